// Shared by the fuzz targets. A target defines LLVMFuzzerTestOneInput; with libFuzzer it is a fuzzer, with replay.cpp a
// test that runs the committed corpus.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

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
class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  bool empty() const { return size_ == 0; }
  uint8_t byte() {
    if (size_ == 0) return 0;
    --size_;
    return *data_++;
  }
  /// In [low, high].
  int64_t between(int64_t low, int64_t high) {
    const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
    uint64_t x = 0;
    for (uint64_t r = range; r > 0; r >>= 8) x = (x << 8) | byte();
    return static_cast<int64_t>(static_cast<uint64_t>(low) + (range == ~uint64_t{0} ? x : x % (range + 1)));
  }
  /// Mostly in [low, high], sometimes at an edge of its type or just outside of the range.
  int64_t around(int64_t low, int64_t high, int64_t type_min, int64_t type_max) {
    switch (byte() % 16) {
      case 0: return type_min;
      case 1: return type_max;
      case 2: return low > type_min ? low - 1 : low;
      case 3: return high < type_max ? high + 1 : high;
      case 4: return between(type_min, type_max);
      case 5: return low;
      case 6: return high;
      default: return between(low, high);
    }
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

}  // namespace gannet::fuzz
