// Ragged prefill in the expanded form on Hopper, 192 wide keys and 128 wide values, bf16.
//
// Shapes. A tile of work is 128 query rows of one head of a request; two consumer warpgroups have 64 rows each, and
// walk the keys 128 at a time:
//   S = Q K^T   64 x 128 x 192   768 cycles of the tensor cores (m64n128k16 takes 64)
//   O += P V    64 x 128 x 128   512 cycles
// so 2,560 cycles for both, 10.5 Mflop, against which a warpgroup's softmax of 64 x 128 scores takes some 700 of its
// quarters' issue slots (512 of them the exponentials). The tensor cores are the bound if softmax runs beside products:
//   - the warpgroups take turns (named barriers kTurn): while one multiplies, the other is in its softmax;
//   - within a warpgroup S of the next keys and P V of these are both under way, and the softmax of the former runs
//     under the latter.
// O and S in fp32 are 64 registers each, P 32: 160 of 240.
//
// Bytes. A tile of keys and values is 80 KB for 10.5 Mflop: 128 flop a byte, 5 TB/s from the L2 at 650 TFLOP/s, which
// is near what it gives; the order of tiles (prefill_problem.cuh) keeps the keys of one or two heads in it. Shared
// memory is read at 96 bytes a cycle in S (2 KB of Q and 4 KB of K each 64 cycles) and 64 in P V, and filled at 80 KB
// in 2,560 cycles: 2,300 of them in all.
//
// Shared memory: Q 48 KB, two stages of K 96 KB and of V 64 KB: 208 KB, one block a multiprocessor. Blocks persist and
// take tiles from a counter, the long ones first; the loads of the next tile run under the end of this one.
//
// Loads. One thread orders boxes of 128 rows and 64 columns from the copy engine, which lays them down in the swizzle
// that wgmma reads and counts their bytes at the stage's mbarrier. Boxes know the tensor, not the request: behind a
// request's keys they hold those of the next. A consumer releases Q with its last S, K after each S, V after each P V.
//
// Masks as in mma/prefill.cuh: tiles of keys start at multiples of 128 from the request's first key, weights of keys
// that are not seen are 0, and values that are not finite on the diagonal go row by row. So a row's bits depend on its
// own keys alone, and the order in which blocks take tiles decides nothing.
#pragma once

