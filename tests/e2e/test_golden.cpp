// Every checkpoint against the reference library's results, as acceptance asks: exact with fp32 caches, and with the
// narrow ones.
#include "model_runs.h"

namespace gannet::e2e {
namespace {

/// Longest prompt of each checkpoint that the oracle takes: plain double loops need a minute for a thousand tokens.
constexpr int64_t kOracleTokens = 100;

void compare_all(const std::string& name, LatentFormat latent, IndexKFormat index, const GoldenCriteria& criteria,
                 const std::string& impl, bool invariant = false, int64_t chunk = 512,
                 QueryPrecision query = QueryPrecision::kF32) {
  ThreadPool pool({.num_threads = 2});
  const Context context{.executor = &pool};
  Checkpoint checkpoint = Checkpoint::open(checkpoint_dir(name));
  const std::vector<GoldenPrompt> prompts = load_golden(checkpoint.directory(), checkpoint.config());
  ASSERT_FALSE(prompts.empty());
  size_t longest = 0;
  for (const GoldenPrompt& p : prompts) longest = std::max(longest, p.ids.size() + p.continuation.size());
  Decoder decoder(context, checkpoint,
                  {.impl = impl,
                   .latent_format = latent,
                   .index_format = index,
                   .num_pages = pages_for(static_cast<int64_t>(longest), 64) + 1,
                   .query = query,
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
    compare_all(GetParam(), LatentFormat::kF32, IndexKFormat::kF32, GoldenCriteria::exact(), impl);
}

TEST_P(Golden, NarrowCachesStayClose) {
  // Dense prefill reads the cache only for what earlier chunks wrote: chunks shorter than the prompts.
  constexpr int64_t kChunk = 64;
  const GoldenCriteria criteria =
      GetParam() == "tiny-dsv32" ? GoldenCriteria::narrow() : GoldenCriteria::narrow_random();
  for (const std::string& impl : implementations(false))
    for (const QueryPrecision query : {QueryPrecision::kF32, QueryPrecision::kBf16})  // bf16 is the command's default
      compare_all(GetParam(), LatentFormat::kBf16, IndexKFormat::kE4m3, criteria, impl, false, kChunk, query);
}

TEST_P(Golden, TheInvariantModeIsExactToo) {
  compare_all(GetParam(), LatentFormat::kF32, IndexKFormat::kF32, GoldenCriteria::exact(),
              implementations(false).front(), true);
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, Golden, testing::ValuesIn(checkpoint_names()), [](const auto& info) {
  std::string name = info.param;
  for (char& c : name)
    if (c == '-') c = '_';
  return name;
});

}  // namespace
}  // namespace gannet::e2e
