// Absorbed MLA attention on Hopper: bf16 queries, 656-byte rows (512 e4m3 | 4 fp32 scales | 64 bf16 of RoPE), dense
// over pages of any size, up to 32 lanes (rows x heads of a request).
//
// Shapes. A tile is 64 keys, 41,984 bytes; at 4.2 TB/s, 132 SMs and 1.7 GHz the memory takes 2,240 cycles for it. With
// 16 lanes S is 288 cycles of the f16 tensor cores, P V 256; conversions are what could be slower.
//
// Conversion. e4m3 is exact in f16, so K and V are converted unscaled, two values an instruction, in the registers of
// the A operand (K and V^T are A, lanes are N as in absorbed_fp8.cuh): 512 conversions of a warp for the scores and
// 512 with 256 byte permutations for the values, 640 cycles of four schedulers at half rate. Nothing converted is
// written to shared memory. Scales go elsewhere, so that any positive fp32 scale is right:
//   scores  sums of the four blocks of 128 columns are kept apart, and added with their key's scale in fp32. Queries
//           are f16 too, each (lane, block) times a power of two that brings its largest value to 2^14;
//   values  a scale is part of the weight: block b of V has weights exp2(score + log2 scale_b - top_b), where top_b is
//           the running maximum of just that exponent. So weights are at most 2^12 for every scale, and a block is
//           multiplied by exp2(top_b - top) at the end, in two halves, which neither overflow nor underflow where the
//           result does not. It costs four exponentials a score, 256 cycles of a tile at 16 lanes.
//
// Roles. Two groups of four warps take tiles in turn, each with sums of its own over all 512 columns (64 registers a
// thread at 16 lanes), merged at the end of a piece: they wait for each other nowhere else, and one's softmax passes
// under the other's products. Warp w of a group scores 16 keys (wgmma, M of 64 keys; Q from shared memory once for
// four warps), then multiplies 128 columns, a block of scales (mma.sync: weights stay in registers). Scores cross
// through shared memory in fp32, double-buffered, one barrier a tile. Denominators are sums of unrounded weights over
// a maximum of each thread's own. A twelfth of the threads loads, a page at a time with bulk copies, or row by row.
//
// Shared memory: four tiles 164 KB (three with 32 lanes), Q 18 KB (36), scores 25 KB (45). Rows of 656 bytes are 41
// times 16 bytes: eight rows' pieces lie in different banks without a swizzle. A tile is written (41 KB) and read twice
// (32 + 40), Q read once (18), scores written and read by four warps (21): 152 KB, 1,190 cycles.
//
// Keys that lanes must not see: as in absorbed_fp8.cuh; rows that were not loaded are overwritten by zeros.
#pragma once

