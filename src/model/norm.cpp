#include "model/norm.h"

#include <algorithm>
#include <cmath>

namespace gannet {
inline namespace v0 {
namespace {

constexpr int64_t kLanes = 16;
// Rows of one task: enough that a task outweighs its dispatch (about a microsecond) at small widths.
constexpr int64_t kRowsPerTask = 32;

template <class F>
void for_row_blocks(Executor& executor, int64_t rows, F&& f) {
  if (rows <= 0) return;
  executor.parallel_for((rows + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int) {
    const int64_t first = task * kRowsPerTask;
    for (int64_t row = first; row < std::min(rows, first + kRowsPerTask); ++row) f(row);
  });
}

float halve(float (&lanes)[kLanes]) {
  for (int64_t half = kLanes / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

template <class F>
float sum(int64_t n, F&& term) {
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += term(i + l);
  for (int64_t l = 0; i + l < n; ++l) lanes[l] += term(i + l);
  return halve(lanes);
}

}  // namespace

void rms_norm(Executor& executor, const float* x, int64_t x_stride, int64_t rows, int64_t dim, const float* weight,
              float eps, float* y, int64_t y_stride) {
  for_row_blocks(executor, rows, [&](int64_t row) {
    const float* in = x + row * x_stride;
    float* out = y + row * y_stride;
    const float squares = sum(dim, [&](int64_t i) { return in[i] * in[i]; });
    const float scale = 1.0f / std::sqrt(squares / static_cast<float>(dim) + eps);
    for (int64_t i = 0; i < dim; ++i) out[i] = in[i] * scale * weight[i];
  });
}

void layer_norm(Executor& executor, const float* x, int64_t x_stride, int64_t rows, int64_t dim, const float* weight,
                const float* bias, float eps, float* y, int64_t y_stride) {
  for_row_blocks(executor, rows, [&](int64_t row) {
    const float* in = x + row * x_stride;
    float* out = y + row * y_stride;
    const float mean = sum(dim, [&](int64_t i) { return in[i]; }) / static_cast<float>(dim);
    // Two passes: mean(x^2) - mean^2 would cancel.
    const float variance =
        sum(dim, [&](int64_t i) { return (in[i] - mean) * (in[i] - mean); }) / static_cast<float>(dim);
    const float scale = 1.0f / std::sqrt(variance + eps);
    for (int64_t i = 0; i < dim; ++i) out[i] = (in[i] - mean) * scale * weight[i] + bias[i];
  });
}

void silu_mul(Executor& executor, float* gate, const float* up, int64_t rows, int64_t dim) {
  for_row_blocks(executor, rows, [&](int64_t row) {
    float* g = gate + row * dim;
    const float* u = up + row * dim;
    for (int64_t i = 0; i < dim; ++i) g[i] = g[i] / (1.0f + std::exp(-g[i])) * u[i];
  });
}

void add_rows(Executor& executor, float* x, const float* y, int64_t rows, int64_t dim) {
  for_row_blocks(executor, rows, [&](int64_t row) {
    for (int64_t i = 0; i < dim; ++i) x[row * dim + i] += y[row * dim + i];
  });
}

}  // namespace v0
}  // namespace gannet
