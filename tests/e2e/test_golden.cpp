// Every checkpoint against the reference library's results, as acceptance asks: exact with fp32 caches, and with the
// narrow ones.
#include "model_runs.h"

namespace gannet::e2e {
namespace {

/// Longest prompt of each checkpoint that the oracle takes: plain double loops need a minute for a thousand tokens.
constexpr int64_t kOracleTokens = 100;

void compare_all(const std::string& name, LatentFormat latent, IndexKFormat index, const std::string& impl,
                 bool invariant = false, int64_t chunk = 512, QueryPrecision query = QueryPrecision::kF32,
                 bool hadamard = false, PrefillForm form = PrefillForm::kAuto) {
  ThreadPool pool({.num_threads = 2});
  const Context context{.executor = &pool};
  Checkpoint checkpoint = Checkpoint::open(checkpoint_dir(name));
  const std::vector<GoldenPrompt> prompts = load_golden(checkpoint.directory(), checkpoint.config());
  ASSERT_FALSE(prompts.empty());
  const GoldenCriteria criteria = GoldenCriteria::of(prompts, checkpoint.config().is_dsa(), latent, index);
  size_t longest = 0;
  for (const GoldenPrompt& p : prompts) longest = std::max(longest, p.ids.size() + p.continuation.size());
  Decoder decoder(context, checkpoint,
                  {.impl = impl,
                   .latent_format = latent,
                   .latent_scale = latent == LatentFormat::kE4m3 ? 1.0f : 0.0f,
                   .index_format = index,
                   .index_hadamard = hadamard,
                   .num_pages = pages_for(static_cast<int64_t>(longest), 64) + 1,
                   .query = query,
                   .prefill_form = form,
                   .invariant = invariant,
                   .draft = has_mtp(prompts)});
  EXPECT_TRUE(decoder.unknown_tensors().empty()) << decoder.unknown_tensors().front();
  for (const GoldenPrompt& prompt : prompts) {
    if (impl == "ref" && static_cast<int64_t>(prompt.ids.size()) > kOracleTokens) continue;
    const GoldenResult r = compare_golden(decoder, context, {.chunk = chunk, .max_requests = 1}, prompt, criteria);
    for (const GoldenCheck& c : r.checks) {
      std::printf("[ %s %s ] %s: %s: %s\n", name.c_str(), impl.c_str(), r.prompt.c_str(), c.what.c_str(),
                  c.figures.c_str());
      EXPECT_TRUE(c.passed) << name << " " << impl << " " << r.prompt << ": " << c.what << ": " << c.figures;
    }
  }
  for (const auto& [op, ran] : decoder.backend().implementations()) EXPECT_EQ(ran, impl) << op;
}

class Golden : public testing::TestWithParam<std::string> {};

TEST_P(Golden, Fp32CachesAndActivationsAreExact) {
  for (const std::string& impl : implementations(true))
    compare_all(GetParam(), LatentFormat::kF32, IndexKFormat::kF32, impl);
}

TEST_P(Golden, NarrowCachesStayClose) {
  // Dense prefill reads the cache only for what earlier chunks wrote: chunks shorter than the prompts.
  constexpr int64_t kChunk = 64;
  for (const std::string& impl : implementations(false))
    for (const QueryPrecision query : {QueryPrecision::kF32, QueryPrecision::kBf16})  // bf16 is the command's default
      compare_all(GetParam(), LatentFormat::kBf16, IndexKFormat::kE4m3, impl, false, kChunk, query);
}

// Every format that the model's backend binds, on the implementation that is chosen.
TEST_P(Golden, EveryFormatStaysClose) {
  constexpr int64_t kChunk = 64;
  const std::string impl = implementations(false).front();
  const ModelConfig config = load_config(checkpoint_dir(GetParam()));
  for (const LatentFormat latent : latent_formats(config)) {
    if (latent == LatentFormat::kF32 || (latent == LatentFormat::kBf16 && !config.is_dsa())) continue;  // above
    const IndexKFormat index = latent == LatentFormat::kBf16 ? IndexKFormat::kBf16 : IndexKFormat::kE4m3;
    compare_all(GetParam(), latent, index, impl, false, kChunk);
  }
}

TEST_P(Golden, TheInvariantModeIsExactToo) {
  compare_all(GetParam(), LatentFormat::kF32, IndexKFormat::kF32, implementations(false).front(), true);
}

// Whatever auto makes of these small models, both forms are held to the reference, in one step and over chunks.
TEST_P(Golden, EitherFormOfPrefillIsExact) {
  if (load_config(checkpoint_dir(GetParam())).is_dsa()) GTEST_SKIP() << "sparse attention has one form";
  constexpr int64_t kChunk = 64;
  for (const PrefillForm form : {PrefillForm::kExpanded, PrefillForm::kAbsorbed}) {
    for (const std::string& impl : implementations(false)) {
      for (const int64_t chunk : {kChunk, int64_t{512}})
        compare_all(GetParam(), LatentFormat::kF32, IndexKFormat::kF32, impl, false, chunk, QueryPrecision::kF32, false,
                    form);
      for (const QueryPrecision query : {QueryPrecision::kF32, QueryPrecision::kBf16})
        compare_all(GetParam(), LatentFormat::kBf16, IndexKFormat::kE4m3, impl, false, kChunk, query, false, form);
    }
    for (const LatentFormat latent : latent_formats(load_config(checkpoint_dir(GetParam()))))
      compare_all(GetParam(), latent, IndexKFormat::kE4m3, implementations(false).front(), false, kChunk,
                  QueryPrecision::kF32, false, form);
  }
}

// The golden files know no rotation: with exact index keys a pool that rotates selects the same keys up to ties, and
// with e4m3 ones as good a list.
TEST(GoldenHadamard, RotatedIndexKeysSelectTheSame) {
  const std::string impl = implementations(false).front();
  compare_all("tiny-dsv32", LatentFormat::kF32, IndexKFormat::kF32, impl, false, 512, QueryPrecision::kF32, true);
  compare_all("tiny-dsv32", LatentFormat::kBf16, IndexKFormat::kE4m3, impl, false, 512, QueryPrecision::kBf16, true);
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, Golden, testing::ValuesIn(checkpoint_names()), [](const auto& info) {
  std::string name = info.param;
  for (char& c : name)
    if (c == '-') c = '_';
  return name;
});

}  // namespace
}  // namespace gannet::e2e