#include "cuda/common/wgmma_half.cuh"
#include "cuda/sm90/absorbed_fp8.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace sm90 {
namespace packed {

using fp8::drop_nan_bytes;

constexpr int kRowBytes = 656, kTileBytesPacked = kKeys * kRowBytes;  // 41,984
constexpr int kScaleAt = kLatent, kRopeAt = kLatent + 16;             // in a row
constexpr int kScaleBlocks = 4, kScaleColumns = kLatent / kScaleBlocks;
constexpr int kGroups = 2, kGroupThreads = 128, kWarpsEach = 4;
constexpr int kMaxStages = 4;
constexpr float kWeightExponent = 12.0f;  // weights are at most 2^12; those down to 2^-14 keep f16's 11 bits
// Scores of a lane: keys 8 o + 2 t + i at 20 t + 8 i + o, so that a thread's 16 are 64 bytes and eight threads' pieces
// lie in different banks. The four rows behind the lanes' hold the logarithms of the scales.
constexpr int kQuarterFloats = 20, kScoreRow = 4 * kQuarterFloats;
constexpr int kLoaderRegisters = 24, kOthersRegisters = 240;

struct SharedPacked : Shared {
  uint64_t loaded[kMaxStages], free[kMaxStages];
  int whole[kMaxStages];  // whether every key of a tile is there
  float factor[kScaleBlocks][32];
  float tops[kGroups][kWarpsEach][32];  // of a group's block of columns, by row of scores
  float maxima[kGroups][kWarpsEach][32], sums[kGroups][kWarpsEach][32];
  float level[32], inverse[32];
  int64_t out_at[32];  // where a lane's result begins, in elements; -1: no such lane
  alignas(16) uint8_t states[kMaxStages][kKeys];
};

template <int kColumns>
struct Config {
  static constexpr int kStages = kColumns == 16 ? 4 : 3;
  static constexpr int kQueryBlock = kColumns * 128;  // 64 columns
  static constexpr int kQueryBytes = kWidth / 64 * kQueryBlock;
  static constexpr int kScoreFloats = (kColumns + kScaleBlocks) * kScoreRow;
  static constexpr int kScoreBytes = 2 * kGroups * kScoreFloats * 4;
  static constexpr int kOperandBytes = kStages * kTileBytesPacked + kQueryBytes + kScoreBytes;
  static constexpr int kSharedBytes = kOperandBytes + static_cast<int>(sizeof(SharedPacked));
  static_assert(kSharedBytes <= 227 * 1024 && kOperandBytes % 16 == 0);
};

/// The row of scores of a lane, and back: a permutation of eight that spreads the writers' banks.
__device__ inline int row_of(int lane) { return (lane & ~7) | (lane & 1) << 2 | (lane >> 1 & 3); }
__device__ inline int lane_of(int row) { return (row & ~7) | (row & 3) << 1 | (row >> 2 & 1); }

__device__ inline float power_of_two(int exponent_field) {
  return __uint_as_float(static_cast<uint32_t>(exponent_field) << 23);
}

// ---- loader -----------------------------------------------------------------------------------------------------

/// By one warp.
template <int kStages>
__device__ void produce(const Dense& p, const Schedule& schedule, SharedPacked& s, uint32_t stages, int part,
                        int lane0) {
  const int lane = threadIdx.x % 32;
  const auto page_size = static_cast<uint32_t>(p.cache.page_size);
  const bool by_tile = page_size % kKeys == 0;  // a tile lies in one page
  const uint64_t policy = evict_first_policy();
  int count = 0;
  Walk walk(s);
  while (walk.next(p, schedule, s, part)) {
    Dense::Place g;
    p.place(g, walk.group - 1);
    const int lanes_end = static_cast<int>(min(int64_t{lane0 + kLanes}, g.num_rows * p.num_heads));
    const int most = lanes_end > lane0 ? static_cast<int>(p.keys_of(g, (lanes_end - 1) / p.num_heads)) : 0;
    auto row_at = [&](int key) -> const unsigned char* {
      if (key >= most) return nullptr;
      const int64_t page = g.list.ids[static_cast<uint32_t>(key) / page_size];
      if (page < 0 || page >= p.cache.num_pages) return nullptr;
      return static_cast<const unsigned char*>(p.cache.data) + page * p.cache.page_stride_bytes +
             static_cast<uint32_t>(key) % page_size * kRowBytes;
    };
    for (int tile = walk.first_tile; tile < walk.last_tile; ++tile, ++count) {
      const int stage = count % kStages, key0 = tile * kKeys, key = 2 * lane;  // a lane has two keys of the tile
      const uint32_t target = stages + stage * kTileBytesPacked;
      // The page table's latency passes while the stage is still in use.
      const unsigned char* const first = row_at(by_tile ? key0 : key0 + key);
      const unsigned char* const second = by_tile ? first : row_at(key0 + key + 1);
      const bool there0 = first != nullptr && key0 + key < most, there1 = second != nullptr && key0 + key + 1 < most;
      const bool whole = __all_sync(0xffffffffu, there0 && there1);
      mbarrier_wait(&s.free[stage], (count / kStages & 1) ^ 1);
      *reinterpret_cast<uint16_t*>(&s.states[stage][key]) = static_cast<uint16_t>(
          static_cast<uint32_t>(there0 ? kPresent : kAbsent) | static_cast<uint32_t>(there1 ? kPresent : kAbsent) << 8);
      if (lane == 0) s.whole[stage] = whole;
      const uint32_t bytes = by_tile ? (lane == 0 && first != nullptr ? kTileBytesPacked : 0)
                                     : (there0 ? kRowBytes : 0) + (there1 ? kRowBytes : 0);
      if (bytes == 0) {
        mbarrier_arrive(&s.loaded[stage]);
      } else {
        mbarrier_arrive_expecting(&s.loaded[stage], bytes);
        if (by_tile) {
          copy_bytes(target, first, kTileBytesPacked, &s.loaded[stage], policy);
        } else {
          if (there0) copy_bytes(target + key * kRowBytes, first, kRowBytes, &s.loaded[stage], policy);
          if (there1) copy_bytes(target + (key + 1) * kRowBytes, second, kRowBytes, &s.loaded[stage], policy);
        }
      }
      __syncwarp();
    }
  }
}

// ---- consumers --------------------------------------------------------------------------------------------------

/// Overwrites the values of keys that are not there or lie beyond `most` by zeros, and takes NaN from those that only
/// some lanes see. By a group, which synchronises afterwards.
__device__ inline void mend_tile_packed(unsigned char* tile, uint8_t* state, int first_key, int least, int most,
                                        int tid) {
  const int r = tid / 2, key = first_key + r;  // two threads a row
  const bool absent = key >= most || state[r] == kAbsent;
  bool marked = false;
  if (absent || key >= least) {
#pragma unroll 1
    for (int piece = tid % 2; piece < kLatent / 16; piece += 2) {
      auto* at = reinterpret_cast<uint4*>(tile + r * kRowBytes + piece * 16);
      uint4 v{0, 0, 0, 0};
      if (!absent) {
        v = *at;
        if (!drop_nan_bytes(v)) continue;
        marked = true;
      }
      *at = v;
    }
  }
  const uint32_t votes = __ballot_sync(0xffffffffu, marked);
  if (tid % 2 == 0 && (votes >> (tid % 32) & 3) != 0) state[r] = kMarked;
  fence_async_shared();
}

template <int kColumns>
__device__ void consume(const Dense& p, const Schedule& schedule, SharedPacked& s, unsigned char* query,
                        unsigned char* stages, float* scores, int part, int lane_block) {
  using C = Config<kColumns>;
  constexpr int kEights = kColumns / 8, kStages = C::kStages;
  const int self = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / kGroupThreads, 0);
  const int tid = threadIdx.x % kGroupThreads, warp = __shfl_sync(0xffffffffu, tid / 32, 0), lane = tid % 32;
  const int g = lane / 4, t = lane % 4;
  const int lane0 = lane_block * kLanes;
  const float scale_log2 = p.softmax_scale * kLog2E;
  const uint32_t stage_address = shared_address(stages);
  const uint64_t query_operand = k_major(shared_address(query));
  const bool slot_of_group = schedule.num_slots == schedule.num_groups;
  // ldmatrix: of keys, matrices are rows 0..7 and 8..15 of this warp's 16, then the same 16 bytes on; of values, keys
  // 0..7 and 8..15 of a step, then the next 16 columns.
  const int matrix_row = lane / 8 % 2 * 8 + lane % 8, matrix_column = lane / 16 * 16;
  const uint32_t key_at = (16 * warp + matrix_row) * kRowBytes + matrix_column;
  const uint32_t value_at = matrix_row * kRowBytes + kScaleColumns * warp + matrix_column;
  const int own_row = 16 * warp + g;  // of the tile's keys, and own_row + 8
  float* const own_scores = scores + self * 2 * C::kScoreFloats;
  const int score_at = g / 2 * kQuarterFloats + g % 2 * 8 + 2 * warp;  // of keys own_row and own_row + 8, in a row
  int count = 0;                                                       // tiles consumed by both groups
  uint32_t buffer = 0;
  int4 cut = {-1, part, 1, 0};
  Walk walk(s);
  while (walk.next(p, schedule, s, part)) {
    Dense::Place place;
    p.place(place, walk.group - 1);
    const int lanes = max(0, min(kColumns, static_cast<int>(place.num_rows) * p.num_heads - lane0));

    // ---- Q ----
    named_barrier_sync(1, kConsumerThreads);  // nobody still reads the last group's
    if (threadIdx.x < kColumns) {
      const int l = threadIdx.x, of_row = (lane0 + l) / p.num_heads, head = lane0 + l - of_row * p.num_heads;
      const bool real = l < lanes;
      s.row_of_lane[l] = of_row;
      s.query_at[l] = real ? (place.first_row + of_row) * p.q_row_stride + head * p.q_head_stride : -1;
      s.bounds[l] = real ? static_cast<int>(p.keys_of(place, of_row)) : 0;
    }
    named_barrier_sync(1, kConsumerThreads);
    {
      // Sixteen threads have a (lane, block). Column 16 c + 4 t + i goes where the MMA has its column 2 t + i (i < 2)
      // or 8 + 2 t + i - 2: a thread of A has four neighbouring bytes of K.
      constexpr int kAtOnce = kConsumerThreads / 16, kRounds = kColumns * kScaleBlocks / kAtOnce;
      const int piece = threadIdx.x % 16;
      uint4 v[kRounds];
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int unit = i * kAtOnce + threadIdx.x / 16;
        const int64_t at = s.query_at[unit / kScaleBlocks];
        v[i] = uint4{0, 0, 0, 0};
        if (at >= 0) v[i] = *reinterpret_cast<const uint4*>(p.q + at + unit % kScaleBlocks * kScaleColumns + 8 * piece);
      }
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int unit = i * kAtOnce + threadIdx.x / 16, l = unit / kScaleBlocks, b = unit % kScaleBlocks;
        const uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
        int most = 0;  // bits of the largest magnitude
#pragma unroll
        for (int k = 0; k < 4; ++k)
          most = max(most, max(static_cast<int>(words[k] & 0x7fffu), static_cast<int>(words[k] >> 16 & 0x7fffu)));
#pragma unroll
        for (int offset = 1; offset < 16; offset *= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
        // 2^(exponent - 127) becomes 2^14. Tiny ones keep a factor that is a normal number; so do NaN and infinities.
        constexpr int kLowest = 15, kTarget = 127 + 14;
        const int exponent = max(most >> 7, kLowest);
        const float by = power_of_two(kTarget + 127 - exponent);
        if (piece == 0) s.factor[b][l] = power_of_two(exponent - (kTarget - 127)) * scale_log2;
        uint32_t half[4];
#pragma unroll
        for (int k = 0; k < 4; ++k)
          half[k] = round_to_f16x2(__uint_as_float(words[k] << 16) * by, __uint_as_float(words[k] & 0xffff0000u) * by);
        const int even = piece / 2 * 2;  // 16-byte pieces of f16: two for 16 columns
        unsigned char* const row = query + (2 * b + even / 8) * C::kQueryBlock + l * 128 + piece % 2 * 8;
        *reinterpret_cast<uint2*>(row + ((even % 8) ^ (l % 8)) * 16) = {half[0], half[2]};
        *reinterpret_cast<uint2*>(row + ((even % 8 + 1) ^ (l % 8)) * 16) = {half[1], half[3]};
      }
      for (int i = threadIdx.x; i < kColumns * 8; i += kConsumerThreads) {  // rope
        const int l = i / 8, of = i % 8;
        const int64_t at = s.query_at[l];
        uint4 r{0, 0, 0, 0};
        if (at >= 0) r = *reinterpret_cast<const uint4*>(p.q + at + kLatent + 8 * of);
        *reinterpret_cast<uint4*>(query + kLatent / 64 * C::kQueryBlock + l * 128 + (of ^ (l % 8)) * 16) = r;
      }
    }
    fence_async_shared();
    named_barrier_sync(1, kConsumerThreads);
    const int least = s.bounds[0], most = s.bounds[max(lanes, 1) - 1];
    const int tiles = walk.last_tile - walk.first_tile;

