// P V of ragged prefill where a tile of values holds NaN or infinities and its rows see different keys.
//
// In the usual product a key that a row does not see has weight 0, and 0 * NaN is NaN. Such a tile takes this way,
// which is slow and gives the same bits: its sums have the same terms in the same order.
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace prefill {

/// acc += P V for 16 rows of a warp, in the layout of mma.m16n8k16: acc[n] are columns 8 n and on, weights[k] keys 16 k
/// and on. Each row has a product of its own, in which keys that it does not see are zeros on both sides.
/// `v_address`: of ldmatrix for key lane % 16, the 16-byte piece lane / 16 of its row, swizzled by key % 8; keys are
/// row_bytes apart, the next 64 columns group_bytes further. `bound`: keys of this tile that row 0 sees, each later row
/// sees one more, all of them at most num_keys.
template <int kColumns, int kSteps>
__device__ __forceinline__ void values_by_row(float (&acc)[kColumns][4], const uint32_t (&weights)[kSteps][4],
                                              uint32_t v_address, int group_bytes, int row_bytes, int bound,
                                              int num_keys) {
  // Copies, so that the loops below, which are not unrolled, do not force the originals out of registers.
  float sums[kColumns][4];
  uint32_t p[kSteps][4];
#pragma unroll
  for (int n = 0; n < kColumns; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] = acc[n][i];
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) p[k][i] = weights[k][i];
  const int lane = static_cast<int>(threadIdx.x) % 32, quad = lane % 4;
#pragma unroll 1
  for (int r = 0; r < 16; ++r) {
    const int sees = min(bound + r, num_keys);
    const bool own = lane / 4 == r % 8;
#pragma unroll 1
    for (int k = 0; k < kSteps; ++k) {
      uint32_t a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = own && (r >= 8) == (i % 2 == 1) ? p[k][i] : 0;
      auto keep = [&](int key) { return (key < sees ? 0xffffu : 0) | (key + 1 < sees ? 0xffff0000u : 0); };
      const uint32_t low = keep(16 * k + 2 * quad), high = keep(16 * k + 2 * quad + 8);
#pragma unroll 1
      for (int n = 0; n < kColumns / 2; ++n) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, (v_address ^ ((n & 3) << 5)) + (n >> 2) * group_bytes + k * 16 * row_bytes);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float(&c)[4] = sums[2 * n + i];
          float d[4] = {c[0], c[1], c[2], c[3]};
          mma_bf16(d, a, b[2 * i] & low, b[2 * i + 1] & high);
#pragma unroll
          for (int j = 0; j < 4; ++j) c[j] = own && (r >= 8) == (j >= 2) ? d[j] : c[j];
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kColumns; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[n][i] = sums[n][i];
}

}  // namespace prefill
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
