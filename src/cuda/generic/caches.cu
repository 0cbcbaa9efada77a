// Cache writes and gathers. All move bytes: a warp serves a latent row of 576 values, half a warp an index key of 128,
// eight values (16 bytes of bf16) an access, so that a warp asks for up to 1.5 KB before the first answer. A
// multiprocessor holds 64 warps; 65,536 rows of bf16 read and written are 151 MB, 36 us at a copy's 4.2 TB/s.
//
// Divisions by a scale are rounded once, as the contract says (gannet/ops.h); by a power of two they are products.
#include "cuda/common/check.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/vectors.cuh"
#include "cuda/common/views.cuh"
#include "cuda/generic/set.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace generic {

namespace {

constexpr int kThreads = 256;
constexpr int kLatentLanes = 32, kIndexLanes = 16;  // threads of a row
constexpr int kGroup = 128;                         // latent values of a scale of a packed row
constexpr float kLargest = 448.0f;                  // of e4m3
constexpr uint32_t kAll = 0xffffffffu;

/// Slots given as int32 or int64.
struct Slots {
  const void* data;
  bool wide;
  int64_t count;
  __device__ int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};
Slots make_slots(const TensorView& v) { return {v.data, v.dtype == DType::kI64, v.shape[0]}; }

struct Matrix {
  void* data;
  int64_t row_stride;
  template <class T>
  __device__ T* row(int64_t t) const {
    return static_cast<T*>(data) + t * row_stride;
  }
};
Matrix make_matrix(const TensorView& v) { return {v.data, v.stride[0]}; }

/// 2^ceil(log2(x)) for positive normal x: the exponent, one more where the mantissa is not zero.
__device__ float power_of_two_above(float x) {
  const uint32_t u = __float_as_uint(x);
  return __uint_as_float((u & 0x7f800000u) + ((u & 0x007fffffu) != 0 ? 0x00800000u : 0u));
}

/// 1 / x, exact, for a power of two between 2^-126 and 2^126; 0 for infinity.
__device__ float inverse_power_of_two(float x) {
  const uint32_t u = __float_as_uint(x);
  return __uint_as_float(u == 0x7f800000u ? 0u : (254u << 23) - u);
}

/// Largest value of a group of kLanes neighbouring lanes; all 32 take part.
template <int kLanes>
__device__ float group_max(float x) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAll, x, step));
  return x;
}

/// Largest magnitude; NaN is left out, as in the definition max over fabs.
__device__ float magnitude(const float (&x)[8]) {
  float m = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) m = fmaxf(m, fabsf(x[i]));
  return m;
}

/// Where a slot lies. Slots below 2^32, which is to say all but those of huge pools, are divided in 32 bits.
struct Place {
  int64_t page;
  int32_t offset;
};
__device__ Place place_slot(int64_t slot, int32_t page_size) {
  if (slot >> 32 == 0) {
    const auto s = static_cast<uint32_t>(slot), size = static_cast<uint32_t>(page_size);
    return {s / size, static_cast<int32_t>(s % size)};
  }
  return {slot / page_size, static_cast<int32_t>(slot % page_size)};
}

