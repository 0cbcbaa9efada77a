// Exact top-k on one block a row, or on a cluster of up to eight where rows are few and long.
//
// Keys. A score becomes a 32-bit key whose unsigned order is the contract's: NaN 0, then -inf, ..., -0 = +0, ..., +inf.
//
// Bytes. A score is read from memory once. A block walks its slice of the row in tiles of 4,096 and holds in shared
// memory what may still win:
//   kept whole   a slice of up to 20,480 keys (80 KB), columns implied by place;
//   filtered     a longer one: (key, column) pairs, in order of column. When a tile may not fit, the list is cut to its
//                k best, and from then on a score enters only if it is larger than the k-th best so far (an equal one
//                has a larger column and loses). Of n random scores k * ln(n / k) enter: 8,500 of 131,072, and with
//                10,240 pairs the list is cut twice. Scores in rising order all enter and cost 15 cuts;
//   reread       k beyond what shared memory holds (22,000): the passes below read the slice again, from the L2.
//
// Selection. An atomic of shared memory costs a cycle a lane, wherever the lanes go (measured: a first version that
// counted every key took 0.55 us a thousand keys, and nothing else mattered). So few keys are counted. A sample, a key
// a thread, is counted first; three standard deviations around the k-th key's place in it are a bracket that holds a
// tenth of the keys. Then all keys are compared with the bracket: those above are counted in registers, those inside in
// a histogram of 2,048 bins, and the bin of the k-th key becomes the next range, until it is one key or all its keys
// are taken. A bracket that misses is noticed by the counts and costs a pass; whatever the scores, the result is exact.
// The blocks of a cluster add up each other's histograms: 64 groups of 32 bins, then the bins of the one group in which
// the key lies, so that a block reads 96 words of each other block and a pass costs one cluster barrier. The k-th key
// may stand for ties: `quota` of the keys equal to it are taken, the first by column.
//
// Order. Everything is compacted in order of column by scans over warps and blocks, so the result is ascending, ties go
// to the smaller column, and no atomic decides anything but a count: 20 launches give the same bits. Taken columns are
// staged in shared memory and leave it side by side.
//
// Time, predicted for an H200 at 1.8 GHz, of one row of 4,096: lens and scores 1,200 cycles, sample 950, bracket 1,200
// (600 keys counted, 420 of barriers and search), the last pass 500, compaction 400: 2.4 us and 1.4 for the launch. Of
// 131,072 on 8 blocks: loads 2,000, sample 1,100, bracket 1,500, last 700, compaction 1,200: 3.6 us and 1.5. Many rows:
// three blocks of 512 threads on a multiprocessor, two where slices are filtered; 2,048 rows of 131,072 are 1.07 GB,
// 240 us at 4.46 TB/s.
#include "cuda/common/topk.cuh"

#include <algorithm>

#include "cuda/common/check.h"
#include "cuda/common/cluster.cuh"
#include "cuda/common/vectors.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kPerThread = 8;  // keys of a thread in a tile
constexpr int kWarpTile = 32 * kPerThread, kTile = kThreads * kPerThread;
constexpr int kDigitBits = 11, kBins = 1 << kDigitBits;
constexpr int kGroups = kBins / 32;   // 64: two for each lane of the warp that looks for the digit
constexpr uint32_t kMaxRanks = 8;     // blocks of a cluster that every Hopper and Blackwell GPU can place
constexpr uint32_t kSoloKeys = 8192;  // up to here one block is as fast as a cluster with its barriers
constexpr uint32_t kAll = 0xffffffffu;

/// A bin of a histogram: keys in higher bins, and in it. No keys: there is no such bin.
struct Bin {
  uint32_t index, above, count;
};

struct alignas(16) Shared {
  uint32_t histogram[2][kBins];     // in turns; the one not in use is zero. At the end: columns on their way out
  uint32_t groups[2][kGroups];      // sums of 32 bins
  uint32_t over[2];                 // keys above the histogram's range
  uint32_t warp_totals[2][kWarps];  // in turns
  Bin bins[2];                      // what was looked for
  uint32_t high_target, low_target, num_samples;
  uint32_t num_keys;        // of this block
  uint32_t greater, equal;  // of this block: keys above and at the threshold
};
constexpr uint32_t kStageWords = 2 * kBins;

/// Unsigned order of keys = order of scores.
__device__ inline uint32_t order_key(float x) {
  const uint32_t u = __float_as_uint(__fadd_rn(x, 0.0f));  // -0 becomes +0
  const uint32_t key = u ^ (static_cast<uint32_t>(static_cast<int32_t>(u) >> 31) | 0x80000000u);
  return x == x ? key : 0;
}
__device__ inline float score_of(uint32_t key) {
  return __uint_as_float((key & 0x80000000u) != 0 ? key ^ 0x80000000u : ~key);
}

