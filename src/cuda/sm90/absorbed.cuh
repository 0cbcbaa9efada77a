// Absorbed MLA attention on Hopper: bf16 queries, bf16 rows, dense over pages or sparse over slot lists.
//
// Shapes. A tile is 64 lanes (rows x heads of one request; heads of one row when sparse) by 64 keys:
//   S = Q K^T   64 x 64 x 576     1,152 cycles of the tensor cores
//   O = O + P V 64 x 512 x 64     1,024 cycles
// for 73,728 bytes of cache. At 1.7 GHz and 132 SMs the tensor cores ask for 7.6 TB/s: with 64 lanes that are all real
// (128 heads: two blocks share the keys through the L2) they are the bound, with few lanes the memory is.
// Shared memory is nearly as busy as the tensor cores: a tile writes 72 KB there and reads 136 KB for S (Q again for
// every 64 keys; its rope part comes from registers) and 72 KB for O, 280 KB at 128 bytes a cycle = 2,190 cycles.
//
// Roles. O in fp32 is 64 x 512 x 4 = 128 KB, half of the register file, so two warpgroups hold 256 columns of it each
// (128 registers a thread). Tiles are taken in pairs: warpgroup 0 scores the even tile, warpgroup 1 the odd one, and
// each multiplies both P by its half of V, its own P from registers, the other's from shared memory. While one is in
// its softmax the other keeps the tensor cores busy; scores of the next pair are begun behind the last product of this
// one. The running maximum goes 0 -> 1 -> 0 through shared memory; each warpgroup keeps the row sums of its own tiles.
// A third warpgroup loads: a warp through the copy engine, a box of 64 columns for each page of a tile, where pages
// hold 32 keys or a multiple of 64; else all of it with 16-byte cp.async, rows through their own addresses (gathered
// lists, other pages). Both write the swizzled layout that wgmma reads.
//
// Shared memory: Q latent 64 KB (its rope part lives in registers), two K tiles 144 KB, P0 and P1 16 KB: 224 KB and
// some.
//
// Halves. A tile is released in two halves: columns 0..255 (left), which only warpgroup 0 reads as values, and 256..575
// (right), which only warpgroup 1 does. So each half has one warpgroup that uses it last, and the next tile's left half
// is under way while this one's right half is still being read. Pages arrive in nine blocks of 64 columns with a
// barrier each, so that scores begin with the first 8 KB; rows one by one arrive in the same two halves.
//
// Hazards, and why there are no more barriers than these. A half is released by the warpgroup that multiplies it; the
// other one may have scored it, but it did that before it announced the weights which that product needs. sP0 is
// rewritten for pair p + 1 after the right half of its even tile has arrived, which needs warpgroup 1's release of the
// stage, which comes after the product that reads sP0; for sP1, the left half and warpgroup 0 likewise. Maxima, scales
// and states are read before the release too. The loader waits in the order left, right, left, right: no consumer waits
// for a half before it has released what the loader needs to get there. Weights are announced at mbarriers of one bit
// of phase; neither warpgroup announces twice before the other has waited, by the same argument.
//
// Every thread arrives for what it wrote or read itself. One for a warp after a __syncwarp would do, and so would
// bar.arrive for the weights and bar.sync for the sums, but compute-sanitizer's racecheck follows none of them
// (docs/kernels/mla_decode_sm90.md).
//
// Keys that lanes must not see. Beyond the last lane's bound a page holds anything, NaN too, and 0 x NaN is NaN: once
// it has scored a tile, which masks put right, the scoring warpgroup overwrites such rows by zeros, before it announces
// the weights. Keys that only some lanes see lose their NaN and infinities in the same way: of a NaN the lanes that see
// it have a NaN score. At most the last tiles of a request need that.
//
// Schedule, computed by each block for itself from the lengths. With at most as many groups (requests or rows) as parts
// (blocks of a lane block), each part gets one piece: the shortest length is searched of which every group can be cut
// into even pieces with no more pieces than parts. Where that would leave too much idle, or with more groups, the work
// is laid out on a line, each group kFixedTiles + its tiles. Each part gets the groups whose middle lies in its share
// of the line, unless that makes the fullest part longer than cutting would: then the line is cut into equal parts.
// Groups that were cut leave partial results (fp32, at most two a part), which combine_kernel merges in order; both
// kernels are launched while what is before them on the stream ends (PDL).
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/absorbed_problem.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/tma.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/sm90/absorbed_tuning.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace sm90 {

using namespace absorbed;

constexpr int kLanes = 64, kKeys = 64, kStages = 2;
constexpr int kConsumerThreads = 256, kProducerThreads = 128, kThreads = kConsumerThreads + kProducerThreads;
constexpr int kBlockBytes = 64 * 128;                    // 64 rows of 64 bf16
constexpr int kQueryBytes = kLatent / 64 * kBlockBytes;  // 65,536
constexpr int kBlocks = kWidth / 64;                     // of a tile: 9
constexpr int kLeftBlocks = kLatent / 2 / 64;            // of them in the left half: 4
constexpr int kStageBytes = kBlocks * kBlockBytes;       // 73,728
constexpr int kWeightBytes = kBlockBytes;                // 8,192
constexpr int kAlignment = 1024;                         // of a swizzled block
constexpr int kTileBytes = kQueryBytes + kStages * kStageBytes + 2 * kWeightBytes;
constexpr int kHalf = kLatent / 2;  // columns of O a warpgroup has
// Of a thread: 128 loaders and 256 consumers share 64,512. At 232 the consumers spill 28 to 40 bytes in their softmax;
// with 24 only a loader that finds pages row by row spills (84 bytes).
template <class Problem, bool kPages>
constexpr bool kSlimLoader = kPages || !std::is_same_v<Problem, Dense>;
template <class Problem, bool kPages>
constexpr int kProducerRegisters = kSlimLoader<Problem, kPages> ? 24 : 40;
template <class Problem, bool kPages>
constexpr int kConsumerRegisters = kSlimLoader<Problem, kPages> ? 240 : 232;
constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;
constexpr int kLeft = 0, kRight = 1;
constexpr int kMaxParts = 256;

/// What every block reads a part of, but can say which only when it knows its part: asked for before. Each block asks
/// for `share` bytes of it, all multiples of 16.
struct Early {
  const unsigned char *begin, *end;
  uint32_t share;
};

struct Schedule {
  int4* cuts;     // [num_slots], for combine_kernel: group, first part, number of parts (1: nothing to merge)
  int num_parts;  // of each lane block
  int lane_blocks;
  int num_groups;
  int num_slots;   // min(num_groups, num_parts): a slot for each group, or for each part (the group that it begins)
  Early early[2];  // queries, and page ids or slots
};

struct Shared {
  uint64_t full[kStages][kBlocks];  // of each block of 64 columns; of row-by-row halves, that of its first block
  uint64_t empty[kStages][2];
  uint64_t weights[2];  // of each warpgroup: P of its tile, its maxima and scales are there
  uint64_t sums;        // both warpgroups' are there
  uint64_t together;    // all consumers
  float max0[kLanes], max1[kLanes], scale0[kLanes], scale1[kLanes], sum0[kLanes], sum1[kLanes];
  int bounds[kLanes];
  int row_of_lane[kLanes];                    // among the group's
  int64_t query_at[kLanes];                   // where a lane's query begins, in elements; -1: no such lane
  alignas(16) uint8_t state[kStages][kKeys];  // of each key of a stage
  int first_group, end_group, first_start;
  int has_blanks;                              // there are groups without tiles: see Walk
  int payload, total;                          // of the line where it is cut; payload 0: the part has whole groups
  int piece;                                   // longest piece in tiles where each part has one, else 0
  int piece_first, piece_last, piece_tiles;    // of the only piece: its tiles, and those of its group
  alignas(16) int partial_sum[kThreads / 32];  // read by 16 bytes, which must not take its neighbours along
};

/// A key of a tile: not there; there; there, with values that were no numbers (only where some lanes do not see it, and
/// only of kernels that mend a tile before they score it).
constexpr uint8_t kAbsent = 0, kPresent = 1, kMarked = 3;

// Everything is dynamic shared memory, so that the tiles begin where it begins, at a multiple of kAlignment. 226.4 KB
// of 227.
constexpr int kSharedBytes = kTileBytes + static_cast<int>(sizeof(Shared));
static_assert(kSharedBytes <= 227 * 1024);

/// One thread of a warp that has least to do, behind wait_for_stream().
__device__ inline void ask_early(const Schedule& schedule) {
  if (threadIdx.x != kThreads - 32) return;
#pragma unroll
  for (const Early& e : schedule.early) {
    const int64_t at = int64_t{blockIdx.x} * e.share, left = e.end - e.begin - at;
    if (left > 0) prefetch_bytes(e.begin + at, static_cast<uint32_t>(min(left, int64_t{e.share})));
  }
}

// Lengths are int32, so tiles, and the line of a call that fits a GPU's memory, are 32-bit numbers.
template <class Problem>
__device__ int group_tiles(const Problem& p, int group) {
  typename Problem::Place g;
  if (!p.place(g, group)) return 0;
  return (max(0, static_cast<int>(p.keys_of(g, g.num_rows - 1))) + kKeys - 1) / kKeys;
}
/// Whether a group has rows but no keys, as the padding of a captured batch does: its results are 0.
template <class Problem>
__device__ bool is_blank(const Problem& p, int group) {
  typename Problem::Place g;
  return p.place(g, group) && p.keys_of(g, g.num_rows - 1) <= 0;
}

// ---- schedule ---------------------------------------------------------------------------------------------------

/// The sum over all threads before this one, and of all; `warp_sums` holds a number a warp. Every thread of the block
/// calls it.
template <class T>
__device__ T scan_threads(T own, T* warp_sums, T& total) {
  const int tid = threadIdx.x;
  T inclusive = own;
  for (int offset = 1; offset < 32; offset *= 2) {
    const T other = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (tid % 32 >= offset) inclusive += other;
  }
  __syncthreads();  // the last use of warp_sums is over
  if (tid % 32 == 31) warp_sums[tid / 32] = inclusive;
  __syncthreads();
  T before = 0;
  total = 0;
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < tid / 32) before += warp_sums[w];
    total += warp_sums[w];
  }
  return before + inclusive - own;
}