    float o[kScaleColumns / 16][kEights][4];  // rows of O^T: columns 16 (m ^ 4 self) + 2 g and the next of the block
#pragma unroll
    for (auto& m : o)
#pragma unroll
      for (auto& j : m)
#pragma unroll
        for (float& x : j) x = 0.0f;
    float top[kEights];  // of row 8 j + g of the scores and this warp's block
    float local_top[2 * kEights], local_sum[2 * kEights];
#pragma unroll
    for (float& x : top) x = -INFINITY;
#pragma unroll
    for (int i = 0; i < 2 * kEights; ++i) local_top[i] = -INFINITY, local_sum[i] = 0.0f;

#pragma unroll 1
    for (int i = self; i < tiles; i += kGroups) {
      const int stage = (count + i) % kStages, first_key = (walk.first_tile + i) * kKeys;
      const uint32_t tile = stage_address + stage * kTileBytesPacked;
      unsigned char* const tile_bytes = stages + stage * kTileBytesPacked;
      mbarrier_wait(&s.loaded[stage], (count + i) / kStages & 1);
      const bool plain = s.whole[stage] != 0 && first_key + kKeys <= least;
      if (!plain) {
        mend_tile_packed(tile_bytes, s.states[stage], first_key, least, most, tid);
        named_barrier_sync(2 + self, kGroupThreads);
      }

      // ---- scores: rounds of four steps, two for each block of scales, then rope ----
      float score[kColumns / 2];
      float sums[2][kColumns / 2];
      uint32_t a[2][4][4];
      constexpr int kRounds = 2 * kScaleBlocks + 1;
      const float4 scale0 = *reinterpret_cast<const float4*>(tile_bytes + own_row * kRowBytes + kScaleAt);
      const float4 scale1 = *reinterpret_cast<const float4*>(tile_bytes + (own_row + 8) * kRowBytes + kScaleAt);
#pragma unroll
      for (float& x : score) x = 0.0f;
#pragma unroll
      for (int r = 0; r <= kRounds; ++r) {
        if (r < kRounds) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            if (r == kRounds - 1) {
              ldmatrix_x4(a[r % 2][k], tile + key_at + kRopeAt + 32 * k);
            } else if (k % 2 == 0) {
              uint32_t v[4];
              ldmatrix_x4(v, tile + key_at + 64 * r + 16 * k);
              e4m3_to_f16(v[0], a[r % 2][k][0], a[r % 2][k][2]);
              e4m3_to_f16(v[1], a[r % 2][k][1], a[r % 2][k][3]);
              e4m3_to_f16(v[2], a[r % 2][k + 1][0], a[r % 2][k + 1][2]);
              e4m3_to_f16(v[3], a[r % 2][k + 1][1], a[r % 2][k + 1][3]);
            }
          }
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const uint64_t b = query_operand + descriptor_step(r * C::kQueryBlock + 32 * k);
            if (r == kRounds - 1) wgmma_bf16_rs(sums[r / 2 % 2], a[r % 2][k], b, k > 0);
            else wgmma_f16_rs(sums[r / 2 % 2], a[r % 2][k], b, k > 0 || r % 2 != 0);
          }
          wgmma_commit();
          wgmma_wait<1>();
        } else {
          wgmma_wait<0>();
        }
        if (r == 0) continue;
        // The round before is done.
        hold_registers(a[(r - 1) % 2]);
        if (r == kRounds) {
          hold_registers(sums[(r - 1) / 2 % 2]);
#pragma unroll
          for (int x = 0; x < kColumns / 2; ++x) score[x] = fmaf(scale_log2, sums[(r - 1) / 2 % 2][x], score[x]);
        } else if (r % 2 == 0) {
          const int b = r / 2 - 1;
          hold_registers(sums[b % 2]);
          const float by0 = b == 0 ? scale0.x : b == 1 ? scale0.y : b == 2 ? scale0.z : scale0.w;
          const float by1 = b == 0 ? scale1.x : b == 1 ? scale1.y : b == 2 ? scale1.z : scale1.w;
#pragma unroll
          for (int j = 0; j < kEights; ++j) {
            const float2 factor = *reinterpret_cast<const float2*>(&s.factor[b][8 * j + 2 * t]);
            score[4 * j] = fmaf(by0, factor.x * sums[b % 2][4 * j], score[4 * j]);
            score[4 * j + 1] = fmaf(by0, factor.y * sums[b % 2][4 * j + 1], score[4 * j + 1]);
            score[4 * j + 2] = fmaf(by1, factor.x * sums[b % 2][4 * j + 2], score[4 * j + 2]);
            score[4 * j + 3] = fmaf(by1, factor.y * sums[b % 2][4 * j + 3], score[4 * j + 3]);
          }
        }
      }
      if (!plain) {
        const int state0 = s.states[stage][own_row], state1 = s.states[stage][own_row + 8];
        const float add0 = state0 == kMarked ? NAN : 0.0f, add1 = state1 == kMarked ? NAN : 0.0f;
#pragma unroll
        for (int j = 0; j < kEights; ++j)
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            const int bound = s.bounds[8 * j + 2 * t + x] - first_key;
            score[4 * j + x] = state0 == kAbsent || own_row >= bound ? -INFINITY : score[4 * j + x] + add0;
            score[4 * j + 2 + x] = state1 == kAbsent || own_row + 8 >= bound ? -INFINITY : score[4 * j + 2 + x] + add1;
          }
      }
      // ---- to the others, and denominators ----
      float* const exchange = own_scores + buffer * C::kScoreFloats;
      buffer ^= 1;
