// Stands in for the CUDA benchmark in a build without CUDA.
#include "bench/cuda_bench.h"
#include "core/format.h"

namespace gannet {
inline namespace v0 {
namespace bench {

int run_cuda_bench(const CudaBenchOptions&) {
  fail(ErrorCode::kUnsupported, "bench", "--device is cuda; this build has no CUDA (configure with -DGANNET_CUDA=ON)");
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet
