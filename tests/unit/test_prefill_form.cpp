// The form of dense prefill: what the estimate must do whatever its figures are, and that both forms, forced or chosen,
// are one attention.
#include "model/prefill_form.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "core/implementation.h"
#include "gannet/gannet.h"
#include "model/compute.h"

namespace gannet {
namespace {

constexpr MlaWidths kV3{.heads = 128, .latent = 512, .rope = 64, .nope = 128, .v = 128};

std::vector<FormSetup> setups() {
  std::vector<FormSetup> all;
  for (const char* impl : {"amx_bf16", "avx512_bf16", "avx2", "portable", "ref"})
    for (const int64_t heads : {1, 16, 128})
      for (const QueryPrecision query : {QueryPrecision::kF32, QueryPrecision::kBf16})
        for (const LatentFormat format : {LatentFormat::kF32, LatentFormat::kBf16, LatentFormat::kE4m3})
          for (const bool library : {false, true}) {
            FormSetup s{.widths = kV3, .query = query, .format = format, .impl = impl, .gemm_library = library};
            s.widths.heads = heads;
            all.push_back(s);
          }
  return all;
}

std::string text(const FormSetup& s) {
  return s.impl + " H=" + std::to_string(s.widths.heads) + (s.query == QueryPrecision::kBf16 ? " bf16 " : " fp32 ") +
         to_string(s.format) + (s.gemm_library ? "" : " no library");
}

/// With the decoder's default capacity.
size_t chunks(int32_t prefix) { return (static_cast<size_t>(prefix) + 2047) / 2048; }

FormCosts costs(const FormSetup& s, int32_t prefix, int32_t rows) {
  const std::vector<int32_t> prefixes = {prefix}, cu = {0, rows};
  return prefill_form_costs(s, {prefixes, cu, chunks(prefix)});
}

PrefillForm choice(const FormSetup& s, int32_t prefix, int32_t rows, PrefillForm asked = PrefillForm::kAuto) {
  const std::vector<int32_t> prefixes = {prefix}, cu = {0, rows};
  return choose_prefill_form(asked, s, {prefixes, cu, chunks(prefix)});
}

constexpr int32_t kRows[] = {1, 2, 4, 8, 15, 16, 17, 31, 64, 100, 256, 257, 1000, 4096, 32768};
constexpr int32_t kPrefixes[] = {0, 1, 63, 64, 500, 1024, 2048, 2049, 4096, 16384, 131072};

TEST(PrefillForm, CostsArePositiveAndGrowWithThePrefix) {
  for (const FormSetup& s : setups())
    for (const int32_t rows : kRows) {
      FormCosts last{};
      for (const int32_t prefix : kPrefixes) {
        const FormCosts c = costs(s, prefix, rows);
        ASSERT_TRUE(std::isfinite(c.expanded) && std::isfinite(c.absorbed)) << text(s);
        ASSERT_GT(c.expanded, last.expanded) << text(s) << " " << rows << " rows, prefix " << prefix;
        ASSERT_GT(c.absorbed, last.absorbed) << text(s) << " " << rows << " rows, prefix " << prefix;
        last = c;
      }
    }
}

TEST(PrefillForm, CostsGrowWithRowsButForTheStepToTheLibrary) {
  // From 16 rows to 17 products pass from the loops to the library, which may be faster for more rows.
  for (const FormSetup& s : setups())
    for (const int32_t prefix : kPrefixes) {
      FormCosts last{};
      for (const int32_t rows : kRows) {
        const FormCosts c = costs(s, prefix, rows);
        if (rows != 17) {
          ASSERT_GT(c.expanded, last.expanded) << text(s) << " " << rows << " rows, prefix " << prefix;
          ASSERT_GT(c.absorbed, last.absorbed) << text(s) << " " << rows << " rows, prefix " << prefix;
        }
        last = c;
      }
    }
}

TEST(PrefillForm, FewRowsBehindALongPrefixAreAbsorbedAndLongPromptsExpanded) {
  for (const FormSetup& s : setups()) {
    // A cached row costs 262,144 flops a head to expand, and 1,536 more a new row to be absorbed.
    for (const int32_t rows : {1, 2, 4, 8})
      for (const int32_t prefix : {1024, 16384, 131072})
        EXPECT_EQ(choice(s, prefix, rows), PrefillForm::kAbsorbed) << text(s) << " " << rows << " of " << prefix;
    EXPECT_EQ(choice(s, 0, 4096), PrefillForm::kExpanded) << text(s);
    EXPECT_EQ(choice(s, 0, 32768), PrefillForm::kExpanded) << text(s);
  }
}

// Behind a prefix, more new rows never turn an expanded step into an absorbed one: what expanding costs is paid once,
// what it saves for each row. Without a prefix the forms are within a few per cent of each other up to some tens of
// rows, and the choice may change more than once.
TEST(PrefillForm, MoreRowsBehindAPrefixTurnToTheExpandedFormOnce) {
  for (const FormSetup& s : setups())
    for (const int32_t prefix : {1024, 4096, 16384, 131072}) {
      bool expanded = false;
      for (const int32_t rows : kRows) {
        const bool now = choice(s, prefix, rows) == PrefillForm::kExpanded;
        EXPECT_TRUE(now || !expanded) << text(s) << " prefix " << prefix << " at " << rows;
        expanded = now;
      }
    }
}

TEST(PrefillForm, AutoIsTheCheaperFormAndAForcedOneIsThatForm) {
  for (const FormSetup& s : setups())
    for (const int32_t prefix : kPrefixes)
      for (const int32_t rows : kRows) {
        const FormCosts c = costs(s, prefix, rows);
        const PrefillForm cheaper = c.absorbed < c.expanded ? PrefillForm::kAbsorbed : PrefillForm::kExpanded;
        EXPECT_EQ(choice(s, prefix, rows), cheaper);
        for (const PrefillForm asked : {PrefillForm::kExpanded, PrefillForm::kAbsorbed})
          EXPECT_EQ(choice(s, prefix, rows, asked), asked);
      }
}

TEST(PrefillForm, CostsOfABatchAreThoseOfItsRequests) {
  // As far as products and chunks are cut alike: rows beyond 16 in each request and no prefix.
  for (const FormSetup& s : setups()) {
    const std::vector<int32_t> prefixes = {0, 0}, cu = {0, 300, 812};
    const FormCosts both = prefill_form_costs(s, {prefixes, cu, 0});
    const FormCosts a = costs(s, 0, 300), b = costs(s, 0, 512);
    EXPECT_NEAR(both.expanded, a.expanded + b.expanded, 1e-9 * both.expanded) << text(s);
    EXPECT_NEAR(both.absorbed, a.absorbed + b.absorbed, 1e-9 * both.absorbed) << text(s);
  }
}

TEST(PrefillForm, OneLongPromptOutweighsAFewRowsBesideIt) {
  // One form a step: 4 rows behind 1,024 alone are absorbed, beside a prompt of 4,096 tokens they are expanded with it.
  for (const FormSetup& s : setups()) {
    const std::vector<int32_t> prefixes = {1024, 0}, cu = {0, 4, 4100};
    EXPECT_EQ(choose_prefill_form(PrefillForm::kAuto, s, {prefixes, cu, 1}), PrefillForm::kExpanded) << text(s);
  }
}

TEST(PrefillForm, DoesNotOverflow) {
  FormSetup s{.widths = kV3, .impl = "avx2"};
  s.widths.heads = 1 << 20;
  const FormCosts c = costs(s, 1 << 30, 1 << 30);
  EXPECT_TRUE(std::isfinite(c.expanded) && std::isfinite(c.absorbed));
  EXPECT_GT(c.expanded, 1e9);  // seconds
  EXPECT_GT(c.absorbed, c.expanded);
}

TEST(PrefillForm, EmptyStepsCostNothing) {
  const FormSetup s{.widths = kV3, .impl = "avx2"};
  const std::vector<int32_t> prefixes = {100}, none = {0, 0};
  const FormCosts c = prefill_form_costs(s, {prefixes, none, 1});
  EXPECT_EQ(c.absorbed, 0.0);
  EXPECT_EQ(choose_prefill_form(PrefillForm::kAuto, s, {}), PrefillForm::kExpanded);  // equal: nothing
}

TEST(PrefillForm, SaysWhereThereIsNoChoice) {
  const Device cpu{}, gpu{DeviceKind::kCuda, 0};
  EXPECT_EQ(only_prefill_form(false, false, cpu).form, PrefillForm::kAuto);
  EXPECT_EQ(only_prefill_form(false, true, cpu).form, PrefillForm::kAbsorbed);
  EXPECT_EQ(only_prefill_form(true, false, cpu).form, PrefillForm::kAbsorbed);
  EXPECT_EQ(only_prefill_form(true, false, gpu).form, PrefillForm::kAbsorbed);
  EXPECT_EQ(only_prefill_form(false, false, gpu).form, PrefillForm::kExpanded);
  for (const OnlyForm& only : {only_prefill_form(false, true, cpu), only_prefill_form(false, false, gpu)}) {
    EXPECT_TRUE(prefill_form_refusal(PrefillForm::kAuto, only).empty());
    EXPECT_TRUE(prefill_form_refusal(only.form, only).empty());
    const PrefillForm other = only.form == PrefillForm::kAbsorbed ? PrefillForm::kExpanded : PrefillForm::kAbsorbed;
    EXPECT_EQ(prefill_form_refusal(other, only).find(std::string("auto, ") + to_string(only.form)), 0u);
  }
}

// ---- the forms themselves -----------------------------------------------------------------------------------------

/// One layer over a paged cache; a step of two requests that extend, with prefixes over several chunks, and one that
/// decodes.
class TwoForms {
 public:
  TwoForms(const std::string& impl, LatentFormat format, QueryPrecision query)
      : compute_(make_compute(context_, {.projector = {.impl = projector_impl(impl)}})) {
    const AttentionConfig config{.arch = AttentionArch::kMla,
                                 .num_heads = static_cast<int32_t>(kW.heads),
                                 .geometry = {512, 64},
                                 .qk_nope_head_dim = 128,
                                 .v_head_dim = 128,
                                 .softmax_scale = 0.0721688f,
                                 .page_size = 64,
                                 .max_context_len = 1024,
                                 .prefix_chunk_capacity = 256,
                                 .plan = {.impl = impl}};
    backend_ = make_attention_backend(context_, config);
    pool_ = std::make_unique<LatentPool>(LatentPoolOptions{.num_layers = 1,
                                                           .format = format,
                                                           .geometry = config.geometry,
                                                           .num_pages = 1 + 3 * kPages,
                                                           .page_size = 64,
                                                           .scale = format == LatentFormat::kE4m3 ? 1.0f : 0.0f});
    backend_->bind(layer_caches(*pool_, nullptr));
    for (int32_t i = 0; i < 3 * kPages; ++i) table_.push_back(3 * kPages - i);
    std::mt19937 random(5);
    std::normal_distribution<float> normal(0.0f, 1.0f);
    const auto fill = [&](std::vector<float>& v, int64_t n, float scale) {
      v.resize(static_cast<size_t>(n));
      for (float& x : v) x = scale * normal(random);
    };
    fill(kv_b_, kW.heads * 256 * 512, 0.04f);
    // Everything that is cached, as rows of one step; the last rows of each request are those of the step under test.
    const std::vector<int32_t> zeros(3, 0);
    std::vector<float> latent, rope;
    const int64_t cached = std::accumulate(std::begin(kLens), std::end(kLens), int64_t{0});
    fill(latent, cached * 512, 1.0f);
    fill(rope, cached * 64, 1.0f);
    backend_->prepare({.seq_lens = kLens, .prefix_lens = zeros, .extend_lens = kLens, .pages = pages()});
    backend_->write(
        0, StepRows::kAll,
        {.latent = view(latent.data(), {cached, 512}), .rope = view(rope.data(), {cached, 64}), .index_k = {}});
    backend_->prepare({.seq_lens = kLens, .prefix_lens = kPrefix, .extend_lens = kExtend, .pages = pages()});
    rows_ = backend_->step().num_rows();
    fill(q_, rows_ * kW.heads * 192, 0.5f);
    // What the expanded form reads of the new rows is what was written, before it was rounded.
    int64_t from = 0;
    for (size_t r = 0; r < 3; ++r) {
      const int64_t n = r < 2 ? kExtend[r] : 1;
      const int64_t first = from + kLens[r] - n;
      latent_.insert(latent_.end(), latent.begin() + first * 512, latent.begin() + (first + n) * 512);
      rope_.insert(rope_.end(), rope.begin() + first * 64, rope.begin() + (first + n) * 64);
      from += kLens[r];
    }
    forms_ = std::make_unique<MlaForms>(*backend_, *compute_, query, kW, seconds_);
  }

