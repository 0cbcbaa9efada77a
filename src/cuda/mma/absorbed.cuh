// Absorbed MLA attention on the tensor cores of sm_80 and newer: dense over pages and sparse over slot lists.
//
// Shapes. A lane is a (query row, head) pair of one request (dense) or a head of one row (sparse). A block serves M
// lanes (16, 32 or 64) over a range of keys, kKeys at a time:
//   S = Q K^T        [M x 576] [576 x kKeys]
//   O = c O + P V    [M x kKeys] [kKeys x 512], V being the first 512 columns of the K tile in shared memory
// 2 * (576 + 512) = 2,176 flop for a lane and key, 1,152 bytes for a bf16 row: M lanes give 1.89 M flop a byte. With 64
// lanes the tensor cores decide on an H200 (ridge 180 flop a byte), with 16 the memory.
//
// Layout. Eight warps. For S a warp has 16 lanes and kKeys / (8 / (M / 16)) keys; for O the same 16 lanes and
// 512 / (8 / (M / 16)) columns, so its fp32 accumulators are 128, 64 or 32 registers. Rows in shared memory are 1,168
// bytes apart (1,152 + 16): eight rows of an ldmatrix then lie in different banks. The K tile is loaded with cp.async
// kStages ahead, 16 bytes a thread; rows come through their own addresses, so pages, strided pools and gathered lists
// cost the same. e4m3 rows are converted in registers on the way.
//
// Shared memory with M = 64, kKeys = 32, 3 stages: Q 73 KB, K 110 KB, S 9 KB, P 5 KB = 197 KB. Traffic a tile: S reads
// 8 warps * 36 steps * 1 KB = 288 KB, O 8 * 2 * 17 * 0.5 KB = 136 KB; at 128 bytes a cycle 3,390 cycles for 4.46 Mflop:
// shared memory bounds this kernel at about 295 TFLOP/s on 132 SMs of 1.7 GHz. wgmma, which reads its operand B without
// registers, is what lifts that (the sm_90a kernels).
//
// Masks. A key that no lane of the block sees is not loaded: its row is zeros. A key that some lanes see and others do
// not (rows of a verify step; at most q_len - 1 keys) must not reach the others even as 0 * NaN: such rows are loaded
// through registers, non-finite values are replaced by zeros, and the key is marked, so that the lanes that do see it
// get a score of NaN, which is what they would have got.
#pragma once

#include <cstdint>

#include "cuda/common/absorbed_problem.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace mma {

using namespace absorbed;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRowPad = 8;                    // 16 bytes: see the essay
constexpr int kRowStride = kWidth + kRowPad;  // bf16 values between rows in shared memory

template <int kM, int kKeyCount, int kStageCount>
struct Config {
  static constexpr int kLanes = kM, kKeys = kKeyCount, kStages = kStageCount;
  static constexpr int kWarpsM = kM / 16, kWarpsN = kWarps / kWarpsM;
  static constexpr int kKeysPerWarp = kKeys / kWarpsN, kColumnsPerWarp = kLatent / kWarpsN;
  static constexpr int kThreadsPerRow = kThreads / kKeys;
  static constexpr int kScoreStride = kKeys + 4, kWeightStride = kKeys + 8;
  static_assert(kM % 16 == 0 && kKeysPerWarp % 8 == 0 && kColumnsPerWarp % 16 == 0 && kKeys % 16 == 0);

  static constexpr size_t kQueryBytes = sizeof(uint16_t) * kM * kRowStride;
  static constexpr size_t kStageBytes = sizeof(uint16_t) * kKeys * kRowStride;
  static constexpr size_t kScoreBytes = sizeof(float) * kM * kScoreStride;
  static constexpr size_t kWeightBytes = sizeof(uint16_t) * kM * kWeightStride;
  static constexpr size_t kSharedBytes = kQueryBytes + kStages * kStageBytes + kScoreBytes + kWeightBytes;
};

