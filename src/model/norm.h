// Norms and activations, fp32 in and out. A row's result depends on that row alone: sums run over 16 fixed partial
// sums, whatever the number of rows or workers.
#pragma once

#include <cstdint>

#include "gannet/executor.h"

namespace gannet {
inline namespace v0 {

/// y = x * rsqrt(mean(x^2) + eps) * weight over `dim` values. x and y may be the same rows.
void rms_norm(Executor& executor, const float* x, int64_t x_stride, int64_t rows, int64_t dim, const float* weight,
              float eps, float* y, int64_t y_stride);

/// y = (x - mean) * rsqrt(variance + eps) * weight + bias, biased variance. x and y may be the same rows.
void layer_norm(Executor& executor, const float* x, int64_t x_stride, int64_t rows, int64_t dim, const float* weight,
                const float* bias, float eps, float* y, int64_t y_stride);

/// gate = silu(gate) * up, packed rows of `dim`.
void silu_mul(Executor& executor, float* gate, const float* up, int64_t rows, int64_t dim);

/// x += y, packed.
void add_rows(Executor& executor, float* x, const float* y, int64_t rows, int64_t dim);

}  // namespace v0
}  // namespace gannet
