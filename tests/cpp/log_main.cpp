// A program without Python, and without torch: what it logs. See tests/test_logging.py.

#include "dtorch/base/log.h"

int main() {
  dtorch::Log(dtorch::LogLevel::kDebug, "future", "not worth much");
  dtorch::Log(dtorch::LogLevel::kInfo, "file", "process ", 12, " is attached");
  dtorch::Log(dtorch::LogLevel::kError, "device", "it has failed");
}
