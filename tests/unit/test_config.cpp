// config.json: the five checkpoints, published values, both RoPE spellings, layer sharing, and what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "gannet/error.h"
#include "model/config.h"

namespace {

using gannet::Error;
using gannet::ErrorCode;
using gannet::Family;
using gannet::ModelConfig;
using gannet::RopePairing;
using Json = nlohmann::json;

const std::string kModel = std::string(GANNET_SOURCE_DIR) + "/models/tiny-dsv32";
const std::string kCheckpoints = std::string(GANNET_SOURCE_DIR) + "/tests/data/checkpoints/";

Json read_json(const std::string& path) {
  std::ifstream file(path);
  return Json::parse(file);
}

Json tiny() { return read_json(kModel + "/config.json"); }
Json glm() { return read_json(kCheckpoints + "glm5-shared-topk/config.json"); }
Json yarn() { return read_json(kCheckpoints + "v3-yarn/config.json"); }
ModelConfig parse(const Json& c, const Json& generation = nullptr) {
  return gannet::parse_config(c.dump(), "config.json", generation.is_null() ? "" : generation.dump());
}

/// "FFSSF": which layers have an indexer.
std::string sharing(const ModelConfig& m) {
  std::string text;
  for (const auto& layer : m.layers) text += layer.indexer ? 'F' : 'S';
  return text;
}

std::string moe(const ModelConfig& m) {
  std::string text;
  for (const auto& layer : m.layers) text += layer.moe ? 'M' : 'D';
  return text;
}

TEST(Config, ReadsTinyDsv32) {
  const ModelConfig m = gannet::load_config(kModel);
  EXPECT_EQ(m.family, Family::kDeepseekV32);
  EXPECT_TRUE(m.is_dsa());
  EXPECT_EQ(m.vocab_size, 2048);
  EXPECT_EQ(m.hidden_size, 256);
  EXPECT_EQ(m.num_hidden_layers(), 4);
  EXPECT_EQ(m.num_attention_heads, 4);
  EXPECT_EQ(m.q_lora_rank, 192);
  EXPECT_EQ(m.kv_lora_rank, 512);
  EXPECT_EQ(m.qk_nope_head_dim, 128);
  EXPECT_EQ(m.qk_rope_head_dim, 64);
  EXPECT_EQ(m.v_head_dim, 128);
  EXPECT_EQ(m.qk_head_dim(), 192);
  EXPECT_EQ(m.max_position_embeddings, 8192);
  EXPECT_EQ(m.rms_norm_eps, 1e-6);
  EXPECT_FALSE(m.tie_word_embeddings);
  EXPECT_EQ(m.rope.theta, 10000.0);
  EXPECT_FALSE(m.rope.yarn);
  EXPECT_EQ(moe(m), "DMMM");
  EXPECT_EQ(sharing(m), "FFFF");
  EXPECT_EQ(m.num_nextn_predict_layers, 1);
  EXPECT_EQ(m.intermediate_size, 768);
  EXPECT_EQ(m.moe_intermediate_size, 128);
  EXPECT_EQ(m.n_routed_experts, 8);
  EXPECT_EQ(m.n_shared_experts, 1);
  EXPECT_EQ(m.num_experts_per_tok, 2);
  EXPECT_EQ(m.n_group, 4);
  EXPECT_EQ(m.topk_group, 2);
  EXPECT_TRUE(m.norm_topk_prob);
  EXPECT_EQ(m.routed_scaling_factor, 2.5);
  EXPECT_EQ(m.index_n_heads, 8);
  EXPECT_EQ(m.index_head_dim, 128);
  EXPECT_EQ(m.index_topk, 256);
  EXPECT_EQ(m.index_rope_pairing, RopePairing::kHalfSplit);
  EXPECT_EQ(m.weight_block_rows, 0);
  EXPECT_EQ(m.bos_token_id, 0);
  EXPECT_EQ(m.generation.eos_token_ids, std::vector<int32_t>{1});
  EXPECT_FALSE(m.generation.do_sample);
  EXPECT_NEAR(m.softmax_scale(), 0.0721688, 1e-7);
  EXPECT_NEAR(m.index_scale(), 0.0883883, 1e-7);
  EXPECT_EQ(gannet::rope_magnitude(m.rope), 1.0);
}

TEST(Config, ReadsTheRandomCheckpoints) {
  const ModelConfig dense = gannet::load_config(kCheckpoints + "v3-yarn");
  EXPECT_EQ(dense.family, Family::kDeepseekV3);
  EXPECT_FALSE(dense.is_dsa());
  EXPECT_EQ(dense.index_topk, 0);
  EXPECT_EQ(sharing(dense), "SSS");
  EXPECT_EQ(moe(dense), "DMM");
  ASSERT_TRUE(dense.rope.yarn);
  EXPECT_EQ(dense.rope.yarn->factor, 40.0);
  EXPECT_EQ(dense.rope.yarn->original_max_position_embeddings, 128);
  EXPECT_EQ(dense.rope.yarn->beta_fast, 32.0);
  EXPECT_EQ(dense.rope.yarn->beta_slow, 1.0);
  EXPECT_EQ(dense.weight_block_rows, 0);
  EXPECT_NEAR(dense.softmax_scale(), 0.1352338, 1e-7);  // spec 7.3, V3
  EXPECT_EQ(gannet::rope_magnitude(dense.rope), 1.0);   // mscale = mscale_all_dim

  const ModelConfig fp8 = gannet::load_config(kCheckpoints + "v3-fp8");
  EXPECT_EQ(fp8.weight_block_rows, 128);
  EXPECT_EQ(fp8.weight_block_cols, 128);
  EXPECT_EQ(fp8.q_lora_rank, 160);
  EXPECT_EQ(moe(fp8), "DM");

  const ModelConfig sparse = gannet::load_config(kCheckpoints + "v32-yarn");
  EXPECT_EQ(sparse.family, Family::kDeepseekV32);
  EXPECT_EQ(sparse.index_n_heads, 16);
  EXPECT_EQ(sparse.index_topk, 64);
  EXPECT_EQ(moe(sparse), "DMM");
  EXPECT_TRUE(sparse.rope.yarn);

  const ModelConfig glm = gannet::load_config(kCheckpoints + "glm5-shared-topk");
  EXPECT_EQ(glm.family, Family::kGlmMoeDsa);
  EXPECT_EQ(glm.index_rope_pairing, RopePairing::kInterleaved);
  EXPECT_EQ(sharing(glm), "FFSSF");
  EXPECT_EQ(moe(glm), "DMMMM");
  EXPECT_EQ(glm.rms_norm_eps, 1e-5);
  EXPECT_EQ(glm.rope.theta, 8e6);
  EXPECT_FALSE(glm.rope.yarn);
  EXPECT_EQ(glm.qk_head_dim(), 256);
  EXPECT_EQ(glm.v_head_dim, 256);
  EXPECT_EQ(glm.n_group, 1);
  EXPECT_NEAR(glm.softmax_scale(), 0.0625, 1e-12);
}

TEST(Config, NamesTheFamily) {
  const auto family = [](const Json& architecture, const Json& type) {
    Json c = yarn();
    c["architectures"] = architecture;
    c["model_type"] = type;
    return parse(c).family;
  };
  EXPECT_EQ(family({"DeepseekV3ForCausalLM"}, nullptr), Family::kDeepseekV3);
  EXPECT_EQ(family({"DeepseekV3ForCausalLM"}, "kimi_k2"), Family::kDeepseekV3);
  EXPECT_EQ(family(nullptr, "deepseek_v3"), Family::kDeepseekV3);
  EXPECT_THROW(family({"LlamaForCausalLM"}, "deepseek_v3"), Error);
  EXPECT_THROW(family({"DeepseekV3ForCausalLM"}, "llama"), Error);
  EXPECT_THROW(family({"DeepseekV3ForCausalLM"}, "deepseek_v32"), Error);
  EXPECT_THROW(family(nullptr, nullptr), Error);
  EXPECT_THROW(family(Json::array(), nullptr), Error);
}

TEST(Config, IgnoresFieldsThatLie) {
  Json c = tiny();
  for (const char* key : {"head_dim", "qk_head_dim", "num_key_value_heads", "torch_dtype", "dtype"}) c[key] = 77;
  EXPECT_EQ(parse(c).qk_head_dim(), 192);
}

TEST(Config, TakesEosFromGenerationFirst) {
  Json c = tiny();
  c["vocab_size"] = 154880;
  c["eos_token_id"] = {154820, 154827};
  EXPECT_EQ(parse(c).generation.eos_token_ids, (std::vector<int32_t>{154820, 154827}));
  EXPECT_EQ(parse(c, {{"eos_token_id", 7}}).generation.eos_token_ids, std::vector<int32_t>{7});
  EXPECT_EQ(parse(c, {{"eos_token_id", {7, 8}}}).generation.eos_token_ids, (std::vector<int32_t>{7, 8}));
  EXPECT_EQ(parse(c, {{"eos_token_id", nullptr}}).generation.eos_token_ids.size(), 2u);
  c.erase("eos_token_id");
  EXPECT_TRUE(parse(c).generation.eos_token_ids.empty());
  const ModelConfig m = parse(c, {{"do_sample", true}, {"temperature", 0.6}, {"top_p", 0.95}});
  EXPECT_TRUE(m.generation.do_sample);
  EXPECT_EQ(m.generation.temperature, 0.6);
  EXPECT_EQ(m.generation.top_p, 0.95);
}

// ---- RoPE ---------------------------------------------------------------------------------------------------------

TEST(Config, ReadsBothRopeSpellings) {
  const ModelConfig old_form = parse(yarn());
  Json c = yarn();
  Json parameters = c["rope_scaling"];
  parameters.erase("type");
  parameters["rope_type"] = "yarn";
  parameters["rope_theta"] = c["rope_theta"];
  c.erase("rope_scaling");
  c.erase("rope_theta");
  c["rope_parameters"] = parameters;
  const ModelConfig new_form = parse(c);
  EXPECT_EQ(new_form.rope.theta, old_form.rope.theta);
  ASSERT_TRUE(new_form.rope.yarn);
  EXPECT_EQ(new_form.rope.yarn->factor, old_form.rope.yarn->factor);
  EXPECT_EQ(new_form.rope.yarn->mscale_all_dim, old_form.rope.yarn->mscale_all_dim);
  EXPECT_EQ(gannet::rope_inverse_frequencies(new_form.rope, 64), gannet::rope_inverse_frequencies(old_form.rope, 64));

  c["rope_scaling"] = yarn()["rope_scaling"];  // the same in both: accepted
  EXPECT_NO_THROW(parse(c));
  c["rope_scaling"]["factor"] = 4;
  EXPECT_THROW(parse(c), Error);
  c = tiny();
  c["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 1e6}};
  EXPECT_THROW(parse(c), Error);  // rope_theta at the top says 1e4
  c.erase("rope_theta");
  EXPECT_EQ(parse(c).rope.theta, 1e6);
  EXPECT_FALSE(parse(c).rope.yarn);
}

TEST(Config, CountsScalingWithoutFactorAsNone) {
  Json c = tiny();
  c["rope_scaling"] = {{"type", "yarn"}, {"beta_fast", 32}};
  EXPECT_FALSE(parse(c).rope.yarn);
  c["rope_scaling"] = Json::object();
  EXPECT_FALSE(parse(c).rope.yarn);
  c["rope_scaling"] = {{"factor", 2}, {"original_max_position_embeddings", 4096}};  // no type: yarn
  ASSERT_TRUE(parse(c).rope.yarn);
  EXPECT_EQ(parse(c).rope.yarn->beta_fast, 32.0);
  EXPECT_EQ(parse(c).rope.yarn->mscale, 0.0);
  c["rope_scaling"] = nullptr;
  c["rope_parameters"] = {{"rope_type", "yarn"}, {"rope_theta", 10000.0}};
  EXPECT_THROW(parse(c), Error);
}

gannet::RopeConfig published_rope(double theta, double factor, double beta_fast, double beta_slow) {
  return {theta, gannet::YarnConfig{.factor = factor,
                                    .original_max_position_embeddings = 4096,
                                    .beta_fast = beta_fast,
                                    .beta_slow = beta_slow,
                                    .mscale = 1.0,
                                    .mscale_all_dim = 1.0}};
}

TEST(Config, ScalesAsPublished) {
  ModelConfig m;
  m.qk_nope_head_dim = 128;
  m.qk_rope_head_dim = 64;
  m.rope = published_rope(1e4, 40, 32, 1);
  EXPECT_NEAR(m.softmax_scale(), 0.1352338, 5e-8);
  m.rope = published_rope(5e4, 32, 1, 1);
  EXPECT_NEAR(m.softmax_scale(), 0.1308608, 5e-8);
  m.rope = published_rope(5e4, 64, 1, 1);
  EXPECT_NEAR(m.softmax_scale(), 0.1446796, 5e-8);
  m.rope.yarn->mscale_all_dim = 0.0;
  EXPECT_NEAR(m.softmax_scale(), 1.0 / std::sqrt(192.0), 1e-12);
}

TEST(Config, ScalesTablesAsPublished) {
  gannet::RopeConfig rope = published_rope(1e4, 40, 32, 1);
  EXPECT_EQ(gannet::rope_magnitude(rope), 1.0);
  rope.yarn->mscale = 0.707;
  const double m = [](double a) { return 0.1 * a * std::log(40.0) + 1.0; }(0.707);
  EXPECT_NEAR(gannet::rope_magnitude(rope), m / 1.3688879, 1e-7);
  rope.yarn->mscale = 0.0;
  EXPECT_NEAR(gannet::rope_magnitude(rope), 1.3688879, 1e-7);
  rope.yarn->attention_factor = 1.25;
  EXPECT_EQ(gannet::rope_magnitude(rope), 1.25);
  EXPECT_EQ(gannet::rope_magnitude({}), 1.0);
}

/// The formula of spec 7.2 in doubles.
std::vector<double> exact_frequencies(const gannet::RopeConfig& rope, double low, double high) {
  std::vector<double> inverse;
  for (int i = 0; i < 32; ++i) {
    const double e = std::pow(rope.theta, -2.0 * i / 64.0);
    const double ramp = rope.yarn ? std::clamp((i - low) / (high - low), 0.0, 1.0) : 0.0;
    inverse.push_back(ramp > 0 ? e / rope.yarn->factor * ramp + e * (1 - ramp) : e);
  }
  return inverse;
}

TEST(Config, BlendsFrequencies) {
  struct Case {
    gannet::RopeConfig rope;
    double low, high;
  };
  // V3: d(32) = 10.47, d(1) = 22.51. Kimi: d(1) = 19.16 for both ends. The random checkpoints: d(32) = -1.57, clamped.
  gannet::RopeConfig random = published_rope(1e4, 40, 32, 1);
  random.yarn->original_max_position_embeddings = 128;
  for (const Case& c : {Case{{1e4, {}}, 0, 1}, Case{{8e6, {}}, 0, 1}, Case{published_rope(1e4, 40, 32, 1), 10, 23},
                        Case{published_rope(5e4, 64, 1, 1), 19, 20}, Case{random, 0, 11}}) {
    const auto inverse = gannet::rope_inverse_frequencies(c.rope, 64);
    const auto exact = exact_frequencies(c.rope, c.low, c.high);
    ASSERT_EQ(inverse.size(), 32u);
    // Four roundings to fp32, and the exponent's own, which ln(theta) <= 16 multiplies.
    for (size_t i = 0; i < 32; ++i) EXPECT_NEAR(inverse[i], exact[i], exact[i] * 20 * 0x1p-24) << i;
  }
}

// ---- layers -------------------------------------------------------------------------------------------------------

TEST(Config, SharesBySelectionLists) {
  Json c = glm();
  for (const char* key : {"indexer_types", "index_topk_freq", "index_skip_topk_offset"}) c.erase(key);
  EXPECT_EQ(sharing(parse(c)), "FFFFF");
  c["index_topk_pattern"] = "FSFSS";
  EXPECT_EQ(sharing(parse(c)), "FSFSS");
  c["index_topk_pattern"] = {"full", "S", "shared", "F", "S", "S"};  // more entries speak of MTP layers
  EXPECT_EQ(sharing(parse(c)), "FSSFS");
  c["index_topk_freq"] = 2;  // the pattern goes first
  EXPECT_EQ(sharing(parse(c)), "FSSFS");
  c["indexer_types"] = {"full", "full", "full", "full", "shared"};  // and this before it
  EXPECT_EQ(sharing(parse(c)), "FFFFS");
}

TEST(Config, SharesByFrequency) {
  Json c = glm();
  c.erase("indexer_types");
  const auto with = [&](const Json& freq, const Json& offset, int layers) {
    c["num_hidden_layers"] = layers;
    c.erase("layer_types");
    c.erase("mlp_layer_types");
    c["index_topk_freq"] = freq;
    c["index_skip_topk_offset"] = offset;
    return sharing(parse(c));
  };
  EXPECT_EQ(with(4, 3, 15), "FFFSSSFSSSFSSSF");  // spec 3.2: full 0, 1, 2, 6, 10, 14
  EXPECT_EQ(with(3, 2, 5), "FFSSF");
  EXPECT_EQ(with(4, nullptr, 10), "FFSSSFSSSF");
  EXPECT_EQ(with(2, 1, 6), "FSFSFS");
  EXPECT_EQ(with(1, 0, 4), "FFFF");
  EXPECT_EQ(with(0, nullptr, 4), "FFFF");
  EXPECT_EQ(with(nullptr, nullptr, 4), "FFFF");
  EXPECT_THROW(with(4, 0, 4), Error);
  EXPECT_THROW(with(4, -1, 4), Error);
}

TEST(Config, ChoosesDenseLayers) {
  Json c = tiny();
  c["num_hidden_layers"] = 8;
  c["first_k_dense_replace"] = 3;
  EXPECT_EQ(moe(parse(c)), "DDDMMMMM");
  c["moe_layer_freq"] = 2;
  EXPECT_EQ(moe(parse(c)), "DDDDMDMD");
  c["mlp_layer_types"] = {"sparse", "dense", "sparse", "dense", "sparse", "dense", "sparse", "dense", "sparse"};
  EXPECT_EQ(moe(parse(c)), "MDMDMDMD");
}

TEST(Config, TakesTheIndexerPairingFromItsOwnField) {
  Json c = tiny();
  c["rope_interleave"] = true;  // speaks of the main part alone
  EXPECT_EQ(parse(c).index_rope_pairing, RopePairing::kHalfSplit);
  c["indexer_rope_interleave"] = true;
  EXPECT_EQ(parse(c).index_rope_pairing, RopePairing::kInterleaved);
  c = glm();
  EXPECT_EQ(parse(c).index_rope_pairing, RopePairing::kInterleaved);
  c["indexer_rope_interleave"] = false;
  EXPECT_EQ(parse(c).index_rope_pairing, RopePairing::kHalfSplit);
}

TEST(Config, AllowsQProjectionsWithoutRankInDenseModels) {
  Json c = yarn();
  c["q_lora_rank"] = nullptr;
  EXPECT_EQ(parse(c).q_lora_rank, 0);
}

// ---- what is refused ----------------------------------------------------------------------------------------------

void expect_error(const Json& c, const std::string& part, const Json& generation = nullptr) {
  try {
    parse(c, generation);
    ADD_FAILURE() << "accepted; expected: " << part;
  } catch (const Error& e) {
    const std::string text = e.what();
    EXPECT_NE(text.find(part), std::string::npos) << text;
    EXPECT_NE(text.find("config.json"), std::string::npos) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    EXPECT_TRUE(e.code() == ErrorCode::kCorruptFile || e.code() == ErrorCode::kUnsupported) << text;
  }
}

void expect_refused(const Json& base, const char* pointer, const Json& value, const std::string& part) {
  SCOPED_TRACE(std::string(pointer) + " = " + value.dump());
  Json c = base;
  c[Json::json_pointer(pointer)] = value;
  expect_error(c, part);
}

TEST(Config, RefusesUnsupportedValuesByName) {
  const Json c = tiny();
  expect_refused(c, "/architectures", {"MistralForCausalLM"}, "architectures[0] is \"MistralForCausalLM\"");
  expect_refused(c, "/model_type", "deepseek_v2", "model_type is \"deepseek_v2\"");
  expect_refused(c, "/hidden_act", "gelu", "hidden_act is \"gelu\"; accepted: \"silu\"");
  expect_refused(c, "/scoring_func", "softmax", "scoring_func is \"softmax\"");
  expect_refused(c, "/topk_method", "group_limited_greedy", "topk_method is");
  expect_refused(c, "/attention_bias", true, "attention_bias is true");
  expect_refused(c, "/mlp_bias", true, "mlp_bias is true");
  expect_refused(c, "/attn_logit_softcapping", 50.0, "attn_logit_softcapping is 50.0");
  expect_refused(c, "/final_logit_softcapping", 30.0, "final_logit_softcapping is 30.0");
  expect_refused(c, "/sliding_window", 4096, "sliding_window is 4096");
  expect_refused(c, "/rope_interleave", false, "rope_interleave is false");
  expect_refused(c, "/q_lora_rank", nullptr, "q_lora_rank is null");
  expect_refused(c, "/layer_types", {"a", "a", "a", "a"}, "layer_types[0] is \"a\"");
  expect_refused(c, "/mlp_layer_types", {"dense", "dense", "dense", "moe"}, "mlp_layer_types[3] is \"moe\"");
  expect_refused(c, "/indexer_types", {"F", "F", "X", "F"}, "indexer_types[2] is \"X\"");
  expect_refused(c, "/index_head_dim", 96, "index_head_dim is 96");
  expect_refused(c, "/rope_scaling", {{"type", "linear"}, {"factor", 2}}, "rope_scaling.type is \"linear\"");
  expect_refused(c, "/compression_config", {{"a", 1}}, "compression_config");
  expect_refused(yarn(), "/index_topk", 2048, "index_topk is 2048");
  expect_refused(yarn(), "/rope_scaling/truncate", false, "rope_scaling.truncate is false");
  const Json fp8 = read_json(kCheckpoints + "v3-fp8/config.json");
  expect_refused(fp8, "/quantization_config/quant_method", "awq", "quantization_config.quant_method is \"awq\"");
  expect_refused(fp8, "/quantization_config/fmt", "e5m2", "quantization_config.fmt");
  expect_refused(fp8, "/quantization_config/activation_scheme", "static", "activation_scheme is \"static\"");
  Json ok = fp8;
  ok["quantization_config"]["scale_fmt"] = "ue8m0";
  EXPECT_NO_THROW(parse(ok));
}

TEST(Config, RefusesValuesThatContradict) {
  const Json c = tiny();
  expect_refused(c, "/n_group", 3, "n_group is 3; accepted: a divisor of n_routed_experts = 8");
  expect_refused(c, "/n_group", 8, "n_group is 8; accepted: at most");
  expect_refused(c, "/topk_group", 5, "topk_group is 5");
  expect_refused(c, "/num_experts_per_tok", 5, "num_experts_per_tok is 5");  // two groups of two are kept
  expect_refused(c, "/layer_types", {"deepseek_sparse_attention"}, "num_hidden_layers = 4");
  expect_refused(c, "/mlp_layer_types", {"dense"}, "mlp_layer_types is an array of 1");
  expect_refused(c, "/indexer_types", {"F", "F", "F"}, "indexer_types has 3 entries");
  expect_refused(c, "/indexer_types", {"S", "F", "F", "F"}, "indexer_types[0] is \"S\"");
  expect_refused(c, "/index_topk_pattern", "FF", "index_topk_pattern has 2 entries");
  expect_refused(c, "/index_topk_pattern", "SFFF", "index_topk_pattern[0]");
  expect_refused(c, "/index_head_dim", 32, "at least qk_rope_head_dim = 64");
  expect_refused(c, "/qk_rope_head_dim", 63, "qk_rope_head_dim is 63; accepted: an even number");
  expect_refused(c, "/rope_scaling", {{"type", "yarn"}, {"factor", 2}}, "original_max_position_embeddings is missing");
  expect_refused(c, "/rope_scaling", {{"type", "yarn"}, {"rope_type", "default"}}, "is \"yarn\"; another RoPE type");
  expect_refused(c, "/rope_scaling", {{"type", "default"}, {"factor", 2}}, "rope_scaling.factor is 2");
  const Json fp8 = read_json(kCheckpoints + "v3-fp8/config.json");
  expect_refused(fp8, "/quantization_config/weight_block_size", {128}, "weight_block_size is an array of 1");
  expect_refused(fp8, "/quantization_config/weight_block_size", {128, 0}, "weight_block_size has the size 0");
  expect_refused(yarn(), "/rope_scaling/factor", 0.5, "rope_scaling.factor is 0.5");
  expect_refused(yarn(), "/rope_scaling/factor", "40", "rope_scaling.factor is \"40\"");
  expect_refused(yarn(), "/rope_scaling/beta_fast", 0.0001, "ramp");
}

TEST(Config, RefusesSizesOutOfRange) {
  for (const char* key :
       {"vocab_size", "hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim", "num_hidden_layers", "intermediate_size", "moe_intermediate_size",
        "n_routed_experts", "num_experts_per_tok", "n_group", "topk_group", "index_n_heads", "index_head_dim",
        "index_topk", "max_position_embeddings"}) {
    const std::string pointer = std::string("/") + key;
    for (const Json& bad : {Json(-1), Json(0), Json(1.5), Json("4"), Json(true), Json(1e300), Json(uint64_t{1} << 63),
                            Json(int64_t{1} << 40), Json::array(), Json::object()})
      expect_refused(tiny(), pointer.c_str(), bad, std::string(key) + " is ");
    Json c = tiny();
    c.erase(key);
    SCOPED_TRACE(key);
    // Its absence has its own text where the model needs it for a reason of its own.
    expect_error(c, std::string(key) + " is missing");
  }
  for (const char* key : {"n_shared_experts", "num_nextn_predict_layers", "first_k_dense_replace", "moe_layer_freq"})
    expect_refused(tiny(), (std::string("/") + key).c_str(), -1, std::string(key) + " is -1");
  expect_refused(tiny(), "/rms_norm_eps", -1e-6, "rms_norm_eps is");
  expect_refused(tiny(), "/rope_theta", 1.0, "rope_theta is 1.0");
  expect_refused(tiny(), "/routed_scaling_factor", -1, "routed_scaling_factor is -1");
  expect_refused(tiny(), "/eos_token_id", -1, "eos_token_id holds -1");
  expect_refused(tiny(), "/eos_token_id", 2048,
                 "eos_token_id holds 2048; accepted: token ids from 0 to vocab_size - 1, 2047");
  expect_refused(tiny(), "/bos_token_id", 2048, "2048");
  expect_refused(tiny(), "/eos_token_id", {1, "x"}, "eos_token_id holds \"x\"");
  expect_error(tiny(), "generation_config.json: top_p is 1.5", {{"top_p", 1.5}});
  expect_error(tiny(), "generation_config.json: temperature is -1", {{"temperature", -1}});
}

TEST(Config, RefusesWhatIsNoJsonObject) {
  for (const char* text : {"", "{", "[]", "null", "3", "{\"a\": 1,}", "{\"a\": 1e999}", "{\"a\": \"\xFF\"}", "{} {}"})
    EXPECT_THROW(gannet::parse_config(text, "config.json"), Error) << text;
  EXPECT_THROW(gannet::parse_config("{\"vocab_size\": 1, \"vocab_size\": 2}", "config.json"), Error);
  EXPECT_THROW(gannet::parse_config(std::string(100'000, '['), "config.json"), Error);
  EXPECT_THROW(gannet::load_config(kModel + "/missing"), Error);
}

}  // namespace