  std::vector<float> run(PrefillForm form) {
    std::vector<float> heads(static_cast<size_t>(rows_ * kW.heads * 128), -7.0f);
    const MlaRows x{.layer = 0,
                    .kv_b = {.data = kv_b_.data(), .dtype = DType::kF32, .rows = kW.heads * 256, .cols = 512},
                    .q = q_.data(),
                    .latent = latent_.data(),
                    .rope = rope_.data(),
                    .rope_stride = 64,
                    .heads = heads.data()};
    if (form == PrefillForm::kExpanded) {
      forms_->expanded(x);
      forms_->absorbed(x, StepRows::kDecode, AlreadyWritten{}, AttendAll{});
    } else {
      forms_->absorbed(x, StepRows::kAll, AlreadyWritten{}, AttendAll{});
    }
    return heads;
  }

 private:
  static constexpr MlaWidths kW{.heads = 3, .latent = 512, .rope = 64, .nope = 128, .v = 128};
  static constexpr int32_t kPages = 11;
  static constexpr int32_t kLens[] = {640, 33, 300}, kPrefix[] = {600, 0}, kExtend[] = {40, 33};
  PageTableView pages() const { return PageTableView::padded(view(table_.data(), {3, kPages})); }

  Context context_;
  std::unique_ptr<Compute> compute_;
  std::unique_ptr<AttentionBackend> backend_;
  std::unique_ptr<LatentPool> pool_;
  std::vector<int32_t> table_;
  std::vector<float> kv_b_, q_, latent_, rope_;
  int64_t rows_ = 0;
  double seconds_ = 0.0;
  std::unique_ptr<MlaForms> forms_;
};

TEST(MlaForms, AgreeOverPrefixesChunksAndMixedSteps) {
  for (const ImplementationSet* set : implementation_sets()) {
    if (set->device != DeviceKind::kCpu || !set->compiled || !set->runs_here()) continue;
    struct Case {
      LatentFormat format;
      QueryPrecision query;
      double most;
    };
    // Values of heads reach 3.5. fp32: sums of 512 terms, each rounded to 2^-24, in another order: 3.5 * 512^0.5 *
    // 2^-24 = 5e-6 a product, of which three follow each other. bf16 rows: the absorbed form alone reads the new rows
    // rounded, by 2^-9 / 3^0.5 of their size in the mean, which kv_b sums to 0.04 * 512^0.5 times as much: 1e-3, ten
    // times which none of 21,000 values exceeds. bf16 queries: values and heads of 3.5 are rounded by up to 7e-3
    // besides.
    for (const Case& c :
         {Case{LatentFormat::kF32, QueryPrecision::kF32, 1.5e-5}, Case{LatentFormat::kBf16, QueryPrecision::kF32, 1e-2},
          Case{LatentFormat::kBf16, QueryPrecision::kBf16, 2e-2}}) {
      TwoForms layer(set->name, c.format, c.query);
      const std::vector<float> expanded = layer.run(PrefillForm::kExpanded);
      const std::vector<float> absorbed = layer.run(PrefillForm::kAbsorbed);
      double worst = 0.0, largest = 0.0;
      for (size_t i = 0; i < expanded.size(); ++i) {
        ASSERT_TRUE(std::isfinite(expanded[i]) && std::isfinite(absorbed[i])) << set->name << " " << i;
        worst = std::max(worst, std::abs(double{expanded[i]} - absorbed[i]));
        largest = std::max(largest, std::abs(double{absorbed[i]}));
      }
      std::printf("[ ran      ] %s %s: differ by %.1e of %.2f\n", set->name, to_string(c.format), worst, largest);
      EXPECT_LE(worst, c.most) << set->name << " " << to_string(c.format);
      EXPECT_GT(largest, 0.1) << set->name;
      // Run again, the same bits.
      EXPECT_EQ(
          0, std::memcmp(expanded.data(), layer.run(PrefillForm::kExpanded).data(), expanded.size() * sizeof(float)));
    }
  }
}

}  // namespace
}  // namespace gannet
