// Shared by the fuzz targets. A target defines LLVMFuzzerTestOneInput; with libFuzzer it is a fuzzer, with replay.cpp a
// test that runs the committed corpus.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "harness/source.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

/// What must hold for every input; a failure is a finding.
#define GANNET_FUZZ_REQUIRE(condition)                                                    \
  do {                                                                                    \
    if (!(condition)) {                                                                   \
      std::fprintf(stderr, "%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                       \
    }                                                                                     \
  } while (false)

namespace gannet::fuzz {

/// Numbers from the bytes of an input; zeros when they are used up.
using Input = gannet_test::Source;

}  // namespace gannet::fuzz
