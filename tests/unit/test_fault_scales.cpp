// Known faults of kinds B (what an LSE is), K (scales and ranges) and L (numbers of heads).
#include "fault_problems.h"

namespace {

using namespace gannet;
using namespace gannet_tests;
using gannet::verify::make_ints;
using gannet::verify::make_tensor;
using gannet::verify::Rng;
using gannet::verify::Tensor;

// With one key an LSE is the score itself, and tells its base: s * q.k, not 1.44 times that (spec 2.7).
TEST(Faults, BL06_TheLseOfOneKeyIsItsScore) {
  constexpr int64_t kHeads = 3;
  for (const AbsorbedFormat& f : kAbsorbedFormats) {
    const DecodeProblem d({.seq_lens = {1, 1}}, f, kHeads);
    std::vector<double> scores;
    for (int64_t row = 0; row < 2; ++row) {
      const Tensor slot = make_ints({static_cast<int32_t>(d.paged.slot(row, 0))});
      const Tensor c = make_tensor(DType::kF32, {1, 512}), r = make_tensor(DType::kF32, {1, 64});
      const verify::Outputs key = verify::run(
          LatentGather{.slots = slot.view, .cache = d.pool.view, .latent = c.view, .rope = r.view}, {.impl = "ref"});
      std::vector<float> x = key.floats("latent");
      const std::vector<float> rope = key.floats("rope");
      x.insert(x.end(), rope.begin(), rope.end());
      for (int64_t h = 0; h < kHeads; ++h) {
        double dot = 0.0;
        for (int64_t i = 0; i < 576; ++i)
          dot += static_cast<double>(verify::get(d.q.view, row, h, i)) * x[static_cast<size_t>(i)];
        scores.push_back(static_cast<double>(kSoftmaxScale) * d.params.q_scale * dot);
      }
    }
    const auto expect_scores = [&](const verify::Outputs& got, const std::string& what) {
      const std::vector<float> lse = got.floats("lse");
      const std::vector<float> largest = d.params.max_logits.given() ? got.floats("max_logits") : lse;
      for (size_t i = 0; i < scores.size(); ++i) {
        EXPECT_NEAR(lse[i], scores[i], verify::lse_tolerance(precision_of(f, 1), scores[i])) << what;
        EXPECT_NEAR(largest[i], scores[i], verify::lse_tolerance(precision_of(f, 1), scores[i])) << what;
      }
    };
    for (const std::string& impl : takers(d.params, name_of(f)))
      expect_scores(verify::run(d.params, {.impl = impl}), impl + " " + name_of(f));
    const SparseProblem s(d, 4);
    for (const std::string& impl : takers(s.params, name_of(f)))
      expect_scores(verify::run(s.params, {.impl = impl}), impl + " lists, " + name_of(f));
  }
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    const Tensor q = make_tensor(dtype, {1, kHeads, 96}), k = make_tensor(dtype, {1, kHeads, 96}),
                 v = make_tensor(dtype, {1, kHeads, 32}), out = make_tensor(DType::kF32, {1, kHeads, 32}),
                 lse = make_tensor(DType::kF32, {1, kHeads}), cu = make_ints({0, 1});
    fill_normal(q, Rng(1));
    fill_normal(k, Rng(2));
    fill_normal(v, Rng(3));
    RaggedPrefill p;
    p.q = q.view;
    p.k = k.view;
    p.v = v.view;
    p.cu_q_lens = p.cu_kv_lens = cu.view;
    p.out = out.view;
    p.lse = lse.view;
    p.softmax_scale = 0.25f;
    for (const std::string& impl : takers(p, to_string(dtype))) {
      const std::vector<float> got = verify::run(p, {.impl = impl}).floats("lse");
      for (int64_t h = 0; h < kHeads; ++h) {
        double dot = 0.0;
        for (int64_t i = 0; i < 96; ++i)
          dot += static_cast<double>(verify::get(q.view, 0, h, i)) * verify::get(k.view, 0, h, i);
        EXPECT_NEAR(got[static_cast<size_t>(h)], 0.25 * dot, 1e-4) << impl;
      }
    }
  }
}

