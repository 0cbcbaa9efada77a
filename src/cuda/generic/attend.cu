// The three attention operations over attend_kernel: dense absorbed, sparse absorbed, ragged expanded.
#include "cuda/common/check.h"
#include "cuda/generic/attend.cuh"
#include "cuda/generic/set.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace generic {

namespace {

float* floats_of(const TensorView& v) { return v.given() ? static_cast<float*>(v.data) : nullptr; }

/// What the two absorbed forms share: lanes are heads of one row.
struct Absorbed {
  const void* q;
  DType q_dtype;
  int64_t q_row_stride, q_head_stride;
  int num_heads;
  LatentCacheView cache;
  int64_t out_row_stride, out_head_stride, lse_row_stride, max_row_stride;
  int64_t num_rows;
  int key_dim, value_dim;
  float softmax_scale;
  AttendOutput output;
  static constexpr bool kValueIsKey = true;

  template <class Params>
  void fill(const Params& p) {
    q = p.q.data;
    q_dtype = p.q.dtype;
    q_row_stride = p.q.stride[0];
    q_head_stride = p.q.stride[1];
    num_heads = static_cast<int>(p.q.shape[1]);
    num_rows = p.q.shape[0];
    cache = with_row_stride(p.cache);
    out_row_stride = p.out.stride[0];
    out_head_stride = p.out.stride[1];
    lse_row_stride = p.lse.given() ? p.lse.stride[0] : 0;
    max_row_stride = p.max_logits.given() ? p.max_logits.stride[0] : 0;
    key_dim = p.cache.geometry.width();
    value_dim = p.cache.geometry.latent_dim;
    softmax_scale = p.softmax_scale * p.q_scale;
    output = {p.out.data, p.out.dtype, floats_of(p.lse), floats_of(p.max_logits), floats_of(p.attn_sink)};
  }
  int head_blocks() const { return (num_heads + kLanes - 1) / kLanes; }

  struct Base {
    int64_t row;
    int first_head;
  };
  __device__ bool base(Base& g) const {
    const int blocks = (num_heads + kLanes - 1) / kLanes;  // one flat grid dimension: rows have no 65,535 limit
    g.row = blockIdx.x / blocks;
    g.first_head = static_cast<int>(blockIdx.x % blocks) * kLanes;
    return g.row < num_rows;
  }
  __device__ int num_lanes(const Base& g) const { return min(kLanes, num_heads - g.first_head); }
  __device__ float query(const Base& g, int lane, int d) const {
    return load_element(q, g.row * q_row_stride + (g.first_head + lane) * q_head_stride + d, q_dtype);
  }
  __device__ int64_t out_offset(const Base& g, int lane) const {
    return g.row * out_row_stride + (g.first_head + lane) * out_head_stride;
  }
  __device__ int64_t lse_offset(const Base& g, int lane) const { return g.row * lse_row_stride + g.first_head + lane; }
  __device__ int64_t max_offset(const Base& g, int lane) const { return g.row * max_row_stride + g.first_head + lane; }
  __device__ int head(const Base& g, int lane) const { return g.first_head + lane; }
};

struct Dense : Absorbed {
  Rows rows;
  Pages pages;
  struct Group : Base {
    PageList list;
    int64_t keys;
  };
  __device__ bool group(Group& g) const {
    if (!base(g)) return false;
    const RowPlace place = place_row(rows, pages, cache.page_size, g.row);
    g.keys = place.num_keys;
    g.list = place.request >= 0 ? page_list(pages, place.request) : PageList{nullptr, 0};
    return true;
  }
  __device__ int64_t max_keys(const Group& g) const { return g.keys; }
  __device__ int64_t lane_keys(const Group& g, int) const { return g.keys; }
  __device__ bool key_valid(const Group& g, int64_t key) const {
    return slot_of(g.list, key, cache.page_size, cache.num_pages) >= 0;
  }
  __device__ float key(const Group& g, int64_t key, int d) const {
    return load_latent(cache, slot_of(g.list, key, cache.page_size, cache.num_pages), d);
  }
};

struct Sparse : Absorbed {
  const int32_t* slots;
  const int32_t* lens;  // or nullptr
  int64_t slots_row_stride, list_width;
  struct Group : Base {
    const int32_t* list;
    int64_t keys;
  };
  __device__ bool group(Group& g) const {
    if (!base(g)) return false;
    g.list = slots + g.row * slots_row_stride;
    g.keys = list_width;
    if (lens != nullptr) g.keys = max(int64_t{0}, min(list_width, static_cast<int64_t>(lens[g.row])));
    return true;
  }
  __device__ int64_t max_keys(const Group& g) const { return g.keys; }
  __device__ int64_t lane_keys(const Group& g, int) const { return g.keys; }
  __device__ bool key_valid(const Group& g, int64_t key) const {
    const int64_t slot = g.list[key];
    return slot >= 0 && slot < cache.num_slots();
  }
  __device__ float key(const Group& g, int64_t key, int d) const { return load_latent(cache, g.list[key], d); }
};

/// Lanes are query rows of one request and head.
struct Ragged {
  const void *q, *k, *k_rope, *v;
  DType dtype;
  int64_t q_row_stride, q_head_stride, k_row_stride, k_head_stride, rope_row_stride, v_row_stride, v_head_stride;
  int64_t out_row_stride, out_head_stride, lse_row_stride;
  const int32_t *cu_q, *cu_kv;
  int64_t num_requests, num_q_rows;
  int num_heads, nope_dim;
  int key_dim, value_dim;
  float softmax_scale;
  bool causal;
  AttendOutput output;
  static constexpr bool kValueIsKey = false;