__device__ inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
__device__ inline float square_root(float x) {  // one instruction
  float y;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// Below this many tiles a piece's partial results cost more than it saves; `lanes` of a group.
__device__ inline int least_piece(int total_tiles, int lanes) {
  const float tiles = square_root(kPartTiles * static_cast<float>(total_tiles) * static_cast<float>(lanes) / kLanes);
  return max(1, static_cast<int>(tiles + 0.5f));
}

/// The shortest piece such that groups of tiles[0..num_groups) cut into even pieces of at most that length are no more
/// pieces than num_parts >= num_groups. Each warp tries another length, so a round divides the range by twelve.
__device__ inline int shortest_piece(const int* tiles, int num_groups, int num_parts, int total_tiles, int lanes,
                                     int (&feasible)[kThreads / 32]) {
  constexpr int kWarps = kThreads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // ceil(t / m) <= (t - 1) / m + 1 gives a length that always fits.
  int low = max(ceil_div(total_tiles, num_parts), least_piece(total_tiles, lanes));
  int high =
      num_parts > num_groups ? max(low, ceil_div(total_tiles - num_groups, num_parts - num_groups)) : total_tiles;
  while (low < high) {
    const int width = high - low;
    auto candidate = [&](int w) { return low + static_cast<int>(int64_t{width} * w / kWarps); };
    const int length = candidate(warp);
    int pieces = 0;
#pragma unroll 1
    for (int g = lane; g < num_groups; g += 32) pieces += ceil_div(tiles[g], length);
    pieces = __reduce_add_sync(0xffffffffu, pieces);
    __syncthreads();
    if (lane == 0) feasible[warp] = pieces <= num_parts;
    __syncthreads();
    const uint32_t fits = __ballot_sync(0xffffffffu, lane < kWarps && feasible[min(lane, kWarps - 1)] != 0);
    const int w = fits == 0 ? kWarps : __ffs(static_cast<int>(fits)) - 1;
    const int new_low = w == 0 ? low : candidate(w - 1) + 1, new_high = w == kWarps ? high : candidate(w);
    low = new_low, high = new_high;
  }
  return high;
}

__device__ inline void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

/// Where this part begins. Groups without tiles have no place in it, so that a batch gives the same bits whatever it
/// is padded to. `scratch` holds 2 * kMaxParts numbers.
template <class Problem>
__device__ void find_part(const Problem& p, const Schedule& schedule, int part, Shared& s, int* scratch) {
  const int tid = threadIdx.x, num_groups = schedule.num_groups, num_parts = schedule.num_parts;
  const int all_lanes = static_cast<int>(p.lanes_per_group()), lanes = min(all_lanes, kLanes);
  const int cut_price = kCutTiles + kCutTiles64 * lanes / kLanes;
  // One group: what is below would find the same (a graph's padded batch has to give the same bits) in twice the time.
  if (num_groups == 1) {
    const int tiles = group_tiles(p, 0);
    int piece = max(ceil_div(tiles, num_parts), least_piece(tiles, all_lanes));
    if (tiles <= piece + cut_price) piece += cut_price;
    const int pieces = ceil_div(tiles, piece), each = tiles / max(pieces, 1), longer = tiles - each * pieces;
    if (tid == 0) {
      s.piece = piece;
      s.has_blanks = tiles == 0;
      if (part < pieces) {
        s.first_group = 0;
        s.end_group = 1;
        s.piece_first = each * part + min(part, longer);
        s.piece_last = s.piece_first + each + (part < longer);
        s.piece_tiles = tiles;
      }
    }
    __syncthreads();
    return;
  }
  const int per_thread = ceil_div(num_groups, kThreads);
  const int begin = min(tid * per_thread, num_groups), end = min(begin + per_thread, num_groups);
  int own_tiles = 0, own_groups = 0;  // and groups with tiles
#pragma unroll 1
  for (int g = begin; g < end; ++g) {
    const int tiles = group_tiles(p, g);
    own_tiles += tiles;
    own_groups += tiles > 0;
  }
  int64_t totals;  // both numbers in one: tiles above
  constexpr int64_t kTile = int64_t{1} << 32;
  const int64_t before = scan_threads(own_tiles * kTile + own_groups, s.query_at, totals);
  const int tiles_before = static_cast<int>(before >> 32), groups_before = static_cast<int>(before),
            total_tiles = static_cast<int>(totals >> 32), with_tiles = static_cast<int>(totals);
  if (tid == 0) s.has_blanks = with_tiles < num_groups;
  const int line = total_tiles + kFixedTiles * with_tiles;
  const int payload = max(ceil_div(line, num_parts), kMinPiece);
  if (with_tiles <= num_parts) {  // kMaxParts < kThreads: at most one of them a thread
    int* const groups = scratch + kMaxParts;
    int at = groups_before;
#pragma unroll 1
    for (int g = begin; g < end; ++g) {
      const int tiles = own_groups == 0 ? 0 : per_thread == 1 ? own_tiles : group_tiles(p, g);
      if (tiles > 0) scratch[at] = tiles, groups[at++] = g;
    }
    __syncthreads();
    const int own = tid < with_tiles ? scratch[tid] : 0;
    int piece = shortest_piece(scratch, with_tiles, num_parts, total_tiles, all_lanes, s.partial_sum);
    // All groups stay whole where that is little longer: 32 requests of 128 heads with 1,024 keys 44.2 us for 49.1.
    if (!__syncthreads_or(own > piece + cut_price)) piece += cut_price;
    const int pieces = ceil_div(own, piece);
    int total;
    const int start = scan_threads(pieces, s.partial_sum, total);
    // Longer pieces than the line's, but each part has one: no second prologue, and fewer merges or none.
    if (with_tiles == 1 || total == with_tiles || piece <= payload + payload / 16 + kMinPiece) {
      if (tid == 0) s.piece = piece;
      if (part >= start && part < start + pieces) {
        const int i = part - start, each = own / pieces, longer = own % pieces;  // the first `longer` have a tile more
        s.first_group = groups[tid];
        s.end_group = groups[tid] + 1;
        s.piece_first = each * i + min(i, longer);
        s.piece_last = s.piece_first + each + (i < longer);
        s.piece_tiles = own;
      }
      __syncthreads();
      return;
    }
  }
  // Whole groups, each to the part in which its middle lies, if the fullest part has little more than a cut would
  // bring.
  int* const loads = scratch;
  __syncthreads();
  if (tid < num_parts) loads[tid] = 0;
  __syncthreads();
  const int line_start = tiles_before + kFixedTiles * groups_before;
  auto part_of = [&](int start, int cost) {
    return static_cast<int>((static_cast<int64_t>(start) + cost / 2) * num_parts / line);
  };
  int start = line_start;
#pragma unroll 1
  for (int g = begin; g < end; ++g) {
    const int tiles = group_tiles(p, g), cost = tiles + kFixedTiles;
    if (tiles == 0) continue;
    const int of = part_of(start, cost);
    atomicAdd(&loads[of], cost);
    if (of == part) {
      atomicMin(&s.first_group, g);
      atomicMax(&s.end_group, g + 1);
    }
    start += cost;
  }
  __syncthreads();
  int most = 0;
#pragma unroll 1
  for (int i = tid % 32; i < num_parts; i += 32) most = max(most, loads[i]);
  most = __reduce_max_sync(0xffffffffu, most);
  if (most <= payload + cut_price) {
    if (tid == 0) s.payload = 0;
    __syncthreads();
    return;
  }
  __syncthreads();
  if (tid == 0) {
    s.payload = payload;
    s.total = line;
    s.first_group = s.end_group = num_groups;
  }
  __syncthreads();
  const int target = part * payload;
  start = line_start;
#pragma unroll 1
  for (int g = begin; g < end; ++g) {
    const int tiles = group_tiles(p, g), cost = tiles + kFixedTiles;
    if (tiles == 0) continue;
    if (target >= start && target < start + cost) s.first_group = g, s.first_start = start;
    start += cost;
  }
  __syncthreads();
}

/// A cut of a group's tiles, moved to an end of the group where it is near one.
__device__ inline int settle(int cut, int tiles) {
  if (cut <= 0) return 0;
  return cut >= tiles - kMinPiece ? tiles : cut <= kMinPiece ? 0 : cut;
}

/// The pieces of work of a part, in order; producer and consumers walk them alike. Few numbers: registers are dear.
struct Walk {
  int group, start;  // the next group and its place on the line; after all of those ~the next that may be blank
  int first_tile, last_tile, tiles;

  __device__ explicit Walk(const Shared& s) : group(s.first_group), start(s.first_start) {}
  /// Advances to the next piece with tiles, of group `group - 1`; false at the end.
  template <class Problem>
  __device__ bool next(const Problem& p, const Schedule& schedule, const Shared& s, int part) {
    if (start >= 0) {
      if (next_piece(p, schedule, s, part)) return true;
      if (!s.has_blanks) return false;
      start = ~part;
    }
    // Blank groups, in turns: a tile in which nothing is seen.
#pragma unroll 1
    while (~start < schedule.num_groups) {
      group = ~start + 1;
      start -= schedule.num_parts;
      first_tile = 0, last_tile = tiles = 1;
      if (is_blank(p, group - 1)) return true;
    }
    return false;
  }
  template <class Problem>
  __device__ bool next_piece(const Problem& p, const Schedule& schedule, const Shared& s, int part) {
    if (s.piece != 0) {
      if (group >= s.end_group) return false;
      first_tile = s.piece_first, last_tile = s.piece_last, tiles = s.piece_tiles;
      ++group;
      return true;
    }
    if (s.payload == 0) {
#pragma unroll 1
      while (group < s.end_group) {
        first_tile = 0, last_tile = tiles = group_tiles(p, group);
        ++group;
        if (tiles > 0) return true;
      }
      return false;
    }
    const int part_begin = part * s.payload, part_end = min(part_begin + s.payload, s.total);
#pragma unroll 1
    while (group < schedule.num_groups && start < part_end) {
      tiles = group_tiles(p, group);
      ++group;
      if (tiles == 0) continue;
      const int origin = start + kFixedTiles;  // the place of tile 0 on the line
      first_tile = settle(max(0, part_begin - origin), tiles);
      last_tile = settle(min(tiles, part_end - origin), tiles);
      start += tiles + kFixedTiles;
      if (first_tile < last_tile) return true;
    }
    return false;
  }
  /// Over how many parts the group of this piece goes, which is its first.
  __device__ int parts(const Shared& s, int part) const {
    if (s.piece != 0) return ceil_div(tiles, s.piece);
    if (last_tile == tiles) return 1;
    // Further parts begin in this group as long as their cut does not settle at its end.
    const int origin = start - tiles;
    const int next_cut = (part + 1) * s.payload - origin;
    return 1 + ceil_div(tiles - kMinPiece - next_cut, s.payload);
  }
};

/// `both` of a thread's numbers by lane, two of each eight (kernels whose lanes are N of the MMAs), over the eight rows
/// that the threads of a warp have: rounds in which a thread keeps half of its numbers and gives the other half away,
/// then rounds of the two that are left. x[0] and x[1] are then those of lanes 8 g + 2 t and the next, where the row g
/// is below kEights.
template <int kEights, class Both>
__device__ inline void reduce_over_rows(float (&x)[2 * kEights], int g, Both both) {
  auto halve = [&](auto of) {
    constexpr int kLeft = decltype(of)::value;  // of eights afterwards
    if constexpr (kLeft < kEights) {
      const bool upper = (g & kLeft) != 0;
#pragma unroll
      for (int c = 0; c < 2 * kLeft; ++c) {
        const float low = x[c], high = x[c + 2 * kLeft];
        x[c] = both(upper ? high : low, __shfl_xor_sync(0xffffffffu, upper ? low : high, 4 * kLeft));
      }
    }
  };
  halve(std::integral_constant<int, 4>{});
  halve(std::integral_constant<int, 2>{});
  halve(std::integral_constant<int, 1>{});
#pragma unroll
  for (int offset = 4 * kEights; offset < 32; offset *= 2)
#pragma unroll
    for (int i = 0; i < 2; ++i) x[i] = both(x[i], __shfl_xor_sync(0xffffffffu, x[i], offset));
}
struct Larger {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  __device__ float operator()(float a, float b) const { return a + b; }
};

__device__ inline float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- producers --------------------------------------------------------------------------------------------------

/// By all threads of the warpgroup, row by row.
template <class Problem>
__device__ void produce_rows(const Problem& p, const Schedule& schedule, Shared& s, unsigned char* stages, int part,
                             int lane0) {
  const int tid = threadIdx.x - kConsumerThreads;
  constexpr int kRowsAtOnce = kProducerThreads / 8,
                kRowsEach = kKeys / kRowsAtOnce;  // eight threads copy 128 bytes of a row
  const int piece = tid % 8, row0 = tid / 8;
  const uint32_t target0 =
      shared_address(stages) + row0 * 128 + ((piece ^ (row0 % 8)) * 16);  // rows are 16 apart: same piece
  const bool asks = tid < kKeys && tid % schedule.lane_blocks == lane0 / kLanes;
  int count = 0;  // tiles issued
  Walk walk(s);
  while (walk.next(p, schedule, s, part)) {
    typename Problem::Place g;
    p.place(g, walk.group - 1);
    const int lanes_end = static_cast<int>(min(int64_t{lane0 + kLanes}, g.num_rows * p.num_heads));
    const int most = lanes_end > lane0 ? static_cast<int>(p.keys_of(g, (lanes_end - 1) / p.num_heads)) : 0;
    for (int tile = walk.first_tile; tile < walk.last_tile; ++tile, ++count) {
      const int stage = count % kStages;
      // Addresses first: the page table's latency passes while the stage is still in use.
      const unsigned char* rows[kRowsEach];
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        const int key = tile * kKeys + row0 + i * kRowsAtOnce;
        rows[i] = key < most ? p.bf16_row(g, key) : nullptr;
      }
      // Lane blocks share what is asked for ahead. Not behind a block's first tile: Q goes before.
      const unsigned char* ahead = nullptr;
      if constexpr (kRowsAhead > 0) {
        const int key = (tile + kRowsAhead) * kKeys + tid;
        if (count > 0 && asks && tile + kRowsAhead < walk.last_tile && key < most) ahead = p.bf16_row(g, key);
      }
      const uint32_t parity = (count / kStages & 1) ^ 1;
      mbarrier_wait(&s.empty[stage][kLeft], parity);
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i)
        if (piece == 0) s.state[stage][row0 + i * kRowsAtOnce] = rows[i] != nullptr ? kPresent : kAbsent;
      auto copy = [&](auto from, auto to) {
#pragma unroll
        for (int i = 0; i < kRowsEach; ++i) {
          const bool ok = rows[i] != nullptr;
          const unsigned char* source =
              ok ? rows[i] : static_cast<const unsigned char*>(p.cache.data);  // not read if not ok: zeros
          const uint32_t target = target0 + stage * kStageBytes + i * (kRowsAtOnce * 128);
#pragma unroll
          for (int b = decltype(from)::value; b < decltype(to)::value; ++b)
            copy_async_16(target + b * kBlockBytes, source + b * 128 + piece * 16, ok);
        }
      };
      // Each thread arrives when its copies have landed, and with the left half those that wrote states. The
      // consumers' fence makes the copies visible to the tensor cores: here it would wait for those that are under way.
      copy(std::integral_constant<int, 0>{}, std::integral_constant<int, kLeftBlocks>{});
      if (piece == 0) mbarrier_arrive(&s.full[stage][0]);
      copy_async_arrive(&s.full[stage][0]);
      mbarrier_wait(&s.empty[stage][kRight], parity);
      copy(std::integral_constant<int, kLeftBlocks>{}, std::integral_constant<int, kBlocks>{});
      copy_async_arrive(&s.full[stage][kLeftBlocks]);
      if (ahead != nullptr) prefetch_bytes(ahead, 2 * kWidth);
    }
  }
}

