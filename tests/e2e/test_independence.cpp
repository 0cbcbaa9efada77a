// A request's results do not depend on how its prompt is cut, where its pages lie, how many threads run, or who else is
// in the batch: within rounding, and bit for bit in the invariant mode.
#include <cmath>
#include <cstring>

#include "model_runs.h"

namespace gannet::e2e {
namespace {

struct Variant {
  std::string name;
  RunSetup setup;
  std::vector<Request> neighbours;
};

std::vector<Request> neighbours_of(const std::string& checkpoint) {
  // One shorter and one longer than the request, so that it meets mixed steps; other first tokens.
  const std::vector<int32_t> ids = golden_prompt(checkpoint, "medium").ids;
  std::vector<int32_t> longer;
  for (int i = 0; i < 3; ++i) longer.insert(longer.end(), ids.rbegin(), ids.rend());
  return {{.prompt = {5, 6, 7}, .max_new_tokens = 12}, {.prompt = longer, .max_new_tokens = 3}};
}

std::vector<Variant> variants(const RunSetup& base) {
  std::vector<Variant> list;
  const auto add = [&](const std::string& name) -> Variant& {
    list.push_back({name, base, {}});
    return list.back();
  };
  for (const int64_t chunk : {1, 7, 64, 1000}) add("chunk " + std::to_string(chunk)).setup.engine.chunk = chunk;
  add("shuffled pages").setup.engine.page_order = 99;
  add("1 thread").setup.threads = 1;
  add("3 threads").setup.threads = 3;
  for (const int64_t chunk : {100, 1 << 20}) {
    Variant& v = add("neighbours, chunk " + std::to_string(chunk));
    v.neighbours = neighbours_of(base.checkpoint);
    v.setup.engine.chunk = chunk;
  }
  return list;
}

class Independence : public testing::TestWithParam<std::string> {};

TEST_P(Independence, WithinRounding) {
  const Request request{.prompt = golden_prompt(GetParam(), "medium").ids, .max_new_tokens = 8};
  for (const std::string& impl : implementations(false)) {
    RunSetup base{.checkpoint = GetParam()};
    base.decoder.latent_format = LatentFormat::kF32;
    base.decoder.index_format = IndexKFormat::kF32;
    base.decoder.impl = impl;
    base.engine.chunk = 1 << 20;  // the whole prompt
    const RunResult whole = run(base, request);
    ASSERT_EQ(whole.tokens.size(), 8u);
    for (const Variant& v : variants(base)) {
      const RunResult r = run(v.setup, request, v.neighbours);
      ASSERT_EQ(r.logits.size(), whole.logits.size()) << v.name;
      double worst = 0.0;
      for (size_t i = 0; i < r.logits.size(); ++i)
        worst = std::max(worst, std::abs(double{r.logits[i]} - double{whole.logits[i]}));
      std::printf("[ %s %s ] %s: logits differ by %.1e\n", GetParam().c_str(), impl.c_str(), v.name.c_str(), worst);
      // Products of many rows and of few add in another order; so do the expanded and the absorbed form. 1e-3 is what
      // the golden comparison allows between two orders of addition.
      EXPECT_LE(worst, 1e-3) << impl << " " << v.name;
      EXPECT_EQ(r.tokens, whole.tokens) << impl << " " << v.name;
    }
  }
}

TEST_P(Independence, TheFormsOfPrefillAgreeWithinRounding) {
  if (load_config(checkpoint_dir(GetParam())).is_dsa()) GTEST_SKIP() << "sparse attention has one form";
  const Request request{.prompt = golden_prompt(GetParam(), "medium").ids, .max_new_tokens = 8};
  for (const std::string& impl : implementations(false)) {
    RunSetup base{.checkpoint = GetParam()};
    base.decoder.latent_format = LatentFormat::kF32;
    base.decoder.impl = impl;
    base.decoder.prefill_form = PrefillForm::kExpanded;
    base.engine.chunk = 1 << 20;
    const RunResult whole = run(base, request);
    base.decoder.prefill_form = PrefillForm::kAbsorbed;
    for (const Variant& v : variants(base)) {
      const RunResult r = run(v.setup, request, v.neighbours);
      ASSERT_EQ(r.logits.size(), whole.logits.size()) << v.name;
      double worst = 0.0;
      for (size_t i = 0; i < r.logits.size(); ++i)
        worst = std::max(worst, std::abs(double{r.logits[i]} - double{whole.logits[i]}));
      std::printf("[ %s %s ] absorbed, %s: logits differ by %.1e\n", GetParam().c_str(), impl.c_str(), v.name.c_str(),
                  worst);
      EXPECT_LE(worst, 1e-3) << impl << " " << v.name;  // as WithinRounding
      EXPECT_EQ(r.tokens, whole.tokens) << impl << " " << v.name;
    }
  }
}

TEST_P(Independence, BitwiseInTheInvariantMode) {
  const Request request{.prompt = golden_prompt(GetParam(), "medium").ids, .max_new_tokens = 8};
  for (const std::string& impl : implementations(false)) {
    std::printf("[ ran      ] %s %s\n", GetParam().c_str(), impl.c_str());
    RunSetup base{.checkpoint = GetParam()};
    base.decoder.impl = impl;
    base.decoder.invariant = true;
    base.decoder.query = QueryPrecision::kBf16;
    base.engine.chunk = 1 << 20;
    const RunResult whole = run(base, request);
    for (const Variant& v : variants(base)) {
      const RunResult r = run(v.setup, request, v.neighbours);
      ASSERT_EQ(r.logits.size(), whole.logits.size()) << v.name;
      EXPECT_EQ(0, std::memcmp(r.logits.data(), whole.logits.data(), r.logits.size() * sizeof(float)))
          << impl << " " << v.name;
      EXPECT_EQ(r.tokens, whole.tokens) << impl << " " << v.name;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Checkpoints, Independence, testing::ValuesIn(checkpoint_names()), [](const auto& info) {
  std::string name = info.param;
  for (char& c : name)
    if (c == '-') c = '_';
  return name;
});

TEST(Engine, RefusesRequestsThatCanNeverRun) {
  ThreadPool pool({.num_threads = 1});
  const Context context{.executor = &pool};
  Checkpoint checkpoint = Checkpoint::open(checkpoint_dir("tiny-dsv32"));
  Decoder decoder(context, checkpoint, {.num_pages = 3, .max_context_len = 100});
  Engine engine(decoder);
  EXPECT_THROW(engine.add({.prompt = {}}), Error);
  EXPECT_THROW(engine.add({.prompt = std::vector<int32_t>(101, 5)}), Error);
  EXPECT_THROW(engine.add({.prompt = {2048}}), Error);
  EXPECT_THROW(engine.add({.prompt = {-1}}), Error);
  EXPECT_THROW(engine.add({.prompt = {1}, .max_new_tokens = -1}), Error);
  EXPECT_THROW(engine.add({.prompt = {1}, .sampling = {.temperature = -1.0f}}), Error);
  EXPECT_THROW(engine.add({.prompt = {1}, .sampling = {.top_p = 0.0f}}), Error);
  EXPECT_FALSE(engine.step());
}

TEST(Engine, StopsAtTheContextAndWaitsForPages) {
  ThreadPool pool({.num_threads = 1});
  const Context context{.executor = &pool};
  Checkpoint checkpoint = Checkpoint::open(checkpoint_dir("tiny-dsv32"));
  Decoder decoder(context, checkpoint, {.num_pages = 3, .max_context_len = 100});  // 2 pages: 128 tokens
  Engine engine(decoder, {.chunk = 64});
  const int64_t a = engine.add({.prompt = std::vector<int32_t>(95, 300), .max_new_tokens = 50});
  const int64_t b = engine.add({.prompt = std::vector<int32_t>(70, 301), .max_new_tokens = 2});
  engine.step();
  EXPECT_EQ(engine.request(b).state, RequestState::kWaiting);
  engine.run();
  EXPECT_EQ(engine.request(a).state, RequestState::kContext);
  EXPECT_EQ(engine.request(a).tokens.size(), 6u);  // the first after 95 cached tokens, the last after 100
  EXPECT_EQ(engine.request(b).state, RequestState::kLength);
  EXPECT_EQ(engine.request(b).tokens.size(), 2u);
}

TEST(Engine, EndsARequestWhenThePoolIsEmpty) {
  ThreadPool pool({.num_threads = 1});
  const Context context{.executor = &pool};
  Checkpoint checkpoint = Checkpoint::open(checkpoint_dir("tiny-dsv32"));
  Decoder decoder(context, checkpoint, {.num_pages = 2});
  Engine engine(decoder);
  const int64_t a = engine.add({.prompt = std::vector<int32_t>(60, 300), .max_new_tokens = 50});
  engine.run();
  EXPECT_EQ(engine.request(a).state, RequestState::kPool);
  EXPECT_EQ(engine.request(a).tokens.size(), 5u);
}

}  // namespace
}  // namespace gannet::e2e
