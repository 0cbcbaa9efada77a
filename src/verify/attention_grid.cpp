// mla_decode, sparse_attention and ragged_prefill.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "verify/attention_compare.h"
#include "verify/recorder.h"

namespace gannet {
inline namespace v0 {
namespace verify {

namespace {

// Standard normal q and keys of width 576 have products of deviation 24; this brings scores to 1.5, where the softmax
// neither is flat nor picks one key.
constexpr double kScoreDeviation = 1.5;
constexpr float kSoftmaxScale = static_cast<float>(kScoreDeviation / 24.0);

// Of an e4m3 cache and of e4m3 queries. No power of two, so that a scale which a kernel rounds is seen.
constexpr float kCacheScale = 0.03f;
constexpr float kQueryScale = 0.37f;

// Sinks of the heads in turn: like the scores, none, everything, and far off on both sides.
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kSinks[] = {0.3f, -kInfinity, kInfinity, -2.0f, 40.0f, -40.0f, 1.5f, 3.0f, -1000.0f};

std::vector<std::byte> all_bytes(const Outputs& o) {
  std::vector<std::byte> all;
  for (const auto& b : o.bytes) all.insert(all.end(), b.begin(), b.end());
  return all;
}

// ---- mla_decode ---------------------------------------------------------------------------------------------------

struct DecodeProblem {
  Paged paged;
  LatentPool pool = {};
  Tensor q = {}, out = {}, lse = {}, sink = {}, max_logits = {};
  MlaDecode params = {};
};

struct DecodeOptions {
  AbsorbedFormat format{};
  int64_t heads = 4;
  uint64_t seed = 7;
  Poison poison = Poison::kNan;
  int64_t page_gap_bytes = 0;
  int64_t padding = 0;  ///< elements after each row of q and out
  RowGeometry geometry{};
  bool lse = true;
  bool sink = false;
  bool max_logits = false;
  int64_t row_gap_bytes = 0;
};

DecodeProblem make_decode(const PagedSpec& spec, const DecodeOptions& o) {
  DecodeProblem d{.paged = Paged(spec)};
  d.pool = make_latent_pool(d.paged, o.format.cache, o.seed, o.poison, o.page_gap_bytes, o.geometry, kCacheScale,
                            o.row_gap_bytes);
  d.q = make_tensor(o.format.q, {d.paged.num_rows, o.heads, o.geometry.width()}, o.padding);
  const bool quantised = o.format.q == DType::kE4m3;
  fill_normal(d.q, Rng(o.seed + 1), quantised ? 1.0 / double{kQueryScale} : 1.0);
  if (quantised) d.params.q_scale = kQueryScale;
  d.out = make_tensor(o.format.out, {d.paged.num_rows, o.heads, o.geometry.latent_dim}, o.padding);
  d.params.q = d.q.view;
  d.params.cache = d.pool.view;
  d.params.pages = d.paged.table();
  d.params.rows = d.paged.rows();
  d.params.out = d.out.view;
  if (o.lse) {
    d.lse = make_tensor(DType::kF32, {d.paged.num_rows, o.heads}, o.padding > 0 ? 1 : 0);
    d.params.lse = d.lse.view;
  }
  if (o.sink) {
    d.sink = make_tensor(DType::kF32, {o.heads});
    for (int64_t h = 0; h < o.heads; ++h) *d.sink.view.ptr<float>(h) = kSinks[h % std::ssize(kSinks)];
    d.params.attn_sink = d.sink.view;
  }
  if (o.max_logits) {
    d.max_logits = make_tensor(DType::kF32, {d.paged.num_rows, o.heads}, o.padding > 0 ? 3 : 0);
    d.params.max_logits = d.max_logits.view;
  }
  d.params.softmax_scale = kSoftmaxScale;
  return d;
}

/// Sets rotated value 0 of the key at a position, in whatever the format stores (times a token's scale, if it has one).
void set_rope(const DecodeProblem& d, int64_t request, int64_t position, float x) {
  const LatentCacheView& c = d.pool.view;
  const int64_t slot = d.paged.slot(request, position), r = c.geometry.latent_dim;
  std::byte* row = c.row(slot, c.row_stride());
  const Bf16 half = Bf16::from_float(x);
  switch (c.format) {
    case LatentFormat::kF32: std::memcpy(row + 4 * r, &x, sizeof x); break;
    case LatentFormat::kBf16: std::memcpy(row + 2 * r, &half, sizeof half); break;
    case LatentFormat::kE4m3: row[r] = std::byte{E4m3::from_float(x).bits}; break;
    case LatentFormat::kPacked656: std::memcpy(row + r + 4 * ((r + 127) / 128), &half, sizeof half); break;
    case LatentFormat::kE4m3PerToken: {
      std::byte* rope_plane = c.row(slot - slot % c.page_size, 0) + c.page_size * (r + 4);
      std::memcpy(rope_plane + slot % c.page_size * 2 * c.geometry.rope_dim, &half, sizeof half);
      break;
    }
  }
}

/// Sets value `column` of the key at a position, which formats of 8 bits cut to their largest or to NaN (before
/// scales).
void set_latent(const DecodeProblem& d, int64_t request, int64_t position, int64_t column, float x) {
  const LatentCacheView& c = d.pool.view;
  const int64_t slot = d.paged.slot(request, position);
  std::byte* row = c.row(slot, c.row_stride());
  const Bf16 half = Bf16::from_float(x);
  const std::byte byte{E4m3::from_float(x).bits};
  switch (c.format) {
    case LatentFormat::kF32: std::memcpy(row + 4 * column, &x, sizeof x); break;
    case LatentFormat::kBf16: std::memcpy(row + 2 * column, &half, sizeof half); break;
    case LatentFormat::kE4m3:
    case LatentFormat::kPacked656: row[column] = byte; break;
    case LatentFormat::kE4m3PerToken:
      c.row(slot - slot % c.page_size, 0)[slot % c.page_size * c.geometry.latent_dim + column] = byte;
      break;
  }
}

/// Which keys have scores of -inf: of a request whose rows see `keys` between them, the one at `position`.
using Infinite = bool (*)(int64_t position, int64_t keys);
bool every_key(int64_t, int64_t) { return true; }
bool first_key(int64_t position, int64_t) { return position == 0; }
bool first_600_keys(int64_t position, int64_t) { return position < 600; }
bool last_two_keys(int64_t position, int64_t keys) { return position >= keys - 2; }  // which some rows see and some not
bool first_and_last_keys(int64_t position, int64_t keys) {
  return first_key(position, keys) || last_two_keys(position, keys);
}

/// Gives those keys scores of -inf: by queries that are infinite where all have them, by keys else. True if the formats
/// can.
bool make_scores_infinite(DecodeProblem& d, Infinite infinite) {
  const bool all = infinite == every_key;
  if (all ? d.q.view.dtype == DType::kE4m3 : d.pool.view.format == LatentFormat::kE4m3) return false;
  const int64_t r = d.pool.view.geometry.latent_dim;
  for (int64_t t = 0; t < d.paged.num_rows; ++t)
    for (int64_t h = 0; h < d.q.view.shape[1]; ++h) set(d.q.view, all ? -kInfinity : 1.0f, t, h, r);
  for (size_t i = 0; i < d.paged.keys_of.size(); ++i) {
    for (int64_t s = 0; s < d.paged.keys_of[i]; ++s) {
      if (all) set_rope(d, static_cast<int64_t>(i), s, 1.0f);
      else if (infinite(s, d.paged.keys_of[i])) set_rope(d, static_cast<int64_t>(i), s, -kInfinity);
    }
  }
  return true;
}

/// The same by an infinite value, in a column where every query is -1.
constexpr int64_t kInfiniteColumn = 300;
bool make_values_infinite(DecodeProblem& d, Infinite infinite) {
  if (d.pool.view.format != LatentFormat::kF32 && d.pool.view.format != LatentFormat::kBf16) return false;
  for (int64_t t = 0; t < d.paged.num_rows; ++t)
    for (int64_t h = 0; h < d.q.view.shape[1]; ++h) set(d.q.view, -1.0f, t, h, kInfiniteColumn);
  for (size_t i = 0; i < d.paged.keys_of.size(); ++i)
    for (int64_t s = 0; s < d.paged.keys_of[i]; ++s)
      if (infinite(s, d.paged.keys_of[i])) set_latent(d, static_cast<int64_t>(i), s, kInfiniteColumn, kInfinity);
  return true;
}

/// Of each row how many of its first keys_of_row keys count; 0 where all have no weight: like a row without keys.
std::vector<int64_t> weighty_rows(const Paged& paged, const std::vector<int64_t>& keys_of_row, Infinite infinite) {
  std::vector<int64_t> weighty;
  for (size_t row = 0; row < keys_of_row.size(); ++row) {
    const int64_t keys = paged.keys_of[static_cast<size_t>(paged.request_of_row[row])];
    bool any = false;
    for (int64_t s = 0; s < keys_of_row[row]; ++s) any = any || !infinite(s, keys);
    weighty.push_back(any ? keys_of_row[row] : 0);
  }
  return weighty;
}

/// The outputs with zeros in that column of `out`: what an infinite value of a key without weight does there is not
/// defined (docs/semantics.md).
Outputs without_column(Outputs o, int64_t width, int64_t column) {
  for (size_t i = 0; i < o.names.size(); ++i) {
    if (o.names[i] != "out") continue;
    const size_t element = size_of(o.dtypes[i]);
    for (size_t at = static_cast<size_t>(column) * element; at < o.bytes[i].size();
         at += static_cast<size_t>(width) * element)
      std::fill_n(o.bytes[i].begin() + static_cast<std::ptrdiff_t>(at), element, std::byte{0});
  }
  return o;
}

AttentionPrecision precision_of(const DecodeOptions& o, const std::string& impl = {}) {
  AttentionPrecision precision = o.format.precision();
  precision.width = o.geometry.width();
  // The deviation of the scores is sqrt(width) * scale.
  precision.score_deviation = std::sqrt(precision.width) * kSoftmaxScale;
  // The set of that name takes e4m3 queries over e4m3 rows with fp8 products, and no other e4m3.
  precision.fp8_products = impl == "cuda_sm90" && o.format.q == DType::kE4m3;
  return precision;
}

/// A decode, or lists of all keys in order, with scores of -inf; `values`: by values that are infinite.
template <class Params>
void check_infinite(Recorder& r, const Case& c, const DecodeOptions& o, const DecodeProblem& d, const Params& params,
                    const std::vector<int64_t>& keys_of_row, Infinite infinite, bool values) {
  const std::vector<int64_t> weighty = weighty_rows(d.paged, keys_of_row, infinite);
  const int64_t width = o.geometry.latent_dim;
  check_case(r, c, params, [&](const Outputs& oracle, const Outputs& got, Worst& worst) {
    if (values)
      compare_attention(without_column(oracle, width, kInfiniteColumn), without_column(got, width, kInfiniteColumn),
                        precision_of(o, got.impl), o.heads, weighty, worst, d.sink.view);
    else compare_attention(oracle, got, precision_of(o, got.impl), o.heads, weighty, worst, d.sink.view);
  });
}

/// Values in either half of the last key of each request, and a rotated one.
void poke_last_keys(const DecodeProblem& d, float x) {
  for (size_t i = 0; i < d.paged.keys_of.size(); ++i) {
    const auto request = static_cast<int64_t>(i);
    for (const int64_t column : {int64_t{5}, kInfiniteColumn})
      set_latent(d, request, d.paged.keys_of[i] - 1, column, x);
    set_rope(d, request, d.paged.keys_of[i] - 1, x);
  }
}

/// All outputs of the rows that are not the last of their request, where each has q_len.
std::vector<std::byte> rows_but_last(const Outputs& o, int64_t q_len, int64_t num_rows) {
  std::vector<std::byte> bytes;
  for (const auto& all : o.bytes) {
    const auto row_bytes = static_cast<std::ptrdiff_t>(all.size()) / num_rows;
    for (int64_t row = 0; row < num_rows; ++row)
      if (row % q_len != q_len - 1)
        bytes.insert(bytes.end(), all.begin() + row * row_bytes, all.begin() + (row + 1) * row_bytes);
  }
  return bytes;
}

void decode_case(Recorder& r, const std::string& case_class, const std::string& detail, const PagedSpec& spec,
                 const DecodeOptions& o) {
  const DecodeProblem d = make_decode(spec, o);
  check_case(r, {"mla_decode", o.format.name(), case_class, detail}, d.params,
             [&](const Outputs& oracle, const Outputs& got, Worst& worst) {
               compare_attention(oracle, got, precision_of(o, got.impl), o.heads, d.paged.keys_of_row, worst,
                                 d.sink.view);
             });
}

/// Row `row` alone, by the arguments of a decode call that a list has too.
template <class Params>
void cut_row(Params& p, int64_t row) {
  p.q.data = static_cast<std::byte*>(p.q.data) + row * p.q.stride[0] * static_cast<int64_t>(size_of(p.q.dtype));
  p.q.shape[0] = p.out.shape[0] = p.lse.shape[0] = p.max_logits.shape[0] = 1;
}

/// Whether each output of `single` is the part of `batch` that belongs to the row.
Worst same_row(const Outputs& batch, const Outputs& single, int64_t row) {
  Worst worst;
  for (size_t i = 0; i < single.names.size(); ++i) {
    const auto& part = single.bytes[i];
    const bool same =
        std::memcmp(batch.bytes[i].data() + static_cast<size_t>(row) * part.size(), part.data(), part.size()) == 0;
    worst.see(same ? 0.0 : 1.0, 0.0, fmt::format("row {} {}", row, single.names[i]));
  }
  return worst;
}

/// Around the lanes of registers and tensor cores. e4m3 queries differ from others in how they are packed alone.
std::vector<int64_t> head_counts(const AbsorbedFormat& format) {
  if (format.q == DType::kE4m3) return {1, 5, 16, 33, 128};
  return {1, 2, 4, 5, 8, 12, 15, 16, 17, 20, 31, 32, 33, 64, 65, 96, 127, 128};
}

/// A result is a function of its row alone: bit for bit the same in other company, memory and order.
void decode_invariants(Recorder& r, const PagedSpec& mixed, const DecodeOptions& o, const std::string& detail) {
  const DecodeProblem base = make_decode(mixed, o);
  const Case c{"mla_decode", o.format.name(), "", detail};
  check_workers(r, c, base.params);
  {
    std::vector<MlaDecode> variants = {base.params};
    std::vector<DecodeProblem> keep;
    for (const Poison poison : {Poison::kInf, Poison::kHuge, Poison::kZero}) {
      DecodeOptions other = o;
      other.poison = poison;
      keep.push_back(make_decode(mixed, other));
      variants.push_back(keep.back().params);
    }
    Case unused = c;
    unused.case_class = "unused bytes";
    check_same<MlaDecode>(r, unused, variants, all_bytes);
  }
  {
    PagedSpec shuffled = mixed;
    shuffled.page_seed = 99;
    shuffled.form = PageTableForm::kCsr;
    const DecodeProblem other = make_decode(shuffled, o);
    Case order = c;
    order.case_class = "page order";
    check_same<MlaDecode>(r, order, {base.params, other.params}, all_bytes, true);
  }
  Case alone = c;
  alone.case_class = "rows alone";
  for_each_invariant_impl(r, alone, base.params, [&](const std::string& impl) {
    const Outputs batch = run(base.params, {.impl = impl});
    for (int64_t row = 0; row < base.paged.num_rows; ++row) {
      const Paged one = base.paged.alone(row);
      MlaDecode p = base.params;
      cut_row(p, row);
      p.pages = one.table();
      p.rows = one.rows();
      r.add(alone, impl, same_row(batch, run(p, {.impl = impl}), row));
    }
  });
}

/// The last key of each request, which its last row alone sees, may be anything: bit for bit nothing to the other rows.
void later_rows_case(Recorder& r, const std::string& detail, const PagedSpec& spec, const DecodeOptions& o) {
  std::vector<DecodeProblem> keep;
  std::vector<MlaDecode> variants;
  for (const float x : {0.5f, NAN, kInfinity, -kInfinity, 1e30f}) {
    keep.push_back(make_decode(spec, o));
    poke_last_keys(keep.back(), x);
    variants.push_back(keep.back().params);
  }
  const Case c{"mla_decode", o.format.name(), "keys of later rows", detail};
  check_same<MlaDecode>(r, c, variants,
                        [&](const Outputs& all) { return rows_but_last(all, spec.q_len, keep[0].paged.num_rows); });
}

/// Sinks, largest scores, rows with others between them, scores of -inf, keys of later rows.
void decode_optional_cases(Recorder& r, const AbsorbedFormat& format) {
  // 513 and 1100 keys are two and three segments of the CPU kernels; 9 heads take every sink.
  const PagedSpec some{.seq_lens = {0, 1, 2, 65, 513, 1100}, .q_len = 2};
  DecodeOptions o{.format = format, .heads = 9, .sink = true, .max_logits = true};
  decode_case(r, "sink, largest score", "both", some, o);
  o.padding = 16;
  o.lse = false;
  decode_case(r, "sink, largest score", "strided, no lse", some, o);
  o.sink = false;
  decode_case(r, "sink, largest score", "largest score alone", some, o);
  o = {.format = format, .heads = 9, .sink = true};
  decode_case(r, "sink, largest score", "sink alone", some, o);
  o.max_logits = true;
  decode_invariants(r, {.seq_lens = {1100, 65, 0, 1, 300, 64}, .q_len = 2}, o, "sink, largest score");
  if (format.cache != LatentFormat::kE4m3PerToken) {
    o = {.format = format, .page_gap_bytes = 64, .row_gap_bytes = 48};
    decode_case(r, "rows apart", "48 bytes or a few more between rows", some, o);
  }
  const auto infinite = [&](const char* detail, bool options, Infinite which, bool values = false) {
    const DecodeOptions x{.format = format, .heads = 9, .sink = options, .max_logits = options};
    DecodeProblem d = make_decode(some, x);
    const Case c{"mla_decode", format.name(), "scores of -inf", detail};
    if (values ? make_values_infinite(d, which) : make_scores_infinite(d, which))
      check_infinite(r, c, x, d, d.params, d.paged.keys_of_row, which, values);
  };
  infinite("all", false, every_key);
  infinite("all, with a sink", true, every_key);
  infinite("the first key", true, first_key);
  infinite("the first 600 keys", true, first_600_keys);
  infinite("the first 600 keys, no options", false, first_600_keys);
  infinite("the last two keys", true, last_two_keys);
  infinite("the last two keys, no options", false, last_two_keys);
  infinite("infinite values", true, first_and_last_keys, true);
  infinite("infinite values, no options", false, first_and_last_keys, true);
  for (const int32_t page_size : {16, 64}) {
    for (const int64_t heads : {5, 16, 64}) {
      const DecodeOptions x{.format = format, .heads = heads};
      later_rows_case(r, fmt::format("{} heads, page size {}", heads, page_size),
                      {.seq_lens = {130, 66}, .q_len = 3, .page_size = page_size}, x);
    }
  }
}

}  // namespace

void verify_mla_decode(Recorder& r) {
  for (const AbsorbedFormat& format : kAbsorbedFormats) {
    DecodeOptions o;
    o.format = format;
    // Lengths around pages and tiles, and none.
    o.heads = 16;
    decode_case(r, "lengths", "0 to 257", {.seq_lens = {0, 1, 63, 64, 65, 127, 128, 129, 130, 255, 256, 257}}, o);
    o.heads = 3;
    decode_case(r, "lengths", "4096 and others", {.seq_lens = {4096, 1, 4095, 0, 700}}, o);
    for (const int64_t heads : head_counts(format)) {
      o.heads = heads;
      decode_case(r, "heads 1 to 128", fmt::format("{} heads", heads), {.seq_lens = {70, 3}}, o);
    }
    o.heads = 4;
    for (const int32_t page_size : {1, 2, 16, 32, 48, 64, 128, 256, 1024})
      decode_case(r, "page sizes 1 to 1024", fmt::format("page size {}", page_size),
                  {.seq_lens = {130, 0, 5, 257}, .page_size = page_size}, o);
    for (int32_t q_len = 1; q_len <= 8; ++q_len)
      decode_case(r, "q_len 1 to 8", fmt::format("q_len {}", q_len),
                  {.seq_lens = {q_len, 63, 64, 65, 66, 0, 128, 130, 258}, .q_len = q_len}, o);
    for (const RowBound bound : {RowBound::kCausalFull, RowBound::kCausalFromFirst, RowBound::kUniformBlock}) {
      for (const PageTableForm form : {PageTableForm::kPadded, PageTableForm::kCsr}) {
        PagedSpec spec{.seq_lens = {100, 0, 64, 7, 129, 2},
                       .q_len = 1,
                       .ragged = {5, 3, 0, 1, 8, 4},
                       .bound = bound,
                       .form = form,
                       .row_indices = form == PageTableForm::kPadded};
        decode_case(r, "bounds, ragged, tables",
                    fmt::format("{} {}", to_string(bound), form == PageTableForm::kCsr ? "csr" : "padded"), spec, o);
      }
    }
    o.page_gap_bytes = 4096;
    o.padding = 16;
    o.heads = 5;
    decode_case(r, "strided", "gaps between pages, heads and rows", {.seq_lens = {65, 300}, .q_len = 2}, o);
    o = {.format = format};
    o.lse = false;
    decode_case(r, "without lse", "", {.seq_lens = {65, 0, 300}}, o);
    o = {.format = format};
    o.geometry = {256, 32};
    decode_case(r, "row geometry", "256 + 32", {.seq_lens = {65, 0, 300}}, o);
    o = {.format = format};
    decode_case(r, "no requests", "", {.seq_lens = {}}, o);
    for (const size_t batch : {1, 31, 32, 33, 64})  // known fault BL-05
      decode_case(r, "no keys at all", fmt::format("{} requests", batch),
                  {.seq_lens = std::vector<int32_t>(batch, 0), .q_len = 2}, o);

    o = {.format = format, .heads = 9};
    decode_invariants(r, {.seq_lens = {2100, 65, 0, 1, 300, 64}, .q_len = 3}, o, "mixed lengths");
    // Fewer rows than workers: keys are shared out instead.
    const DecodeProblem one_row = make_decode({.seq_lens = {4200}}, o);
    check_workers(r, {"mla_decode", format.name(), "", "one row"}, one_row.params);
    decode_optional_cases(r, format);
  }
}

void verify_small_decodes(Recorder& r) {
  for (const AbsorbedFormat& format : kAbsorbedFormats) {
    if (!r.wants_format(format.name())) continue;
    const auto add = [&](const char* detail, const PagedSpec& spec, int64_t heads) {
      decode_case(r, "small", detail, spec, {.format = format, .heads = heads});
    };
    // Blocks of 16, 32 and 64 lanes; keys that some rows see and others do not; a request without any.
    add("one row of 16 heads", {.seq_lens = {130, 0, 1}}, 16);
    add("two rows of 16 heads", {.seq_lens = {65, 2}, .q_len = 2, .page_size = 32}, 16);
    add("ragged", {.seq_lens = {100, 0, 7}, .ragged = {3, 1, 2}, .form = PageTableForm::kCsr}, 16);
    later_rows_case(r, "small, last keys of NaN and infinities", {.seq_lens = {66}, .q_len = 2},
                    {.format = format, .heads = 16});
    // cuda_generic has one kernel, whose blocks know nothing of each other and which is slow enough.
    if (!r.wants_impl("cuda_mma") && !r.wants_impl("cuda_sm90")) continue;
    add("three rows of 16 heads", {.seq_lens = {130, 64, 3}, .q_len = 3}, 16);
    add("pages of 16", {.seq_lens = {130, 20}, .q_len = 2, .page_size = 16}, 5);
    add("pages of 48", {.seq_lens = {100}, .page_size = 48}, 64);
    add("pages of 128", {.seq_lens = {200, 129}, .page_size = 128}, 16);
    // Requests over several parts of the chip and their merges: of few parts and of many, of few lanes and of more.
    add("few parts", {.seq_lens = {300}}, 32);
    add("many parts", {.seq_lens = {830}}, 16);
    add("many parts of many lanes", {.seq_lens = {830}}, 128);
    if (format.cache == LatentFormat::kBf16)
      add("many parts of more lanes than there are blocks", {.seq_lens = {830, 830, 700}}, 128);
    // More requests than parts: of one key each, then a long one among them, which is cut out of the line.
    std::vector<int32_t> lens(70, 1);
    add("more requests than parts", {.seq_lens = lens}, 128);
    lens[33] = 1500;
    add("one long request among many", {.seq_lens = lens}, 128);
    if (format.cache == LatentFormat::kPacked656) {  // of which cuda_sm90 takes up to 32 lanes, over all of the chip
      lens.resize(140, 1);
      add("one long request among more", {.seq_lens = lens}, 16);
    }
  }
}

// ---- sparse_attention ---------------------------------------------------------------------------------------------

namespace {

struct SparseProblem {
  DecodeProblem decode;  ///< the pool, q and outputs; its rows give the candidates
  Tensor slots = {}, lens = {};
  std::vector<int64_t> listed = {};  ///< entries of each row that count
  SparseAttention params = {};
};

struct ListOptions {
  int64_t k = 96;
  int32_t take = 1 << 30;  ///< entries of a row: min(take, its keys, k)
  bool with_lens = true;
  bool holes = false;       ///< invalid entries among the valid ones: -1, num_slots, huge
  bool everything = false;  ///< all keys in order
  bool repeats = false;     ///< k entries whatever the number of keys: slots are listed more than once
  bool wild_lens = false;   ///< lengths of lists that are negative or beyond k
};

SparseProblem make_sparse(const PagedSpec& spec, const DecodeOptions& o, const ListOptions& list) {
  SparseProblem s{.decode = make_decode(spec, o)};
  const Paged& paged = s.decode.paged;
  s.slots = make_tensor(DType::kI32, {paged.num_rows, list.k});
  std::vector<int32_t> lens;
  Rng rng(o.seed + 5);
  const auto num_slots = static_cast<int32_t>(s.decode.pool.view.num_slots());
  const int32_t invalid[] = {-1, num_slots, 0x7FFFFFFF, -0x7FFFFFFF};
  for (int64_t row = 0; row < paged.num_rows; ++row) {
    const int64_t keys = paged.keys_of_row[static_cast<size_t>(row)];
    std::vector<int64_t> positions(static_cast<size_t>(list.repeats && keys > 0 ? list.k : keys));
    for (size_t i = 0; i < positions.size(); ++i)
      positions[i] = list.repeats ? rng.below(keys) : static_cast<int64_t>(i);
    if (!list.everything) {
      for (size_t i = positions.size(); i > 1; --i)
        std::swap(positions[i - 1], positions[static_cast<size_t>(rng.below(static_cast<int64_t>(i)))]);
    }
    auto* out = s.slots.view.ptr<int32_t>(row);
    int64_t column = 0;
    int64_t taken = 0;
    for (const int64_t position : positions) {
      if (taken == list.take) break;
      if (list.holes && rng.below(3) == 0 && column < list.k) out[column++] = invalid[rng.below(4)];
      if (column == list.k) break;
      out[column++] = static_cast<int32_t>(paged.slot(paged.request_of_row[static_cast<size_t>(row)], position));
      ++taken;
    }
    const bool cut = list.wild_lens && row % 3 == 0;  // a list of a length below 0 has none of its entries
    s.listed.push_back(cut ? 0 : taken);
    lens.push_back(cut ? -5 : static_cast<int32_t>(list.wild_lens ? list.k + 7 : column));
    // Behind the list: with its length anything at all, a real slot of somebody else included; without, invalid ones.
    const bool ends = list.with_lens && !list.wild_lens;
    for (; column < list.k; ++column) out[column] = ends && column % 2 == 0 ? 0 : invalid[column % 4];
  }
  s.params.q = s.decode.params.q;
  s.params.cache = s.decode.params.cache;
  s.params.topk_slots = s.slots.view;
  if (list.with_lens) {
    s.lens = make_ints(lens);
    s.params.topk_lens = s.lens.view;
  }
  s.params.out = s.decode.params.out;
  s.params.lse = s.decode.params.lse;
  s.params.attn_sink = s.decode.params.attn_sink;
  s.params.max_logits = s.decode.params.max_logits;
  s.params.softmax_scale = s.decode.params.softmax_scale;
  s.params.q_scale = s.decode.params.q_scale;
  return s;
}

void sparse_case(Recorder& r, const std::string& case_class, const std::string& detail, const PagedSpec& spec,
                 const DecodeOptions& o, const ListOptions& list) {
  const SparseProblem s = make_sparse(spec, o, list);
  check_case(r, {"sparse_attention", o.format.name(), case_class, detail}, s.params,
             [&](const Outputs& oracle, const Outputs& got, Worst& worst) {
               compare_attention(oracle, got, precision_of(o), o.heads, s.listed, worst, s.decode.sink.view);
             });
}

void sparse_invariants(Recorder& r, const PagedSpec& mixed, const DecodeOptions& o, const ListOptions& list,
                       const std::string& detail) {
  const SparseProblem base = make_sparse(mixed, o, list);
  const Case c{"sparse_attention", o.format.name(), "", detail};
  check_workers(r, c, base.params);
  {
    std::vector<SparseAttention> variants = {base.params};
    std::vector<SparseProblem> keep;
    for (const Poison poison : {Poison::kInf, Poison::kHuge, Poison::kZero}) {
      DecodeOptions other = o;
      other.poison = poison;
      keep.push_back(make_sparse(mixed, other, list));
      variants.push_back(keep.back().params);
    }
    Case unused = c;
    unused.case_class = "unused bytes";
    check_same<SparseAttention>(r, unused, variants, all_bytes);
    PagedSpec shuffled = mixed;
    shuffled.page_seed = 99;
    const SparseProblem other = make_sparse(shuffled, o, list);
    Case order = c;
    order.case_class = "page order";
    check_same<SparseAttention>(r, order, {base.params, other.params}, all_bytes, true);
  }
  Case alone = c;
  alone.case_class = "rows alone";
  for_each_invariant_impl(r, alone, base.params, [&](const std::string& impl) {
    const Outputs batch = run(base.params, {.impl = impl});
    for (int64_t row = 0; row < base.decode.paged.num_rows; ++row) {
      SparseAttention p = base.params;
      cut_row(p, row);
      p.topk_slots.data = p.topk_slots.ptr<int32_t>(row);
      p.topk_lens.data = p.topk_lens.ptr<int32_t>(row);
      p.topk_slots.shape[0] = p.topk_lens.shape[0] = 1;
      r.add(alone, impl, same_row(batch, run(p, {.impl = impl}), row));
    }
  });
}

/// Sinks, largest scores, rows with others between them, scores of -inf, long lists, lengths of lists out of range.
void sparse_optional_cases(Recorder& r, const AbsorbedFormat& format) {
  const PagedSpec some{.seq_lens = {0, 1, 64, 65, 1100}, .q_len = 2};
  DecodeOptions o{.format = format, .heads = 9, .sink = true, .max_logits = true};
  for (const int64_t k : {1, 77, 1030})
    sparse_case(r, "sink, largest score", fmt::format("k {}", k), some, o, {.k = k});
  o.padding = 16;
  o.lse = false;
  sparse_case(r, "sink, largest score", "strided, no lse, invalid entries", some, o, {.k = 600, .holes = true});
  o.sink = false;
  sparse_case(r, "sink, largest score", "largest score alone", some, o, {.k = 96});
  o = {.format = format, .heads = 9, .sink = true};
  sparse_case(r, "sink, largest score", "sink alone", some, o, {.k = 96});
  o.max_logits = true;
  sparse_invariants(r, {.seq_lens = {1100, 65, 0, 1}, .q_len = 2}, o, {.k = 700, .holes = true}, "sink, largest score");
  if (format.cache != LatentFormat::kE4m3PerToken) {
    o = {.format = format, .page_gap_bytes = 64, .row_gap_bytes = 48};
    sparse_case(r, "rows apart", "48 bytes or a few more between rows", some, o, {.k = 96});
    sparse_case(r, "rows apart", "flat", some, {.format = format, .row_gap_bytes = 48}, {.k = 96});
  }
  o = {.format = format};
  sparse_case(r, "lengths of lists", "below 0 and beyond k", some, o, {.k = 100, .wild_lens = true});
  o.heads = 1;
  for (const int64_t k : {16384, 20001}) {
    if (format.cache != LatentFormat::kBf16 && format.cache != LatentFormat::kPacked656) continue;
    sparse_case(r, "lists of any length", fmt::format("k {}", k), {.seq_lens = {300, 0, 90}}, o,
                {.k = k, .with_lens = k == 16384, .repeats = true});
  }
  const auto infinite = [&](const char* detail, bool options, Infinite which, bool values = false) {
    const DecodeOptions x{.format = format, .heads = 9, .sink = options, .max_logits = options};
    SparseProblem s = make_sparse(some, x, {.k = 1100, .everything = true});
    const Case c{"sparse_attention", format.name(), "scores of -inf", detail};
    if (values ? make_values_infinite(s.decode, which) : make_scores_infinite(s.decode, which))
      check_infinite(r, c, x, s.decode, s.params, s.listed, which, values);
  };
  infinite("all", false, every_key);
  infinite("all, with a sink", true, every_key);
  infinite("the first 600 keys", true, first_600_keys);
  infinite("the last two keys, no options", false, last_two_keys);
  infinite("infinite values", true, first_and_last_keys, true);
  infinite("infinite values, no options", false, first_and_last_keys, true);
  for (const int64_t heads : {5, 16, 64}) {  // the last key stands in the last row's list alone
    const DecodeOptions x{.format = format, .heads = heads};
    const PagedSpec spec{.seq_lens = {130, 66}, .q_len = 3};
    std::vector<SparseProblem> keep;
    std::vector<SparseAttention> variants;
    for (const float value : {0.5f, NAN, kInfinity, -kInfinity, 1e30f}) {
      keep.push_back(make_sparse(spec, x, {.k = 130}));
      poke_last_keys(keep.back().decode, value);
      variants.push_back(keep.back().params);
    }
    const Case c{"sparse_attention", format.name(), "keys of other lists", fmt::format("{} heads", heads)};
    check_same<SparseAttention>(r, c, variants, [&](const Outputs& all) {
      return rows_but_last(all, spec.q_len, keep[0].decode.paged.num_rows);
    });
  }
}

}  // namespace

void verify_sparse_attention(Recorder& r) {
  for (const AbsorbedFormat& format : kAbsorbedFormats) {
    DecodeOptions o;
    o.format = format;
    const PagedSpec some{.seq_lens = {0, 1, 63, 64, 65, 300, 1000}, .q_len = 2};
    o.heads = 16;
    for (const int64_t k : {1, 17, 64, 65, 200, 512})
      sparse_case(r, "list widths", fmt::format("k {}", k), some, o, {.k = k});
    o.heads = 2;
    sparse_case(r, "list widths", "k 2048", {.seq_lens = {2048, 2049, 2047, 3000}}, o, {.k = 2048});
    for (const int64_t heads : head_counts(format)) {
      o.heads = heads;
      sparse_case(r, "heads 1 to 128", fmt::format("{} heads", heads), {.seq_lens = {70, 3}}, o, {.k = 64});
    }
    o.heads = 4;
    sparse_case(r, "lists without lens", "", some, o, {.k = 96, .with_lens = false});
    sparse_case(r, "invalid entries inside", "", some, o, {.k = 128, .with_lens = true, .holes = true});
    sparse_case(r, "invalid entries inside", "no lens", some, o, {.k = 128, .with_lens = false, .holes = true});
    sparse_case(r, "nothing valid", "", some, o, {.k = 128, .take = 0});
    for (const int32_t page_size : {1, 3, 32, 64, 1024}) {
      PagedSpec spec = some;
      spec.page_size = page_size;
      sparse_case(r, "page sizes 1 to 1024", fmt::format("page size {}", page_size), spec, o, {.k = 80});
    }
    o.page_gap_bytes = 2048;
    o.padding = 16;
    o.heads = 5;
    sparse_case(r, "strided", "gaps between pages, heads and rows", some, o, {.k = 80});
    o = {.format = format};
    o.geometry = {256, 32};
    sparse_case(r, "row geometry", "256 + 32", some, o, {.k = 80});
    o = {.format = format};
    sparse_case(r, "no rows", "", {.seq_lens = {}}, o, {.k = 80});
    // sparse == dense when the list is everything: the oracle of the dense problem judges the sparse one.
    {
      o = {.format = format};
      const PagedSpec spec{.seq_lens = {1, 64, 65, 200, 0}, .q_len = 2};
      const SparseProblem s = make_sparse(spec, o, {.k = 200, .everything = true});
      const Outputs dense = run(s.decode.params, {.impl = "ref", .num_workers = 1, .fp32_outputs = true});
      AttentionPrecision precision = format.precision();
      precision.score_deviation = kScoreDeviation;
      const Case c{"sparse_attention", format.name(), "sparse == dense", ""};
      for_each_impl(r, c, s.params, [&](const std::string& impl) {
        Worst worst;
        compare_attention(dense, run(s.params, {.impl = impl}), precision, o.heads, s.decode.paged.keys_of_row, worst);
        r.add(c, impl, worst);
      });
    }

    o = {.format = format, .heads = 9};
    sparse_invariants(r, {.seq_lens = {1500, 65, 0, 1, 300, 64}, .q_len = 3}, o, {.k = 700, .holes = true},
                      "mixed lengths");
    const SparseProblem one_row = make_sparse({.seq_lens = {2500}}, o, {.k = 2048});
    check_workers(r, {"sparse_attention", format.name(), "", "one row"}, one_row.params);
    sparse_optional_cases(r, format);
  }
}

void verify_small_lists(Recorder& r) {
  for (const AbsorbedFormat& format : kAbsorbedFormats) {
    if (!r.wants_format(format.name())) continue;
    const auto add = [&](const char* detail, const PagedSpec& spec, int64_t heads, const ListOptions& list) {
      sparse_case(r, "small", detail, spec, {.format = format, .heads = heads}, list);
    };
    add("16 heads", {.seq_lens = {130, 0, 1}}, 16, {.k = 96});
    add("invalid entries, no lens", {.seq_lens = {100, 7}, .page_size = 3}, 16,
        {.k = 64, .with_lens = false, .holes = true});
    if (!r.wants_impl("cuda_mma") && !r.wants_impl("cuda_sm90")) continue;  // as above
    add("32 heads", {.seq_lens = {130}, .q_len = 2}, 32, {.k = 100, .holes = true});
    add("64 heads", {.seq_lens = {130}}, 64, {.k = 70});
    add("few parts", {.seq_lens = {300}}, 128, {.k = 290});
    add("many parts", {.seq_lens = {830}}, 16, {.k = 830});
    add("more rows than parts", {.seq_lens = std::vector<int32_t>(35, 3), .q_len = 2}, 128, {.k = 4});
  }
}

// ---- ragged_prefill -----------------------------------------------------------------------------------------------

namespace {

struct PrefillOptions {
  DType dtype = DType::kBf16;
  DType out = DType::kBf16;
  int64_t heads = 2;
  int64_t own = 128;  ///< N
  int64_t rope = 64;  ///< P
  int64_t value_dim = 128;
  bool shared_rope = true;
  bool causal = true;
  bool lse = true;
  int64_t padding = 0;
  int64_t spare_kv_rows = 0;  ///< rows of k and v that belong to nobody: NaN
  uint64_t seed = 3;
};

struct PrefillProblem {
  Tensor q, k, k_rope, v, cu_q, cu_kv, out, lse;
  std::vector<int64_t> keys_of_row;
  RaggedPrefill params;
};

PrefillProblem make_prefill(const std::vector<int32_t>& q_lens, const std::vector<int32_t>& kv_lens,
                            const PrefillOptions& o) {
  PrefillProblem s;
  std::vector<int32_t> cu_q = {0};
  std::vector<int32_t> cu_kv = {0};
  for (size_t i = 0; i < q_lens.size(); ++i) {
    cu_q.push_back(cu_q.back() + q_lens[i]);
    cu_kv.push_back(cu_kv.back() + kv_lens[i]);
    for (int64_t a = 0; a < q_lens[i]; ++a)
      s.keys_of_row.push_back(o.causal ? std::max<int64_t>(0, a + kv_lens[i] - q_lens[i] + 1) : kv_lens[i]);
  }
  const int64_t q_rows = cu_q.back();
  const int64_t kv_rows = cu_kv.back() + o.spare_kv_rows;
  const int64_t width = o.own + o.rope;
  s.q = make_tensor(o.dtype, {q_rows, o.heads, width}, o.padding);
  s.k = make_tensor(o.dtype, {kv_rows, o.heads, o.shared_rope ? o.own : width}, o.padding);
  s.v = make_tensor(o.dtype, {kv_rows, o.heads, o.value_dim}, o.padding);
  fill_normal(s.q, Rng(o.seed));
  const auto fill_rows = [&](Tensor& t, uint64_t seed) {  // the spare rows keep their NaN
    Tensor used = t;
    used.view.shape[0] = cu_kv.back();
    fill_normal(used, Rng(seed));
  };
  fill_rows(s.k, o.seed + 1);
  fill_rows(s.v, o.seed + 2);
  if (o.shared_rope) {
    s.k_rope = make_tensor(o.dtype, {kv_rows, o.rope}, o.padding);
    fill_rows(s.k_rope, o.seed + 3);
    s.params.k_rope = s.k_rope.view;
  }
  s.cu_q = make_ints(cu_q);
  s.cu_kv = make_ints(cu_kv);
  s.out = make_tensor(o.out, {q_rows, o.heads, o.value_dim}, o.padding);
  s.params.q = s.q.view;
  s.params.k = s.k.view;
  s.params.v = s.v.view;
  s.params.cu_q_lens = s.cu_q.view;
  s.params.cu_kv_lens = s.cu_kv.view;
  s.params.out = s.out.view;
  if (o.lse) {
    s.lse = make_tensor(DType::kF32, {q_rows, o.heads});
    s.params.lse = s.lse.view;
  }
  s.params.softmax_scale = static_cast<float>(kScoreDeviation / std::sqrt(static_cast<double>(width)));
  s.params.causal = o.causal;
  return s;
}

std::string prefill_format(const PrefillOptions& o) {
  return fmt::format("qkv {}, out {}", to_string(o.dtype), to_string(o.out));
}

void prefill_case(Recorder& r, const std::string& case_class, const std::string& detail,
                  const std::vector<int32_t>& q_lens, const std::vector<int32_t>& kv_lens, const PrefillOptions& o) {
  const PrefillProblem s = make_prefill(q_lens, kv_lens, o);
  AttentionPrecision precision;
  precision.fp32 = o.dtype == DType::kF32;
  precision.output_bf16 = o.out == DType::kBf16;
  precision.width = static_cast<double>(o.own + o.rope);
  precision.score_deviation = kScoreDeviation;
  check_case(r, {"ragged_prefill", prefill_format(o), case_class, detail}, s.params,
             [&](const Outputs& oracle, const Outputs& got, Worst& worst) {
               compare_attention(oracle, got, precision, o.heads, s.keys_of_row, worst);
             });
}

}  // namespace

void verify_ragged_prefill(Recorder& r) {
  const std::pair<DType, DType> formats[] = {
      {DType::kBf16, DType::kBf16}, {DType::kBf16, DType::kF32}, {DType::kF32, DType::kF32}};
  for (const auto& [dtype, out] : formats) {
    PrefillOptions o;
    o.dtype = dtype;
    o.out = out;
    // New tokens alone, then behind prefixes; rows before the first key see nothing.
    prefill_case(r, "causal, no prefix", "", {1, 63, 64, 65, 0, 130, 300}, {1, 63, 64, 65, 0, 130, 300}, o);
    for (const int32_t prefix : {0, 1, 63, 64, 65, 4096})
      prefill_case(r, "causal, prefixes", fmt::format("prefix {}", prefix), {3, 1, 17},
                   {3 + prefix, 1, 17 + prefix / 7}, o);
    prefill_case(r, "more rows than keys", "", {8, 5, 70}, {5, 0, 3}, o);
    o.causal = false;
    for (const int32_t keys : {0, 1, 63, 64, 65, 2000})
      prefill_case(r, "not causal", fmt::format("{} keys", keys), {3, 33, 2}, {keys, 0, keys / 2}, o);
    prefill_case(r, "spare kv rows", "", {3, 2}, {65, 10},
                 {.dtype = dtype, .out = out, .causal = false, .spare_kv_rows = 40});
    o.causal = true;
    o.shared_rope = false;
    prefill_case(r, "rope inside k", "", {65, 2}, {70, 40}, o);
    o = {.dtype = dtype, .out = out};
    for (const int64_t heads : {1, 3, 5, 16}) {
      o.heads = heads;
      prefill_case(r, "heads", fmt::format("{} heads", heads), {20, 7}, {33, 90}, o);
    }
    o = {.dtype = dtype, .out = out, .own = 192, .rope = 64, .value_dim = 256};
    prefill_case(r, "widths", "256/256", {20, 7}, {33, 90}, o);
    o = {.dtype = dtype, .out = out, .own = 32, .rope = 16, .value_dim = 48};
    prefill_case(r, "widths", "48/48", {20, 7}, {33, 90}, o);
    o = {.dtype = dtype, .out = out, .heads = 3, .lse = false, .padding = 16};
    prefill_case(r, "strided, no lse", "", {20, 7, 66}, {33, 90, 66}, o);
    o = {.dtype = dtype, .out = out};
    prefill_case(r, "no requests", "", {}, {}, o);
    o.heads = 1;  // tiles of 64 and 128 rows, whole and with one row more or less
    prefill_case(r, "tile edges", "", {127, 128, 129, 64, 192}, {127, 200, 129, 65, 320}, o);
    {
      std::vector<int32_t> rows, keys;  // more requests than lanes look at in one step of a search
      for (int32_t i = 0; i < 70; ++i) {
        rows.push_back(i % 7 == 3 ? 0 : i % 4);
        keys.push_back(i * 5 % 23);
      }
      prefill_case(r, "many requests", "70 requests", rows, keys, o);
    }
    {  // Bit for bit: what stands in a key, or in its value, is nothing to the rows before it.
      o.heads = 2;
      constexpr int32_t kRows = 150, kKey = 70;
      std::vector<PrefillProblem> keep;
      std::vector<RaggedPrefill> variants;
      for (const float x : {0.5f, NAN, INFINITY, 1e30f}) {
        keep.push_back(make_prefill({kRows}, {kRows}, o));
        for (int64_t h = 0; h < o.heads; ++h) {
          set(keep.back().k.view, x, kKey, h, 3);
          set(keep.back().v.view, x, kKey, h, 5);
          set(keep.back().v.view, -x, kKey + 40, h, 77);
        }
        variants.push_back(keep.back().params);
      }
      check_same<RaggedPrefill>(
          r, {"ragged_prefill", prefill_format(o), "keys of later rows", ""}, variants, [](const Outputs& all) {
            std::vector<std::byte> before;
            for (const auto& b : all.bytes)
              before.insert(before.end(), b.begin(), b.begin() + static_cast<std::ptrdiff_t>(b.size()) / kRows * kKey);
            return before;
          });
    }
    o = {.dtype = dtype, .out = out};
    {  // scores of -inf: one infinite factor of every row, a positive one of every key
      const PrefillProblem s = make_prefill({65, 2, 3}, {70, 600, 1}, o);
      for (int64_t h = 0; h < o.heads; ++h) {
        for (int64_t t = 0; t < s.q.view.shape[0]; ++t) set(s.q.view, -kInfinity, t, h, 0);
        for (int64_t t = 0; t < s.k.view.shape[0]; ++t) set(s.k.view, 1.0f, t, h, 0);
      }
      const std::vector<int64_t> no_weight(s.keys_of_row.size(), 0);
      check_case(r, {"ragged_prefill", prefill_format(o), "scores of -inf", "all"}, s.params,
                 [&](const Outputs& oracle, const Outputs& got, Worst& worst) {
                   compare_attention(oracle, got, {}, o.heads, no_weight, worst);
                 });
    }

    // Bit for bit: workers; each request alone.
    o = {.dtype = dtype, .out = out, .heads = 3};
    const std::vector<int32_t> q_lens = {70, 0, 1, 129, 5};
    const std::vector<int32_t> kv_lens = {600, 3, 1, 129, 0};
    const PrefillProblem base = make_prefill(q_lens, kv_lens, o);
    const Case c{"ragged_prefill", prefill_format(o), "requests alone", "mixed lengths"};
    check_workers(r, c, base.params);
    PrefillOptions one_head = o;
    one_head.heads = 1;
    const PrefillProblem few = make_prefill({2}, {3000}, one_head);
    check_workers(r, c, few.params);
    for_each_impl(r, c, base.params, [&](const std::string& impl) {
      const Outputs batch = run(base.params, {.impl = impl});
      const auto* cu_q = base.cu_q.view.ptr<int32_t>();
      const auto* cu_kv = base.cu_kv.view.ptr<int32_t>();
      for (size_t i = 0; i < q_lens.size(); ++i) {
        const Tensor one_q = make_ints({0, q_lens[i]});
        const Tensor one_kv = make_ints({0, kv_lens[i]});
        RaggedPrefill p = base.params;
        const auto cut = [&](TensorView& v, int64_t begin, int64_t rows) {
          v.data = static_cast<std::byte*>(v.data) + begin * v.stride[0] * static_cast<int64_t>(size_of(v.dtype));
          v.shape[0] = rows;
        };
        cut(p.q, cu_q[i], q_lens[i]);
        cut(p.out, 0, q_lens[i]);
        cut(p.lse, 0, q_lens[i]);
        cut(p.k, cu_kv[i], kv_lens[i]);
        cut(p.v, cu_kv[i], kv_lens[i]);
        cut(p.k_rope, cu_kv[i], kv_lens[i]);
        p.cu_q_lens = one_q.view;
        p.cu_kv_lens = one_kv.view;
        const Outputs single = run(p, {.impl = impl});
        Worst worst;
        for (const char* name : {"out", "lse"}) {
          const auto& whole = batch.of(name);
          const auto& part = single.of(name);
          const size_t row_bytes = whole.size() / static_cast<size_t>(cu_q[q_lens.size()]);
          const bool same = part.empty() || std::memcmp(whole.data() + static_cast<size_t>(cu_q[i]) * row_bytes,
                                                        part.data(), part.size()) == 0;
          worst.see(same ? 0.0 : 1.0, 0.0, fmt::format("request {} {}", i, name));
        }
        r.add(c, impl, worst);
        // A row alone: one query row, and only the keys that it sees.
        for (const int32_t a : {0, q_lens[i] / 2, q_lens[i] - 1}) {
          if (a < 0 || a >= q_lens[i]) continue;
          const int64_t row = cu_q[i] + a;
          const auto keys = static_cast<int32_t>(base.keys_of_row[static_cast<size_t>(row)]);
          const Tensor row_q = make_ints({0, 1});
          const Tensor row_kv = make_ints({0, keys});
          RaggedPrefill one = base.params;
          cut(one.q, row, 1);
          cut(one.out, 0, 1);
          cut(one.lse, 0, 1);
          cut(one.k, cu_kv[i], keys);
          cut(one.v, cu_kv[i], keys);
          cut(one.k_rope, cu_kv[i], keys);
          one.cu_q_lens = row_q.view;
          one.cu_kv_lens = row_kv.view;
          const Outputs out_of_one = run(one, {.impl = impl});
          Worst row_worst;
          for (const char* name : {"out", "lse"}) {
            const auto& part = out_of_one.of(name);
            const bool same = std::memcmp(batch.of(name).data() + static_cast<size_t>(row) * part.size(), part.data(),
                                          part.size()) == 0;
            row_worst.see(same ? 0.0 : 1.0, 0.0, fmt::format("request {} row {} {}", i, a, name));
          }
          Case row_alone = c;
          row_alone.case_class = "rows alone";
          r.add(row_alone, impl, row_worst);
        }
      }
    });
  }
}

void verify_small_prefills(Recorder& r) {
  const std::pair<DType, DType> formats[] = {
      {DType::kBf16, DType::kBf16}, {DType::kBf16, DType::kF32}, {DType::kF32, DType::kF32}};
  for (const auto& [dtype, out] : formats) {
    PrefillOptions o{.dtype = dtype, .out = out};
    if (!r.wants_format(prefill_format(o))) continue;
    prefill_case(r, "small", "192/128", {20, 0, 66}, {33, 3, 200}, o);
    o.shared_rope = false;
    prefill_case(r, "small", "192/128, rope inside k", {9, 2}, {70, 40}, o);
    o = {.dtype = dtype, .out = out, .causal = false, .lse = false};
    prefill_case(r, "small", "192/128, not causal, no lse", {5, 3, 2}, {0, 65, 130}, o);
    o = {.dtype = dtype, .out = out, .own = 192, .rope = 64, .value_dim = 256};
    prefill_case(r, "small", "256/256", {20, 7}, {33, 90}, o);
    o.shared_rope = false;
    prefill_case(r, "small", "256/256, rope inside k", {5}, {70}, o);
    o = {.dtype = dtype, .out = out, .heads = 16};  // more tiles than blocks that persist
    prefill_case(r, "small", "many tiles", std::vector<int32_t>(10, 2), std::vector<int32_t>(10, 5), o);
  }
}

}  // namespace verify
}  // namespace v0
}  // namespace gannet