#pragma unroll
      for (int j = 0; j < kEights; ++j)
#pragma unroll
        for (int x = 0; x < 2; ++x)
          *reinterpret_cast<float2*>(exchange + row_of(8 * j + 2 * t + x) * kScoreRow + score_at) = {
              score[4 * j + x], score[4 * j + 2 + x]};
      {
        // Of scales that are no numbers nothing is left here: lanes that see such a key have a NaN for a score.
        auto logarithm = [](float x) { return x >= 0.0f && x < INFINITY ? __log2f(x) : 0.0f; };
        const auto* at = reinterpret_cast<const float*>(tile_bytes + own_row * kRowBytes + kScaleAt) + t;
        *reinterpret_cast<float2*>(exchange + (kColumns + t) * kScoreRow + score_at) = {
            logarithm(at[0]), logarithm(at[8 * kRowBytes / 4])};
      }
#pragma unroll
      for (int c = 0; c < 2 * kEights; ++c) {
        const float x0 = score[c / 2 * 4 + c % 2], x1 = score[c / 2 * 4 + 2 + c % 2];
        const float now = fmaxf(local_top[c], fmaxf(x0, x1)), shift = now == -INFINITY ? 0.0f : now;
        local_sum[c] = local_sum[c] * exp2_fast(local_top[c] - shift) + (exp2_fast(x0 - shift) + exp2_fast(x1 - shift));
        local_top[c] = now;
      }
      named_barrier_sync(2 + self, kGroupThreads);

      // ---- weights of this warp's block, as B operands ----
      uint32_t weight[kEights][4][2];
      float factor[kEights];
      bool moved = false;
      {
        float logs[16];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const float4 v =
              *reinterpret_cast<const float4*>(exchange + (kColumns + warp) * kScoreRow + t * kQuarterFloats + 4 * k);
          logs[4 * k] = v.x, logs[4 * k + 1] = v.y, logs[4 * k + 2] = v.z, logs[4 * k + 3] = v.w;
        }
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          float x[16];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float4 v =
                *reinterpret_cast<const float4*>(exchange + (8 * j + g) * kScoreRow + t * kQuarterFloats + 4 * k);
            x[4 * k] = v.x, x[4 * k + 1] = v.y, x[4 * k + 2] = v.z, x[4 * k + 3] = v.w;
          }
          float now = top[j];
