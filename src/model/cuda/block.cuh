// What the decoder's kernels share: sums over a block of threads, and the gate of an MLP.
#pragma once

namespace gannet {
inline namespace v0 {
namespace cuda {

__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }

/// The sum of x over a block of kWarps whole warps, in every thread, in the order of the warps. partial: [kWarps] in
/// shared memory, free for others once every thread is back.
template <int kWarps>
__device__ float block_sum(float x, float* partial) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0f;
  for (int i = 0; i < kWarps; ++i) sum += partial[i];
  return sum;
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
