// mla_decode, sparse_attention and ragged_prefill.
#include <fmt/core.h>

#include <algorithm>
#include <cmath>
#include <cstring>

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

// Of an e4m3 cache. No power of two, so that a scale which a kernel rounds is seen.
constexpr float kCacheScale = 0.03f;

std::vector<std::byte> all_bytes(const Outputs& o) {
  std::vector<std::byte> all;
  for (const auto& b : o.bytes) all.insert(all.end(), b.begin(), b.end());
  return all;
}

// ---- mla_decode ---------------------------------------------------------------------------------------------------

struct DecodeProblem {
  Paged paged;
  LatentPool pool;
  Tensor q, out, lse;
  MlaDecode params;
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
};

DecodeProblem make_decode(const PagedSpec& spec, const DecodeOptions& o) {
  DecodeProblem d{.paged = Paged(spec), .pool = {}, .q = {}, .out = {}, .lse = {}, .params = {}};
  d.pool = make_latent_pool(d.paged, o.format.cache, o.seed, o.poison, o.page_gap_bytes, o.geometry, kCacheScale);
  d.q = make_tensor(o.format.q, {d.paged.num_rows, o.heads, o.geometry.width()}, o.padding);
  fill_normal(d.q, Rng(o.seed + 1));
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
  d.params.softmax_scale = kSoftmaxScale;
  return d;
}

void decode_case(Recorder& r, const std::string& case_class, const std::string& detail, const PagedSpec& spec,
                 const DecodeOptions& o) {
  const DecodeProblem d = make_decode(spec, o);
  AttentionPrecision precision = o.format.precision();
  precision.width = o.geometry.width();
  // The deviation of the scores is sqrt(width) * scale.
  precision.score_deviation = std::sqrt(precision.width) * kSoftmaxScale;
  check_case(r, {"mla_decode", o.format.name(), case_class, detail}, d.params,
             [&](const Outputs& oracle, const Outputs& got, Worst& worst) {
               compare_attention(oracle, got, precision, o.heads, d.paged.keys_of_row, worst);
             });
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
    for (const int64_t heads : {1, 2, 4, 5, 8, 12, 15, 16, 17, 20, 31, 32, 33, 64, 65, 96, 127, 128}) {
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

    // A result is a function of its row alone.
    o = {.format = format, .heads = 9};
    const PagedSpec mixed{.seq_lens = {2100, 65, 0, 1, 300, 64}, .q_len = 3};
    const DecodeProblem base = make_decode(mixed, o);
    const Case c{"mla_decode", format.name(), "", "mixed lengths"};
    check_workers(r, c, base.params);
    // Fewer rows than workers: keys are shared out instead.
    const DecodeProblem one_row = make_decode({.seq_lens = {4200}}, o);
    check_workers(r, c, one_row.params);
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
        p.q.data = p.q.dtype == DType::kBf16 ? static_cast<void*>(p.q.ptr<Bf16>(row)) : p.q.ptr<float>(row);
        p.q.shape[0] = p.out.shape[0] = p.lse.shape[0] = 1;
        p.pages = one.table();
        p.rows = one.rows();
        const Outputs single = run(p, {.impl = impl});
        Worst worst;
        for (const char* name : {"out", "lse"}) {
          const auto& whole = batch.of(name);
          const auto& part = single.of(name);
          const bool same =
              std::memcmp(whole.data() + static_cast<size_t>(row) * part.size(), part.data(), part.size()) == 0;
          worst.see(same ? 0.0 : 1.0, 0.0, fmt::format("row {} {}", row, name));
        }
        r.add(alone, impl, worst);
      }
    });
  }
}

// ---- sparse_attention ---------------------------------------------------------------------------------------------

