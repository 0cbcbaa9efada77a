// The set "cuda_sm90": Hopper's own instructions (wgmma), for what they are written for.
#include "cuda/sm90/set.h"
#include "core/format.h"
#include "cuda/common/check.h"
#include "cuda/common/index_select.h"
#include "cuda/common/refuse.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

namespace {

// wgmma and the copy engine are of sm_90a alone. Code for another architecture, sm_90 among them, has kernels that
// trap.
#if defined(GANNET_HAS_SM90A)
constexpr bool kCompiled = true;
#else
constexpr bool kCompiled = false;
#endif

template <class Params>
std::string refuses_shape(const Params& p) {
  const RowGeometry g = p.cache.geometry;
  if (g.latent_dim != 512 || g.rope_dim != 64)
    return fmt::format("rows are {} + {} wide; accepted: 512 + 64", g.latent_dim, g.rope_dim);
  return refuses_options(p);
}

template <class Params>
std::string refuses_absorbed(const Params& p) {
  if (p.q.dtype != DType::kBf16) return fmt::format("q is {}; accepted: bf16", to_string(p.q.dtype));
  const LatentFormat f = p.cache.format;
  if (f != LatentFormat::kBf16) return fmt::format("the cache is {}; accepted: bf16", to_string(f));
  return refuses_shape(p);
}

std::string refuses_dense(const MlaDecode& p) {
  if (p.rows.cu_q_lens.given()) return "cu_q_lens is given; accepted: q_len rows for each request";
  if (p.q.dtype == DType::kBf16 && p.cache.format == LatentFormat::kPacked656) {
    const int64_t lanes = p.q.shape[1] * p.rows.q_len;
    if (lanes > sm90::kMaxPackedLanes)
      return fmt::format("packed656 rows and {} heads of {} rows of a request; accepted: up to {} together",
                         p.q.shape[1], p.rows.q_len, sm90::kMaxPackedLanes);
    return refuses_shape(p);
  }
  if (p.q.dtype != DType::kE4m3 || p.cache.format != LatentFormat::kE4m3) return refuses_absorbed(p);
  if (std::string refusal = refuses_shape(p); !refusal.empty()) return refusal;
  if (!sm90::has_boxes(p.cache))
    return fmt::format("e4m3 pages hold {} tokens, {} bytes apart; accepted: 32 or a multiple of 64 tokens",
                       p.cache.page_size, p.cache.page_stride_bytes);
  return {};
}

/// IndexLogits, or IndexSelect over scores of this set.
template <class Params>
std::string refuses_scores(const Params& p, int64_t num_columns) {
  return refuses_indexer(p, num_columns, {DType::kE4m3}, {128});
}
std::string refuses_index_logits(const IndexLogits& p) { return refuses_scores(p, p.logits.shape[1]); }
std::string refuses_index_select(const IndexSelect& p) { return refuses_scores(p, p.max_seq_len); }

std::string refuses_prefill(const RaggedPrefill& p) { return refuses_ragged(p, {{192, 128}}); }

}  // namespace

const ImplementationSet& sm90_set() noexcept {
  static const ImplementationSet set = {
      .name = "cuda_sm90",
      .device = DeviceKind::kCuda,
      .only_when_forced = false,
      .compiled = kCompiled,
      .runs_here = [] { return kCompiled && has_device(9, 9); },
      .ragged_prefill = {refuses_prefill, sm90::workspace_ragged_prefill, sm90::run_ragged_prefill},
      .mla_decode = {refuses_dense, sm90::workspace_mla_decode, sm90::run_mla_decode, true},
      .index_logits = {refuses_index_logits, nullptr, run_index_logits_over<sm90::launch_index_logits>},
      .index_select = {refuses_index_select, workspace_index_select, run_index_select_over<sm90::launch_index_logits>},
      .sparse_attention = {refuses_absorbed<SparseAttention>, sm90::workspace_sparse_attention,
                           sm90::run_sparse_attention, true},
  };
  return set;
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