// Grid: groups (requests or rows) x lane blocks x splits in one dimension, splits fastest.
template <class C, LatentFormat kFormat, class Problem>
__global__ void __launch_bounds__(kThreads, 1) absorbed_kernel(const Problem p) {
  wait_for_stream();
  let_next_start();
  // ---- who am I ----
  const int64_t lane_blocks = (p.lanes_per_group() + C::kLanes - 1) / C::kLanes;
  const int split = static_cast<int>(blockIdx.x % p.num_splits);
  const int64_t first_lane = blockIdx.x / p.num_splits % lane_blocks * C::kLanes;
  typename Problem::Place g;
  if (!p.place(g, blockIdx.x / p.num_splits / lane_blocks)) return;
  const int64_t num_lanes = g.num_rows * p.num_heads;
  if (first_lane >= num_lanes) return;
  const int lanes = static_cast<int>(min(static_cast<int64_t>(C::kLanes), num_lanes - first_lane));
  const int tid = threadIdx.x, warp = tid / 32, lane_id = tid % 32;
  const int warp_m = warp / C::kWarpsN, warp_n = warp % C::kWarpsN;

  // ---- shared memory ----
  extern __shared__ __align__(128) unsigned char shared[];
  auto* query = reinterpret_cast<uint16_t*>(shared);
  auto* stages = reinterpret_cast<uint16_t*>(shared + C::kQueryBytes);
  auto* scores = reinterpret_cast<float*>(shared + C::kQueryBytes + C::kStages * C::kStageBytes);
  auto* weights = reinterpret_cast<uint16_t*>(reinterpret_cast<unsigned char*>(scores) + C::kScoreBytes);
  __shared__ float row_max[C::kLanes], row_sum[C::kLanes], rescale[C::kLanes];
  __shared__ int64_t bounds[C::kLanes];
  __shared__ bool key_seen[C::kStages][C::kKeys], key_marked[C::kStages][C::kKeys];

  for (int i = tid; i < C::kLanes * kChunks; i += kThreads) {
    const int l = i / kChunks, chunk = i % kChunks;
    const int64_t lane = first_lane + l, row = g.first_row + lane / p.num_heads, head = lane % p.num_heads;
    const uint4 v =
        l < lanes ? *reinterpret_cast<const uint4*>(p.q + row * p.q_row_stride + head * p.q_head_stride + 8 * chunk)
                  : uint4{0, 0, 0, 0};
    *reinterpret_cast<uint4*>(query + l * kRowStride + 8 * chunk) = v;
  }
  if (tid < C::kLanes) {
    row_max[tid] = -INFINITY;
    row_sum[tid] = 0.0f;
    bounds[tid] = tid < lanes ? p.keys_of(g, (first_lane + tid) / p.num_heads) : 0;
  }
  // Rows of a request see more keys the later they are, so the block's last lane sees most and its first least.
  const int64_t most = p.keys_of(g, (first_lane + lanes - 1) / p.num_heads),
                least = p.keys_of(g, first_lane / p.num_heads);
  const int64_t tiles = (most + C::kKeys - 1) / C::kKeys, tiles_per_split = (tiles + p.num_splits - 1) / p.num_splits;
  const int64_t first_tile = split * tiles_per_split, last_tile = min(tiles, first_tile + tiles_per_split);

  auto load_tile = [&](int64_t tile) {
    if (tile < last_tile) {
      const int stage = static_cast<int>(tile % C::kStages), k = tid / C::kThreadsPerRow;
      const int64_t key = tile * C::kKeys + k;
      const int64_t slot = key < most ? p.slot(g, key) : -1;
      const bool divided = key >= least;  // some lanes see it, others do not
      uint16_t* row = stages + stage * (C::kStageBytes / sizeof(uint16_t)) + k * kRowStride;
      bool marked = false;
      if (kFormat == LatentFormat::kBf16 && !(divided && slot >= 0)) {
        const int64_t safe = slot >= 0 ? slot : 0;
        const auto* source = static_cast<const unsigned char*>(p.cache.data) +
                             safe / p.cache.page_size * p.cache.page_stride_bytes +
                             safe % p.cache.page_size * (2 * kWidth);
        const uint32_t target = shared_address(row);
        for (int c = tid % C::kThreadsPerRow; c < kChunks; c += C::kThreadsPerRow)
          copy_async_16(target + 16 * c, source + 16 * c, slot >= 0);
      } else {
        for (int c = tid % C::kThreadsPerRow; c < kChunks; c += C::kThreadsPerRow) {
          uint4 v = slot >= 0 ? load_chunk<kFormat>(p.cache, slot, c) : uint4{0, 0, 0, 0};
          if (divided && slot >= 0) marked |= drop_non_finite(v);
          *reinterpret_cast<uint4*>(row + 8 * c) = v;
        }
      }
      // The threads of a row are neighbours in a warp.
      for (int offset = C::kThreadsPerRow / 2; offset > 0; offset /= 2)
        marked |= __shfl_xor_sync(0xffffffffu, static_cast<int>(marked), offset) != 0;
      if (tid % C::kThreadsPerRow == 0) {
        key_seen[stage][k] = slot >= 0;
        key_marked[stage][k] = marked;
      }
    }
    copy_async_commit();
  };

  float acc[C::kColumnsPerWarp / 8][4];
#pragma unroll
  for (auto& a : acc)
#pragma unroll
    for (float& x : a) x = 0.0f;

  for (int s = 0; s < C::kStages - 1; ++s) load_tile(first_tile + s);

  // ---- tiles ----
  for (int64_t tile = first_tile; tile < last_tile; ++tile) {
    const int stage = static_cast<int>(tile % C::kStages);
    copy_async_wait<C::kStages - 2>();
    __syncthreads();  // the tile is there, and nobody reads the stage that is refilled next
    load_tile(tile + C::kStages - 1);
    const uint32_t keys = shared_address(stages + stage * (C::kStageBytes / sizeof(uint16_t)));

    {  // S: 16 lanes x kKeysPerWarp keys
      float s[C::kKeysPerWarp / 8][4] = {};
      // ldmatrix rows: A takes lanes (id % 16) at column half id / 16; B takes keys, two 8x8 matrices a key group.
      const uint32_t a_address =
          shared_address(query) + 2 * ((warp_m * 16 + lane_id % 16) * kRowStride + lane_id / 16 * 8);
      if constexpr (C::kKeysPerWarp % 16 == 0) {
        const uint32_t b_address =
            keys + 2 * ((warp_n * C::kKeysPerWarp + lane_id % 8 + lane_id / 16 * 8) * kRowStride + lane_id / 8 % 2 * 8);
#pragma unroll 4
        for (int k = 0; k < kWidth; k += 16) {
          uint32_t a[4], b[4];
          ldmatrix_x4(a, a_address + 2 * k);
#pragma unroll
          for (int n = 0; n < C::kKeysPerWarp / 16; ++n) {
            ldmatrix_x4(b, b_address + 2 * (n * 16 * kRowStride + k));
            mma_bf16(s[2 * n], a, b[0], b[1]);
            mma_bf16(s[2 * n + 1], a, b[2], b[3]);
          }
        }
      } else {  // eight keys: one ldmatrix serves two steps of k
        const uint32_t b_address = keys + 2 * ((warp_n * 8 + lane_id % 8) * kRowStride + lane_id / 8 * 8);
#pragma unroll 2
        for (int k = 0; k < kWidth; k += 32) {
          uint32_t a[4], b[4];
          ldmatrix_x4(b, b_address + 2 * k);
          ldmatrix_x4(a, a_address + 2 * k);
          mma_bf16(s[0], a, b[0], b[1]);
          ldmatrix_x4(a, a_address + 2 * (k + 16));
          mma_bf16(s[0], a, b[2], b[3]);
        }
      }
#pragma unroll
      for (int n = 0; n < C::kKeysPerWarp / 8; ++n) {
        float* at =
            scores + (warp_m * 16 + lane_id / 4) * C::kScoreStride + warp_n * C::kKeysPerWarp + n * 8 + lane_id % 4 * 2;
        at[0] = s[n][0];
        at[1] = s[n][1];
        at[8 * C::kScoreStride] = s[n][2];
        at[8 * C::kScoreStride + 1] = s[n][3];
      }
    }
    __syncthreads();

    {  // softmax: kThreads / kLanes threads a lane, neighbours in a warp
      constexpr int kThreadsPerLane = kThreads / C::kLanes, kPerThread = C::kKeys / kThreadsPerLane;
      const int l = tid / kThreadsPerLane, part = tid % kThreadsPerLane;
      const int64_t bound = bounds[l];
      float x[kPerThread];
      bool see[kPerThread];
      float m = -INFINITY;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const int k = i * kThreadsPerLane + part;
        see[i] = key_seen[stage][k] && tile * C::kKeys + k < bound;
        x[i] = key_marked[stage][k] ? NAN : scores[l * C::kScoreStride + k] * p.softmax_scale;
        if (see[i]) m = fmaxf(m, x[i]);
      }
#pragma unroll
      for (int offset = kThreadsPerLane / 2; offset > 0; offset /= 2)
        m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, offset));
      const float before = row_max[l], now = fmaxf(before, m);
      const float base = now == -INFINITY ? 0.0f : now;  // scores of -inf alone: weights of 0, not NaN
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kPerThread; ++i) {
        const float w = see[i] ? __expf(x[i] - base) : 0.0f;
        const uint16_t rounded = float_to_bf16(w);  // what multiplies V is also what is summed
        weights[l * C::kWeightStride + i * kThreadsPerLane + part] = rounded;
        sum += bf16_to_float(rounded);
      }
