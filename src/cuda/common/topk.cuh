// Exact top-k of rows of scores, as a launch: operation topk, and the second half of index_select.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/common/views.cuh"
#include "gannet/device.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

struct TopKArgs {
  const void* logits;  // fp32 or bf16; row 0 is row `first_row` of everything below
  DType dtype;
  int64_t logits_stride, num_columns;
  const int32_t* lens;  // columns of a row that count; or nullptr: what `rows` says the row sees
  Rows rows;
  Pages pages;
  int32_t page_size;
  int64_t num_pages;
  int64_t first_row;
  int64_t k;
  int32_t* positions;  // or nullptr
  int64_t positions_stride;
  int32_t* slots;  // or nullptr
  int64_t slots_stride;
  int32_t* counts;
};

/// Rows first_row .. first_row + num_rows - 1, on the current device. No workspace.
void launch_topk(const char* function, const TopKArgs& a, int64_t num_rows, Stream stream);

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