/// One row a group of kLanes threads.
template <int kLanes>
struct RowTask {
  int64_t row;
  int lane;
};
template <int kLanes>
__device__ RowTask<kLanes> row_task() {
  return {(static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kLanes, static_cast<int>(threadIdx.x) % kLanes};
}

/// The element type of a cache format's values.
template <LatentFormat kFormat>
struct ValueOf {
  using Type = uint8_t;
};
template <>
struct ValueOf<LatentFormat::kF32> {
  using Type = float;
};
template <>
struct ValueOf<LatentFormat::kBf16> {
  using Type = uint16_t;
};

// ---- latent rows -------------------------------------------------------------------------------------------------

constexpr int kBatch = 3;  // 72 eights of 512 + 64 values over 32 lanes

/// Rows of formats that keep [latent | rope] alike, eight values at a time, kBatch loads before the first store.
template <class From, class To, class Address, class Convert>
__device__ void move_row(int lane, int eights, Address address, Convert convert) {
  for (int first = lane; first < eights; first += kBatch * kLatentLanes) {
    Eight<From> from[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = first + b * kLatentLanes;
      if (i < eights) from[b] = Eight<From>::load(address(i).from);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = first + b * kLatentLanes;
      if (i < eights) convert(from[b]).store(address(i).to);
    }
  }
}

struct FromTo {
  const void* from;
  void* to;
};

template <class T, LatentFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    latent_write_kernel(Matrix latent, Matrix rope, Slots slots, LatentCacheView c) {
  wait_for_stream();
  let_next_start();
  const auto [t, lane] = row_task<kLatentLanes>();
  if (t >= slots.count) return;
  const int64_t slot = slots[t];
  if (slot < 0 || slot >= c.num_slots()) return;  // the warp's: groups below stay whole
  const Place place = place_slot(slot, c.page_size);
  auto* page = static_cast<unsigned char*>(c.data) + place.page * c.page_stride_bytes;
  const int64_t offset = place.offset;
  unsigned char* row = page + offset * c.row_stride_bytes;
  const int r = c.geometry.latent_dim, p = c.geometry.rope_dim, latent_eights = r / 8;
  const T* latent_row = latent.row<T>(t);
  const T* rope_row = rope.row<T>(t);
  if constexpr (kFormat == LatentFormat::kF32 || kFormat == LatentFormat::kBf16 || kFormat == LatentFormat::kE4m3) {
    using To = typename ValueOf<kFormat>::Type;
    move_row<T, To>(
        lane, latent_eights + p / 8,
        [&](int i) -> FromTo {
          return {i < latent_eights ? latent_row + 8 * i : rope_row + 8 * (i - latent_eights),
                  reinterpret_cast<To*>(row) + 8 * i};
        },
        [&](const Eight<T>& from) {
          if constexpr (sizeof(T) == sizeof(To)) {
            return from;
          } else {
            float x[8];
            from.expand(x);
            if constexpr (kFormat == LatentFormat::kE4m3) {
#pragma unroll
              for (float& y : x) y = __fdiv_rn(y, c.scale);
            }
            return Eight<To>::pack(x);
          }
        });
  } else if constexpr (kFormat == LatentFormat::kPacked656) {
    const int groups = r / kGroup;  // 16 lanes each
#pragma unroll 2
    for (int first = 0; first < latent_eights; first += kLatentLanes) {
      const int i = first + lane;
      float x[8] = {};
      if (i < latent_eights) Eight<T>::load(latent_row + 8 * i).expand(x);
      const float amax = group_max<kGroup / 8>(magnitude(x));
      const float scale = power_of_two_above(fmaxf(__fdiv_rn(amax, kLargest), 1e-4f));
      const float inverse = inverse_power_of_two(scale);
#pragma unroll
      for (float& y : x) y *= inverse;
      if (i >= latent_eights) continue;
      Eight<uint8_t>::pack(x).store(row + 8 * i);
      if (i % (kGroup / 8) == 0) reinterpret_cast<float*>(row + r)[i / (kGroup / 8)] = scale;
    }
    auto* rope_out = reinterpret_cast<uint32_t*>(row + r + 4 * groups);
    for (int i = lane; i < p / 2; i += kLatentLanes) {
      const float x[2] = {load_value(rope_row, 2 * i), load_value(rope_row, 2 * i + 1)};
      rope_out[i] = pack_bf16(x[0], x[1]);
    }
  } else {
    float amax = 0.0f;
    for (int i = lane; i < latent_eights; i += kLatentLanes) {
      float x[8];
      Eight<T>::load(latent_row + 8 * i).expand(x);
      amax = fmaxf(amax, magnitude(x));
    }
    const float scale = __fdiv_rn(fmaxf(group_max<32>(amax), 1e-26f), kLargest);
    for (int i = lane; i < latent_eights; i += kLatentLanes) {  // the second look is into the L1
      float x[8];
      Eight<T>::load(latent_row + 8 * i).expand(x);
#pragma unroll
      for (float& y : x) y = __fdiv_rn(y, scale);
      Eight<uint8_t>::pack(x).store(page + offset * r + 8 * i);
    }
    auto* scales = reinterpret_cast<float*>(page + int64_t{c.page_size} * r);
    if (lane == 0) scales[offset] = scale;
    auto* rope_out = reinterpret_cast<uint32_t*>(scales + c.page_size) + offset * (p / 2);
    for (int i = lane; i < p / 2; i += kLatentLanes) {
      const float x[2] = {__fdiv_rn(load_value(rope_row, 2 * i), scale),
                          __fdiv_rn(load_value(rope_row, 2 * i + 1), scale)};
      rope_out[i] = pack_bf16(x[0], x[1]);
    }
  }
}

template <class T, LatentFormat kFormat>
__global__ void __launch_bounds__(kThreads)
    latent_gather_kernel(Slots slots, LatentCacheView c, Matrix latent, Matrix rope) {
  wait_for_stream();
  let_next_start();
  const auto [t, lane] = row_task<kLatentLanes>();
  if (t >= slots.count) return;
  const int64_t slot = slots[t];
  const int r = c.geometry.latent_dim, p = c.geometry.rope_dim, latent_eights = r / 8, eights = latent_eights + p / 8;
  T* latent_row = latent.row<T>(t);
  T* rope_row = rope.row<T>(t);
  const auto outside = [&](int i) {
    return i < latent_eights ? latent_row + 8 * i : rope_row + 8 * (i - latent_eights);
  };
  if (slot < 0 || slot >= c.num_slots()) {
    for (int i = lane; i < eights; i += kLatentLanes) Eight<T>{}.store(outside(i));
    return;
  }
  const Place place = place_slot(slot, c.page_size);
  const auto* page = static_cast<const unsigned char*>(c.data) + place.page * c.page_stride_bytes;
  const int64_t offset = place.offset;
  const unsigned char* row = page + offset * c.row_stride_bytes;
  if constexpr (kFormat == LatentFormat::kF32 || kFormat == LatentFormat::kBf16 || kFormat == LatentFormat::kE4m3) {
    using From = typename ValueOf<kFormat>::Type;
    move_row<From, T>(
        lane, eights,
        [&](int i) -> FromTo {
          return {reinterpret_cast<const From*>(row) + 8 * i, outside(i)};
        },
        [&](const Eight<From>& from) {
          if constexpr (sizeof(T) == sizeof(From)) {
            return from;
          } else {
            float x[8];
            from.expand(x);
            if constexpr (kFormat == LatentFormat::kE4m3) {
#pragma unroll
              for (float& y : x) y *= c.scale;
            }
            return Eight<T>::pack(x);
          }
        });
  } else {
    // Latent values with the scale of their group or token, then rope, which one format scales too.
    constexpr bool kPacked = kFormat == LatentFormat::kPacked656;
    const int groups = r / kGroup;
    const unsigned char* values = kPacked ? row : page + offset * r;
    const auto* scales = reinterpret_cast<const float*>(kPacked ? values + r : page + int64_t{c.page_size} * r);
    const auto* rope_in =
        reinterpret_cast<const uint32_t*>(scales + (kPacked ? groups : c.page_size)) + (kPacked ? 0 : offset * (p / 2));
    const float token_scale = kPacked ? 1.0f : scales[offset];
#pragma unroll 2
    for (int i = lane; i < latent_eights; i += kLatentLanes) {
      float x[8];
      Eight<uint8_t>::load(values + 8 * i).expand(x);
      const float scale = kPacked ? scales[i / (kGroup / 8)] : token_scale;
#pragma unroll
      for (float& y : x) y *= scale;
      Eight<T>::pack(x).store(latent_row + 8 * i);
    }
    for (int i = lane; i < p / 2; i += kLatentLanes) {
      const uint32_t both = rope_in[i];
      const float x[2] = {__uint_as_float(both << 16) * token_scale, __uint_as_float(both & 0xffff0000u) * token_scale};
      store_value(rope_row, 2 * i, x[0]);
      store_value(rope_row, 2 * i + 1, x[1]);
    }
  }
}

// ---- index keys --------------------------------------------------------------------------------------------------

template <IndexKFormat kFormat>
struct KeyValueOf {
  using Type = uint8_t;
};
template <>
struct KeyValueOf<IndexKFormat::kF32> {
  using Type = float;
};
template <>
struct KeyValueOf<IndexKFormat::kBf16> {
  using Type = uint16_t;
};

template <class T, IndexKFormat kFormat>
__global__ void __launch_bounds__(kThreads) index_k_write_kernel(Matrix k, Slots slots, IndexCacheView c) {
  wait_for_stream();
  let_next_start();
  using To = typename KeyValueOf<kFormat>::Type;
  const auto [t, lane] = row_task<kIndexLanes>();
  const int64_t slot = t < slots.count ? slots[t] : -1;
  const bool ok = slot >= 0 && slot < c.num_slots();
  const Place place = place_slot(ok ? slot : 0, c.page_size);
  auto* page = static_cast<unsigned char*>(c.data) + place.page * c.page_stride_bytes;
  const T* from = k.row<T>(ok ? t : 0);
  To* to = reinterpret_cast<To*>(page) + static_cast<int64_t>(place.offset) * c.head_dim;
  const int eights = ok ? c.head_dim / 8 : 0;
  float scale = 1.0f;
  if constexpr (kFormat == IndexKFormat::kE4m3) {
    float amax = 0.0f;
    for (int i = lane; i < eights; i += kIndexLanes) {
      float x[8];
      Eight<T>::load(from + 8 * i).expand(x);
      amax = fmaxf(amax, magnitude(x));
    }
    amax = group_max<kIndexLanes>(amax);
    scale = c.scale_format == ScaleFormat::kFp32 ? __fdiv_rn(fmaxf(amax, 1e-10f), kLargest)
                                                 : power_of_two_above(__fdiv_rn(fmaxf(amax, 1e-4f), kLargest));
    if (ok && lane == 0) reinterpret_cast<float*>(page + int64_t{c.page_size} * c.head_dim)[place.offset] = scale;
  }
  for (int i = lane; i < eights; i += kIndexLanes) {
    const Eight<T> bits = Eight<T>::load(from + 8 * i);
    if constexpr (sizeof(T) == sizeof(To)) {
      bits.store(to + 8 * i);
    } else {
      float x[8];
      bits.expand(x);
      if constexpr (kFormat == IndexKFormat::kE4m3) {
        if (c.scale_format == ScaleFormat::kPowerOfTwo) {
          const float inverse = inverse_power_of_two(scale);
#pragma unroll
          for (float& y : x) y *= inverse;
        } else {
#pragma unroll
          for (float& y : x) y = __fdiv_rn(y, scale);
        }
      }
      Eight<To>::pack(x).store(to + 8 * i);
    }
  }
}

template <class T, IndexKFormat kFormat>
__global__ void __launch_bounds__(kThreads) index_k_gather_kernel(Slots slots, IndexCacheView c, Matrix k) {
  wait_for_stream();
  let_next_start();
  using From = typename KeyValueOf<kFormat>::Type;
  const auto [t, lane] = row_task<kIndexLanes>();
  if (t >= slots.count) return;
  const int64_t slot = slots[t];
  T* to = k.row<T>(t);
  if (slot < 0 || slot >= c.num_slots()) {
    for (int i = lane; i < c.head_dim / 8; i += kIndexLanes) Eight<T>{}.store(to + 8 * i);
    return;
  }
  const Place place = place_slot(slot, c.page_size);
  const auto* page = static_cast<const unsigned char*>(c.data) + place.page * c.page_stride_bytes;
  const From* from = reinterpret_cast<const From*>(page) + static_cast<int64_t>(place.offset) * c.head_dim;
  float scale = 1.0f;
  if constexpr (kFormat == IndexKFormat::kE4m3)
    scale = reinterpret_cast<const float*>(page + int64_t{c.page_size} * c.head_dim)[place.offset];
  for (int i = lane; i < c.head_dim / 8; i += kIndexLanes) {
    const Eight<From> bits = Eight<From>::load(from + 8 * i);
    if constexpr (sizeof(T) == sizeof(From)) {
      bits.store(to + 8 * i);
    } else {
      float x[8];
      bits.expand(x);
      if constexpr (kFormat == IndexKFormat::kE4m3) {
#pragma unroll
        for (float& y : x) y *= scale;
      }
      Eight<T>::pack(x).store(to + 8 * i);
    }
  }
}

// ---- launches ----------------------------------------------------------------------------------------------------

template <class... Params, class... Args>
void launch_rows(const char* function, void (*kernel)(Params...), int64_t rows, int lanes, const Device& device,
                 Stream stream, const Args&... args) {
  const DeviceGuard guard(function, device.index);
  const int64_t blocks = (rows * lanes + kThreads - 1) / kThreads;
  launch_kernel(function, kernel, {.blocks = blocks, .threads = kThreads}, stream, args...);
}

/// Calls f with a value of the outside rows' element type: fp32 or bf16.
template <class F>
void with_rows(DType t, F&& f) {
  if (t == DType::kBf16) f(uint16_t{});
  else f(float{});
}

template <LatentFormat kFormat>
struct LatentTag {
  static constexpr LatentFormat kValue = kFormat;
};
template <class F>
void with_format(LatentFormat format, F&& f) {
  switch (format) {
    case LatentFormat::kF32: return f(LatentTag<LatentFormat::kF32>{});
    case LatentFormat::kBf16: return f(LatentTag<LatentFormat::kBf16>{});
    case LatentFormat::kE4m3: return f(LatentTag<LatentFormat::kE4m3>{});
    case LatentFormat::kPacked656: return f(LatentTag<LatentFormat::kPacked656>{});
    case LatentFormat::kE4m3PerToken: return f(LatentTag<LatentFormat::kE4m3PerToken>{});
  }
}

template <IndexKFormat kFormat>
struct IndexTag {
  static constexpr IndexKFormat kValue = kFormat;
};
template <class F>
void with_format(IndexKFormat format, F&& f) {
  switch (format) {
    case IndexKFormat::kF32: return f(IndexTag<IndexKFormat::kF32>{});
    case IndexKFormat::kBf16: return f(IndexTag<IndexKFormat::kBf16>{});
    case IndexKFormat::kE4m3: return f(IndexTag<IndexKFormat::kE4m3>{});
  }
}

}  // namespace

