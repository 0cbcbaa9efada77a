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
// Selection. Three histograms of 11, 11 and 10 bits of the keys that share the digits found so far, exact whatever the
// range of the scores; it ends early where a digit's keys are all taken. The blocks of a cluster add up each other's
// histograms: 64 groups of 32 bins, then the bins of the one group in which the k-th key lies, so that a block reads
// 96 words of each other block and a pass costs one cluster barrier. The 2^32 keys at the end are one number, and so
// are ties: `quota` of the keys equal to it are taken, the first by column.
//
// Order. Everything is compacted in order of column by ballots and scans over warps and blocks, so the result is
// ascending, ties go to the smaller column, and no atomic decides anything but a count: 20 launches give the same bits.
//
// End. Every loop is over tiles, digits (three) or words of marks, whatever the scores are; NaN, infinities and rows of
// one value included.
//
// Time. Instructions bound it where rows are many: read off the SASS, 32 keys cost a warp 13 instructions until they
// are kept and counted, 11 for each further pass and 19 to be placed and written, and 4,096 keys a multiprocessor that
// issues four a cycle some 1,500 cycles; a row costs about 1,900 beside its keys. Few rows are bound by latency: lens,
// scores, some ten barriers and two or three searches by a warp. Three blocks of 512 threads share a multiprocessor
// where slices are kept whole in up to 13,000 words, else two; 2,048 rows of 131,072 are 1.07 GB, 240 us at 4.46 TB/s.
#include "cuda/common/topk.cuh"

#include <algorithm>

#include "cuda/common/check.h"
#include "cuda/common/cluster.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"

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

struct alignas(16) Shared {
  uint32_t histogram[2][kBins];  // in turns; the one not in use is zero
  uint32_t groups[2][kGroups];
  uint32_t warp_totals[2][kWarps];  // in turns
  uint32_t prefix, remaining, all_taken;
  uint32_t greater, equal;  // keys of this block above and at the threshold
};

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
};

/// Keys in shared memory at [first, end), with their columns, or as neighbours of the row: key i is column i + offset.
struct List {
  static constexpr int kRun = 4, kRuns = kPerThread / kRun;
  uint32_t* keys;
  uint32_t* column_of;  // or nullptr
  uint32_t offset;
  uint32_t first, end;

  __device__ uint32_t num_tiles() const { return (end + kTile - 1) / kTile; }
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

/// Adds one to a word of shared memory, without a branch. By address: the compiler would find the histogram anew in
/// each of its basic blocks.
__device__ inline void count_at(uint32_t address) { asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(address)); }
__device__ inline void count_at_if(bool condition, uint32_t address) {
  asm volatile("{\n .reg .pred p;\n setp.ne.s32 p, %1, 0;\n @p red.shared.add.u32 [%0], 1;\n}" ::"r"(address),
               "r"(static_cast<int>(condition)));
}
__device__ inline uint32_t first_digit(uint32_t key) { return key >> (32 - kDigitBits); }

/// Which bin of the histogram, all blocks together, holds the remaining-th key from the top. By warp 0. Adds to
/// t.shared.greater this block's keys above the bin.
__device__ void find_digit(Team& t, const uint32_t* histogram, const uint32_t* groups, uint32_t remaining, int shift,
                           uint32_t prefix) {
  const uint2 own_pair = reinterpret_cast<const uint2*>(groups)[t.lane];
  uint2 pair = own_pair;
#pragma unroll
  for (uint32_t d = 1; d < kMaxRanks; ++d) {  // blocks start at different neighbours
    if (d >= t.ranks) break;
    const uint2 other = load_remote(reinterpret_cast<const uint2*>(groups) + t.lane, (t.rank + d) % t.ranks);
    pair.x += other.x;
    pair.y += other.y;
  }
  uint32_t from = pair.x + pair.y;  // keys in this lane's groups and all higher ones
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_down_sync(kAll, from, step);
    if (t.lane + step < 32) from += other;
  }
  uint32_t above = from - pair.x - pair.y;
  const int owner = __ffs(__ballot_sync(kAll, above < remaining && remaining <= from)) - 1;
  const bool upper = remaining <= above + pair.y;
  const int group = __shfl_sync(kAll, 2 * t.lane + (upper ? 1 : 0), owner);
  above = __shfl_sync(kAll, upper ? above : above + pair.y, owner);

  const uint32_t own_bin = histogram[group * 32 + t.lane];
  uint32_t bin = own_bin;
