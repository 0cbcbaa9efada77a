// Index logits to memory. The score itself is in index_score-inl.h; here is how the work is cut: (block of rows, block
// of keys), keys in as few blocks as keep all workers busy, since each task packs its rows' queries (once per worker
// and row block). Where a block of keys ends changes no bit of any logit. bf16 logits are made as fp32 in the worker's
// scratch, a piece of the keys at a time, and rounded once.
#pragma once

#include "cpu/kernels/index_score-inl.h"
#include "cpu/kernels/row_codec-inl.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace {

constexpr int kLogitTasksPerWorker = 4;         // evens out rows of different length
constexpr int64_t kLogitPiece = 8 * kKeyBlock;  // keys whose fp32 logits stay in L1 or L2: 18 KiB for 8 rows

/// fp32 logits of a piece, of all rows of a block; behind the worker's other scratch.
GANNET_INLINE int64_t logit_piece_bytes(const IndexLogits& p, const IndexProblem& x) {
  return p.logits.dtype == DType::kF32 ? 0 : x.rows_per_block * kLogitPiece * int64_t{sizeof(float)};
}

}  // namespace

size_t workspace_index_logits(const IndexLogits& p, int num_workers) {
  const IndexProblem x = index_problem(p);
  return static_cast<size_t>(index_list_bytes(x) + num_workers * (index_scratch_bytes(x) + logit_piece_bytes(p, x)));
}

void run_index_logits(const IndexLogits& p, const RunContext& ctx) {
  const IndexProblem x = index_problem(p);
  auto* blocks_before = reinterpret_cast<int64_t*>(ctx.workspace);
  std::byte* memory = ctx.workspace + index_list_bytes(x);
  const int64_t scratch_bytes = index_scratch_bytes(x) + logit_piece_bytes(p, x);
  const int workers = ctx.executor.num_workers();
  int64_t max_keys = 0;
  const int64_t num_blocks = list_row_blocks(x, blocks_before, &max_keys);
  max_keys = smaller(max_keys, p.logits.shape[1]);
  if (num_blocks == 0 || max_keys == 0) return;
  const int64_t cuts =
      smaller(divide_up(int64_t{kLogitTasksPerWorker} * workers, num_blocks), divide_up(max_keys, kKeyBlock));
  const int64_t keys_per_task = round_up(divide_up(max_keys, cuts), kKeyBlock);
  const int64_t tasks_per_block = divide_up(max_keys, keys_per_task);
  for (int w = 0; w < workers; ++w) *index_scratch(x, memory + w * scratch_bytes).packed_block = -1;

  ctx.executor.parallel_for(num_blocks * tasks_per_block, [&](int64_t task, int worker) {
    const RowBlock block = row_block(x, blocks_before, task / tasks_per_block);
    const int64_t begin = task % tasks_per_block * keys_per_task;
    int64_t limits[kMaxBlockRows];
    float* out[kMaxBlockRows];
    int64_t end = 0;
    for (int i = 0; i < block.num_rows; ++i) {
      limits[i] = smaller(visible_keys(block.request, x.rows.bound, block.first + i), p.logits.shape[1]);
      end = larger(end, limits[i]);
    }
    end = smaller(end, begin + keys_per_task);
    if (begin >= end) return;
    const IndexScratch scratch = index_scratch(x, memory + worker * scratch_bytes);
    if (*scratch.packed_block != task / tasks_per_block) {
      pack_queries(x, block, scratch);
      *scratch.packed_block = task / tasks_per_block;
    }
    if (p.logits.dtype == DType::kF32) {
      for (int i = 0; i < block.num_rows; ++i) out[i] = p.logits.ptr<float>(block.row(i)) + begin;
      return score_keys(x, block, scratch, begin, end, out, limits);
    }
    auto* const piece = reinterpret_cast<float*>(memory + worker * scratch_bytes + index_scratch_bytes(x));
    for (int i = 0; i < block.num_rows; ++i) out[i] = piece + i * kLogitPiece;
    for (int64_t first = begin; first < end; first += kLogitPiece) {
      const int64_t last = smaller(end, first + kLogitPiece);
      score_keys(x, block, scratch, first, last, out, limits);
      for (int i = 0; i < block.num_rows; ++i) {
        const int64_t n = smaller(limits[i], last) - first;
        if (n > 0) convert_row(out[i], DType::kF32, p.logits.ptr<uint16_t>(block.row(i)) + first, DType::kBf16, n);
      }
    }
  });
}

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
