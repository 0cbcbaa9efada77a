// Known faults of kinds A (rows without keys) and O (empty batches).
#include "fault_problems.h"

namespace {

using namespace gannet;
using namespace gannet_tests;
using gannet::verify::make_ints;
using gannet::verify::make_tensor;
using gannet::verify::Rng;
using gannet::verify::Tensor;

bool is_empty_line(const std::vector<float>& out, const std::vector<float>& lse, size_t line) {
  const size_t width = out.size() / lse.size();
  for (size_t d = line * width; d < (line + 1) * width; ++d) {
    if (out[d] != 0.0f) return false;
  }
  return lse[line] == -INFINITY;
}

// 8 causal rows and 5 keys: rows 0 to 2 see nothing, row 3 sees one key and is its value exactly.
TEST(Faults, BL04_CausalRowsAboveTheFirstKeyAreEmpty) {
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    constexpr int64_t kHeads = 3;
    const Tensor q = make_tensor(dtype, {8, kHeads, 192});
    const Tensor k = make_tensor(dtype, {5, kHeads, 128});
    const Tensor k_rope = make_tensor(dtype, {5, 64});
    const Tensor v = make_tensor(dtype, {5, kHeads, 128});
    fill_normal(q, Rng(1));
    fill_normal(k, Rng(2));
    fill_normal(k_rope, Rng(3));
    fill_normal(v, Rng(4));
    const Tensor cu_q = make_ints({0, 8});
    const Tensor cu_kv = make_ints({0, 5});
    RaggedPrefill p;
    p.q = q.view;
    p.k = k.view;
    p.k_rope = k_rope.view;
    p.v = v.view;
    p.cu_q_lens = cu_q.view;
    p.cu_kv_lens = cu_kv.view;
    const Tensor out = make_tensor(DType::kF32, {8, kHeads, 128});
    const Tensor lse = make_tensor(DType::kF32, {8, kHeads});
    p.out = out.view;
    p.lse = lse.view;
    p.softmax_scale = 0.1f;
    for (const std::string& impl : takers(p)) {
      const verify::Outputs got = verify::run(p, {.impl = impl});
      EXPECT_EQ(got.fault, "");
      const std::vector<float> o = got.floats("out");
      const std::vector<float> l = got.floats("lse");
      for (size_t line = 0; line < 3 * kHeads; ++line) EXPECT_TRUE(is_empty_line(o, l, line)) << impl << " " << line;
      for (int64_t h = 0; h < kHeads; ++h) {
        EXPECT_TRUE(std::isfinite(l[static_cast<size_t>(3 * kHeads + h)])) << impl;
        for (int64_t d = 0; d < 128; ++d)
          ASSERT_EQ(o[static_cast<size_t>((3 * kHeads + h) * 128 + d)], verify::get(v.view, 0, h, d)) << impl;
      }
    }
  }
}

// A whole batch without work, and one in which a few requests have some, around sizes of planners.
TEST(Faults, BL05_BatchesWithoutWork) {
  for (const size_t batch : {1, 31, 32, 33, 64}) {
    for (const bool mixed : {false, true}) {
      std::vector<int32_t> lens(batch, 0);
      if (mixed)
        for (size_t i = batch % 2; i < batch; i += 5) lens[i] = static_cast<int32_t>(7 + i);
      for (const int32_t q_len : {1, 3}) {
        const verify::PagedSpec spec{.seq_lens = lens, .q_len = q_len};
        const auto rows = static_cast<int64_t>(batch) * q_len;
        for (const IndexerFormat& f : kIndexerFormats) {
          const IndexProblem s(spec, f, 2, 16);
          for (const std::string& impl : takers(s.scores)) {
            const verify::Outputs got = verify::run(s.scores, {.impl = impl});
            EXPECT_EQ(got.fault, "");
            for (int64_t r = 0; r < rows; ++r) {
              if (s.paged.keys_of_row[static_cast<size_t>(r)] > 0) continue;
              for (const std::byte b : row_bytes(got, "logits", r, rows)) ASSERT_EQ(b, std::byte{0xFF}) << impl;
            }
          }
          for (const std::string& impl : takers(s.select)) {
            const verify::Outputs got = verify::run(s.select, {.impl = impl});
            EXPECT_EQ(got.fault, "");
            const std::vector<int32_t> counts = got.ints("topk_lens"), chosen = got.ints("topk_slots");
            for (int64_t r = 0; r < rows; ++r) {
              const auto n = static_cast<int32_t>(s.paged.keys_of_row[static_cast<size_t>(r)]);
              ASSERT_EQ(counts[static_cast<size_t>(r)], std::min(n, 16)) << impl;
              for (int32_t c = 0; c < 16; ++c)
                ASSERT_EQ(chosen[static_cast<size_t>(r * 16 + c)] == -1, c >= n) << impl << " row " << r;
            }
          }
        }
        for (const AbsorbedFormat& f : kAbsorbedFormats) {
          const DecodeProblem d(spec, f, 1);
          for (const std::string& impl : takers(d.params)) {
            const verify::Outputs got = verify::run(d.params, {.impl = impl});
            EXPECT_EQ(got.fault, "");
            const std::vector<float> out = got.floats("out"), lse = got.floats("lse");
            for (int64_t r = 0; r < rows; ++r)
              ASSERT_EQ(is_empty_line(out, lse, static_cast<size_t>(r)),
                        d.paged.keys_of_row[static_cast<size_t>(r)] == 0)
                  << impl << " row " << r;
          }
        }
      }
    }
  }
}