  struct Group {
    int head;
    int64_t first_row, first_kv;  // global rows
    int64_t offset;               // of first_row inside its request
    int lanes;
    int64_t nq, nk;
  };
  // Blocks: num_heads x (q_rows / kLanes + num_requests). Request r has those from cu_q[r] / kLanes + r on, enough for
  // its last, partial group: where they begin is found without the sizes of the requests before it.
  __device__ int64_t first_group(int64_t request) const { return cu_q[request] / kLanes + request; }
  __device__ bool group(Group& g) const {
    g.head = static_cast<int>(blockIdx.x % num_heads);
    const int64_t index = blockIdx.x / num_heads;
    int64_t r = 0, end = num_requests;  // the last request that begins at or before index
    while (end - r > 1) {
      const int64_t middle = (r + end) / 2;
      if (first_group(middle) <= index) r = middle;
      else end = middle;
    }
    g.offset = (index - first_group(r)) * kLanes;
    g.nq = cu_q[r + 1] - cu_q[r];
    if (g.offset >= g.nq) return false;
    g.first_row = cu_q[r] + g.offset;
    g.first_kv = cu_kv[r];
    g.nk = cu_kv[r + 1] - cu_kv[r];
    g.lanes = static_cast<int>(min(static_cast<int64_t>(kLanes), g.nq - g.offset));
    return true;
  }
  __device__ int num_lanes(const Group& g) const { return g.lanes; }
  __device__ int64_t lane_keys(const Group& g, int lane) const {
    const int64_t n = causal ? g.offset + lane + (g.nk - g.nq) + 1 : g.nk;
    return max(int64_t{0}, min(n, g.nk));
  }
  __device__ int64_t max_keys(const Group& g) const { return lane_keys(g, g.lanes - 1); }
  __device__ bool key_valid(const Group&, int64_t) const { return true; }
  __device__ float query(const Group& g, int lane, int d) const {
    return load_element(q, (g.first_row + lane) * q_row_stride + g.head * q_head_stride + d, dtype);
  }
  __device__ float key(const Group& g, int64_t key, int d) const {
    if (d < nope_dim) return load_element(k, (g.first_kv + key) * k_row_stride + g.head * k_head_stride + d, dtype);
    return load_element(k_rope, (g.first_kv + key) * rope_row_stride + d - nope_dim, dtype);
  }
  __device__ float value(const Group& g, int64_t key, int d) const {
    return load_element(v, (g.first_kv + key) * v_row_stride + g.head * v_head_stride + d, dtype);
  }
  __device__ int64_t out_offset(const Group& g, int lane) const {
    return (g.first_row + lane) * out_row_stride + g.head * out_head_stride;
  }
  __device__ int64_t lse_offset(const Group& g, int lane) const {
    return (g.first_row + lane) * lse_row_stride + g.head;
  }
  __device__ int64_t max_offset(const Group&, int) const { return 0; }  // no such output
  __device__ int head(const Group& g, int) const { return g.head; }
};

template <class Problem>
void launch(const char* function, const Problem& problem, int64_t blocks, const Device& device, Stream stream) {
  const DeviceGuard guard(function, device.index);
  const int64_t bytes = attend_shared_bytes(problem.key_dim, problem.value_dim, Problem::kValueIsKey);
  launch_kernel(function, attend_kernel<Problem>,
                {.blocks = blocks,
                 .threads = kThreads,
                 .shared_bytes = static_cast<size_t>(bytes),
                 .blocks_y = (problem.value_dim + kMaxValueDim - 1) / kMaxValueDim},
                stream, problem);
}

}  // namespace

void run_mla_decode(const MlaDecode& p, const RunContext& c) {
  Dense d{};
  d.fill(p);
  d.rows = make_rows(p.rows);
  d.pages = make_pages(p.pages);
  launch(MlaDecode::kName, d, d.num_rows * d.head_blocks(), p.q.device, c.stream);
}

void run_sparse_attention(const SparseAttention& p, const RunContext& c) {
  Sparse s{};
  s.fill(p);
  s.slots = static_cast<const int32_t*>(p.topk_slots.data);
  s.lens = p.topk_lens.given() ? static_cast<const int32_t*>(p.topk_lens.data) : nullptr;
  s.slots_row_stride = p.topk_slots.stride[0];
  s.list_width = p.topk_slots.shape[1];
  launch(SparseAttention::kName, s, s.num_rows * s.head_blocks(), p.q.device, c.stream);
}

void run_ragged_prefill(const RaggedPrefill& p, const RunContext& c) {
  Ragged r{};
  r.q = p.q.data;
  r.k = p.k.data;
  r.k_rope = p.k_rope.given() ? p.k_rope.data : nullptr;
  r.v = p.v.data;
  r.dtype = p.q.dtype;
  r.q_row_stride = p.q.stride[0];
  r.q_head_stride = p.q.stride[1];
  r.k_row_stride = p.k.stride[0];
  r.k_head_stride = p.k.stride[1];
  r.rope_row_stride = p.k_rope.given() ? p.k_rope.stride[0] : 0;
  r.v_row_stride = p.v.stride[0];
  r.v_head_stride = p.v.stride[1];
  r.out_row_stride = p.out.stride[0];
  r.out_head_stride = p.out.stride[1];
  r.lse_row_stride = p.lse.given() ? p.lse.stride[0] : 0;
  r.cu_q = static_cast<const int32_t*>(p.cu_q_lens.data);
  r.cu_kv = static_cast<const int32_t*>(p.cu_kv_lens.data);
  r.num_requests = p.cu_q_lens.shape[0] - 1;
  r.num_q_rows = p.q.shape[0];
  r.num_heads = static_cast<int>(p.q.shape[1]);
  r.nope_dim = static_cast<int>(p.k.shape[2]);
  r.key_dim = static_cast<int>(p.q.shape[2]);
  r.value_dim = static_cast<int>(p.v.shape[2]);
  r.softmax_scale = p.softmax_scale;
  r.causal = p.causal;
  r.output = {p.out.data, p.out.dtype, floats_of(p.lse), nullptr, nullptr};
  const int64_t groups = r.num_q_rows / kLanes + r.num_requests;
  launch(RaggedPrefill::kName, r, groups * r.num_heads, p.q.device, c.stream);
}

}  // namespace generic
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
