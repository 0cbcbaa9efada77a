// From logits to tokens.
#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "gannet/error.h"

namespace gannet {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(Argmax, TakesTheSmallerIdOnTiesAndIgnoresNan) {
  EXPECT_EQ(argmax(std::vector<float>{1.0f, 3.0f, 3.0f, 2.0f}), 1);
  EXPECT_EQ(argmax(std::vector<float>{kNan, 1.0f, kNan, 2.0f}), 3);
  EXPECT_EQ(argmax(std::vector<float>{kNan, -kInf}), 1);
  EXPECT_EQ(argmax(std::vector<float>{-5.0f}), 0);
}

TEST(Sampler, TemperatureZeroIsGreedy) {
  Sampler sampler({.temperature = 0.0f});
  EXPECT_EQ(sampler.sample(std::vector<float>{0.0f, 2.0f, 2.0f}), 1);
}

TEST(Sampler, FrequenciesFollowTheSoftmaxAtTheTemperature) {
  const std::vector<float> logits = {0.0f, 1.0f, 2.0f};
  const float temperature = 0.5f;
  Sampler sampler({.temperature = temperature, .seed = 7});
  constexpr int kDraws = 20000;
  double counts[3] = {};
  for (int i = 0; i < kDraws; ++i) ++counts[sampler.sample(logits)];
  double total = 0.0;
  for (const float x : logits) total += std::exp(double{x} / double{temperature});
  for (size_t i = 0; i < 3; ++i) {
    const double p = std::exp(double{logits[i]} / double{temperature}) / total;
    // Five standard deviations of a binomial count.
    EXPECT_NEAR(counts[i], kDraws * p, 5.0 * std::sqrt(kDraws * p * (1.0 - p)) + 1.0) << i;
  }
}

TEST(Sampler, TopPKeepsTheSmallestSetThatReachesIt) {
  // Probabilities 0.5, 0.3, 0.2.
  const std::vector<float> logits = {std::log(0.2f), std::log(0.5f), std::log(0.3f)};
  Sampler half({.temperature = 1.0f, .top_p = 0.49f, .seed = 1});
  Sampler most({.temperature = 1.0f, .top_p = 0.7f, .seed = 1});
  bool second = false;
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(half.sample(logits), 1);
    const int32_t token = most.sample(logits);
    EXPECT_NE(token, 0);
    second = second || token == 2;
  }
  EXPECT_TRUE(second);
}

TEST(Sampler, TheSeedDecides) {
  std::vector<float> logits(50, 0.0f);
  const auto draw = [&](uint64_t seed) {
    Sampler sampler({.temperature = 1.0f, .seed = seed});
    std::vector<int32_t> tokens;
    for (int i = 0; i < 20; ++i) tokens.push_back(sampler.sample(logits));
    return tokens;
  };
  EXPECT_EQ(draw(3), draw(3));
  EXPECT_NE(draw(3), draw(4));
}

TEST(Sampler, RefusesBadOptions) {
  EXPECT_THROW(Sampler({.temperature = -0.1f}), Error);
  EXPECT_THROW(Sampler({.temperature = kNan}), Error);
  EXPECT_THROW(Sampler({.temperature = kInf}), Error);
  EXPECT_THROW(Sampler({.temperature = 1.0f, .top_p = 0.0f}), Error);
  EXPECT_THROW(Sampler({.temperature = 1.0f, .top_p = 1.1f}), Error);
  EXPECT_THROW(Sampler({.temperature = 1.0f, .top_p = kNan}), Error);
}

}  // namespace
}  // namespace gannet
