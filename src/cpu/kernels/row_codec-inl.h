// Rows of values between the callers' dtypes and the caches' formats, shared by the latent and the index-key caches.
// Writes give the very bytes that Bf16::from_float and E4m3::from_float give (gannet/dtype.h), division in fp32.
#pragma once

#include "cpu/kernel_table.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace {

constexpr int64_t kPackedGroup = 128;  // latent values that share a scale in a packed row
constexpr int64_t kRowsPerTask = 64;   // of some 1 KiB each: 10 us or more, against a few us for a fork and join

/// Bytes from a token's row to the next; of planar pages rows have none.
GANNET_INLINE int64_t row_stride_of(const LatentCacheView& cache) {
  return cache.row_stride_bytes != 0 ? cache.row_stride_bytes : latent_row_bytes(cache.format, cache.geometry);
}

/// Values i .. i + n of a row, n <= kLanes; lanes from n on are 0.
GANNET_INLINE F load_values(const void* row, DType dtype, int64_t i, int n) {
  if (dtype == DType::kF32) {
    const float* p = static_cast<const float*>(row) + i;
    return n == kLanes ? loadu(p) : loadu_n(p, n);
  }
  const uint16_t* p = static_cast<const uint16_t*>(row) + i;
  if (n == kLanes) return load_bf16(p);
  uint16_t rest[kLanes] = {};
  std::memcpy(rest, p, static_cast<size_t>(n) * sizeof(uint16_t));
  return load_bf16(rest);
}

/// Values i .. i + n of an e4m3 row.
GANNET_INLINE F load_codes(const uint8_t* row, int64_t i, int n) {
  if (n == kLanes) return load_e4m3(row + i);
  uint8_t rest[kLanes] = {};
  std::memcpy(rest, row + i, static_cast<size_t>(n));
  return load_e4m3(rest);
}

GANNET_INLINE void store_values(void* row, DType dtype, int64_t i, F v, int n) {
  if (dtype == DType::kF32) {
    float* p = static_cast<float*>(row) + i;
    if (n == kLanes) storeu(p, v);
    else storeu_n(p, v, n);
    return;
  }
  uint16_t* p = static_cast<uint16_t*>(row) + i;
  if (n == kLanes) return store_bf16_exact(p, v);
  uint16_t rest[kLanes];
  store_bf16_exact(rest, v);
  std::memcpy(p, rest, static_cast<size_t>(n) * sizeof(uint16_t));
}

GANNET_INLINE void store_codes(uint8_t* row, int64_t i, F v, int n) {
  if (n == kLanes) return store_e4m3(row + i, v);
  uint8_t rest[kLanes];
  store_e4m3(rest, v);
  std::memcpy(row + i, rest, static_cast<size_t>(n));
}

GANNET_INLINE int lanes_from(int64_t i, int64_t n) { return n - i < kLanes ? static_cast<int>(n - i) : kLanes; }

/// out[0, n) = in[0, n) in another (or the same) float dtype.
GANNET_INLINE void convert_row(const void* in, DType in_dtype, void* out, DType out_dtype, int64_t n) {
  if (in_dtype == out_dtype) {
    std::memcpy(out, in, static_cast<size_t>(n) * (in_dtype == DType::kF32 ? 4 : 2));
    return;
  }
  for (int64_t i = 0; i < n; i += kLanes)
    store_values(out, out_dtype, i, load_values(in, in_dtype, i, lanes_from(i, n)), lanes_from(i, n));
}

/// out[0, n) = e4m3(in[0, n) / scale).
GANNET_INLINE void encode_row(const void* in, DType in_dtype, uint8_t* out, float scale, int64_t n) {
  const F s = set1(scale);
  for (int64_t i = 0; i < n; i += kLanes)
    store_codes(out, i, div(load_values(in, in_dtype, i, lanes_from(i, n)), s), lanes_from(i, n));
}

/// out[0, n) = in[0, n) * scale.
GANNET_INLINE void decode_row(const uint8_t* in, float scale, void* out, DType out_dtype, int64_t n) {
  const F s = set1(scale);
  for (int64_t i = 0; i < n; i += kLanes)
    store_values(out, out_dtype, i, mul(load_codes(in, i, lanes_from(i, n)), s), lanes_from(i, n));
}

/// out[0, n) = bf16 in[0, n) * scale.
GANNET_INLINE void multiply_row_bf16(const std::byte* in, float scale, void* out, DType out_dtype, int64_t n) {
  const F s = set1(scale);
  for (int64_t i = 0; i < n; i += kLanes)
    store_values(out, out_dtype, i, mul(load_values(in, DType::kBf16, i, lanes_from(i, n)), s), lanes_from(i, n));
}

GANNET_INLINE void zero_row(void* out, DType dtype, int64_t n) {
  std::memset(out, 0, static_cast<size_t>(n) * (dtype == DType::kF32 ? 4 : 2));
}

/// Largest |value| of values [begin, end); NaNs do not count, infinities do.
GANNET_INLINE float largest_magnitude(const void* in, DType in_dtype, int64_t begin, int64_t end) {
  F m = zero();
  for (int64_t i = begin; i < end; i += kLanes) m = max(abs(load_values(in, in_dtype, i, lanes_from(i, end))), m);
  return reduce_max(m);
}

/// The smallest power of two that is at least x; x is a normal number below 2^127.
GANNET_INLINE float power_of_two_above(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0x7fffffu) & 0xff800000u;
  std::memcpy(&x, &bits, sizeof bits);
  return x;
}

GANNET_INLINE int64_t slot_at(const TensorView& slots, int64_t row) {
  return slots.dtype == DType::kI64 ? slots.ptr<const int64_t>()[row * slots.stride[0]]
                                    : int64_t{slots.ptr<const int32_t>()[row * slots.stride[0]]};
}

/// Start of a row of a [rows, n] view.
GANNET_INLINE std::byte* row_of(const TensorView& v, int64_t row) {
  return static_cast<std::byte*>(v.data) + row * v.stride[0] * static_cast<int64_t>(v.dtype == DType::kF32 ? 4 : 2);
}

/// f(row) for every row, kRowsPerTask rows a task.
template <class Function>
GANNET_INLINE void for_each_row(Executor& executor, int64_t rows, const Function& f) {
  executor.parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
    const int64_t begin = task * kRowsPerTask;
    const int64_t end = rows - begin < kRowsPerTask ? rows : begin + kRowsPerTask;
    for (int64_t row = begin; row < end; ++row) f(row);
  });
}

}  // namespace
}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
