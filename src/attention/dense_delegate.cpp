// Memory of a chunked prefill (spec 2.6), in elements of q's type, n the tokens of a chunk and T the new rows:
//   n * (R + P)      gathered rows
//   n * H * (N + V)  expanded keys and values
//   T * H * V        partial output, and T * H fp32 twice for the two LSEs
// With the default capacity of 32,768 tokens and DeepSeek-V3's 128 heads the second term is 2.1 GB in bf16: an engine
// with less room lowers prefix_chunk_capacity; the result changes by rounding only.
#include "attention/dense_delegate.h"

#include "core/checked.h"

namespace gannet {
inline namespace v0 {
namespace attention {
namespace {

/// Cuts views out of one buffer.
class Carver {
 public:
  static constexpr int64_t kAlignment = 64;
  Carver(std::byte* base, Device device) : base_(base), device_(device) {}  // nullptr: only counts
  TensorView take(DType dtype, std::initializer_list<int64_t> shape) {
    int64_t bytes = static_cast<int64_t>(size_of(dtype));
    for (const int64_t n : shape) bytes = checked_mul("dense_prefill", "the size of the scratch", bytes, n);
    const TensorView v = view(base_ == nullptr ? nullptr : base_ + used_, dtype, shape, device_);
    used_ = checked_add("dense_prefill", "the size of the scratch", used_,
                        checked_round_up("dense_prefill", "the size of the scratch", bytes, kAlignment));
    return v;
  }
  size_t used() const noexcept { return static_cast<size_t>(used_); }

 private:
  std::byte* base_;
  Device device_;
  int64_t used_ = 0;
};

}  // namespace

// The operations underneath choose their implementation by device themselves.
DenseDelegate::DenseDelegate(BackendCore& core) : core_(core), slot_copies_(core.config().device, core.memory()) {}

void DenseDelegate::attend_all(const AttendCall& call) {
  constexpr const char* kCall = "attend";
  const StepRows part = core_.effective(kCall, call.rows);
  MlaDecode op;
  op.q = call.q;
  op.cache = core_.open_layer(call.layer).latent;
  op.pages = core_.pages(part);
  op.rows = core_.query_rows(part);
  op.out = call.out;
  op.lse = call.lse;
  op.softmax_scale = core_.config().softmax_scale;
  core_.run(op);
}

void DenseDelegate::check_prefill(const char* call, const DensePrefillCall& args, bool lse_required) const {
  const AttentionConfig& c = core_.config();
  const int64_t rows = core_.active_step(call).rows(StepRows::kPrefill).size();
  if (c.qk_nope_head_dim < 1 || c.v_head_dim < 1)
    core_.refuse(call, "qk_nope_head_dim is {} and v_head_dim {} in the config; dense prefill needs both",
                 c.qk_nope_head_dim, c.v_head_dim);
  core_.layer(call, args.layer);
  if (rows == 0) return;
  core_.check_float(call, "q", args.q, {rows, c.num_heads, c.qk_nope_head_dim + c.geometry.rope_dim});
  core_.check_typed(call, "k_nope", args.k_nope, args.q.dtype, {rows, c.num_heads, c.qk_nope_head_dim});
  core_.check_typed(call, "k_rope", args.k_rope, args.q.dtype, {rows, c.geometry.rope_dim});
  core_.check_typed(call, "v", args.v, args.q.dtype, {rows, c.num_heads, c.v_head_dim});
  core_.check_typed(call, "out", args.out, args.q.dtype, {rows, c.num_heads, c.v_head_dim});
  if (lse_required || args.lse.given()) core_.check_typed(call, "lse", args.lse, DType::kF32, {rows, c.num_heads});
}

void DenseDelegate::causal_pass(const DensePrefillCall& call, const TensorView& lse) {
  RaggedPrefill op;
  op.q = call.q;
  op.k = call.k_nope;
  op.k_rope = call.k_rope;
  op.v = call.v;
  op.cu_q_lens = op.cu_kv_lens = core_.on_device(core_.active_step("dense_prefill").cu_q_lens(StepRows::kPrefill));
  op.out = call.out;
  op.lse = lse;
  op.softmax_scale = core_.config().softmax_scale;
  op.causal = true;
  core_.run(op);
}

const PrefixChunk& DenseDelegate::chunk_at(const char* call, int64_t chunk) const {
  const auto& chunks = core_.active_step(call).prefix_chunks().chunks;
  if (chunk < 0 || static_cast<size_t>(chunk) >= chunks.size())
    core_.refuse(call, "chunk is {}; the step has {} prefix chunks", chunk, chunks.size());
  return chunks[static_cast<size_t>(chunk)];
}

TensorView DenseDelegate::chunk_slots(int64_t chunk) {
  const StepPlan& step = core_.active_step("gather_prefix");
  const auto& chunks = step.prefix_chunks().chunks;
  if (!slots_ready_) {  // once a step, by the first layer that needs them
    slot_offsets_.clear();
    int64_t total = 0;
    for (const PrefixChunk& c : chunks) {
      slot_offsets_.push_back(total);
      total += c.num_tokens;
    }
    slots_.resize(static_cast<size_t>(total));
    for (size_t i = 0; i < chunks.size(); ++i)
      step.fill_chunk_slots(chunks[i], std::span(slots_).subspan(static_cast<size_t>(slot_offsets_[i]),
                                                                 static_cast<size_t>(chunks[i].num_tokens)));
    const DeviceArrays::Piece piece = DeviceArrays::piece(std::span<const int32_t>(slots_));
    slot_copies_.upload("gather_prefix", core_.staging(), {&piece, 1}, core_.stream());
    slots_ready_ = true;
  }
  const auto i = static_cast<size_t>(chunk);
  return slot_copies_.on_device(view(slots_.data() + slot_offsets_[i], {chunks[i].num_tokens}));
}

void DenseDelegate::gather(int32_t layer, int64_t chunk, const TensorView& latent, const TensorView& rope) {
  core_.run(LatentGather{
      .slots = chunk_slots(chunk), .cache = core_.open_layer(layer).latent, .latent = latent, .rope = rope});
}

void DenseDelegate::pass(const PrefixPassCall& call, const TensorView& part_out, const TensorView& part_lse) {
  const StepPlan& step = core_.active_step("prefill_prefix");
  const std::span<const int32_t> cu_kv = step.prefix_chunks().cu_kv_lens(static_cast<size_t>(call.chunk));
  RaggedPrefill op;
  op.q = call.q;
  op.k = call.k_nope;
  op.k_rope = call.k_rope;
  op.v = call.v;
  op.cu_q_lens = core_.on_device(step.cu_q_lens(StepRows::kPrefill));
  op.cu_kv_lens = core_.on_device(view(cu_kv.data(), {static_cast<int64_t>(cu_kv.size())}));
  op.out = part_out;
  op.lse = part_lse;
  op.softmax_scale = core_.config().softmax_scale;
  op.causal = false;
  core_.run(op);
  core_.run(MergeState{.out_a = call.out,
                       .lse_a = call.lse,
                       .out_b = part_out,
                       .lse_b = part_lse,
                       .count_a = {},
                       .count_b = {},
                       .base = LseBase::kNatural});
}

void DenseDelegate::prefill_new_tokens(const DensePrefillCall& call) {
  constexpr const char* kCall = "prefill_new_tokens";
  check_prefill(kCall, call, true);
  core_.apply(kCall, call.layer, StepRows::kPrefill, call.write);
  if (core_.active_step(kCall).rows(StepRows::kPrefill).size() == 0) return;
  causal_pass(call, call.lse);
}

void DenseDelegate::gather_prefix(int32_t layer, int64_t chunk, const TensorView& latent, const TensorView& rope) {
  constexpr const char* kCall = "gather_prefix";
  core_.active_step(kCall);
  core_.layer(kCall, layer);
  const int64_t n = chunk_at(kCall, chunk).num_tokens;
  core_.check_float(kCall, "latent", latent, {n, core_.config().geometry.latent_dim});
  core_.check_typed(kCall, "rope", rope, latent.dtype, {n, core_.config().geometry.rope_dim});
  gather(layer, chunk, latent, rope);
}

void DenseDelegate::prefill_prefix(const PrefixPassCall& call) {
  constexpr const char* kCall = "prefill_prefix";
  const AttentionConfig& c = core_.config();
  const int64_t rows = core_.active_step(kCall).rows(StepRows::kPrefill).size();
  core_.layer(kCall, call.layer);
  const int64_t n = chunk_at(kCall, call.chunk).num_tokens;
  if (rows == 0) return;
  core_.check_float(kCall, "q", call.q, {rows, c.num_heads, c.qk_nope_head_dim + c.geometry.rope_dim});
  const DType dtype = call.q.dtype;
  core_.check_typed(kCall, "k_nope", call.k_nope, dtype, {n, c.num_heads, c.qk_nope_head_dim});
  core_.check_typed(kCall, "k_rope", call.k_rope, dtype, {n, c.geometry.rope_dim});
  core_.check_typed(kCall, "v", call.v, dtype, {n, c.num_heads, c.v_head_dim});
  core_.check_typed(kCall, "out", call.out, dtype, {rows, c.num_heads, c.v_head_dim});
  core_.check_typed(kCall, "lse", call.lse, DType::kF32, {rows, c.num_heads});
  TensorView part_out, part_lse;
  const auto carve = [&](std::byte* base) {
    Carver carver(base, c.device);
    part_out = carver.take(dtype, {rows, c.num_heads, c.v_head_dim});
    part_lse = carver.take(DType::kF32, {rows, c.num_heads});
    return carver.used();
  };
  core_.grow(scratch_, carve(nullptr));
  carve(scratch_.data());
  pass(call, part_out, part_lse);
}

void DenseDelegate::dense_prefill(const DensePrefillCall& call) {
  constexpr const char* kCall = "dense_prefill";
  const StepPlan& step = core_.active_step(kCall);
  check_prefill(kCall, call, false);
  const auto& chunks = step.prefix_chunks().chunks;
  const int64_t rows = step.rows(StepRows::kPrefill).size();
  if (rows > 0 && !chunks.empty() && !call.expand)
    core_.refuse(kCall, "expand is not given; a request of the step has a prefix, whose keys and values it makes");
  core_.apply(kCall, call.layer, StepRows::kPrefill, call.write);
  if (rows == 0) return;
  if (chunks.empty()) return causal_pass(call, call.lse);

  const AttentionConfig& c = core_.config();
  const DType dtype = call.q.dtype;
  struct {
    TensorView lse, part_out, part_lse, latent, rope, k_nope, v;
  } s;
  const auto carve = [&](std::byte* base, int64_t tokens) {
    Carver carver(base, c.device);
    s.lse = call.lse.given() ? call.lse : carver.take(DType::kF32, {rows, c.num_heads});
    s.part_out = carver.take(dtype, {rows, c.num_heads, c.v_head_dim});
    s.part_lse = carver.take(DType::kF32, {rows, c.num_heads});
    s.latent = carver.take(dtype, {tokens, c.geometry.latent_dim});
    s.rope = carver.take(dtype, {tokens, c.geometry.rope_dim});
    s.k_nope = carver.take(dtype, {tokens, c.num_heads, c.qk_nope_head_dim});
    s.v = carver.take(dtype, {tokens, c.num_heads, c.v_head_dim});
    return carver.used();
  };
  core_.grow(scratch_, carve(nullptr, step.prefix_chunks().max_tokens));
  carve(scratch_.data(), 0);
  causal_pass(call, s.lse);
  for (size_t i = 0; i < chunks.size(); ++i) {
    carve(scratch_.data(), chunks[i].num_tokens);
    const auto chunk = static_cast<int64_t>(i);
    gather(call.layer, chunk, s.latent, s.rope);
    call.expand(s.latent, s.k_nope, s.v);
    pass({.layer = call.layer,
          .chunk = chunk,
          .q = call.q,
          .k_nope = s.k_nope,
          .k_rope = s.rope,
          .v = s.v,
          .out = call.out,
          .lse = s.lse},
         s.part_out, s.part_lse);
  }
}

}  // namespace attention
}  // namespace v0
}  // namespace gannet
