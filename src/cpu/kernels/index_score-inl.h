// Scores of index keys, shared by index_logits and index_select:
//   logit(t, s) = scale(s) * sum over heads h of w(t, h) * relu(q(t, h) . k(s))
//
// Shapes and cost. Hi = 64 heads of Di = 128 against one key is 16,384 flops for 132 to 256 bytes of cache: bound by
// the dot products from the first row on, whatever the cache's format. So:
//   - a lane is a head. The queries of a row are packed once as [Di / 2][heads] pairs of bf16 (16 KiB for 64 x 128),
//     a key is broadcast pair by pair from the cache as it lies, and the dot product of a (head, key) runs down one
//     lane in one chain: no shuffles, and the same bits wherever the row or the key happens to be in a tile.
//   - registers hold a tile of keys x vectors of lanes: 6 x 4 with 32 registers (24 accumulators, 4 queries, 1 or 2
//     broadcasts): 10 loads for 24 dot products. Fewer heads give 9 x 3 and 12 x 2 or 12 x 1; several rows of a request
//     fill the vectors of a tile, and the lanes of a vector (kLanes / 2 heads and fewer), where the heads of one do
//     not.
//   - relu, weight and head sum follow while the tile is in registers: 2 operations a vector and one horizontal sum a
//     (row, key), about 5 % of the 64 steps of the dot product.
//   - keys go in blocks of kKeyBlock, which all rows of a block of rows use while it is in the first two cache levels.
//     e4m3 keys become bf16 pairs here, exactly, and their scale multiplies the head sum.
// e4m3 queries are widened as they are packed: to bf16, exactly, or to fp32.
// With tiles (vec_amx_bf16.h) the packed queries are the second operand of a product as they lie, and 16 keys the
// first: 4 steps of 4 products for 16 keys of 64 heads, 256 cycles where pairs take 2,048; a page's keys are read where
// they are, and others gathered. Relu, weights and head sum are the same code, over results in L1. fp32 queries or an
// fp32 cache take the same route with one fp32 value a step instead of a pair, at half the speed; so does everything
// where the pair product is not an instruction (kNativeDot2).
//
// Determinism: the chain of a lane, the order of vectors in a row (first to last, fused), and the horizontal sum are
// fixed by Hi and Di alone.
#pragma once

#include "cpu/kernel_table.h"
#include "cpu/kernels/query_rows-inl.h"
#ifdef GANNET_TILES
#include "cpu/kernels/tiles-inl.h"
#endif

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace {

constexpr int kTileVectors = 4;
/// Keys in a register tile beside `vectors` lane vectors: the accumulators leave room for the queries and two
/// broadcasts; 12 independent chains hide the latency of a dot product (6 cycles, at most 2 a cycle).
constexpr int tile_keys(int vectors) {
  const int n = (kVectorRegisters - vectors - 2) / vectors;
  return n > 12 ? 12 : n;
}
#ifdef GANNET_TILES
constexpr int kKeyBlock = 144;  // a multiple of 16 as well
static_assert(kKeyBlock % kTileRows == 0);
#else
constexpr int kKeyBlock = 72;  // a multiple of every tile_keys; 72 bf16 keys of 128 values are 18 KiB
#endif
static_assert(kKeyBlock % tile_keys(1) == 0 && kKeyBlock % tile_keys(2) == 0 && kKeyBlock % tile_keys(3) == 0 &&
              kKeyBlock % tile_keys(4) == 0);
constexpr int kMaxBlockLanes = 512;  // lanes of a row block: 8 rows of 64 heads, 128 KiB of packed queries, half of L2
constexpr int kMaxBlockRows = 32;
constexpr int kMaxTileRows = kTileVectors * kLanes / kFewestGroupLanes;
static_assert(kMaxBlockRows % (kLanes / kFewestGroupLanes) == 0);

constexpr int64_t kCacheLine = 64;

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
constexpr int64_t divide_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }
constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/// Pairs of bf16 on both sides.
struct PairStep {
  using Vector = W;
  static constexpr int kValuesPerWord = 2;
  GANNET_INLINE W load(const uint32_t* p) { return load_w(p); }
  GANNET_INLINE W broadcast(const std::byte* p) {
    uint32_t x;
    std::memcpy(&x, p, sizeof x);
    return set1_w(x);
  }
  GANNET_INLINE F step(F acc, W q, W k) { return dot2(acc, q, k); }
};

