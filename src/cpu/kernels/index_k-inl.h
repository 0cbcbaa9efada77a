// Index keys into and out of the cache (spec 3.3, A.6). An e4m3 page is planar: page_size * head_dim values, then
// page_size fp32 scales. The scale is max(amax, 1e-10) / 448, or the power of two at or above max(amax, 1e-4) / 448.
#pragma once

#include "cpu/kernels/row_codec-inl.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace {

constexpr float kIndexMagnitudeFloor = 1e-10f;           // fp32 scales
constexpr float kIndexMagnitudeFloorPowerOfTwo = 1e-4f;  // power-of-two scales
constexpr float kIndexE4m3Max = 448.0f;

inline void write_index_key(const IndexCacheView& cache, int64_t slot, const std::byte* k, DType dtype) {
  const int64_t n = cache.head_dim;
  std::byte* to = cache.values(slot);
  if (cache.format != IndexKFormat::kE4m3)
    return convert_row(k, dtype, to, cache.format == IndexKFormat::kF32 ? DType::kF32 : DType::kBf16, n);
  const bool power_of_two = cache.scale_format == ScaleFormat::kPowerOfTwo;
  const float floor = power_of_two ? kIndexMagnitudeFloorPowerOfTwo : kIndexMagnitudeFloor;
  const float largest = largest_magnitude(k, dtype, 0, n);
  float scale = (largest > floor ? largest : floor) / kIndexE4m3Max;
  if (power_of_two) scale = power_of_two_above(scale);
  *cache.scale(slot) = scale;
  encode_row(k, dtype, reinterpret_cast<uint8_t*>(to), scale, n);
}

}  // namespace

size_t workspace_index_k_write(const IndexKWrite&, int) { return 0; }

void run_index_k_write(const IndexKWrite& p, const RunContext& ctx) {
  for_each_row(ctx.executor, p.k.shape[0], [&](int64_t row) {
    const int64_t slot = slot_at(p.slots, row);
    if (slot >= 0) write_index_key(p.cache, slot, row_of(p.k, row), p.k.dtype);
  });
}

size_t workspace_index_k_gather(const IndexKGather&, int) { return 0; }

void run_index_k_gather(const IndexKGather& p, const RunContext& ctx) {
  for_each_row(ctx.executor, p.slots.shape[0], [&](int64_t row) {
    const int64_t slot = slot_at(p.slots, row), n = p.cache.head_dim;
    std::byte* to = row_of(p.k, row);
    if (slot < 0) return zero_row(to, p.k.dtype, n);
    const std::byte* values = p.cache.values(slot);
    if (p.cache.format == IndexKFormat::kE4m3)
      return decode_row(reinterpret_cast<const uint8_t*>(values), *p.cache.scale(slot), to, p.k.dtype, n);
    convert_row(values, p.cache.format == IndexKFormat::kF32 ? DType::kF32 : DType::kBf16, to, p.k.dtype, n);
  });
}

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
