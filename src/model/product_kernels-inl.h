// The loops behind Projector: included by one source file per instruction set, which defines GANNET_PRODUCT_ISA.
//
// Order of additions. Transposed form: y[m, n] is a vector of 16 partial sums, lane l over k = l, l + 16, ..., then
// the lanes are halved until one is left. Plain form: one chain over k. Neither depends on m, on n, on the tile a row
// falls into, or on the number of rows: only on K. Tiles exist to reuse loads: 4 x 4 outputs take 8 vector loads for
// 16 multiply-adds (4 x 1 would take 5 for 4); one row alone takes 8 weight rows at a time, so that 8 chains hide the
// latency of an addition (4 cycles at 2 a cycle).
//
// Vectors are the compiler's own (16 floats), lowered to whatever the instruction set has. Everything is in an unnamed
// namespace: nothing compiled here may be taken for another file's copy.
#include <cstring>

#include "model/product_kernels.h"

namespace gannet {
inline namespace v0 {
namespace {

constexpr int64_t kLanes = 16;
typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

#define GANNET_PRODUCT_INLINE inline __attribute__((always_inline))

GANNET_PRODUCT_INLINE Floats load(const float* p) {
  Floats v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
GANNET_PRODUCT_INLINE Floats load(const Bf16* p) {
  Halves h;
  std::memcpy(&h, p, sizeof h);
  const Words w = __builtin_convertvector(h, Words) << 16;
  Floats v;
  std::memcpy(&v, &w, sizeof v);
  return v;
}
GANNET_PRODUCT_INLINE void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

/// The n < 16 elements at p, zeros behind them.
template <class T>
GANNET_PRODUCT_INLINE Floats load_tail(const T* p, int64_t n) {
  T padded[kLanes] = {};
  std::memcpy(padded, p, static_cast<size_t>(n) * sizeof(T));
  return load(padded);
}

GANNET_PRODUCT_INLINE float sum_lanes(Floats v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

template <int M, int N, class W>
GANNET_PRODUCT_INLINE void transposed_tile(const float* x, int64_t x_stride, const W* w, int64_t w_stride, int64_t k,
                                           float* y, int64_t y_stride) {
  Floats sum[M][N] = {};
  int64_t i = 0;
  for (; i + kLanes <= k; i += kLanes) {
    Floats b[N];
    for (int n = 0; n < N; ++n) b[n] = load(w + n * w_stride + i);
    for (int m = 0; m < M; ++m) {
      const Floats a = load(x + m * x_stride + i);
      for (int n = 0; n < N; ++n) sum[m][n] += a * b[n];
    }
  }
  if (i < k) {
    Floats b[N];
    for (int n = 0; n < N; ++n) b[n] = load_tail(w + n * w_stride + i, k - i);
    for (int m = 0; m < M; ++m) {
      const Floats a = load_tail(x + m * x_stride + i, k - i);
      for (int n = 0; n < N; ++n) sum[m][n] += a * b[n];
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) y[m * y_stride + n] = sum_lanes(sum[m][n]);
}

template <int N, class W>
void transposed_columns(const float* x, int64_t x_stride, int64_t m, const W* w, int64_t w_stride, int64_t k, float* y,
                        int64_t y_stride) {
  int64_t i = 0;
  for (; i + 4 <= m; i += 4)
    transposed_tile<4, N>(x + i * x_stride, x_stride, w, w_stride, k, y + i * y_stride, y_stride);
  for (; i + 2 <= m; i += 2)
    transposed_tile<2, N>(x + i * x_stride, x_stride, w, w_stride, k, y + i * y_stride, y_stride);
  if (i < m) transposed_tile<1, N>(x + i * x_stride, x_stride, w, w_stride, k, y + i * y_stride, y_stride);
}

template <class W>
void transposed_all(const float* x, int64_t x_stride, int64_t m, const W* w, int64_t w_stride, int64_t n, int64_t k,
                    float* y, int64_t y_stride) {
  int64_t j = 0;
  if (m == 1)
    for (; j + 8 <= n; j += 8) transposed_tile<1, 8>(x, x_stride, w + j * w_stride, w_stride, k, y + j, y_stride);
  for (; j + 4 <= n; j += 4) transposed_columns<4>(x, x_stride, m, w + j * w_stride, w_stride, k, y + j, y_stride);
  for (; j < n; ++j) transposed_columns<1>(x, x_stride, m, w + j * w_stride, w_stride, k, y + j, y_stride);
}

template <int M, int N, class W>
GANNET_PRODUCT_INLINE void plain_tile(const float* x, int64_t x_stride, const W* w, int64_t w_stride, int64_t k,
                                      float* y, int64_t y_stride) {
  Floats sum[M][N] = {};
  for (int64_t i = 0; i < k; ++i) {
    Floats b[N];
    for (int n = 0; n < N; ++n) b[n] = load(w + i * w_stride + n * kLanes);
    for (int m = 0; m < M; ++m) {
      const Floats a = x[m * x_stride + i] - Floats{};
      for (int n = 0; n < N; ++n) sum[m][n] += a * b[n];
    }
  }
  for (int m = 0; m < M; ++m)
    for (int n = 0; n < N; ++n) store(y + m * y_stride + n * kLanes, sum[m][n]);
}

/// The last n < 16 columns: vectors with zeros behind them.
template <class W>
void plain_tail(const float* x, int64_t x_stride, int64_t m, const W* w, int64_t w_stride, int64_t n, int64_t k,
                float* y, int64_t y_stride) {
  for (int64_t r = 0; r < m; ++r) {
    Floats sum = {};
    for (int64_t i = 0; i < k; ++i) sum += (x[r * x_stride + i] - Floats{}) * load_tail(w + i * w_stride, n);
    std::memcpy(y + r * y_stride, &sum, static_cast<size_t>(n) * sizeof(float));
  }
}

template <int N, class W>
void plain_columns(const float* x, int64_t x_stride, int64_t m, const W* w, int64_t w_stride, int64_t k, float* y,
                   int64_t y_stride) {
  int64_t i = 0;
  for (; i + 4 <= m; i += 4) plain_tile<4, N>(x + i * x_stride, x_stride, w, w_stride, k, y + i * y_stride, y_stride);
  for (; i < m; ++i) plain_tile<1, N>(x + i * x_stride, x_stride, w, w_stride, k, y + i * y_stride, y_stride);
}

template <class W>
void plain_all(const float* x, int64_t x_stride, int64_t m, const W* w, int64_t w_stride, int64_t n, int64_t k,
               float* y, int64_t y_stride) {
  int64_t j = 0;
  for (; j + 4 * kLanes <= n; j += 4 * kLanes) plain_columns<4>(x, x_stride, m, w + j, w_stride, k, y + j, y_stride);
  for (; j + kLanes <= n; j += kLanes) plain_columns<1>(x, x_stride, m, w + j, w_stride, k, y + j, y_stride);
  if (j < n) plain_tail(x, x_stride, m, w + j, w_stride, n - j, k, y + j, y_stride);
}

void transposed(const float* x, int64_t x_stride, int64_t m, const void* w, DType dtype, int64_t w_stride, int64_t n,
                int64_t k, float* y, int64_t y_stride) {
  if (dtype == DType::kBf16) transposed_all(x, x_stride, m, static_cast<const Bf16*>(w), w_stride, n, k, y, y_stride);
  else transposed_all(x, x_stride, m, static_cast<const float*>(w), w_stride, n, k, y, y_stride);
}

void plain(const float* x, int64_t x_stride, int64_t m, const void* w, DType dtype, int64_t w_stride, int64_t n,
           int64_t k, float* y, int64_t y_stride) {
  if (dtype == DType::kBf16) plain_all(x, x_stride, m, static_cast<const Bf16*>(w), w_stride, n, k, y, y_stride);
  else plain_all(x, x_stride, m, static_cast<const float*>(w), w_stride, n, k, y, y_stride);
}

void widen_bf16(const Bf16* src, int64_t n, float* dst) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(dst + i, load(src + i));
  for (; i < n; ++i) dst[i] = src[i].to_float();
}

/// e4m3 to fp32: exponent and mantissa moved to the top of an fp32's fields are the value times 2^-120 (the biases are
/// 7 and 127), subnormals included; 0x7f is NaN.
GANNET_PRODUCT_INLINE Floats widen16(const E4m3* p) {
  Bytes b;
  std::memcpy(&b, p, sizeof b);
  const Words w = __builtin_convertvector(b, Words);
  const Words magnitude = w & 0x7fu;
  const Words bits = (magnitude << 20) | ((w & 0x80u) << 24);
  Floats v;
  std::memcpy(&v, &bits, sizeof v);
  v *= 0x1p120f;
  const Words nan = (magnitude == 0x7fu) & 0x7fc00000u;
  Words out;
  std::memcpy(&out, &v, sizeof out);
  out |= nan;
  std::memcpy(&v, &out, sizeof v);
  return v;
}

void widen_e4m3(const E4m3* src, int64_t n, float scale, float* dst) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(dst + i, widen16(src + i) * scale);
  for (; i < n; ++i) dst[i] = src[i].to_float() * scale;
}

}  // namespace
}  // namespace v0
}  // namespace gannet