#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/common/prefill_problem.cuh"
#include "cuda/common/prefill_values.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace sm90 {
namespace ragged {

using prefill::kLn2;
using prefill::kLog2E;
using prefill::Problem;
using prefill::Tile;

constexpr int kDk = 192, kDv = 128;
constexpr int kTileRows = 128, kKeys = 128, kStages = 2;
constexpr int kGroupRows = 64;  // of a consumer warpgroup
constexpr int kConsumerThreads = 256, kProducerThreads = 128, kThreads = kConsumerThreads + kProducerThreads;
constexpr int kConsumerWarps = kConsumerThreads / 32;
constexpr int kBlockBytes = 128 * 128;  // 64 columns of 128 rows, keys or values: Q, K and V are made of these
constexpr int kQuerySize = kDk / 64 * kBlockBytes, kKeySize = kDk / 64 * kBlockBytes,
              kValueSize = kDv / 64 * kBlockBytes;
constexpr int kTileBytes = kQuerySize + kStages * (kKeySize + kValueSize);
constexpr int kAlignment = 1024;                                  // of a swizzled block
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;  // 128 * 24 + 256 * 240 = 64,512 of 65,536
constexpr uint32_t kAllLanes = 0xffffffffu;

// Named barriers; 0 is __syncthreads.
constexpr int kTurn = 1;  // and 2: the warpgroup may issue its products
constexpr int kVote = 3;  // and 4: within a consumer warpgroup

struct Shared {
  uint64_t q_full, q_empty;
  uint64_t k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
  Tile tiles[2];  // of the tile under way and the next; num_rows 0: there is none
};
constexpr int kSharedBytes = kTileBytes + static_cast<int>(sizeof(Shared));
static_assert(kSharedBytes <= 227 * 1024);

/// A number that is the same in all lanes, as the compiler's uniform registers have it: what follows from it, stages
/// and descriptors of wgmma above all, is then computed once a warp instead of being moved there for each product. (A
/// reduction's result is uniform to the assembler, a shuffle's is not.)
__device__ inline int same_in_warp(int x) { return __reduce_max_sync(kAllLanes, x); }

/// How many tiles of keys a tile has, and how many of them every row sees whole.
struct Extent {
  int least, most, tiles, plain;
  __device__ explicit Extent(const Tile& t)
      : least(same_in_warp(t.sees(0))),
        most(same_in_warp(t.sees(t.num_rows - 1))),
        tiles((most + kKeys - 1) / kKeys),
        plain(least / kKeys) {}
};

// ---- producer ---------------------------------------------------------------------------------------------------

/// Tensors as the copy engine knows them (common/tensor_map.h): boxes of 128 rows of q, k and v. The last block of a
/// key is read from `last`: the same as k, or the rotated part that all heads share.
struct Maps {
  CUtensorMap q, k, last, v;
};

/// One warp; lane 0 gives the orders.
__device__ inline void produce(const Problem& p, const Maps& maps, Shared& s, uint32_t q_shared, int* counter,
                               int num_ids) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t k_shared = q_shared + kQuerySize, v_shared = k_shared + kStages * kKeySize;
  int taken = static_cast<int>(blockIdx.x);  // lane 0's: the next id, asked for long before it is needed
  int count = 0;                             // tiles of keys so far
  for (int i = 0;; ++i) {
    Tile t;
    bool any = false;
    while (!any) {  // ids that a request does not need are passed over
      const int id = __shfl_sync(kAllLanes, taken, 0);
      if (id >= num_ids) break;
      any = prefill::find_tile<kTileRows>(p, t, static_cast<unsigned>(id), static_cast<unsigned>(num_ids));
      if (lane == 0) taken = static_cast<int>(gridDim.x) + fetch_increment(counter);
    }
    if (!any) t.num_rows = 0;
    if (lane == 0) {
      const int most = any ? t.sees(t.num_rows - 1) : 0, kv_row = static_cast<int>(t.kv_row);
      auto load_keys = [&](int first) {
        const int stage = count % kStages;
        const uint32_t key = k_shared + stage * kKeySize;
        mbarrier_wait(&s.k_empty[stage], (count / kStages & 1) ^ 1);
        mbarrier_arrive_expecting(&s.k_full[stage], kKeySize);
        copy_box(key, maps.k, &s.k_full[stage], 0, t.head, kv_row + first);
        copy_box(key + kBlockBytes, maps.k, &s.k_full[stage], 64, t.head, kv_row + first);
        const bool shared_rope = p.k_rope != nullptr;
        copy_box(key + 2 * kBlockBytes, maps.last, &s.k_full[stage], shared_rope ? 0 : 128, shared_rope ? 0 : t.head,
                 kv_row + first);
      };
      if (most > 0) load_keys(0);  // there may be a place for them before there is one for the queries
      mbarrier_wait(&s.q_empty,
                    (i & 1) ^ 1);  // and all consumers are past the tile before the last, whose slot this takes
      s.tiles[i & 1] = t;
      if (!any) {
        mbarrier_arrive(&s.q_full);
      } else {
        mbarrier_arrive_expecting(&s.q_full, kQuerySize);
#pragma unroll
        for (int b = 0; b < kDk / 64; ++b)
          copy_box(q_shared + b * kBlockBytes, maps.q, &s.q_full, 64 * b, t.head, static_cast<int>(t.q_row));
      }
#pragma unroll 1
      for (int first = 0; first < most; first += kKeys, ++count) {
        if (first > 0) load_keys(first);
        const int stage = count % kStages;
        const uint32_t value = v_shared + stage * kValueSize;
        mbarrier_wait(&s.v_empty[stage], (count / kStages & 1) ^ 1);
        mbarrier_arrive_expecting(&s.v_full[stage], kValueSize);
        copy_box(value, maps.v, &s.v_full[stage], 0, t.head, kv_row + first);
        copy_box(value + kBlockBytes, maps.v, &s.v_full[stage], 64, t.head, kv_row + first);
      }
    }
    __syncwarp();
    if (!any) break;
  }
}

// ---- consumers --------------------------------------------------------------------------------------------------

/// Running maximum (of unscaled scores) and sum of a thread's two rows. The sum is over this thread's columns only.
struct Softmax {
  float top[2], sum[2];

