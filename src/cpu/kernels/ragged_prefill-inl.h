// Attention over ragged batches in the expanded form (spec 2.7, A.3): each head has keys and values of its own.
//
// Work. For a request of nq rows and nk keys and a head of width Dk (scores) and Dv (values) the visible pairs cost
// 2 * (Dk + Dv) flops each: 640 at 192/128, so 128 heads over 4,096 causal tokens are 687 GFLOP. Keys and values of one
// head are 2.6 MB in bf16 and are read once per tile of query rows: at 256 rows a tile that is 256 flops a byte, far
// above the ridge of any CPU. What bounds the kernel is the rate of the dot products, and then what surrounds them.
//
// Form. Lanes are query rows. In absorbed decode the lanes are heads, since all heads share a key; here a key belongs
// to one head and the rows of a tile are what shares it. A tile of up to 256 rows is transposed once into words
// [k][row], a word being a pair of bf16 along k or one fp32. Then, for every block of 96 keys:
//   1. the block's keys are copied to [key][word] and its values to [key pair][column] (an fp32 word holds one key),
//      two shuffles for 64 values. In the caller's tensor the rows of one head lie H * Dk values apart, a multiple of
//      4 KiB for all usual shapes, so that 96 of them meet in a few cache sets: read in place they evict each other.
//      Copying costs 320 words a key against 256 * 10 dot products of 16 lanes: about 1 %.
//   2. scores: 6 keys x 64 rows in 24 accumulators; a key's word is broadcast, the rows' words are vectors. 96 words
//      of 64 rows (24 KiB) stay in L1.
//   3. softmax, running, in units of log2: a lane is a row, so there is no step across lanes. Probabilities leave as
//      words [key pair][row], which is the order that step 4 broadcasts.
//   4. output: 6 rows x 64 columns in 24 accumulators, rescaled when they are loaded; no separate pass.
// Blocks above the diagonal are never touched.
//
// With tiles (vec_amx_bf16.h) steps 2 and 4 of bf16 are products in tiles: the rows' words, the keys and the values lie
// as those want them already, and only the probabilities are transposed, 16 x 16 words at a time. A row takes through
// tiles the whole steps of 32 keys of a block that it sees, and through vectors the rest: on the diagonal, where rows
// of a tile differ by one step at most, that step goes into a copy of the sums, of which the rows that see it are kept.
//
// A row's bits depend on the row alone. Blocks start at fixed distances from the request's first key; every sum runs
// in order of keys within a lane; and a row takes exactly the words that hold keys it sees: on the diagonal, where the
// rows of a register tile see different numbers of keys, the common words go through the tile and the rest row by row.
// A key that a row does not see has its score replaced by a select, and its value is masked out of the word or the
// word is not read, so NaN there goes nowhere. Adding such a key changes nothing: the maximum stays, the factor is
// exp2(0) = 1, the sum gets +0.
#pragma once

#include "cpu/kernel_table.h"
#include "cpu/kernels/math-inl.h"
#ifdef GANNET_TILES
#include "cpu/kernels/tiles-inl.h"
#endif

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace ragged {
namespace {

// Keys of a block, counted from the request's first key. 96 is whole tiles of 6, 8 and 12 keys, and 48 pairs of 64
// values are 12 KiB beside 12 KiB of probabilities in an L1 of 32 KiB.
constexpr int kKeyBlock = 96;
// Words of k between two visits of the accumulators: 96 words x 64 rows x 4 bytes = 24 KiB.
constexpr int kWordBlock = 96;
constexpr int kGroupVectors = kVectorRegisters >= 32 ? 4 : 2;
constexpr int kGroupRows = kGroupVectors * kLanes;
// Rows that share one copy of the keys. Rows of a tile need (Dk / 2 + Dv) words each: 256 rows are 230 KiB at 192/128
// and 384 KiB at 256/256, inside an L2 of 1 MiB.
constexpr int kMaxTileRows = 256;
constexpr int kMinTileRows = 64;
// Tasks per worker below which smaller tiles are taken, so that workers end at about the same time.
constexpr int64_t kTasksPerWorker = 4;

#ifdef GANNET_TILES
constexpr int64_t kTilePairs = kKeyBlock / 2;  // words of a row of probabilities
static_assert(kKeyBlock % kTileValues == 0);
#endif

constexpr float kLowest = -3.402823466e38f;  // a finite stand-in for -inf, so that -inf - max is not NaN
constexpr uint32_t kMinusInfinityBits = 0xff800000u;

struct Bf16Words {
  typedef uint16_t Value;
  static constexpr int kValues = 2;  // values of k, and keys of a probability word
  GANNET_INLINE F dot(F acc, W a, W b) { return dot2(acc, a, b); }
};
struct F32Words {
  typedef float Value;
  static constexpr int kValues = 1;
  GANNET_INLINE F dot(F acc, W a, W b) { return fma((F)a, (F)b, acc); }
};

GANNET_INLINE int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }
GANNET_INLINE int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }
GANNET_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

