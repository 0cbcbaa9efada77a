// Half-precision MMA with few columns, for kernels that convert e4m3 in registers: f16 operands hold every e4m3 value
// exactly. A is in registers, B (columns as rows) K-major in shared memory, sums in fp32 registers.
//
// A in registers, f16 and bf16 alike: thread (warp w, lane 4 g + t) holds of rows 16 w + g (words 0 and 2) and
// 16 w + g + 8 (1 and 3) the columns 2 t, 2 t + 1 (0 and 1) and 8 more (2 and 3).
#pragma once

#include <cstdint>

#include "cuda/common/wgmma.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {

#define GANNET_WGMMA_N16(TYPE)                                                                         \
  asm volatile(                                                                                        \
      "{\n .reg .pred p;\n setp.ne.b32 p, %13, 0;\n"                                                   \
      "wgmma.mma_async.sync.aligned.m64n16k16.f32." TYPE "." TYPE                                      \
      " {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}"                     \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]) \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)))
#define GANNET_WGMMA_N32(TYPE)                                                                                        \
  asm volatile(                                                                                                       \
      "{\n .reg .pred p;\n setp.ne.b32 p, %21, 0;\n"                                                                  \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." TYPE "." TYPE                                                     \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, " \
      "0;\n}"                                                                                                         \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]),   \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])                      \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)))

/// d[64 x N] = (accumulate ? d : 0) + a[64 x 16] b[N x 16]^T; N is twice the length of d.
__device__ inline void wgmma_f16_rs(float (&d)[8], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  GANNET_WGMMA_N16("f16");
}
__device__ inline void wgmma_f16_rs(float (&d)[16], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  GANNET_WGMMA_N32("f16");
}
__device__ inline void wgmma_bf16_rs(float (&d)[8], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  GANNET_WGMMA_N16("bf16");
}
__device__ inline void wgmma_bf16_rs(float (&d)[16], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  GANNET_WGMMA_N32("bf16");
}
#undef GANNET_WGMMA_N16
#undef GANNET_WGMMA_N32

/// d[16x8] += a[16x16] b[16x8] for f16 operands and fp32 sums, by a warp.
__device__ inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Four e4m3 values as two pairs of f16, exactly; NaN stays NaN.
__device__ inline void e4m3_to_f16(uint32_t four, uint32_t& low, uint32_t& high) {
  asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e4m3x2 %0, l;\n cvt.rn.f16x2.e4m3x2 %1, h;\n}"
      : "=r"(low), "=r"(high)
      : "r"(four));
}
/// Two values rounded to f16, the first in the lower half.
__device__ inline uint32_t round_to_f16x2(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
