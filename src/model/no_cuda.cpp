// Stands in for src/model/cuda in a build without the CUDA toolkit.
#include "core/format.h"
#include "model/compute.h"

namespace gannet {
inline namespace v0 {

std::unique_ptr<Compute> make_cuda_compute(const ComputeOptions& options) {
  fail(ErrorCode::kUnsupported, "make_compute", "device is {}; accepted: cpu (this build has no CUDA)",
       to_string(options.device));
}

}  // namespace v0
}  // namespace gannet
