#include "gannet/hadamard.h"

#include <algorithm>
#include <cmath>

#include "core/format.h"
#include "core/views.h"
#include "cuda/runtime.h"

namespace gannet {
inline namespace v0 {
namespace {

constexpr int64_t kMostValues = 1024;  // index heads have 32 to 128; a row fits on the stack
// 64 rows of 128 values are 10 us of work, well above what a fork costs.
constexpr int64_t kValuesPerTask = 64 * 128;

/// Butterflies in place: n log2 n additions.
void transform(float* x, int64_t n, float scale) {
  for (int64_t half = 1; half < n; half *= 2)
    for (int64_t base = 0; base < n; base += 2 * half)
      for (int64_t i = base; i < base + half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
  for (int64_t i = 0; i < n; ++i) x[i] *= scale;
}

void check(const TensorView& from, const TensorView& to) {
  constexpr const char* kFunction = "hadamard";
  const int64_t n = from.rank > 0 ? from.shape[from.rank - 1] : 0;
  if (n < 1 || n > kMostValues || (n & (n - 1)) != 0)
    fail_argument(kFunction, "from is {}; accepted: a last dimension that is a power of two up to {}", describe(from),
                  kMostValues);
  if (from.dtype != DType::kF32 && from.dtype != DType::kBf16)
    fail_argument(kFunction, "from is {}; accepted: fp32 or bf16", describe(from));
  bool same = from.rank == to.rank && from.dtype == to.dtype;
  for (int i = 0; same && i < from.rank; ++i) same = from.shape[i] == to.shape[i];
  if (!same) fail_argument(kFunction, "to is {}; accepted: shape and dtype of from, {}", describe(to), describe(from));
  for (const auto& [name, v] : {std::pair("from", &from), std::pair("to", &to)}) {
    check_view_form(kFunction, name, *v, from.device);
    check_view_data(kFunction, name, *v);
  }
}

}  // namespace

void hadamard(const Context& context, const TensorView& from, const TensorView& to, Stream stream) {
  check(from, to);
  const int64_t n = from.shape[from.rank - 1], elements = from.num_elements(), rows = elements / n;
  if (elements == 0) return;
  const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(n)));
  if (from.device.kind != DeviceKind::kCpu)
    return cuda::hadamard("hadamard", from, to, rows, static_cast<int>(n), scale, stream);
  SerialExecutor serial;
  Executor& executor = context.executor != nullptr ? *context.executor : serial;
  // The offset of a row: its number written in the sizes of the dimensions before the last.
  const auto offset = [](const TensorView& v, int64_t row) {
    int64_t at = 0;
    for (int d = v.rank - 2; d >= 0; --d) {
      at += row % v.shape[d] * v.stride[d];
      row /= v.shape[d];
    }
    return at;
  };
  const int64_t per_task = std::max<int64_t>(1, kValuesPerTask / n);
  executor.parallel_for((rows + per_task - 1) / per_task, [&](int64_t task, int) {
    float wide[kMostValues];  // bf16 rows are summed in fp32
    for (int64_t row = task * per_task; row < std::min(rows, (task + 1) * per_task); ++row) {
      if (from.dtype == DType::kF32) {
        const float* in = static_cast<const float*>(from.data) + offset(from, row);
        float* out = static_cast<float*>(to.data) + offset(to, row);
        if (in != out) std::copy_n(in, n, out);
        transform(out, n, scale);
        continue;
      }
      const Bf16* in = static_cast<const Bf16*>(from.data) + offset(from, row);
      Bf16* out = static_cast<Bf16*>(to.data) + offset(to, row);
      for (int64_t i = 0; i < n; ++i) wide[i] = in[i].to_float();
      transform(wide, n, scale);
      for (int64_t i = 0; i < n; ++i) out[i] = Bf16::from_float(wide[i]);
    }
  });
}

}  // namespace v0
}  // namespace gannet