/// fp32 on both sides.
struct ValueStep {
  using Vector = F;
  static constexpr int kValuesPerWord = 1;
  GANNET_INLINE F load(const uint32_t* p) { return (F)load_w(p); }
  GANNET_INLINE F broadcast(const std::byte* p) {
    float x;
    std::memcpy(&x, p, sizeof x);
    return set1(x);
  }
  GANNET_INLINE F step(F acc, F q, F k) { return fma(q, k, acc); }
};

/// What is the same for all rows of a call.
struct IndexProblem {
  TensorView q, weights;
  IndexCacheView cache;
  PageTableView pages;
  QueryRows rows;
  int64_t num_rows;
  int64_t num_requests;
  int num_heads;
  int head_dim;
  bool pairs;           // PairStep rather than ValueStep
  int num_words;        // steps of a dot product
  int vectors_per_row;  // 1 where several rows share a vector
  int rows_per_vector;  // 1 where a row fills a vector or more
  int lanes_per_row;    // within the last, or shared, vector of a row
  int rows_per_block;   // a multiple of rows_per_vector
};

template <class Params>
GANNET_INLINE IndexProblem index_problem(const Params& p) {
  IndexProblem x;
  x.q = p.q;
  x.weights = p.weights;
  x.cache = p.cache;
  x.pages = p.pages;
  x.rows = p.rows;
  x.num_rows = p.q.shape[0];
  x.num_requests = p.rows.seq_lens.shape[0];
  x.num_heads = static_cast<int>(p.q.shape[1]);
  x.head_dim = static_cast<int>(p.q.shape[2]);
  const bool narrow_cache = (p.cache.format == IndexKFormat::kBf16 && x.head_dim % 2 == 0) ||
                            (p.cache.format == IndexKFormat::kE4m3 && x.head_dim % 32 == 0);
  x.pairs = kNativeDot2 && p.q.dtype != DType::kF32 && narrow_cache;
  x.num_words = x.pairs ? x.head_dim / 2 : x.head_dim;
  x.vectors_per_row = static_cast<int>(divide_up(x.num_heads, kLanes));
  x.lanes_per_row = kLanes;
  while (x.lanes_per_row > kFewestGroupLanes && x.num_heads <= x.lanes_per_row / 2) x.lanes_per_row /= 2;
  x.rows_per_vector = kLanes / x.lanes_per_row;
  const int fitting = kMaxBlockLanes / (x.vectors_per_row * x.lanes_per_row);
  x.rows_per_block = fitting < 1 ? 1 : fitting > kMaxBlockRows ? kMaxBlockRows : fitting;
  return x;
}

/// Lane vectors of a block of num_rows rows.
GANNET_INLINE int64_t block_vectors(const IndexProblem& x, int64_t num_rows) {
  return divide_up(num_rows, x.rows_per_vector) * x.vectors_per_row;
}

/// A worker's memory. Everything but the sizes lies in the workspace.
struct IndexScratch {
  int64_t* packed_block;  // the row block whose queries are packed, or -1
  uint32_t* queries;      // tiles of [num_words][vectors][kLanes]
  float* weights;         // [block_vectors][kLanes]
  std::byte* keys;        // [kKeyBlock][head_dim] converted keys
  float* partial;         // [kKeyBlock][kLanes] head sums of rows that need several tiles
};

constexpr int64_t kScratchAlignment = 64;

GANNET_INLINE int64_t index_scratch_bytes(const IndexProblem& x) {
  const int64_t lanes = block_vectors(x, x.rows_per_block) * kLanes;
  return kScratchAlignment + round_up(lanes * x.num_words * 4, kScratchAlignment) +
         round_up(lanes * 4, kScratchAlignment) + round_up(int64_t{kKeyBlock} * x.head_dim * 4, kScratchAlignment) +
         round_up(int64_t{kKeyBlock} * kLanes * 4, kScratchAlignment);
}

