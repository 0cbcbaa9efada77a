// One forward step of a batch as host arithmetic: which rows belong to which request, what each row sees, where its
// KV goes, and in which chunks long prefixes are attended. Nothing here touches a device.
//
// Order within a step: the requests that extend (prefill) come first, then those that decode; query rows likewise: all
// rows of extend requests, ragged, in request order, then q_len rows of each decode request.
//
// Thread safety: ordinary values.
#pragma once

#include <span>
#include <vector>

#include "gannet/page_table.h"

namespace gannet {
inline namespace v0 {

// ---- modes --------------------------------------------------------------------------------------------------------

/// What a step does (spec 1.1). Speculative verify is kDecode with q_len > 1.
enum class StepMode : uint8_t { kIdle, kExtend, kDecode, kMixed };

GANNET_API const char* to_string(StepMode m) noexcept;

/// No requests: kIdle; some of them extend: kMixed; all: kExtend; none: kDecode. Throws for num_extends outside
/// [0, num_requests].
GANNET_API StepMode step_mode(int64_t num_extends, int64_t num_requests);

constexpr bool is_idle(StepMode m) noexcept { return m == StepMode::kIdle; }
constexpr bool is_extend(StepMode m) noexcept { return m == StepMode::kExtend; }
constexpr bool is_decode(StepMode m) noexcept { return m == StepMode::kDecode; }
constexpr bool is_mixed(StepMode m) noexcept { return m == StepMode::kMixed; }
constexpr bool is_extend_or_mixed(StepMode m) noexcept { return is_extend(m) || is_mixed(m); }
constexpr bool is_decode_or_idle(StepMode m) noexcept { return is_decode(m) || is_idle(m); }

// ---- prefix chunks ------------------------------------------------------------------------------------------------

/// One non-causal pass over a part of the prefixes of requests [first_request, first_request + num_requests); the other
/// extend requests have no keys in it.
struct PrefixChunk {
  int32_t first_request = 0;
  int32_t num_requests = 0;
  int64_t begin = 0;       ///< position of the first token, the same in every request
  int64_t num_tokens = 0;  ///< over its requests, at least 1
  int32_t max_len = 0;     ///< longest part of one request
};

/// How the prefixes of a step's extend requests are cut (spec 2.5, 0.1.8):
///   chunk_len = max(unit, floor(capacity / num_extends / unit) * unit)
/// chunk i of request r covers positions [i * chunk_len, min(prefix_r, (i + 1) * chunk_len)). Where
/// num_extends * unit exceeds the capacity a chunk holds only as many requests, consecutive ones, as fit (at least
/// one). A chunk in which no request has tokens is left out.
struct PrefixChunkPlan {
  int64_t chunk_len = 0;
  int64_t num_loops = 0;  ///< ceil(longest prefix / chunk_len)
  int64_t requests_per_chunk = 0;
  int64_t max_tokens = 0;  ///< of one chunk: sizes the scratch
  std::vector<PrefixChunk> chunks;
  int64_t num_extends = 0;
  std::vector<int32_t> cu_lens;  ///< [chunks, num_extends + 1]

  /// Cumulative lengths of all extend requests in chunk i, [num_extends + 1], from 0; a request may have none.
  std::span<const int32_t> cu_kv_lens(size_t i) const noexcept {
    const auto width = static_cast<size_t>(num_extends) + 1;
    return std::span(cu_lens).subspan(i * width, width);
  }
};

/// Chunks times requests that a chunk plan may hold: far beyond any use (a prefix of a million tokens in pages of 64 is
/// 16,384 chunks), and little enough memory (64 MiB) that no caller can ask for all of it by mistake.
inline constexpr int64_t kMaxPrefixChunkEntries = int64_t{1} << 24;

/// Fills `plan`, reusing its memory. Throws for capacity or unit below 1, a negative prefix, or more than
/// kMaxPrefixChunkEntries.
GANNET_API void plan_prefix_chunks(std::span<const int32_t> prefix_lens, int64_t capacity, int64_t unit,
                                   PrefixChunkPlan& plan);

// ---- steps --------------------------------------------------------------------------------------------------------

/// Rows that a decode request may have in a step: far beyond any draft (spec 1.4 has 8), and few enough that a number
/// that was never set is refused and not made room for.
inline constexpr int32_t kMaxQLen = 4096;

/// A step as an engine describes it; the arrays are read during StepPlan::assign only.
struct BatchStep {
  /// [num_requests], tokens; 0: a padded request. Of extend requests this step's tokens are included; of decode
  /// requests decode_bound says.
  std::span<const int32_t> seq_lens;
  std::span<const int32_t> prefix_lens;           ///< [num_extends]: tokens in the cache before this step
  std::span<const int32_t> extend_lens;           ///< [num_extends]: new tokens; prefix + extend = seq_len
  int32_t q_len = 1;                              ///< rows of each decode request, 1 to kMaxQLen
  RowBound decode_bound = RowBound::kCausalFull;  ///< what seq_lens means for decode requests
  PageTableView pages;                            ///< int32 in host memory, in either form

  int64_t num_requests() const noexcept { return static_cast<int64_t>(seq_lens.size()); }
  int64_t num_extends() const noexcept { return static_cast<int64_t>(extend_lens.size()); }
};

struct StepLimits {
  int32_t page_size = 64;
  int64_t num_pages = 0;        ///< of the pool: every page that a row sees is checked against it; 0: not checked
  int64_t max_context_len = 0;  ///< at most 2^31 - 1
  int64_t prefix_chunk_capacity = 32768;  ///< tokens gathered and expanded at a time
};

/// A batch of decode requests for which a plan is made once and refreshed in place.
struct CaptureShape {
  StepMode mode = StepMode::kDecode;  ///< nothing else can be captured: prefill rows are ragged
  int32_t num_requests = 0;           ///< at least 1, those included that pad a smaller batch
  int32_t q_len = 1;
  RowBound decode_bound = RowBound::kCausalFull;  ///< kCausalFromFirst counts as kCausalFull, which it becomes
  int64_t max_seq_len = 0;                        ///< tokens of a request at most; 0: max_context_len

  friend bool operator==(const CaptureShape&, const CaptureShape&) = default;
};

/// Which rows of a step a call is about.
enum class StepRows : uint8_t {
  kPrefill,  ///< the rows of the extend requests
  kDecode,   ///< the rows of the decode requests
  kAll,
};

GANNET_API const char* to_string(StepRows r) noexcept;

struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const noexcept { return end - begin; }
  friend bool operator==(const Range&, const Range&) = default;
};

/// Everything that follows from a BatchStep. Owns its arrays; assign() reuses their memory.
///
/// Lengths here have one meaning: all tokens of a request after this step. A decode request given as kCausalFromFirst,
/// whose first row sees L > 0 keys, becomes one of L + S - 1 tokens under kCausalFull: row j sees the same L + j. So
/// row j of S stands at position seq_len - S + j. A row at a negative position belongs to padding: it is written
/// nowhere (slot -1), and sees nothing under kCausalFull.
class GANNET_API StepPlan {
 public:
  StepPlan() = default;

