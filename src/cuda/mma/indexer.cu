// Launches index_logits_kernel: which configuration, how many rows a unit.
#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/mma/indexer.cuh"
#include "cuda/mma/set.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace mma {

namespace {

using indexer::Config;

template <class C>
void launch(const char* function, const LogitProblem& logits, int device, int64_t rows, Stream stream) {
  int sms = 0, shared = 0;
  GANNET_CUDA(function, cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  GANNET_CUDA(function, cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  constexpr size_t kStaticBytes = 1024;  // parts, bounds and what the compiler adds
  const auto room = (static_cast<size_t>(shared) - kStaticBytes - C::shared_bytes(0)) / C::slot_bytes();
  const int slots = static_cast<int>(std::min<size_t>(room, indexer::kMaxSlots));
  // Measured, 8,192 causal rows: the blocks with the short units took 13 us a unit longer than its tiles of 2.5 us.
  constexpr int kFixedTiles = 5;
  const index_units::Problem a = index_units::make_problem(logits, rows, slots, kFixedTiles);
  const size_t bytes = C::shared_bytes(a.rows_per_unit * a.units_per_phase);
  launch_kernel(function, indexer::index_logits_kernel<C>,
                {.blocks = sms, .threads = indexer::kThreads, .shared_bytes = bytes}, stream, a);
}

template <bool kBf16, int kChunks>
void launch_heads(const char* function, const LogitProblem& a, int device, int64_t rows, Stream stream) {
  if (a.num_heads <= 16) launch<Config<kBf16, 1, kChunks>>(function, a, device, rows, stream);
  else if (a.num_heads <= 32) launch<Config<kBf16, 2, kChunks>>(function, a, device, rows, stream);
  else launch<Config<kBf16, 4, kChunks>>(function, a, device, rows, stream);
}

template <bool kBf16>
void launch_dims(const char* function, const LogitProblem& a, int device, int64_t rows, Stream stream) {
  if (a.cache.head_dim == 64) launch_heads<kBf16, 1>(function, a, device, rows, stream);
  else launch_heads<kBf16, 2>(function, a, device, rows, stream);
}

}  // namespace

void launch_index_logits(const char* function, const TensorView& q, const TensorView& weights,
                         const IndexCacheView& cache, const PageTableView& pages, const QueryRows& rows,
                         const LogitBlock& block, Stream stream) {
  const LogitProblem a = make_logit_problem(q, weights, cache, pages, rows, block);
  if (q.dtype == DType::kBf16) launch_dims<true>(function, a, q.device.index, q.shape[0], stream);
  else launch_dims<false>(function, a, q.device.index, q.shape[0], stream);
}

}  // namespace mma
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