#pragma unroll
  for (uint32_t d = 1; d < kMaxRanks; ++d) {
    if (d >= t.ranks) break;
    bin += load_remote(histogram + group * 32 + t.lane, (t.rank + d) % t.ranks);
  }
  from = bin;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_down_sync(kAll, from, step);
    if (t.lane + step < 32) from += other;
  }
  from += above;
  above = from - bin;
  const bool here = above < remaining && remaining <= from;
  const int digit = __ffs(__ballot_sync(kAll, here)) - 1;
  uint32_t own_above = t.lane > digit ? own_bin : 0;
  if (2 * t.lane > group) own_above += own_pair.x;
  if (2 * t.lane + 1 > group) own_above += own_pair.y;
  own_above = __reduce_add_sync(kAll, own_above);
  if (here) {
    Shared& s = t.shared;
    s.prefix = prefix | static_cast<uint32_t>(group * 32 + t.lane) << shift;
    s.remaining = remaining - above;
    s.all_taken = remaining - above == bin;
    s.greater = (shift + kDigitBits == 32 ? 0 : s.greater) + own_above;  // 0 at the first digit
    s.equal = own_bin;
  }
}

/// Counts the keys that share the known digits by their next one.
template <class Source>
__device__ void count_digit(const Team& t, const Source& source, uint32_t* histogram, uint32_t known, uint32_t prefix,
                            int shift, uint32_t mask) {
  for (uint32_t tile = 0; tile < source.num_tiles(); ++tile) {
    uint32_t key[kPerThread];
    const uint32_t valid = source.load(t, tile, key);
#pragma unroll
    for (int j = 0; j < kPerThread; ++j)
      if ((valid >> j & 1) != 0 && (key[j] & known) == prefix) atomicAdd(&histogram[key[j] >> shift & mask], 1u);
  }
}
__device__ void count_digit(const Team&, const List& list, uint32_t* histogram, uint32_t known, uint32_t prefix,
                            int shift, uint32_t mask) {
  constexpr uint32_t kStep = 4 * kThreads;
  const uint32_t bins = shared_address(histogram);
  const auto count = [&](uint32_t key, bool there) {
    count_at_if(there && (key & known) == prefix, bins + 4 * (key >> shift & mask));
  };
  const auto four_at = [&](uint32_t at) { return *reinterpret_cast<const uint4*>(list.keys + at); };
  const auto count_edge = [&](uint32_t at) {
    const uint4 four = four_at(at);
    const auto there = [&](uint32_t e) { return at + e >= list.first && at + e < list.end; };
    count(four.x, there(0));
    count(four.y, there(1));
    count(four.z, there(2));
    count(four.w, there(3));
  };
  uint32_t at = 4 * threadIdx.x;
  if (at < list.first && at < list.end) {
    count_edge(at);
    at += kStep;
  }
  for (; at + 4 <= list.end; at += kStep) {
    const uint4 four = four_at(at);
    count(four.x, true);
    count(four.y, true);
    count(four.z, true);
    count(four.w, true);
  }
  if (at < list.end) count_edge(at);
}

/// The k-th largest key of all blocks' sources, which hold at least k. `counted`: the caller has filled the first
/// histogram. Barriers on entry and exit: sources are complete, and shared memory may be reused by this block.
template <class Source>
__device__ Threshold select(Team& t, const Source& source, uint32_t k, bool counted) {
  Shared& s = t.shared;
  uint32_t prefix = 0, remaining = k, known = 0;  // known: the bits found so far
  int shift = 32 - kDigitBits, bins = kBins;
  for (;;) {
    uint32_t* histogram = s.histogram[t.histogram];
    uint32_t* groups = s.groups[t.histogram];
    uint32_t* next = s.histogram[t.histogram ^ 1];
    if (!counted) count_digit(t, source, histogram, known, prefix, shift, static_cast<uint32_t>(bins - 1));
    counted = false;
    __syncthreads();
    {  // eight threads a group, four bins each
      static_assert(kBins == 4 * kThreads);
      const uint4 four = reinterpret_cast<const uint4*>(histogram)[threadIdx.x];
      uint32_t sum = four.x + four.y + four.z + four.w;
      sum += __shfl_xor_sync(kAll, sum, 1);
      sum += __shfl_xor_sync(kAll, sum, 2);
      sum += __shfl_xor_sync(kAll, sum, 4);
      if (threadIdx.x % 8 == 0) groups[threadIdx.x / 8] = sum;
    }
    if (t.ranks > 1) cluster_sync();
    else __syncthreads();
    // Nobody reads `next` any more: its readers have arrived at this barrier.
    if (t.warp == 0) find_digit(t, histogram, groups, remaining, shift, prefix);
    else
      for (int i = threadIdx.x - 32; i < kBins / 4; i += kThreads - 32) reinterpret_cast<uint4*>(next)[i] = {};
    __syncthreads();
    t.histogram ^= 1;
    prefix = s.prefix;
    remaining = s.remaining;
    // All keys with these digits are taken: no further digit matters. (Not for NaN, which has none below.)
    if (s.all_taken != 0 && prefix != 0) return {prefix - 1, 0, prefix};
    if (shift == 0) return {prefix, remaining, prefix};
    known |= static_cast<uint32_t>(bins - 1) << shift;
    const int bits = min(kDigitBits, shift);
    shift -= bits;
    bins = 1 << bits;
  }
}

