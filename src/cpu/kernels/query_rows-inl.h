// Requests of a call: which rows they have, how many keys each row sees, where the keys' pages are listed.
#pragma once

#include "cpu/kernel_table.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace {

struct RequestRows {
  int64_t first_row;  // of the call
  int64_t num_rows;
  int64_t seq_len;       // as given
  int64_t reach;         // keys that the page table lists
  const int32_t* pages;  // [reach / page_size]
};

/// num_rows_total is the number of rows of the call's tensors: cu_q_lens never leads beyond it.
GANNET_INLINE RequestRows request_rows(const PageTableView& table, const QueryRows& rows, int64_t page_size,
                                       int64_t num_rows_total, int64_t request) {
  RequestRows r;
  int64_t end;
  if (rows.cu_q_lens.given()) {
    const int32_t* cu = rows.cu_q_lens.ptr<const int32_t>();
    r.first_row = cu[request * rows.cu_q_lens.stride[0]];
    end = cu[(request + 1) * rows.cu_q_lens.stride[0]];
  } else {
    r.first_row = request * rows.q_len;
    end = r.first_row + rows.q_len;
  }
  if (end > num_rows_total) end = num_rows_total;
  r.num_rows = end > r.first_row ? end - r.first_row : 0;
  r.seq_len = rows.seq_lens.ptr<const int32_t>()[request * rows.seq_lens.stride[0]];
  if (table.form == PageTableForm::kPadded) {
    const int64_t row = table.row_indices.given()
                            ? table.row_indices.ptr<const int32_t>()[request * table.row_indices.stride[0]]
                            : request;
    r.pages = table.pages.ptr<const int32_t>(row);
    r.reach = table.pages.shape[1] * page_size;
  } else {
    const int32_t* indptr = table.indptr.ptr<const int32_t>();
    const int64_t begin = indptr[request * table.indptr.stride[0]];
    r.pages = table.indices.ptr<const int32_t>() + begin;
    r.reach = (indptr[(request + 1) * table.indptr.stride[0]] - begin) * page_size;
  }
  return r;
}

/// Keys that row j of the request sees.
GANNET_INLINE int64_t visible_keys(const RequestRows& r, RowBound bound, int64_t j) {
  if (r.seq_len <= 0) return 0;  // a request without keys has none for any row, whatever the bound
  const int64_t n = row_bound(bound, r.seq_len, r.num_rows, j);
  return n < r.reach ? n : r.reach;
}

}  // namespace
}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
