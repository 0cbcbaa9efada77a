// index_logits, topk, index_select, sparse_attention.
#include <algorithm>
#include <cmath>
#include <vector>

#include "ref/attend.h"
#include "ref/cache_rows.h"
#include "ref/elements.h"
#include "ref/ref_ops.h"

namespace gannet {
inline namespace v0 {
namespace ref {

namespace {

/// Scores of every key that a row sees (spec A.7), rounded to fp32 as index_logits stores them. A NaN score stays NaN.
template <class Params>
std::vector<float> score_row(const Params& p, int64_t row, const Row& r) {
  const int64_t heads = p.q.shape[1];
  const int64_t dim = p.q.shape[2];
  std::vector<double> query(static_cast<size_t>(heads * dim));
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t d = 0; d < dim; ++d) query[static_cast<size_t>(h * dim + d)] = load(p.q, row, h, d);
  }
  std::vector<double> key(static_cast<size_t>(dim));
  std::vector<float> scores(static_cast<size_t>(r.num_keys));
  for (int64_t t = 0; t < r.num_keys; ++t) {
    read_index_k(p.cache, slot_of(p.pages, r.request, p.cache.page_size, t), key.data());
    double score = 0.0;
    for (int64_t h = 0; h < heads; ++h) {
      double dot = 0.0;
      for (int64_t d = 0; d < dim; ++d) dot += query[static_cast<size_t>(h * dim + d)] * key[static_cast<size_t>(d)];
      const double relu = dot <= 0.0 ? 0.0 : dot;
      score += load(p.weights, row, h) * relu;
    }
    scores[static_cast<size_t>(t)] = static_cast<float>(score);
  }
  return scores;
}

/// The chosen positions in ascending order (spec A.8).
std::vector<int64_t> choose(const float* scores, int64_t n, int64_t k) {
  std::vector<int64_t> order(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) order[static_cast<size_t>(i)] = i;
  if (n > k) {
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
      const float x = scores[a];
      const float y = scores[b];
      if (std::isnan(x) || std::isnan(y)) return !std::isnan(x) && std::isnan(y);
      return x > y;
    });
    order.resize(static_cast<size_t>(k));
    std::sort(order.begin(), order.end());
  }
  return order;
}

}  // namespace

void run_index_logits(const IndexLogits& p, const RunContext& context) {
  context.executor.parallel_for(p.q.shape[0], [&](int64_t row, int) {
    const std::vector<float> scores = score_row(p, row, find_row(p.rows, p.pages, p.cache.page_size, row));
    for (size_t t = 0; t < scores.size(); ++t) store(p.logits, scores[t], row, static_cast<int64_t>(t));
  });
}

void run_topk(const TopK& p, const RunContext& context) {
  const int64_t k = p.positions.shape[1];
  context.executor.parallel_for(p.logits.shape[0], [&](int64_t row, int) {
    const int64_t n = std::max<int64_t>(0, load_int(p.lens, row));
    std::vector<float> scores(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) scores[static_cast<size_t>(i)] = static_cast<float>(load(p.logits, row, i));
    const std::vector<int64_t> chosen = choose(scores.data(), n, k);
    for (int64_t c = 0; c < k; ++c) {
      const auto i = static_cast<size_t>(c);
      *p.positions.ptr<int32_t>(row, c) = i < chosen.size() ? static_cast<int32_t>(chosen[i]) : -1;
    }
    *p.counts.ptr<int32_t>(row) = static_cast<int32_t>(chosen.size());
  });
}

void run_index_select(const IndexSelect& p, const RunContext& context) {
  const int64_t k = p.topk_slots.shape[1];
  context.executor.parallel_for(p.q.shape[0], [&](int64_t row, int) {
    const Row r = find_row(p.rows, p.pages, p.cache.page_size, row);
    const std::vector<float> scores = score_row(p, row, r);
    const std::vector<int64_t> chosen = choose(scores.data(), r.num_keys, k);
    for (int64_t c = 0; c < k; ++c) {
      const auto i = static_cast<size_t>(c);
      const bool used = i < chosen.size();
      *p.topk_slots.ptr<int32_t>(row, c) =
          used ? static_cast<int32_t>(slot_of(p.pages, r.request, p.cache.page_size, chosen[i])) : -1;
      if (p.topk_positions.given())
        *p.topk_positions.ptr<int32_t>(row, c) = used ? static_cast<int32_t>(chosen[i]) : -1;
    }
    *p.topk_lens.ptr<int32_t>(row) = static_cast<int32_t>(chosen.size());
  });
}

void run_sparse_attention(const SparseAttention& p, const RunContext& context) {
  const int64_t k = p.topk_slots.shape[1];
  context.executor.parallel_for(p.q.shape[0], [&](int64_t row, int) {
    const int64_t listed = p.topk_lens.given() ? std::min<int64_t>(k, load_int(p.topk_lens, row)) : k;
    std::vector<int64_t> slots;
    for (int64_t c = 0; c < listed; ++c) {
      const int64_t slot = *p.topk_slots.ptr<int32_t>(row, c);
      if (slot >= 0 && slot < p.cache.num_slots()) slots.push_back(slot);
    }
    attend(Attention(p), slots, row);
  });
}

}  // namespace ref
}  // namespace v0
}  // namespace gannet
