#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>

#include "cuda/common/check.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

bool can_overlap(const char* function, const void* kernel) {
  constexpr int kFirstMajor = 9, kFirstPtx = 90;  // sm_90, where griddepcontrol begins
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, bool> known;  // asking the driver takes longer than a launch
  int device = 0;
  GANNET_CUDA(function, cudaGetDevice(&device));
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known.find({kernel, device}); found != known.end()) return found->second;
  }
  int major = 0;
  cudaFuncAttributes attributes{};
  GANNET_CUDA(function, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  GANNET_CUDA(function, cudaFuncGetAttributes(&attributes, kernel));
  const bool able = major >= kFirstMajor && attributes.ptxVersion >= kFirstPtx;
  const std::lock_guard lock(mutex);
  known[{kernel, device}] = able;
  return able;
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
