// What the end-to-end tests share: where checkpoints are, which implementations run here, and one run of a request.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "core/implementation.h"
#include "engine/engine.h"
#include "engine/golden.h"

namespace gannet::e2e {

/// In the tree that the program was built from, or, on another machine, where the environment's GANNET_SOURCE_DIR says.
inline std::string checkpoint_dir(const std::string& name) {
  const char* const moved = std::getenv("GANNET_SOURCE_DIR");
  const std::string root = moved != nullptr ? moved : GANNET_SOURCE_DIR;
  return name == "tiny-dsv32" ? root + "/models/" + name : root + "/tests/data/checkpoints/" + name;
}

inline const std::vector<std::string>& checkpoint_names() {
  static const std::vector<std::string> names = {"tiny-dsv32", "v3-yarn", "v3-fp8", "v32-yarn", "glm5-shared-topk"};
  return names;
}

/// Implementation sets for the CPU that run here, the oracle last if asked for; says which do not.
inline std::vector<std::string> implementations(bool with_oracle) {
  std::vector<std::string> names;
  for (const ImplementationSet* set : implementation_sets()) {
    if (set->device != DeviceKind::kCpu) continue;
    if (!set->compiled || !set->runs_here()) {
      std::printf("[ not here ] %s\n", set->name);
      continue;
    }
    if (!set->only_when_forced || with_oracle) names.push_back(set->name);
  }
  return names;
}

struct RunSetup {
  std::string checkpoint = "tiny-dsv32";
  std::string directory = {};  ///< instead of the checkpoint's
  DecoderOptions decoder = {};
  EngineOptions engine = {};
  int threads = 2;
};

struct RunResult {
  std::vector<int32_t> tokens;
  std::vector<float> logits;  ///< [rows, vocab] of the first request: all of its prompt and all but its last new token
  int64_t vocab = 0;
  EngineStats stats;
};

/// Runs `request` with `neighbours` beside it; logits are the first one's.
inline RunResult run(const RunSetup& setup, const Request& request, const std::vector<Request>& neighbours = {}) {
  ThreadPool pool({.num_threads = setup.threads});
  const Context context{.executor = &pool};
  Checkpoint checkpoint =
      Checkpoint::open(setup.directory.empty() ? checkpoint_dir(setup.checkpoint) : setup.directory);
  DecoderOptions options = setup.decoder;
  if (options.num_pages == 0) {
    int64_t pages = 1;
    for (const Request* r : [&] {
           std::vector<const Request*> all = {&request};
           for (const Request& n : neighbours) all.push_back(&n);
           return all;
         }())
      pages += pages_for(static_cast<int64_t>(r->prompt.size()) + r->max_new_tokens, options.page_size);
    options.num_pages = pages;
  }
  options.draft = options.draft || setup.engine.speculate > 0;
  Decoder decoder(context, checkpoint, options);
  RunResult result;
  result.vocab = decoder.config().vocab_size;
  // Neighbours first: the request is not the first row of a step.
  const auto mine = static_cast<int64_t>(neighbours.size());
  EngineHooks hooks{.all_logits = true};
  hooks.on_logits = [&](int64_t id, int64_t, std::span<const float> logits) {
    if (id == mine) result.logits.insert(result.logits.end(), logits.begin(), logits.end());
  };
  Engine engine(decoder, setup.engine, hooks);
  for (const Request& n : neighbours) engine.add(n);
  EXPECT_EQ(engine.add(request), mine);
  engine.run();
  result.tokens = engine.request(mine).tokens;
  result.stats = engine.stats();
  return result;
}

/// The golden prompt of a checkpoint by name.
inline GoldenPrompt golden_prompt(const std::string& checkpoint, const std::string& name) {
  const std::string dir = checkpoint_dir(checkpoint);
  for (GoldenPrompt& p : load_golden(dir, load_config(dir)))
    if (p.name == name) return p;
  ADD_FAILURE() << checkpoint << " has no golden prompt " << name;
  return {};
}

}  // namespace gannet::e2e
