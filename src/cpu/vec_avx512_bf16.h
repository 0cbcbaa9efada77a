// The vector vocabulary on AVX-512 with VBMI and BF16: sixteen lanes, dot products of bf16 pairs in one instruction
// (vdpbf16ps: no denormals, round to nearest even, the two products of a pair added before the accumulator's).
// See vec_portable.h for what each name means and for the rules.
#pragma once

// GCC 12's own header initialises "undefined" registers with themselves and warns about it at each use (GCC bug
// 105593).
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include <cstdint>
#include <cstring>

#define GANNET_INLINE static inline __attribute__((always_inline))

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {

inline constexpr int kLanes = 16;
inline constexpr bool kFastDot2 = true;
inline constexpr int kVectorRegisters = 32;
inline constexpr bool kNativeDot2 = true;

using F = __m512;
using W = __m512i;

GANNET_INLINE F zero() { return _mm512_setzero_ps(); }
GANNET_INLINE F set1(float x) { return _mm512_set1_ps(x); }
GANNET_INLINE F loadu(const float* p) { return _mm512_loadu_ps(p); }
GANNET_INLINE void storeu(float* p, F v) { _mm512_storeu_ps(p, v); }
GANNET_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
GANNET_INLINE F loadu_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
GANNET_INLINE void storeu_n(float* p, F v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
GANNET_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
GANNET_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
GANNET_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
GANNET_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
GANNET_INLINE F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
GANNET_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
GANNET_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
GANNET_INLINE F select_less(F a, F b, F x, F y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
GANNET_INLINE F canonical_nan(F x) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x, _mm512_set1_ps(__builtin_nanf("")));
}
GANNET_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
GANNET_INLINE float reduce_add(F v) { return _mm512_reduce_add_ps(v); }
GANNET_INLINE float reduce_max(F v) { return _mm512_reduce_max_ps(v); }

GANNET_INLINE W load_w(const uint32_t* p) { return _mm512_loadu_si512(p); }
GANNET_INLINE void store_w(uint32_t* p, W v) { _mm512_storeu_si512(p, v); }
GANNET_INLINE W set1_w(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
GANNET_INLINE F dot2(F acc, W a, W b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }
GANNET_INLINE W to_bf16_w(F x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }
GANNET_INLINE W pack2(F low, F high) { return _mm512_or_si512(to_bf16_w(low), _mm512_slli_epi32(to_bf16_w(high), 16)); }
GANNET_INLINE F load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
GANNET_INLINE void store_bf16(uint16_t* p, F v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(v));
}
GANNET_INLINE void interleave2(const uint16_t* a, const uint16_t* b, uint32_t* out) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
  const __m512i low = _mm512_unpacklo_epi16(x, y), high = _mm512_unpackhi_epi16(x, y);
  _mm512_storeu_si512(out, _mm512_permutex2var_epi32(low, first, high));
  _mm512_storeu_si512(out + 16, _mm512_permutex2var_epi32(low, second, high));
}
GANNET_INLINE void transpose_words(W* m) {
  // Words within pairs of rows, double words, then 128-bit quarters: 4 x 16 shuffles.
  W a[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(m[i], m[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(m[i], m[i + 1]);
  }
  W b[16];  // b[4 g + c] has in quarter k the column 4 k + c of rows 4 g .. 4 g + 3
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int c = 0; c < 4; ++c) {
    const W even01 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88), odd01 = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd);
    const W even23 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88),
            odd23 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
    m[c] = _mm512_shuffle_i32x4(even01, even23, 0x88);
    m[8 + c] = _mm512_shuffle_i32x4(even01, even23, 0xdd);
    m[4 + c] = _mm512_shuffle_i32x4(odd01, odd23, 0x88);
    m[12 + c] = _mm512_shuffle_i32x4(odd01, odd23, 0xdd);
  }
}
GANNET_INLINE void pair_columns(const uint16_t* a, const uint16_t* b, W* low, W* high) {
  const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
  *low = _mm512_unpacklo_epi16(x, y);   // columns 0-3, 8-11, 16-19, 24-27
  *high = _mm512_unpackhi_epi16(x, y);  // columns 4-7, 12-15, 20-23, 28-31
}
GANNET_INLINE void ordered(F low, F high, F* first, F* second) {
  *first = _mm512_permutex2var_ps(low, _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23), high);
  *second = _mm512_permutex2var_ps(low, _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31),
                                   high);
}
GANNET_INLINE F load_e4m3(const uint8_t* p) {
  const __m512i b = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512i magnitude = _mm512_and_si512(b, _mm512_set1_epi32(0x7f));
  const __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(magnitude, 20)), _mm512_set1_ps(0x1p120f));
  const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(b, _mm512_set1_epi32(0x80)), 24);
  const __mmask16 nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(0x7f));
  const __m512i bits = _mm512_or_si512(_mm512_castps_si512(value), sign);
  return _mm512_castsi512_ps(_mm512_mask_or_epi32(bits, nan, bits, _mm512_set1_epi32(0x7fc00000)));
}
GANNET_INLINE F round_int(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
GANNET_INLINE F scale2(F p, F n) { return _mm512_scalef_ps(p, n); }

GANNET_INLINE void store_bf16_exact(uint16_t* p, F v) {
  const __m512i u = _mm512_castps_si512(v), high = _mm512_srli_epi32(u, 16);
  const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
  __m512i w = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7fff)), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  w = _mm512_mask_or_epi32(w, nan, high, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(w));
}
GANNET_INLINE void store_e4m3(uint8_t* p, F v) {
  const __m512i u = _mm512_castps_si512(v), magnitude = _mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff));
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(magnitude, 20), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(magnitude, odd), _mm512_set1_epi32(0x7ffff - (120 << 23)));
  const __m512i subnormal =
      _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_set1_ps(0x1p14f))),
                       _mm512_set1_epi32(0x46800000));
  __m512i code = _mm512_srli_epi32(rounded, 20);
  code = _mm512_mask_mov_epi32(code, _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x3c800000)), subnormal);
  code = _mm512_mask_mov_epi32(code, _mm512_cmpge_epi32_mask(magnitude, _mm512_set1_epi32(0x43e00000)),
                               _mm512_set1_epi32(0x7e));
  code = _mm512_or_si512(code, _mm512_and_si512(_mm512_srli_epi32(u, 24), _mm512_set1_epi32(0x80)));
  code = _mm512_mask_mov_epi32(code, _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000)),
                               _mm512_set1_epi32(0x7f));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(code));
}
GANNET_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
GANNET_INLINE F abs(F a) { return _mm512_abs_ps(a); }
GANNET_INLINE F swap_pairs(F a) { return _mm512_permute_ps(a, 0xB1); }
// The 128 magnitudes of e4m3, NaN the last, and the bytes of their bf16 values.
struct E4m3Magnitudes {
  float values[128];
  uint16_t words[128];  // of bf16
  uint8_t low[128], high[128];
};
constexpr E4m3Magnitudes e4m3_magnitudes() {
  E4m3Magnitudes t{};
  for (int i = 0; i < 128; ++i) {
    float v = i < 8 ? static_cast<float>(i) : static_cast<float>(8 + i % 8);
    for (int e = i < 8 ? 1 : i / 8; e < 10; ++e) v *= 0.5f;
    for (int e = i / 8; e > 10; --e) v *= 2.0f;
    t.values[i] = i < 127 ? v : __builtin_nanf("");
    const auto bits = __builtin_bit_cast(uint32_t, t.values[i]);
    t.words[i] = static_cast<uint16_t>(bits >> 16);
    t.low[i] = static_cast<uint8_t>(bits >> 16);
    t.high[i] = static_cast<uint8_t>(bits >> 24);
  }
  return t;
}
alignas(64) static constexpr E4m3Magnitudes kE4m3Magnitudes = e4m3_magnitudes();
struct ByteIndices {
  uint8_t at[64];
};
constexpr ByteIndices every_second_byte(int first) {
  ByteIndices x{};
  for (int i = 0; i < 64; ++i) x.at[i] = static_cast<uint8_t>(2 * i + first);
  return x;
}
alignas(64) static constexpr ByteIndices kEvenBytes = every_second_byte(0), kOddBytes = every_second_byte(1);
// A table of 128 bf16 values by bytes.
struct Bf16Table {
  W low[2], high[2];
};
// out[i] = the entry of the magnitude of code p[i], with the upper bit flipped where p[i] is negative. n is a multiple
// of 32. Two instructions look up 64 values; shuffles bound it (5 for 64 values), where arithmetic on words has 22.
GANNET_INLINE void look_up_e4m3(const uint8_t* p, uint16_t* out, int n, const Bf16Table& t) {
  // Bytes of 0-31 to the lower halves of the quarters, 32-63 to the upper: what the byte-wise unpacking puts in order.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const auto pairs = [&](__m512i codes, __m512i * low, __m512i * high) __attribute__((always_inline)) {
    const __m512i b = _mm512_permutexvar_epi64(order, codes);
    *low = _mm512_permutex2var_epi8(t.low[0], b, t.low[1]);
    // x ^ (b & 0x80)
    *high = _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(t.high[0], b, t.high[1]), b, _mm512_set1_epi8(INT8_MIN),
                                      0x78);
  };
  int i = 0;
  __m512i low, high;
  for (; i + 64 <= n; i += 64) {
    pairs(_mm512_loadu_si512(p + i), &low, &high);
    _mm512_storeu_si512(out + i, _mm512_unpacklo_epi8(low, high));
    _mm512_storeu_si512(out + i + 32, _mm512_unpackhi_epi8(low, high));
  }
  if (i == n) return;
  pairs(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i))), &low, &high);
  _mm512_storeu_si512(out + i, _mm512_unpacklo_epi8(low, high));
}
GANNET_INLINE void e4m3_to_bf16(const uint8_t* p, uint16_t* out, int n) {
  const E4m3Magnitudes& e = kE4m3Magnitudes;
  look_up_e4m3(p, out, n,
               {{_mm512_load_si512(e.low), _mm512_load_si512(e.low + 64)},
                {_mm512_load_si512(e.high), _mm512_load_si512(e.high + 64)}});
}
GANNET_INLINE void scaled_e4m3_to_bf16(const uint8_t* p, float scale, uint16_t* out, int n) {
  // The table has as many products as a group of a packed row has values, and spares each its widening. A power of two
  // is an addition to the exponents, but of 0 and NaN, where all products are normal numbers.
  const E4m3Magnitudes& e = kE4m3Magnitudes;
  constexpr uint32_t kLeast = (127 - 117) << 23, kMost = (127 + 119) << 23;  // 2^-9 to 2^-126, 448 to 1.75 * 2^127
  W words[4];
  uint32_t bits;
  std::memcpy(&bits, &scale, sizeof bits);
  if ((bits & 0x7fffff) == 0 && bits >= kLeast && bits <= kMost) {
    const W shift = _mm512_set1_epi16(static_cast<int16_t>((bits >> 16) - (127 << 7)));
    for (int i = 0; i < 4; ++i) {
      const W x = _mm512_load_si512(e.words + 32 * i);
      const __mmask32 moved = i == 0 ? 0xfffffffe : i == 3 ? 0x7fffffff : 0xffffffff;
      words[i] = _mm512_mask_add_epi16(x, moved, x, shift);
    }
  } else {
    const F s = _mm512_set1_ps(scale);
    for (int i = 0; i < 4; ++i) {
      const float* from = e.values + 32 * i;
      words[i] =
          (W)_mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_load_ps(from + 16), s), _mm512_mul_ps(_mm512_load_ps(from), s));
    }
  }
  Bf16Table t;
  for (int i = 0; i < 2; ++i) {
    const W a = words[2 * i], b = words[2 * i + 1];
    t.low[i] = _mm512_permutex2var_epi8(a, _mm512_load_si512(kEvenBytes.at), b);
    t.high[i] = _mm512_permutex2var_epi8(a, _mm512_load_si512(kOddBytes.at), b);
  }
  look_up_e4m3(p, out, n, t);
}

