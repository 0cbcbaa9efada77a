// The vector vocabulary on AVX2 with FMA: eight lanes, 16 registers. No dot product of bf16 pairs: the kernels
// take fp32 fma over widened values. See vec_portable.h for what each name means and for the rules.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#define GANNET_INLINE static inline __attribute__((always_inline))

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {

inline constexpr int kLanes = 8;
inline constexpr bool kFastDot2 = false;
inline constexpr int kVectorRegisters = 16;
inline constexpr bool kNativeDot2 = false;

using F = __m256;
using W = __m256i;

GANNET_INLINE F zero() { return _mm256_setzero_ps(); }
GANNET_INLINE F set1(float x) { return _mm256_set1_ps(x); }
GANNET_INLINE F loadu(const float* p) { return _mm256_loadu_ps(p); }
GANNET_INLINE void storeu(float* p, F v) { _mm256_storeu_ps(p, v); }
GANNET_INLINE W lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
GANNET_INLINE W first_lanes(int n) { return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane_numbers()); }
GANNET_INLINE F loadu_n(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
GANNET_INLINE void storeu_n(float* p, F v, int n) { _mm256_maskstore_ps(p, first_lanes(n), v); }
GANNET_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
GANNET_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
GANNET_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
GANNET_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
GANNET_INLINE F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
GANNET_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
GANNET_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
GANNET_INLINE F select_less(F a, F b, F x, F y) { return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
GANNET_INLINE F canonical_nan(F x) {
  return _mm256_blendv_ps(x, _mm256_set1_ps(__builtin_nanf("")), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
GANNET_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
GANNET_INLINE float reduce_add(F v) {
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_shuffle_ps(x, x, 1)));
}
GANNET_INLINE float reduce_max(F v) {
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_shuffle_ps(x, x, 1)));
}

GANNET_INLINE W load_w(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
GANNET_INLINE void store_w(uint32_t* p, W v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
GANNET_INLINE W set1_w(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
GANNET_INLINE F dot2(F acc, W a, W b) {
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const F al = _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), bl = _mm256_castsi256_ps(_mm256_slli_epi32(b, 16));
  const F ah = _mm256_castsi256_ps(_mm256_and_si256(a, upper)), bh = _mm256_castsi256_ps(_mm256_and_si256(b, upper));
  return _mm256_fmadd_ps(ah, bh, _mm256_fmadd_ps(al, bl, acc));
}
GANNET_INLINE W to_bf16_w(F x) {
  const __m256i u = _mm256_castps_si256(x), high = _mm256_srli_epi32(u, 16);
  const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, odd), _mm256_set1_epi32(0x7fff)), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(rounded, _mm256_or_si256(high, _mm256_set1_epi32(0x40)), nan);
}
GANNET_INLINE W pack2(F low, F high) { return _mm256_or_si256(to_bf16_w(low), _mm256_slli_epi32(to_bf16_w(high), 16)); }
GANNET_INLINE F load_bf16(const uint16_t* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
/// The low halves of eight words, in order.
GANNET_INLINE __m128i low_halves(W w) {
  const __m256i packed = _mm256_packus_epi32(w, w);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}
GANNET_INLINE void store_bf16(uint16_t* p, F v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), low_halves(to_bf16_w(v)));
}
GANNET_INLINE void interleave2(const uint16_t* a, const uint16_t* b, uint32_t* out) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
  const __m256i low = _mm256_unpacklo_epi16(x, y), high = _mm256_unpackhi_epi16(x, y);
  store_w(out, _mm256_permute2x128_si256(low, high, 0x20));
  store_w(out + kLanes, _mm256_permute2x128_si256(low, high, 0x31));
}
GANNET_INLINE void transpose_words(W* m) {
  W a[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_epi32(m[i], m[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32(m[i], m[i + 1]);
  }
  W b[8];  // b[4 g + c] has in half k the column 4 k + c of rows 4 g .. 4 g + 3
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    m[c] = _mm256_permute2x128_si256(b[c], b[4 + c], 0x20);
    m[4 + c] = _mm256_permute2x128_si256(b[c], b[4 + c], 0x31);
  }
}
GANNET_INLINE void pair_columns(const uint16_t* a, const uint16_t* b, W* low, W* high) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a));
  const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
  *low = _mm256_unpacklo_epi16(x, y);   // columns 0-3, 8-11
  *high = _mm256_unpackhi_epi16(x, y);  // columns 4-7, 12-15
}
GANNET_INLINE void ordered(F low, F high, F* first, F* second) {
  *first = _mm256_permute2f128_ps(low, high, 0x20);
  *second = _mm256_permute2f128_ps(low, high, 0x31);
}
GANNET_INLINE F load_e4m3(const uint8_t* p) {
  const __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256i magnitude = _mm256_and_si256(b, _mm256_set1_epi32(0x7f));
  const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 20)), _mm256_set1_ps(0x1p120f));
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(b, _mm256_set1_epi32(0x80)), 24);
  const __m256i nan =
      _mm256_and_si256(_mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f)), _mm256_set1_epi32(0x7fc00000));
  return _mm256_castsi256_ps(_mm256_or_si256(_mm256_or_si256(_mm256_castps_si256(value), sign), nan));
}
GANNET_INLINE F round_int(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
GANNET_INLINE F scale2(F p, F n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(e, 23)));
}

