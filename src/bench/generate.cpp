#include "bench/generate.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <ostream>
#include <random>
#include <vector>

#include "bench/bench.h"
#include "bench_commit.h"
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

void run_decode_steps(const Context& context, const GenerateGrid& grid, int batch, const std::string& impl,
                      LatentFormat latent, IndexKFormat index, const std::string& json_file, std::ostream& out) {
  constexpr double kMilli = 1e3;
  constexpr int kWarm = 3;  // steps that are not counted
  Checkpoint checkpoint = Checkpoint::open(grid.model);
  std::mt19937 random(9);
  std::uniform_int_distribution<int32_t> id(0, static_cast<int32_t>(checkpoint.config().vocab_size) - 1);
  // Requests whose prompts come early decode beside the others' prefill: those steps are not counted either.
  const int64_t mixed = int64_t{batch} * grid.prompt_tokens / grid.chunk + 2;
  const int64_t tokens = mixed + kWarm + grid.new_tokens + 1;
  const int64_t context_len = checkpoint.config().max_position_embeddings;
  if (grid.prompt_tokens + tokens > context_len)
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("[bench] prompts of {} tokens, {} steps beside their prefill and {} more do not fit into {} "
                    "tokens; accepted: fewer, or a larger --chunk",
                    grid.prompt_tokens, mixed, tokens - mixed, context_len));
  DecoderOptions options;
  options.impl = impl;
  options.latent_format = latent;
  options.latent_scale = latent == LatentFormat::kE4m3 ? 1.0f : 0.0f;
  options.index_format = index;
  options.num_pages = 1 + batch * pages_for(grid.prompt_tokens + tokens, options.page_size);
  options.query = QueryPrecision::kBf16;
  options.device = {DeviceKind::kCuda, 0};
  options.precision = ComputePrecision::kBf16;
  Decoder decoder(context, checkpoint, options);
  Engine engine(decoder, {.chunk = grid.chunk, .max_requests = batch});
  for (int b = 0; b < batch; ++b) {
    std::vector<int32_t> prompt(static_cast<size_t>(grid.prompt_tokens));
    for (int32_t& x : prompt) x = id(random);
    engine.add({.prompt = prompt, .max_new_tokens = tokens});
  }
  const auto timed_step = [&] {
    const auto start = std::chrono::steady_clock::now();
    if (!engine.step()) throw Error(ErrorCode::kOutOfMemory, "[bench] the requests ended early: no pages");
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  double first = 0.0;
  while (engine.stats().decode_steps == 0) first = timed_step();
  for (int i = 0; i < kWarm; ++i) timed_step();
  std::vector<double> steps;
  for (int i = 0; i < grid.new_tokens; ++i) steps.push_back(timed_step());
  std::sort(steps.begin(), steps.end());
  const auto at = [&](double share) { return kMilli * steps[static_cast<size_t>(share * double(steps.size() - 1))]; };
  const std::string name = std::filesystem::path(grid.model).lexically_normal().filename().string();
  out << fmt::format(
      "decode steps, {} on {} ({}): batch {}, prompts of {} tokens, kv {}, index keys {}\n"
      "  {} steps: median {:.3f} ms, 10 % below {:.3f}, 10 % above {:.3f}; the first one {:.1f} ms\n",
      name, to_string(options.device), decoder.compute().name(), batch, grid.prompt_tokens, to_string(latent),
      to_string(index), steps.size(), at(0.5), at(0.1), at(0.9), kMilli * first);
  std::string implementations;
  for (const auto& [op, chosen] : decoder.backend().implementations())
    implementations += fmt::format("{}{} {}", implementations.empty() ? "" : ", ", op, chosen);
  out << "  " << implementations << std::endl;
  if (json_file.empty()) return;
  nlohmann::ordered_json j;
  j["op"] = "decode_step";
  j["shape"] = {{"model", name},
                {"batch", batch},
                {"prompt_tokens", grid.prompt_tokens},
                {"kv", to_string(latent)},
                {"index_k", to_string(index)}};
  j["impl"] = implementations;
  j["steps"] = steps.size();
  j["ms_median"] = at(0.5);
  j["ms_10"] = at(0.1);
  j["ms_90"] = at(0.9);
  j["ms_first"] = kMilli * first;
  j["commit"] = kCommit;
  std::ofstream file(json_file, std::ios::app);
  if (!(file << j.dump() << '\n'))
    throw Error(ErrorCode::kInvalidArgument, "[bench] --json: " + json_file + " cannot be written");
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet
