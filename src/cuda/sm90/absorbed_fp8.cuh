// Absorbed MLA attention on Hopper: e4m3 queries, e4m3 rows with one scale, dense over pages, through fp8 MMA.
//
// Shapes. A tile is 64 keys by kColumns lanes (16, 32 or 64: rows x heads of one request; no more are computed than
// that). 64 lanes: S 576 cycles of the tensor cores (4,096 products a cycle), P V 512; 40,960 bytes of shared memory,
// 36,864 of cache. At 4.46 TB/s, 132 SMs and 1.7 GHz the memory takes 1,855 cycles a tile, so up to 64 lanes are bound
// by it, and 128 (two blocks, which share the keys through the L2) by the tensor cores.
//
// Operands. fp8 MMA wants both operands K-major, and for P V the keys are K, which lie the other way round in the
// cache. Others transpose V from shared memory to shared memory (64 KB of traffic a tile and two more buffers). Here
// lanes are N instead: S^T = K Q^T with keys as M, and O^T = V^T P^T with latent columns as M and V^T as the A operand,
// which may come from registers: ldmatrix.trans transposes pairs of bytes and two byte permutes part them,
//   ldmatrix: word of lane (g, t) = keys 2 t, 2 t + 1 of columns 2 g, 2 g + 1
//   permute:  row g of A = column 2 g, row g + 8 = column 2 g + 1; its columns 4 t .. + 3 = keys 2 t, 2 t + 1, 8 + 2 t,
//             9 + 2 t
// one ldmatrix.x4 and four permutes for 16 columns by 32 keys. Every byte of V is read once, P (the B operand) is
// stored with its keys in the same order, and few heads pad nothing: 16 heads take a quarter of the products.
// Shared memory, 64 lanes, a tile: written by the copy engine 40 KB, keys read as A 36, Q beside them 36, V 32, P
// written 4 and read 32: 180 KB, 1,440 cycles. 16 lanes: 36 + 40 + 9 + 32 + 9 KB, 1,010.
//
// Roles. Warpgroup 0 scores even tiles, warpgroup 1 odd ones; each multiplies all by its 256 columns of V: O^T is four
// products of 64 columns, 4 * kColumns / 2 registers a thread (128 of 240), then scores 32 or A 32, sums 16. A lane's
// maximum goes over rows of S^T: shuffles over eight threads of a warp, then an atomic maximum in shared memory. Up to
// 32 lanes tiles are taken in pairs, with two barriers of both warpgroups each: the maxima are there; P is there. With
// 64 they take turns (consume_turns()). A third warpgroup has one warp that loads, a box of 128 columns for each page
// of a tile, four tiles ahead: two tiles are used, two are under way. Scores of the next pair under this pair's P V
// would hold all four and leave the memory idle.
//
// P. e4m3 has four bits, and a range of which weights of at most 1 use the lower half. Weights are 2^8 exp(x - max):
// at most 256 of 448, and those down to 2^-14 are still normal numbers. The denominator is summed from weights before
// they are rounded. k_scale is part of the scores' scale and multiplies the result.
//
// Precision. Hopper's fp8 tensor cores add with some 13 bits behind the largest term's leading bit (common tests:
// verify/tolerances.h), so sums over very long pieces lose more than fp32 would.
//
// Keys that lanes must not see: as in absorbed.cuh. e4m3 has NaN and no infinities. Tiles that a pair lacks: its scores
// are masked, and the other tile's V stands in, so that there is no branch while products are under way.
//
// Measured, 64 lanes, 1.7 GHz assumed: in pairs a tile took 2,900 cycles, nothing overlapping the softmax of both. With
// 32 lanes and all columns for each warpgroup, so that neither waits for the other, 3,100 to 3,300: 850 instructions of
// each of two warps a scheduler, keys and values read by both. In turns it is 790 a pair of tiles, and the tensor cores
// have 2,176 cycles of work: predicted are 3,000 a pair, or what the memory needs, 3,710 (64 lanes that share nothing).
#pragma once

#include "cuda/common/wgmma_fp8.cuh"
#include "cuda/sm90/absorbed.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace sm90 {
namespace fp8 {

constexpr int kTileStages = 4;
constexpr int kByteBlocks = 5;                          // of 128 columns; the last one is half empty
constexpr int kTileBytes8 = kByteBlocks * kBlockBytes;  // 40,960
constexpr int kLatentSteps = kLatent / 32, kRopeSteps = kRope / 32;
constexpr int kParts64 = kHalf / 64;     // products of 64 columns of V a warpgroup has
constexpr int kWarpsEach = 4;            // of a warpgroup
constexpr float kWeightExponent = 8.0f;  // weights are at most 2^8
constexpr int kTurnSlots = 4;
constexpr int kTops = 3;  // maxima of this pair, the one before, the next
constexpr int kLoaderRegisters = 24, kOthersRegisters = 240;

struct Shared8 : Shared {
  uint64_t loaded[kTileStages], free[kTileStages];
  uint64_t announced[2][2];                       // of 64 lanes: a warpgroup's weights, by buffer
  int turn_top[kTurnSlots][kLanes];               // maxima after a tile
  int high[2][2][kLanes];                         // of a warpgroup's tile, by buffer
  float shift[2][kLanes], sum_factor[2][kLanes];  // of a warpgroup's tile: for its weights, for its sums so far
  float value_factor[kTurnSlots][kLanes];         // of a tile: for what was multiplied before
  alignas(8) int moved[kTurnSlots][2];            // whether it is not 1 for any of 32 lanes
  int top[kTops][kLanes];                         // ordered(): maxima so far of scores in units of log2
  float sums[2][kWarpsEach][kLanes];
  float inverse[kLanes];
  int64_t out_at[kLanes];  // where a lane's result begins, in elements; -1: no such lane
  alignas(16) uint8_t states[kTileStages][kKeys];
};

template <int kColumns>
struct Config {
  static constexpr int kQueryBlock = kColumns * 128;
  static constexpr int kQueryBytes = kByteBlocks * kQueryBlock;
  static constexpr int kWeightBytes = kColumns * 128;  // a row: a lane's weights of a pair of tiles
  static constexpr int kWeightBuffers = kColumns == kLanes ? 2 : 1;
  static constexpr int kOperandBytes = kTileStages * kTileBytes8 + kQueryBytes + kWeightBuffers * kWeightBytes;
  static constexpr int kSharedBytes = kOperandBytes + static_cast<int>(sizeof(Shared8));
  static_assert(kSharedBytes <= 227 * 1024);
};

/// fp32 as integers of the same order, and back: negative numbers have their magnitude's bits turned.
__device__ inline int turn_negative(int x) { return x ^ (x >> 31 & 0x7fffffff); }
__device__ inline int ordered(float x) { return turn_negative(static_cast<int>(__float_as_uint(x))); }
__device__ inline float from_ordered(int x) { return __uint_as_float(static_cast<uint32_t>(turn_negative(x))); }
/// Maximum in shared memory, without waiting for what was there.
__device__ inline void raise(int* at, int x) {
  asm volatile("red.shared.max.s32 [%0], %1;" ::"r"(shared_address(at)), "r"(x) : "memory");
}

/// Two values as e4m3, `low` in the lower byte. NaN stays NaN.
__device__ inline uint32_t pack_e4m3(float low, float high) {
  uint16_t both;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(both) : "f"(high), "f"(low));
  return both;
}

