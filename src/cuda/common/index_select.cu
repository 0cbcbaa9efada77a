#include "cuda/common/index_select.h"

#include <algorithm>

#include "cuda/common/check.h"
#include "cuda/common/topk.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {

namespace {

// Half of an L2 of 50 to 60 MB, so that top-k finds there what the scores' kernel wrote; and 64 rows of 131,072 keys,
// which fill the chip. Rows that see at most k keys need no scores and get none.
constexpr int64_t kScratchBytes = int64_t{32} << 20;

bool needs_scores(const IndexSelect& p) { return p.max_seq_len > p.topk_slots.shape[1]; }

/// Elements from a row of scores to the next: rows stay 16-byte aligned.
int64_t row_stride(const IndexSelect& p) { return (p.max_seq_len + 3) / 4 * 4; }

int64_t rows_of_block(const IndexSelect& p) {
  if (!needs_scores(p)) return p.q.shape[0];
  const int64_t rows = kScratchBytes / (row_stride(p) * static_cast<int64_t>(sizeof(float)));
  return std::min(std::max<int64_t>(rows, 1), p.q.shape[0]);
}

}  // namespace

size_t workspace_index_select(const IndexSelect& p, int) {
  return needs_scores(p) ? static_cast<size_t>(rows_of_block(p) * row_stride(p)) * sizeof(float) : 0;
}

void run_index_select(const IndexSelect& p, const RunContext& c, LaunchIndexLogits launch_logits) {
  const DeviceGuard guard(IndexSelect::kName, p.q.device.index);
  LogitBlock block{};
  block.logits = c.workspace;
  block.stride = row_stride(p);
  block.num_columns = p.max_seq_len;
  block.unscored = p.topk_slots.shape[1];
  TopKArgs t{};
  t.logits = block.logits;
  t.dtype = DType::kF32;
  t.logits_stride = block.stride;
  t.num_columns = block.num_columns;
  t.rows = make_rows(p.rows);
  t.pages = make_pages(p.pages);
  t.page_size = p.cache.page_size;
  t.num_pages = p.cache.num_pages;
  t.k = p.topk_slots.shape[1];
  t.slots = static_cast<int32_t*>(p.topk_slots.data);
  t.slots_stride = p.topk_slots.stride[0];
  t.counts = static_cast<int32_t*>(p.topk_lens.data);
  if (p.topk_positions.given()) {
    t.positions = static_cast<int32_t*>(p.topk_positions.data);
    t.positions_stride = p.topk_positions.stride[0];
  }
  const int64_t num_rows = p.q.shape[0], step = rows_of_block(p);
  for (int64_t first = 0; first < num_rows; first += step) {
    block.first_row = t.first_row = first;
    block.num_rows = std::min(step, num_rows - first);
    if (needs_scores(p)) launch_logits(IndexSelect::kName, p.q, p.weights, p.cache, p.pages, p.rows, block, c.stream);
    launch_topk(IndexSelect::kName, t, block.num_rows, c.stream);
  }
}

void run_index_logits(const IndexLogits& p, const RunContext& c, LaunchIndexLogits launch_logits) {
  const DeviceGuard guard(IndexLogits::kName, p.q.device.index);
  const LogitBlock block{
      p.logits.data, p.logits.stride[0], p.logits.shape[1], 0, p.q.shape[0], p.logits.dtype == DType::kBf16};
  launch_logits(IndexLogits::kName, p.q, p.weights, p.cache, p.pages, p.rows, block, c.stream);
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
