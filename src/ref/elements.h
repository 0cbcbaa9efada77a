// Elements and rows, one at a time: what the oracle's loops are made of. Nothing here is shared with a kernel.
#pragma once

#include <cmath>
#include <cstdint>

#include "gannet/dtype.h"
#include "gannet/page_table.h"
#include "gannet/tensor.h"

namespace gannet {
inline namespace v0 {
namespace ref {

/// v[i0, i1, i2] as a real number.
inline double load(const TensorView& v, int64_t i0, int64_t i1 = 0, int64_t i2 = 0) {
  switch (v.dtype) {
    case DType::kF32: return *v.ptr<float>(i0, i1, i2);
    case DType::kBf16: return v.ptr<Bf16>(i0, i1, i2)->to_float();
    case DType::kE4m3: return v.ptr<E4m3>(i0, i1, i2)->to_float();
    case DType::kI32: return *v.ptr<int32_t>(i0, i1, i2);
    case DType::kI64: return static_cast<double>(*v.ptr<int64_t>(i0, i1, i2));
    case DType::kF16:
    case DType::kU8: break;
  }
  return std::nan("");
}

/// v[i0, i1, i2] = x, rounded to fp32 first.
inline void store(const TensorView& v, double x, int64_t i0, int64_t i1 = 0, int64_t i2 = 0) {
  const float f = static_cast<float>(x);
  if (v.dtype == DType::kBf16) *v.ptr<Bf16>(i0, i1, i2) = Bf16::from_float(f);
  else *v.ptr<float>(i0, i1, i2) = f;
}

/// v[i] of an int32 or int64 vector.
inline int64_t load_int(const TensorView& v, int64_t i) {
  return v.dtype == DType::kI64 ? *v.ptr<int64_t>(i) : *v.ptr<int32_t>(i);
}

/// Where a query row belongs and what it sees (spec A.1).
struct Row {
  int64_t request = 0;
  int64_t num_keys = 0;  ///< positions 0 .. num_keys - 1
};

inline int64_t table_reach(const PageTableView& pages, int64_t request, int64_t page_size) {
  const int64_t columns = pages.form == PageTableForm::kPadded
                              ? pages.pages.shape[1]
                              : load_int(pages.indptr, request + 1) - load_int(pages.indptr, request);
  return columns * page_size;
}

inline Row find_row(const QueryRows& rows, const PageTableView& pages, int64_t page_size, int64_t row) {
  Row r;
  int64_t first = 0;     // first row of the request
  int64_t num_rows = 0;  // S
  if (rows.cu_q_lens.given()) {
    while (load_int(rows.cu_q_lens, r.request + 1) <= row) ++r.request;
    first = load_int(rows.cu_q_lens, r.request);
    num_rows = load_int(rows.cu_q_lens, r.request + 1) - first;
  } else {
    r.request = row / rows.q_len;
    first = r.request * rows.q_len;
    num_rows = rows.q_len;
  }
  const int64_t length = load_int(rows.seq_lens, r.request);
  const int64_t j = row - first;
  if (length > 0) {
    switch (rows.bound) {
      case RowBound::kCausalFull: r.num_keys = length - (num_rows - 1) + j; break;
      case RowBound::kCausalFromFirst: r.num_keys = length + j; break;
      case RowBound::kUniformBlock: r.num_keys = length; break;
    }
  }
  const int64_t reach = table_reach(pages, r.request, page_size);
  if (r.num_keys > reach) r.num_keys = reach;
  if (r.num_keys < 0) r.num_keys = 0;
  return r;
}

/// Slot of position t of a request (spec A.9).
inline int64_t slot_of(const PageTableView& pages, int64_t request, int64_t page_size, int64_t t) {
  int64_t page = 0;
  if (pages.form == PageTableForm::kPadded) {
    const int64_t table_row = pages.row_indices.given() ? load_int(pages.row_indices, request) : request;
    page = *pages.pages.ptr<int32_t>(table_row, t / page_size);
  } else {
    page = load_int(pages.indices, load_int(pages.indptr, request) + t / page_size);
  }
  return page * page_size + t % page_size;
}

}  // namespace ref
}  // namespace v0
}  // namespace gannet
