// Counts calls of operator new in a test program that links counting_new.cpp.
#pragma once

#include <cstdint>

namespace gannet_test {
int64_t num_news();
}
