// Absorbed MLA attention on Hopper: bf16 queries, bf16 rows, dense over pages or sparse over slot lists.
//
// Shapes. A tile is 64 lanes (rows x heads of one request; heads of one row when sparse) by 64 keys:
//   S = Q K^T   64 x 64 x 576     1,152 cycles of the tensor cores
//   O = O + P V 64 x 512 x 64     1,024 cycles
// for 73,728 bytes of cache. At 1.7 GHz and 132 SMs the tensor cores ask for 7.6 TB/s: with 64 lanes that are all real
// (128 heads: two blocks share the keys through the L2) they are the bound, with few lanes the memory is.
//
// Roles. O in fp32 is 64 x 512 x 4 = 128 KB, half of the register file, so two warpgroups hold 256 columns of it each
// (128 registers a thread). Tiles are taken in pairs: warpgroup 0 scores the even tile, warpgroup 1 the odd one, and
// each multiplies both P by its half of V, its own P from registers, the other's from shared memory. While one is in
// its softmax the other keeps the tensor cores busy. The running maximum goes 0 -> 1 -> 0 through shared memory; each
// warpgroup keeps the row sums of its own tiles. A third warpgroup loads: 16-byte cp.async into the swizzled layout
// that wgmma reads, rows through their own addresses, so that pages, strided pools and gathered lists cost the same and
// keys that nobody sees are zeros without being read.
//
// Shared memory: Q latent 64 KB (its rope part lives in registers), two K tiles 144 KB, P0 and P1 16 KB: 224 KB and
// some.
//
// Hazards, and why there are no more barriers than these. sP0 is rewritten for tile t + 2 after that tile has arrived
// in its stage, which needs warpgroup 1 to have released the stage, which it does after the product that reads sP0. The
// same holds for sP1 and warpgroup 0. row maxima and scales are read before the release too.
//
// Schedule. The work of a call is laid out on a line: each group (request or row) takes kFixedTiles + its tiles; the
// line is cut into as many equal parts as there are blocks a lane block. A group that a cut goes through leaves partial
// results (fp32, at most two a part), which combine_kernel merges in order. All of it is computed on the device from
// the lengths.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/absorbed_problem.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/wgmma.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace sm90 {

using namespace absorbed;

constexpr int kLanes = 64, kKeys = 64, kStages = 2;
constexpr int kConsumerThreads = 256, kProducerThreads = 128, kThreads = kConsumerThreads + kProducerThreads;
constexpr int kBlockBytes = 64 * 128;                    // 64 rows of 64 bf16
constexpr int kQueryBytes = kLatent / 64 * kBlockBytes;  // 65,536
constexpr int kStageBytes = kWidth / 64 * kBlockBytes;   // 73,728
constexpr int kWeightBytes = kBlockBytes;                // 8,192
constexpr int kAlignment = 1024;                         // of a swizzled block
constexpr int kTileBytes = kQueryBytes + kStages * kStageBytes + 2 * kWeightBytes;
constexpr int kHalf = kLatent / 2;                                // columns of O a warpgroup has
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // 128 * 40 + 256 * 232 = 64,512 of 65,536
constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;

// The price of a group beside its tiles: loading Q, the first tile's latency, the results. In tiles.
constexpr int kFixedTiles = 4;
constexpr int kMinPartTiles = 2;  // a part below this costs more to merge than it saves

struct Schedule {
  int* cut_group;  // [num_parts], for combine_kernel: the group that begins in a part and goes on behind it, or -1
  int* cut_parts;  // [num_parts]: over how many parts it goes
  int num_parts;   // of each lane block
  int lane_blocks;
  int num_groups;
};

struct Shared {
  uint64_t full[kStages], empty[kStages];
  float max0[kLanes], max1[kLanes], scale0[kLanes], scale1[kLanes], sum0[kLanes], sum1[kLanes];
  int bounds[kLanes];
  alignas(16) uint8_t state[kStages][kKeys];  // of each key of a stage
  int first_group, first_start, payload, total;
  int partial_sum[kThreads / 32];
};