/// By one warp, page by page through the copy engine. `map` has [pages, rows of a page, 576] in boxes of 64 columns.
__device__ inline void produce_pages(const Dense& p, const Schedule& schedule, Shared& s, unsigned char* stages,
                                     int part, int lane0, const CUtensorMap& map) {
  const int lane = threadIdx.x % 32, page_size = p.cache.page_size;
  const int box_rows = min(page_size, kKeys);
  const bool two_pages = page_size < kKeys;  // of 32 keys
  const uint64_t policy = evict_first_policy();
  const uint32_t stage_address = shared_address(stages);
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
    constexpr int kTilesAtOnce = 32;
    for (int base = walk.first_tile; base < walk.last_tile; base += kTilesAtOnce) {
      const int mine = base + lane;
      const int own_first = mine < walk.last_tile ? page_at(mine * kKeys) : -1;
      const int own_second = two_pages && mine < walk.last_tile ? page_at(mine * kKeys + box_rows) : -1;
      const int here = min(kTilesAtOnce, walk.last_tile - base);
      for (int i = 0; i < here; ++i, ++count) {
        const int first = __shfl_sync(0xffffffffu, own_first, i), second = __shfl_sync(0xffffffffu, own_second, i);
        const int key0 = (base + i) * kKeys, stage = count % kStages;
        const int page_row =
            two_pages ? 0 : static_cast<int>(static_cast<uint32_t>(key0) % static_cast<uint32_t>(page_size));
        const uint32_t parity = (count / kStages & 1) ^ 1;
        auto copy_blocks = [&](int from, int to) {
#pragma unroll 1
          for (int b = from; b < to; ++b) {
            const uint32_t target = stage_address + stage * kStageBytes + b * kBlockBytes;
            mbarrier_arrive_expecting(&s.full[stage][b], kBlockBytes);
            copy_page_box(target, map, &s.full[stage][b], b * kMapColumns, page_row, first, policy);
            if (two_pages)
              copy_page_box(target + box_rows * 128, map, &s.full[stage][b], b * kMapColumns, 0, second, policy);
          }
        };
        mbarrier_wait(&s.empty[stage][kLeft], parity);
        {
          const int key = 2 * lane;  // of the tile; a lane writes the states of two
          const bool there = (two_pages && key >= box_rows ? second : first) >= 0;
          const uint32_t low = there && key0 + key < most ? kPresent : kAbsent,
                         high = there && key0 + key + 1 < most ? kPresent : kAbsent;
          *reinterpret_cast<uint16_t*>(&s.state[stage][key]) = static_cast<uint16_t>(low | high << 8);
        }
        if (lane == 0) copy_blocks(0, kLeftBlocks);
        else mbarrier_arrive(&s.full[stage][0]);  // for its states
        mbarrier_wait(&s.empty[stage][kRight], parity);
        if (lane == 0) copy_blocks(kLeftBlocks, kBlocks);
        __syncwarp();
      }
    }
  }
}

