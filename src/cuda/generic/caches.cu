// Cache writes and gathers: rows outside (latent | rope, or an index key) to and from rows of a cache, by slot.
//
// Bytes. Bound by memory: a latent row of 576 bf16 values is 1,152 bytes outside and 1,152 (bf16), 576 (e4m3) or 656
// (packed) in the cache; an index key 256 and 132. At 4.46 TB/s, an H200's copy, a multiprocessor has 95 cycles for a
// row of packed bytes and 22 for an e4m3 index key, so instructions count too: 380 and 86 of a warp's.
//
// Work in flight. 4.46 TB/s over some 800 ns under load are 27 KB a multiprocessor, reads and writes together. A warp
// serves kRows rows (4 latent rows, 8 index keys) and asks for all their values, 9 or 4 accesses of 16 bytes a lane,
// before it looks at the first: 4.6 and 2 KB a warp, six and thirteen warps' worth. When it writes it does not wait for
// the slots either. A write of latent rows takes one row a warp, whatever their number: against two and four it won
// every one of 21 sizes, 131 us against 136 and 134 for 262,144 packed rows in any order and 1.3 against 1.4 and 1.8
// for 256. Gathers take one or two of few rows: with four, 1,024 rows are 256 warps for 528 schedulers, and each has
// four rows' instructions one behind the other. Reads marked as used once (ld.global.cs) cost writes 2 to 15 %. Lane i
// works out where the i-th row lies (a division and four products); the others ask it. Rope values of four rows fill a
// warp's access, as those of one would not.
//
// Arithmetic. Values are divided by a scale with one rounding, as the contract says (gannet/ops.h). By a power of two
// it is a product. By another number d, for bf16 values y, three instructions: with r = 1 / d rounded, q = y r,
// q - (q d - y) r (so written -0 stays -0). That is y / d rounded for every bf16 y and every fp32 d within range (all
// 2^7 * 2^23 pairs of significands tried); the general division is ten. power_of_two_above(a / 448), for the same
// reason, needs no division: 448 is 1.75 * 2^8, and no fp32 above 1.75 * 2^k has a quotient that rounds to 2^(k-8).
//
// Widths other than 512 + 64 and 128, fp32 rows, and what else the fixed kernels leave out run through the same code
// with widths that are arguments, kBatch accesses at a time.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "cuda/common/check.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/vectors.cuh"
#include "cuda/generic/set.h"
#include "gannet/kv_cache.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace generic {

namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int64_t kMostForOne = 1024, kMostForTwo = 8192;  // latent rows of a gather, for one and for two of a warp
constexpr int kGroup = 128;                                // latent values of a scale of a packed row
constexpr float kLargest = 448.0f;                         // of e4m3
constexpr uint32_t kAll = 0xffffffffu;

/// How rows lie in a cache; index keys are rows without rope.
enum class Layout : uint8_t { kF32, kBf16, kE4m3, kPacked, kPlanar };

/// Scales of planar rows.
enum class ScaleRule : uint8_t { kToken, kIndex, kIndexPowerOfTwo };

struct Rows {
  void *latent, *rope;  // outside: fp32 or bf16
  int64_t latent_stride, rope_stride;
  const void* slots;
  bool wide_slots;  // int64, else int32
  int64_t count;
  unsigned char* cache;
  int64_t page_stride, row_stride, num_slots;
  int32_t page_size, dim, rope_dim;
  uint32_t page_inverse;  // 2^32 / page_size rounded down, at most 2^32 - 1
  float scale, inverse;   // kE4m3
  bool exact_inverse;     // scale is a power of two, so that a quotient is the product with the inverse
  ScaleRule rule;
};

