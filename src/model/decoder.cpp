#include "model/decoder.h"

#include <algorithm>
#include <cmath>
#include <deque>

#include "core/format.h"
#include "model/timer.h"

namespace gannet {
inline namespace v0 {
namespace {

constexpr auto kWeightTypes = {DType::kBf16, DType::kF32, DType::kE4m3};
constexpr auto kNormTypes = {DType::kF32, DType::kBf16};

/// Takes tensors out of a checkpoint.
class Loader {
 public:
  Loader(Checkpoint& checkpoint, const ModelConfig& config, Compute& compute)
      : checkpoint_(checkpoint), config_(config), compute_(compute) {}

  WeightView weight(const std::string& name, int64_t rows, int64_t cols, bool exact = false) {
    return compute_.place(file_weight(name, rows, cols), exact);
  }

  WeightView file_weight(const std::string& name, int64_t rows, int64_t cols) {
    const TensorRef& t = checkpoint_.require(name, kWeightTypes, {rows, cols});
    WeightView w{.data = t.data, .dtype = t.dtype, .rows = rows, .cols = cols};
    if (t.dtype != DType::kE4m3) return w;
    if (config_.weight_block_rows <= 0 || config_.weight_block_cols <= 0)
      fail(ErrorCode::kCorruptFile, "Decoder", "{}: tensor {} is F8_E4M3; config.json has no quantization_config",
           t.file, name);
    w.block_rows = config_.weight_block_rows;
    w.block_cols = config_.weight_block_cols;
    const TensorRef& s = checkpoint_.require(name + "_scale_inv", {DType::kF32},
                                             {(rows + w.block_rows - 1) / w.block_rows, w.scale_cols()});
    w.scales = s.values<float>().data();
    return w;
  }

  const float* vector(const std::string& name, int64_t size) {
    std::vector<float> v(static_cast<size_t>(size));
    checkpoint_.require(name, kNormTypes, {size}).to_float(v.data());
    return compute_.place(std::move(v));
  }

  int32_t experts(std::vector<MlpWeights> all) { return compute_.place_experts(std::move(all)); }

  MlpWeights mlp(const std::string& prefix, int64_t width) {
    return {.gate = weight(prefix + "gate_proj.weight", width, config_.hidden_size),
            .up = weight(prefix + "up_proj.weight", width, config_.hidden_size),
            .down = weight(prefix + "down_proj.weight", config_.hidden_size, width)};
  }

 private:
  Checkpoint& checkpoint_;
  const ModelConfig& config_;
  Compute& compute_;
};

/// True for "model.layers.N." with N at or beyond the decoder's layers: the MTP layers.
bool is_mtp_tensor(const std::string& name, int64_t num_layers) {
  constexpr std::string_view kPrefix = "model.layers.";
  if (name.compare(0, kPrefix.size(), kPrefix) != 0) return false;
  int64_t layer = 0;
  size_t i = kPrefix.size();
  for (; i < name.size() && name[i] >= '0' && name[i] <= '9' && layer < num_layers; ++i)
    layer = layer * 10 + (name[i] - '0');
  return layer >= num_layers;
}

RouterParams router_params(const ModelConfig& c) {
  return {.num_experts = static_cast<int32_t>(c.n_routed_experts),
          .experts_per_token = static_cast<int32_t>(c.num_experts_per_tok),
          .num_groups = static_cast<int32_t>(c.n_group),
          .groups_kept = static_cast<int32_t>(c.topk_group),
          .normalise = c.norm_topk_prob,
          .scaling_factor = static_cast<float>(c.routed_scaling_factor)};
}

/// Whether FewRows takes every product of the model.
bool fits_few_rows(const ModelConfig& c) {
  const auto multiple = [](int64_t of, std::initializer_list<int64_t> values) {
    return std::all_of(values.begin(), values.end(), [&](int64_t v) { return v % of == 0; });
  };
  constexpr int64_t kMostChoices = 16;
  return multiple(8, {c.vocab_size, c.hidden_size, c.q_lora_rank, c.kv_lora_rank, c.v_head_dim, c.index_n_heads,
                      c.intermediate_size, c.moe_intermediate_size}) &&
         multiple(16, {c.qk_nope_head_dim, c.qk_rope_head_dim, c.index_head_dim}) &&
         c.num_experts_per_tok <= kMostChoices;
}

}  // namespace

KvCost kv_cost(const ModelConfig& config, LatentFormat latent, IndexKFormat index, bool draft) {
  KvCost cost;
  const RowGeometry geometry{static_cast<int32_t>(config.kv_lora_rank), static_cast<int32_t>(config.qk_rope_head_dim)};
  cost.latent_bytes = latent_row_bytes(latent, geometry) * (config.num_hidden_layers() + int64_t{draft});
  if (!config.is_dsa()) return cost;
  int64_t indexers = int64_t{draft};
  for (const LayerConfig& layer : config.layers) indexers += int64_t{layer.indexer};
  cost.index_bytes = indexers * index_k_token_bytes(index, static_cast<int32_t>(config.index_head_dim));
  return cost;
}

AttentionConfig attention_config(const ModelConfig& c, const DecoderOptions& options) {
  AttentionConfig config;
  config.arch = c.is_dsa() ? AttentionArch::kDsa : AttentionArch::kMla;
  config.num_heads = static_cast<int32_t>(c.num_attention_heads);
  config.geometry = {static_cast<int32_t>(c.kv_lora_rank), static_cast<int32_t>(c.qk_rope_head_dim)};
  config.qk_nope_head_dim = static_cast<int32_t>(c.qk_nope_head_dim);
  config.v_head_dim = static_cast<int32_t>(c.v_head_dim);
  config.q_lora_rank = static_cast<int32_t>(c.q_lora_rank);
  config.softmax_scale = static_cast<float>(c.softmax_scale());
  if (c.is_dsa())
    config.indexer = {.num_heads = static_cast<int32_t>(c.index_n_heads),
                      .head_dim = static_cast<int32_t>(c.index_head_dim),
                      .topk = static_cast<int32_t>(c.index_topk)};
  config.page_size = options.page_size;
  config.max_context_len = options.max_context_len > 0 ? options.max_context_len : c.max_position_embeddings;
  config.prefix_chunk_capacity = options.prefix_chunk_capacity;
  config.plan.impl = options.impl;
  config.plan.batch_invariant = options.invariant;
  config.device = options.device;
  return config;
}

std::vector<LatentFormat> latent_formats(const ModelConfig& c) {
  const Context context{};
  const AttentionConfig config = attention_config(c, {});
  const std::unique_ptr<AttentionBackend> backend = make_attention_backend(context, config);
  std::vector<LatentFormat> formats;
  for (const LatentFormat format : backend->capabilities().latent_formats) {
    const RowGeometry g = config.geometry;
    LatentWrite write;
    write.latent = view(nullptr, DType::kF32, {1, g.latent_dim});
    write.rope = view(nullptr, DType::kF32, {1, g.rope_dim});
    write.slots = view(nullptr, DType::kI32, {1});
    write.cache = {.format = format,
                   .geometry = g,
                   .num_pages = 1,
                   .page_size = config.page_size,
                   .page_stride_bytes = config.page_size * latent_row_bytes(format, g),
                   .scale = format == LatentFormat::kE4m3 ? 1.0f : 0.0f};
    try {
      OpPlan<LatentWrite>(context, write);
    } catch (const Error&) {  // widths that its groups do not divide
      continue;
    }
    formats.push_back(format);
  }
  return formats;
}

struct Decoder::Layer {
  void load(Loader& loader, const ModelConfig& c, const LayerConfig& layer_config, const std::string& prefix);
  LayerConfig config;
  const float *input_norm = nullptr, *post_norm = nullptr, *q_norm = nullptr, *kv_norm = nullptr;
  WeightView q_a, q_b, kv_a, kv_b, o;  // without a q latent q_b is q_proj, over the hidden state
  WeightView index_q, index_k, index_weights;
  const float *index_norm_weight = nullptr, *index_norm_bias = nullptr;
  MlpWeights mlp;  // dense layers; MoE layers: the shared experts, as one
  WeightView router;
  const float* router_bias = nullptr;
  int32_t experts = -1;          // their number in Compute
  const void* absorb = nullptr;  // for few rows: [H][R, N], the keys' half of kv_b as the absorbed query reads it
};

/// The MTP layer: a decoder layer over what the embedding of the next token and the hidden state are mixed to.
/// Embedding and lm_head are the main model's; published files hold copies of them.
struct Decoder::Mtp {
  const float *embed_norm = nullptr, *hidden_norm = nullptr, *head_norm = nullptr;
  WeightView mix;  // eh_proj [D, 2D], the embedding's half first
  Layer layer;
};

/// Buffers of one step, by what lies in them. [rows, ...] of the step.
struct Decoder::Scratch {
  explicit Scratch(MemoryResource& m) : memory(m) {}
  MemoryResource& memory;
  Array x{memory};         // [rows, D] the residual stream
  Array normed{memory};    // [rows, D]
  Array branch{memory};    // [rows, D] what a layer adds
  Array q_latent{memory};  // [rows, q_lora_rank]
  Array q{memory};         // [rows, H, N+P]
  Array kv{memory};        // [rows, R+P], k_pe rotated where it lies
  Array latent{memory};    // [rows, R]
  Array rope{memory};      // [rows, P] packed, for few rows
  Array index_q{memory}, index_k{memory}, index_weights{memory};
  Array heads{memory};  // [rows, H, V]
  Array index_q16{memory};
  Array router_logits{memory};
  Array nope16{memory};        // [rows, H, N], for few rows
  Array q16{memory};           // [rows, H, R+P]
  Array attended16{memory};    // [rows, H, R]
  Array heads16{memory};       // [rows, H, V]
  Array index_k_out{memory};   // [rows, Di], of which index_k is the input
  Array tokens{memory};        // [wanted rows] int32
  Array logit_rows{memory};    // [wanted rows, D]
  Array logits{memory};        // [wanted rows, vocab], of a GPU
  Array hidden{memory};        // [rows, D] normalised, of the last forward(), for drafts
  Array draft_hidden{memory};  // [rows, D] normalised, of the last draft step
  Array gathered{memory};      // [requests, D] rows of it
  Array mix_in{memory};        // [rows, 2D]
};

Decoder::Decoder(const Context& context, Checkpoint& checkpoint, const DecoderOptions& options)
    : context_(&context),
      config_(checkpoint.config()),
      options_(options),
      compute_(
          make_compute(context, {.device = options.device,
                                 .precision = options.precision,
                                 .projector = {.invariant = options.invariant, .impl = projector_impl(options.impl)}})),
      rope_(config_.rope, config_.qk_rope_head_dim),
      only_form_(only_prefill_form(config_.is_dsa(), options.invariant, options.device)),
      scratch_(std::make_unique<Scratch>(compute_->memory())) {
  if (options_.max_context_len <= 0) options_.max_context_len = config_.max_position_embeddings;
  if (options_.invariant && options_.device.kind != DeviceKind::kCpu)
    fail(ErrorCode::kUnsupported, "Decoder", "invariant on {}; accepted: on the CPU (bits of {} depend on the batch)",
         to_string(options_.device), compute_->name());
  if (const std::string accepted = prefill_form_refusal(options_.prefill_form, only_form_); !accepted.empty())
    fail_argument("Decoder", "prefill_form is {}; accepted: {}", to_string(options_.prefill_form), accepted);
  if (options_.query == QueryPrecision::kBf16 && fits_few_rows(config_)) few_ = compute_->few_rows();
  load(checkpoint);
  if (options_.draft && !draft_refusal_.empty()) fail(ErrorCode::kUnsupported, "draft", "{}", draft_refusal_);
  make_backend();
}

Decoder::~Decoder() = default;

void Decoder::Layer::load(Loader& loader, const ModelConfig& c, const LayerConfig& layer_config,
                          const std::string& prefix) {
  config = layer_config;
  const int64_t dim = c.hidden_size, heads = c.num_attention_heads;
  const std::string attn = prefix + "self_attn.";
  input_norm = loader.vector(prefix + "input_layernorm.weight", dim);
  post_norm = loader.vector(prefix + "post_attention_layernorm.weight", dim);
  if (c.q_lora_rank > 0) {
    q_a = loader.weight(attn + "q_a_proj.weight", c.q_lora_rank, dim);
    q_norm = loader.vector(attn + "q_a_layernorm.weight", c.q_lora_rank);
    q_b = loader.weight(attn + "q_b_proj.weight", heads * c.qk_head_dim(), c.q_lora_rank);
  } else {
    q_b = loader.weight(attn + "q_proj.weight", heads * c.qk_head_dim(), dim);
  }
  kv_a = loader.weight(attn + "kv_a_proj_with_mqa.weight", c.kv_lora_rank + c.qk_rope_head_dim, dim);
  kv_norm = loader.vector(attn + "kv_a_layernorm.weight", c.kv_lora_rank);
  kv_b = loader.weight(attn + "kv_b_proj.weight", heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank);
  o = loader.weight(attn + "o_proj.weight", dim, heads * c.v_head_dim);
  if (config.indexer) {
    const std::string indexer = attn + "indexer.";
    index_q = loader.weight(indexer + "wq_b.weight", c.index_n_heads * c.index_head_dim, c.q_lora_rank);
    index_k = loader.weight(indexer + "wk.weight", c.index_head_dim, dim);
    index_norm_weight = loader.vector(indexer + "k_norm.weight", c.index_head_dim);
    index_norm_bias = loader.vector(indexer + "k_norm.bias", c.index_head_dim);
    index_weights = loader.weight(indexer + "weights_proj.weight", c.index_n_heads, dim);
  }
  if (!config.moe) {
    mlp = loader.mlp(prefix + "mlp.", c.intermediate_size);
    return;
  }
  router = loader.weight(prefix + "mlp.gate.weight", c.n_routed_experts, dim, true);
  router_bias = loader.vector(prefix + "mlp.gate.e_score_correction_bias", c.n_routed_experts);
  std::vector<MlpWeights> all;
  for (int64_t e = 0; e < c.n_routed_experts; ++e)
    all.push_back(loader.mlp(fmt::format("{}mlp.experts.{}.", prefix, e), c.moe_intermediate_size));
  experts = loader.experts(std::move(all));
  if (c.n_shared_experts > 0)
    mlp = loader.mlp(prefix + "mlp.shared_experts.", c.moe_intermediate_size * c.n_shared_experts);
}

void Decoder::load(Checkpoint& checkpoint) {
  Loader loader(checkpoint, config_, *compute_);
  const ModelConfig& c = config_;
  embed_ = loader.weight("model.embed_tokens.weight", c.vocab_size, c.hidden_size);
  lm_head_ = c.tie_word_embeddings ? embed_ : loader.weight("lm_head.weight", c.vocab_size, c.hidden_size);
  final_norm_ = loader.vector("model.norm.weight", c.hidden_size);
  layers_.resize(c.layers.size());
  for (size_t i = 0; i < layers_.size(); ++i)
    layers_[i].load(loader, c, c.layers[i], fmt::format("model.layers.{}.", i));
  load_mtp(checkpoint);
  if (few_ != nullptr) {
    const auto place_absorbed = [&](Layer& layer) {
      layer.absorb = few_->place_transposed(layer.kv_b.data, c.qk_nope_head_dim, c.kv_lora_rank, c.num_attention_heads,
                                            (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank);
    };
    for (Layer& layer : layers_) place_absorbed(layer);
    if (mtp_) place_absorbed(mtp_->layer);
  }
  for (const std::string& name : checkpoint.unused())
    if (!is_mtp_tensor(name, c.num_hidden_layers())) unknown_.push_back(name);
}

/// Of several announced layers the first one drafts.
void Decoder::load_mtp(Checkpoint& checkpoint) {
  const ModelConfig& c = config_;
  const std::string& directory = checkpoint.directory();
  if (c.num_nextn_predict_layers == 0) {
    draft_refusal_ =
        fmt::format("{}: num_nextn_predict_layers of config.json is 0: there is no MTP layer to draft with", directory);
    return;
  }
  const std::string prefix = fmt::format("model.layers.{}.", c.num_hidden_layers());
  const std::vector<std::string> names = checkpoint.names();
  if (std::none_of(names.begin(), names.end(), [&](const std::string& n) { return n.starts_with(prefix); })) {
    draft_refusal_ = fmt::format(
        "{}: config.json announces an MTP layer, and no file has a tensor {}*: there is none to "
        "draft with",
        directory, prefix);
    return;
  }
  Loader loader(checkpoint, config_, *compute_);
  auto mtp = std::make_unique<Mtp>();
  try {
    mtp->embed_norm = loader.vector(prefix + "enorm.weight", c.hidden_size);
    mtp->hidden_norm = loader.vector(prefix + "hnorm.weight", c.hidden_size);
    mtp->mix = loader.weight(prefix + "eh_proj.weight", c.hidden_size, 2 * c.hidden_size);
    mtp->head_norm = loader.vector(prefix + "shared_head.norm.weight", c.hidden_size);
    mtp->layer.load(loader, c, {.moe = true, .indexer = c.is_dsa()}, prefix);
  } catch (const Error& e) {  // the model itself is whole
    std::string_view text = e.what();
    if (const size_t at = text.find("] "); at != std::string_view::npos) text.remove_prefix(at + 2);
    draft_refusal_ = text;
    return;
  }
  mtp_ = std::move(mtp);
}

void Decoder::make_backend() {
  const ModelConfig& c = config_;
  MemoryResource& memory = compute_->memory();
  backend_ = make_attention_backend(*context_, attention_config(c, options_), options_.backend, memory);
  backend_->set_stream(compute_->stream());
  const RowGeometry geometry = backend_->config().geometry;
  const auto num_layers = static_cast<int32_t>(layers_.size());
  latent_pool_ = std::make_unique<LatentPool>(LatentPoolOptions{.num_layers = num_layers + int32_t{options_.draft},
                                                                .format = options_.latent_format,
                                                                .geometry = geometry,
                                                                .num_pages = options_.num_pages,
                                                                .page_size = options_.page_size,
                                                                .scale = options_.latent_scale},
                                              memory);
  if (c.is_dsa()) {
    IndexKPoolOptions index{.format = options_.index_format,
                            .scale_format = options_.index_scale_format,
                            .head_dim = static_cast<int32_t>(c.index_head_dim),
                            .num_pages = options_.num_pages,
                            .page_size = options_.page_size,
                            .hadamard = options_.index_hadamard};
    for (int32_t i = 0; i < num_layers; ++i)
      if (layers_[static_cast<size_t>(i)].config.indexer) index.layers.push_back(i);
    if (options_.draft) index.layers.push_back(num_layers);
    index_pool_ = std::make_unique<IndexKPool>(index, memory);
    const auto topk = static_cast<int32_t>(c.index_topk);
    for (auto* buffer : {&selection_, &draft_selection_, &next_draft_selection_})
      *buffer = std::make_unique<SelectionBuffer>(topk, true, memory);
  }
  backend_->bind(layer_caches(*latent_pool_, index_pool_.get()));
  form_setup_ = {.widths = {.heads = c.num_attention_heads,
                            .latent = c.kv_lora_rank,
                            .rope = c.qk_rope_head_dim,
                            .nope = c.qk_nope_head_dim,
                            .v = c.v_head_dim},
                 .query = options_.query,
                 .format = options_.latent_format,
                 .impl = attention_impl(options_.impl),
                 .gemm_library = Projector::gemm_library() != "none"};
  forms_ =
      std::make_unique<MlaForms>(*backend_, *compute_, options_.query, form_setup_.widths, stats_.attention_seconds);
}

int64_t Decoder::pool_bytes() const noexcept {
  return latent_pool_->sizes().total_bytes + (index_pool_ ? index_pool_->sizes().total_bytes : 0);
}

void Decoder::prepare(const BatchStep& step) {
  hidden_rows_ = draft_rows_ = 0;
  if (!options_.persistent_plans || step.num_extends() > 0 || step.num_requests() == 0) {
    backend_->prepare(step);
    return;
  }
  const auto requests = static_cast<int32_t>(step.num_requests());
  capture(requests, step.q_len);
  if (options_.draft) capture(requests, 1);  // later draft steps have one row a request
  backend_->refresh(step, requests);
}

/// Of a step just prepared: once for all of its layers.
void Decoder::choose_form() {
  const StepPlan& plan = backend_->step();
  form_ = PrefillForm::kAbsorbed;
  if (plan.rows(StepRows::kPrefill).size() == 0) return;
  form_ = only_form_.form != PrefillForm::kAuto
              ? only_form_.form
              : choose_prefill_form(options_.prefill_form, form_setup_, form_step(plan));
  ++(form_ == PrefillForm::kExpanded ? stats_.expanded_steps : stats_.absorbed_steps);
}

void Decoder::capture(int32_t num_requests, int32_t q_len) {
  const std::pair<int32_t, int32_t> shape(num_requests, q_len);
  if (std::find(captured_.begin(), captured_.end(), shape) != captured_.end()) return;
  // No request outgrows the pool: a plan for the whole context would take its table, and workspaces, for nothing.
  const int64_t pool_tokens = std::max<int64_t>(1, options_.num_pages - 1) * options_.page_size;
  backend_->capture(
      {.num_requests = num_requests, .q_len = q_len, .max_seq_len = std::min(options_.max_context_len, pool_tokens)});
  captured_.push_back(shape);
}

/// The RoPE table as far as the step needs it. On a GPU all of it at once: recorded steps read it where it lies.
void Decoder::reserve_positions() {
  const std::span<const int32_t> positions = backend_->step().positions();
  const int64_t needed = 1 + *std::max_element(positions.begin(), positions.end());
  if (needed <= rope_positions_) return;
  const bool gpu = compute_->device().kind != DeviceKind::kCpu;
  rope_.reserve(gpu ? std::max(needed, options_.max_context_len) : needed);
  rope_positions_ = rope_.positions();
  rope_values_ = gpu ? compute_->place(std::vector(rope_.data(), rope_.data() + rope_positions_ * rope_.rope_dim()))
                     : rope_.data();
}

void Decoder::check_ids(const char* function, std::span<const int32_t> ids, int64_t rows,
                        std::span<const int64_t> logit_rows) const {
  if (static_cast<int64_t>(ids.size()) != rows) fail_argument(function, "{} ids for {} rows", ids.size(), rows);
  for (const int32_t id : ids)
    if (id < 0 || id >= config_.vocab_size)
      fail_argument(function, "token id is {}; accepted: 0 to {}", id, config_.vocab_size - 1);
  for (const int64_t row : logit_rows)
    if (row < 0 || row >= rows) fail_argument(function, "logit row is {}; the step has {} rows", row, rows);
}

void Decoder::forward(const BatchStep& step, std::span<const int32_t> ids, const ForwardOutputs& outputs) {
  const Timer timer(stats_.total_seconds);
  prepare(step);
  choose_form();
  const StepPlan& plan = backend_->step();
  const int64_t rows = plan.num_rows(), dim = config_.hidden_size;
  check_ids("forward", ids, rows, outputs.logit_rows);
  check_outputs("forward", outputs);
  if (rows == 0) return;
  reserve_positions();

  const int32_t* there = compute_->upload_ids(ids, rows);
  if (replay_decode(rows, there, outputs)) return;
  run_layers(rows, there, outputs);

  const float* x = scratch_->x.data();
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  if (options_.draft) {
    float* hidden = scratch_->hidden.room(rows * dim);
    compute_->rms_norm(x, dim, rows, dim, final_norm_, eps, hidden, dim);
    hidden_rows_ = rows;
    logits_of(hidden, outputs);
    return;
  }
  const auto wanted = static_cast<int64_t>(outputs.logit_rows.size());
  if (wanted == 0) return;
  float* last = scratch_->logit_rows.room(wanted * dim);
  compute_->gather_rows(x, outputs.logit_rows, dim, last);
  if (runs_few(wanted)) return deliver(logits_few(last, wanted, final_norm_), wanted, outputs.logits, outputs.tokens);
  compute_->rms_norm(last, dim, wanted, dim, final_norm_, eps, last, dim);
  project_logits(last, wanted, outputs);
}

void Decoder::run_layers(int64_t rows, const int32_t* ids, const ForwardOutputs& outputs) {
  compute_->embed(embed_, ids, rows, scratch_->x.room(rows * config_.hidden_size));
  Choice choice;
  if (selection_) {
    selection_->reserve(rows);
    choice.selection = selection_->view(rows);
  }
  for (size_t i = 0; i < layers_.size(); ++i)
    run_layer(static_cast<int32_t>(i), layers_[i], rows,
              {.selection = choice.selection, .reused = !layers_[i].config.indexer}, outputs);
}

bool Decoder::replay_decode(int64_t rows, const int32_t* ids, const ForwardOutputs& outputs) {
  const StepPlan& plan = backend_->step();
  if (compute_->device().kind == DeviceKind::kCpu || !plan.captured() || options_.draft || outputs.on_selection ||
      outputs.logit_rows.empty())
    return false;
  const int64_t dim = config_.hidden_size, vocab = config_.vocab_size;
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  const auto work = [&] {
    run_layers(rows, ids, {});
    if (runs_few(rows)) {
      few_->argmax(logits_few(scratch_->x.data(), rows, final_norm_), rows, vocab,
                   scratch_->tokens.room<int32_t>(rows));
      return;
    }
    float* normed = scratch_->normed.room(rows * dim);
    compute_->rms_norm(scratch_->x.data(), dim, rows, dim, final_norm_, eps, normed, dim);
    compute_->linear(normed, rows, lm_head_, scratch_->logits.room(rows * vocab));
  };
  Recorded& r = recorded_[{static_cast<int32_t>(plan.num_requests()), plan.q_len()}];
  if (r.work != nullptr && r.allocations == compute_->allocations()) {
    r.work->replay();
  } else {
    work();  // for real, and for the plans and memory that a recording takes as given
    r.work = compute_->record(work);
    r.allocations = compute_->allocations();
  }
  const float* logits = scratch_->logits.data();
  const auto row_bytes = static_cast<size_t>(vocab) * sizeof(float);
  if (outputs.tokens != nullptr) {
    auto* there = scratch_->tokens.room<int32_t>(rows);
    if (!runs_few(rows)) few_->argmax(logits, rows, vocab, there);  // else the recording has done it
    std::vector<int32_t> picked(static_cast<size_t>(rows));
    compute_->fetch(there, picked.size() * sizeof(int32_t), picked.data());
    for (size_t i = 0; i < outputs.logit_rows.size(); ++i)
      outputs.tokens[i] = picked[static_cast<size_t>(outputs.logit_rows[i])];
  }
  if (outputs.logits == nullptr) return true;
  if (static_cast<int64_t>(outputs.logit_rows.size()) == rows) {
    compute_->fetch(logits, row_bytes * static_cast<size_t>(rows), outputs.logits);
    return true;
  }
  for (size_t i = 0; i < outputs.logit_rows.size(); ++i)
    compute_->fetch(logits + outputs.logit_rows[i] * vocab, row_bytes,
                    outputs.logits + static_cast<int64_t>(i) * vocab);
  return true;
}

/// lm_head over packed rows, to the host.
void Decoder::project_logits(const float* rows, int64_t n, const ForwardOutputs& outputs) {
  const int64_t values = n * config_.vocab_size;
  float* there = compute_->device().kind == DeviceKind::kCpu ? outputs.logits : scratch_->logits.room(values);
  compute_->linear(rows, n, lm_head_, there);
  deliver(there, n, outputs.logits, outputs.tokens);
}

void Decoder::deliver(const float* logits, int64_t n, float* to, int32_t* tokens) {
  const int64_t vocab = config_.vocab_size;
  if (tokens != nullptr) {
    auto* picked = scratch_->tokens.room<int32_t>(n);
    few_->argmax(logits, n, vocab, picked);
    compute_->fetch(picked, static_cast<size_t>(n) * sizeof(int32_t), tokens);
  }
  if (to != nullptr) compute_->fetch(logits, static_cast<size_t>(n * vocab) * sizeof(float), to);
}

void Decoder::check_outputs(const char* function, const ForwardOutputs& outputs) const {
  if (outputs.tokens != nullptr && !picks_tokens())
    fail(ErrorCode::kUnsupported, function, "tokens are asked for; accepted: logits (a decoder on {} does not pick)",
         compute_->name());
  if (!outputs.logit_rows.empty() && outputs.logits == nullptr && outputs.tokens == nullptr)
    fail_argument(function, "{} logit rows and neither logits nor tokens", outputs.logit_rows.size());
}

/// lm_head over the wanted rows of `normed`.
void Decoder::logits_of(const float* normed, const ForwardOutputs& outputs) {
  const auto wanted = static_cast<int64_t>(outputs.logit_rows.size());
  const int64_t dim = config_.hidden_size;
  if (wanted == 0) return;
  float* rows = scratch_->logit_rows.room(wanted * dim);
  compute_->gather_rows(normed, outputs.logit_rows, dim, rows);
  project_logits(rows, wanted, outputs);
}

/// x += attention(norm(x)); x += mlp(norm(x)).
void Decoder::run_layer(int32_t index, const Layer& layer, int64_t rows, const Choice& choice,
                        const ForwardOutputs& outputs) {
  if (runs_few(rows)) return run_layer_few(index, layer, rows, choice, outputs);
  const int64_t dim = config_.hidden_size;
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  float* x = scratch_->x.data();
  float* normed = scratch_->normed.room(rows * dim);
  float* branch = scratch_->branch.room(rows * dim);
  compute_->rms_norm(x, dim, rows, dim, layer.input_norm, eps, normed, dim);
  attention(index, layer, rows, choice, outputs);
  compute_->add(x, branch, rows, dim);
  compute_->rms_norm(x, dim, rows, dim, layer.post_norm, eps, normed, dim);
  mlp(layer, rows);
  compute_->add(x, branch, rows, dim);
}

void Decoder::draft(std::span<const int32_t> next_ids, const ForwardOutputs& outputs) {
  constexpr const char* kFunction = "draft";
  const Timer timer(stats_.total_seconds);
  if (!options_.draft) fail_argument(kFunction, "the decoder was made without `draft`");
  if (hidden_rows_ == 0) fail_argument(kFunction, "there is no step to draft from; accepted: forward with rows first");
  check_ids(kFunction, next_ids, hidden_rows_, outputs.logit_rows);
  check_outputs(kFunction, outputs);
  draft_rows_ = hidden_rows_;
  hidden_rows_ = 0;  // a second pass would write what the first one wrote
  Choice choice;
  if (draft_selection_) {
    draft_selection_->reserve(draft_rows_);
    choice.selection = draft_selection_->view(draft_rows_);
  }
  run_mtp(next_ids, scratch_->hidden.data(), choice, outputs);
}

void Decoder::draft_next(const DraftAdvance& advance, std::span<const int32_t> rows, std::span<const int32_t> ids,
                         const ForwardOutputs& outputs) {
  constexpr const char* kFunction = "draft_next";
  const Timer timer(stats_.total_seconds);
  if (draft_rows_ == 0) fail_argument(kFunction, "there is no draft to go on from; accepted: draft first");
  for (const int32_t row : rows)
    if (row < -1 || row >= draft_rows_) fail_argument(kFunction, "row is {}; accepted: -1 to {}", row, draft_rows_ - 1);
  backend_->advance(advance);
  choose_form();
  const StepPlan& plan = backend_->step();
  const int64_t n = plan.num_rows(), dim = config_.hidden_size;
  if (static_cast<int64_t>(rows.size()) != n) fail_argument(kFunction, "{} rows for {} requests", rows.size(), n);
  check_ids(kFunction, ids, n, outputs.logit_rows);
  check_outputs(kFunction, outputs);
  reserve_positions();
  float* hidden = scratch_->gathered.room(n * dim);
  compute_->gather_rows(scratch_->draft_hidden.data(), std::vector<int64_t>(rows.begin(), rows.end()), dim, hidden);
  Choice choice;
  if (draft_selection_) {
    next_draft_selection_->reserve(n);
    choice.selection = next_draft_selection_->view(n);
    if (config_.index_share_for_mtp_iteration) {
      gather_selection(draft_selection_->view(draft_rows_), rows, choice.selection, compute_->stream());
      choice.reused = true;
    }
    std::swap(draft_selection_, next_draft_selection_);
  }
  draft_rows_ = n;
  run_mtp(ids, hidden, choice, outputs);
}

/// The MTP layer over the rows of the current step. `hidden` is what lm_head read: normalised.
void Decoder::run_mtp(std::span<const int32_t> ids, const float* hidden, const Choice& choice,
                      const ForwardOutputs& outputs) {
  Scratch& s = *scratch_;
  const Mtp& mtp = *mtp_;
  const auto rows = static_cast<int64_t>(ids.size());
  const int64_t dim = config_.hidden_size;
  const auto eps = static_cast<float>(config_.rms_norm_eps);
  float* x = s.x.room(rows * dim);
  float* mixed = s.mix_in.room(rows * 2 * dim);
  compute_->embed(embed_, compute_->upload_ids(ids, rows), rows, x);
  compute_->rms_norm(x, dim, rows, dim, mtp.embed_norm, eps, mixed, 2 * dim);
  compute_->rms_norm(hidden, dim, rows, dim, mtp.hidden_norm, eps, mixed + dim, 2 * dim);
  compute_->linear(mixed, rows, mtp.mix, x);
  run_layer(static_cast<int32_t>(layers_.size()), mtp.layer, rows, choice, outputs);
  float* out = s.draft_hidden.room(rows * dim);
  compute_->rms_norm(x, dim, rows, dim, mtp.head_norm, eps, out, dim);
  logits_of(out, outputs);
}

void Decoder::rotate(float* x, int64_t rows, int64_t heads, int64_t width, int64_t row_stride, int32_t offset,
                     RopePairing pairing) {
  Rope rope{.x = view_of(x, {rows, heads, width}),
            .positions = backend_->step_tensors().positions,
            .cos_sin = view_of(const_cast<float*>(rope_values_), {rope_positions_, rope_.rope_dim()}),
            .offset = offset,
            .pairing = pairing};
  rope.x.stride[0] = row_stride;
  OpPlan<Rope>(*context_, rope, {.impl = options_.impl}).run(rope, {}, compute_->stream());
}

/// The event in host memory.
void Decoder::report_selection(const SelectionEvent& event, const ForwardOutputs& outputs) const {
  if (!outputs.on_selection) return;
  if (compute_->device().kind == DeviceKind::kCpu) return outputs.on_selection(event);
  std::deque<std::vector<std::byte>> copies;
  const auto fetch = [&](const void* from, int64_t bytes) -> void* {
    std::vector<std::byte>& copy = copies.emplace_back(static_cast<size_t>(bytes));
    compute_->fetch(from, copy.size(), copy.data());
    return copy.data();
  };
  const auto on_host = [&](TensorView v) {
    if (!v.given()) return v;
    v.data = fetch(v.data, v.shape[0] * v.stride[0] * static_cast<int64_t>(size_of(v.dtype)));
    v.device = {};
    return v;
  };
  IndexCacheView cache = event.cache;
  cache.data = fetch(cache.data, cache.num_pages * cache.page_stride_bytes);
  cache.device = {};
  outputs.on_selection({.layer = event.layer,
                        .q = on_host(event.q),
                        .weights = on_host(event.weights),
                        .chosen = {.slots = on_host(event.chosen.slots),
                                   .lens = on_host(event.chosen.lens),
                                   .positions = on_host(event.chosen.positions)},
                        .step = event.step,
                        .cache = cache});
}

void Decoder::attention(int32_t index, const Layer& layer, int64_t rows, const Choice& choice,
                        const ForwardOutputs& outputs) {
  const ModelConfig& c = config_;
  Scratch& s = *scratch_;
  const int64_t dim = c.hidden_size, heads = c.num_attention_heads, q_dim = c.qk_head_dim();
  const int64_t latent_dim = c.kv_lora_rank, rope_dim = c.qk_rope_head_dim, row_dim = latent_dim + rope_dim;
  const bool indexer = layer.config.indexer, selects = indexer && !choice.reused;
  const float latent_eps = static_cast<float>(ModelConfig::kLatentNormEps);

  // What reads the hidden state.
  const auto from_hidden = [&](const WeightView& w, Array& y) {
    return Product{
        .x = s.normed.data(), .x_stride = dim, .rows = rows, .w = w, .y = y.room(rows * w.rows), .y_stride = w.rows};
  };
  std::vector<Product> products;
  products.push_back(c.q_lora_rank > 0 ? from_hidden(layer.q_a, s.q_latent) : from_hidden(layer.q_b, s.q));
  products.push_back(from_hidden(layer.kv_a, s.kv));
  if (indexer) products.push_back(from_hidden(layer.index_k, s.index_k));
  if (selects) products.push_back(from_hidden(layer.index_weights, s.index_weights));
  compute_->run(products);

  // What reads the normalised q latent.
  if (c.q_lora_rank > 0) {
    compute_->rms_norm(s.q_latent.data(), c.q_lora_rank, rows, c.q_lora_rank, layer.q_norm, latent_eps,
                       s.q_latent.data(), c.q_lora_rank);
    const auto from_latent = [&](const WeightView& w, Array& y) {
      return Product{.x = s.q_latent.data(),
                     .x_stride = c.q_lora_rank,
                     .rows = rows,
                     .w = w,
                     .y = y.room(rows * w.rows),
                     .y_stride = w.rows};
    };
    products = {from_latent(layer.q_b, s.q)};
    if (selects) products.push_back(from_latent(layer.index_q, s.index_q));
    compute_->run(products);
  }
  rotate(s.q.data(), rows, heads, q_dim, heads * q_dim, static_cast<int32_t>(c.qk_nope_head_dim),
         RopePairing::kInterleaved);

  // The row that the cache keeps: normalised latent and rotated k_pe.
  float* latent = s.latent.room(rows * latent_dim);
  float* rope = s.kv.data() + latent_dim;  // rotated where it lies
  compute_->rms_norm(s.kv.data(), row_dim, rows, latent_dim, layer.kv_norm, latent_eps, latent, latent_dim);
  rotate(rope, rows, 1, rope_dim, row_dim, 0, RopePairing::kInterleaved);
  KvRows kv{.latent = view_of(latent, {rows, latent_dim}), .rope = view_of(rope, {rows, rope_dim}), .index_k = {}};
  kv.rope.stride[0] = row_dim;

  const MlaRows x{.layer = index,
                  .kv_b = layer.kv_b,
                  .q = s.q.data(),
                  .latent = latent,
                  .rope = rope,
                  .rope_stride = row_dim,
                  .heads = s.heads.room(rows * heads * c.v_head_dim)};
  if (c.is_dsa()) sparse_attention(x, layer, rows, kv, choice, outputs);
  else dense_attention(x, kv);
  compute_->linear(s.heads.data(), rows, layer.o, s.branch.data());
}

void Decoder::sparse_attention(const MlaRows& x, const Layer& layer, int64_t rows, const KvRows& kv,
                               const Choice& choice, const ForwardOutputs& outputs) {
  const ModelConfig& c = config_;
  Scratch& s = *scratch_;
  const int32_t index = x.layer;
  const int64_t index_heads = c.index_n_heads, index_dim = c.index_head_dim;
  const TopKSelection& chosen = choice.selection;
  StepWrite write = kv;
  if (layer.config.indexer) {
    compute_->layer_norm(s.index_k.data(), rows, index_dim, layer.index_norm_weight, layer.index_norm_bias,
                         static_cast<float>(ModelConfig::kLatentNormEps), s.index_k.data());
    rotate(s.index_k.data(), rows, 1, index_dim, index_dim, 0, c.index_rope_pairing);
    KvRows with_index = kv;
    with_index.index_k = view_of(s.index_k.data(), {rows, index_dim});
    write = AlreadyWritten{};
    if (choice.reused) {
      const Timer timer(stats_.attention_seconds);
      backend_->write(index, StepRows::kAll, with_index);
    } else {
      rotate(s.index_q.data(), rows, index_heads, index_dim, index_heads * index_dim, 0, c.index_rope_pairing);
      const auto factor = static_cast<float>(c.index_scale() / std::sqrt(static_cast<double>(index_heads)));
      compute_->scale(s.index_weights.data(), factor, rows * index_heads);
      const TensorView weights = view_of(s.index_weights.data(), {rows, index_heads});
      {
        const Timer timer(stats_.attention_seconds);
        backend_->select({.layer = index,
                          .rows = StepRows::kAll,
                          .q = forms_->query_view(s.index_q.data(), {rows, index_heads, index_dim}, s.index_q16),
                          .weights = weights,
                          .write = with_index,
                          .out = chosen});
      }
      report_selection({.layer = index,
                        .q = view_of(s.index_q.data(), {rows, index_heads, index_dim}),
                        .weights = weights,
                        .chosen = chosen,
                        .step = backend_->step(),
                        .cache = index_pool_->layer(index)},
                       outputs);
    }
  }
  const std::span<const int32_t> row_lens = backend_->step().row_lens();
  const bool on_host = compute_->device().kind == DeviceKind::kCpu;
  for (int64_t r = 0; on_host && r < rows; ++r) {
    stats_.attended_keys += *chosen.lens.ptr<const int32_t>(r);
    stats_.visible_keys += row_lens[static_cast<size_t>(r)];
  }

  forms_->absorbed(x, StepRows::kAll, write, chosen);
}

void Decoder::dense_attention(const MlaRows& x, const KvRows& kv) {
  {
    const Timer timer(stats_.attention_seconds);
    backend_->write(x.layer, StepRows::kAll, kv);
  }
  if (form_ == PrefillForm::kExpanded) {
    forms_->expanded(x);
    forms_->absorbed(x, StepRows::kDecode, AlreadyWritten{}, AttendAll{});
  } else {
    forms_->absorbed(x, StepRows::kAll, AlreadyWritten{}, AttendAll{});
  }
}

void Decoder::mlp(const Layer& layer, int64_t rows) {
  const ModelConfig& c = config_;
  Scratch& s = *scratch_;
  const int64_t dim = c.hidden_size;
  if (!layer.config.moe) return compute_->run_mlp(layer.mlp, s.normed.data(), rows, s.branch.data());
  if (c.n_shared_experts > 0) compute_->run_mlp(layer.mlp, s.normed.data(), rows, s.branch.data());
  else compute_->clear(s.branch.data(), rows * dim);
  const RouterParams params = router_params(c);
  compute_->linear(s.normed.data(), rows, layer.router, s.router_logits.room(rows * params.num_experts));
  compute_->run_experts(layer.experts, params, s.router_logits.data(), layer.router_bias, s.normed.data(), rows,
                        s.branch.data());
}

// ---- few rows -----------------------------------------------------------------------------------------------------

bool Decoder::runs_few(int64_t rows) const {
  return few_ != nullptr && rows <= FewRows::kMostRows &&
         (config_.is_dsa() || backend_->step().rows(StepRows::kPrefill).size() == 0);
}

float* Decoder::logits_few(const float* x, int64_t n, const float* norm) {
  const int64_t dim = config_.hidden_size, vocab = config_.vocab_size;
  float* logits = scratch_->logits.room(n * vocab);
  FewRowsProducts p;
  p.in = {.x = x, .stride = dim, .rows = n, .norm = norm, .eps = static_cast<float>(config_.rms_norm_eps)};
  p.products[0] = {.w = lm_head_.data, .n = vocab, .k = dim, .y = logits, .y_stride = vocab};
  p.count = 1;
  few_->run(p);
  return logits;
}

/// run_layer in 13 launches (docs/kernels/decoder_cuda.md): the norms, rotations, roundings and sums of run_layer are
/// in the products before or behind them.
void Decoder::run_layer_few(int32_t index, const Layer& layer, int64_t rows, const Choice& choice,
                            const ForwardOutputs& outputs) {
  const ModelConfig& c = config_;
  Scratch& s = *scratch_;
  const int64_t dim = c.hidden_size, heads = c.num_attention_heads, nope = c.qk_nope_head_dim, v_dim = c.v_head_dim;
  const int64_t latent_dim = c.kv_lora_rank, rope_dim = c.qk_rope_head_dim, row_dim = latent_dim + rope_dim;
  const int64_t index_heads = c.index_n_heads, index_dim = c.index_head_dim;
  const bool indexer = layer.config.indexer, selects = indexer && !choice.reused;
  const auto eps = static_cast<float>(c.rms_norm_eps);
  const auto latent_eps = static_cast<float>(ModelConfig::kLatentNormEps);
  float* x = s.x.data();
  const FewRowsInput hidden{.x = x, .stride = dim, .rows = rows, .norm = layer.input_norm, .eps = eps};
  const FewRowsRope rope{.positions = backend_->step_tensors().positions.ptr<const int32_t>(),
                         .table = rope_values_,
                         .num_positions = rope_positions_,
                         .rope_dim = static_cast<int32_t>(rope_dim)};

  // What reads the hidden state.
  FewRowsProducts first;
  first.in = hidden;
  const auto from_hidden = [&](const WeightView& w, Array& y, float factor) {
    first.products[first.count++] = {
        .w = w.data, .n = w.rows, .k = w.cols, .y = y.room(rows * w.rows), .y_stride = w.rows, .factor = factor};
  };
  if (c.q_lora_rank > 0) from_hidden(layer.q_a, s.q_latent, 1.0f);
  from_hidden(layer.kv_a, s.kv, 1.0f);
  if (indexer) from_hidden(layer.index_k, s.index_k, 1.0f);
  if (selects)
    from_hidden(layer.index_weights, s.index_weights,
                static_cast<float>(c.index_scale() / std::sqrt(static_cast<double>(index_heads))));
  few_->run(first);

  // Queries, rotated as they leave, and beside them the rows of the caches: in bf16 where the caches are no wider,
  // which for latents is the rounding that the write would do, and for index keys what a model in bf16 quantises.
  FewRowsProducts second;
  second.in = c.q_lora_rank > 0 ? FewRowsInput{.x = s.q_latent.data(),
                                               .stride = c.q_lora_rank,
                                               .rows = rows,
                                               .norm = layer.q_norm,
                                               .eps = latent_eps}
                                : hidden;
  auto* q_nope = s.nope16.room<Bf16>(rows * heads * nope);
  auto* q = s.q16.room<Bf16>(rows * heads * row_dim);
  second.products[second.count++] = {.w = layer.q_b.data,
                                     .n = layer.q_b.rows,
                                     .k = layer.q_b.cols,
                                     .y = q_nope,
                                     .y_stride = heads * nope,
                                     .y_bf16 = true,
                                     .head_dim = static_cast<int32_t>(nope + rope_dim),
                                     .rope_first = static_cast<int32_t>(nope),
                                     .rope_dim = static_cast<int32_t>(rope_dim),
                                     .y_head = nope,
                                     .y_rope = q + latent_dim,
                                     .rope_stride = heads * row_dim,
                                     .rope_head = row_dim};
  auto* index_q = selects ? s.index_q16.room<Bf16>(rows * index_heads * index_dim) : nullptr;
  if (selects)
    second.products[second.count++] = {.w = layer.index_q.data,
                                       .n = layer.index_q.rows,
                                       .k = layer.index_q.cols,
                                       .y = index_q,
                                       .y_stride = index_heads * index_dim,
                                       .y_bf16 = true,
                                       .head_dim = static_cast<int32_t>(index_dim),
                                       .rope_dim = static_cast<int32_t>(rope_dim),
                                       .pairing = c.index_rope_pairing,
                                       .y_head = index_dim,
                                       .y_rope = index_q,
                                       .rope_stride = index_heads * index_dim,
                                       .rope_head = index_dim};
  second.rope = rope;
  second.kv = {.kv = s.kv.data(),
               .norm = layer.kv_norm,
               .latent_bf16 = options_.latent_format == LatentFormat::kBf16,
               .latent = s.latent.room(rows * latent_dim),
               .rope = s.rope.room(rows * rope_dim),
               .latent_dim = static_cast<int32_t>(latent_dim),
               .eps = latent_eps};
  if (indexer) {
    second.kv.index_k = s.index_k.data();
    second.kv.index_norm = layer.index_norm_weight;
    second.kv.index_bias = layer.index_norm_bias;
    second.kv.index_bf16 = options_.index_format != IndexKFormat::kF32;
    second.kv.index_out = s.index_k_out.room(rows * index_dim);
    second.kv.index_dim = static_cast<int32_t>(index_dim);
    second.kv.index_pairing = c.index_rope_pairing;
  }
  few_->run(second);

  // Attention.
  const auto typed_view = [&](void* data, bool bf16, std::initializer_list<int64_t> shape) {
    return view(data, bf16 ? DType::kBf16 : DType::kF32, shape, compute_->device());
  };
  const auto bf16_view = [&](void* data, std::initializer_list<int64_t> shape) {
    return typed_view(data, true, shape);
  };
  KvRows kv{.latent = typed_view(second.kv.latent, second.kv.latent_bf16, {rows, latent_dim}),
            .rope = typed_view(second.kv.rope, second.kv.latent_bf16, {rows, rope_dim}),
            .index_k = {}};
  StepWrite write = kv;
  if (indexer) {
    kv.index_k = typed_view(second.kv.index_out, second.kv.index_bf16, {rows, index_dim});
    write = AlreadyWritten{};
  }
  if (selects) {
    const TensorView weights = view_of(s.index_weights.data(), {rows, index_heads});
    backend_->select({.layer = index,
                      .rows = StepRows::kAll,
                      .q = bf16_view(index_q, {rows, index_heads, index_dim}),
                      .weights = weights,
                      .write = kv,
                      .out = choice.selection});
    if (outputs.on_selection) {
      float* wide = s.index_q.room(rows * index_heads * index_dim);
      compute_->from_bf16(index_q, rows * index_heads * index_dim, wide);
      report_selection({.layer = index,
                        .q = view_of(wide, {rows, index_heads, index_dim}),
                        .weights = weights,
                        .chosen = choice.selection,
                        .step = backend_->step(),
                        .cache = index_pool_->layer(index)},
                       outputs);
    }
  } else if (indexer || !c.is_dsa()) {
    backend_->write(index, StepRows::kAll, kv);
    write = AlreadyWritten{};
  }
  FewRowsProducts absorb;
  absorb.in = {.x = q_nope, .bf16 = true, .stride = heads * nope, .rows = rows};
  absorb.products[absorb.count++] = {.w = layer.absorb,
                                     .n = latent_dim,
                                     .k = nope,
                                     .repeats = heads,
                                     .w_step = nope * latent_dim,
                                     .x_step = nope,
                                     .y_step = row_dim,
                                     .y = q,
                                     .y_stride = heads * row_dim,
                                     .y_bf16 = true};
  few_->run(absorb);
  auto* attended = s.attended16.room<Bf16>(rows * heads * latent_dim);
  AttendCall call{.layer = index,
                  .rows = StepRows::kAll,
                  .q = bf16_view(q, {rows, heads, row_dim}),
                  .write = write,
                  .selection = AttendAll{},
                  .out = bf16_view(attended, {rows, heads, latent_dim}),
                  .lse = {}};
  if (c.is_dsa()) call.selection = choice.selection;
  backend_->attend(call);
  FewRowsProducts values;
  auto* values_out = s.heads16.room<Bf16>(rows * heads * v_dim);
  values.in = {.x = attended, .bf16 = true, .stride = heads * latent_dim, .rows = rows};
  values.products[values.count++] = {.w = static_cast<const Bf16*>(layer.kv_b.data) + nope * latent_dim,
                                     .n = v_dim,
                                     .k = latent_dim,
                                     .repeats = heads,
                                     .w_step = (nope + v_dim) * latent_dim,
                                     .x_step = latent_dim,
                                     .y_step = v_dim,
                                     .y = values_out,
                                     .y_stride = heads * v_dim,
                                     .y_bf16 = true};
  few_->run(values);
  FewRowsProducts out;
  out.in = {.x = values_out, .bf16 = true, .stride = heads * v_dim, .rows = rows};
  out.products[out.count++] = {.w = layer.o.data, .n = dim, .k = heads * v_dim, .y = x, .y_stride = dim, .add = true};
  few_->run(out);

  FewRowsMlp mlp{.x = x, .rows = rows, .norm = layer.post_norm, .eps = eps, .shared = layer.mlp};
  if (layer.config.moe) {
    mlp.experts = layer.experts;
    mlp.router = router_params(c);
    mlp.router_weight = static_cast<const float*>(layer.router.data);
    mlp.router_bias = layer.router_bias;
  }
  few_->run(mlp);
}

}  // namespace v0
}  // namespace gannet
