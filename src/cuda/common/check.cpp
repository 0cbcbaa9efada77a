#include "cuda/common/check.h"

#include "core/format.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

void fail_cuda(cudaError_t status, const char* function, const char* call) {
  fail(ErrorCode::kDevice, function, "{} returned {}: {}", call, cudaGetErrorName(status), cudaGetErrorString(status));
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
