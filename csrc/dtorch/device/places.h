#pragma once

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include <cstddef>
#include <exception>

// What an error of an operator that takes a list, `self`, says of where it happened: a context of
// the error, "at self[3]", behind its message. Python names the place in a tree by it.
namespace dtorch {

/// Adds the places to an error. With several it happened at one of them.
void AddPlaces(c10::Error& error, c10::ArrayRef<size_t> places);
/// The same to any error, if it can take it.
std::exception_ptr WithPlaces(std::exception_ptr error, c10::ArrayRef<size_t> places);

/// Runs `body`; what it throws says that it was at `place`.
template <typename Body>
auto AtPlace(size_t place, const Body& body) {
  try {
    return body();
  } catch (c10::Error& error) {
    AddPlaces(error, place);
    throw;
  }
}

}  // namespace dtorch