/// Pieces of eight values of widths that the compiler knows.
template <int kDim, int kRope>
struct Eights {
  static constexpr int kLatentEights = kDim / 8, kRopeEights = kRope / 8;
};
/// Widths that the compiler knows, and rows for a warp such that each access of a warp to latent parts is full.
template <int kDim, int kRope, int kRowsOfWarp>
struct Fixed : Eights<kDim, kRope> {
  static constexpr bool kKnown = true;
  using Stride = int32_t;  // of rows outside, in values
  static constexpr int kRows = kRowsOfWarp;
  static constexpr int kBatch = (kRows * (kDim + kRope) / 8 + 31) / 32;
  static_assert(kRows * kDim % 256 == 0);
  __device__ static constexpr int dim(const Rows&) { return kDim; }
  __device__ static constexpr int rope_dim(const Rows&) { return kRope; }
};
/// Any others.
struct Any {
  static constexpr bool kKnown = false;
  static constexpr int kLatentEights = 0, kRopeEights = 0;  // not known
  using Stride = int64_t;
  static constexpr int kRows = 4;
  static constexpr int kBatch = 4;
  __device__ static int dim(const Rows& a) { return a.dim; }
  __device__ static int rope_dim(const Rows& a) { return a.rope_dim; }
};

/// The values of a layout, and whether they lie at multiples of their size. Rows of the last two layouts begin at
/// multiples of 4 bytes, but for the fixed widths.
template <Layout kLayout>
struct StoredType {
  using Type = uint8_t;
};
template <>
struct StoredType<Layout::kF32> {
  using Type = float;
};
template <>
struct StoredType<Layout::kBf16> {
  using Type = uint16_t;
};
template <Layout kLayout>
constexpr bool kHasScales = kLayout == Layout::kPacked || kLayout == Layout::kPlanar;
template <Layout kLayout, class W, class E>
__device__ E load_stored(const void* p) {
  if constexpr (kHasScales<kLayout> && !W::kKnown) return load_words<E>(p);
  else return E::load(p);
}
template <Layout kLayout, class W, class E>
__device__ void store_stored(void* p, const E& e) {
  if constexpr (kHasScales<kLayout> && !W::kKnown) store_words(p, e);
  else e.store(p);
}

/// 1 / x, exact, for a power of two between 2^-126 and 2^126; 0 for infinity.
__device__ float inverse_power_of_two(float x) {
  const uint32_t u = __float_as_uint(x);
  return __uint_as_float(u == 0x7f800000u ? 0u : (254u << 23) - u);
}

/// 2^ceil(log2(a / 448)), the quotient rounded to fp32, for a from 2^-100 to infinity.
__device__ float power_of_two_above_quotient(float a) {
  const uint32_t u = __float_as_uint(a);
  const uint32_t exponent = (u & 0x7f800000u) - (8u << 23);  // 448 = 1.75 * 2^8
  return __uint_as_float(u == 0x7f800000u ? u : exponent + ((u & 0x007fffffu) > 0x00600000u ? 0x00800000u : 0u));
}

__device__ float packed_scale(float amax) {
  constexpr float kFloor = 0x1p-13f;  // the power of two above 1e-4
  return amax < kFloor ? kFloor : fmaxf(power_of_two_above_quotient(amax), kFloor);
}

__device__ float planar_scale(ScaleRule rule, float amax) {
  switch (rule) {
    case ScaleRule::kToken: return __fdiv_rn(fmaxf(amax, 1e-26f), kLargest);
    case ScaleRule::kIndex: return __fdiv_rn(fmaxf(amax, 1e-10f), kLargest);
    case ScaleRule::kIndexPowerOfTwo: break;
  }
  return power_of_two_above_quotient(fmaxf(amax, 1e-4f));
}

/// y / d rounded once, for y that bf16 holds, d between 2^-60 and 2^100, r = 1 / d rounded and a quotient of at most
/// 2^20. Below 2^-60 the remainder of a quotient that matters, from 2^-11, could lose bits.
constexpr float kLeastDivisor = 0x1p-60f, kMostDivisor = 0x1p100f;
__device__ float quotient(float y, float d, float r) {
  const float q = y * r;
  return fmaf(-fmaf(q, d, -y), r, q);
}

