// The tensor-core and copy instructions that sm_80 and everything newer have.
#pragma once

#include <cstdint>

namespace gannet {
inline namespace v0 {
namespace cuda {

__device__ inline uint32_t shared_address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

/// Four 8x8 matrices of 16-bit values; thread i gives the address of row i % 8 of matrix i / 8.
__device__ inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

/// d[16x8] += a[16x16] b[16x8] for bf16 operands and fp32 sums.
__device__ inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// The same for half operands.
__device__ inline void mma_half(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// 2^x, to about 2 units in the last place; -inf gives 0.
__device__ inline float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
/// Two values rounded to bf16, the first in the lower half.
__device__ inline uint32_t round_to_bf16x2(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

/// The same as half; magnitudes from 65,520 become infinite.
__device__ inline uint32_t round_to_half2(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

/// *p before one is added to it. Not atomicAdd, which the assembler turns into one for all lanes and a shuffle, which
/// waits for the result at once; an increment that wraps at 2^31 - 1 is left alone.
__device__ inline int fetch_increment(int* p) {
  int before;
  asm volatile("atom.global.inc.u32 %0, [%1], 0x7fffffff;" : "=r"(before) : "l"(p) : "memory");
  return before;
}

/// seen + 0 * x for two bf16 values: 0 as long as all of them have been finite, NaN from then on.
__device__ inline uint32_t note_non_finite(uint32_t seen, uint32_t x) {
  uint32_t y;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x), "r"(0), "r"(seen));
  return y;
}
__device__ inline bool any_non_finite(uint32_t seen) { return (seen & 0x7fff7fffu) != 0; }

/// A barrier of so many warps, `id` from 1.
template <int kWarps>
__device__ inline void warps_barrier(int id) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(32 * kWarps) : "memory");
}

/// 16 bytes from global to shared memory, past the L1; `copy` false writes zeros and reads nothing.
__device__ inline void copy_async_16(uint32_t shared, const void* global, bool copy) {
  const int bytes = copy ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
__device__ inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ inline void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
