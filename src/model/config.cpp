#include "model/config.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "gannet/index_sharing.h"
#include "model/json_file.h"

namespace gannet {
inline namespace v0 {
namespace {

constexpr const char* kFunction = "config";
constexpr const char* kConfigFile = "config.json";
constexpr const char* kGenerationFile = "generation_config.json";
constexpr int64_t kMaxConfigBytes = 4'000'000;

// Bounds well above every published model (vocab 163,840; hidden 7,168; experts 384; 1,048,576 positions), and low
// enough that the bytes of any tensor of the model, a product of at most three of these times 4, fit in 63 bits.
constexpr int64_t kMaxWide = int64_t{1} << 20;  // hidden and intermediate sizes
constexpr int64_t kMaxVocab = int64_t{1} << 24;
constexpr int64_t kMaxHeadSize = int64_t{1} << 16;  // heads, head widths, ranks, experts
constexpr int64_t kMaxLayers = int64_t{1} << 12;
constexpr int64_t kMaxPositions = int64_t{1} << 30;

struct Name {
  const char* name;
  Family family;
};
constexpr Name kArchitectures[] = {
    {"DeepseekV3ForCausalLM", Family::kDeepseekV3},
    {"DeepseekV32ForCausalLM", Family::kDeepseekV32},
    {"GlmMoeDsaForCausalLM", Family::kGlmMoeDsa},
};
constexpr Name kModelTypes[] = {
    {"deepseek_v3", Family::kDeepseekV3},
    {"kimi_k2", Family::kDeepseekV3},
    {"deepseek_v32", Family::kDeepseekV32},
    {"glm_moe_dsa", Family::kGlmMoeDsa},
};

template <size_t n>
std::string join(const Name (&names)[n]) {
  std::string text;
  for (const Name& name : names) text += fmt::format("{}{}", text.empty() ? "" : ", ", name.name);
  return text;
}

template <size_t n>
std::optional<Family> family_of(const Name (&names)[n], std::string_view name) {
  for (const Name& known : names)
    if (name == known.name) return known.family;
  return std::nullopt;
}

Family read_family(const JsonObject& c) {
  std::optional<Family> by_architecture;
  if (c.given("architectures")) {
    const std::vector<Json>& list = c.array("architectures");
    if (list.empty() || !list[0].is_string()) c.refuse("architectures", "an array of names");
    by_architecture = family_of(kArchitectures, list[0].get<std::string>());
    if (!by_architecture)
      fail(ErrorCode::kUnsupported, kFunction, "{}: architectures[0] is {}; accepted: {}", c.file(), show(list[0]),
           join(kArchitectures));
  }
  if (!c.given("model_type")) {
    if (!by_architecture) c.refuse("architectures", join(kArchitectures));
    return *by_architecture;
  }
  const std::string type = c.string("model_type");
  const std::optional<Family> by_type = family_of(kModelTypes, type);
  if (!by_type) c.unsupported("model_type", join(kModelTypes));
  if (by_architecture && *by_architecture != *by_type)
    fail(ErrorCode::kCorruptFile, kFunction, "{}: model_type is {}, but architectures[0] is that of {}", c.file(),
         show_text(type), to_string(*by_architecture));
  return *by_type;
}

/// Throws unless `key` is absent, null or `accepted`.
void require_string(const JsonObject& c, std::string_view key, std::string_view accepted) {
  if (c.given(key) && c.string(key) != accepted) c.unsupported(key, show_text(accepted));
}

void require_false(const JsonObject& c, std::string_view key) {
  if (c.boolean_or(key, false)) c.unsupported(key, "false or absent");
}

/// Absent, null, 0 or false: a feature that the model does without.
void require_off(const JsonObject& c, std::string_view key) {
  const Json* value = c.find(key);
  if (value == nullptr || (value->is_boolean() && !value->get<bool>())) return;
  if (value->is_number() && value->get<double>() == 0.0) return;
  c.unsupported(key, "null or absent");
}

void refuse_unimplemented(const JsonObject& c) {
  require_string(c, "hidden_act", "silu");
  require_string(c, "scoring_func", "sigmoid");
  require_string(c, "topk_method", "noaux_tc");
  require_false(c, "attention_bias");
  require_false(c, "mlp_bias");
  for (const char* key : {"attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap", "logit_soft_cap",
                          "logit_cap", "attn_logit_softcap", "sliding_window"})
    require_off(c, key);
  // Speaks of the main MLA part alone; every published file has it true or absent.
  if (!c.boolean_or("rope_interleave", true)) c.unsupported("rope_interleave", "true or absent");
}

// ---- RoPE -------------------------------------------------------------------------------------------------------

/// Looks a key up in rope_parameters, then rope_scaling; refuses a file in which both have it and differ.
class RopeSource {
 public:
  explicit RopeSource(const JsonObject& c) : config_(c) {
    if (c.given("rope_parameters")) objects_.push_back(c.object("rope_parameters"));
    if (c.given("rope_scaling")) objects_.push_back(c.object("rope_scaling"));
  }

  const JsonObject* holder(std::string_view key) const {
    const JsonObject* found = nullptr;
    for (const JsonObject& o : objects_) {
      if (!o.given(key)) continue;
      if (found != nullptr) check_equal(*found, o, key);
      else found = &o;
    }
    return found;
  }

  double number_or(std::string_view key, double otherwise, double min, double max) const {
    const JsonObject* o = holder(key);
    return o != nullptr ? o->number(key, min, max) : otherwise;
  }

  /// rope_theta may also stand at the top, beside either object.
  double theta(double min, double max) const {
    const JsonObject* o = holder("rope_theta");
    if (o == nullptr) return config_.number("rope_theta", min, max);
    if (config_.given("rope_theta")) check_equal(*o, config_, "rope_theta");
    return o->number("rope_theta", min, max);
  }

  /// "" where no object names a type. Older files spell the key `type`; some have both.
  std::string type() const {
    std::string found;
    for (const JsonObject& o : objects_) {
      for (const char* key : {"rope_type", "type"}) {
        if (!o.given(key)) continue;
        const std::string type = o.string(key);
        if (type != "default" && type != "yarn") o.unsupported(key, "\"default\" or \"yarn\"");
        if (!found.empty() && found != type)
          fail(ErrorCode::kCorruptFile, kFunction, "{}: {} is {}; another RoPE type in the file is {}", o.file(),
               o.field(key), show_text(type), show_text(found));
        found = type;
      }
    }
    return found;
  }

  bool has_parameters() const { return config_.given("rope_parameters"); }

 private:
  static void check_equal(const JsonObject& a, const JsonObject& b, std::string_view key) {
    if (a.at(key) != b.at(key))
      fail(ErrorCode::kCorruptFile, kFunction, "{}: {} is {}, but {} is {}", a.file(), a.field(key), show(a.at(key)),
           b.field(key), show(b.at(key)));
  }

  const JsonObject& config_;
  std::vector<JsonObject> objects_;
};

struct Ramp {
  double low;
  double high;
};

/// Where yarn's blend begins and ends, in pairs: d(b) = P ln(orig / (2 pi b)) / (2 ln theta).
Ramp yarn_ramp(double theta, const YarnConfig& yarn, int64_t rope_dim) {
  const auto pair_of = [&](double beta) {
    return static_cast<double>(rope_dim) *
           std::log(static_cast<double>(yarn.original_max_position_embeddings) / (beta * 2.0 * std::numbers::pi)) /
           (2.0 * std::log(theta));
  };
  return {std::max(std::floor(pair_of(yarn.beta_fast)), 0.0),
          std::min(std::ceil(pair_of(yarn.beta_slow)), static_cast<double>(rope_dim - 1))};
}

RopeConfig read_rope(const JsonObject& c, int64_t rope_dim) {
  // Bounds only keep logarithms and powers finite: theta of published files lies between 1e4 and 8e6.
  constexpr double kMinTheta = 1.0 + 1e-6;
  constexpr double kMaxTheta = 1e12;
  constexpr double kMaxFactor = 1e6;
  constexpr double kMinBeta = 1e-6;
  constexpr double kMaxBeta = 1e6;
  const RopeSource source(c);
  RopeConfig rope;
  rope.theta = source.theta(kMinTheta, kMaxTheta);
  const std::string type = source.type();
  const JsonObject* factor = source.holder("factor");
  if (type == "default" && factor != nullptr) factor->refuse("factor", "absent, since the RoPE type is \"default\"");
  if (factor == nullptr) {
    // rope_scaling without a factor counts as none; rope_parameters that ask for yarn by name must say how much.
    if (type == "yarn" && source.has_parameters()) c.object("rope_parameters").at("factor");
    return rope;
  }
  YarnConfig yarn;
  yarn.factor = factor->number("factor", 1.0, kMaxFactor);
  const JsonObject* original = source.holder("original_max_position_embeddings");
  if (original == nullptr) factor->at("original_max_position_embeddings");
  yarn.original_max_position_embeddings = original->integer("original_max_position_embeddings", 1, kMaxPositions);
  yarn.beta_fast = source.number_or("beta_fast", yarn.beta_fast, kMinBeta, kMaxBeta);
  yarn.beta_slow = source.number_or("beta_slow", yarn.beta_slow, kMinBeta, kMaxBeta);
  yarn.mscale = source.number_or("mscale", 0.0, 0.0, kMaxFactor);
  yarn.mscale_all_dim = source.number_or("mscale_all_dim", 0.0, 0.0, kMaxFactor);
  if (const JsonObject* o = source.holder("attention_factor"))
    yarn.attention_factor = o->number("attention_factor", 1e-6, kMaxFactor);
  if (const JsonObject* o = source.holder("truncate"))
    if (!o->boolean_or("truncate", true)) o->unsupported("truncate", "true or absent");
  const Ramp ramp = yarn_ramp(rope.theta, yarn, rope_dim);
  if (!(ramp.low <= ramp.high))
    fail(ErrorCode::kCorruptFile, kFunction,
         "{}: {} is {} and beta_slow {}; accepted: values whose ramp ends after it begins (it goes from {} to {})",
         c.file(), factor->field("beta_fast"), yarn.beta_fast, yarn.beta_slow, ramp.low, ramp.high);
  rope.yarn = yarn;
  return rope;
}

/// m(f, a) of yarn.
double yarn_m(double factor, double a) { return factor > 1.0 ? 0.1 * a * std::log(factor) + 1.0 : 1.0; }

// ---- layers -----------------------------------------------------------------------------------------------------

/// A list with one string per layer; entries beyond num_layers speak of MTP layers.
const std::vector<Json>& layer_list(const JsonObject& c, std::string_view key, int64_t num_layers) {
  const std::vector<Json>& list = c.array(key);
  if (static_cast<int64_t>(list.size()) < num_layers)
    c.refuse(key, fmt::format("one entry for each of num_hidden_layers = {} layers", num_layers));
  return list;
}

[[noreturn]] void refuse_entry(const JsonObject& c, std::string_view key, size_t i, const Json& value,
                               std::string_view accepted) {
  fail(ErrorCode::kUnsupported, kFunction, "{}: {}[{}] is {}; accepted: {}", c.file(), c.field(key), i, show(value),
       accepted);
}

void check_layer_types(const JsonObject& c, bool dsa, int64_t num_layers) {
  if (!c.given("layer_types")) return;
  const char* accepted = dsa ? "deepseek_sparse_attention" : "full_attention";
  const std::vector<Json>& list = layer_list(c, "layer_types", num_layers);
  for (size_t i = 0; i < list.size(); ++i)
    if (!list[i].is_string() || list[i].get_ref<const std::string&>() != accepted)
      refuse_entry(c, "layer_types", i, list[i], show_text(accepted));
}

void read_mlp_layers(const JsonObject& c, ModelConfig* m) {
  const int64_t n = m->num_hidden_layers();
  if (c.given("mlp_layer_types")) {
    const std::vector<Json>& list = layer_list(c, "mlp_layer_types", n);
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string type = list[i].is_string() ? list[i].get<std::string>() : "";
      if (type != "dense" && type != "sparse")
        refuse_entry(c, "mlp_layer_types", i, list[i], "\"dense\" or \"sparse\"");
      if (i < m->layers.size()) m->layers[i].moe = type == "sparse";
    }
    return;
  }
  const int64_t first = c.integer("first_k_dense_replace", 0, kMaxLayers);
  const int64_t freq = c.integer_or("moe_layer_freq", 1, 1, kMaxLayers);
  for (int64_t l = 0; l < n; ++l) m->layers[static_cast<size_t>(l)].moe = l >= first && l % freq == 0;
}

void read_moe(const JsonObject& c, ModelConfig* m) {
  m->n_routed_experts = c.integer("n_routed_experts", 1, kMaxHeadSize);
  m->moe_intermediate_size = c.integer("moe_intermediate_size", 1, kMaxWide);
  m->n_shared_experts = c.integer_or("n_shared_experts", 0, 0, kMaxWide / m->moe_intermediate_size);
  m->n_group = c.integer("n_group", 1, m->n_routed_experts);
  const int64_t group_size = m->n_routed_experts / m->n_group;
  if (m->n_routed_experts % m->n_group != 0)
    c.refuse("n_group", fmt::format("a divisor of n_routed_experts = {}", m->n_routed_experts));
  // A group's score is the sum of its two largest choices.
  if (m->n_group > 1 && group_size < 2)
    c.refuse("n_group", fmt::format("at most n_routed_experts / 2 = {}, two experts a group", m->n_routed_experts / 2));
  m->topk_group = c.integer("topk_group", 1, m->n_group);
  m->num_experts_per_tok = c.integer("num_experts_per_tok", 1, m->topk_group * group_size);
  m->norm_topk_prob = c.boolean_or("norm_topk_prob", true);
  m->routed_scaling_factor = c.number("routed_scaling_factor", 0.0, 1e6);
}

/// A list of words a layer, or one word of letters ("FFSS").
std::vector<std::string> read_words(const JsonObject& c, std::string_view key) {
  std::vector<std::string> words;
  if (c.at(key).is_string()) {
    for (const char letter : c.string(key)) words.emplace_back(1, letter);
    return words;
  }
  const std::vector<Json>& list = c.array(key);
  for (size_t i = 0; i < list.size(); ++i) {
    if (!list[i].is_string()) refuse_entry(c, key, i, list[i], "\"F\", \"S\", \"full\" or \"shared\"");
    words.push_back(list[i].get<std::string>());
  }
  return words;
}

/// Which layers compute a selection of their own: the library has the rules, the file their fields.
void read_sharing(const JsonObject& c, ModelConfig* m) {
  IndexSharing sharing{.num_hidden_layers = m->num_hidden_layers()};
  if (c.given("indexer_types")) sharing.indexer_types = read_words(c, "indexer_types");
  else if (c.given("index_topk_pattern")) sharing.index_topk_pattern = read_words(c, "index_topk_pattern");
  else sharing.index_topk_freq = c.integer_or("index_topk_freq", 1, 0, kMaxLayers);
  if (sharing.index_topk_freq.value_or(1) > 1 && c.given("index_skip_topk_offset"))
    sharing.index_skip_topk_offset = c.integer("index_skip_topk_offset", -kMaxLayers, kMaxLayers);
  try {
    const std::vector<int32_t> sources = selection_sources(sharing);
    for (size_t l = 0; l < sources.size(); ++l) m->layers[l].indexer = sources[l] == static_cast<int32_t>(l);
  } catch (const Error& e) {
    std::string_view text = e.what();
    text.remove_prefix(text.find("] ") + 2);  // the name of the function
    fail(ErrorCode::kCorruptFile, kFunction, "{}: {}", c.file(), text);
  }
}

void read_indexer(const JsonObject& c, ModelConfig* m) {
  m->index_n_heads = c.integer("index_n_heads", 1, kMaxHeadSize);
  m->index_head_dim = c.integer("index_head_dim", 1, kMaxHeadSize);
  if (m->index_head_dim != 32 && m->index_head_dim != 64 && m->index_head_dim != 128)
    c.unsupported("index_head_dim", "32, 64 or 128");
  if (m->index_head_dim < m->qk_rope_head_dim)
    c.refuse("index_head_dim", fmt::format("at least qk_rope_head_dim = {}", m->qk_rope_head_dim));
  m->index_topk = c.integer("index_topk", 1, kMaxPositions);
  const bool interleaved = c.boolean_or("indexer_rope_interleave", m->family == Family::kGlmMoeDsa);
  m->index_rope_pairing = interleaved ? RopePairing::kInterleaved : RopePairing::kHalfSplit;
  m->index_share_for_mtp_iteration = c.boolean_or("index_share_for_mtp_iteration", false);
  read_sharing(c, m);
}

// ---- the rest ---------------------------------------------------------------------------------------------------

void read_quantization(const JsonObject& c, ModelConfig* m) {
  if (c.given("compression_config")) c.unsupported("compression_config", "null or absent");
  if (!c.given("quantization_config")) return;
  const JsonObject q = c.object("quantization_config");
  if (q.string("quant_method") != "fp8") q.unsupported("quant_method", "\"fp8\"");
  if (q.string_or("fmt", "e4m3") != "e4m3") q.unsupported("fmt", "\"e4m3\"");
  // Of the weights alone; activations are not quantised here, whatever scheme the file names.
  if (q.string_or("activation_scheme", "dynamic") != "dynamic") q.unsupported("activation_scheme", "\"dynamic\"");
  const std::string scale_format = q.string_or("scale_fmt", "float");
  // Power-of-two scales are stored as ordinary fp32 numbers.
  if (scale_format != "float" && scale_format != "ue8m0") q.unsupported("scale_fmt", "\"ue8m0\" or absent");
  const std::vector<Json>& block = q.array("weight_block_size");
  for (const Json& size : block)
    if (!size.is_number_unsigned() || size.get<uint64_t>() == 0 ||
        size.get<uint64_t>() > static_cast<uint64_t>(kMaxWide))
      fail(ErrorCode::kCorruptFile, kFunction, "{}: {} has the size {}; accepted: 1 to {}", q.file(),
           q.field("weight_block_size"), show(size), kMaxWide);
  if (block.size() != 2) q.refuse("weight_block_size", "[rows, columns]");
  m->weight_block_rows = block[0].get<int64_t>();
  m->weight_block_cols = block[1].get<int64_t>();
}

/// An id, a list of ids, or nothing.
std::vector<int32_t> read_ids(const JsonObject& c, std::string_view key, int64_t vocab_size) {
  std::vector<int32_t> ids;
  const Json* value = c.find(key);
  if (value == nullptr) return ids;
  const auto add = [&](const Json& id) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() >= static_cast<uint64_t>(vocab_size))
      fail(ErrorCode::kCorruptFile, kFunction, "{}: {} holds {}; accepted: token ids from 0 to vocab_size - 1, {}",
           c.file(), c.field(key), show(id), vocab_size - 1);
    ids.push_back(static_cast<int32_t>(id.get<uint64_t>()));
  };
  if (value->is_array())
    for (const Json& id : *value) add(id);
  else add(*value);
  return ids;
}

}  // namespace