// keep_from(x, n, fill): lanes n, n + 1, ... of x, and `fill` in the first n.
struct alignas(64) LaneMasks {
  uint32_t words[2 * kLanes];
};
constexpr LaneMasks make_lane_masks() {
  LaneMasks m{};
  for (int i = 0; i < kLanes; ++i) m.words[kLanes + i] = 0xffffffffu;
  return m;
}
constexpr LaneMasks kLaneMasks = make_lane_masks();
GANNET_INLINE F keep_from(F x, int64_t n, uint32_t fill_bits) {
  const W keep = load_w(kLaneMasks.words + kLanes - clamp(n, 0, kLanes));
  return (F)(((W)x & keep) | (set1_w(fill_bits) & ~keep));
}

// Sizes of one problem and the scratch of one worker. The operation accepts widths that are multiples of 16 only, so
// there are whole words and whole vectors everywhere.
static_assert(16 % kLanes == 0);
struct Shape {
  int64_t key_words;  // words of a key
  int64_t own;        // values of a key that are the head's own; the others are k_rope's
  int64_t shared;
  int64_t value_dim;
  int tile_rows;
  float scale;  // softmax_scale * log2(e)
};

struct Scratch {
  uint32_t* q;       // [groups][key_words][kGroupRows]
  uint32_t* k;       // [kKeyBlock][key_words]
  uint32_t* v;       // [kKeyBlock / kValues][value_dim]
  uint32_t* p;       // [kKeyBlock / kValues][kGroupRows]
  float* s;          // [kKeyBlock][kGroupRows]
  float* o;          // [kMaxTileRows][value_dim]
  float* max;        // [kMaxTileRows], in units of log2
  float* sum;        // [kMaxTileRows]
  uint32_t* p_rows;  // [kGroupRows][kKeyBlock / kValues] probabilities by rows: with tiles only, as the next
  float* few;        // [16][value_dim]
  float* ratio;      // [kGroupRows], what the block multiplies earlier sums with
};

constexpr int64_t kScratchAlignment = 64;

// Addresses are numbers here: sizes are counted from 0, and a null pointer may not be added to.
template <class T>
GANNET_INLINE T* take(uintptr_t& at, int64_t count) {
  T* p = reinterpret_cast<T*>(at);
  at += static_cast<uintptr_t>(round_up(count * static_cast<int64_t>(sizeof(T)), kScratchAlignment));
  return p;
}

// Lays the scratch out from `base`; returns its end.
GANNET_INLINE uintptr_t lay_out(uintptr_t base, const Shape& shape, int values_per_word, Scratch& s) {
  const int64_t words = kKeyBlock / values_per_word;
  s.q = take<uint32_t>(base, kMaxTileRows * shape.key_words);
  s.k = take<uint32_t>(base, kKeyBlock * shape.key_words);
  s.v = take<uint32_t>(base, words * shape.value_dim);
  s.p = take<uint32_t>(base, words * kGroupRows);
  s.s = take<float>(base, kKeyBlock * kGroupRows);
  s.o = take<float>(base, kMaxTileRows * shape.value_dim);
  s.max = take<float>(base, kMaxTileRows);
  s.sum = take<float>(base, kMaxTileRows);
  s.ratio = take<float>(base, kGroupRows);
  s.p_rows = nullptr;
  s.few = nullptr;
#ifdef GANNET_TILES
  if (values_per_word == 2) {
    s.p_rows = take<uint32_t>(base, kGroupRows * kTilePairs);
    s.few = take<float>(base, kTileRows * shape.value_dim);
  }
#endif
  return base;
}

