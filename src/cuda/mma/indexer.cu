// Launches index_logits_kernel: which configuration, how many rows a unit.
#include <algorithm>

#include "cuda/common/check.h"
#include "cuda/mma/indexer.cuh"
#include "cuda/mma/set.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace mma {

namespace {

using indexer::Config;
using indexer::Problem;

int64_t divide_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit; }

template <class C>
void launch(const char* function, Problem a, int device, int64_t rows, cudaStream_t stream) {
  int sms = 0, shared = 0;
  GANNET_CUDA(function, cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  GANNET_CUDA(function, cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  constexpr size_t kStaticBytes = 1024;  // parts, bounds and what the compiler adds
  const auto room = (static_cast<size_t>(shared) - kStaticBytes - C::shared_bytes(0)) / C::slot_bytes();
  const int slots = static_cast<int>(std::min<size_t>(room, indexer::kMaxSlots));
  // Rows of a unit: those of a request, in equal parts where they are more than fit; ragged, of the average request.
  const bool ragged = a.rows.cu_q_lens != nullptr;
  const int64_t rows_of_request = ragged ? divide_up(rows, a.rows.num_requests) : a.rows.q_len;
  a.rows_per_unit = static_cast<int>(divide_up(rows_of_request, divide_up(rows_of_request, slots)));
  a.units_per_phase = std::clamp(slots / a.rows_per_unit, 1, indexer::kMaxUnits);
  a.units_per_request = divide_up(rows_of_request, a.rows_per_unit);
  const int64_t last_row = a.block.first_row + a.block.num_rows - 1;
  if (ragged) {  // of a row: at least row / rows_per_unit - 1, at most that and the number of requests
    a.first_unit = std::max<int64_t>(a.block.first_row / a.rows_per_unit - 1, 0);
    a.num_units = last_row / a.rows_per_unit + a.rows.num_requests - a.first_unit;
  } else {
    const auto unit_of = [&](int64_t row) {
      return row / a.rows.q_len * a.units_per_request + row % a.rows.q_len / a.rows_per_unit;
    };
    a.first_unit = unit_of(a.block.first_row);
    a.num_units = unit_of(last_row) + 1 - a.first_unit;
  }
  const size_t bytes = C::shared_bytes(a.rows_per_unit * a.units_per_phase);
  auto* kernel = indexer::index_logits_kernel<C>;
  GANNET_CUDA(function,
              cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  kernel<<<static_cast<unsigned>(sms), indexer::kThreads, bytes, stream>>>(a);
  GANNET_CUDA(function, cudaGetLastError());
}

template <bool kBf16, int kChunks>
void launch_heads(const char* function, const Problem& a, int device, int64_t rows, cudaStream_t stream) {
  if (a.num_heads <= 16) launch<Config<kBf16, 1, kChunks>>(function, a, device, rows, stream);
  else if (a.num_heads <= 32) launch<Config<kBf16, 2, kChunks>>(function, a, device, rows, stream);
  else launch<Config<kBf16, 4, kChunks>>(function, a, device, rows, stream);
}

template <bool kBf16>
void launch_dims(const char* function, const Problem& a, int device, int64_t rows, cudaStream_t stream) {
  if (a.cache.head_dim == 64) launch_heads<kBf16, 1>(function, a, device, rows, stream);
  else launch_heads<kBf16, 2>(function, a, device, rows, stream);
}

}  // namespace

void launch_index_logits(const char* function, const TensorView& q, const TensorView& weights,
                         const IndexCacheView& cache, const PageTableView& pages, const QueryRows& rows,
                         const LogitBlock& block, cudaStream_t stream) {
  Problem a{};
  a.q = q.data;
  a.q_row_stride = q.stride[0];
  a.q_head_stride = q.stride[1];
  a.weights = static_cast<const float*>(weights.data);
  a.weights_stride = weights.stride[0];
  a.num_heads = static_cast<int>(q.shape[1]);
  a.cache = cache;
  a.rows = make_rows(rows);
  a.pages = make_pages(pages);
  a.block = block;
  if (q.dtype == DType::kBf16) launch_dims<true>(function, a, q.device.index, q.shape[0], stream);
  else launch_dims<false>(function, a, q.device.index, q.shape[0], stream);
}

void run_index_logits(const IndexLogits& p, const RunContext& c) {
  const DeviceGuard guard(IndexLogits::kName, p.q.device.index);
  const LogitBlock block{
      p.logits.data, p.logits.stride[0], p.logits.shape[1], 0, p.q.shape[0], p.logits.dtype == DType::kBf16};
  launch_index_logits(IndexLogits::kName, p.q, p.weights, p.cache, p.pages, p.rows, block,
                      static_cast<cudaStream_t>(c.stream.handle));
}

}  // namespace mma
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
