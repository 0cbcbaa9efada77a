// Problems for the tests of known faults (docs/known-faults.md), over every format of the caches.
#pragma once

#include <cmath>
#include <cstring>
#include <set>

#include "case_counts.h"
#include "op_cases.h"
#include "verify/device_mirror.h"
#include "verify/tolerances.h"

namespace gannet_tests {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;  // loops of many rows are scaled down
#else
inline constexpr bool kSanitized = false;
#endif

/// Queries and a latent cache; results are fp32, so that two kernels which differ are seen to.
struct AbsorbedFormat {
  gannet::DType q;
  gannet::LatentFormat cache;
};
inline constexpr AbsorbedFormat kAbsorbedFormats[] = {
    {gannet::DType::kBf16, gannet::LatentFormat::kBf16},
    {gannet::DType::kF32, gannet::LatentFormat::kF32},
    {gannet::DType::kF32, gannet::LatentFormat::kBf16},
    {gannet::DType::kBf16, gannet::LatentFormat::kF32},
    {gannet::DType::kBf16, gannet::LatentFormat::kE4m3},
    {gannet::DType::kBf16, gannet::LatentFormat::kPacked656},
    {gannet::DType::kBf16, gannet::LatentFormat::kE4m3PerToken},
    {gannet::DType::kF32, gannet::LatentFormat::kE4m3},
    {gannet::DType::kF32, gannet::LatentFormat::kPacked656},
    {gannet::DType::kF32, gannet::LatentFormat::kE4m3PerToken},
    {gannet::DType::kE4m3, gannet::LatentFormat::kE4m3},
    {gannet::DType::kE4m3, gannet::LatentFormat::kE4m3PerToken},
};
inline std::string name_of(const AbsorbedFormat& f) {
  return std::string("q ") + to_string(f.q) + ", cache " + to_string(f.cache);
}

struct IndexerFormat {
  gannet::DType q;
  gannet::IndexKFormat cache;
};
inline constexpr IndexerFormat kIndexerFormats[] = {
    {gannet::DType::kBf16, gannet::IndexKFormat::kBf16}, {gannet::DType::kF32, gannet::IndexKFormat::kF32},
    {gannet::DType::kBf16, gannet::IndexKFormat::kE4m3}, {gannet::DType::kF32, gannet::IndexKFormat::kE4m3},
    {gannet::DType::kE4m3, gannet::IndexKFormat::kE4m3},
};

// Standard normal q and keys of width 576 have products of deviation 24; this brings scores to 1.5.
inline constexpr float kSoftmaxScale = 0.0625f;
inline constexpr double kScoreDeviation = 1.5;
inline constexpr float kQueryScale = 0.75f;  // of e4m3 queries

inline gannet::verify::AttentionPrecision precision_of(const AbsorbedFormat& f, double num_keys,
                                                       const std::string& impl = {}) {
  gannet::verify::AttentionPrecision p;
  p.fp32 = f.q == gannet::DType::kF32 || f.cache == gannet::LatentFormat::kF32;
  p.rounds_inputs = f.cache != gannet::LatentFormat::kBf16;
  p.score_deviation = kScoreDeviation;
  p.num_keys = num_keys;
  p.fp8_products = impl == "cuda_sm90" && f.q == gannet::DType::kE4m3;
  return p;
}

/// Whether every implementation that runs here and takes `less` takes `more` as well: an optional output is looked at
/// as soon as all can write it.
inline bool takes_everywhere(const gannet::MlaDecode& more, const gannet::MlaDecode& less) {
  const auto takes = [](const gannet::ImplInfo& info, const gannet::MlaDecode& p) {
    try {
      const gannet::OpPlan<gannet::MlaDecode> plan(gannet::Context{}, gannet::verify::placed_on(info.device, p),
                                                   {.impl = info.name});
      return true;
    } catch (const gannet::Error&) {
      return false;
    }
  };
  for (const gannet::ImplInfo& info : gannet::list_implementations<gannet::MlaDecode>()) {
    if (info.runs_here && takes(info, less) && !takes(info, more)) return false;
  }
  return true;
}

/// mla_decode over the keys of `spec`.
struct DecodeProblem {
  AbsorbedFormat format;
  gannet::verify::Paged paged;
  gannet::verify::LatentPool pool;
  gannet::verify::Tensor q, out, lse, max_logits;
  gannet::MlaDecode params;

