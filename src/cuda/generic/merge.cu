// The merge of two partial attention results, in place.
//
// Bytes: a value is read twice and written once, 6 bytes of bf16 for 3 flops: bound by memory, 4.2 TB/s on an H200.
// A warp serves up to 32 (row, head) pairs, "items". First lane i reads both LSEs and counts of item i, works out the
// two weights and stores the new LSE: one thread reads an LSE and one, the same, writes it, so that merging in place is
// no race (trap 6.26). Then the warp walks the items' values as one list of 16-byte pieces, kBatch pieces a lane with
// all loads under way before the first store, and takes each piece's weights from its item's lane. Few items are
// spread over more warps, down to a piece a lane.
#include <algorithm>

#include "cuda/common/check.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/vectors.cuh"
#include "cuda/generic/set.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace generic {

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBatch = 2;
constexpr int kBlocksOnSm = 4;
constexpr uint32_t kAll = 0xffffffffu;

struct MergeArgs {
  void* out_a;
  const void* out_b;
  int64_t row_stride_a, head_stride_a, row_stride_b, head_stride_b;
  float* lse_a;
  const float* lse_b;
  int64_t lse_stride_a, lse_stride_b;
  const int32_t *count_a, *count_b;
  uint32_t num_items;  // rows * heads, of this launch
  uint32_t num_heads;
  int32_t dim;
  int32_t items_of_warp;
  LseBase base;
};

// What happens to an item's values.
constexpr uint32_t kStore = 1;  // side a changes
constexpr uint32_t kReadA = 2, kReadB = 4;
constexpr uint32_t kCopy = 8;    // b's bits, not its numbers
constexpr uint32_t kEmpty = 16;  // neither side has keys

/// wa * a + wb * b of 16 bytes of values.
template <class T>
__device__ uint4 blend(const uint4& a, const uint4& b, float wa, float wb) {
  const uint32_t u[4] = {a.x, a.y, a.z, a.w}, v[4] = {b.x, b.y, b.z, b.w};
  uint32_t w[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      w[i] = __float_as_uint(wa * __uint_as_float(u[i]) + wb * __uint_as_float(v[i]));
    } else {
      const float low = wa * __uint_as_float(u[i] << 16) + wb * __uint_as_float(v[i] << 16);
      const float high = wa * __uint_as_float(u[i] & 0xffff0000u) + wb * __uint_as_float(v[i] & 0xffff0000u);
      w[i] = pack_bf16(low, high);
    }
  }
  return {w[0], w[1], w[2], w[3]};
}

