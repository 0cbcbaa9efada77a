#include "cuda/common/check.h"

#include "core/format.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

void fail_cuda(cudaError_t status, const char* function, const char* call) {
  fail(ErrorCode::kDevice, function, "{} returned {}: {}", call, cudaGetErrorName(status), cudaGetErrorString(status));
}

bool has_device(int least, int most) noexcept {
  int count = 0, major = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && least <= major &&
         major <= most;
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
