// The set "cuda_generic": every operation on any NVIDIA GPU from sm_80 with plain kernels.
#include "cuda/generic/set.h"
#include "core/format.h"
#include "cuda/common/check.h"
#include "cuda/common/index_select.h"
#include "cuda/generic/attend_shape.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

namespace {

using namespace generic;

/// attend.cuh keeps kLanes queries and a tile of keys (and of values, where they are not the keys) as fp32 in shared
/// memory, of which every device from sm_80 gives a block 99 KB.
std::string refuses_dims(int64_t key_dim, int64_t value_dim, bool value_is_key) {
  constexpr int64_t kSharedBytes = 99 * 1024, kFixedBytes = 2048;
  const int64_t bytes = attend_shared_bytes(key_dim, value_dim, value_is_key) + kFixedBytes;
  if (bytes > kSharedBytes)
    return fmt::format("keys of {} and values of {} take {} bytes of shared memory; accepted: up to {}", key_dim,
                       value_dim, bytes, kSharedBytes);
  return {};
}

template <class Params>
std::string refuses_absorbed(const Params& p) {
  return refuses_dims(p.cache.geometry.width(), p.cache.geometry.latent_dim, true);
}

std::string refuses_ragged(const RaggedPrefill& p) { return refuses_dims(p.q.shape[2], p.v.shape[2], false); }

template <class Params>
std::string refuses_indexer(const Params& p) {
  constexpr int64_t kMaxQuery = 24 * 1024;  // fp32 values of one row's queries in 96 KB of shared memory
  const int64_t n = p.q.shape[1] * p.q.shape[2];
  if (n > kMaxQuery) return fmt::format("index heads * head_dim is {}; accepted: up to {}", n, kMaxQuery);
  return {};
}

}  // namespace

const ImplementationSet& generic_set() noexcept {
  static const ImplementationSet set = {
      .name = "cuda_generic",
      .device = DeviceKind::kCuda,
      .only_when_forced = false,
      .compiled = true,
      .runs_here = [] { return has_device(); },
      .latent_write = {nullptr, nullptr, run_latent_write},
      .latent_gather = {nullptr, nullptr, run_latent_gather},
      .index_k_write = {nullptr, nullptr, run_index_k_write},
      .index_k_gather = {nullptr, nullptr, run_index_k_gather},
      .rope = {nullptr, nullptr, run_rope},
      .ragged_prefill = {refuses_ragged, nullptr, run_ragged_prefill},
      .merge_state = {nullptr, nullptr, run_merge_state},
      .mla_decode = {refuses_absorbed<MlaDecode>, nullptr, run_mla_decode},
      .index_logits = {refuses_indexer<IndexLogits>, nullptr, run_index_logits},
      .topk = {nullptr, nullptr, run_topk},
      .index_select = {refuses_indexer<IndexSelect>, workspace_index_select, run_index_select},
      .sparse_attention = {refuses_absorbed<SparseAttention>, nullptr, run_sparse_attention},
  };
  return set;
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
