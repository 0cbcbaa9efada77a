// The decoder of the supported families over a checkpoint's mapped weights: embedding, norms, MLA with or without an
// indexer, dense and mixture-of-experts MLPs, lm_head. Attention runs through the public backends; activations are
// fp32.
//
//   Decoder decoder(context, checkpoint, options);
//   decoder.forward(step, ids, {.logit_rows = rows, .logits = out});
//
// Drafts. With DecoderOptions::draft the multi-token-prediction layer (MTP: the layer behind the others) has caches of
// its own, and after forward() it guesses the token behind the next one of every row:
//   decoder.draft(next_ids, {...});                        // the same rows
//   decoder.draft_next({.steps = 1, ...}, rows, ids, {...});  // one row a request, as often as wanted
// A model may announce such a layer and have no tensors for it, as published ones do: it loads, and only
// DecoderOptions::draft is refused.
//
// Forms of attention. DSA layers always run the absorbed form over what their indexer chose, prefill and decode alike.
// Dense MLA layers run the absorbed form for decode rows. Prefill rows of a step take the form that costs less by the
// figures of model/prefill_form.h, or the one that DecoderOptions::prefill_form names: expanded (prefixes in chunks) or
// absorbed. On a GPU they are always expanded; in the invariant mode they are absorbed, since the two differ in
// rounding and a choice by cost depends on how a prompt is cut.
//
// Errors: Error(kCorruptFile) for tensors that are missing or of another dtype or shape; what the backend refuses.
// Thread safety: used by one thread at a time; spreads its work over the context's executor.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gannet/attention.h"
#include "gannet/kv_pool.h"
#include "model/checkpoint.h"
#include "model/compute.h"
#include "model/few_rows.h"
#include "model/linear.h"
#include "model/mla_forms.h"
#include "model/moe.h"
#include "model/prefill_form.h"
#include "model/rope_table.h"

