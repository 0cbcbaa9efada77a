#include <cmath>
#include <cstring>

#include "op_cases.h"
#include "verify/tolerances.h"

namespace {

using namespace gannet;
using gannet::verify::make_ints;
using gannet::verify::make_tensor;
using gannet::verify::Rng;
using gannet::verify::Tensor;

TEST(MergeState, AgreesWithTheOracleOnTheGrid) { gannet_tests::expect_grid("merge_state"); }

/// Attention over prefixes in chunks, merged, against one pass of the oracle. Requests without tokens in a chunk are in
/// it all the same, and every output starts as NaN (known faults BL-01, BL-06).
struct Chunked {
  std::vector<int32_t> prefixes;
  std::vector<int32_t> new_tokens;
  int32_t chunk = 64;
  int64_t heads = 2;
  DType dtype = DType::kBf16;
};

void expect_chunks_equal_one_pass(const Chunked& c) {
  constexpr int64_t kWidth = 192;
  constexpr int64_t kOwn = 128;
  const size_t n = c.prefixes.size();
  std::vector<int32_t> cu_q = {0};
  std::vector<int32_t> cu_kv = {0};
  int32_t longest = 0;
  for (size_t i = 0; i < n; ++i) {
    cu_q.push_back(cu_q.back() + c.new_tokens[i]);
    cu_kv.push_back(cu_kv.back() + c.prefixes[i] + c.new_tokens[i]);
    longest = std::max(longest, c.prefixes[i]);
  }
  const int64_t rows = cu_q.back();
  const Tensor q = make_tensor(c.dtype, {rows, c.heads, kWidth});
  const Tensor k = make_tensor(c.dtype, {cu_kv.back(), c.heads, kOwn});
  const Tensor k_rope = make_tensor(c.dtype, {cu_kv.back(), kWidth - kOwn});
  const Tensor v = make_tensor(c.dtype, {cu_kv.back(), c.heads, 128});
  verify::fill_normal(q, Rng(1));
  verify::fill_normal(k, Rng(2));
  verify::fill_normal(k_rope, Rng(3));
  verify::fill_normal(v, Rng(4));
  const Tensor q_lens = make_ints(cu_q);
  const Tensor kv_lens = make_ints(cu_kv);
  const Tensor one_out = make_tensor(DType::kF32, {rows, c.heads, 128});
  const Tensor one_lse = make_tensor(DType::kF32, {rows, c.heads});
  constexpr double kDeviation = 1.5;
  RaggedPrefill whole;
  whole.q = q.view;
  whole.k = k.view;
  whole.k_rope = k_rope.view;
  whole.v = v.view;
  whole.cu_q_lens = q_lens.view;
  whole.cu_kv_lens = kv_lens.view;
  whole.out = one_out.view;
  whole.lse = one_lse.view;
  whole.softmax_scale = static_cast<float>(kDeviation / std::sqrt(static_cast<double>(kWidth)));
  run_once(Context{}, whole, {.impl = "ref"});

  // Tokens [begin, begin + length) of each request, as far as it has them, side by side.
  const auto pass = [&](const std::string& impl, int32_t begin, int32_t length, bool causal, const Tensor& out,
                        const Tensor& lse) {
    std::vector<int32_t> cu = {0};
    std::vector<int64_t> source;
    for (size_t i = 0; i < n; ++i) {
      const int32_t end_of = causal ? c.prefixes[i] + c.new_tokens[i] : c.prefixes[i];
      const int32_t first = causal ? c.prefixes[i] : std::min(begin, end_of);
      const int32_t last = causal ? end_of : std::min(begin + length, end_of);
      for (int32_t t = first; t < last; ++t) source.push_back(cu_kv[i] + t);
      cu.push_back(cu.back() + last - first);
    }
    const auto total = static_cast<int64_t>(source.size());
    const auto gather = [&](const Tensor& from) {
      Tensor to;
      if (from.view.rank == 3) to = make_tensor(c.dtype, {total, from.view.shape[1], from.view.shape[2]});
      else to = make_tensor(c.dtype, {total, from.view.shape[1]});
      const auto row_bytes = static_cast<size_t>(from.view.stride[0]) * size_of(c.dtype);
      for (int64_t t = 0; t < total; ++t)
        std::memcpy(to.buffer->data() + static_cast<size_t>(t) * row_bytes,
                    from.buffer->data() + static_cast<size_t>(source[static_cast<size_t>(t)]) * row_bytes, row_bytes);
      return to;
    };
    const Tensor chunk_k = gather(k);
    const Tensor chunk_rope = gather(k_rope);
    const Tensor chunk_v = gather(v);
    const Tensor chunk_lens = make_ints(cu);
    RaggedPrefill p = whole;
    p.k = chunk_k.view;
    p.k_rope = chunk_rope.view;
    p.v = chunk_v.view;
    p.cu_kv_lens = chunk_lens.view;
    p.causal = causal;
    p.out = out.view;
    p.lse = lse.view;
    gannet_tests::run_here(p, impl);
  };

  for (const std::string& impl : gannet_tests::taking(whole)) {
    const Tensor out = make_tensor(DType::kF32, {rows, c.heads, 128});
    const Tensor lse = make_tensor(DType::kF32, {rows, c.heads});
    pass(impl, 0, 0, true, out, lse);
    int merges = 0;
    for (int32_t begin = 0; begin < longest; begin += c.chunk, ++merges) {
      const Tensor part = make_tensor(DType::kF32, {rows, c.heads, 128});
      const Tensor part_lse = make_tensor(DType::kF32, {rows, c.heads});
      pass(impl, begin, c.chunk, false, part, part_lse);
      MergeState m;
      m.out_a = out.view;
      m.lse_a = lse.view;
      m.out_b = part.view;
      m.lse_b = part_lse.view;
      gannet_tests::run_here(m, gannet_tests::or_neighbour(impl, m));
    }
    for (size_t i = 0; i < n; ++i) {
      for (int64_t t = cu_q[i]; t < cu_q[i + 1]; ++t) {
        for (int64_t h = 0; h < c.heads; ++h) {
          double error = 0.0;
          double norm = 0.0;
          for (int64_t d = 0; d < 128; ++d) {
            const double x = verify::get(one_out.view, t, h, d);
            error += std::pow(verify::get(out.view, t, h, d) - x, 2.0);
            norm += x * x;
          }
          verify::AttentionPrecision precision;
          precision.fp32 = c.dtype == DType::kF32;
          precision.width = kWidth;
          precision.score_deviation = kDeviation;
          precision.num_keys = c.prefixes[i] + static_cast<double>(t - cu_q[i]) + 1;
          // A part's LSE error is an error of its weight; each merge rounds once more.
          const double wanted = verify::get(one_lse.view, t, h);
          const double tolerance = verify::attention_tolerance(precision) + verify::lse_tolerance(precision, wanted) +
                                   16.0 * merges * verify::kUnitFp32;
          EXPECT_LE(std::sqrt(error / norm), tolerance) << impl << " request " << i << " row " << t << " head " << h;
          EXPECT_LE(std::fabs(verify::get(lse.view, t, h) - wanted),
                    verify::lse_tolerance(precision, wanted) + 4.0 * merges * verify::kUnitFp32 * std::fabs(wanted))
              << impl << " request " << i << " row " << t << " head " << h;
        }
      }
    }
  }
}

TEST(MergeState, ChunksOfPrefixesEqualOnePass) {
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    for (const int32_t chunk : {64, 1000}) {
      expect_chunks_equal_one_pass({{0, 1, 63, 64, 65, 700}, {3, 2, 1, 4, 2, 5}, chunk, 2, dtype});
      expect_chunks_equal_one_pass({{4096}, {2}, chunk == 64 ? 512 : 4096, 1, dtype});
    }
    expect_chunks_equal_one_pass({{96, 16}, {5, 5}, 32, 16, dtype});      // BL-01
    expect_chunks_equal_one_pass({{0, 1, 70}, {4, 4, 4}, 64, 4, dtype});  // BL-02
    expect_chunks_equal_one_pass({{3072}, {64}, 3072, 1, dtype});         // BL-06
  }
}

