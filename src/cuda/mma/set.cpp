// The set "cuda_mma": tensor cores of sm_80 and newer.
#include "cuda/mma/set.h"
#include "core/format.h"
#include "cuda/common/check.h"
#include "cuda/common/index_select.h"

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
std::string refuses_indexer(const Params& p, int64_t num_columns) {
  constexpr int64_t kMaxHeads = 64, kMaxColumns = int64_t{1} << 30;  // positions are 32-bit numbers in the kernel
  if (p.q.dtype != DType::kBf16 && p.q.dtype != DType::kE4m3)
    return fmt::format("q is {}; accepted: bf16, e4m3", to_string(p.q.dtype));
  if (p.cache.format != IndexKFormat::kE4m3)
    return fmt::format("index keys are {}; accepted: e4m3", to_string(p.cache.format));
  if (p.cache.head_dim != 64 && p.cache.head_dim != 128)
    return fmt::format("head_dim is {}; accepted: 64, 128", p.cache.head_dim);
  if (p.q.shape[1] > kMaxHeads) return fmt::format("index heads are {}; accepted: up to {}", p.q.shape[1], kMaxHeads);
  if (num_columns > kMaxColumns) return fmt::format("{} keys a row; accepted: up to {}", num_columns, kMaxColumns);
  return {};
}

std::string refuses_index_logits(const IndexLogits& p) { return refuses_indexer(p, p.logits.shape[1]); }
std::string refuses_index_select(const IndexSelect& p) { return refuses_indexer(p, p.max_seq_len); }

std::string refuses_ragged(const RaggedPrefill& p) {
  if (p.q.dtype != DType::kBf16) return fmt::format("q is {}; accepted: bf16", to_string(p.q.dtype));
  const int64_t key = p.q.shape[2], value = p.v.shape[2];
  if (!(key == 192 && value == 128) && !(key == 256 && value == 256))
    return fmt::format("keys and values are {} and {} wide; accepted: 192 and 128, 256 and 256", key, value);
  if (p.k_rope.given() && p.k_rope.shape[1] != 64)
    return fmt::format("k_rope is {} wide; accepted: 64", p.k_rope.shape[1]);
  return {};
}

}  // namespace

const ImplementationSet& mma_set() noexcept {
  static const ImplementationSet set = {
      .name = "cuda_mma",
      .device = DeviceKind::kCuda,
      .only_when_forced = false,
      .compiled = true,
      .runs_here =
          [] {
            int count = 0, major = 0;
            return cudaGetDeviceCount(&count) == cudaSuccess && count > 0 &&
                   cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess && major >= 8;
          },
      .ragged_prefill = {refuses_ragged, nullptr, mma::run_ragged_prefill},
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
