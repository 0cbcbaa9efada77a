// Merging two partial attention results into the first (spec 2.8, A.4): for every row and head
//   m = max(la, lb), wa = e^(la - m), wb = e^(lb - m), out = (wa oa + wb ob) / (wa + wb), lse = m + ln(wa + wb)
// (powers and logarithms of 2 where the LSEs are to base 2).
//
// A side without keys is never read: not its output, nor, where counts say so, its LSE. Then the other side's bytes are
// the result; in place that is nothing to do (b empty) or a copy (a empty). A side with keys always takes part with its
// product, so that its NaN reaches the result even where its weight underflows to 0; only a weight that is 0 by
// definition, that of an LSE of -inf, drops the term.
//
// Memory-bound: 3 rows of D values move for 3 D flops. Rows are divided over the workers in fixed pieces.
#pragma once

#include "cpu/kernel_table.h"
#include "cpu/kernels/math-inl.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace merge {
namespace {

// Rows of a task. A row of 128 heads x 128 values in bf16 is 32 KiB a side: about 3 us a row, so a task outweighs the
// hand-over of some hundred nanoseconds.
constexpr int64_t kRowsPerTask = 4;
constexpr float kMinusInfinity = -__builtin_inff();

GANNET_INLINE F load(const float* p, int n) { return n == kLanes ? loadu(p) : loadu_n(p, n); }
GANNET_INLINE void store(float* p, F v, int n) {
  if (n == kLanes) storeu(p, v);
  else storeu_n(p, v, n);
}
GANNET_INLINE F load(const uint16_t* p, int n) {
  if (n == kLanes) return load_bf16(p);
  uint16_t values[kLanes] = {};
  std::memcpy(values, p, static_cast<size_t>(n) * sizeof(uint16_t));
  return load_bf16(values);
}
GANNET_INLINE void store(uint16_t* p, F v, int n) {
  if (n == kLanes) return store_bf16(p, v);
  uint16_t values[kLanes];
  store_bf16(values, v);
  std::memcpy(p, values, static_cast<size_t>(n) * sizeof(uint16_t));
}

// a := (weight_a * a + weight_b * b) / sum.
template <class T>
GANNET_INLINE void blend(T* a, const T* b, int64_t dim, float weight_a, float weight_b, float sum, bool take_a,
                         bool take_b) {
  const F wa = set1(weight_a), wb = set1(weight_b), divisor = set1(sum);
  for (int64_t d = 0; d < dim; d += kLanes) {
    const int n = dim - d < kLanes ? static_cast<int>(dim - d) : kLanes;
    const F x = take_a ? mul(wa, load(a + d, n)) : zero();
    const F y = take_b ? fma(wb, load(b + d, n), x) : x;
    store(a + d, y / divisor, n);
  }
}

// The weights of two LSEs by one call of the exponential: lane 0 is a's, lane 1 b's.
GANNET_INLINE void weights(float a, float b, bool base_two, float* out) {
  float x[kLanes] = {a, b};
  const F v = loadu(x);
  storeu(x, base_two ? fast_exp2(v) : fast_exp(v));
  out[0] = x[0];
  out[1] = x[1];
}

template <class T>
void merge_row(const MergeState& m, int64_t row) {
  const int64_t heads = m.out_a.shape[1];
  const int64_t dim = m.out_a.shape[2];
  const bool counted_a = m.count_a.given(), counted_b = m.count_b.given();
  const bool none_a = counted_a && m.count_a.ptr<int32_t>(row)[0] <= 0;
  const bool none_b = counted_b && m.count_b.ptr<int32_t>(row)[0] <= 0;
  const bool base_two = m.base == LseBase::kTwo;
  for (int64_t head = 0; head < heads; ++head) {
    T* a = m.out_a.ptr<T>(row, head);
    const T* b = m.out_b.ptr<T>(row, head);
    float* lse_a = m.lse_a.ptr<float>(row, head);
    const float* lse_b = m.lse_b.ptr<float>(row, head);
    const bool empty_a = none_a || (!counted_a && *lse_a == kMinusInfinity);
    const bool empty_b = none_b || (!counted_b && *lse_b == kMinusInfinity);
    if (empty_a && empty_b) {
      std::memset(a, 0, static_cast<size_t>(dim) * sizeof(T));
      *lse_a = kMinusInfinity;
      continue;
    }
    if (empty_b) continue;
    if (empty_a) {
      std::memcpy(a, b, static_cast<size_t>(dim) * sizeof(T));
      std::memcpy(lse_a, lse_b, sizeof(float));
      continue;
    }
    const float la = *lse_a, lb = *lse_b;
    const float most = la > lb ? la : lb;
    if (la == kMinusInfinity && lb == kMinusInfinity) {  // keys on both sides, all of weight 0
      std::memset(a, 0, static_cast<size_t>(dim) * sizeof(T));
      continue;
    }
    float w[2];
    weights(la - most, lb - most, base_two, w);  // NaN in either LSE makes a weight NaN
    const float sum = w[0] + w[1];
    blend(a, b, dim, w[0], w[1], sum, la != kMinusInfinity, lb != kMinusInfinity);
    *lse_a = most + (base_two ? log_of(sum) * kLog2E : log_of(sum));
  }
}

}  // namespace
}  // namespace merge

void run_merge_state(const MergeState& m, const RunContext& ctx) {
  const int64_t rows = m.out_a.shape[0];
  const int64_t tasks = (rows + merge::kRowsPerTask - 1) / merge::kRowsPerTask;
  ctx.executor.parallel_for(tasks, [&](int64_t task, int) {
    const int64_t first = task * merge::kRowsPerTask;
    const int64_t end = first + merge::kRowsPerTask < rows ? first + merge::kRowsPerTask : rows;
    for (int64_t row = first; row < end; ++row) {
      if (m.out_a.dtype == DType::kF32) merge::merge_row<float>(m, row);
      else merge::merge_row<uint16_t>(m, row);
    }
  });
}

size_t workspace_merge_state(const MergeState&, int) { return 0; }

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