/// Replaces NaN by zeros; true if there were any.
__device__ inline bool drop_nan_bytes(uint4& v) {
  bool found = false;
  auto fix = [&](uint32_t& w) {
    const uint32_t nan = ((w & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;  // bytes of magnitude 0x7f
    if (nan == 0) return;
    w &= ~((nan >> 7) * 0xffu);
    found = true;
  };
  fix(v.x), fix(v.y), fix(v.z), fix(v.w);
  return found;
}

// ---- loader -----------------------------------------------------------------------------------------------------

/// By one warp. `map` has [pages, rows of a page, 576] bytes in boxes of 128.
__device__ inline void produce(const Dense& p, const Schedule& schedule, Shared8& s, uint32_t stages, int part,
                               int lane0, const CUtensorMap& map) {
  const int lane = threadIdx.x % 32, page_size = p.cache.page_size;
  const int box_rows = min(page_size, kKeys);
  const bool two_pages = page_size < kKeys;  // of 32 keys
  const uint64_t policy = evict_first_policy();
  int count = 0;
  Walk walk(s);
  while (walk.next(p, schedule, s, part)) {
    Dense::Place g;
    p.place(g, walk.group - 1);
    const int lanes_end = static_cast<int>(min(int64_t{lane0 + kLanes}, g.num_rows * p.num_heads));
    const int most = lanes_end > lane0 ? static_cast<int>(p.keys_of(g, (lanes_end - 1) / p.num_heads)) : 0;
    // Each lane looks up the pages of one of the next 32 tiles; -1: nothing there, which the engine fills with zeros.
    auto page_at = [&](int key) {
      if (key >= most) return -1;
      const int page = g.list.ids[static_cast<uint32_t>(key) / static_cast<uint32_t>(page_size)];
      return page >= 0 && page < p.cache.num_pages ? page : -1;
    };
    for (int base = walk.first_tile; base < walk.last_tile; base += 32) {
      const int mine = base + lane;
      const int own_first = mine < walk.last_tile ? page_at(mine * kKeys) : -1;
      const int own_second = two_pages && mine < walk.last_tile ? page_at(mine * kKeys + box_rows) : -1;
      const int here = min(32, walk.last_tile - base);
      for (int i = 0; i < here; ++i, ++count) {
        const int first = __shfl_sync(0xffffffffu, own_first, i), second = __shfl_sync(0xffffffffu, own_second, i);
        const int key0 = (base + i) * kKeys, stage = count % kTileStages;
        const int page_row = two_pages ? 0 : static_cast<int>(static_cast<uint32_t>(key0) % page_size);
        mbarrier_wait(&s.free[stage], (count / kTileStages & 1) ^ 1);
        const int key = 2 * lane;  // of the tile; a lane writes the states of two
        const bool there = (two_pages && key >= box_rows ? second : first) >= 0;
        const uint32_t low = there && key0 + key < most ? kPresent : kAbsent,
                       high = there && key0 + key + 1 < most ? kPresent : kAbsent;
        *reinterpret_cast<uint16_t*>(&s.states[stage][key]) = static_cast<uint16_t>(low | high << 8);
        if (lane == 0) {
          mbarrier_arrive_expecting(&s.loaded[stage], kTileBytes8);
          for (int b = 0; b < kByteBlocks; ++b) {
            const uint32_t target = stages + stage * kTileBytes8 + b * kBlockBytes;
            copy_page_box(target, map, &s.loaded[stage], b * kMapByteColumns, page_row, first, policy);
            if (two_pages)
              copy_page_box(target + box_rows * 128, map, &s.loaded[stage], b * kMapByteColumns, 0, second, policy);
          }
        } else {
          mbarrier_arrive(&s.loaded[stage]);  // for its states
        }
        __syncwarp();
      }
    }
  }
}

// ---- consumers --------------------------------------------------------------------------------------------------

/// Overwrites the keys of a tile from `most` on by zeros, and takes NaN from those that only some lanes see.
__device__ inline void mend_tile8(unsigned char* tile, uint8_t* state, int first_key, int least, int most, int tid) {
  constexpr int kRowsAtOnce = 128 / 8;
  const int piece = tid % 8;
#pragma unroll 1
  for (int r = tid / 8; r < kKeys; r += kRowsAtOnce) {
    const int key = first_key + r;
    if (key < least) continue;  // eight threads of a row alike
    bool marked = false;
#pragma unroll 1
    for (int b = 0; b < kByteBlocks; ++b) {
      auto* at = reinterpret_cast<uint4*>(tile + b * kBlockBytes + r * 128 + (piece ^ (r % 8)) * 16);
      uint4 v{0, 0, 0, 0};
      if (key < most) {
        v = *at;
        if (!drop_nan_bytes(v)) continue;
        marked = true;
      }
      *at = v;
    }
    marked = __any_sync(0xffu << (threadIdx.x % 32 / 8 * 8), marked);
    if (marked && piece == 0 && state[r] == kPresent) state[r] = kMarked;
  }
  fence_async_shared();
}

template <int kColumns>
__device__ void consume(const Dense& p, const Schedule& schedule, Shared8& s, unsigned char* query,
                        unsigned char* stages, unsigned char* weights, int part, int lane_block) {
  using C = Config<kColumns>;
  constexpr int kEights = kColumns / 8;
  const int self = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const int tid = threadIdx.x % 128, warp = __shfl_sync(0xffffffffu, tid / 32, 0), lane = tid % 32;
  const int g = lane / 4, t = lane % 4;
  const int lane0 = lane_block * kLanes;
  const float scale_log2 = p.softmax_scale * kLog2E;
  const uint32_t stage_address = shared_address(stages);
  const uint64_t query_operand = k_major(shared_address(query)), weight_operand = k_major(shared_address(weights));
  // Of a tile: row `lane` of 32 keys, 16 columns of the first product of a block; those of the second are 64 bytes
  // away.
  const uint32_t value_at = static_cast<uint32_t>(lane * 128 + ((warp ^ (lane % 8)) * 16));
  const bool slot_of_group = schedule.num_slots == schedule.num_groups;
  int count = 0;  // tiles consumed
  uint32_t phase = 0;
  auto meet = [&] {  // of both warpgroups, as in absorbed.cuh
    mbarrier_arrive(&s.together);
    mbarrier_wait(&s.together, phase);
    phase ^= 1;
  };
  int4 cut = {-1, part, 1, 0};
  Walk walk(s);
  while (walk.next(p, schedule, s, part)) {
    Dense::Place place;
    p.place(place, walk.group - 1);
    const int lanes = max(0, min(kColumns, static_cast<int>(place.num_rows) * p.num_heads - lane0));

    // ---- Q: all loads are under way before the last group's is overwritten ----
    {
      constexpr int kEach = kConsumerThreads / kColumns;  // threads of a lane
      constexpr int kPieces = kWidth / 16, kRounds = (kPieces + kEach - 1) / kEach;
      const int l = threadIdx.x / kEach, first = threadIdx.x % kEach;
      const int of_row = (lane0 + l) / p.num_heads, head = lane0 + l - of_row * p.num_heads;
      const bool real = l < lanes;
      const auto* from = reinterpret_cast<const unsigned char*>(p.q) + (place.first_row + of_row) * p.q_row_stride +
                         head * p.q_head_stride;
      uint4 v[kRounds];
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int piece = i * kEach + first;
        v[i] = real && piece < kPieces ? *reinterpret_cast<const uint4*>(from + 16 * piece) : uint4{0, 0, 0, 0};
      }
      meet();  // nobody still reads the last group's
      if (first == 0) {
        s.row_of_lane[l] = of_row;
        s.bounds[l] = real ? static_cast<int>(p.keys_of(place, of_row)) : 0;
        for (int i = 0; i < kTops; ++i) s.top[i][l] = ordered(-INFINITY);
      }
#pragma unroll
      for (int i = 0; i < kRounds; ++i) {
        const int piece = i * kEach + first;  // what lies beyond a row is zeros
        if (piece < kByteBlocks * 8)
          *reinterpret_cast<uint4*>(query + piece / 8 * C::kQueryBlock + l * 128 + ((piece % 8) ^ (l % 8)) * 16) = v[i];
      }
    }
    fence_async_shared();
    meet();
    const int least = s.bounds[0];
    const int tiles = walk.last_tile - walk.first_tile;

    float o[kParts64][kColumns / 2];
#pragma unroll
    for (int m = 0; m < kParts64; ++m)
#pragma unroll
      for (float& x : o[m]) x = 0.0f;
    float score[kColumns / 2];
    float sum[2 * kEights];
#pragma unroll
    for (float& x : sum) x = 0.0f;

    auto stage_of = [&](int i) { return (count + i) % kTileStages; };  // of the i-th tile of this piece
    auto prepare = [&](int i) {  // waits for the tile and mends it where its end may be
      const int stage = stage_of(i), first_key = (walk.first_tile + i) * kKeys;
      mbarrier_wait(&s.loaded[stage], (count + i) / kTileStages & 1);
      if (first_key + kKeys > least) {
        mend_tile8(stages + stage * kTileBytes8, s.states[stage], first_key, least, s.bounds[max(lanes, 1) - 1], tid);
        named_barrier_sync(2 + self, 128);
      }
    };
    auto start_scores = [&](int stage) {
      const uint64_t keys = k_major(uniform(stage_address + stage * kTileBytes8));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kLatentSteps + kRopeSteps; ++k)
        wgmma_e4m3_ss(score, keys + descriptor_step(k / 4 * kBlockBytes + k % 4 * 32),
                      query_operand + descriptor_step(k / 4 * C::kQueryBlock + k % 4 * 32), k > 0);
      wgmma_commit();
    };

    int turn = 0;  // pair % kTops
#pragma unroll 1
    for (int pair = 0; pair < tiles; pair += 2) {
      const int own = pair + self, first_key = (walk.first_tile + own) * kKeys;
      const bool has_own = own < tiles, has_odd = pair + 1 < tiles;
      const int before = turn == 0 ? kTops - 1 : turn - 1, after = turn == kTops - 1 ? 0 : turn + 1;

      // ---- scores and maxima ----
      if (has_own) prepare(own);
      start_scores(stage_of(has_own ? own : pair));  // of a tile that is there, if only to have no branch
      wgmma_wait<0>();
      hold_registers(score);
      const int row = 16 * warp + g;  // of the tile, and row + 8
      uint32_t state0 = kPresent, state1 = kPresent;
      if (has_own) state0 = s.states[stage_of(own)][row], state1 = s.states[stage_of(own)][row + 8];
      if (!__all_sync(0xffffffffu, has_own && first_key + kKeys <= least && state0 == kPresent && state1 == kPresent)) {
        const float add0 = state0 == kMarked ? NAN : 0.0f, add1 = state1 == kMarked ? NAN : 0.0f;
        const bool absent0 = !has_own || state0 == kAbsent, absent1 = !has_own || state1 == kAbsent;
#pragma unroll
        for (int j = 0; j < kEights; ++j)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int bound = s.bounds[8 * j + 2 * t + i] - first_key;
            score[4 * j + i] = absent0 || row >= bound ? -INFINITY : score[4 * j + i] + add0;
            score[4 * j + 2 + i] = absent1 || row + 8 >= bound ? -INFINITY : score[4 * j + 2 + i] + add1;
          }
      }
      // Of the two columns of each j the largest of the eight g, left in the lanes with g % kEights == j: rounds in
      // which a lane keeps half of its columns and gives the other half away, then rounds of what is left.
      float m[2 * kEights];
#pragma unroll
      for (int c = 0; c < 2 * kEights; ++c) m[c] = fmaxf(score[c / 2 * 4 + c % 2], score[c / 2 * 4 + 2 + c % 2]);
      reduce_over_rows<kEights>(m, g, Larger{});
      if (g < kEights) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (m[i] > -INFINITY) raise(&s.top[turn][8 * g + 2 * t + i], ordered(m[i] * scale_log2));
      }
      named_barrier_sync(1, kConsumerThreads);

      // ---- weights ----
      if (threadIdx.x < kColumns) s.top[after][threadIdx.x] = s.top[turn][threadIdx.x];
#pragma unroll
      for (int j = 0; j < kEights; ++j) {
        float w[4];  // as the scores
        const int2 now = *reinterpret_cast<const int2*>(&s.top[turn][8 * j + 2 * t]),
                   old = *reinterpret_cast<const int2*>(&s.top[before][8 * j + 2 * t]);
        const float top[2] = {from_ordered(now.x), from_ordered(now.y)};
        if (__any_sync(0xffffffffu, now.x != old.x || now.y != old.y)) {
          const float factor[2] = {now.x == old.x ? 1.0f : exp2_fast(from_ordered(old.x) - top[0]),
                                   now.y == old.y ? 1.0f : exp2_fast(from_ordered(old.y) - top[1])};
          sum[2 * j] *= factor[0], sum[2 * j + 1] *= factor[1];
#pragma unroll
          for (int e = 0; e < kParts64; ++e) {
            o[e][4 * j] *= factor[0], o[e][4 * j + 1] *= factor[1];
            o[e][4 * j + 2] *= factor[0], o[e][4 * j + 3] *= factor[1];
          }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          // Where nothing has been seen yet -inf stays -inf, a weight of 0.
          const float shift = top[i] == -INFINITY ? 0.0f : top[i] - kWeightExponent;
          w[i] = exp2_fast(fmaf(score[4 * j + i], scale_log2, -shift));
          w[2 + i] = exp2_fast(fmaf(score[4 * j + 2 + i], scale_log2, -shift));
          sum[2 * j + i] += w[i] + w[2 + i];
        }
        // Bytes: lane c key g, key g + 8; lane c + 1 likewise. The thread of key g ^ 1 has the other two of a word:
        // even g takes lane c, odd g lane c + 1.
        const uint32_t mine = pack_e4m3(w[0], w[2]) | pack_e4m3(w[1], w[3]) << 16;
        const uint32_t other = __shfl_xor_sync(0xffffffffu, mine, 4);
        const uint32_t word = g % 2 == 0 ? __byte_perm(mine, other, 0x5140) : __byte_perm(mine, other, 0x3726);
        const int l = 8 * j + 2 * t + g % 2;
        *reinterpret_cast<uint32_t*>(weights + l * 128 + (((4 * self + warp) ^ (l % 8)) * 16) + g / 2 * 4) = word;
      }
      fence_async_shared();
      named_barrier_sync(1, kConsumerThreads);

      // ---- P V ----
      const int other = self == 0 && has_odd ? pair + 1 : pair;  // the tile that this warpgroup has not waited for
      mbarrier_wait(&s.loaded[stage_of(other)], (count + other) / kTileStages & 1);
      uint32_t a[2][kParts64][4];
      const uint32_t tile_at[2] = {stage_address + stage_of(pair) * kTileBytes8,
                                   stage_address + stage_of(has_odd ? pair + 1 : pair) * kTileBytes8};
#pragma unroll
      for (int k = 0; k < 4; ++k) {  // 32 keys each
        if (k >= 2) {                // the registers of A are free again
          wgmma_wait<1>();
          hold_registers(a[k % 2]);
        }
#pragma unroll
        for (int m = 0; m < kParts64; ++m) {
          uint32_t v[4];
          ldmatrix_x4_trans(
              v, tile_at[k / 2] + k % 2 * (32 * 128) + (2 * self + m / 2) * kBlockBytes + (value_at ^ m % 2 * 64));
          a[k % 2][m][0] = __byte_perm(v[0], v[1], 0x6420);
          a[k % 2][m][1] = __byte_perm(v[0], v[1], 0x7531);
          a[k % 2][m][2] = __byte_perm(v[2], v[3], 0x6420);
          a[k % 2][m][3] = __byte_perm(v[2], v[3], 0x7531);
        }
        wgmma_fence();
#pragma unroll
        for (int m = 0; m < kParts64; ++m) wgmma_e4m3_rs(o[m], a[k % 2][m], weight_operand + descriptor_step(32 * k));
        wgmma_commit();
      }
      wgmma_wait<0>();
#pragma unroll
      for (int m = 0; m < kParts64; ++m) hold_registers(o[m]);
      if (lane < kReleasingLanes) {
        mbarrier_arrive(&s.free[stage_of(pair)]);
        if (has_odd) mbarrier_arrive(&s.free[stage_of(pair + 1)]);
      }
      turn = after;
    }
    count += tiles;

    // ---- results ----
