// Index logits in fp32, and the indexer's other two operations with them.
#include "cuda/common/check.h"
#include "cuda/common/index_select.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/logit_problem.cuh"
#include "cuda/common/topk.cuh"
#include "cuda/generic/set.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace generic {

namespace {

// ---- logits ----------------------------------------------------------------------------------------------------

constexpr int kLogitThreads = 256;
constexpr int kKeysPerBlock = 64;  // 8 keys a warp against one load of the row's queries

// Shared memory: queries [head_dim][num_heads] fp32 (32 KB for 64 x 128), so that lanes (heads) read neighbours.
__global__ void __launch_bounds__(kLogitThreads) index_logits_kernel(const __grid_constant__ LogitProblem a) {
  wait_for_stream();
  let_next_start();
  extern __shared__ float query[];
  const int64_t key_blocks = (a.block.num_columns + kKeysPerBlock - 1) / kKeysPerBlock;
  const int64_t local = blockIdx.x / key_blocks, row = a.block.first_row + local;
  const int64_t first_key = static_cast<int64_t>(blockIdx.x % key_blocks) * kKeysPerBlock;
  const RowPlace place = place_row(a.rows, a.pages, a.cache.page_size, row);
  const int64_t num_keys = min(place.num_keys, a.block.num_columns);
  if (place.request < 0 || first_key >= num_keys || num_keys <= a.block.unscored) return;
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
      store_element(a.block.logits, local * a.block.stride + key, a.block.bf16 ? DType::kBf16 : DType::kF32,
                    slot >= 0 ? sum * index_k_scale(a.cache, slot) : -INFINITY);
    }
  }
}

void launch_logits(const char* function, const TensorView& q, const TensorView& weights, const IndexCacheView& cache,
                   const PageTableView& pages, const QueryRows& rows, const LogitBlock& block, Stream stream) {
  const LogitProblem a = make_logit_problem(q, weights, cache, pages, rows, block);
  const int64_t key_blocks = (block.num_columns + kKeysPerBlock - 1) / kKeysPerBlock;
  const size_t bytes = sizeof(float) * static_cast<size_t>(a.num_heads) * static_cast<size_t>(cache.head_dim);
  launch_kernel(function, index_logits_kernel,
                {.blocks = block.num_rows * key_blocks, .threads = kLogitThreads, .shared_bytes = bytes}, stream, a);
}

}  // namespace

void run_index_logits(const IndexLogits& p, const RunContext& c) { cuda::run_index_logits(p, c, launch_logits); }

void run_topk(const TopK& p, const RunContext& c) {
  const DeviceGuard guard(TopK::kName, p.logits.device.index);
  TopKArgs a{};
  a.logits = p.logits.data;
  a.dtype = p.logits.dtype;
  a.logits_stride = p.logits.stride[0];
  a.num_columns = p.logits.shape[1];
  a.lens = static_cast<const int32_t*>(p.lens.data);
  a.page_size = 1;
  a.k = p.positions.shape[1];
  a.positions = static_cast<int32_t*>(p.positions.data);
  a.positions_stride = p.positions.stride[0];
  a.counts = static_cast<int32_t*>(p.counts.data);
  launch_topk(TopK::kName, a, p.logits.shape[0], c.stream);
}

void run_index_select(const IndexSelect& p, const RunContext& c) { cuda::run_index_select(p, c, launch_logits); }

}  // namespace generic
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