inline constexpr int kFewestGroupLanes = 4;
GANNET_INLINE F sum_groups(F v, int lanes) {
  v = _mm512_add_ps(v, _mm512_permute_ps(v, 0x4E));                            // + the lane 2 further, of four
  v = _mm512_add_ps(v, _mm512_permute_ps(v, 0xB1));                            // + its neighbour
  return lanes == 4 ? v : _mm512_add_ps(v, _mm512_shuffle_f32x4(v, v, 0xB1));  // + the next four
}
GANNET_INLINE F and_mask(F a, W mask) { return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), mask)); }
GANNET_INLINE W order_key(F x) {
  const __m512i u = _mm512_castps_si512(_mm512_add_ps(x, _mm512_setzero_ps()));
  const __m512i flip = _mm512_or_si512(_mm512_srai_epi32(u, 31), _mm512_set1_epi32(INT32_MIN));
  return _mm512_maskz_xor_epi32(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), u, flip);
}
GANNET_INLINE W shift_right(W a, int n) { return _mm512_srl_epi32(a, _mm_cvtsi32_si128(n)); }
GANNET_INLINE uint32_t greater_bits(W a, W b) { return _mm512_cmpgt_epu32_mask(a, b); }
GANNET_INLINE uint32_t equal_bits(W a, W b) { return _mm512_cmpeq_epi32_mask(a, b); }
GANNET_INLINE int compress_lanes(int32_t* out, uint32_t bits, int32_t base) {
  // In registers and then a masked store: the memory form of the compress instruction is microcode on Zen 4.
  const int n = __builtin_popcount(bits);
  const __m512i lane = _mm512_add_epi32(_mm512_set1_epi32(base),
                                        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  _mm512_mask_storeu_epi32(out, first_lanes(n), _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), lane));
  return n;
}

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
