#pragma once

#include <pybind11/pybind11.h>

#include <Python.h>

namespace dtorch::python {

/// A Python class derived from `base`, a class that torch has bound, with C methods. pybind cannot
/// express it: the holder of torch's Future does not derive, and a call through pybind costs more
/// than what most of our methods do. `methods` ends with a
/// null name and lives for ever. `make`, if given, makes the instances of the class, and of those
/// derived from it.
inline pybind11::object MakeNativeType(const char* name, pybind11::handle base,
                                       PyMethodDef* methods, const char* doc,
                                       newfunc make = nullptr) {
  namespace py = pybind11;
  py::dict members;
  members["__module__"] = "dtorch_ops._C";
  members["__doc__"] = doc;
  members["__slots__"] = py::tuple();
  py::object type = py::type::of(base)(name, py::make_tuple(base), members);
  for (PyMethodDef* method = methods; method->ml_name; ++method) {
    auto* owner = reinterpret_cast<PyTypeObject*>(type.ptr());
    PyObject* descriptor = nullptr;
    if (method->ml_flags & METH_STATIC) {
      descriptor = PyStaticMethod_New(
          py::reinterpret_steal<py::object>(PyCFunction_New(method, nullptr)).ptr());
    } else {
      descriptor = method->ml_flags & METH_CLASS ? PyDescr_NewClassMethod(owner, method)
                                                 : PyDescr_NewMethod(owner, method);
    }
    if (!descriptor) throw py::error_already_set();
    type.attr(method->ml_name) = py::reinterpret_steal<py::object>(descriptor);
  }
  if (make) reinterpret_cast<PyTypeObject*>(type.ptr())->tp_new = make;
  return type;
}

/// The C++ object in an instance of a class bound by torch, or of one derived from it; nullptr if
/// its __init__ has not run.
template <typename T>
T* NativeValue(PyObject* self) {
  auto* instance = reinterpret_cast<pybind11::detail::instance*>(self);
  return instance->get_value_and_holder().value_ptr<T>();
}

/// Gives a new instance of a class bound by torch the C++ object that it is to own. It is not
/// entered into pybind's table of instances, which only serves to find the Python object of a C++
/// one again: ours are never looked for, and an entry would cost 48 bytes each.
template <typename T>
void SetNativeValue(PyObject* self, pybind11::detail::type_info* info, T* value,
                    const void* holder = nullptr) {
  auto* instance = reinterpret_cast<pybind11::detail::instance*>(self);
  auto v_h = instance->get_value_and_holder(info);
  v_h.value_ptr() = value;
  info->init_instance(instance, holder);
  if (pybind11::detail::deregister_instance(instance, value, info)) {
    v_h.set_instance_registered(false);
  }
}

}  // namespace dtorch::python
