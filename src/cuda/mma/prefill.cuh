// Ragged prefill in the expanded form on the tensor cores of sm_80 and newer.
//
// Shapes. A block serves kTileRows query rows of one head of a request over the keys that they see, 64 at a time:
//   S = Q K^T        [M x Dk] [Dk x 64]
//   O = c O + P V    [M x 64] [64 x Dv]
// Four warps; each has kRowsPerWarp whole rows, so nothing but K and V is shared between warps. At 192/128 a warp has
// 32 rows (O 128, S 64 accumulator registers of 255), at 256/256 it has 16 (128 and 32).
//
// Work. 2 * (Dk + Dv) flop a pair of row and key: 640 at 192/128, so a tile of 128 x 64 is 5.24 Mflop for 40,960 bytes
// of K and V. That is 128 flop a byte from the L2 (at 300 TFLOP/s 2.3 TB/s, under half of what an H200's L2 gives).
// Shared memory: a warp reads K (24 KB), V (16 KB) and its Q (12 KB) each tile with ldmatrix, 208 KB for four warps,
// 1,664 cycles at 128 bytes a cycle: 730 TFLOP/s on 132 SMs at 1.75 GHz. The tensor cores through mma.sync do about
// 0.62 of what wgmma does, say 600 TFLOP/s; 320 of them a warp and tile, beside some 600 other instructions, of which
// 64 exponentials take 512 cycles of a quarter's special function unit. Two blocks a multiprocessor let one's softmax
// run under the other's products. Predicted: 300 to 350 TFLOP/s for long sequences.
//
// Shared memory: Q 48 KB, one K tile 24 KB, one V tile 16 KB = 88 KB (192/128); 32 + 32 + 32 = 96 KB (256/256): two
// blocks on Hopper. V travels while S is computed, the next K while the softmax and P V are. Rows are multiples of 128
// bytes, and the 16-byte piece c of row r lies at c ^ (r % 8): eight rows of an ldmatrix then lie in different banks,
// and a step of k is an xor and an immediate offset.
//
// Masks. Tiles start at multiples of 64 from the request's first key, sums run in the order of keys, and a key that a
// row does not see has weight 0 exactly and leaves maximum and factor alone: a row's bits depend on nothing but its own
// keys. (Products that are added to are fmaf by name: left to nvcc, some of the unrolled rows of a thread had an LSE
// from two roundings and others from one, so that it depended on where in its tile a row lay.) Keys beyond those of the
// block's last row are zeros and not read. Keys that some rows of the block see and others do not (the diagonal) must
// not reach the others as 0 * NaN: when such a tile holds a value that is not finite, P V is done row by row with the
// other keys cleared (values_by_row), else as usual. Scores are replaced by select.
#pragma once

#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "cuda/common/prefill_problem.cuh"
#include "cuda/common/prefill_values.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace mma {

using prefill::kLn2;
using prefill::kLog2E;
using prefill::Problem;
using prefill::Tile;

constexpr uint32_t kAllLanes = 0xffffffffu;