/// Calls sink(index, key, column) for the taken keys in order of column; index counts taken keys, those of the
/// `greater` and `equal` keys of earlier blocks included.
template <class Source, class Sink>
__device__ void for_each_taken(Team& t, const Source& source, const Threshold& threshold, uint32_t greater,
                               uint32_t equal, Sink sink) {
  constexpr int kRun = Source::kRun;
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
    level &= valid;
    const auto ranks = rank_marks<Source>(t, above, level);
    if ((above | level) != 0) {
      uint32_t g = 0, e = 0;
#pragma unroll
      for (int j = 0; j < kPerThread; ++j) {
        if (j % kRun == 0) {
          g = greater + ranks.greater[j / kRun];
          e = equal + ranks.equal[j / kRun];
        }
        if ((above >> j & 1) != 0) {
          sink(g + min(e, threshold.quota), key[j], column[j]);
          ++g;
        } else if ((level >> j & 1) != 0) {
          if (e < threshold.quota) sink(g + e, key[j], column[j]);
          ++e;
        }
      }
    }
    greater += ranks.greater_total;
    equal += ranks.equal_total;
  }
}

/// Calls emit(index, column) for the taken keys in order of column. A warp marks its stretch of the list by ballots: a
/// word for 32 neighbours, which lane i keeps of the i-th 32; then it knows each key's place by counting bits. A lane
/// has a key at a time and neighbours are written by neighbours. kTies: there is a quota of keys at the threshold.
template <bool kTies, class Emit>
__device__ void emit_marked(Team& t, const List& list, const Threshold& threshold, uint32_t greater, uint32_t equal,
                            const Emit& emit) {
  constexpr uint32_t kRoundKeys = kThreads * 32;
  const uint32_t lane_bit = 1u << t.lane, quota = threshold.quota;
  for (uint32_t base = 0; base < list.end; base += kRoundKeys) {
    const uint32_t each = (min(list.end - base, kRoundKeys) + kThreads - 1) / kThreads * 32;  // keys of a warp
    const uint32_t begin = base + t.warp * each, mine = begin + t.lane;
    const int words = begin < list.end ? static_cast<int>((min(each, list.end - begin) + 31) / 32) : 0;
    uint32_t above = 0, level = 0;
    const auto mark = [&](int i, uint32_t key, bool there) {
      const uint32_t a = __ballot_sync(kAll, there && key > threshold.key);
      if (t.lane == i) above = a;
      if constexpr (kTies) {
        const uint32_t l = __ballot_sync(kAll, there && key == threshold.key);
        if (t.lane == i) level = l;
      }
    };
    if (begin >= list.first && begin + 32 * words <= list.end) {
#pragma unroll 4
      for (int i = 0; i < words; ++i) mark(i, list.keys[mine + 32 * i], true);
    } else {
#pragma unroll 1
      for (int i = 0; i < words; ++i) {
        const uint32_t at = mine + 32 * i;
        const bool there = at >= list.first && at < list.end;
        mark(i, there ? list.keys[at] : 0, there);
      }
    }
    const uint32_t own = static_cast<uint32_t>(__popc(above) | __popc(level) << 16);  // of a round: 2^14 at most
    uint32_t upto = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const uint32_t other = __shfl_up_sync(kAll, upto, step);
      if (t.lane >= step) upto += other;
    }
    uint32_t* totals = t.shared.warp_totals[t.totals];
    t.totals ^= 1;
    if (t.lane == 31) totals[t.warp] = upto;
    __syncthreads();
    const uint32_t counts = t.lane < kWarps ? totals[t.lane] : 0;
    const uint32_t before = upto - own + __reduce_add_sync(kAll, t.lane < t.warp ? counts : 0);
    const uint32_t all = __reduce_add_sync(kAll, counts);
    const uint32_t greater_before = greater + (before & 0xffff), equal_before = equal + (before >> 16);
#pragma unroll 4
    for (int i = 0; i < words; ++i) {
      const uint32_t a = __shfl_sync(kAll, above, i);
      uint32_t index = __shfl_sync(kAll, greater_before, i) + static_cast<uint32_t>(__popc(a & (lane_bit - 1)));
      bool taken = (a & lane_bit) != 0;
      if constexpr (kTies) {
        const uint32_t l = __shfl_sync(kAll, level, i);
        const uint32_t e = __shfl_sync(kAll, equal_before, i) + static_cast<uint32_t>(__popc(l & (lane_bit - 1)));
        taken = taken || ((l & lane_bit) != 0 && e < quota);
        index += min(e, quota);
      }
      const uint32_t at = mine + 32 * i;
      if (taken) emit(index, list.column_of != nullptr ? list.column_of[at] : at + list.offset);
    }
    greater += all & 0xffff;
    equal += all >> 16;
  }
}
template <class Emit>
__device__ void emit_taken(Team& t, const List& list, const Threshold& threshold, uint32_t greater, uint32_t equal,
                           const Emit& emit) {
  if (threshold.quota != 0) emit_marked<true>(t, list, threshold, greater, equal, emit);
  else emit_marked<false>(t, list, threshold, greater, 0, emit);
}
template <class T, class Emit>
__device__ void emit_taken(Team& t, const RowSlice<T>& slice, const Threshold& threshold, uint32_t greater,
                           uint32_t equal, const Emit& emit) {
  for_each_taken(t, slice, threshold, greater, equal,
                 [&](uint32_t index, uint32_t, uint32_t column) { emit(index, column); });
}