// ---- consumers --------------------------------------------------------------------------------------------------

/// Overwrites the values of a tile's keys from `most` on by zeros, and takes NaN and infinities from those that only
/// some lanes see. By a warpgroup that has scored the tile; the caller's barrier follows.
__device__ inline void mend_tile(unsigned char* tile, int first_key, int least, int most, int tid) {
  constexpr int kRowsAtOnce = 128 / 8;
  const int piece = tid % 8;
#pragma unroll 1
  for (int r = tid / 8; r < kKeys; r += kRowsAtOnce) {
    const int key = first_key + r;
    if (key < least) continue;
#pragma unroll 1
    for (int b = 0; b < kLatent / 64; ++b) {
      auto* at = reinterpret_cast<uint4*>(tile + b * kBlockBytes + r * 128 + (piece ^ (r % 8)) * 16);
      uint4 v{0, 0, 0, 0};
      if (key < most) {
        v = *at;
        if (!drop_non_finite(v)) continue;
      }
      *at = v;
    }
  }
  fence_async_shared();
}

/// Both warpgroups run this; `self` is 0 or 1. What they share is one piece of code: instructions come from the L2 on
/// each launch, and both loops together should stay in the SM's nearest instruction cache.
template <bool kPages, class Problem>
__device__ void consume(const Problem& p, const Schedule& schedule, Shared& s, unsigned char* query,
                        unsigned char* stages, unsigned char* weights, int part, int lane_block) {
  const int self = __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x) / 128, 0);
  const int column0 = self * kHalf;
  const int tid = threadIdx.x % 128, warp = tid / 32, lane = tid % 32, quad = lane % 4;
  const int row = warp * 16 + lane / 4;  // and row + 8
  const int lane0 = lane_block * kLanes;
  const float scale_log2 = p.softmax_scale * kLog2E;
  const uint32_t stage_address = shared_address(stages);
  const uint64_t query_operand = k_major(shared_address(query));
  const bool slot_of_group = schedule.num_slots == schedule.num_groups;
  int count = 0;  // tiles consumed
  constexpr uint32_t kSumsBit = 2;
  constexpr uint32_t kTogetherBit = 4;
  uint32_t parity = 0;  // of the other's weights: bit 0, of the sums: kSumsBit, and of the consumers' meeting
  auto meet = [&] {  // as bar.sync of the consumers would, but racecheck follows it whatever other barriers were used
    mbarrier_arrive(&s.together);
    mbarrier_wait(&s.together, parity / kTogetherBit & 1);
    parity ^= kTogetherBit;
  };
  int4 cut = {-1, part, 1, 0};
  Walk walk(s);
  while (walk.next(p, schedule, s, part)) {
    typename Problem::Place g;
    p.place(g, walk.group - 1);
    const int lanes = max(0, min(kLanes, static_cast<int>(g.num_rows) * p.num_heads - lane0));

    // Q: the latent part to shared memory by both warpgroups, the rope part to registers of each. Code is dear here: it
    // runs once, and comes from the L2.
    meet();  // nobody still reads the last group's
    if (threadIdx.x < kLanes) {
      const int l = threadIdx.x, of_row = (lane0 + l) / p.num_heads, head = lane0 + l - of_row * p.num_heads;
      const bool real = l < lanes;
      s.row_of_lane[l] = of_row;
      s.query_at[l] = real ? (g.first_row + of_row) * p.q_row_stride + head * p.q_head_stride : -1;
      s.bounds[l] = real ? static_cast<int>(p.keys_of(g, of_row)) : 0;
    }
    meet();
    uint32_t rope[kRope / 16][4];
    {
      // A thread copies 16-byte piece `piece` of every fourth lane; all loads are under way before the first is stored.
      constexpr int kPieces = kLatent / 8, kLanesAtOnce = kConsumerThreads / kPieces, kLoads = kLanes / kLanesAtOnce;
      const int piece = threadIdx.x % kPieces, first = threadIdx.x / kPieces;
      uint4 v[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int64_t at = s.query_at[first + i * kLanesAtOnce];
        v[i] = uint4{0, 0, 0, 0};
        if (at >= 0) v[i] = *reinterpret_cast<const uint4*>(p.q + at + 8 * piece);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t at = s.query_at[row + 8 * half];
        const uint16_t* q = p.q + at + kLatent + 2 * quad;
#pragma unroll
        for (int k = 0; k < kRope / 16; ++k) {
          rope[k][half] = at >= 0 ? *reinterpret_cast<const uint32_t*>(q + 16 * k) : 0;
          rope[k][half + 2] = at >= 0 ? *reinterpret_cast<const uint32_t*>(q + 16 * k + 8) : 0;
        }
      }
      if (s.piece == 0 && walk.group < schedule.num_groups) {  // the next group's come from the L2
        constexpr int kLines = 2 * kWidth / 128;
#pragma unroll 1
        for (int i = threadIdx.x; i < lanes * kLines; i += kConsumerThreads)
          prefetch_line(p.q + s.query_at[i / kLines] + g.num_rows * p.q_row_stride + i % kLines * 64);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int l = first + i * kLanesAtOnce;
        *reinterpret_cast<uint4*>(query + piece / 8 * kBlockBytes + l * 128 + ((piece % 8) ^ (l % 8)) * 16) = v[i];
      }
    }
    fence_async_shared();
    meet();
    const int least = s.bounds[0];

    float o[kHalf / 2];
#pragma unroll
    for (float& x : o) x = 0.0f;
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
    uint32_t own[kKeys / 16][4];  // P of the own tile as A operand
    float score[kKeys / 2];
    float factor[2], own_sum[2];  // of softmax()

    auto wait_full = [&](int n, int b) {  // a block of the n-th tile, or what a row-by-row loader announces there
      mbarrier_wait(&s.full[n % kStages][b], n / kStages & 1);
      if constexpr (!kPages) fence_async_shared();
    };
    // A half of what the other warpgroup has scored. It has seen it arrive before it announced the weights, so there is
    // nothing to wait for but one's own fence, which values by cp.async need.
    auto see_half = [&](int n, int half) {
      if constexpr (!kPages) wait_full(n, half == kLeft ? 0 : kLeftBlocks);
    };
    auto announce_weights = [&] { mbarrier_arrive(&s.weights[self]); };
    auto wait_weights = [&] {  // of the other warpgroup
      mbarrier_wait(&s.weights[1 - self], parity & 1);
      parity ^= 1;
    };
    auto release = [&](int n, int half) {
      if (lane < kReleasingLanes) mbarrier_arrive(&s.empty[n % kStages][half]);
    };
    // Scores of a tile, a round of four steps for each 64 columns. The product of the turn before may still be under
    // way; behind the first round it is done, and `done` may release what it read. Not later: what is released is what
    // the next tile's loads wait for, and this tile's further blocks may be late themselves.
    auto score_tile = [&](auto wg, int n, int tile, auto done) {
      if constexpr (!kPages) wait_full(n, 0);
      const uint64_t keys = k_major(stage_address + n % kStages * kStageBytes);
      auto round = [&](int b, bool first) {
        if (kPages || b == kLeftBlocks) wait_full(n, b);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const uint64_t ahead = b * descriptor_step(kBlockBytes) + descriptor_step(k * 32);
          wgmma_m64n64_ss(score, query_operand + ahead, keys + ahead, !first || k != 0);
        }
      };
      round(0, true);
      wgmma_commit();
      wgmma_wait<1>();
      done();
#pragma unroll 1
      for (int b = 1; b < kLatent / 64; ++b) round(b, false);
      if constexpr (kPages) wait_full(n, kLatent / 64);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kRope / 16; ++k)
        wgmma_m64n64_rs(score, rope[k], keys + descriptor_step(kLatent / 64 * kBlockBytes + k * 32), true);
      wgmma_commit();
      wgmma_wait<0>();
      hold_registers(score);
      // Whether every lane sees all keys of the tile. The others, at the end of a request, are mended.
      if ((tile + 1) * kKeys > least && (kPages || least < s.bounds[lanes - 1])) {
        named_barrier_sync(2 + wg, 128);  // every warp has scored it
        mend_tile(stages + n % kStages * kStageBytes, tile * kKeys, least, s.bounds[lanes - 1], tid);
        named_barrier_sync(2 + wg, 128);
      }
    };
    // Most tiles need no masks.
    auto needs_masks = [&](int n, int tile) {
      const uint4 states = *reinterpret_cast<const uint4*>(&s.state[n % kStages][quad * 16]);
      constexpr uint32_t kAllPresent = 0x01010101u * kPresent;
      return !__all_sync(0xffffffffu, (tile + 1) * kKeys <= least && states.x == kAllPresent &&
                                          states.y == kAllPresent && states.z == kAllPresent &&
                                          states.w == kAllPresent);
    };
    auto mask = [&](int n, int tile) {
      const int bound0 = s.bounds[row] - tile * kKeys, bound1 = s.bounds[row + 8] - tile * kKeys;
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
        const uint32_t two = *reinterpret_cast<const uint16_t*>(&s.state[n % kStages][8 * j + 2 * quad]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t state = two >> (8 * i) & 0xffu;
          const int k = 8 * j + 2 * quad + i;
          if (state == kAbsent || k >= bound0) score[4 * j + i] = -INFINITY;
          if (state == kAbsent || k >= bound1) score[4 * j + 2 + i] = -INFINITY;
        }
      }
    };
    // Weights of the own tile over the maxima `before`: to `own` and to shared memory; new maxima to `top`, the scale
    // of what was summed before to `factor`, the sums of the weights to `own_sum`: before they are rounded, since an
    // LSE of rounded ones would be off by 2^-9 over few keys (FlashMLA's own tests allow 2^-13).
    auto softmax = [&](auto wg, const float(&before)[2]) {
      own_sum[0] = own_sum[1] = 0.0f;
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
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float w0 = exp2_fast(fmaf(score[4 * j + 2 * half], scale_log2, -shift[half]));
          const float w1 = exp2_fast(fmaf(score[4 * j + 2 * half + 1], scale_log2, -shift[half]));
          uint32_t packed;
          asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(w1), "f"(w0));
          own_sum[half] += w0 + w1;
          own[j / 2][half + 2 * (j % 2)] = packed;
        }
        // P to shared memory for the other warpgroup: row r, 16-byte piece j, this thread's four bytes of it.
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int r = row + 8 * half;
          *reinterpret_cast<uint32_t*>(weights + wg * kWeightBytes + r * 128 + (j ^ (r % 8)) * 16 + quad * 4) =
              own[j / 2][half + 2 * (j % 2)];
        }
      if (quad == 0) {
        float* const maxima = wg == 0 ? s.max0 : s.max1;
        float* const scales = wg == 0 ? s.scale0 : s.scale1;
        maxima[row] = top[0], maxima[row + 8] = top[1];
        scales[row] = factor[0], scales[row + 8] = factor[1];
      }
      fence_async_shared();
    };
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
    auto values_of = [&](auto wg, int n) {
      return mn_major(stage_address + n % kStages * kStageBytes + wg * kLeftBlocks * kBlockBytes, kBlockBytes);
    };
    auto multiply_own = [&](auto wg, int n) {
      const uint64_t values = values_of(wg, n);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k) wgmma_m64n256_rs_mn(o, own[k], values + descriptor_step(k * 2048), true);
      wgmma_commit();
    };
    auto multiply_other = [&](auto wg, int n) {
      const uint64_t values = values_of(wg, n),
                     weight_operand = k_major(shared_address(weights + (1 - wg) * kWeightBytes));
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kKeys / 16; ++k)
        wgmma_m64n256_ss_mn(o, weight_operand + descriptor_step(k * 32), values + descriptor_step(k * 2048), true);
      wgmma_commit();
    };

    const int tiles = walk.last_tile - walk.first_tile;
    // In each turn the scores of the own tile come first: of warpgroup 0 behind the last product of the turn before.
    constexpr std::integral_constant<int, 0> kFirst;
    constexpr std::integral_constant<int, 1> kSecond;
    if (self == 0) {
#pragma unroll 1
      for (int pair = 0;; pair += 2) {
        const int even = count + pair, odd = even + 1, tile = walk.first_tile + pair;
        score_tile(kFirst, even, tile, [&] {
          if (pair > 0) release(even - 1, kLeft);
        });
        const float before[2] = {top[0], top[1]};
        if (needs_masks(even, tile)) mask(even, tile);
        softmax(kFirst, before);
        announce_weights();
        sum[0] = sum[0] * factor[0] + own_sum[0], sum[1] = sum[1] * factor[1] + own_sum[1];
        rescale(factor[0], factor[1]);
        multiply_own(kFirst, even);
        wgmma_wait<0>();
        hold_registers(o);
        hold_registers(own);
        release(even, kLeft);
        if (pair + 1 >= tiles) break;
        see_half(odd, kLeft);
        wait_weights();  // of the odd tile
        const float scale1[2] = {s.scale1[row], s.scale1[row + 8]};
        top[0] = s.max1[row], top[1] = s.max1[row + 8];
        sum[0] *= scale1[0], sum[1] *= scale1[1];
        rescale(scale1[0], scale1[1]);
        multiply_other(kFirst, odd);  // still under way when the next scores begin
        if (pair + 2 >= tiles) {
          wgmma_wait<0>();
          release(odd, kLeft);
          break;
        }
      }
    } else {
#pragma unroll 1
      for (int pair = 0; pair < tiles; pair += 2) {
        const int even = count + pair, odd = even + 1, tile = walk.first_tile + pair;
        const bool has_odd = pair + 1 < tiles;
        if (has_odd) score_tile(kSecond, odd, tile + 1, [] {});
        wait_weights();  // of the even tile
        const float before[2] = {s.max0[row], s.max0[row + 8]};
        const float scale0[2] = {s.scale0[row], s.scale0[row + 8]};
        sum[0] *= scale0[0], sum[1] *= scale0[1];
        see_half(even, kRight);
        rescale(scale0[0], scale0[1]);
        if (has_odd && needs_masks(odd, tile + 1)) mask(odd, tile + 1);
        multiply_other(kSecond, even);
        if (!has_odd) {
          wgmma_wait<0>();
          release(even, kRight);
          break;
        }
        softmax(kSecond, before);  // while the tensor cores multiply
        announce_weights();
        sum[0] = sum[0] * factor[0] + own_sum[0], sum[1] = sum[1] * factor[1] + own_sum[1];
        wgmma_wait<0>();
        hold_registers(o);
        release(even, kRight);
        rescale(factor[0], factor[1]);
        multiply_own(kSecond, odd);
        wgmma_wait<0>();
        hold_registers(o);
        hold_registers(own);
        release(odd, kRight);
      }
    }
    wgmma_wait<0>();
    hold_registers(o);
    hold_registers(own);
    count += tiles;

    // ---- results ----
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 1);
      sum[half] += __shfl_xor_sync(0xffffffffu, sum[half], 2);
      if (quad == 0) (self == 0 ? s.sum0 : s.sum1)[row + 8 * half] = sum[half];
    }
    mbarrier_arrive(&s.sums);
    mbarrier_wait(&s.sums, parity / kSumsBit & 1);
    parity ^= kSumsBit;
    p.place(g, walk.group - 1);  // again, rather than kept through the loop
    const bool complete = walk.first_tile == 0 && walk.last_tile == walk.tiles;
    int64_t at[2];  // in elements of the output or of the partial results
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int l = row + 8 * half;
      const float total = s.sum0[l] + s.sum1[l];
      const bool empty = total == 0.0f;
      inverse[half] = empty ? 0.0f : __fdividef(1.0f, total);
      const int64_t out_row = g.first_row + s.row_of_lane[l];
      const int head = lane0 + l - s.row_of_lane[l] * p.num_heads;
      const int64_t index =
          ((2 * int64_t{part} + (walk.first_tile == 0)) * schedule.lane_blocks + lane_block) * kLanes + l;
      at[half] = (complete ? out_row * p.out_row_stride + head * p.out_head_stride : index * kLatent) + column0;
      if (self == 0 && quad == 0 && l < lanes) {
        const float lse = empty ? -INFINITY : (top[half] + __log2f(total)) * kLn2;
        if (!complete) p.partial_lse[index] = lse;
        else if (p.lse != nullptr) p.lse[out_row * p.lse_row_stride + head] = lse;
      }
    }