  /// Replaces scores by weights; factor: what the rows' earlier results are worth now.
  __device__ void step(float (&score)[kKeys / 2], float scale, float (&factor)[2]) {
    float now[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // fmaxf passes NaN by; it comes back through the weights
      float x = top[half], y = -INFINITY;
#pragma unroll
      for (int n = 0; n < kKeys / 8; n += 2) {
        x = fmaxf(x, fmaxf(score[4 * n + 2 * half], score[4 * n + 2 * half + 1]));
        y = fmaxf(y, fmaxf(score[4 * n + 4 + 2 * half], score[4 * n + 5 + 2 * half]));
      }
      now[half] = fmaxf(x, y);
    }
#pragma unroll
    for (int distance = 1; distance <= 2; ++distance)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        now[half] = fmaxf(now[half], __shfl_xor_sync(kAllLanes, now[half], distance));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Nothing seen yet: the maximum is -inf, and subtracting 0 instead leaves a weight of 0.
      const float shift = now[half] == -INFINITY ? 0.0f : now[half] * scale;
      factor[half] = top[half] == now[half] ? 1.0f : exp2_approx(top[half] * scale - shift);
      top[half] = now[half];
      float own = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = score[4 * n + 2 * half + i];
          x = exp2_approx(fmaf(x, scale, -shift));
          own += x;
        }
      sum[half] = sum[half] * factor[half] + own;
    }
  }
};

/// Transposes the four words of four neighbouring lanes: lane i of them gets word i of each, in order.
__device__ inline uint4 transpose_quad(uint32_t a, uint32_t b, uint32_t c, uint32_t d, int quad) {
  const bool odd = (quad & 1) != 0, upper = (quad & 2) != 0;
  const uint32_t ab = __shfl_xor_sync(kAllLanes, odd ? a : b, 1), cd = __shfl_xor_sync(kAllLanes, odd ? c : d, 1);
  // Now of words (0, 1) and of (2, 3): what this pair of lanes holds of the one that this lane wants.
  const uint32_t low0 = odd ? ab : a, low1 = odd ? b : ab, high0 = odd ? cd : c, high1 = odd ? d : cd;
  const uint32_t other0 = __shfl_xor_sync(kAllLanes, upper ? low0 : high0, 2),
                 other1 = __shfl_xor_sync(kAllLanes, upper ? low1 : high1, 2);
  return upper ? uint4{other0, other1, high0, high1} : uint4{low0, low1, other0, other1};
}