  DecodeProblem(const gannet::verify::PagedSpec& spec, const AbsorbedFormat& f, int64_t heads,
                gannet::verify::Poison poison = gannet::verify::Poison::kNan, int64_t page_gap_bytes = 0,
                gannet::RowGeometry geometry = {})
      : format(f),
        paged(spec),
        pool(make_latent_pool(paged, f.cache, 3, poison, page_gap_bytes, geometry)),
        q(gannet::verify::make_tensor(f.q, {paged.num_rows, heads, geometry.width()})),
        out(gannet::verify::make_tensor(gannet::DType::kF32, {paged.num_rows, heads, geometry.latent_dim})),
        lse(gannet::verify::make_tensor(gannet::DType::kF32, {paged.num_rows, heads})),
        max_logits(gannet::verify::make_tensor(gannet::DType::kF32, {paged.num_rows, heads})) {
    fill_normal(q, gannet::verify::Rng(4));
    params.q = q.view;
    params.cache = pool.view;
    params.pages = paged.table();
    params.rows = paged.rows();
    params.out = out.view;
    params.lse = lse.view;
    params.softmax_scale = kSoftmaxScale;
    if (f.q == gannet::DType::kE4m3) params.q_scale = kQueryScale;
    gannet::MlaDecode more = params;
    more.max_logits = max_logits.view;
    if (takes_everywhere(more, params)) params = more;
  }
};

/// sparse_attention over lists of slots, one a row, over the pool and the queries of a decode problem.
struct SparseProblem {
  gannet::verify::Tensor slots, lens;
  gannet::SparseAttention params;

  /// The first k keys that each row sees, in order; behind them -1.
  SparseProblem(const DecodeProblem& d, int64_t k)
      : slots(gannet::verify::make_tensor(gannet::DType::kI32, {d.paged.num_rows, k})) {
    std::vector<int32_t> n;
    for (int64_t row = 0; row < d.paged.num_rows; ++row) {
      n.push_back(static_cast<int32_t>(std::min(k, d.paged.keys_of_row[static_cast<size_t>(row)])));
      for (int64_t c = 0; c < k; ++c)
        *slots.view.ptr<int32_t>(row, c) =
            c < n.back() ? static_cast<int32_t>(d.paged.slot(d.paged.request_of_row[static_cast<size_t>(row)], c)) : -1;
    }
    lens = gannet::verify::make_ints(n);
    params.q = d.params.q;
    params.cache = d.params.cache;
    params.topk_slots = slots.view;
    params.topk_lens = lens.view;
    params.out = d.params.out;
    params.lse = d.params.lse;
    params.max_logits = d.params.max_logits;
    params.softmax_scale = d.params.softmax_scale;
    params.q_scale = d.params.q_scale;
  }
};

/// index_logits and index_select over the keys of `spec`.
struct IndexProblem {
  gannet::verify::Paged paged;
  gannet::verify::IndexPool pool;
  gannet::verify::Tensor q, weights, logits, slots, lens, positions;
  gannet::IndexLogits scores;
  gannet::IndexSelect select;