#pragma unroll
          for (int k = 0; k < 16; ++k) {
            x[k] += logs[k];
            now = fmaxf(now, x[k]);
          }
          now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 1));
          now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, 2));
          factor[j] = now == top[j] ? 1.0f : exp2_fast(top[j] - now);
          moved |= now != top[j];
          top[j] = now;
          const float shift = now == -INFINITY ? 0.0f : now - kWeightExponent;
#pragma unroll
          for (int k = 0; k < 16; ++k) x[k] = exp2_fast(x[k] - shift);
#pragma unroll
          for (int k = 0; k < 4; ++k)
#pragma unroll
            for (int half = 0; half < 2; ++half)
              weight[j][k][half] = round_to_f16x2(x[2 * k + half], x[8 + 2 * k + half]);
        }
      }
      if (__any_sync(0xffffffffu, moved)) {
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          const float low = __shfl_sync(0xffffffffu, factor[j], 8 * t), high = __shfl_sync(0xffffffffu, factor[j], 8 * t + 4);
#pragma unroll
          for (auto& m : o) m[j][0] *= low, m[j][1] *= high, m[j][2] *= low, m[j][3] *= high;
        }
      }
      // ---- P V ----
#pragma unroll
      for (int k = 0; k < 4; ++k) {
#pragma unroll
        for (int m = 0; m < kScaleColumns / 16; m += 2) {
          uint32_t v[4];
          ldmatrix_x4_trans(v, tile + value_at + 16 * k * kRowBytes + (16 * m ^ 64 * self));
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            uint32_t values[4];
            e4m3_to_f16(__byte_perm(v[2 * half], 0, 0x3120), values[0], values[1]);
            e4m3_to_f16(__byte_perm(v[2 * half + 1], 0, 0x3120), values[2], values[3]);
#pragma unroll
            for (int j = 0; j < kEights; ++j) mma_f16(o[m + half][j], values, weight[j][k][0], weight[j][k][1]);
          }
        }
      }
      if (lane < kReleasingLanes) mbarrier_arrive(&s.free[stage]);
    }
    count += tiles;

    // ---- results ----
    // Denominators: over the eight threads of a column, then over warps and groups in order.
    auto weight_of = [](float from, float to) { return from == to ? 1.0f : exp2_fast(from - to); };
