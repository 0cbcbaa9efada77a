// Mixture of experts: the grouped sigmoid router ("noaux_tc") and the experts' products.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/linear.h"

namespace gannet {
inline namespace v0 {

struct RouterParams {
  int32_t num_experts = 0;
  int32_t experts_per_token = 0;
  int32_t num_groups = 1;       ///< n_group
  int32_t groups_kept = 1;      ///< topk_group
  bool normalise = true;        ///< norm_topk_prob
  float scaling_factor = 1.0f;  ///< routed_scaling_factor
};

/// Picks experts from logits fp32 [rows, E]: s = sigmoid(logits); choice = s + bias; groups are ranked by the sum of
/// their two largest choices and the experts outside the kept ones are out whatever their choice (it can be negative);
/// the largest choices win, ties to the smaller index. Weights are s without the bias, over (sum + 1e-20) if
/// normalised, times scaling_factor. `ids` and `weights` are [rows, experts_per_token], ids ascending in choice order.
void route_experts(const RouterParams& params, const float* logits, const float* bias, int64_t rows, int32_t* ids,
                   float* weights);

/// One gated MLP: down(silu(gate(x)) * up(x)).
struct MlpWeights {
  WeightView gate, up, down;
};

/// Scratch of the MLPs, kept between calls.
struct MlpScratch {
  std::vector<float> gate, up, gathered, expert_out;
};

/// y[rows, D] = mlp(x[rows, D]).
void run_mlp(Projector& projector, const MlpWeights& mlp, const float* x, int64_t rows, float* y, MlpScratch& scratch);

/// y[rows, D] += sum over picked experts of weight * expert(x), in the order of `ids`: a row's additions do not depend
/// on the other rows.
void run_experts(Projector& projector, std::span<const MlpWeights> experts, const int32_t* ids, const float* weights,
                 int32_t experts_per_token, const float* x, int64_t rows, float* y, MlpScratch& scratch);

}  // namespace v0
}  // namespace gannet
