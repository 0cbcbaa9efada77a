// RoPE in place: pairs of neighbours, or of halves. A thread rotates 16 bytes of values (with their partners, where the
// pairs are of halves) when places and widths allow it, else a single pair.
#include "cuda/common/check.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/vectors.cuh"
#include "cuda/generic/set.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace generic {

namespace {

constexpr int kThreads = 256;

struct RopeArgs {
  void* x;
  int64_t row_stride, head_stride;
  const int32_t* positions;
  const float* cos_sin;
  int64_t table_stride, table_rows;
  int64_t num_tasks;
  int32_t num_heads, rope_dim, offset;
};

/// kPairs pairs a thread: pair i is (first + i * kStep, partner).
template <class T, RopePairing kPairing, int kPairs>
__global__ void __launch_bounds__(kThreads) rope_kernel(const __grid_constant__ RopeArgs a) {
  wait_for_stream();
  let_next_start();
  constexpr bool kNeighbours = kPairing == RopePairing::kInterleaved;
  const int64_t task = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (task >= a.num_tasks) return;
  const int half = a.rope_dim / 2, tasks_of_head = half / kPairs;
  const int64_t line = task / tasks_of_head, row = line / a.num_heads;
  const int pair = static_cast<int>(task - line * tasks_of_head) * kPairs;
  const int head = static_cast<int>(line - row * a.num_heads);
  const int64_t position = a.positions[row];
  if (position < 0 || position >= a.table_rows) return;  // memory protection: the host cannot see device positions
  const float* table = a.cos_sin + position * a.table_stride + pair;
  T* x = static_cast<T*>(a.x) + row * a.row_stride + head * a.head_stride + a.offset;
  if constexpr (kPairs == 1) {
    const int first = kNeighbours ? 2 * pair : pair, second = kNeighbours ? first + 1 : pair + half;
    const float x0 = load_value(x, first), x1 = load_value(x, second), c = table[0], s = table[half];
    store_value(x, first, x0 * c - x1 * s);
    store_value(x, second, x1 * c + x0 * s);
  } else {
    // Eight values hold four pairs of neighbours, or one half of eight pairs.
    static_assert(kPairs == (kNeighbours ? 4 : 8));
    float u[8], v[8];
    T* const low = x + (kNeighbours ? 2 * pair : pair);
    Eight<T>::load(low).expand(u);
    if constexpr (!kNeighbours) Eight<T>::load(low + half).expand(v);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      float& x0 = kNeighbours ? u[2 * i % 8] : u[i];
      float& x1 = kNeighbours ? u[(2 * i + 1) % 8] : v[i];
      const float c = table[i], s = table[half + i], y0 = x0 * c - x1 * s, y1 = x1 * c + x0 * s;
      x0 = y0;
      x1 = y1;
    }
    Eight<T>::pack(u).store(low);
    if constexpr (!kNeighbours) Eight<T>::pack(v).store(low + half);
  }
}

template <class T, RopePairing kPairing>
void launch(const Rope& p, Stream stream) {
  constexpr int kPairs = kPairing == RopePairing::kInterleaved ? 4 : 8;
  const int64_t rotated = p.cos_sin.shape[1];
  RopeArgs a{p.x.data,
             p.x.stride[0],
             p.x.stride[1],
             static_cast<const int32_t*>(p.positions.data),
             static_cast<const float*>(p.cos_sin.data),
             p.cos_sin.stride[0],
             p.cos_sin.shape[0],
             0,
             static_cast<int32_t>(p.x.shape[1]),
             static_cast<int32_t>(rotated),
             p.offset};
  // Rows and heads begin at multiples of 16 bytes; so do the values where offset and half are multiples of eight.
  const bool wide = p.offset % 8 == 0 && rotated / 2 % kPairs == 0;
  a.num_tasks = p.x.shape[0] * p.x.shape[1] * (rotated / 2 / (wide ? kPairs : 1));
  const Grid grid{.blocks = (a.num_tasks + kThreads - 1) / kThreads, .threads = kThreads};
  launch_kernel(Rope::kName, wide ? rope_kernel<T, kPairing, kPairs> : rope_kernel<T, kPairing, 1>, grid, stream, a);
}

}  // namespace

void run_rope(const Rope& p, const RunContext& c) {
  const DeviceGuard guard(Rope::kName, p.x.device.index);
  const bool bf16 = p.x.dtype == DType::kBf16;
  if (p.pairing == RopePairing::kInterleaved) {
    if (bf16) launch<uint16_t, RopePairing::kInterleaved>(p, c.stream);
    else launch<float, RopePairing::kInterleaved>(p, c.stream);
  } else {
    if (bf16) launch<uint16_t, RopePairing::kHalfSplit>(p, c.stream);
    else launch<float, RopePairing::kHalfSplit>(p, c.stream);
  }
}

}  // namespace generic
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