#pragma unroll
    for (int c = 0; c < 2 * kEights; ++c) {
      float now = local_top[c];
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) now = fmaxf(now, __shfl_xor_sync(0xffffffffu, now, offset));
      float sum = local_sum[c] * weight_of(local_top[c], now);
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      const int l = c / 2 * 8 + 2 * t + c % 2;
      if (g == 0) s.maxima[self][warp][l] = now, s.sums[self][warp][l] = sum;
    }
    if (t == 0) {
#pragma unroll
      for (int j = 0; j < kEights; ++j) s.tops[self][warp][8 * j + g] = top[j];
    }
    named_barrier_sync(1, kConsumerThreads);
    p.place(place, walk.group - 1);  // again, rather than kept through the loop
    const bool complete = walk.first_tile == 0 && walk.last_tile == walk.tiles;
    if (threadIdx.x < kColumns) {
      const int l = threadIdx.x;
      float level = -INFINITY, total = 0.0f;
      for (int w = 0; w < kGroups * kWarpsEach; ++w) level = fmaxf(level, s.maxima[w / kWarpsEach][w % kWarpsEach][l]);
      for (int w = 0; w < kGroups * kWarpsEach; ++w)
        total += s.sums[w / kWarpsEach][w % kWarpsEach][l] * weight_of(s.maxima[w / kWarpsEach][w % kWarpsEach][l], level);
      const bool empty = total == 0.0f;
      s.level[l] = level;
      s.inverse[l] = empty ? 0.0f : 1.0f / total;
      const int64_t out_row = place.first_row + s.row_of_lane[l];
      const int head = lane0 + l - s.row_of_lane[l] * p.num_heads;
      const int64_t index =
          ((2 * int64_t{part} + (walk.first_tile == 0)) * schedule.lane_blocks + lane_block) * kLanes + l;
      s.out_at[l] = l >= lanes ? -1 : complete ? out_row * p.out_row_stride + head * p.out_head_stride : index * kLatent;
      if (l < lanes) {
        const float lse = empty ? -INFINITY : (level + __log2f(total)) * kLn2;
        if (!complete) p.partial_lse[index] = lse;
        else if (p.lse != nullptr) p.lse[out_row * p.lse_row_stride + head] = lse;
      }
    }
    named_barrier_sync(1, kConsumerThreads);
    // Each group finishes half of the columns, o[0..3], and gives the other half away: two rounds of two.
