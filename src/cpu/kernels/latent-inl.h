// Latent rows into and out of the cache (docs/kv_layouts.md; formats in gannet/kv_cache.h).
//
// 2 to 4 KB of traffic a row and a handful of operations a value: memory-bound but for the e4m3 division, which keeps
// pace with one DRAM stream. A row is converted by one worker, so nothing depends on how rows are shared out.
#pragma once

#include "cpu/kernels/row_codec-inl.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace {

constexpr float kPackedScaleFloor = 1e-4f;         // spec 3.10: the scale is 2^ceil(log2(max(amax / 448, 1e-4)))
constexpr float kPerTokenMagnitudeFloor = 1e-26f;  // spec 4.1: the scale is max(amax, 1e-26) / 448
constexpr float kE4m3Max = 448.0f;

/// The parts of one token's row.
struct LatentRow {
  std::byte* latent;
  float* scales;
  std::byte* rope;
};

GANNET_INLINE LatentRow latent_row(const LatentCacheView& cache, int64_t slot) {
  const int64_t dim = cache.geometry.latent_dim, rope = cache.geometry.rope_dim, page_size = cache.page_size;
  std::byte* page = static_cast<std::byte*>(cache.data) + slot / page_size * cache.page_stride_bytes;
  const int64_t offset = slot % page_size;
  LatentRow r{page + offset * row_stride_of(cache), nullptr, nullptr};
  switch (cache.format) {
    case LatentFormat::kF32: r.rope = r.latent + dim * 4; break;
    case LatentFormat::kBf16: r.rope = r.latent + dim * 2; break;
    case LatentFormat::kE4m3: r.rope = r.latent + dim; break;
    case LatentFormat::kPacked656: {
      const int64_t groups = (dim + kPackedGroup - 1) / kPackedGroup;
      r.scales = reinterpret_cast<float*>(r.latent + dim);
      r.rope = r.latent + dim + groups * 4;
      break;
    }
    case LatentFormat::kE4m3PerToken:
      r.latent = page + offset * dim;
      r.scales = reinterpret_cast<float*>(page + page_size * dim) + offset;
      r.rope = page + page_size * (dim + 4) + offset * rope * 2;
      break;
  }
  return r;
}

/// out[0, n) = bf16(in[0, n) / scale).
GANNET_INLINE void divide_row_bf16(const void* in, DType in_dtype, std::byte* out, float scale, int64_t n) {
  const F s = set1(scale);
  for (int64_t i = 0; i < n; i += kLanes)
    store_values(out, DType::kBf16, i, div(load_values(in, in_dtype, i, lanes_from(i, n)), s), lanes_from(i, n));
}

GANNET_INLINE const std::byte* value_at(const std::byte* row, DType dtype, int64_t i) {
  return row + i * (dtype == DType::kF32 ? 4 : 2);
}

inline void write_latent_row(const LatentCacheView& cache, int64_t slot, const std::byte* latent, const std::byte* rope,
                             DType dtype) {
  const int64_t dim = cache.geometry.latent_dim, rope_dim = cache.geometry.rope_dim;
  const LatentRow to = latent_row(cache, slot);
  switch (cache.format) {
    case LatentFormat::kF32:
      convert_row(latent, dtype, to.latent, DType::kF32, dim);
      convert_row(rope, dtype, to.rope, DType::kF32, rope_dim);
      return;
    case LatentFormat::kBf16:
      convert_row(latent, dtype, to.latent, DType::kBf16, dim);
      convert_row(rope, dtype, to.rope, DType::kBf16, rope_dim);
      return;
    case LatentFormat::kE4m3:
      encode_row(latent, dtype, reinterpret_cast<uint8_t*>(to.latent), cache.scale, dim);
      encode_row(rope, dtype, reinterpret_cast<uint8_t*>(to.rope), cache.scale, rope_dim);
      return;
    case LatentFormat::kPacked656:
      for (int64_t g = 0; g < dim; g += kPackedGroup) {
        const int64_t end = g + kPackedGroup < dim ? g + kPackedGroup : dim;
        const float least = largest_magnitude(latent, dtype, g, end) / kE4m3Max;
        const float scale = power_of_two_above(least > kPackedScaleFloor ? least : kPackedScaleFloor);
        to.scales[g / kPackedGroup] = scale;
        encode_row(value_at(latent, dtype, g), dtype, reinterpret_cast<uint8_t*>(to.latent) + g, scale, end - g);
      }
      convert_row(rope, dtype, to.rope, DType::kBf16, rope_dim);
      return;
    case LatentFormat::kE4m3PerToken: {
      const float largest = largest_magnitude(latent, dtype, 0, dim);
      const float scale = (largest > kPerTokenMagnitudeFloor ? largest : kPerTokenMagnitudeFloor) / kE4m3Max;
      *to.scales = scale;
      encode_row(latent, dtype, reinterpret_cast<uint8_t*>(to.latent), scale, dim);
      divide_row_bf16(rope, dtype, to.rope, scale, rope_dim);
      return;
    }
  }
}

