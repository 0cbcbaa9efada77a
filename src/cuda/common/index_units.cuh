// How index logits are cut into work, the same for every tensor-core kernel of them.
//
// A unit is up to rows_per_unit rows of one request against all keys that the last of them sees, in tiles of kTileKeys
// keys. The tiles of all units lie on a line, before those of each unit its fixed cost; each block of the grid takes an
// equal stretch of it. Nothing is planned
// before: a block finds its stretch from the lengths on the device, each thread summing the tiles of a run of units
// (about 1 us for some hundreds of requests). It works through its stretch in phases: units_per_phase units whose
// queries are in shared memory together.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/common/logit_problem.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace index_units {

constexpr int kTileKeys = 64;
constexpr int kMaxUnits = 8;  // of a phase

struct Problem : LogitProblem {
  int page_shift;  // log2 of page_size, or -1: divisions are slow
  int rows_per_unit, units_per_phase;
  int per_row;                // 1,024 / rows_per_unit, rounded up
  int fixed_tiles;            // what a unit costs beside its tiles, in tiles
  int units_per_request;      // for q_len rows a request
  int first_unit, num_units;  // enough for the rows of the block; those of other rows are empty
};

/// Units for a call of `num_rows` rows (of all its blocks: ragged units have the size of its average request) where
/// shared memory has room for the queries of `slots` rows. `fixed_tiles` is what a unit that has a phase for itself
/// costs beside its tiles, in tiles: lengths, queries and a fresh pipeline.
inline Problem make_problem(const LogitProblem& logits, int64_t num_rows, int slots, int fixed_tiles) {
  Problem p{};
  static_cast<LogitProblem&>(p) = logits;
  p.page_shift = -1;
  for (int shift = 0; shift < 31; ++shift)
    if (p.cache.page_size == 1 << shift) p.page_shift = shift;
  const auto divide_up = [](int64_t n, int64_t unit) { return (n + unit - 1) / unit; };
  // Rows of a unit: those of a request, in equal parts where they are more than fit; ragged, of the average request.
  const bool ragged = p.rows.cu_q_lens != nullptr;
  const int64_t rows_of_request = ragged ? divide_up(num_rows, p.rows.num_requests) : p.rows.q_len;
  p.rows_per_unit = static_cast<int>(divide_up(rows_of_request, divide_up(rows_of_request, slots)));
  p.per_row = static_cast<int>(divide_up(1024, p.rows_per_unit));
  p.units_per_phase = std::clamp(slots / p.rows_per_unit, 1, kMaxUnits);
  p.fixed_tiles = p.units_per_phase == 1 ? fixed_tiles : 0;
  p.units_per_request = static_cast<int>(divide_up(rows_of_request, p.rows_per_unit));
  const int64_t last_row = p.block.first_row + p.block.num_rows - 1;
  if (ragged) {  // of a row: at least row / rows_per_unit - 1, at most that and the number of requests
    p.first_unit = static_cast<int>(std::max<int64_t>(p.block.first_row / p.rows_per_unit - 1, 0));
    p.num_units = static_cast<int>(last_row / p.rows_per_unit + p.rows.num_requests - p.first_unit);
  } else {
    const auto unit_of = [&](int64_t row) {
      return static_cast<int>(row / p.rows.q_len * p.units_per_request + row % p.rows.q_len / p.rows_per_unit);
    };
    p.first_unit = unit_of(p.block.first_row);
    p.num_units = unit_of(last_row) + 1 - p.first_unit;
  }
  p.units_per_phase = std::min(p.units_per_phase, p.num_units);  // no look at slots that stay empty
  return p;
}

struct PagePlace {
  int index, offset;  // of a position: which page of the list, and where in it
};
__device__ inline PagePlace place_in_page(const Problem& p, int position) {
  if (p.page_shift >= 0) return {position >> p.page_shift, position & ((1 << p.page_shift) - 1)};
  return {position / p.cache.page_size, position % p.cache.page_size};
}

/// x / rows_per_unit, for x below 64 and up to 16 rows a unit: the product is less than 1 / rows_per_unit too large.
__device__ inline int over_rows(const Problem& p, int x) { return x * p.per_row >> 10; }

/// Rows and requests are 32-bit numbers, as cumulative lengths and positions are: 64-bit divisions are slow.
struct Unit {
  int request, first_row, num_rows;
  int first_of_request, rows_of_request;
  int keys;  // of its last row, which sees most
};