  /// Throws Error(kInvalidArgument), and leaves an idle plan, for: more extends than requests, arrays of other sizes,
  /// negative lengths, prefix + extend unlike seq_len, q_len outside 1 to kMaxQLen, a length beyond max_context_len or
  /// beyond the table, a page or slot outside the pool, a table that is not int32 in host memory, more than 2^31 - 1
  /// rows.
  void assign(const BatchStep& step, const StepLimits& limits);

  /// Makes this the plan of a captured batch, all of whose requests are padding for now (length 0, write slots -1), and
  /// takes all memory that its batches can need. From then on assign() takes decode steps of q_len rows, of any number
  /// of requests up to num_requests - the others are padding - and of lengths up to max_seq_len, and neither allocates
  /// nor moves an array: what points into this plan stays valid. The table is as wide as max_seq_len makes it.
  /// Capturing the same shape again is allowed, another one not. Throws kUnsupported for a mode other than kDecode,
  /// else kInvalidArgument.
  void capture(const CaptureShape& shape, const StepLimits& limits);
  bool captured() const noexcept { return shape_.num_requests > 0; }

  /// Makes this captured plan one of a step whose lengths are not known on the host (gannet/shared_page_table.h): the
  /// arrays that follow from lengths are those of padding, and max_row_len is what it can be at most.
  void assign_unknown(int64_t max_seq_len, const StepLimits& limits);
  /// False: seq_lens, positions, write_slots, row_lens and the table of pages say nothing; their sizes hold.
  bool lens_known() const noexcept { return lens_known_; }
  const CaptureShape& capture_shape() const noexcept { return shape_; }

  /// Makes this plan a decode step of one row for every request of `from`, whatever its mode, with other lengths: a
  /// later step of a draft (spec 1.5). Pages come from `from`, and where `pages` is given as far as the lengths need
  /// from there; only then may a length reach beyond the pages of `from`. Depends on the arguments alone, so that a
  /// repeated call changes nothing, and reads seq_lens only now. A captured plan must be one of
  /// from's number of requests and q_len 1, and may be `from` itself; another plan may not. Cells beyond a length may
  /// hold pages of `from`. Throws as assign does, and then leaves everything as it was.
  void advance(const StepPlan& from, std::span<const int32_t> seq_lens, const PageTableView& pages,
               const StepLimits& limits);

