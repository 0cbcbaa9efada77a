#include "harness/op_problems.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>

#include "core/op_list.h"
#include "harness/odd_executor.h"
#include "verify/attention_compare.h"
#include "verify/tolerances.h"

namespace gannet_test {

using namespace gannet;
using namespace gannet::verify;

namespace {

using Memory = verify::Buffer;  // not gannet::Buffer: this one has guards and poison
using Keep = std::vector<std::shared_ptr<void>>;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---- numbers ------------------------------------------------------------------------------------------------------

// Tolerances are derived for standard deviations; of the rows of some ten thousand cases the farthest lie about twice
// as far out as those of the fixed grid of src/verify.
constexpr double kTails = 2.0;

uint64_t mix(uint64_t seed, uint64_t a, uint64_t b) { return Rng::of(seed, a, b).next(); }

/// Normal numbers, drawn once: making fresh ones would be most of the time of a small case.
float normal_at(uint64_t i) {
  static const std::vector<float> table = [] {
    std::vector<float> t(1 << 14);
    Rng rng(2026);
    for (float& x : t) x = static_cast<float>(rng.normal());
    return t;
  }();
  return table[i % table.size()];
}

/// Row `row` of `what`: the same numbers wherever it lies.
class Row {
 public:
  Row(uint64_t seed, uint64_t what, uint64_t row) : start_(mix(seed, what, row)), step_(2 * (start_ >> 40 & 255) + 1) {}
  float operator[](int64_t d) const { return normal_at(start_ + static_cast<uint64_t>(d) * step_); }

