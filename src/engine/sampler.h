// From logits to a token.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace gannet {
inline namespace v0 {

struct SamplingOptions {
  float temperature = 0.0f;  ///< 0: the most likely token, the smaller id among equals
  float top_p = 1.0f;        ///< in (0, 1]: the smallest set of likeliest tokens that reaches this probability
  uint64_t seed = 0;
};

/// Throws Error(kInvalidArgument) for a temperature below 0 or not finite, and top_p outside (0, 1].
void check_sampling(const SamplingOptions& options);

/// Index of the largest logit, the smaller among equals. NaN is below everything.
int32_t argmax(std::span<const float> logits);

/// Throws what sample() does where every logit is NaN.
[[noreturn]] void fail_all_nan();

/// Draws the tokens of one request. The same options and logits give the same tokens on every machine: the generator is
/// the standard library's mt19937_64, whose numbers are specified, and no distribution object of it is used.
class Sampler {
 public:
  explicit Sampler(const SamplingOptions& options);
  int32_t sample(std::span<const float> logits);

 private:
  SamplingOptions options_;
  std::mt19937_64 random_;
  std::vector<int32_t> order_;
  std::vector<double> weights_;
};

}  // namespace v0
}  // namespace gannet
