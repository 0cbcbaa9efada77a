// index_logits, topk and index_select.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "verify/recorder.h"
#include "verify/tolerances.h"

namespace gannet {
inline namespace v0 {
namespace verify {

namespace {

struct IndexerFormat {
  DType q;
  IndexKFormat cache;
  ScaleFormat scale;

  std::string name() const {
    return fmt::format("q {}, index keys {}{}", to_string(q), to_string(cache),
                       cache != IndexKFormat::kE4m3        ? ""
                       : scale == ScaleFormat::kPowerOfTwo ? " (scales 2^n)"
                                                           : " (scales fp32)");
  }
};

constexpr IndexerFormat kIndexerFormats[] = {
    {DType::kBf16, IndexKFormat::kBf16, ScaleFormat::kFp32},
    {DType::kF32, IndexKFormat::kF32, ScaleFormat::kFp32},
    {DType::kBf16, IndexKFormat::kE4m3, ScaleFormat::kFp32},
    {DType::kF32, IndexKFormat::kE4m3, ScaleFormat::kPowerOfTwo},
    {DType::kF32, IndexKFormat::kBf16, ScaleFormat::kFp32},
    {DType::kBf16, IndexKFormat::kF32, ScaleFormat::kFp32},
    {DType::kE4m3, IndexKFormat::kE4m3, ScaleFormat::kFp32},
    {DType::kE4m3, IndexKFormat::kBf16, ScaleFormat::kFp32},
};

struct IndexerOptions {
  IndexerFormat format{};
  int64_t heads = 8;
  int32_t head_dim = 128;
  uint64_t seed = 11;
  Poison poison = Poison::kNan;
  int64_t page_gap_bytes = 0;
  int64_t padding = 0;
  bool integers = false;  ///< whole numbers everywhere: every sum is exact, and ties abound
  bool nans = false;      ///< NaN in keys 3 and 65 of each request and in a query of the last row
  DType logits = DType::kF32;
};

struct IndexerProblem {
  Paged paged;
  IndexPool pool;
  Tensor q, weights, logits, slots, lens, positions;
};

void put_nans(IndexerProblem& s) {
  const IndexCacheView& cache = s.pool.view;
  for (size_t i = 0; i < s.paged.keys_of.size(); ++i) {
    for (const int64_t position : {3, 65}) {
      if (position >= s.paged.keys_of[i]) continue;
      TensorView key = view(cache.values(s.paged.slot(static_cast<int64_t>(i), position)),
                            cache.format == IndexKFormat::kF32    ? DType::kF32
                            : cache.format == IndexKFormat::kBf16 ? DType::kBf16
                                                                  : DType::kE4m3,
                            {cache.head_dim});
      set(key, NAN, position % cache.head_dim);
    }
  }
  set(s.q.view, NAN, s.paged.num_rows - 1, s.q.view.shape[1] - 1, s.q.view.shape[2] - 1);
}

IndexerProblem make_indexer(const PagedSpec& spec, const IndexerOptions& o) {
  IndexerProblem s{
      .paged = Paged(spec), .pool = {}, .q = {}, .weights = {}, .logits = {}, .slots = {}, .lens = {}, .positions = {}};
  s.pool = make_index_pool(s.paged, o.format.cache, o.format.scale, o.head_dim, o.seed, o.poison, o.page_gap_bytes,
                           o.integers);
  s.q = make_tensor(o.format.q, {s.paged.num_rows, o.heads, o.head_dim}, o.padding);
  s.weights = make_tensor(DType::kF32, {s.paged.num_rows, o.heads}, o.padding > 0 ? 3 : 0);
  if (o.integers) {
    Rng rng(o.seed + 1);
    for (int64_t t = 0; t < s.paged.num_rows; ++t) {
      for (int64_t h = 0; h < o.heads; ++h) {
        set(s.weights.view, static_cast<float>(rng.below(5) - 2), t, h);
        for (int64_t d = 0; d < o.head_dim; ++d)  // few terms, so that many keys score alike
          set(s.q.view, d < 4 ? static_cast<float>(rng.below(3) - 1) : 0.0f, t, h, d);
      }
    }
  } else {
    fill_normal(s.q, Rng(o.seed + 1));
    fill_normal(s.weights, Rng(o.seed + 2));  // negative ones too
  }
  if (o.nans) put_nans(s);
  return s;
}

IndexLogits logits_of(IndexerProblem& s, DType dtype = DType::kF32) {
  const int64_t columns = s.paged.max_keys() + 5;
  s.logits = make_tensor(dtype, {s.paged.num_rows, columns}, 3);
  IndexLogits p;
  p.q = s.q.view;
  p.weights = s.weights.view;
  p.cache = s.pool.view;
  p.pages = s.paged.table();
  p.rows = s.paged.rows();
  p.logits = s.logits.view;
  return p;
}

IndexSelect select_of(IndexerProblem& s, int64_t k) {
  s.slots = make_tensor(DType::kI32, {s.paged.num_rows, k}, 1);
  s.lens = make_tensor(DType::kI32, {s.paged.num_rows});
  s.positions = make_tensor(DType::kI32, {s.paged.num_rows, k});
  IndexSelect p;
  p.q = s.q.view;
  p.weights = s.weights.view;
  p.cache = s.pool.view;
  p.pages = s.paged.table();
  p.rows = s.paged.rows();
  p.max_seq_len = s.paged.max_keys() + 9;
  p.topk_slots = s.slots.view;
  p.topk_lens = s.lens.view;
  p.topk_positions = s.positions.view;
  return p;
}

/// Of each row the sum over heads of |w| ||q||.
std::vector<double> row_bounds(const IndexerProblem& s) {
  std::vector<double> bounds(static_cast<size_t>(s.paged.num_rows));
  for (int64_t t = 0; t < s.paged.num_rows; ++t) {
    for (int64_t h = 0; h < s.q.view.shape[1]; ++h) {
      double norm = 0.0;
      for (int64_t d = 0; d < s.q.view.shape[2]; ++d) norm += std::pow(get(s.q.view, t, h, d), 2.0);
      bounds[static_cast<size_t>(t)] += std::fabs(get(s.weights.view, t, h)) * std::sqrt(norm);
    }
  }
  return bounds;
}

/// Keys are standard normal: their norm is sqrt(head_dim) within a few percent; a fifth more covers all of them.
double score_tolerance(const IndexerOptions& o, double row_bound, const std::string& impl = {}) {
  const double bound = row_bound * 1.2 * std::sqrt(static_cast<double>(o.head_dim));
  if (impl == "cuda_sm90") return fp8_logit_tolerance(o.head_dim, static_cast<double>(o.heads), bound);
  return logit_tolerance(o.head_dim, static_cast<double>(o.heads), bound);
}

void logits_case(Recorder& r, const std::string& case_class, const std::string& detail, const PagedSpec& spec,
                 const IndexerOptions& o) {
  IndexerProblem s = make_indexer(spec, o);
  const IndexLogits p = logits_of(s, o.logits);
  const std::vector<double> scales = row_bounds(s);
  const auto columns = static_cast<size_t>(p.logits.shape[1]);
  const double rounding = o.logits == DType::kBf16 ? kUnitBf16 : 0.0;
  const Case c{"index_logits", o.format.name(), case_class, detail};
  Outputs oracle;  // when somebody takes the case
  for_each_impl(r, c, p, [&](const std::string& impl) {
    if (oracle.names.empty()) oracle = run(p, {.impl = "ref", .num_workers = 1, .fp32_outputs = true});
    const Outputs got = run(p, r.run_options(impl));
    Worst worst;
    const std::vector<float> want = oracle.floats("logits");
    const std::vector<float> have = got.floats("logits");
    for (size_t e = 0; e < want.size(); ++e) {
      const size_t row = e / columns;
      const std::string place = fmt::format("row {} key {}", row, e % columns);
      if (static_cast<int64_t>(e % columns) >= s.paged.keys_of_row[row]) {
        uint32_t bits;
        std::memcpy(&bits, &have[e], sizeof bits);
        worst.see(bits >> 16 == 0xFFFF ? 0.0 : 1.0, 0.0, place + " was written");
      } else if (std::isnan(want[e]) || std::isnan(have[e])) {
        worst.see(std::isnan(want[e]) == std::isnan(have[e]) ? 0.0 : 1.0, 0.0, place + " NaN or not");
      } else {
        worst.see(std::fabs(static_cast<double>(have[e]) - want[e]),
                  (o.integers ? 0.0 : score_tolerance(o, scales[row], impl)) + rounding * std::fabs(want[e]), place);
      }
    }
    if (!got.fault.empty()) worst = {1.0, 0.0, got.fault, true};
    r.add(c, impl, worst);
  });
}

/// A selection against the oracle's scores: packed distinct positions in ascending order, -1 behind, the slot of each;
/// no score among the chosen below one left out by more than both may be wrong.
void compare_selection(const IndexerProblem& s, const IndexerOptions& o, int64_t k, const Outputs& scores,
                       const Outputs& got, const std::string& impl, Worst& worst) {
  const std::vector<double> scales = row_bounds(s);
  const std::vector<float> all = scores.floats("logits");
  const auto columns = s.paged.num_rows > 0 ? all.size() / static_cast<size_t>(s.paged.num_rows) : 0;
  const std::vector<int32_t> positions = got.ints("topk_positions");
  const std::vector<int32_t> slots = got.ints("topk_slots");
  const std::vector<int32_t> lens = got.ints("topk_lens");
  for (int64_t row = 0; row < s.paged.num_rows; ++row) {
    const int64_t n = s.paged.keys_of_row[static_cast<size_t>(row)];
    const int64_t count = std::min(n, k);
    const std::string place = fmt::format("row {} ({} keys)", row, n);
    const int32_t* chosen = positions.data() + row * k;
    bool form = lens[static_cast<size_t>(row)] == count;
    for (int64_t c = 0; c < k; ++c) {
      const int32_t position = chosen[c];
      if (c >= count) form = form && position == -1 && slots[static_cast<size_t>(row * k + c)] == -1;
      else
        form = form && position >= 0 && position < n && (c == 0 || chosen[c - 1] < position) &&
               slots[static_cast<size_t>(row * k + c)] ==
                   s.paged.slot(s.paged.request_of_row[static_cast<size_t>(row)], position);
    }
    worst.see(form ? 0.0 : 1.0, 0.0, place + " packing");
    if (!form) return;
    std::vector<bool> taken(static_cast<size_t>(n), false);
    double lowest = std::numeric_limits<double>::infinity();
    for (int64_t c = 0; c < count; ++c) {
      taken[static_cast<size_t>(chosen[c])] = true;
      lowest = std::min<double>(lowest, all[static_cast<size_t>(row) * columns + static_cast<size_t>(chosen[c])]);
    }
    double highest = -std::numeric_limits<double>::infinity();
    for (int64_t t = 0; t < n; ++t) {
      if (!taken[static_cast<size_t>(t)])
        highest = std::max<double>(highest, all[static_cast<size_t>(row) * columns + static_cast<size_t>(t)]);
    }
    worst.see(std::max(0.0, highest - lowest), 2.0 * score_tolerance(o, scales[static_cast<size_t>(row)], impl), place);
  }
}

void select_case(Recorder& r, const std::string& case_class, const std::string& detail, const PagedSpec& spec,
                 const IndexerOptions& o, int64_t k) {
  IndexerProblem s = make_indexer(spec, o);
  const IndexSelect p = select_of(s, k);
  const Outputs scores = run(logits_of(s), {.impl = "ref"});
  const Case c{"index_select", o.format.name(), case_class, detail};
  if (o.integers) {  // exact scores: exactly the oracle's choice
    check_case(r, c, p, same_bits);
    return;
  }
  for_each_impl(r, c, p, [&](const std::string& impl) {
    const Outputs got = run(p, r.run_options(impl));
    Worst worst;
    compare_selection(s, o, k, scores, got, impl, worst);
    if (!got.fault.empty()) worst = {1.0, 0.0, got.fault, true};
    r.add(c, impl, worst);
  });
}

std::vector<std::byte> all_bytes(const Outputs& o) {
  std::vector<std::byte> all;
  for (const auto& b : o.bytes) all.insert(all.end(), b.begin(), b.end());
  return all;
}

/// What page order must not change: positions and lengths, not slots.
std::vector<std::byte> positions_only(const Outputs& o) {
  std::vector<std::byte> all = o.of("topk_positions");
  const auto& lens = o.of("topk_lens");
  all.insert(all.end(), lens.begin(), lens.end());
  return all;
}

template <class Params>
void alone_case(Recorder& r, Case c, const IndexerProblem& s, const Params& params) {
  c.case_class = "rows alone";
  for_each_impl(r, c, params, [&](const std::string& impl) {
    const Outputs batch = run(params, {.impl = impl});
    for (int64_t row = 0; row < s.paged.num_rows; ++row) {
      const Paged one = s.paged.alone(row);
      Params p = params;
      p.q.data = static_cast<std::byte*>(p.q.data) + row * p.q.stride[0] * static_cast<int64_t>(size_of(p.q.dtype));
      p.q.shape[0] = p.weights.shape[0] = 1;
      p.weights.data = p.weights.template ptr<float>(row);
      p.pages = one.table();
      p.rows = one.rows();
      if constexpr (requires { p.logits; }) p.logits.shape[0] = 1;
      else p.topk_slots.shape[0] = p.topk_lens.shape[0] = p.topk_positions.shape[0] = 1;
      const Outputs single = run(p, {.impl = impl});
      Worst worst;
      for (size_t i = 0; i < single.names.size(); ++i) {
        const auto& part = single.bytes[i];
        const bool same =
            std::memcmp(batch.bytes[i].data() + static_cast<size_t>(row) * part.size(), part.data(), part.size()) == 0;
        worst.see(same ? 0.0 : 1.0, 0.0, fmt::format("row {} {}", row, single.names[i]));
      }
      r.add(c, impl, worst);
    }
  });
}

}  // namespace

void verify_index_logits(Recorder& r) {
  for (const IndexerFormat& format : kIndexerFormats) {
    IndexerOptions o;
    o.format = format;
    logits_case(r, "lengths", "0 to 257", {.seq_lens = {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257}},
                o);
    o.heads = 2;
    logits_case(r, "lengths", "4096", {.seq_lens = {4096, 3, 4097}}, o);
    for (const int64_t heads : {1, 3, 4, 8, 16, 31, 32, 33, 64, 128}) {
      o.heads = heads;
      logits_case(r, "heads 1 to 128", fmt::format("{} heads", heads), {.seq_lens = {70, 3}}, o);
    }
    o.heads = 4;
    for (const int32_t dim : {16, 32, 48, 64, 128, 256}) {
      o.head_dim = dim;
      logits_case(r, "head dims 16 to 256", fmt::format("{}", dim), {.seq_lens = {70, 3}}, o);
    }
    o.head_dim = 128;
    for (const int32_t page_size : {1, 16, 32, 48, 64, 128, 256, 1024})
      logits_case(r, "page sizes 1 to 1024", fmt::format("page size {}", page_size),
                  {.seq_lens = {130, 0, 5, 257}, .page_size = page_size}, o);
    for (int32_t q_len = 1; q_len <= 8; ++q_len)
      logits_case(r, "q_len 1 to 8", fmt::format("q_len {}", q_len),
                  {.seq_lens = {q_len, 63, 64, 65, 66, 0, 130}, .q_len = q_len}, o);
    for (const RowBound bound : {RowBound::kCausalFull, RowBound::kCausalFromFirst, RowBound::kUniformBlock}) {
      for (const PageTableForm form : {PageTableForm::kPadded, PageTableForm::kCsr})
        logits_case(r, "bounds, ragged, tables", to_string(bound),
                    {.seq_lens = {100, 0, 64, 7, 129, 2},
                     .q_len = 1,
                     .ragged = {5, 3, 0, 1, 8, 4},
                     .bound = bound,
                     .form = form,
                     .row_indices = form == PageTableForm::kPadded},
                    o);
    }
    // Decode of many requests: kernels that find their work from the lengths take it by the warp up to 32.
    for (const size_t requests : {31, 32, 33, 70}) {
      std::vector<int32_t> lens(requests);
      for (size_t i = 0; i < requests; ++i) lens[i] = i % 5 == 3 ? 0 : static_cast<int32_t>(i * 37 % 300);
      logits_case(r, "many requests", fmt::format("{}", requests), {.seq_lens = lens}, o);
    }
    // Many rows of a request: blocks of rows, and tiles of keys that only some of the rows see.
    for (const int64_t heads : {5, 32, 64}) {
      o.heads = heads;
      logits_case(r, "many rows", fmt::format("{} heads, 9 and 21 rows", heads),
                  {.seq_lens = {140, 9, 0, 64, 265}, .q_len = 9}, o);
      logits_case(r, "many rows", fmt::format("{} heads, ragged", heads),
                  {.seq_lens = {200, 5, 130, 64}, .ragged = {21, 1, 0, 8}, .page_size = 32}, o);
    }
    o.nans = true;
    for (const int64_t heads : {4, 33, 64}) {
      o.heads = heads;
      logits_case(r, "NaN in keys and queries", fmt::format("{} heads", heads), {.seq_lens = {70, 3, 130}, .q_len = 2},
                  o);
    }
    o.nans = false;
    o.heads = 4;
    o.integers = true;
    logits_case(r, "whole numbers", "", {.seq_lens = {300, 65}, .q_len = 2}, o);
    o.integers = false;
    o.page_gap_bytes = 4096;
    o.padding = 16;
    logits_case(r, "strided", "gaps between pages, heads and rows", {.seq_lens = {65, 300}, .q_len = 2}, o);
    o = {.format = format};
    logits_case(r, "no requests", "", {.seq_lens = {}}, o);
    logits_case(r, "no keys at all", "", {.seq_lens = std::vector<int32_t>(33, 0), .q_len = 3}, o);

    // bf16 logits are the fp32 ones of the same implementation, rounded once.
    o.logits = DType::kBf16;
    for (const int64_t heads : {1, 8, 64}) {
      o.heads = heads;
      logits_case(r, "bf16 logits", fmt::format("{} heads", heads),
                  {.seq_lens = {0, 1, 15, 64, 65, 575, 576, 577, 1300}, .q_len = 2}, o);
    }
    o = {.format = format, .heads = 3, .page_gap_bytes = 4096, .padding = 16, .logits = DType::kBf16};
    logits_case(r, "bf16 logits", "strided", {.seq_lens = {65, 300}, .q_len = 2, .page_size = 16}, o);
    {
      IndexerProblem s = make_indexer({.seq_lens = {1300, 0, 65}, .q_len = 3}, o);
      IndexerProblem again = s;
      const IndexLogits wide = logits_of(s), narrow = logits_of(again, DType::kBf16);
      const Case rounded{"index_logits", format.name(), "bf16 logits", "against fp32 ones"};
      for_each_impl(r, rounded, narrow, [&](const std::string& impl) {
        const std::vector<float> whole = run(wide, {.impl = impl}).floats("logits");
        const std::vector<float> half = run(narrow, {.impl = impl}).floats("logits");
        Worst worst;
        for (size_t e = 0; e < whole.size(); ++e) {
          if (static_cast<int64_t>(e % static_cast<size_t>(wide.logits.shape[1])) >=
              s.paged.keys_of_row[e / static_cast<size_t>(wide.logits.shape[1])])
            continue;
          worst.see(Bf16::from_float(whole[e]).to_float() == half[e] ? 0.0 : 1.0, 0.0, fmt::format("element {}", e));
        }
        r.add(rounded, impl, worst);
      });
      check_workers(r, {"index_logits", format.name(), "", "bf16 logits"}, narrow);
    }
    o = {.format = format};

    const PagedSpec mixed{.seq_lens = {2100, 65, 0, 1, 300, 64}, .q_len = 3};
    IndexerProblem base = make_indexer(mixed, o);
    const IndexLogits p = logits_of(base);
    const Case c{"index_logits", format.name(), "", "mixed lengths"};
    check_workers(r, c, p);
    IndexerProblem one_row = make_indexer({.seq_lens = {5000}}, o);  // fewer rows than workers
    check_workers(r, c, logits_of(one_row));
    std::vector<IndexLogits> variants = {p};
    std::vector<IndexerProblem> keep;
    for (const Poison poison : {Poison::kInf, Poison::kHuge, Poison::kZero}) {
      IndexerOptions other = o;
      other.poison = poison;
      keep.push_back(make_indexer(mixed, other));
      variants.push_back(logits_of(keep.back()));
    }
    Case unused = c;
    unused.case_class = "unused bytes";
    check_same<IndexLogits>(r, unused, variants, all_bytes);
    PagedSpec shuffled = mixed;
    shuffled.page_seed = 99;
    IndexerProblem other = make_indexer(shuffled, o);
    Case order = c;
    order.case_class = "page order";
    check_same<IndexLogits>(r, order, {p, logits_of(other)}, all_bytes);
    alone_case(r, c, base, p);
  }
}

void verify_small_logits(Recorder& r) {
  for (const IndexerFormat& format : kIndexerFormats) {
    if (!r.wants_format(format.name())) continue;
    IndexerOptions o;
    o.format = format;
    // 16, 32 and 64 heads, of 64 values and 128: each has a kernel of its own where it has one at all.
    for (const int64_t heads : {8, 20, 64}) {
      for (const int32_t dim : {64, 128}) {
        o.heads = heads;
        o.head_dim = dim;
        o.logits = heads == 20 ? DType::kBf16 : DType::kF32;
        logits_case(r, "small", fmt::format("{} heads of {}", heads, dim), {.seq_lens = {70, 0, 3}}, o);
      }
    }
    for (const DType dtype : {DType::kBf16, DType::kF32}) {  // the other dtype of either kernel of head_dim 128
      o.heads = dtype == DType::kBf16 ? 64 : 32;
      o.logits = dtype;
      logits_case(r, "small", "rows by two", {.seq_lens = {200, 2}, .q_len = 2, .page_size = 16}, o);
    }
    logits_case(r, "small", "ragged", {.seq_lens = {200, 5, 130}, .ragged = {9, 1, 4}, .page_size = 32}, o);
    logits_case(r, "small", "pages of 3", {.seq_lens = {70}, .page_size = 3}, o);
    // More requests than a warp looks at in one step, and more units than blocks.
    logits_case(r, "small", "many requests", {.seq_lens = std::vector<int32_t>(140, 5), .q_len = 2}, o);
  }
}

// ---- topk ---------------------------------------------------------------------------------------------------------

namespace {

/// Rows of scores that have broken selectors (known faults BL-26 to BL-29).
struct ScoreKind {
  const char* name;
  float (*at)(Rng& rng, int64_t i, int64_t n);
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

const ScoreKind kScoreKinds[] = {
    {"normal", [](Rng& rng, int64_t, int64_t) { return static_cast<float>(rng.normal()); }},
    {"all equal", [](Rng&, int64_t, int64_t) { return 1.5f; }},
    {"all zero, both signs", [](Rng& rng, int64_t, int64_t) { return rng.below(2) == 0 ? 0.0f : -0.0f; }},
    {"all -inf", [](Rng&, int64_t, int64_t) { return -kInfinity; }},
    {"all NaN", [](Rng& rng, int64_t, int64_t) { return rng.below(2) == 0 ? NAN : -NAN; }},
    {"one NaN", [](Rng& rng, int64_t i, int64_t n) { return i == n / 2 ? NAN : static_cast<float>(rng.normal()); }},
    {"NaN, infinities and numbers",
     [](Rng& rng, int64_t, int64_t) {
       switch (rng.below(5)) {
         case 0: return static_cast<float>(NAN);
         case 1: return -kInfinity;
         case 2: return kInfinity;
         case 3: return -static_cast<float>(NAN);
         default: return static_cast<float>(rng.normal());
       }
     }},
    {"few numbers, else NaN",
     [](Rng& rng, int64_t i, int64_t) { return i % 97 == 5 ? static_cast<float>(-rng.uniform()) : NAN; }},
    {"all negative", [](Rng& rng, int64_t, int64_t) { return static_cast<float>(-1.0 - rng.uniform()); }},
    {"rising", [](Rng&, int64_t i, int64_t) { return static_cast<float>(i); }},
    {"falling", [](Rng&, int64_t i, int64_t) { return static_cast<float>(-i); }},
    {"[1, 1.245)", [](Rng& rng, int64_t, int64_t) { return static_cast<float>(1.0 + 0.245 * rng.uniform()); }},
    {"last bits", [](Rng& rng, int64_t, int64_t) { return 1.0f + static_cast<float>(rng.below(16)) * 0x1p-23f; }},
    {"duplicates", [](Rng& rng, int64_t, int64_t) { return static_cast<float>(rng.below(40)); }},
    {"100 winners, the rest zero",
     [](Rng& rng, int64_t i, int64_t n) {
       return i % (n / 100 + 1) == 0 ? static_cast<float>(1.0 + rng.uniform()) : 0.0f;
     }},
    {"denormals", [](Rng& rng, int64_t, int64_t) { return static_cast<float>(rng.below(200) - 100) * 0x1p-149f; }},
    {"huge and tiny",
     [](Rng& rng, int64_t, int64_t) {
       return static_cast<float>(std::ldexp(rng.normal(), static_cast<int>(rng.below(240) - 120)));
     }},
};

struct TopKProblem {
  Tensor logits, lens, positions, counts;
  TopK params;
};

TopKProblem make_topk(const ScoreKind& kind, const std::vector<int32_t>& lens, int64_t k, uint64_t seed,
                      DType dtype = DType::kF32) {
  TopKProblem s;
  int64_t columns = 1;
  for (const int32_t n : lens) columns = std::max<int64_t>(columns, n);
  columns += 3;
  const auto rows = static_cast<int64_t>(lens.size());
  s.logits = make_tensor(dtype, {rows, columns}, 5);
  for (int64_t t = 0; t < rows; ++t) {
    Rng rng = Rng::of(seed, static_cast<uint64_t>(t), 0);
    const int32_t n = lens[static_cast<size_t>(t)];
    // Behind the row's end lie scores that would win.
    for (int64_t i = 0; i < columns; ++i) set(s.logits.view, i < n ? kind.at(rng, i, n) : kInfinity, t, i);
  }
  s.lens = make_ints(lens);
  s.positions = make_tensor(DType::kI32, {rows, k}, 1);
  s.counts = make_tensor(DType::kI32, {rows});
  s.params.logits = s.logits.view;
  s.params.lens = s.lens.view;
  s.params.positions = s.positions.view;
  s.params.counts = s.counts.view;
  return s;
}

/// bf16 scores tie far more often; the shapes at which the kernels take other ways are the same, so fewer of them.
void verify_topk_of(Recorder& r, DType dtype) {
  const std::string format = fmt::format("scores {}", to_string(dtype));
  const std::vector<int64_t> widths =
      dtype == DType::kF32 ? std::vector<int64_t>{1, 7, 64, 65, 256, 2048} : std::vector<int64_t>{1, 65, 2048};
  for (const ScoreKind& kind : kScoreKinds) {
    for (const int64_t k : widths) {
      const auto n = static_cast<int32_t>(k);
      const std::vector<int32_t> lens = {-3, 0, 1, n - 1, n, n + 1, n + 17, 2 * n + 5, 4 * n + 1};
      const TopKProblem s = make_topk(kind, lens, k, static_cast<uint64_t>(k), dtype);
      check_case(r, {"topk", format, kind.name, fmt::format("k {}", k)}, s.params, same_bits);
    }
    // The rows that broke others: long ones at a width that is not a power of two.
    const TopKProblem s = make_topk(kind, {16385, 8320, 131072}, 2048, 5, dtype);
    check_case(r, {"topk", format, kind.name, "131072, k 2048"}, s.params, same_bits);
  }
  // Rows and selections beyond what a kernel may hold in its fast memory; more long rows than processors.
  for (const size_t i : {0, 6, 9, 13}) {
    const ScoreKind& kind = kScoreKinds[i];
    const auto add = [&](const std::vector<int32_t>& lens, int64_t k, const char* detail) {
      const TopKProblem large = make_topk(kind, lens, k, 6, dtype);
      check_case(r, {"topk", format, kind.name, detail}, large.params, same_bits);
    };
    add({0, 5, 64, 65, 66, 77, 261, 8193}, 64, "k 64");
    add({400000, 16385, 9000}, 2048, "400000, k 2048");
    add({70000, 30001, 30000, 9000}, 30000, "70000, k 30000");
    add({40000, 20000, 16385}, 16384, "40000, k 16384");
    if (i == 0) {
      add(std::vector<int32_t>(137, 20999), 2048, "137 rows of 20999, k 2048");
      add(std::vector<int32_t>(137, 20400), 2048, "137 rows of 20400, k 2048");
    }
  }
  const TopKProblem s = make_topk(kScoreKinds[13], {5000, 100, 0, 3000, 2049, 20000, 2048, 1}, 2048, 9, dtype);
  const Case c{"topk", format, "20 runs", "duplicates"};
  check_workers(r, c, s.params);
  for (const ScoreKind& kind : kScoreKinds) {  // fewer rows than workers: columns are shared out instead
    const TopKProblem one = make_topk(kind, {131072}, 2048, 3, dtype);
    check_workers(r, {"topk", format, "", kind.name}, one.params);
    const TopKProblem two = make_topk(kind, {70000, 900}, 2048, 4, dtype);
    check_workers(r, {"topk", format, "", kind.name}, two.params);
  }
  check_same<TopK>(r, c, std::vector<TopK>(20, s.params), all_bytes);
  Case alone = c;
  alone.case_class = "rows alone";
  for_each_impl(r, alone, s.params, [&](const std::string& impl) {
    const Outputs batch = run(s.params, {.impl = impl});
    for (int64_t row = 0; row < s.params.logits.shape[0]; ++row) {
      TopK p = s.params;
      p.logits.data = static_cast<std::byte*>(p.logits.data) +
                      row * p.logits.stride[0] * static_cast<int64_t>(size_of(p.logits.dtype));
      p.lens.data = p.lens.ptr<int32_t>(row);
      p.logits.shape[0] = p.lens.shape[0] = p.positions.shape[0] = p.counts.shape[0] = 1;
      const Outputs single = run(p, {.impl = impl});
      Worst worst;
      for (size_t i = 0; i < single.names.size(); ++i) {
        const auto& part = single.bytes[i];
        worst.see(
            std::memcmp(batch.bytes[i].data() + static_cast<size_t>(row) * part.size(), part.data(), part.size()) == 0
                ? 0.0
                : 1.0,
            0.0, fmt::format("row {}", row));
      }
      r.add(alone, impl, worst);
    }
  });
  {  // wide lists, and lists wider than the rows that they come from
    const TopKProblem wide = make_topk(kScoreKinds[13], {-3, 0, 100, 19999, 20000, 20001, 40000}, 20000, 6, dtype);
    check_case(r, {"topk", format, "lists of any length", "k 20000"}, wide.params, same_bits);
    const TopKProblem short_rows = make_topk(kScoreKinds[13], {100, 0, 7}, 16384, 7, dtype);
    check_case(r, {"topk", format, "lists of any length", "k 16384 of 103 columns"}, short_rows.params, same_bits);
  }
  const TopKProblem none = make_topk(kScoreKinds[0], {}, 8, 1, dtype);
  check_case(r, {"topk", format, "no rows", ""}, none.params, same_bits);
}

}  // namespace

void verify_topk(Recorder& r) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) verify_topk_of(r, dtype);
}

/// Rows that the kernels of a GPU keep whole, one that they keep the best of and one that they read again and again.
void verify_small_topk(Recorder& r) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    const std::string format = fmt::format("scores {}", to_string(dtype));
    if (!r.wants_format(format)) continue;
    const auto add = [&](size_t kind, const std::vector<int32_t>& lens, int64_t k, const char* detail) {
      const TopKProblem s = make_topk(kScoreKinds[kind], lens, k, 6, dtype);
      check_case(r, {"topk", format, "small", detail}, s.params, same_bits);
    };
    add(0, {-3, 0, 1, 63, 64, 65, 300}, 64, "k 64");
    add(6, {130, 700, 64}, 64, "k 64, NaN and infinities");
    add(13, {2047, 2048, 2049, 5000}, 2048, "k 2048, ties");
    add(0, {9000, 20000}, 512, "clusters");
    add(13, {100, 7}, 256, "lists longer than rows");
    // 170,000 columns over eight blocks are 21,250 each, more than a list of 20,480 holds; of 480,000 and k 30,000 not
    // even pairs fit.
    add(13, {170000, 300}, 512, "the best of a slice");
    if (dtype == DType::kF32) add(0, {480000}, 30000, "no room for a list");
  }
}

