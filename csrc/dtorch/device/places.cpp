#include "dtorch/device/places.h"

#include <algorithm>
#include <sstream>

namespace dtorch {
namespace {
constexpr size_t kNamed = 3;  // so many of several
}

void AddPlaces(c10::Error& error, c10::ArrayRef<size_t> places) {
  std::ostringstream text;
  text << (places.size() > 1 ? "at one of " : "at ");
  const size_t named = std::min(places.size(), kNamed);
  for (size_t i = 0; i < named; ++i) text << (i > 0 ? ", " : "") << "self[" << places[i] << "]";
  if (places.size() > named) text << " and " << places.size() - named << " more";
  error.add_context(text.str());
}

std::exception_ptr WithPlaces(std::exception_ptr error, c10::ArrayRef<size_t> places) {
  try {
    std::rethrow_exception(error);
  } catch (c10::Error& known) {
    AddPlaces(known, places);
    return std::current_exception();
  } catch (...) {
    return error;
  }
}

}  // namespace dtorch
