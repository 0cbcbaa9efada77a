// Speculative decoding with the MTP layer gives what plain decoding gives, and plans that are refreshed in place what
// plans made anew give.
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "model_runs.h"

namespace gannet::e2e {
namespace {

namespace fs = std::filesystem;

testing::AssertionResult same(const RunResult& a, const RunResult& b) {
  if (a.tokens != b.tokens) return testing::AssertionFailure() << "other tokens";
  if (a.logits.size() != b.logits.size())
    return testing::AssertionFailure() << a.logits.size() << " and " << b.logits.size() << " logits";
  for (size_t i = 0; i < a.logits.size(); ++i)
    if (std::memcmp(&a.logits[i], &b.logits[i], sizeof(float)) != 0)
      return testing::AssertionFailure() << "row " << i / static_cast<size_t>(a.vocab) << " differs: " << a.logits[i]
                                         << " and " << b.logits[i];
  return testing::AssertionSuccess();
}

/// A prompt longer than index_topk, so that drafts and verify select.
Request request(int64_t new_tokens) {
  return {.prompt = golden_prompt("tiny-dsv32", "medium").ids, .max_new_tokens = new_tokens};
}

/// They begin and end while the request runs: growing and shrinking batches, and mixed steps.
std::vector<Request> neighbours() {
  std::vector<int32_t> ids = golden_prompt("tiny-dsv32", "medium").ids;
  ids.resize(150);
  return {{.prompt = {0, 5, 6, 7}, .max_new_tokens = 9}, {.prompt = ids, .max_new_tokens = 17}};
}

/// tiny-dsv32 with another config.json.
class Variant {
 public:
  explicit Variant(const std::function<void(nlohmann::json&)>& change)
      : path_(fs::temp_directory_path() / ("gannet_speculation." + std::to_string(getpid()))) {
    fs::remove_all(path_);
    fs::create_directories(path_);
    const fs::path model = checkpoint_dir("tiny-dsv32");
    for (const auto& entry : fs::directory_iterator(model))
      if (entry.path().filename() != "config.json") fs::create_symlink(entry.path(), path_ / entry.path().filename());
    nlohmann::json config = nlohmann::json::parse(std::ifstream(model / "config.json"));
    change(config);
    std::ofstream(path_ / "config.json") << config.dump();
  }
  ~Variant() { fs::remove_all(path_); }
  std::string string() const { return path_.string(); }