GANNET_INLINE IndexScratch index_scratch(const IndexProblem& x, std::byte* memory) {
  const int64_t lanes = block_vectors(x, x.rows_per_block) * kLanes;
  IndexScratch s;
  s.packed_block = reinterpret_cast<int64_t*>(memory);
  memory += kScratchAlignment;
  s.queries = reinterpret_cast<uint32_t*>(memory);
  memory += round_up(lanes * x.num_words * 4, kScratchAlignment);
  s.weights = reinterpret_cast<float*>(memory);
  memory += round_up(lanes * 4, kScratchAlignment);
  s.keys = memory;
  memory += round_up(int64_t{kKeyBlock} * x.head_dim * 4, kScratchAlignment);
  s.partial = reinterpret_cast<float*>(memory);
  return s;
}

// ---- row blocks -----------------------------------------------------------------------------------------------------

/// Up to rows_per_block consecutive rows of one request.
struct RowBlock {
  RequestRows request;
  int64_t first;  // first row within the request
  int num_rows;
  int64_t row(int i) const { return request.first_row + first + i; }
};

/// Bytes of blocks_before below.
GANNET_INLINE int64_t index_list_bytes(const IndexProblem& x) {
  return round_up((x.num_requests + 1) * static_cast<int64_t>(sizeof(int64_t)), kScratchAlignment);
}

/// blocks_before[i] = row blocks of the requests before i, [num_requests + 1]; returns their number, and the most keys
/// that any row sees.
GANNET_INLINE int64_t list_row_blocks(const IndexProblem& x, int64_t* blocks_before, int64_t* max_keys) {
  int64_t n = 0;
  *max_keys = 0;
  for (int64_t i = 0; i < x.num_requests; ++i) {
    blocks_before[i] = n;
    const RequestRows r = request_rows(x.pages, x.rows, x.cache.page_size, x.num_rows, i);
    n += divide_up(r.num_rows, x.rows_per_block);
    if (r.num_rows > 0) *max_keys = larger(*max_keys, visible_keys(r, x.rows.bound, r.num_rows - 1));
  }
  blocks_before[x.num_requests] = n;
  return n;
}

GANNET_INLINE RowBlock row_block(const IndexProblem& x, const int64_t* blocks_before, int64_t block) {
  int64_t low = 0, high = x.num_requests;  // the last request with blocks_before <= block
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (blocks_before[middle] <= block) low = middle;
    else high = middle;
  }
  RowBlock b;
  b.request = request_rows(x.pages, x.rows, x.cache.page_size, x.num_rows, low);
  b.first = (block - blocks_before[low]) * x.rows_per_block;
  b.num_rows = static_cast<int>(smaller(x.rows_per_block, b.request.num_rows - b.first));
  return b;
}

// ---- queries --------------------------------------------------------------------------------------------------------

/// A unit is what lies in vectors_per_row consecutive vectors: a row, or the rows_per_vector rows that share a vector.
/// Vectors and units of the tile that starts at vector `vector` of unit `unit` of a block of num_units.
struct TileShape {
  int vectors;
  int units;  // 1 where a unit needs several tiles
};
GANNET_INLINE TileShape tile_shape(int vectors_per_row, int num_units, int unit, int vector) {
  if (vectors_per_row > kTileVectors) return {static_cast<int>(smaller(kTileVectors, vectors_per_row - vector)), 1};
  const int units = static_cast<int>(smaller(kTileVectors / vectors_per_row, num_units - unit));
  return {units * vectors_per_row, units};
}

/// The bits of an e4m3 value in fp32; the upper half is its bf16, exactly.
GANNET_INLINE uint32_t e4m3_word(uint8_t x) {
  const uint32_t magnitude = x & 0x7fu, as_float = magnitude << 20;
  float value;
  std::memcpy(&value, &as_float, sizeof value);
  value *= 0x1p120f;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return (magnitude == 0x7fu ? 0x7fc00000u : bits) | (x & 0x80u) << 24;
}