/// A thread's place, and what its block counts in turns.
struct Team {
  Shared& shared;
  int warp, lane;
  uint32_t rank, ranks;  // of the blocks that share the row
  int histogram = 0, totals = 0;
};

// ---- where keys lie ----------------------------------------------------------------------------------------------
// A tile gives each thread kPerThread keys, as runs of kRun neighbours; a warp's run r is 32 * kRun neighbours. Tiles,
// warps, runs, lanes, in this order, are the order of columns.

/// A block's columns of the row in memory. Column c is element c + shift of `base`, which is 16-byte aligned.
template <class T>
struct RowSlice {
  static constexpr int kRun = 16 / sizeof(T), kRuns = kPerThread / kRun;
  struct Raw {
    uint4 words[kRuns];
  };
  const T* base;
  uint32_t shift;
  uint32_t begin, first, end;  // elements; begin is a multiple of 8, first the first that counts

  __device__ uint32_t num_tiles() const { return end > begin ? (end - begin + kTile - 1) / kTile : 0; }
  __device__ uint32_t place(const Team& t, uint32_t tile, int run) const {
    return begin + tile * kTile + t.warp * kWarpTile + run * 32 * kRun + t.lane * kRun;
  }
  /// Bit j: key j is one of the slice.
  __device__ uint32_t fetch(const Team& t, uint32_t tile, Raw& raw) const {
    uint32_t valid = 0;
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const uint32_t at = place(t, tile, r);
      raw.words[r] = {};
      if (at >= first && at + kRun <= end) {
        raw.words[r] = __ldg(reinterpret_cast<const uint4*>(base + at));
        valid |= ((1u << kRun) - 1) << (r * kRun);
      } else if (at < end) {  // the slice's edges: nothing outside it is read
        uint32_t w[4] = {};
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          if (at + e < first || at + e >= end) continue;
          valid |= 1u << (r * kRun + e);
          if constexpr (sizeof(T) == 4) w[e] = __float_as_uint(base[at + e]);
          else w[e / 2] |= static_cast<uint32_t>(base[at + e]) << (e % 2 * 16);
        }
        raw.words[r] = {w[0], w[1], w[2], w[3]};
      }
    }
    return valid;
  }
  __device__ static void expand(const Raw& raw, float (&x)[kPerThread]) {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const uint32_t w[4] = {raw.words[r].x, raw.words[r].y, raw.words[r].z, raw.words[r].w};
#pragma unroll
      for (int e = 0; e < kRun; ++e)
        x[r * kRun + e] = __uint_as_float(sizeof(T) == 4 ? w[e] : e % 2 != 0 ? w[e / 2] & 0xffff0000u : w[e / 2] << 16);
    }
  }
  __device__ uint32_t load(const Team& t, uint32_t tile, uint32_t (&key)[kPerThread]) const {
    Raw raw;
    const uint32_t valid = fetch(t, tile, raw);
    float x[kPerThread];
    expand(raw, x);
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) key[j] = order_key(x[j]);
    return valid;
  }
  __device__ void columns(const Team& t, uint32_t tile, uint32_t (&column)[kPerThread]) const {
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) column[j] = place(t, tile, j / kRun) + j % kRun - shift;
  }
  __device__ uint32_t num_keys() const { return end - first; }
  __device__ uint32_t key_at(uint32_t i) const { return order_key(load_value(base, first + i)); }
};

/// Keys in shared memory at [first, end), with their columns, or as neighbours of the row: key i is column i + offset.
struct List {
  static constexpr int kRun = 4, kRuns = kPerThread / kRun;
  uint32_t* keys;
  uint32_t* column_of;  // or nullptr
  uint32_t offset;
  uint32_t first, end;

  __device__ uint32_t num_tiles() const { return (end + kTile - 1) / kTile; }
  __device__ uint32_t num_keys() const { return end - first; }
  __device__ uint32_t key_at(uint32_t i) const { return keys[first + i]; }
  __device__ uint32_t place(const Team& t, uint32_t tile, int run) const {
    return tile * kTile + t.warp * kWarpTile + run * 32 * kRun + t.lane * kRun;
  }
  __device__ uint32_t load(const Team& t, uint32_t tile, uint32_t (&key)[kPerThread]) const {
    uint32_t valid = 0;
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const uint32_t at = place(t, tile, r);
      uint4 four = {};
      if (at < end) {
        four = *reinterpret_cast<const uint4*>(keys + at);
        uint32_t mask = at + kRun <= end ? 0xf : 0xfu >> (kRun - (end - at));
        if (at < first) mask &= 0xfu << (first - at);  // first is below 8: a shift of 4 and more leaves nothing
        valid |= (mask & 0xf) << (r * kRun);
      }
      key[4 * r] = four.x;
      key[4 * r + 1] = four.y;
      key[4 * r + 2] = four.z;
      key[4 * r + 3] = four.w;
    }
    return valid;
  }
  __device__ void columns(const Team& t, uint32_t tile, uint32_t (&column)[kPerThread]) const {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const uint32_t at = place(t, tile, r);
      uint4 four = {at + offset, at + 1 + offset, at + 2 + offset, at + 3 + offset};
      if (column_of != nullptr && at < end) four = *reinterpret_cast<const uint4*>(column_of + at);
      column[4 * r] = four.x;
      column[4 * r + 1] = four.y;
      column[4 * r + 2] = four.z;
      column[4 * r + 3] = four.w;
    }
  }
};

