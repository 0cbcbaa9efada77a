#include <algorithm>
#include <bit>
#include <limits>
#include <optional>

#include "core/checked.h"
#include "gannet/step.h"
#include "plan/table_reader.h"

namespace gannet {
inline namespace v0 {
namespace {

constexpr const char* kName = "StepPlan";
constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMinColumns = 4;  // 16 bytes: rows of the table copy stay aligned to kBaseAlignment

}  // namespace

const char* to_string(StepMode m) noexcept {
  switch (m) {
    case StepMode::kIdle: return "idle";
    case StepMode::kExtend: return "extend";
    case StepMode::kDecode: return "decode";
    case StepMode::kMixed: return "mixed";
  }
  return "unknown";
}

const char* to_string(StepRows r) noexcept {
  switch (r) {
    case StepRows::kPrefill: return "prefill";
    case StepRows::kDecode: return "decode";
    case StepRows::kAll: return "all";
  }
  return "unknown";
}

StepMode step_mode(int64_t num_extends, int64_t num_requests) {
  if (num_extends < 0 || num_extends > std::max<int64_t>(num_requests, 0))
    fail_argument("step_mode", "num_extends is {}; accepted: 0 to num_requests, {}", num_extends, num_requests);
  if (num_requests <= 0) return StepMode::kIdle;
  if (num_extends == 0) return StepMode::kDecode;
  return num_extends == num_requests ? StepMode::kExtend : StepMode::kMixed;
}

void StepPlan::reset() noexcept {
  mode_ = StepMode::kIdle;
  lens_known_ = true;
  num_extends_ = 0;
  max_row_len_ = max_prefill_row_len_ = max_decode_row_len_ = 0;
  for (std::vector<int32_t>* v :
       {&seq_lens_, &prefix_lens_, &cu_rows_, &cu_decode_rows_, &positions_, &write_slots_, &row_lens_})
    v->clear();
  chunks_.chunks.clear();
  chunks_.cu_lens.clear();
  chunks_.num_extends = chunks_.num_loops = chunks_.max_tokens = 0;
}

void StepPlan::assign(const BatchStep& step, const StepLimits& limits) {
  reset();
  try {
    fill(step, limits);
  } catch (...) {
    reset();
    throw;
  }
}

namespace {

void check_limits(const StepLimits& limits) {
  if (limits.page_size < 1) fail_argument(kName, "page_size is {}; accepted: 1 and more", limits.page_size);
  if (limits.num_pages < 0) fail_argument(kName, "num_pages is {}; accepted: 0 and more", limits.num_pages);
  if (limits.max_context_len < 0 || limits.max_context_len > kMaxInt32)
    fail_argument(kName, "max_context_len is {}; accepted: 0 to {}", limits.max_context_len, kMaxInt32);
}

/// A bound as plans keep it: kCausalFromFirst is turned into kCausalFull.
RowBound kept(RowBound b) { return b == RowBound::kUniformBlock ? b : RowBound::kCausalFull; }

void check_decode_rows(int32_t q_len, RowBound bound) {
  if (q_len < 1 || q_len > kMaxQLen) fail_argument(kName, "q_len is {}; accepted: 1 to {}", q_len, kMaxQLen);
  if (bound > RowBound::kUniformBlock)
    fail_argument(kName, "decode_bound is {}; accepted: a RowBound", static_cast<int>(bound));
}

/// Slots are int32 in lists: page * page_size + page_size - 1 must fit.
int64_t page_limit(const StepLimits& limits) {
  const int64_t most = (kMaxInt32 + 1) / limits.page_size;
  return limits.num_pages > 0 ? std::min(limits.num_pages, most) : most;
}

void check_page(int64_t request, size_t cell, int32_t page, int64_t limit) {
  if (page < 0 || page >= limit)
    fail_argument(kName, "page {} of request {} is {}; accepted: 0 to {}", cell, request, page, limit - 1);
}

}  // namespace

int64_t StepPlan::max_len(const StepLimits& limits) const noexcept {
  return captured() ? std::min(limits.max_context_len, shape_.max_seq_len) : limits.max_context_len;
}

void StepPlan::check_captured(const BatchStep& step) const {
  if (step.num_extends() > 0)
    fail(ErrorCode::kUnsupported, kName, "the step is {}; accepted for a captured batch: decode",
         to_string(step_mode(step.num_extends(), step.num_requests())));
  if (step.q_len != shape_.q_len)
    fail_argument(kName, "q_len is {}; the captured batch has {}", step.q_len, shape_.q_len);
  if (step.num_requests() > shape_.num_requests)
    fail_argument(kName, "the step has {} requests; the captured batch has {}", step.num_requests(),
                  shape_.num_requests);
  if (kept(step.decode_bound) != shape_.decode_bound)
    fail_argument(kName, "decode_bound is {}; the captured batch has {}", to_string(step.decode_bound),
                  to_string(shape_.decode_bound));
}

void StepPlan::fill(const BatchStep& step, const StepLimits& limits) {
  if (captured()) check_captured(step);
  const int64_t num_given = step.num_requests();
  const int64_t num_requests = captured() ? shape_.num_requests : num_given;
  check_limits(limits);
  if (step.prefix_lens.size() != step.extend_lens.size())
    fail_argument(kName,
                  "prefix_lens has {} entries and extend_lens {}; accepted: as many, one for each extend request",
                  step.prefix_lens.size(), step.extend_lens.size());
  check_decode_rows(step.q_len, step.decode_bound);
  const StepMode mode = step_mode(step.num_extends(), num_requests);

  page_size_ = limits.page_size;
  q_len_ = step.q_len;
  num_extends_ = step.num_extends();
  decode_bound_ = kept(step.decode_bound);

  // Lengths, in their one meaning, and rows.
  cu_rows_.push_back(0);
  int64_t rows = 0;
  for (int64_t r = 0; r < num_requests; ++r) {
    int64_t len = r < num_given ? step.seq_lens[static_cast<size_t>(r)] : 0;
    if (len < 0) fail_argument(kName, "seq_lens[{}] is {}; accepted: 0 and more", r, len);
    if (r < num_extends_) {
      const int64_t prefix = step.prefix_lens[static_cast<size_t>(r)];
      const int64_t extend = step.extend_lens[static_cast<size_t>(r)];
      if (prefix < 0 || extend < 0)
        fail_argument(kName, "prefix_lens[{}] is {} and extend_lens[{}] {}; accepted: 0 and more", r, prefix, r,
                      extend);
      if (prefix + extend != len)
        fail_argument(kName,
                      "seq_lens[{}] is {}; prefix_lens + extend_lens is {} + {} (lengths include this step's tokens)",
                      r, len, prefix, extend);
      rows += extend;
    } else {
      if (step.decode_bound == RowBound::kCausalFromFirst && len > 0) len += step.q_len - 1;
      rows += step.q_len;
    }
    if (len > max_len(limits))
      fail_argument(kName, "seq_lens[{}] makes {} tokens; accepted: at most {}, {}", r, len,
                    max_len(limits) < limits.max_context_len ? "max_seq_len of the captured batch" : "max_context_len",
                    max_len(limits));
    if (rows > kMaxInt32) fail_argument(kName, "the step has more than 2^31 - 1 rows");
    seq_lens_.push_back(static_cast<int32_t>(len));
    cu_rows_.push_back(static_cast<int32_t>(rows));
  }
  for (int64_t r = num_extends_; r <= num_requests; ++r)
    cu_decode_rows_.push_back(cu_rows_[static_cast<size_t>(r)] - cu_rows_[static_cast<size_t>(num_extends_)]);
  prefix_lens_.assign(step.prefix_lens.begin(), step.prefix_lens.end());

  if (num_requests > 0) copy_table(step.pages, num_given, page_limit(limits));
  fill_rows();
  plan_prefix_chunks(prefix_lens_, limits.prefix_chunk_capacity, limits.page_size, chunks_);
  mode_ = mode;
}

void StepPlan::copy_table(const PageTableView& pages, int64_t num_given, int64_t page_limit) {
  std::optional<TableReader> reader;
  if (num_given > 0) reader.emplace(kName, pages, num_given);
  const auto row_of = [&](size_t r) {
    const auto request = static_cast<int64_t>(r);
    return request < num_given ? reader->row(request) : std::span<const int32_t>{};
  };
  int64_t columns = std::max(columns_, kMinColumns);
  const auto num_rows = seq_lens_.size();
  for (size_t r = 0; r < num_rows; ++r) {  // before any memory is taken for them
    const int64_t reach = static_cast<int64_t>(row_of(r).size()) * page_size_;
    if (seq_lens_[r] > reach)
      fail_argument(kName, "request {} has {} tokens; its row of the page table reaches {}", r, seq_lens_[r], reach);
    const int64_t needed = (int64_t{seq_lens_[r]} + page_size_ - 1) / page_size_;
    if (needed > columns) columns = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(needed)));
  }
  // Rows keep their cells from the step before; only what a row no longer uses is cleared.
  if (columns != columns_ || used_.size() != num_rows) {
    used_.assign(num_rows, 0);
    cells_.assign(static_cast<size_t>(checked_mul(kName, "the size of the page table", num_requests(), columns)), 0);
    columns_ = columns;
  }
  for (size_t r = 0; r < num_rows; ++r) {
    const std::span<const int32_t> row = row_of(r);
    const auto needed = static_cast<size_t>((int64_t{seq_lens_[r]} + page_size_ - 1) / page_size_);
    int32_t* cells = cells_.data() + r * static_cast<size_t>(columns_);
    const auto before = static_cast<size_t>(used_[r]);
    used_[r] = static_cast<int32_t>(std::max(needed, before));  // holds also when a page below is refused
    for (size_t c = 0; c < needed; ++c) {
      check_page(static_cast<int64_t>(r), c, row[c], page_limit);
      cells[c] = row[c];
    }
    if (before > needed) std::fill(cells + needed, cells + before, 0);
    used_[r] = static_cast<int32_t>(needed);
  }
}