namespace {

struct SparseProblem {
  DecodeProblem decode;  ///< the pool, q and outputs; its rows give the candidates
  Tensor slots, lens;
  std::vector<int64_t> listed;  ///< entries of each row that count
  SparseAttention params;
};

struct ListOptions {
  int64_t k = 96;
  int32_t take = 1 << 30;  ///< entries of a row: min(take, its keys, k)
  bool with_lens = true;
  bool holes = false;       ///< invalid entries among the valid ones: -1, num_slots, huge
  bool everything = false;  ///< all keys in order
};

SparseProblem make_sparse(const PagedSpec& spec, const DecodeOptions& o, const ListOptions& list) {
  SparseProblem s{.decode = make_decode(spec, o), .slots = {}, .lens = {}, .listed = {}, .params = {}};
  const Paged& paged = s.decode.paged;
  s.slots = make_tensor(DType::kI32, {paged.num_rows, list.k});
  std::vector<int32_t> lens;
  Rng rng(o.seed + 5);
  const auto num_slots = static_cast<int32_t>(s.decode.pool.view.num_slots());
  const int32_t invalid[] = {-1, num_slots, 0x7FFFFFFF, -0x7FFFFFFF};
  for (int64_t row = 0; row < paged.num_rows; ++row) {
    const int64_t keys = paged.keys_of_row[static_cast<size_t>(row)];
    std::vector<int64_t> positions(static_cast<size_t>(keys));
    for (size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<int64_t>(i);
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
    s.listed.push_back(taken);
    lens.push_back(static_cast<int32_t>(column));
    // Behind the list: with lens anything at all, a real slot of somebody else included; without, the invalid ones.
    for (; column < list.k; ++column) out[column] = list.with_lens && column % 2 == 0 ? 0 : invalid[column % 4];
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
  s.params.softmax_scale = kSoftmaxScale;
  return s;
}

void sparse_case(Recorder& r, const std::string& case_class, const std::string& detail, const PagedSpec& spec,
                 const DecodeOptions& o, const ListOptions& list) {
  const SparseProblem s = make_sparse(spec, o, list);
  AttentionPrecision precision = o.format.precision();
  precision.width = o.geometry.width();
  precision.score_deviation = std::sqrt(precision.width) * kSoftmaxScale;
  check_case(r, {"sparse_attention", o.format.name(), case_class, detail}, s.params,
             [&](const Outputs& oracle, const Outputs& got, Worst& worst) {
               compare_attention(oracle, got, precision, o.heads, s.listed, worst);
             });
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
    for (const int64_t heads : {1, 2, 4, 5, 8, 12, 15, 16, 17, 20, 31, 32, 33, 64, 65, 96, 127, 128}) {
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
    const PagedSpec mixed{.seq_lens = {1500, 65, 0, 1, 300, 64}, .q_len = 3};
    const ListOptions list{.k = 700, .holes = true};
    const SparseProblem base = make_sparse(mixed, o, list);
    const Case c{"sparse_attention", format.name(), "", "mixed lengths"};
    check_workers(r, c, base.params);
    const SparseProblem one_row = make_sparse({.seq_lens = {2500}}, o, {.k = 2048});
    check_workers(r, c, one_row.params);
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
        p.q.data = p.q.dtype == DType::kBf16 ? static_cast<void*>(p.q.ptr<Bf16>(row)) : p.q.ptr<float>(row);
        p.topk_slots.data = p.topk_slots.ptr<int32_t>(row);
        p.topk_lens.data = p.topk_lens.ptr<int32_t>(row);
        p.q.shape[0] = p.out.shape[0] = p.lse.shape[0] = p.topk_slots.shape[0] = p.topk_lens.shape[0] = 1;
        const Outputs single = run(p, {.impl = impl});
        Worst worst;
        for (const char* name : {"out", "lse"}) {
          const auto& part = single.of(name);
          const bool same = std::memcmp(batch.of(name).data() + static_cast<size_t>(row) * part.size(), part.data(),
                                        part.size()) == 0;
          worst.see(same ? 0.0 : 1.0, 0.0, fmt::format("row {} {}", row, name));
        }
        r.add(alone, impl, worst);
      }
    });
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

}  // namespace verify
}  // namespace v0
}  // namespace gannet