namespace gannet {
inline namespace v0 {

struct DecoderOptions {
  std::string backend = {};  ///< name in the attention registry; empty: the architecture's default
  std::string impl = {};     ///< implementation to force for every operation
  LatentFormat latent_format = LatentFormat::kBf16;
  float latent_scale = 0.0f;  ///< LatentFormat::kE4m3 only
  IndexKFormat index_format = IndexKFormat::kE4m3;
  ScaleFormat index_scale_format = ScaleFormat::kFp32;
  bool index_hadamard = false;  ///< keep index keys rotated (gannet/hadamard.h)
  int32_t page_size = 64;
  int64_t num_pages = 0;                 ///< of the pools, page 0 included
  int64_t max_context_len = 0;           ///< tokens; 0: the checkpoint's max_position_embeddings
  int64_t prefix_chunk_capacity = 2048;  ///< dense prefill: prefix tokens expanded at a time, H*(N+P+V) values each
  QueryPrecision query = QueryPrecision::kF32;
  PrefillForm prefill_form = PrefillForm::kAuto;        ///< of dense layers; one of those that can be had
  Device device{};                                      ///< where caches, weights and everything that is computed lie
  ComputePrecision precision = ComputePrecision::kF32;  ///< of projections on a GPU
  bool invariant = false;  ///< rows' bits do not depend on chunks, batch neighbours or threads; on the CPU only
  bool draft = false;      ///< run the MTP layer; refused where the checkpoint has none
  /// Decode steps go through plans that are captured once per (requests, rows a request) and refreshed in place. The
  /// bits are the same either way.
  bool persistent_plans = true;
};

/// Bytes of cache that one token takes, over all layers, the MTP layer among them for drafts.
struct KvCost {
  int64_t latent_bytes = 0;
  int64_t index_bytes = 0;
  int64_t total() const noexcept { return latent_bytes + index_bytes; }
};
KvCost kv_cost(const ModelConfig& config, LatentFormat latent, IndexKFormat index, bool draft = false);

/// What a backend needs to know of a model.
AttentionConfig attention_config(const ModelConfig& config, const DecoderOptions& options);

/// The formats of the latent cache that the model's backend binds and its rows fit into.
std::vector<LatentFormat> latent_formats(const ModelConfig& config);

/// Counters over all steps so far.
struct DecoderStats {
  double attention_seconds = 0.0;  ///< in the backend: writing caches, selecting, attending; on the CPU only
  double total_seconds = 0.0;      ///< in forward()
  int64_t expanded_steps = 0;      ///< with prefill rows, in that form
  int64_t absorbed_steps = 0;      ///< with prefill rows, in that form
  int64_t attended_keys = 0;       ///< keys that rows of sparse layers attended to; on the CPU only
  int64_t visible_keys = 0;        ///< keys that they could have
};

/// What an indexer chose for the rows of a step. Views are valid during the call, and in host memory: copies where the
/// decoder runs on a GPU.
struct SelectionEvent {
  int32_t layer;
  TensorView q;          ///< fp32 [rows, Hi, Di], rotated
  TensorView weights;    ///< fp32 [rows, Hi]
  TopKSelection chosen;  ///< with positions
  const StepPlan& step;
  IndexCacheView cache;
};

struct ForwardOutputs {
  std::span<const int64_t> logit_rows = {};  ///< rows of the step whose logits are wanted
  float* logits = nullptr;                   ///< [logit_rows, vocab], in host memory; null: only `tokens`
  /// [logit_rows], in host memory, or null: the likeliest token of each row, the smaller id among equals, -1 where
  /// every logit is NaN. For decoders that pick tokens: four bytes a row come to the host rather than the logits.
  int32_t* tokens = nullptr;
  std::function<void(const SelectionEvent&)> on_selection = {};
};

class Decoder {
 public:
  /// `context` and `checkpoint` outlive the decoder. Memory of the pools is touched as pages are written.
  Decoder(const Context& context, Checkpoint& checkpoint, const DecoderOptions& options);
  ~Decoder();
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  /// One step of a batch; ids are those of its rows [num_rows], each below vocab_size.
  void forward(const BatchStep& step, std::span<const int32_t> ids, const ForwardOutputs& outputs);

  /// The MTP layer over the rows that forward() ran last, writing its caches: row i, whose token is followed by
  /// next_ids[i], gives logits of the token behind that one. Rows are those of the step, in `outputs` too.
  void draft(std::span<const int32_t> next_ids, const ForwardOutputs& outputs);
  /// A later step of the draft: one row for every request of the step, `advance` giving lengths. Request r goes on from
  /// row rows[r] of the draft step before (-1: padding) with the token ids[r], which that row guessed. Selects keys
  /// anew, unless the model says that MTP iterations share the first selection.
  void draft_next(const DraftAdvance& advance, std::span<const int32_t> rows, std::span<const int32_t> ids,
                  const ForwardOutputs& outputs);
  /// Why this checkpoint cannot draft; empty where it can.
  const std::string& draft_refusal() const noexcept { return draft_refusal_; }

  const ModelConfig& config() const noexcept { return config_; }
  const DecoderOptions& options() const noexcept { return options_; }
  int64_t num_pages() const noexcept { return options_.num_pages; }
  int64_t pool_bytes() const noexcept;
  const DecoderStats& stats() const noexcept { return stats_; }
  AttentionBackend& backend() noexcept { return *backend_; }
  /// What everything but attention is computed by.
  const Compute& compute() const noexcept { return *compute_; }
  /// Whether ForwardOutputs::tokens can be asked for.
  bool picks_tokens() const noexcept { return few_ != nullptr; }
  /// The caches, for whoever moves or inspects pages.
  LatentCacheView latent_cache(int32_t layer) const { return latent_pool_->layer(layer); }
  IndexCacheView index_cache(int32_t layer) const { return index_pool_->layer(layer); }  ///< layers with an indexer
  /// Tensors of the checkpoint that belong to no layer of this model and to no MTP layer: to be reported.
  const std::vector<std::string>& unknown_tensors() const noexcept { return unknown_; }

 private:
  struct Layer;
  struct Mtp;
  struct Scratch;
  /// Where a sparse layer's list of keys lies, and whether it is there already.
  struct Choice {
    TopKSelection selection;
    bool reused = false;
  };
  void load(Checkpoint& checkpoint);
  void load_mtp(Checkpoint& checkpoint);
  void make_backend();
  void prepare(const BatchStep& step);
  void choose_form();
  void capture(int32_t num_requests, int32_t q_len);
  void check_ids(const char* function, std::span<const int32_t> ids, int64_t rows,
                 std::span<const int64_t> logit_rows) const;
  void run_layer(int32_t index, const Layer& layer, int64_t rows, const Choice& choice, const ForwardOutputs& outputs);
  void run_mtp(std::span<const int32_t> ids, const float* hidden, const Choice& choice, const ForwardOutputs& outputs);
  void logits_of(const float* normed, const ForwardOutputs& outputs);
  void project_logits(const float* rows, int64_t n, const ForwardOutputs& outputs);
  void attention(int32_t index, const Layer& layer, int64_t rows, const Choice& choice, const ForwardOutputs& outputs);
  void sparse_attention(const MlaRows& x, const Layer& layer, int64_t rows, const KvRows& kv, const Choice& choice,
                        const ForwardOutputs& outputs);
  void dense_attention(const MlaRows& x, const KvRows& kv);
  void mlp(const Layer& layer, int64_t rows);
  /// Whether a step of that many rows runs through few_: launches fused, bf16, decode or sparse rows only.
  bool runs_few(int64_t rows) const;
  void run_layer_few(int32_t index, const Layer& layer, int64_t rows, const Choice& choice,
                     const ForwardOutputs& outputs);
  /// Logits of n packed rows of the residual stream into scratch of the device, behind the norm.
  float* logits_few(const float* x, int64_t n, const float* norm);
  void check_outputs(const char* function, const ForwardOutputs& outputs) const;
  /// From logits on the device to what the caller asked for.
  void deliver(const float* logits, int64_t n, float* to, int32_t* tokens);
  void rotate(float* x, int64_t rows, int64_t heads, int64_t width, int64_t row_stride, int32_t offset,
              RopePairing pairing);
  /// A packed view of fp32 values on the decoder's device.
  TensorView view_of(float* x, std::initializer_list<int64_t> shape) const {
    return view(x, DType::kF32, shape, compute_->device());
  }
  /// The layers, and the logits of every row of the step, of a decode step on a GPU: recorded once a shape.
  bool replay_decode(int64_t rows, const int32_t* ids, const ForwardOutputs& outputs);
  void run_layers(int64_t rows, const int32_t* ids, const ForwardOutputs& outputs);
  void report_selection(const SelectionEvent& event, const ForwardOutputs& outputs) const;
  void reserve_positions();

  const Context* context_;
  ModelConfig config_;
  DecoderOptions options_;
  std::unique_ptr<Compute> compute_;
  FewRows* few_ = nullptr;  // of compute_, where the model's widths and the options let it
  RopeTable rope_;
  const float* rope_values_ = nullptr;  // on the device, for rope_positions_
  int64_t rope_positions_ = 0;
  WeightView embed_, lm_head_;
  const float* final_norm_ = nullptr;
  std::vector<Layer> layers_;
  std::unique_ptr<Mtp> mtp_;  // null where the checkpoint has none that can be used: draft_refusal_ says why
  std::string draft_refusal_;
  std::vector<std::string> unknown_;
  std::unique_ptr<LatentPool> latent_pool_;
  std::unique_ptr<IndexKPool> index_pool_;
  std::unique_ptr<AttentionBackend> backend_;
  std::unique_ptr<MlaForms> forms_;
  OnlyForm only_form_;
  FormSetup form_setup_;
  PrefillForm form_ = PrefillForm::kAbsorbed;  // of the step's prefill rows
  std::unique_ptr<SelectionBuffer> selection_;
  // Of the MTP layer: the list of the last draft step, and room for the next one's.
  std::unique_ptr<SelectionBuffer> draft_selection_, next_draft_selection_;
  std::vector<std::pair<int32_t, int32_t>> captured_;  // (requests, rows a request)
  int64_t hidden_rows_ = 0;                            // rows whose hidden state forward() left
  int64_t draft_rows_ = 0;                             // rows whose hidden state the last draft step left
  std::unique_ptr<Scratch> scratch_;
  struct Recorded {
    std::unique_ptr<Compute::Recording> work;
    int64_t allocations = 0;  // of the device's memory when it was made
  };
  std::map<std::pair<int32_t, int32_t>, Recorded> recorded_;  // by (requests, rows a request)
  DecoderStats stats_;
};

}  // namespace v0
}  // namespace gannet
