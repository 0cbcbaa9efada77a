// Any text is a configuration or an Error; a configuration that is accepted contradicts itself nowhere.
#include <cmath>

#include "fuzz.h"
#include "gannet/error.h"
#include "model/config.h"

namespace {

void check(const gannet::ModelConfig& m) {
  GANNET_FUZZ_REQUIRE(m.num_hidden_layers() >= 1);
  for (const int64_t n : {m.vocab_size, m.hidden_size, m.num_attention_heads, m.kv_lora_rank, m.qk_nope_head_dim,
                          m.qk_rope_head_dim, m.v_head_dim, m.max_position_embeddings, m.n_routed_experts,
                          m.moe_intermediate_size, m.num_experts_per_tok, m.n_group, m.topk_group})
    GANNET_FUZZ_REQUIRE(n >= 1);
  GANNET_FUZZ_REQUIRE(m.q_lora_rank >= 1 || (m.q_lora_rank == 0 && !m.is_dsa()));
  GANNET_FUZZ_REQUIRE(m.n_routed_experts % m.n_group == 0 && m.topk_group <= m.n_group);
  GANNET_FUZZ_REQUIRE(m.num_experts_per_tok <= m.topk_group * (m.n_routed_experts / m.n_group));
  GANNET_FUZZ_REQUIRE(m.is_dsa() == (m.index_topk > 0) && m.is_dsa() == (m.index_n_heads > 0));
  GANNET_FUZZ_REQUIRE(m.layers[0].indexer == m.is_dsa());
  for (const gannet::LayerConfig& layer : m.layers) GANNET_FUZZ_REQUIRE(layer.moe || m.intermediate_size >= 1);
  if (m.is_dsa()) GANNET_FUZZ_REQUIRE(m.index_head_dim >= m.qk_rope_head_dim && std::isfinite(m.index_scale()));
  GANNET_FUZZ_REQUIRE((m.weight_block_rows > 0) == (m.weight_block_cols > 0));
  GANNET_FUZZ_REQUIRE(std::isfinite(m.softmax_scale()) && m.softmax_scale() > 0.0);
  GANNET_FUZZ_REQUIRE(std::isfinite(gannet::rope_magnitude(m.rope)) && gannet::rope_magnitude(m.rope) > 0.0);
  const auto frequencies = gannet::rope_inverse_frequencies(m.rope, m.qk_rope_head_dim);
  GANNET_FUZZ_REQUIRE(static_cast<int64_t>(frequencies.size()) * 2 == m.qk_rope_head_dim);
  for (const float f : frequencies) GANNET_FUZZ_REQUIRE(f >= 0.0f && f <= 1.0f);
  for (const int32_t id : m.generation.eos_token_ids) GANNET_FUZZ_REQUIRE(id >= 0);
  // Bytes of the largest tensors in fp32, which the loader computes.
  int64_t bytes = 0;
  GANNET_FUZZ_REQUIRE(!__builtin_mul_overflow(m.vocab_size * 4, m.hidden_size, &bytes));
  GANNET_FUZZ_REQUIRE(
      !__builtin_mul_overflow(m.num_attention_heads * (m.qk_nope_head_dim + m.v_head_dim) * 4, m.kv_lora_rank, &bytes));
  GANNET_FUZZ_REQUIRE(!__builtin_mul_overflow(m.n_shared_experts * m.moe_intermediate_size * 4, m.hidden_size, &bytes));
}

bool parse(std::string_view text, std::string_view generation) {
  try {
    check(gannet::parse_config(text, "config.json", generation));
    return true;
  } catch (const gannet::Error& e) {
    GANNET_FUZZ_REQUIRE(e.code() == gannet::ErrorCode::kCorruptFile || e.code() == gannet::ErrorCode::kUnsupported);
    GANNET_FUZZ_REQUIRE(std::string_view(e.what()).find('\n') == std::string_view::npos);
    return false;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  // A second time as generation_config.json too: both read eos_token_id.
  if (parse(text, {})) parse(text, text);
  return 0;
}