// ---- order inside a tile -----------------------------------------------------------------------------------------

/// How many marked keys lie before each run of this thread, and in the whole tile. Two kinds of marks at once.
template <int kRuns>
struct Ranks {
  uint32_t greater[kRuns], equal[kRuns];
  uint32_t greater_total, equal_total;
};

/// One barrier; the caller's reads of shared memory before it are done when any thread returns.
template <class Source>
__device__ Ranks<Source::kRuns> rank_marks(Team& t, uint32_t greater, uint32_t equal) {
  constexpr int kRuns = Source::kRuns, kRun = Source::kRun;
  constexpr int kField = 16 / kRuns;  // a warp's run has 128 or 256 keys: fields of 8 or 16 bits hold its count
  constexpr uint32_t kFieldMask = (1u << kField) - 1, kRunMask = (1u << kRun) - 1;
  uint32_t own = 0;
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    own |= static_cast<uint32_t>(__popc(greater >> (r * kRun) & kRunMask)) << (2 * r * kField);
    own |= static_cast<uint32_t>(__popc(equal >> (r * kRun) & kRunMask)) << ((2 * r + 1) * kField);
  }
  uint32_t upto = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(kAll, upto, step);
    if (t.lane >= step) upto += other;
  }
  const uint32_t total = __shfl_sync(kAll, upto, 31), before = upto - own;
  uint32_t* totals = t.shared.warp_totals[t.totals];
  t.totals ^= 1;
  uint32_t warp_greater = 0, warp_equal = 0;
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    warp_greater += total >> (2 * r * kField) & kFieldMask;
    warp_equal += total >> ((2 * r + 1) * kField) & kFieldMask;
  }
  if (t.lane == 0) totals[t.warp] = warp_greater | warp_equal << 16;
  __syncthreads();
  const uint32_t counts = t.lane < kWarps ? totals[t.lane] : 0;  // sums of at most kTile: halves do not overflow
  const uint32_t earlier = __reduce_add_sync(kAll, t.lane < t.warp ? counts : 0), all = __reduce_add_sync(kAll, counts);
  Ranks<kRuns> ranks;
  ranks.greater_total = all & 0xffff;
  ranks.equal_total = all >> 16;
  uint32_t greater_base = earlier & 0xffff, equal_base = earlier >> 16;
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    ranks.greater[r] = greater_base + (before >> (2 * r * kField) & kFieldMask);
    ranks.equal[r] = equal_base + (before >> ((2 * r + 1) * kField) & kFieldMask);
    greater_base += total >> (2 * r * kField) & kFieldMask;
    equal_base += total >> ((2 * r + 1) * kField) & kFieldMask;
  }
  return ranks;
}

// ---- the k-th key ------------------------------------------------------------------------------------------------

/// Taken: the keys above `key`, and the first `quota` of those equal to it. None taken is below `lowest`.
struct Threshold {
  uint32_t key, quota, lowest;
};

/// Keys low .. low + span, in bins of 2^shift keys.
struct Range {
  uint32_t low, span;
  __device__ uint32_t top() const { return low + span; }
  __device__ int shift() const { return span < kBins ? 0 : 32 - kDigitBits - __clz(static_cast<int>(span)); }
  /// The keys of bins first to last.
  __device__ Range bins(uint32_t first, uint32_t last) const {
    const int s = shift();
    const uint32_t from = first << s, to = min((last << s) + ((1u << s) - 1), span);
    return {low + from, to - from};
  }
};
__device__ constexpr Range everything() { return {0, kAll}; }

/// Ends a histogram: sums of 32 bins, and all blocks that share the row have come this far.
__device__ void sum_groups(Team& t) {
  static_assert(kGroups == 4 * kWarps);
  __syncthreads();
  const uint32_t* histogram = t.shared.histogram[t.histogram] + 4 * 32 * t.warp;
  uint32_t sum[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) sum[j] = __reduce_add_sync(kAll, histogram[32 * j + t.lane]);
  if (t.lane == 0) reinterpret_cast<uint4*>(t.shared.groups[t.histogram])[t.warp] = {sum[0], sum[1], sum[2], sum[3]};
  if (t.ranks > 1) cluster_sync();
  else __syncthreads();
}