template <int kKeyDim, int kValueDim, bool kSharedRope>
struct PrefillConfig {
  static constexpr int kDk = kKeyDim, kDv = kValueDim;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kKeys = 64;
  static constexpr int kRowTiles = kDv <= 128 ? 2 : 1;  // of 16 rows, a warp
  static constexpr int kRowsPerWarp = 16 * kRowTiles, kTileRows = kWarps * kRowsPerWarp;
  static constexpr int kRowBytes = 2 * kDk, kValueBytes = 2 * kDv;  // of a row in shared memory
  static constexpr int kQuerySize = kTileRows * kRowBytes, kKeySize = kKeys * kRowBytes,
                       kValueSize = kKeys * kValueBytes;
  static constexpr int kTileBytes = kQuerySize + kKeySize + kValueSize, kSharedBytes = kTileBytes + sizeof(Tile);
  // Loads: eight threads take 128 bytes of a row, a pass kLoadRows rows.
  static constexpr int kLoadRows = kThreads / 8;
  static constexpr int kKeyGroups = kDk / 64, kOwnGroups = kKeyGroups - (kSharedRope ? prefill::kRope / 64 : 0);
  static constexpr int kValueGroups = kDv / 64;
  static_assert(kDk % 64 == 0 && kDv % 64 == 0 && kRowBytes % 128 == 0 && kValueBytes <= kRowBytes);
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 2) prefill_kernel(const __grid_constant__ Problem p) {
  wait_for_stream();
  let_next_start();
  extern __shared__ __align__(128) unsigned char shared[];
  Tile t;
  if (!prefill::find_tile<C::kTileRows>(p, t, blockIdx.x, gridDim.x)) return;
  Tile& kept = *reinterpret_cast<Tile*>(shared + C::kTileBytes);  // for masks and results: registers are dear
  if (threadIdx.x == 0) kept = t;                                 // read behind the first barrier
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, quad = lane % 4;
  const uint32_t q_shared = shared_address(shared), k_shared = q_shared + C::kQuerySize,
                 v_shared = k_shared + C::kKeySize;
  const int least = t.sees(0), most = t.sees(t.num_rows - 1);
  const int num_tiles = (most + C::kKeys - 1) / C::kKeys;
  const float scale = p.softmax_scale * kLog2E;

  // ---- loads ----
  // Thread: 16-byte piece `piece` of each 128, rows load_row + i * kLoadRows; row % 8 is the same for all of them.
  const int piece = tid % 8, load_row = tid / 8;
  const int load_at = (piece ^ (load_row % 8)) * 16;
  if (num_tiles > 0) {
    const uint16_t* source = p.q + (t.q_row + load_row) * p.q_row_stride + t.head * p.q_head_stride + 8 * piece;
#pragma unroll
    for (int i = 0; i < C::kTileRows / C::kLoadRows; ++i) {
      const bool ok = load_row + i * C::kLoadRows < t.num_rows;
#pragma unroll
      for (int g = 0; g < C::kKeyGroups; ++g)
        copy_async_16(q_shared + load_row * C::kRowBytes + load_at + i * C::kLoadRows * C::kRowBytes + g * 128,
                      source + 64 * g, ok);
      source += C::kLoadRows * p.q_row_stride;
    }
  }
  const uint16_t* next_key = p.k + (t.kv_row + load_row) * p.k_row_stride + t.head * p.k_head_stride + 8 * piece;
  const uint16_t* next_rope =
      C::kOwnGroups < C::kKeyGroups ? p.k_rope + (t.kv_row + load_row) * p.rope_row_stride + 8 * piece : nullptr;
  const uint16_t* next_value = p.v + (t.kv_row + load_row) * p.v_row_stride + t.head * p.v_head_stride + 8 * piece;
  // Tiles are loaded in order, each once: the pointers walk along.
  auto load_keys = [&](int first) {
#pragma unroll
    for (int i = 0; i < C::kKeys / C::kLoadRows; ++i) {
      const bool ok = first + load_row + i * C::kLoadRows < most;
      const uint32_t target = k_shared + load_row * C::kRowBytes + load_at + i * C::kLoadRows * C::kRowBytes;
#pragma unroll
      for (int g = 0; g < C::kOwnGroups; ++g) copy_async_16(target + g * 128, next_key + 64 * g, ok);
      next_key += C::kLoadRows * p.k_row_stride;
      if constexpr (C::kOwnGroups < C::kKeyGroups) {
        copy_async_16(target + C::kOwnGroups * 128, next_rope, ok);
        next_rope += C::kLoadRows * p.rope_row_stride;
      }
    }
    copy_async_commit();
  };
  auto load_values = [&](int first) {
#pragma unroll
    for (int i = 0; i < C::kKeys / C::kLoadRows; ++i) {
      const bool ok = first + load_row + i * C::kLoadRows < most;
      const uint32_t target = v_shared + load_row * C::kValueBytes + load_at + i * C::kLoadRows * C::kValueBytes;
#pragma unroll
      for (int g = 0; g < C::kValueGroups; ++g) copy_async_16(target + g * 128, next_value + 64 * g, ok);
      next_value += C::kLoadRows * p.v_row_stride;
    }
    copy_async_commit();
  };
  if (num_tiles > 0) load_keys(0);

  // ---- ldmatrix addresses; a step of 16 columns is an xor of 32 bytes, four of them are 128 bytes further ----
  const int warp_row = warp * C::kRowsPerWarp;
  const uint32_t q_address = q_shared + (warp_row + lane % 16) * C::kRowBytes + ((lane / 16) ^ (lane % 8)) * 16;
  const uint32_t k_address = k_shared + (lane % 8 + lane / 16 * 8) * C::kRowBytes + ((lane / 8 % 2) ^ (lane % 8)) * 16;
  const uint32_t v_address = v_shared + lane % 16 * C::kValueBytes + ((lane / 16) ^ (lane % 8)) * 16;

  float acc[C::kRowTiles][C::kDv / 8][4];
  float top[C::kRowTiles][2], sum[C::kRowTiles][2];
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m) {
#pragma unroll
    for (int n = 0; n < C::kDv / 8; ++n)
#pragma unroll
      for (float& x : acc[m][n]) x = 0.0f;
    top[m][0] = top[m][1] = -INFINITY;
    sum[m][0] = sum[m][1] = 0.0f;
  }
  // Keys that the last row of this warp sees: beyond them the warp has nothing to do but to load.
  const int warp_sees = warp_row < t.num_rows ? t.sees(min(warp_row + C::kRowsPerWarp, t.num_rows) - 1) : 0;

  for (int tile = 0; tile < num_tiles; ++tile) {
    const int first = tile * C::kKeys;
    const bool active = first < warp_sees;
    copy_async_wait<0>();
    __syncthreads();  // K is there; nobody reads V any more
    load_values(first);

    float s[C::kRowTiles][C::kKeys / 8][4];
    if (active) {
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < C::kKeys / 8; ++n)
#pragma unroll
          for (float& x : s[m][n]) x = 0.0f;
#pragma unroll
      for (int k = 0; k < C::kDk / 16; ++k) {
        uint32_t a[C::kRowTiles][4];
#pragma unroll
        for (int m = 0; m < C::kRowTiles; ++m)
          ldmatrix_x4(a[m], (q_address ^ ((k & 3) << 5)) + (k >> 2) * 128 + m * 16 * C::kRowBytes);
#pragma unroll
        for (int n = 0; n < C::kKeys / 16; ++n) {
          uint32_t b[4];
          ldmatrix_x4(b, (k_address ^ ((k & 3) << 5)) + (k >> 2) * 128 + n * 16 * C::kRowBytes);
#pragma unroll
          for (int m = 0; m < C::kRowTiles; ++m) {
            mma_bf16(s[m][2 * n], a[m], b[0], b[1]);
            mma_bf16(s[m][2 * n + 1], a[m], b[2], b[3]);
          }
        }
      }
    }
    copy_async_wait<0>();
    __syncthreads();  // V is there; nobody reads K any more
    if (tile + 1 < num_tiles) load_keys(first + C::kKeys);

    const bool masked = first + C::kKeys > least;
    bool by_row = false;
    if (masked && least < most) {  // some rows see keys of this tile that others do not: look for what is not finite
      uint32_t seen = 0;
#pragma unroll
      for (int i = 0; i < C::kValueSize / (16 * C::kThreads); ++i) {
        const uint4 v =
            *reinterpret_cast<const uint4*>(shared + C::kQuerySize + C::kKeySize + 16 * (tid + i * C::kThreads));
        seen = note_non_finite(note_non_finite(note_non_finite(note_non_finite(seen, v.x), v.y), v.z), v.w);
      }
      by_row = __syncthreads_or(any_non_finite(seen)) != 0;
    }
    if (!active) continue;

    // ---- softmax: each step for all rows of a thread, so that the steps' latencies overlap ----
    if (masked) {
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int bound = kept.sees(warp_row + 16 * m + lane / 4 + 8 * half) - first - 2 * quad;
#pragma unroll
          for (int n = 0; n < C::kKeys / 8; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) s[m][n][2 * half + i] = 8 * n + i < bound ? s[m][n][2 * half + i] : -INFINITY;
        }
    }
    float now[C::kRowTiles][2], factor[C::kRowTiles][2];  // fmaxf passes NaN by; it comes back through the weights
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x = fmaxf(s[m][0][2 * half], s[m][0][2 * half + 1]), y = fmaxf(s[m][1][2 * half], s[m][1][2 * half + 1]);
#pragma unroll
        for (int n = 2; n < C::kKeys / 8; n += 2) {
          x = fmaxf(x, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
          y = fmaxf(y, fmaxf(s[m][n + 1][2 * half], s[m][n + 1][2 * half + 1]));
        }
        now[m][half] = fmaxf(top[m][half], fmaxf(x, y));
      }
#pragma unroll
    for (int distance = 1; distance <= 2; ++distance)
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          now[m][half] = fmaxf(now[m][half], __shfl_xor_sync(kAllLanes, now[m][half], distance));
    uint32_t weights[C::kRowTiles][C::kKeys / 16][4];
    bool changed = false;
#pragma unroll
    for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float before = top[m][half];
        top[m][half] = now[m][half];
        // Nothing seen yet: the maximum is -inf, and subtracting 0 instead leaves a weight of 0.
        const float shift = now[m][half] == -INFINITY ? 0.0f : now[m][half] * scale;
        factor[m][half] = before == now[m][half] ? 1.0f : exp2_approx(fmaf(before, scale, -shift));
        changed |= factor[m][half] != 1.0f;
        float own = 0.0f;
#pragma unroll
        for (int n = 0; n < C::kKeys / 8; ++n) {
          const float w0 = exp2_approx(fmaf(s[m][n][2 * half], scale, -shift)),
                      w1 = exp2_approx(fmaf(s[m][n][2 * half + 1], scale, -shift));
          own += w0 + w1;
          weights[m][n / 2][half + 2 * (n % 2)] = round_to_bf16x2(w0, w1);
        }
        sum[m][half] = fmaf(sum[m][half], factor[m][half], own);
      }
    if (__any_sync(kAllLanes, changed)) {
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
        for (int n = 0; n < C::kDv / 8; ++n) {
          acc[m][n][0] *= factor[m][0];
          acc[m][n][1] *= factor[m][0];
          acc[m][n][2] *= factor[m][1];
          acc[m][n][3] *= factor[m][1];
        }
    }

    // ---- P V ----
    if (!by_row) {
#pragma unroll
      for (int k = 0; k < C::kKeys / 16; ++k)
#pragma unroll
        for (int n = 0; n < C::kDv / 16; ++n) {
          uint32_t b[4];
          ldmatrix_x4_trans(b, (v_address ^ ((n & 3) << 5)) + (n >> 2) * 128 + k * 16 * C::kValueBytes);
#pragma unroll
          for (int m = 0; m < C::kRowTiles; ++m) {
            mma_bf16(acc[m][2 * n], weights[m][k], b[0], b[1]);
            mma_bf16(acc[m][2 * n + 1], weights[m][k], b[2], b[3]);
          }
        }
    } else {
#pragma unroll
      for (int m = 0; m < C::kRowTiles; ++m)
        prefill::values_by_row(acc[m], weights[m], v_address, 128, C::kValueBytes,
                               kept.first_sees + warp_row + 16 * m - first, kept.num_keys - first);
    }
  }
  copy_async_wait<0>();
  __syncthreads();

  // ---- results ----
  unsigned char* staging = shared + warp_row * C::kRowBytes;  // this warp's own queries, which nobody needs any more