// ---- filling the list --------------------------------------------------------------------------------------------

/// All keys of a slice, and their first histogram. A tile is under way while the one before is written.
template <class T>
__device__ void keep_whole(Team& t, const RowSlice<T>& slice, List& list) {
  const uint32_t bins = shared_address(t.shared.histogram[t.histogram]);
  typename RowSlice<T>::Raw next;
  const uint32_t tiles = slice.num_tiles();
  uint32_t next_valid = tiles > 0 ? slice.fetch(t, 0, next) : 0;
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    const typename RowSlice<T>::Raw raw = next;
    const uint32_t valid = next_valid;
    if (tile + 1 < tiles) next_valid = slice.fetch(t, tile + 1, next);
    float x[kPerThread];
    slice.expand(raw, x);
#pragma unroll
    for (int r = 0; r < kPerThread / 4; ++r) {
      const uint32_t four = valid >> (4 * r) & 0xf;
      if (four == 0) continue;
      uint32_t key[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) key[e] = order_key(x[4 * r + e]);
      const uint32_t at = slice.place(t, tile, 4 * r / slice.kRun) + 4 * r % slice.kRun - slice.begin;
      *reinterpret_cast<uint4*>(list.keys + at) = {key[0], key[1], key[2], key[3]};
      if (four == 0xf) {
#pragma unroll
        for (int e = 0; e < 4; ++e) count_at(bins + 4 * first_digit(key[e]));
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) count_at_if((four >> e & 1) != 0, bins + 4 * first_digit(key[e]));
      }
    }
  }
  list.column_of = nullptr;
  list.offset = slice.begin - slice.shift;
  list.first = slice.first - slice.begin;
  list.end = slice.end > slice.begin ? slice.end - slice.begin : 0;
}

/// Pairs of a key and a column that so many words hold.
__host__ __device__ constexpr uint32_t pair_capacity(uint32_t words) { return words / 2 & ~3u; }

