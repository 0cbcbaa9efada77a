// Thread block clusters (sm_90 and newer): blocks that run together and read each other's shared memory. Compiled for
// an older architecture there are none: a block is its own cluster, and the barriers are the block's.
#pragma once

#include <cstdint>

#include "cuda/common/mma.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900

__device__ inline uint32_t cluster_rank() { return 0; }
__device__ inline uint32_t cluster_size() { return 1; }
__device__ inline void cluster_arrive() {}
__device__ inline void cluster_wait() { __syncthreads(); }
__device__ inline uint32_t load_remote(const uint32_t* shared, uint32_t) { return *shared; }
__device__ inline uint2 load_remote(const uint2* shared, uint32_t) { return *shared; }

#else

__device__ inline uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ inline uint32_t cluster_size() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
  return r;
}
/// Every thread of the cluster arrives, then waits; what was written to shared memory before is seen after. Warps may
/// come to it diverged.
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

/// The value that lies at this address of shared memory in the block of that rank.
__device__ inline uint32_t remote_address(const void* shared, uint32_t rank) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared_address(shared)), "r"(rank));
  return r;
}
__device__ inline uint32_t load_remote(const uint32_t* shared, uint32_t rank) {
  uint32_t x;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(x) : "r"(remote_address(shared, rank)) : "memory");
  return x;
}
__device__ inline uint2 load_remote(const uint2* shared, uint32_t rank) {
  uint2 x;
  asm volatile("ld.shared::cluster.v2.u32 {%0, %1}, [%2];"
               : "=r"(x.x), "=r"(x.y)
               : "r"(remote_address(shared, rank))
               : "memory");
  return x;
}

#endif

__device__ inline void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