  IndexProblem(const gannet::verify::PagedSpec& spec, const IndexerFormat& f, int64_t heads, int64_t k,
               gannet::verify::Poison poison = gannet::verify::Poison::kNan, int64_t page_gap_bytes = 0,
               bool integers = false)
      : paged(spec),
        pool(make_index_pool(paged, f.cache, gannet::ScaleFormat::kFp32, 128, 5, poison, page_gap_bytes, integers)),
        q(gannet::verify::make_tensor(f.q, {paged.num_rows, heads, 128})),
        weights(gannet::verify::make_tensor(gannet::DType::kF32, {paged.num_rows, heads})),
        logits(gannet::verify::make_tensor(gannet::DType::kF32, {paged.num_rows, paged.max_keys() + 1})),
        slots(gannet::verify::make_tensor(gannet::DType::kI32, {paged.num_rows, k})),
        lens(gannet::verify::make_tensor(gannet::DType::kI32, {paged.num_rows})),
        positions(gannet::verify::make_tensor(gannet::DType::kI32, {paged.num_rows, k})) {
    fill_normal(q, gannet::verify::Rng(6));
    fill_normal(weights, gannet::verify::Rng(7));
    scores.q = select.q = q.view;
    scores.weights = select.weights = weights.view;
    scores.cache = select.cache = pool.view;
    scores.pages = select.pages = paged.table();
    scores.rows = select.rows = paged.rows();
    scores.logits = logits.view;
    select.max_seq_len = paged.max_keys() + 1;
    select.topk_slots = slots.view;
    select.topk_lens = lens.view;
    select.topk_positions = positions.view;
  }
};

/// Names of the implementations, the oracle left out, that run here and take these arguments: printed once a test and
/// format. On each device that is here somebody must take them, but for lists over rows with a scale each, which the
/// sets of the CPU refuse by design, and e4m3 queries, which may be refused by name where a set has no kernel for them.
/// across_batches: only those whose bits do not depend on the rest of the batch (all of the CPU).
template <class Params>
std::vector<std::string> takers(const Params& params, const std::string& format = {}, bool across_batches = false) {
  static std::set<std::string> printed;
  const std::string test = testing::UnitTest::GetInstance()->current_test_info()->name();
  const auto print = [&](const std::string& line) {
    if (printed.insert(test + line).second) std::puts(line.c_str());
  };
  std::vector<std::string> names;
  bool on_cpu = false, on_cuda = false, cuda_here = false;
  std::string reasons;
  for (const gannet::ImplInfo& info : gannet::list_implementations<Params>()) {
    if (info.name == "ref") continue;
    const bool cuda = info.device == gannet::DeviceKind::kCuda;
    const std::string line = info.op + " " + info.name + " " + format;
    std::string why;
    if (!info.runs_here) why = "does not run here";
    else if (across_batches && !info.batch_invariant) why = "left out: its bits depend on the batch";
    else if (!takes(info.name, params, &why)) why = "refuses: " + why;
    cuda_here = cuda_here || (cuda && info.runs_here);
    print(line + (why.empty() ? "" : " " + why));
    if (why.empty()) {
      names.push_back(info.name);
      (cuda ? on_cuda : on_cpu) = true;
    } else if (cuda) {
      reasons += (reasons.empty() ? "" : "; ") + info.name + " " + why;
    }
  }
  CaseCounts::get().note(test + " " + Params::kName + " " + format, on_cpu, on_cuda, reasons);
  bool by_design = false;
  if constexpr (std::is_same_v<Params, gannet::SparseAttention>)
    by_design = params.cache.format == gannet::LatentFormat::kE4m3PerToken;
  bool optional = false;
  if constexpr (std::is_same_v<Params, gannet::SparseAttention> || std::is_same_v<Params, gannet::MlaDecode>)
    optional = params.q.dtype == gannet::DType::kE4m3;
  if (!optional) {
    EXPECT_EQ(on_cpu, !by_design) << Params::kName << " " << format;
    if (cuda_here && !by_design) {
      EXPECT_TRUE(on_cuda) << Params::kName << " " << format << ": " << reasons;
    }
  }
  return names;
}

/// The bytes of row `row` of an output of `rows` rows.
inline std::vector<std::byte> row_bytes(const gannet::verify::Outputs& o, const std::string& name, int64_t row,
                                        int64_t rows) {
  const auto& all = o.of(name);
  const size_t n = all.size() / static_cast<size_t>(rows);
  const auto begin = all.begin() + static_cast<std::ptrdiff_t>(n * static_cast<size_t>(row));
  return {begin, begin + static_cast<std::ptrdiff_t>(n)};
}

/// Rows [first, first + count) of an argument.
inline gannet::TensorView cut(gannet::TensorView v, int64_t first, int64_t count) {
  v.data = static_cast<std::byte*>(v.data) + first * v.stride[0] * static_cast<int64_t>(size_of(v.dtype));
  v.shape[0] = count;
  return v;
}

/// ||got - want|| / ||want|| of each line of `width` values.
inline void expect_lines_close(const std::vector<float>& want, const std::vector<float>& got, size_t width,
                               double tolerance, const std::string& what) {
  ASSERT_EQ(want.size(), got.size()) << what;
  for (size_t l = 0; l * width < want.size(); ++l) {
    double error = 0.0;
    double norm = 0.0;
    for (size_t d = l * width; d < (l + 1) * width; ++d) {
      error += std::pow(static_cast<double>(got[d]) - want[d], 2.0);
      norm += static_cast<double>(want[d]) * want[d];
    }
    if (norm == 0.0) ASSERT_EQ(error, 0.0) << what << " line " << l;
    else ASSERT_LE(std::sqrt(error / norm), tolerance) << what << " line " << l;
  }
}

}  // namespace gannet_tests