#pragma unroll
    for (int i = 0; i < kHalf / 2; ++i) o[i] *= inverse[i / 2 % 2];
    // A thread has two neighbouring columns of every eight: the four threads of a row exchange them and store 16 bytes
    // each, 64 of a row at once. By 4 bytes a thread 64 lanes took 12,500 cycles, partial results by 8 bytes 5,400.
    const bool real[2] = {row < lanes, row + 8 < lanes};
    const bool second = quad % 2 != 0, upper = quad / 2 != 0;
    const bool any = 16 * warp < lanes;  // of this warp's lanes
    if (any && complete && p.out_dtype == DType::kBf16) {
      auto* const out = static_cast<uint16_t*>(p.out);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint16_t* const to = out + at[half] + 8 * quad;
#pragma unroll
        for (int j = 0; j < kHalf / 8; j += 4) {
          uint32_t w[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) w[i] = round_to_bf16x2(o[4 * (j + i) + 2 * half], o[4 * (j + i) + 2 * half + 1]);
#pragma unroll
          for (int i = 0; i < 4; i += 2) {
            const uint32_t got = __shfl_xor_sync(0xffffffffu, second ? w[i] : w[i + 1], 1);
            if (second) w[i] = got;
            else w[i + 1] = got;
          }
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? w[i] : w[i + 2], 2);
            if (upper) w[i] = got;
            else w[i + 2] = got;
          }
          if (real[half]) *reinterpret_cast<uint4*>(to + 8 * j) = {w[0], w[1], w[2], w[3]};
        }
      }
    } else if (any) {
      float* const out = complete ? static_cast<float*>(p.out) : p.partial;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* const to = out + at[half] + 8 * second + 4 * upper;
#pragma unroll
        for (int j = 0; j < kHalf / 8; j += 2) {
          float2 low{o[4 * j + 2 * half], o[4 * j + 2 * half + 1]},
              high{o[4 * j + 4 + 2 * half], o[4 * j + 4 + 2 * half + 1]};
          const float2 got{__shfl_xor_sync(0xffffffffu, second ? low.x : high.x, 1),
                           __shfl_xor_sync(0xffffffffu, second ? low.y : high.y, 1)};
          if (second) low = got;
          else high = got;
          if (real[half]) *reinterpret_cast<float4*>(to + 8 * j) = {low.x, low.y, high.x, high.y};
        }
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

// Grid: lane blocks x parts, lane blocks fastest, so that blocks that share keys run side by side.
template <class Problem, bool kPages>
__global__ void __launch_bounds__(kThreads, 1)
    absorbed_kernel(const __grid_constant__ Problem p, const Schedule schedule,
                    const __grid_constant__ CUtensorMap map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(kAlignment) unsigned char shared[];
  unsigned char* query = shared;
  unsigned char* stages = query + kQueryBytes;
  unsigned char* weights = stages + kStages * kStageBytes;
  Shared& s = *reinterpret_cast<Shared*>(shared + kTileBytes);
  const int lane_block = blockIdx.x % schedule.lane_blocks, part = blockIdx.x / schedule.lane_blocks;
  if (threadIdx.x == 0) {
    if constexpr (kPages) prefetch_map(map);
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(&s.full[i][0], kPages ? 32 : kProducerThreads + kProducerThreads / 8);
      for (int b = 1; b < kBlocks; ++b) mbarrier_init(&s.full[i][b], kPages ? 1 : kProducerThreads);
      for (int half = 0; half < 2; ++half)
        mbarrier_init(&s.empty[i][half], kConsumerThreads / 2 / 32 * kReleasingLanes);
    }
    for (uint64_t& b : s.weights) mbarrier_init(&b, kConsumerThreads / 2);
    mbarrier_init(&s.sums, kConsumerThreads);
    mbarrier_init(&s.together, kConsumerThreads);
    fence_mbarrier_init();
    s.first_group = schedule.num_groups;
    s.end_group = 0;
    s.first_start = 0;
    s.piece = 0;
  }
  wait_for_stream();
  // The merge starts when this block ends: announced here, its blocks waited on the SMs that have no part, and one
  // request of 16 heads took 14.1 us where it takes 12.9, with 32,768 keys 27.5 for 25.1.
  ask_early(schedule);
  find_part(p, schedule, part, s, reinterpret_cast<int*>(weights));
  if (threadIdx.x < kConsumerThreads) {
    register_increase<kConsumerRegisters<Problem, kPages>>();
    consume<kPages>(p, schedule, s, query, stages, weights, part, lane_block);
  } else {
    register_decrease<kProducerRegisters<Problem, kPages>>();
    if constexpr (kPages) {
      if (threadIdx.x < kConsumerThreads + 32) produce_pages(p, schedule, s, stages, part, lane_block * kLanes, map);
    } else {
      produce_rows(p, schedule, s, stages, part, lane_block * kLanes);
    }
  }
#else
  __trap();  // the set refuses: see set.cpp
#endif
}