void StepPlan::assign_unknown(int64_t max_seq_len, const StepLimits& limits) {
  if (!captured())
    fail_argument(kName, "lengths that are not known here need a captured plan; accepted: capture first");
  if (max_seq_len < 0) fail_argument(kName, "max_seq_len is {}; accepted: 0 and more", max_seq_len);
  BatchStep padding;
  padding.q_len = shape_.q_len;
  padding.decode_bound = shape_.decode_bound;
  assign(padding, limits);
  lens_known_ = false;
  max_row_len_ = max_decode_row_len_ = std::min(max_seq_len, max_len(limits));
}

void StepPlan::capture(const CaptureShape& given, const StepLimits& limits) {
  if (given.mode != StepMode::kDecode)
    fail(ErrorCode::kUnsupported, kName, "the mode to capture is {}; accepted: decode", to_string(given.mode));
  check_limits(limits);
  if (given.num_requests < 1) fail_argument(kName, "num_requests is {}; accepted: 1 and more", given.num_requests);
  check_decode_rows(given.q_len, given.decode_bound);
  const int64_t num_rows = int64_t{given.num_requests} * given.q_len;
  if (num_rows > kMaxInt32) fail_argument(kName, "the batch has more than 2^31 - 1 rows");
  CaptureShape shape = given;
  shape.decode_bound = kept(given.decode_bound);
  if (shape.max_seq_len == 0) shape.max_seq_len = limits.max_context_len;
  if (shape.max_seq_len < 1 || shape.max_seq_len > limits.max_context_len)
    fail_argument(kName, "max_seq_len is {}; accepted: 0, or 1 to max_context_len, {}", given.max_seq_len,
                  limits.max_context_len);
  if (captured() && !(shape == shape_))
    fail_argument(kName,
                  "a batch of {} requests of {} rows is captured for {} and {} tokens; given are {} of {}, {} and {}",
                  shape_.num_requests, shape_.q_len, to_string(shape_.decode_bound), shape_.max_seq_len,
                  shape.num_requests, shape.q_len, to_string(shape.decode_bound), shape.max_seq_len);
  reset();
  if (!captured()) {
    const auto n = static_cast<size_t>(shape.num_requests);
    const int64_t pages = shape.max_seq_len / limits.page_size + (shape.max_seq_len % limits.page_size != 0 ? 1 : 0);
    const int64_t columns = std::max(pages, kMinColumns);
    cells_.assign(static_cast<size_t>(checked_mul(kName, "the size of the page table", shape.num_requests, columns)),
                  0);
    used_.assign(n, 0);
    columns_ = columns;
    seq_lens_.reserve(n);
    cu_rows_.reserve(n + 1);
    cu_decode_rows_.reserve(n + 1);
    for (std::vector<int32_t>* v : {&positions_, &write_slots_, &row_lens_}) v->reserve(static_cast<size_t>(num_rows));
    shape_ = shape;
  }
  BatchStep padding;
  padding.q_len = shape.q_len;
  padding.decode_bound = shape.decode_bound;
  assign(padding, limits);
}

