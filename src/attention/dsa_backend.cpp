// "dsa": DeepSeek sparse attention. An indexer chooses the keys of each row, and every row, of prefill and decode
// alike, is attended in the absorbed form over its list. Dense attention stays reachable, by type, for steps in which
// every row sees at most index_topk keys, where it is the same function.
#include <algorithm>

#include "attention/backends.h"
#include "attention/dense_delegate.h"

namespace gannet {
inline namespace v0 {
namespace attention {
namespace {

AttentionCapabilities capabilities() {
  // kE4m3PerToken is refused: its rows carry a scale each, which the sparse kernels do not read (spec 3.8, 4.1).
  return {.dense_prefill = true,
          .attend_all = true,
          .attend_sparse = true,
          .page_sizes = {64},
          .latent_formats = {LatentFormat::kF32, LatentFormat::kBf16, LatentFormat::kE4m3, LatentFormat::kPacked656}};
}

class DsaBackend final : public AttentionBackend {
 public:
  DsaBackend(const Context& context, const AttentionConfig& config, MemoryResource& memory)
      : core_("dsa", attention::capabilities(), context, config, memory), dense_(core_) {
    constexpr const char* kCall = "config";
    if (config.q_lora_rank < 1)
      core_.refuse(kCall, "q_lora_rank is {}; accepted: 1 and more (the indexer reads the q latent)",
                   config.q_lora_rank);
    const IndexerConfig& i = config.indexer;
    if (i.num_heads < 1) core_.refuse(kCall, "indexer.num_heads is {}; accepted: 1 and more", i.num_heads);
    if (i.topk < 1) core_.refuse(kCall, "indexer.topk is {}; accepted: 1 and more", i.topk);
    if (i.head_dim < config.geometry.rope_dim)
      core_.refuse(kCall, "indexer.head_dim is {}; accepted: geometry.rope_dim, {}, and more", i.head_dim,
                   config.geometry.rope_dim);
  }

  const char* name() const noexcept override { return core_.name().c_str(); }
  const AttentionCapabilities& capabilities() const noexcept override { return core_.capabilities(); }
  const AttentionConfig& config() const noexcept override { return core_.config(); }
  void bind(std::span<const LayerCaches> layers) override { core_.bind(layers); }
  void set_stream(Stream stream) override { core_.set_stream(stream); }
  void set_layer_hooks(LayerHooks hooks) override { core_.set_layer_hooks(std::move(hooks)); }
  void prepare(const BatchStep& step) override {
    dense_.on_prepare();
    core_.prepare(step);
  }
  void capture(const CaptureShape& shape) override {
    dense_.on_prepare();
    core_.capture(shape);
  }
  void refresh(const BatchStep& step, int32_t num_requests) override {
    dense_.on_prepare();
    core_.refresh(step, num_requests);
  }
  void advance(const DraftAdvance& advance) override {
    dense_.on_prepare();
    core_.advance(advance);
  }
  const StepPlan& step() const override { return core_.step("step"); }
  StepTensors step_tensors() const override { return core_.step_tensors(); }
  void write(int32_t layer, StepRows rows, const KvRows& kv) override { core_.write("write", layer, rows, kv); }

  void select(const SelectCall& call) override {
    constexpr const char* kCall = "select";
    const StepPlan& step = core_.active_step(kCall);
    const AttentionConfig& c = core_.config();
    const LayerCaches& caches = core_.layer(kCall, call.layer);
    if (!caches.index)
      core_.refuse(kCall, "layer {} has no index cache; accepted: the selection of an earlier layer that has one",
                   call.layer);
    const StepRows part = core_.effective(kCall, call.rows);
    const int64_t rows = step.rows(part).size();
    if (rows > 0) {
      core_.check_float(kCall, "q", call.q, {rows, c.indexer.num_heads, c.indexer.head_dim});
      core_.check_typed(kCall, "weights", call.weights, DType::kF32, {rows, c.indexer.num_heads});
      check_selection(kCall, call.out, rows);
    }
    core_.apply(kCall, call.layer, part, call.write);
    if (rows == 0) return;
    IndexSelect op;
    op.q = call.q;
    op.weights = call.weights;
    op.cache = *core_.open_layer(call.layer).index;
    op.pages = core_.pages(part);
    op.rows = core_.query_rows(part);
    // The reach of the plan's table, which grows by doubling: the longest row itself would be a new shape each step.
    op.max_seq_len = std::min(op.pages.pages.shape[1] * step.page_size(), c.max_context_len);
    op.topk_slots = call.out.slots;
    op.topk_lens = call.out.lens;
    op.topk_positions = call.out.positions;
    core_.run(op);
  }

  void attend(const AttendCall& call) override {
    constexpr const char* kCall = "attend";
    if (std::holds_alternative<AttendAll>(call.selection)) {
      check_dense(kCall);
      if (core_.begin_attend(call)) dense_.attend_all(call);
      return;
    }
    const TopKSelection* selection = std::get_if<TopKSelection>(&call.selection);
    if (selection == nullptr) core_.refuse(kCall, "selection is not given; accepted: TopKSelection or AttendAll");
    const LayerCaches& caches = (core_.active_step(kCall), core_.layer(kCall, call.layer));
    if (caches.index && std::holds_alternative<KvRows>(call.write))
      core_.refuse(kCall, "write has the rows of layer {}, which has an index cache: they are written before select",
                   call.layer);
    const int64_t rows = core_.active_step(kCall).rows(call.rows).size();
    if (rows > 0) check_selection(kCall, *selection, rows);
    if (!core_.begin_attend(call)) return;
    SparseAttention op;
    op.q = call.q;
    op.cache = core_.open_layer(call.layer).latent;
    op.topk_slots = selection->slots;
    op.topk_lens = selection->lens;
    op.out = call.out;
    op.lse = call.lse;
    op.softmax_scale = core_.config().softmax_scale;
    core_.run(op);
  }

  void dense_prefill(const DensePrefillCall& call) override {
    check_dense("dense_prefill");
    dense_.dense_prefill(call);
  }
  void prefill_new_tokens(const DensePrefillCall& call) override {
    check_dense("prefill_new_tokens");
    dense_.prefill_new_tokens(call);
  }
  void gather_prefix(int32_t layer, int64_t chunk, const TensorView& latent, const TensorView& rope) override {
    dense_.gather_prefix(layer, chunk, latent, rope);
  }
  void prefill_prefix(const PrefixPassCall& call) override {
    check_dense("prefill_prefix");
    dense_.prefill_prefix(call);
  }

  std::vector<std::pair<std::string, std::string>> implementations() const override { return core_.implementations(); }

 private:
  /// Dense is sparse only while no row has more keys than a selection holds. Known from the host's lengths, of the full
  /// context, prefix included (spec 3.11, 6.36).
  void check_dense(const char* call) const {
    const int64_t longest = core_.active_step(call).max_row_len();
    if (longest > core_.config().indexer.topk)
      core_.refuse(call,
                   "dense attention is asked for, and a row of the step sees {} tokens; accepted: at most index_topk, "
                   "{} (else a TopKSelection)",
                   longest, core_.config().indexer.topk);
  }

  void check_selection(const char* call, const TopKSelection& s, int64_t rows) const {
    const int64_t k = core_.config().indexer.topk;
    core_.check_typed(call, "selection.slots", s.slots, DType::kI32, {rows, k});
    core_.check_typed(call, "selection.lens", s.lens, DType::kI32, {rows});
    if (s.positions.given()) core_.check_typed(call, "selection.positions", s.positions, DType::kI32, {rows, k});
  }

  BackendCore core_;
  DenseDelegate dense_;
};

}  // namespace

std::unique_ptr<AttentionBackend> make_dsa(const Context& context, const AttentionConfig& config,
                                           MemoryResource& memory) {
  return std::make_unique<DsaBackend>(context, config, memory);
}

}  // namespace attention
}  // namespace v0
}  // namespace gannet
