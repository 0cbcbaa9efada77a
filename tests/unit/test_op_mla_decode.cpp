#include <cmath>
#include <cstring>
#include <iterator>

#include "op_cases.h"

namespace {

using namespace gannet;
using gannet::verify::make_ints;
using gannet::verify::make_tensor;
using gannet::verify::Paged;
using gannet::verify::Rng;
using gannet::verify::Tensor;

TEST(MlaDecode, AgreesWithTheOracleOnTheGrid) { gannet_tests::expect_grid("mla_decode"); }

struct Problem {
  Paged paged;
  verify::LatentPool pool;
  Tensor q, out, lse;
  MlaDecode params;
  Problem(const verify::PagedSpec& spec, DType dtype, LatentFormat format, int64_t heads)
      : paged(spec), pool(make_latent_pool(paged, format, 3)) {
    q = make_tensor(dtype, {paged.num_rows, heads, 576});
    verify::fill_normal(q, Rng(4));
    out = make_tensor(DType::kF32, {paged.num_rows, heads, 512});
    lse = make_tensor(DType::kF32, {paged.num_rows, heads});
    params.q = q.view;
    params.cache = pool.view;
    params.pages = paged.table();
    params.rows = paged.rows();
    params.out = out.view;
    params.lse = lse.view;
    params.softmax_scale = 0.0625f;
  }
};

TEST(MlaDecode, NanOfAVisibleKeyReachesTheRowsThatSeeIt) {
  // In the rope part alone, which only the score reads: a kernel that clamps scores would hide it.
  // Of rows with a scale each, in the scale, which score and weight are multiplied by.
  for (const auto& [dtype, format] : {std::pair{DType::kBf16, LatentFormat::kBf16},
                                      {DType::kF32, LatentFormat::kF32},
                                      {DType::kBf16, LatentFormat::kE4m3},
                                      {DType::kBf16, LatentFormat::kPacked656},
                                      {DType::kBf16, LatentFormat::kE4m3PerToken},
                                      {DType::kF32, LatentFormat::kE4m3PerToken}}) {
    SCOPED_TRACE(to_string(format));
    Problem p({.seq_lens = {100, 70}, .q_len = 2}, dtype, format, 4);
    const LatentCacheView& cache = p.pool.view;
    const int64_t slot = p.paged.slot(0, 99);
    std::byte* key = cache.row(slot, latent_row_bytes(format, {}));
    switch (format) {
      case LatentFormat::kF32: reinterpret_cast<float*>(key)[530] = NAN; break;
      case LatentFormat::kBf16: reinterpret_cast<Bf16*>(key)[530] = Bf16::from_float(NAN); break;
      case LatentFormat::kE4m3: key[530] = std::byte{0x7F}; break;
      case LatentFormat::kPacked656: reinterpret_cast<Bf16*>(key + 512 + 4 * 4)[18] = Bf16::from_float(NAN); break;
      case LatentFormat::kE4m3PerToken:
        reinterpret_cast<float*>(cache.row(slot - slot % cache.page_size, 0) +
                                 cache.page_size * 512)[slot % cache.page_size] = NAN;
        break;
    }
    for (const std::string& impl : gannet_tests::taking(p.params)) {
      gannet_tests::run_here(p.params, impl);
      for (int64_t row = 0; row < 4; ++row) {  // row 1 sees position 99, row 0 of the same request does not
        for (int64_t h = 0; h < 4; ++h) {
          EXPECT_EQ(std::isnan(verify::get(p.lse.view, row, h)), row == 1) << impl << " row " << row;
          for (int64_t d = 0; d < 512; ++d)
            ASSERT_EQ(std::isnan(verify::get(p.out.view, row, h, d)), row == 1)
                << impl << " row " << row << " value " << d;
        }
      }
    }
  }
}

TEST(MlaDecode, PackedValuesAreTheProductsOfCodesAndScalesRoundedOnceAtMost) {
  // A single key has the weight 1, so its values come out as they were converted: all finite codes, with scales that
  // are powers of two up to where products are no normal numbers any more, just beyond in the other direction, and
  // none.
  const float scales[] = {1.0f,   0.5f,        0x1p-117f,      0x1p119f,        0.3f,    3.1415927f,
                          -0.25f, 0x1.8p-117f, 0x1.0002p-117f, 0x1.fffffep118f, 0x1p-7f, 0x1.fffffep-1f};
  constexpr int kGroups = 4, kGroup = 128, kSets = std::size(scales) / kGroups;
  Problem p({.seq_lens = std::vector<int32_t>(2 * kSets, 1)}, DType::kBf16, LatentFormat::kPacked656, 16);
  std::memset(p.q.view.data, 0, static_cast<size_t>(2 * kSets * 16 * 576) * sizeof(Bf16));
  const auto code = [](int request, int column) {
    const int c = request % 2 * kGroup + column % kGroup;
    return static_cast<uint8_t>(c % kGroup == 127 ? 0 : c);
  };
  for (int r = 0; r < 2 * kSets; ++r) {
    std::byte* key = p.pool.view.row(p.paged.slot(r, 0), latent_row_bytes(LatentFormat::kPacked656, {}));
    for (int d = 0; d < kGroups * kGroup; ++d) key[d] = std::byte{code(r, d)};
    std::memcpy(key + kGroups * kGroup, scales + r / 2 * kGroups, kGroups * sizeof(float));
  }
  for (const std::string& impl : gannet_tests::taking(p.params)) {
    gannet_tests::run_here(p.params, impl);
    // There a scale is part of the weights and comes back from its logarithm, up to 149, which fp32 holds to 2^-17.
    const float slack = impl == "cuda_sm90" ? 0x1p-16f : 0.0f;
    for (int r = 0; r < 2 * kSets; ++r) {
      for (int d = 0; d < kGroups * kGroup; ++d) {
        const float scale = scales[r / 2 * kGroups + d / kGroup];
        const float exact = E4m3{code(r, d)}.to_float() * scale;
        const auto got = static_cast<float>(verify::get(p.out.view, r, 15, d));
        if (!(std::fabs(got - exact) <= slack * std::fabs(exact))) {
          ASSERT_EQ(got, Bf16::from_float(exact).to_float())
              << impl << ": code " << int{code(r, d)} << " times " << scale;
        }
      }
    }
  }
}

TEST(MlaDecode, HugeQueriesStayFinite) {
  // Known fault BL-33: absorbed queries up to 1e6. The softmax then picks one key.
  for (const auto& [dtype, format] :
       {std::pair{DType::kBf16, LatentFormat::kBf16}, {DType::kF32, LatentFormat::kF32}}) {
    Problem p({.seq_lens = {300, 1}}, dtype, format, 3);
    verify::fill_normal(p.q, Rng(4), 3e5);
    const verify::Outputs want = verify::run(p.params, {.impl = "ref"});
    const std::vector<float> wanted = want.floats("lse");
    for (const std::string& impl : gannet_tests::taking(p.params)) {
      const verify::Outputs got = verify::run(p.params, {.impl = impl});
      for (const float x : got.floats("out")) ASSERT_TRUE(std::isfinite(x)) << impl;
      const std::vector<float> lse = got.floats("lse");
      for (size_t i = 0; i < lse.size(); ++i) EXPECT_NEAR(lse[i], wanted[i], 1e-5 * std::fabs(wanted[i])) << impl;
    }
  }
}

TEST(MlaDecode, RequestsMayShareTheirPages) {
  // Known fault BL-18: more tokens between the requests than the pool has.
  Problem p({.seq_lens = {100}, .q_len = 1, .page_size = 16}, DType::kBf16, LatentFormat::kBf16, 4);
  for (const std::string& impl : gannet_tests::taking(p.params, false, true)) {
    const verify::Outputs alone = verify::run(p.params, {.impl = impl});
    MlaDecode many = p.params;
    const Tensor rows = make_ints(std::vector<int32_t>(8, 0));
    const Tensor lens = make_ints(std::vector<int32_t>(8, 100));
    const Tensor out = make_tensor(DType::kF32, {8, 4, 512});
    const Tensor lse = make_tensor(DType::kF32, {8, 4});
    many.pages.row_indices = rows.view;
    many.rows.seq_lens = lens.view;
    many.q.shape[0] = 8;
    many.q.stride[0] = 0;  // one query for all
    many.out = out.view;
    many.lse = lse.view;
    const verify::Outputs all = verify::run(many, {.impl = impl});
    const auto& part = alone.of("out");
    for (size_t i = 0; i < 8; ++i)
      EXPECT_EQ(std::memcmp(all.of("out").data() + i * part.size(), part.data(), part.size()), 0)
          << impl << " request " << i;
  }
}

TEST(MlaDecode, RowsBeyondTheTableSeeWhatItReaches) {
  // Known fault BL-17: the last draft rows of a request near the end of its table.
  verify::PagedSpec spec{.seq_lens = {190}, .q_len = 1};
  spec.spare_columns = 0;
  Problem whole(spec, DType::kBf16, LatentFormat::kBf16, 2);
  MlaDecode p = whole.params;
  const Tensor lens = make_ints({128});
  const Tensor q = make_tensor(DType::kBf16, {4, 2, 576});
  verify::fill_normal(q, Rng(4));
  const Tensor out = make_tensor(DType::kF32, {4, 2, 512});
  p.pages.pages.shape[1] = 2;  // 128 tokens
  p.rows.seq_lens = lens.view;
  p.rows.q_len = 4;
  p.rows.bound = RowBound::kCausalFromFirst;
  p.q = q.view;
  p.out = out.view;
  p.lse = {};
  // Each row sees all 128 tokens and no more: what a uniform block of 128 says in so many words.
  MlaDecode same = p;
  same.rows.bound = RowBound::kUniformBlock;
  std::vector<std::string> names = gannet_tests::taking(p);
  names.push_back("ref");
  for (const std::string& impl : names)
    EXPECT_EQ(verify::run(p, {.impl = impl}), verify::run(same, {.impl = impl})) << impl;
}

}  // namespace