/// A key of a tile: not there; there; there, with values that were not finite (only where some lanes do not see it).
constexpr uint8_t kAbsent = 0, kPresent = 1, kMarked = 3;

// Everything is dynamic shared memory, so that the tiles begin where it begins, at a multiple of kAlignment. 226.4 KB
// of 227.
constexpr int kSharedBytes = kTileBytes + static_cast<int>(sizeof(Shared));
static_assert(kSharedBytes <= 227 * 1024);

// Lengths are int32, so tiles, and the line of a call that fits a GPU's memory, are 32-bit numbers.
template <class Problem>
__device__ int group_tiles(const Problem& p, int group) {
  typename Problem::Place g;
  if (!p.place(g, group)) return 0;
  const int n = static_cast<int>(p.keys_of(g, g.num_rows - 1));
  return n <= 0 ? 1 : (n + kKeys - 1) / kKeys;  // a group without keys takes a tile in which nothing is seen
}

/// Where this part begins. Each thread sums a run of groups; a scan over threads gives each run's start.
template <class Problem>
__device__ void find_part(const Problem& p, const Schedule& schedule, int part, Shared& s) {
  const int tid = threadIdx.x;
  const int per_thread = (schedule.num_groups + kThreads - 1) / kThreads;
  const int begin = min(tid * per_thread, schedule.num_groups), end = min(begin + per_thread, schedule.num_groups);
  int own = 0;
  for (int g = begin; g < end; ++g) own += group_tiles(p, g) + kFixedTiles;
  int inclusive = own;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (tid % 32 >= offset) inclusive += other;
  }
  if (tid % 32 == 31) s.partial_sum[tid / 32] = inclusive;
  __syncthreads();
  int before = 0, total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < tid / 32) before += s.partial_sum[w];
    total += s.partial_sum[w];
  }
  int start = before + inclusive - own;
  const int payload = max((total + schedule.num_parts - 1) / schedule.num_parts, kMinPartTiles);
  const int target = part * payload;
  if (tid == 0) {
    s.payload = payload;
    s.total = total;
  }
  for (int g = begin; g < end; ++g) {
    const int cost = group_tiles(p, g) + kFixedTiles;
    if (target >= start && target < start + cost) {
      s.first_group = g;
      s.first_start = start;
    }
    start += cost;
  }
  __syncthreads();
}

/// The pieces of work of a part, in order; producer and consumers walk them alike. Few numbers: registers are dear.
struct Walk {
  int group, start;  // the next group and its place on the line
  int first_tile, last_tile, tiles;

  __device__ explicit Walk(const Shared& s) : group(s.first_group), start(s.first_start) {}
  /// Advances to the next piece with tiles, of group `group - 1`; false at the end.
  template <class Problem>
  __device__ bool next(const Problem& p, const Schedule& schedule, const Shared& s, int part) {
    const int part_begin = part * s.payload, part_end = min(part_begin + s.payload, s.total);
    while (group < schedule.num_groups && start < part_end) {
      tiles = group_tiles(p, group);
      const int origin = start + kFixedTiles;  // the place of tile 0 on the line
      first_tile = max(0, part_begin - origin);
      last_tile = min(tiles, part_end - origin);
      start += tiles + kFixedTiles;
      ++group;
      if (first_tile < last_tile) return true;
    }
    return false;
  }
};

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- producer ---------------------------------------------------------------------------------------------------