#pragma unroll
    for (int c = 0; c < 2 * kEights; ++c) {
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], offset);
      if (g == 0) s.sums[self][warp][c / 2 * 8 + 2 * t + c % 2] = sum[c];
    }
    meet();
    p.place(place, walk.group - 1);  // again, rather than kept through the loop
    const bool complete = walk.first_tile == 0 && walk.last_tile == walk.tiles;
    if (threadIdx.x < kColumns) {
      const int l = threadIdx.x;
      float total = 0.0f;
      for (int i = 0; i < 2; ++i)
        for (int w = 0; w < kWarpsEach; ++w) total += s.sums[i][w][l];
      const bool empty = total == 0.0f;
      const int last = turn == 0 ? kTops - 1 : turn - 1;
      s.inverse[l] = empty ? 0.0f : p.cache.scale / total;
      const int64_t out_row = place.first_row + s.row_of_lane[l];
      const int head = lane0 + l - s.row_of_lane[l] * p.num_heads;
      const int64_t index =
          ((2 * int64_t{part} + (walk.first_tile == 0)) * schedule.lane_blocks + lane_block) * kLanes + l;
      s.out_at[l] = l >= lanes ? -1
                    : complete ? out_row * p.out_row_stride + head * p.out_head_stride
                               : index * kLatent;
      if (l < lanes) {
        const float lse = empty ? -INFINITY : (from_ordered(s.top[last][l]) - kWeightExponent + __log2f(total)) * kLn2;
        if (!complete) p.partial_lse[index] = lse;
        else if (p.lse != nullptr) p.lse[out_row * p.lse_row_stride + head] = lse;
      }
    }
    meet();
    const int column0 = self * kHalf + 16 * warp + 2 * g;  // of the first product
