// RoPE in place: pairs of neighbours, or of halves. A thread rotates 16 bytes of values (with their partners, where the
// pairs are of halves) of up to kHeads heads, when places and widths allow it, else a single pair.
//
// Bytes: 128 heads of 64 rotated values are 16 KB a row, read and written. A thread that had one head would look its
// position up and load eight numbers of the table for 16 bytes of values, after two 64-bit divisions; heads share them.
// The values do not wait for the position.
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

constexpr int kManyHeads = 4;

struct RopeArgs {
  void* x;
  int64_t row_stride, head_stride;
  const int32_t* positions;
  const float* cos_sin;
  int64_t table_stride, table_rows;
  int64_t num_tasks;
  int32_t tasks_of_row;
  int32_t num_heads, rope_dim, offset;
  bool aligned_table;  // its rows' halves begin at multiples of 16 bytes
};

/// kPairs numbers of a row of the table.
template <int kPairs>
__device__ void load_table(const float* from, bool aligned, float (&to)[kPairs]) {
  if (kPairs % 4 == 0 && aligned) {
#pragma unroll
    for (int i = 0; i < kPairs / 4; ++i) {
      const float4 four = reinterpret_cast<const float4*>(from)[i];
      to[4 * i % kPairs] = four.x;
      to[(4 * i + 1) % kPairs] = four.y;
      to[(4 * i + 2) % kPairs] = four.z;
      to[(4 * i + 3) % kPairs] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) to[i] = from[i];
  }
}

/// kPairs pairs of each of kHeads heads a thread.
template <class T, RopePairing kPairing, int kPairs, int kHeads>
__global__ void __launch_bounds__(kThreads) rope_kernel(const __grid_constant__ RopeArgs a) {
  wait_for_stream();
  let_next_start();
  constexpr bool kNeighbours = kPairing == RopePairing::kInterleaved;
  const int64_t task = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (task >= a.num_tasks) return;
  const int64_t row = a.num_tasks >> 32 == 0
                          ? static_cast<int64_t>(static_cast<uint32_t>(task) / static_cast<uint32_t>(a.tasks_of_row))
                          : task / a.tasks_of_row;
  const auto of_row = static_cast<uint32_t>(task - row * a.tasks_of_row);
  const int half = a.rope_dim / 2;
  const uint32_t tasks_of_head = static_cast<uint32_t>(half) / kPairs;
  const int first_head = static_cast<int>(of_row / tasks_of_head) * kHeads;
  const int pair = static_cast<int>(of_row % tasks_of_head) * kPairs;
  const int heads = min(kHeads, a.num_heads - first_head);
  T* const x = static_cast<T*>(a.x) + row * a.row_stride + first_head * a.head_stride + a.offset;
  if constexpr (kPairs == 1) {
    static_assert(kHeads == 1);
    const int64_t position = a.positions[row];
    if (position < 0 || position >= a.table_rows) return;  // memory protection: the host cannot see device positions
    const float* const table = a.cos_sin + position * a.table_stride + pair;
    const int first = kNeighbours ? 2 * pair : pair, second = kNeighbours ? first + 1 : pair + half;
    const float x0 = load_value(x, first), x1 = load_value(x, second), c = table[0], s = table[half];
    store_value(x, first, x0 * c - x1 * s);
    store_value(x, second, x1 * c + x0 * s);
  } else {
    // Eight values hold four pairs of neighbours, or one half of eight pairs.
    static_assert(kPairs == (kNeighbours ? 4 : 8));
    T* const low = x + (kNeighbours ? 2 * pair : pair);
    Eight<T> first[kHeads], second[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      first[h] = second[h] = {};
      if (h >= heads) continue;
      first[h] = Eight<T>::load(low + h * a.head_stride);
      if constexpr (!kNeighbours) second[h] = Eight<T>::load(low + h * a.head_stride + half);
    }
    const int64_t position = a.positions[row];
    if (position < 0 || position >= a.table_rows) return;  // as above
    const float* const table = a.cos_sin + position * a.table_stride + pair;
    float cosines[kPairs], sines[kPairs];
    load_table<kPairs>(table, a.aligned_table, cosines);
    load_table<kPairs>(table + half, a.aligned_table, sines);
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (h >= heads) continue;
      float u[8], v[8];
      first[h].expand(u);
      second[h].expand(v);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        float& x0 = kNeighbours ? u[2 * i % 8] : u[i];
        float& x1 = kNeighbours ? u[(2 * i + 1) % 8] : v[i];
        const float y0 = x0 * cosines[i] - x1 * sines[i], y1 = x1 * cosines[i] + x0 * sines[i];
        x0 = y0;
        x1 = y1;
      }
      Eight<T>::pack(u).store(low + h * a.head_stride);
      if constexpr (!kNeighbours) Eight<T>::pack(v).store(low + h * a.head_stride + half);
    }
  }
}

template <class T, RopePairing kPairing>
void launch(const Rope& p, Stream stream) {
  constexpr int kPairs = kPairing == RopePairing::kInterleaved ? 4 : 8;
  const int64_t rotated = p.cos_sin.shape[1];
  // Rows and heads begin at multiples of 16 bytes; so do the values where offset and half are multiples of eight.
  const bool wide = p.offset % 8 == 0 && rotated / 2 % kPairs == 0;
  const int64_t heads = p.x.shape[1], of_thread = wide && heads >= kManyHeads ? kManyHeads : 1;
  RopeArgs a{};
  a.x = p.x.data;
  a.row_stride = p.x.stride[0];
  a.head_stride = p.x.stride[1];
  a.positions = static_cast<const int32_t*>(p.positions.data);
  a.cos_sin = static_cast<const float*>(p.cos_sin.data);
  a.table_stride = p.cos_sin.stride[0];
  a.table_rows = p.cos_sin.shape[0];
  a.tasks_of_row = static_cast<int32_t>((heads + of_thread - 1) / of_thread * (rotated / 2 / (wide ? kPairs : 1)));
  a.num_tasks = p.x.shape[0] * a.tasks_of_row;
  a.num_heads = static_cast<int32_t>(heads);
  a.rope_dim = static_cast<int32_t>(rotated);
  a.offset = p.offset;
  a.aligned_table =
      reinterpret_cast<uintptr_t>(p.cos_sin.data) % 16 == 0 && a.table_stride % 4 == 0 && rotated % 8 == 0;
  const Grid grid{.blocks = (a.num_tasks + kThreads - 1) / kThreads, .threads = kThreads};
  launch_kernel(Rope::kName,
                !wide            ? rope_kernel<T, kPairing, 1, 1>
                : of_thread == 1 ? rope_kernel<T, kPairing, kPairs, 1>
                                 : rope_kernel<T, kPairing, kPairs, kManyHeads>,
                grid, stream, a);
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