 private:
  uint64_t start_, step_;
};

struct Seeds {
  explicit Seeds(Source& in) : seed(static_cast<uint64_t>(in.between(0, 0xFFFFFF))) {}
  uint64_t seed;
};

void fill(const TensorView& v, uint64_t seed, uint64_t what, float deviation = 1.0f) {
  const int64_t n1 = v.rank > 1 ? v.shape[1] : 1, n2 = v.rank > 2 ? v.shape[2] : 1;
  for (int64_t i = 0; i < v.shape[0]; ++i) {
    for (int64_t j = 0; j < n1; ++j) {
      if (v.rank < 3) {
        set(v, Row(seed, what, static_cast<uint64_t>(i))[j] * deviation, i, j);
        continue;
      }
      const Row row(seed, what, static_cast<uint64_t>(i * n1 + j));
      for (int64_t k = 0; k < n2; ++k) set(v, row[k] * deviation, i, j, k);
    }
  }
}

/// A tensor in the keeping of a problem, whose gaps hold the poison.
TensorView tensor(Keep& keep, const Surroundings& around, DType dtype, std::initializer_list<int64_t> shape,
                  int64_t padding = 0) {
  Tensor t = make_tensor(dtype, shape, padding);
  t.buffer = std::make_shared<Memory>(t.buffer->size(), around.poison, dtype == DType::kBf16 ? dtype : DType::kF32);
  t.view.data = t.buffer->data();
  keep.push_back(t.buffer);
  return t.view;
}

TensorView ints(Keep& keep, const std::vector<int32_t>& values) {
  Tensor t = make_ints(values);
  keep.push_back(t.buffer);
  return t.view;
}

/// Rows [begin, begin + rows) of a view.
TensorView cut(TensorView v, int64_t begin, int64_t rows) {
  if (!v.given()) return v;
  v.data = static_cast<std::byte*>(v.data) + begin * v.stride[0] * static_cast<int64_t>(size_of(v.dtype));
  v.shape[0] = rows;
  return v;
}

/// `text()` only where it is needed: it would be most of the time.
template <class Text>
void require(bool holds, Text&& text) {
  if (holds) return;
  if constexpr (std::is_invocable_v<Text>) throw Failure(text());
  else throw Failure(text);
}

void require(const Worst& worst) {
  if (worst.bad)
    throw Failure(fmt::format("{}: error {:.3g}, tolerance {:.3g}", worst.where, worst.error, worst.tolerance));
}

bool same_number(float a, float b) { return std::memcmp(&a, &b, 4) == 0 || (std::isnan(a) && std::isnan(b)); }

/// Everything the same bit for bit, but that all NaN are equal.
void compare_bits(const Outputs& oracle, const Outputs& got) {
  for (size_t i = 0; i < oracle.names.size(); ++i) {
    const std::string& name = oracle.names[i];
    if (oracle.dtypes[i] == DType::kF32 || oracle.dtypes[i] == DType::kBf16) {
      const std::vector<float> want = oracle.floats(name), have = got.floats(name);
      for (size_t e = 0; e < want.size(); ++e)
        require(same_number(want[e], have[e]),
                [&] { return fmt::format("{}[{}] is {}; the oracle has {}", name, e, have[e], want[e]); });
    } else {
      for (size_t e = 0; e < oracle.bytes[i].size(); ++e)
        require(oracle.bytes[i][e] == got.bytes[i][e], [&] {
          return fmt::format("byte {} of {} is {}; the oracle has {}", e, name, static_cast<int>(got.bytes[i][e]),
                             static_cast<int>(oracle.bytes[i][e]));
        });
    }
  }
}

// ---- pages --------------------------------------------------------------------------------------------------------

constexpr int32_t kPageSizes[] = {64, 1, 2, 3, 16, 32, 48, 100, 128, 1024};

/// Some requests: none, padded ones, lengths around tiles and pages, rows alike or ragged, none of them at times.
PagedSpec draw_requests(Source& in, const Surroundings& around) {
  PagedSpec spec;
  const auto n = in.between(0, 4);
  const auto longest = in.one_in(16) ? 500 : in.pick({20, 70, 140});
  for (int64_t i = 0; i < n; ++i) {
    switch (in.between(0, 5)) {
      case 0: spec.seq_lens.push_back(0); break;
      case 1: spec.seq_lens.push_back(in.pick({1, 15, 16, 17, 63, 64, 65, 127, 128, 129, -1})); break;
      default: spec.seq_lens.push_back(static_cast<int32_t>(in.between(1, longest)));
    }
  }
  spec.bound = in.pick({RowBound::kCausalFull, RowBound::kCausalFromFirst, RowBound::kUniformBlock});
  if (in.one_in(3)) {
    spec.ragged.assign(static_cast<size_t>(n), 0);
    for (int32_t& rows : spec.ragged) rows = static_cast<int32_t>(in.between(0, 5));
  } else {
    spec.q_len = in.one_in(2) ? static_cast<int32_t>(in.between(1, 8)) : 1;
  }
  spec.form = in.pick({PageTableForm::kPadded, PageTableForm::kCsr});
  spec.row_indices = spec.form == PageTableForm::kPadded && in.one_in(2);
  spec.page_size = in.pick(kPageSizes);
  spec.spare_columns = static_cast<int32_t>(in.between(0, 2));
  spec.page_seed = around.page_seed;
  return spec;
}

std::string describe(const PagedSpec& s) {
  return fmt::format("lens [{}], q_len {}, ragged [{}], {}, page size {}, {}{}", fmt::join(s.seq_lens, " "), s.q_len,
                     fmt::join(s.ragged, " "), to_string(s.bound), s.page_size,
                     s.form == PageTableForm::kCsr ? "csr" : "padded", s.row_indices ? " by row_indices" : "");
}

template <class Cache>
void make_pages(Keep& keep, const Paged& paged, const Surroundings& around, Cache& view, int64_t token_bytes, DType as,
                int64_t gap) {
  view.num_pages = paged.num_pages;
  view.page_size = paged.spec.page_size;
  view.page_stride_bytes = (token_bytes * view.page_size + gap + 15) / 16 * 16;
  auto buffer =
      std::make_shared<Memory>(static_cast<size_t>(view.num_pages * view.page_stride_bytes), around.poison, as);
  view.data = buffer->data();
  keep.push_back(buffer);
}

/// Every key of the requests, by its slot.
template <class F>
void for_each_key(const Paged& paged, F&& f) {
  for (size_t i = 0; i < paged.keys_of.size(); ++i)
    for (int64_t t = 0; t < paged.keys_of[i]; ++t)
      f(static_cast<int64_t>(i), t, paged.slot(static_cast<int64_t>(i), t));
}

// ---- absorbed attention -------------------------------------------------------------------------------------------

// Mostly narrow: width is most of the time of a case.
constexpr RowGeometry kGeometries[] = {{128, 16}, {128, 64}, {128, 32}, {128, 16}, {128, 16}, {256, 32}, {512, 64}};
constexpr RowGeometry kOddGeometries[] = {{64, 16}, {80, 48}, {96, 32}};  // no multiple of 128: not packed

/// What mla_decode and sparse_attention share: a pool, queries and outputs.
struct Absorbed {
  Paged paged;
  AbsorbedFormat format;
  AttentionPrecision precision;
  int64_t heads = 1;
  LatentCacheView cache;
  TensorView q, attn_sink, out, lse, max_logits;
  float softmax_scale = 0.0f, q_scale = 1.0f;
  std::string text;
};

Absorbed draw_absorbed(Source& in, const Surroundings& around, Keep& keep, bool sparse) {
  const Seeds seeds(in);
  Absorbed a{.paged = Paged(draw_requests(in, around)),
             .format = in.pick(kAbsorbedFormats),
             .precision = {},
             .cache = {},
             .q = {},
             .attn_sink = {},
             .out = {},
             .lse = {},
             .max_logits = {},
             .text = {}};
  if (sparse && a.format.cache == LatentFormat::kE4m3PerToken)
    a.format.cache = a.format.q == DType::kE4m3 ? LatentFormat::kE4m3 : LatentFormat::kPacked656;
  RowGeometry g = in.pick(kGeometries);
  if (a.format.cache != LatentFormat::kPacked656 && in.one_in(4)) g = in.pick(kOddGeometries);
  if (in.one_in(6)) a.format.out = a.format.out == DType::kF32 ? DType::kBf16 : DType::kF32;
  a.heads = in.one_in(10) ? in.pick<int64_t>({5, 8, 16, 17, 33}) : in.between(1, 4);
  // Queries of one byte over caches of one byte.
  const bool narrow_q = (a.format.cache == LatentFormat::kE4m3 || a.format.cache == LatentFormat::kE4m3PerToken) &&
                        a.format.q == DType::kBf16 && in.one_in(3);
  if (narrow_q) {
    a.format.q = DType::kE4m3;
    a.q_scale = in.pick({0.1f, 0.25f});
  }
  const int64_t padding = in.pick<int64_t>({0, 16});
  const double deviation = in.pick({1.5, 0.25, 4.0});
  const bool with_lse = !in.one_in(4), with_sink = in.one_in(4), with_max = in.one_in(4);
  const bool nan_keys = in.one_in(8);

  a.cache.format = a.format.cache;
  a.cache.geometry = g;
  if (a.cache.format == LatentFormat::kE4m3) a.cache.scale = in.pick({0.03f, 1.0f / 64});
  const DType as = a.cache.format == LatentFormat::kBf16 ? DType::kBf16 : DType::kF32;
  const int64_t row_bytes = latent_row_bytes(a.cache.format, g);
  if (a.cache.format != LatentFormat::kE4m3PerToken && in.one_in(4))  // rows of others between
    a.cache.row_stride_bytes = (row_bytes + 15) / 16 * 16 + in.pick<int64_t>({16, 0, 256});
  make_pages(keep, a.paged, around, a.cache, std::max(row_bytes, a.cache.row_stride_bytes), as,
             in.pick<int64_t>({0, 48, 4096}));
  std::vector<int64_t> slots;
  for_each_key(a.paged, [&](int64_t, int64_t, int64_t slot) { slots.push_back(slot); });
  const auto n = static_cast<int64_t>(slots.size());
  const TensorView latent = tensor(keep, around, DType::kF32, {n, g.latent_dim});
  const TensorView rope = tensor(keep, around, DType::kF32, {n, g.rope_dim});
  int64_t row = 0;
  for_each_key(a.paged, [&](int64_t request, int64_t t, int64_t) {
    const Row x(seeds.seed, static_cast<uint64_t>(request), static_cast<uint64_t>(t));
    const bool nan = nan_keys && t % 37 == 36;  // rows that do not see it are as they were
    for (int64_t d = 0; d < g.latent_dim; ++d) set(latent, nan && d % 5 == 0 ? NAN : x[d], row, d);
    for (int64_t d = 0; d < g.rope_dim; ++d) set(rope, x[g.latent_dim + d], row, d);
    ++row;
  });
  run_once(Context{}, LatentWrite{.latent = latent, .rope = rope, .slots = view(slots.data(), {n}), .cache = a.cache},
           {.impl = "ref"});

  a.q = tensor(keep, around, a.format.q, {a.paged.num_rows, a.heads, g.width()}, padding);
  fill(a.q, seeds.seed, 1 << 20, 1.0f / a.q_scale);
  if (with_sink) {
    a.attn_sink = tensor(keep, around, DType::kF32, {a.heads});
    for (int64_t h = 0; h < a.heads; ++h)
      set(a.attn_sink, h % 5 == 4 ? -kInfinity : normal_at(seeds.seed + static_cast<uint64_t>(h)) * 3.0f, h);
  }
  if (with_max) a.max_logits = tensor(keep, around, DType::kF32, {a.paged.num_rows, a.heads}, padding > 0 ? 1 : 0);
  a.out = tensor(keep, around, a.format.out, {a.paged.num_rows, a.heads, g.latent_dim}, padding);
  if (with_lse) a.lse = tensor(keep, around, DType::kF32, {a.paged.num_rows, a.heads}, padding > 0 ? 1 : 0);
  a.softmax_scale = static_cast<float>(deviation / std::sqrt(static_cast<double>(g.width())));
  a.precision = a.format.precision();
  a.precision.width = g.width();
  a.precision.score_deviation = deviation;
  a.text = fmt::format("{}, {} heads, {} + {}, deviation {}{}{}{}, {}", a.format.name(), a.heads, g.latent_dim,
                       g.rope_dim, deviation, nan_keys ? ", NaN keys" : "", with_sink ? ", sink" : "",
                       a.cache.row_stride_bytes > 0 ? ", rows between" : "", describe(a.paged.spec));
  return a;
}

auto compare_attention_within(AttentionPrecision precision, int64_t heads, std::vector<int64_t> keys_of_row) {
  return [=](const Outputs& oracle, const Outputs& got) {
    Worst worst;
    compare_attention(oracle, got, precision, heads, keys_of_row, worst);
    if (worst.bad && worst.error <= kTails * worst.tolerance) worst.bad = false;
    require(worst);
    if (std::find(got.names.begin(), got.names.end(), "max_logits") == got.names.end()) return;
    const std::vector<float> want = oracle.floats("max_logits"), have = got.floats("max_logits");
    for (size_t i = 0; i < want.size(); ++i)
      require(want[i] == have[i] || std::fabs(double{want[i]} - have[i]) <= kTails * lse_tolerance(precision, want[i]),
              [&] { return fmt::format("max_logits[{}] is {}; the oracle has {}", i, have[i], want[i]); });
  };
}

}  // namespace

template <>
OpProblem<MlaDecode> make_problem(Source in, const Surroundings& around) {
  OpProblem<MlaDecode> problem;
  auto a = std::make_shared<Absorbed>(draw_absorbed(in, around, problem.keep, false));
  problem.text = a->text;
  problem.format = a->format.name();
  problem.num_rows = a->paged.num_rows;
  MlaDecode& p = problem.params;
  p.q = a->q;
  p.cache = a->cache;
  p.pages = a->paged.table();
  p.rows = a->paged.rows();
  p.out = a->out;
  p.lse = a->lse;
  p.attn_sink = a->attn_sink;
  p.max_logits = a->max_logits;
  p.q_scale = a->q_scale;
  p.softmax_scale = a->softmax_scale;
  problem.compare = compare_attention_within(a->precision, a->heads, a->paged.keys_of_row);
  problem.alone = [a, p](int64_t row, Keep& keep) {
    auto one = std::make_shared<Paged>(a->paged.alone(row));
    keep.push_back(one);
    MlaDecode single = p;
    single.q = cut(p.q, row, 1);
    single.out = cut(p.out, row, 1);
    single.lse = cut(p.lse, row, 1);
    single.max_logits = cut(p.max_logits, row, 1);
    single.pages = one->table();
    single.rows = one->rows();
    return single;
  };
  problem.free_of_pages = {"out", "lse", "max_logits"};
  problem.keep.push_back(a);
  return problem;
}

template <>
OpProblem<SparseAttention> make_problem(Source in, const Surroundings& around) {
  OpProblem<SparseAttention> problem;
  const Seeds seeds(in);
  const int64_t k = in.one_in(2) ? in.pick<int64_t>({1, 15, 16, 17, 63, 64, 65, 128}) : in.between(1, 90);
  const bool with_lens = in.between(0, 3) != 3;
  const bool holes = in.one_in(3);
  auto a = std::make_shared<Absorbed>(draw_absorbed(in, around, problem.keep, true));
  const Paged& paged = a->paged;
  const TensorView slots = tensor(problem.keep, around, DType::kI32, {paged.num_rows, k}, in.pick<int64_t>({0, 3}));
  std::vector<int32_t> lens;
  std::vector<int64_t> listed;
  const auto num_slots = static_cast<int32_t>(a->cache.num_slots());
  const int32_t invalid[] = {-1, num_slots, 0x7FFFFFFF, -0x7FFFFFFF};
  for (int64_t row = 0; row < paged.num_rows; ++row) {
    Rng rng = Rng::of(seeds.seed, static_cast<uint64_t>(row), 77);
    const int64_t keys = paged.keys_of_row[static_cast<size_t>(row)];
    int64_t position = keys > 0 ? rng.below(keys) : 0;
    const int64_t want = std::min(keys, k - (rng.below(2) == 0 ? 0 : rng.below(k)));
    auto* list = slots.ptr<int32_t>(row);
    int64_t column = 0, taken = 0;
    while (column < k && taken < want) {
      if (holes && rng.below(3) == 0) {
        list[column++] = invalid[rng.below(4)];
        continue;
      }
      list[column++] = static_cast<int32_t>(paged.slot(paged.request_of_row[static_cast<size_t>(row)], position));
      position = (position + 1) % keys;
      ++taken;
    }
    listed.push_back(taken);
    lens.push_back(static_cast<int32_t>(column));
    for (; column < k; ++column) list[column] = with_lens && column % 2 == 0 ? 0 : invalid[column % 4];
  }
  problem.text = fmt::format("k {}{}{}, {}", k, with_lens ? "" : ", no lens", holes ? ", holes" : "", a->text);
  problem.format = a->format.name();
  problem.num_rows = paged.num_rows;
  SparseAttention& p = problem.params;
  p.q = a->q;
  p.cache = a->cache;
  p.topk_slots = slots;
  if (with_lens) p.topk_lens = ints(problem.keep, lens);
  p.out = a->out;
  p.lse = a->lse;
  p.attn_sink = a->attn_sink;
  p.max_logits = a->max_logits;
  p.q_scale = a->q_scale;
  p.softmax_scale = a->softmax_scale;
  problem.compare = compare_attention_within(a->precision, a->heads, listed);
  problem.alone = [p](int64_t row, Keep&) {
    SparseAttention single = p;
    for (TensorView* v :
         {&single.q, &single.topk_slots, &single.topk_lens, &single.out, &single.lse, &single.max_logits})
      *v = cut(*v, row, 1);
    return single;
  };
  problem.free_of_pages = {"out", "lse", "max_logits"};
  problem.keep.push_back(a);
  return problem;
}

// ---- the indexer --------------------------------------------------------------------------------------------------

namespace {

struct Indexer {
  Paged paged;
  IndexCacheView cache;
  TensorView q, weights;
  bool exact = false;  ///< whole numbers: every sum is exact, ties abound
  std::string format;
  std::vector<double> bounds;  ///< [rows] what no partial sum of a score exceeds
  std::string text;
};

Indexer draw_indexer(Source& in, const Surroundings& around, Keep& keep) {
  const Seeds seeds(in);
  Indexer x{.paged = Paged(draw_requests(in, around)),
            .cache = {},
            .q = {},
            .weights = {},
            .format = {},
            .bounds = {},
            .text = {}};
  const DType dtype = in.pick({DType::kBf16, DType::kF32, DType::kE4m3});
  const auto heads = in.one_in(6) ? in.pick<int64_t>({8, 31, 32, 64}) : in.between(1, 5);
  x.cache.format = in.pick({IndexKFormat::kE4m3, IndexKFormat::kBf16, IndexKFormat::kF32});
  x.cache.scale_format = in.pick({ScaleFormat::kFp32, ScaleFormat::kPowerOfTwo});
  x.cache.head_dim = in.pick({128, 16, 32, 48, 64});
  x.exact = in.one_in(2);
  const bool nan_keys = x.exact && in.one_in(3);
  const int64_t padding = in.pick<int64_t>({0, 16});
  const int32_t dim = x.cache.head_dim;
  const DType as = x.cache.format == IndexKFormat::kBf16 ? DType::kBf16 : DType::kF32;
  make_pages(keep, x.paged, around, x.cache, index_k_token_bytes(x.cache.format, dim), as,
             in.pick<int64_t>({0, 48, 1024}));
  std::vector<int64_t> slots;
  for_each_key(x.paged, [&](int64_t, int64_t, int64_t slot) { slots.push_back(slot); });
  const auto n = static_cast<int64_t>(slots.size());
  const TensorView k = tensor(keep, around, DType::kF32, {n, dim});
  double longest = 0.0;
  int64_t row = 0;
  for_each_key(x.paged, [&](int64_t request, int64_t t, int64_t) {
    const uint64_t kind = x.exact ? static_cast<uint64_t>(t % 23) : static_cast<uint64_t>(t);  // the same key at times
    const Row numbers(seeds.seed, static_cast<uint64_t>(request), kind);
    double norm = 0.0;
    for (int64_t d = 0; d < dim; ++d) {
      float value = numbers[d];
      if (x.exact) value = std::clamp(std::round(value), -3.0f, 3.0f);
      if (nan_keys && t % 5 == 4 && d % 3 == 0) value = NAN;
      set(k, value, row, d);
      norm += std::isnan(value) ? 0.0 : double{value} * value;
    }
    longest = std::max(longest, std::sqrt(norm));
    ++row;
  });
  run_once(Context{}, IndexKWrite{.k = k, .slots = view(slots.data(), {n}), .cache = x.cache}, {.impl = "ref"});

  x.q = tensor(keep, around, dtype, {x.paged.num_rows, heads, dim}, padding);
  x.weights = tensor(keep, around, DType::kF32, {x.paged.num_rows, heads}, padding > 0 ? 3 : 0);
  fill(x.q, seeds.seed, 1 << 20);
  fill(x.weights, seeds.seed, 1 << 21);
  for (int64_t t = 0; t < x.paged.num_rows; ++t) {
    double bound = 0.0;
    for (int64_t h = 0; h < heads; ++h) {
      if (x.exact) set(x.weights, std::clamp(std::round(get(x.weights, t, h)), -2.0f, 2.0f), t, h);
      double norm = 0.0;
      for (int64_t d = 0; d < dim; ++d) {
        if (x.exact) set(x.q, d < 6 ? std::clamp(std::round(get(x.q, t, h, d)), -1.0f, 1.0f) : 0.0f, t, h, d);
        norm += std::pow(get(x.q, t, h, d), 2.0);
      }
      bound += std::fabs(get(x.weights, t, h)) * std::sqrt(norm);
    }
    // What formats round moves the norm of a key by far less than a tenth.
    x.bounds.push_back(bound * longest * 1.1);
  }
  x.format = fmt::format("q {}, index keys {}{}", to_string(dtype), to_string(x.cache.format),
                         x.cache.scale_format == ScaleFormat::kPowerOfTwo ? " (2^n)" : "");
  x.text = fmt::format("q {}, index keys {}{}, {} heads of {}, {}{}, {}", to_string(dtype), to_string(x.cache.format),
                       x.cache.scale_format == ScaleFormat::kPowerOfTwo ? " (2^n)" : "", heads, dim,
                       x.exact ? "whole numbers" : "normal", nan_keys ? " and NaN" : "", describe(x.paged.spec));
  return x;
}

double score_tolerance(const Indexer& x, int64_t row) {
  return kTails *
         logit_tolerance(x.cache.head_dim, static_cast<double>(x.q.shape[1]), x.bounds[static_cast<size_t>(row)]);
}

IndexLogits logits_of(const Indexer& x, const Surroundings& around, Keep& keep, int64_t padding,
                      DType dtype = DType::kF32) {
  return {.q = x.q,
          .weights = x.weights,
          .cache = x.cache,
          .pages = x.paged.table(),
          .rows = x.paged.rows(),
          .logits = tensor(keep, around, dtype, {x.paged.num_rows, x.paged.max_keys() + 5}, padding)};
}

/// Whole numbers give the oracle's own choice; else no score among the chosen is below one left out by more than both
/// may be wrong. Always packed, distinct, ascending, the slot of each, -1 behind.
void compare_selection(const Indexer& x, int64_t k, const std::vector<float>& scores, const Outputs& got) {
  const std::vector<int32_t> positions = got.ints("topk_positions"), slots = got.ints("topk_slots"),
                             lens = got.ints("topk_lens");
  const int64_t columns = x.paged.max_keys() + 5;
  for (int64_t row = 0; row < x.paged.num_rows; ++row) {
    const int64_t n = x.paged.keys_of_row[static_cast<size_t>(row)];
    const int64_t count = std::min(n, k);
    const int32_t* chosen = positions.data() + row * k;
    require(lens[static_cast<size_t>(row)] == count,
            [&] { return fmt::format("row {} lists {}", row, lens[static_cast<size_t>(row)]); });
    std::vector<bool> taken(static_cast<size_t>(n), false);
    double lowest = std::numeric_limits<double>::infinity(), highest = -lowest;
    for (int64_t c = 0; c < k; ++c) {
      const int32_t slot = slots[static_cast<size_t>(row * k + c)];
      const auto place = [&] { return fmt::format("row {} entry {}: position {}, slot {}", row, c, chosen[c], slot); };
      if (c >= count) {
        require(chosen[c] == -1 && slot == -1, place);
        continue;
      }
      require(chosen[c] < n && chosen[c] > (c == 0 ? -1 : chosen[c - 1]), place);
      require(slot == x.paged.slot(x.paged.request_of_row[static_cast<size_t>(row)], chosen[c]), place);
      taken[static_cast<size_t>(chosen[c])] = true;
      lowest = std::min<double>(lowest, scores[static_cast<size_t>(row * columns + chosen[c])]);
    }
    for (int64_t t = 0; t < n; ++t)
      if (!taken[static_cast<size_t>(t)])
        highest = std::max<double>(highest, scores[static_cast<size_t>(row * columns + t)]);
    require(highest - lowest <= 2.0 * score_tolerance(x, row) || !(highest > lowest),
            [&] { return fmt::format("row {} leaves out {} and takes {}", row, highest, lowest); });
  }
}

}  // namespace

template <>
OpProblem<IndexLogits> make_problem(Source in, const Surroundings& around) {
  OpProblem<IndexLogits> problem;
  auto x = std::make_shared<Indexer>(draw_indexer(in, around, problem.keep));
  problem.params =
      logits_of(*x, around, problem.keep, in.pick<int64_t>({0, 3}), in.pick({DType::kF32, DType::kF32, DType::kBf16}));
  const bool bf16 = problem.params.logits.dtype == DType::kBf16;
  problem.text = x->text;
  problem.format = x->format;
  problem.num_rows = x->paged.num_rows;
  problem.compare = [x, bf16](const Outputs& oracle, const Outputs& got) {
    std::vector<float> want = oracle.floats("logits");
    const std::vector<float> have = got.floats("logits");
    if (bf16 && x->exact)
      for (float& score : want) score = Bf16::from_float(score).to_float();
    const int64_t columns = x->paged.max_keys() + 5;
    for (int64_t row = 0; row < x->paged.num_rows; ++row) {
      for (int64_t t = 0; t < columns; ++t) {
        const auto e = static_cast<size_t>(row * columns + t);
        const auto place = [&] {
          return fmt::format("row {} key {} is {}; the oracle has {}", row, t, have[e], want[e]);
        };
        if (x->exact || t >= x->paged.keys_of_row[static_cast<size_t>(row)])
          require(same_number(want[e], have[e]) || want[e] == have[e], place);
        else
          require(std::fabs(double{have[e]} - want[e]) <=
                      score_tolerance(*x, row) + (bf16 ? kUnitBf16 * std::fabs(want[e]) : 0.0),
                  place);
      }
    }
  };
  problem.alone = [x, p = problem.params](int64_t row, Keep& keep) {
    auto one = std::make_shared<Paged>(x->paged.alone(row));
    keep.push_back(one);
    IndexLogits single = p;
    for (TensorView* v : {&single.q, &single.weights, &single.logits}) *v = cut(*v, row, 1);
    single.pages = one->table();
    single.rows = one->rows();
    return single;
  };
  problem.free_of_pages = {"logits"};
  problem.keep.push_back(x);
  return problem;
}

template <>
OpProblem<IndexSelect> make_problem(Source in, const Surroundings& around) {
  OpProblem<IndexSelect> problem;
  const int64_t k = in.one_in(2) ? in.pick<int64_t>({1, 63, 64, 65, 256}) : in.between(1, 100);
  const int64_t padding = in.pick<int64_t>({0, 1});
  const int64_t spare = in.pick<int64_t>({9, 0, 5000});
  auto x = std::make_shared<Indexer>(draw_indexer(in, around, problem.keep));
  IndexSelect& p = problem.params;
  p.q = x->q;
  p.weights = x->weights;
  p.cache = x->cache;
  p.pages = x->paged.table();
  p.rows = x->paged.rows();
  p.max_seq_len = x->paged.max_keys() + spare;
  p.topk_slots = tensor(problem.keep, around, DType::kI32, {x->paged.num_rows, k}, padding);
  p.topk_lens = tensor(problem.keep, around, DType::kI32, {x->paged.num_rows});
  p.topk_positions = tensor(problem.keep, around, DType::kI32, {x->paged.num_rows, k});
  problem.text = fmt::format("k {}, {}", k, x->text);
  problem.format = x->format;
  problem.num_rows = x->paged.num_rows;
  // The oracle's scores, when somebody compares.
  auto scores = std::make_shared<std::vector<float>>();
  problem.compare = [x, k, scores](const Outputs& oracle, const Outputs& got) {
    if (x->exact) return compare_bits(oracle, got);
    if (scores->empty()) {
      Keep keep;
      *scores = run(logits_of(*x, {}, keep, 0), {.impl = "ref"}).floats("logits");
    }
    compare_selection(*x, k, *scores, got);
  };
  problem.alone = [x, p](int64_t row, Keep& keep) {
    auto one = std::make_shared<Paged>(x->paged.alone(row));
    keep.push_back(one);
    IndexSelect single = p;
    for (TensorView* v : {&single.q, &single.weights, &single.topk_slots, &single.topk_lens, &single.topk_positions})
      *v = cut(*v, row, 1);
    single.pages = one->table();
    single.rows = one->rows();
    return single;
  };
  problem.free_of_pages = {"topk_lens", "topk_positions"};
  problem.keep.push_back(x);
  return problem;
}

template <>
OpProblem<TopK> make_problem(Source in, const Surroundings& around) {
  OpProblem<TopK> problem;
  const Seeds seeds(in);
  const int64_t rows = in.between(0, 4);
  const int64_t k = in.one_in(2) ? in.pick<int64_t>({1, 7, 64, 65, 256, 2048}) : in.between(1, 100);
  const int64_t most = in.one_in(6) ? 5000 : in.pick<int64_t>({40, 150, 600});
  std::vector<int32_t> lens;
  for (int64_t t = 0; t < rows; ++t)
    lens.push_back(
        static_cast<int32_t>(in.one_in(4) ? in.pick<int64_t>({0, -1, k - 1, k, k + 1}) : in.between(1, most)));
  int64_t columns = 1;
  for (const int32_t n : lens) columns = std::max<int64_t>(columns, n);
  columns += in.between(0, 20);
  const int64_t kind = in.between(0, 6);
  const TensorView logits = tensor(problem.keep, around, in.pick({DType::kF32, DType::kF32, DType::kBf16}),
                                   {rows, columns}, in.pick<int64_t>({0, 5}));
  for (int64_t t = 0; t < rows; ++t) {
    Rng rng = Rng::of(seeds.seed, static_cast<uint64_t>(t), 3);
    for (int64_t i = 0; i < lens[static_cast<size_t>(t)]; ++i) {
      float x = static_cast<float>(rng.normal());
      switch (kind) {
        case 1: x = static_cast<float>(rng.below(7)); break;
        case 2: x = rng.below(2) == 0 ? 0.0f : -0.0f; break;
        case 3: {
          const float specials[] = {NAN, -NAN, kInfinity, -kInfinity, x, 0.0f, -0.0f, 1e30f};
          x = specials[rng.below(8)];
          break;
        }
        case 4: x = 1.0f + static_cast<float>(rng.below(16)) * 0x1p-23f; break;
        case 5: x = static_cast<float>(rng.below(200) - 100) * 0x1p-149f; break;
        case 6: {  // any bits at all
          const auto bits = static_cast<uint32_t>(rng.next());
          std::memcpy(&x, &bits, sizeof x);
          break;
        }
        default: break;
      }
      set(logits, x, t, i);
    }
  }
  TopK& p = problem.params;
  p.logits = logits;
  p.lens = ints(problem.keep, lens);
  p.positions = tensor(problem.keep, around, DType::kI32, {rows, k}, in.pick<int64_t>({0, 1}));
  p.counts = tensor(problem.keep, around, DType::kI32, {rows});
  problem.text =
      fmt::format("k {}, lens [{}] of {} columns, scores of kind {}", k, fmt::join(lens, " "), columns, kind);
  problem.format = to_string(logits.dtype);
  problem.num_rows = rows;
  problem.compare = compare_bits;
  problem.alone = [p](int64_t row, Keep&) {
    TopK single = p;
    for (TensorView* v : {&single.logits, &single.lens, &single.positions, &single.counts}) *v = cut(*v, row, 1);
    return single;
  };
  problem.free_of_pages = {"positions", "counts"};
  return problem;
}

// ---- prefill and merge --------------------------------------------------------------------------------------------

template <>
OpProblem<RaggedPrefill> make_problem(Source in, const Surroundings& around) {
  OpProblem<RaggedPrefill> problem;
  const Seeds seeds(in);
  struct Shape {
    std::vector<int32_t> q_lens, kv_lens, cu_q = {0}, cu_kv = {0};
  };
  Shape s;
  const int64_t requests = in.between(0, 4);
  const int64_t longest = in.one_in(16) ? 300 : in.pick<int64_t>({10, 40, 140});
  for (int64_t i = 0; i < requests; ++i) {
    s.q_lens.push_back(static_cast<int32_t>(in.one_in(4) ? 0 : in.between(1, in.one_in(4) ? 70 : 8)));
    // A prefix before the rows, fewer keys than rows, or no keys.
    s.kv_lens.push_back(static_cast<int32_t>(in.one_in(4) ? in.pick<int64_t>({0, 1, s.q_lens.back()})
                                                          : s.q_lens.back() + in.between(0, longest)));
    s.cu_q.push_back(s.cu_q.back() + s.q_lens.back());
    s.cu_kv.push_back(s.cu_kv.back() + s.kv_lens.back());
  }
  const bool narrow = in.one_in(2);
  const DType dtype = narrow ? DType::kBf16 : DType::kF32;
  const DType out = narrow && !in.one_in(3) ? DType::kBf16 : DType::kF32;
  const int64_t heads = in.between(1, 4);
  const int64_t own = in.pick<int64_t>({32, 16, 48, 128}), rope = in.pick<int64_t>({16, 32, 64});
  const int64_t value_dim = in.pick<int64_t>({64, 48, 128, 80});
  const bool shared_rope = !in.one_in(3), causal = !in.one_in(3), with_lse = !in.one_in(4);
  const bool nan_keys = in.one_in(8);
  const int64_t padding = in.pick<int64_t>({0, 16, 8});
  const double deviation = in.pick({1.5, 0.25, 4.0});
  const int64_t spare_rows = in.between(0, 3);
  const int64_t q_rows = s.cu_q.back(), kv_rows = s.cu_kv.back();
  const auto rows_of = [&](int64_t width, uint64_t what, bool three) {
    const int64_t all = kv_rows + spare_rows;
    const TensorView v = three ? tensor(problem.keep, around, dtype, {all, heads, width}, padding)
                               : tensor(problem.keep, around, dtype, {all, width}, padding);
    fill(cut(v, 0, kv_rows), seeds.seed, what);
    return v;
  };
  RaggedPrefill& p = problem.params;
  p.q = tensor(problem.keep, around, dtype, {q_rows, heads, own + rope}, padding);
  fill(p.q, seeds.seed, 1);
  p.k = rows_of(shared_rope ? own : own + rope, 2, true);
  if (shared_rope) p.k_rope = rows_of(rope, 3, false);
  p.v = rows_of(value_dim, 4, true);
  if (nan_keys)
    for (int64_t row = 6; row < kv_rows; row += 9)
      for (int64_t h = 0; h < heads; ++h) {
        set(p.k, NAN, row, h, 3);
        for (int64_t d = 0; d < value_dim; ++d) set(p.v, NAN, row, h, d);
      }
  p.cu_q_lens = ints(problem.keep, s.cu_q);
  p.cu_kv_lens = ints(problem.keep, s.cu_kv);
  p.out = tensor(problem.keep, around, out, {q_rows, heads, value_dim}, padding);
  if (with_lse) p.lse = tensor(problem.keep, around, DType::kF32, {q_rows, heads});
  p.softmax_scale = static_cast<float>(deviation / std::sqrt(static_cast<double>(own + rope)));
  p.causal = causal;
  problem.text =
      fmt::format("qkv {}, out {}, {} heads, N {} P {} V {}, q [{}], kv [{}]{}{}{}, deviation {}", to_string(dtype),
                  to_string(out), heads, own, rope, value_dim, fmt::join(s.q_lens, " "), fmt::join(s.kv_lens, " "),
                  causal ? ", causal" : "", shared_rope ? "" : ", rope in k", nan_keys ? ", NaN keys" : "", deviation);
  problem.format = fmt::format("qkv {}, out {}", to_string(dtype), to_string(out));
  problem.num_rows = q_rows;
  auto keys_of_row = std::make_shared<std::vector<int64_t>>();
  auto request_of_row = std::make_shared<std::vector<size_t>>();
  for (size_t i = 0; i < s.q_lens.size(); ++i)
    for (int64_t a = 0; a < s.q_lens[i]; ++a) {
      keys_of_row->push_back(causal ? std::max<int64_t>(0, a + s.kv_lens[i] - s.q_lens[i] + 1) : s.kv_lens[i]);
      request_of_row->push_back(i);
    }
  AttentionPrecision precision;
  precision.fp32 = !narrow;
  precision.output_bf16 = out == DType::kBf16;
  precision.width = static_cast<double>(own + rope);
  precision.score_deviation = deviation;
  problem.compare = compare_attention_within(precision, heads, *keys_of_row);
  problem.alone = [p, s, keys_of_row, request_of_row](int64_t row, Keep& keep) {
    const auto r = static_cast<size_t>(row);
    const auto keys = static_cast<int32_t>((*keys_of_row)[r]);
    const int64_t first = s.cu_kv[(*request_of_row)[r]];
    RaggedPrefill single = p;
    for (TensorView* v : {&single.q, &single.out, &single.lse}) *v = cut(*v, row, 1);
    for (TensorView* v : {&single.k, &single.k_rope, &single.v}) *v = cut(*v, first, keys);
    single.cu_q_lens = ints(keep, {0, 1});
    single.cu_kv_lens = ints(keep, {0, keys});
    return single;
  };
  problem.free_of_pages = {"out", "lse", "max_logits"};
  return problem;
}

template <>
OpProblem<MergeState> make_problem(Source in, const Surroundings& around) {
  OpProblem<MergeState> problem;
  const Seeds seeds(in);
  const int64_t rows = in.between(0, 9), heads = in.between(1, 5), dim = in.pick<int64_t>({64, 16, 40, 128, 8});
  const DType dtype = in.pick({DType::kBf16, DType::kF32});
  const int64_t padding = in.pick<int64_t>({0, 16});
  const bool counted = in.one_in(2);
  MergeState& p = problem.params;
  p.base = in.pick({LseBase::kNatural, LseBase::kTwo});
  p.out_a = tensor(problem.keep, around, dtype, {rows, heads, dim}, padding);
  p.out_b = tensor(problem.keep, around, dtype, {rows, heads, dim}, padding);
  p.lse_a = tensor(problem.keep, around, DType::kF32, {rows, heads}, padding > 0 ? 1 : 0);
  p.lse_b = tensor(problem.keep, around, DType::kF32, {rows, heads}, padding > 0 ? 1 : 0);
  std::vector<int32_t> count_a, count_b;
  std::vector<bool> empty_a, empty_b;
  for (int64_t t = 0; t < rows; ++t) {
    const int64_t kind = in.between(0, 7);
    empty_a.push_back(kind == 1 || kind == 3);
    empty_b.push_back(kind == 2 || kind == 3);
    count_a.push_back(empty_a.back() ? -static_cast<int32_t>(t % 2) : 5);
    count_b.push_back(empty_b.back() ? 0 : 1);
    const float far = kind == 4 ? 0.0f : kind == 5 ? 90.0f : kind == 6 ? 1e30f : 4.0f;
    for (int64_t h = 0; h < heads; ++h) {
      const Row a(seeds.seed, 1, static_cast<uint64_t>(t * heads + h)),
          b(seeds.seed, 2, static_cast<uint64_t>(t * heads + h));
      // What is empty is left as the poison: with counts its LSE too.
      if (!empty_a.back())
        for (int64_t d = 0; d < dim; ++d) set(p.out_a, a[d], t, h, d);
      if (!empty_b.back())
        for (int64_t d = 0; d < dim; ++d) set(p.out_b, b[d], t, h, d);
      if (!empty_a.back() || !counted) set(p.lse_a, empty_a.back() ? -kInfinity : a[dim] * far, t, h);
      if (!empty_b.back() || !counted) set(p.lse_b, empty_b.back() ? -kInfinity : b[dim] * far, t, h);
    }
  }
  if (counted) {
    p.count_a = ints(problem.keep, count_a);
    p.count_b = ints(problem.keep, count_b);
  }
  problem.text = fmt::format("out {}, [{}, {}, {}], {}{}", to_string(dtype), rows, heads, dim,
                             p.base == LseBase::kTwo ? "base 2" : "natural", counted ? ", counts" : "");
  problem.format = fmt::format("out {}{}", to_string(dtype), p.base == LseBase::kTwo ? ", base 2" : "");
  problem.num_rows = rows;
  problem.compare = [p, empty_a, empty_b](const Outputs& oracle, const Outputs& got) {
    const std::vector<float> want = oracle.floats("out_a"), have = got.floats("out_a");
    const std::vector<float> want_lse = oracle.floats("lse_a"), have_lse = got.floats("lse_a");
    const int64_t heads_ = p.out_a.shape[1], dim_ = p.out_a.shape[2];
    for (size_t e = 0; e < want.size(); ++e) {
      const auto line = static_cast<int64_t>(e) / dim_, t = line / heads_, h = line % heads_;
      const auto place = [&] {
        return fmt::format("row {} head {} value {} is {}; the oracle has {}", t, h, static_cast<int64_t>(e) % dim_,
                           have[e], want[e]);
      };
      if (empty_a[static_cast<size_t>(t)] || empty_b[static_cast<size_t>(t)]) {
        require(same_number(want[e], have[e]), place);
        continue;
      }
      const int64_t d = static_cast<int64_t>(e) % dim_;
      require(std::fabs(double{have[e]} - want[e]) <=
                  merge_tolerance(p.out_a.dtype == DType::kBf16, get(p.out_a, t, h, d), get(p.out_b, t, h, d)),
              place);
    }
    for (size_t l = 0; l < want_lse.size(); ++l) {
      const auto t = l / static_cast<size_t>(heads_);
      const auto place = [&] { return fmt::format("lse {} is {}; the oracle has {}", l, have_lse[l], want_lse[l]); };
      if (empty_a[t] || empty_b[t]) require(same_number(want_lse[l], have_lse[l]), place);
      else require(std::fabs(double{have_lse[l]} - want_lse[l]) <= merge_lse_tolerance(want_lse[l]), place);
    }
  };
  problem.alone = [p](int64_t row, Keep&) {
    MergeState single = p;
    for (TensorView* v : {&single.out_a, &single.out_b, &single.lse_a, &single.lse_b, &single.count_a, &single.count_b})
      *v = cut(*v, row, 1);
    return single;
  };
  problem.free_of_pages = {"out_a", "lse_a"};
  return problem;
}

// ---- caches and RoPE ----------------------------------------------------------------------------------------------

namespace {

constexpr LatentFormat kLatentFormats[] = {LatentFormat::kBf16, LatentFormat::kF32, LatentFormat::kE4m3,
                                           LatentFormat::kPacked656, LatentFormat::kE4m3PerToken};

/// A cache of a few pages, poisoned or full of arbitrary bytes.
template <class Cache>
void draw_pages(Source& in, const Surroundings& around, Keep& keep, Cache& cache, int64_t token_bytes) {
  cache.page_size = in.one_in(16) ? 1024 : in.pick({64, 1, 2, 3, 16, 48, 100});
  cache.num_pages = cache.page_size >= 100 ? 1 : in.between(1, 3);
  cache.page_stride_bytes = (token_bytes * cache.page_size + in.pick<int64_t>({0, 48, 512}) + 15) / 16 * 16;
  auto buffer = std::make_shared<Memory>(static_cast<size_t>(cache.num_pages * cache.page_stride_bytes), around.poison);
  cache.data = buffer->data();
  keep.push_back(buffer);
}

/// Slots, some negative; different ones unless `repeated`.
std::vector<int64_t> draw_slots(Source& in, int64_t num_slots, uint64_t seed, bool repeated) {
  const int64_t rows = std::min(in.between(0, 12), num_slots);
  std::vector<int64_t> slots;
  const int64_t start = static_cast<int64_t>(mix(seed, 1, 1) % static_cast<uint64_t>(num_slots));
  for (int64_t i = 0; i < rows; ++i) {
    if (in.one_in(5)) slots.push_back(in.pick<int64_t>({-1, -0x7FFFFFFF}));
    else
      slots.push_back(
          repeated ? static_cast<int64_t>(mix(seed, 2, static_cast<uint64_t>(i)) % static_cast<uint64_t>(num_slots))
                   : (start + i * (num_slots / rows)) % num_slots);
  }
  return slots;
}

TensorView slot_tensor(Source& in, Keep& keep, const std::vector<int64_t>& slots) {
  if (in.one_in(2)) {
    Tensor t = make_tensor(DType::kI64, {static_cast<int64_t>(slots.size())});
    std::copy(slots.begin(), slots.end(), t.view.ptr<int64_t>());
    keep.push_back(t.buffer);
    return t.view;
  }
  return ints(keep, {slots.begin(), slots.end()});
}

/// Rows for writers: normal, zero, tiny, saturating, NaN, infinite, huge.
void fill_rows(Source& in, const TensorView& v, uint64_t seed, uint64_t what) {
  const float deviation = in.pick({1.0f, 100.0f, 1e-6f, 1e4f});
  fill(v, seed, what, deviation);
  for (int64_t i = 0; i < v.shape[0]; ++i) {
    const int64_t kind = in.between(0, 15);
    for (int64_t d = 0; d < v.shape[1]; ++d) {
      if (kind == 9) set(v, 0.0f, i, d);
      if (kind == 10 && d % 7 == 3) set(v, 1e30f, i, d);
      if (kind == 11)
        set(v, static_cast<float>(std::ldexp(d % 2 == 0 ? 1.0 : -1.0, static_cast<int>(d % 24) - 12)), i, d);
      if (kind == 12) set(v, d == 0 ? 448.0f : static_cast<float>(d % 448), i, d);
      if (kind == 13 && d % 11 == 5) set(v, NAN, i, d);
      if (kind == 14) set(v, std::ldexp(1.0f, -140) * static_cast<float>(d), i, d);
      if (kind == 15 && d % 13 == 2) set(v, d % 2 == 0 ? kInfinity : -kInfinity, i, d);
    }
  }
}

/// What a gather of some slots from arbitrary bytes sees: any value of the format, any finite positive scale.
void fill_bytes(std::byte* data, int64_t size, uint64_t seed) {
  Rng rng(seed);
  for (int64_t i = 0; i < size; i += 8) {
    const uint64_t x = rng.next();
    std::memcpy(data + i, &x, static_cast<size_t>(std::min<int64_t>(8, size - i)));
  }
}

float draw_scale(uint64_t seed, uint64_t i) {
  return std::ldexp(1.0f + std::fabs(normal_at(mix(seed, 31, i))), static_cast<int>(mix(seed, 32, i) % 20) - 10);
}

}  // namespace

template <>
OpProblem<LatentWrite> make_problem(Source in, const Surroundings& around) {
  OpProblem<LatentWrite> problem;
  const Seeds seeds(in);
  LatentWrite& p = problem.params;
  p.cache.format = in.pick(kLatentFormats);
  p.cache.geometry = in.pick(kGeometries);
  if (p.cache.format == LatentFormat::kE4m3) p.cache.scale = draw_scale(seeds.seed, 0);
  const int64_t row_bytes = latent_row_bytes(p.cache.format, p.cache.geometry);
  if (p.cache.format != LatentFormat::kE4m3PerToken && in.one_in(4))
    p.cache.row_stride_bytes = (row_bytes + 15) / 16 * 16 + in.pick<int64_t>({16, 0, 256});
  draw_pages(in, around, problem.keep, p.cache, std::max(row_bytes, p.cache.row_stride_bytes));
  const std::vector<int64_t> slots = draw_slots(in, p.cache.num_slots(), seeds.seed, false);
  p.slots = slot_tensor(in, problem.keep, slots);
  const DType dtype = in.pick({DType::kBf16, DType::kF32});
  const int64_t padding = in.pick<int64_t>({0, 16}), rows = static_cast<int64_t>(slots.size());
  p.latent = tensor(problem.keep, around, dtype, {rows, p.cache.geometry.latent_dim}, padding);
  p.rope = tensor(problem.keep, around, dtype, {rows, p.cache.geometry.rope_dim}, padding);
  fill_rows(in, p.latent, seeds.seed, 1);
  fill_rows(in, p.rope, seeds.seed, 2);
  problem.text =
      fmt::format("rows {}, cache {} {} + {}, page size {}, slots [{}]", to_string(dtype), to_string(p.cache.format),
                  p.cache.geometry.latent_dim, p.cache.geometry.rope_dim, p.cache.page_size, fmt::join(slots, " "));
  problem.format = fmt::format("rows {}, cache {}", to_string(dtype), to_string(p.cache.format));
  problem.num_rows = rows;
  problem.alone = [p](int64_t row, Keep&) {
    LatentWrite single = p;
    for (TensorView* v : {&single.latent, &single.rope, &single.slots}) *v = cut(*v, row, 1);
    return single;
  };
  problem.compare = compare_bits;
  return problem;
}

template <>
OpProblem<LatentGather> make_problem(Source in, const Surroundings& around) {
  OpProblem<LatentGather> problem;
  const Seeds seeds(in);
  LatentGather& p = problem.params;
  p.cache.format = in.pick(kLatentFormats);
  p.cache.geometry = in.pick(kGeometries);
  if (p.cache.format == LatentFormat::kE4m3) p.cache.scale = draw_scale(seeds.seed, 0);
  const int64_t row_bytes = latent_row_bytes(p.cache.format, p.cache.geometry);
  if (p.cache.format != LatentFormat::kE4m3PerToken && in.one_in(4))
    p.cache.row_stride_bytes = (row_bytes + 15) / 16 * 16 + in.pick<int64_t>({16, 0, 256});
  draw_pages(in, around, problem.keep, p.cache, std::max(row_bytes, p.cache.row_stride_bytes));
  const std::vector<int64_t> slots = draw_slots(in, p.cache.num_slots(), seeds.seed, true);
  const RowGeometry g = p.cache.geometry;
  for (const int64_t slot : slots) {  // only the rows that are read
    if (slot < 0) continue;
    const uint64_t seed = mix(seeds.seed, 9, static_cast<uint64_t>(slot));
    if (p.cache.format == LatentFormat::kE4m3PerToken) {
      auto* page = static_cast<std::byte*>(p.cache.data) + slot / p.cache.page_size * p.cache.page_stride_bytes;
      const int64_t at = slot % p.cache.page_size, scales = int64_t{p.cache.page_size} * g.latent_dim;
      fill_bytes(page + at * g.latent_dim, g.latent_dim, seed);
      const float scale = draw_scale(seed, 0);
      std::memcpy(page + scales + at * 4, &scale, 4);
      fill_bytes(page + scales + int64_t{p.cache.page_size} * 4 + at * g.rope_dim * 2, g.rope_dim * 2, seed + 1);
      continue;
    }
    std::byte* row = p.cache.row(slot, p.cache.row_stride());
    fill_bytes(row, row_bytes, seed);
    if (p.cache.format == LatentFormat::kPacked656)
      for (int32_t i = 0; i < g.latent_dim / 128; ++i) {
        const float scale = draw_scale(seed, static_cast<uint64_t>(i));
        std::memcpy(row + g.latent_dim + i * 4, &scale, 4);
      }
  }
  p.slots = slot_tensor(in, problem.keep, slots);
  const DType dtype = in.pick({DType::kBf16, DType::kF32});
  const int64_t padding = in.pick<int64_t>({0, 16}), rows = static_cast<int64_t>(slots.size());
  p.latent = tensor(problem.keep, around, dtype, {rows, g.latent_dim}, padding);
  p.rope = tensor(problem.keep, around, dtype, {rows, g.rope_dim}, padding);
  problem.text =
      fmt::format("rows {}, cache {} {} + {}, page size {}, slots [{}]", to_string(dtype), to_string(p.cache.format),
                  g.latent_dim, g.rope_dim, p.cache.page_size, fmt::join(slots, " "));
  problem.format = fmt::format("rows {}, cache {}", to_string(dtype), to_string(p.cache.format));
  problem.num_rows = rows;
  problem.compare = compare_bits;
  problem.alone = [p](int64_t row, Keep&) {
    LatentGather single = p;
    for (TensorView* v : {&single.slots, &single.latent, &single.rope}) *v = cut(*v, row, 1);
    return single;
  };
  return problem;
}

template <>
OpProblem<IndexKWrite> make_problem(Source in, const Surroundings& around) {
  OpProblem<IndexKWrite> problem;
  const Seeds seeds(in);
  IndexKWrite& p = problem.params;
  p.cache.format = in.pick({IndexKFormat::kE4m3, IndexKFormat::kBf16, IndexKFormat::kF32});
  p.cache.scale_format = in.pick({ScaleFormat::kFp32, ScaleFormat::kPowerOfTwo});
  p.cache.head_dim = in.pick({128, 16, 32, 64, 80});
  draw_pages(in, around, problem.keep, p.cache, index_k_token_bytes(p.cache.format, p.cache.head_dim));
  const std::vector<int64_t> slots = draw_slots(in, p.cache.num_slots(), seeds.seed, false);
  p.slots = slot_tensor(in, problem.keep, slots);
  const DType dtype = in.pick({DType::kBf16, DType::kF32});
  p.k = tensor(problem.keep, around, dtype, {static_cast<int64_t>(slots.size()), p.cache.head_dim},
               in.pick<int64_t>({0, 16}));
  fill_rows(in, p.k, seeds.seed, 1);
  problem.text =
      fmt::format("rows {}, index keys {}{} of {}, page size {}, slots [{}]", to_string(dtype),
                  to_string(p.cache.format), p.cache.scale_format == ScaleFormat::kPowerOfTwo ? " (2^n)" : "",
                  p.cache.head_dim, p.cache.page_size, fmt::join(slots, " "));
  problem.format = fmt::format("rows {}, index keys {}{}", to_string(dtype), to_string(p.cache.format),
                               p.cache.scale_format == ScaleFormat::kPowerOfTwo ? " (2^n)" : "");
  problem.num_rows = static_cast<int64_t>(slots.size());
  problem.alone = [p](int64_t row, Keep&) {
    IndexKWrite single = p;
    for (TensorView* v : {&single.k, &single.slots}) *v = cut(*v, row, 1);
    return single;
  };
  problem.compare = compare_bits;
  return problem;
}

template <>
OpProblem<IndexKGather> make_problem(Source in, const Surroundings& around) {
  OpProblem<IndexKGather> problem;
  const Seeds seeds(in);
  IndexKGather& p = problem.params;
  p.cache.format = in.pick({IndexKFormat::kE4m3, IndexKFormat::kBf16, IndexKFormat::kF32});
  p.cache.scale_format = in.pick({ScaleFormat::kFp32, ScaleFormat::kPowerOfTwo});
  p.cache.head_dim = in.pick({128, 16, 32, 64, 80});
  draw_pages(in, around, problem.keep, p.cache, index_k_token_bytes(p.cache.format, p.cache.head_dim));
  const std::vector<int64_t> slots = draw_slots(in, p.cache.num_slots(), seeds.seed, true);
  const int64_t value_bytes = p.cache.head_dim * (p.cache.format == IndexKFormat::kF32    ? 4
                                                  : p.cache.format == IndexKFormat::kBf16 ? 2
                                                                                          : 1);
  for (const int64_t slot : slots) {
    if (slot < 0) continue;
    const uint64_t seed = mix(seeds.seed, 9, static_cast<uint64_t>(slot));
    fill_bytes(p.cache.values(slot), value_bytes, seed);
    if (p.cache.format == IndexKFormat::kE4m3) *p.cache.scale(slot) = draw_scale(seed, 0);
  }
  p.slots = slot_tensor(in, problem.keep, slots);
  const DType dtype = in.pick({DType::kBf16, DType::kF32});
  p.k = tensor(problem.keep, around, dtype, {static_cast<int64_t>(slots.size()), p.cache.head_dim},
               in.pick<int64_t>({0, 16}));
  problem.text = fmt::format("rows {}, index keys {} of {}, page size {}, slots [{}]", to_string(dtype),
                             to_string(p.cache.format), p.cache.head_dim, p.cache.page_size, fmt::join(slots, " "));
  problem.format = fmt::format("rows {}, index keys {}{}", to_string(dtype), to_string(p.cache.format),
                               p.cache.scale_format == ScaleFormat::kPowerOfTwo ? " (2^n)" : "");
  problem.num_rows = static_cast<int64_t>(slots.size());
  problem.compare = compare_bits;
  problem.alone = [p](int64_t row, Keep&) {
    IndexKGather single = p;
    for (TensorView* v : {&single.slots, &single.k}) *v = cut(*v, row, 1);
    return single;
  };
  return problem;
}

template <>
OpProblem<Rope> make_problem(Source in, const Surroundings& around) {
  OpProblem<Rope> problem;
  const Seeds seeds(in);
  Rope& p = problem.params;
  const int64_t rows = in.between(0, 8), heads = in.between(1, 4), half = in.pick<int64_t>({32, 1, 8, 16, 5});
  const int64_t before = in.pick<int64_t>({0, 64, 16, 3}), after = in.pick<int64_t>({0, 16, 7});
  const int64_t width = before + 2 * half + after, table_rows = in.between(1, 40);
  const DType dtype = in.pick({DType::kBf16, DType::kF32});
  p.x = tensor(problem.keep, around, dtype, {rows, heads, width}, 16 + (16 - width % 16) % 16);
  // Strides of rows and heads are multiples of 16 bytes.
  p.x.stride[1] = (width + 15) / 16 * 16;
  p.x.stride[0] = p.x.stride[1] * heads;
  fill(p.x, seeds.seed, 1, in.pick({1.0f, 1e30f, 1e-30f}));
  std::vector<int32_t> positions;
  for (int64_t t = 0; t < rows; ++t) positions.push_back(static_cast<int32_t>(in.between(0, table_rows - 1)));
  p.positions = ints(problem.keep, positions);
  p.cos_sin = tensor(problem.keep, around, DType::kF32, {table_rows, 2 * half}, in.pick<int64_t>({0, 1}));
  for (const int32_t position : positions)  // rows that nobody asks for stay poison
    for (int64_t i = 0; i < half; ++i) {
      const float angle = normal_at(mix(seeds.seed, static_cast<uint64_t>(position), static_cast<uint64_t>(i))) * 3.0f;
      set(p.cos_sin, std::cos(angle), position, i);
      set(p.cos_sin, std::sin(angle), position, half + i);
    }
  p.offset = static_cast<int32_t>(before);
  p.pairing = in.pick({RopePairing::kInterleaved, RopePairing::kHalfSplit});
  problem.text = fmt::format("x {} [{}, {}, {}], rotated {} at {}, {}", to_string(dtype), rows, heads, width, 2 * half,
                             before, p.pairing == RopePairing::kInterleaved ? "interleaved" : "half split");
  problem.format = fmt::format("x {}, pairing {}", to_string(dtype), static_cast<int>(p.pairing));
  problem.num_rows = rows;
  problem.compare = [p, half](const Outputs& oracle, const Outputs& got) {
    const std::vector<float> want = oracle.floats("x"), have = got.floats("x");
    const int64_t width_ = p.x.shape[2];
    for (size_t e = 0; e < want.size(); ++e) {
      const int64_t d = static_cast<int64_t>(e) % width_ - p.offset;
      const auto place = [&] { return fmt::format("value {} is {}; the oracle has {}", e, have[e], want[e]); };
      if (d < 0 || d >= 2 * half) {
        require(same_number(want[e], have[e]), place);
        continue;
      }
      const int64_t partner = p.pairing == RopePairing::kInterleaved ? d ^ 1 : d < half ? d + half : d - half;
      const size_t other = e - static_cast<size_t>(d) + static_cast<size_t>(partner);
      require(std::fabs(double{have[e]} - want[e]) <=
                  rope_tolerance(p.x.dtype == DType::kBf16, want[e], want[other]) + 0x1p-126,
              place);
    }
  };
  problem.alone = [p](int64_t row, Keep&) {
    Rope single = p;
    for (TensorView* v : {&single.x, &single.positions}) *v = cut(*v, row, 1);
    return single;
  };
  return problem;
}

// ---- checks -------------------------------------------------------------------------------------------------------

template <class Params>
std::vector<std::string> takers(const Params& params) {
  std::vector<std::string> names;
  for (const ImplInfo& info : list_implementations<Params>()) {
    if (!info.runs_here || info.device != DeviceKind::kCpu) continue;
    try {
      const OpPlan<Params> plan(Context{}, params, {.impl = info.name});
      names.push_back(info.name);
    } catch (const Error& e) {
      if (e.code() != ErrorCode::kUnsupported) throw;
    }
  }
  return names;
}

namespace {

constexpr Poison kPoisons[] = {Poison::kNan, Poison::kInf, Poison::kHuge, Poison::kZero};
constexpr const char* kPoisonNames[] = {"NaN", "infinite", "1e30", "zero"};

template <class Params>
[[noreturn]] void fail_case(const OpProblem<Params>& problem, const std::string& impl, const std::string& what) {
  throw Failure(fmt::format("{} {}: {} ({})", Params::kName, impl, what, problem.text));
}

template <class Params>
constexpr bool kWrites = std::is_same_v<Params, LatentWrite> || std::is_same_v<Params, IndexKWrite>;

/// What a writer wrote: the rows of its slots. Throws where it wrote anything else, if it was `alone`.
template <class Params>
std::vector<std::byte> written_bytes(const OpProblem<Params>& problem, const Outputs& out, bool alone = true) {
  std::vector<std::byte> bytes;
  const auto* before = static_cast<const std::byte*>(problem.params.cache.data);
  const std::vector<std::byte>& after = out.of("cache");
  std::vector<std::byte> expected(before, before + after.size());
  const auto take = [&](const std::byte* at, int64_t n) {
    const auto begin = at - before;
    std::copy_n(after.begin() + begin, n, expected.begin() + begin);
    bytes.insert(bytes.end(), after.begin() + begin, after.begin() + begin + n);
  };
  const TensorView& slots = problem.params.slots;
  for (int64_t i = 0; i < slots.shape[0]; ++i) {
    const int64_t slot = slots.dtype == DType::kI64 ? *slots.ptr<int64_t>(i) : *slots.ptr<int32_t>(i);
    if (slot < 0) continue;
    const auto& c = problem.params.cache;
    if constexpr (std::is_same_v<Params, LatentWrite>) {
      const RowGeometry g = c.geometry;
      if (c.format == LatentFormat::kE4m3PerToken) {
        const auto* page = before + slot / c.page_size * c.page_stride_bytes;
        const int64_t at = slot % c.page_size, scales = int64_t{c.page_size} * g.latent_dim;
        take(page + at * g.latent_dim, g.latent_dim);
        take(page + scales + at * 4, 4);
        take(page + scales + int64_t{c.page_size} * 4 + at * g.rope_dim * 2, g.rope_dim * 2);
      } else {
        take(c.row(slot, c.row_stride()), latent_row_bytes(c.format, g));
      }
    } else {
      const int64_t value_bytes = index_k_token_bytes(c.format, c.head_dim) - (c.format == IndexKFormat::kE4m3 ? 4 : 0);
      take(c.values(slot), value_bytes);
      if (c.format == IndexKFormat::kE4m3) take(reinterpret_cast<const std::byte*>(c.scale(slot)), 4);
    }
  }
  require(!alone || expected == after, "the cache was written outside the rows of the slots");
  return bytes;
}

/// What must not move: of writers the rows that they write.
template <class Params>
std::vector<std::vector<std::byte>> results(const OpProblem<Params>& problem, const Outputs& out) {
  if constexpr (kWrites<Params>) return {written_bytes(problem, out)};
  else return out.bytes;
}

template <class Params>
void check_poison(Source bytes, const Surroundings& around, const std::string& impl, const OpProblem<Params>& base,
                  const Outputs& first, const std::vector<Poison>& poisons) {
  const auto want = results(base, first);
  for (const Poison poison : poisons) {
    const char* const name = kPoisonNames[static_cast<size_t>(poison)];
    Surroundings other = around;
    other.poison = poison;
    const OpProblem<Params> problem = make_problem<Params>(bytes, other);
    const Outputs got = run(problem.params, {.impl = impl, .poison = poison});
    if (!got.fault.empty()) fail_case(problem, impl, got.fault);
    if constexpr (std::is_same_v<Params, IndexLogits>) {
      // Columns that a row does not see are left alone: the poison.
      const std::vector<float> a = first.floats("logits"), b = got.floats("logits");
      const auto columns = static_cast<size_t>(problem.params.logits.shape[1]);
      const OpProblem<Params>& p = problem;
      Keep keep;
      for (int64_t row = 0; row < p.num_rows; ++row) {
        const auto keys = static_cast<size_t>(p.alone(row, keep).rows.seq_lens.template ptr<int32_t>()[0]);
        if (std::memcmp(&a[static_cast<size_t>(row) * columns], &b[static_cast<size_t>(row) * columns], keys * 4) != 0)
          fail_case(p, impl, fmt::format("row {} moved where unused bytes are {}", row, name));
      }
    } else if (results(problem, got) != want) {
      fail_case(problem, impl, fmt::format("the result moved where unused bytes are {}", name));
    }
  }
}

template <class Params>
void check_again(const OpProblem<Params>& problem, const std::string& impl, const Outputs& first, int repeats,
                 Executor* executor, int workers, const std::string& text) {
  for (int i = 0; i < repeats; ++i) {
    const Outputs got = run(problem.params, {.impl = impl, .num_workers = workers, .executor = executor});
    if (!got.fault.empty()) fail_case(problem, impl, got.fault);
    if (!(got == first)) fail_case(problem, impl, text);
  }
}

template <class Params>
void check_pages(Source bytes, const Surroundings& around, const std::string& impl, const Outputs& first) {
  Surroundings other = around;
  other.page_seed += 98;
  const OpProblem<Params> problem = make_problem<Params>(bytes, other);
  const Outputs got = run(problem.params, {.impl = impl});
  for (const std::string& name : problem.free_of_pages) {
    const bool given = std::find(first.names.begin(), first.names.end(), name) != first.names.end();
    if (given && got.of(name) != first.of(name)) fail_case(problem, impl, name + " moved with the order of the pages");
  }
}

template <class Params>
void check_alone(const OpProblem<Params>& problem, const std::string& impl, const Outputs& batch, int64_t row) {
  Keep keep;
  const Params params = problem.alone(row, keep);
  const Outputs single = run(params, {.impl = impl});
  if constexpr (kWrites<Params>) {
    OpProblem<Params> one;
    one.params = params;
    if (written_bytes(one, single) != written_bytes(one, batch, false))
      fail_case(problem, impl, fmt::format("row {} is written as another one where it is alone", row));
    return;
  }
  for (size_t i = 0; i < single.names.size(); ++i) {
    const auto& part = single.bytes[i];
    if (std::memcmp(batch.bytes[i].data() + static_cast<size_t>(row) * part.size(), part.data(), part.size()) != 0)
      fail_case(problem, impl, fmt::format("{} of row {} is another one where it is alone", single.names[i], row));
  }
}

}  // namespace

template <class Params>
int check_operation(Source& in) {
  const int64_t which = in.between(0, 4);
  const int64_t choice = in.byte();
  const Source bytes = in;
  const Surroundings around;
  const OpProblem<Params> problem = make_problem<Params>(bytes, around);
  // What gathers round once is compared with what the oracle rounds once.
  constexpr bool kGathers = std::is_same_v<Params, LatentGather> || std::is_same_v<Params, IndexKGather>;
  const Outputs oracle = run(problem.params, {.impl = "ref", .fp32_outputs = !kGathers});
  int ran = 0;
  for (const std::string& impl : takers(problem.params)) {
    // The oracle is slow, and the same plain loops whatever surrounds them: seldom held to itself.
    if (impl == "ref" && (which != 0 || choice % 8 != 0)) continue;
    ++ran;
    const Outputs first = run(problem.params, {.impl = impl});
    if (!first.fault.empty()) fail_case(problem, impl, first.fault);
    try {
      problem.compare(oracle, first);
      switch (which) {
        case 0: check_poison(bytes, around, impl, problem, first, {kPoisons[1 + choice % 3]}); break;
        case 1: {
          OddExecutor executor(static_cast<int>(choice % 9) + 1);
          check_again(problem, impl, first, 1, &executor, 1, "another number of workers gives other bits");
          break;
        }
        case 2:
          if (problem.num_rows > 0) check_alone(problem, impl, first, choice % problem.num_rows);
          break;
        case 3: check_pages<Params>(bytes, around, impl, first); break;
        default: check_again(problem, impl, first, 1, nullptr, 1, "another run gives other bits"); break;
      }
    } catch (const Failure& e) {
      if (std::string(e.what()).find(problem.text) != std::string::npos) throw;
      fail_case(problem, impl, e.what());
    }
  }
  return ran;
}

template <class Params>
std::string check_every_invariance(Source bytes, int repeats) {
  const Surroundings around;
  const OpProblem<Params> problem = make_problem<Params>(bytes, around);
  for (const std::string& impl : takers(problem.params)) {
    const Outputs first = run(problem.params, {.impl = impl});
    if (!first.fault.empty()) fail_case(problem, impl, first.fault);
    check_poison(bytes, around, impl, problem, first, {Poison::kInf, Poison::kHuge, Poison::kZero});
    check_pages<Params>(bytes, around, impl, first);
    for (int64_t row = 0; row < problem.num_rows; ++row) check_alone(problem, impl, first, row);
    check_again(problem, impl, first, repeats, nullptr, 1, "another run gives other bits");
    for (const int workers : {2, 3, 7}) {
      check_again(problem, impl, first, 1, nullptr, workers, fmt::format("{} workers give other bits", workers));
      OddExecutor executor(workers);
      check_again(problem, impl, first, 1, &executor, 1, fmt::format("{} odd workers give other bits", workers));
    }
  }
  return problem.num_rows > 0 ? problem.format : std::string{};
}

#define GANNET_INSTANTIATE(Params, member)                         \
  template std::vector<std::string> takers<Params>(const Params&); \
  template int check_operation<Params>(Source&);                   \
  template std::string check_every_invariance<Params>(Source, int);
GANNET_FOR_EACH_OP(GANNET_INSTANTIATE)
#undef GANNET_INSTANTIATE

}  // namespace gannet_test