template <class Problem>
__device__ void produce(const Problem& p, const Schedule& schedule, Shared& s, unsigned char* stages, int part,
                        int lane0) {
  const int tid = threadIdx.x - kConsumerThreads;
  constexpr int kRowsAtOnce = kProducerThreads / 8,
                kRowsEach = kKeys / kRowsAtOnce;  // eight threads copy 128 bytes of a row
  const int piece = tid % 8, row0 = tid / 8;
  const uint32_t target0 =
      shared_address(stages) + row0 * 128 + ((piece ^ (row0 % 8)) * 16);  // rows are 16 apart: same piece
  int count = 0;                                                          // tiles issued
  Walk walk(s);
  while (walk.next(p, schedule, s, part)) {
    typename Problem::Place g;
    p.place(g, walk.group - 1);
    const int lanes_end = static_cast<int>(min(int64_t{lane0 + kLanes}, g.num_rows * p.num_heads));
    const int most = lanes_end > lane0 ? static_cast<int>(p.keys_of(g, (lanes_end - 1) / p.num_heads)) : 0;
    const int least = lanes_end > lane0 ? static_cast<int>(p.keys_of(g, lane0 / p.num_heads)) : 0;
    for (int tile = walk.first_tile; tile < walk.last_tile; ++tile, ++count) {
      const int stage = count % kStages;
      // Addresses first: the page table's latency passes while the stage is still in use.
      const unsigned char* rows[kRowsEach];
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        const int key = tile * kKeys + row0 + i * kRowsAtOnce;
        rows[i] = key < most ? p.bf16_row(g, key) : nullptr;
      }
      const uint32_t parity = (count / kStages & 1) ^ 1;
      mbarrier_wait(&s.empty[stage], parity);
      if ((tile + 1) * kKeys <= least || least == most) {
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) {
          const bool ok = rows[i] != nullptr;
          const unsigned char* source =
              ok ? rows[i] : static_cast<const unsigned char*>(p.cache.data);  // not read if not ok
          const uint32_t target = target0 + stage * kStageBytes + i * (kRowsAtOnce * 128);
#pragma unroll
          for (int b = 0; b < kWidth / 64; ++b)
            copy_async_16(target + b * kBlockBytes, source + b * 128 + piece * 16, ok);
          if (piece == 0) s.state[stage][row0 + i * kRowsAtOnce] = ok ? kPresent : kAbsent;
        }
      } else {  // some lanes see keys of this tile that others do not
#pragma unroll 1
        for (int i = 0; i < kRowsEach; ++i) {
          const int row = row0 + i * kRowsAtOnce, key = tile * kKeys + row;
          const unsigned char* source = key < most ? p.bf16_row(g, key) : nullptr;
          bool marked = false;
#pragma unroll 1
          for (int b = 0; b < kWidth / 64; ++b) {
            uint4 v =
                source != nullptr ? *reinterpret_cast<const uint4*>(source + b * 128 + piece * 16) : uint4{0, 0, 0, 0};
            if (key >= least && source != nullptr) marked |= drop_non_finite(v);
            *reinterpret_cast<uint4*>(stages + stage * kStageBytes + b * kBlockBytes + row * 128 +
                                      ((piece ^ (row % 8)) * 16)) = v;
          }
          marked = __any_sync(0xffu << (threadIdx.x % 32 / 8 * 8), marked);
          if (piece == 0) s.state[stage][row] = source == nullptr ? kAbsent : marked ? kMarked : kPresent;
        }
      }
      // Two arrivals a thread: now, for what it stored itself, and when its copies have landed. The consumers' fence
      // makes both visible to the tensor cores: here it would wait for the copies that are under way.
      mbarrier_arrive(&s.full[stage]);
      copy_async_arrive(&s.full[stage]);
    }
  }
}

// ---- consumers --------------------------------------------------------------------------------------------------