GANNET_INLINE uint32_t query_word(const TensorView& q, int64_t row, int64_t head, int word, bool pairs) {
  uint32_t bits;
  const int64_t element = row * q.stride[0] + head * q.stride[1];
  if (q.dtype == DType::kE4m3) {
    const uint8_t* values = static_cast<const uint8_t*>(q.data) + element;
    bits = pairs ? e4m3_word(values[2 * word]) >> 16 | (e4m3_word(values[2 * word + 1]) & 0xffff0000u)
                 : e4m3_word(values[word]);
  } else if (pairs) {
    std::memcpy(&bits, static_cast<const uint16_t*>(q.data) + element + 2 * word, sizeof bits);
  } else if (q.dtype == DType::kBf16) {
    bits = static_cast<uint32_t>(static_cast<const uint16_t*>(q.data)[element + word]) << 16;
  } else {
    std::memcpy(&bits, static_cast<const float*>(q.data) + element + word, sizeof bits);
  }
  return bits;
}

inline void pack_queries(const IndexProblem& x, const RowBlock& block, const IndexScratch& scratch) {
  const int num_units = static_cast<int>(divide_up(block.num_rows, x.rows_per_vector));
  uint32_t* out = scratch.queries;
  float* weights = scratch.weights;
  for (int unit = 0, vector = 0; unit < num_units;) {
    const TileShape tile = tile_shape(x.vectors_per_row, num_units, unit, vector);
    const int64_t step = int64_t{tile.vectors} * kLanes;
    for (int v = 0; v < tile.vectors; ++v) {
      const int of_unit = unit + (tile.units > 1 ? v / x.vectors_per_row : 0);
      const int in_row = tile.units > 1 ? v % x.vectors_per_row : vector + v;
      for (int lane = 0; lane < kLanes; ++lane) {
        const int i = of_unit * x.rows_per_vector + lane / x.lanes_per_row;
        const int64_t head = int64_t{in_row} * kLanes + lane % x.lanes_per_row;
        uint32_t* to = out + v * kLanes + lane;
        if (i < block.num_rows && head < x.num_heads) {
          for (int c = 0; c < x.num_words; ++c) to[c * step] = query_word(x.q, block.row(i), head, c, x.pairs);
          *weights++ = x.weights.ptr<const float>(block.row(i))[head];
        } else {
          for (int c = 0; c < x.num_words; ++c) to[c * step] = 0;
          *weights++ = 0.0f;
        }
      }
    }
    out += step * x.num_words;
    vector += tile.vectors;
    if (x.vectors_per_row <= kTileVectors || vector == x.vectors_per_row) {
      unit += tile.units;
      vector = 0;
    }
  }
}

// ---- keys -----------------------------------------------------------------------------------------------------------

/// Values of up to kKeyBlock keys as the steps want them.
struct KeyBlock {
  const std::byte* values[kKeyBlock];
  float scales[kKeyBlock];
  int count;
};

GANNET_INLINE void expand_bf16(const uint16_t* in, float* out, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) storeu(out + i, load_bf16(in + i));
  for (; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(in[i]) << 16;
    std::memcpy(out + i, &bits, sizeof bits);
  }
}

GANNET_INLINE void expand_e4m3(const uint8_t* in, float* out, int n) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) storeu(out + i, load_e4m3(in + i));
  if (i < n) {
    uint8_t rest[kLanes] = {};
    std::memcpy(rest, in + i, static_cast<size_t>(n - i));
    storeu_n(out + i, load_e4m3(rest), n - i);
  }
}

/// Asks for keys [first, first + count) of a request to come to the second cache level: pages lie anywhere, so the
/// processor cannot guess the next one.
GANNET_INLINE void prefetch_keys(const IndexProblem& x, const RequestRows& request, int64_t first, int64_t count) {
  const IndexCacheView& cache = x.cache;
  const int64_t page_size = cache.page_size;
  const int64_t value_bytes = x.head_dim * (cache.format == IndexKFormat::kF32    ? 4
                                            : cache.format == IndexKFormat::kBf16 ? 2
                                                                                  : 1);
  while (count > 0) {
    const int64_t page = first / page_size, offset = first % page_size;
    const int64_t n = smaller(count, page_size - offset);
    const std::byte* values = cache.values(int64_t{request.pages[page]} * page_size + offset);
    for (int64_t b = 0; b < n * value_bytes; b += kCacheLine) __builtin_prefetch(values + b, 0, 2);
    if (cache.format == IndexKFormat::kE4m3)
      __builtin_prefetch(cache.scale(int64_t{request.pages[page]} * page_size + offset), 0, 2);
    first += n;
    count -= n;
  }
}

