// The Hopper implementations (sm_90a) as plain functions; set.cpp makes an implementation set of them.
#pragma once

#include <cuda_runtime_api.h>

#include "core/implementation.h"
#include "cuda/common/index_logits.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace sm90 {

size_t workspace_ragged_prefill(const RaggedPrefill& p, int num_workers);
size_t workspace_mla_decode(const MlaDecode& p, int num_workers);
size_t workspace_sparse_attention(const SparseAttention& p, int num_workers);
void run_ragged_prefill(const RaggedPrefill& p, const RunContext& c);
void run_mla_decode(const MlaDecode& p, const RunContext& c);
void run_sparse_attention(const SparseAttention& p, const RunContext& c);
/// Whether the copy engine can bring the pages of this cache: page sizes of 32 and multiples of 64.
bool has_boxes(const LatentCacheView& c);
/// Rows x heads of a request that the kernel of 656-byte rows takes.
constexpr int kMaxPackedLanes = 32;
/// Scores a block of rows of a call whose arguments the set takes. No workspace.
void launch_index_logits(const char* function, const TensorView& q, const TensorView& weights,
                         const IndexCacheView& cache, const PageTableView& pages, const QueryRows& rows,
                         const LogitBlock& block, Stream stream);

}  // namespace sm90
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
