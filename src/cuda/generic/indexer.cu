// Index logits, exact top-k, and the two fused into a selection of slots.
//
// Top-k of a row: scores become 32-bit keys whose unsigned order is the contract's order (NaN lowest, -0 = +0). Four
// passes of eight bits find the k-th largest key exactly, whatever the range of the scores (no candidate buffer that
// could overflow); a last pass in order of position takes every larger key and the first of the equal ones, so the
// result is ascending and ties go to the smaller position. Each pass reads the row once: 5 * 4 bytes a score.
#include <cub/block/block_scan.cuh>

#include "cuda/common/check.h"
#include "cuda/common/views.cuh"
#include "cuda/generic/set.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace generic {

namespace {

// ---- logits ----------------------------------------------------------------------------------------------------

constexpr int kLogitThreads = 256;
constexpr int kKeysPerBlock = 64;  // 8 keys a warp against one load of the row's queries

struct LogitArgs {
  const void* q;
  DType q_dtype;
  int64_t q_row_stride, q_head_stride;
  const float* weights;
  int64_t weights_stride;
  int num_heads;
  IndexCacheView cache;
  Rows rows;
  Pages pages;
  void* logits;
  DType logits_dtype;
  int64_t logits_stride, num_columns;
  int64_t first_row, num_rows;  // of the call; logits has row 0 for first_row
};

// Shared memory: queries [head_dim][num_heads] fp32 (32 KB for 64 x 128), so that lanes (heads) read neighbours.
__global__ void __launch_bounds__(kLogitThreads) index_logits_kernel(LogitArgs a) {
  extern __shared__ float query[];
  const int64_t key_blocks = (a.num_columns + kKeysPerBlock - 1) / kKeysPerBlock;
  const int64_t local = blockIdx.x / key_blocks, row = a.first_row + local;
  const int64_t first_key = static_cast<int64_t>(blockIdx.x % key_blocks) * kKeysPerBlock;
  const RowPlace place = place_row(a.rows, a.pages, a.cache.page_size, row);
  const int64_t num_keys = min(place.num_keys, a.num_columns);
  if (place.request < 0 || first_key >= num_keys) return;
  const PageList list = page_list(a.pages, place.request);
  const int dim = a.cache.head_dim, heads = a.num_heads;
  for (int i = threadIdx.x; i < heads * dim; i += kLogitThreads) {
    const int h = i / dim, d = i % dim;
    query[d * heads + h] = load_element(a.q, row * a.q_row_stride + h * a.q_head_stride + d, a.q_dtype);
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int k = threadIdx.x / 32; k < kKeysPerBlock; k += kLogitThreads / 32) {
    const int64_t key = first_key + k;
    if (key >= num_keys) break;
    const int64_t slot = slot_of(list, key, a.cache.page_size, a.cache.num_pages);
    float sum = 0.0f;
    if (slot >= 0) {
      for (int h = lane; h < heads; h += 32) {
        float dot = 0.0f;
        for (int d = 0; d < dim; ++d) dot = fmaf(query[d * heads + h], load_index_k(a.cache, slot, d), dot);
        // relu by comparison, so that a NaN score stays NaN: dot > 0 is false for NaN, dot < 0 too.
        const float relu = dot < 0.0f ? 0.0f : dot;
        sum = fmaf(a.weights[row * a.weights_stride + h], relu, sum);
      }
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    if (lane == 0) {
      // A page id outside the pool cannot be scored: the lowest rank, so that it is never preferred to a real key.
      store_element(a.logits, local * a.logits_stride + key, a.logits_dtype,
                    slot >= 0 ? sum * index_k_scale(a.cache, slot) : -INFINITY);
    }
  }
}

LogitArgs logit_args(const TensorView& q, const TensorView& weights, const IndexCacheView& cache,
                     const PageTableView& pages, const QueryRows& rows) {
  LogitArgs a{};
  a.q = q.data;
  a.q_dtype = q.dtype;
  a.q_row_stride = q.stride[0];
  a.q_head_stride = q.stride[1];
  a.weights = static_cast<const float*>(weights.data);
  a.weights_stride = weights.stride[0];
  a.num_heads = static_cast<int>(q.shape[1]);
  a.cache = cache;
  a.rows = make_rows(rows);
  a.pages = make_pages(pages);
  return a;
}

void launch_logits(const char* function, const LogitArgs& a, cudaStream_t stream) {
  const int64_t key_blocks = (a.num_columns + kKeysPerBlock - 1) / kKeysPerBlock;
  const size_t bytes = sizeof(float) * static_cast<size_t>(a.num_heads) * static_cast<size_t>(a.cache.head_dim);
  GANNET_CUDA(function, cudaFuncSetAttribute(index_logits_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(bytes)));
  index_logits_kernel<<<static_cast<unsigned>(a.num_rows * key_blocks), kLogitThreads, bytes, stream>>>(a);
  GANNET_CUDA(function, cudaGetLastError());
}

// ---- top-k -----------------------------------------------------------------------------------------------------

constexpr int kTopKThreads = 512;
constexpr int kRadix = 256;

/// Larger key, better score: NaN 0, -inf 1 (0x007fffff + ...), ... as unsigned numbers; -0 and +0 alike.
__device__ uint32_t order_key(float x) {
  if (isnan(x)) return 0;
  if (x == 0.0f) x = 0.0f;  // -0 becomes +0
  const uint32_t u = __float_as_uint(x);
  return (u & 0x80000000u) != 0 ? ~u : u | 0x80000000u;
}

struct TopKArgs {
  const void* logits;
  DType logits_dtype;
  int64_t logits_stride, num_columns;
  const int32_t* lens;  // or nullptr: the rows' bounds
  Rows rows;
  Pages pages;
  int page_size;
  int64_t num_pages;
  int64_t first_row;
  int k;
  int32_t* positions;  // or nullptr
  int64_t positions_stride;
  int32_t* slots;  // or nullptr
  int64_t slots_stride;
  int32_t* counts;
};

__global__ void __launch_bounds__(kTopKThreads) topk_kernel(TopKArgs a) {
  using Scan = cub::BlockScan<int, kTopKThreads>;
  __shared__ typename Scan::TempStorage scan_storage;
  __shared__ int histogram[kRadix];
  __shared__ uint32_t shared_prefix;
  __shared__ int shared_remaining;
  const int64_t local = blockIdx.x, row = a.first_row + local;
  RowPlace place{-1, 0};
  int64_t n;
  if (a.lens != nullptr) {
    n = a.lens[row];
  } else {
    place = place_row(a.rows, a.pages, a.page_size, row);
    n = place.num_keys;
  }
  n = max(int64_t{0}, min(n, a.num_columns));
  const PageList list = place.request >= 0 ? page_list(a.pages, place.request) : PageList{nullptr, 0};
  const int count = static_cast<int>(min(n, static_cast<int64_t>(a.k)));
  auto emit = [&](int i, int64_t position) {
    if (a.positions != nullptr) a.positions[row * a.positions_stride + i] = static_cast<int32_t>(position);
    if (a.slots != nullptr)
      a.slots[row * a.slots_stride + i] =
          position < 0 ? -1 : static_cast<int32_t>(slot_of(list, position, a.page_size, a.num_pages));
  };
  for (int i = count + threadIdx.x; i < a.k; i += kTopKThreads) emit(i, -1);
  if (threadIdx.x == 0) a.counts[row] = count;
  if (n <= a.k) {
    for (int i = threadIdx.x; i < count; i += kTopKThreads) emit(i, i);
    return;
  }
  const int64_t first = local * a.logits_stride;
  auto key_at = [&](int64_t i) { return order_key(load_element(a.logits, first + i, a.logits_dtype)); };
  uint32_t prefix = 0, mask = 0;
  int remaining = a.k;  // entries still to be found among keys that match the prefix
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kRadix; i += kTopKThreads) histogram[i] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += kTopKThreads) {
      const uint32_t key = key_at(i);
      if ((key & mask) == prefix) atomicAdd(&histogram[(key >> shift) & (kRadix - 1)], 1);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int left = remaining, digit = kRadix - 1;
      while (histogram[digit] < left) left -= histogram[digit--];
      shared_prefix = prefix | static_cast<uint32_t>(digit) << shift;
      shared_remaining = left;
    }
    __syncthreads();
    prefix = shared_prefix;
    remaining = shared_remaining;
    mask |= static_cast<uint32_t>(kRadix - 1) << shift;
    __syncthreads();
  }
  // prefix is the k-th largest key; `remaining` of the keys equal to it are taken, the first ones.
  int taken = 0, equal_seen = 0;
  for (int64_t base = 0; base < n; base += kTopKThreads) {
    const int64_t i = base + threadIdx.x;
    const uint32_t key = i < n ? key_at(i) : 0;
    const bool larger = i < n && key > prefix, equal = i < n && key == prefix;
    int equal_before, equal_total;
    Scan(scan_storage).ExclusiveSum(equal ? 1 : 0, equal_before, equal_total);
    __syncthreads();
    const bool take = larger || (equal && equal_seen + equal_before < remaining);
    int before, total;
    Scan(scan_storage).ExclusiveSum(take ? 1 : 0, before, total);
    __syncthreads();
    if (take) emit(taken + before, i);
    taken += total;
    equal_seen += equal_total;
  }
}