// ---- step 0: the tile's queries as [group][word][row] ----
template <class T>
void pack_q(const typename T::Value* q, int64_t row_stride, int num_rows, const Shape& shape, uint32_t* out) {
  for (int g = 0; g * kGroupRows < num_rows; ++g) {
    uint32_t* group = out + g * shape.key_words * kGroupRows;
    for (int r = 0; r < kGroupRows; ++r) {
      const int row = g * kGroupRows + r;
      if (row >= num_rows) {
        for (int64_t w = 0; w < shape.key_words; ++w) group[w * kGroupRows + r] = 0;
        continue;
      }
      const typename T::Value* from = q + row * row_stride;
      for (int64_t w = 0; w < shape.key_words; ++w) std::memcpy(group + w * kGroupRows + r, from + w * T::kValues, 4);
    }
  }
}

// ---- step 1: the block's keys and values ----
template <class T>
void pack_k(const typename T::Value* k, int64_t stride, const typename T::Value* rope, int64_t rope_stride, int count,
            const Shape& shape, uint32_t* out) {
  const size_t own_bytes = static_cast<size_t>(shape.own) * sizeof(typename T::Value);
  const size_t shared_bytes = static_cast<size_t>(shape.shared) * sizeof(typename T::Value);
  for (int t = 0; t < count; ++t, out += shape.key_words) {
    std::memcpy(out, k + t * stride, own_bytes);
    if (shared_bytes > 0)
      std::memcpy(reinterpret_cast<std::byte*>(out) + own_bytes, rope + t * rope_stride, shared_bytes);
  }
}

// The upper halves of the last of an odd number of keys are 0.
GANNET_INLINE void pack_v(const uint16_t* v, int64_t row_stride, int count, const Shape& shape, uint32_t* out) {
  for (int t = 0; t < count; t += 2, out += shape.value_dim) {
    const uint16_t* a = v + t * row_stride;
    const uint16_t* b = t + 1 < count ? a + row_stride : nullptr;
    int64_t d = 0;
    if (b != nullptr)
      for (; d + 2 * kLanes <= shape.value_dim; d += 2 * kLanes) interleave2(a + d, b + d, out + d);
    for (; d < shape.value_dim; ++d)
      out[d] = static_cast<uint32_t>(a[d]) | (b != nullptr ? static_cast<uint32_t>(b[d]) << 16 : 0u);
  }
}

GANNET_INLINE void pack_v(const float* v, int64_t row_stride, int count, const Shape& shape, uint32_t* out) {
  for (int t = 0; t < count; ++t, out += shape.value_dim)
    std::memcpy(out, v + t * row_stride, static_cast<size_t>(shape.value_dim) * sizeof(float));
}

// ---- step 2: s[key][row] (+)= sum over words of q[word][row] . k[key][word], for KEYS keys and VECTORS vectors ----
template <class T, int KEYS, int VECTORS>
GANNET_INLINE void score_tile(const uint32_t* q, const uint32_t* k, int64_t k_stride, int64_t words, float* s,
                              bool first) {
  F acc[KEYS][VECTORS];
  for (int t = 0; t < KEYS; ++t)
    for (int v = 0; v < VECTORS; ++v) acc[t][v] = first ? zero() : loadu(s + t * kGroupRows + v * kLanes);
  for (int64_t w = 0; w < words; ++w) {
    W x[VECTORS];
    for (int v = 0; v < VECTORS; ++v) x[v] = load_w(q + w * kGroupRows + v * kLanes);
    for (int t = 0; t < KEYS; ++t) {
      const W b = set1_w(k[t * k_stride + w]);
      for (int v = 0; v < VECTORS; ++v) acc[t][v] = T::dot(acc[t][v], x[v], b);
    }
  }
  for (int t = 0; t < KEYS; ++t)
    for (int v = 0; v < VECTORS; ++v) storeu(s + t * kGroupRows + v * kLanes, acc[t][v]);
}

