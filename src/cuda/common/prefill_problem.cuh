// What the tensor-core kernels of ragged_prefill know about their problem: which rows, head and keys a block serves,
// found from the cumulative lengths on the device, and how many keys each row sees.
//
// Tiles. The host knows q_rows and the number of requests B, not the lengths. With tiles of M rows request r gets the
// ids floor(cu_q[r] / M) + r up to floor(cu_q[r + 1] / M) + r, of which it needs the first ceil(rows / M): never more
// than there are, since floor((a + n) / M) - floor(a / M) + 1 >= ceil(n / M). So q_rows / M + B ids are enough, the id
// of a request's first tile is a function of its own offset, and a search replaces a scan. Ids that a request does not
// need are blocks that leave at once: at most one for each request.
//
// Order of blocks: requests from the last to the first; in each, groups of heads whose keys and values fit into part of
// the L2 together; in a group the tiles from the last to the first, of all its heads. Under the causal mask the last
// tile has most keys, so the tiles that begin late are short, and multiprocessors end at about the same time; and tiles
// that run side by side find each other's keys in the L2.
#pragma once

#include <cstdint>

#include "cuda/common/views.cuh"
#include "gannet/ops.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace prefill {

constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;

struct Problem {
  const uint16_t *q, *k, *k_rope, *v;  // bf16; strides in elements
  int64_t q_row_stride, q_head_stride, k_row_stride, k_head_stride, rope_row_stride, v_row_stride, v_head_stride;
  const int32_t *cu_q, *cu_kv;
  int64_t q_rows, kv_rows;
  int num_requests, num_heads;
  int keys_in_cache;  // of one head, with their values: a group of heads has about so many
  float softmax_scale;
  bool causal;
  void* out;
  DType out_dtype;
  int64_t out_row_stride, out_head_stride;
  float* lse;  // or nullptr
  int64_t lse_row_stride;
};

struct Tile {
  int64_t q_row, kv_row;  // global first row and first key
  int head;
  int num_rows;
  int num_keys;    // of the request
  int first_sees;  // keys that the first row sees, before clamping: later rows see one more each
  bool causal;

  __device__ int sees(int row) const { return causal ? max(0, min(first_sees + row, num_keys)) : num_keys; }
};

/// The last request whose first tile id is at or before `id`; every lane of a warp calls it together. Whatever the
/// lengths hold, the result is a request.
__device__ inline int request_of_tile(const int32_t* cu_q, int num_requests, int tile_rows, int id) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int low = 0, count = num_requests;
  while (count > 1) {
    const int step = (count + 31) / 32, at = lane * step;
    const bool before = at < count && cu_q[low + at] / tile_rows + low + at <= id;
    const int skipped = max(1, __popc(__ballot_sync(0xffffffffu, before))) - 1;
    low += skipped * step;
    count = min(step, count - skipped * step);
  }
  return low;
}

/// The tile of this block; false: nothing to do. Lengths that leave the tensors are cut (memory protection only).
template <int kTileRows>
__device__ inline bool find_tile(const Problem& p, Tile& t, unsigned block, unsigned num_blocks) {
  const unsigned index = num_blocks - 1 - block;
  const int heads = p.num_heads;
  const int r = request_of_tile(p.cu_q, p.num_requests, kTileRows, static_cast<int>(index / heads));
  const int64_t q_begin = max(int64_t{0}, min(static_cast<int64_t>(p.cu_q[r]), p.q_rows)),
                q_end = max(q_begin, min(static_cast<int64_t>(p.cu_q[r + 1]), p.q_rows)),
                kv_begin = max(int64_t{0}, min(static_cast<int64_t>(p.cu_kv[r]), p.kv_rows)),
                kv_end = max(kv_begin, min(static_cast<int64_t>(p.cu_kv[r + 1]), p.kv_rows));
  const int first_id = static_cast<int>(q_begin / kTileRows) + r,
            ids = static_cast<int>(q_end / kTileRows) + r + 1 - first_id;
  const int local = static_cast<int>(static_cast<int64_t>(index) - static_cast<int64_t>(first_id) * heads);
  const int nq = static_cast<int>(q_end - q_begin);
  if (local < 0 || local >= ids * heads) return false;
  const int in_group = max(1, min(p.keys_in_cache / max(1, static_cast<int>(kv_end - kv_begin)), heads)),
            first_head = local / (ids * in_group) * in_group, in_this = min(in_group, heads - first_head),
            place = local - first_head * ids;
  const int tile_row = place / in_this * kTileRows;
  if (tile_row >= nq) return false;
  t.head = first_head + place % in_this;
  t.q_row = q_begin + tile_row;
  t.kv_row = kv_begin;
  t.num_rows = min(kTileRows, nq - tile_row);
  t.num_keys = static_cast<int>(kv_end - kv_begin);
  t.first_sees = tile_row + t.num_keys - nq + 1;
  t.causal = p.causal;
  return true;
}

/// What a group of heads may take of the L2: 40 MB on an A100, 50 on an H100; queries and results pass through it too.
constexpr int64_t kGroupBytes = int64_t{32} << 20;

inline Problem make_problem(const RaggedPrefill& p) {
  Problem r{};
  r.q = static_cast<const uint16_t*>(p.q.data);
  r.k = static_cast<const uint16_t*>(p.k.data);
  r.v = static_cast<const uint16_t*>(p.v.data);
  r.q_row_stride = p.q.stride[0];
  r.q_head_stride = p.q.stride[1];
  r.k_row_stride = p.k.stride[0];
  r.k_head_stride = p.k.stride[1];
  r.v_row_stride = p.v.stride[0];
  r.v_head_stride = p.v.stride[1];
  if (p.k_rope.given()) {
    r.k_rope = static_cast<const uint16_t*>(p.k_rope.data);
    r.rope_row_stride = p.k_rope.stride[0];
  }
  r.cu_q = static_cast<const int32_t*>(p.cu_q_lens.data);
  r.cu_kv = static_cast<const int32_t*>(p.cu_kv_lens.data);
  r.q_rows = p.q.shape[0];
  r.kv_rows = p.k.shape[0];
  r.num_requests = static_cast<int>(p.cu_q_lens.shape[0] - 1);
  r.num_heads = static_cast<int>(p.q.shape[1]);
  r.keys_in_cache = static_cast<int>(kGroupBytes / (2 * (p.q.shape[2] + p.v.shape[2])));
  r.softmax_scale = p.softmax_scale;
  r.causal = p.causal;
  r.out = p.out.data;
  r.out_dtype = p.out.dtype;
  r.out_row_stride = p.out.stride[0];
  r.out_head_stride = p.out.stride[1];
  if (p.lse.given()) {
    r.lse = static_cast<float*>(p.lse.data);
    r.lse_row_stride = p.lse.stride[0];
  }
  return r;
}

/// What the kernels are built for; a key lies in k whole, or its last kRope values in k_rope.
constexpr int kRope = 64;
enum class Widths { kNone, kMla192, kWide256 };  // N + P = 192 and V = 128; 256 and 256
inline Widths widths_of(const RaggedPrefill& p) {
  if (p.q.shape[2] == 192 && p.v.shape[2] == 128) return Widths::kMla192;
  if (p.q.shape[2] == 256 && p.v.shape[2] == 256) return Widths::kWide256;
  return Widths::kNone;
}

inline int64_t num_tile_ids(int64_t q_rows, int64_t num_requests, int tile_rows) {
  return q_rows / tile_rows + num_requests;
}

}  // namespace prefill
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
