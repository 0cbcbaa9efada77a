// How a call of absorbed attention is cut into equal parts on the device, from lengths that only the device has.
//
// The work lies on a line: each group (a request; a row when sparse) takes kFixedTiles + its tiles of kKeys keys. The
// line is cut into num_parts equal parts for each block of lanes; a block of threads walks the pieces of its part. A
// group that a cut goes through leaves partial results, at most two a part, which combine_kernel merges in order. One
// long request among short ones is shared out like many; a batch of one uses the whole chip.
#pragma once

#include <cstdint>

#include "cuda/common/absorbed_problem.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace mma {

using namespace absorbed;

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kKeys = 64;         // of a tile
constexpr int kFixedTiles = 2;    // a group's price beside its tiles: Q, the first tile's latency, the results
constexpr int kWholeGain = 8;     // parts may be longer by an eighth so that groups stay whole
constexpr int kMinPartTiles = 2;  // a part below this costs more to merge than it saves

struct Schedule {
  int* cut_group;      // [num_parts], for combine_kernel: the group that begins in a part and goes on behind it, or -1
  int* cut_parts;      // [num_parts]: over how many parts it goes
  float* partial_max;  // largest scaled scores of partial results, beside partial_lse
  int num_parts;       // of each lane block
  int lane_blocks;
  int num_groups;
  int page_shift;  // where the size of a page is a power of two, of which; else -1

  __device__ uint32_t page_of(const Common& p, uint32_t position) const {
    return page_shift >= 0 ? position >> page_shift : position / static_cast<uint32_t>(p.cache.page_size);
  }
};

/// Dense with cu_q_lens: how many rows a request has is known on the device alone, so a group is a block of lanes of a
/// request. Request r has the ids from floor(cu_q_lens[r] * heads / block) + r on, which is always enough (as in
/// prefill_problem.cuh), so a search finds the request of an id; ids that it does not need have no tiles. Rows beyond
/// the last request's are one more request, without keys.
struct Ragged : Dense {
  int block;  // lanes

  struct Place : Dense::Place {
    int first_lane;
  };
  __device__ int64_t begin_of(int64_t request) const {
    return max(int64_t{0}, min(static_cast<int64_t>(rows.cu_q_lens[request]), num_rows));
  }
  __device__ int64_t first_id(int64_t request) const { return begin_of(request) * num_heads / block + request; }
  __device__ bool place(Place& g, int64_t id) const {
    int64_t low = 0, high = rows.num_requests + 1;  // the last request whose first id is at or before this one
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (first_id(middle) <= id) low = middle;
      else high = middle;
    }
    g.request = low;
    g.first_row = begin_of(low);
    g.num_rows = (low < rows.num_requests ? begin_of(low + 1) : num_rows) - g.first_row;
    g.list = low < rows.num_requests ? page_list(pages, low) : PageList{nullptr, 0};
    g.first_lane = static_cast<int>(id - first_id(low)) * block;
    return g.first_lane < g.num_rows * num_heads;
  }
  __device__ int64_t keys_of(const Place& g, int64_t row) const {
    return g.request < rows.num_requests ? Dense::keys_of(g, row) : 0;
  }
};

/// The first lane of a group that a block of threads serves, where the group's lanes are cut into blocks, and the last
/// row whose keys the group is cut into tiles for.
template <class Problem, class Place>
__device__ int first_lane_of(const Problem&, const Place&, int lane_block, int lanes) {
  return lane_block * lanes;
}
__device__ inline int first_lane_of(const Ragged&, const Ragged::Place& g, int, int) { return g.first_lane; }
template <class Problem, class Place>
__device__ int64_t last_row_of(const Problem&, const Place& g) {
  return g.num_rows - 1;
}
__device__ inline int64_t last_row_of(const Ragged& p, const Ragged::Place& g) {
  return (min(static_cast<int64_t>(g.first_lane + p.block), g.num_rows * p.num_heads) - 1) / p.num_heads;
}

struct Line {
  int first_group, first_start, payload, total;
  int cut, cut_parts;  // what goes to Schedule in the end; thread 0's
  int partial_sum[kWarps], partial_most[kWarps];
};

// Lengths are int32, so tiles, and the line of a call that fits a GPU's memory, are 32-bit numbers.
template <class Problem>
__device__ int group_tiles(const Problem& p, int group) {
  typename Problem::Place g;
  if (!p.place(g, group)) return 0;
  const int n = static_cast<int>(p.keys_of(g, last_row_of(p, g)));
  return n <= 0 ? 1 : (n + kKeys - 1) / kKeys;  // a group without keys takes a tile in which nothing is seen
}

/// Where this part begins. Each thread sums a run of groups; a scan over threads gives each run's start.
template <class Problem>
__device__ void find_part(const Problem& p, const Schedule& schedule, int part, Line& s) {
  const int tid = static_cast<int>(threadIdx.x);
  if (tid == 0) {
    s.first_group = schedule.num_groups;
    s.first_start = 0;
  }
  const int per_thread = (schedule.num_groups + kThreads - 1) / kThreads;
  const int begin = min(tid * per_thread, schedule.num_groups), end = min(begin + per_thread, schedule.num_groups);
  int own = 0, most = 0;
  for (int g = begin; g < end; ++g) {
    const int cost = group_tiles(p, g) + kFixedTiles;
    own += cost;
    most = max(most, cost);
  }
  int inclusive = own;
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (tid % 32 >= offset) inclusive += other;
  }
  for (int offset = 16; offset > 0; offset /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, offset));
  if (tid % 32 == 31) {
    s.partial_sum[tid / 32] = inclusive;
    s.partial_most[tid / 32] = most;
  }
  __syncthreads();
  int before = 0, total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < tid / 32) before += s.partial_sum[w];
    total += s.partial_sum[w];
    most = max(most, s.partial_most[w]);
  }
  int start = before + inclusive - own;
  int payload = max((total + schedule.num_parts - 1) / schedule.num_parts, kMinPartTiles);
  // Groups that are all alike are not cut where whole ones make parts that are little longer: a cut costs a second
  // query, two partial results and their merge.
  const int whole = (payload + most - 1) / most * most;
  if (total == schedule.num_groups * most && whole - payload <= payload / kWholeGain) payload = whole;
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

/// The pieces of work of a part, in order.
struct Walk {
  int group, start;  // the next group and its place on the line
  int first_tile, last_tile, tiles;

  __device__ explicit Walk(const Line& s) : group(s.first_group), start(s.first_start) {}
  /// Advances to the next piece with tiles, of group `group - 1`; false at the end.
  template <class Problem>
  __device__ bool next(const Problem& p, const Schedule& schedule, const Line& s, int part) {
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

}  // namespace mma
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