/// Divides latent values, of magnitude up to 448 d or not finite, by the scale of their planar row. kLifts: d may be
/// below kLeastDivisor; d and the values are lifted, which leaves the quotient.
template <bool kLifts>
class RowDivisor {
 public:
  __device__ RowDivisor() : d_(0.0f), r_(0.0f), lift_(1.0f) {}
  __device__ explicit RowDivisor(float d) {
    lift_ = kLifts && d < kLeastDivisor ? 0x1p60f : 1.0f;
    d_ = d * lift_;
    r_ = __frcp_rn(d_);
    if (d == INFINITY) d_ = r_ = 0.0f;  // a finite value gives a zero of its sign, others NaN
  }
  /// That of lane `from`; all lanes take part.
  __device__ RowDivisor of_lane(int from) const {
    RowDivisor other;
    other.d_ = __shfl_sync(kAll, d_, from);
    other.r_ = __shfl_sync(kAll, r_, from);
    if constexpr (kLifts) other.lift_ = __shfl_sync(kAll, lift_, from);
    return other;
  }
  template <class T>
  __device__ float divide(float y) const {
    const float x = kLifts ? y * lift_ : y;
    if constexpr (sizeof(T) == 2) return quotient(x, d_, r_);
    // As in the other case: 0 stands for infinity.
    return d_ == 0.0f ? x * 0.0f : __fdiv_rn(x, d_);
  }

 private:
  float d_, r_, lift_;
};

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

/// What a warp has to do. Its rows' values are one list of eights: those of the latent parts, row by row, then those of
/// the rope parts. A lane has every 32nd.
template <class T, class W>
class WarpRows {
 public:
  __device__ explicit WarpRows(const Rows& a) : a_(a) {
    first_ = (static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32) * W::kRows;
    const int64_t left = a.count - first_;
    rows_ = left < W::kRows ? static_cast<int>(left) : W::kRows;
    latent_ = static_cast<T*>(a.latent) + first_ * a.latent_stride;
    rope_ = static_cast<T*>(a.rope) + first_ * a.rope_stride;
  }
  __device__ int rows() const { return rows_; }  // not positive: none
  __device__ static uint32_t lane() { return threadIdx.x % 32; }
  __device__ uint32_t latent_eights() const { return W::dim(a_) / 8u; }
  __device__ uint32_t num_eights() const { return W::kRows * (W::dim(a_) + W::rope_dim(a_)) / 8u; }

  struct Piece {
    int row, eight;
    bool rope;
  };
  /// `neighbours`: of the eights of a latent row (64) a lane has two that lie side by side.
  __device__ Piece piece(uint32_t i, bool neighbours = false) const {
    const uint32_t eights = latent_eights(), latents = W::kRows * eights;
    if (i < latents && neighbours) return {static_cast<int>(i / 64), static_cast<int>(i % 32 * 2 + i / 32 % 2), false};
    if (i < latents) return {static_cast<int>(i / eights), static_cast<int>(i % eights), false};
    const uint32_t rope_eights = max(W::rope_dim(a_) / 8u, 1u), j = i - latents;
    return {static_cast<int>(j / rope_eights), static_cast<int>(j % rope_eights), true};
  }
  __device__ T* outside(const Piece& p) const {
    using Stride = typename W::Stride;
    return p.rope ? rope_ + static_cast<int64_t>(p.row) * static_cast<Stride>(a_.rope_stride) + 8 * p.eight
                  : latent_ + static_cast<int64_t>(p.row) * static_cast<Stride>(a_.latent_stride) + 8 * p.eight;
  }
  /// The slot of the lane's row; -1 where there is none.
  __device__ int64_t own_slot() const {
    if (static_cast<int>(lane()) >= rows_) return -1;
    return a_.wide_slots ? static_cast<const int64_t*>(a_.slots)[first_ + lane()]
                         : static_cast<const int32_t*>(a_.slots)[first_ + lane()];
  }

 private:
  const Rows& a_;
  int64_t first_;
  int rows_;
  T *latent_, *rope_;
};