// ---- merge ------------------------------------------------------------------------------------------------------

constexpr int kCombineThreads = 512, kCombineWarps = kCombineThreads / 32;
constexpr int kColumnsAtOnce = 128;                    // 16 bytes of each thread of a warp
constexpr int kHalves = kLatent / kColumnsAtOnce / 2;  // of a lane's columns; a warp sums one of them
constexpr int kPartsAtOnce = 4;                        // of a warp, their loads under way together
constexpr int kShares = 5;                             // an item is shared by 1, 2, 4, 8 or 16 warps
struct CombineShared {
  int4 cut;                                          // of the group that this block is at,
  uint32_t first_block;                              // and which of all blocks' turns is that group's first
  alignas(16) uint32_t before_warp[kMaxParts / 32];  // read by 16 bytes, which must not take first_block along
  float4 sums[kCombineWarps][2][32];
};

__device__ inline float larger_or_nan(float a, float b) { return b > a || isnan(b) ? b : a; }

/// Merges the parts of the groups that were cut, in the order of their keys. An item is half of the columns of a lane;
/// as many warps share one as leave each kPartsAtOnce parts at most, or, where that asks for more blocks than are on
/// the chip at once, at least. Each group has its own number: with that of the longest for all, 8 requests of mixed
/// lengths and 128 heads took 63.4 us, 56.0 with a warp an item. It depends on the groups' lengths alone, not on the
/// number of blocks: sums of a call do not change with what its buffers have room for. One way for all of them:
/// instructions that run once a call cost 8 cycles each, and of three ways with all loads unrolled this kernel had
/// 3,280, a thousand of them on the way of one call.
template <class Problem>
__global__ void __launch_bounds__(kCombineThreads, 2)
    combine_kernel(const __grid_constant__ Problem p, const Schedule schedule) {
  __shared__ CombineShared s;
  const int tid = threadIdx.x, warp = tid / 32, in_warp = tid % 32;
  wait_for_stream();
  let_next_start();
  static_assert(kMaxParts <= kCombineThreads && (1 << (kShares - 1)) == kCombineWarps);
  const uint32_t lanes = static_cast<uint32_t>(p.lanes_per_group());
  // Turns of a block for each slot's group, so many with most warps an item, so many with least: 16 bits each are
  // enough for all of them, since cuts are no more than parts, and 64 lanes of all parts fit the chip.
  int4 own = {-1, 0, 1, 0};
  if (tid < schedule.num_slots) own = schedule.cuts[tid];
  // Nobody writes the slot of a group without rows.
  typename Problem::Place own_place;
  const bool there = schedule.num_slots == schedule.num_groups ? own.x == tid && p.place(own_place, tid) : own.x >= 0;
  const uint32_t parts = there ? static_cast<uint32_t>(own.z) : 1;
  const int least_bits = min(max(29 - __clz(parts), 0), kShares - 1);  // floor(log2(parts / kPartsAtOnce))
  const int most_bits = min(least_bits + (kPartsAtOnce << least_bits < parts), kShares - 1);
  auto turns = [&](int bits) { return ((lanes * kHalves << bits) + kCombineWarps - 1) / kCombineWarps; };
  const uint32_t own_turns = parts > 1 ? turns(most_bits) << 16 | turns(least_bits) : 0;
  uint32_t end = own_turns, total = 0;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, end, offset);
    if (in_warp >= offset) end += other;
  }
  if (in_warp == 31 && warp < kMaxParts / 32) s.before_warp[warp] = end;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kMaxParts / 32; ++w) {
    const uint32_t of_warp = s.before_warp[w];
    if (w < warp) end += of_warp;
    total += of_warp;
  }
  // As many blocks as the chip holds: of the grid itself there may be fewer.
  const bool most = total >> 16 <= 2 * static_cast<uint32_t>(schedule.num_parts * schedule.lane_blocks);
  const int half_word = most ? 16 : 0;
  const uint32_t own_end = end >> half_word & 0xffffu, own_begin = own_end - (own_turns >> half_word & 0xffffu);
  total = total >> half_word & 0xffffu;
