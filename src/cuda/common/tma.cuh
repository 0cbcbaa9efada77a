// The copy engine (TMA) of sm_90 and newer: boxes of a tensor to shared memory, announced at an mbarrier.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/common/mma.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {

/// One arrival, after which the barrier's phase also waits for so many bytes to be copied.
__device__ inline void mbarrier_arrive_expecting(uint64_t* b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(b)), "r"(bytes)
               : "memory");
}
/// The box at (column, head, row) of a map of common/tensor_map.h to `shared`, a multiple of 1,024. By one thread.
__device__ inline void copy_box(uint32_t shared, const CUtensorMap& map, uint64_t* barrier, int column, int head,
                                int row) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(shared),
      "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(head), "r"(row)
      : "memory");
}
/// `bytes` from global memory to `shared`, all multiples of 16. By one thread.
__device__ inline void copy_bytes(uint32_t shared, const void* global, uint32_t bytes, uint64_t* barrier,
                                  uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}

/// For copy_page_box: lines that are read once leave the L2 first.
__device__ inline uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
/// The box at (column, row of the page, page) of map_pages() to `shared`; what lies outside the tensor arrives as
/// zeros.
__device__ inline void copy_page_box(uint32_t shared, const CUtensorMap& map, uint64_t* barrier, int column, int row,
                                     int page, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(shared),
      "l"(&map), "r"(shared_address(barrier)), "r"(column), "r"(row), "r"(page), "l"(policy)
      : "memory");
}
/// Asks for `bytes` (a multiple of 16) of global memory from `from` on to come to the L2. Nothing waits for it.
__device__ inline void prefetch_bytes(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(from)), "r"(bytes)
               : "memory");
}
/// Brings a map near before its first use.
__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
