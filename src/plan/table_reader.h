// Reads a page table of the caller's, in either form, in host memory.
#pragma once

#include <span>

#include "core/format.h"
#include "gannet/page_table.h"

namespace gannet {
inline namespace v0 {

/// Throws unless the view is one of int32 in host memory.
inline void check_host_int32(const char* function, const char* name, const TensorView& v, int rank) {
  if (v.dtype != DType::kI32 || v.rank != rank || v.device.kind != DeviceKind::kCpu)
    fail_argument(function, "{} is {}; accepted: int32 of rank {} in host memory", name, describe(v), rank);
  if (v.shape[static_cast<size_t>(rank) - 1] > 1 && v.stride[static_cast<size_t>(rank) - 1] != 1)
    fail_argument(function, "{} is {}; accepted: last stride 1", name, describe(v));
  if (v.num_elements() > 0 && v.data == nullptr) fail_argument(function, "{}.data is null", name);
}

/// A request's cells in either form.
class TableReader {
 public:
  TableReader(const char* function, const PageTableView& t, int64_t num_requests) : function_(function), t_(t) {
    if (t.form > PageTableForm::kCsr)
      fail_argument(function_, "pages.form is {}; accepted: a PageTableForm", static_cast<int>(t.form));
    if (t.form == PageTableForm::kPadded) {
      check_host_int32(function, "pages", t.pages, 2);
      if (t.row_indices.given()) {
        check_host_int32(function, "pages.row_indices", t.row_indices, 1);
        if (t.row_indices.shape[0] < num_requests)
          fail_argument(function_, "pages.row_indices is {}; the step has {} requests", describe(t.row_indices),
                        num_requests);
      } else if (t.pages.shape[0] < num_requests) {
        fail_argument(function_, "pages is {}; the step has {} requests", describe(t.pages), num_requests);
      }
    } else {
      check_host_int32(function, "pages.indptr", t.indptr, 1);
      check_host_int32(function, "pages.indices", t.indices, 1);
      if (t.indptr.shape[0] < num_requests + 1)
        fail_argument(function_, "pages.indptr is {}; the step has {} requests and needs one entry more",
                      describe(t.indptr), num_requests);
    }
  }

  std::span<const int32_t> row(int64_t request) const {
    if (t_.form == PageTableForm::kPadded) {
      int64_t r = request;
      if (t_.row_indices.given()) {
        r = *t_.row_indices.ptr<const int32_t>(request);
        if (r < 0 || r >= t_.pages.shape[0])
          fail_argument(function_, "pages.row_indices[{}] is {}; accepted: 0 to {}", request, r, t_.pages.shape[0] - 1);
      }
      return {t_.pages.ptr<const int32_t>(r), static_cast<size_t>(t_.pages.shape[1])};
    }
    const int32_t begin = *t_.indptr.ptr<const int32_t>(request);
    const int32_t end = *t_.indptr.ptr<const int32_t>(request + 1);
    if (begin < 0 || end < begin || end > t_.indices.shape[0])
      fail_argument(function_, "pages.indptr[{}..{}] is {}, {}; accepted: ascending within 0 to {}", request,
                    request + 1, begin, end, t_.indices.shape[0]);
    return {t_.indices.ptr<const int32_t>(begin), static_cast<size_t>(end - begin)};
  }

 private:
  const char* function_;
  const PageTableView& t_;
};

}  // namespace v0
}  // namespace gannet