/// The k best keys of a slice and some that are not, in pairs; `capacity` is at least k + kTile. Blocks work alone.
template <class T>
__device__ void keep_best(Team& t, const RowSlice<T>& slice, List& list, uint32_t capacity, uint32_t k) {
  Team alone = t;
  alone.rank = 0;
  alone.ranks = 1;
  list.column_of = list.keys + capacity;
  list.first = list.end = 0;
  float limit = 0.0f;
  bool full = false;  // the list holds the k best so far: only scores above `limit` enter
  typename RowSlice<T>::Raw raw, next;
  const uint32_t tiles = slice.num_tiles();
  uint32_t valid = tiles > 0 ? slice.fetch(t, 0, next) : 0;
  for (uint32_t tile = 0; tile < tiles; ++tile) {
    raw = next;
    const uint32_t marks = valid;
    if (tile + 1 < tiles) valid = slice.fetch(t, tile + 1, next);
    float x[kPerThread];
    slice.expand(raw, x);
    uint32_t enters;
    for (;;) {
      enters = marks;
      if (full) {
#pragma unroll
        for (int j = 0; j < kPerThread; ++j) {
          // Above the limit and a number; everything but NaN is above a limit that is NaN.
          if (!(x[j] == x[j] && !(x[j] <= limit))) enters &= ~(1u << j);
        }
      }
      const auto ranks = rank_marks<RowSlice<T>>(alone, enters, 0);
      if (list.end + ranks.greater_total <= capacity) {
#pragma unroll
        for (int r = 0; r < RowSlice<T>::kRuns; ++r) {
          constexpr int kRun = RowSlice<T>::kRun;
          uint32_t at = list.end + ranks.greater[r];
          const uint32_t column = slice.place(t, tile, r) - slice.shift;
#pragma unroll
          for (int e = 0; e < kRun; ++e) {
            if ((enters >> (r * kRun + e) & 1) == 0) continue;
            list.keys[at] = order_key(x[r * kRun + e]);
            list.column_of[at] = column + e;
            ++at;
          }
        }
        list.end += ranks.greater_total;
        break;
      }
      const Threshold threshold = select(alone, list, k, false);
      // In place: a taken key moves to an index that is not above its own, and a tile is read before it is written.
      for_each_taken(alone, list, threshold, 0, 0, [&](uint32_t index, uint32_t key, uint32_t column) {
        list.keys[index] = key;
        list.column_of[index] = column;
      });
      list.end = k;
      limit = score_of(threshold.lowest);
      full = true;
    }
  }
  t.totals = alone.totals;
  // The blocks of a cluster read each other's histograms at one address: all begin with the first.
  if (alone.histogram != 0) {
    for (int i = threadIdx.x; i < kBins / 4; i += kThreads) reinterpret_cast<uint4*>(t.shared.histogram[0])[i] = {};
  }
  __syncthreads();
}

// ---- the kernel --------------------------------------------------------------------------------------------------

/// kWhole: every slice is kept whole, which takes fewer registers: three blocks on a multiprocessor instead of two.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads, kWhole ? 3 : 2)
    topk_kernel(const __grid_constant__ TopKArgs a, const __grid_constant__ uint32_t list_words) {
  wait_for_stream();
  // Blocks of a next top-k take the room that is free when this says so, and should find as much everywhere. Two blocks
  // fit: at once, and each multiprocessor gets one (64 rows of 131,072: 38 us, not 48). Three fit: once thresholds are
  // known and most blocks end together (256 rows of 8,192: 13.4 us, not 16.6).
  if constexpr (!kWhole) let_next_start();
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
  const PageList pages = place.request >= 0 ? page_list(a.pages, place.request) : PageList{nullptr, 0};
  int32_t* const positions = a.positions != nullptr ? a.positions + row * a.positions_stride : nullptr;
  int32_t* const slots = a.slots != nullptr ? a.slots + row * a.slots_stride : nullptr;
  const auto emit_position = [&](uint32_t index, uint32_t column) { positions[index] = static_cast<int32_t>(column); };
  const auto page_size = static_cast<uint32_t>(a.page_size);
  const int page_shift = (page_size & (page_size - 1)) == 0 ? 31 - __clz(static_cast<int>(page_size)) : -1;
  const auto emit_slot = [&](uint32_t index, uint32_t column) {
    if (positions != nullptr) positions[index] = static_cast<int32_t>(column);
    const uint32_t page = page_shift >= 0 ? column >> page_shift : column / page_size;
    const int64_t id = pages.ids[page];
    slots[index] =
        id >= 0 && id < a.num_pages ? static_cast<int32_t>(id * a.page_size + (column - page * page_size)) : -1;
  };
  if (t.rank == 0 && threadIdx.x == 0) a.counts[row] = static_cast<int32_t>(min(n, a.k));
  if (n <= a.k) {  // everything is taken: scores do not matter
    for (int64_t i = t.rank * kThreads + threadIdx.x; i < a.k; i += t.ranks * kThreads) {
      if (i < n) {
        if (slots != nullptr) emit_slot(static_cast<uint32_t>(i), static_cast<uint32_t>(i));
        else emit_position(static_cast<uint32_t>(i), static_cast<uint32_t>(i));
      } else {
        if (positions != nullptr) positions[i] = -1;
        if (slots != nullptr) slots[i] = -1;
      }
    }
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
  __syncthreads();

  const auto k = static_cast<uint32_t>(a.k);
  // The threshold, then the columns in order: behind those of the cluster's earlier blocks.
  const auto finish = [&](const auto& source, bool counted) {
    const Threshold threshold = select(t, source, k, counted);
    uint32_t greater = 0, equal = 0;
    if (t.ranks > 1) {
      cluster_sync();
      for (uint32_t r = 0; r < t.rank; ++r) {
        greater += load_remote(&shared.greater, r);
        equal += load_remote(&shared.equal, r);
      }
      if (threshold.quota == 0) greater += equal;  // a digit that is taken whole: its keys are above the threshold
      cluster_arrive();
    }
    if constexpr (kWhole) let_next_start();
    if (slots != nullptr) emit_taken(t, source, threshold, greater, equal, emit_slot);
    else emit_taken(t, source, threshold, greater, equal, emit_position);
    if (t.ranks > 1) cluster_wait();  // nobody reads this block's counts any more
  };
  List list{};
  list.keys = reinterpret_cast<uint32_t*>(memory + sizeof(Shared));
  if (kWhole || slice.end - slice.begin <= list_words) {
    keep_whole(t, slice, list);
    finish(list, true);
  } else if constexpr (!kWhole) {
    if (pair_capacity(list_words) >= k + kTile) {
      keep_best(t, slice, list, pair_capacity(list_words), k);
      finish(list, false);
    } else {
      finish(slice, false);
    }
  }
}

// ---- the launch --------------------------------------------------------------------------------------------------

struct Machine {
  int num_sms, shared_bytes;
  bool clusters;
};

struct Shape {
  uint32_t ranks, list_words;
  bool whole;  // no block has more columns than words
};

/// How many blocks share a row, and the words of their lists; `columns` is the most that a row can have.
Shape shape_of(const Machine& m, int64_t rows, int64_t columns, int64_t k) {
  constexpr int64_t kListWords = 20480;  // 80 KB, 97 with the histograms: two blocks on a multiprocessor
  constexpr int64_t kMinSlice = 4096;    // below that the barriers of a cluster cost more than its histograms save
  int64_t ranks = 1;
  if (m.clusters && columns > kSoloKeys && columns > k) {
    // Clusters of four and eight that share multiprocessors cost more than they save; pairs may.
    while (ranks < kMaxRanks && rows * ranks * 2 <= (ranks == 1 ? 2 : 1) * m.num_sms &&
           columns / (ranks * 2) >= kMinSlice)
      ranks *= 2;
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
  return {static_cast<uint32_t>(ranks), static_cast<uint32_t>(words), columns <= k || slice <= words};
}

template <class T>
void launch(const char* function, const TopKArgs& a, int64_t num_rows, Stream stream) {
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
  const size_t bytes = sizeof(Shared) + shape.list_words * sizeof(uint32_t);
  auto* const kernel = shape.whole ? topk_kernel<T, true> : topk_kernel<T, false>;
  GANNET_CUDA(function, cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                             cudaSharedmemCarveoutMaxShared));
  launch_kernel(function, kernel,
                {.blocks = num_rows * shape.ranks,
                 .threads = kThreads,
                 .shared_bytes = bytes,
                 .cluster = static_cast<int>(shape.ranks)},
                stream, a, shape.list_words);
}

}  // namespace

void launch_topk(const char* function, const TopKArgs& a, int64_t num_rows, Stream stream) {
  if (a.dtype == DType::kBf16) launch<uint16_t>(function, a, num_rows, stream);
  else launch<float>(function, a, num_rows, stream);
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