  StepMode mode() const noexcept { return mode_; }
  int32_t q_len() const noexcept { return q_len_; }
  /// kCausalFull or kUniformBlock.
  RowBound decode_bound() const noexcept { return decode_bound_; }
  int32_t page_size() const noexcept { return page_size_; }
  int64_t num_requests() const noexcept { return static_cast<int64_t>(seq_lens_.size()); }
  int64_t num_extends() const noexcept { return num_extends_; }
  int64_t num_rows() const noexcept { return cu_rows_.empty() ? 0 : cu_rows_.back(); }

  Range requests(StepRows part) const noexcept;
  Range rows(StepRows part) const noexcept;
  Range rows_of_request(int64_t request) const noexcept {
    return {cu_rows_[static_cast<size_t>(request)], cu_rows_[static_cast<size_t>(request) + 1]};
  }
  int64_t request_of_row(int64_t row) const noexcept;

  std::span<const int32_t> seq_lens() const noexcept { return seq_lens_; }        ///< [num_requests]
  std::span<const int32_t> prefix_lens() const noexcept { return prefix_lens_; }  ///< [num_extends]
  std::span<const int32_t> cu_rows() const noexcept { return cu_rows_; }          ///< [num_requests + 1]
  std::span<const int32_t> positions() const noexcept { return positions_; }      ///< [num_rows], padding 0: for RoPE
  std::span<const int32_t> write_slots() const noexcept { return write_slots_; }  ///< [num_rows], padding -1
  std::span<const int32_t> row_lens() const noexcept { return row_lens_; }        ///< [num_rows]: keys that a row sees
  int64_t max_row_len() const noexcept { return max_row_len_; }                   ///< 0 without rows
  int64_t max_row_len(StepRows part) const noexcept;

  /// This plan's own copy of the page table: int32 [num_requests, columns], row i for request i, only the cells that
  /// some row sees, the rest 0. Columns only grow from step to step (by doubling), so that shapes repeat.
  PageTableView pages(StepRows part) const noexcept;
  /// Cumulative rows of a part's requests from 0: int32 [requests + 1].
  TensorView cu_q_lens(StepRows part) const noexcept;
  TensorView seq_lens_view(StepRows part) const noexcept;

  const PrefixChunkPlan& prefix_chunks() const noexcept { return chunks_; }
  /// Slots of a chunk's tokens, request by request: int32 [num_tokens].
  void fill_chunk_slots(const PrefixChunk& chunk, std::span<int32_t> slots) const;

  /// Slot of a position of a request, which must be within its length.
  int64_t slot_of(int64_t request, int64_t position) const noexcept {
    return int64_t{cells_[static_cast<size_t>(request * columns_ + position / page_size_)]} * page_size_ +
           position % page_size_;
  }

 private:
  void reset() noexcept;
  void fill(const BatchStep& step, const StepLimits& limits);
  void fill_rows();
  void copy_table(const PageTableView& pages, int64_t num_given, int64_t page_limit);
  void check_captured(const BatchStep& step) const;
  int64_t max_len(const StepLimits& limits) const noexcept;

  CaptureShape shape_{};  // of a captured plan; num_requests is 0 in others
  StepMode mode_ = StepMode::kIdle;
  bool lens_known_ = true;
  RowBound decode_bound_ = RowBound::kCausalFull;
  int32_t q_len_ = 1;
  int32_t page_size_ = 64;
  int64_t num_extends_ = 0;
  int64_t columns_ = 0;
  int64_t max_row_len_ = 0;
  int64_t max_prefill_row_len_ = 0;
  int64_t max_decode_row_len_ = 0;
  std::vector<int32_t> seq_lens_, prefix_lens_, cu_rows_, cu_decode_rows_, positions_, write_slots_, row_lens_;
  std::vector<int32_t> cells_;  // [num_requests, columns_]
  std::vector<int32_t> used_;   // [num_requests]: leading cells that are not 0 by rule
  PrefixChunkPlan chunks_;
};

// ---- drafts -------------------------------------------------------------------------------------------------------

/// After speculative verify: what is left of a request of q_len rows when `accepted` of them stand, the bonus token
/// included (spec 1.5). Fewer than 1 count as 1, more than q_len as q_len.
///   rows[r]      the row of the step that a draft goes on from: an extend's last row (-1 for one without new rows),
///                row accepted - 1 of a decode
///   seq_lens[r]  the tokens of the request then: all of an extend, seq_len - q_len + accepted of a decode; 0 stays 0
/// accepted: [decode requests]; rows and seq_lens: [num_requests]. Nothing is changed in place, so that it may be
/// called any number of times. Throws for other sizes.
GANNET_API void narrow_rows(const StepPlan& step, std::span<const int32_t> accepted, std::span<int32_t> rows);
GANNET_API void narrow_seq_lens(const StepPlan& step, std::span<const int32_t> accepted, std::span<int32_t> seq_lens);

}  // namespace v0
}  // namespace gannet
