// Absorbed ("MQA") attention, the core of mla_decode and sparse_attention.
//
// The problem. Every query head h of every query row t attends to the same rows x_s = [c_s | r_s] of the latent cache
// (R = 512 latent, P = 64 rotated values):
//   score(t, h, s) = scale * q(t, h) . x_s       out(t, h) = sum_s softmax_s(score) c_s
// A cached row of 1152 bytes (bf16) meets 2 * (R + P + R) = 2176 flop a head: at 128 heads that is 242 flop a byte, far
// above the ridge of a CPU (12 to 17), so at many heads the kernel is a matrix product and the score is the share of
// the rate of vdpbf16ps. At 16 heads it is 30 flop a byte and still compute bound while the cache lies in L3.
//
// The form. A lane of a vector is a (row, head) pair. Rows of one request and their heads are packed densely into
// groups of up to kGroupLanes lanes, which share one walk over the keys.
//   - q is packed once a group as [k / 2][lane] pairs of bf16 (or [k][lane] fp32), in sub-blocks of kSubLanes lanes;
//   - scores: a pair of values of a cache row is broadcast from where it lies and meets the lanes. Nothing of K is
//     packed and nothing is summed across a vector, so a gather (pages, slots) costs nothing extra;
//   - softmax: running maximum and sum are vertical, a lane each;
//   - the weights come out as pairs of keys [key / 2][lane], which is what the product with V broadcasts;
//   - V (the first R values of the rows) is read from the rows too: two keys are interleaved in registers on the way to
//     the product, by shuffles that run beside the dot products. Columns come out in the order of the shuffle and are
//     put right when the result is written.
// fp32 needs no pairs. Rows of other element types are converted once a block of keys, for all lanes:
//   - every e4m3 value is a bf16 value, so codes are widened to bf16 without loss. The scale of a tensor multiplies
//     scores and result, that of a token its scores and weights, in fp32;
//   - the four scales of a packed row go into its values: an fp32 product, rounded to bf16 (nothing is lost where the
//     scale is a power of two);
//   - fp32 queries meet rows of fp32, where codes are exact and scales of a row are fp32 products.
// e4m3 queries are widened as they are packed, which is exact; their scale is a factor of the scores like any other. An
// attention sink is a term of the last denominator, and the largest score is the running maximum: neither concerns the
// loop over keys.
//
// What was tried (one core of a Zen 4, 512-bit operations in two passes, 236 GFLOP/s of vdpbf16ps from registers and
// L1; 128 and 16 heads, 1024 keys): V interleaved into a buffer 85 and 75 %, since at 16 heads the stores of the buffer
// are 8 % of the work, and a panel of whole rows at 2 KiB falls into 8 of the 64 sets of L1; interleaved in registers
// 92 and 85 %. At one vector of lanes the broadcasts bound the scores to 92 %. Blocks of q of 16 or 18 KiB, groups of
// 64 lanes: no gain.
//
// What no result depends on. The keys of a row are cut into segments at fixed positions (multiples of kSegmentKeys; for
// a list: of its columns) and a segment into blocks at fixed positions. Each segment starts from a fresh state, and
// states are merged in the order of the segments. A (row, head) sees one chain of additions whatever the tile it is
// computed in; a key it does not see adds exactly nothing: its score is replaced by -inf, whose exponential is exactly
// 0, and the product with V stops at the row's own last key. So neither the number of workers, nor other requests, nor
// other rows of the same request, nor where pages lie can change a bit; bytes of unseen keys, NaN included, never
// reach a result.
//
// Work is dealt out as (group, segment) units in waves: a group of one segment writes its result directly, the others
// leave partial sums which a second pass merges. The number of partials of a wave is fixed, so the workspace does not
// grow with the length or the number of rows.
#ifndef GANNET_CPU_KERNELS_ABSORBED_INL_H_
#define GANNET_CPU_KERNELS_ABSORBED_INL_H_