// KEYS keys at a time fill the registers; what is left of the block goes two by two and one by one.
template <class T, int KEYS, int VECTORS>
void scores(const uint32_t* q, const uint32_t* k, int num_keys, const Shape& shape, float* s) {
  for (int64_t w = 0; w < shape.key_words; w += kWordBlock) {
    const int64_t words = min64(kWordBlock, shape.key_words - w);
    const uint32_t* qw = q + w * kGroupRows;
    const uint32_t* kw = k + w;
    const bool first = w == 0;
    int t = 0;
    for (; t + KEYS <= num_keys; t += KEYS)
      score_tile<T, KEYS, VECTORS>(qw, kw + t * shape.key_words, shape.key_words, words, s + t * kGroupRows, first);
    for (; t + 2 <= num_keys; t += 2)
      score_tile<T, 2, VECTORS>(qw, kw + t * shape.key_words, shape.key_words, words, s + t * kGroupRows, first);
    for (; t < num_keys; ++t)
      score_tile<T, 1, VECTORS>(qw, kw + t * shape.key_words, shape.key_words, words, s + t * kGroupRows, first);
  }
}

// ---- step 3: one vector of rows. Lane l sees keys t < full + l of the block (all of them where full >= num_keys) ----
template <class T>
GANNET_INLINE F probability(const float* s, int t, int num_keys, int64_t full, F scale, F m) {
  if (t >= num_keys) return zero();
  const F p = fast_exp2(sub(mul(loadu(s + t * kGroupRows), scale), m));
  return t < full ? p : keep_from(p, t - full + 1, 0u);
}

template <class T>
GANNET_INLINE void softmax(const float* s, int num_keys, int64_t full, float scale_value, float* max_io, float* sum_io,
                           float* ratio, uint32_t* p) {
  const F scale = set1(scale_value);
  // Lanes are at most kLanes - 1 keys apart, so later keys are seen by none of them and their words are not read.
  const int seen = static_cast<int>(clamp(full + kLanes - 1, 0, num_keys));
  const int unmasked = static_cast<int>(clamp(full, 0, seen));
  const F old = loadu(max_io);
  F m = max(set1(kLowest), old);
  int t = 0;
  for (; t < unmasked; ++t) m = max(mul(loadu(s + t * kGroupRows), scale), m);
  for (; t < seen; ++t) m = max(keep_from(mul(loadu(s + t * kGroupRows), scale), t - full + 1, kMinusInfinityBits), m);
  const F r = fast_exp2(sub(old, m));
  F sum = zero();
  for (t = 0; t < seen; t += T::kValues) {
    const F a = probability<T>(s, t, seen, full, scale, m);
    if constexpr (T::kValues == 2) {
      const F b = probability<T>(s, t + 1, seen, full, scale, m);
      sum = add(sum, add(a, b));
      store_w(p + t / 2 * kGroupRows, pack2(a, b));
    } else {
      sum = add(sum, a);
      store_w(p + t * kGroupRows, (W)a);
    }
  }
  storeu(max_io, m);
  storeu(sum_io, fma(loadu(sum_io), r, sum));
  storeu(ratio, r);
}

