// What a set of kernels scores for a block of rows: the seam between index logits and the selection made of them.
#pragma once

#include <cstdint>

namespace gannet {
inline namespace v0 {
namespace cuda {

/// Rows [first_row, first_row + num_rows) of the call's queries; first_row may lie anywhere in a request.
struct LogitBlock {
  void* logits;         // row 0 is row first_row of the call; fp32 unless `bf16`
  int64_t stride;       // elements
  int64_t num_columns;  // keys from here on are not scored
  int64_t first_row, num_rows;
  bool bf16 = false;
  int64_t unscored = 0;  // rows that see at most so many keys are left out: a selection takes all of them
};

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
