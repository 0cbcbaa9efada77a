// index_select out of its parts: scores of a block of rows into scratch, top-k of them, translated to slots. A set
// brings the scores. Host code only.
#pragma once

#include "core/implementation.h"
#include "cuda/common/index_logits.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {

/// Enqueues index logits of a block of rows of a call; columns that a row does not see are left alone.
using LaunchIndexLogits = void (*)(const char* function, const TensorView& q, const TensorView& weights,
                                   const IndexCacheView& cache, const PageTableView& pages, const QueryRows& rows,
                                   const LogitBlock& block, Stream stream);

/// Scores of as many rows as 32 MiB hold, at least one: max_seq_len * 4 bytes a row. None where every row selects all.
size_t workspace_index_select(const IndexSelect& p, int num_workers);
void run_index_select(const IndexSelect& p, const RunContext& c, LaunchIndexLogits launch_logits);

/// Index logits of a whole call.
void run_index_logits(const IndexLogits& p, const RunContext& c, LaunchIndexLogits launch_logits);

/// The same as entries of a set.
template <LaunchIndexLogits kLaunchLogits>
void run_index_select_over(const IndexSelect& p, const RunContext& c) {
  run_index_select(p, c, kLaunchLogits);
}
template <LaunchIndexLogits kLaunchLogits>
void run_index_logits_over(const IndexLogits& p, const RunContext& c) {
  run_index_logits(p, c, kLaunchLogits);
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