#pragma unroll
    for (int j = 0; j < kEights; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int l = 8 * j + 2 * t + i;
        const int64_t at = s.out_at[l];
        if (at < 0) continue;
        const float inverse = s.inverse[l];
#pragma unroll
        for (int m = 0; m < kParts64; ++m) {
          const float low = o[m][4 * j + i] * inverse, high = o[m][4 * j + 2 + i] * inverse;
          const int64_t to = at + column0 + 64 * m;
          if (complete && p.out_dtype == DType::kBf16)
            *reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(p.out) + to) = round_to_bf16x2(low, high);
          else *reinterpret_cast<float2*>((complete ? static_cast<float*>(p.out) : p.partial) + to) = {low, high};
        }
      }
    if (walk.first_tile == 0) {
      const int parts = walk.parts(s, part);
      // Blank groups come last, and in a part's slot the group stays that goes on behind it.
      if (slot_of_group || parts > 1) cut = {walk.group - 1, part, parts, 0};
      if (slot_of_group && threadIdx.x == 0 && lane_block == 0) schedule.cuts[walk.group - 1] = cut;
    }
  }
  if (!slot_of_group && threadIdx.x == 0 && lane_block == 0) schedule.cuts[part] = cut;
}

/// 64 lanes: warpgroups take turns. Each scores every other tile (64 keys, all lanes), and multiplies all of them by
/// its 256 columns: the other's tile before its own, whose weights were there half a turn ago, then its own. So one is
/// in its softmax while the other's products pass, and each waits only for what the other did before. `top` of a tile
/// is that of the one before or larger: each softmax needs the other's, so that turns stay turns.
///
/// Hazards. A tile's weights, maxima and flag are announced at an mbarrier of the warpgroup and buffer (two each), for
/// which both wait once. What tile n wrote there is overwritten for tile n + 4, which lies in the same stage: both have
/// released tile n, behind the product that read its weights. Its maxima are also read with tile n + 1; but its owner
/// had to wait for tile n + 3, which the other announces after its products of tile n + 1.
__device__ inline void consume_turns(const Dense& p, const Schedule& schedule, Shared8& s, unsigned char* query,
                                     unsigned char* stages, unsigned char* weights, int part, int lane_block) {
  using C = Config<kLanes>;
  constexpr int kEights = kLanes / 8;
  const int self = static_cast<int>(uniform(threadIdx.x / 128));
  const int tid = threadIdx.x % 128, warp = static_cast<int>(uniform(tid / 32)), lane = tid % 32;
  const int g = lane / 4, t = lane % 4;
  const int lane0 = lane_block * kLanes;
  const float scale_log2 = p.softmax_scale * kLog2E;
  const uint32_t stage_address = shared_address(stages), weight_address = shared_address(weights);
  const uint32_t value_at = static_cast<uint32_t>(2 * self * kBlockBytes + lane * 128 + ((warp ^ (lane % 8)) * 16));
  const int row = 16 * warp + g;  // of a tile's keys, and row + 8
  // Of a thread's word of weights: lane 8 j + 2 t + g % 2, four keys. Bytes: see consume().
  const int lane_of_word = 2 * t + g % 2;
  unsigned char* const weight_store =
      weights + lane_of_word * 128 + ((4 * self + warp) ^ lane_of_word) * 16 + g / 2 * 4;
  const uint32_t order = g % 2 == 0 ? 0x5140 : 0x3726;
  const bool slot_of_group = schedule.num_slots == schedule.num_groups;
  const bool writes_cut = threadIdx.x == 0 && lane_block == 0;
  if (writes_cut && !slot_of_group) schedule.cuts[part] = {-1, part, 1, 0};
  int count = 0;  // tiles consumed
  constexpr int kTogetherBit = 4;
  uint32_t phases = 0;  // of s.announced[owner][buffer]: bit 2 owner + buffer; of s.together
  auto meet = [&] {     // of both warpgroups, as in absorbed.cuh
    mbarrier_arrive(&s.together);
    mbarrier_wait(&s.together, phases >> kTogetherBit & 1);
    phases ^= 1u << kTogetherBit;
  };
  Walk walk(s);
  while (walk.next(p, schedule, s, part)) {
    Dense::Place place;
    p.place(place, walk.group - 1);
    const int lanes = max(0, min(kLanes, static_cast<int>(place.num_rows) * p.num_heads - lane0));

    // ---- Q: four threads a lane, all loads under way before the last group's is overwritten ----
    {
      const int l = threadIdx.x / 4, quarter = threadIdx.x % 4;
      const int of_row = (lane0 + l) / p.num_heads, head = lane0 + l - of_row * p.num_heads;
      const bool real = l < lanes;
      constexpr int kPieces = kWidth / 16 / 4;
      uint4 v[kPieces];
      const auto* from = reinterpret_cast<const unsigned char*>(p.q) + (place.first_row + of_row) * p.q_row_stride +
                         head * p.q_head_stride + 16 * quarter;
#pragma unroll
      for (int i = 0; i < kPieces; ++i)
        v[i] = real ? *reinterpret_cast<const uint4*>(from + 64 * i) : uint4{0, 0, 0, 0};
      meet();  // nobody still reads the last group's
      if (quarter == 0) {
        s.row_of_lane[l] = of_row;
        s.bounds[l] = real ? static_cast<int>(p.keys_of(place, of_row)) : 0;
      }
      s.turn_top[quarter][l] = ordered(-INFINITY);
      s.high[quarter / 2][quarter % 2][l] = ordered(-INFINITY);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int piece = 4 * i + quarter;
        *reinterpret_cast<uint4*>(query + piece / 8 * C::kQueryBlock + l * 128 + ((piece % 8) ^ (l % 8)) * 16) = v[i];
      }
    }
    fence_async_shared();
    meet();
    const int tiles = walk.last_tile - walk.first_tile;

    float o[kParts64][kLanes / 2];
#pragma unroll
    for (auto& m : o)
#pragma unroll
      for (float& x : m) x = 0.0f;
    float sum[2 * kEights];
#pragma unroll
    for (float& x : sum) x = 0.0f;

    auto wait_loaded = [&](int i) {
      mbarrier_wait(&s.loaded[(count + i) % kTileStages], (count + i) / kTileStages & 1);
    };
    auto wait_announced = [&](int i) {  // tile i's weights; once a tile
      const uint32_t which = i % 2 * 2 + i / 2 % 2;
      mbarrier_wait(&s.announced[which / 2][which % 2], phases >> which & 1);
      phases ^= 1u << which;
    };

#pragma unroll 1
    for (int own = self; own <= tiles; own += 2) {  // own == tiles: only the other's last tile is left
      const int slot = own % kTurnSlots, before = (own + kTurnSlots - 1) % kTurnSlots;
      const int buffer = own / 2 % 2, stage = (count + own) % kTileStages;
      float score[kLanes / 2];
      if (own < tiles) {
        // ---- scores ----
        const int first_key = (walk.first_tile + own) * kKeys;
        const bool inside = first_key + kKeys <= s.bounds[0];
        wait_loaded(own);
        if (!inside) {
          mend_tile8(stages + stage * kTileBytes8, s.states[stage], first_key, s.bounds[0], s.bounds[max(lanes, 1) - 1],
                     tid);
          named_barrier_sync(2 + self, 128);
        }
        {
          const uint64_t keys = k_major(uniform(stage_address + stage * kTileBytes8)),
                         queries = k_major(uniform(shared_address(query)));
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < kLatentSteps + kRopeSteps; ++k)
            wgmma_e4m3_ss(score, keys + descriptor_step(k / 4 * kBlockBytes + k % 4 * 32),
                          queries + descriptor_step(k / 4 * C::kQueryBlock + k % 4 * 32), k > 0);
          wgmma_commit();
          wgmma_wait<0>();
          hold_registers(score);
        }
        const uint32_t state0 = s.states[stage][row], state1 = s.states[stage][row + 8];
        if (!__all_sync(0xffffffffu, inside && state0 == kPresent && state1 == kPresent)) {
          const float add0 = state0 == kMarked ? NAN : 0.0f, add1 = state1 == kMarked ? NAN : 0.0f;
#pragma unroll
          for (int j = 0; j < kEights; ++j)
#pragma unroll
            for (int x = 0; x < 2; ++x) {
              const int bound = s.bounds[8 * j + 2 * t + x] - first_key;
              score[4 * j + x] = state0 == kAbsent || row >= bound ? -INFINITY : score[4 * j + x] + add0;
              score[4 * j + 2 + x] = state1 == kAbsent || row + 8 >= bound ? -INFINITY : score[4 * j + 2 + x] + add1;
            }
        }
        // ---- maxima of this tile: as in consume() ----
        {
          float m[2 * kEights];
#pragma unroll
          for (int c = 0; c < 2 * kEights; ++c) m[c] = fmaxf(score[c / 2 * 4 + c % 2], score[c / 2 * 4 + 2 + c % 2]);
          reduce_over_rows<kEights>(m, g, Larger{});
#pragma unroll
          for (int x = 0; x < 2; ++x)
            if (m[x] > -INFINITY) raise(&s.high[self][buffer][8 * g + 2 * t + x], ordered(m[x] * scale_log2));
        }
        named_barrier_sync(2 + self, 128);
      }
      if (own > 0) wait_announced(own - 1);
      if (own < tiles) {
        // ---- what the weights of this tile are relative to, a thread for each lane ----
        if (tid < kLanes) {
          const int high = s.high[self][buffer][tid], old = s.turn_top[before][tid], now = max(high, old);
          const int summed = s.turn_top[slot ^ 2][tid];  // after the last own tile
          const float top = from_ordered(now);
          auto factor = [&](int from) { return now == from ? 1.0f : exp2_fast(from_ordered(from) - top); };
          s.turn_top[slot][tid] = now;
          // Where nothing has been seen yet -inf stays -inf, a weight of 0.
          s.shift[self][tid] = now == ordered(-INFINITY) ? 0.0f : top - kWeightExponent;
          s.sum_factor[self][tid] = factor(summed);
          s.value_factor[slot][tid] = factor(old);
          s.high[self][buffer ^ 1][tid] = ordered(-INFINITY);  // of the next own tile
          const bool moved = __any_sync(0xffffffffu, now != old);
          if (lane == 0) s.moved[slot][warp] = moved;
        }
        named_barrier_sync(2 + self, 128);
        // ---- weights ----
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          float w[4];  // as the scores
          const int l = 8 * j + 2 * t;
          const float2 shift = *reinterpret_cast<const float2*>(&s.shift[self][l]),
                       by = *reinterpret_cast<const float2*>(&s.sum_factor[self][l]);
          w[0] = exp2_fast(fmaf(score[4 * j], scale_log2, -shift.x));
          w[1] = exp2_fast(fmaf(score[4 * j + 1], scale_log2, -shift.y));
          w[2] = exp2_fast(fmaf(score[4 * j + 2], scale_log2, -shift.x));
          w[3] = exp2_fast(fmaf(score[4 * j + 3], scale_log2, -shift.y));
          sum[2 * j] = fmaf(sum[2 * j], by.x, w[0] + w[2]);
          sum[2 * j + 1] = fmaf(sum[2 * j + 1], by.y, w[1] + w[3]);
          const uint32_t mine = pack_e4m3(w[0], w[2]) | pack_e4m3(w[1], w[3]) << 16;  // as in consume()
          const uint32_t other = __shfl_xor_sync(0xffffffffu, mine, 4);
          *reinterpret_cast<uint32_t*>(weight_store + buffer * C::kWeightBytes + 1024 * j) =
              __byte_perm(mine, other, order);
        }
        fence_async_shared();
        mbarrier_arrive(&s.announced[self][buffer]);
      }

      // ---- P V: the other's tile, then this warpgroup's ----