__device__ inline int keys_of(const Problem& p, const Unit& u, int row) {
  const int64_t n = row_bound(p.rows.bound, p.rows.seq_lens[u.request], u.rows_of_request, row - u.first_of_request);
  const int64_t reach = min(page_list(p.pages, u.request).num_pages * p.cache.page_size, p.block.num_columns);
  const int64_t keys = min(n, reach);
  return keys > p.block.unscored ? static_cast<int>(keys) : 0;
}

/// Unit number first_unit + index; one without rows of the block or without keys has keys == 0. Ragged: the units of
/// request r start at cu_q_lens[r] / rows_per_unit + r, which leaves room for all of them; the rest are empty.
__device__ inline Unit unit_at(const Problem& p, int index) {
  index += p.first_unit;
  Unit u{};
  int group;
  if (p.rows.cu_q_lens != nullptr) {
    int low = 0, high = static_cast<int>(p.rows.num_requests);
#pragma unroll 1
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (p.rows.cu_q_lens[middle] / p.rows_per_unit + middle <= index) low = middle;
      else high = middle;
    }
    u.request = low;
    u.first_of_request = p.rows.cu_q_lens[low];
    u.rows_of_request = p.rows.cu_q_lens[low + 1] - u.first_of_request;
    group = index - (u.first_of_request / p.rows_per_unit + low);
  } else {
    u.request = p.units_per_request == 1 ? index : index / p.units_per_request;
    group = index - u.request * p.units_per_request;
    u.first_of_request = u.request * p.rows.q_len;
    u.rows_of_request = p.rows.q_len;
  }
  if (group < 0) return u;
  const int64_t offset = int64_t{group} * p.rows_per_unit;
  const int64_t begin = max(u.first_of_request + offset, p.block.first_row);
  const int64_t end = min(u.first_of_request + min(offset + p.rows_per_unit, static_cast<int64_t>(u.rows_of_request)),
                          p.block.first_row + p.block.num_rows);
  if (begin >= end) return u;
  u.first_row = static_cast<int>(begin);
  u.num_rows = static_cast<int>(end - begin);
  u.keys = keys_of(p, u, static_cast<int>(end - 1));
  return u;
}

__device__ inline int tiles_of(const Unit& u) { return (u.keys + kTileKeys - 1) / kTileKeys; }

/// Its length on the line: a unit costs its queries and a fresh pipeline beside its tiles.
__device__ inline int length_of(const Problem& p, const Unit& u) {
  const int tiles = tiles_of(u);
  return tiles > 0 ? tiles + p.fixed_tiles : 0;
}

/// A unit's part of the block's stretch of tiles.
struct Part {
  const int32_t* page_ids;
  int64_t first_row;
  int32_t num_rows;
  int32_t keys;
  int32_t first_tile;
  int32_t begin;  // tiles of the parts before it in the phase
};

/// In shared memory. kWarps of the block, kSlots rows of queries at most.
template <int kWarps, int kSlots>
struct Schedule {
  static_assert(kSlots <= 32);
  static constexpr int kThreads = 32 * kWarps;

  Part parts[kMaxUnits + 1];   // of the phase; the last one's `begin` is the number of tiles
  int32_t bounds[kSlots + 4];  // keys that the row of a slot sees; slot = part * rows_per_unit + row
  int64_t warp_tiles[kWarps];
  int next_unit;         // of the next phase
  int64_t tiles_before;  // before it