#pragma unroll
    for (int j = 0; j < kEights; ++j)
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int r = 8 * j + 2 * t + x;
        const float own = s.tops[self][warp][r], common = fmaxf(own, s.tops[1 - self][warp][r]);
        const float by = weight_of(own, common) * 0x1p-12f;
        static_assert(kWeightExponent == 12.0f);
#pragma unroll
        for (auto& m : o) m[j][x] *= by, m[j][2 + x] *= by;
      }
    constexpr int kGiven = 2 * kEights * 4;  // values a thread gives in a round
    static_assert(2 * kGroups * C::kScoreFloats >= kGroups * kGiven * kGroupThreads);
#pragma unroll
    for (int round = 0; round < 2; ++round) {
      if (round > 0) named_barrier_sync(1, kConsumerThreads);
#pragma unroll
      for (int v = 0; v < kGiven; ++v)
        scores[(self * kGiven + v) * kGroupThreads + tid] = o[4 + 2 * round + v / (4 * kEights)][v / 4 % kEights][v % 4];
      named_barrier_sync(1, kConsumerThreads);
#pragma unroll
      for (int v = 0; v < kGiven; ++v)
        o[2 * round + v / (4 * kEights)][v / 4 % kEights][v % 4] +=
            scores[((1 - self) * kGiven + v) * kGroupThreads + tid];
    }
    const int column0 = kScaleColumns * warp + 64 * self + 2 * g;
