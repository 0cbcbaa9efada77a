// Plans and runs of the operations.
#include <optional>
#include <string>
#include <vector>

#include "capi/capi.h"
#include "gannet/hadamard.h"
#include "gannet/index_sharing.h"
#include "gannet/kv_heads.h"

namespace gannet {
inline namespace v0 {
namespace capi {
namespace {

/// X(kind, arguments in C, arguments in C++)
#define GANNET_FOR_EACH_C_OP(X)                                     \
  X(GANNET_OP_LATENT_WRITE, gannet_latent_write, LatentWrite)       \
  X(GANNET_OP_LATENT_GATHER, gannet_latent_gather, LatentGather)    \
  X(GANNET_OP_INDEX_K_WRITE, gannet_index_k_write, IndexKWrite)     \
  X(GANNET_OP_INDEX_K_GATHER, gannet_index_k_gather, IndexKGather)  \
  X(GANNET_OP_ROPE, gannet_rope, Rope)                              \
  X(GANNET_OP_RAGGED_PREFILL, gannet_ragged_prefill, RaggedPrefill) \
  X(GANNET_OP_MERGE_STATE, gannet_merge_state, MergeState)          \
  X(GANNET_OP_MLA_DECODE, gannet_mla_decode, MlaDecode)             \
  X(GANNET_OP_INDEX_LOGITS, gannet_index_logits, IndexLogits)       \
  X(GANNET_OP_TOPK, gannet_topk, TopK)                              \
  X(GANNET_OP_INDEX_SELECT, gannet_index_select, IndexSelect)       \
  X(GANNET_OP_SPARSE_ATTENTION, gannet_sparse_attention, SparseAttention)

/// Takes fields of C to those of the same name in C++, under the name of the operation.
template <class Params>
struct Take {
  Params& p;
  static constexpr const char* kName = Params::kName;
  void operator()(const char* name, TensorView& to, const gannet_tensor& from) const {
    to = tensor_of(kName, name, from);
  }
  void cache(const gannet_latent_cache* from) const { p.cache = latent_cache_of(kName, "cache", from); }
  void cache(const gannet_index_cache* from) const { p.cache = index_cache_of(kName, "cache", from); }
  void paged_rows(const gannet_page_table* pages, const gannet_query_rows& rows) const {
    p.pages = pages_of(kName, pages);
    p.rows.seq_lens = tensor_of(kName, "seq_lens", rows.seq_lens);
    p.rows.cu_q_lens = tensor_of(kName, "cu_q_lens", rows.cu_q_lens);
    p.rows.q_len = rows.q_len;
    p.rows.bound = enum_of(kName, "rows.bound", rows.bound, RowBound::kUniformBlock);
  }
};

#define GANNET_TAKE(field) take(#field, p.field, c.field)

void convert(const gannet_latent_write& c, LatentWrite& p, const Take<LatentWrite>& take) {
  GANNET_TAKE(latent);
  GANNET_TAKE(rope);
  GANNET_TAKE(slots);
  take.cache(c.cache);
}

void convert(const gannet_latent_gather& c, LatentGather& p, const Take<LatentGather>& take) {
  GANNET_TAKE(slots);
  take.cache(c.cache);
  GANNET_TAKE(latent);
  GANNET_TAKE(rope);
}

void convert(const gannet_index_k_write& c, IndexKWrite& p, const Take<IndexKWrite>& take) {
  GANNET_TAKE(k);
  GANNET_TAKE(slots);
  take.cache(c.cache);
  p.hadamard = flag_of(take.kName, "hadamard", c.hadamard);
}

void convert(const gannet_index_k_gather& c, IndexKGather& p, const Take<IndexKGather>& take) {
  GANNET_TAKE(slots);
  take.cache(c.cache);
  GANNET_TAKE(k);
  p.hadamard = flag_of(take.kName, "hadamard", c.hadamard);
}

void convert(const gannet_rope& c, Rope& p, const Take<Rope>& take) {
  GANNET_TAKE(x);
  GANNET_TAKE(positions);
  GANNET_TAKE(cos_sin);
  p.offset = c.offset;
  p.pairing = enum_of(take.kName, "pairing", c.pairing, RopePairing::kHalfSplit);
}

void convert(const gannet_ragged_prefill& c, RaggedPrefill& p, const Take<RaggedPrefill>& take) {
  GANNET_TAKE(q);
  GANNET_TAKE(k);
  GANNET_TAKE(k_rope);
  GANNET_TAKE(v);
  GANNET_TAKE(cu_q_lens);
  GANNET_TAKE(cu_kv_lens);
  GANNET_TAKE(out);
  GANNET_TAKE(lse);
  p.softmax_scale = c.softmax_scale;
  p.causal = flag_of(take.kName, "causal", c.causal);
}

void convert(const gannet_merge_state& c, MergeState& p, const Take<MergeState>& take) {
  GANNET_TAKE(out_a);
  GANNET_TAKE(lse_a);
  GANNET_TAKE(out_b);
  GANNET_TAKE(lse_b);
  GANNET_TAKE(count_a);
  GANNET_TAKE(count_b);
  p.base = enum_of(take.kName, "base", c.base, LseBase::kTwo);
}

void convert(const gannet_mla_decode& c, MlaDecode& p, const Take<MlaDecode>& take) {
  GANNET_TAKE(q);
  take.cache(c.cache);
  take.paged_rows(c.pages, c.rows);
  GANNET_TAKE(attn_sink);
  GANNET_TAKE(out);
  GANNET_TAKE(lse);
  GANNET_TAKE(max_logits);
  p.softmax_scale = c.softmax_scale;
  if (c.q_scale != 0.0f) p.q_scale = c.q_scale;
}

void convert(const gannet_index_logits& c, IndexLogits& p, const Take<IndexLogits>& take) {
  GANNET_TAKE(q);
  GANNET_TAKE(weights);
  take.cache(c.cache);
  take.paged_rows(c.pages, c.rows);
  GANNET_TAKE(logits);
  p.hadamard = flag_of(take.kName, "hadamard", c.hadamard);
}

void convert(const gannet_topk& c, TopK& p, const Take<TopK>& take) {
  GANNET_TAKE(logits);
  GANNET_TAKE(lens);
  GANNET_TAKE(positions);
  GANNET_TAKE(counts);
}

void convert(const gannet_index_select& c, IndexSelect& p, const Take<IndexSelect>& take) {
  GANNET_TAKE(q);
  GANNET_TAKE(weights);
  take.cache(c.cache);
  take.paged_rows(c.pages, c.rows);
  p.max_seq_len = c.max_seq_len;
  GANNET_TAKE(topk_slots);
  GANNET_TAKE(topk_lens);
  GANNET_TAKE(topk_positions);
  p.hadamard = flag_of(take.kName, "hadamard", c.hadamard);
}

void convert(const gannet_sparse_attention& c, SparseAttention& p, const Take<SparseAttention>& take) {
  GANNET_TAKE(q);
  take.cache(c.cache);
  GANNET_TAKE(topk_slots);
  GANNET_TAKE(topk_lens);
  GANNET_TAKE(attn_sink);
  GANNET_TAKE(out);
  GANNET_TAKE(lse);
  GANNET_TAKE(max_logits);
  p.softmax_scale = c.softmax_scale;
  if (c.q_scale != 0.0f) p.q_scale = c.q_scale;
}

#undef GANNET_TAKE

/// Calls f with the arguments in C++, of whatever kind they are.
template <class F>
void visit(const char* function, const gannet_op* args, F&& f) {
  switch (given(function, "args", args)->kind) {
#define GANNET_CASE(KIND, CArgs, Params)                                               \
  case KIND: {                                                                         \
    const CArgs c = read(Params::kName, "args", reinterpret_cast<const CArgs*>(args)); \
    Params p;                                                                          \
    convert(c, p, Take<Params>{p});                                                    \
    f(p);                                                                              \
    return;                                                                            \
  }
    GANNET_FOR_EACH_C_OP(GANNET_CASE)
#undef GANNET_CASE
    default:
      fail_argument(function, "args.kind is {}; accepted: {} to {}", args->kind, +GANNET_OP_LATENT_WRITE,
                    +GANNET_OP_SPARSE_ATTENTION);
  }
}

}  // namespace
}  // namespace capi
}  // namespace v0
}  // namespace gannet

