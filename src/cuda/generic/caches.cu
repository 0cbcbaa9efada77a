// Cache writes and gathers, RoPE and the merge of partial results. All move bytes; a block serves one row.
#include "cuda/common/check.h"
#include "cuda/common/views.cuh"
#include "cuda/generic/set.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace generic {

namespace {

constexpr int kThreads = 128;  // 4 warps: a latent row of 576 values is 4.5 values a thread

/// Slots given as int32 or int64.
struct Slots {
  const void* data;
  bool wide;
  __device__ int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};
Slots make_slots(const TensorView& v) { return {v.data, v.dtype == DType::kI64}; }

struct Matrix {
  void* data;
  DType dtype;
  int64_t row_stride;
};
Matrix make_matrix(const TensorView& v) { return {v.data, v.dtype, v.stride[0]}; }

/// Largest |x| of the block's values; every thread gets it. NaN is left out, as in the definition max over fabs.
__device__ float block_max(float x) {
  __shared__ float partial[kThreads / 32];
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  __syncthreads();
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = x;
  __syncthreads();
  float m = partial[0];
  for (int i = 1; i < kThreads / 32; ++i) m = fmaxf(m, partial[i]);
  return m;
}

/// 2^ceil(log2(x)) for positive normal x: the exponent, one more where the mantissa is not zero.
__device__ float power_of_two_above(float x) {
  const uint32_t u = __float_as_uint(x);
  return __uint_as_float((u & 0x7f800000u) + ((u & 0x007fffffu) != 0 ? 0x00800000u : 0u));
}

__global__ void __launch_bounds__(kThreads)
    latent_write_kernel(Matrix latent, Matrix rope, Slots slots, LatentCacheView c) {
  const int64_t t = blockIdx.x, slot = slots[t];
  if (slot < 0 || slot >= c.num_slots()) return;
  const int r = c.geometry.latent_dim, width = c.geometry.width();
  auto* page = static_cast<unsigned char*>(c.data) + slot / c.page_size * c.page_stride_bytes;
  const int64_t offset = slot % c.page_size;
  unsigned char* row = page + offset * c.row_stride_bytes;
  auto source = [&](int d) {
    return d < r ? load_element(latent.data, t * latent.row_stride + d, latent.dtype)
                 : load_element(rope.data, t * rope.row_stride + d - r, rope.dtype);
  };
  switch (c.format) {
    case LatentFormat::kF32:
      for (int d = threadIdx.x; d < width; d += kThreads) reinterpret_cast<float*>(row)[d] = source(d);
      break;
    case LatentFormat::kBf16:
      for (int d = threadIdx.x; d < width; d += kThreads)
        reinterpret_cast<uint16_t*>(row)[d] = float_to_bf16(source(d));
      break;
    case LatentFormat::kE4m3:
      for (int d = threadIdx.x; d < width; d += kThreads) row[d] = float_to_e4m3(__fdiv_rn(source(d), c.scale));
      break;
    case LatentFormat::kPacked656: {
      const int groups = (r + 127) / 128;
      for (int g = 0; g < groups; ++g) {
        const int d = g * 128 + threadIdx.x;
        static_assert(kThreads == 128, "a thread is a value of a scale group");
        const float x = d < r ? source(d) : 0.0f;
        const float scale = power_of_two_above(fmaxf(__fdiv_rn(block_max(fabsf(x)), 448.0f), 1e-4f));
        if (d < r) row[d] = float_to_e4m3(__fdiv_rn(x, scale));
        if (threadIdx.x == 0) reinterpret_cast<float*>(row + r)[g] = scale;
      }
      for (int d = threadIdx.x; d < c.geometry.rope_dim; d += kThreads)
        reinterpret_cast<uint16_t*>(row + r + 4 * groups)[d] = float_to_bf16(source(r + d));
      break;
    }
    case LatentFormat::kE4m3PerToken: {
      float amax = 0.0f;
      for (int d = threadIdx.x; d < r; d += kThreads) amax = fmaxf(amax, fabsf(source(d)));
      const float scale = __fdiv_rn(fmaxf(block_max(amax), 1e-26f), 448.0f);
      auto* scales = reinterpret_cast<float*>(page + int64_t{c.page_size} * r);
      auto* rope_plane = reinterpret_cast<uint16_t*>(scales + c.page_size);
      for (int d = threadIdx.x; d < r; d += kThreads) page[offset * r + d] = float_to_e4m3(__fdiv_rn(source(d), scale));
      for (int d = threadIdx.x; d < c.geometry.rope_dim; d += kThreads)
        rope_plane[offset * c.geometry.rope_dim + d] = float_to_bf16(__fdiv_rn(source(r + d), scale));
      if (threadIdx.x == 0) scales[offset] = scale;
      break;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    latent_gather_kernel(Slots slots, LatentCacheView c, Matrix latent, Matrix rope) {
  const int64_t t = blockIdx.x, slot = slots[t];
  const bool ok = slot >= 0 && slot < c.num_slots();
  const int r = c.geometry.latent_dim, width = c.geometry.width();
  for (int d = threadIdx.x; d < width; d += kThreads) {
    const float x = ok ? load_latent(c, slot, d) : 0.0f;
    if (d < r) store_element(latent.data, t * latent.row_stride + d, latent.dtype, x);
    else store_element(rope.data, t * rope.row_stride + d - r, rope.dtype, x);
  }
}

__global__ void __launch_bounds__(kThreads) index_k_write_kernel(Matrix k, Slots slots, IndexCacheView c) {
  const int64_t t = blockIdx.x, slot = slots[t];
  if (slot < 0 || slot >= c.num_slots()) return;
  auto* page = static_cast<unsigned char*>(c.data) + slot / c.page_size * c.page_stride_bytes;
  const int64_t offset = slot % c.page_size;
  auto source = [&](int d) { return load_element(k.data, t * k.row_stride + d, k.dtype); };
  if (c.format == IndexKFormat::kE4m3) {
    float amax = 0.0f;
    for (int d = threadIdx.x; d < c.head_dim; d += kThreads) amax = fmaxf(amax, fabsf(source(d)));
    amax = block_max(amax);
    const float scale = c.scale_format == ScaleFormat::kFp32
                            ? __fdiv_rn(fmaxf(amax, 1e-10f), 448.0f)
                            : power_of_two_above(__fdiv_rn(fmaxf(amax, 1e-4f), 448.0f));
    for (int d = threadIdx.x; d < c.head_dim; d += kThreads)
      page[offset * c.head_dim + d] = float_to_e4m3(__fdiv_rn(source(d), scale));
    if (threadIdx.x == 0) reinterpret_cast<float*>(page + int64_t{c.page_size} * c.head_dim)[offset] = scale;
    return;
  }
  for (int d = threadIdx.x; d < c.head_dim; d += kThreads) {
    if (c.format == IndexKFormat::kF32) reinterpret_cast<float*>(page)[offset * c.head_dim + d] = source(d);
    else reinterpret_cast<uint16_t*>(page)[offset * c.head_dim + d] = float_to_bf16(source(d));
  }
}

__global__ void __launch_bounds__(kThreads) index_k_gather_kernel(Slots slots, IndexCacheView c, Matrix k) {
  const int64_t t = blockIdx.x, slot = slots[t];
  const bool ok = slot >= 0 && slot < c.num_slots();
  const float scale = ok ? index_k_scale(c, slot) : 0.0f;
  for (int d = threadIdx.x; d < c.head_dim; d += kThreads)
    store_element(k.data, t * k.row_stride + d, k.dtype, ok ? load_index_k(c, slot, d) * scale : 0.0f);
}

struct RopeArgs {
  Matrix x;
  int64_t head_stride;
  const int32_t* positions;
  const float* cos_sin;
  int64_t table_stride, table_rows;
  int num_heads, rope_dim, offset;
  RopePairing pairing;
};

__global__ void __launch_bounds__(kThreads) rope_kernel(RopeArgs a) {
  const int64_t t = blockIdx.x, position = a.positions[t];
  if (position < 0 || position >= a.table_rows) return;  // memory protection: the host cannot see device positions
  const float* table = a.cos_sin + position * a.table_stride;
  const int half = a.rope_dim / 2;
  for (int i = threadIdx.x; i < a.num_heads * half; i += kThreads) {
    const int head = i / half, pair = i % half;
    const bool interleaved = a.pairing == RopePairing::kInterleaved;
    const int64_t base = t * a.x.row_stride + head * a.head_stride + a.offset;
    const int64_t first = base + (interleaved ? 2 * pair : pair),
                  second = base + (interleaved ? 2 * pair + 1 : pair + half);
    const float x0 = load_element(a.x.data, first, a.x.dtype), x1 = load_element(a.x.data, second, a.x.dtype);
    const float c = table[pair], s = table[half + pair];
    store_element(a.x.data, first, a.x.dtype, x0 * c - x1 * s);
    store_element(a.x.data, second, a.x.dtype, x1 * c + x0 * s);
  }
}

struct MergeArgs {
  Matrix out_a, out_b;
  int64_t head_stride_a, head_stride_b;
  float* lse_a;
  const float* lse_b;
  int64_t lse_stride_a, lse_stride_b;
  const int32_t *count_a, *count_b;
  int num_heads, dim;
  LseBase base;
};

// A block serves one (row, head): it has read both LSEs before its one writer stores the new one (trap 6.26).
__global__ void __launch_bounds__(kThreads) merge_state_kernel(MergeArgs m) {
  const int64_t row = blockIdx.x / m.num_heads;
  const int head = static_cast<int>(blockIdx.x % m.num_heads);
  float* lse_a = m.lse_a + row * m.lse_stride_a + head;
  const float la = *lse_a, lb = m.lse_b[row * m.lse_stride_b + head];
  const bool empty_a = m.count_a != nullptr ? m.count_a[row] <= 0 : la == -INFINITY;
  const bool empty_b = m.count_b != nullptr ? m.count_b[row] <= 0 : lb == -INFINITY;
  __syncthreads();
  const int64_t a0 = row * m.out_a.row_stride + head * m.head_stride_a,
                b0 = row * m.out_b.row_stride + head * m.head_stride_b;
  if (empty_b) {
    if (!empty_a) return;
    for (int d = threadIdx.x; d < m.dim; d += kThreads) store_element(m.out_a.data, a0 + d, m.out_a.dtype, 0.0f);
    if (threadIdx.x == 0) *lse_a = -INFINITY;
    return;
  }
  if (empty_a) {  // bit for bit: elements are copied as words of their own size
    for (int d = threadIdx.x; d < m.dim; d += kThreads) {
      if (m.out_a.dtype == DType::kBf16)
        static_cast<uint16_t*>(m.out_a.data)[a0 + d] = static_cast<const uint16_t*>(m.out_b.data)[b0 + d];
      else static_cast<uint32_t*>(m.out_a.data)[a0 + d] = static_cast<const uint32_t*>(m.out_b.data)[b0 + d];
    }
    if (threadIdx.x == 0) *lse_a = lb;
    return;
  }
  const bool two = m.base == LseBase::kTwo;
  const float top = fmaxf(la, lb);
  const float wa = two ? exp2f(la - top) : expf(la - top), wb = two ? exp2f(lb - top) : expf(lb - top);
  const float sum = wa + wb;
  for (int d = threadIdx.x; d < m.dim; d += kThreads) {
    // A weight that underflowed to 0 is a term that is dropped, not multiplied.
    const float a = wa == 0.0f ? 0.0f : wa * load_element(m.out_a.data, a0 + d, m.out_a.dtype);
    const float b = wb == 0.0f ? 0.0f : wb * load_element(m.out_b.data, b0 + d, m.out_b.dtype);
    store_element(m.out_a.data, a0 + d, m.out_a.dtype, (a + b) / sum);
  }
  if (threadIdx.x == 0) *lse_a = top + (two ? log2f(sum) : logf(sum));
}

template <class Kernel, class... Args>
void launch_rows(const char* function, Kernel kernel, int64_t blocks, const Device& device, Stream stream,
                 Args... args) {
  const DeviceGuard guard(function, device.index);
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, static_cast<cudaStream_t>(stream.handle)>>>(args...);
  GANNET_CUDA(function, cudaGetLastError());
}

}  // namespace

void run_latent_write(const LatentWrite& p, const RunContext& c) {
  launch_rows(LatentWrite::kName, latent_write_kernel, p.slots.shape[0], p.latent.device, c.stream,
              make_matrix(p.latent), make_matrix(p.rope), make_slots(p.slots), with_row_stride(p.cache));
}

void run_latent_gather(const LatentGather& p, const RunContext& c) {
  launch_rows(LatentGather::kName, latent_gather_kernel, p.slots.shape[0], p.latent.device, c.stream,
              make_slots(p.slots), with_row_stride(p.cache), make_matrix(p.latent), make_matrix(p.rope));
}

void run_index_k_write(const IndexKWrite& p, const RunContext& c) {
  launch_rows(IndexKWrite::kName, index_k_write_kernel, p.slots.shape[0], p.k.device, c.stream, make_matrix(p.k),
              make_slots(p.slots), p.cache);
}

void run_index_k_gather(const IndexKGather& p, const RunContext& c) {
  launch_rows(IndexKGather::kName, index_k_gather_kernel, p.slots.shape[0], p.k.device, c.stream, make_slots(p.slots),
              p.cache, make_matrix(p.k));
}

void run_rope(const Rope& p, const RunContext& c) {
  const RopeArgs a{make_matrix(p.x),
                   p.x.stride[1],
                   static_cast<const int32_t*>(p.positions.data),
                   static_cast<const float*>(p.cos_sin.data),
                   p.cos_sin.stride[0],
                   p.cos_sin.shape[0],
                   static_cast<int>(p.x.shape[1]),
                   static_cast<int>(p.cos_sin.shape[1]),
                   p.offset,
                   p.pairing};
  launch_rows(Rope::kName, rope_kernel, p.x.shape[0], p.x.device, c.stream, a);
}

void run_merge_state(const MergeState& p, const RunContext& c) {
  const MergeArgs m{make_matrix(p.out_a),
                    make_matrix(p.out_b),
                    p.out_a.stride[1],
                    p.out_b.stride[1],
                    static_cast<float*>(p.lse_a.data),
                    static_cast<const float*>(p.lse_b.data),
                    p.lse_a.stride[0],
                    p.lse_b.stride[0],
                    p.count_a.given() ? static_cast<const int32_t*>(p.count_a.data) : nullptr,
                    p.count_b.given() ? static_cast<const int32_t*>(p.count_b.data) : nullptr,
                    static_cast<int>(p.out_a.shape[1]),
                    static_cast<int>(p.out_a.shape[2]),
                    p.base};
  launch_rows(MergeState::kName, merge_state_kernel, p.out_a.shape[0] * p.out_a.shape[1], p.out_a.device, c.stream, m);
}

}  // namespace generic
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