inline void read_latent_row(const LatentCacheView& cache, int64_t slot, std::byte* latent, std::byte* rope,
                            DType dtype) {
  const int64_t dim = cache.geometry.latent_dim, rope_dim = cache.geometry.rope_dim;
  const LatentRow from = latent_row(cache, slot);
  switch (cache.format) {
    case LatentFormat::kF32:
      convert_row(from.latent, DType::kF32, latent, dtype, dim);
      convert_row(from.rope, DType::kF32, rope, dtype, rope_dim);
      return;
    case LatentFormat::kBf16:
      convert_row(from.latent, DType::kBf16, latent, dtype, dim);
      convert_row(from.rope, DType::kBf16, rope, dtype, rope_dim);
      return;
    case LatentFormat::kE4m3:
      decode_row(reinterpret_cast<const uint8_t*>(from.latent), cache.scale, latent, dtype, dim);
      decode_row(reinterpret_cast<const uint8_t*>(from.rope), cache.scale, rope, dtype, rope_dim);
      return;
    case LatentFormat::kPacked656:
      for (int64_t g = 0; g < dim; g += kPackedGroup) {
        const int64_t end = g + kPackedGroup < dim ? g + kPackedGroup : dim;
        decode_row(reinterpret_cast<const uint8_t*>(from.latent) + g, from.scales[g / kPackedGroup],
                   latent + g * (dtype == DType::kF32 ? 4 : 2), dtype, end - g);
      }
      convert_row(from.rope, DType::kBf16, rope, dtype, rope_dim);
      return;
    case LatentFormat::kE4m3PerToken:
      decode_row(reinterpret_cast<const uint8_t*>(from.latent), *from.scales, latent, dtype, dim);
      multiply_row_bf16(from.rope, *from.scales, rope, dtype, rope_dim);
      return;
  }
}

}  // namespace

size_t workspace_latent_write(const LatentWrite&, int) { return 0; }

void run_latent_write(const LatentWrite& p, const RunContext& ctx) {
  for_each_row(ctx.executor, p.latent.shape[0], [&](int64_t row) {
    const int64_t slot = slot_at(p.slots, row);
    if (slot >= 0) write_latent_row(p.cache, slot, row_of(p.latent, row), row_of(p.rope, row), p.latent.dtype);
  });
}

size_t workspace_latent_gather(const LatentGather&, int) { return 0; }

void run_latent_gather(const LatentGather& p, const RunContext& ctx) {
  for_each_row(ctx.executor, p.slots.shape[0], [&](int64_t row) {
    const int64_t slot = slot_at(p.slots, row);
    std::byte* latent = row_of(p.latent, row);
    std::byte* rope = row_of(p.rope, row);
    if (slot >= 0) {
      read_latent_row(p.cache, slot, latent, rope, p.latent.dtype);
    } else {
      zero_row(latent, p.latent.dtype, p.cache.geometry.latent_dim);
      zero_row(rope, p.latent.dtype, p.cache.geometry.rope_dim);
    }
  });
}

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