/// Rows [n, 576] in a pool of e4m3 (or another format) with a scale, read back as fp32, and attended.
struct Scaled {
  verify::Paged paged{verify::PagedSpec{.seq_lens = {80}}};
  std::shared_ptr<verify::Buffer> memory;
  LatentCacheView cache;
  Tensor slots, q, out, lse, c, r;

  Scaled(LatentFormat format, float scale) {
    cache.format = format;
    cache.scale = scale;
    cache.num_pages = paged.num_pages;
    cache.page_stride_bytes = 64 * latent_row_bytes(format, {});
    memory = std::make_shared<verify::Buffer>(static_cast<size_t>(cache.num_pages * cache.page_stride_bytes));
    cache.data = memory->data();
    std::vector<int32_t> list;
    for (int32_t t = 0; t < 80; ++t) list.push_back(static_cast<int32_t>(paged.slot(0, t)));
    slots = make_ints(list);
    q = make_tensor(DType::kF32, {1, 2, 576});
    out = make_tensor(DType::kF32, {1, 2, 512});
    lse = make_tensor(DType::kF32, {1, 2});
    c = make_tensor(DType::kF32, {80, 512});
    r = make_tensor(DType::kF32, {80, 64});
    fill_normal(q, Rng(1));
  }
  /// Writes rows times `factor` with `impl`.
  void write(const std::string& impl, float factor) {
    const Tensor x = make_tensor(DType::kF32, {80, 512}), y = make_tensor(DType::kF32, {80, 64});
    fill_normal(x, Rng(2));
    fill_normal(y, Rng(3));
    for (int64_t t = 0; t < 80; ++t) {
      for (int64_t d = 0; d < 512; ++d) verify::set(x.view, verify::get(x.view, t, d) * factor, t, d);
      for (int64_t d = 0; d < 64; ++d) verify::set(y.view, verify::get(y.view, t, d) * factor, t, d);
    }
    const verify::Outputs written =
        verify::run(LatentWrite{.latent = x.view, .rope = y.view, .slots = slots.view, .cache = cache}, {.impl = impl});
    std::memcpy(memory->data(), written.of("cache").data(), memory->size());
  }
  MlaDecode decode(float softmax_scale) const {
    MlaDecode p;
    p.q = q.view;
    p.cache = cache;
    p.pages = paged.table();
    p.rows = paged.rows();
    p.out = out.view;
    p.lse = lse.view;
    p.softmax_scale = softmax_scale;
    return p;
  }
  SparseAttention sparse(float softmax_scale) const {
    SparseAttention p;
    p.q = q.view;
    p.cache = cache;
    p.topk_slots = view(slots.view.ptr<int32_t>(), {1, 80});
    p.out = out.view;
    p.lse = lse.view;
    p.softmax_scale = softmax_scale;
    return p;
  }
  LatentGather gather() const { return {.slots = slots.view, .cache = cache, .latent = c.view, .rope = r.view}; }
};

