// Whole checkpoints on a CUDA device against the reference library's results, MTP layer included, and decode steps as
// graphs against the same steps launched kernel by kernel. Skipped, with the reason, where there is no device.
#include <cstring>

#include "../e2e/model_runs.h"
#include "gannet/cuda.h"

namespace gannet::e2e {
namespace {

constexpr Device kDevice{DeviceKind::kCuda, 0};

class CudaModel : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    std::string why;
    if (cuda_device_count(&why) == 0) GTEST_SKIP() << "no CUDA device: " << why;
  }
};
INSTANTIATE_TEST_SUITE_P(Checkpoints, CudaModel, testing::ValuesIn(checkpoint_names()), [](const auto& info) {
  std::string name = info.param;
  for (char& c : name)
    if (c == '-') c = '_';
  return name;
});

void compare_all(const std::string& name, const DecoderOptions& given, int64_t chunk = 512) {
  const Context context;
  Checkpoint checkpoint = Checkpoint::open(checkpoint_dir(name));
  const std::vector<GoldenPrompt> prompts = load_golden(checkpoint.directory(), checkpoint.config());
  ASSERT_FALSE(prompts.empty());
  size_t longest = 0;
  for (const GoldenPrompt& p : prompts) longest = std::max(longest, p.ids.size() + p.continuation.size());
  const GoldenCriteria criteria =
      GoldenCriteria::of(prompts, checkpoint.config().is_dsa(), given.latent_format, given.index_format);
  DecoderOptions options = given;
  options.device = kDevice;
  options.num_pages = pages_for(static_cast<int64_t>(longest), 64) + 1;
  for (const bool draft : {false, true}) {
    if (draft && !has_mtp(prompts)) continue;
    options.draft = draft;
    Decoder decoder(context, checkpoint, options);
    for (const GoldenPrompt& prompt : prompts) {
      const GoldenResult r = compare_golden(decoder, context, {.chunk = chunk, .max_requests = 1}, prompt, criteria);
      for (const GoldenCheck& c : r.checks) {
        std::printf("[ %s%s ] %s: %s: %s\n", name.c_str(), draft ? ", MTP" : "", r.prompt.c_str(), c.what.c_str(),
                    c.figures.c_str());
        EXPECT_TRUE(c.passed) << name << " " << r.prompt << ": " << c.what << ": " << c.figures;
      }
    }
    std::string ran;
    for (const auto& [op, impl] : decoder.backend().implementations()) ran += op + " " + impl + ", ";
    std::printf("[ %s ] ran on %s%s\n", name.c_str(), ran.c_str(), decoder.compute().name().c_str());
  }
}

TEST_P(CudaModel, Fp32CachesAndActivationsAreExact) {
  compare_all(GetParam(), {.latent_format = LatentFormat::kF32, .index_format = IndexKFormat::kF32});
}

// bf16 weights, activations, queries and latents, fp8 index keys: what the command does by default.
TEST_P(CudaModel, NarrowOnesStayClose) {
  compare_all(GetParam(), {.query = QueryPrecision::kBf16, .precision = ComputePrecision::kBf16});
}

// Keys that are kept rotated, and queries rotated with them: as a graph's steps too.
TEST_P(CudaModel, RotatedIndexKeysStayClose) {
  const Checkpoint checkpoint = Checkpoint::open(checkpoint_dir(GetParam()));
  if (!checkpoint.config().is_dsa()) GTEST_SKIP() << "no indexer";
  compare_all(GetParam(),
              {.index_hadamard = true, .query = QueryPrecision::kBf16, .precision = ComputePrecision::kBf16});
}

// The same in steps of few rows, which run through fused launches, prompts included where attention is sparse.
TEST_P(CudaModel, NarrowStepsOfFewRowsStayClose) {
  for (const int64_t chunk : {5, 64, 100})
    compare_all(GetParam(), {.query = QueryPrecision::kBf16, .precision = ComputePrecision::kBf16}, chunk);
}

// Tokens picked on the device are those that the logits' largest gives on the host.
TEST_P(CudaModel, PickedTokensAreTheLikeliest) {
  const GoldenPrompt prompt = golden_prompt(GetParam(), "short");
  const Context context;
  Checkpoint checkpoint = Checkpoint::open(checkpoint_dir(GetParam()));
  Decoder decoder(
      context, checkpoint,
      {.num_pages = 9, .query = QueryPrecision::kBf16, .device = kDevice, .precision = ComputePrecision::kBf16});
  ASSERT_TRUE(decoder.picks_tokens());
  const auto tokens = [&](const EngineHooks& hooks) {
    Engine engine(decoder, {.chunk = 64, .max_requests = 3}, hooks);
    for (const int64_t n : {4, 20, 11}) engine.add({.prompt = prompt.ids, .max_new_tokens = n});
    engine.run();
    std::vector<std::vector<int32_t>> all;
    for (int64_t id = 0; id < 3; ++id) all.push_back(engine.request(id).tokens);
    return all;
  };
  int64_t seen = 0;
  EXPECT_EQ(tokens({}), tokens({.on_logits = [&](int64_t, int64_t, std::span<const float>) { ++seen; }}));
  EXPECT_EQ(seen, 35);
}

// A recorded step is the step: growing and shrinking batches, requests that come and go.
TEST_P(CudaModel, RecordedStepsAreTheStepsThemselves) {
  const GoldenPrompt prompt = golden_prompt(GetParam(), "short");
  std::vector<Request> neighbours;
  for (const int64_t n : {3, 9, 27}) neighbours.push_back({.prompt = prompt.ids, .max_new_tokens = n});
  for (const bool exact : {true, false}) {
    RunSetup setup{.checkpoint = GetParam()};
    if (exact) setup.decoder = {.latent_format = LatentFormat::kF32, .index_format = IndexKFormat::kF32};
    else setup.decoder = {.query = QueryPrecision::kBf16, .precision = ComputePrecision::kBf16};
    setup.decoder.device = kDevice;
    setup.engine = {.chunk = 64, .max_requests = 4};
    const Request request{.prompt = prompt.ids, .max_new_tokens = 20};
    const RunResult recorded = run(setup, request, neighbours);
    setup.decoder.persistent_plans = false;
    const RunResult eager = run(setup, request, neighbours);
    EXPECT_EQ(recorded.tokens, eager.tokens);
    ASSERT_EQ(recorded.logits.size(), eager.logits.size());
    EXPECT_EQ(std::memcmp(recorded.logits.data(), eager.logits.data(), eager.logits.size() * sizeof(float)), 0);
  }
}

TEST_P(CudaModel, TheInvariantModeIsRefused) {
  const Context context;
  Checkpoint checkpoint = Checkpoint::open(checkpoint_dir(GetParam()));
  try {
    Decoder decoder(context, checkpoint, {.num_pages = 4, .device = kDevice, .invariant = true});
    FAIL() << "it was taken";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("invariant on cuda:0; accepted: on the CPU"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace gannet::e2e