using namespace gannet;
using namespace gannet::capi;

struct gannet_plan {
  virtual ~gannet_plan() = default;
  virtual void run(const gannet_op* args, std::span<std::byte> workspace, void* stream) const = 0;
  const char* impl = nullptr;
  size_t workspace_bytes = 0;
};

namespace {

template <class Params>
struct PlanOf final : gannet_plan {
  PlanOf(std::shared_ptr<ContextState> state, const Params& p, const PlanOptions& options)
      : context(std::move(state)), plan(context->context, p, options) {
    impl = plan.impl();
    workspace_bytes = plan.workspace_bytes();
  }
  void run(const gannet_op* args, std::span<std::byte> workspace, void* stream) const override {
    visit("gannet_plan_run", args, [&]<class Given>(const Given& p) {
      if constexpr (std::is_same_v<Given, Params>) plan.run(p, workspace, context->stream(stream));
      else
        fail_argument("gannet_plan_run", "args.kind is {} ({}); planned was {}", args->kind, Given::kName,
                      Params::kName);
    });
  }
  std::shared_ptr<ContextState> context;
  OpPlan<Params> plan;
};

}  // namespace

gannet_status gannet_plan_create(gannet_context* context, const gannet_op* args, const gannet_plan_options* options,
                                 gannet_plan** out) {
  constexpr const char* kName = "gannet_plan_create";
  return guard(kName, [&] {
    *given(kName, "out", out) = nullptr;
    given(kName, "context", context);
    const PlanOptions o = plan_options_of(kName, options);
    visit(kName, args, [&]<class Params>(const Params& p) { *out = new PlanOf<Params>(context->state, p, o); });
  });
}