// ---- selection -------------------------------------------------------------------------------------------------

constexpr size_t kSelectScratchBytes = size_t{64} << 20;  // logits of a block of rows: 4,096 rows of 4,096 keys

int64_t select_rows_per_block(const IndexSelect& p) {
  const int64_t row_bytes = 4 * std::max<int64_t>(p.max_seq_len, 1);
  const int64_t rows = std::max<int64_t>(static_cast<int64_t>(kSelectScratchBytes) / row_bytes, 1);
  return std::min(rows, p.q.shape[0]);
}

}  // namespace

void run_index_logits(const IndexLogits& p, const RunContext& c) {
  const DeviceGuard guard(IndexLogits::kName, p.q.device.index);
  LogitArgs a = logit_args(p.q, p.weights, p.cache, p.pages, p.rows);
  a.logits = p.logits.data;
  a.logits_dtype = p.logits.dtype;
  a.logits_stride = p.logits.stride[0];
  a.num_columns = p.logits.shape[1];
  a.num_rows = p.q.shape[0];
  launch_logits(IndexLogits::kName, a, static_cast<cudaStream_t>(c.stream.handle));
}

void run_topk(const TopK& p, const RunContext& c) {
  const DeviceGuard guard(TopK::kName, p.logits.device.index);
  TopKArgs a{};
  a.logits = p.logits.data;
  a.logits_dtype = p.logits.dtype;
  a.logits_stride = p.logits.stride[0];
  a.num_columns = p.logits.shape[1];
  a.lens = static_cast<const int32_t*>(p.lens.data);
  a.page_size = 1;
  a.k = static_cast<int>(p.positions.shape[1]);
  a.positions = static_cast<int32_t*>(p.positions.data);
  a.positions_stride = p.positions.stride[0];
  a.counts = static_cast<int32_t*>(p.counts.data);
  topk_kernel<<<static_cast<unsigned>(p.logits.shape[0]), kTopKThreads, 0,
                static_cast<cudaStream_t>(c.stream.handle)>>>(a);
  GANNET_CUDA(TopK::kName, cudaGetLastError());
}

