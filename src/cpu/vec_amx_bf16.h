// The vocabulary of AVX-512 with BF16, and tiles (AMX-TILE, AMX-BF16): eight registers of 16 rows of 64 bytes, and a
// product that adds 16 x 32 bf16 times 32 x 16 bf16 to 16 x 16 fp32 in 16 cycles, sixteen times the rate of vdpbf16ps.
// The second operand lies as words [16][16], a word being a pair of bf16: the very order in which the other kernels
// keep queries, weights and values.
//
// A row of the result is a function of that row of the first operand and of the second operand alone: even and odd
// values of a step are summed apart, each from +0 in order and fused, and their sum is added to the accumulator; no
// denormals.
//
// GANNET_EMULATE_TILES (CMake: GANNET_EMULATE_AMX) does the same in plain loops, for tests on machines without tiles.
#pragma once

#include "cpu/vec_avx512_bf16.h"

#define GANNET_TILES 1

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {

inline constexpr int kTileRows = 16;
inline constexpr int kTileBytes = 64;               // of a row
inline constexpr int kTileWords = kTileBytes / 4;   // of a row
inline constexpr int kTileValues = kTileBytes / 2;  // bf16 of a row: a step of a product

#ifdef GANNET_EMULATE_TILES

static __thread unsigned char emulated_tiles[8][kTileRows][kTileBytes];

GANNET_INLINE void tiles_begin() {}
GANNET_INLINE void tiles_end() { std::memset(emulated_tiles, 0xff, sizeof emulated_tiles); }  // as good as lost
template <int N>
GANNET_INLINE void tile_zero() {
  std::memset(emulated_tiles[N], 0, sizeof emulated_tiles[N]);
}
template <int N>
GANNET_INLINE void tile_load(const void* p, int64_t stride) {
  for (int r = 0; r < kTileRows; ++r)
    std::memcpy(emulated_tiles[N][r], static_cast<const unsigned char*>(p) + r * stride, kTileBytes);
}
template <int N>
GANNET_INLINE void tile_store(void* p, int64_t stride) {
  for (int r = 0; r < kTileRows; ++r)
    std::memcpy(static_cast<unsigned char*>(p) + r * stride, emulated_tiles[N][r], kTileBytes);
}
template <int C, int A, int B>
GANNET_INLINE void tile_dot() {
  for (int m = 0; m < kTileRows; ++m) {
    F even = zero(), odd = zero();
    for (int k = 0; k < kTileWords; ++k) {
      uint32_t a;
      std::memcpy(&a, emulated_tiles[A][m] + 4 * k, sizeof a);
      uint32_t words[kLanes];
      std::memcpy(words, emulated_tiles[B][k], sizeof words);
      const W b = load_w(words), pair = set1_w(a);
      const W upper = set1_w(0xffff0000u);
      even = fma((F)_mm512_slli_epi32(pair, 16), (F)_mm512_slli_epi32(b, 16), even);
      odd = fma((F)_mm512_and_si512(pair, upper), (F)_mm512_and_si512(b, upper), odd);
    }
    float c[kLanes];
    std::memcpy(c, emulated_tiles[C][m], sizeof c);
    storeu(c, add(loadu(c), add(even, odd)));
    std::memcpy(emulated_tiles[C][m], c, sizeof c);
  }
}

#else

struct alignas(64) TileConfig {
  uint8_t palette, start_row;
  uint8_t reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(TileConfig) == 64);

/// Configures the tiles of this thread; their contents are 0. Until tiles_end they are part of what a switch of
/// threads saves.
GANNET_INLINE void tiles_begin() {
  TileConfig c = {};
  c.palette = 1;
  for (int i = 0; i < 8; ++i) {
    c.bytes[i] = kTileBytes;
    c.rows[i] = kTileRows;
  }
  __asm__ volatile("ldtilecfg %0" : : "m"(c));
}
GANNET_INLINE void tiles_end() { __asm__ volatile("tilerelease" ::: "memory"); }
template <int N>
GANNET_INLINE void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(N));
}
template <int N>
GANNET_INLINE void tile_load(const void* p, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(p), "r"(stride), "i"(N) : "memory");
}
template <int N>
GANNET_INLINE void tile_store(void* p, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(p), "r"(stride), "i"(N) : "memory");
}
/// tile C += tile A . tile B.
template <int C, int A, int B>
GANNET_INLINE void tile_dot() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
