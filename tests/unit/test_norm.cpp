// Norms and activations against their formulas in double.
#include "model/norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace gannet {
namespace {

std::vector<float> random_values(size_t n, float mean, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(mean, 1.0f);
  std::vector<float> x(n);
  for (float& v : x) v = normal(rng);
  return x;
}

// An fp32 sum of n terms in 16 chains errs by (n/16 + 4) * 2^-24 of the sum of magnitudes; the rest of a norm is a few
// roundings. 512 terms: 36 * 6e-8 = 2e-6.
constexpr double kNormTolerance = 5e-6;

TEST(Norm, RmsNormIsItsFormulaWithItsOwnEps) {
  ThreadPool pool({.num_threads = 2});
  for (const int64_t dim : {1, 15, 16, 100, 512})
    for (const double eps : {1e-5, 1e-6}) {
      // Small values make eps count: mean(x^2) is 1e-6 here.
      std::vector<float> x = random_values(static_cast<size_t>(dim * 70), 0.0f, 1);
      for (float& v : x) v *= 1e-3f;
      const std::vector<float> w = random_values(static_cast<size_t>(dim), 1.0f, 2);
      std::vector<float> y(x.size());
      rms_norm(pool, x.data(), dim, 70, dim, w.data(), static_cast<float>(eps), y.data(), dim);
      for (int64_t r = 0; r < 70; ++r) {
        double squares = 0.0;
        for (int64_t i = 0; i < dim; ++i) squares += std::pow(double{x[static_cast<size_t>(r * dim + i)]}, 2);
        for (int64_t i = 0; i < dim; ++i) {
          const auto at = static_cast<size_t>(r * dim + i);
          const double expected =
              x[at] / std::sqrt(squares / static_cast<double>(dim) + eps) * w[static_cast<size_t>(i)];
          ASSERT_NEAR(y[at], expected, kNormTolerance * std::max(1.0, std::abs(expected)));
        }
      }
    }
}

TEST(Norm, LayerNormUsesBiasedVarianceAndDoesNotCancel) {
  SerialExecutor serial;
  const int64_t dim = 128;
  const std::vector<float> x =
      random_values(128 * 3, 50.0f, 3);  // mean far from 0: E[x^2] - E[x]^2 would lose 3 digits
  const std::vector<float> w = random_values(128, 1.0f, 4), b = random_values(128, 0.0f, 5);
  std::vector<float> y(x.size());
  layer_norm(serial, x.data(), dim, 3, dim, w.data(), b.data(), 1e-6f, y.data(), dim);
  for (size_t r = 0; r < 3; ++r) {
    double mean = 0.0, variance = 0.0;
    for (size_t i = 0; i < 128; ++i) mean += x[r * 128 + i] / 128.0;
    for (size_t i = 0; i < 128; ++i) variance += std::pow(x[r * 128 + i] - mean, 2) / 128.0;
    for (size_t i = 0; i < 128; ++i)
      ASSERT_NEAR(y[r * 128 + i], (x[r * 128 + i] - mean) / std::sqrt(variance + 1e-6) * w[i] + b[i], 1e-4);
  }
}

TEST(Norm, ARowHasTheSameBitsAloneAndAmongOthers) {
  const int64_t dim = 200;
  const std::vector<float> x = random_values(static_cast<size_t>(dim * 90), 0.0f, 6), w = random_values(200, 1.0f, 7);
  SerialExecutor serial;
  ThreadPool pool({.num_threads = 3});
  std::vector<float> together(x.size()), alone(200);
  rms_norm(pool, x.data(), dim, 90, dim, w.data(), 1e-6f, together.data(), dim);
  for (int64_t r = 0; r < 90; ++r) {
    rms_norm(serial, x.data() + r * dim, dim, 1, dim, w.data(), 1e-6f, alone.data(), dim);
    ASSERT_EQ(0, std::memcmp(alone.data(), together.data() + r * dim, 200 * sizeof(float)));
  }
}

TEST(Norm, SiluMulSurvivesLargeValues) {
  SerialExecutor serial;
  std::vector<float> gate = {0.0f, 1.0f, -1.0f, 100.0f, -100.0f, -1000.0f};
  const std::vector<float> up = {2.0f, 2.0f, 2.0f, 2.0f, 2.0f, 2.0f};
  silu_mul(serial, gate.data(), up.data(), 1, 6);
  const double expected[] = {0.0,   2.0 / (1.0 + std::exp(-1.0)), -2.0 / (1.0 + std::exp(1.0)),
                             200.0, -200.0 * std::exp(-100.0),    0.0};
  for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(gate[i], expected[i], 1e-6 * std::max(1.0, std::abs(expected[i]))) << i;
}

}  // namespace
}  // namespace gannet
