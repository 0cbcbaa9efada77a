// Index logits, top-k and slots in one pass with bounded memory.
//
// A task is a block of rows of one request (index_score-inl.h) and a stretch of its keys. It walks the keys in pieces:
// the piece's logits go behind the selection so far in the worker's scratch, where a select (select-inl.h) keeps the
// best k in order of position. Logits never reach memory beyond L2, and the scratch of a worker does not grow with the
// context.
//   many row blocks (prefill): one stretch a row block; the task writes slots.
//   few (decode): the keys are cut into stretches, so that all workers share a row; each stretch leaves at most k
//   (score, position) entries a row in the workspace, and a second step selects among those.
// Rows that see at most k keys take them all and compute no logits.
//
// Workspace, with R = rows_per_block (8 for 64 heads), C = piece (8,192 keys, or 4 k if that is more, never more than
// max_seq_len), E = min(rows, R * 6 * workers) rows in flight when keys are cut:
//   workers * (packed queries and keys: at most 512 lanes * Di * 4 bytes + kKeyBlock * Di * 4 + ..., and
//              R * (C + k) * 4 + R * k * 4 + k * 4 + 32 KiB)
//   + E * min(max_seq_len, 4 * workers * k) * 8 + 8 * (requests + 1).
// 64 heads, k 2,048, bf16: 0.7 MiB a worker at any context from 8,192 keys on.
// No result depends on any of these numbers.
#pragma once

#include "cpu/kernels/index_score-inl.h"
#include "cpu/kernels/select-inl.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace {

constexpr int64_t kSelectPiece = 8192;            // logits of a row between two selects
constexpr int64_t kSelectScratchBytes = 2 << 20;  // of logits a worker: fewer rows a block where k is very large
constexpr int kSelectTasksPerWorker = 2;
constexpr int64_t kShortestStretch = 512;  // keys; 64 heads take about 35 us for them

struct SelectPlan {
  IndexProblem x;
  int64_t k;
  int64_t max_keys;  // that any row may see
  int64_t piece;
  int64_t row_floats;  // k + piece
  int64_t worker_bytes;
  int64_t entry_rows;  // rows that may be cut over stretches
  int64_t entries;     // entries a row, all stretches together
};

/// Row blocks below this share their keys between workers.
GANNET_INLINE int64_t few_blocks(int num_workers) {
  return num_workers > 1 ? int64_t{kSelectTasksPerWorker} * num_workers : 0;
}

GANNET_INLINE int64_t select_stretches(int64_t num_blocks, int64_t max_keys, int num_workers) {
  if (num_blocks >= few_blocks(num_workers)) return 1;
  const int64_t wanted = divide_up(few_blocks(num_workers), num_blocks);
  return larger(1, smaller(wanted, max_keys / kShortestStretch));
}

GANNET_INLINE SelectPlan select_plan(const IndexSelect& p, int num_workers) {
  SelectPlan s;
  s.x = index_problem(p);
  s.k = p.topk_slots.shape[1];
  s.max_keys = p.max_seq_len;
  s.piece = smaller(larger(kSelectPiece, 4 * s.k), larger(s.max_keys, 1));
  s.row_floats = round_up(smaller(s.k, s.max_keys) + s.piece, kScratchAlignment / 4);
  const int64_t rows = larger(1, kSelectScratchBytes / (s.row_floats * 4));
  if (rows < s.x.rows_per_block) s.x.rows_per_block = static_cast<int>(rows);
  const int64_t kept = round_up(smaller(s.k, s.max_keys), kScratchAlignment / 4);
  s.worker_bytes =
      index_scratch_bytes(s.x) + s.x.rows_per_block * (s.row_floats + kept) * 4 + kept * 4 + kHistogramBytes;
  // Keys are cut while there are fewer than few_blocks row blocks.
  s.entry_rows = smaller(s.x.num_rows, s.x.rows_per_block * few_blocks(num_workers));
  s.entries = smaller(s.max_keys, few_blocks(num_workers) * s.k);
  return s;
}

struct SelectScratch {
  IndexScratch index;
  float* scores;       // [rows_per_block][row_floats]
  int32_t* positions;  // [rows_per_block][kept]
  int32_t* indices;    // [kept]
  uint32_t* histograms;
  int64_t kept;
};

GANNET_INLINE SelectScratch select_scratch(const SelectPlan& s, std::byte* memory) {
  SelectScratch r;
  r.kept = round_up(smaller(s.k, s.max_keys), kScratchAlignment / 4);
  r.index = index_scratch(s.x, memory);
  memory += index_scratch_bytes(s.x);
  r.scores = reinterpret_cast<float*>(memory);
  memory += s.x.rows_per_block * s.row_floats * 4;
  r.positions = reinterpret_cast<int32_t*>(memory);
  memory += s.x.rows_per_block * r.kept * 4;
  r.indices = reinterpret_cast<int32_t*>(memory);
  memory += r.kept * 4;
  r.histograms = reinterpret_cast<uint32_t*>(memory);
  return r;
}

/// Writes a row's list from ascending positions (or 0 .. count-1 where positions is null).
inline void emit_row(const IndexSelect& p, const RequestRows& request, int64_t row, const int32_t* positions,
                     int64_t count) {
  const int64_t k = p.topk_slots.shape[1], page_size = p.cache.page_size;
  int32_t* slots = p.topk_slots.ptr<int32_t>(row);
  int64_t page_end = 0, shift = 0;  // positions below page_end become slots by adding shift
  for (int64_t i = 0; i < count; ++i) {
    const int64_t position = positions != nullptr ? positions[i] : i;
    if (position >= page_end) {
      const int64_t page = position / page_size;
      page_end = (page + 1) * page_size;
      shift = (request.pages[page] - page) * page_size;
    }
    slots[i] = static_cast<int32_t>(position + shift);
  }
  for (int64_t i = count; i < k; ++i) slots[i] = -1;
  p.topk_lens.ptr<int32_t>()[row * p.topk_lens.stride[0]] = static_cast<int32_t>(count);
  if (p.topk_positions.given()) {
    int32_t* out = p.topk_positions.ptr<int32_t>(row);
    for (int64_t i = 0; i < count; ++i) out[i] = positions != nullptr ? positions[i] : static_cast<int32_t>(i);
    for (int64_t i = count; i < k; ++i) out[i] = -1;
  }
}

GANNET_INLINE int64_t selectable_keys(const SelectPlan& s, const RequestRows& request, int64_t j) {
  return s.k == 0 ? 0 : smaller(visible_keys(request, s.x.rows.bound, j), s.max_keys);
}

/// Selections of a row block over the keys [begin, end), left in the scratch's running selections.
inline void select_stretch(const SelectPlan& s, const RowBlock& block, int64_t block_id, const SelectScratch& scratch,
                           int64_t begin, int64_t end, RunningSelection* running) {
  int64_t limits[kMaxBlockRows];
  int64_t last = begin;
  for (int i = 0; i < block.num_rows; ++i) {
    running[i] = {scratch.scores + i * s.row_floats, scratch.positions + i * scratch.kept, 0};
    const int64_t n = selectable_keys(s, block.request, block.first + i);
    limits[i] = n > s.k ? smaller(n, end) : 0;  // the others take everything without scores
    last = larger(last, limits[i]);
  }
  if (last <= begin) return;
  if (*scratch.index.packed_block != block_id) {
    pack_queries(s.x, block, scratch.index);
    *scratch.index.packed_block = block_id;
  }
  for (int64_t first = begin; first < last; first += s.piece) {
    float* out[kMaxBlockRows];
    for (int i = 0; i < block.num_rows; ++i) out[i] = running[i].scores + running[i].count;
    score_keys(s.x, block, scratch.index, first, smaller(last, first + s.piece), out, limits);
    for (int i = 0; i < block.num_rows; ++i) {
      const int64_t n = smaller(limits[i] - first, s.piece);
      if (n > 0) take_piece(&running[i], n, first, s.k, scratch.histograms, scratch.indices);
    }
  }
}

}  // namespace

size_t workspace_index_select(const IndexSelect& p, int num_workers) {
  const SelectPlan s = select_plan(p, num_workers);
  return static_cast<size_t>(index_list_bytes(s.x) + num_workers * s.worker_bytes + s.entry_rows * s.entries * 8);
}