#pragma unroll 1
      for (int i = max(own - 1, 0); i <= min(own, tiles - 1); ++i) {
        if (i == own) wait_announced(i);
        else wait_loaded(i);
        const int of_slot = i % kTurnSlots;
        const int2 moved = *reinterpret_cast<const int2*>(s.moved[of_slot]);
        if ((moved.x | moved.y) != 0) {
#pragma unroll
          for (int j = 0; j < kEights; ++j)
#pragma unroll
            for (int x = 0; x < 2; ++x) {
              const float factor = s.value_factor[of_slot][8 * j + 2 * t + x];
#pragma unroll
              for (auto& e : o) e[4 * j + x] *= factor, e[4 * j + 2 + x] *= factor;
            }
        }
        const uint32_t tile_at = stage_address + (count + i) % kTileStages * kTileBytes8 + value_at;
        const uint64_t weight_operand = k_major(uniform(weight_address + i / 2 % 2 * C::kWeightBytes + i % 2 * 64));
        uint32_t a[2][kParts64][4];
#pragma unroll
        for (int k = 0; k < 2; ++k) {  // 32 keys each
#pragma unroll
          for (int m = 0; m < kParts64; ++m) {
            uint32_t v[4];
            ldmatrix_x4_trans(v, (tile_at ^ m % 2 * 64) + k * (32 * 128) + m / 2 * kBlockBytes);
            a[k][m][0] = __byte_perm(v[0], v[1], 0x6420);
            a[k][m][1] = __byte_perm(v[0], v[1], 0x7531);
            a[k][m][2] = __byte_perm(v[2], v[3], 0x6420);
            a[k][m][3] = __byte_perm(v[2], v[3], 0x7531);
          }
          wgmma_fence();
#pragma unroll
          for (int m = 0; m < kParts64; ++m) wgmma_e4m3_rs(o[m], a[k][m], weight_operand + descriptor_step(32 * k));
          wgmma_commit();
        }
        wgmma_wait<0>();
        hold_registers(a[0]), hold_registers(a[1]);
#pragma unroll
        for (auto& m : o) hold_registers(m);
        if (lane < kReleasingLanes) mbarrier_arrive(&s.free[(count + i) % kTileStages]);
      }
    }
    count += tiles;

    // ---- results ----
    // Sums over eight threads as maxima above: a thread is left with two lanes.
    reduce_over_rows<kEights>(sum, g, Sum{});
