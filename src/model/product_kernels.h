// The loops behind Projector, compiled once per instruction set.
#pragma once

#include <cstdint>

#include "gannet/dtype.h"

namespace gannet {
inline namespace v0 {

struct ProductKernels {
  const char* name;
  bool (*runs_here)();
  /// y[m, n] = sum over k of x[m, k] w[n, k]. w is kBf16 or kF32, strides in elements.
  void (*transposed)(const float* x, int64_t x_stride, int64_t m, const void* w, DType dtype, int64_t w_stride,
                     int64_t n, int64_t k, float* y, int64_t y_stride);
  /// y[m, n] = sum over k of x[m, k] w[k, n].
  void (*plain)(const float* x, int64_t x_stride, int64_t m, const void* w, DType dtype, int64_t w_stride, int64_t n,
                int64_t k, float* y, int64_t y_stride);
  /// dst[i] = bf16 src[i].
  void (*widen_bf16)(const Bf16* src, int64_t n, float* dst);
  /// dst[i] = e4m3 src[i] * scale, the product in fp32.
  void (*widen_e4m3)(const E4m3* src, int64_t n, float scale, float* dst);
};

extern const ProductKernels kPortableProducts;
extern const ProductKernels kAvx512Products;

}  // namespace v0
}  // namespace gannet
