// Eight neighbouring values as one access of a thread: 16 bytes of bf16, 8 of e4m3, twice 16 of fp32.
#pragma once

#include <cstring>

#include "cuda/common/convert.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {

/// Two values as bf16, as float_to_bf16 has them. The instruction has another NaN.
__device__ inline uint32_t pack_bf16(float low, float high) {
  if (isnan(low) || isnan(high)) return float_to_bf16(low) | static_cast<uint32_t>(float_to_bf16(high)) << 16;
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &both, sizeof bits);
  return bits;
}

/// Two values as e4m3, as float_to_e4m3 has them: the instruction of sm_89 and newer writes the same NaN.
__device__ inline uint32_t pack_e4m3(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
#else
  return float_to_e4m3(low) | static_cast<uint32_t>(float_to_e4m3(high)) << 8;
#endif
}

/// The element type of a dtype: float, uint16_t (bf16), uint8_t (e4m3).
template <class T>
struct Eight;

template <>
struct Eight<float> {
  uint4 low, high;
  __device__ static Eight load(const void* p) {
    return {reinterpret_cast<const uint4*>(p)[0], reinterpret_cast<const uint4*>(p)[1]};
  }
  __device__ void store(void* p) const {
    reinterpret_cast<uint4*>(p)[0] = low;
    reinterpret_cast<uint4*>(p)[1] = high;
  }
  __device__ void expand(float (&x)[8]) const {
    const uint32_t w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = __uint_as_float(w[i]);
  }
  __device__ static Eight pack(const float (&x)[8]) {
    return {{__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])},
            {__float_as_uint(x[4]), __float_as_uint(x[5]), __float_as_uint(x[6]), __float_as_uint(x[7])}};
  }
};

template <>
struct Eight<uint16_t> {
  uint4 all;
  __device__ static Eight load(const void* p) { return {*reinterpret_cast<const uint4*>(p)}; }
  __device__ void store(void* p) const { *reinterpret_cast<uint4*>(p) = all; }
  __device__ void expand(float (&x)[8]) const {
    const uint32_t w[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __uint_as_float(w[i] << 16);
      x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
  }
  __device__ static Eight pack(const float (&x)[8]) {
    uint32_t w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
    return {{w[0], w[1], w[2], w[3]}};
  }
};

template <>
struct Eight<uint8_t> {
  uint32_t low, high;  // rows of some formats are aligned to 4 bytes only
  __device__ static Eight load(const void* p) {
    if (reinterpret_cast<uintptr_t>(p) % 8 == 0) {
      const uint2 both = *reinterpret_cast<const uint2*>(p);
      return {both.x, both.y};
    }
    return {reinterpret_cast<const uint32_t*>(p)[0], reinterpret_cast<const uint32_t*>(p)[1]};
  }
  __device__ void store(void* p) const {
    if (reinterpret_cast<uintptr_t>(p) % 8 == 0) {
      *reinterpret_cast<uint2*>(p) = {low, high};
    } else {
      reinterpret_cast<uint32_t*>(p)[0] = low;
      reinterpret_cast<uint32_t*>(p)[1] = high;
    }
  }
  __device__ void expand(float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // by way of half, which holds every e4m3 value; NaN as e4m3_to_float has it
      const auto pair = static_cast<__nv_fp8x2_storage_t>((i < 2 ? low : high) >> (16 * (i % 2)));
      const float2 two = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
      x[2 * i] = isnan(two.x) ? __uint_as_float(0x7fc00000u) : two.x;
      x[2 * i + 1] = isnan(two.y) ? __uint_as_float(0x7fc00000u) : two.y;
    }
  }
  __device__ static Eight pack(const float (&x)[8]) {
    uint32_t w[2] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i / 2] |= pack_e4m3(x[2 * i], x[2 * i + 1]) << (16 * (i % 2));
    return {w[0], w[1]};
  }
};

/// Single values of these types as fp32.
__device__ inline float load_value(const float* p, int64_t i) { return p[i]; }
__device__ inline float load_value(const uint16_t* p, int64_t i) { return bf16_to_float(p[i]); }
__device__ inline void store_value(float* p, int64_t i, float x) { p[i] = x; }
__device__ inline void store_value(uint16_t* p, int64_t i, float x) { p[i] = float_to_bf16(x); }

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
