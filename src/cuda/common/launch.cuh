// How every kernel of this library is launched, and with it programmatic dependent launch (sm_90 and newer), which sets
// a kernel up while the one before it on the stream ends. Stream::overlap switches it.
//
// The rule for kernels. wait_for_stream() is the first statement of every kernel, before any early return: it comes
// back when all that was enqueued before has finished and its writes are visible. Before it a kernel may look at its
// parameters and set up barriers in its own shared memory, nothing else. let_next_start() may stand anywhere behind it.
//
// Why that is enough. Kernel n + 1 starts early when every block of kernel n has called let_next_start() or has ended,
// and then stands in its own wait until n has finished. Kernel n + 2 can start only when every block of n + 1 has got
// past its wait, so when n has finished: nobody writes what an earlier kernel may still read, and a buffer that n + 2
// reuses from n is safe. A kernel that announced its successor before its wait, or that did not wait, would break this
// for the two kernels around it. Copies, memsets and other libraries' kernels are enqueued without the attribute and
// start when all before them has finished.
//
// Where let_next_start() stands is a question of speed alone: blocks of the next kernel take shared memory and
// registers that nobody uses, so a kernel whose blocks all run at once announces at the start; with more blocks than
// fit, the last wave does.
#pragma once

#include <cuda_runtime.h>

#include "cuda/common/check.h"
#include "gannet/device.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

__device__ inline void wait_for_stream() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
__device__ inline void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

struct Grid {
  int64_t blocks = 1;
  int threads = 1;
  size_t shared_bytes = 0;  // dynamic
  int cluster = 1;          // blocks of a cluster
  int64_t blocks_y = 1;
};

/// Launches `kernel`, whose first statement is wait_for_stream(), on the current device.
template <class... Params, class... Args>
void launch_kernel(const char* function, void (*kernel)(Params...), const Grid& grid, Stream stream,
                   const Args&... args) {
  if (grid.shared_bytes > 0)
    GANNET_CUDA(function, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                               static_cast<int>(grid.shared_bytes)));
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (grid.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = static_cast<unsigned>(grid.cluster);
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  if (stream.overlap && can_overlap(function, reinterpret_cast<const void*>(kernel))) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks), static_cast<unsigned>(grid.blocks_y));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = attributes;
  config.numAttrs = count;
  GANNET_CUDA(function, cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...));
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