/// After the histogram has been searched: the next one, which warps from the third on have cleared meanwhile. (Whoever
/// read it in other blocks did so before sum_groups.)
__device__ void clear_next(Team& t) {
  const int next = t.histogram ^ 1;
  if (t.warp >= 2) {
    for (int i = threadIdx.x - 64; i < kBins / 4; i += kThreads - 64)
      reinterpret_cast<uint4*>(t.shared.histogram[next])[i] = {};
  }
  if (threadIdx.x == kThreads - 1) t.shared.over[next] = 0;
  __syncthreads();
  t.histogram = next;
}

/// Sum of a word of shared memory over the blocks that share the row. By a whole warp.
__device__ uint32_t sum_of_ranks(const Team& t, const uint32_t* word) {
  if (t.ranks == 1) return *word;
  return __reduce_add_sync(kAll, t.lane < static_cast<int>(t.ranks) ? load_remote(word, t.lane) : 0);
}

/// A histogram of all blocks, as a warp looks into it: lane i has groups 2 i and 2 i + 1.
struct Search {
  uint2 own_pair, pair;
  uint32_t from;  // keys in this lane's groups and all higher ones

  __device__ static uint32_t suffix_sum(const Team& t, uint32_t x) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_down_sync(kAll, x, step);
      if (t.lane + step < 32) x += other;
    }
    return x;
  }
  __device__ explicit Search(const Team& t) {
    const uint2* groups = reinterpret_cast<const uint2*>(t.shared.groups[t.histogram]) + t.lane;
    own_pair = pair = *groups;
#pragma unroll
    for (uint32_t d = 1; d < kMaxRanks; ++d) {
      if (d >= t.ranks) break;
      const uint2 other = load_remote(groups, (t.rank + d) & (t.ranks - 1));  // each begins with its neighbour
      pair.x += other.x;
      pair.y += other.y;
    }
    from = suffix_sum(t, pair.x + pair.y);
  }
  __device__ uint32_t total() const { return __shfl_sync(kAll, from, 0); }

  /// The bin with the target-th key from the top; none for target 0 or beyond the total. Also this block's own keys in
  /// higher bins and in it.
  __device__ Bin find(const Team& t, uint32_t target, uint32_t& own_above, uint32_t& own_count) const {
    const uint32_t above_pair = from - pair.x - pair.y;
    const uint32_t owners = __ballot_sync(kAll, above_pair < target && target <= from);
    if (owners == 0) return {0, 0, 0};
    const bool upper = target <= above_pair + pair.y;
    const int owner = __ffs(static_cast<int>(owners)) - 1;
    const int group = __shfl_sync(kAll, 2 * t.lane + (upper ? 1 : 0), owner);
    const uint32_t above_group = __shfl_sync(kAll, upper ? above_pair : above_pair + pair.y, owner);
    const uint32_t* bins = t.shared.histogram[t.histogram] + group * 32 + t.lane;
    const uint32_t own_bin = *bins;
    uint32_t bin = own_bin;
#pragma unroll
    for (uint32_t d = 1; d < kMaxRanks; ++d) {
      if (d >= t.ranks) break;
      bin += load_remote(bins, (t.rank + d) & (t.ranks - 1));
    }
    const uint32_t upto = above_group + suffix_sum(t, bin), above = upto - bin;
    const int lane = __ffs(static_cast<int>(__ballot_sync(kAll, above < target && target <= upto))) - 1;
    uint32_t own = t.lane > lane ? own_bin : 0;
    if (2 * t.lane > group) own += own_pair.x;
    if (2 * t.lane + 1 > group) own += own_pair.y;
    own_above = __reduce_add_sync(kAll, own);
    own_count = __shfl_sync(kAll, own_bin, lane);
    return {static_cast<uint32_t>(group * 32 + lane), __shfl_sync(kAll, above, lane), __shfl_sync(kAll, bin, lane)};
  }
};