/// Where a row lies in the cache: bytes from its beginning. latent < 0: nowhere.
struct Place {
  int64_t latent, rope, scale;
};
template <Layout kLayout, class W>
__device__ Place place_slot(const Rows& a, int64_t slot) {
  if (slot < 0 || slot >= a.num_slots) return {-1, -1, -1};
  int64_t page;
  int32_t offset;
  if constexpr (W::kKnown) {  // fewer than 2^32 slots: the quotient is the product with the inverse, or one more
    const auto n = static_cast<uint32_t>(slot), size = static_cast<uint32_t>(a.page_size);
    uint32_t quotient = __umulhi(n, a.page_inverse), rest = n - quotient * size;
    if (rest >= size) {
      ++quotient;
      rest -= size;
    }
    page = quotient;
    offset = static_cast<int32_t>(rest);
  } else {
    page = slot / a.page_size;
    offset = static_cast<int32_t>(slot % a.page_size);
  }
  const int64_t begin = page * a.page_stride;
  if constexpr (kLayout == Layout::kPlanar) {
    const int64_t scales = begin + static_cast<int64_t>(a.page_size) * W::dim(a);
    return {begin + static_cast<int64_t>(offset) * W::dim(a),
            scales + 4 * (static_cast<int64_t>(a.page_size) + static_cast<int64_t>(offset) * (W::rope_dim(a) / 2)),
            scales + 4 * static_cast<int64_t>(offset)};
  } else {
    constexpr int64_t kBytes = sizeof(typename StoredType<kLayout>::Type);
    const int64_t row = begin + offset * a.row_stride, after = row + kBytes * W::dim(a);
    return {row, after + (kLayout == Layout::kPacked ? 4 * (W::dim(a) / kGroup) : 0), after};
  }
}

/// What the lane that placed the piece's row says of the part it is in; all lanes take part. Where widths are known the
/// pieces of an access are of the same part.
template <class W, class Piece>
__device__ int64_t place_of(const Place& own, const Piece& p) {
  if constexpr (W::kKnown) return __shfl_sync(kAll, p.rope ? own.rope : own.latent, p.row);
  const int64_t latent = __shfl_sync(kAll, own.latent, p.row), rope = __shfl_sync(kAll, own.rope, p.row);
  return p.rope ? rope : latent;
}

/// Eights of a layout's latent parts and, where they differ, of its rope parts.
template <Layout kLayout>
using LatentEight = Eight<typename StoredType<kLayout>::Type>;
using RopeEight = Eight<uint16_t>;

// ---- writing -----------------------------------------------------------------------------------------------------