/// Keys [first, first + count) of a request. Only these rows of the cache are read.
inline void load_keys(const IndexProblem& x, const RequestRows& request, int64_t first, int count, std::byte* converted,
                      KeyBlock* block) {
  const IndexCacheView& cache = x.cache;
  const int64_t page_size = cache.page_size;
  int64_t page = first / page_size, offset = first % page_size;
  const int64_t converted_bytes = int64_t{x.num_words} * 4;
  block->count = count;
  for (int i = 0; i < count; ++i) {
    const int64_t slot = int64_t{request.pages[page]} * page_size + offset;
    const std::byte* values = cache.values(slot);
    block->scales[i] = cache.format == IndexKFormat::kE4m3 ? *cache.scale(slot) : 1.0f;
    std::byte* to = converted + i * converted_bytes;
    if (cache.format == IndexKFormat::kF32 || (cache.format == IndexKFormat::kBf16 && x.pairs)) {
      block->values[i] = values;
    } else {
      if (x.pairs) {
        e4m3_to_bf16(reinterpret_cast<const uint8_t*>(values), reinterpret_cast<uint16_t*>(to), x.head_dim);
      } else if (cache.format == IndexKFormat::kBf16) {
        expand_bf16(reinterpret_cast<const uint16_t*>(values), reinterpret_cast<float*>(to), x.head_dim);
      } else {
        expand_e4m3(reinterpret_cast<const uint8_t*>(values), reinterpret_cast<float*>(to), x.head_dim);
      }
      block->values[i] = to;
    }
    if (++offset == page_size) {
      offset = 0;
      ++page;
    }
  }
}

// ---- the tile -------------------------------------------------------------------------------------------------------

/// One packed tile of queries against a block of keys. Row r of the tile stores its logits to out[r][0 .. limit[r]);
/// rows are counted unit by unit.
struct TileTask {
  const uint32_t* queries;  // [num_words][vectors][kLanes]
  const float* weights;     // [vectors][kLanes]
  int num_words;
  const KeyBlock* keys;
  bool scaled;  // multiply by keys->scales
  int lanes_per_row;
  W last_lanes;         // ones in the lanes of a unit's last vector that are heads
  std::byte* gathered;  // [kKeyBlock] keys in pairs: IndexScratch::keys
  float* partial;       // [kKeyBlock][kLanes]: head sums of a row's earlier tiles
  bool first_of_row;    // partial holds nothing yet
  bool last_of_row;     // the row ends in this tile
  float* out[kMaxTileRows];
  int limit[kMaxTileRows];
};

GANNET_INLINE void store_logit(const TileTask& task, int row, int key, float sum) {
  task.out[row][key] = task.scaled ? sum * task.keys->scales[key] : sum;
}

/// What follows the dot products of the keys from `first` on: relu, weights and head sums.
template <int kKeys, int kVectors, int kUnits>
GANNET_INLINE void finish_keys(const TileTask& task, int first, const F (&acc)[kKeys][kVectors]) {
  constexpr int kPerUnit = kVectors / kUnits;
  const int count = task.keys->count;
#pragma GCC unroll 16
  for (int u = 0; u < kUnits; ++u) {
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) {
      const int key = first + i;
      F sum = task.first_of_row || key >= count ? zero() : loadu(task.partial + key * kLanes);
#pragma GCC unroll 16
      for (int v = 0; v < kPerUnit; ++v) {
        F x = max(zero(), acc[i][u * kPerUnit + v]);  // NaN stays
        if (v == kPerUnit - 1 && task.last_of_row) x = and_mask(x, task.last_lanes);
        sum = fma(loadu(task.weights + (u * kPerUnit + v) * kLanes), x, sum);
      }
      if (!task.last_of_row) {
        if (key < count) storeu(task.partial + key * kLanes, sum);
      } else if (task.lanes_per_row == kLanes) {
        if (key < task.limit[u]) store_logit(task, u, key, reduce_add(sum));
      } else {
        float sums[kLanes];
        storeu(sums, sum_groups(sum, task.lanes_per_row));
        const int rows = kLanes / task.lanes_per_row;
        for (int r = 0; r < rows; ++r) {
          if (key < task.limit[u * rows + r]) store_logit(task, u * rows + r, key, sums[r * task.lanes_per_row]);
        }
      }
    }
  }
}