/// A range of keys in which the k-th lies, probably, and few others: from every step-th key of all blocks.
template <class Source>
__device__ Range bracket(Team& t, const Source& source, uint32_t k, uint32_t step) {
  constexpr int kPasses = 3;  // 11 bits each
  Shared& s = t.shared;
  Range range = everything();
  uint32_t high_target = 0, low_target = 0, num_samples = 0;
  if (threadIdx.x == 0) s.num_keys = source.num_keys();
  for (int pass = 0;; ++pass) {
    const uint32_t at = step / 2 + threadIdx.x * step;
    if (at < source.num_keys()) {
      const uint32_t d = source.key_at(at) - range.low;
      if (d <= range.span) atomicAdd(&s.histogram[t.histogram][d >> range.shift()], 1u);
    }
    sum_groups(t);
    if (t.warp < 2) {
      const Search search(t);
      const uint32_t total = search.total();
      if (pass == 0) {
        // Of `total` samples those above the k-th key are binomially distributed: three standard deviations each way.
        num_samples = total;
        const float share = static_cast<float>(k) / static_cast<float>(sum_of_ranks(t, &s.num_keys));
        const float mean = share * static_cast<float>(total);
        const float margin = 3.0f * sqrtf(fmaxf(mean * (1.0f - share), 0.0f)) + 1.0f;
        high_target = mean - margin < 1.0f ? 0 : static_cast<uint32_t>(mean - margin);
        low_target = mean + margin >= static_cast<float>(total) ? 0 : static_cast<uint32_t>(mean + margin) + 1;
        if (threadIdx.x == 0) {
          s.high_target = high_target;
          s.low_target = low_target;
          s.num_samples = total;
        }
      }
      uint32_t own_above, own_count;
      Bin bin = search.find(t, t.warp == 0 ? high_target : low_target, own_above, own_count);
      if (bin.count == 0)  // no bound on this side
        bin = t.warp == 0 ? Bin{range.span >> range.shift(), 0, 0} : Bin{0, total, 0};
      if (t.lane == 0) s.bins[t.warp] = bin;
    }
    clear_next(t);
    if (pass == 0) {
      high_target = s.high_target;
      low_target = s.low_target;
      num_samples = s.num_samples;
    }
    const Bin high = s.bins[0], low = s.bins[1];
    range = range.bins(low.index, high.index);
    const uint32_t inside = low.above + low.count - high.above;
    if (pass + 1 == kPasses || range.span == 0 || low.index != high.index || inside <= num_samples / 4) return range;
    if (high_target != 0) high_target -= high.above;
    if (low_target != 0) low_target -= low.above;
  }
}

/// The k-th largest key of all blocks' sources, which hold at least k. Histograms of the keys in a range, which each
/// narrows 2,048-fold; the first range comes from samples where step, their distance, is not 0. Barriers on entry and
/// exit: sources are complete, and shared memory may be reused by this block.
template <class Source>
__device__ Threshold select(Team& t, const Source& source, uint32_t k, uint32_t step) {
  Shared& s = t.shared;
  Range range = step != 0 ? bracket(t, source, k, step) : everything();
  uint32_t remaining = k;  // the key is the remaining-th from the top of the range; first: of everything
  for (bool first = true;;) {
    uint32_t* histogram = s.histogram[t.histogram];
    const int shift = range.shift();
    const uint32_t top = range.top();
    uint32_t over = 0;
    for (uint32_t tile = 0; tile < source.num_tiles(); ++tile) {
      uint32_t key[kPerThread];
      const uint32_t valid = source.load(t, tile, key);
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        if ((valid >> j & 1) == 0) continue;
        const uint32_t d = key[j] - range.low;
        if (d <= range.span) atomicAdd(&histogram[d >> shift], 1u);
        over += key[j] > top ? 1 : 0;
      }
    }
    if (first) {
      over = __reduce_add_sync(kAll, over);
      if (t.lane == 0 && over != 0) atomicAdd(&s.over[t.histogram], over);
    }
    sum_groups(t);
    if (t.warp == 0) {
      const Search search(t);
      const uint32_t all_over = first ? sum_of_ranks(t, &s.over[t.histogram]) : 0;
      uint32_t own_above = 0, own_count = 0;
      Bin bin = search.find(t, remaining > all_over ? remaining - all_over : 0, own_above, own_count);
      bin.above += all_over;
      if (t.lane == 0) {
        s.bins[0] = bin;
        s.greater = first ? s.over[t.histogram] + own_above : s.greater + own_above;
        s.equal = own_count;
      }
    }
    clear_next(t);
    const Bin bin = s.bins[0];
    if (bin.count == 0) {  // the samples have misled: once in some hundred rows
      range = everything();
      continue;
    }
    first = false;
    range = range.bins(bin.index, bin.index);
    remaining -= bin.above;
    // All keys of the bin are taken: no further digit matters. (Not for NaN, which has none below.)
    if (remaining == bin.count && range.low != 0) return {range.low - 1, 0, range.low};
    if (shift == 0) return {range.low, remaining, range.low};
  }
}

/// Calls sink.expect(index, count) for each tile's taken keys and then sink.put(index, key, column) for each of them,
/// in order of column; index counts taken keys, those of the `greater` and `equal` keys of earlier blocks included.
template <class Source, class Sink>
__device__ void for_each_taken(Team& t, const Source& source, const Threshold& threshold, uint32_t greater,
                               uint32_t equal, Sink& sink) {
  constexpr int kRun = Source::kRun;
  const uint32_t quota = threshold.quota;
  for (uint32_t tile = 0; tile < source.num_tiles(); ++tile) {
    uint32_t key[kPerThread], column[kPerThread];
    const uint32_t valid = source.load(t, tile, key);
    source.columns(t, tile, column);
    uint32_t above = 0, level = 0;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      above |= static_cast<uint32_t>(key[j] > threshold.key) << j;
      level |= static_cast<uint32_t>(key[j] == threshold.key) << j;
    }
    above &= valid;
    level = quota != 0 ? level & valid : 0;
    const auto ranks = rank_marks<Source>(t, above, level);
    const uint32_t index = greater + min(equal, quota);
    sink.expect(index, greater + ranks.greater_total + min(equal + ranks.equal_total, quota) - index);
    uint32_t taken = above;
    if (level != 0) {
      uint32_t e = 0;
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        if (j % kRun == 0) e = equal + ranks.equal[j / kRun];
        if ((level >> j & 1) == 0) continue;
        if (e < quota) taken |= 1u << j;
        ++e;
      }
    }
    uint32_t at = 0;
