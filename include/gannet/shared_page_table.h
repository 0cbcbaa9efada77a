// The page table and the lengths of a batch of decode requests, where the kernels read them, as one object that several
// captured batches share: those of a target and of its draft, of one backend or of several. Refreshed once a step by
// whichever of them comes first; who still uses the step before is told so.
//
//   gannet::SharedPageTable table({.num_requests = 64, .max_seq_len = 8192, .num_pages = n, .lookahead = 3}, memory);
//   target->capture({.num_requests = 64, .q_len = 4}, table);
//   draft->capture({.num_requests = 64, .q_len = 1}, table);
//   each step, in either order:
//     table.refresh(step, seq_lens, pages, stream);  // the first call of a step copies, the other finds it done
//     target->refresh({.table = &table, .generation = step, .q_len = 4});
//     draft->refresh({.table = &table, .generation = step, .q_len = 1, .seq_lens = accepted_lens, .steps = 1});
//
// Lengths may lie on the device alone: a kernel of the caller's writes seq_lens() (an accept, an advance of a draft),
// mark() says that they are the next step's, and nothing waits for the device. What is planned from them is bounded by
// max_seq_len instead of by the longest request: memory is taken for it, AttendAll of `dsa` counts it, and a longer
// length is cut to it.
//
// On a CUDA device the copies of refresh() and the kernel of a backend's refresh go into streams: the same one, or
// ordered by the caller. A backend's refresh may be captured into a graph, in front of the layers: a replay then takes
// the lengths and pages that the table has by then, and as nothing of it runs on the host, no replay is told that it is
// stale. table.refresh() is not for a graph.
//
// Errors: Error(kInvalidArgument) with argument, value and what is accepted. Thread safety: one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "gannet/memory.h"
#include "gannet/page_table.h"

namespace gannet {
inline namespace v0 {

struct SharedPageTableOptions {
  int32_t num_requests = 0;  ///< at least 1, those included that pad a smaller batch
  int64_t max_seq_len = 0;   ///< tokens of a request at most, drafts included: makes the table's width
  int32_t page_size = 64;
  int64_t num_pages = 0;  ///< of the pool: pages are checked against it; 0: not checked
  int32_t lookahead = 0;  ///< tokens beyond its length for which a request has pages: what drafts of a step reach
};

class GANNET_API SharedPageTable {
 public:
  /// Of generation 0, all requests padding. The resource outlives the table, and says on which device it lies.
  explicit SharedPageTable(const SharedPageTableOptions& options, MemoryResource& resource = host_memory());
  ~SharedPageTable();
  SharedPageTable(const SharedPageTable&) = delete;
  SharedPageTable& operator=(const SharedPageTable&) = delete;

  const SharedPageTableOptions& options() const noexcept { return options_; }
  Device device() const noexcept { return device_; }

  /// Makes the table that of generation `generation`, a number of the caller's that grows from step to step: copies the
  /// lengths of up to num_requests requests (the others are padding, length 0), and of each its pages as far as
  /// min(length + lookahead, max_seq_len) needs them. Both lie in host memory and are done with when this returns.
  /// True where it did; false, and nothing is looked at, where the table is of that generation already. Throws for an
  /// older generation, more requests, a length below 0 or beyond max_seq_len, a row of `pages` that does not reach, a
  /// page outside the pool, and leaves the table as it was.
  bool refresh(uint64_t generation, std::span<const int32_t> seq_lens, const PageTableView& pages, Stream stream = {});
  /// Makes it that of generation `generation` with what is, or will be when the stream comes there, in seq_lens() and
  /// pages(). Throws unless the generation grows.
  void mark(uint64_t generation);
  uint64_t generation() const noexcept { return generation_; }

  /// int32 [num_requests], tokens, 0: padding; on the device. A kernel of the caller's may write it.
  TensorView seq_lens() const noexcept;
  /// int32 [num_requests, columns], padded form, cells that nobody needs 0; on the device.
  PageTableView pages() const noexcept;

 private:
  struct Host;  // what a copy goes through

  SharedPageTableOptions options_;
  Device device_;
  int64_t columns_ = 0;
  int64_t pages_offset_ = 0;  // bytes
  uint64_t generation_ = 0;
  Buffer memory_;
  std::unique_ptr<Host> host_;
};

/// A decode step whose lengths and pages are a shared table's.
struct SharedStep {
  const SharedPageTable* table = nullptr;  ///< outlives the step
  /// That the step belongs to: has to be the table's now, and as long as the step is used.
  uint64_t generation = 0;
  int32_t q_len = 1;                              ///< rows of each request
  RowBound decode_bound = RowBound::kCausalFull;  ///< what a length means; as captured
  /// int32 [num_requests] on the table's device, instead of the table's own: those of a draft.
  TensorView seq_lens = {};
  int32_t steps = 0;  ///< added to each length, 0 stays 0: a draft's later steps
};

}  // namespace v0
}  // namespace gannet