// Rows s * y in a pool of scale s hold the codes of y in a pool of scale 1: scores and values are s times those of it,
// once each, and a gather gives s * y.
TEST(Faults, BL32_OneScaleForScoresAndValues) {
  constexpr float kPlain = 0.0625f;
  for (const float scale : {0.5f, 2.0f, 0.0123f}) {
    // A product with a power of two is exact; else codes next to a boundary may differ, by an eighth of a value each.
    const bool exact = scale != 0.0123f;
    Scaled one(LatentFormat::kE4m3, 1.0f), scaled(LatentFormat::kE4m3, scale);
    one.write("ref", 1.0f);
    const auto compare = [&](const auto& p_one, const auto& p_scaled, const std::string& impl) {
      const verify::Outputs want = verify::run(p_one, {.impl = impl}), got = verify::run(p_scaled, {.impl = impl});
      std::vector<float> expected = want.floats("out");
      for (float& x : expected) x *= scale;
      expect_lines_close(expected, got.floats("out"), 512, exact ? 2e-6 : 2e-2, impl + " out");
      for (size_t h = 0; h < 2; ++h)
        EXPECT_NEAR(got.floats("lse")[h], want.floats("lse")[h], exact ? 1e-5 : 2e-2) << impl;
    };
    for (const std::string& writer :
         takers(LatentWrite{.latent = one.c.view, .rope = one.r.view, .slots = one.slots.view, .cache = one.cache})) {
      scaled.write(writer, scale);
      if (exact) {
        EXPECT_EQ(std::memcmp(scaled.memory->data(), one.memory->data(), one.memory->size()), 0) << writer;
      }
      for (const std::string& impl : takers(scaled.decode(kPlain / scale)))
        compare(one.decode(kPlain), scaled.decode(kPlain / scale), impl);
      for (const std::string& impl : takers(scaled.sparse(kPlain / scale)))
        compare(one.sparse(kPlain), scaled.sparse(kPlain / scale), impl);
      for (const std::string& impl : takers(scaled.gather())) {
        std::vector<float> want = verify::run(one.gather(), {.impl = "ref"}).floats("latent");
        for (float& x : want) x *= scale;
        expect_lines_close(want, verify::run(scaled.gather(), {.impl = impl}).floats("latent"), 512, exact ? 0.0 : 2e-2,
                           impl);
      }
    }
  }
  // Formats without such a scale do not look at it.
  for (const LatentFormat format :
       {LatentFormat::kBf16, LatentFormat::kF32, LatentFormat::kPacked656, LatentFormat::kE4m3PerToken}) {
    Scaled plain(format, 0.0f), other(format, 0.5f);
    plain.write("ref", 1.0f);
    for (const std::string& impl : takers(
             LatentWrite{.latent = plain.c.view, .rope = plain.r.view, .slots = plain.slots.view, .cache = plain.cache},
             to_string(format))) {
      other.write(impl, 1.0f);
      EXPECT_EQ(std::memcmp(plain.memory->data(), other.memory->data(), plain.memory->size()), 0) << impl;
    }
    for (const std::string& impl : takers(plain.decode(kPlain), to_string(format)))
      EXPECT_EQ(verify::run(plain.decode(kPlain), {.impl = impl}), verify::run(other.decode(kPlain), {.impl = impl}))
          << impl;
    for (const std::string& impl : takers(plain.gather(), to_string(format)))
      EXPECT_EQ(verify::run(plain.gather(), {.impl = impl}), verify::run(other.gather(), {.impl = impl})) << impl;
    for (const std::string& impl : takers(plain.sparse(kPlain), to_string(format)))
      EXPECT_EQ(verify::run(plain.sparse(kPlain), {.impl = impl}), verify::run(other.sparse(kPlain), {.impl = impl}))
          << impl;
  }
  // Missing, zero, negative, not finite: refused wherever such a pool is read or written.
  for (const float bad : {0.0f, -1.0f, INFINITY, NAN}) {
    const Scaled s(LatentFormat::kE4m3, bad);
    EXPECT_THROW(OpPlan<MlaDecode>(Context{}, s.decode(kPlain)), Error);
    EXPECT_THROW(OpPlan<SparseAttention>(Context{}, s.sparse(kPlain)), Error);
    EXPECT_THROW(OpPlan<LatentGather>(Context{}, s.gather()), Error);
    EXPECT_THROW(
        OpPlan<LatentWrite>(Context{},
                            LatentWrite{.latent = s.c.view, .rope = s.r.view, .slots = s.slots.view, .cache = s.cache}),
        Error);
  }
}

// Absorbed queries up to 1e6, which no half precision holds: finite, and the key with the largest score.
TEST(Faults, BL33_HugeQueries) {
  for (const AbsorbedFormat& f : kAbsorbedFormats) {
    DecodeProblem d({.seq_lens = {200, 3}}, f, 2);
    verify::fill_normal(d.q, Rng(4), 3e5);
    const SparseProblem s(d, 200);
    const auto expect_finite = [&](const auto& p) {
      const std::vector<float> want = verify::run(p, {.impl = "ref"}).floats("lse");
      for (const std::string& impl : takers(p, name_of(f))) {
        const verify::Outputs got = verify::run(p, {.impl = impl});
        for (const float x : got.floats("out")) ASSERT_TRUE(std::isfinite(x)) << impl;
        const std::vector<float> lse = got.floats("lse");
        // Keys may be rounded to bf16 on the way.
        const double tolerance = precision_of(f, 1).fp32 || f.cache == LatentFormat::kBf16 ? 1e-5 : verify::kUnitBf16;
        for (size_t i = 0; i < lse.size(); ++i) EXPECT_NEAR(lse[i], want[i], tolerance * std::fabs(want[i])) << impl;
      }
    };
    expect_finite(d.params);
    expect_finite(s.params);
  }
}