const char* to_string(Family f) noexcept {
  switch (f) {
    case Family::kDeepseekV3: return "deepseek_v3";
    case Family::kDeepseekV32: return "deepseek_v32";
    case Family::kGlmMoeDsa: return "glm_moe_dsa";
  }
  return "unknown";
}

double ModelConfig::softmax_scale() const noexcept {
  const double scale = 1.0 / std::sqrt(static_cast<double>(qk_head_dim()));
  if (!rope.yarn || rope.yarn->mscale_all_dim == 0.0) return scale;
  const double m = yarn_m(rope.yarn->factor, rope.yarn->mscale_all_dim);
  return scale * m * m;
}

double ModelConfig::index_scale() const noexcept { return 1.0 / std::sqrt(static_cast<double>(index_head_dim)); }

double rope_magnitude(const RopeConfig& rope) noexcept {
  if (!rope.yarn) return 1.0;
  const YarnConfig& yarn = *rope.yarn;
  if (yarn.attention_factor) return *yarn.attention_factor;
  if (yarn.mscale != 0.0 && yarn.mscale_all_dim != 0.0)
    return yarn_m(yarn.factor, yarn.mscale) / yarn_m(yarn.factor, yarn.mscale_all_dim);
  return yarn_m(yarn.factor, 1.0);
}