void run_index_select(const IndexSelect& p, const RunContext& ctx) {
  const int workers = ctx.executor.num_workers();
  const SelectPlan s = select_plan(p, workers);
  auto* blocks_before = reinterpret_cast<int64_t*>(ctx.workspace);
  std::byte* memory = ctx.workspace + index_list_bytes(s.x);
  int64_t max_keys = 0;
  const int64_t num_blocks = list_row_blocks(s.x, blocks_before, &max_keys);
  max_keys = smaller(max_keys, s.max_keys);
  if (num_blocks == 0) return;
  for (int w = 0; w < workers; ++w) *index_scratch(s.x, memory + w * s.worker_bytes).packed_block = -1;
  const int64_t stretches = s.k > 0 && max_keys > s.k ? select_stretches(num_blocks, max_keys, workers) : 1;

  if (stretches == 1) {
    // Later blocks of a request see more keys: start with them, so that no worker is left with a long one at the end.
    ctx.executor.parallel_for(num_blocks, [&](int64_t task, int worker) {
      const int64_t id = num_blocks - 1 - task;
      const RowBlock block = row_block(s.x, blocks_before, id);
      RunningSelection running[kMaxBlockRows];
      const SelectScratch scratch = select_scratch(s, memory + worker * s.worker_bytes);
      select_stretch(s, block, id, scratch, 0, max_keys, running);
      for (int i = 0; i < block.num_rows; ++i) {
        const int64_t n = selectable_keys(s, block.request, block.first + i);
        emit_row(p, block.request, block.row(i), n > s.k ? running[i].positions : nullptr, smaller(n, s.k));
      }
    });
    return;
  }

  const int64_t stretch = round_up(divide_up(max_keys, stretches), kKeyBlock);
  const int64_t entries = smaller(s.k, stretch);  // that a whole stretch leaves
  const int64_t num_stretches = divide_up(max_keys, stretch);
  auto* entry_scores = reinterpret_cast<float*>(memory + workers * s.worker_bytes);
  auto* entry_positions = reinterpret_cast<int32_t*>(entry_scores + s.entry_rows * s.entries);
  ctx.executor.parallel_for(num_blocks * num_stretches, [&](int64_t task, int worker) {
    const int64_t id = task / num_stretches, begin = task % num_stretches * stretch;
    const RowBlock block = row_block(s.x, blocks_before, id);
    RunningSelection running[kMaxBlockRows];
    const SelectScratch scratch = select_scratch(s, memory + worker * s.worker_bytes);
    select_stretch(s, block, id, scratch, begin, smaller(max_keys, begin + stretch), running);
    for (int i = 0; i < block.num_rows; ++i) {
      const int64_t at = block.row(i) * s.entries + task % num_stretches * entries;
      for (int64_t e = 0; e < running[i].count; ++e) {
        entry_scores[at + e] = running[i].scores[e];
        entry_positions[at + e] = running[i].positions[e];
      }
    }
  });
  ctx.executor.parallel_for(num_blocks * s.x.rows_per_block, [&](int64_t task, int worker) {
    const RowBlock block = row_block(s.x, blocks_before, task / s.x.rows_per_block);
    const int i = static_cast<int>(task % s.x.rows_per_block);
    if (i >= block.num_rows) return;
    const int64_t n = selectable_keys(s, block.request, block.first + i);
    if (n <= s.k) return emit_row(p, block.request, block.row(i), nullptr, n);
    const SelectScratch scratch = select_scratch(s, memory + worker * s.worker_bytes);
    const float* scores = entry_scores + block.row(i) * s.entries;
    const int32_t* positions = entry_positions + block.row(i) * s.entries;
    const int64_t total = n / stretch * entries + smaller(n % stretch, entries);
    if (total > s.k) {
      select_indices(scores, total, s.k, scratch.histograms, scratch.indices);
      for (int64_t e = 0; e < s.k; ++e) scratch.indices[e] = positions[scratch.indices[e]];
      positions = scratch.indices;
    }
    emit_row(p, block.request, block.row(i), positions, s.k);
  });
}

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