#pragma unroll
      for (int offset = kThreadsPerLane / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      __syncwarp();
      if (part == 0) {
        const float factor = before == now ? 1.0f : __expf(before - now);
        row_max[l] = now;
        row_sum[l] = row_sum[l] * factor + sum;
        rescale[l] = factor;
      }
    }
    __syncthreads();

    {  // O: 16 lanes x kColumnsPerWarp columns
      const float low = rescale[warp_m * 16 + lane_id / 4], high = rescale[warp_m * 16 + lane_id / 4 + 8];
#pragma unroll
      for (auto& a : acc) {
        a[0] *= low;
        a[1] *= low;
        a[2] *= high;
        a[3] *= high;
      }
      const uint32_t a_address =
          shared_address(weights) + 2 * ((warp_m * 16 + lane_id % 16) * C::kWeightStride + lane_id / 16 * 8);
      const uint32_t b_address =
          keys + 2 * (lane_id % 16 * kRowStride + warp_n * C::kColumnsPerWarp + lane_id / 16 * 8);
#pragma unroll
      for (int k = 0; k < C::kKeys; k += 16) {
        uint32_t a[4], b[4];
        ldmatrix_x4(a, a_address + 2 * k);
#pragma unroll
        for (int n = 0; n < C::kColumnsPerWarp / 16; ++n) {
          ldmatrix_x4_trans(b, b_address + 2 * (k * kRowStride + n * 16));
          mma_bf16(acc[2 * n], a, b[0], b[1]);
          mma_bf16(acc[2 * n + 1], a, b[2], b[3]);
        }
      }
    }
  }
  copy_async_wait<0>();
  __syncthreads();

  // ---- results ----
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int l = warp_m * 16 + lane_id / 4 + 8 * half;
    if (l >= lanes) continue;
    const int64_t lane = first_lane + l, row = g.first_row + lane / p.num_heads, head = lane % p.num_heads;
    const float sum = row_sum[l];
    const bool empty = sum == 0.0f;
    const float inverse = empty ? 0.0f : 1.0f / sum;
    const float lse = empty ? -INFINITY : row_max[l] + logf(sum);
    const int column = warp_n * C::kColumnsPerWarp + lane_id % 4 * 2;
    if (p.num_splits == 1) {
      const int64_t at = row * p.out_row_stride + head * p.out_head_stride + column;
#pragma unroll
      for (int n = 0; n < C::kColumnsPerWarp / 8; ++n) {
        const float x0 = empty ? 0.0f : acc[n][2 * half] * inverse, x1 = empty ? 0.0f : acc[n][2 * half + 1] * inverse;
        if (p.out_dtype == DType::kBf16)
          *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at + 8 * n) = pack_bf16(x0, x1);
        else *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at + 8 * n) = {x0, x1};
      }
      if (p.lse != nullptr && warp_n == 0 && lane_id % 4 == 0) p.lse[row * p.lse_row_stride + head] = lse;
    } else {
      const int64_t index = (split * p.num_rows + row) * p.num_heads + head;
#pragma unroll
      for (int n = 0; n < C::kColumnsPerWarp / 8; ++n)
        *reinterpret_cast<float2*>(p.partial + index * kLatent + column + 8 * n) = {acc[n][2 * half] * inverse,
                                                                                    acc[n][2 * half + 1] * inverse};
      if (warp_n == 0 && lane_id % 4 == 0) p.partial_lse[index] = lse;
    }
  }
}