  /// The stretch [begin, end) of the line for this block, and its first phase; false if there is none. All threads call
  /// it. Where a lane a unit is enough, so in decode, each warp finds the stretch by itself, from one look at the
  /// lengths: all of this is on the way to the first key, and small launches are little else.
  __device__ bool start(const Problem& p, int64_t& begin, int64_t& end) {
    constexpr int kLanes = 32;
    constexpr uint32_t kAll = 0xffffffffu;
    if (p.num_units > kLanes) {
      if (!find_stretch(p, begin, end)) return false;
      next_phase(p, begin, end);
      return true;
    }
    const int lane = threadIdx.x % kLanes, units = p.units_per_phase;
    Unit u{};
    if (lane < p.num_units) u = unit_at(p, lane);
    const uint32_t tiles = tiles_of(u);
    uint32_t behind = length_of(p, u);  // becomes the end of the unit on the line: 32 of up to 2^24 tiles
    for (int offset = 1; offset < kLanes; offset *= 2) {
      const uint32_t x = __shfl_up_sync(kAll, behind, offset);
      if (lane >= offset) behind += x;
    }
    const uint32_t total = __shfl_sync(kAll, behind, kLanes - 1);
    const auto first = static_cast<uint32_t>(share(total, blockIdx.x));
    const auto last = static_cast<uint32_t>(share(total, blockIdx.x + 1));
    begin = first;
    end = last;
    if (first >= last) return false;
    if (threadIdx.x < kLanes) {
      const int lead = __ffs(static_cast<int>(__ballot_sync(kAll, behind > first))) - 1;  // unit of the first part
      const int part = lane - lead;
      const bool here = part >= 0 && part < units;
      const uint32_t from = max(first, behind - tiles), to = min(last, behind);
      const int n = here && from < to ? static_cast<int>(to - from) : 0;
      // Units that share a phase have no fixed cost: their tiles lie side by side.
      const int done = units == 1 ? n : static_cast<int>(to - first);
      const int last_lane = min(lead + units - 1, kLanes - 1);
      const int num_tiles = __shfl_sync(kAll, done, last_lane);
      const uint32_t line_end = __shfl_sync(kAll, behind, last_lane);
      if (here)
        parts[part] = {n > 0 ? page_list(p.pages, u.request).ids : nullptr, u.first_row, n > 0 ? u.num_rows : 0, u.keys,
                       static_cast<int32_t>(from - (behind - tiles)),       done - n};
      if (lane < units && lead + lane >= kLanes) parts[lane] = {nullptr, 0, 0, 0, 0, num_tiles};
      if (lane == 0) {
        parts[units].begin = num_tiles;
        next_unit = lead + units;
        tiles_before = line_end;
      }
      const int rows = n > 0 ? u.num_rows : 0;
      if (p.rows_per_unit == 1) {
        if (rows > 0) bounds[part] = u.keys;
      } else {
        set_bounds(p, u, rows, lead);
      }
    }
    __syncthreads();
    return true;
  }

  /// Where the line of `total` tiles is cut before block i.
  __device__ static int64_t share(int64_t total, uint32_t i) {
    constexpr int64_t kShort = 1 << 20;  // total * gridDim fits 32 bits for up to 2,047 blocks; 64 bits are slow
    if (total < kShort && gridDim.x < 2048) return static_cast<uint32_t>(total) * i / gridDim.x;
    return total * i / gridDim.x;
  }