size_t workspace_index_select(const IndexSelect& p, int) {
  if (p.max_seq_len <= p.topk_slots.shape[1]) return 0;  // every row selects everything: no scores are needed
  return sizeof(float) * static_cast<size_t>(select_rows_per_block(p)) * static_cast<size_t>(p.max_seq_len);
}

void run_index_select(const IndexSelect& p, const RunContext& c) {
  const DeviceGuard guard(IndexSelect::kName, p.q.device.index);
  const auto stream = static_cast<cudaStream_t>(c.stream.handle);
  const bool all = p.max_seq_len <= p.topk_slots.shape[1];
  LogitArgs l = logit_args(p.q, p.weights, p.cache, p.pages, p.rows);
  l.logits = c.workspace;
  l.logits_dtype = DType::kF32;
  l.logits_stride = p.max_seq_len;
  l.num_columns = p.max_seq_len;
  TopKArgs t{};
  t.logits = l.logits;
  t.logits_dtype = l.logits_dtype;
  t.logits_stride = p.max_seq_len;
  t.num_columns = p.max_seq_len;
  t.rows = l.rows;
  t.pages = l.pages;
  t.page_size = p.cache.page_size;
  t.num_pages = p.cache.num_pages;
  t.k = static_cast<int>(p.topk_slots.shape[1]);
  t.slots = static_cast<int32_t*>(p.topk_slots.data);
  t.slots_stride = p.topk_slots.stride[0];
  t.counts = static_cast<int32_t*>(p.topk_lens.data);
  if (p.topk_positions.given()) {
    t.positions = static_cast<int32_t*>(p.topk_positions.data);
    t.positions_stride = p.topk_positions.stride[0];
  }
  const int64_t rows_per_block = all ? p.q.shape[0] : select_rows_per_block(p);
  for (int64_t first = 0; first < p.q.shape[0]; first += rows_per_block) {
    l.first_row = t.first_row = first;
    l.num_rows = std::min(rows_per_block, p.q.shape[0] - first);
    if (!all) launch_logits(IndexSelect::kName, l, stream);
    topk_kernel<<<static_cast<unsigned>(l.num_rows), kTopKThreads, 0, stream>>>(t);
    GANNET_CUDA(IndexSelect::kName, cudaGetLastError());
  }
}

}  // namespace generic
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