// ---- step 4: o[row][column] = ratio * o + sum over words of p[word][row] . v[word][column] ----
template <class T, int ROWS, int VECTORS>
GANNET_INLINE void output_tile(const uint32_t* p, const uint32_t* v, int64_t v_stride, int64_t words, float* o,
                               const float* ratio) {
  F acc[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < VECTORS; ++c) acc[r][c] = mul(set1(ratio[r]), loadu(o + r * v_stride + c * kLanes));
  for (int64_t w = 0; w < words; ++w) {
    W x[VECTORS];
    for (int c = 0; c < VECTORS; ++c) x[c] = load_w(v + w * v_stride + c * kLanes);
    for (int r = 0; r < ROWS; ++r) {
      const W b = set1_w(p[w * kGroupRows + r]);
      for (int c = 0; c < VECTORS; ++c) acc[r][c] = T::dot(acc[r][c], x[c], b);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int c = 0; c < VECTORS; ++c) storeu(o + r * v_stride + c * kLanes, acc[r][c]);
}

template <class T, int ROWS>
GANNET_INLINE void output_rows(const uint32_t* p, const uint32_t* v, int64_t v_stride, int64_t words, float* o,
                               const float* ratio) {
  int64_t d = 0;
  for (; d + kGroupVectors * kLanes <= v_stride; d += kGroupVectors * kLanes)
    output_tile<T, ROWS, kGroupVectors>(p, v + d, v_stride, words, o + d, ratio);
  for (; d < v_stride; d += kLanes) output_tile<T, ROWS, 1>(p, v + d, v_stride, words, o + d, ratio);
}

// The words of one row that its neighbours do not share: [first, num_keys / kValues) whole, then, where num_keys is
// odd, the lower half of one more: its upper half is a key that this row does not see.
template <class T>
GANNET_INLINE void output_row_rest(const uint32_t* p, const uint32_t* v, int64_t v_stride, int64_t first,
                                   int64_t num_keys, float* o) {
  const int64_t words = num_keys / T::kValues;
  const bool half = num_keys % T::kValues != 0;
  if (first >= words && !half) return;
  for (int64_t d = 0; d < v_stride; d += kLanes) {
    F acc = loadu(o + d);
    for (int64_t w = first; w < words; ++w) acc = T::dot(acc, load_w(v + w * v_stride + d), set1_w(p[w * kGroupRows]));
    if (half) acc = T::dot(acc, load_w(v + words * v_stride + d) & set1_w(0xffffu), set1_w(p[words * kGroupRows]));
    storeu(o + d, acc);
  }
}

// ROWS rows; row r sees keys t < full + r of the block (all of them where full >= num_keys).
template <class T, int ROWS>
GANNET_INLINE void output_step(const Scratch& w, int row, int num_keys, int64_t full, const Shape& shape, float* o) {
  float* out = o + row * shape.value_dim;
  const int64_t least = clamp(full + row, 0, num_keys);
  const bool same = least == num_keys;
  const int64_t words = same ? (num_keys + T::kValues - 1) / T::kValues : least / T::kValues;
  output_rows<T, ROWS>(w.p + row, w.v, shape.value_dim, words, out, w.ratio + row);
  if (same) return;
  for (int i = 0; i < ROWS; ++i)
    output_row_rest<T>(w.p + row + i, w.v, shape.value_dim, words, clamp(full + row + i, 0, num_keys),
                       out + i * shape.value_dim);
}

// Rows [0, num_rows) of a group.
template <class T>
void outputs(const Scratch& w, int num_rows, int num_keys, int64_t full, const Shape& shape, float* o) {
  constexpr int kRows = kVectorRegisters >= 32 ? 6 : 4;
  int row = 0;
  for (; row + kRows <= num_rows; row += kRows) output_step<T, kRows>(w, row, num_keys, full, shape, o);
  for (; row + 2 <= num_rows; row += 2) output_step<T, 2>(w, row, num_keys, full, shape, o);
  for (; row < num_rows; ++row) output_step<T, 1>(w, row, num_keys, full, shape, o);
}

#ifdef GANNET_TILES
// Whole steps of a product.
template <class T>
GANNET_INLINE bool takes_tiles(const Shape& shape) {
  return T::kValues == 2 && shape.key_words % kTileWords == 0;
}

GANNET_INLINE void tiled_scores(const uint32_t* q, const Scratch& w, int num_keys, int vectors, const Shape& shape) {
  const TileOperands t{reinterpret_cast<const std::byte*>(w.k), shape.key_words * 4,
                       reinterpret_cast<const std::byte*>(q),   kGroupRows * 4,
                       reinterpret_cast<std::byte*>(w.s),       kGroupRows * 4};
  tile_product(t, shape.key_words / kTileWords, (num_keys + kTileRows - 1) / kTileRows, vectors, true);
}

// Rows [0, num_rows) of a group, as outputs.
inline void tiled_outputs(const Scratch& w, int num_rows, int num_keys, int64_t full, const Shape& shape, float* o) {
  const int64_t bytes = shape.value_dim * int64_t{sizeof(float)};
  const auto columns = static_cast<int>(shape.value_dim / kTileWords);
  for (int row0 = 0; row0 < num_rows; row0 += kTileRows) {
    const int rows = num_rows - row0 < kTileRows ? num_rows - row0 : kTileRows;
    const auto keys_of = [&](int r) __attribute__((always_inline)) { return clamp(full + row0 + r, 0, num_keys); };
    const int64_t least = keys_of(0) / kTileValues, most = keys_of(rows - 1) / kTileValues;
    for (int64_t j = 0; j < most; ++j)
      transpose_pairs(w.p + j * kTileWords * kGroupRows + row0, kGroupRows,
                      w.p_rows + row0 * kTilePairs + j * kTileWords, kTilePairs);
    float* const sums = o + row0 * shape.value_dim;
    for (int r = 0; r < rows; ++r) {
      const F ratio = set1(w.ratio[row0 + r]);
      float* const row = sums + r * shape.value_dim;
      for (int64_t d = 0; d < shape.value_dim; d += kLanes) storeu(row + d, mul(ratio, loadu(row + d)));
    }
    // Steps [first, end) for the rows from `from`, in place where all 16 rows are there and want them.
    const auto product = [&](int64_t first, int64_t end, int from) __attribute__((always_inline)) {
      if (first >= end || from >= rows) return;
      const bool in_place = rows == kTileRows && from == 0;
      if (!in_place) std::memcpy(w.few, sums, static_cast<size_t>(rows * bytes));
      const TileOperands t{reinterpret_cast<const std::byte*>(w.p_rows + row0 * kTilePairs + first * kTileWords),
                           kTilePairs * 4,
                           reinterpret_cast<const std::byte*>(w.v + first * kTileWords * shape.value_dim),
                           bytes,
                           reinterpret_cast<std::byte*>(in_place ? sums : w.few),
                           bytes};
      tile_product(t, end - first, 1, columns, false);
      if (!in_place)
        std::memcpy(sums + from * shape.value_dim, w.few + from * shape.value_dim,
                    static_cast<size_t>((rows - from) * bytes));
    };
    product(0, least, 0);
    for (int64_t j = least; j < most; ++j) {
      int from = 0;
      while (from < rows && keys_of(from) / kTileValues <= j) ++from;
      product(j, j + 1, from);
    }
    for (int r = 0; r < rows; ++r)
      output_row_rest<Bf16Words>(w.p + row0 + r, w.v, shape.value_dim, keys_of(r) / kTileValues * kTileWords,
                                 keys_of(r), sums + r * shape.value_dim);
  }
}
#endif

// One group of rows against one block of keys.
template <class T>
void group_block(const Scratch& w, int group, int num_rows, int num_keys, int64_t full, const Shape& shape) {
  const uint32_t* q = w.q + group * shape.key_words * kGroupRows;
  const int vectors = (num_rows + kLanes - 1) / kLanes;
#ifdef GANNET_TILES
  const bool tiled = takes_tiles<T>(shape);
  if (tiled) tiled_scores(q, w, num_keys, vectors, shape);
  else
#endif
      if constexpr (kGroupVectors == 4) {
    if (vectors == 1) scores<T, 12, 1>(q, w.k, num_keys, shape, w.s);
    else if (vectors == 2) scores<T, 12, 2>(q, w.k, num_keys, shape, w.s);
    else if (vectors == 3) scores<T, 8, 3>(q, w.k, num_keys, shape, w.s);
    else scores<T, 6, 4>(q, w.k, num_keys, shape, w.s);
  } else {
    if (vectors == 1) scores<T, 6, 1>(q, w.k, num_keys, shape, w.s);
    else scores<T, 4, 2>(q, w.k, num_keys, shape, w.s);
  }
  for (int v = 0; v < vectors; ++v) {
    const int64_t at = v * kLanes;
    softmax<T>(w.s + at, num_keys, full + at, shape.scale, w.max + group * kGroupRows + at,
               w.sum + group * kGroupRows + at, w.ratio + at, w.p + at);
  }
#ifdef GANNET_TILES
  if (tiled) return tiled_outputs(w, num_rows, num_keys, full, shape, w.o + group * kGroupRows * shape.value_dim);
#endif
  outputs<T>(w, num_rows, num_keys, full, shape, w.o + group * kGroupRows * shape.value_dim);
}

GANNET_INLINE void write_row(const TensorView& out, int64_t row, int64_t head, const float* o, float sum,
                             const Shape& shape) {
  const F divisor = set1(sum);
  for (int64_t d = 0; d < shape.value_dim; d += kLanes) {
    const F x = o != nullptr ? loadu(o + d) / divisor : zero();
    if (out.dtype == DType::kF32) storeu(out.ptr<float>(row, head) + d, x);
    else store_bf16(out.ptr<uint16_t>(row, head) + d, x);
  }
}

// One head of rows [row0, row0 + num_rows) of a request.
struct Tile {
  int64_t q_row;     // first row in q and out
  int64_t kv_row;    // the request's first key
  int64_t num_keys;  // the request's keys
  int64_t bound;     // keys that the first row sees, before clamping to [0, num_keys]
  int num_rows;
};

template <class T>
void run_tile(const RaggedPrefill& a, const Tile& tile, int64_t head, const Shape& shape, const Scratch& w) {
  typedef typename T::Value Value;
  // Without a mask every row sees every key: a first bound of num_keys says so.
  const int64_t step = a.causal ? 1 : 0;
  const int64_t visible = clamp(tile.bound + step * (tile.num_rows - 1), 0, tile.num_keys);
  if (visible > 0) {
    pack_q<T>(a.q.ptr<Value>(tile.q_row, head), a.q.stride[0], tile.num_rows, shape, w.q);
    for (int64_t i = 0; i < tile.num_rows * shape.value_dim; ++i) w.o[i] = 0.0f;
    for (int i = 0; i < kMaxTileRows; ++i) {
      w.sum[i] = 0.0f;
      std::memcpy(w.max + i, &kMinusInfinityBits, sizeof(float));
    }
  }
  for (int64_t k0 = 0; k0 < visible; k0 += kKeyBlock) {
    const int count = static_cast<int>(min64(kKeyBlock, visible - k0));
    const int64_t row = tile.kv_row + k0;
    pack_k<T>(a.k.ptr<Value>(row, head), a.k.stride[0], shape.shared > 0 ? a.k_rope.ptr<Value>(row) : nullptr,
              a.k_rope.stride[0], count, shape, w.k);
    pack_v(a.v.ptr<Value>(row, head), a.v.stride[0], count, shape, w.v);
    for (int g = 0; g * kGroupRows < tile.num_rows; ++g) {
      const int num_rows = static_cast<int>(min64(kGroupRows, tile.num_rows - g * kGroupRows));
      const int64_t full = a.causal ? tile.bound + g * kGroupRows - k0 : count;
      // Keys beyond what the group's last row sees are above the diagonal. Whole words: the upper half of a last odd
      // word is a key above the diagonal, so the rows that end in it must not take the word as it is.
      const int64_t keys = a.causal ? min64(count, round_up(clamp(full + num_rows - 1, 0, count), T::kValues)) : count;
      if (keys > 0) group_block<T>(w, g, num_rows, static_cast<int>(keys), full, shape);
    }
  }
  for (int r = 0; r < tile.num_rows; ++r) {
    // No key, or none with a weight: scores of -inf alone.
    const bool empty = clamp(tile.bound + step * r, 0, tile.num_keys) == 0 || w.sum[r] == 0.0f;
    write_row(a.out, tile.q_row + r, head, empty ? nullptr : w.o + r * shape.value_dim, w.sum[r], shape);
    if (!a.lse.given()) continue;
    float* lse = a.lse.ptr<float>(tile.q_row + r, head);
    if (empty) std::memcpy(lse, &kMinusInfinityBits, sizeof(float));
    else *lse = w.max[r] * kLn2 + log_of(w.sum[r]);
  }
}

GANNET_INLINE Shape shape_of(const RaggedPrefill& a) {
  const int values = a.q.dtype == DType::kF32 ? 1 : 2;
  Shape s;
  s.own = a.k.shape[2];
  s.shared = a.q.shape[2] - s.own;
  s.key_words = a.q.shape[2] / values;
  s.value_dim = a.v.shape[2];
  s.tile_rows = kMaxTileRows;
  s.scale = a.softmax_scale * kLog2E;
  return s;
}

GANNET_INLINE int64_t worker_bytes(const Shape& shape, int values_per_word) {
  Scratch s;
  return static_cast<int64_t>(lay_out(0, shape, values_per_word, s));
}

// Host-known row and key ranges are the caller's; a range that leaves the tensors is cut, so that no memory outside
// them is touched.
struct Range {
  int64_t first;
  int64_t count;
};
GANNET_INLINE Range range_of(const TensorView& cumulative, int64_t request, int64_t rows) {
  const int64_t first = clamp(*cumulative.ptr<int32_t>(request), 0, rows);
  const int64_t end = clamp(*cumulative.ptr<int32_t>(request + 1), first, rows);
  return {first, end - first};
}

template <class T>
void run(const RaggedPrefill& a, const RunContext& ctx) {
  Shape shape = shape_of(a);
  const int64_t batch = a.cu_q_lens.shape[0] - 1;
  const int64_t heads = a.q.shape[1];
  const int64_t q_rows = a.q.shape[0];
  const int64_t kv_rows = a.k.shape[0];
  // A row's bits do not depend on the tile it is in, so tiles may be as small as an even load wants.
  const int64_t wanted = kTasksPerWorker * ctx.executor.num_workers();
  while (shape.tile_rows > kMinTileRows && (q_rows + shape.tile_rows - 1) / shape.tile_rows * heads < wanted)
    shape.tile_rows /= 2;
  int64_t* first_tile = reinterpret_cast<int64_t*>(ctx.workspace);  // [batch + 1]
  first_tile[0] = 0;
  for (int64_t r = 0; r < batch; ++r)
    first_tile[r + 1] =
        first_tile[r] + (range_of(a.cu_q_lens, r, q_rows).count + shape.tile_rows - 1) / shape.tile_rows;
  const int64_t num_tiles = first_tile[batch];
  std::byte* const scratch =
      ctx.workspace + round_up((batch + 1) * static_cast<int64_t>(sizeof(int64_t)), kScratchAlignment);
  const int64_t scratch_bytes = worker_bytes(shape, T::kValues);

  // Head by head, so that workers meet in the same keys (L3), and the long last tiles of a request first.
  ctx.executor.parallel_for(num_tiles * heads, [&](int64_t task, int worker) {
    const int64_t head = task / num_tiles;
    const int64_t index = num_tiles - 1 - task % num_tiles;
    int64_t low = 0, high = batch;  // first_tile[low] <= index < first_tile[high]
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first_tile[middle] <= index ? low : high) = middle;
    }
    const Range q = range_of(a.cu_q_lens, low, q_rows);
    const Range kv = range_of(a.cu_kv_lens, low, kv_rows);
    const int64_t at = (index - first_tile[low]) * shape.tile_rows;
    Tile tile;
    tile.q_row = q.first + at;
    tile.kv_row = kv.first;
    tile.num_keys = kv.count;
    tile.num_rows = static_cast<int>(min64(shape.tile_rows, q.count - at));
    tile.bound = a.causal ? at + 1 + kv.count - q.count : kv.count;
    Scratch w;
    lay_out(reinterpret_cast<uintptr_t>(scratch + worker * scratch_bytes), shape, T::kValues, w);
#ifdef GANNET_TILES
    if (takes_tiles<T>(shape)) tiles_begin();
#endif
    run_tile<T>(a, tile, head, shape, w);
#ifdef GANNET_TILES
    if (takes_tiles<T>(shape)) tiles_end();
#endif
  });
}

}  // namespace
}  // namespace ragged

void run_ragged_prefill(const RaggedPrefill& a, const RunContext& ctx) {
  if (a.q.dtype == DType::kF32) ragged::run<ragged::F32Words>(a, ctx);
  else ragged::run<ragged::Bf16Words>(a, ctx);
}

size_t workspace_ragged_prefill(const RaggedPrefill& a, int num_workers) {
  const int64_t table =
      ragged::round_up(a.cu_q_lens.shape[0] * static_cast<int64_t>(sizeof(int64_t)), ragged::kScratchAlignment);
  const int64_t worker = ragged::worker_bytes(ragged::shape_of(a), a.q.dtype == DType::kF32 ? 1 : 2);
  return static_cast<size_t>(table + num_workers * worker);
}

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