  /// The stretch [begin, end) of the line for this block; false if there is none. next_phase() comes next.
  __device__ bool find_stretch(const Problem& p, int64_t& begin, int64_t& end) {
    const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
    const int units_per_thread = (p.num_units + kThreads - 1) / kThreads;
    const int first_mine = min(tid * units_per_thread, p.num_units);
    const int last_mine = min(p.num_units, first_mine + units_per_thread);
    int64_t mine = 0;
#pragma unroll 1  // here and below: a launch begins with cold instruction caches
    for (int u = first_mine; u < last_mine; ++u) mine += length_of(p, unit_at(p, u));
    int64_t before = mine;  // becomes the tiles of the threads before this one
    for (int offset = 1; offset < 32; offset *= 2) {
      const int64_t x = __shfl_up_sync(0xffffffffu, before, offset);
      if (lane >= offset) before += x;
    }
    if (lane == 31) warp_tiles[warp] = before;
    before -= mine;
    __syncthreads();
    int64_t total = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) before += warp_tiles[w];
      total += warp_tiles[w];
    }
    begin = share(total, blockIdx.x);
    end = share(total, blockIdx.x + 1);
    if (begin >= end) return false;
    if (before <= begin && begin < before + mine) {
      int u = first_mine;
#pragma unroll 1
      for (; u + 1 < last_mine; ++u) {
        const int n = length_of(p, unit_at(p, u));
        if (begin < before + n) break;
        before += n;
      }
      next_unit = u;
      tiles_before = before;
    }
    return true;
  }

  /// Fills `parts` and `bounds`. All threads call it; nobody may still use the last phase's queries behind it.
  __device__ void next_phase(const Problem& p, int64_t begin, int64_t end) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();
    const int first_unit = next_unit;
    const int64_t tiles_so_far = tiles_before;
    __syncthreads();
    if (warp == 0) {
      Unit u{};
      if (lane < p.units_per_phase && first_unit + lane < p.num_units) u = unit_at(p, first_unit + lane);
      const int tiles = tiles_of(u);
      int64_t last = length_of(p, u);
      for (int offset = 1; offset < kMaxUnits; offset *= 2) {
        const int64_t x = __shfl_up_sync(0xffffffffu, last, offset);
        if (lane >= offset) last += x;
      }
      last += tiles_so_far;
      const int64_t from = max(begin, last - tiles), to = min(end, last);
      const int n = from < to ? static_cast<int>(to - from) : 0;
      int behind = n;
      for (int offset = 1; offset < kMaxUnits; offset *= 2) {
        const int x = __shfl_up_sync(0xffffffffu, behind, offset);
        if (lane >= offset) behind += x;
      }
      if (lane < p.units_per_phase) {
        parts[lane] = {n > 0 ? page_list(p.pages, u.request).ids : nullptr, u.first_row, n > 0 ? u.num_rows : 0, u.keys,
                       static_cast<int32_t>(from - (last - tiles)),         behind - n};
      }
      set_bounds(p, u, n > 0 ? u.num_rows : 0, 0);
      if (lane == p.units_per_phase - 1) {
        parts[p.units_per_phase].begin = behind;
        next_unit = first_unit + p.units_per_phase;
        tiles_before = last;
      }
    }
    __syncthreads();
  }

  /// Fills `bounds`: by a warp whose lane `lead` + part has the unit of that part, and how many of its rows count. A
  /// lane then does a slot.
  __device__ void set_bounds(const Problem& p, const Unit& u, int rows, int lead) {
    const int lane = threadIdx.x % 32, part = over_rows(p, lane), row = lane - part * p.rows_per_unit;
    const int from = part < p.units_per_phase ? min(lead + part, 31) : 0;
    Unit v{};
    v.request = __shfl_sync(0xffffffffu, u.request, from);
    v.first_row = __shfl_sync(0xffffffffu, u.first_row, from);
    v.num_rows = __shfl_sync(0xffffffffu, rows, from);
    v.first_of_request = __shfl_sync(0xffffffffu, u.first_of_request, from);
    v.rows_of_request = __shfl_sync(0xffffffffu, u.rows_of_request, from);
    if (part < p.units_per_phase && lead + part < 32 && row < v.num_rows)
      bounds[lane] = keys_of(p, v, v.first_row + row);
  }

  __device__ bool last_phase(const Problem& p, int64_t end) const {
    return tiles_before >= end || next_unit >= p.num_units;
  }
  __device__ int num_tiles(const Problem& p) const { return parts[p.units_per_phase].begin; }
  /// The part that has tile i of the phase.
  __device__ int part_of(int i) const {
    int e = 0;
    while (i >= parts[e + 1].begin) ++e;
    return e;
  }
};

/// Calls put(slot, head, piece, value) for each 16-byte piece of the phase's queries, of kPieces a head; heads that are
/// not there are zeros. The loads of a batch are under way before the first is used: where requests are short, this
/// wait is most of a phase. T: uint8_t for e4m3, uint16_t for bf16.
template <class T, int kHeads, int kPieces, int kThreads, class Put>
__device__ inline void for_each_query_piece(const Problem& p, const Part* parts, int slots, Put&& put) {
  constexpr int kBatch = 4, kValues = 16 / sizeof(T);
  const int num_pieces = slots * kHeads * kPieces;
#pragma unroll 1
  for (int first = threadIdx.x; first < num_pieces; first += kBatch * kThreads) {
    uint4 v[kBatch];
    bool wanted[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + j * kThreads, piece = i % kPieces, h = i / kPieces % kHeads;
      const int slot = i / (kPieces * kHeads);
      v[j] = uint4{0, 0, 0, 0};
      wanted[j] = false;
      if (i < num_pieces) {
        const int e = over_rows(p, slot), r = slot - e * p.rows_per_unit;
        const Part& part = parts[e];
        wanted[j] = r < part.num_rows;
        if (wanted[j] && h < p.num_heads) {
          const int64_t row = part.first_row + r;
          v[j] = *reinterpret_cast<const uint4*>(static_cast<const T*>(p.q) + row * p.q_row_stride +
                                                 h * p.q_head_stride + kValues * piece);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + j * kThreads;
      if (wanted[j]) put(i / (kPieces * kHeads), i / kPieces % kHeads, i % kPieces, v[j]);
    }
  }
}

}  // namespace index_units
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
