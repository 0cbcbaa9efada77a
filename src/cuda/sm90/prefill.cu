// Launches the Hopper kernel of ragged prefill: blocks that persist, and the counter from which they take tiles.
#include <algorithm>

#include "cuda/common/check.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/sm90/prefill.cuh"
#include "cuda/sm90/set.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace sm90 {

size_t workspace_ragged_prefill(const RaggedPrefill&, int) { return sizeof(int); }

void run_ragged_prefill(const RaggedPrefill& p, const RunContext& c) {
  const char* function = RaggedPrefill::kName;
  const DeviceGuard guard(function, p.q.device.index);
  const prefill::Problem problem = prefill::make_problem(p);
  const int64_t ids =
      prefill::num_tile_ids(problem.q_rows, problem.num_requests, ragged::kTileRows) * problem.num_heads;
  if (problem.num_requests == 0) return;  // rows of no request
  int sms = 0;
  GANNET_CUDA(function, cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, p.q.device.index));
  ragged::Maps maps{};
  maps.q = map_rows(function, p.q, ragged::kTileRows);
  if (p.k.shape[0] > 0) {  // else no keys are read
    maps.k = map_rows(function, p.k, ragged::kKeys);
    maps.last = p.k_rope.given() ? map_rows(function, p.k_rope, ragged::kKeys) : maps.k;
    maps.v = map_rows(function, p.v, ragged::kKeys);
  }
  auto* counter = reinterpret_cast<int*>(c.workspace);
  GANNET_CUDA(function, cudaMemsetAsync(counter, 0, sizeof(int), static_cast<cudaStream_t>(c.stream.handle)));
  launch_kernel(
      function, ragged::prefill_kernel,
      {.blocks = std::min<int64_t>(sms, ids), .threads = ragged::kThreads, .shared_bytes = ragged::kSharedBytes},
      c.stream, problem, maps, counter, static_cast<int>(ids));
}

}  // namespace sm90
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
