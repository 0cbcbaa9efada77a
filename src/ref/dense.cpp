// mla_decode, ragged_prefill, merge_state.
#include <cmath>
#include <limits>
#include <vector>

#include "ref/attend.h"
#include "ref/cache_rows.h"
#include "ref/elements.h"
#include "ref/ref_ops.h"

namespace gannet {
inline namespace v0 {
namespace ref {

namespace {

constexpr double kNoKeys = -std::numeric_limits<double>::infinity();

/// e^(score - max), and 0 for a score of -inf, also where every other one is -inf too (A.4: weight 0 by definition).
double weight_of(double score, double max) { return score == kNoKeys ? 0.0 : std::exp(score - max); }

/// NaN left out.
double largest(const double* x, size_t n) {
  double m = kNoKeys;
  for (size_t i = 0; i < n; ++i) {
    if (x[i] > m) m = x[i];
  }
  return m;
}

}  // namespace

void attend(const Attention& a, std::span<const int64_t> slots, int64_t row) {
  const auto width = static_cast<size_t>(a.cache.geometry.width());
  const auto r = static_cast<size_t>(a.cache.geometry.latent_dim);
  const auto heads = static_cast<size_t>(a.q.shape[1]);
  const size_t n = slots.size();
  std::vector<double> query(heads * width);
  for (size_t h = 0; h < heads; ++h) {
    for (size_t d = 0; d < width; ++d)
      query[h * width + d] = load(a.q, row, static_cast<int64_t>(h), static_cast<int64_t>(d));
  }
  std::vector<double> key(width);
  std::vector<double> score(heads * n);  // [heads, n], then the weights
  for (size_t t = 0; t < n; ++t) {
    read_latent(a.cache, slots[t], key.data());
    for (size_t h = 0; h < heads; ++h) {
      double dot = 0.0;
      for (size_t d = 0; d < width; ++d) dot += query[h * width + d] * key[d];
      score[h * n + t] = a.scale * dot;
    }
  }
  std::vector<double> sum(heads, 0.0);
  std::vector<double> max(heads, kNoKeys);
  for (size_t h = 0; h < heads; ++h) {
    max[h] = largest(score.data() + h * n, n);
    for (size_t t = 0; t < n; ++t) {
      score[h * n + t] = weight_of(score[h * n + t], max[h]);
      sum[h] += score[h * n + t];
    }
  }
  std::vector<double> acc(heads * r, 0.0);
  for (size_t t = 0; t < n; ++t) {
    read_latent(a.cache, slots[t], key.data());
    for (size_t h = 0; h < heads; ++h) {
      for (size_t d = 0; d < r; ++d) acc[h * r + d] += score[h * n + t] * key[d];
    }
  }
  for (size_t h = 0; h < heads; ++h) {
    const auto head = static_cast<int64_t>(h);
    const bool none = sum[h] == 0.0;  // no key, or none with a weight
    const double sink = a.attn_sink.given() ? load(a.attn_sink, head) : kNoKeys;
    const double all = none ? 1.0 : sum[h] + std::exp(sink - max[h]);
    for (size_t d = 0; d < r; ++d) store(a.out, none ? 0.0 : acc[h * r + d] / all, row, head, static_cast<int64_t>(d));
    if (a.lse.given()) store(a.lse, none ? kNoKeys : max[h] + std::log(sum[h]), row, head);
    if (a.max_logits.given()) store(a.max_logits, max[h], row, head);
  }
}

void run_mla_decode(const MlaDecode& p, const RunContext& context) {
  context.executor.parallel_for(p.q.shape[0], [&](int64_t row, int) {
    const Row r = find_row(p.rows, p.pages, p.cache.page_size, row);
    std::vector<int64_t> slots(static_cast<size_t>(r.num_keys));
    for (size_t t = 0; t < slots.size(); ++t)
      slots[t] = slot_of(p.pages, r.request, p.cache.page_size, static_cast<int64_t>(t));
    attend(Attention(p), slots, row);
  });
}

void run_ragged_prefill(const RaggedPrefill& p, const RunContext& context) {
  const int64_t heads = p.q.shape[1];
  const int64_t width = p.q.shape[2];
  const int64_t own = p.k.shape[2];  // values of a key that belong to its head; the rest are shared
  const int64_t value_dim = p.v.shape[2];
  const int64_t num_requests = p.cu_q_lens.shape[0] - 1;
  context.executor.parallel_for(num_requests * heads, [&](int64_t task, int) {
    const int64_t r = task / heads;
    const int64_t h = task % heads;
    const int64_t q_begin = load_int(p.cu_q_lens, r);
    const int64_t kv_begin = load_int(p.cu_kv_lens, r);
    const int64_t nq = load_int(p.cu_q_lens, r + 1) - q_begin;
    const int64_t nk = load_int(p.cu_kv_lens, r + 1) - kv_begin;
    std::vector<double> keys(static_cast<size_t>(nk * width));
    std::vector<double> values(static_cast<size_t>(nk * value_dim));
    for (int64_t b = 0; b < nk; ++b) {
      for (int64_t d = 0; d < width; ++d)
        keys[static_cast<size_t>(b * width + d)] =
            d < own ? load(p.k, kv_begin + b, h, d) : load(p.k_rope, kv_begin + b, d - own);
      for (int64_t d = 0; d < value_dim; ++d)
        values[static_cast<size_t>(b * value_dim + d)] = load(p.v, kv_begin + b, h, d);
    }
    std::vector<double> query(static_cast<size_t>(width));
    std::vector<double> acc(static_cast<size_t>(value_dim));
    std::vector<double> score(static_cast<size_t>(nk));
    for (int64_t a = 0; a < nq; ++a) {
      int64_t n = p.causal ? a + (nk - nq) + 1 : nk;
      if (n < 0) n = 0;
      for (int64_t d = 0; d < width; ++d) query[static_cast<size_t>(d)] = load(p.q, q_begin + a, h, d);
      for (int64_t b = 0; b < n; ++b) {
        double dot = 0.0;
        for (int64_t d = 0; d < width; ++d)
          dot += query[static_cast<size_t>(d)] * keys[static_cast<size_t>(b * width + d)];
        score[static_cast<size_t>(b)] = static_cast<double>(p.softmax_scale) * dot;
      }
      const double max = largest(score.data(), static_cast<size_t>(n));
      double sum = 0.0;
      acc.assign(acc.size(), 0.0);
      for (int64_t b = 0; b < n; ++b) {
        const double weight = weight_of(score[static_cast<size_t>(b)], max);
        sum += weight;
        for (int64_t d = 0; d < value_dim; ++d)
          acc[static_cast<size_t>(d)] += weight * values[static_cast<size_t>(b * value_dim + d)];
      }
      for (int64_t d = 0; d < value_dim; ++d)
        store(p.out, sum == 0.0 ? 0.0 : acc[static_cast<size_t>(d)] / sum, q_begin + a, h, d);
      if (p.lse.given()) store(p.lse, sum == 0.0 ? kNoKeys : max + std::log(sum), q_begin + a, h);
    }
  });
}

void run_merge_state(const MergeState& p, const RunContext&) {
  const bool natural = p.base == LseBase::kNatural;
  const int64_t dim = p.out_a.shape[2];
  for (int64_t t = 0; t < p.out_a.shape[0]; ++t) {
    for (int64_t h = 0; h < p.out_a.shape[1]; ++h) {
      const double la = load(p.lse_a, t, h);
      const double lb = load(p.lse_b, t, h);
      const bool empty_a = p.count_a.given() ? load_int(p.count_a, t) <= 0 : la == kNoKeys;
      const bool empty_b = p.count_b.given() ? load_int(p.count_b, t) <= 0 : lb == kNoKeys;
      if (empty_a && empty_b) {
        for (int64_t d = 0; d < dim; ++d) store(p.out_a, 0.0, t, h, d);
        store(p.lse_a, kNoKeys, t, h);
      } else if (empty_a) {
        for (int64_t d = 0; d < dim; ++d) store(p.out_a, load(p.out_b, t, h, d), t, h, d);
        store(p.lse_a, lb, t, h);
      } else if (!empty_b) {
        const double max = la > lb ? la : lb;
        if (la == kNoKeys && lb == kNoKeys) {  // keys on both sides by their counts, all of weight 0 (A.4)
          for (int64_t d = 0; d < dim; ++d) store(p.out_a, 0.0, t, h, d);
          continue;
        }
        const double wa = natural ? std::exp(la - max) : std::exp2(la - max);
        const double wb = natural ? std::exp(lb - max) : std::exp2(lb - max);
        for (int64_t d = 0; d < dim; ++d) {
          // A weight that is 0 by definition drops its term; one that underflows still brings a NaN along.
          const double a = la == kNoKeys ? 0.0 : wa * load(p.out_a, t, h, d);
          const double b = lb == kNoKeys ? 0.0 : wb * load(p.out_b, t, h, d);
          store(p.out_a, (a + b) / (wa + wb), t, h, d);
        }
        store(p.lse_a, max + (natural ? std::log(wa + wb) : std::log2(wa + wb)), t, h);
      }
    }
  }
}

}  // namespace ref
}  // namespace v0
}  // namespace gannet