#pragma unroll
    for (int x = 0; x < 2; ++x) s.sums[self][warp][8 * g + 2 * t + x] = sum[x];
    meet();
    p.place(place, walk.group - 1);  // again, rather than kept through the loop
    const bool complete = walk.first_tile == 0 && walk.last_tile == walk.tiles;
    if (threadIdx.x < kLanes) {
      const int l = threadIdx.x, last = tiles - 1;
      const int top = s.turn_top[last % kTurnSlots][l];
      float total = 0.0f;
      for (int i = 0; i < 2;
           ++i) {                 // the warpgroup of the last tile, and the other, whose sums stand where its tile was
        const int of = last - i;  // -1: none, a sum of 0
        const int summed = s.turn_top[(of + kTurnSlots) % kTurnSlots][l];
        const float by = summed == top ? 1.0f : exp2_fast(from_ordered(summed) - from_ordered(top));
        for (int w = 0; w < kWarpsEach; ++w) total += s.sums[(of + 2) % 2][w][l] * by;
      }
      const bool empty = total == 0.0f;
      s.inverse[l] = empty ? 0.0f : p.cache.scale / total;
      const int64_t out_row = place.first_row + s.row_of_lane[l];
      const int head = lane0 + l - s.row_of_lane[l] * p.num_heads;
      const int64_t index =
          ((2 * int64_t{part} + (walk.first_tile == 0)) * schedule.lane_blocks + lane_block) * kLanes + l;
      s.out_at[l] = l >= lanes ? -1
                    : complete ? out_row * p.out_row_stride + head * p.out_head_stride
                               : index * kLatent;
      if (l < lanes) {
        const float lse = empty ? -INFINITY : (from_ordered(top) - kWeightExponent + __log2f(total)) * kLn2;
        if (!complete) p.partial_lse[index] = lse;
        else if (p.lse != nullptr) p.lse[out_row * p.lse_row_stride + head] = lse;
      }
    }
    meet();
    const int column0 = self * kHalf + 16 * warp + 2 * g;  // of the first product
    const bool as_bf16 = complete && p.out_dtype == DType::kBf16;
    unsigned char* const out = static_cast<unsigned char*>(complete ? p.out : static_cast<void*>(p.partial));
    // A loop, for which what is left of O moves to the front: instructions that run once a call cost 8 cycles each,
    // coming from the L2 or memory.
    constexpr int kAtOnce = 2;  // eights
