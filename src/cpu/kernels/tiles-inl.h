// Matrix products in tiles (vec_amx_bf16.h), which absorbed attention and ragged prefill share.
#ifndef GANNET_CPU_KERNELS_TILES_INL_H_
#define GANNET_CPU_KERNELS_TILES_INL_H_

#include "cpu/kernel_table.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace {

// What a product reads and writes. Strides are in bytes.
struct TileOperands {
  const std::byte* a;  // bf16 [16 * row_tiles][32 * steps]
  int64_t a_stride;
  const std::byte* b;  // words [16 * steps][16 * column_tiles]
  int64_t b_stride;
  std::byte* c;  // fp32 [16 * row_tiles][16 * column_tiles]
  int64_t c_stride;
};

// RT x CT tiles of c: 4 accumulators, 2 and 2 operands where both are 2, so that 4 loads feed 4 products.
template <int RT, int CT>
GANNET_INLINE void tile_block(const TileOperands& t, int64_t steps, bool fresh) {
  std::byte* const c_low = t.c + kTileRows * t.c_stride;
  if (fresh) {
    tile_zero<0>();
    if constexpr (CT == 2) tile_zero<1>();
    if constexpr (RT == 2) tile_zero<2>();
    if constexpr (RT == 2 && CT == 2) tile_zero<3>();
  } else {
    tile_load<0>(t.c, t.c_stride);
    if constexpr (CT == 2) tile_load<1>(t.c + kTileBytes, t.c_stride);
    if constexpr (RT == 2) tile_load<2>(c_low, t.c_stride);
    if constexpr (RT == 2 && CT == 2) tile_load<3>(c_low + kTileBytes, t.c_stride);
  }
  const std::byte* a = t.a;
  const std::byte* b = t.b;
  for (int64_t s = 0; s < steps; ++s, a += kTileBytes, b += kTileRows * t.b_stride) {
    tile_load<4>(a, t.a_stride);
    tile_load<6>(b, t.b_stride);
    tile_dot<0, 4, 6>();
    if constexpr (CT == 2) {
      tile_load<7>(b + kTileBytes, t.b_stride);
      tile_dot<1, 4, 7>();
    }
    if constexpr (RT == 2) {
      tile_load<5>(a + kTileRows * t.a_stride, t.a_stride);
      tile_dot<2, 5, 6>();
      if constexpr (CT == 2) tile_dot<3, 5, 7>();
    }
  }
  tile_store<0>(t.c, t.c_stride);
  if constexpr (CT == 2) tile_store<1>(t.c + kTileBytes, t.c_stride);
  if constexpr (RT == 2) tile_store<2>(c_low, t.c_stride);
  if constexpr (RT == 2 && CT == 2) tile_store<3>(c_low + kTileBytes, t.c_stride);
}

// c (+)= a . b. Two columns of tiles of b stay in L1 while all rows of a pass: 16 KiB at 256 keys, 36 KiB at 576
// values.
[[maybe_unused]] void tile_product(const TileOperands& t, int64_t steps, int row_tiles, int column_tiles, bool fresh) {
  for (int j = 0; j < column_tiles; j += 2) {
    for (int i = 0; i < row_tiles; i += 2) {
      TileOperands x = t;
      x.a += i * kTileRows * t.a_stride;
      x.b += j * kTileBytes;
      x.c += i * kTileRows * t.c_stride + j * kTileBytes;
      if (i + 2 <= row_tiles) {
        if (j + 2 <= column_tiles) tile_block<2, 2>(x, steps, fresh);
        else tile_block<2, 1>(x, steps, fresh);
      } else {
        if (j + 2 <= column_tiles) tile_block<1, 2>(x, steps, fresh);
        else tile_block<1, 1>(x, steps, fresh);
      }
    }
  }
}

// Weights as pairs of keys [pair][lane], stride_words apart, to rows [lane][pair] of 16 pairs: what a product takes as
// its first operand. For 16 lanes.
GANNET_INLINE void transpose_pairs(const uint32_t* pairs, int64_t stride_words, uint32_t* rows, int64_t row_words) {
  W m[kLanes];
  for (int i = 0; i < kLanes; ++i) m[i] = load_w(pairs + i * stride_words);
  transpose_words(m);
  for (int i = 0; i < kLanes; ++i) store_w(rows + i * row_words, m[i]);
}
static_assert(kLanes == kTileRows && kLanes == kTileWords);

}  // namespace
}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet

#endif  // GANNET_CPU_KERNELS_TILES_INL_H_