#pragma unroll
    for (int j = 0; j < kPerThread; ++j) {
      if (j % kRun == 0) at = greater + ranks.greater[j / kRun] + min(equal + ranks.equal[j / kRun], quota);
      if ((taken >> j & 1) == 0) continue;
      sink.put(at, key[j], column[j]);
      ++at;
    }
    greater += ranks.greater_total;
    equal += ranks.equal_total;
  }
}

/// Moves the taken keys of a list to its front. A key moves to an index that is not above its own, and a tile is read
/// before it is written.
struct Compaction {
  List& list;
  __device__ void expect(uint32_t, uint32_t) {}
  __device__ void put(uint32_t index, uint32_t key, uint32_t column) {
    list.keys[index] = key;
    list.column_of[index] = column;
  }
};

/// Collects taken columns in shared memory and calls emit(index, column) for neighbours by neighbouring threads.
template <class Emit>
struct Stage {
  uint32_t* words;  // kStageWords
  Emit emit;
  uint32_t first = 0, count = 0;

  __device__ void expect(uint32_t index, uint32_t more) {
    static_assert(kTile <= kStageWords);
    if (count + more > kStageWords) {
      flush();
      __syncthreads();
      count = 0;
    }
    if (count == 0) first = index;
    count += more;
  }
  __device__ void put(uint32_t index, uint32_t, uint32_t column) { words[index - first] = column; }
  __device__ void flush() {
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) emit(first + i, words[i]);
  }
};

// ---- filling the list --------------------------------------------------------------------------------------------

/// All keys of a slice. A tile is under way while the one before is written.
template <class T>
__device__ void keep_whole(Team& t, const RowSlice<T>& slice, List& list) {
  typename RowSlice<T>::Raw next;
  uint32_t next_valid = slice.fetch(t, 0, next);
  for (uint32_t tile = 0; tile < slice.num_tiles(); ++tile) {
    const typename RowSlice<T>::Raw raw = next;
    const uint32_t valid = next_valid;
    next_valid = slice.fetch(t, tile + 1, next);
    float x[kPerThread];
    slice.expand(raw, x);
#pragma unroll
    for (int r = 0; r < kPerThread / 4; ++r) {
      if ((valid >> (4 * r) & 0xf) == 0) continue;
      const uint32_t at = slice.place(t, tile, 4 * r / slice.kRun) + 4 * r % slice.kRun - slice.begin;
      *reinterpret_cast<uint4*>(list.keys + at) = {order_key(x[4 * r]), order_key(x[4 * r + 1]),
                                                   order_key(x[4 * r + 2]), order_key(x[4 * r + 3])};
    }
  }
  list.column_of = nullptr;
  list.offset = slice.begin - slice.shift;
  list.first = slice.first - slice.begin;
  list.end = slice.end - slice.begin;
  __syncthreads();
}

/// A sample for each thread, of so many keys; none where all of them are hardly more.
__device__ uint32_t sample_step(uint32_t num_keys) {
  return num_keys > 4 * kThreads ? (num_keys + kThreads - 1) / kThreads : 0;
}

/// Pairs of a key and a column that so many words hold.
__host__ __device__ constexpr uint32_t pair_capacity(uint32_t words) { return words / 2 & ~3u; }