__device__ inline void consume(const Problem& p, Shared& s, unsigned char* shared, int group) {
  const int tid = static_cast<int>(threadIdx.x) % 128, warp = tid / 32, lane = tid % 32, quad = lane % 4;
  const int row = group * kGroupRows + warp * 16 + lane / 4;  // and row + 8
  const float scale = p.softmax_scale * kLog2E;
  const uint32_t q_address = shared_address(shared), k_address = q_address + kQuerySize,
                 v_address = k_address + kStages * kKeySize;
  const uint64_t q_descriptor = k_major(q_address + group * kGroupRows * 128), k_descriptor = k_major(k_address),
                 v_descriptor = mn_major(v_address, kBlockBytes);
  auto release = [&](uint64_t* barrier) {
    if (lane == 0) mbarrier_arrive(barrier);
  };
  int count = 0;  // tiles of keys so far
  if (group == 1) named_barrier_arrive(kTurn, kConsumerThreads);
  for (int i = 0;; ++i) {
    mbarrier_wait(&s.q_full, i & 1);
    const Tile& t = s.tiles[i & 1];
    const int num_rows = same_in_warp(t.num_rows);
    if (num_rows == 0) break;
    const Extent extent(t);
    if (extent.tiles == 0) mbarrier_arrive(&s.q_empty);
    if (group * kGroupRows >= num_rows) {  // no rows: keep the producer going
      for (int j = 0; j < extent.tiles; ++j, ++count) {
        mbarrier_wait(&s.k_full[count % kStages], count / kStages & 1);
        release(&s.k_empty[count % kStages]);
        if (j == extent.tiles - 1) mbarrier_arrive(&s.q_empty);
        mbarrier_wait(&s.v_full[count % kStages], count / kStages & 1);
        release(&s.v_empty[count % kStages]);
      }
      continue;
    }
    const bool turns = num_rows > kGroupRows;  // the other warpgroup has rows too

    float o[kDv / 2], score[kKeys / 2], factor[2] = {1.0f, 1.0f};
    uint32_t weights[kKeys / 16][4];
    Softmax softmax{{-INFINITY, -INFINITY}, {0.0f, 0.0f}};
#pragma unroll
    for (float& x : o) x = 0.0f;

    // Addresses in a descriptor are in units of 16 bytes, in its low bits: steps are added to it.
    auto start_scores = [&](int stage) {
      const uint64_t k = k_descriptor + stage * (kKeySize / 16);
      hold_registers(score);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kDk / 16; ++i) {
        const int at = (i / 4 * kBlockBytes + i % 4 * 32) / 16;
        wgmma_m64n128_ss(score, q_descriptor + at, k + at, i != 0);
      }
      wgmma_commit();
    };
    auto start_values = [&](int stage) {
      const uint64_t v = v_descriptor + stage * (kValueSize / 16);
      hold_registers(o);
      hold_registers(weights);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kKeys / 16; ++i) wgmma_m64n128_rs_mn(o, weights[i], v + i * (2048 / 16), true);
      wgmma_commit();
    };
    auto take_turn = [&] {
      if (turns) named_barrier_sync(kTurn + group, kConsumerThreads);
    };
    auto pass_turn = [&] {
      if (turns) named_barrier_arrive(kTurn + 1 - group, kConsumerThreads);
    };
    auto pack_weights = [&] {
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          weights[n / 2][half + 2 * (n % 2)] = round_to_bf16x2(score[4 * n + 2 * half], score[4 * n + 2 * half + 1]);
    };
    auto rescale = [&] {
      if (!__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
      for (int n = 0; n < kDv / 8; ++n) {
        o[4 * n] *= factor[0];
        o[4 * n + 1] *= factor[0];
        o[4 * n + 2] *= factor[1];
        o[4 * n + 3] *= factor[1];
      }
    };

    // ---- tiles of keys that every row sees whole ----
    if (extent.plain > 0) {
      mbarrier_wait(&s.k_full[count % kStages], count / kStages & 1);
      take_turn();
      start_scores(same_in_warp(count % kStages));
      pass_turn();
      wgmma_wait<0>();
      hold_registers(score);
      release(&s.k_empty[count % kStages]);
      if (extent.tiles == 1) mbarrier_arrive(&s.q_empty);
      softmax.step(score, scale, factor);  // nothing to rescale yet
      pack_weights();
#pragma unroll 1
      for (int j = 1; j < extent.plain; ++j, ++count) {
        const int v_stage = same_in_warp(count % kStages), k_stage = same_in_warp((count + 1) % kStages);
        mbarrier_wait(&s.k_full[k_stage], (count + 1) / kStages & 1);
        mbarrier_wait(&s.v_full[v_stage], count / kStages & 1);
        take_turn();
        start_scores(k_stage);
        start_values(v_stage);
        pass_turn();
        wgmma_wait<1>();
        hold_registers(score);
        release(&s.k_empty[k_stage]);
        if (j == extent.tiles - 1) mbarrier_arrive(&s.q_empty);
        softmax.step(score, scale, factor);
        // ptxas moves exponentials behind the wait, where nothing covers them, unless a branch needs their sum.
        if (softmax.sum[0] < 0.0f || softmax.sum[1] < 0.0f) __trap();
        wgmma_wait<0>();
        hold_registers(o);
        hold_registers(score);
        hold_registers(weights);
        release(&s.v_empty[v_stage]);
        rescale();
        pack_weights();
      }
      mbarrier_wait(&s.v_full[count % kStages], count / kStages & 1);
      start_values(same_in_warp(count % kStages));
      wgmma_wait<0>();
      hold_registers(o);
      release(&s.v_empty[count % kStages]);
      ++count;
    }

    // ---- the others: the diagonal, and the end of the keys ----
#pragma unroll 1
    for (int j = extent.plain; j < extent.tiles; ++j, ++count) {
      const int stage = same_in_warp(count % kStages), first = j * kKeys;
      const uint32_t parity = count / kStages & 1;
      mbarrier_wait(&s.k_full[stage], parity);
      take_turn();
      start_scores(stage);
      pass_turn();
      wgmma_wait<0>();
      hold_registers(score);
      release(&s.k_empty[stage]);
      if (j == extent.tiles - 1) mbarrier_arrive(&s.q_empty);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int bound = t.sees(row + 8 * half) - first - 2 * quad;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& x = score[4 * n + 2 * half + c];
            x = 8 * n + c < bound ? x : -INFINITY;
          }
      }
      softmax.step(score, scale, factor);
      rescale();
      pack_weights();
      mbarrier_wait(&s.v_full[stage], parity);
      bool by_row = false;
      const int v_at = kQuerySize + kStages * kKeySize + stage * kValueSize;
      {
        // What stands behind the keys of the tile's last row is not theirs: zeros instead. Both warpgroups write them,
        // so that neither waits for the other.
        const int limit = extent.most - first;
        uint32_t seen = 0;
#pragma unroll 4
        for (int n = 0; n < kValueSize / (16 * 128); ++n) {  // a thread takes 16 bytes of every 16th key
          auto& v = *reinterpret_cast<uint4*>(shared + v_at + 16 * (tid + 128 * n));
          if ((tid / 8 + 16 * n) % kKeys >= limit) v = uint4{0, 0, 0, 0};
          else seen = note_non_finite(note_non_finite(note_non_finite(note_non_finite(seen, v.x), v.y), v.z), v.w);
        }
        fence_async_shared();
        const bool found = named_barrier_or(kVote + group, 128, any_non_finite(seen));
        by_row = found && extent.least < extent.most;  // some rows see keys of this tile that others do not
      }
      if (!by_row) {
        start_values(stage);
        wgmma_wait<0>();
        hold_registers(o);
      } else {
        const uint32_t at = q_address + v_at + lane % 16 * 128 + ((lane / 16) ^ (lane % 8)) * 16;
        prefill::values_by_row(reinterpret_cast<float(&)[kDv / 8][4]>(o), weights, at, kBlockBytes, 128,
                               t.first_sees + group * kGroupRows + warp * 16 - first, t.num_keys - first);
      }
      release(&s.v_empty[stage]);
    }

    // ---- results ----
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = softmax.sum[half];
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      const int r = row + 8 * half;
      const bool empty = total == 0.0f, real = r < t.num_rows;  // no keys, or none with a weight: all scores are -inf
      const float inverse = empty ? 0.0f : __fdividef(1.0f, total);
      const int64_t out_row = t.q_row + r;
      if (p.lse != nullptr && quad == 0 && real)
        p.lse[out_row * p.lse_row_stride + t.head] =
            empty ? -INFINITY : (softmax.top[half] * scale + log2f(total)) * kLn2;
      const int64_t at = out_row * p.out_row_stride + t.head * p.out_head_stride;
      if (p.out_dtype == DType::kBf16) {
#pragma unroll
        for (int n = 0; n < kDv / 8; n += 4) {
          uint32_t word[4];
#pragma unroll
          for (int j = 0; j < 4; ++j)
            word[j] = round_to_bf16x2(o[4 * (n + j) + 2 * half] * inverse, o[4 * (n + j) + 2 * half + 1] * inverse);
          const uint4 piece = transpose_quad(word[0], word[1], word[2], word[3], quad);
          if (real) *reinterpret_cast<uint4*>(static_cast<uint16_t*>(p.out) + at + 8 * (n + quad)) = piece;
        }
      } else if (real) {
#pragma unroll
        for (int n = 0; n < kDv / 8; ++n)
          *reinterpret_cast<float2*>(static_cast<float*>(p.out) + at + 8 * n + 2 * quad) = {
              o[4 * n + 2 * half] * inverse, o[4 * n + 2 * half + 1] * inverse};
      }
    }
  }
  if (group == 0) named_barrier_sync(kTurn, kConsumerThreads);  // what the other arrived for last
}

__global__ void __launch_bounds__(kThreads, 1)
    prefill_kernel(const __grid_constant__ Problem p, const __grid_constant__ Maps maps, int* counter, int num_ids) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_stream();
  let_next_start();
  extern __shared__ __align__(kAlignment) unsigned char shared[];
  Shared& s = *reinterpret_cast<Shared*>(shared + kTileBytes);
  if (threadIdx.x == 0) {
    mbarrier_init(&s.q_full, 1);
    mbarrier_init(&s.q_empty, kConsumerThreads);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&s.k_full[i], 1);
      mbarrier_init(&s.v_full[i], 1);
      mbarrier_init(&s.k_empty[i], kConsumerWarps);
      mbarrier_init(&s.v_empty[i], kConsumerWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  if (threadIdx.x < kConsumerThreads) {
    register_increase<kConsumerRegisters>();
    consume(p, s, shared, same_in_warp(static_cast<int>(threadIdx.x) / 128));
  } else {
    register_decrease<kProducerRegisters>();
    if (threadIdx.x < kConsumerThreads + 32) produce(p, maps, s, shared_address(shared), counter, num_ids);
  }
#else
  __trap();  // the set refuses: see set.cpp
#endif
}

}  // namespace ragged
}  // namespace sm90
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
