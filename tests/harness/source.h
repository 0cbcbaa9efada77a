// Where random cases come from: bytes. The bytes of libFuzzer, of RapidCheck (which shrinks them) and of a committed
// corpus go through the same generators, so that what one of them finds the others replay.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <vector>

namespace gannet_test {

/// What must hold did not.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// Numbers from bytes; zeros when they are used up, so that generators put the simplest choice at 0. A copy draws the
/// same numbers again.
class Source {
 public:
  Source(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  explicit Source(const std::vector<uint8_t>& bytes) : Source(bytes.data(), bytes.size()) {}

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
  template <class T>
  T pick(std::initializer_list<T> values) {
    return values.begin()[between(0, static_cast<int64_t>(values.size()) - 1)];
  }
  template <class T, size_t kSize>
  const T& pick(const T (&values)[kSize]) {
    return values[between(0, int64_t{kSize} - 1)];
  }
  /// True once in n times.
  bool one_in(int64_t n) { return between(0, n - 1) == n - 1; }

 private:
  const uint8_t* data_;
  size_t size_;
};

}  // namespace gannet_test