template <class T, Layout kLayout, class W>
__global__ void __launch_bounds__(kThreads) write_kernel(const __grid_constant__ Rows a) {
  using To = LatentEight<kLayout>;
  constexpr bool kPacked = kLayout == Layout::kPacked, kPlanar = kLayout == Layout::kPlanar;
  constexpr bool kPairs = kPacked && W::kKnown;  // 16 neighbouring values a lane: one store of a row's 512 bytes
  wait_for_stream();
  let_next_start();
  const WarpRows<T, W> w(a);
  if (w.rows() <= 0) return;
  const int64_t slot = w.own_slot();
  Place own{};
  float own_scale = 0.0f;                                       // kPlanar: of the lane's row
  constexpr bool kWithRope = !W::kKnown || W::kRopeEights > 0;  // of index keys no scale is below 2^-42
  using Divisor = RowDivisor<kWithRope>;
  Divisor own_divisor;
  const uint32_t num_eights = w.num_eights();

  // Where the compiler does not know the width, the scales of planar rows take a look of their own; the second look is
  // into the L1.
  if constexpr (kPlanar && !W::kKnown) {
    for (int row = 0; row < w.rows(); ++row) {
      float amax = 0.0f;
      for (uint32_t e = w.lane(); e < w.latent_eights(); e += 32) {
        float x[8];
        Eight<T>::load(w.outside({row, static_cast<int>(e), false})).expand(x);
        amax = fmaxf(amax, magnitude(x));
      }
      amax = group_max<32>(amax);
      if (static_cast<int>(w.lane()) == row) own_scale = planar_scale(a.rule, amax);
    }
  }

#pragma unroll(W::kKnown ? 1 : 2)
  for (uint32_t begin = 0; begin < num_eights; begin += 32 * W::kBatch) {
    Eight<T> from[W::kBatch];
#pragma unroll
    for (int b = 0; b < W::kBatch; ++b) {
      const uint32_t i = begin + 32 * b + w.lane();
      const auto p = w.piece(i, kPairs);
      from[b] = {};
      if (i < num_eights && p.row < w.rows()) from[b] = Eight<T>::load(w.outside(p));
    }
    if (begin == 0) {
      own = place_slot<kLayout, W>(a, slot);
      if constexpr (kPlanar) {
        if constexpr (W::kKnown) {  // a row fills half an access, or several
          constexpr int kOfRow = W::kLatentEights > 32 ? W::kLatentEights / 32 : 1;
          constexpr uint32_t kLanes = W::kLatentEights > 32 ? 32 : W::kLatentEights, kGroups = 32 / kLanes;
          float own_amax = 0.0f;
#pragma unroll
          for (int b = 0; b < W::kRows * W::kLatentEights / 32; b += kOfRow) {
            float amax = 0.0f;
#pragma unroll
            for (int c = b; c < b + kOfRow; ++c) {
              float x[8];
              from[c].expand(x);
              amax = fmaxf(amax, magnitude(x));
            }
            amax = __shfl_sync(kAll, group_max<kLanes>(amax), w.lane() % kGroups * kLanes);
            if (w.lane() / kGroups == b / kOfRow) own_amax = amax;
          }
          own_scale = planar_scale(a.rule, own_amax);
        }
        own_divisor = Divisor(own_scale);
        if (own.latent >= 0) *reinterpret_cast<float*>(a.cache + own.scale) = own_scale;
      }
    }

    constexpr int kPairBatch = kPairs ? W::kRows * W::kLatentEights / 32 : 0;
    if constexpr (kPairs) {
#pragma unroll
      for (int b = 0; b < kPairBatch; b += 2) {
        const int row = b / 2;
        const int64_t place = __shfl_sync(kAll, own.latent, row);
        float low[8], high[8];
        from[b].expand(low);
        from[b + 1].expand(high);
        const float scale = packed_scale(group_max<kGroup / 16>(fmaxf(magnitude(low), magnitude(high))));
        const float inverse = inverse_power_of_two(scale);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          low[i] *= inverse;
          high[i] *= inverse;
        }
        if (row >= w.rows() || place < 0) continue;
        const To first = To::pack(low), second = To::pack(high);
        unsigned char* const to = a.cache + place;
        __stwb(reinterpret_cast<uint4*>(to) + w.lane(), make_uint4(first.low, first.high, second.low, second.high));
        if (w.lane() % (kGroup / 16) == 0) reinterpret_cast<float*>(to + W::dim(a))[w.lane() / (kGroup / 16)] = scale;
      }
    }
#pragma unroll
    for (int b = kPairBatch; b < W::kBatch; ++b) {
      const uint32_t i = begin + 32 * b + w.lane();
      const auto p = w.piece(i, kPairs);
      const int64_t place = place_of<W>(own, p);
      const bool ok = i < num_eights && p.row < w.rows() && place >= 0;
      float x[8];
      from[b].expand(x);
      float scale = 1.0f;
      Divisor divisor;
      if constexpr (kPacked) scale = packed_scale(group_max<kGroup / 8>(p.rope ? 0.0f : magnitude(x)));
      if constexpr (kPlanar) {
        if constexpr (kWithRope) scale = __shfl_sync(kAll, own_scale, p.row);
        divisor = own_divisor.of_lane(p.row);
      }
      if (!ok) continue;
      if (p.rope && kHasScales<kLayout>) {
        if constexpr (kPlanar) {
#pragma unroll
          for (float& y : x) y = __fdiv_rn(y, scale);
        }
        RopeEight bits;
        if constexpr (kPacked && sizeof(T) == 2) bits = from[b];
        else bits = RopeEight::pack(x);
        store_stored<kLayout, W>(a.cache + place + p.eight * sizeof bits, bits);
        continue;
      }
      if constexpr (kPacked) {
        const float inverse = inverse_power_of_two(scale);
#pragma unroll
        for (float& y : x) y *= inverse;
        if (p.eight % (kGroup / 8) == 0)
          *reinterpret_cast<float*>(a.cache + place + W::dim(a) + p.eight / (kGroup / 8) * 4) = scale;
      } else if constexpr (kPlanar) {
#pragma unroll
        for (float& y : x) y = divisor.template divide<T>(y);
      } else if constexpr (kLayout == Layout::kE4m3) {
        if (a.exact_inverse) {
#pragma unroll
          for (float& y : x) y *= a.inverse;
        } else {
#pragma unroll
          for (float& y : x) {
            if constexpr (W::kKnown) {
              constexpr float kSaturated = 1024.0f;  // far beyond 448, and far below where the remainder overflows
              const float simple = y * a.inverse;
              y = fabsf(simple) < kSaturated ? quotient(y, a.scale, a.inverse) : simple;
            } else {
              y = __fdiv_rn(y, a.scale);
            }
          }
        }
      }
      if constexpr (sizeof(Eight<T>) == sizeof(To))
        store_stored<kLayout, W>(a.cache + place + p.eight * sizeof(To), from[b]);
      else store_stored<kLayout, W>(a.cache + place + p.eight * sizeof(To), To::pack(x));
    }
  }
}