template <int kWarpgroup, class Problem>
__device__ void consume(const Problem& p, const Schedule& schedule, Shared& s, unsigned char* query,
                        unsigned char* stages, unsigned char* weights, int part, int lane_block) {
  constexpr int kColumn0 = kWarpgroup * kHalf;
  const int tid = threadIdx.x % 128, warp = tid / 32, lane = tid % 32, quad = lane % 4;
  const int row = warp * 16 + lane / 4;  // and row + 8
  const int lane0 = lane_block * kLanes;
  const float scale_log2 = p.softmax_scale * kLog2E;
  const uint32_t query_address = shared_address(query), stage_address = shared_address(stages);
  const uint32_t weight_address[2] = {shared_address(weights), shared_address(weights + kWeightBytes)};
  int count = 0;  // tiles consumed
  int cut = -1, cut_parts = 0;
  Walk walk(s);
  while (walk.next(p, schedule, s, part)) {
    typename Problem::Place g;
    p.place(g, walk.group - 1);
    const int lanes = max(0, min(kLanes, static_cast<int>(g.num_rows) * p.num_heads - lane0));

    // Q: the latent part to shared memory by both warpgroups, the rope part to registers of each.
    named_barrier_sync(1, kConsumerThreads);  // nobody still reads the last group's
    {
      // A thread copies 16-byte piece `piece` of every fourth lane; all loads are under way before the first is stored.
      constexpr int kPieces = kLatent / 8, kLanesAtOnce = kConsumerThreads / kPieces, kLoads = kLanes / kLanesAtOnce;
      const int piece = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
      uint4 v[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int l = first + i * kLanesAtOnce;
        const int64_t at =
            (g.first_row + (lane0 + l) / p.num_heads) * p.q_row_stride + (lane0 + l) % p.num_heads * p.q_head_stride;
        v[i] = l < lanes ? *reinterpret_cast<const uint4*>(p.q + at + 8 * piece) : uint4{0, 0, 0, 0};
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int l = first + i * kLanesAtOnce;
        *reinterpret_cast<uint4*>(query + piece / 8 * kBlockBytes + l * 128 + ((piece % 8) ^ (l % 8)) * 16) = v[i];
      }
    }
    if (threadIdx.x < kLanes)
      s.bounds[threadIdx.x] =
          static_cast<int>(threadIdx.x) < lanes
              ? static_cast<int>(p.keys_of(g, (lane0 + static_cast<int>(threadIdx.x)) / p.num_heads))
              : 0;
    uint32_t rope[kRope / 16][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int l = lane0 + row + 8 * half;
      const uint16_t* q =
          p.q + (g.first_row + l / p.num_heads) * p.q_row_stride + l % p.num_heads * p.q_head_stride + kLatent;
#pragma unroll
      for (int k = 0; k < kRope / 16; ++k) {
        const bool ok = row + 8 * half < lanes;
        rope[k][half] = ok ? *reinterpret_cast<const uint32_t*>(q + 16 * k + 2 * quad) : 0;
        rope[k][half + 2] = ok ? *reinterpret_cast<const uint32_t*>(q + 16 * k + 8 + 2 * quad) : 0;
      }
    }
    fence_async_shared();
    named_barrier_sync(1, kConsumerThreads);
    const int least = s.bounds[0];

    float o[kHalf / 2];
#pragma unroll
    for (float& x : o) x = 0.0f;
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};

    const int tiles = walk.last_tile - walk.first_tile;
    for (int pair = 0; pair < tiles; pair += 2, count += 2) {
      const bool has_odd = pair + 1 < tiles;
      const int even_stage = count % kStages, odd_stage = (count + 1) % kStages;
      const uint32_t even_parity = count / kStages & 1, odd_parity = (count + 1) / kStages & 1;
      const int own_stage = kWarpgroup == 0 ? even_stage : odd_stage;
      const int own_tile = walk.first_tile + pair + kWarpgroup;
      uint32_t own[kKeys / 16][4];  // P of the own tile as A operand
      float score[kKeys / 2];
      const bool scores_own = kWarpgroup == 0 || has_odd;

      if (scores_own) {  // S
        mbarrier_wait(&s.full[own_stage], kWarpgroup == 0 ? even_parity : odd_parity);
        fence_async_shared();
        const uint32_t keys = stage_address + own_stage * kStageBytes;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kLatent / 16; ++k) {
          const uint32_t offset = k / 4 * kBlockBytes + k % 4 * 32;
          wgmma_m64n64_ss(score, k_major(query_address + offset), k_major(keys + offset), k != 0);
        }
#pragma unroll
        for (int k = 0; k < kRope / 16; ++k)
          wgmma_m64n64_rs(score, rope[k], k_major(keys + kLatent / 64 * kBlockBytes + k * 32), true);
        wgmma_commit();
        wgmma_wait<0>();
      }

      float before[2] = {top[0], top[1]}, scale0[2];
      if constexpr (kWarpgroup == 1) {
        named_barrier_sync(2, kConsumerThreads);  // the even tile's maxima and weights
        before[0] = s.max0[row], before[1] = s.max0[row + 8];
        scale0[0] = s.scale0[row], scale0[1] = s.scale0[row + 8];
        mbarrier_wait(&s.full[even_stage], even_parity);
        fence_async_shared();
      }

      float factor[2] = {1.0f, 1.0f};
      if (scores_own) {  // softmax of the own tile
        // Most tiles are seen whole by every lane, and need no masks.
        const uint4 states = *reinterpret_cast<const uint4*>(&s.state[own_stage][quad * 16]);
        constexpr uint32_t kAllPresent = 0x01010101u * kPresent;
        const bool plain =
            __all_sync(0xffffffffu, (own_tile + 1) * kKeys <= least && states.x == kAllPresent &&
                                        states.y == kAllPresent && states.z == kAllPresent && states.w == kAllPresent);
        if (!plain) {
          const int bound0 = s.bounds[row] - own_tile * kKeys, bound1 = s.bounds[row + 8] - own_tile * kKeys;
#pragma unroll
          for (int j = 0; j < kKeys / 8; ++j) {
            const uint32_t two = *reinterpret_cast<const uint16_t*>(&s.state[own_stage][8 * j + 2 * quad]);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const uint32_t state = two >> (8 * i) & 0xffu;
              const int k = 8 * j + 2 * quad + i;
              const float add = state == kMarked ? NAN : 0.0f;
              score[4 * j + i] = state == kAbsent || k >= bound0 ? -INFINITY : score[4 * j + i] + add;
              score[4 * j + 2 + i] = state == kAbsent || k >= bound1 ? -INFINITY : score[4 * j + 2 + i] + add;
            }
          }
        }
        float m[2] = {-INFINITY, -INFINITY};
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            m[half] = fmaxf(m[half], fmaxf(score[4 * j + 2 * half], score[4 * j + 2 * half + 1]));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          m[half] = fmaxf(m[half], __shfl_xor_sync(0xffffffffu, m[half], 1));
          m[half] = fmaxf(m[half], __shfl_xor_sync(0xffffffffu, m[half], 2));
          top[half] = fmaxf(before[half], m[half] * scale_log2);
          factor[half] = before[half] == top[half] ? 1.0f : exp2_fast(before[half] - top[half]);
        }
        // Where nothing has been seen yet the maximum is -inf; subtracting 0 instead keeps -inf - x = -inf, a weight of
        // 0.
        const float shift[2] = {top[0] == -INFINITY ? 0.0f : top[0], top[1] == -INFINITY ? 0.0f : top[1]};
        float own_sum[2] = {0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float w0 = exp2_fast(fmaf(score[4 * j + 2 * half], scale_log2, -shift[half]));
            const float w1 = exp2_fast(fmaf(score[4 * j + 2 * half + 1], scale_log2, -shift[half]));
            uint32_t packed;
            asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(w1), "f"(w0));
            own_sum[half] += __uint_as_float(packed << 16) + __uint_as_float(packed & 0xffff0000u);
            own[j / 2][half + 2 * (j % 2)] = packed;
          }
          // P to shared memory for the other warpgroup: row r, 16-byte piece j, this thread's four bytes of it.
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int r = row + 8 * half;
            *reinterpret_cast<uint32_t*>(weights + kWarpgroup * kWeightBytes + r * 128 + (j ^ (r % 8)) * 16 +
                                         quad * 4) = own[j / 2][half + 2 * (j % 2)];
          }
        if constexpr (kWarpgroup == 0) {
          if (quad == 0) {
            s.max0[row] = top[0], s.max0[row + 8] = top[1];
            s.scale0[row] = factor[0], s.scale0[row + 8] = factor[1];
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) sum[half] = sum[half] * factor[half] + own_sum[half];
        } else {
          if (quad == 0) {
            s.max1[row] = top[0], s.max1[row + 8] = top[1];
            s.scale1[row] = factor[0], s.scale1[row + 8] = factor[1];
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) sum[half] = sum[half] * scale0[half] * factor[half] + own_sum[half];
        }
        fence_async_shared();
      } else {
        top[0] = before[0], top[1] = before[1];
#pragma unroll
        for (int half = 0; half < 2; ++half) sum[half] *= scale0[half];
      }
      auto rescale = [&](float low, float high) {
        if (!__any_sync(0xffffffffu, low != 1.0f || high != 1.0f)) return;
#pragma unroll
        for (int i = 0; i < kHalf / 2; i += 4) {
          o[i] *= low;
          o[i + 1] *= low;
          o[i + 2] *= high;
          o[i + 3] *= high;
        }
      };
      const uint32_t even_values = stage_address + even_stage * kStageBytes + kColumn0 / 64 * kBlockBytes;
      const uint32_t odd_values = stage_address + odd_stage * kStageBytes + kColumn0 / 64 * kBlockBytes;
      if constexpr (kWarpgroup == 0) {
        named_barrier_arrive(2, kConsumerThreads);
        rescale(factor[0], factor[1]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k)
          wgmma_m64n256_rs_mn(o, own[k], mn_major(even_values + k * 2048, kBlockBytes), true);
        wgmma_commit();
        wgmma_wait<0>();
        if (lane == 0) mbarrier_arrive(&s.empty[even_stage]);
        if (has_odd) {
          mbarrier_wait(&s.full[odd_stage], odd_parity);
          fence_async_shared();
          named_barrier_sync(3, kConsumerThreads);  // the odd tile's
          const float scale1[2] = {s.scale1[row], s.scale1[row + 8]};
          top[0] = s.max1[row], top[1] = s.max1[row + 8];
          sum[0] *= scale1[0], sum[1] *= scale1[1];
          rescale(scale1[0], scale1[1]);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < kKeys / 16; ++k)
            wgmma_m64n256_ss_mn(o, k_major(weight_address[1] + k * 32), mn_major(odd_values + k * 2048, kBlockBytes),
                                true);
          wgmma_commit();
          wgmma_wait<0>();
          if (lane == 0) mbarrier_arrive(&s.empty[odd_stage]);
        }
      } else {
        if (has_odd) named_barrier_arrive(3, kConsumerThreads);
        rescale(scale0[0], scale0[1]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kKeys / 16; ++k)
          wgmma_m64n256_ss_mn(o, k_major(weight_address[0] + k * 32), mn_major(even_values + k * 2048, kBlockBytes),
                              true);
        wgmma_commit();
        wgmma_wait<0>();
        if (lane == 0) mbarrier_arrive(&s.empty[even_stage]);
        if (has_odd) {
          rescale(factor[0], factor[1]);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < kKeys / 16; ++k)
            wgmma_m64n256_rs_mn(o, own[k], mn_major(odd_values + k * 2048, kBlockBytes), true);
          wgmma_commit();
          wgmma_wait<0>();
          if (lane == 0) mbarrier_arrive(&s.empty[odd_stage]);
        }
      }
      if (!has_odd) count -= 1;  // a piece may have an odd number of tiles; stages go on from there
    }

    // ---- results ----
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
      if (quad == 0) (kWarpgroup == 0 ? s.sum0 : s.sum1)[row + 8 * half] = sum[half];
    }
    named_barrier_sync(1, kConsumerThreads);
    p.place(g, walk.group - 1);  // again, rather than kept through the loop
    const bool complete = walk.first_tile == 0 && walk.last_tile == walk.tiles;
    auto store = [&](auto half_constant) {
      constexpr int kRowHalf = decltype(half_constant)::value;
      const int l = row + 8 * kRowHalf;
      if (l >= lanes) return;
      const float total = s.sum0[l] + s.sum1[l];
      const bool empty = total == 0.0f;
      const float inverse = empty ? 0.0f : 1.0f / total,
                  lse = empty ? -INFINITY : (top[kRowHalf] + log2f(total)) * kLn2;
      const int64_t out_row = g.first_row + (lane0 + l) / p.num_heads;
      const int head = (lane0 + l) % p.num_heads;
      const int64_t at = out_row * p.out_row_stride + head * p.out_head_stride + kColumn0 + 2 * quad;
      const int64_t index =
          ((2 * int64_t{part} + (walk.first_tile == 0)) * schedule.lane_blocks + lane_block) * kLanes + l;
      float* partial = p.partial + index * kLatent + kColumn0 + 2 * quad;
      const bool narrow = complete && p.out_dtype == DType::kBf16;
      float* wide = complete ? static_cast<float*>(p.out) + at : partial;
#pragma unroll
      for (int j = 0; j < kHalf / 8; ++j) {
        const float x0 = o[4 * j + 2 * kRowHalf] * inverse, x1 = o[4 * j + 2 * kRowHalf + 1] * inverse;
        if (narrow) *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + at + 8 * j) = pack_bf16(x0, x1);
        else *reinterpret_cast<float2*>(wide + 8 * j) = {x0, x1};
      }
      if (kWarpgroup == 0 && quad == 0) {
        if (!complete) p.partial_lse[index] = lse;
        else if (p.lse != nullptr) p.lse[out_row * p.lse_row_stride + head] = lse;
      }
    };
    store(std::integral_constant<int, 0>{});
    store(std::integral_constant<int, 1>{});
    if (walk.first_tile == 0 && walk.last_tile < walk.tiles) {
      cut = walk.group - 1;
      cut_parts = 1 + (walk.tiles - walk.last_tile + s.payload - 1) / s.payload;
    }
  }
  if (kWarpgroup == 0 && tid == 0 && lane_block == 0) {
    schedule.cut_group[part] = cut;
    schedule.cut_parts[part] = cut_parts;
  }
}

