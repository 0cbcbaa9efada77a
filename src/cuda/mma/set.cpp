// The set "cuda_mma": tensor cores of sm_80 and newer.
#include "cuda/mma/set.h"
#include "core/format.h"
#include "cuda/common/check.h"
#include "cuda/common/index_select.h"
#include "cuda/common/refuse.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

namespace {

template <class Params>
std::string refuses_absorbed(const Params& p) {
  if (p.q.dtype != DType::kBf16 && p.q.dtype != DType::kE4m3)
    return fmt::format("q is {}; accepted: bf16, e4m3", to_string(p.q.dtype));
  const LatentFormat f = p.cache.format;
  if (f != LatentFormat::kBf16 && f != LatentFormat::kE4m3 && f != LatentFormat::kPacked656)
    return fmt::format("the cache is {}; accepted: bf16, e4m3, packed656", to_string(f));
  const RowGeometry g = p.cache.geometry;
  if (g.latent_dim != 512 || g.rope_dim != 64)
    return fmt::format("rows are {} + {} wide; accepted: 512 + 64", g.latent_dim, g.rope_dim);
  return {};
}

/// IndexLogits, or IndexSelect over scores of this set.
template <class Params>
std::string refuses_scores(const Params& p, int64_t num_columns) {
  return refuses_indexer(p, num_columns, {DType::kBf16, DType::kE4m3}, {64, 128});
}
std::string refuses_index_logits(const IndexLogits& p) { return refuses_scores(p, p.logits.shape[1]); }
std::string refuses_index_select(const IndexSelect& p) { return refuses_scores(p, p.max_seq_len); }

std::string refuses_prefill(const RaggedPrefill& p) { return refuses_ragged(p, {{192, 128}, {256, 256}}); }

}  // namespace

const ImplementationSet& mma_set() noexcept {
  static const ImplementationSet set = {
      .name = "cuda_mma",
      .device = DeviceKind::kCuda,
      .only_when_forced = false,
      .compiled = true,
      .runs_here = [] { return has_device(8); },
      .ragged_prefill = {refuses_prefill, nullptr, mma::run_ragged_prefill},
      .mla_decode = {refuses_absorbed<MlaDecode>, mma::workspace_mla_decode, mma::run_mla_decode, true},
      .index_logits = {refuses_index_logits, nullptr, run_index_logits_over<mma::launch_index_logits>},
      .index_select = {refuses_index_select, workspace_index_select, run_index_select_over<mma::launch_index_logits>},
      .sparse_attention = {refuses_absorbed<SparseAttention>, mma::workspace_sparse_attention,
                           mma::run_sparse_attention, true},
  };
  return set;
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
