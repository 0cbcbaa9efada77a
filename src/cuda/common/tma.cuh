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

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
