// How far an implementation may be from the fp64 oracle, derived once. The oracle reads the same stored bytes, so what
// is bounded here is the arithmetic of a kernel, not the error of a format.
//
// Where an input is fp32 the arithmetic is fp32 throughout. Where all are narrower a kernel may round dequantised
// values and the softmax weights P to bf16 (the bf16 dot products of CPUs and GPUs take no other) and adds products in
// fp32; products of bf16 and e4m3 values are exact.
//
// Roundings are independent and uniform, so an error of many of them is measured in the L2 norm of an output row, where
// a relative rounding of at most u has the RMS u / sqrt(3); each term below is the full u, which leaves a factor of
// sqrt(3) and more (terms add as squares) over what is expected. One wrong, missing or repeated key of n moves a row
// by about 1 / sqrt(n) to 1, far beyond.
#pragma once

#include <algorithm>
#include <cmath>

namespace gannet {
inline namespace v0 {
namespace verify {

inline constexpr double kUnitFp32 = 0x1p-24;  // half of the spacing of fp32 at 1
inline constexpr double kUnitBf16 = 0x1p-8;   // the same of bf16
inline constexpr double kUnitE4m3 = 0x1p-4;   // the same of e4m3
// What Hopper's fp8 tensor cores cut off a step of 32 products and the sum so far: 13 bits below the leading bit of the
// largest.
inline constexpr double kUnitFp8Sum = 0x1p-13;

/// What an attention operation works on.
struct AttentionPrecision {
  bool fp32 = false;           ///< an input is fp32, so that the arithmetic is
  bool rounds_inputs = false;  ///< dequantised keys and values may be rounded to bf16
  bool output_bf16 = false;
  bool fp8_products = false;  ///< weights are rounded to e4m3, products added by fp8 tensor cores
  double width = 576;         ///< terms of a score
  double num_keys = 1;
  double score_deviation = 1;  ///< RMS of the scores that enter the softmax
};

/// ||out - oracle|| / ||oracle|| over the values of one row and head.
inline double attention_tolerance(const AttentionPrecision& p) {
  const double output = p.output_bf16 ? kUnitBf16 : 0.0;
  if (p.fp32) {
    // Score: partial sums walk up to the score deviation, one rounding a term, so their errors add up to
    // sqrt(width / 2) units of it; times six for the worst of the thousands of scores of a row with few keys, where one
    // score error is the whole error. exp: 2 units and the rounding of its argument; P * V and the denominator:
    // sqrt(num_keys) each.
    return kUnitFp32 *
               (4.0 * std::sqrt(p.width) * std::max(1.0, p.score_deviation) + 2.0 * std::sqrt(p.num_keys) + 16.0) +
           output;
  }
  // P to bf16: one unit. Keys to bf16: a relative change of each product moves a score by u times its deviation, and
  // the values by u.
  const double inputs = p.rounds_inputs ? kUnitBf16 * (p.score_deviation + 1.0) : 0.0;
  // P to e4m3 instead, and cuts of every step of 32, all of one sign at worst.
  constexpr double kStep = 32.0;
  const double fp8 =
      p.fp8_products ? kUnitE4m3 + kUnitFp8Sum / kStep * (p.width * p.score_deviation + p.num_keys) : 0.0;
  return kUnitBf16 + inputs + output + fp8 +
         kUnitFp32 * (4.0 * std::sqrt(p.width) * p.score_deviation + 2.0 * std::sqrt(p.num_keys) + 16.0);
}

/// |lse - oracle|: a weighted mean of score errors, and the relative error of the denominator, which a kernel may sum
/// from weights already rounded to bf16. With one key there is no mean: four deviations.
inline double lse_tolerance(const AttentionPrecision& p, double lse) {
  const double fp32 = kUnitFp32 * (4.0 * std::sqrt(p.width) * std::max(1.0, p.score_deviation) +
                                   2.0 * std::sqrt(p.num_keys) + 16.0 + 4.0 * std::fabs(lse));
  if (p.fp32) return fp32;
  return fp32 + kUnitBf16 * (1.0 + (p.rounds_inputs ? 4.0 * p.score_deviation : 0.0));
}

/// |max_logit - oracle|: the error of one score, so lse_tolerance with one key, but for the rounding of weights.
inline double max_logit_tolerance(const AttentionPrecision& p, double max_logit) {
  const double fp32 =
      kUnitFp32 * (4.0 * std::sqrt(p.width) * std::max(1.0, p.score_deviation) + 16.0 + 4.0 * std::fabs(max_logit));
  return fp32 + (p.fp32 || !p.rounds_inputs ? 0.0 : kUnitBf16 * 4.0 * p.score_deviation);
}

/// |logit - oracle| of index_logits, elementwise. Products of bf16 and e4m3 values are exact and fp32 queries or keys
/// are not rounded, so only sums in fp32 count: `bound` is sum over heads of |w| ||q|| * ||k||, which no partial sum
/// exceeds.
inline double logit_tolerance(double head_dim, double num_heads, double bound) {
  return kUnitFp32 * (std::sqrt(head_dim) + std::sqrt(num_heads) + 8.0) * bound;
}

/// The same where e4m3 products are added by Hopper's fp8 tensor cores (cuda_sm90): each of the head_dim / 32 steps
/// adds 32 products and the sum so far, every one cut off 13 bits below the leading bit of the largest. With normal
/// values that is the sum, up to a quarter of ||q|| ||k||; 33 cuts of random sign are 1.7 units of it, those of four
/// steps 3.4, the worst of some thousand logits four times that: 4 units of ||q|| ||k||. Heads err independently.
inline double fp8_logit_tolerance(double head_dim, double num_heads, double bound) {
  return logit_tolerance(head_dim, num_heads, bound) + 4.0 * kUnitFp8Sum * bound / std::sqrt(num_heads);
}

/// |x - oracle| of a rotated value of the pair (a, b): two products and a sum in fp32, then the rounding of storage,
/// and the oracle's own rounding to fp32.
inline double rope_tolerance(bool bf16, double a, double b) {
  const double magnitude = std::fabs(a) + std::fabs(b);
  return 3.0 * kUnitFp32 * magnitude + (bf16 ? kUnitBf16 * magnitude : 0.0);
}

/// |out - oracle| of a merged value: weights from an exp of 2 units whose argument is the difference of two LSE (each
/// exact), a sum and a division.
inline double merge_tolerance(bool bf16, double a, double b) {
  const double magnitude = std::max(std::fabs(a), std::fabs(b));
  return 16.0 * kUnitFp32 * magnitude + (bf16 ? kUnitBf16 * magnitude : 0.0);
}
inline double merge_lse_tolerance(double lse) { return kUnitFp32 * (16.0 + 4.0 * std::fabs(lse)); }

}  // namespace verify
}  // namespace v0
}  // namespace gannet