void StepPlan::advance(const StepPlan& from, std::span<const int32_t> seq_lens, const PageTableView& pages,
                       const StepLimits& limits) {
  check_limits(limits);
  const int64_t n = from.num_requests();
  if (n == 0) fail_argument(kName, "the step to go on from is idle; accepted: one with requests");
  if (!from.lens_known_)
    fail_argument(kName, "the lengths of the step to go on from lie on a device; accepted: a step of known lengths");
  if (static_cast<int64_t>(seq_lens.size()) != n)
    fail_argument(kName, "seq_lens has {} entries; the step to go on from has {} requests", seq_lens.size(), n);
  if (from.page_size_ != limits.page_size)
    fail_argument(kName, "page_size is {}; that of the step to go on from is {}", limits.page_size, from.page_size_);
  if (captured() && (shape_.num_requests != n || shape_.q_len != 1))
    fail_argument(kName, "the captured batch has {} requests of {} rows; the step needs {} of 1", shape_.num_requests,
                  shape_.q_len, n);
  const auto pages_of = [&](int64_t len) { return (len + limits.page_size - 1) / limits.page_size; };
  int64_t num_live = 0;  // up to the last request that is no padding
  for (int64_t r = 0; r < n; ++r) {
    const int64_t len = seq_lens[static_cast<size_t>(r)];
    if (len < 0 || len > max_len(limits))
      fail_argument(kName, "seq_lens[{}] is {}; accepted: 0 to {}", r, len, max_len(limits));
    if (len > 0) num_live = r + 1;
  }
  if (this == &from && !captured())
    fail_argument(kName, "a plan that is not captured cannot go on from itself; accepted: another plan");
  std::optional<TableReader> reader;
  if (num_live > 0 && (pages.pages.given() || pages.indptr.given())) reader.emplace(kName, pages, num_live);
  int64_t columns = std::max(columns_, kMinColumns);
  for (int64_t r = 0; r < num_live; ++r) {
    const int64_t len = seq_lens[static_cast<size_t>(r)];
    const std::span<const int32_t> row = reader ? reader->row(r) : std::span<const int32_t>{};
    const int64_t known = reader ? static_cast<int64_t>(row.size()) : from.used_[static_cast<size_t>(r)];
    if (pages_of(len) > known)
      fail_argument(kName, "request {} has {} tokens; {} reaches {}", r, len,
                    reader ? "its row of the page table" : "the step to go on from (give pages)",
                    known * limits.page_size);
    for (int64_t c = 0; reader && c < pages_of(len); ++c)
      check_page(r, static_cast<size_t>(c), row[static_cast<size_t>(c)], page_limit(limits));
    columns = std::max(columns, pages_of(len));
  }
  // Checked; from here on nothing throws but for want of memory.
  if (this != &from) {
    if (!captured()) {
      if (columns < from.columns_) columns = from.columns_;
      else if (columns > columns_) columns = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(columns)));
      if (columns != columns_ || static_cast<int64_t>(used_.size()) != n) {
        cells_.assign(static_cast<size_t>(checked_mul(kName, "the size of the page table", n, columns)), 0);
        used_.assign(static_cast<size_t>(n), 0);
        columns_ = columns;
      }
    }
    for (size_t r = 0; r < static_cast<size_t>(n); ++r) {
      const int32_t copied = std::min(from.used_[r], static_cast<int32_t>(columns_));
      const int32_t* source = from.cells_.data() + r * static_cast<size_t>(from.columns_);
      int32_t* cells = cells_.data() + r * static_cast<size_t>(columns_);
      std::copy(source, source + copied, cells);
      if (used_[r] > copied) std::fill(cells + copied, cells + used_[r], 0);
      used_[r] = copied;
    }
  }
  if (reader) {
    for (int64_t r = 0; r < num_live; ++r) {
      const auto needed = static_cast<int32_t>(pages_of(seq_lens[static_cast<size_t>(r)]));
      const std::span<const int32_t> row = reader->row(r);
      std::copy(row.begin(), row.begin() + needed, cells_.begin() + r * columns_);
      int32_t& used = used_[static_cast<size_t>(r)];
      used = std::max(used, needed);
    }
  }
  reset();
  page_size_ = limits.page_size;
  q_len_ = 1;
  decode_bound_ = captured() ? shape_.decode_bound : RowBound::kCausalFull;
  seq_lens_.assign(seq_lens.begin(), seq_lens.end());
  for (int64_t r = 0; r <= n; ++r) {
    cu_rows_.push_back(static_cast<int32_t>(r));
    cu_decode_rows_.push_back(static_cast<int32_t>(r));
  }
  fill_rows();
  mode_ = StepMode::kDecode;
}

