// Elementary functions over the vector vocabulary.
//
// Polynomials are minimax fits (Remez exchange, relative error, constant term forced to 1 so that the exponential of 0
// is exactly 1: a rescale by e^0 must leave a running sum alone, bit for bit). Degree 6 has a relative error of 4.1e-9,
// below half a unit of fp32; with the rounding of the Horner steps the functions are within 2 units in the last place.
#ifndef GANNET_CPU_KERNELS_MATH_INL_H_
#define GANNET_CPU_KERNELS_MATH_INL_H_

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {

inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kLn2 = 0.693147182f;

/// 2^x for x <= 127. Exactly 0 below -126 (no denormals) and for -inf, exactly 1 for 0, NaN for NaN.
GANNET_INLINE F fast_exp2(F x) {
  const F lowest = set1(-126.0f);
  const F clamped = max(lowest, x);  // max gives its second operand where one is NaN
  const F n = round_int(clamped);
  const F r = sub(clamped, n);  // exact, in [-1/2, 1/2]
  F p = set1(1.53941037e-4f);
  p = fma(p, r, set1(1.34092307e-3f));
  p = fma(p, r, set1(9.61829448e-3f));
  p = fma(p, r, set1(5.55029972e-2f));
  p = fma(p, r, set1(2.40226490e-1f));
  p = fma(p, r, set1(6.93147224e-1f));
  p = fma(p, r, set1(1.0f));
  return select_less(x, lowest, zero(), scale2(p, n));
}

/// e^x for x <= 88. Exactly 0 below -87 (no denormals) and for -inf, exactly 1 for 0, NaN for NaN.
GANNET_INLINE F fast_exp(F x) {
  const F lowest = set1(-87.0f);
  const F clamped = max(lowest, x);
  const F n = round_int(mul(clamped, set1(kLog2E)));
  // ln 2 in two parts: n has at most 7 bits and the first part 17, so the first product is exact.
  const F r = fnma(n, set1(1.42860677e-6f), fnma(n, set1(0.693145752f), clamped));
  F p = set1(1.38526030e-3f);
  p = fma(p, r, set1(8.38043176e-3f));
  p = fma(p, r, set1(4.16678486e-2f));
  p = fma(p, r, set1(1.66663359e-1f));
  p = fma(p, r, set1(4.99999948e-1f));
  p = fma(p, r, set1(1.00000006f));
  p = fma(p, r, set1(1.0f));
  return select_less(x, lowest, zero(), scale2(p, n));
}

/// Natural logarithm of one value and 2^x of one, from the C library: one a row and head, so speed is no concern.
GANNET_INLINE float log_of(float x) { return __builtin_logf(x); }
GANNET_INLINE float exp2_of(float x) { return __builtin_exp2f(x); }

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet

#endif  // GANNET_CPU_KERNELS_MATH_INL_H_
