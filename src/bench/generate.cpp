#include "bench/generate.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <ostream>
#include <random>
#include <vector>

#include "bench/bench.h"
#include "engine/engine.h"

namespace gannet {
inline namespace v0 {
namespace bench {

namespace {

struct Mode {
  const char* name;
  bool invariant;
  std::vector<double> prefill, decode;  // seconds, a round each
};

double least(const std::vector<double>& v) { return *std::min_element(v.begin(), v.end()); }
double middle(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  const size_t n = v.size();
  return n % 2 == 1 ? v[n / 2] : 0.5 * (v[n / 2 - 1] + v[n / 2]);
}

}  // namespace

void run_generate(const Context& context, const GenerateGrid& grid, const std::string& impl, int rounds,
                  LatentFormat latent, IndexKFormat index, const Roofs& roofs, std::ostream& out, std::ostream* json) {
  constexpr double kMilli = 1e3;
  Checkpoint checkpoint = Checkpoint::open(grid.model);
  std::mt19937 random(9);
  std::uniform_int_distribution<int32_t> id(0, static_cast<int32_t>(checkpoint.config().vocab_size) - 1);
  std::vector<int32_t> prompt(static_cast<size_t>(grid.prompt_tokens));
  for (int32_t& x : prompt) x = id(random);

  const DecoderOptions defaults;
  const int64_t pages = pages_for(int64_t{grid.prompt_tokens} + grid.new_tokens, defaults.page_size);
  Mode modes[] = {{"plain", false, {}, {}}, {"invariant", true, {}, {}}};
  // One round more than asked for: the first maps the weights and is not counted.
  for (int round = 0; round <= rounds; ++round) {
    for (Mode& mode : modes) {
      Decoder decoder(context, checkpoint,
                      {.impl = impl,
                       .latent_format = latent,
                       .latent_scale = latent == LatentFormat::kE4m3 ? 1.0f : 0.0f,
                       .index_format = index,
                       .num_pages = pages + 1,  // page 0 is nobody's
                       .invariant = mode.invariant});
      Engine engine(decoder, {.chunk = grid.chunk, .max_requests = 1});
      engine.add({.prompt = prompt, .max_new_tokens = grid.new_tokens});
      engine.run();
      if (round == 0) continue;
      mode.prefill.push_back(engine.stats().prefill_seconds);
      mode.decode.push_back(engine.stats().decode_seconds);
    }
  }

  const std::string name = std::filesystem::path(grid.model).lexically_normal().filename().string();
  out << fmt::format("\ngenerate, {}: {} prompt tokens in steps of {}, {} new tokens, kv {}, index keys {}\n", name,
                     grid.prompt_tokens, grid.chunk, grid.new_tokens, to_string(latent), to_string(index));
  out << fmt::format("{:<12} {:>16} {:>12} {:>10} {:>16} {:>12} {:>10}\n", "mode", "prefill min ms", "median ms",
                     "tokens/s", "decode min ms", "median ms", "tokens/s");
  for (const Mode& mode : modes) {
    const double prefill = least(mode.prefill), decode = least(mode.decode);
    // The first new token comes with the prefill.
    const double prefill_rate = grid.prompt_tokens / prefill, decode_rate = (grid.new_tokens - 1) / decode;
    out << fmt::format("{:<12} {:>16.2f} {:>12.2f} {:>10.1f} {:>16.2f} {:>12.2f} {:>10.1f}\n", mode.name,
                       prefill * kMilli, middle(mode.prefill) * kMilli, prefill_rate, decode * kMilli,
                       middle(mode.decode) * kMilli, decode_rate);
    if (json == nullptr) continue;
    nlohmann::ordered_json j;
    j["op"] = "generate";
    j["shape"] = {{"model", name},
                  {"prompt_tokens", grid.prompt_tokens},
                  {"new_tokens", grid.new_tokens},
                  {"chunk", grid.chunk},
                  {"kv", to_string(latent)},
                  {"index_k", to_string(index)},
                  {"invariant", mode.invariant}};
    j["impl"] = impl.empty() ? "default" : impl;
    j["prefill_ms_min"] = prefill * kMilli;
    j["prefill_ms_median"] = middle(mode.prefill) * kMilli;
    j["decode_ms_min"] = decode * kMilli;
    j["decode_ms_median"] = middle(mode.decode) * kMilli;
    j["prefill_tokens_per_second"] = prefill_rate;
    j["decode_tokens_per_second"] = decode_rate;
    *json << to_json_line(j, roofs) << '\n' << std::flush;
  }
  const auto cost = [](double plain, double invariant) { return 100.0 * (invariant / plain - 1.0); };
  out << fmt::format("cost of --invariant: prefill {:+.1f} %, decode {:+.1f} %\n",
                     cost(least(modes[0].prefill), least(modes[1].prefill)),
                     cost(least(modes[0].decode), least(modes[1].decode)))
      << std::flush;
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet
