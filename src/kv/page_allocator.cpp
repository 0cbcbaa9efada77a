// Pages and their counted references. The pool's state is shared by the allocator and every reference, so that a
// reference that outlives the allocator still has something to give its page back to.
#include <limits>
#include <utility>

#include "core/format.h"
#include "gannet/kv_pool.h"

namespace gannet {
inline namespace v0 {
namespace detail {

struct PagePool {
  std::vector<int64_t> counts;  // [num_pages]; page 0 is never counted
  std::vector<PageId> free;     // the last one goes first

  void add(PageId id) noexcept { ++counts[static_cast<size_t>(id)]; }
  // `free` has room for every page from the start: giving back never allocates.
  void drop(PageId id) noexcept {
    if (--counts[static_cast<size_t>(id)] == 0) free.push_back(id);
  }
};

}  // namespace detail

// ---- PageRef ----

PageRef::PageRef(std::shared_ptr<detail::PagePool> pool, PageId id) noexcept : pool_(std::move(pool)), id_(id) {}

PageRef::PageRef(const PageRef& other) : pool_(other.pool_), id_(other.id_) {
  if (pool_ != nullptr) pool_->add(id_);
}

PageRef::PageRef(PageRef&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), id_(std::exchange(other.id_, kReservedPage)) {}

PageRef& PageRef::operator=(PageRef other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(id_, other.id_);
  return *this;
}

PageRef::~PageRef() {
  if (pool_ != nullptr) pool_->drop(id_);
}

int64_t PageRef::use_count() const noexcept { return pool_ != nullptr ? pool_->counts[static_cast<size_t>(id_)] : 0; }

// ---- PageList ----

PageList::PageList(PageList&& other) noexcept
    : pool_(std::exchange(other.pool_, nullptr)), ids_(std::exchange(other.ids_, {})) {}

PageList& PageList::operator=(PageList&& other) noexcept {
  PageList moved(std::move(other));
  std::swap(pool_, moved.pool_);
  std::swap(ids_, moved.ids_);
  return *this;
}

PageList::~PageList() { clear(); }

PageRef PageList::ref(int64_t i) const {
  if (i < 0 || i >= size()) fail_argument("PageList::ref", "i is {}; accepted: 0 to {}", i, size() - 1);
  const PageId id = ids_[static_cast<size_t>(i)];
  pool_->add(id);
  return PageRef(pool_, id);
}

PageList PageList::share(int64_t begin, int64_t count) const {
  if (begin < 0 || count < 0 || begin > size() || count > size() - begin)
    fail_argument("PageList::share", "begin is {} and count {}; the list has {} pages", begin, count, size());
  PageList shared;
  shared.pool_ = pool_;
  shared.ids_.assign(ids_.begin() + begin, ids_.begin() + begin + count);
  for (const PageId id : shared.ids_) pool_->add(id);
  return shared;
}

void PageList::append(PageList&& tail) {
  if (this == &tail) fail_argument("PageList::append", "a list cannot be appended to itself");
  if (tail.empty()) return;
  if (!empty() && pool_ != tail.pool_) fail_argument("PageList::append", "the pages come from another allocator");
  ids_.insert(ids_.end(), tail.ids_.begin(), tail.ids_.end());
  pool_ = tail.pool_;
  tail.ids_.clear();  // its counts are ours now
}

void PageList::append(PageRef page) {
  if (!page) fail_argument("PageList::append", "the reference is empty");
  if (!empty() && pool_ != page.pool_) fail_argument("PageList::append", "the page comes from another allocator");
  ids_.push_back(page.id_);
  pool_ = std::exchange(page.pool_, nullptr);
  page.id_ = kReservedPage;
}

void PageList::truncate(int64_t count) {
  if (count < 0) fail_argument("PageList::truncate", "count is {}; accepted: 0 and more", count);
  while (size() > count) {
    pool_->drop(ids_.back());
    ids_.pop_back();
  }
}

void PageList::clear() noexcept {
  // Backwards, so that the first page goes first when it is acquired again.
  for (; !ids_.empty(); ids_.pop_back()) pool_->drop(ids_.back());
}

// ---- PageAllocator ----

PageAllocator::PageAllocator(int64_t num_pages) {
  constexpr int64_t kMost = std::numeric_limits<PageId>::max();
  if (num_pages < 1 || num_pages > kMost)
    fail_argument("PageAllocator", "num_pages is {}; accepted: 1 to {} (page 0 is reserved)", num_pages, kMost);
  pool_ = std::make_shared<detail::PagePool>();
  pool_->counts.assign(static_cast<size_t>(num_pages), 0);
  pool_->free.reserve(static_cast<size_t>(num_pages));
  for (int64_t id = num_pages - 1; id > kReservedPage; --id) pool_->free.push_back(static_cast<PageId>(id));
}

PageAllocator::~PageAllocator() = default;

std::optional<PageList> PageAllocator::try_acquire(int64_t count) {
  if (count < 0) fail_argument("PageAllocator::acquire", "count is {}; accepted: 0 and more", count);
  if (count > num_free()) return std::nullopt;
  PageList list;
  list.pool_ = pool_;
  list.ids_.assign(pool_->free.rbegin(), pool_->free.rbegin() + count);
  pool_->free.resize(pool_->free.size() - static_cast<size_t>(count));
  for (const PageId id : list.ids_) pool_->add(id);
  return list;
}

PageList PageAllocator::acquire(int64_t count) {
  std::optional<PageList> list = try_acquire(count);
  if (!list)
    fail(ErrorCode::kOutOfMemory, "PageAllocator::acquire", "{} pages are wanted; {} of {} are free", count, num_free(),
         num_pages() - 1);
  return std::move(*list);
}

int64_t PageAllocator::num_pages() const noexcept { return static_cast<int64_t>(pool_->counts.size()); }
int64_t PageAllocator::num_free() const noexcept { return static_cast<int64_t>(pool_->free.size()); }

}  // namespace v0
}  // namespace gannet
