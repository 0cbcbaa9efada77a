// config.json and generation_config.json of the supported families, checked and completed.
//
//   family           architectures / model_type                                   attention
//   kDeepseekV3      DeepseekV3ForCausalLM, deepseek_v3, kimi_k2                  dense MLA
//   kDeepseekV32     DeepseekV32ForCausalLM, deepseek_v32                         DSA, one indexer a layer
//   kGlmMoeDsa       GlmMoeDsaForCausalLM, glm_moe_dsa                            DSA, layers may share selections
//
// head_dim, qk_head_dim and num_key_value_heads are never read: published files disagree about their meaning.
//
// Errors: Error(kCorruptFile) for a value that is missing, malformed or contradicts another; Error(kUnsupported) for
// one that is valid but not implemented. Both name the file, the field, the value and what is accepted.
// Thread safety: ordinary values and pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gannet/ops.h"

namespace gannet {
inline namespace v0 {

enum class Family : uint8_t { kDeepseekV3, kDeepseekV32, kGlmMoeDsa };
/// "deepseek_v3", "deepseek_v32", "glm_moe_dsa"
const char* to_string(Family f) noexcept;

/// yarn: frequencies blended between the original and the interpolated ones (attention.md 7.2).
struct YarnConfig {
  double factor = 1.0;                           ///< > 0
  int64_t original_max_position_embeddings = 0;  ///< tokens
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  double mscale = 0.0;          ///< 0: not given
  double mscale_all_dim = 0.0;  ///< 0: not given
  std::optional<double> attention_factor = {};
};

struct RopeConfig {
  double theta = 10000.0;
  std::optional<YarnConfig> yarn = {};  ///< nullopt: plain RoPE
};

/// Defaults for sampling from generation_config.json.
struct GenerationDefaults {
  bool do_sample = false;
  double temperature = 1.0;
  double top_p = 1.0;
  std::vector<int32_t> eos_token_ids = {};  ///< generation_config.json, else config.json; stop on any
};

struct LayerConfig {
  bool moe = false;      ///< routed and shared experts; else a dense MLP of intermediate_size
  bool indexer = false;  ///< DSA: computes its own selection; else takes that of the nearest earlier layer that does
};

struct ModelConfig {
  Family family = Family::kDeepseekV3;
  std::string model_type;  ///< as the file says, for display

  int64_t vocab_size = 0;
  int64_t hidden_size = 0;          ///< D
  int64_t num_attention_heads = 0;  ///< H
  int64_t q_lora_rank = 0;          ///< 0: null in the file, q_proj instead of q_a_proj and q_b_proj; never with DSA
  int64_t kv_lora_rank = 0;         ///< R
  int64_t qk_nope_head_dim = 0;     ///< N
  int64_t qk_rope_head_dim = 0;     ///< P, even
  int64_t v_head_dim = 0;           ///< V
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;  ///< of every RMSNorm but q_a_layernorm and kv_a_layernorm
  bool tie_word_embeddings = false;
  RopeConfig rope;

  std::vector<LayerConfig> layers;       ///< [num_hidden_layers]
  int64_t num_nextn_predict_layers = 0;  ///< MTP layers follow the others; their tensors may be absent

  int64_t intermediate_size = 0;      ///< of dense layers
  int64_t moe_intermediate_size = 0;  ///< of one expert
  int64_t n_routed_experts = 0;       ///< E
  int64_t n_shared_experts = 0;       ///< their common width is n_shared_experts * moe_intermediate_size
  int64_t num_experts_per_tok = 0;
  int64_t n_group = 1;  ///< divides E, E / n_group >= 2 where groups are masked
  int64_t topk_group = 1;
  bool norm_topk_prob = false;
  double routed_scaling_factor = 1.0;

  // DSA only; zero in dense models.
  int64_t index_n_heads = 0;   ///< Hi
  int64_t index_head_dim = 0;  ///< Di: 32, 64 or 128, at least P
  int64_t index_topk = 0;      ///< K
  RopePairing index_rope_pairing = RopePairing::kHalfSplit;
  bool index_share_for_mtp_iteration = false;

  /// fp8 weights in blocks of [rows, columns], each with an fp32 scale in `<name>_scale_inv`; 0: not quantised.
  int64_t weight_block_rows = 0;
  int64_t weight_block_cols = 0;

  std::optional<int32_t> bos_token_id = {};  ///< for display; whether a BOS is added is the tokenizer's affair
  GenerationDefaults generation;

  /// eps of q_a_layernorm, kv_a_layernorm and the indexer's k_norm in every family, whatever rms_norm_eps says.
  static constexpr double kLatentNormEps = 1e-6;

  int64_t num_hidden_layers() const noexcept { return static_cast<int64_t>(layers.size()); }
  int64_t qk_head_dim() const noexcept { return qk_nope_head_dim + qk_rope_head_dim; }
  bool is_dsa() const noexcept { return family != Family::kDeepseekV3; }
  /// (N+P)^-0.5, times m(factor, mscale_all_dim)^2 under yarn (attention.md 7.3).
  double softmax_scale() const noexcept;
  /// Di^-0.5; the head factor Hi^-0.5 stands apart, on the weights.
  double index_scale() const noexcept;
};

/// [P/2] fp32, rounded where the reference library rounds: angles are position * inv in fp32.
std::vector<float> rope_inverse_frequencies(const RopeConfig& rope, int64_t rope_dim);
/// Factor on cosines and sines: 1 without yarn.
double rope_magnitude(const RopeConfig& rope) noexcept;

/// Reads config.json and, where it is there, generation_config.json of a directory.
ModelConfig load_config(const std::string& directory);
/// From texts; `name` and `generation_name` stand for the files in errors. An empty generation text is an absent file.
ModelConfig parse_config(std::string_view text, const std::string& name, std::string_view generation_text = {},
                         const std::string& generation_name = "generation_config.json");

}  // namespace v0
}  // namespace gannet
