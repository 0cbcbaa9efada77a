// The vector vocabulary in plain C++ with the compiler's vector extension: four lanes, which is one register of the
// x86-64 and the aarch64 baseline. The algorithms in kernels/ are written once over these names; a source file per
// instruction set includes one vocabulary and all kernels.
//
// Rules for the vocabularies and for kernels/: every function is GANNET_INLINE or in an unnamed namespace, and no
// template of the standard library is instantiated there: such code would be a weak symbol compiled with this file's
// instruction set, and the linker could give it to callers on machines that lack it (scripts/check looks).
#pragma once

#include <cstdint>
#include <cstring>

#define GANNET_INLINE static inline __attribute__((always_inline))

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {

inline constexpr int kLanes = 4;          // fp32 values in a vector
inline constexpr bool kFastDot2 = false;  // dot2 beats two fma on fp32
inline constexpr int kVectorRegisters = 16;
inline constexpr bool kNativeDot2 = false;  // dot2 is several instructions: fp32 fma over expanded values is faster

typedef float F __attribute__((vector_size(16)));     // kLanes fp32
typedef uint32_t W __attribute__((vector_size(16)));  // kLanes words, each a pair of bf16 (low half first)
typedef int32_t I __attribute__((vector_size(16)));

GANNET_INLINE F zero() { return F{}; }
GANNET_INLINE F set1(float x) { return F{x, x, x, x}; }
GANNET_INLINE F loadu(const float* p) {
  F v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
GANNET_INLINE void storeu(float* p, F v) { std::memcpy(p, &v, sizeof v); }
/// The first n lanes; the others read as 0 and are not touched in memory.
GANNET_INLINE F loadu_n(const float* p, int n) {
  F v{};
  for (int i = 0; i < n; ++i) v[i] = p[i];
  return v;
}
GANNET_INLINE void storeu_n(float* p, F v, int n) {
  for (int i = 0; i < n; ++i) p[i] = v[i];
}
GANNET_INLINE F add(F a, F b) { return a + b; }
GANNET_INLINE F sub(F a, F b) { return a - b; }
GANNET_INLINE F mul(F a, F b) { return a * b; }
GANNET_INLINE F fma(F a, F b, F c) { return a * b + c; }   // a * b + c, fused where the machine has it
GANNET_INLINE F fnma(F a, F b, F c) { return c - a * b; }  // c - a * b
GANNET_INLINE F max(F a, F b) { return a > b ? a : b; }    // b where a is NaN
GANNET_INLINE F min(F a, F b) { return a < b ? a : b; }
/// a < b ? x : y in each lane; y where a or b is NaN.
GANNET_INLINE F select_less(F a, F b, F x, F y) { return a < b ? x : y; }
/// One NaN for all: which operand's payload and sign survive an operation is the compiler's choice.
GANNET_INLINE F canonical_nan(F x) { return x == x ? x : set1(__builtin_nanf("")); }
/// Asks for the cache line at p; never faults.
GANNET_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }
GANNET_INLINE float reduce_add(F v) { return (v[0] + v[2]) + (v[1] + v[3]); }
GANNET_INLINE float reduce_max(F v) {
  const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}

GANNET_INLINE W load_w(const uint32_t* p) {
  W v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
GANNET_INLINE void store_w(uint32_t* p, W v) { std::memcpy(p, &v, sizeof v); }
GANNET_INLINE W set1_w(uint32_t x) { return W{x, x, x, x}; }
/// acc + a.low * b.low + a.high * b.high for pairs of bf16.
GANNET_INLINE F dot2(F acc, W a, W b) {
  const W al = a << 16, bl = b << 16, ah = a & 0xffff0000u, bh = b & 0xffff0000u;
  return acc + (F)al * (F)bl + (F)ah * (F)bh;
}
/// fp32 to bf16 in the low half of each word, round to nearest even; NaN stays NaN.
GANNET_INLINE W to_bf16_w(F x) {
  const W u = (W)x;
  const W rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
  const W nan = (W)(x != x);
  return (rounded & ~nan) | (((u >> 16) | 0x40u) & nan);
}
/// Pairs (low, high), each rounded to bf16.
GANNET_INLINE W pack2(F low, F high) { return to_bf16_w(low) | (to_bf16_w(high) << 16); }
GANNET_INLINE F load_bf16(const uint16_t* p) {
  return (F)W{uint32_t(p[0]) << 16, uint32_t(p[1]) << 16, uint32_t(p[2]) << 16, uint32_t(p[3]) << 16};
}
GANNET_INLINE void store_bf16(uint16_t* p, F v) {
  const W w = to_bf16_w(v);
  for (int i = 0; i < 4; ++i) p[i] = static_cast<uint16_t>(w[i]);
}
/// out[i] = pair (a[i], b[i]) for i in [0, 2 * kLanes): two rows become pairs.
GANNET_INLINE void interleave2(const uint16_t* a, const uint16_t* b, uint32_t* out) {
  for (int i = 0; i < 2 * kLanes; ++i) out[i] = uint32_t(a[i]) | (uint32_t(b[i]) << 16);
}
/// The kLanes x kLanes words of m, transposed in place.
GANNET_INLINE void transpose_words(W* m) {
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < i; ++j) {
      const uint32_t x = m[i][j];
      m[i][j] = m[j][i];
      m[j][i] = x;
    }
}
/// Pairs (a[i], b[i]) for 2 * kLanes columns i in whatever order is cheapest; ordered() puts such columns in order.
GANNET_INLINE void pair_columns(const uint16_t* a, const uint16_t* b, W* low, W* high) {
  uint32_t out[2 * kLanes];
  interleave2(a, b, out);
  *low = load_w(out);
  *high = load_w(out + kLanes);
}
GANNET_INLINE void ordered(F low, F high, F* first, F* second) {
  *first = low;
  *second = high;
}
/// e4m3 to fp32, exactly: value bits shifted into place as a tiny float, times 2^120; 0x7F and 0xFF give NaN.
GANNET_INLINE F load_e4m3(const uint8_t* p) {
  const W b = {p[0], p[1], p[2], p[3]};
  const W magnitude = b & 0x7fu;
  const F value = (F)(magnitude << 20) * 0x1p120f;
  const W nan = (W)(magnitude == 0x7fu) & 0x7fc00000u;
  return (F)((W)value | nan | ((b & 0x80u) << 24));
}
/// Nearest integer, ties to even, for |x| < 2^22.
GANNET_INLINE F round_int(F x) {
  const F magic = set1(12582912.0f);
  return (x + magic) - magic;
}
/// p * 2^n for whole n in [-126, 127].
GANNET_INLINE F scale2(F p, F n) {
  const I e = __builtin_convertvector(n, I);
  return p * (F)((e + 127) << 23);
}

// ---- exact conversions for cache rows: the bits of Bf16::from_float and E4m3::from_float ----------------------------

/// fp32 to bf16, denormals kept (to_bf16_w may flush them, as bf16 arithmetic units do).
GANNET_INLINE void store_bf16_exact(uint16_t* p, F v) { store_bf16(p, v); }
/// fp32 to e4m3: nearest even, saturating, NaN to 0x7F.
GANNET_INLINE void store_e4m3(uint8_t* p, F v) {
  const W u = (W)v, magnitude = u & 0x7fffffffu;
  // Normal results: round at bit 20, then rebias the exponent from 127 to 7. Results below 2^-6 are multiples of 2^-9,
  // which is what the last bit of a number near 2^14 counts. Comparisons are signed: magnitudes have no top bit.
  const W normal = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  const W subnormal = (W)((F)magnitude + 0x1p14f) - 0x46800000u;
  const W small = (W)((I)magnitude < 0x3c800000);
  W code = (small & subnormal) | (~small & normal);
  const W large = (W)((I)magnitude >= 0x43e00000);  // 448 and more
  code = (large & 0x7eu) | (~large & code);
  code |= (u >> 24) & 0x80u;
  const W nan = (W)((I)magnitude > 0x7f800000);
  code = (nan & 0x7fu) | (~nan & code);
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<uint8_t>(code[i]);
}
GANNET_INLINE F div(F a, F b) { return a / b; }
GANNET_INLINE F abs(F a) { return (F)((W)a & 0x7fffffffu); }
/// (1, 0, 3, 2, ...)
GANNET_INLINE F swap_pairs(F a) { return F{a[1], a[0], a[3], a[2]}; }
/// e4m3 to bf16, exactly, for n values, n a multiple of 32.
GANNET_INLINE void e4m3_to_bf16(const uint8_t* p, uint16_t* out, int n) {
  for (int i = 0; i < n; i += kLanes) store_bf16(out + i, load_e4m3(p + i));
}
/// bf16 of e4m3 * scale, the product in fp32, for n values, n a multiple of 32.
GANNET_INLINE void scaled_e4m3_to_bf16(const uint8_t* p, float scale, uint16_t* out, int n) {
  for (int i = 0; i < n; i += kLanes) store_bf16(out + i, mul(load_e4m3(p + i), set1(scale)));
}

// ---- selections -----------------------------------------------------------------------------------------------------

/// Lanes that sum_groups can add separately: n lanes from a multiple of n, kFewestGroupLanes <= n <= kLanes, n a power
/// of two. The sum of a group stands in its first lane; its bits depend on the group alone.
inline constexpr int kFewestGroupLanes = 4;
GANNET_INLINE F sum_groups(F v, int) {
  v[0] = reduce_add(v);
  return v;
}
/// Bits of a where the mask has ones, +0 elsewhere (a NaN there is gone).
GANNET_INLINE F and_mask(F a, W mask) { return (F)((W)a & mask); }
/// Unsigned words in the total order of scores: NaN (0) < -inf < finite < +inf, -0 = +0.
GANNET_INLINE W order_key(F x) {
  const W u = (W)(x + zero());
  const W key = u ^ ((W)((I)u >> 31) | 0x80000000u);
  return key & ~(W)(x != x);
}
GANNET_INLINE W shift_right(W a, int n) { return a >> static_cast<uint32_t>(n); }
/// A bit per lane.
GANNET_INLINE uint32_t bits_of(W mask) { return (mask[0] & 1u) | (mask[1] & 2u) | (mask[2] & 4u) | (mask[3] & 8u); }
GANNET_INLINE uint32_t greater_bits(W a, W b) { return bits_of((W)(a > b)); }
GANNET_INLINE uint32_t equal_bits(W a, W b) { return bits_of((W)(a == b)); }
/// Writes base + lane for each bit, in order; returns how many.
GANNET_INLINE int compress_lanes(int32_t* out, uint32_t bits, int32_t base) {
  int n = 0;
  for (; bits != 0; bits &= bits - 1) out[n++] = base + __builtin_ctz(bits);
  return n;
}

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
