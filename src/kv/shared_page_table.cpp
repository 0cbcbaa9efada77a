#include "gannet/shared_page_table.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "core/checked.h"
#include "cuda/runtime.h"
#include "plan/table_reader.h"

namespace gannet {
inline namespace v0 {
namespace {

constexpr const char* kName = "SharedPageTable";
constexpr int64_t kCell = sizeof(int32_t);

}  // namespace

struct SharedPageTable::Host {
  std::vector<int32_t> cells;  // [num_requests, columns]: the next generation, until it is checked
  std::vector<int32_t> seq_lens;
  std::unique_ptr<cuda::Staging> staging;  // on a CUDA device
};

SharedPageTable::SharedPageTable(const SharedPageTableOptions& o, MemoryResource& resource)
    : options_(o), device_(resource.device()), host_(std::make_unique<Host>()) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (o.num_requests < 1) fail_argument(kName, "num_requests is {}; accepted: 1 and more", o.num_requests);
  if (o.page_size < 1) fail_argument(kName, "page_size is {}; accepted: 1 and more", o.page_size);
  if (o.max_seq_len < 1 || o.max_seq_len > kMost)
    fail_argument(kName, "max_seq_len is {}; accepted: 1 to {}", o.max_seq_len, kMost);
  if (o.num_pages < 0) fail_argument(kName, "num_pages is {}; accepted: 0 and more", o.num_pages);
  if (o.lookahead < 0) fail_argument(kName, "lookahead is {}; accepted: 0 and more", o.lookahead);
  constexpr int64_t kMinColumns = 4;  // rows stay aligned to kBaseAlignment
  columns_ = std::max(kMinColumns, (o.max_seq_len + o.page_size - 1) / o.page_size);
  pages_offset_ = checked_round_up(kName, "the size", o.num_requests * kCell, Buffer::kAlignment);
  const int64_t cells = checked_mul(kName, "the size", o.num_requests, columns_);
  const int64_t bytes = checked_add(kName, "the size", pages_offset_, checked_mul(kName, "the size", cells, kCell));
  memory_ = Buffer(static_cast<size_t>(bytes), resource);
  host_->cells.resize(static_cast<size_t>(cells));
  host_->seq_lens.resize(static_cast<size_t>(o.num_requests));
  if (device_.kind == DeviceKind::kCpu) {
    std::memset(memory_.data(), 0, memory_.size());
    return;
  }
  host_->staging = std::make_unique<cuda::Staging>(device_.index);
  cuda::clear(kName, device_.index, memory_.data(), memory_.size(), {});
  cuda::wait(kName, device_.index, {});  // whatever stream comes next finds it cleared
}

SharedPageTable::~SharedPageTable() = default;

TensorView SharedPageTable::seq_lens() const noexcept {
  return view(memory_.data(), DType::kI32, {options_.num_requests}, device_);
}

PageTableView SharedPageTable::pages() const noexcept {
  return PageTableView::padded(
      view(memory_.data() + pages_offset_, DType::kI32, {options_.num_requests, columns_}, device_));
}

void SharedPageTable::mark(uint64_t generation) {
  if (generation <= generation_)
    fail_argument(kName, "generation is {}; accepted: more than that of the table, {}", generation, generation_);
  generation_ = generation;
}

bool SharedPageTable::refresh(uint64_t generation, std::span<const int32_t> seq_lens, const PageTableView& pages,
                              Stream stream) {
  if (generation == generation_ && generation > 0) return false;
  if (generation <= generation_)
    fail_argument(kName, "generation is {}; accepted: that of the table, {}, or more", generation, generation_);
  const auto given = static_cast<int64_t>(seq_lens.size());
  if (given > options_.num_requests)
    fail_argument(kName, "seq_lens has {} entries; accepted: at most num_requests, {}", given, options_.num_requests);
  if (device_.kind == DeviceKind::kCuda) cuda::refuse_capture(kName, device_.index, stream);
  const int64_t page_limit = options_.num_pages > 0 ? options_.num_pages : std::numeric_limits<int32_t>::max();
  std::fill(host_->seq_lens.begin(), host_->seq_lens.end(), 0);
  std::fill(host_->cells.begin(), host_->cells.end(), 0);
  int64_t widest = 0;
  if (given > 0) {
    const TableReader reader(kName, pages, given);
    for (int64_t r = 0; r < given; ++r) {
      const int64_t len = seq_lens[static_cast<size_t>(r)];
      if (len < 0 || len > options_.max_seq_len)
        fail_argument(kName, "seq_lens[{}] is {}; accepted: 0 to max_seq_len, {}", r, len, options_.max_seq_len);
      host_->seq_lens[static_cast<size_t>(r)] = static_cast<int32_t>(len);
      if (len == 0) continue;
      const int64_t reach = std::min<int64_t>(len + options_.lookahead, options_.max_seq_len);
      const int64_t needed = (reach + options_.page_size - 1) / options_.page_size;
      const std::span<const int32_t> row = reader.row(r);
      if (static_cast<int64_t>(row.size()) < needed)
        fail_argument(kName, "request {} has {} tokens and {} of lookahead; its row of the page table reaches {}", r,
                      len, options_.lookahead, static_cast<int64_t>(row.size()) * options_.page_size);
      for (int64_t c = 0; c < needed; ++c) {
        const int32_t page = row[static_cast<size_t>(c)];
        if (page < 0 || page >= page_limit)
          fail_argument(kName, "page {} of request {} is {}; accepted: 0 to {}", c, r, page, page_limit - 1);
        host_->cells[static_cast<size_t>(r * columns_ + c)] = page;
      }
      widest = std::max(widest, needed);
    }
  }
  const size_t lens_bytes = host_->seq_lens.size() * sizeof(int32_t), row_bytes = static_cast<size_t>(columns_ * kCell);
  const auto rows = static_cast<size_t>(options_.num_requests);
  if (device_.kind == DeviceKind::kCpu) {
    std::memcpy(memory_.data(), host_->seq_lens.data(), lens_bytes);
    std::memcpy(memory_.data() + pages_offset_, host_->cells.data(), row_bytes * rows);
  } else {
    // What lies beyond the longest request is left as it was: nobody reads it.
    const size_t used = static_cast<size_t>(widest * kCell), table_at = static_cast<size_t>(pages_offset_);
    std::byte* staged = host_->staging->begin(kName, table_at + used * rows);
    std::memcpy(staged, host_->seq_lens.data(), lens_bytes);
    for (size_t r = 0; r < rows; ++r)
      std::memcpy(staged + table_at + r * used, host_->cells.data() + r * static_cast<size_t>(columns_), used);
    cuda::copy(kName, device_.index, memory_.data(), staged, lens_bytes, stream);
    cuda::copy_rows(kName, device_.index, memory_.data() + pages_offset_, row_bytes, staged + table_at, used, used,
                    rows, stream);
    host_->staging->done(kName, stream);
  }
  generation_ = generation;
  return true;
}

}  // namespace v0
}  // namespace gannet