#ifdef GANNET_TILES

template <int kVector>
GANNET_INLINE void tile_of_queries(const uint32_t* queries, int64_t stride) {
  constexpr int kOperand = 5 + kVector % 3;
  tile_load<kOperand>(queries + kVector * kLanes, stride);
  tile_dot<kVector, 4, kOperand>();
}

/// score_tile by products of 16 keys, where a dot product is a whole number of their steps.
template <int kVectors, int kUnits>
inline __attribute__((noinline)) void score_by_tiles(const TileTask& task) {
  const KeyBlock& block = *task.keys;
  const int64_t row_bytes = int64_t{task.num_words} * 4, query_stride = int64_t{kVectors} * kTileBytes;
  alignas(64) float results[kTileRows][kVectors][kLanes];
  for (int t = 0; t < block.count; t += kTileRows) {
    const int n = block.count - t < kTileRows ? block.count - t : kTileRows;
    std::byte* const gathered = task.gathered + t * row_bytes;
    const std::byte* keys = block.values[t];
    if (keys != gathered) {  // else converted there, with room for 16
      bool together = n == kTileRows;
      for (int i = 1; i < n; ++i) together = together && block.values[t + i] == keys + i * row_bytes;
      if (!together) {
        for (int i = 0; i < n; ++i) std::memcpy(gathered + i * row_bytes, block.values[t + i], row_bytes);
        keys = gathered;
      }
    }
    tile_zero<0>();
    if constexpr (kVectors > 1) tile_zero<1>();
    if constexpr (kVectors > 2) tile_zero<2>();
    if constexpr (kVectors > 3) tile_zero<3>();
    const uint32_t* queries = task.queries;
    for (int c = 0; c < task.num_words; c += kTileWords, queries += kTileWords * kVectors * kLanes) {
      tile_load<4>(keys + int64_t{c} * 4, row_bytes);
      tile_of_queries<0>(queries, query_stride);
      if constexpr (kVectors > 1) tile_of_queries<1>(queries, query_stride);
      if constexpr (kVectors > 2) tile_of_queries<2>(queries, query_stride);
      if constexpr (kVectors > 3) tile_of_queries<3>(queries, query_stride);
    }
    tile_store<0>(results[0][0], sizeof results[0]);
    if constexpr (kVectors > 1) tile_store<1>(results[0][1], sizeof results[0]);
    if constexpr (kVectors > 2) tile_store<2>(results[0][2], sizeof results[0]);
    if constexpr (kVectors > 3) tile_store<3>(results[0][3], sizeof results[0]);
    for (int i = 0; i < n; ++i) {
      F acc[1][kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[0][v] = loadu(results[i][v]);
      finish_keys<1, kVectors, kUnits>(task, t + i, acc);
    }
  }
}

#endif

template <class Step, int kVectors, int kUnits>
inline __attribute__((noinline)) void score_tile(const TileTask& task) {
#ifdef GANNET_TILES
  if constexpr (Step::kValuesPerWord == 2) {
    if (task.num_words % kTileWords == 0) return score_by_tiles<kVectors, kUnits>(task);
  }
#endif
  constexpr int kKeys = tile_keys(kVectors);
  const int count = task.keys->count;
  for (int t = 0; t < count; t += kKeys) {
    // Beyond the last key its values repeat; those results are dropped.
    const std::byte* key[kKeys];
    for (int i = 0; i < kKeys; ++i) key[i] = task.keys->values[t + i < count ? t + i : count - 1];
    F acc[kKeys][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i)
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) acc[i][v] = zero();
    const uint32_t* q = task.queries;
    for (int64_t c = 0; c < int64_t{task.num_words} * 4; c += 4, q += kVectors * kLanes) {
      typename Step::Vector queries[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) queries[v] = Step::load(q + v * kLanes);
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        const typename Step::Vector k = Step::broadcast(key[i] + c);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) acc[i][v] = Step::step(acc[i][v], queries[v], k);
      }
    }
    finish_keys<kKeys, kVectors, kUnits>(task, t, acc);
  }
}