// Grid: lane blocks x parts, lane blocks fastest, so that blocks that share keys run side by side.
template <class Problem>
__global__ void __launch_bounds__(kThreads, 1)
    absorbed_kernel(const __grid_constant__ Problem p, const Schedule schedule) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_stream();
  extern __shared__ __align__(kAlignment) unsigned char shared[];
  unsigned char* query = shared;
  unsigned char* stages = query + kQueryBytes;
  unsigned char* weights = stages + kStages * kStageBytes;
  Shared& s = *reinterpret_cast<Shared*>(shared + kTileBytes);
  const int lane_block = blockIdx.x % schedule.lane_blocks, part = blockIdx.x / schedule.lane_blocks;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&s.full[i], 2 * kProducerThreads);
      mbarrier_init(&s.empty[i], kConsumerThreads / 32);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    s.first_group = schedule.num_groups;
    s.first_start = 0;
  }
  __syncthreads();
  find_part(p, schedule, part, s);
  let_next_start();
  if (threadIdx.x < 128) {
    register_increase<kConsumerRegisters>();
    consume<0>(p, schedule, s, query, stages, weights, part, lane_block);
  } else if (threadIdx.x < 256) {
    register_increase<kConsumerRegisters>();
    consume<1>(p, schedule, s, query, stages, weights, part, lane_block);
  } else {
    register_decrease<kProducerRegisters>();
    produce(p, schedule, s, stages, part, lane_block * kLanes);
  }
