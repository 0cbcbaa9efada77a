#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/format.h"

namespace gannet {
inline namespace v0 {

void check_sampling(const SamplingOptions& options) {
  if (!(options.temperature >= 0.0f) || !std::isfinite(options.temperature))
    fail_argument("sampling", "temperature is {}; accepted: a finite number from 0", options.temperature);
  if (!(options.top_p > 0.0f && options.top_p <= 1.0f))
    fail_argument("sampling", "top_p is {}; accepted: above 0 and at most 1", options.top_p);
}

int32_t argmax(std::span<const float> logits) {
  size_t best = 0;
  for (size_t i = 1; i < logits.size(); ++i)
    if (logits[i] > logits[best] || (std::isnan(logits[best]) && !std::isnan(logits[i]))) best = i;
  return static_cast<int32_t>(best);
}

void fail_all_nan() {
  fail(ErrorCode::kCorruptFile, "sampling", "every logit is NaN; accepted: a model whose weights are finite");
}

Sampler::Sampler(const SamplingOptions& options) : options_(options), random_(options.seed) { check_sampling(options); }

int32_t Sampler::sample(std::span<const float> logits) {
  const int32_t best = argmax(logits);
  if (std::isnan(logits[static_cast<size_t>(best)]))  // argmax takes any other value before NaN
    fail_all_nan();
  if (options_.temperature == 0.0f) return best;
  const double top = logits[static_cast<size_t>(best)];
  weights_.resize(logits.size());
  double total = 0.0;
  for (size_t i = 0; i < logits.size(); ++i) {
    weights_[i] = std::isnan(logits[i]) ? 0.0 : std::exp((double{logits[i]} - top) / double{options_.temperature});
    total += weights_[i];
  }
  if (!(total > 0.0)) return best;
  order_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
    const double wa = weights_[static_cast<size_t>(a)], wb = weights_[static_cast<size_t>(b)];
    return wa != wb ? wa > wb : a < b;
  });
  // The nucleus: tokens in order until their probability reaches top_p.
  size_t kept = 0;
  double mass = 0.0;
  while (kept < order_.size() && (kept == 0 || mass < double{options_.top_p} * total))
    mass += weights_[static_cast<size_t>(order_[kept++])];
  const double u = static_cast<double>(random_() >> 11) * 0x1p-53 * mass;  // uniform in [0, mass)
  double sum = 0.0;
  for (size_t i = 0; i < kept; ++i) {
    sum += weights_[static_cast<size_t>(order_[i])];
    if (u < sum) return order_[i];
  }
  return order_[kept - 1];
}

}  // namespace v0
}  // namespace gannet
