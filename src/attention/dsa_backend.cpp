// "dsa": DeepSeek sparse attention. An indexer chooses the keys of each row, and every row, of prefill and decode
// alike, is attended in the absorbed form over its list. Dense attention stays reachable, by type, for steps in which
// every row sees at most index_topk keys, where it is the same function.
#include <algorithm>

#include "attention/backends.h"
#include "attention/common_backend.h"

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

class DsaBackend final : public CommonBackend {
 public:
  DsaBackend(const Context& context, const AttentionConfig& config, MemoryResource& memory)
      : CommonBackend("dsa", attention::capabilities(), context, config, memory) {}

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
    op.cache = *core_.open_layer(call.layer).index;
    op.q = core_.rotated_query(call.q, op.cache);
    op.hadamard = op.cache.hadamard;
    op.weights = call.weights;
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

 private:
  /// Dense is sparse only while no row has more keys than a selection holds. Known from the host's lengths, of the full
  /// context, prefix included (spec 3.11, 6.36).
  void check_dense(const char* call) const override {
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
};

}  // namespace

std::unique_ptr<AttentionBackend> make_dsa(const Context& context, const AttentionConfig& config,
                                           MemoryResource& memory) {
  return std::make_unique<DsaBackend>(context, config, memory);
}

}  // namespace attention
}  // namespace v0
}  // namespace gannet