#pragma unroll 1
  for (uint32_t turn = blockIdx.x; turn < total; turn += gridDim.x) {
    if (turn >= own_begin && turn < own_end) {
      s.cut = {own.x, own.y, own.z, most ? most_bits : least_bits};
      s.first_block = own_begin;
    }
    __syncthreads();
    const int4 cut = s.cut;
    const int bits = cut.w, shared_by = 1 << bits, first = warp & (shared_by - 1), first_warp = warp - first;
    // The last item more than once rather than a branch.
    const uint32_t item =
        min(((turn - s.first_block) * kCombineWarps + warp) >> bits, static_cast<uint32_t>(lanes * kHalves - 1));
    const uint32_t lane = item / kHalves, half = item % kHalves;
    // A few thousand partial results: 32 bits.
    auto index_of = [&](int i) {
      return static_cast<uint32_t>(((2 * (cut.y + i) + (i == 0)) * schedule.lane_blocks + lane / kLanes) * kLanes +
                                   lane % kLanes);
    };
    auto weight_of = [](float l, float top) { return l == -INFINITY ? 0.0f : __expf(l - top); };  // top may be, too
    float4 o[2] = {};
    float top = -INFINITY, sum = 0.0f;
#pragma unroll 1
    for (int i = first; i == first || i < cut.z; i += kPartsAtOnce * shared_by) {
      float4 x[kPartsAtOnce][2];
      float of_part[kPartsAtOnce];
#pragma unroll
      for (int k = 0; k < kPartsAtOnce; ++k) {
        of_part[k] = -INFINITY;
        if (i + k * shared_by >= cut.z) continue;
        const uint32_t index = index_of(i + k * shared_by);
        const auto* row = reinterpret_cast<const float4*>(p.partial + index * kLatent) + half * 64 + in_warp;
        x[k][0] = row[0], x[k][1] = row[32];
        of_part[k] = p.partial_lse[index];
      }
      if (i == first) {  // the sum of all weights, while they are under way
#pragma unroll 1
        for (int n = in_warp; n < cut.z; n += 4 * 32) {  // four at once: each alone would wait for the L2
          float l[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) l[k] = n + 32 * k < cut.z ? p.partial_lse[index_of(n + 32 * k)] : -INFINITY;
#pragma unroll
          for (int k = 0; k < 4; ++k) top = larger_or_nan(top, l[k]);
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
          top = larger_or_nan(top, __shfl_xor_sync(0xffffffffu, top, offset));
#pragma unroll 1
        for (int n = in_warp; n < cut.z; n += 32) sum += weight_of(p.partial_lse[index_of(n)], top);
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
      }
#pragma unroll
      for (int k = 0; k < kPartsAtOnce; ++k) {
        if (of_part[k] == -INFINITY) continue;  // an empty piece: not read, whatever it holds
        const float w = weight_of(of_part[k], top);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          o[c].x = fmaf(w, x[k][c].x, o[c].x), o[c].y = fmaf(w, x[k][c].y, o[c].y);
          o[c].z = fmaf(w, x[k][c].z, o[c].z), o[c].w = fmaf(w, x[k][c].w, o[c].w);
        }
      }
    }
    // Warps in order; where several share an item, the first two finish 128 columns each.
    s.sums[warp][0][in_warp] = o[0], s.sums[warp][1][in_warp] = o[1];
    if (shared_by > 1) __syncthreads();  // else each thread reads its own
    const float inverse = sum == 0.0f ? 0.0f : __frcp_rn(sum);
    typename Problem::Place g;
    p.place(g, cut.x);
    const int of_row = static_cast<int>(lane) / p.num_heads, head = static_cast<int>(lane) - of_row * p.num_heads;
    const int64_t row = g.first_row + of_row;
#pragma unroll 1
    for (int c = first; c < 2; c += shared_by) {
      float4 total = s.sums[first_warp][c][in_warp];
#pragma unroll 1
      for (int w = 1; w < shared_by; ++w) {
        const float4 v = s.sums[first_warp + w][c][in_warp];
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
      }
      total.x *= inverse, total.y *= inverse, total.z *= inverse, total.w *= inverse;
      const int64_t at = row * p.out_row_stride + head * p.out_head_stride +
                         (2 * static_cast<int>(half) + c) * kColumnsAtOnce + 4 * in_warp;
      if (p.out_dtype == DType::kBf16)
        *reinterpret_cast<uint2*>(static_cast<uint16_t*>(p.out) + at) = {pack_bf16(total.x, total.y),
                                                                         pack_bf16(total.z, total.w)};
      else *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = total;
    }
    if (p.lse != nullptr && half == 0 && first == 0 && in_warp == 0)
      p.lse[row * p.lse_row_stride + head] = sum == 0.0f ? -INFINITY : top + __logf(sum);
    __syncthreads();  // s.cut and the sums have been read
  }
}

}  // namespace sm90
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
