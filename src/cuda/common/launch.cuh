// Launches that overlap the end of what runs before them on the stream (programmatic dependent launch, sm_90 and
// newer).
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/check.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

/// The first statement of a kernel that launch_overlapped() launches: waits until all before it on the stream has
/// finished and its writes are visible, then lets the next such kernel be set up. Before it nothing may be read or
/// written that another kernel may touch.
__device__ inline void wait_for_stream() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/// Launches `kernel`, which begins with wait_for_stream(), with `shared_bytes` of dynamic shared memory.
template <class Params>
void launch_overlapped(const char* function, void (*kernel)(Params), int blocks, int threads, size_t shared_bytes,
                       int device, cudaStream_t stream, const Params& params) {
  int major = 0;
  GANNET_CUDA(function, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  GANNET_CUDA(function, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(shared_bytes)));
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = major >= 9 ? 1 : 0;
  GANNET_CUDA(function, cudaLaunchKernelEx(&config, kernel, params));
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
