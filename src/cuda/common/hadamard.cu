// The rotation of index keys and queries (gannet/hadamard.h) on a device: a warp a row of n values.
//
// A row of 128 fp32 values is 1 KB of traffic and 7 * 128 additions: the launch is what it costs. A lane has n / 32
// neighbours, so that the first butterflies are within lanes and the rest five exchanges. The order of additions is the
// host's and nothing is contracted, so the bits are the host's too.
#include "cuda/common/convert.cuh"
#include "cuda/common/launch.cuh"
#include "cuda/common/small_kernels.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kLanes = 32;

/// Where rows begin: their number written in the sizes of the dimensions before the last.
__device__ inline int64_t row_offset(const TensorView& v, int64_t row) {
  int64_t at = 0;
  for (int d = v.rank - 2; d >= 0; --d) {
    at += row % v.shape[d] * v.stride[d];
    row /= v.shape[d];
  }
  return at;
}

/// n = kPerLane * 32 values, or fewer than 32 (kPerLane is 1 then, and lanes from n on have nothing to do).
template <int kPerLane>
__global__ void __launch_bounds__(kWarps* kLanes)
    hadamard_kernel(const __grid_constant__ TensorView from, const __grid_constant__ TensorView to, int64_t rows, int n,
                    float scale) {
  wait_for_stream();
  let_next_start();
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes, first = lane * kPerLane;
  if (row >= rows) return;
  const int64_t in = row_offset(from, row), out = row_offset(to, row);
  float x[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) x[j] = first + j < n ? load_element(from.data, in + first + j, from.dtype) : 0.0f;
#pragma unroll
  for (int half = 1; half < kPerLane; half *= 2)
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if ((i & half) != 0) continue;
      const float a = x[i], b = x[i + half];
      x[i] = __fadd_rn(a, b);
      x[i + half] = __fsub_rn(a, b);
    }
  for (int step = 1; step * kPerLane < n; step *= 2) {
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const float other = __shfl_xor_sync(0xffffffffu, x[j], step);
      x[j] = (lane & step) == 0 ? __fadd_rn(x[j], other) : __fsub_rn(other, x[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < kPerLane; ++j)
    if (first + j < n) store_element(to.data, out + first + j, to.dtype, __fmul_rn(x[j], scale));
}

template <int kPerLane>
void launch(const char* function, const TensorView& from, const TensorView& to, int64_t rows, int n, float scale,
            Stream stream) {
  if (kPerLane * kLanes < n) {
    if constexpr (kPerLane < 32) launch<2 * kPerLane>(function, from, to, rows, n, scale, stream);
    return;
  }
  launch_kernel(function, hadamard_kernel<kPerLane>,
                {.blocks = (rows + kWarps - 1) / kWarps, .threads = kWarps * kLanes}, stream, from, to, rows, n, scale);
}

}  // namespace

void launch_hadamard(const char* function, const TensorView& from, const TensorView& to, int64_t rows, int n,
                     float scale, Stream stream) {
  launch<1>(function, from, to, rows, n, scale, stream);
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
