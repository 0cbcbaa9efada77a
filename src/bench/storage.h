// Memory of what is timed: aligned, filled with random values, and enough of it that caches are cold.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "bench/problems.h"
#include "bench/roofs.h"
#include "core/format.h"
#include "gannet/tensor.h"

namespace gannet {
inline namespace v0 {
namespace bench {

// Base addresses at cache lines, as pools give them; the kernel's huge pages are left to the system's setting.
inline constexpr size_t kAlignment = 64;
struct FreeMemory {
  void operator()(void* p) const { std::free(p); }
};

/// Owns what a problem's views point to.
class Storage {
 public:
  explicit Storage(uint64_t seed) : random_(seed), normals_(kNormals) {
    std::normal_distribution<float> normal(0.0f, 1.0f);
    for (float& x : normals_) x = normal(random_);
  }
  std::byte* allocate(size_t bytes) {
    blocks_.emplace_back(std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment));
    if (blocks_.back() == nullptr) fail(ErrorCode::kOutOfMemory, "bench", "{} bytes cannot be allocated", bytes);
    return static_cast<std::byte*>(blocks_.back().get());
  }
  TensorView uninitialised(DType dtype, std::initializer_list<int64_t> shape) {
    int64_t n = 1;
    for (const int64_t s : shape) n *= s;
    return view(allocate(static_cast<size_t>(n) * size_of(dtype)), dtype, shape);
  }
  /// Outputs: written once, so that no first touch is timed.
  TensorView zeros(DType dtype, std::initializer_list<int64_t> shape) {
    TensorView v = uninitialised(dtype, shape);
    std::memset(v.data, 0, static_cast<size_t>(v.num_elements()) * size_of(dtype));
    return v;
  }
  /// Normally distributed with standard deviation `scale`.
  TensorView normal(DType dtype, std::initializer_list<int64_t> shape, float scale = 1.0f) {
    TensorView v = uninitialised(dtype, shape);
    fill(dtype, v.data, v.num_elements(), scale);
    return v;
  }
  TensorView ints(const std::vector<int32_t>& values) {
    TensorView v = uninitialised(DType::kI32, {static_cast<int64_t>(values.size())});
    std::memcpy(v.data, values.data(), values.size() * sizeof(int32_t));
    return v;
  }
  void fill(DType dtype, void* data, int64_t count, float scale) {
    for (int64_t i = 0; i < count; ++i) {
      // Every value comes from a fresh random index: no period that a cache or a predictor could use.
      const float x = scale * normals_[next() % kNormals];
      if (dtype == DType::kF32) static_cast<float*>(data)[i] = x;
      else if (dtype == DType::kBf16) static_cast<Bf16*>(data)[i] = Bf16::from_float(x);
      else static_cast<E4m3*>(data)[i] = E4m3::from_float(x);
    }
  }
  std::vector<int32_t> permutation(int32_t first, int32_t count) {
    std::vector<int32_t> p(static_cast<size_t>(count));
    std::iota(p.begin(), p.end(), first);
    std::shuffle(p.begin(), p.end(), random_);
    return p;
  }
  std::mt19937_64& random() { return random_; }

 private:
  static constexpr uint64_t kNormals = 4096;
  uint64_t next() {  // xorshift64: quick, and good enough to pick from a table
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_;
  }
  std::mt19937_64 random_;
  uint64_t state_ = 88172645463325252u;
  std::vector<float> normals_;
  std::vector<std::unique_ptr<void, FreeMemory>> blocks_;
};

// Memory that a rotation goes through, in units of the last-level cache.
inline constexpr int64_t kRotationCaches = 2;
inline constexpr int64_t kMaxCopies = 64;

/// How many copies of `bytes` of cache a rotation needs so that none is found in the last level.
inline int64_t num_copies(const Grid& grid, int64_t bytes) {
  if (grid.warm) return 1;
  const int64_t wanted = (kRotationCaches * last_level_cache_bytes() + bytes - 1) / bytes;
  return std::clamp<int64_t>(wanted + 1, 2, kMaxCopies);
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet
