// Eight neighbouring values as one access of a thread: 16 bytes of bf16, 8 of e4m3, twice 16 of fp32. Stores to global
// memory, by __stwb: nvcc takes a plain store of selected values apart into four.
#pragma once

#include <cstring>

#include "cuda/common/convert.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {

/// Two values as bf16 by the instruction, which writes another NaN than float_to_bf16.
__device__ inline uint32_t pack_bf16_numbers(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &both, sizeof bits);
  return bits;
}

/// Two values as bf16, as float_to_bf16 has them.
__device__ inline uint32_t pack_bf16(float low, float high) {
  if (isnan(low) || isnan(high)) return float_to_bf16(low) | static_cast<uint32_t>(float_to_bf16(high)) << 16;
  return pack_bf16_numbers(low, high);
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
    __stwb(reinterpret_cast<uint4*>(p), low);
    __stwb(reinterpret_cast<uint4*>(p) + 1, high);
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
  __device__ void store(void* p) const { __stwb(reinterpret_cast<uint4*>(p), all); }
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
    bool any_nan = false;
#pragma unroll
    for (int i = 0; i < 8; ++i) any_nan |= isnan(x[i]);
    if (any_nan) {
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = pack_bf16_numbers(x[2 * i], x[2 * i + 1]);
    }
    return {{w[0], w[1], w[2], w[3]}};
  }
};

template <>
struct Eight<uint8_t> {
  uint32_t low, high;
  __device__ static Eight load(const void* p) {
    const uint2 both = *reinterpret_cast<const uint2*>(p);
    return {both.x, both.y};
  }
  __device__ void store(void* p) const { __stwb(reinterpret_cast<uint2*>(p), make_uint2(low, high)); }
  __device__ void expand(float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // by way of half, which holds every e4m3 value
      const auto pair = static_cast<__nv_fp8x2_storage_t>((i < 2 ? low : high) >> (16 * (i % 2)));
      const float2 two = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
      x[2 * i] = two.x;
      x[2 * i + 1] = two.y;
    }
    // NaN as e4m3_to_float has it. A byte of magnitude 0x7f carries into its top bit; no other does.
    constexpr uint32_t kMagnitude = 0x7f7f7f7fu, kOnes = 0x01010101u;
    if ((((low & kMagnitude) + kOnes) | ((high & kMagnitude) + kOnes)) & ~kMagnitude) {
#pragma unroll
      for (float& y : x)
        if (isnan(y)) y = __uint_as_float(0x7fc00000u);
    }
  }
  __device__ static Eight pack(const float (&x)[8]) {
    uint32_t w[2] = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i / 2] |= pack_e4m3(x[2 * i], x[2 * i + 1]) << (16 * (i % 2));
    return {w[0], w[1]};
  }
};

/// Eight values from or to a place that is aligned to 4 bytes only, as rows of some formats and widths are.
template <class E>
__device__ E load_words(const void* p) {
  uint32_t w[sizeof(E) / 4];
#pragma unroll
  for (size_t i = 0; i < sizeof(E) / 4; ++i) w[i] = static_cast<const uint32_t*>(p)[i];
  E e;
  memcpy(&e, w, sizeof e);
  return e;
}
template <class E>
__device__ void store_words(void* p, const E& e) {
  uint32_t w[sizeof(E) / 4];
  memcpy(w, &e, sizeof e);
#pragma unroll
  for (size_t i = 0; i < sizeof(E) / 4; ++i) static_cast<uint32_t*>(p)[i] = w[i];
}

/// Single values of these types as fp32.
__device__ inline float load_value(const float* p, int64_t i) { return p[i]; }
__device__ inline float load_value(const uint16_t* p, int64_t i) { return bf16_to_float(p[i]); }
__device__ inline void store_value(float* p, int64_t i, float x) { p[i] = x; }
__device__ inline void store_value(uint16_t* p, int64_t i, float x) { p[i] = float_to_bf16(x); }

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
