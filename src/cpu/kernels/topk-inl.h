// Exact top-k of rows of scores (select-inl.h). Rows go to workers one by one. Where there are fewer rows than workers
// can share and they are long, each row is cut in pieces: a worker selects the top k of a piece and a second step
// selects among the pieces' entries.
#pragma once

#include "cpu/kernels/select-inl.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace {

// A piece of this length takes some 30 us, several times what a second fork and join costs.
constexpr int64_t kTopkPiece = 32768;

struct TopkPlan {
  int64_t pieces;        // of a row; 1: rows are not cut
  int64_t piece;         // scores in a piece
  int64_t entries;       // kept of a piece: min(k, piece)
  int64_t worker_bytes;  // histograms
};

GANNET_INLINE TopkPlan topk_plan(const TopK& p, int num_workers) {
  const int64_t rows = p.logits.shape[0], columns = p.logits.shape[1], k = p.positions.shape[1];
  TopkPlan plan;
  plan.worker_bytes = kHistogramBytes;
  plan.pieces = 1;
  // Short pieces of which nearly everything is kept would only be selected from twice.
  const int64_t shortest = kTopkPiece > 4 * k ? kTopkPiece : 4 * k;
  if (k > 0 && rows > 0 && rows < num_workers && columns >= 2 * shortest) {
    const int64_t wanted = (2 * num_workers + rows - 1) / rows, most = columns / shortest;
    plan.pieces = wanted < most ? wanted : most;
  }
  plan.piece = (columns + plan.pieces - 1) / plan.pieces;
  plan.entries = k < plan.piece ? k : plan.piece;
  return plan;
}

GANNET_INLINE int64_t topk_row_length(const TopK& p, int64_t row) {
  const int64_t n = p.lens.ptr<const int32_t>()[row * p.lens.stride[0]], columns = p.logits.shape[1];
  return n < 0 ? 0 : n < columns ? n : columns;
}

/// Ends a row: the count, and -1 behind the first `count` positions.
GANNET_INLINE void finish_topk_row(const TopK& p, int64_t row, int64_t count) {
  int32_t* out = p.positions.ptr<int32_t>(row);
  for (int64_t i = count; i < p.positions.shape[1]; ++i) out[i] = -1;
  p.counts.ptr<int32_t>()[row * p.counts.stride[0]] = static_cast<int32_t>(count);
}

template <class Score>
void run_topk_of(const TopK& p, const RunContext& ctx) {
  const int num_workers = ctx.executor.num_workers();
  const TopkPlan plan = topk_plan(p, num_workers);
  const int64_t rows = p.logits.shape[0], k = p.positions.shape[1];
  std::byte* worker_memory = ctx.workspace;
  if (plan.pieces == 1) {
    ctx.executor.parallel_for(rows, [&](int64_t row, int worker) {
      const int64_t n = topk_row_length(p, row);
      int32_t* out = p.positions.ptr<int32_t>(row);
      if (n <= k) {
        for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int32_t>(i);
      } else if (k > 0) {
        auto* histograms = reinterpret_cast<uint32_t*>(worker_memory + worker * plan.worker_bytes);
        select_indices(p.logits.ptr<const Score>(row), n, k, histograms, out);
      }
      finish_topk_row(p, row, n < k ? n : k);
    });
    return;
  }
  auto* scores = reinterpret_cast<float*>(worker_memory + num_workers * plan.worker_bytes);
  auto* positions = reinterpret_cast<int32_t*>(scores + rows * plan.pieces * plan.entries);
  // A piece of m scores leaves min(k, m) entries; all pieces before the last have the same length, so that the entries
  // of a row lie one behind the other.
  ctx.executor.parallel_for(rows * plan.pieces, [&](int64_t task, int worker) {
    const int64_t row = task / plan.pieces, n = topk_row_length(p, row);
    const int64_t begin = task % plan.pieces * plan.piece;
    const int64_t m = n - begin < plan.piece ? n - begin : plan.piece;
    if (n <= k || m <= 0) return;
    const Score* in = p.logits.ptr<const Score>(row) + begin;
    int32_t* to = positions + task * plan.entries;
    if (m <= plan.entries) {
      for (int64_t i = 0; i < m; ++i) to[i] = static_cast<int32_t>(i);
    } else {
      select_indices(in, m, plan.entries, reinterpret_cast<uint32_t*>(worker_memory + worker * plan.worker_bytes), to);
    }
    const int64_t kept = m < plan.entries ? m : plan.entries;
    for (int64_t i = 0; i < kept; ++i) {
      scores[task * plan.entries + i] = score_at(in + to[i]);
      to[i] += static_cast<int32_t>(begin);
    }
  });
  ctx.executor.parallel_for(rows, [&](int64_t row, int worker) {
    const int64_t n = topk_row_length(p, row);
    int32_t* out = p.positions.ptr<int32_t>(row);
    if (n <= k) {
      for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int32_t>(i);
      finish_topk_row(p, row, n);
      return;
    }
    const int64_t whole = n / plan.piece, rest = n % plan.piece;
    const int64_t total = whole * plan.entries + (rest < plan.entries ? rest : plan.entries);
    const int64_t first = row * plan.pieces * plan.entries;
    if (total <= k) {  // total is k: every piece kept what it had
      for (int64_t i = 0; i < total; ++i) out[i] = positions[first + i];
    } else {
      auto* histograms = reinterpret_cast<uint32_t*>(worker_memory + worker * plan.worker_bytes);
      select_indices(scores + first, total, k, histograms, out);
      for (int64_t i = 0; i < k; ++i) out[i] = positions[first + out[i]];
    }
    finish_topk_row(p, row, k);
  });
}

}  // namespace

size_t workspace_topk(const TopK& p, int num_workers) {
  const TopkPlan plan = topk_plan(p, num_workers);
  int64_t bytes = num_workers * plan.worker_bytes;
  if (plan.pieces > 1) bytes += p.logits.shape[0] * plan.pieces * plan.entries * 8;  // scores and positions
  return static_cast<size_t>(bytes);
}

void run_topk(const TopK& p, const RunContext& ctx) {
  if (p.logits.dtype == DType::kBf16) run_topk_of<uint16_t>(p, ctx);
  else run_topk_of<float>(p, ctx);
}

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
