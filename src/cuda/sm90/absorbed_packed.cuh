// Absorbed MLA attention on Hopper: bf16 queries, 656-byte rows (512 e4m3 | 4 fp32 scales | 64 bf16 of RoPE), dense
// over pages of any size, up to 32 lanes (rows x heads of a request).
//
// Shapes. A tile is 64 keys, 41,984 bytes; at 4.2 TB/s, 132 SMs and 1.7 GHz the memory takes 2,240 cycles for it. With
// 32 lanes S is 576 cycles of the f16 tensor cores, P V 512; with 16 half of that.
//
// Conversion. e4m3 is exact in f16, so K and V are converted unscaled, two values an instruction, in the registers of
// the A operand (K and V^T are A, lanes are N as in absorbed_fp8.cuh): 512 conversions of a warp for the scores and
// 512 with 256 byte permutations for the values, 640 cycles of four schedulers at half rate (times measured fit an
// eighth: docs/kernels/mla_decode_sm90.md). Nothing converted is written to shared memory. Scales go elsewhere, so that
// any positive fp32 scale is right:
//   scores  sums of the four blocks of 128 columns are kept apart, and added with their key's scale in fp32. Queries
//           are f16 too, each (lane, block) times a power of two that brings its largest value to 2^14;
//   values  a scale is part of the weight: block b of V has weights exp2((score - base) + (log2 scale_b - offset_b)),
//           where base belongs to the denominator and offset_b follows the maximum of just that exponent; the block is
//           multiplied by exp2(offset_b) at the end, in two halves, which neither overflow nor underflow where the
//           result does not. That is five exponentials a score: 640 cycles of a tile at 32 lanes, 320 at 16.
//           score - base comes first: all five exponents have the same rounding then, which leaves the quotient. With
//           the logarithm added to the score, what fp32 does not hold of their sum stayed: all of a scale at 1e8.
//           A scale's sign goes to the weight.
//
// Bases. A base is 8 below the largest exponent when it was set, and weights are f16: as long as none is infinite, up
// to 2^16, it stays, and what was summed needs no factor. So no maxima are taken; the group's one barrier between
// weights and products' buffer also asks whether any weight was infinite, and if so maxima are, and weights computed
// again: for the first tile, and where a later key's exponent is 8 above all before.
//
// Roles. Two groups of four warps take tiles in turn, each with sums of its own over all 512 columns (128 registers a
// thread at 32 lanes), merged at the end of a piece: they wait for each other nowhere else, and one's softmax passes
// under the other's products. Warp w of a group scores 16 keys (M of 64 keys; Q from shared memory) and computes their
// weights where the scores are, four times 16 keys by lanes; stmatrix turns them, and all are the B operand of P V,
// V^T in registers: one ldmatrix.trans for 16 columns by 32 keys. Two barriers of a group a tile. The other
// warpgroup's first warp loads, a page at a time with bulk copies, or row by row. A tile is released when its values
// are in registers.
//
// Before, weights stayed in registers: every warp computed those of one block for all keys, from scores exchanged in
// fp32, and multiplied with mma.sync. With 32 lanes registers ran out (224 bytes spilled); 128 requests of 4,096 keys
// took 165 us where they take 126 now.
//
// Shared memory: four tiles 164 KB, Q 18 KB (36 with 32 lanes), weights 16 KB: of all four blocks with 16 lanes, of two
// and again two with 32. With three tiles, for which all had room, 32 requests of 32,768 keys took 253 us, with four
// 237. Rows of 656 bytes are 41 times 16 bytes: eight rows' pieces lie in different banks without a swizzle. A tile of
// 32 lanes is written (41 KB) and read twice (40 + 32), Q read once (36), weights written (16) and read by eight
// products (32): 197 KB, 1,580 cycles.
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
using fp8::from_ordered;
using fp8::ordered;
using fp8::raise;

constexpr int kRowBytes = 656, kTileBytesPacked = kKeys * kRowBytes;  // 41,984
constexpr int kScaleAt = kLatent, kRopeAt = kLatent + 16;             // in a row
constexpr int kScaleBlocks = 4, kScaleColumns = kLatent / kScaleBlocks;
constexpr int kGroups = 2, kGroupThreads = 128, kWarpsEach = 4;
constexpr int kMaxStages = 4;
constexpr int kValueBlocks = kLatent / 64;  // products of 64 columns of V
// The largest weight was 2^8 when the base was last raised; up to twice 2^15 later ones need not raise it, and those
// down to 2^-14 keep f16's 11 bits.
constexpr float kWeightExponent = 8.0f;
constexpr uint32_t kHalfInfinity = 0x7c00;
constexpr float kMostAdded = 0x1p20f;          // weights of denominators, in fp32, that raise no base
constexpr float kNoBase = -3.40282347e38f;     // what nothing has been seen for; finite, so that -inf less it is -inf
constexpr int kNextScale = 8 * kRowBytes / 4;  // from a thread's first key to its second
constexpr int kBases = kScaleBlocks + 1;       // offsets of each block's weights, and the denominator's base
// The least offset: what a block has is nothing beside 2^-149 long before, and sums with logarithms are exact to 2^-3.
constexpr float kLeastOffset = -0x1p20f;