// ---- gathering ---------------------------------------------------------------------------------------------------

template <class T, Layout kLayout, class W>
__global__ void __launch_bounds__(kThreads) gather_kernel(const __grid_constant__ Rows a) {
  using From = LatentEight<kLayout>;
  constexpr bool kPacked = kLayout == Layout::kPacked, kPlanar = kLayout == Layout::kPlanar;
  wait_for_stream();
  let_next_start();
  const WarpRows<T, W> w(a);
  if (w.rows() <= 0) return;
  const Place own = place_slot<kLayout, W>(a, w.own_slot());
  float own_scale = 0.0f;
  if (kPlanar && own.latent >= 0) own_scale = *reinterpret_cast<const float*>(a.cache + own.scale);
  const uint32_t num_eights = w.num_eights();

#pragma unroll(W::kKnown ? 1 : 2)
  for (uint32_t begin = 0; begin < num_eights; begin += 32 * W::kBatch) {
    From latent[W::kBatch];
    RopeEight rope[W::kBatch];  // of layouts with scales
    float scale[W::kBatch];
#pragma unroll
    for (int b = 0; b < W::kBatch; ++b) {
      const uint32_t i = begin + 32 * b + w.lane();
      const auto p = w.piece(i);
      const int64_t place = place_of<W>(own, p);
      latent[b] = {};
      rope[b] = {};
      scale[b] = kPlanar ? __shfl_sync(kAll, own_scale, p.row) : a.scale;
      if (i >= num_eights || p.row >= w.rows() || place < 0) continue;
      if (p.rope && kHasScales<kLayout>) {
        rope[b] = load_stored<kLayout, W, RopeEight>(a.cache + place + p.eight * sizeof(RopeEight));
        continue;
      }
      latent[b] = load_stored<kLayout, W, From>(a.cache + place + p.eight * sizeof(From));
      if constexpr (kPacked)
        scale[b] = *reinterpret_cast<const float*>(a.cache + place + W::dim(a) + p.eight / (kGroup / 8) * 4);
    }
#pragma unroll
    for (int b = 0; b < W::kBatch; ++b) {
      const uint32_t i = begin + 32 * b + w.lane();
      const auto p = w.piece(i);
      if (i >= num_eights || p.row >= w.rows()) continue;
      T* const to = w.outside(p);
      // A row that lies nowhere gives zeros: its values and scales are.
      float x[8];
      if (p.rope && kHasScales<kLayout>) {
        if constexpr (kPacked && sizeof(T) == 2) {
          rope[b].store(to);
        } else {
          rope[b].expand(x);
#pragma unroll
          for (float& y : x) y *= kPlanar ? scale[b] : 1.0f;
          Eight<T>::pack(x).store(to);
        }
      } else if constexpr (sizeof(Eight<T>) == sizeof(From)) {
        latent[b].store(to);
      } else {
        latent[b].expand(x);
#pragma unroll
        for (float& y : x) y *= sizeof(From) == 8 ? scale[b] : 1.0f;
        Eight<T>::pack(x).store(to);
      }
    }
  }
}

