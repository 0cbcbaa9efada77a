// Rotary embedding in place. Interleaved pairs (2i, 2i+1) are turned as x * [c0 c0 c1 c1 ..] + swapped(x) * [-s0 s0 -s1
// s1
// ..]; half-split pairs (i, i + P/2) as two vectors. The products are fused in one order everywhere, so that a value's
// bits do not depend on its lane.
#pragma once

#include "cpu/kernels/row_codec-inl.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace {

/// n <= kLanes values, n even; cos_sin points to the first pair's cosine, sines lie `half` behind.
GANNET_INLINE void rotate_interleaved(std::byte* x, DType dtype, int64_t i, int n, const float* cosines,
                                      const float* sines) {
  float c[kLanes], s[kLanes];
  for (int l = 0; l < kLanes; l += 2) {
    const bool real = l < n;
    c[l] = c[l + 1] = real ? cosines[(i + l) / 2] : 0.0f;
    s[l + 1] = real ? sines[(i + l) / 2] : 0.0f;
    s[l] = -s[l + 1];
  }
  const F v = load_values(x, dtype, i, n);
  store_values(x, dtype, i, fma(swap_pairs(v), loadu(s), mul(v, loadu(c))), n);
}

GANNET_INLINE void rotate_half_split(std::byte* x, DType dtype, int64_t i, int n, int64_t half, const float* cosines,
                                     const float* sines) {
  const F a = load_values(x, dtype, i, n), b = load_values(x, dtype, half + i, n);
  const F c = load_values(cosines, DType::kF32, i, n), s = load_values(sines, DType::kF32, i, n);
  store_values(x, dtype, i, fnma(b, s, mul(a, c)), n);
  store_values(x, dtype, half + i, fma(a, s, mul(b, c)), n);
}

}  // namespace

size_t workspace_rope(const Rope&, int) { return 0; }

void run_rope(const Rope& p, const RunContext& ctx) {
  const int64_t heads = p.x.shape[1], rope_dim = p.cos_sin.shape[1], half = rope_dim / 2;
  const int64_t value_bytes = p.x.dtype == DType::kF32 ? 4 : 2;
  for_each_row(ctx.executor, p.x.shape[0], [&](int64_t row) {
    const float* cosines = p.cos_sin.ptr<const float>(p.positions.ptr<const int32_t>()[row * p.positions.stride[0]]);
    const float* sines = cosines + half;
    for (int64_t h = 0; h < heads; ++h) {
      std::byte* x =
          static_cast<std::byte*>(p.x.data) + (row * p.x.stride[0] + h * p.x.stride[1] + p.offset) * value_bytes;
      if (p.pairing == RopePairing::kInterleaved) {
        for (int64_t i = 0; i < rope_dim; i += kLanes)
          rotate_interleaved(x, p.x.dtype, i, lanes_from(i, rope_dim), cosines, sines);
      } else {
        for (int64_t i = 0; i < half; i += kLanes)
          rotate_half_split(x, p.x.dtype, i, lanes_from(i, half), half, cosines, sines);
      }
    }
  });
}

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
