#pragma once

// Marks what the library exports. Everything else is built with hidden visibility.
#define DTORCH_API __attribute__((visibility("default")))