void run_latent_write(const LatentWrite& p, const RunContext& c) {
  with_rows(p.latent.dtype, [&](auto row) {
    with_format(p.cache.format, [&](auto tag) {
      launch_rows(LatentWrite::kName, latent_write_kernel<decltype(row), decltype(tag)::kValue>, p.slots.shape[0],
                  kLatentLanes, p.latent.device, c.stream, make_matrix(p.latent), make_matrix(p.rope),
                  make_slots(p.slots), with_row_stride(p.cache));
    });
  });
}

void run_latent_gather(const LatentGather& p, const RunContext& c) {
  with_rows(p.latent.dtype, [&](auto row) {
    with_format(p.cache.format, [&](auto tag) {
      launch_rows(LatentGather::kName, latent_gather_kernel<decltype(row), decltype(tag)::kValue>, p.slots.shape[0],
                  kLatentLanes, p.latent.device, c.stream, make_slots(p.slots), with_row_stride(p.cache),
                  make_matrix(p.latent), make_matrix(p.rope));
    });
  });
}

void run_index_k_write(const IndexKWrite& p, const RunContext& c) {
  with_rows(p.k.dtype, [&](auto row) {
    with_format(p.cache.format, [&](auto tag) {
      launch_rows(IndexKWrite::kName, index_k_write_kernel<decltype(row), decltype(tag)::kValue>, p.slots.shape[0],
                  kIndexLanes, p.k.device, c.stream, make_matrix(p.k), make_slots(p.slots), p.cache);
    });
  });
}

void run_index_k_gather(const IndexKGather& p, const RunContext& c) {
  with_rows(p.k.dtype, [&](auto row) {
    with_format(p.cache.format, [&](auto tag) {
      launch_rows(IndexKGather::kName, index_k_gather_kernel<decltype(row), decltype(tag)::kValue>, p.slots.shape[0],
                  kIndexLanes, p.k.device, c.stream, make_slots(p.slots), p.cache, make_matrix(p.k));
    });
  });
}

}  // namespace generic
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
