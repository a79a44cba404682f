#pragma once

// Named steps at which a test build stops or kills the process, to show what becomes of the others.
// Nothing in any other build.
#ifdef DTORCH_TEST_POINTS
namespace dtorch {
/// Defined by the test program.
void OnTestPoint(const char* name);
}  // namespace dtorch
#define DTORCH_TEST_POINT(name) ::dtorch::OnTestPoint(name)
#else
#define DTORCH_TEST_POINT(name) static_cast<void>(0)
#endif