template <class Step>
GANNET_INLINE void score_tile_of(TileShape shape, const TileTask& task) {
  if (shape.units == 1) {
    switch (shape.vectors) {
      case 1: return score_tile<Step, 1, 1>(task);
      case 2: return score_tile<Step, 2, 1>(task);
      case 3: return score_tile<Step, 3, 1>(task);
      default: return score_tile<Step, 4, 1>(task);
    }
  }
  if (shape.vectors == 4 && shape.units == 2) return score_tile<Step, 4, 2>(task);
  switch (shape.vectors) {
    case 2: return score_tile<Step, 2, 2>(task);
    case 3: return score_tile<Step, 3, 3>(task);
    default: return score_tile<Step, 4, 4>(task);
  }
}

/// Logits of the keys [begin, end) for a packed row block: row i stores those below limits[i] to out[i][key - begin].
inline void score_keys(const IndexProblem& x, const RowBlock& block, const IndexScratch& scratch, int64_t begin,
                       int64_t end, float* const* out, const int64_t* limits) {
  const int last_heads = x.num_heads - (x.vectors_per_row - 1) * kLanes;
  const int num_units = static_cast<int>(divide_up(block.num_rows, x.rows_per_vector));
  uint32_t last_lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) last_lanes[i] = i % x.lanes_per_row < last_heads ? 0xffffffffu : 0u;
  KeyBlock keys;
  TileTask task;
  task.num_words = x.num_words;
  task.keys = &keys;
  task.scaled = x.cache.format == IndexKFormat::kE4m3;
  task.lanes_per_row = x.lanes_per_row;
  task.last_lanes = load_w(last_lanes);
  task.partial = scratch.partial;
  task.gathered = scratch.keys;
#ifdef GANNET_TILES
  tiles_begin();
#endif
  for (int64_t first = begin; first < end; first += kKeyBlock) {
    load_keys(x, block.request, first, static_cast<int>(smaller(kKeyBlock, end - first)), scratch.keys, &keys);
    if (first + kKeyBlock < end)
      prefetch_keys(x, block.request, first + kKeyBlock, smaller(kKeyBlock, end - first - kKeyBlock));
    task.queries = scratch.queries;
    task.weights = scratch.weights;
    for (int unit = 0, vector = 0; unit < num_units;) {
      const TileShape tile = tile_shape(x.vectors_per_row, num_units, unit, vector);
      task.first_of_row = vector == 0;
      task.last_of_row = x.vectors_per_row <= kTileVectors || vector + tile.vectors == x.vectors_per_row;
      bool wanted = false;
      for (int r = 0; r < tile.units * x.rows_per_vector; ++r) {
        const int i = unit * x.rows_per_vector + r;
        const int64_t limit = i < block.num_rows ? limits[i] - first : 0;
        task.limit[r] = static_cast<int>(limit < 0 ? 0 : smaller(limit, keys.count));
        task.out[r] = i < block.num_rows ? out[i] + (first - begin) : nullptr;
        wanted = wanted || limit > 0;
      }
      if (wanted) {
        if (x.pairs) score_tile_of<PairStep>(tile, task);
        else score_tile_of<ValueStep>(tile, task);
      }
      task.queries += int64_t{tile.vectors} * kLanes * x.num_words;
      task.weights += tile.vectors * kLanes;
      vector += tile.vectors;
      if (task.last_of_row) {
        unit += tile.units;
        vector = 0;
      }
    }
  }
#ifdef GANNET_TILES
  tiles_end();
#endif
}

}  // namespace
}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
