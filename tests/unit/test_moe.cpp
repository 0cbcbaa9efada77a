// The router on hand-made cases, and the experts against a dense evaluation.
#include "model/moe.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

namespace gannet {
namespace {

float logit(double s) { return static_cast<float>(std::log(s / (1.0 - s))); }

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed route_one(const RouterParams& params, const std::vector<double>& scores, const std::vector<float>& bias) {
  std::vector<float> logits;
  for (const double s : scores) logits.push_back(logit(s));
  Routed r{std::vector<int32_t>(static_cast<size_t>(params.experts_per_token)),
           std::vector<float>(static_cast<size_t>(params.experts_per_token))};
  route_experts(params, logits.data(), bias.data(), 1, r.ids.data(), r.weights.data());
  return r;
}

TEST(Router, RanksGroupsByTheirTwoLargestChoices) {
  // Group 0 has the single best expert, groups 1 and 2 the better pairs.
  const RouterParams params{.num_experts = 8, .experts_per_token = 2, .num_groups = 4, .groups_kept = 2};
  const Routed r = route_one(params, {0.9, 0.1, 0.6, 0.7, 0.65, 0.6, 0.2, 0.2}, std::vector<float>(8, 0.0f));
  EXPECT_EQ(r.ids, (std::vector<int32_t>{3, 4}));
  EXPECT_NEAR(r.weights[0], 0.7 / 1.35, 1e-6);
  EXPECT_NEAR(r.weights[1], 0.65 / 1.35, 1e-6);
}

TEST(Router, BiasChoosesButDoesNotWeigh) {
  const RouterParams params{.num_experts = 4, .experts_per_token = 2, .scaling_factor = 2.5f};
  const Routed r = route_one(params, {0.9, 0.8, 0.1, 0.2}, {0.0f, 0.0f, 5.0f, 0.0f});
  EXPECT_EQ(r.ids, (std::vector<int32_t>{2, 0}));
  EXPECT_NEAR(r.weights[0], 2.5 * 0.1, 1e-6);
  EXPECT_NEAR(r.weights[1], 2.5 * 0.9, 1e-6);
}

TEST(Router, ExpertsOutsideTheKeptGroupsAreOutEvenWhereChoicesAreNegative) {
  // With 0 instead of -inf outside, experts 2 and 3 (choices 0) would beat the negative ones inside.
  const RouterParams params{.num_experts = 4, .experts_per_token = 2, .num_groups = 2, .groups_kept = 1};
  const Routed r = route_one(params, {0.5, 0.5, 0.4, 0.4}, {-1.0f, -1.0f, -1.0f, -1.0f});
  EXPECT_EQ(r.ids, (std::vector<int32_t>{0, 1}));
}

TEST(Router, TiesGoToTheSmallerIndex) {
  const RouterParams flat{.num_experts = 6, .experts_per_token = 3};
  EXPECT_EQ(route_one(flat, std::vector<double>(6, 0.5), std::vector<float>(6, 0.0f)).ids,
            (std::vector<int32_t>{0, 1, 2}));
  const RouterParams grouped{.num_experts = 6, .experts_per_token = 2, .num_groups = 3, .groups_kept = 1};
  EXPECT_EQ(route_one(grouped, std::vector<double>(6, 0.5), std::vector<float>(6, 0.0f)).ids,
            (std::vector<int32_t>{0, 1}));
}

TEST(Router, WithoutNormalisationWeightsAreScores) {
  const RouterParams params{.num_experts = 3, .experts_per_token = 2, .normalise = false, .scaling_factor = 2.0f};
  const Routed r = route_one(params, {0.2, 0.3, 0.1}, std::vector<float>(3, 0.0f));
  EXPECT_NEAR(r.weights[0], 0.6, 1e-6);
  EXPECT_NEAR(r.weights[1], 0.4, 1e-6);
}

TEST(Experts, AddUpToTheWeightedSumAndDoNotDependOnOtherRows) {
  constexpr int64_t kDim = 48, kWidth = 32, kRows = 60;
  constexpr int32_t kExperts = 5, kPicked = 2;
  std::mt19937 rng(1);
  std::normal_distribution<float> normal(0.0f, 0.2f);
  const auto random = [&](int64_t n) {
    std::vector<float> v(static_cast<size_t>(n));
    for (float& x : v) x = normal(rng);
    return v;
  };
  std::vector<std::vector<float>> stored;
  std::vector<MlpWeights> experts;
  for (int32_t e = 0; e < kExperts; ++e) {
    MlpWeights w;
    for (WeightView* m : {&w.gate, &w.up, &w.down}) {
      stored.push_back(random(kDim * kWidth));
      const bool down = m == &w.down;
      *m = {.data = stored.back().data(),
            .dtype = DType::kF32,
            .rows = down ? kDim : kWidth,
            .cols = down ? kWidth : kDim};
    }
    experts.push_back(w);
  }
  const std::vector<float> x = random(kRows * kDim);
  std::vector<int32_t> ids;
  std::vector<float> weights;
  for (int64_t r = 0; r < kRows; ++r) {  // expert 4 stays unused
    const auto first = static_cast<int32_t>(rng() % 4);
    ids.push_back(first);
    ids.push_back((first + 1) % 4);
    weights.push_back(0.3f);
    weights.push_back(1.7f);
  }
  ThreadPool pool({.num_threads = 2});
  Projector projector(pool, {.invariant = true});
  MlpScratch scratch;
  std::vector<float> y(static_cast<size_t>(kRows * kDim), 1.0f);
  run_experts(projector, experts, ids.data(), weights.data(), kPicked, x.data(), kRows, y.data(), scratch);
  std::vector<float> one(kDim), alone(kDim);
  for (int64_t r = 0; r < kRows; ++r) {
    std::vector<double> expected(kDim, 1.0);
    for (int32_t j = 0; j < kPicked; ++j) {
      const auto at = static_cast<size_t>(r * kPicked + j);
      run_mlp(projector, experts[static_cast<size_t>(ids[at])], x.data() + r * kDim, 1, one.data(), scratch);
      for (size_t i = 0; i < kDim; ++i) expected[i] += double{weights[at]} * one[i];
    }
    for (size_t i = 0; i < kDim; ++i) ASSERT_NEAR(y[static_cast<size_t>(r * kDim) + i], expected[i], 1e-5);
    std::fill(alone.begin(), alone.end(), 1.0f);
    run_experts(projector, experts, ids.data() + r * kPicked, weights.data() + r * kPicked, kPicked,
                x.data() + r * kDim, 1, alone.data(), scratch);
    ASSERT_EQ(0, std::memcmp(alone.data(), y.data() + r * kDim, kDim * sizeof(float))) << r;
  }
}

}  // namespace
}  // namespace gannet
