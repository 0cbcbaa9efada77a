#include <algorithm>
#include <limits>

#include "core/checked.h"
#include "gannet/kv_pool.h"

namespace gannet {
inline namespace v0 {

PageTableView CsrPageTable::view() const {
  return PageTableView::csr(gannet::view(indptr.data(), {static_cast<int64_t>(indptr.size())}),
                            gannet::view(indices.data(), {static_cast<int64_t>(indices.size())}));
}

PageTable::PageTable(int32_t rows, int32_t max_pages) : rows_(rows), max_pages_(max_pages) {
  if (rows < 0 || max_pages < 0)
    fail_argument("PageTable", "rows is {} and max_pages {}; accepted: 0 and more", rows, max_pages);
  cells_.assign(static_cast<size_t>(rows) * static_cast<size_t>(max_pages), kReservedPage);
  used_.assign(static_cast<size_t>(rows), 0);
}

void PageTable::check_row(const char* function, int32_t row) const {
  if (row < 0 || row >= rows_) fail_argument(function, "row is {}; accepted: 0 to {}", row, rows_ - 1);
}

int32_t PageTable::num_pages(int32_t row) const {
  check_row("PageTable::num_pages", row);
  return used_[static_cast<size_t>(row)];
}

std::span<const int32_t> PageTable::row(int32_t row) const {
  check_row("PageTable::row", row);
  const auto width = static_cast<size_t>(max_pages_);
  return std::span(cells_).subspan(static_cast<size_t>(row) * width, width);
}

void PageTable::set_row(int32_t row, std::span<const PageId> pages) {
  check_row("PageTable::set_row", row);
  const int32_t before = used_[static_cast<size_t>(row)];
  used_[static_cast<size_t>(row)] = 0;
  try {
    append(row, pages);
  } catch (...) {
    used_[static_cast<size_t>(row)] = before;
    throw;
  }
  int32_t* cells = cells_.data() + static_cast<size_t>(row) * static_cast<size_t>(max_pages_);
  const auto used = static_cast<int32_t>(pages.size());
  if (before > used) std::fill(cells + used, cells + before, kReservedPage);
}

void PageTable::append(int32_t row, std::span<const PageId> pages) {
  check_row("PageTable::append", row);
  const int32_t used = used_[static_cast<size_t>(row)];
  if (pages.size() > static_cast<size_t>(max_pages_ - used))
    fail_argument("PageTable::append", "row {} would have {} pages; accepted: at most {}", row,
                  static_cast<size_t>(used) + pages.size(), max_pages_);
  for (const PageId page : pages)
    if (page < 0) fail_argument("PageTable::append", "a page of row {} is {}; accepted: 0 and more", row, page);
  std::copy(pages.begin(), pages.end(),
            cells_.begin() + static_cast<std::ptrdiff_t>(row) * max_pages_ + static_cast<std::ptrdiff_t>(used));
  used_[static_cast<size_t>(row)] = used + static_cast<int32_t>(pages.size());
}

PageTableView PageTable::view(TensorView row_indices) const {
  return PageTableView::padded(gannet::view(cells_.data(), {rows_, max_pages_}), row_indices);
}

CsrPageTable PageTable::csr(std::span<const int32_t> rows) const {
  CsrPageTable table;
  table.indptr.reserve(rows.size() + 1);
  table.indptr.push_back(0);
  for (const int32_t r : rows) {
    const int32_t used = num_pages(r);
    const int64_t end = checked_add("PageTable::csr", "the number of pages", table.indptr.back(), used);
    if (end > std::numeric_limits<int32_t>::max())
      fail_argument("PageTable::csr", "the rows have more than 2^31 - 1 pages");
    const std::span<const int32_t> pages = row(r).first(static_cast<size_t>(used));
    table.indices.insert(table.indices.end(), pages.begin(), pages.end());
    table.indptr.push_back(static_cast<int32_t>(end));
  }
  return table;
}

}  // namespace v0
}  // namespace gannet
