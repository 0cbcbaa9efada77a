// The rows of a decode step whose lengths lie on the device: a thread a row, some tens of bytes each. 128 requests of 8
// rows are 1,024 threads: the launch is what it costs.
#include "cuda/common/launch.cuh"
#include "cuda/runtime.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace {

constexpr int kThreads = 256;

__global__ void decode_rows_kernel(const __grid_constant__ DecodeRows p) {
  wait_for_stream();
  let_next_start();
  const int64_t row = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (row >= p.num_requests * p.q_len) return;
  const int64_t request = row / p.q_len, j = row % p.q_len;
  int64_t len = p.seq_lens[request];
  len = len > 0 ? len + p.added : 0;
  len = len > p.max_len ? p.max_len : len;
  if (j == 0) p.out_seq_lens[request] = static_cast<int32_t>(len);
  const int64_t position = len - p.q_len + j;
  int64_t slot = -1;
  if (position >= 0) {
    const int64_t page = p.pages[request * p.columns + position / p.page_size];
    if (page >= 0 && page < p.num_pages) slot = page * p.page_size + position % p.page_size;
  }
  p.positions[row] = static_cast<int32_t>(position > 0 ? position : 0);
  p.write_slots[row] = static_cast<int32_t>(slot);
  p.row_lens[row] = static_cast<int32_t>(row_bound(p.bound, len, p.q_len, j));
}

}  // namespace

void plan_decode_rows(const char* function, int index, const DecodeRows& rows, Stream stream) {
  const int64_t threads = rows.num_requests * rows.q_len;
  if (threads == 0) return;
  const DeviceGuard guard(function, index);
  launch_kernel(function, decode_rows_kernel, {.blocks = (threads + kThreads - 1) / kThreads, .threads = kThreads},
                stream, rows);
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
