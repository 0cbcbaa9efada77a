// Page tables and query rows: which keys a row sees, and where they lie.
//
// Position p of request i lies in page table(i, p / page_size) at offset p % page_size; its slot is
// page * page_size + offset. Cells beyond ceil(seq_len / page_size) are meaningless and are never used; cells beyond
// the table are never read.
#pragma once

#include <string>
#include <tuple>

#include "gannet/tensor.h"

namespace gannet {
inline namespace v0 {

/// The two forms that engines have.
enum class PageTableForm : uint8_t {
  kPadded,  ///< int32 [table_rows, max_pages], optionally with a table row per request
  kCsr,     ///< indptr int32 [num_requests + 1] into indices int32 [num_pages_listed]
};

/// A page table over somebody's memory. Use the factories.
struct PageTableView {
  PageTableForm form = PageTableForm::kPadded;
  TensorView pages;        ///< padded: int32 [table_rows, max_pages], unit column stride
  TensorView row_indices;  ///< padded, optional: int32 [num_requests], the table row of each request; absent: row i
  TensorView indptr;       ///< CSR: int32 [num_requests + 1]
  TensorView indices;      ///< CSR: int32 [n]

  static PageTableView padded(TensorView pages, TensorView row_indices = {}) {
    PageTableView v;
    v.form = PageTableForm::kPadded;
    v.pages = pages;
    v.row_indices = row_indices;
    return v;
  }
  static PageTableView csr(TensorView indptr, TensorView indices) {
    PageTableView v;
    v.form = PageTableForm::kCsr;
    v.indptr = indptr;
    v.indices = indices;
    return v;
  }

  template <class Self, class F>
  static void for_each_view(Self& s, F&& f) {
    f("pages", s.pages);
    f("row_indices", s.row_indices);
    f("indptr", s.indptr);
    f("indices", s.indices);
  }
  auto options() const { return std::tuple{form}; }
};

/// What a request's entry in seq_lens means for its S rows (spec 1.6, A.1). Row j (0-based) sees
///   kCausalFull       max(0, L - (S - 1) + j) keys: L counts this step's tokens (decode, verify, prefill)
///   kCausalFromFirst  L + j keys: L is what the first row sees
///   kUniformBlock     L keys, every row alike
/// never more than the table reaches. A request with L <= 0 (padding of a captured batch) has no keys in any meaning.
enum class RowBound : uint8_t { kCausalFull, kCausalFromFirst, kUniformBlock };

GANNET_API const char* to_string(RowBound b) noexcept;

/// The query rows of a call: request-major, either q_len rows for each request or a ragged count.
struct QueryRows {
  TensorView seq_lens;        ///< int32 [num_requests], tokens; 0 and less: no keys
  int32_t q_len = 1;          ///< rows per request, used when cu_q_lens is not given
  TensorView cu_q_lens = {};  ///< optional int32 [num_requests + 1], cumulative rows per request, starts at 0
  RowBound bound = RowBound::kCausalFull;

  template <class Self, class F>
  static void for_each_view(Self& s, F&& f) {
    f("seq_lens", s.seq_lens);
    f("cu_q_lens", s.cu_q_lens);
  }
  auto options() const { return std::tuple{q_len, bound}; }
};

/// Keys that row j of S sees, before the bound of the table's reach.
constexpr int64_t row_bound(RowBound b, int64_t seq_len, int64_t num_rows, int64_t j) noexcept {
  if (seq_len <= 0) return 0;
  const int64_t n = b == RowBound::kCausalFull        ? seq_len - (num_rows - 1) + j
                    : b == RowBound::kCausalFromFirst ? seq_len + j
                                                      : seq_len;
  return n > 0 ? n : 0;
}

}  // namespace v0
}  // namespace gannet