/// The first `heads` heads of a view [rows, 128, ...], whose other heads stay where they are.
TensorView heads_of(TensorView v, int64_t heads) {
  v.shape[1] = heads;
  return v;
}

// Heads of a rank: 1 to 20 and more are a slice of 128, the heads behind them hold NaN and are not written to. run()
// looks at the bytes between the rows.
TEST(Faults, BL34_AnyNumberOfHeads) {
  for (const AbsorbedFormat& f : kAbsorbedFormats) {
    DecodeProblem all({.seq_lens = {70, 3}}, f, 128);
    const SparseProblem lists(all, 70);
    DecodeProblem some({.seq_lens = {70, 3}}, f, 128);  // its queries lose their last heads
    for (const auto& impls = takers(all.params, name_of(f), true); const std::string& impl : impls) {
      const verify::Outputs whole = verify::run(all.params, {.impl = impl});
      const bool takes_lists = takes(impl, lists.params);
      const verify::Outputs whole_lists = takes_lists ? verify::run(lists.params, {.impl = impl}) : verify::Outputs{};
      for (const int64_t heads : {1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 13, 15, 16, 17, 19, 20, 32, 64, 96}) {
        if (kSanitized && heads > 8 && heads != 12 && heads != 20) continue;
        fill_normal(some.q, Rng(4));
        const int64_t element = static_cast<int64_t>(size_of(f.q));
        for (int64_t row = 0; row < 2; ++row)
          std::memset(static_cast<std::byte*>(some.q.view.data) + (row * 128 + heads) * 576 * element, 0xFF,
                      static_cast<size_t>((128 - heads) * 576 * element));
        MlaDecode p = some.params;
        p.q = heads_of(p.q, heads);
        p.out = heads_of(p.out, heads);
        p.lse = heads_of(p.lse, heads);
        if (p.max_logits.given()) p.max_logits = heads_of(p.max_logits, heads);
        const auto expect_slice = [&](const verify::Outputs& got, const verify::Outputs& want,
                                      const std::string& what) {
          EXPECT_EQ(got.fault, "") << what;
          const std::vector<float> o = got.floats("out"), w = want.floats("out"), lo = got.floats("lse"),
                                   lw = want.floats("lse");
          for (size_t row = 0; row < 2; ++row) {
            for (size_t h = 0; h < static_cast<size_t>(heads); ++h) {
              ASSERT_EQ(lo[row * static_cast<size_t>(heads) + h], lw[row * 128 + h]) << what << " head " << h;
              ASSERT_EQ(std::memcmp(&o[(row * static_cast<size_t>(heads) + h) * 512], &w[(row * 128 + h) * 512], 2048),
                        0)
                  << what << " head " << h << " of " << heads;
            }
          }
        };
        expect_slice(verify::run(p, {.impl = impl}), whole, impl + " " + name_of(f));
        if (!takes_lists) continue;
        SparseAttention s = lists.params;
        s.q = p.q;
        s.out = p.out;
        s.lse = p.lse;
        s.max_logits = p.max_logits;
        expect_slice(verify::run(s, {.impl = impl}), whole_lists, impl + " lists, " + name_of(f));
      }
    }
  }
}

// Narrow caches are as right as wide ones at every number of heads: both against the values that they hold.
TEST(Faults, BL35_NarrowCachesAtEveryNumberOfHeads) {
  for (const AbsorbedFormat& f : kAbsorbedFormats) {
    if (f.q == DType::kF32) continue;
    for (int64_t heads = 1; heads <= 20; ++heads) {
      const DecodeProblem d({.seq_lens = {40, 3}}, f, heads);
      const std::vector<float> want = verify::run(d.params, {.impl = "ref", .fp32_outputs = true}).floats("out");
      for (const std::string& impl : takers(d.params, name_of(f)))
        expect_lines_close(want, verify::run(d.params, {.impl = impl}).floats("out"), 512,
                           verify::attention_tolerance(precision_of(f, 40, impl)), impl + " " + name_of(f));
    }
  }
}

}  // namespace