std::vector<float> rope_inverse_frequencies(const RopeConfig& rope, int64_t rope_dim) {
  // Rounded to fp32 after each of the reference's steps: at position 4,095 one unit in the last place of the largest
  // frequency turns the angle by 2.4e-4.
  const auto theta = static_cast<float>(rope.theta);
  std::vector<float> inverse(static_cast<size_t>(rope_dim / 2));
  Ramp ramp{};
  if (rope.yarn) {
    ramp = yarn_ramp(rope.theta, *rope.yarn, rope_dim);
    if (ramp.low == ramp.high) ramp.high += 0.001;
  }
  for (size_t i = 0; i < inverse.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(rope_dim);
    const auto wave = static_cast<float>(std::pow(static_cast<double>(theta), static_cast<double>(exponent)));
    inverse[i] = 1.0f / wave;
    if (!rope.yarn) continue;
    const float interpolated = 1.0f / (static_cast<float>(rope.yarn->factor) * wave);
    const float t = (static_cast<float>(i) - static_cast<float>(ramp.low)) / static_cast<float>(ramp.high - ramp.low);
    const float keep = 1.0f - std::clamp(t, 0.0f, 1.0f);
    inverse[i] = interpolated * (1.0f - keep) + inverse[i] * keep;
  }
  return inverse;
}