// ---- launches ----------------------------------------------------------------------------------------------------

template <class W>
void launch(const char* function, void (*kernel)(Rows), const Rows& a, const Device& device, Stream stream) {
  const DeviceGuard guard(function, device.index);
  constexpr int64_t kOfBlock = int64_t{kWarps} * W::kRows;
  launch_kernel(function, kernel, {.blocks = (a.count + kOfBlock - 1) / kOfBlock, .threads = kThreads}, stream, a);
}

template <bool kWrites, class T, Layout kLayout, class W>
constexpr auto kernel_of() {  // one of the two: the other one is not compiled
  if constexpr (kWrites) return write_kernel<T, kLayout, W>;
  else return gather_kernel<T, kLayout, W>;
}

template <bool kWrites, Layout kLayout>
void run_layout(const char* function, const Rows& a, DType outside, const Device& device, Stream stream) {
  if (outside != DType::kBf16)
    return launch<Any>(function, kernel_of<kWrites, float, kLayout, Any>(), a, device, stream);
  if constexpr (kLayout != Layout::kF32) {
    using Index = Fixed<128, 0, 8>;
    constexpr int64_t kMostStride = std::numeric_limits<Index::Stride>::max();
    bool fits = a.latent_stride <= kMostStride && a.rope_stride <= kMostStride && a.num_slots >> 32 == 0;
    if (kLayout == Layout::kE4m3) fits = fits && a.scale >= kLeastDivisor && a.scale <= kMostDivisor;
    if (kLayout == Layout::kPlanar) fits = fits && (a.page_size % 4 == 0 || a.rope_dim == 0);  // else rope is unaligned
    if (fits && a.dim == 512 && a.rope_dim == 64) {
      const auto with_rows = [&]<int kRows>() {
        using Few = Fixed<512, 64, kRows>;
        launch<Few>(function, kernel_of<kWrites, uint16_t, kLayout, Few>(), a, device, stream);
      };
      if constexpr (kWrites) {
        return with_rows.template operator()<1>();
      } else {
        if (a.count <= kMostForOne) return with_rows.template operator()<1>();
        if (a.count <= kMostForTwo) return with_rows.template operator()<2>();
        return with_rows.template operator()<4>();
      }
    }
    if constexpr (kLayout == Layout::kBf16 || kLayout == Layout::kPlanar)
      if (fits && a.dim == 128 && a.rope_dim == 0)
        return launch<Index>(function, kernel_of<kWrites, uint16_t, kLayout, Index>(), a, device, stream);
  }
  launch<Any>(function, kernel_of<kWrites, uint16_t, kLayout, Any>(), a, device, stream);
}

template <bool kWrites>
void run_rows(const char* function, const Rows& a, Layout layout, DType outside, const Device& device, Stream stream) {
  switch (layout) {
    case Layout::kF32: return run_layout<kWrites, Layout::kF32>(function, a, outside, device, stream);
    case Layout::kBf16: return run_layout<kWrites, Layout::kBf16>(function, a, outside, device, stream);
    case Layout::kE4m3: return run_layout<kWrites, Layout::kE4m3>(function, a, outside, device, stream);
    case Layout::kPacked: return run_layout<kWrites, Layout::kPacked>(function, a, outside, device, stream);
    case Layout::kPlanar: return run_layout<kWrites, Layout::kPlanar>(function, a, outside, device, stream);
  }
}