struct SharedPacked : Shared {
  uint64_t loaded[kMaxStages], free[kMaxStages];
  int whole[kMaxStages];  // whether every key of a tile is there
  float factor[kScaleBlocks][32];
  float base[kGroups][kBases][32];  // offsets of blocks, then the denominator's base
  int top[kGroups][kBases][32];     // ordered(): of a tile that raises them, its largest exponents
  float sums[kGroups][kWarpsEach][32];
  float inverse[32];
  float to_common[kGroups][kScaleBlocks][32], half[kScaleBlocks][32];  // of results
  int64_t out_at[32];  // where a lane's result begins, in elements; -1: no such lane
  alignas(16) uint8_t states[kMaxStages][kKeys];
};

template <int kColumns>
struct Config {
  static constexpr int kStages = 4;
  static constexpr int kLoaderRegisters = kColumns == 16 ? 40 : 24, kOthersRegisters = kColumns == 16 ? 232 : 240;
  static constexpr int kQueryBlock = kColumns * 128;  // 64 columns
  static constexpr int kQueryBytes = kWidth / 64 * kQueryBlock;
  static constexpr int kWeightBlock = kColumns * 128;  // f16 weights of 64 keys over one block of columns
  // Of a group: all blocks, or with 32 lanes, for which a fourth tile would have no room then, two and again two.
  static constexpr int kBlocksAtOnce = kColumns == 16 ? kScaleBlocks : kScaleBlocks / 2;
  static constexpr int kWeightBytes = kBlocksAtOnce * kWeightBlock;
  static constexpr int kOperandBytes = kStages * kTileBytesPacked + kQueryBytes + kGroups * kWeightBytes;
  static constexpr int kSharedBytes = kOperandBytes + static_cast<int>(sizeof(SharedPacked));
  static_assert(kSharedBytes <= 227 * 1024 && kOperandBytes % 16 == 0 && kTileBytesPacked % kAlignment == 0 &&
                kWeightBlock % kAlignment == 0);
};

__device__ inline float power_of_two(int exponent_field) {
  return __uint_as_float(static_cast<uint32_t>(exponent_field) << 23);
}