/// The k best keys of a slice and some that are not, in pairs; `capacity` is at least k + kTile. Blocks work alone.
template <class T>
__device__ void keep_best(Team& t, const RowSlice<T>& slice, List& list, uint32_t capacity, uint32_t k) {
  const uint32_t ranks = t.ranks;
  t.rank = 0;
  t.ranks = 1;
  list.column_of = list.keys + capacity;
  list.first = list.end = 0;
  float limit = 0.0f;
  bool full = false;  // the list holds the k best so far: only scores above `limit` enter
  typename RowSlice<T>::Raw next;
  const uint32_t tiles = slice.num_tiles();
  uint32_t next_valid = slice.fetch(t, 0, next);
  for (uint32_t tile = 0; tile < tiles;) {
    const typename RowSlice<T>::Raw raw = next;
    uint32_t enters = next_valid;
    next_valid = slice.fetch(t, tile + 1, next);
    float x[kPerThread];
    slice.expand(raw, x);
    if (full) {
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        // Above the limit and a number; everything but NaN is above a limit that is NaN.
        if (!(x[j] == x[j] && !(x[j] <= limit))) enters &= ~(1u << j);
      }
    }
    const auto before = rank_marks<RowSlice<T>>(t, enters, 0);
    if (list.end + before.greater_total <= capacity) {
#pragma unroll
      for (int r = 0; r < RowSlice<T>::kRuns; ++r) {
        constexpr int kRun = RowSlice<T>::kRun;
        uint32_t at = list.end + before.greater[r];
        const uint32_t column = slice.place(t, tile, r) - slice.shift;
#pragma unroll
        for (int e = 0; e < kRun; ++e) {
          if ((enters >> (r * kRun + e) & 1) == 0) continue;
          list.keys[at] = order_key(x[r * kRun + e]);
          list.column_of[at] = column + e;
          ++at;
        }
      }
      list.end += before.greater_total;
      ++tile;
      continue;
    }
    const Threshold threshold = select(t, list, k, sample_step(list.num_keys()));
    Compaction compaction{list};
    for_each_taken(t, list, threshold, 0, 0, compaction);
    list.end = k;
    limit = score_of(threshold.lowest);
    full = true;
    next_valid = slice.fetch(t, tile, next);  // the same tile again, against the new limit
  }
  // The blocks of a cluster read each other's histograms at one address: all begin with the first.
  if (t.histogram != 0) {
    for (int i = threadIdx.x; i < kBins / 4; i += kThreads) reinterpret_cast<uint4*>(t.shared.histogram[0])[i] = {};
    if (threadIdx.x == 0) t.shared.over[0] = 0;
    t.histogram = 0;
  }
  __syncthreads();
  t.rank = cluster_rank();
  t.ranks = ranks;
}

// ---- the kernel --------------------------------------------------------------------------------------------------

/// kWhole: every slice is kept whole, which takes fewer registers: three blocks on a multiprocessor instead of two.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads, kWhole && sizeof(T) == 4 ? 3 : 2)
    topk_kernel(const __grid_constant__ TopKArgs a, const __grid_constant__ uint32_t list_words) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  Team t{shared, static_cast<int>(threadIdx.x / 32), static_cast<int>(threadIdx.x % 32), cluster_rank(),
         cluster_size()};
  const int64_t local = blockIdx.x / t.ranks, row = a.first_row + local;
  RowPlace place{-1, 0};
  int64_t n;
  if (a.lens != nullptr) {
    n = a.lens[row];
  } else {
    place = place_row(a.rows, a.pages, a.page_size, row);
    n = place.num_keys;
  }
  n = max(int64_t{0}, min(n, a.num_columns));
  const int32_t* pages = place.request >= 0 ? page_list(a.pages, place.request).ids : nullptr;
  const auto emit = [&](int64_t index, int64_t column) {
    if (a.positions != nullptr) a.positions[row * a.positions_stride + index] = static_cast<int32_t>(column);
    if (a.slots == nullptr) return;
    int32_t slot = -1;
    if (column >= 0) {
      const uint32_t page_size = static_cast<uint32_t>(a.page_size), c = static_cast<uint32_t>(column);
      const uint32_t page = c / page_size;
      const int64_t id = pages[page];
      if (id >= 0 && id < a.num_pages) slot = static_cast<int32_t>(id * a.page_size + (c - page * page_size));
    }
    a.slots[row * a.slots_stride + index] = slot;
  };
  if (t.rank == 0 && threadIdx.x == 0) a.counts[row] = static_cast<int32_t>(min(n, a.k));
  if (n <= a.k) {  // everything is taken: scores do not matter
    for (int64_t i = t.rank * kThreads + threadIdx.x; i < a.k; i += t.ranks * kThreads) emit(i, i < n ? i : -1);
    return;
  }

  const T* scores = static_cast<const T*>(a.logits) + local * a.logits_stride;
  RowSlice<T> slice;
  slice.shift = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(scores) % 16 / sizeof(T));
  slice.base = scores - slice.shift;
  const uint32_t extent = slice.shift + static_cast<uint32_t>(n);
  if (t.ranks > 1 && extent <= min(kSoloKeys, list_words)) {
    if (t.rank != 0) return;
    t.ranks = 1;
  }
  const uint32_t each = (extent + t.ranks * kWarpTile - 1) / (t.ranks * kWarpTile) * kWarpTile;
  slice.begin = min(t.rank * each, extent);
  slice.end = min(slice.begin + each, extent);
  slice.first = max(slice.begin, slice.shift);
  for (int i = threadIdx.x; i < 2 * kBins / 4; i += kThreads) reinterpret_cast<uint4*>(shared.histogram)[i] = {};
  if (threadIdx.x < 2) shared.over[threadIdx.x] = 0;
  __syncthreads();

  const auto k = static_cast<uint32_t>(a.k);
  // The threshold, then the columns in order: behind those of the cluster's earlier blocks.
  const auto finish = [&](const auto& source, uint32_t step) {
    const Threshold threshold = select(t, source, k, step);
    uint32_t greater = 0, equal = 0;
    if (t.ranks > 1) {
      cluster_sync();
      for (uint32_t r = 0; r < t.rank; ++r) {
        greater += load_remote(&shared.greater, r);
        equal += load_remote(&shared.equal, r);
      }
      if (threshold.quota == 0) greater += equal;  // a bin that is taken whole: its keys are above the threshold
      cluster_arrive();
    }
    Stage<decltype(emit)> stage{shared.histogram[0], emit};
    for_each_taken(t, source, threshold, greater, equal, stage);
    stage.flush();
    if (t.ranks > 1) cluster_wait();  // nobody reads this block's counts any more
  };
  List list{};
  list.keys = reinterpret_cast<uint32_t*>(memory + sizeof(Shared));
  if constexpr (kWhole) {
    keep_whole(t, slice, list);
    finish(list, sample_step(each));
  } else if (const uint32_t capacity = pair_capacity(list_words); capacity >= k + kTile) {
    keep_best(t, slice, list, capacity, k);
    finish(list, sample_step(capacity));
  } else {
    finish(slice, sample_step(each));
  }
}