template <class Params>
void expect_nothing_happens(const Params& p) {
  std::vector<std::string> names = takers(p);
  names.emplace_back("ref");
  for (const std::string& impl : names) {
    const verify::Outputs got = verify::run(p, {.impl = impl, .num_workers = 2});
    EXPECT_EQ(got.fault, "") << impl;
    for (const auto& bytes : got.bytes) EXPECT_TRUE(bytes.empty()) << Params::kName << " " << impl;
  }
}

// No request at all: every operation returns at once, and touches nothing.
TEST(Faults, BL40_EmptyBatches) {
  for (const int32_t q_len : {1, 4}) {
    const verify::PagedSpec none{.seq_lens = {}, .q_len = q_len};
    for (const AbsorbedFormat& f : kAbsorbedFormats) {
      const DecodeProblem d(none, f, 4);
      expect_nothing_happens(d.params);
      expect_nothing_happens(SparseProblem(d, 8).params);
    }
    for (const IndexerFormat& f : kIndexerFormats) {
      const IndexProblem s(none, f, 4, 8);
      expect_nothing_happens(s.scores);
      expect_nothing_happens(s.select);
    }
  }
  const Tensor no_ints = make_ints({});
  const Tensor zero = make_ints({0});
  const Tensor no_rows = make_tensor(DType::kF32, {0, 2, 128});
  const Tensor no_lse = make_tensor(DType::kF32, {0, 2});
  RaggedPrefill prefill;
  prefill.q = prefill.k = prefill.v = prefill.out = no_rows.view;
  prefill.cu_q_lens = prefill.cu_kv_lens = zero.view;
  prefill.softmax_scale = 0.1f;
  expect_nothing_happens(prefill);
  MergeState merge;
  merge.out_a = merge.out_b = no_rows.view;
  merge.lse_a = merge.lse_b = no_lse.view;
  expect_nothing_happens(merge);
  const Tensor no_scores = make_tensor(DType::kF32, {0, 10});
  const Tensor no_list = make_tensor(DType::kI32, {0, 4});
  TopK topk;
  topk.logits = no_scores.view;
  topk.lens = topk.counts = no_ints.view;
  topk.positions = no_list.view;
  expect_nothing_happens(topk);
  const Tensor table = make_tensor(DType::kF32, {4, 64});
  Rope rope;
  rope.x = no_rows.view;
  rope.positions = no_ints.view;
  rope.cos_sin = table.view;
  expect_nothing_happens(rope);
  // Writers without rows leave the cache as it is; readers have nothing to fill.
  const Tensor c = make_tensor(DType::kF32, {0, 512});
  const Tensor r = make_tensor(DType::kF32, {0, 64});
  const Tensor k = make_tensor(DType::kF32, {0, 128});
  for (const AbsorbedFormat& f : kAbsorbedFormats) {
    const DecodeProblem d({.seq_lens = {3}}, f, 1);
    LatentWrite w{.latent = c.view, .rope = r.view, .slots = no_ints.view, .cache = d.pool.view};
    for (const std::string& impl : takers(w)) {
      const verify::Outputs got = verify::run(w, {.impl = impl});
      EXPECT_EQ(got.fault, "");
      EXPECT_EQ(std::memcmp(got.of("cache").data(), d.pool.view.data, got.of("cache").size()), 0) << impl;
    }
    expect_nothing_happens(LatentGather{.slots = no_ints.view, .cache = d.pool.view, .latent = c.view, .rope = r.view});
  }
  for (const IndexerFormat& f : kIndexerFormats) {
    const IndexProblem s({.seq_lens = {3}}, f, 1, 4);
    IndexKWrite w{.k = k.view, .slots = no_ints.view, .cache = s.pool.view};
    for (const std::string& impl : takers(w)) {
      const verify::Outputs got = verify::run(w, {.impl = impl});
      EXPECT_EQ(std::memcmp(got.of("cache").data(), s.pool.view.data, got.of("cache").size()), 0) << impl;
    }
    expect_nothing_happens(IndexKGather{.slots = no_ints.view, .cache = s.pool.view, .k = k.view});
  }
}

}  // namespace
