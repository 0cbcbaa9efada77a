// Elements of any dtype as fp32 on the device, and back. The conversions follow gannet/dtype.h bit for bit: round to
// nearest even, e4m3 saturates and writes NaN as 0x7F.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "gannet/dtype.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

__device__ inline float bf16_to_float(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
__device__ inline uint16_t float_to_bf16(float x) {
  const uint32_t u = __float_as_uint(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((u >> 16) | 0x40u);
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
__device__ inline float e4m3_to_float(uint8_t bits) {
  const uint32_t magnitude = bits & 0x7fu;
  const uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24;
  if (magnitude == 0x7fu) return __uint_as_float(0x7fc00000u);
  // The seven bits as an fp32 with exponent bias 127 instead of 7: exact after a multiplication by 2^120.
  return __uint_as_float(__float_as_uint(__uint_as_float(magnitude << 20) * 0x1p120f) | sign);
}
__device__ inline uint8_t float_to_e4m3(float x) {
  if (isnan(x)) return 0x7f;
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

/// Element i of a buffer of fp32, bf16 or e4m3.
__device__ inline float load_element(const void* data, int64_t i, DType t) {
  switch (t) {
    case DType::kBf16: return bf16_to_float(static_cast<const uint16_t*>(data)[i]);
    case DType::kE4m3: return e4m3_to_float(static_cast<const uint8_t*>(data)[i]);
    default: return static_cast<const float*>(data)[i];
  }
}
__device__ inline void store_element(void* data, int64_t i, DType t, float x) {
  if (t == DType::kBf16) static_cast<uint16_t*>(data)[i] = float_to_bf16(x);
  else static_cast<float*>(data)[i] = x;
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