GANNET_INLINE void store_bf16_exact(uint16_t* p, F v) { store_bf16(p, v); }
GANNET_INLINE void store_e4m3(uint8_t* p, F v) {
  const __m256i u = _mm256_castps_si256(v), magnitude = _mm256_and_si256(u, _mm256_set1_epi32(0x7fffffff));
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(magnitude, odd), _mm256_set1_epi32(0x7ffff - (120 << 23)));
  const __m256i subnormal =
      _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(0x1p14f))),
                       _mm256_set1_epi32(0x46800000));
  __m256i code = _mm256_srli_epi32(rounded, 20);
  code = _mm256_blendv_epi8(code, subnormal, _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), magnitude));
  code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7e),
                            _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x43e00000 - 1)));
  code = _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(u, 24), _mm256_set1_epi32(0x80)));
  code =
      _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7f), _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000)));
  const __m128i halves = low_halves(code);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(halves, halves));
}
GANNET_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
GANNET_INLINE F abs(F a) { return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff))); }
GANNET_INLINE F swap_pairs(F a) { return _mm256_permute_ps(a, 0xB1); }
GANNET_INLINE void e4m3_to_bf16(const uint8_t* p, uint16_t* out, int n) {
  // Normal values: three mantissa bits shifted up and the exponent rebiased from 7 to 127. The seven subnormals
  // k * 2^-9 come from a table of upper bytes and one of lower bytes.
  const __m256i upper = _mm256_setr_epi8(0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x3b,
                                         0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0);
  const __m256i lower = _mm256_setr_epi8(0, 0, -0x80, -0x40, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -0x80,
                                         -0x40, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0);
  for (int i = 0; i < n; i += 2 * kLanes) {
    const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i)));
    const __m256i magnitude = _mm256_and_si256(b, _mm256_set1_epi16(0x7f));
    __m256i v = _mm256_add_epi16(_mm256_slli_epi16(magnitude, 4), _mm256_set1_epi16(120 << 7));
    // The odd bytes of magnitude are 0, and so is the tables' entry 0.
    const __m256i small = _mm256_or_si256(_mm256_slli_epi16(_mm256_shuffle_epi8(upper, magnitude), 8),
                                          _mm256_shuffle_epi8(lower, magnitude));
    v = _mm256_blendv_epi8(v, small, _mm256_cmpgt_epi16(_mm256_set1_epi16(8), magnitude));
    v = _mm256_blendv_epi8(v, _mm256_set1_epi16(0x7fc0), _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7f)));
    const __m256i sign = _mm256_slli_epi16(_mm256_xor_si256(b, magnitude), 8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_or_si256(v, sign));
  }
}
GANNET_INLINE void scaled_e4m3_to_bf16(const uint8_t* p, float scale, uint16_t* out, int n) {
  for (int i = 0; i < n; i += kLanes) store_bf16(out + i, mul(load_e4m3(p + i), set1(scale)));
}

inline constexpr int kFewestGroupLanes = 4;
GANNET_INLINE F sum_groups(F v, int lanes) {
  v = _mm256_add_ps(v, _mm256_permute_ps(v, 0x4E));                              // + the lane 2 further, of four
  v = _mm256_add_ps(v, _mm256_permute_ps(v, 0xB1));                              // + its neighbour
  return lanes == 4 ? v : _mm256_add_ps(v, _mm256_permute2f128_ps(v, v, 0x01));  // + the other four
}
GANNET_INLINE F and_mask(F a, W mask) { return _mm256_and_ps(a, _mm256_castsi256_ps(mask)); }
GANNET_INLINE W order_key(F x) {
  const __m256i u = _mm256_castps_si256(_mm256_add_ps(x, _mm256_setzero_ps()));
  const __m256i flip = _mm256_or_si256(_mm256_srai_epi32(u, 31), _mm256_set1_epi32(INT32_MIN));
  return _mm256_and_si256(_mm256_xor_si256(u, flip), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_ORD_Q)));
}
GANNET_INLINE W shift_right(W a, int n) { return _mm256_srl_epi32(a, _mm_cvtsi32_si128(n)); }
GANNET_INLINE uint32_t bits_of(W mask) { return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(mask))); }
GANNET_INLINE uint32_t greater_bits(W a, W b) {
  const __m256i top = _mm256_set1_epi32(INT32_MIN);  // unsigned order as signed order
  return bits_of(_mm256_cmpgt_epi32(_mm256_xor_si256(a, top), _mm256_xor_si256(b, top)));
}
GANNET_INLINE uint32_t equal_bits(W a, W b) { return bits_of(_mm256_cmpeq_epi32(a, b)); }
GANNET_INLINE int compress_lanes(int32_t* out, uint32_t bits, int32_t base) {
  int n = 0;
  for (; bits != 0; bits &= bits - 1) out[n++] = base + __builtin_ctz(bits);
  return n;
}

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