#pragma unroll
    for (int j = 0; j < kEights; ++j)
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int r = 8 * j + 2 * t + x, l = lane_of(r);
        const int64_t at = s.out_at[l];
        if (at < 0) continue;
        const float common = fmaxf(s.tops[0][warp][r], s.tops[1][warp][r]);
        // Halves of the exponent: neither is out of range where the result is not.
        const float half = common == -INFINITY ? 0.0f : exp2_fast(0.5f * (common - s.level[l]));
        const float inverse = s.inverse[l];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const float low = o[m][j][x] * inverse * half * half, high = o[m][j][2 + x] * inverse * half * half;
          const int64_t to = at + column0 + 16 * m;
          if (complete && p.out_dtype == DType::kBf16)
            *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + to) = round_to_bf16x2(low, high);
          else *reinterpret_cast<float2*>((complete ? static_cast<float*>(p.out) : p.partial) + to) = {low, high};
        }
      }
    if (walk.first_tile == 0) {
      cut = {walk.group - 1, part, walk.parts(s, part), 0};
      if (slot_of_group && threadIdx.x == 0 && lane_block == 0) schedule.cuts[walk.group - 1] = cut;
    }
  }
  if (!slot_of_group && threadIdx.x == 0 && lane_block == 0) schedule.cuts[part] = cut;
}

// Grid: as of absorbed_kernel. combine_kernel follows. The map is not used: pages are copied as bytes.
template <int kColumns>
__global__ void __launch_bounds__(kThreads, 1)
    absorbed_packed_kernel(const __grid_constant__ Dense p, const Schedule schedule,
                           const __grid_constant__ CUtensorMap) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kAlignment) unsigned char shared[];
  using C = Config<kColumns>;
  unsigned char* stages = shared;
  unsigned char* query = stages + C::kStages * kTileBytesPacked;
  auto* scores = reinterpret_cast<float*>(query + C::kQueryBytes);
  SharedPacked& s = *reinterpret_cast<SharedPacked*>(shared + C::kOperandBytes);
  const int lane_block = blockIdx.x % schedule.lane_blocks, part = blockIdx.x / schedule.lane_blocks;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      mbarrier_init(&s.loaded[i], 32);
      mbarrier_init(&s.free[i], kWarpsEach * kReleasingLanes);
    }
    fence_mbarrier_init();
    s.first_group = schedule.num_groups;
    s.end_group = 0;
    s.first_start = 0;
    s.piece = 0;
  }
  wait_for_stream();
  // The merge starts when this block ends: announced here, its blocks wait where no part is, which cost the bf16 kernel
  // 1.2 us of 14.1 with one request.
  find_part(p, schedule, part, s, reinterpret_cast<int*>(scores));
  if (threadIdx.x < kConsumerThreads) {
    register_increase<kOthersRegisters>();
    consume<kColumns>(p, schedule, s, query, stages, scores, part, lane_block);
  } else {
    register_decrease<kLoaderRegisters>();
    if (threadIdx.x < kConsumerThreads + 32)
      produce<C::kStages>(p, schedule, s, shared_address(stages), part, lane_block * kLanes);
  }
#else
  __trap();  // the set refuses: see set.cpp
#endif
}

}  // namespace packed
}  // namespace sm90
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
