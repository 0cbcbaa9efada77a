// The loops of roof_loops.h over a vector vocabulary.
#pragma once

#include "bench/roof_loops.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace {

// Independent accumulators: the latency of a multiply-add is 4 to 6 cycles at up to 2 a cycle, so 12 are enough to fill
// the pipes; two registers hold the operands.
constexpr int kAccumulators = 12;

// The empty statements make the value opaque, so that no product is hoisted out of the loop.
template <class V>
GANNET_INLINE void opaque(V& x) {
#if defined(__x86_64__)
  __asm__ volatile("" : "+v"(x));
#elif defined(__aarch64__)
  __asm__ volatile("" : "+w"(x));
#else
  __asm__ volatile("" : "+m"(x));
#endif
}

// Values near 1 that stay finite: each step multiplies by 1 - 2^-20 and adds a little.
double roof_fp32_fma(int64_t iterations) {
  F acc[kAccumulators];
  for (int i = 0; i < kAccumulators; ++i) acc[i] = set1(1.0f + 0.01f * static_cast<float>(i));
  F a = set1(0.99999905f), b = set1(1e-6f);
  for (int64_t n = 0; n < iterations; ++n) {
    opaque(a);
    opaque(b);
    for (int i = 0; i < kAccumulators; ++i) acc[i] = fma(acc[i], a, b);
  }
  for (int i = 0; i < kAccumulators; ++i) opaque(acc[i]);
  return 2.0 * kLanes * kAccumulators * static_cast<double>(iterations);
}

// bf16 values around 1 of both signs: 0x3f80 is 1, 0xbf7f is -0.99609375.
[[maybe_unused]] double roof_bf16_dot(int64_t iterations) {
  F acc[kAccumulators];
  for (int i = 0; i < kAccumulators; ++i) acc[i] = set1(1.0f + 0.01f * static_cast<float>(i));
  W a = set1_w(0x3f80bf7fu), b = set1_w(0x3f813f80u);
  for (int64_t n = 0; n < iterations; ++n) {
    opaque(a);
    opaque(b);
    for (int i = 0; i < kAccumulators; ++i) acc[i] = dot2(acc[i], a, b);
  }
  for (int i = 0; i < kAccumulators; ++i) opaque(acc[i]);
  return 4.0 * kLanes * kAccumulators * static_cast<double>(iterations);
}

#ifdef GANNET_TILES
// Four accumulators and four operands, as in the kernels; the tiles hold zeros, which take as long as anything else.
double roof_bf16_tiles(int64_t iterations) {
  tiles_begin();
  for (int64_t n = 0; n < iterations; ++n) {
    tile_dot<0, 4, 6>();
    tile_dot<1, 4, 7>();
    tile_dot<2, 5, 6>();
    tile_dot<3, 5, 7>();
  }
  tiles_end();
  return 4.0 * 2.0 * kTileRows * kTileWords * kTileValues * static_cast<double>(iterations);
}
#endif

uint32_t roof_read(const uint32_t* words, int64_t count) {
  constexpr int kStreams = 8;
  static_assert(bench::kReadWords % (kStreams * kLanes) == 0);
  W sum[kStreams];
  for (int i = 0; i < kStreams; ++i) sum[i] = set1_w(0);
  for (int64_t n = 0; n < count; n += kStreams * kLanes)
    for (int i = 0; i < kStreams; ++i) sum[i] = sum[i] ^ load_w(words + n + i * kLanes);
  uint32_t lanes[kLanes];
  uint32_t total = 0;
  for (int i = 0; i < kStreams; ++i) {
    store_w(lanes, sum[i]);
    for (int l = 0; l < kLanes; ++l) total ^= lanes[l];
  }
  return total;
}

}  // namespace
}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