#pragma unroll 1
    for (int j0 = 0; j0 < kEights; j0 += kAtOnce) {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const int l = 8 * (j0 + j) + 2 * t + x;
          const int64_t at = s.out_at[l];
          if (at < 0) continue;
          const float inverse = s.inverse[l];
          unsigned char* const to = out + (at + column0) * (as_bf16 ? 2 : 4);
#pragma unroll
          for (int m = 0; m < kParts64; ++m) {
            const float low = o[m][4 * j + x] * inverse, high = o[m][4 * j + 2 + x] * inverse;
            if (as_bf16) *reinterpret_cast<uint32_t*>(to + 128 * m) = round_to_bf16x2(low, high);
            else *reinterpret_cast<float2*>(to + 256 * m) = {low, high};
          }
        }
#pragma unroll
      for (auto& e : o)
#pragma unroll
        for (int x = 0; x + 4 * kAtOnce < kLanes / 2; ++x) e[x] = e[x + 4 * kAtOnce];
    }
    if (walk.first_tile == 0 && writes_cut) {
      const int parts = walk.parts(s, part);
      // Blank groups come last, and in a part's slot the group stays that goes on behind it.
      if (slot_of_group || parts > 1)
        schedule.cuts[slot_of_group ? walk.group - 1 : part] = {walk.group - 1, part, parts, 0};
    }
  }
}