// ---- the launch --------------------------------------------------------------------------------------------------

struct Machine {
  int num_sms, shared_bytes;
  bool clusters;
};

struct Shape {
  uint32_t ranks, list_words;
  int64_t slice;  // the most columns of a block
};

/// How many blocks share a row, and the words of their lists; `columns` is the most that a row can have.
Shape shape_of(const Machine& m, int64_t rows, int64_t columns, int64_t k) {
  constexpr int64_t kListWords = 20480;  // 80 KB, 97 with the histograms: two blocks on a multiprocessor
  constexpr int64_t kMinSlice = 4096;    // below that the barriers of a cluster cost more than its histograms save
  int64_t ranks = 1;
  if (m.clusters && columns > kSoloKeys && columns > k) {
    while (ranks < kMaxRanks && rows * ranks * 2 <= m.num_sms && columns / (ranks * 2) >= kMinSlice) ranks *= 2;
  }
  constexpr int64_t kReserved = 1024;  // of each block by the system
  const int64_t limit = (m.shared_bytes - kReserved - static_cast<int64_t>(sizeof(Shared))) / 4 / 4 * 4;
  const int64_t slice = (columns + 8 + ranks * kWarpTile - 1) / (ranks * kWarpTile) * kWarpTile;
  const int64_t pairs = std::min(std::max<int64_t>(2 * (2 * k + kTile), kListWords), limit);
  int64_t words;
  if (columns <= k) words = 0;
  else if (slice <= std::min(kListWords, limit)) words = slice;
  else if (pair_capacity(static_cast<uint32_t>(pairs)) >= k + kTile) words = pairs;
  else words = slice <= limit ? slice : 0;
  return {static_cast<uint32_t>(ranks), static_cast<uint32_t>(words), columns <= k ? 0 : slice};
}

template <class T>
void launch(const char* function, const TopKArgs& a, int64_t num_rows, cudaStream_t stream) {
  int device = 0, sms = 0, shared = 0, major = 0;
  cudaFuncAttributes attributes{};
  GANNET_CUDA(function, cudaGetDevice(&device));
  GANNET_CUDA(function, cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  GANNET_CUDA(function, cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  GANNET_CUDA(function, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  GANNET_CUDA(function, cudaFuncGetAttributes(&attributes, topk_kernel<T, true>));
  // A kernel from the intermediate code of an older architecture has no clusters, wherever it runs.
  const Machine machine{sms, shared, major >= 9 && attributes.ptxVersion >= 90};
  const Shape shape = shape_of(machine, num_rows, a.num_columns, a.k);
  auto* kernel = shape.slice <= shape.list_words ? topk_kernel<T, true> : topk_kernel<T, false>;
  const size_t bytes = sizeof(Shared) + shape.list_words * sizeof(uint32_t);
  GANNET_CUDA(function,
              cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  GANNET_CUDA(function, cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                             cudaSharedmemCarveoutMaxShared));
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(num_rows * shape.ranks));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = shape.ranks;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = shape.ranks > 1 ? 1 : 0;
  GANNET_CUDA(function, cudaLaunchKernelEx(&config, kernel, a, shape.list_words));
}

}  // namespace

void launch_topk(const char* function, const TopKArgs& a, int64_t num_rows, cudaStream_t stream) {
  if (a.dtype == DType::kBf16) launch<uint16_t>(function, a, num_rows, stream);
  else launch<float>(function, a, num_rows, stream);
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