void StepPlan::fill_rows() {
  const auto rows = static_cast<size_t>(num_rows());
  positions_.resize(rows);
  write_slots_.resize(rows);
  row_lens_.resize(rows);
  size_t t = 0;
  for (int64_t r = 0; r < num_requests(); ++r) {
    const int64_t len = seq_lens_[static_cast<size_t>(r)];
    const int64_t count = rows_of_request(r).size();
    const RowBound bound = r < num_extends_ ? RowBound::kCausalFull : decode_bound_;
    int64_t& max_len = r < num_extends_ ? max_prefill_row_len_ : max_decode_row_len_;
    for (int64_t j = 0; j < count; ++j, ++t) {
      const int64_t position = len - count + j;
      positions_[t] = static_cast<int32_t>(std::max<int64_t>(position, 0));
      write_slots_[t] = position < 0 ? -1 : static_cast<int32_t>(slot_of(r, position));
      const int64_t sees = row_bound(bound, len, count, j);
      row_lens_[t] = static_cast<int32_t>(sees);
      max_len = std::max(max_len, sees);
    }
  }
  max_row_len_ = std::max(max_prefill_row_len_, max_decode_row_len_);
}

Range StepPlan::requests(StepRows part) const noexcept {
  switch (part) {
    case StepRows::kPrefill: return {0, num_extends_};
    case StepRows::kDecode: return {num_extends_, num_requests()};
    case StepRows::kAll: break;
  }
  return {0, num_requests()};
}