// ---- index_select -------------------------------------------------------------------------------------------------

void verify_index_select(Recorder& r) {
  for (const IndexerFormat& format : kIndexerFormats) {
    IndexerOptions o;
    o.format = format;
    o.heads = 4;
    for (const int64_t k : {1, 63, 64, 65, 256})
      select_case(r, "lengths around k", fmt::format("k {}", k),
                  {.seq_lens = {0, 1, static_cast<int32_t>(k - 1), static_cast<int32_t>(k), static_cast<int32_t>(k + 1),
                                257, 600}},
                  o, k);
    o.heads = 2;
    select_case(r, "lengths around k", "k 2048", {.seq_lens = {2047, 2048, 2049, 3000}}, o, 2048);
    for (const int64_t heads : {1, 2, 16, 32, 64}) {
      o.heads = heads;
      for (const int32_t dim : {32, 64, 128}) {
        o.head_dim = dim;
        select_case(r, "heads 1 to 64, dims 32 to 128", fmt::format("{} heads of {}", heads, dim),
                    {.seq_lens = {300, 40}}, o, 64);
      }
    }
    o.heads = 1;
    o.head_dim = 32;
    for (const int64_t k : {16384, 20000})
      select_case(r, "lists of any length", fmt::format("k {}", k), {.seq_lens = {17000, 100}}, o, k);
    o.head_dim = 128;
    o.heads = 5;
    o.integers = true;
    for (const int32_t q_len : {1, 2, 5, 8})
      select_case(r, "whole numbers, ties", fmt::format("q_len {}", q_len),
                  {.seq_lens = {q_len, 700, 0, 65, 1500}, .q_len = q_len}, o, 64);
    for (const int32_t page_size : {1, 16, 48, 64, 1024})
      select_case(r, "page sizes 1 to 1024", fmt::format("page size {}", page_size),
                  {.seq_lens = {130, 0, 5, 257}, .page_size = page_size}, o, 100);
    for (const RowBound bound : {RowBound::kCausalFull, RowBound::kCausalFromFirst, RowBound::kUniformBlock}) {
      for (const PageTableForm form : {PageTableForm::kPadded, PageTableForm::kCsr})
        select_case(r, "bounds, ragged, tables", to_string(bound),
                    {.seq_lens = {100, 0, 64, 7, 129, 2},
                     .q_len = 1,
                     .ragged = {5, 3, 0, 1, 8, 4},
                     .bound = bound,
                     .form = form,
                     .row_indices = form == PageTableForm::kPadded},
                    o, 60);
    }
    o.padding = 16;
    o.page_gap_bytes = 1024;
    select_case(r, "strided", "", {.seq_lens = {65, 300}, .q_len = 2}, o, 50);
    o = {.format = format, .heads = 4};
    select_case(r, "no requests", "", {.seq_lens = {}}, o, 50);
    select_case(r, "no keys at all", "", {.seq_lens = std::vector<int32_t>(33, 0), .q_len = 3}, o, 50);

    const PagedSpec mixed{.seq_lens = {2100, 65, 0, 1, 300, 64}, .q_len = 3};
    IndexerProblem base = make_indexer(mixed, o);
    const IndexSelect p = select_of(base, 200);
    const Case c{"index_select", format.name(), "", "mixed lengths"};
    check_workers(r, c, p);
    IndexerProblem one_row = make_indexer({.seq_lens = {5000}}, o);
    check_workers(r, c, select_of(one_row, 512));
    IndexerProblem ties =
        make_indexer({.seq_lens = {5000, 3000}, .q_len = 1}, {.format = format, .heads = 4, .integers = true});
    check_workers(r, c, select_of(ties, 512));
    std::vector<IndexSelect> variants = {p};
    std::vector<IndexerProblem> keep;
    for (const Poison poison : {Poison::kInf, Poison::kHuge, Poison::kZero}) {
      IndexerOptions other = o;
      other.poison = poison;
      keep.push_back(make_indexer(mixed, other));
      variants.push_back(select_of(keep.back(), 200));
    }
    Case unused = c;
    unused.case_class = "unused bytes";
    check_same<IndexSelect>(r, unused, variants, all_bytes);
    PagedSpec shuffled = mixed;
    shuffled.page_seed = 99;
    IndexerProblem other = make_indexer(shuffled, o);
    Case order = c;
    order.case_class = "page order";
    check_same<IndexSelect>(r, order, {p, select_of(other, 200)}, positions_only);
    alone_case(r, c, base, p);
    // The fused selection is the selection, which is exact whoever makes it, of the same implementation's own scores.
    Case fused = c;
    fused.case_class = "== topk of index_logits";
    IndexerProblem again = make_indexer(mixed, o);
    const IndexLogits logits = logits_of(again);
    for_each_impl(r, fused, p, [&](const std::string& impl) {
      const Outputs scores = run(logits, {.impl = impl});
      std::vector<int32_t> lens(again.paged.keys_of_row.begin(), again.paged.keys_of_row.end());
      const std::vector<float> values = scores.floats("logits");
      TopKProblem t = make_topk(kScoreKinds[0], lens, 200, 1);
      const auto columns = static_cast<size_t>(logits.logits.shape[1]);
      for (size_t row = 0; row < lens.size(); ++row) {
        for (int64_t i = 0; i < lens[row]; ++i)
          *t.logits.view.ptr<float>(static_cast<int64_t>(row), i) = values[row * columns + static_cast<size_t>(i)];
      }
      Worst worst;
      worst.see(
          run(t.params, {.impl = "ref"}).of("positions") == run(p, {.impl = impl}).of("topk_positions") ? 0.0 : 1.0,
          0.0, "positions differ");
      r.add(fused, impl, worst);
    });
  }
}

void verify_small_selections(Recorder& r) {
  for (const IndexerFormat& format : kIndexerFormats) {
    if (!r.wants_format(format.name())) continue;
    IndexerOptions o;
    o.format = format;
    o.heads = 8;
    select_case(r, "small", "one row each", {.seq_lens = {300, 0, 40}}, o, 64);
    select_case(r, "small", "no scores", {.seq_lens = {60, 3}, .q_len = 2, .page_size = 16}, o, 128);
    o.integers = true;
    select_case(r, "small", "ragged, ties",
                {.seq_lens = {200, 5, 130}, .ragged = {3, 1, 2}, .form = PageTableForm::kCsr}, o, 64);
  }
}

}  // namespace verify
}  // namespace v0
}  // namespace gannet