 private:
  fs::path path_;
};

TEST(Speculation, IsPlainDecodingBitForBitInTheInvariantMode) {
  const Variant shares([](nlohmann::json& c) { c["index_share_for_mtp_iteration"] = true; });
  for (const std::string& impl : implementations(false)) {
    RunSetup setup;
    setup.decoder.impl = impl;
    setup.decoder.invariant = true;
    setup.decoder.query = QueryPrecision::kBf16;
    const RunResult plain = run(setup, request(40));
    ASSERT_EQ(plain.tokens.size(), 40u);
    for (const int32_t n : {1, 3, 7}) {
      for (const bool shared : {false, true}) {
        if (shared && n == 1) continue;  // there is no later draft step
        RunSetup drafts = setup;
        drafts.engine.speculate = n;
        if (shared) drafts.directory = shares.string();
        const RunResult alone = run(drafts, request(40));
        std::printf("[ %s ] %d drafts a step%s: accepted %lld of %lld in %lld steps\n", impl.c_str(), n,
                    shared ? ", selection shared" : "", static_cast<long long>(alone.stats.accepted_tokens),
                    static_cast<long long>(alone.stats.drafted_tokens),
                    static_cast<long long>(alone.stats.decode_steps));
        EXPECT_TRUE(same(plain, alone)) << impl << " " << n;
        EXPECT_GT(alone.stats.accepted_tokens, 5) << impl << " " << n;
        EXPECT_LT(alone.stats.accepted_tokens, alone.stats.drafted_tokens) << impl << " " << n;
        EXPECT_EQ(alone.stats.decode_steps + alone.stats.accepted_tokens, 39) << impl << " " << n;
      }
      RunSetup batched = setup;
      batched.engine.speculate = n;
      batched.engine.chunk = 100;
      batched.engine.page_order = 5;
      EXPECT_TRUE(same(plain, run(batched, request(40), neighbours()))) << impl << " " << n;
    }
  }
}

// The sampler draws one number for every token that stands, as in plain decoding.
TEST(Speculation, SampledTokensAreThoseOfPlainDecoding) {
  RunSetup setup;
  setup.decoder.invariant = true;
  Request sampled = request(40);
  sampled.sampling = {.temperature = 0.8f, .top_p = 0.9f, .seed = 7};
  const RunResult plain = run(setup, sampled);
  EXPECT_NE(plain.tokens, run(setup, request(40)).tokens);
  setup.engine.speculate = 3;
  const RunResult drafts = run(setup, sampled);
  EXPECT_TRUE(same(plain, drafts));
  EXPECT_GT(drafts.stats.accepted_tokens, 0);
}

// A request ends where it would have ended: at a stop token that was a draft, with its tokens, its context, its pool.
TEST(Speculation, EndsWherePlainDecodingEnds) {
  RunSetup setup;
  setup.decoder.invariant = true;
  Request base = request(30);
  base.prompt.resize(60);
  const RunResult plain = run(setup, base);
  for (size_t stop = 0; stop < 12; ++stop) {
    Request r = base;
    r.stop_ids = {plain.tokens[stop]};
    RunSetup drafts = setup;
    drafts.engine.speculate = 4;
    EXPECT_EQ(run(drafts, r).tokens, run(setup, r).tokens) << stop;
  }
  for (const int64_t context : {66, 67, 68, 75}) {
    RunSetup limited = setup;
    limited.decoder.max_context_len = context;
    const RunResult short_plain = run(limited, base);
    EXPECT_LT(short_plain.tokens.size(), 30u);
    limited.engine.speculate = 4;
    EXPECT_TRUE(same(short_plain, run(limited, base))) << context;
  }
  RunSetup pool = setup;
  pool.decoder.num_pages = 2;  // 64 tokens
  const RunResult pool_plain = run(pool, base);
  EXPECT_EQ(pool_plain.tokens.size(), 5u);
  pool.engine.speculate = 4;
  EXPECT_TRUE(same(pool_plain, run(pool, base)));
}

// Later steps of a draft select keys anew, or reuse the first selection where the model says so.
TEST(Speculation, LaterDraftStepsShareTheSelectionWhereTheModelSaysSo) {
  const Variant shares([](nlohmann::json& c) { c["index_share_for_mtp_iteration"] = true; });
  ThreadPool pool({.num_threads = 2});
  const Context context{.executor = &pool};
  for (const std::string& directory : {checkpoint_dir("tiny-dsv32"), shares.string()}) {
    Checkpoint checkpoint = Checkpoint::open(directory);
    Decoder decoder(context, checkpoint, {.num_pages = 8, .draft = true});
    int64_t main = 0, mtp = 0;
    EngineHooks hooks;
    hooks.on_selection = [&](const SelectionEvent& e) { ++(e.layer == 4 ? mtp : main); };
    Engine engine(decoder, {.speculate = 3}, hooks);
    engine.add(request(10));
    ASSERT_TRUE(engine.step());  // the prompt, and three drafts
    EXPECT_EQ(main, 4);
    EXPECT_EQ(mtp, checkpoint.config().index_share_for_mtp_iteration ? 1 : 3);
  }
}

TEST(Speculation, RefusesWhatItCannotDo) {
  ThreadPool pool({.num_threads = 1});
  const Context context{.executor = &pool};
  Checkpoint checkpoint = Checkpoint::open(checkpoint_dir("tiny-dsv32"));
  Decoder plain(context, checkpoint, {.num_pages = 3});
  EXPECT_TRUE(plain.draft_refusal().empty());
  EXPECT_THROW(Engine(plain, {.speculate = 1}), Error);
  EXPECT_THROW(plain.draft({}, {}), Error);
  Decoder drafts(context, checkpoint, {.num_pages = 3, .draft = true});
  EXPECT_THROW(Engine(drafts, {.speculate = -1}), Error);
  EXPECT_THROW(Engine(drafts, {.speculate = 8}), Error);
  const std::vector<int32_t> id = {1};
  EXPECT_THROW(drafts.draft(id, {}), Error);                  // no step
  EXPECT_THROW(drafts.draft_next({}, {{0}}, id, {}), Error);  // no draft
  for (const std::string& name : checkpoint_names()) {
    if (name == "tiny-dsv32") continue;
    Checkpoint none = Checkpoint::open(checkpoint_dir(name));
    EXPECT_NE(Decoder(context, none, {.num_pages = 2}).draft_refusal().find("num_nextn_predict_layers"),
              std::string::npos)
        << name;
    EXPECT_THROW(Decoder(context, none, {.num_pages = 2, .draft = true}), Error) << name;
  }
}

// Growing and shrinking batches, every checkpoint, with and without drafts.
TEST(PersistentPlans, GiveTheBitsOfPlansMadeAnew) {
  for (const std::string& name : checkpoint_names()) {
    for (const std::string& impl : implementations(false)) {
      for (const int32_t speculate : {0, 2}) {
        if (speculate > 0 && name != "tiny-dsv32") continue;
        RunSetup setup{.checkpoint = name};
        setup.decoder.impl = impl;
        setup.engine.speculate = speculate;
        setup.engine.chunk = 100;
        setup.decoder.persistent_plans = false;
        Request r{.prompt = golden_prompt(name, "medium").ids, .max_new_tokens = 20};
        r.prompt.resize(std::min<size_t>(r.prompt.size(), 120));
        const RunResult anew = run(setup, r, neighbours());
        setup.decoder.persistent_plans = true;
        EXPECT_TRUE(same(anew, run(setup, r, neighbours()))) << name << " " << impl << " " << speculate;
        std::printf("[ ran      ] %s %s, %d drafts\n", name.c_str(), impl.c_str(), speculate);
      }
    }
  }
}

}  // namespace
}  // namespace gannet::e2e