Range StepPlan::rows(StepRows part) const noexcept {
  if (cu_rows_.empty()) return {};
  const Range r = requests(part);
  return {cu_rows_[static_cast<size_t>(r.begin)], cu_rows_[static_cast<size_t>(r.end)]};
}

int64_t StepPlan::request_of_row(int64_t row) const noexcept {
  return std::upper_bound(cu_rows_.begin(), cu_rows_.end(), row) - cu_rows_.begin() - 1;
}

int64_t StepPlan::max_row_len(StepRows part) const noexcept {
  return part == StepRows::kPrefill  ? max_prefill_row_len_
         : part == StepRows::kDecode ? max_decode_row_len_
                                     : max_row_len_;
}

PageTableView StepPlan::pages(StepRows part) const noexcept {
  const Range r = requests(part);
  return PageTableView::padded(view(cells_.data() + r.begin * columns_, {r.size(), columns_}));
}

TensorView StepPlan::cu_q_lens(StepRows part) const noexcept {
  if (part == StepRows::kDecode) return view(cu_decode_rows_.data(), {static_cast<int64_t>(cu_decode_rows_.size())});
  return view(cu_rows_.data(), {requests(part).size() + 1});
}

TensorView StepPlan::seq_lens_view(StepRows part) const noexcept {
  const Range r = requests(part);
  return view(seq_lens_.data() + r.begin, {r.size()});
}

void StepPlan::fill_chunk_slots(const PrefixChunk& chunk, std::span<int32_t> slots) const {
  if (static_cast<int64_t>(slots.size()) < chunk.num_tokens)
    fail_argument("StepPlan::fill_chunk_slots", "slots has {} entries; the chunk has {} tokens", slots.size(),
                  chunk.num_tokens);
  size_t t = 0;
  for (int64_t r = chunk.first_request; r < chunk.first_request + chunk.num_requests; ++r) {
    const int64_t end = std::min<int64_t>(prefix_lens_[static_cast<size_t>(r)], chunk.begin + chunks_.chunk_len);
    for (int64_t p = chunk.begin; p < end; ++p) slots[t++] = static_cast<int32_t>(slot_of(r, p));
  }
}

}  // namespace v0
}  // namespace gannet
