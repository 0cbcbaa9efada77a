// A call's arguments as every kernel of index logits takes them.
#pragma once

#include "cuda/common/index_logits.cuh"
#include "cuda/common/views.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {

struct LogitProblem {
  const void* q;
  DType q_dtype;
  int64_t q_row_stride, q_head_stride;
  const float* weights;
  int64_t weights_stride;
  int num_heads;
  IndexCacheView cache;
  Rows rows;
  Pages pages;
  LogitBlock block;
};

inline LogitProblem make_logit_problem(const TensorView& q, const TensorView& weights, const IndexCacheView& cache,
                                       const PageTableView& pages, const QueryRows& rows, const LogitBlock& block) {
  return {.q = q.data,
          .q_dtype = q.dtype,
          .q_row_stride = q.stride[0],
          .q_head_stride = q.stride[1],
          .weights = static_cast<const float*>(weights.data),
          .weights_stride = weights.stride[0],
          .num_heads = static_cast<int>(q.shape[1]),
          .cache = cache,
          .rows = make_rows(rows),
          .pages = make_pages(pages),
          .block = block};
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
