// Owners of the paged KV cache: who has which page (PageAllocator), where a request's pages lie (PageTable), and the
// memory of latent rows (LatentPool) and index keys (IndexKPool). An engine with pages of its own needs none of them:
// backends and operations take the views of gannet/kv_cache.h and gannet/page_table.h.
//
//   gannet::PageAllocator pages(1024);                       // page 0 is never handed out
//   gannet::LatentPool latent({.num_layers = 61, .num_pages = 1024});
//   gannet::PageList mine = pages.acquire(pages_for(prompt_len, 64));
//   gannet::PageTable table(max_requests, max_pages);
//   table.set_row(0, mine.ids());
//
// Thread safety: none of these is used by two threads at once. References count without atomics.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "gannet/kv_cache.h"
#include "gannet/layer_caches.h"
#include "gannet/memory.h"
#include "gannet/page_table.h"

namespace gannet {
inline namespace v0 {

using PageId = int32_t;

/// Page 0 is a dummy: cleared at creation, never handed out; unused table cells point to it.
inline constexpr PageId kReservedPage = 0;

// ---- sizes: pure arithmetic ---------------------------------------------------------------------------------------

/// ceil(tokens / page_size); 0 for no tokens. Throws for negative tokens or a page size below 1.
GANNET_API int64_t pages_for(int64_t tokens, int32_t page_size);

struct LatentPoolOptions {
  int32_t num_layers = 0;
  LatentFormat format = LatentFormat::kBf16;
  RowGeometry geometry{};
  int64_t num_pages = 0;  ///< page 0 included
  int32_t page_size = 64;
  int64_t page_stride_bytes = 0;  ///< 0: the page's bytes rounded up to kBaseAlignment
  float scale = 0.0f;             ///< kE4m3: finite and positive, fixed here; any other format: 0
};

struct IndexKPoolOptions {
  std::vector<int32_t> layers = {};  ///< the layers that have an indexer, ascending; others get no memory
  IndexKFormat format = IndexKFormat::kE4m3;
  ScaleFormat scale_format = ScaleFormat::kFp32;
  int32_t head_dim = 128;
  int64_t num_pages = 0;  ///< page 0 included
  int32_t page_size = 64;
  int64_t page_stride_bytes = 0;  ///< 0: the page's bytes rounded up to kBaseAlignment
  bool hadamard = false;          ///< keys are kept rotated, for the life of the pool; head_dim is a power of two
};

struct PoolSizes {
  int64_t token_bytes = 0;         ///< of one layer
  int64_t page_bytes = 0;          ///< page_size * token_bytes
  int64_t page_stride_bytes = 0;   ///< from one page to the next
  int64_t layer_stride_bytes = 0;  ///< num_pages * page_stride_bytes rounded up to 4 KiB
  int64_t total_bytes = 0;
};

/// Throws Error(kInvalidArgument) for options outside the contract and for sizes beyond 2^63 - 1 bytes or slots
/// beyond 2^31 - 1 (lists of slots are int32). One layer's numbers hold for every layer of the pool.
GANNET_API PoolSizes latent_pool_sizes(const LatentPoolOptions& options);
GANNET_API PoolSizes index_k_pool_sizes(const IndexKPoolOptions& options);

// ---- pages --------------------------------------------------------------------------------------------------------

namespace detail {
struct PagePool;
}

/// One counted reference to a page; copying shares the page, the last one gives it back. Only PageAllocator and
/// PageList make them, so that a page cannot be given back twice or to a stranger. May outlive the allocator.
class GANNET_API PageRef {
 public:
  PageRef() = default;
  PageRef(const PageRef& other);
  PageRef(PageRef&& other) noexcept;
  PageRef& operator=(PageRef other) noexcept;
  ~PageRef();

  /// kReservedPage for an empty reference.
  PageId id() const noexcept { return id_; }
  explicit operator bool() const noexcept { return id_ != kReservedPage; }
  /// References to this page, this one included; 0 for an empty reference.
  int64_t use_count() const noexcept;

 private:
  friend class PageList;
  PageRef(std::shared_ptr<detail::PagePool> pool, PageId id) noexcept;  // takes over one count
  std::shared_ptr<detail::PagePool> pool_;
  PageId id_ = kReservedPage;
};

/// The pages of a request in the order of their tokens, one counted reference each. Movable; share() copies.
class GANNET_API PageList {
 public:
  PageList() = default;
  PageList(PageList&& other) noexcept;
  PageList& operator=(PageList&& other) noexcept;
  PageList(const PageList&) = delete;
  PageList& operator=(const PageList&) = delete;
  ~PageList();

  int64_t size() const noexcept { return static_cast<int64_t>(ids_.size()); }
  bool empty() const noexcept { return ids_.empty(); }
  std::span<const PageId> ids() const noexcept { return ids_; }
  /// A further reference to page i of the list.
  PageRef ref(int64_t i) const;
  /// Further references to pages [begin, begin + count): a common prefix of two requests.
  PageList share(int64_t begin, int64_t count) const;
  /// Appends; both must come from the same allocator.
  void append(PageList&& tail);
  void append(PageRef page);
  /// Gives back all but the first `count` references.
  void truncate(int64_t count);
  void clear() noexcept;

 private:
  friend class PageAllocator;
  std::shared_ptr<detail::PagePool> pool_;
  std::vector<PageId> ids_;
};

/// Hands out page numbers; knows nothing of what lies in them. A fresh allocator hands out 1, 2, 3, ...; later the
/// page given back last goes first, for it is the likeliest to be in a cache.
class GANNET_API PageAllocator {
 public:
  /// Pages 0 .. num_pages - 1, of which page 0 is reserved. num_pages is at least 1.
  explicit PageAllocator(int64_t num_pages);
  PageAllocator(const PageAllocator&) = delete;
  PageAllocator& operator=(const PageAllocator&) = delete;
  ~PageAllocator();

  /// `count` pages, or none: Error(kOutOfMemory) leaves the allocator as it was.
  PageList acquire(int64_t count);
  /// The same, nullopt where too few are free.
  std::optional<PageList> try_acquire(int64_t count);

  int64_t num_pages() const noexcept;  ///< page 0 included
  int64_t num_free() const noexcept;
  int64_t num_used() const noexcept { return num_pages() - 1 - num_free(); }

 private:
  std::shared_ptr<detail::PagePool> pool_;
};

// ---- page tables --------------------------------------------------------------------------------------------------

/// A page table in CSR form: pages of request i are indices[indptr[i]] .. indices[indptr[i + 1] - 1].
struct CsrPageTable {
  std::vector<int32_t> indptr;
  std::vector<int32_t> indices;
  /// Valid while the vectors live and do not grow.
  PageTableView view() const;
};

/// A padded page table in host memory: int32 [rows, max_pages]. Unused cells are 0, always.
class GANNET_API PageTable {
 public:
  PageTable(int32_t rows, int32_t max_pages);

  int32_t rows() const noexcept { return rows_; }
  int32_t max_pages() const noexcept { return max_pages_; }
  /// Number of pages in a row.
  int32_t num_pages(int32_t row) const;
  std::span<const int32_t> row(int32_t row) const;  ///< [max_pages]

  /// Replaces a row; the rest of it becomes 0.
  void set_row(int32_t row, std::span<const PageId> pages);
  /// Appends to a row.
  void append(int32_t row, std::span<const PageId> pages);
  void clear_row(int32_t row) { set_row(row, {}); }

  /// Row i of the table belongs to request i, or request i's row stands in row_indices: int32 [num_requests], kept by
  /// the caller. Valid while the table lives.
  PageTableView view(TensorView row_indices = {}) const;
  /// The given rows in CSR form, in their order.
  CsrPageTable csr(std::span<const int32_t> rows) const;

 private:
  void check_row(const char* function, int32_t row) const;
  int32_t rows_;
  int32_t max_pages_;
  std::vector<int32_t> cells_;
  std::vector<int32_t> used_;
};

// ---- memory -------------------------------------------------------------------------------------------------------

/// Latent rows of all layers. Page 0 of every layer is cleared at creation; other pages hold whatever the memory held.
class GANNET_API LatentPool {
 public:
  /// The resource must outlive the pool.
  explicit LatentPool(const LatentPoolOptions& options, MemoryResource& resource = host_memory());

  const LatentPoolOptions& options() const noexcept { return options_; }
  const PoolSizes& sizes() const noexcept { return sizes_; }
  int64_t num_slots() const noexcept { return options_.num_pages * options_.page_size; }
  LatentCacheView layer(int32_t layer) const;

 private:
  LatentPoolOptions options_;
  PoolSizes sizes_;
  Device device_;
  Buffer memory_;
};

/// Index keys of the layers that have an indexer. Page 0 is cleared at creation.
class GANNET_API IndexKPool {
 public:
  explicit IndexKPool(const IndexKPoolOptions& options, MemoryResource& resource = host_memory());

  const IndexKPoolOptions& options() const noexcept { return options_; }
  const PoolSizes& sizes() const noexcept { return sizes_; }
  bool has_layer(int32_t layer) const noexcept;
  /// Throws for a layer without an indexer.
  IndexCacheView layer(int32_t layer) const;

 private:
  int64_t place_of(int32_t layer) const noexcept;  // -1: none
  IndexKPoolOptions options_;
  PoolSizes sizes_;
  Device device_;
  Buffer memory_;
};

/// The caches of every layer of `latent`, with the index caches of the layers that have one: what backends bind and
/// pages travel by (gannet/kv_transfer.h). Throws where an index layer is not one of latent's.
GANNET_API std::vector<LayerCaches> layer_caches(const LatentPool& latent, const IndexKPool* index = nullptr);

}  // namespace v0
}  // namespace gannet
