// Results of absorbed and expanded attention against the oracle's.
#pragma once

#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "verify/recorder.h"
#include "verify/tolerances.h"

namespace gannet {
inline namespace v0 {
namespace verify {

/// The formats of one call of absorbed attention.
struct AbsorbedFormat {
  DType q;
  LatentFormat cache;
  DType out;

  std::string name() const {
    return fmt::format("q {}, cache {}, out {}", to_string(q), to_string(cache), to_string(out));
  }
  AttentionPrecision precision() const {
    AttentionPrecision p;
    p.fp32 = q == DType::kF32 || cache == LatentFormat::kF32;
    p.rounds_inputs = cache != LatentFormat::kBf16;
    p.output_bf16 = out == DType::kBf16;
    return p;
  }
};

inline constexpr AbsorbedFormat kAbsorbedFormats[] = {
    {DType::kBf16, LatentFormat::kBf16, DType::kBf16},         {DType::kF32, LatentFormat::kF32, DType::kF32},
    {DType::kF32, LatentFormat::kBf16, DType::kF32},           {DType::kBf16, LatentFormat::kF32, DType::kF32},
    {DType::kBf16, LatentFormat::kE4m3, DType::kBf16},         {DType::kBf16, LatentFormat::kPacked656, DType::kBf16},
    {DType::kBf16, LatentFormat::kE4m3PerToken, DType::kBf16}, {DType::kF32, LatentFormat::kE4m3, DType::kF32},
    {DType::kF32, LatentFormat::kPacked656, DType::kF32},      {DType::kF32, LatentFormat::kE4m3PerToken, DType::kF32},
    {DType::kE4m3, LatentFormat::kE4m3, DType::kBf16},         {DType::kE4m3, LatentFormat::kE4m3PerToken, DType::kF32},
};

/// Rows of `out` by relative L2 norm, `lse` and `max_logits` by difference; rows without keys bit for bit. A row and
/// head of which the oracle has NaN has seen one: so has the implementation. `sink`: that of the call, where it has
/// one; the share that it takes is off by what the LSE is off.
inline void compare_attention(const Outputs& oracle, const Outputs& got, AttentionPrecision precision, int64_t heads,
                              const std::vector<int64_t>& keys_of_row, Worst& worst, const TensorView& sink = {}) {
  const std::vector<float> want = oracle.floats("out");
  const std::vector<float> have = got.floats("out");
  const bool with_lse = std::find(got.names.begin(), got.names.end(), "lse") != got.names.end();
  const std::vector<float> want_lse = with_lse ? oracle.floats("lse") : std::vector<float>{};
  const std::vector<float> have_lse = with_lse ? got.floats("lse") : std::vector<float>{};
  const bool with_max = std::find(got.names.begin(), got.names.end(), "max_logits") != got.names.end();
  const std::vector<float> want_max = with_max ? oracle.floats("max_logits") : std::vector<float>{};
  const std::vector<float> have_max = with_max ? got.floats("max_logits") : std::vector<float>{};
  if (want.empty()) {
    worst.see(have.empty() ? 0.0 : 1.0, 0.0, "no rows");
    return;
  }
  const size_t lines = keys_of_row.size() * static_cast<size_t>(heads);
  const size_t width = want.size() / lines;
  for (size_t l = 0; l < lines; ++l) {
    const int64_t keys = keys_of_row[l / static_cast<size_t>(heads)];
    const std::string place =
        fmt::format("row {} head {} ({} keys)", l / static_cast<size_t>(heads), l % static_cast<size_t>(heads), keys);
    double error = 0.0;
    double norm = 0.0;
    bool nan_agrees = true;
    for (size_t d = 0; d < width; ++d) {
      const double x = want[l * width + d];
      const double y = have[l * width + d];
      nan_agrees = nan_agrees && std::isnan(x) == std::isnan(y);
      if (std::isnan(x)) continue;
      error += (y - x) * (y - x);
      norm += x * x;
    }
    worst.see(nan_agrees ? 0.0 : 1.0, 0.0, place + " NaN");
    if (keys == 0) {
      bool zero = true;
      for (size_t d = 0; d < width; ++d)
        zero = zero && have[l * width + d] == 0.0f && !std::signbit(have[l * width + d]);
      worst.see(zero ? 0.0 : 1.0, 0.0, place + " out is not 0");
      if (with_lse) worst.see(have_lse[l] == -INFINITY ? 0.0 : 1.0, 0.0, place + " lse is not -inf");
      if (with_max) worst.see(have_max[l] == -INFINITY ? 0.0 : 1.0, 0.0, place + " max_logits is not -inf");
      continue;
    }
    precision.num_keys = static_cast<double>(keys);
    double of_sink = 0.0;
    if (sink.given()) {
      const double x = *sink.ptr<float>(static_cast<int64_t>(l) % heads);
      if (std::isfinite(x)) of_sink = lse_tolerance(precision, std::max(std::fabs(x), 1.0));
    }
    if (norm > 0.0) worst.see(std::sqrt(error / norm), attention_tolerance(precision) + of_sink, place);
    else worst.see(error, 0.0, place + " is 0");
    if (with_max) {
      const bool exact = std::isnan(want_max[l]) || std::isinf(want_max[l]);
      if (exact) worst.see(std::memcmp(&want_max[l], &have_max[l], 4) == 0 ? 0.0 : 1.0, 0.0, place + " max_logits");
      else
        worst.see(std::fabs(static_cast<double>(have_max[l]) - want_max[l]),
                  max_logit_tolerance(precision, want_max[l]), place + " max_logits");
    }
    if (!with_lse) continue;
    if (std::isnan(want_lse[l])) worst.see(std::isnan(have_lse[l]) ? 0.0 : 1.0, 0.0, place + " lse NaN");
    else
      worst.see(std::fabs(static_cast<double>(have_lse[l]) - want_lse[l]), lse_tolerance(precision, want_lse[l]),
                place + " lse");
  }
}

}  // namespace verify
}  // namespace v0
}  // namespace gannet
