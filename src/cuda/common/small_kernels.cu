#include "cuda/common/small_kernels.h"

#include "cuda/common/launch.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace {

constexpr int kThreads = 256;

__global__ void gather_int32_rows_kernel(const __grid_constant__ RowList list, const int32_t* from, int64_t from_stride,
                                         int32_t* to, int64_t to_stride, int64_t width, int32_t fill) {
  wait_for_stream();
  let_next_start();
  const int64_t row = list.rows[blockIdx.x];
  int32_t* target = to + blockIdx.x * to_stride;
  for (int64_t i = threadIdx.x; i < width; i += kThreads) target[i] = row < 0 ? fill : from[row * from_stride + i];
}

__global__ void signal_kernel(uint64_t* counter) {
  wait_for_stream();
  let_next_start();
  // What earlier kernels of the stream wrote is visible device-wide already; the fence orders it for the host and for
  // other devices before the count.
  __threadfence_system();
  *static_cast<volatile uint64_t*>(counter) = *static_cast<volatile uint64_t*>(counter) + 1;
  __threadfence_system();
}

}  // namespace

void launch_gather_int32_rows(const RowList& list, int n, const int32_t* from, int64_t from_stride, int32_t* to,
                              int64_t to_stride, int64_t width, int32_t fill, Stream stream) {
  launch_kernel("gather_int32_rows", gather_int32_rows_kernel, {.blocks = n, .threads = kThreads}, stream, list, from,
                from_stride, to, to_stride, width, fill);
}

void launch_signal(uint64_t* counter, Stream stream) { launch_kernel("signal", signal_kernel, {}, stream, counter); }

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