#pragma unroll
  for (int m = 0; m < C::kRowTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = sum[m][half];
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      const int in_warp = 16 * m + lane / 4 + 8 * half, row = warp_row + in_warp;
      const bool empty = total == 0.0f;  // no keys, or none with a weight: all scores are -inf
      const float inverse = empty ? 0.0f : __fdividef(1.0f, total);
      if (p.lse != nullptr && quad == 0 && row < kept.num_rows)
        p.lse[(kept.q_row + row) * p.lse_row_stride + kept.head] =
            empty ? -INFINITY : fmaf(top[m][half], scale, log2f(total)) * kLn2;
#pragma unroll
      for (int n = 0; n < C::kDv / 8; ++n) {
        acc[m][n][2 * half] *= inverse;
        acc[m][n][2 * half + 1] *= inverse;
      }
      if (p.out_dtype == DType::kBf16) {
#pragma unroll
        for (int n = 0; n < C::kDv / 8; ++n)
          *reinterpret_cast<uint32_t*>(staging + in_warp * C::kValueBytes + (n ^ (in_warp % 8)) * 16 + 4 * quad) =
              round_to_bf16x2(acc[m][n][2 * half], acc[m][n][2 * half + 1]);
      } else if (row < kept.num_rows) {
        float* out = static_cast<float*>(p.out) + (kept.q_row + row) * p.out_row_stride + kept.head * p.out_head_stride;
#pragma unroll
        for (int n = 0; n < C::kDv / 8; ++n)
          *reinterpret_cast<float2*>(out + 8 * n + 2 * quad) = {acc[m][n][2 * half], acc[m][n][2 * half + 1]};
      }
    }
  if (p.out_dtype != DType::kBf16) return;
  __syncwarp();
  constexpr int kPieces = C::kValueBytes / 16, kRowsAtOnce = 32 / kPieces;  // whole rows, 16 bytes a lane
  const int column = lane % kPieces;
#pragma unroll
  for (int i = 0; i < C::kRowsPerWarp / kRowsAtOnce; ++i) {
    const int in_warp = i * kRowsAtOnce + lane / kPieces, row = warp_row + in_warp;
    if (row >= kept.num_rows) continue;
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + (kept.q_row + row) * p.out_row_stride +
                              kept.head * p.out_head_stride + 8 * column) =
        *reinterpret_cast<const uint4*>(staging + in_warp * C::kValueBytes + (column ^ (in_warp % 8)) * 16);
  }
}

}  // namespace mma
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
