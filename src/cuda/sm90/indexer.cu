// Launches index_logits_kernel of Hopper.
#include <algorithm>

#include "cuda/common/launch.cuh"
#include "cuda/sm90/indexer.cuh"
#include "cuda/sm90/set.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace sm90 {

namespace {

template <class C>
void launch(const char* function, const LogitProblem& logits, int device, int64_t rows, Stream stream) {
  int sms = 0;
  GANNET_CUDA(function, cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  // Measured, 8,192 causal rows: the blocks with the short units took 8.5 us a unit longer than its tiles of 1.1 us.
  constexpr int kFixedTiles = 8;
  const index_units::Problem a = index_units::make_problem(logits, rows, C::kSlots, kFixedTiles);
  const size_t bytes = C::shared_bytes(a.rows_per_unit * a.units_per_phase);
  auto* kernel = a.block.bf16 ? indexer::index_logits_kernel<C, uint16_t> : indexer::index_logits_kernel<C, float>;
  launch_kernel(function, kernel, {.blocks = sms, .threads = indexer::kThreads, .shared_bytes = bytes}, stream, a);
}

}  // namespace

void launch_index_logits(const char* function, const TensorView& q, const TensorView& weights,
                         const IndexCacheView& cache, const PageTableView& pages, const QueryRows& rows,
                         const LogitBlock& block, Stream stream) {
  const LogitProblem a = make_logit_problem(q, weights, cache, pages, rows, block);
  if (a.num_heads <= 32) launch<indexer::Config<32>>(function, a, q.device.index, q.shape[0], stream);
  else launch<indexer::Config<64>>(function, a, q.device.index, q.shape[0], stream);
}

}  // namespace sm90
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