// Grid: as of absorbed_kernel. combine_kernel follows. p.softmax_scale has the scales of queries and cache in it.
template <int kColumns>
__global__ void __launch_bounds__(kThreads, 1)
    absorbed_fp8_kernel(const __grid_constant__ Dense p, const Schedule schedule,
                        const __grid_constant__ CUtensorMap map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kAlignment) unsigned char shared[];
  using C = Config<kColumns>;
  unsigned char* stages = shared;
  unsigned char* query = stages + kTileStages * kTileBytes8;
  unsigned char* weights = query + C::kQueryBytes;
  Shared8& s = *reinterpret_cast<Shared8*>(shared + C::kOperandBytes);
  const int lane_block = blockIdx.x % schedule.lane_blocks, part = blockIdx.x / schedule.lane_blocks;
  if (threadIdx.x == 0) {
    prefetch_map(map);
    for (int i = 0; i < kTileStages; ++i) {
      mbarrier_init(&s.loaded[i], 32);
      mbarrier_init(&s.free[i], kConsumerThreads / 32 * kReleasingLanes);
    }
    for (int i = 0; i < 4; ++i) mbarrier_init(&s.announced[i / 2][i % 2], kConsumerThreads / 2);
    mbarrier_init(&s.together, kConsumerThreads);
    fence_mbarrier_init();
    s.first_group = schedule.num_groups;
    s.end_group = 0;
    s.first_start = 0;
    s.piece = 0;
  }
  wait_for_stream();
  // The merge starts when this block ends: announced here, its blocks wait where no part is, which cost the bf16 kernel
  // 1.2 us of 14.1 with one request.
  find_part(p, schedule, part, s, reinterpret_cast<int*>(weights));
  if (threadIdx.x < kConsumerThreads) {
    register_increase<kOthersRegisters>();
    if constexpr (kColumns == kLanes) consume_turns(p, schedule, s, query, stages, weights, part, lane_block);
    else consume<kColumns>(p, schedule, s, query, stages, weights, part, lane_block);
  } else {
    register_decrease<kLoaderRegisters>();
    if (threadIdx.x < kConsumerThreads + 32)
      produce(p, schedule, s, shared_address(stages), part, lane_block * kLanes, map);
  }
#else
  __trap();  // the set refuses: see set.cpp
#endif
}

}  // namespace fp8
}  // namespace sm90
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