uint32_t page_inverse(int32_t page_size) {
  return static_cast<uint32_t>(std::min<uint64_t>((uint64_t{1} << 32) / static_cast<uint32_t>(page_size), UINT32_MAX));
}

/// LatentWrite and LatentGather.
template <class Params>
void run_latent(const Params& p, const RunContext& c) {
  constexpr bool kWrites = std::is_same_v<Params, LatentWrite>;
  const LatentCacheView& v = p.cache;
  Rows a{};
  a.latent = p.latent.data;
  a.rope = p.rope.data;
  a.latent_stride = p.latent.stride[0];
  a.rope_stride = p.rope.stride[0];
  a.slots = p.slots.data;
  a.wide_slots = p.slots.dtype == DType::kI64;
  a.count = p.slots.shape[0];
  a.cache = static_cast<unsigned char*>(v.data);
  a.page_stride = v.page_stride_bytes;
  a.row_stride = v.row_stride();
  a.num_slots = v.num_slots();
  a.page_size = v.page_size;
  a.page_inverse = page_inverse(v.page_size);
  a.dim = v.geometry.latent_dim;
  a.rope_dim = v.geometry.rope_dim;
  a.scale = v.scale;
  a.inverse = v.scale > 0.0f ? 1.0f / v.scale : 0.0f;
  int exponent = 0;
  a.exact_inverse = v.scale >= kLeastDivisor && v.scale <= kMostDivisor && std::frexp(v.scale, &exponent) == 0.5f;
  a.rule = ScaleRule::kToken;
  const auto run = [&](Layout layout) {
    run_rows<kWrites>(Params::kName, a, layout, p.latent.dtype, p.latent.device, c.stream);
  };
  switch (v.format) {
    case LatentFormat::kF32: return run(Layout::kF32);
    case LatentFormat::kBf16: return run(Layout::kBf16);
    case LatentFormat::kE4m3: return run(Layout::kE4m3);
    case LatentFormat::kPacked656: return run(Layout::kPacked);
    case LatentFormat::kE4m3PerToken: return run(Layout::kPlanar);
  }
}

/// IndexKWrite and IndexKGather.
template <class Params>
void run_index_k(const Params& p, const RunContext& c) {
  constexpr bool kWrites = std::is_same_v<Params, IndexKWrite>;
  const IndexCacheView& v = p.cache;
  Rows a{};
  a.latent = p.k.data;
  a.latent_stride = p.k.stride[0];
  a.slots = p.slots.data;
  a.wide_slots = p.slots.dtype == DType::kI64;
  a.count = p.slots.shape[0];
  a.cache = static_cast<unsigned char*>(v.data);
  a.page_stride = v.page_stride_bytes;
  a.num_slots = v.num_slots();
  a.page_size = v.page_size;
  a.page_inverse = page_inverse(v.page_size);
  a.dim = v.head_dim;
  a.rule = v.scale_format == ScaleFormat::kFp32 ? ScaleRule::kIndex : ScaleRule::kIndexPowerOfTwo;
  const auto run = [&](Layout layout, int64_t value_bytes) {
    a.row_stride = v.head_dim * value_bytes;
    run_rows<kWrites>(Params::kName, a, layout, p.k.dtype, p.k.device, c.stream);
  };
  switch (v.format) {
    case IndexKFormat::kF32: return run(Layout::kF32, 4);
    case IndexKFormat::kBf16: return run(Layout::kBf16, 2);
    case IndexKFormat::kE4m3: return run(Layout::kPlanar, 1);
  }
}

}  // namespace

void run_latent_write(const LatentWrite& p, const RunContext& c) { run_latent(p, c); }
void run_latent_gather(const LatentGather& p, const RunContext& c) { run_latent(p, c); }
void run_index_k_write(const IndexKWrite& p, const RunContext& c) { run_index_k(p, c); }
void run_index_k_gather(const IndexKGather& p, const RunContext& c) { run_index_k(p, c); }

}  // namespace generic
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
