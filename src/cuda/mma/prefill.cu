// Launches prefill_kernel: which widths, and how many blocks.
#include "cuda/common/check.h"
#include "cuda/common/launch.cuh"
#include "cuda/mma/prefill.cuh"
#include "cuda/mma/set.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace mma {

namespace {

template <class C>
void launch(const Problem& p, Stream stream) {
  const char* function = RaggedPrefill::kName;
  const int64_t blocks = prefill::num_tile_ids(p.q_rows, p.num_requests, C::kTileRows) * p.num_heads;
  if (p.num_requests == 0) return;  // rows of no request
  launch_kernel(function, prefill_kernel<C>,
                {.blocks = blocks, .threads = C::kThreads, .shared_bytes = C::kSharedBytes}, stream, p);
}

template <int kKeyDim, int kValueDim>
void launch(const Problem& p, Stream stream) {
  if (p.k_rope != nullptr) launch<PrefillConfig<kKeyDim, kValueDim, true>>(p, stream);
  else launch<PrefillConfig<kKeyDim, kValueDim, false>>(p, stream);
}

}  // namespace

void run_ragged_prefill(const RaggedPrefill& p, const RunContext& c) {
  const DeviceGuard guard(RaggedPrefill::kName, p.q.device.index);
  const Problem problem = prefill::make_problem(p);
  switch (prefill::widths_of(p)) {
    case prefill::Widths::kMla192: return launch<192, 128>(problem, c.stream);
    case prefill::Widths::kWide256: return launch<256, 256>(problem, c.stream);
    case prefill::Widths::kNone: break;  // refused by the set
  }
}

}  // namespace mma
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