/// Merges the splits of each (row, head), in order. A block of kLatent / 4 threads serves one.
__global__ void __launch_bounds__(kLatent / 4) combine_kernel(const Common p) {
  wait_for_stream();
  let_next_start();
  const int64_t row = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads;
  float top = -INFINITY;
  const int64_t stride = p.num_rows * p.num_heads, index = row * p.num_heads + head;
  for (int s = 0; s < p.num_splits; ++s) {
    const float l = p.partial_lse[s * stride + index];
    top = l > top || isnan(l) ? l : top;
  }
  float4 o{0, 0, 0, 0};
  float sum = 0.0f;
  for (int s = 0; s < p.num_splits; ++s) {
    const float l = p.partial_lse[s * stride + index];
    if (l == -INFINITY) continue;  // an empty split is not read
    const float w = expf(l - top);
    const float4 x = reinterpret_cast<const float4*>(p.partial + (s * stride + index) * kLatent)[threadIdx.x];
    sum += w;
    o.x = fmaf(w, x.x, o.x), o.y = fmaf(w, x.y, o.y), o.z = fmaf(w, x.z, o.z), o.w = fmaf(w, x.w, o.w);
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  const int64_t at = row * p.out_row_stride + head * p.out_head_stride + 4 * threadIdx.x;
  o.x *= inverse, o.y *= inverse, o.z *= inverse, o.w *= inverse;
  if (p.out_dtype == DType::kBf16)
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) = {pack_bf16(o.x, o.y), pack_bf16(o.z, o.w)};
  else *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = o;
  if (p.lse != nullptr && threadIdx.x == 0)
    p.lse[row * p.lse_row_stride + head] = sum == 0.0f ? -INFINITY : top + logf(sum);
}

}  // namespace mma
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