__device__ inline uint32_t max_f16x2(uint32_t a, uint32_t b) {  // NaN only where both are
  uint32_t y;
  asm("max.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}
/// Of a scale's magnitude. Of those that are no numbers nothing is left: lanes that see such a key have a NaN for a
/// score.
__device__ inline float logarithm(float scale) { return fabsf(scale) < INFINITY ? __log2f(fabsf(scale)) : 0.0f; }

// ---- loader -----------------------------------------------------------------------------------------------------

/// By one warp.
template <int kStages>
__device__ void produce(const Dense& p, const Schedule& schedule, SharedPacked& s, uint32_t stages, int part,
                        int lane0) {
  const int lane = threadIdx.x % 32;
  const auto page_size = static_cast<uint32_t>(p.cache.page_size);
  const bool by_tile = page_size % kKeys == 0;  // a tile lies in one page
  int count = 0;
  Walk walk(s);
  while (walk.next(p, schedule, s, part)) {
    Dense::Place g;
    p.place(g, walk.group - 1);
    const int lanes_end = static_cast<int>(min(int64_t{lane0 + kLanes}, g.num_rows * p.num_heads));
    const int most = lanes_end > lane0 ? static_cast<int>(p.keys_of(g, (lanes_end - 1) / p.num_heads)) : 0;
    auto page_at = [&](int key) {  // -1: nothing there
      if (key >= most) return -1;
      const int page = g.list.ids[static_cast<uint32_t>(key) / page_size];
      return page >= 0 && page < p.cache.num_pages ? page : -1;
    };
    auto copy = [&](uint32_t target, int page, int key, uint32_t bytes, uint64_t* barrier) {
      copy_bytes(target,
                 static_cast<const unsigned char*>(p.cache.data) + page * p.cache.page_stride_bytes +
                     static_cast<uint32_t>(key) % page_size * kRowBytes,
                 bytes, barrier, evict_first_policy());
    };
    for (int tile = walk.first_tile; tile < walk.last_tile; ++tile, ++count) {
      const int stage = count % kStages, key0 = tile * kKeys, key = 2 * lane;  // a lane has two keys of the tile
      const uint32_t target = stages + stage * kTileBytesPacked;
      // The page table's latency passes while the stage is still in use.
      const int first = page_at(by_tile ? key0 : key0 + key), second = by_tile ? first : page_at(key0 + key + 1);
      const bool there0 = first >= 0 && key0 + key < most, there1 = second >= 0 && key0 + key + 1 < most;
      const bool whole = __all_sync(0xffffffffu, there0 && there1);
      mbarrier_wait(&s.free[stage], (count / kStages & 1) ^ 1);
      *reinterpret_cast<uint16_t*>(&s.states[stage][key]) = static_cast<uint16_t>(
          static_cast<uint32_t>(there0 ? kPresent : kAbsent) | static_cast<uint32_t>(there1 ? kPresent : kAbsent) << 8);
      if (lane == 0) s.whole[stage] = whole;
      const uint32_t bytes = by_tile ? (lane == 0 && first >= 0 ? kTileBytesPacked : 0)
                                     : (there0 ? kRowBytes : 0) + (there1 ? kRowBytes : 0);
      if (bytes == 0) {
        mbarrier_arrive(&s.loaded[stage]);
      } else {
        mbarrier_arrive_expecting(&s.loaded[stage], bytes);
        if (by_tile) {
          copy(target, first, key0, kTileBytesPacked, &s.loaded[stage]);
        } else {
          if (there0) copy(target + key * kRowBytes, first, key0 + key, kRowBytes, &s.loaded[stage]);
          if (there1) copy(target + (key + 1) * kRowBytes, second, key0 + key + 1, kRowBytes, &s.loaded[stage]);
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

/// Makes this tile's largest weights 2^kWeightExponent where they were larger, and what was summed before so much
/// smaller (nothing, with the first). By a group; `scales` are those of the thread's first key, its second is eight
/// rows on.
template <int kColumns>
__device__ inline void raise_bases(SharedPacked& s, int self, int tid, const float (&score)[kColumns / 2],
                                   const float* scales, bool first, float (&o)[kValueBlocks][kColumns / 2],
                                   float (&sum)[kColumns / 4]) {
  constexpr int kEights = kColumns / 8;
  const int g = tid % 32 / 4, t = tid % 4;
  // The base of the denominator, then offsets, which are what is left of exponents above it.
  auto base = [&](int l) {
    const float before = s.base[self][kScaleBlocks][l], top = from_ordered(s.top[self][kScaleBlocks][l]);
    if (top == -INFINITY) return before;
    // From 2^27 on a difference may be rounded to twice itself: that weight would be too large again, and again.
    const float now = top - kWeightExponent;
    return fmaxf(before, top - now > kWeightExponent ? top : now);
  };
  float less[2 * kEights];
#pragma unroll
  for (float& x : less) x = 0.0f;
#pragma unroll 1
  for (int step = 0; step < kBases; ++step) {
    const bool block = step > 0;
    const int b = block ? step - 1 : kScaleBlocks;
    const float log0 = block ? logarithm(scales[b]) : 0.0f, log1 = block ? logarithm(scales[kNextScale + b]) : 0.0f;
    // Over the eight threads of a column, as denominators at the end: a thread is left with two lanes.
    float m[2 * kEights];
#pragma unroll
    for (int c = 0; c < 2 * kEights; ++c)
      m[c] = fmaxf((score[c / 2 * 4 + c % 2] - less[c]) + log0, (score[c / 2 * 4 + 2 + c % 2] - less[c]) + log1);
    auto halve = [&](auto of) {
      constexpr int kLeft = decltype(of)::value;
      if constexpr (kLeft < kEights) {
        const bool upper = (g & kLeft) != 0;
#pragma unroll
        for (int c = 0; c < 2 * kLeft; ++c) {
          const float low = m[c], high = m[c + 2 * kLeft];
          m[c] = fmaxf(upper ? high : low, __shfl_xor_sync(0xffffffffu, upper ? low : high, 4 * kLeft));
        }
      }
    };
    halve(std::integral_constant<int, 2>{});
    halve(std::integral_constant<int, 1>{});
#pragma unroll
    for (int offset = 4 * kEights; offset < 32; offset *= 2)
#pragma unroll
      for (int x = 0; x < 2; ++x) m[x] = fmaxf(m[x], __shfl_xor_sync(0xffffffffu, m[x], offset));
    if (g < kEights) {
#pragma unroll
      for (int x = 0; x < 2; ++x)
        if (m[x] > -INFINITY) raise(&s.top[self][b][8 * g + 2 * t + x], ordered(m[x]));
    }
    named_barrier_sync(2 + self, kGroupThreads);
    if (!block) {
#pragma unroll
      for (int c = 0; c < 2 * kEights; ++c) less[c] = base(c / 2 * 8 + 2 * t + c % 2);
    }
  }
  auto change = [&](int l) { return s.base[self][kScaleBlocks][l] - base(l); };
  auto offset = [&](int b, int l) {
    const float least = fmaxf(kLeastOffset, s.base[self][b][l] + change(l));
    return fmaxf(least, from_ordered(s.top[self][b][l]) - kWeightExponent);
  };
  constexpr int kEach = (kBases * kColumns + kGroupThreads - 1) / kGroupThreads;
  float now[kEach];
#pragma unroll
  for (int k = 0; k < kEach; ++k)
    if (const int i = k * kGroupThreads + tid, b = i / kColumns, l = i % kColumns; b < kBases)
      now[k] = b < kScaleBlocks ? offset(b, l) : base(l);
  if (!first) {
#pragma unroll
    for (int j = 0; j < kEights; ++j)
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int l = 8 * j + 2 * t + x;
        const float by_base = change(l);
        sum[2 * j + x] *= exp2_fast(by_base);
#pragma unroll
        for (int b = 0; b < kScaleBlocks; ++b) {
          const float by = exp2_fast(by_base + (s.base[self][b][l] - offset(b, l)));
#pragma unroll
          for (int m = 2 * b; m < 2 * b + 2; ++m) o[m][4 * j + x] *= by, o[m][4 * j + 2 + x] *= by;
        }
      }
  }
  named_barrier_sync(2 + self, kGroupThreads);
#pragma unroll
  for (int k = 0; k < kEach; ++k) {
    if (const int i = k * kGroupThreads + tid, b = i / kColumns, l = i % kColumns; b < kBases) {
      s.base[self][b][l] = now[k];
      s.top[self][b][l] = ordered(-INFINITY);
    }
  }
  named_barrier_sync(2 + self, kGroupThreads);
}

template <int kColumns>
__device__ void consume(const Dense& p, const Schedule& schedule, SharedPacked& s, unsigned char* query,
                        unsigned char* stages, unsigned char* weights, int part, int lane_block) {
  using C = Config<kColumns>;
  constexpr int kEights = kColumns / 8, kStages = C::kStages;
  const int self = static_cast<int>(uniform(threadIdx.x / kGroupThreads));
  const int tid = threadIdx.x % kGroupThreads, warp = __shfl_sync(0xffffffffu, tid / 32, 0), lane = tid % 32;
  const int g = lane / 4, t = lane % 4;
  const int lane0 = lane_block * kLanes;
  const float scale_log2 = p.softmax_scale * kLog2E;
  const uint32_t stage_address = shared_address(stages);
  const uint64_t query_operand = k_major(shared_address(query));
  const bool slot_of_group = schedule.num_slots == schedule.num_groups;
  // ldmatrix: of keys, matrices are rows 0..7 and 8..15 of this warp's 16, then the same 16 bytes on; of values, 16
  // columns of 32 keys, which are the rows of A that this warp has. stmatrix: lanes by keys, eight of each: keys 8..15
  // of this warp's 16 behind 0..7, then the next eight lanes.
  const uint32_t key_at = (16 * warp + lane % 16) * kRowBytes + lane / 16 * 16;
  const uint32_t value_at = lane * kRowBytes + 16 * warp;
  const uint32_t own_weights = shared_address(weights) + self * C::kWeightBytes;
  const uint64_t weight_operand = k_major(uniform(own_weights));
  const uint32_t weight_store =
      own_weights + (lane / 16 * 8 + lane % 8) * 128 + ((2 * warp + lane / 8 % 2) ^ (lane % 8)) * 16;
  const int own_row = 16 * warp + g;  // of the tile's keys, and own_row + 8
  uint32_t phase = 0;
  auto meet = [&] {  // of both groups, as in absorbed.cuh
    mbarrier_arrive(&s.together);
    mbarrier_wait(&s.together, phase);
    phase ^= 1;
  };
  int count = 0;  // tiles consumed by both groups
  const bool writes_cut = threadIdx.x == 0 && lane_block == 0;
  if (writes_cut && !slot_of_group) schedule.cuts[part] = {-1, part, 1, 0};
  Walk walk(s);
  while (walk.next(p, schedule, s, part)) {
    Dense::Place place;
    p.place(place, walk.group - 1);
    const int lanes = max(0, min(kColumns, static_cast<int>(place.num_rows) * p.num_heads - lane0));

    // ---- Q ----
    meet();  // nobody still reads the last group's
    if (threadIdx.x < kColumns) {
      const int l = threadIdx.x, of_row = (lane0 + l) / p.num_heads, head = lane0 + l - of_row * p.num_heads;
      const bool real = l < lanes;
      s.row_of_lane[l] = of_row;
      s.query_at[l] = real ? (place.first_row + of_row) * p.q_row_stride + head * p.q_head_stride : -1;
      s.bounds[l] = real ? static_cast<int>(p.keys_of(place, of_row)) : 0;
    }
    for (int i = tid; i < kBases * kColumns; i += kGroupThreads) {
      s.base[self][i / kColumns][i % kColumns] = i / kColumns == kScaleBlocks ? kNoBase : kLeastOffset;
      s.top[self][i / kColumns][i % kColumns] = ordered(-INFINITY);
    }
    meet();
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
      static_assert(kColumns * 8 <= kConsumerThreads);
      const bool has_rope = threadIdx.x < kColumns * 8;
      const int rope_lane = threadIdx.x / 8, rope_piece = threadIdx.x % 8;
      uint4 rope{0, 0, 0, 0};
      if (const int64_t at = has_rope ? s.query_at[rope_lane] : -1; at >= 0)
        rope = *reinterpret_cast<const uint4*>(p.q + at + kLatent + 8 * rope_piece);
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
      if (has_rope)
        *reinterpret_cast<uint4*>(query + kLatent / 64 * C::kQueryBlock + rope_lane * 128 +
                                  (rope_piece ^ (rope_lane % 8)) * 16) = rope;
    }
    fence_async_shared();
    meet();
    const int least = s.bounds[0], most = s.bounds[max(lanes, 1) - 1];
    const int tiles = walk.last_tile - walk.first_tile;

    float o[kValueBlocks][kColumns / 2];  // of O^T: 64 columns each, as wgmma leaves them
#pragma unroll
    for (auto& m : o)
#pragma unroll
      for (float& x : m) x = 0.0f;
    float sum[2 * kEights];
#pragma unroll
    for (float& x : sum) x = 0.0f;

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
      const auto* scales = reinterpret_cast<const float*>(tile_bytes + own_row * kRowBytes + kScaleAt);
      {
        float part_sum[kColumns / 2];
        uint32_t a[2][4][4];
        constexpr int kRounds = 2 * kScaleBlocks + 1;
#pragma unroll
        for (float& x : score) x = 0.0f;
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {  // while the round before is under way
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
          hold_registers(a[r % 2]);
          if (r > 0) {
            wgmma_wait<0>();
            hold_registers(a[(r - 1) % 2]);
          }
          if (r > 0 && r % 2 == 0) {  // a block's sums are there
            const int b = r / 2 - 1;
            hold_registers(part_sum);
            const float by0 = scales[b], by1 = scales[kNextScale + b];
#pragma unroll
            for (int j = 0; j < kEights; ++j) {
              const float2 factor = *reinterpret_cast<const float2*>(&s.factor[b][8 * j + 2 * t]);
              score[4 * j] = fmaf(by0, factor.x * part_sum[4 * j], score[4 * j]);
              score[4 * j + 1] = fmaf(by0, factor.y * part_sum[4 * j + 1], score[4 * j + 1]);
              score[4 * j + 2] = fmaf(by1, factor.x * part_sum[4 * j + 2], score[4 * j + 2]);
              score[4 * j + 3] = fmaf(by1, factor.y * part_sum[4 * j + 3], score[4 * j + 3]);
            }
          }
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const uint64_t b = query_operand + descriptor_step(r * C::kQueryBlock + 32 * k);
            if (r == kRounds - 1) wgmma_bf16_rs(part_sum, a[r % 2][k], b, k > 0);
            else wgmma_f16_rs(part_sum, a[r % 2][k], b, k > 0 || r % 2 != 0);
          }
          wgmma_commit();
        }
        wgmma_wait<0>();
        hold_registers(a[(kRounds - 1) % 2]);
        hold_registers(part_sum);
#pragma unroll
        for (int x = 0; x < kColumns / 2; ++x) score[x] = fmaf(scale_log2, part_sum[x], score[x]);
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

      // ---- weights: of the first tile when bases are there; again if one was too large for f16 ----
      uint32_t weight[kScaleBlocks][kEights][2];  // lanes 8 j + 2 t and the next of key own_row; of key own_row + 8
      float added[2 * kEights];
      uint32_t scale_signs;  // or'ed
      bool again = i == self;
#pragma unroll 1
      do {
        if (again) raise_bases<kColumns>(s, self, tid, score, scales, i == self, o, sum);
        hold_registers(score);  // sums of scores and logarithms would be kept for a second time, 64 registers of them
        uint32_t most_half = 0;
        float most_added = 0.0f;
        scale_signs = 0;
#pragma unroll
        for (int b = 0; b < kScaleBlocks; ++b) {
          const float scale0 = scales[b], scale1 = scales[kNextScale + b];
          const float log0 = logarithm(scale0), log1 = logarithm(scale1);
          scale_signs |= __float_as_uint(scale0) | __float_as_uint(scale1);
#pragma unroll
          for (int j = 0; j < kEights; ++j) {
            const float2 base = *reinterpret_cast<const float2*>(&s.base[self][kScaleBlocks][8 * j + 2 * t]);
            const float2 offset = *reinterpret_cast<const float2*>(&s.base[self][b][8 * j + 2 * t]);
            weight[b][j][0] = round_to_f16x2(exp2_fast((score[4 * j] - base.x) + (log0 - offset.x)),
                                             exp2_fast((score[4 * j + 1] - base.y) + (log0 - offset.y)));
            weight[b][j][1] = round_to_f16x2(exp2_fast((score[4 * j + 2] - base.x) + (log1 - offset.x)),
                                             exp2_fast((score[4 * j + 3] - base.y) + (log1 - offset.y)));
            most_half = max_f16x2(most_half, max_f16x2(weight[b][j][0], weight[b][j][1]));
          }
        }
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          const float2 base = *reinterpret_cast<const float2*>(&s.base[self][kScaleBlocks][8 * j + 2 * t]);
          added[2 * j] = exp2_fast(score[4 * j] - base.x) + exp2_fast(score[4 * j + 2] - base.x);
          added[2 * j + 1] = exp2_fast(score[4 * j + 1] - base.y) + exp2_fast(score[4 * j + 3] - base.y);
          most_added = fmaxf(most_added, fmaxf(added[2 * j], added[2 * j + 1]));
        }
        const bool too_large =
            (most_half & 0x7fffu) == kHalfInfinity || most_half >> 16 == kHalfInfinity || most_added > kMostAdded;
        // All have read the weights of the tile before, too.
        again = named_barrier_any(2 + self, kGroupThreads, too_large);
      } while (again);
#pragma unroll
      for (int c = 0; c < 2 * kEights; ++c) sum[c] += added[c];
      if (static_cast<int>(scale_signs) < 0) {
#pragma unroll
        for (int b = 0; b < kScaleBlocks; ++b)
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            const uint32_t signs = scales[x * kNextScale + b] < 0.0f ? 0x80008000u : 0;
#pragma unroll
            for (int j = 0; j < kEights; ++j) weight[b][j][x] ^= signs;
          }
      }
      auto store_weights = [&](int first) {  // of the blocks from `first` on
#pragma unroll
        for (int b = 0; b < C::kBlocksAtOnce; ++b)
#pragma unroll
          for (int j = 0; j < kEights; j += 2)
            stmatrix_x4_trans(weight_store + b * C::kWeightBlock + j * (8 * 128), weight[first + b][j][0],
                              weight[first + b][j][1], weight[first + b][j + 1][0], weight[first + b][j + 1][1]);
        fence_async_shared();
        named_barrier_sync(2 + self, kGroupThreads);
      };
      store_weights(0);

      // ---- P V: 64 columns by 64 keys at a time ----
      {
        uint32_t a[2][4][4], v[2][2][4];
        auto load = [&](int m) {
#pragma unroll
          for (int half = 0; half < 2; ++half)
            ldmatrix_x4_trans(v[m % 2][half], tile + value_at + half * (32 * kRowBytes) + 64 * m);
        };
        auto end_products = [&] {
          wgmma_wait<0>();
          hold_registers(a[0]), hold_registers(a[1]);
#pragma unroll
          for (auto& m : o) hold_registers(m);
        };
        load(0);
#pragma unroll
        for (int m = 0; m < kValueBlocks; ++m) {
          if (m + 1 < kValueBlocks) load(m + 1);
          if (m == 2 * C::kBlocksAtOnce) {  // all have read the first two blocks' weights
            end_products();
            named_barrier_sync(2 + self, kGroupThreads);
            store_weights(C::kBlocksAtOnce % kScaleBlocks);
          } else if (m >= 2) {  // the registers of A are free again
            wgmma_wait<1>();
            hold_registers(a[m % 2]);
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const uint32_t low = v[m % 2][k / 2][k % 2 * 2], high = v[m % 2][k / 2][k % 2 * 2 + 1];
            e4m3_to_f16(__byte_perm(low, 0, 0x3120), a[m % 2][k][0], a[m % 2][k][1]);
            e4m3_to_f16(__byte_perm(high, 0, 0x3120), a[m % 2][k][2], a[m % 2][k][3]);
          }
          hold_registers(a[m % 2]);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k)
            wgmma_f16_rs(o[m], a[m % 2][k],
                         weight_operand + descriptor_step(m / 2 % C::kBlocksAtOnce * C::kWeightBlock + 32 * k), true);
          wgmma_commit();
        }
        // The values are in registers, and with them the tile is no longer needed.
        if (lane < kReleasingLanes) mbarrier_arrive(&s.free[stage]);
        end_products();
      }
    }
    count += tiles;

    // ---- results ----
    // Denominators: over the eight threads of a column, rounds in which a thread keeps half of its columns and gives
    // the other half away and then rounds of what is left; over warps and groups in order.
    auto weight_of = [](float from, float to) { return from == to ? 1.0f : exp2_fast(from - to); };
    auto halve = [&](auto of) {
      constexpr int kLeft = decltype(of)::value;  // of eights afterwards
      if constexpr (kLeft < kEights) {
        const bool upper = (g & kLeft) != 0;
#pragma unroll
        for (int c = 0; c < 2 * kLeft; ++c) {
          const float low = sum[c], high = sum[c + 2 * kLeft];
          sum[c] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, 4 * kLeft);
        }
      }
    };
    halve(std::integral_constant<int, 2>{});
    halve(std::integral_constant<int, 1>{});
#pragma unroll
    for (int offset = 4 * kEights; offset < 32; offset *= 2)
#pragma unroll
      for (int x = 0; x < 2; ++x) sum[x] += __shfl_xor_sync(0xffffffffu, sum[x], offset);
    if (g < kEights) {
#pragma unroll
      for (int x = 0; x < 2; ++x) s.sums[self][warp][8 * g + 2 * t + x] = sum[x];
    }
    meet();
    p.place(place, walk.group - 1);  // again, rather than kept through the loop
    const bool complete = walk.first_tile == 0 && walk.last_tile == walk.tiles;
    if (threadIdx.x < kColumns) {
      const int l = threadIdx.x;
      const float level = fmaxf(s.base[0][kScaleBlocks][l], s.base[1][kScaleBlocks][l]);
      float total = 0.0f;
      for (int group = 0; group < kGroups; ++group) {
        const float by = weight_of(s.base[group][kScaleBlocks][l], level);
        for (int w = 0; w < kWarpsEach; ++w) total += s.sums[group][w][l] * by;
      }
      const bool empty = total == 0.0f;
      s.inverse[l] = empty ? 0.0f : 1.0f / total;
      const int64_t out_row = place.first_row + s.row_of_lane[l];
      const int head = lane0 + l - s.row_of_lane[l] * p.num_heads;
      const int64_t index =
          ((2 * int64_t{part} + (walk.first_tile == 0)) * schedule.lane_blocks + lane_block) * kLanes + l;
      s.out_at[l] = l >= lanes ? -1
                    : complete ? out_row * p.out_row_stride + head * p.out_head_stride
                               : index * kLatent;
      if (l < lanes) {
        const float lse = empty ? -INFINITY : (level + __log2f(total)) * kLn2;
        if (!complete) p.partial_lse[index] = lse;
        else if (p.lse != nullptr) p.lse[out_row * p.lse_row_stride + head] = lse;
      }
    }
    if (tid < kScaleBlocks * kColumns) {  // of a block and a lane
      const int b = tid / kColumns, l = tid % kColumns;
      const float level = fmaxf(s.base[0][kScaleBlocks][l], s.base[1][kScaleBlocks][l]);
      auto above = [&](int group) { return (s.base[group][kScaleBlocks][l] - level) + s.base[group][b][l]; };
      const float own = above(self), common = fmaxf(own, above(1 - self));
      s.to_common[self][b][l] = weight_of(own, common);
      // Halves of the exponent: neither is out of range where the result is not.
      if (self == 0) s.half[b][l] = exp2_fast(0.5f * common);
    }
    meet();
    // Eight lanes at a time each group gives half of the columns away, where Q was, and finishes the other half. A
    // loop, for which what is left of O moves to the front: instructions that run once a call cost 8 cycles each,
    // coming from the L2 or memory. Two buffers: what is written for the next but one all have read.
    constexpr int kGiven = kValueBlocks / 2;
    constexpr int kExchange = kGroups * kGiven * kGroupThreads;  // of 16 bytes, for eight lanes
    static_assert(2 * kExchange * 16 <= C::kQueryBytes + kGroups * C::kWeightBytes);
    const bool as_bf16 = complete && p.out_dtype == DType::kBf16;
    unsigned char* const out = static_cast<unsigned char*>(complete ? p.out : static_cast<void*>(p.partial));
    const int column0 = kLatent / 2 * self + 16 * warp + 2 * g;
#pragma unroll 1
    for (int j = 0; j < kEights; ++j) {
      const int l = 8 * j + 2 * t;
      auto* const exchange = reinterpret_cast<float4*>(query) + j % 2 * kExchange + tid;
#pragma unroll
      for (int m = 0; m < kValueBlocks; ++m) {
        const float2 by = *reinterpret_cast<const float2*>(&s.to_common[self][m / 2][l]);
        o[m][0] *= by.x, o[m][1] *= by.y, o[m][2] *= by.x, o[m][3] *= by.y;
      }
#pragma unroll
      for (int m = 0; m < kGiven; ++m) {
        const float(&low)[kColumns / 2] = o[m], (&high)[kColumns / 2] = o[m + kGiven];
        exchange[(self * kGiven + m) * kGroupThreads] =
            self == 0 ? float4{high[0], high[1], high[2], high[3]} : float4{low[0], low[1], low[2], low[3]};
      }
      meet();
      const float2 inverse = *reinterpret_cast<const float2*>(&s.inverse[l]);
      const int64_t at[2] = {s.out_at[l], s.out_at[l + 1]};
#pragma unroll
      for (int m = 0; m < kGiven; ++m) {
        const float4 got = exchange[((1 - self) * kGiven + m) * kGroupThreads];
        const float2 half = *reinterpret_cast<const float2*>(&s.half[kScaleBlocks / 2 * self + m / 2][l]);
        float kept[4];
#pragma unroll
        for (int x = 0; x < 4; ++x) kept[x] = self == 0 ? o[m][x] : o[m + kGiven][x];
        const float result[4] = {
            (kept[0] + got.x) * inverse.x * half.x * half.x, (kept[1] + got.y) * inverse.y * half.y * half.y,
            (kept[2] + got.z) * inverse.x * half.x * half.x, (kept[3] + got.w) * inverse.y * half.y * half.y};
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          if (at[x] < 0) continue;
          unsigned char* const to = out + (at[x] + column0) * (as_bf16 ? 2 : 4);
          if (as_bf16) *reinterpret_cast<uint32_t*>(to + 128 * m) = round_to_bf16x2(result[x], result[2 + x]);
          else *reinterpret_cast<float2*>(to + 256 * m) = {result[x], result[2 + x]};
        }
      }
#pragma unroll
      for (auto& m : o)
#pragma unroll
        for (int x = 0; x + 4 < kColumns / 2; ++x) m[x] = m[x + 4];
    }
    if (walk.first_tile == 0 && writes_cut) {
      const int parts = walk.parts(s, part);
      // Blank groups come last, and in a part's slot the group stays that goes on behind it.
      if (slot_of_group || parts > 1)
        schedule.cuts[slot_of_group ? walk.group - 1 : part] = {walk.group - 1, part, parts, 0};
    }
  }
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
  unsigned char* weights = query + C::kQueryBytes;
  SharedPacked& s = *reinterpret_cast<SharedPacked*>(shared + C::kOperandBytes);
  const int lane_block = blockIdx.x % schedule.lane_blocks, part = blockIdx.x / schedule.lane_blocks;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; ++i) {
      mbarrier_init(&s.loaded[i], 32);
      mbarrier_init(&s.free[i], kWarpsEach * kReleasingLanes);
    }
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
    register_increase<C::kOthersRegisters>();
    consume<kColumns>(p, schedule, s, query, stages, weights, part, lane_block);
  } else {
    register_decrease<C::kLoaderRegisters>();
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