#include "cpu/kernel_table.h"
#include "cpu/kernels/math-inl.h"
#include "cpu/kernels/row_codec-inl.h"
#ifdef GANNET_TILES
#include "cpu/kernels/tiles-inl.h"
#endif

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace {

// ---- constants ----------------------------------------------------------------------------------------------------

constexpr int kSubVectors = kVectorRegisters >= 32 ? 4 : 2;  // lanes of a register tile, in vectors
constexpr int kSubLanes = kSubVectors * kLanes;
constexpr int kGroupLanes = 128;  // one row of DeepSeek-V3: its sums (256 KiB) and q (144 KiB) stay in 1 MiB of L2
// Positions of the splits; part of the definition of a result. A partial result is 256 KiB at 128 lanes, written and
// read once a segment: 512 keys cost 1 % more than 1024 and feed twice as many workers.
constexpr int kSegmentKeys = 512;
constexpr int kQBlockBytes = 24576;  // of a sub-block's q: stays in 32 KiB of L1 beside the rows that stream by
// Of a row of the next block. The machine's own prefetch follows once a row has begun. A cache of 32,768 rows in DRAM,
// 16 heads: 53 % of the bf16 rate without, 62 % with 512 bytes, 58 % with the whole row (whose requests hold up the
// reads of this block); where the cache lies in L3 it costs 1 %.
constexpr int64_t kAheadBytes = 768;
constexpr int64_t kCacheLine = 64;
constexpr int kMinPartials = 64;  // partial results of a wave: 16 MiB at 128 lanes of 512 values
constexpr int kPartialsPerWorker = 8;
constexpr int kMaxUnits = 1024;  // of a wave

constexpr float kInfinity = __builtin_inff();

constexpr int64_t round_up(int64_t n, int64_t m) { return (n + m - 1) / m * m; }
GANNET_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
GANNET_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

template <bool kTheValue>
struct Constant {
  static constexpr bool kValue = kTheValue;
};

/// Address of element [i0][i1][0] of a view.
template <class T>
GANNET_INLINE T* element(const TensorView& v, int64_t i0, int64_t i1) {
  return static_cast<T*>(v.data) + i0 * v.stride[0] + i1 * v.stride[1];
}

// ---- element paths ------------------------------------------------------------------------------------------------
// A cell is what a lane consumes in one step: a pair of bf16 or one fp32.

struct Bf16Path {
  using Cell = uint32_t;
  using Vec = W;
  static constexpr int kPer = 2;  // values of a cell
  static constexpr int kBlockKeys = 128;
  static constexpr bool kPaired = true;
  static constexpr bool kTiled = false;
  GANNET_INLINE Vec load(const Cell* p) { return load_w(p); }
  GANNET_INLINE Vec broadcast(const Cell* p) {
    Cell x;
    std::memcpy(&x, p, sizeof x);
    return set1_w(x);
  }
  GANNET_INLINE F step(F acc, Vec a, Vec b) { return dot2(acc, a, b); }
  GANNET_INLINE void store_weights(Cell* p, int64_t, F first, F second) { store_w(p, pack2(first, second)); }
  // Columns of each 2 * kLanes come in the order of pair_columns; write_row puts them right.
  template <int NV>
  GANNET_INLINE void load_columns(const void* const* rows, int64_t column, Vec* x) {
    const auto* a = static_cast<const uint16_t*>(rows[0]) + column;
    const auto* b = static_cast<const uint16_t*>(rows[1]) + column;
    for (int v = 0; v < NV; v += 2) pair_columns(a + v * kLanes, b + v * kLanes, x + v, x + v + 1);
  }
};

struct F32Path {
  using Cell = float;
  using Vec = F;
  static constexpr int kPer = 1;
  static constexpr int kBlockKeys = 64;
  static constexpr bool kPaired = false;
  static constexpr bool kTiled = false;
  GANNET_INLINE Vec load(const Cell* p) { return loadu(p); }
  GANNET_INLINE Vec broadcast(const Cell* p) { return set1(*p); }
  GANNET_INLINE F step(F acc, Vec a, Vec b) { return fma(a, b, acc); }
  GANNET_INLINE void store_weights(Cell* p, int64_t stride, F first, F second) {
    storeu(p, first);
    storeu(p + stride, second);
  }
  template <int NV>
  GANNET_INLINE void load_columns(const void* const* rows, int64_t column, Vec* x) {
    const float* a = static_cast<const float*>(rows[0]) + column;
    for (int v = 0; v < NV; ++v) x[v] = loadu(a + v * kLanes);
  }
};

#ifdef GANNET_TILES
// Pairs again, with products in tiles. A tile of keys is 16 rows at one distance, so the rows of a block are copied,
// and their values kept as pairs of keys: 70 cycles a key, where the products of 128 heads are 272 of tiles and 4,350
// of vectors. Weights are transposed, 16 x 16 words at a time. Whole steps of 32 keys that a row sees go through tiles,
// the rest through vectors: as with vectors alone, a key that a row does not see is not even multiplied by 0, and a
// row's bits are a matter of its own keys. Blocks are longer, since each reads and writes all sums: 128 lanes of 512
// values are 512 KiB of traffic with L2 against 32 KiB of operands a 16 x 16 sums.
struct TilePath : Bf16Path {
  static constexpr int kBlockKeys = 256;
  static constexpr bool kTiled = true;
};
#endif

// ---- shapes and scratch -------------------------------------------------------------------------------------------

// What all units of a call share.
struct Problem {
  TensorView q, attn_sink, out, lse, max_logits;
  LatentFormat format;
  int64_t ahead_lines;  // of a row, asked for while the block before is worked on
  int64_t page_size;
  int64_t latent_dim, width;  // R, R + P
  int64_t out_stride;         // R rounded up to whole vectors: the stride of running sums
  int64_t num_heads;
  int max_lanes;      // of a group, whole vectors
  float score_scale;  // softmax scale * other scales * log2(e): exponentials are to base 2
  float out_scale;
};

// A worker's memory. Sizes for max_lanes lanes (L), blocks of B keys.
struct Scratch {
  int64_t* packed_for;      // [2] the group whose q is packed: item, first lane
  const std::byte** rows;   // [kSegmentKeys] addresses of the segment's cache rows (planar pages: of their latent part)
  const std::byte** after;  // [B] addresses of the rows that this worker is likely to need next
  int32_t* offsets;         // [kSegmentKeys] where in their pages they lie; read for planar pages only
  const void** block_rows;  // [B + 1] the block's rows as cells
  void* q;                  // cells [sub-block][(R + P) / kPer][lanes of it]
  float* scores;            // [sub-block][B][lanes of it]
  void* weights;            // cells [sub-block][B / kPer][lanes of it]
  std::byte* converted;     // [B][converted_bytes]: rows of a format that is not used as it lies, as cells
  float* key_scales;        // [B] of a block whose rows are cells but for a scale each
  const void* no_row;       // zeros, the partner of a last odd key
  uint32_t* value_pairs;    // [B / 2][out_stride] of whole steps of keys: with tiles only, as the next two
  uint32_t* weight_rows;    // [L + 16][B / 2] weights by lanes
  float* few_rows;          // [16][out_stride] sums of a tile that has fewer lanes
  float* limit;             // [L] keys of the segment that the lane sees
  float* rescale;           // [L]
  float* m;                 // [L] running maximum, in units of log2
  float* z;                 // [L] running sum
  float* o;                 // [L][out_stride]
};

// A part of the work: a segment of the keys for a group of lanes.
struct Unit {
  int64_t item;        // request, or row of a list
  int64_t first_lane;  // within the item
  int32_t segment;
  int32_t partial;  // where its state goes; -1: it is the group's only segment and writes the result
};

// The partials of one group that a wave produced.
struct MergeJob {
  int64_t item;
  int64_t first_lane;
  int32_t first_partial;
  int32_t num_partials;
  int32_t resumes;   // continues what an earlier wave left in the carry
  int32_t finishes;  // has the group's last segment; else the state goes to the carry
};

// Lanes of a group that belong to one query row, and how many of the segment's keys that row sees.
struct Run {
  int32_t lane0;
  int32_t num_lanes;
  int32_t keys;
};

// ---- scores: q . x ------------------------------------------------------------------------------------------------

// scores[t][lane] (+)= sum over cells [0, n) of q[cell][lane] * rows[t][cell], for TT keys and NV vectors of lanes.
// Beside it asks for the first num_lines cache lines of each of the TT rows of `ahead`, where that is not null.
template <class P, int TT, int NV>
GANNET_INLINE void score_tile(const typename P::Cell* q, const void* const* rows, int64_t cell0, int64_t n,
                              float* scores, bool fresh, const std::byte* const* ahead, int64_t num_lines) {
  using Cell = typename P::Cell;
  constexpr int64_t kWidth = NV * kLanes;
  F acc[TT][NV];
  const Cell* x[TT];
  for (int t = 0; t < TT; ++t) {
    x[t] = static_cast<const Cell*>(rows[t]) + cell0;
    for (int v = 0; v < NV; ++v) acc[t][v] = fresh ? zero() : loadu(scores + t * kWidth + v * kLanes);
  }
  const auto step = [&](int64_t i) __attribute__((always_inline)) {
    typename P::Vec lane[NV];
    for (int v = 0; v < NV; ++v) lane[v] = P::load(q + i * kWidth + v * kLanes);
    for (int t = 0; t < TT; ++t) {
      const typename P::Vec b = P::broadcast(x[t] + i);
      for (int v = 0; v < NV; ++v) acc[t][v] = P::step(acc[t][v], lane[v], b);
    }
  };
  int64_t i = 0;
  if (ahead != nullptr) {
    // Evenly, since requests that come at once fill the buffers for misses, where reads of this block wait for them.
    // The first of each row do: where rows are scattered each asks for a page's address first, and those walks overlap.
    for (int t = 0; t < TT; ++t) prefetch(ahead[t]);
    const int64_t part = n / TT, gap = part / num_lines;
    for (int t = 0; t < TT && gap > 0; ++t) {
      const int64_t end = i + part;
      for (int64_t line = 1; line < num_lines; ++line) {
        prefetch(ahead[t] + line * kCacheLine);
        for (const int64_t next = i + gap; i < next; ++i) step(i);
      }
      for (; i < end; ++i) step(i);
    }
  }
  for (; i < n; ++i) step(i);
  for (int t = 0; t < TT; ++t)
    for (int v = 0; v < NV; ++v) storeu(scores + t * kWidth + v * kLanes, acc[t][v]);
}

// The rows of the next block, the beginnings of which are asked for while this one is worked on.
struct Ahead {
  const std::byte* const* rows;
  int num_rows;
  int64_t num_lines;  // of a row
};

template <class P, int NV>
void score_block(const typename P::Cell* q, const void* const* rows, int num_keys, int64_t cells, const Ahead& ahead,
                 float* scores) {
  // Tiles of about 24 accumulators (8 where there are 16 registers), 12 keys at most.
  constexpr int kWanted = (kVectorRegisters >= 32 ? 24 : 8) / NV;
  constexpr int kTile = kWanted > 12 ? 12 : kWanted;
  constexpr int64_t kWidth = NV * kLanes;
  constexpr int64_t kCells = kQBlockBytes / static_cast<int64_t>(sizeof(typename P::Cell)) / kWidth;
  for (int64_t c = 0; c < cells; c += kCells) {
    const int64_t n = smaller(kCells, cells - c);
    const typename P::Cell* qc = q + c * kWidth;
    int t = 0;
    for (; t + kTile <= num_keys; t += kTile) {
      const bool asks = c == 0 && t + kTile <= ahead.num_rows;
      score_tile<P, kTile, NV>(qc, rows + t, c, n, scores + t * kWidth, c == 0, asks ? ahead.rows + t : nullptr,
                               ahead.num_lines);
    }
    for (; t + 2 <= num_keys; t += 2) score_tile<P, 2, NV>(qc, rows + t, c, n, scores + t * kWidth, c == 0, nullptr, 0);
    for (; t < num_keys; ++t) score_tile<P, 1, NV>(qc, rows + t, c, n, scores + t * kWidth, c == 0, nullptr, 0);
  }
}

template <class P>
void score_sub_block(const typename P::Cell* q, const void* const* rows, int num_keys, int64_t cells, int num_vectors,
                     const Ahead& ahead, float* scores) {
  if constexpr (kSubVectors >= 4) {
    if (num_vectors == 4) return score_block<P, 4>(q, rows, num_keys, cells, ahead, scores);
    if (num_vectors == 3) return score_block<P, 3>(q, rows, num_keys, cells, ahead, scores);
  }
  if (num_vectors == 2) return score_block<P, 2>(q, rows, num_keys, cells, ahead, scores);
  score_block<P, 1>(q, rows, num_keys, cells, ahead, scores);
}

// ---- softmax of a block -------------------------------------------------------------------------------------------

// For one vector of lanes: scores [num_keys][stride] to weights, and the running maximum, sum and rescale factor.
// kMasked: the block has keys that some lane does not see; key t is visible iff first_key + t < limit[lane].
// kScaled: row t is its cells times key_scales[t], so its score and its weight (not what z counts) are too.
template <class P, bool kMasked, bool kScaled>
GANNET_INLINE void softmax_vector(const float* scores, int64_t stride, int num_keys, int first_key, const float* limit,
                                  const float* key_scales, float scale, bool fresh, typename P::Cell* weights, float* m,
                                  float* z, float* rescale) {
  const F minus_infinity = set1(-kInfinity), factor = set1(scale);
  const F seen = kMasked ? loadu(limit) : zero();
  const auto score = [&](int t) __attribute__((always_inline)) {
    F s = loadu(scores + t * stride);
    if constexpr (kScaled) s = mul(s, set1(key_scales[t]));
    if constexpr (kMasked) s = select_less(set1(static_cast<float>(first_key + t)), seen, s, minus_infinity);
    return s;
  };
  // The scale of a key that a lane does not see may be NaN, and the weight is 0 all the same.
  const auto weight = [&](int t, F e) __attribute__((always_inline)) {
    if constexpr (!kScaled) return e;
    e = mul(e, set1(key_scales[t]));
    if constexpr (kMasked) e = select_less(set1(static_cast<float>(first_key + t)), seen, e, zero());
    return e;
  };
  F top0 = minus_infinity, top1 = minus_infinity;  // max gives its second operand where one is NaN: NaN never is a top
  int t = 0;
  for (; t + 2 <= num_keys; t += 2) {
    top0 = max(mul(score(t), factor), top0);
    top1 = max(mul(score(t + 1), factor), top1);
  }
  if (t < num_keys) top0 = max(mul(score(t), factor), top0);
  const F before = fresh ? minus_infinity : loadu(m);
  const F now = max(max(top0, top1), before);
  // A lane without keys so far has -inf; 0 in its place keeps exp2(-inf - base) at 0 instead of NaN.
  const F base = select_less(minus_infinity, now, now, zero());
  const F shift = fast_exp2(sub(before, base));
  const F minus_base = sub(zero(), base);
  F sum = zero();
  for (t = 0; t + 2 <= num_keys; t += 2) {
    const F a = fast_exp2(fma(score(t), factor, minus_base));
    const F b = fast_exp2(fma(score(t + 1), factor, minus_base));
    sum = add(sum, add(a, b));
    P::store_weights(weights + t / P::kPer * stride, stride, weight(t, a), weight(t + 1, b));
  }
  if (t < num_keys) {
    const F a = fast_exp2(fma(score(t), factor, minus_base));
    sum = add(sum, a);
    P::store_weights(weights + t / P::kPer * stride, stride, weight(t, a), zero());
  }
  storeu(rescale, shift);
  storeu(m, now);
  storeu(z, fresh ? sum : fma(loadu(z), shift, sum));
}

// ---- weights times V ----------------------------------------------------------------------------------------------

// o[lane][column] = rescale[lane] * o + sum over cells j of weights[j][lane] * V[j][column], for HH lanes and NV
// vectors of columns from `column`. A cell of V is a row, or two rows of which the columns are paired on the way: the
// shuffles run beside the dot products, so that was measured to be free, where pairs in a buffer cost stores and L1.
template <class P, int HH, int NV>
GANNET_INLINE void value_tile(const typename P::Cell* weights, int64_t weight_stride, const void* const* rows,
                              int64_t column, int64_t cells, float* o, int64_t o_stride, const float* rescale,
                              bool fresh) {
  F acc[HH][NV];
  for (int h = 0; h < HH; ++h) {
    const F factor = fresh ? zero() : set1(rescale[h]);
    for (int v = 0; v < NV; ++v) acc[h][v] = fresh ? zero() : mul(factor, loadu(o + h * o_stride + v * kLanes));
  }
  for (int64_t j = 0; j < cells; ++j) {
    typename P::Vec x[NV];
    P::template load_columns<NV>(rows + P::kPer * j, column, x);
    for (int h = 0; h < HH; ++h) {
      const typename P::Vec b = P::broadcast(weights + j * weight_stride + h);
      for (int v = 0; v < NV; ++v) acc[h][v] = P::step(acc[h][v], x[v], b);
    }
  }
  for (int h = 0; h < HH; ++h)
    for (int v = 0; v < NV; ++v) storeu(o + h * o_stride + v * kLanes, acc[h][v]);
}

template <class P, int HH, int NV>
GANNET_INLINE int value_tiles(int h, int num_lanes, const typename P::Cell* weights, int64_t weight_stride,
                              const void* const* rows, int64_t column, int64_t cells, float* o, int64_t o_stride,
                              const float* rescale, bool fresh) {
  for (; h + HH <= num_lanes; h += HH)
    value_tile<P, HH, NV>(weights + h, weight_stride, rows, column, cells, o + h * o_stride, o_stride, rescale + h,
                          fresh);
  return h;
}

template <class P, int NV>
void value_lanes(const typename P::Cell* weights, int64_t weight_stride, const void* const* rows, int64_t column,
                 int64_t cells, int num_lanes, float* o, int64_t o_stride, const float* rescale, bool fresh) {
  constexpr int kTile = kVectorRegisters >= 32 ? 6 : 4;
  // Sixes, and fives for the last where that avoids a small rest: 16 = 6 + 5 + 5, 64 = 9 * 6 + 2 * 5.
  int h = 0;
  if constexpr (kTile == 6) {
    const int fives = (6 - num_lanes % 6) % 6;
    if (fives * 5 <= num_lanes) {
      h = value_tiles<P, 6, NV>(h, num_lanes - 5 * fives, weights, weight_stride, rows, column, cells, o, o_stride,
                                rescale, fresh);
      value_tiles<P, 5, NV>(h, num_lanes, weights, weight_stride, rows, column, cells, o, o_stride, rescale, fresh);
      return;
    }
  }
  h = value_tiles<P, 4, NV>(h, num_lanes, weights, weight_stride, rows, column, cells, o, o_stride, rescale, fresh);
  h = value_tiles<P, 2, NV>(h, num_lanes, weights, weight_stride, rows, column, cells, o, o_stride, rescale, fresh);
  value_tiles<P, 1, NV>(h, num_lanes, weights, weight_stride, rows, column, cells, o, o_stride, rescale, fresh);
}

// The lanes [lane0, lane0 + num_lanes) of a group over `cells` cells of the block from first_cell. A panel of V (16 KiB
// as bf16) stays in L1 while all lanes pass.
template <class P>
void add_values(const Problem& p, const Scratch& s, int group_lanes, int lane0, int num_lanes, int64_t first_cell,
                int64_t cells, float* o, bool fresh) {
  constexpr int64_t kCells = P::kBlockKeys / P::kPer;
  constexpr int64_t kColumns = kSubVectors * kLanes;
  for (int64_t d = 0; d < p.out_stride;) {
    const bool whole = d + kColumns <= p.out_stride;
    for (int sub = lane0 / kSubLanes * kSubLanes; sub < lane0 + num_lanes; sub += kSubLanes) {
      const int from = lane0 > sub ? lane0 : sub;
      const int to = static_cast<int>(smaller(lane0 + num_lanes, sub + kSubLanes));
      const int64_t lanes = smaller(kSubLanes, group_lanes - sub);
      const auto* weights =
          static_cast<const typename P::Cell*>(s.weights) + sub * kCells + first_cell * lanes + (from - sub);
      const void* const* rows = s.block_rows + first_cell * P::kPer;
      float* od = o + from * p.out_stride + d;
      if (whole)
        value_lanes<P, kSubVectors>(weights, lanes, rows, d, cells, to - from, od, p.out_stride, s.rescale + from,
                                    fresh);
      else
        value_lanes<P, P::kPer>(weights, lanes, rows, d, cells, to - from, od, p.out_stride, s.rescale + from, fresh);
    }
    d += whole ? kColumns : P::kPer * kLanes;
  }
}

// ---- reading cache rows -------------------------------------------------------------------------------------------

// Whether the rows of a format are cells as they lie. fp32 rows are used where reading whole vectors of the latent
// part stays inside the row.
template <class P>
bool rows_are_cells(const Problem& p) {
  if constexpr (P::kTiled) return false;
  else if constexpr (P::kPaired) return p.format == LatentFormat::kBf16;
  else return p.format == LatentFormat::kF32 && p.out_stride <= p.width;
}

// Whether a converted row is its cells times a scale of its own.
template <class P>
constexpr bool rows_have_scales(const Problem& p) {
  return P::kPaired && p.format == LatentFormat::kE4m3PerToken;
}

// Bytes of a converted row: whole cache lines, and an odd number of them so that a column of many rows does not fall
// into few sets of L1.
template <class P>
GANNET_INLINE int64_t converted_bytes(const Problem& p) {
  constexpr int64_t kLine = 64;
  const int64_t lines = round_up(larger(p.width, p.out_stride) * (P::kPaired ? 2 : 4), kLine) / kLine;
  return (lines % 2 == 0 ? lines + 1 : lines) * kLine;
}

GANNET_INLINE float float_at(const std::byte* p) {
  float x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// to[0, n) = the e4m3 values at `from`, exactly.
GANNET_INLINE void widen_codes(const std::byte* from, uint16_t* to, int64_t n) {
  constexpr int64_t kStep = 32;  // of e4m3_to_bf16
  const auto* codes = reinterpret_cast<const uint8_t*>(from);
  const int64_t whole = n / kStep * kStep;
  e4m3_to_bf16(codes, to, static_cast<int>(whole));
  if (whole == n) return;
  uint8_t rest[kStep] = {};
  uint16_t wide[kStep];
  std::memcpy(rest, codes + whole, static_cast<size_t>(n - whole));
  e4m3_to_bf16(rest, wide, kStep);
  std::memcpy(to + whole, wide, static_cast<size_t>(n - whole) * sizeof(uint16_t));
}

// The rotated values of a row of a planar page, whose latent ones are at `row`, and the scale of both.
struct PerTokenParts {
  const std::byte* rope;
  float scale;
};
GANNET_INLINE PerTokenParts per_token_parts(const Problem& p, const std::byte* row, int64_t offset) {
  const std::byte* scales = row + (p.page_size - offset) * p.latent_dim;
  const int64_t rope_bytes = 2 * (p.width - p.latent_dim);
  return {scales + p.page_size * 4 + offset * rope_bytes, float_at(scales + offset * 4)};
}

// A row as fp32, but for the scale of a tensor, which scores and result are multiplied by.
GANNET_INLINE void convert_to_floats(const Problem& p, const std::byte* row, int64_t offset, float* to) {
  const auto* codes = reinterpret_cast<const uint8_t*>(row);
  const int64_t r = p.latent_dim, rope = p.width - r;
  switch (p.format) {
    case LatentFormat::kF32: return convert_row(row, DType::kF32, to, DType::kF32, p.width);
    case LatentFormat::kBf16: return convert_row(row, DType::kBf16, to, DType::kF32, p.width);
    case LatentFormat::kE4m3: return decode_row(codes, 1.0f, to, DType::kF32, p.width);
    case LatentFormat::kPacked656: {
      const int64_t groups = r / kPackedGroup;
      for (int64_t g = 0; g < groups; ++g)
        decode_row(codes + g * kPackedGroup, float_at(row + r + 4 * g), to + g * kPackedGroup, DType::kF32,
                   kPackedGroup);
      return convert_row(row + r + 4 * groups, DType::kBf16, to + r, DType::kF32, rope);
    }
    case LatentFormat::kE4m3PerToken: {
      const PerTokenParts parts = per_token_parts(p, row, offset);
      decode_row(codes, parts.scale, to, DType::kF32, r);
      return multiply_row_bf16(parts.rope, parts.scale, to + r, DType::kF32, rope);
    }
  }
}

// A row as bf16, but for the scale of a tensor and that of a token.
GANNET_INLINE void convert_to_halves(const Problem& p, const std::byte* row, int64_t offset, uint16_t* to,
                                     float* key_scale) {
  const int64_t r = p.latent_dim;
  const auto rope_bytes = static_cast<size_t>(p.width - r) * sizeof(uint16_t);
  switch (p.format) {
    case LatentFormat::kE4m3: return widen_codes(row, to, p.width);
    case LatentFormat::kPacked656: {
      const int64_t groups = r / kPackedGroup;
      for (int64_t g = 0; g < groups; ++g) {
        const auto* codes = reinterpret_cast<const uint8_t*>(row) + g * kPackedGroup;
        scaled_e4m3_to_bf16(codes, float_at(row + r + 4 * g), to + g * kPackedGroup, kPackedGroup);
      }
      std::memcpy(to + r, row + r + 4 * groups, rope_bytes);
      return;
    }
    case LatentFormat::kE4m3PerToken: {
      const PerTokenParts parts = per_token_parts(p, row, offset);
      widen_codes(row, to, r);
      std::memcpy(to + r, parts.rope, rope_bytes);
      *key_scale = parts.scale;
      return;
    }
    case LatentFormat::kBf16: std::memcpy(to, row, static_cast<size_t>(p.width) * sizeof(uint16_t)); return;
    case LatentFormat::kF32: return;  // never with pairs
  }
}

template <class P>
void load_block(const Problem& p, const Scratch& s, const std::byte* const* rows, const int32_t* offsets,
                int num_keys) {
  if (rows_are_cells<P>(p)) {
    for (int t = 0; t < num_keys; ++t) s.block_rows[t] = rows[t];
    return;
  }
  const int64_t stride = converted_bytes<P>(p);
  for (int t = 0; t < num_keys; ++t) {
    std::byte* const to = s.converted + t * stride;
    s.block_rows[t] = to;
    if constexpr (P::kPaired) {
      convert_to_halves(p, rows[t], offsets[t], reinterpret_cast<uint16_t*>(to), s.key_scales + t);
    } else {
      auto* const floats = reinterpret_cast<float*>(to);
      convert_to_floats(p, rows[t], offsets[t], floats);
      for (int64_t c = p.width; c < p.out_stride; ++c) floats[c] = 0.0f;
    }
  }
}

// ---- a unit -------------------------------------------------------------------------------------------------------

struct Group {
  int64_t row0;   // query row of lane 0
  int64_t head0;  // head of lane 0
  int num_lanes;
};

// kLanes cells of a lane's q, as words; what lies beyond its end is 0.
template <class P>
GANNET_INLINE W load_q(const TensorView& q, int64_t row, int64_t head, int64_t cell, int64_t cells) {
  if (q.dtype == DType::kE4m3) {
    const uint8_t* codes = element<uint8_t>(q, row, head) + P::kPer * cell;
    const int n = static_cast<int>(smaller(kLanes, cells - cell));
    if constexpr (P::kPaired) {
      uint16_t wide[2 * kLanes] = {};
      widen_codes(reinterpret_cast<const std::byte*>(codes), wide, 2 * n);
      uint32_t pairs[kLanes];
      std::memcpy(pairs, wide, sizeof pairs);
      return load_w(pairs);
    } else {
      return (W)load_codes(codes, 0, n);
    }
  }
  if constexpr (P::kPaired) {
    const uint16_t* from = element<uint16_t>(q, row, head) + 2 * cell;
    if (cell + kLanes <= cells) return load_w(reinterpret_cast<const uint32_t*>(from));
    uint32_t tail[kLanes] = {};
    std::memcpy(tail, from, static_cast<size_t>(cells - cell) * 4);
    return load_w(tail);
  } else if (q.dtype == DType::kF32) {
    const float* from = element<float>(q, row, head) + cell;
    return (W)(cell + kLanes <= cells ? loadu(from) : loadu_n(from, static_cast<int>(cells - cell)));
  } else {
    const uint16_t* from = element<uint16_t>(q, row, head) + cell;
    if (cell + kLanes <= cells) return (W)load_bf16(from);
    uint16_t tail[kLanes] = {};
    std::memcpy(tail, from, static_cast<size_t>(cells - cell) * 2);
    return (W)load_bf16(tail);
  }
}

// q of the group's lanes as cells [sub-block][cell][lane]; lanes that fill up the last vector are 0.
template <class P>
void pack_q(const Problem& p, const Group& g, typename P::Cell* packed) {
  const int64_t cells = p.width / P::kPer;
  const int padded = static_cast<int>(round_up(g.num_lanes, kLanes));
  for (int lane0 = 0; lane0 < padded; lane0 += kLanes) {
    const int sub = lane0 / kSubLanes * kSubLanes;
    const int64_t lanes = smaller(kSubLanes, padded - sub);
    auto* to = reinterpret_cast<uint32_t*>(packed) + sub * cells + (lane0 - sub);
    for (int64_t c = 0; c < cells; c += kLanes) {
      W m[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        const int64_t at = g.head0 + lane0 + i;
        m[i] =
            lane0 + i < g.num_lanes ? load_q<P>(p.q, g.row0 + at / p.num_heads, at % p.num_heads, c, cells) : set1_w(0);
      }
      transpose_words(m);
      const int n = static_cast<int>(smaller(kLanes, cells - c));
      for (int i = 0; i < n; ++i) store_w(to + (c + i) * lanes, m[i]);
    }
  }
}

#ifdef GANNET_TILES
// The values of the first `keys` rows, a whole number of steps, as pairs in the order of pair_columns.
GANNET_INLINE void pair_values(const Problem& p, const Scratch& s, int keys) {
  for (int t = 0; t < keys; t += 2) {
    const auto* a = static_cast<const uint16_t*>(s.block_rows[t]);
    const auto* b = static_cast<const uint16_t*>(s.block_rows[t + 1]);
    uint32_t* to = s.value_pairs + t / 2 * p.out_stride;
    for (int64_t c = 0; c < p.latent_dim; c += 2 * kLanes) {
      W low, high;
      pair_columns(a + c, b + c, &low, &high);
      store_w(to + c, low);
      store_w(to + c + kLanes, high);
    }
  }
}

GANNET_INLINE void score_tiles(const Scratch& s, const uint32_t* q, int num_keys, int64_t cells, int lanes,
                               float* scores, int64_t row_bytes) {
  const TileOperands t{s.converted,
                       row_bytes,
                       reinterpret_cast<const std::byte*>(q),
                       int64_t{lanes} * 4,
                       reinterpret_cast<std::byte*>(scores),
                       int64_t{lanes} * 4};
  tile_product(t, cells / kTileWords, (num_keys + kTileRows - 1) / kTileRows, lanes / kTileWords, true);
}

// As add_values, of a block's first `keys` keys; multiplies the sums by their factor first.
inline void add_tiled_values(const Problem& p, const Scratch& s, int group_lanes, int lane0, int num_lanes, int keys,
                             float* o, bool fresh) {
  constexpr int64_t kPairs = TilePath::kBlockKeys / 2;
  for (int l = lane0; l < lane0 + num_lanes; ++l) {
    float* const row = o + l * p.out_stride;
    if (fresh) {
      std::memset(row, 0, static_cast<size_t>(p.out_stride) * sizeof(float));
    } else if (s.rescale[l] != 1.0f) {
      const F factor = set1(s.rescale[l]);
      for (int64_t c = 0; c < p.out_stride; c += kLanes) storeu(row + c, mul(factor, loadu(row + c)));
    }
    s.rescale[l] = 1.0f;
  }
  const int64_t steps = keys / kTileValues;
  const auto columns = static_cast<int>(p.out_stride / kTileWords);
  const int64_t o_bytes = p.out_stride * int64_t{sizeof(float)};
  if (steps > 0) {
    TileOperands t{reinterpret_cast<const std::byte*>(s.weight_rows + lane0 * kPairs),
                   kPairs * 4,
                   reinterpret_cast<const std::byte*>(s.value_pairs),
                   p.out_stride * 4,
                   reinterpret_cast<std::byte*>(o + lane0 * p.out_stride),
                   o_bytes};
    const int whole = num_lanes / kTileRows, rest = num_lanes % kTileRows;
    if (whole > 0) tile_product(t, steps, whole, columns, false);
    if (rest > 0) {
      const int64_t done = int64_t{whole} * kTileRows;
      std::byte* const home = t.c + done * o_bytes;
      const auto bytes = static_cast<size_t>(rest * o_bytes);
      std::memcpy(s.few_rows, home, bytes);
      t.a += done * t.a_stride;
      t.c = reinterpret_cast<std::byte*>(s.few_rows);
      tile_product(t, steps, 1, columns, false);
      std::memcpy(home, s.few_rows, bytes);
    }
  }
  if (keys % kTileValues != 0)
    add_values<TilePath>(p, s, group_lanes, lane0, num_lanes, steps * kTileWords, (keys + 1) / 2 - steps * kTileWords,
                         o, false);
}
#endif

// The state (m, z, o) of a group over one segment: n rows, of which run i sees the first runs[i].keys, which do not
// fall from one run to the next. The first num_after rows of s.after are asked for beside the last block.
template <class P>
void attend_segment(const Problem& p, const Scratch& s, const Run* runs, int num_runs, int num_lanes, int n,
                    int num_after, float* m, float* z, float* o) {
  using Cell = typename P::Cell;
  const int padded = static_cast<int>(round_up(num_lanes, kLanes));
  const int64_t cells = p.width / P::kPer;
  for (int i = 0; i < num_runs; ++i)
    for (int l = 0; l < runs[i].num_lanes; ++l) s.limit[runs[i].lane0 + l] = static_cast<float>(runs[i].keys);
  for (int l = num_lanes; l < padded; ++l) s.limit[l] = 0.0f;
  if (n == 0) {
    for (int l = 0; l < padded; ++l) {
      m[l] = -kInfinity;
      z[l] = 0.0f;
    }
  }
  for (int b = 0; b < n; b += P::kBlockKeys) {
    const int num_keys = static_cast<int>(smaller(P::kBlockKeys, n - b));
    const bool fresh = b == 0, masked = runs[0].keys < b + num_keys;
    load_block<P>(p, s, s.rows + b, s.offsets + b, num_keys);
    const Ahead next =
        b + num_keys < n
            ? Ahead{s.rows + b + num_keys, static_cast<int>(smaller(P::kBlockKeys, n - b - num_keys)), p.ahead_lines}
            : Ahead{s.after, num_after, p.ahead_lines};
    const Ahead none{nullptr, 0, 0};
    for (int sub = 0; sub < padded; sub += kSubLanes) {
      const int lanes = static_cast<int>(smaller(kSubLanes, padded - sub));
      float* scores = s.scores + sub * P::kBlockKeys;
      Cell* weights = static_cast<Cell*>(s.weights) + sub * (P::kBlockKeys / P::kPer);
#ifdef GANNET_TILES
      if constexpr (P::kTiled)
        score_tiles(s, static_cast<const Cell*>(s.q) + sub * cells, num_keys, cells, lanes, scores,
                    converted_bytes<P>(p));
      else
#endif
        score_sub_block<P>(static_cast<const Cell*>(s.q) + sub * cells, s.block_rows, num_keys, cells, lanes / kLanes,
                           sub == 0 ? next : none, scores);
      for (int l = 0; l < lanes; l += kLanes) {
        const int lane = sub + l;
        const auto softmax = [&](auto is_masked, auto is_scaled) __attribute__((always_inline)) {
          softmax_vector<P, is_masked.kValue, is_scaled.kValue>(scores + l, lanes, num_keys, b, s.limit + lane,
                                                                s.key_scales, p.score_scale, fresh, weights + l,
                                                                m + lane, z + lane, s.rescale + lane);
        };
        if constexpr (P::kPaired) {
          if (rows_have_scales<P>(p)) {
            if (masked) softmax(Constant<true>{}, Constant<true>{});
            else softmax(Constant<false>{}, Constant<true>{});
            continue;
          }
        }
        if (masked) softmax(Constant<true>{}, Constant<false>{});
        else softmax(Constant<false>{}, Constant<false>{});
      }
    }
#ifdef GANNET_TILES
    if constexpr (P::kTiled) {
      constexpr int64_t kPairs = P::kBlockKeys / 2;
      const int whole = num_keys / kTileValues * kTileValues;
      pair_values(p, s, whole);
      for (int lane = 0; lane < padded; lane += kLanes) {
        const int sub = lane / kSubLanes * kSubLanes;
        const int64_t lanes = smaller(kSubLanes, padded - sub);
        const Cell* weights = static_cast<const Cell*>(s.weights) + sub * kPairs + (lane - sub);
        for (int j = 0; j < whole / 2; j += kTileWords)
          transpose_pairs(weights + j * lanes, lanes, s.weight_rows + lane * kPairs + j, kPairs);
      }
    }
#endif
    // Rows with the same number of visible keys go together, from the longest to the shortest: a key that they pair
    // with none (0 * NaN would be NaN) is not missed later.
    const auto keys_of = [&](int i) __attribute__((always_inline)) {
      const int64_t k = smaller(runs[i].keys - b, num_keys);
      return static_cast<int>(k > 0 ? k : 0);
    };
    for (int last = num_runs - 1; last >= 0;) {
      const int keys = keys_of(last);
      int first = last;
      while (first > 0 && keys_of(first - 1) == keys) --first;
      if (keys > 0) {
        if constexpr (P::kPaired) {
          if (keys % 2 != 0) s.block_rows[keys] = s.no_row;
        }
        const int lane0 = runs[first].lane0, lanes = runs[last].lane0 + runs[last].num_lanes - lane0;
#ifdef GANNET_TILES
        if constexpr (P::kTiled) add_tiled_values(p, s, padded, lane0, lanes, keys, o, fresh);
        else
#endif
          add_values<P>(p, s, padded, lane0, lanes, 0, (keys + P::kPer - 1) / P::kPer, o, fresh);
      }
      last = first - 1;
    }
  }
}

// ---- results ------------------------------------------------------------------------------------------------------

// z is 0 only where there was no key (o was never written then), or none but with scores of -inf.
template <class P>
GANNET_INLINE void write_row(const Problem& p, int64_t row, int64_t head, const float* o, float m, float z) {
  const bool none = z == 0.0f;
  if (p.max_logits.given()) *element<float>(p.max_logits, row, head) = m * kLn2;
  if (p.lse.given()) {
    const float lse = m * kLn2 + log_of(z);
    *element<float>(p.lse, row, head) = none ? -kInfinity : lse == lse ? lse : __builtin_nanf("");
  }
  float all = z;
  if (p.attn_sink.given()) all += exp2_of(static_cast<const float*>(p.attn_sink.data)[head] * kLog2E - m);
  const F factor = set1(none ? 0.0f : p.out_scale / all);
  const auto result = [&](F x) __attribute__((always_inline)) { return none ? zero() : canonical_nan(mul(x, factor)); };
  auto* const floats = p.out.dtype == DType::kF32 ? element<float>(p.out, row, head) : nullptr;
  auto* const halves = p.out.dtype == DType::kF32 ? nullptr : element<uint16_t>(p.out, row, head);
  const auto write = [&](int64_t c, F x) __attribute__((always_inline)) {
    const int64_t n = p.latent_dim - c;
    if (floats != nullptr) {
      if (n >= kLanes) storeu(floats + c, x);
      else storeu_n(floats + c, x, static_cast<int>(n));
    } else if (n >= kLanes) {
      store_bf16(halves + c, x);
    } else {
      uint16_t tail[kLanes];
      store_bf16(tail, x);
      std::memcpy(halves + c, tail, static_cast<size_t>(n) * 2);
    }
  };
  for (int64_t c = 0; c < p.latent_dim; c += P::kPer * kLanes) {
    if constexpr (P::kPaired) {
      F first, second;
      ordered(loadu(o + c), loadu(o + c + kLanes), &first, &second);
      write(c, result(first));
      write(c + kLanes, result(second));
    } else {
      write(c, result(loadu(o + c)));
    }
  }
}

// A state of a group: m [L], z [L], o [L][out_stride].
struct State {
  float* m;
  float* z;
  float* o;
};
GANNET_INLINE int64_t state_floats(const Problem& p) { return int64_t{2} * p.max_lanes + p.max_lanes * p.out_stride; }
GANNET_INLINE State state_at(const Problem& p, float* base, int64_t i) {
  float* m = base + i * state_floats(p);
  return {m, m + p.max_lanes, m + 2 * p.max_lanes};
}

// Lanes [lane0, lane0 + kLanes) of a group: merges the states of consecutive segments in their order, one after the
// other: m' = max(m, m_s), o' = o 2^(m - m') + o_s 2^(m_s - m'). A segment without keys for a lane is not read.
template <class P>
void merge_lanes(const Problem& p, const Group& g, const MergeJob& job, float* partials, const State& carry_in,
                 const State& carry_out, int lane0, float* factors) {
  float m_lanes[kLanes], z_lanes[kLanes];
  bool begun[kLanes];
  F m = job.resumes ? loadu(carry_in.m + lane0) : set1(-kInfinity);
  F z = job.resumes ? loadu(carry_in.z + lane0) : zero();
  storeu(z_lanes, z);
  for (int i = 0; i < kLanes; ++i) begun[i] = !(z_lanes[i] == 0.0f);
  for (int j = 0; j < job.num_partials; ++j) {
    const State s = state_at(p, partials, job.first_partial + j);
    const F m_s = loadu(s.m + lane0);
    const F top = max(m, m_s);
    const F base = select_less(set1(-kInfinity), top, top, zero());
    const F keep = fast_exp2(sub(m, base)), take = fast_exp2(sub(m_s, base));
    m = top;
    z = fma(z, keep, mul(loadu(s.z + lane0), take));
    storeu(factors + 2 * j * kLanes, keep);
    storeu(factors + (2 * j + 1) * kLanes, take);
  }
  storeu(m_lanes, m);
  storeu(z_lanes, z);
  // The sum is formed where nobody else writes: in the outgoing carry, the incoming one or the first partial.
  const State home = !job.finishes ? carry_out : job.resumes ? carry_in : state_at(p, partials, job.first_partial);
  const int lanes = static_cast<int>(smaller(kLanes, g.num_lanes - lane0));
  for (int i = 0; i < lanes; ++i) {
    const int64_t offset = (lane0 + i) * p.out_stride;
    float* o = home.o + offset;
    const float* so_far = begun[i] ? carry_in.o + offset : nullptr;
    for (int j = 0; j < job.num_partials; ++j) {
      const State s = state_at(p, partials, job.first_partial + j);
      if (s.z[lane0 + i] == 0.0f) continue;
      const float* from = s.o + offset;
      const F keep = set1(factors[2 * j * kLanes + i]), take = set1(factors[(2 * j + 1) * kLanes + i]);
      if (so_far != nullptr) {
        for (int64_t c = 0; c < p.out_stride; c += kLanes)
          storeu(o + c, fma(loadu(so_far + c), keep, mul(loadu(from + c), take)));
      } else {
        for (int64_t c = 0; c < p.out_stride; c += kLanes) storeu(o + c, mul(loadu(from + c), take));
      }
      so_far = o;
    }
    if (job.finishes) {
      const int64_t at = g.head0 + lane0 + i;
      write_row<P>(p, g.row0 + at / p.num_heads, at % p.num_heads, so_far != nullptr ? so_far : o, m_lanes[i],
                   z_lanes[i]);
    } else if (so_far != nullptr && so_far != o) {
      std::memcpy(o, so_far, static_cast<size_t>(p.out_stride) * sizeof(float));
    }
  }
  if (!job.finishes) {
    storeu(carry_out.m + lane0, m);
    storeu(carry_out.z + lane0, z);
  }
}

// ---- a call -------------------------------------------------------------------------------------------------------

template <class P>
struct Sizes {
  int64_t rows, after, offsets, block_rows, q, scores, weights, converted, key_scales, no_row, lane, o, value_pairs,
      weight_rows, few_rows;
  explicit Sizes(const Problem& p) {
    const int64_t lanes = p.max_lanes;
    rows = round_up(kSegmentKeys * int64_t{sizeof(void*)}, 64);
    after = round_up(P::kBlockKeys * int64_t{sizeof(void*)}, 64);
    offsets = round_up(kSegmentKeys * int64_t{sizeof(int32_t)}, 64);
    block_rows = round_up((P::kBlockKeys + 1) * int64_t{sizeof(void*)}, 64);
    q = round_up(lanes * (p.width / P::kPer) * 4, 64);
    scores = round_up(lanes * P::kBlockKeys * 4, 64);
    weights = round_up(lanes * P::kBlockKeys / P::kPer * 4, 64);
    converted = rows_are_cells<P>(p) ? 0 : P::kBlockKeys * converted_bytes<P>(p);
    key_scales = rows_have_scales<P>(p) ? round_up(P::kBlockKeys * int64_t{sizeof(float)}, 64) : 0;
    no_row = P::kPaired ? round_up(p.latent_dim * 2, 64) : 0;
    lane = round_up(lanes * 4, 64);
    o = round_up(lanes * p.out_stride * 4, 64);
    constexpr int64_t kFewest = 16;  // rows of a tile
    value_pairs = P::kTiled ? round_up(P::kBlockKeys / 2 * p.out_stride * 4, 64) : 0;
    weight_rows = P::kTiled ? round_up((lanes + kFewest) * (P::kBlockKeys / 2) * 4, 64) : 0;
    few_rows = P::kTiled ? round_up(kFewest * p.out_stride * 4, 64) : 0;
  }
  int64_t total() const {
    return 64 + rows + after + offsets + block_rows + q + scores + weights + converted + key_scales + no_row +
           4 * lane + o + value_pairs + weight_rows + few_rows;
  }
};

template <class P>
Scratch scratch_at(const Problem& p, std::byte* at) {
  const Sizes<P> z(p);
  Scratch s;
  const auto take = [&](int64_t bytes) {
    std::byte* here = at;
    at += bytes;
    return here;
  };
  s.packed_for = reinterpret_cast<int64_t*>(take(64));
  s.rows = reinterpret_cast<const std::byte**>(take(z.rows));
  s.after = reinterpret_cast<const std::byte**>(take(z.after));
  s.offsets = reinterpret_cast<int32_t*>(take(z.offsets));
  s.block_rows = reinterpret_cast<const void**>(take(z.block_rows));
  s.q = take(z.q);
  s.scores = reinterpret_cast<float*>(take(z.scores));
  s.weights = take(z.weights);
  s.converted = take(z.converted);
  s.key_scales = reinterpret_cast<float*>(take(z.key_scales));
  s.no_row = take(z.no_row);
  s.limit = reinterpret_cast<float*>(take(z.lane));
  s.rescale = reinterpret_cast<float*>(take(z.lane));
  s.m = reinterpret_cast<float*>(take(z.lane));
  s.z = reinterpret_cast<float*>(take(z.lane));
  s.o = reinterpret_cast<float*>(take(z.o));
  s.value_pairs = reinterpret_cast<uint32_t*>(take(z.value_pairs));
  s.weight_rows = reinterpret_cast<uint32_t*>(take(z.weight_rows));
  s.few_rows = reinterpret_cast<float*>(take(z.few_rows));
  return s;
}

// Partials of a wave, given the most segments that a group can have.
GANNET_INLINE int64_t partials_of(int64_t max_segments, int num_workers) {
  return max_segments <= 1 ? 0 : larger(kMinPartials, int64_t{kPartialsPerWorker} * num_workers);
}

// Bytes of the merge factors of a lane vector: the worker's q is free by then, but may be smaller.
GANNET_INLINE int64_t factor_floats(int64_t num_partials) { return 2 * num_partials * kLanes; }

template <class P>
size_t workspace_on(const Problem& p, int64_t max_segments, int num_workers) {
  const int64_t partials = partials_of(max_segments, num_workers);
  const int64_t per_worker = Sizes<P>(p).total() + round_up(factor_floats(partials) * 4, 64);
  const int64_t states = partials > 0 ? (partials + 2) * round_up(state_floats(p) * 4, 64) : 0;
  return static_cast<size_t>(num_workers * per_worker + states + kMaxUnits * int64_t{sizeof(Unit) + sizeof(MergeJob)});
}

// Source gives the items (a request, or a row with a list) and their keys:
//   int64_t num_items;
//   Item item(i): has first_row and num_rows, the query rows
//   int64_t num_keys(item, j): keys that row j sees (columns of its list), which do not fall from a row to the next
//   int gather(item, segment, n, rows, offsets): addresses of the first n keys of the segment and, for rows of planar
//     pages, where in the page they lie; returns how many there are
//   static constexpr bool kList: entries may be dropped, so what gather returns counts for every lane
template <class P, class Source>
void run_on(const Problem& p, const Source& source, int64_t max_segments, const RunContext& ctx) {
  const int num_workers = ctx.executor.num_workers();
  const int64_t max_partials = partials_of(max_segments, num_workers);
  const int64_t per_worker = Sizes<P>(p).total() + round_up(factor_floats(max_partials) * 4, 64);
  std::byte* const worker_memory = ctx.workspace;
  auto* const states = reinterpret_cast<float*>(worker_memory + num_workers * per_worker);
  const int64_t states_bytes = max_partials > 0 ? (max_partials + 2) * round_up(state_floats(p) * 4, 64) : 0;
  auto* const units = reinterpret_cast<Unit*>(reinterpret_cast<std::byte*>(states) + states_bytes);
  auto* const jobs = reinterpret_cast<MergeJob*>(units + kMaxUnits);
  // A group that a wave leaves unfinished is handed on in one of two carries, while the other may hold one that the
  // same wave finishes.
  int64_t carry = 0;
  for (int w = 0; w < num_workers; ++w) {
    const Scratch s = scratch_at<P>(p, worker_memory + w * per_worker);
    s.packed_for[0] = -1;
    if constexpr (P::kPaired) std::memset(const_cast<void*>(s.no_row), 0, static_cast<size_t>(p.latent_dim) * 2);
  }

  using Item = typename Source::Item;
  const auto group_at = [&](const Item& item, int64_t first_lane) {
    Group g;
    g.row0 = item.first_row + first_lane / p.num_heads;
    g.head0 = first_lane % p.num_heads;
    g.num_lanes = static_cast<int>(smaller(p.max_lanes, item.num_rows * p.num_heads - first_lane));
    return g;
  };

  int64_t num_units = 0, num_partials = 0, num_jobs = 0;
  const auto run_unit = [&](int64_t index, int worker) {
    const Unit& u = units[index];
    const Scratch s = scratch_at<P>(p, worker_memory + worker * per_worker);
    const Item item = source.item(u.item);
    const Group g = group_at(item, u.first_lane);
    if (s.packed_for[0] != u.item || s.packed_for[1] != u.first_lane) {
      pack_q<P>(p, g, static_cast<typename P::Cell*>(s.q));
      s.packed_for[0] = u.item;
      s.packed_for[1] = u.first_lane;
    }
    Run runs[kGroupLanes];
    int num_runs = 0;
    const int64_t first_key = int64_t{u.segment} * kSegmentKeys;
    for (int lane = 0; lane < g.num_lanes; ++num_runs) {
      const int64_t at = u.first_lane + lane, j = at / p.num_heads;
      const int64_t keys = smaller(larger(source.num_keys(item, j) - first_key, 0), kSegmentKeys);
      const int lanes = static_cast<int>(smaller((j + 1) * p.num_heads - at, g.num_lanes - lane));
      runs[num_runs] = {lane, lanes, static_cast<int32_t>(keys)};
      lane += lanes;
    }
    // Units are claimed one by one, so while all workers go on at about the same speed this one's next is that many
    // further on. A wrong guess costs the requests.
    int num_after = 0;
    if (const int64_t likely = index + num_workers;
        likely < num_units && units[likely].item == u.item && units[likely].first_lane == u.first_lane) {
      const int64_t keys = source.num_keys(item, (u.first_lane + g.num_lanes - 1) / p.num_heads) -
                           int64_t{units[likely].segment} * kSegmentKeys;
      num_after = source.gather(item, units[likely].segment, static_cast<int>(smaller(keys, P::kBlockKeys)), s.after,
                                s.offsets);  // offsets: overwritten below
    }
    int n = runs[num_runs - 1].keys;
    n = source.gather(item, u.segment, n, s.rows, s.offsets);
    if constexpr (Source::kList) runs[0].keys = n;
    const State state = u.partial < 0 ? State{s.m, s.z, s.o} : state_at(p, states, u.partial);
#ifdef GANNET_TILES
    if constexpr (P::kTiled) tiles_begin();
#endif
    attend_segment<P>(p, s, runs, num_runs, g.num_lanes, n, num_after, state.m, state.z, state.o);
#ifdef GANNET_TILES
    if constexpr (P::kTiled) tiles_end();
#endif
    if (u.partial >= 0) return;
    for (int lane = 0; lane < g.num_lanes; ++lane)
      write_row<P>(p, g.row0 + (g.head0 + lane) / p.num_heads, (g.head0 + lane) % p.num_heads,
                   s.o + lane * p.out_stride, s.m[lane], s.z[lane]);
  };

  const int64_t vectors = p.max_lanes / kLanes;
  const auto run_merge = [&](int64_t index, int worker) {
    const MergeJob& job = jobs[index / vectors];
    const Group g = group_at(source.item(job.item), job.first_lane);
    const int lane0 = static_cast<int>(index % vectors) * kLanes;
    if (lane0 >= g.num_lanes) return;
    auto* factors = reinterpret_cast<float*>(worker_memory + worker * per_worker + Sizes<P>(p).total());
    merge_lanes<P>(p, g, job, states, state_at(p, states, max_partials + carry),
                   state_at(p, states, max_partials + 1 - carry), lane0, factors);
  };

  const auto flush = [&] {
    if (num_units > 0) ctx.executor.parallel_for(num_units, run_unit);
    if (num_jobs > 0) ctx.executor.parallel_for(num_jobs * vectors, run_merge);
    num_units = num_partials = num_jobs = 0;
    carry = 1 - carry;
  };
  for (int64_t i = 0; i < source.num_items; ++i) {
    const Item item = source.item(i);
    const int64_t lanes = item.num_rows * p.num_heads;
    for (int64_t first = 0; first < lanes; first += p.max_lanes) {
      const int64_t last_row = (smaller(first + p.max_lanes, lanes) - 1) / p.num_heads;
      const int64_t segments = (source.num_keys(item, last_row) + kSegmentKeys - 1) / kSegmentKeys;
      if (segments <= 1) {
        if (num_units == kMaxUnits) flush();
        units[num_units++] = {i, first, 0, -1};
        continue;
      }
      for (int64_t done = 0; done < segments;) {
        if (num_units == kMaxUnits || num_partials == max_partials) flush();
        const int64_t count = smaller(segments - done, smaller(kMaxUnits - num_units, max_partials - num_partials));
        jobs[num_jobs++] = {i,
                            first,
                            static_cast<int32_t>(num_partials),
                            static_cast<int32_t>(count),
                            done > 0,
                            done + count == segments};
        for (int64_t s = 0; s < count; ++s)
          units[num_units++] = {i, first, static_cast<int32_t>(done + s), static_cast<int32_t>(num_partials++)};
        done += count;
      }
    }
  }
  flush();
}

// lanes: the most (row, head) pairs that an item has.
template <class Params>
GANNET_INLINE Problem make_problem(const Params& a, int64_t lanes) {
  const LatentCacheView& cache = a.cache;
  Problem p;
  p.q = a.q;
  p.attn_sink = a.attn_sink;
  p.out = a.out;
  p.lse = a.lse;
  p.max_logits = a.max_logits;
  p.format = cache.format;
  const int64_t row_bytes = cache.format == LatentFormat::kE4m3PerToken
                                ? cache.geometry.latent_dim
                                : latent_row_bytes(cache.format, cache.geometry);
  p.ahead_lines = round_up(smaller(kAheadBytes, row_bytes), kCacheLine) / kCacheLine;
  p.page_size = cache.page_size;
  p.latent_dim = cache.geometry.latent_dim;
  p.width = int64_t{cache.geometry.latent_dim} + cache.geometry.rope_dim;
  p.out_stride = round_up(p.latent_dim, kLanes);
  p.num_heads = a.q.shape[1];
  p.max_lanes = static_cast<int>(round_up(smaller(lanes, kGroupLanes), kLanes));
  p.out_scale = cache.format == LatentFormat::kE4m3 ? cache.scale : 1.0f;
  p.score_scale = a.softmax_scale * a.q_scale * p.out_scale * kLog2E;
  return p;
}

// Pairs of bf16 where both sides are bf16 or narrower and the widths are whole pairs of vectors; else fp32. A matter of
// types and widths alone, so that it is the same for every batch.
GANNET_INLINE bool takes_pairs(const Problem& p) {
  return kFastDot2 && p.q.dtype != DType::kF32 && p.format != LatentFormat::kF32 && p.width % 2 == 0 &&
         p.latent_dim % (2 * kLanes) == 0;
}

#ifdef GANNET_TILES
// Whole steps of a product in both.
GANNET_INLINE bool takes_tiles(const Problem& p) { return takes_pairs(p) && p.width % kTileValues == 0; }
#endif

GANNET_INLINE size_t absorbed_workspace(const Problem& p, int64_t max_segments, int num_workers) {
#ifdef GANNET_TILES
  if (takes_tiles(p)) return workspace_on<TilePath>(p, max_segments, num_workers);
#endif
  if constexpr (kFastDot2) {
    if (takes_pairs(p)) return workspace_on<Bf16Path>(p, max_segments, num_workers);
  }
  return workspace_on<F32Path>(p, max_segments, num_workers);
}

template <class Source>
GANNET_INLINE void run_absorbed(const Problem& p, const Source& source, int64_t max_segments, const RunContext& ctx) {
#ifdef GANNET_TILES
  if (takes_tiles(p)) return run_on<TilePath>(p, source, max_segments, ctx);
#endif
  if constexpr (kFastDot2) {
    if (takes_pairs(p)) return run_on<Bf16Path>(p, source, max_segments, ctx);
  }
  run_on<F32Path>(p, source, max_segments, ctx);
}

}  // namespace
}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet

#endif  // GANNET_CPU_KERNELS_ABSORBED_INL_H_