#endif
}

constexpr int kMaxParts = 256;
constexpr int kCombineLanes = 4, kWarpsPerLane = 4, kCombineThreads = 32 * kCombineLanes * kWarpsPerLane;

/// Merges the parts of the groups that were cut. Grid: parts x lane blocks x (kLanes / kCombineLanes); a block serves
/// kCombineLanes lanes of the group that begins in its part and goes on behind it, if there is one: kWarpsPerLane warps
/// take every fourth part each, and their sums are added in order.
template <class Problem>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ Problem p, const Schedule schedule) {
  wait_for_stream();
  let_next_start();
  constexpr int kPieces = kLatent / 128;  // a warp reads 128 columns at once
  static_assert(kPieces == kWarpsPerLane, "a warp finishes 128 columns");
  __shared__ float weight[kCombineLanes][kMaxParts];
  __shared__ float4 sums[kCombineLanes][kWarpsPerLane][kPieces][32];
  constexpr int kBlocksPerPart = kLanes / kCombineLanes;
  const int first = blockIdx.x / (kBlocksPerPart * schedule.lane_blocks);
  const int group = schedule.cut_group[first];
  if (group < 0) return;
  const int parts = schedule.cut_parts[first];
  typename Problem::Place g;
  p.place(g, group);
  const int warp = threadIdx.x / 32, in_warp = threadIdx.x % 32, slot = warp / kWarpsPerLane,
            quarter = warp % kWarpsPerLane;
  const int lane = static_cast<int>(blockIdx.x) % (kBlocksPerPart * schedule.lane_blocks) * kCombineLanes + slot;
  const bool real = lane < static_cast<int>(g.num_rows) * p.num_heads;
  auto index_of = [&](int i) {
    return ((int64_t{2} * (first + i) + (i == 0)) * schedule.lane_blocks + lane / kLanes) * kLanes + lane % kLanes;
  };
  float top = -INFINITY;  // every warp of a lane finds it for itself
  if (real) {
    for (int i = in_warp; i < parts; i += 32) {
      const float l = p.partial_lse[index_of(i)];
      if (quarter == 0) weight[slot][i] = l;
      top = l > top || isnan(l) ? l : top;
    }
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, top, offset);
    top = other > top || isnan(other) ? other : top;
  }
  __syncthreads();
  float sum = 0.0f;
  float4 o[kPieces] = {};
  if (real) {
    for (int i = 0; i < parts; ++i) {
      const float l = weight[slot][i];
      sum += l == -INFINITY ? 0.0f : __expf(l - top);
    }
#pragma unroll 2
    for (int i = quarter; i < parts; i += kWarpsPerLane) {
      const float l = weight[slot][i];
      if (l == -INFINITY) continue;  // an empty piece is not read
      const float w = __expf(l - top);
      const float4* row = reinterpret_cast<const float4*>(p.partial + index_of(i) * kLatent) + in_warp;
#pragma unroll
      for (int c = 0; c < kPieces; ++c) {
        const float4 x = row[32 * c];
        o[c].x = fmaf(w, x.x, o[c].x), o[c].y = fmaf(w, x.y, o[c].y), o[c].z = fmaf(w, x.z, o[c].z),
        o[c].w = fmaf(w, x.w, o[c].w);
      }
    }
  }
#pragma unroll
  for (int c = 0; c < kPieces; ++c) sums[slot][quarter][c][in_warp] = o[c];
  __syncthreads();
  if (!real) return;
  float4 total = sums[slot][0][quarter][in_warp];
  for (int w = 1; w < kWarpsPerLane; ++w) {
    const float4 x = sums[slot][w][quarter][in_warp];
    total.x += x.x, total.y += x.y, total.z += x.z, total.w += x.w;
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  total.x *= inverse, total.y *= inverse, total.z *= inverse, total.w *= inverse;
  const int64_t row = g.first_row + lane / p.num_heads;
  const int head = lane % p.num_heads;
  const int64_t at = row * p.out_row_stride + head * p.out_head_stride + 128 * quarter + 4 * in_warp;
  if (p.out_dtype == DType::kBf16)
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) = {pack_bf16(total.x, total.y),
                                                                     pack_bf16(total.z, total.w)};
  else *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = total;
  if (p.lse != nullptr && quarter == 0 && in_warp == 0)
    p.lse[row * p.lse_row_stride + head] = sum == 0.0f ? -INFINITY : top + logf(sum);
}

}  // namespace sm90
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