ModelConfig parse_config(std::string_view text, const std::string& name, std::string_view generation_text,
                         const std::string& generation_name) {
  const Json json = parse_json(kFunction, text, name);
  const JsonObject c(kFunction, name, "", json);
  ModelConfig m;
  m.family = read_family(c);
  m.model_type = c.string_or("model_type", to_string(m.family));
  refuse_unimplemented(c);

  m.vocab_size = c.integer("vocab_size", 1, kMaxVocab);
  m.hidden_size = c.integer("hidden_size", 1, kMaxWide);
  m.num_attention_heads = c.integer("num_attention_heads", 1, kMaxHeadSize);
  m.kv_lora_rank = c.integer("kv_lora_rank", 1, kMaxHeadSize);
  m.qk_nope_head_dim = c.integer("qk_nope_head_dim", 1, kMaxHeadSize);
  m.qk_rope_head_dim = c.integer("qk_rope_head_dim", 2, kMaxHeadSize);
  if (m.qk_rope_head_dim % 2 != 0) c.refuse("qk_rope_head_dim", "an even number");
  m.v_head_dim = c.integer("v_head_dim", 1, kMaxHeadSize);
  if (m.is_dsa() && !c.given("q_lora_rank"))
    c.unsupported("q_lora_rank", "a rank: the indexer reads the query's latent");
  m.q_lora_rank = c.given("q_lora_rank") ? c.integer("q_lora_rank", 1, kMaxHeadSize) : 0;
  m.max_position_embeddings = c.integer("max_position_embeddings", 1, kMaxPositions);
  m.rms_norm_eps = c.number("rms_norm_eps", 0.0, 1.0);
  m.tie_word_embeddings = c.boolean_or("tie_word_embeddings", false);
  m.rope = read_rope(c, m.qk_rope_head_dim);

  m.layers.resize(static_cast<size_t>(c.integer("num_hidden_layers", 1, kMaxLayers)));
  m.num_nextn_predict_layers = c.integer_or("num_nextn_predict_layers", 0, 0, kMaxLayers);
  check_layer_types(c, m.is_dsa(), m.num_hidden_layers());
  read_mlp_layers(c, &m);
  read_moe(c, &m);
  const bool any_dense = std::any_of(m.layers.begin(), m.layers.end(), [](const LayerConfig& l) { return !l.moe; });
  if (any_dense || c.given("intermediate_size")) m.intermediate_size = c.integer("intermediate_size", 1, kMaxWide);

  if (m.is_dsa()) read_indexer(c, &m);
  else if (c.given("index_topk"))
    c.unsupported("index_topk", fmt::format("absent: {} is attended densely", to_string(m.family)));
  read_quantization(c, &m);

  if (c.given("bos_token_id")) m.bos_token_id = static_cast<int32_t>(c.integer("bos_token_id", 0, m.vocab_size - 1));
  m.generation.eos_token_ids = read_ids(c, "eos_token_id", m.vocab_size);
  if (!generation_text.empty()) {
    const Json generation = parse_json(kFunction, generation_text, generation_name);
    const JsonObject g(kFunction, generation_name, "", generation);
    m.generation.do_sample = g.boolean_or("do_sample", false);
    m.generation.temperature = g.number_or("temperature", 1.0, 0.0, 1e6);
    m.generation.top_p = g.number_or("top_p", 1.0, 0.0, 1.0);
    if (g.given("eos_token_id")) m.generation.eos_token_ids = read_ids(g, "eos_token_id", m.vocab_size);
  }
  return m;
}

ModelConfig load_config(const std::string& directory) {
  const std::string path = join_path(directory, kConfigFile);
  const std::string generation_path = join_path(directory, kGenerationFile);
  const std::string text = read_file(kFunction, path, kMaxConfigBytes);
  std::string generation;
  if (file_exists(generation_path)) {
    generation = read_file(kFunction, generation_path, kMaxConfigBytes);
    // An empty file is not an absent one.
    if (generation.empty()) fail(ErrorCode::kCorruptFile, kFunction, "{}: is empty", generation_path);
  }
  return parse_config(text, path, generation, generation_path);
}

}  // namespace v0
}  // namespace gannet
