#include "model/moe.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "model/norm.h"

namespace gannet {
inline namespace v0 {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

/// Sum of the two largest of n >= 1 values (the largest where there is one).
float two_largest(const float* v, int32_t n) {
  float first = kNever, second = kNever;
  for (int32_t i = 0; i < n; ++i) {
    if (v[i] > first) {
      second = first;
      first = v[i];
    } else if (v[i] > second) {
      second = v[i];
    }
  }
  return n > 1 ? first + second : first;
}

/// Index of the largest value not yet taken, the smaller index among equals; takes it.
int32_t take_largest(const std::vector<float>& v, std::vector<char>& taken) {
  int32_t best = -1;
  for (int32_t i = 0; i < static_cast<int32_t>(v.size()); ++i) {
    const auto at = static_cast<size_t>(i);
    if (taken[at] == 0 && (best < 0 || v[at] > v[static_cast<size_t>(best)])) best = i;
  }
  taken[static_cast<size_t>(best)] = 1;
  return best;
}

}  // namespace

void route_experts(const RouterParams& params, const float* logits, const float* bias, int64_t rows, int32_t* ids,
                   float* weights) {
  const int32_t num_experts = params.num_experts;
  const int32_t group_size = num_experts / params.num_groups;
  std::vector<float> scores(static_cast<size_t>(num_experts)), choices(scores),
      groups(static_cast<size_t>(params.num_groups));
  std::vector<char> taken, taken_groups;
  for (int64_t row = 0; row < rows; ++row) {
    const float* in = logits + row * num_experts;
    for (int32_t e = 0; e < num_experts; ++e) {
      const auto at = static_cast<size_t>(e);
      scores[at] = 1.0f / (1.0f + std::exp(-in[e]));
      choices[at] = scores[at] + bias[e];
    }
    if (params.groups_kept < params.num_groups) {
      for (int32_t g = 0; g < params.num_groups; ++g)
        groups[static_cast<size_t>(g)] = two_largest(choices.data() + g * group_size, group_size);
      taken_groups.assign(groups.size(), 0);
      for (int32_t i = 0; i < params.groups_kept; ++i) take_largest(groups, taken_groups);
      for (int32_t e = 0; e < num_experts; ++e)
        if (taken_groups[static_cast<size_t>(e / group_size)] == 0) choices[static_cast<size_t>(e)] = kNever;
    }
    taken.assign(choices.size(), 0);
    float sum = 0.0f;
    for (int32_t j = 0; j < params.experts_per_token; ++j) {
      const int32_t e = take_largest(choices, taken);
      ids[row * params.experts_per_token + j] = e;
      weights[row * params.experts_per_token + j] = scores[static_cast<size_t>(e)];
      sum += scores[static_cast<size_t>(e)];
    }
    for (int32_t j = 0; j < params.experts_per_token; ++j) {
      float& w = weights[row * params.experts_per_token + j];
      if (params.normalise) w /= sum + 1e-20f;
      w *= params.scaling_factor;
    }
  }
}

void run_mlp(Projector& projector, const MlpWeights& mlp, const float* x, int64_t rows, float* y, MlpScratch& scratch) {
  const int64_t width = mlp.gate.rows, dim = mlp.gate.cols;
  scratch.gate.resize(static_cast<size_t>(rows * width));
  scratch.up.resize(static_cast<size_t>(rows * width));
  const Product in[] = {
      {.x = x, .x_stride = dim, .rows = rows, .w = mlp.gate, .y = scratch.gate.data(), .y_stride = width},
      {.x = x, .x_stride = dim, .rows = rows, .w = mlp.up, .y = scratch.up.data(), .y_stride = width}};
  projector.run(in);
  silu_mul(projector.executor(), scratch.gate.data(), scratch.up.data(), rows, width);
  projector.linear(scratch.gate.data(), rows, mlp.down, y);
}

void run_experts(Projector& projector, std::span<const MlpWeights> experts, const int32_t* ids, const float* weights,
                 int32_t experts_per_token, const float* x, int64_t rows, float* y, MlpScratch& scratch) {
  if (rows == 0) return;
  const auto num_experts = static_cast<int64_t>(experts.size());
  const int64_t dim = experts[0].gate.cols, width = experts[0].gate.rows;
  const int64_t pairs = rows * experts_per_token;

  // Pairs (row, j) sorted by expert: pair p of the input lies in row place[p] of the gathered buffers.
  std::vector<int64_t> first(static_cast<size_t>(num_experts + 1), 0), next, place(static_cast<size_t>(pairs));
  for (int64_t p = 0; p < pairs; ++p) ++first[static_cast<size_t>(ids[p] + 1)];
  for (int64_t e = 0; e < num_experts; ++e) first[static_cast<size_t>(e + 1)] += first[static_cast<size_t>(e)];
  next = first;
  for (int64_t p = 0; p < pairs; ++p) place[static_cast<size_t>(p)] = next[static_cast<size_t>(ids[p])]++;

  scratch.gathered.resize(static_cast<size_t>(pairs * dim));
  scratch.expert_out.resize(static_cast<size_t>(pairs * dim));
  scratch.gate.resize(static_cast<size_t>(pairs * width));
  scratch.up.resize(static_cast<size_t>(pairs * width));
  for (int64_t p = 0; p < pairs; ++p)
    std::copy_n(x + p / experts_per_token * dim, dim, scratch.gathered.data() + place[static_cast<size_t>(p)] * dim);

  std::vector<Product> in, out;
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t at = first[static_cast<size_t>(e)], n = first[static_cast<size_t>(e + 1)] - at;
    if (n == 0) continue;
    const MlpWeights& w = experts[static_cast<size_t>(e)];
    const float* xe = scratch.gathered.data() + at * dim;
    in.push_back(
        {.x = xe, .x_stride = dim, .rows = n, .w = w.gate, .y = scratch.gate.data() + at * width, .y_stride = width});
    in.push_back(
        {.x = xe, .x_stride = dim, .rows = n, .w = w.up, .y = scratch.up.data() + at * width, .y_stride = width});
    out.push_back({.x = scratch.gate.data() + at * width,
                   .x_stride = width,
                   .rows = n,
                   .w = w.down,
                   .y = scratch.expert_out.data() + at * dim,
                   .y_stride = dim});
  }
  projector.run(in);
  silu_mul(projector.executor(), scratch.gate.data(), scratch.up.data(), pairs, width);
  projector.run(out);
  for (int64_t p = 0; p < pairs; ++p) {
    const float* expert_out = scratch.expert_out.data() + place[static_cast<size_t>(p)] * dim;
    float* row = y + p / experts_per_token * dim;
    for (int64_t i = 0; i < dim; ++i) row[i] += weights[p] * expert_out[i];
  }
}

}  // namespace v0
}  // namespace gannet