/// The first n values of 16 bytes, by their bits.
template <class T>
__device__ uint4 load_part(const T* p, int n) {
  uint32_t w[4] = {};
#pragma unroll
  for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i) {
    if (i >= n) continue;
    if constexpr (sizeof(T) == 4) w[i] = __float_as_uint(p[i]);
    else w[i / 2] |= static_cast<uint32_t>(p[i]) << (i % 2 * 16);
  }
  return {w[0], w[1], w[2], w[3]};
}
template <class T>
__device__ void store_part(T* p, const uint4& x, int n) {
  const uint32_t w[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i) {
    if (i >= n) continue;
    if constexpr (sizeof(T) == 4) p[i] = __uint_as_float(w[i]);
    else p[i] = static_cast<uint16_t>(w[i / 2] >> (i % 2 * 16));
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksOnSm) merge_state_kernel(const __grid_constant__ MergeArgs m) {
  wait_for_stream();
  let_next_start();
  constexpr int kPiece = 16 / sizeof(T);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t warp = (blockIdx.x * kThreads + threadIdx.x) / 32;
  const uint32_t first = warp * m.items_of_warp;
  if (first >= m.num_items) return;
  const int items = static_cast<int>(min(static_cast<uint32_t>(m.items_of_warp), m.num_items - first));

  uint32_t mode = 0;
  int64_t offset_a = 0, offset_b = 0;  // of the item's first value
  float* lse = nullptr;
  float la = 0.0f, lb = 0.0f;
  if (lane < items) {
    const uint32_t row = (first + lane) / m.num_heads, head = first + lane - row * m.num_heads;
    offset_a = row * m.row_stride_a + head * m.head_stride_a;
    offset_b = row * m.row_stride_b + head * m.head_stride_b;
    lse = m.lse_a + row * m.lse_stride_a + head;
    la = *lse;
    lb = m.lse_b[row * m.lse_stride_b + head];
    const bool empty_a = m.count_a != nullptr ? m.count_a[row] <= 0 : la == -INFINITY;
    const bool empty_b = m.count_b != nullptr ? m.count_b[row] <= 0 : lb == -INFINITY;
    if (empty_a && empty_b) mode = kStore | kEmpty;
    else if (empty_a) mode = kStore | kReadB | kCopy;
    // A weight that is 0 by definition drops its term; one that underflows still brings a NaN along.
    else if (!empty_b) mode = kStore | (la == -INFINITY ? 0 : kReadA) | (lb == -INFINITY ? 0 : kReadB);
  }

  // Piece i of the warp is piece i % pieces of item i / pieces; a lane's pieces are 32 apart.
  const int pieces = max((m.dim + kPiece - 1) / kPiece, 1), step_items = 32 / pieces, step_pieces = 32 % pieces;
  int item = lane / pieces, piece = lane % pieces;
  float weight_a = 0.0f, weight_b = 0.0f;
  for (int done = 0; done < items * pieces; done += 32 * kBatch) {
    uint4 a[kBatch], b[kBatch];
    T* to[kBatch];
    int from[kBatch], size[kBatch];
    uint32_t modes[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      from[i] = item % 32;
      modes[i] = __shfl_sync(kAll, mode, from[i]);
      const int64_t from_a = __shfl_sync(kAll, offset_a, from[i]), from_b = __shfl_sync(kAll, offset_b, from[i]);
      if (item >= items) modes[i] = 0;
      to[i] = static_cast<T*>(m.out_a) + from_a + piece * kPiece;
      const T* other = static_cast<const T*>(m.out_b) + from_b + piece * kPiece;
      size[i] = min(kPiece, m.dim - piece * kPiece);
      a[i] = b[i] = {};
      if (size[i] == kPiece) {
        if ((modes[i] & kReadA) != 0) a[i] = *reinterpret_cast<const uint4*>(to[i]);
        if ((modes[i] & kReadB) != 0) b[i] = __ldg(reinterpret_cast<const uint4*>(other));
      } else {  // the last values of a width that is no multiple of 16 bytes
        a[i] = load_part(to[i], (modes[i] & kReadA) != 0 ? size[i] : 0);
        b[i] = load_part(other, (modes[i] & kReadB) != 0 ? size[i] : 0);
      }
      item += step_items;
      piece += step_pieces;
      if (piece >= pieces) {
        piece -= pieces;
        ++item;
      }
    }
    if (done == 0 && mode != 0) {  // while the first values are on their way
      if ((mode & kEmpty) != 0) {
        *lse = -INFINITY;
      } else if ((mode & kCopy) != 0) {
        *lse = lb;
      } else if ((mode & (kReadA | kReadB)) != 0) {
        const bool two = m.base == LseBase::kTwo;
        const float top = fmaxf(la, lb);
        const float ea = two ? exp2f(la - top) : expf(la - top), eb = two ? exp2f(lb - top) : expf(lb - top);
        const float sum = ea + eb;
        weight_a = ea / sum;
        weight_b = eb / sum;
        *lse = top + (two ? log2f(sum) : logf(sum));
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float wa = __shfl_sync(kAll, weight_a, from[i]), wb = __shfl_sync(kAll, weight_b, from[i]);
      if ((modes[i] & kStore) == 0) continue;
      uint4 out = b[i];
      if ((modes[i] & kCopy) == 0) out = blend<T>(a[i], b[i], wa, wb);
      if (size[i] == kPiece) *reinterpret_cast<uint4*>(to[i]) = out;
      else store_part(to[i], out, size[i]);
    }
  }
}

template <class T>
void launch(const MergeState& p, Stream stream) {
  int sms = 0;
  GANNET_CUDA(MergeState::kName, cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, p.out_a.device.index));
  const int64_t heads = p.out_a.shape[1], dim = p.out_a.shape[2];
  // Items are counted in 32 bits: more of them than that take several launches.
  const int64_t rows_at_once = std::max<int64_t>((int64_t{1} << 31) / heads, 1);
  for (int64_t row = 0; row < p.out_a.shape[0]; row += rows_at_once) {
    const int64_t rows = std::min(rows_at_once, p.out_a.shape[0] - row), items = rows * heads;
    MergeArgs m{};
    m.out_a = static_cast<T*>(p.out_a.data) + row * p.out_a.stride[0];
    m.out_b = static_cast<const T*>(p.out_b.data) + row * p.out_b.stride[0];
    m.row_stride_a = p.out_a.stride[0];
    m.head_stride_a = p.out_a.stride[1];
    m.row_stride_b = p.out_b.stride[0];
    m.head_stride_b = p.out_b.stride[1];
    m.lse_a = static_cast<float*>(p.lse_a.data) + row * p.lse_a.stride[0];
    m.lse_b = static_cast<const float*>(p.lse_b.data) + row * p.lse_b.stride[0];
    m.lse_stride_a = p.lse_a.stride[0];
    m.lse_stride_b = p.lse_b.stride[0];
    m.count_a = p.count_a.given() ? static_cast<const int32_t*>(p.count_a.data) + row : nullptr;
    m.count_b = p.count_b.given() ? static_cast<const int32_t*>(p.count_b.data) + row : nullptr;
    m.num_items = static_cast<uint32_t>(items);
    m.num_heads = static_cast<uint32_t>(heads);
    m.dim = static_cast<int32_t>(dim);
    m.base = p.base;
    // As many warps as the chip holds at once, each with whole pieces for its lanes, as far as 32 items a warp reach.
    const int64_t pieces = std::max<int64_t>((dim * static_cast<int64_t>(sizeof(T)) + 15) / 16, 1);
    const int64_t least = std::max<int64_t>(32 / pieces, 1), held = int64_t{sms} * kBlocksOnSm * kWarps;
    m.items_of_warp = static_cast<int32_t>(std::min<int64_t>((items + held * least - 1) / (held * least) * least, 32));
    const int64_t warps = (items + m.items_of_warp - 1) / m.items_of_warp;
    launch_kernel(MergeState::kName, merge_state_kernel<T>,
                  {.blocks = (warps + kWarps - 1) / kWarps, .threads = kThreads}, stream, m);
  }
}

}  // namespace

void run_merge_state(const MergeState& p, const RunContext& c) {
  const DeviceGuard guard(MergeState::kName, p.out_a.device.index);
  if (p.out_a.dtype == DType::kBf16) launch<uint16_t>(p, c.stream);
  else launch<float>(p, c.stream);
}

}  // namespace generic
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