TEST(MergeState, OrderOfMergesMattersByRoundingOnly) {
  const auto side = [](uint64_t seed, Tensor& out, Tensor& lse) {
    out = make_tensor(DType::kF32, {9, 3, 64});
    lse = make_tensor(DType::kF32, {9, 3});
    verify::fill_normal(out, Rng(seed));
    verify::fill_normal(lse, Rng(seed + 1), 3.0);
    for (int64_t h = 0; h < 3; ++h) {  // an empty row in each
      const auto row = static_cast<int64_t>(seed % 9);
      verify::set(lse.view, -INFINITY, row, h);
      for (int64_t d = 0; d < 64; ++d) verify::set(out.view, NAN, row, h, d);
    }
  };
  const auto merge = [](const std::string& impl, const Tensor& a, const Tensor& la, const Tensor& b, const Tensor& lb) {
    MergeState m;
    m.out_a = a.view;
    m.lse_a = la.view;
    m.out_b = b.view;
    m.lse_b = lb.view;
    gannet_tests::run_here(m, impl);
  };
  MergeState shape;
  Tensor o, l;
  side(1, o, l);
  shape.out_a = shape.out_b = o.view;
  shape.lse_a = shape.lse_b = l.view;
  for (const std::string& impl : gannet_tests::taking(shape)) {
    Tensor a, la, b, lb, c, lc, x, lx, y, ly;
    side(1, a, la);
    side(2, b, lb);
    side(3, c, lc);
    merge(impl, a, la, b, lb);
    merge(impl, a, la, c, lc);  // (a b) c
    side(1, x, lx);
    side(2, b, lb);
    side(3, y, ly);
    merge(impl, y, ly, b, lb);
    merge(impl, y, ly, x, lx);  // (c b) a
    for (int64_t t = 0; t < 9; ++t) {
      for (int64_t h = 0; h < 3; ++h) {
        EXPECT_NEAR(verify::get(la.view, t, h), verify::get(ly.view, t, h), 1e-5) << impl;
        for (int64_t d = 0; d < 64; ++d)
          EXPECT_NEAR(verify::get(a.view, t, h, d), verify::get(y.view, t, h, d), 1e-5) << impl << " row " << t;
      }
    }
  }
}

TEST(MergeState, NanOfARowWithKeysIsKept) {
  MergeState m;
  const Tensor a = make_tensor(DType::kF32, {1, 1, 16});
  const Tensor b = make_tensor(DType::kF32, {1, 1, 16});
  const Tensor la = make_tensor(DType::kF32, {1, 1});
  const Tensor lb = make_tensor(DType::kF32, {1, 1});
  m.out_a = a.view;
  m.out_b = b.view;
  m.lse_a = la.view;
  m.lse_b = lb.view;
  for (const std::string& impl : gannet_tests::taking(m)) {
    verify::fill_normal(a, Rng(1));
    verify::fill_normal(b, Rng(2));
    verify::set(b.view, NAN, 0, 0, 5);
    verify::set(la.view, 1.0f, 0, 0);
    verify::set(lb.view, 1.0f, 0, 0);
    gannet_tests::run_here(m, impl);
    EXPECT_TRUE(std::isnan(verify::get(a.view, 0, 0, 5))) << impl;
    EXPECT_FALSE(std::isnan(verify::get(a.view, 0, 0, 4))) << impl;
  }
}

}  // namespace