void gannet_plan_free(gannet_plan** plan) { free_handle(plan); }

const char* gannet_plan_impl(const gannet_plan* plan) { return plan == nullptr ? nullptr : plan->impl; }

size_t gannet_plan_workspace_bytes(const gannet_plan* plan) { return plan == nullptr ? 0 : plan->workspace_bytes; }

gannet_status gannet_plan_run(const gannet_plan* plan, const gannet_op* args, void* workspace, size_t workspace_bytes,
                              void* stream) {
  constexpr const char* kName = "gannet_plan_run";
  return guard(kName, [&] {
    given(kName, "plan", plan);
    if (workspace_bytes > 0) given(kName, "workspace", workspace);
    plan->run(args, {static_cast<std::byte*>(workspace), workspace_bytes}, stream);
  });
}

gannet_status gannet_run_once(gannet_context* context, const gannet_op* args, const gannet_plan_options* options) {
  constexpr const char* kName = "gannet_run_once";
  return guard(kName, [&] {
    given(kName, "context", context);
    const PlanOptions o = plan_options_of(kName, options);
    visit(kName, args, [&](const auto& p) { run_once(context->state->context, p, o); });
  });
}

gannet_status gannet_list_implementations(gannet_visit_implementation visit, void* user) {
  constexpr const char* kName = "gannet_list_implementations";
  return guard(kName, [&] {
    given(kName, "visit", reinterpret_cast<const void*>(visit));
    for (const ImplInfo& i : list_all_implementations()) {
      const gannet_implementation info = {
          sizeof(info), i.op.c_str(), i.name.c_str(), static_cast<int32_t>(i.device), i.runs_here, i.batch_invariant};
      visit(user, &info);
    }
  });
}

// ---- beside the operations ----------------------------------------------------------------------------------------

gannet_status gannet_kv_head_of(const gannet_latent_cache* pool, int32_t num_kv_heads, int32_t kv_head,
                                gannet_latent_cache* out) {
  constexpr const char* kName = "gannet_kv_head_of";
  return guard(kName, [&] {
    write_struct(kName, "out", to_c(kv_head_of(latent_cache_of(kName, "pool", pool), num_kv_heads, kv_head)), out);
  });
}

gannet_status gannet_head_group_of(const gannet_tensor* t, int32_t num_groups, int32_t group, gannet_tensor* out) {
  constexpr const char* kName = "gannet_head_group_of";
  return guard(kName, [&] {
    *given(kName, "out", out) = to_c(head_group_of(tensor_of(kName, "t", *given(kName, "t", t)), num_groups, group));
  });
}

gannet_status gannet_hadamard(const gannet_context* context, const gannet_tensor* from, const gannet_tensor* to,
                              void* stream) {
  constexpr const char* kName = "gannet_hadamard";
  return guard(kName, [&] {
    const ContextState& state = *given(kName, "context", context)->state;
    hadamard(state.context, tensor_of(kName, "from", *given(kName, "from", from)),
             tensor_of(kName, "to", *given(kName, "to", to)), state.stream(stream));
  });
}

gannet_status gannet_selection_sources(const gannet_index_sharing* sharing, int32_t* sources) {
  constexpr const char* kName = "gannet_selection_sources";
  return guard(kName, [&] {
    const gannet_index_sharing c = read(kName, "sharing", sharing);
    const auto words = [&](const char* name, const char* const* list,
                           int64_t count) -> std::optional<std::vector<std::string>> {
      if (list == nullptr) return std::nullopt;
      std::vector<std::string> all;
      for (const char* word : span_of(kName, name, list, count)) all.emplace_back(given(kName, name, word));
      return all;
    };
    IndexSharing s;
    s.num_hidden_layers = c.num_hidden_layers;
    s.indexer_types = words("indexer_types", c.indexer_types, c.num_indexer_types);
    s.index_topk_pattern = words("index_topk_pattern", c.index_topk_pattern, c.num_index_topk_pattern);
    s.index_topk_freq = c.index_topk_freq;
    if (flag_of(kName, "has_index_skip_topk_offset", c.has_index_skip_topk_offset))
      s.index_skip_topk_offset = c.index_skip_topk_offset;
    const std::vector<int32_t> all = selection_sources(s);
    if (!all.empty()) std::copy(all.begin(), all.end(), given(kName, "sources", sources));
  });
}
