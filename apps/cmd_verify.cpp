// gannet verify: every implementation of every operation against the oracle on this machine; with a model, the model
// against its golden files. Each check is printed with its figures.
#include "cmd_verify.h"

#include <fmt/core.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>

#include "cli.h"
#include "engine/golden.h"
#include "gannet/cuda.h"
#include "model/tokenizer.h"
#include "verify/verify.h"

namespace gannet::cli {
namespace {

struct VerifyOptions {
  std::optional<std::string> model, kv_dtype, index_dtype, op;
  std::optional<float> kv_scale;
  std::string query_dtype = "auto";
  int32_t page_size = 64;
  int64_t chunk = 512;
  bool invariant = false, index_hadamard = false;
  std::string backend;
  std::string prefill_form = "auto";
  MachineOptions machine;
  DeviceOptions device;
};

/// The longest prompt with its continuation, in pages, and page 0.
int64_t pages_needed(const std::vector<GoldenPrompt>& prompts, int32_t page_size) {
  size_t longest = 1;
  for (const GoldenPrompt& p : prompts) longest = std::max(longest, p.ids.size() + p.continuation.size());
  return pages_for(static_cast<int64_t>(longest), page_size) + 1;
}

/// True if every check passed.
bool verify_model(const VerifyOptions& o, Machine& machine, const std::vector<GoldenPrompt>& prompts,
                  const std::string& kv_dtype, const std::string& index_dtype) {
  const CacheFormats formats = cache_formats(kv_dtype, o.kv_scale, index_dtype);
  Checkpoint checkpoint = Checkpoint::open(*o.model);
  const bool sparse = checkpoint.config().is_dsa();
  check_cache_options(checkpoint.config(), formats.latent, o.page_size, 0, o.index_dtype.has_value(), o.index_hadamard);
  const ChosenDevice device = choose_device(o.device, o.machine.impl, formats.latent);
  Decoder decoder(machine.context, checkpoint,
                  {.backend = o.backend,
                   .impl = o.machine.impl,
                   .latent_format = formats.latent,
                   .latent_scale = formats.latent_scale,
                   .index_format = formats.index,
                   .index_scale_format = formats.index_scale,
                   .index_hadamard = o.index_hadamard,
                   .page_size = o.page_size,
                   .num_pages = pages_needed(prompts, o.page_size),
                   .query = query_precision(o.query_dtype, formats.latent, sparse, device),
                   .prefill_form = prefill_form(o.prefill_form, sparse, o.invariant, device),
                   .device = device.device,
                   .precision = device.precision,
                   .invariant = o.invariant,
                   .draft = has_mtp(prompts)});
  warn_unknown_tensors(decoder);
  const GoldenCriteria criteria = GoldenCriteria::of(prompts, sparse, formats.latent, formats.index);
  std::printf("latent cache %s%s%s\n", kv_dtype.c_str(), sparse ? (", index keys " + index_dtype).c_str() : "",
              sparse && o.index_hadamard ? ", rotated" : "");
  bool passed = true;
  for (const GoldenPrompt& prompt : prompts) {
    if (interrupted()) throw Exit{kExitInterrupted};
    const GoldenResult r =
        compare_golden(decoder, machine.context, {.chunk = o.chunk, .max_requests = 1}, prompt, criteria);
    for (const GoldenCheck& check : r.checks)
      std::printf("  %-6s  %-8s %5lld tokens  %-18s %s\n", check.passed ? "ok" : "FAILED", r.prompt.c_str(),
                  static_cast<long long>(r.tokens), check.what.c_str(), check.figures.c_str());
    std::fflush(stdout);
    passed = passed && r.passed();
  }
  std::string impls;
  for (const auto& [op, impl] : decoder.backend().implementations())
    impls += fmt::format("{}{}: {}", impls.empty() ? "" : ", ", op, impl);
  const std::string form =
      sparse ? "" : fmt::format("; prefill form {}", prefill_form_text(o.prefill_form, decoder.stats()));
  std::printf("  ran on %s: %s%s; projections: %s; threads: %d\n", device.text.c_str(), impls.c_str(), form.c_str(),
              decoder.compute().name().c_str(), machine.pool.num_workers());
  return passed;
}

/// Texts of the golden prompts through the tokenizer.
bool verify_tokenizer(const std::string& directory, const std::vector<GoldenPrompt>& prompts) {
  std::optional<Tokenizer> tokenizer;
  int64_t compared = 0, wrong = 0;
  for (const GoldenPrompt& p : prompts) {
    if (p.text.empty()) continue;
    if (!tokenizer) tokenizer = Tokenizer::load(directory);
    ++compared;
    if (tokenizer->encode(p.text) != p.ids) ++wrong;
  }
  if (compared > 0)
    std::printf("tokenizer\n  %-6s  %lld of %lld prompts give other ids\n", wrong == 0 ? "ok" : "FAILED",
                static_cast<long long>(wrong), static_cast<long long>(compared));
  return wrong == 0;
}

/// True if every line of the grid passed.
bool verify_machine(const VerifyOptions& o) {
  int64_t lines = 0, failed = 0, refused = 0;
  const std::string op = o.op.value_or("all");
  verify::Options options{.op = op == "all" ? std::string() : op, .impl = o.machine.impl};
  options.on_line = [&](const verify::Line& line) {
    if (interrupted()) throw Exit{kExitInterrupted};
    ++lines;
    failed += int64_t{!line.pass};
    refused += int64_t{line.refused};
    std::printf("%s\n", verify::to_string(line).c_str());
    std::fflush(stdout);
  };
  int64_t cpu_cases = 0, cuda_cases = 0;
  bool cuda_here = false;
  std::vector<std::string> left_out;
  options.on_coverage = [&](const verify::Coverage& c) {
    cpu_cases += c.cpu_cases;
    cuda_cases += c.cuda_cases;
    cuda_here = cuda_here || c.cuda_here;
    left_out.insert(left_out.end(), c.left_out.begin(), c.left_out.end());
  };
  verify::verify_operations(options);
  if (lines == 0) {
    if (!o.machine.impl.empty())
      refuse("--impl", o.machine.impl, "a name of gannet info that runs here, the oracle aside");
    refuse("--op", fmt::format("\"{}\"", op), "all, or the name of an operation (gannet info)");
  }
  std::printf("%lld lines, %lld failed, %lld of formats that an implementation does not take\n",
              static_cast<long long>(lines), static_cast<long long>(failed), static_cast<long long>(refused));
  for (const std::string& text : left_out) std::printf("left out on CUDA: %s\n", text.c_str());
  std::string why;
  if (cuda_here)
    std::printf("cases: %lld on the CPU, %lld on CUDA\n", static_cast<long long>(cpu_cases),
                static_cast<long long>(cuda_cases));
  else if (cuda_device_count(&why) == 0)
    std::printf("cases: %lld on the CPU; none on CUDA: %s\n", static_cast<long long>(cpu_cases), why.c_str());
  return failed == 0;
}

void run_verify(const VerifyOptions& o) {
  if (o.chunk < 1) refuse("--chunk", std::to_string(o.chunk), "1 and more");
  if (o.page_size < 1) refuse("--page-size", std::to_string(o.page_size), "32, 64");
  query_precision(o.query_dtype, LatentFormat::kF32, false);
  const std::string kv = o.kv_dtype.value_or("fp32"), index = o.index_dtype.value_or("fp32");
  cache_formats(kv, o.kv_scale, index);
  check_impl(o.machine.impl);
  if (o.op && o.model)
    throw Error(ErrorCode::kInvalidArgument, "--op and --model exclude each other: operations or a checkpoint");
  if (o.op && o.op->empty()) refuse("--op", "empty", "all, or the name of an operation (gannet info)");
  if (o.model && o.model->empty()) refuse("--model", "empty", "the directory of a checkpoint");
  if (!o.model && o.machine.threads != 0 && std::getenv("GANNET_THREADS") == nullptr)
    refuse("--threads", std::to_string(o.machine.threads),
           "none without --model: the operations are run with several numbers of workers each");
  catch_interrupts();
  if (!o.model) {
    const bool passed = verify_machine(o);
    std::printf("%s\n", passed ? "all checks passed" : "some checks FAILED");
    if (!passed) throw Exit{kExitFailed};
    return;
  }
  Machine machine(o.machine);
  const ModelConfig config = load_config(*o.model);
  const std::vector<GoldenPrompt> prompts = load_golden(*o.model, config);
  // The model first: what its options refuse is refused before anything is printed.
  bool passed = verify_model(o, machine, prompts, kv, index);
  if (!o.kv_dtype && !o.index_dtype) passed = verify_model(o, machine, prompts, "bf16", "fp8") && passed;
  passed = verify_tokenizer(*o.model, prompts) && passed;
  std::printf("%s\n", passed ? "all checks passed" : "some checks FAILED");
  if (!passed) throw Exit{kExitFailed};
}

}  // namespace
}  // namespace gannet::cli

void add_verify_command(CLI::App& app) {
  using namespace gannet::cli;
  auto options = std::make_shared<VerifyOptions>();
  VerifyOptions& o = *options;
  CLI::App& c = *app.add_subcommand(
      "verify", "Compare every implementation with the oracle on this machine, or a checkpoint with its golden files");
  c.add_option(
      "--model", o.model,
      "Directory of a checkpoint with golden.json and golden.safetensors; without it the operations are verified");
  c.add_option("--op", o.op, "Verify this operation, or all, instead of a checkpoint; the default without --model");
  c.add_option("--kv-dtype", o.kv_dtype,
               fmt::format("Latent cache: {}; default: fp32 with fp32 index keys, then bf16 with fp8", kLatentNames));
  add_scale_option(c, o.kv_scale);
  c.add_option("--index-dtype", o.index_dtype, fmt::format("Index-key cache: {}", kIndexNames));
  add_hadamard_option(c, o.index_hadamard);
  add_query_option(c, o.query_dtype);
  c.add_option("--page-size", o.page_size, "Tokens of a page")->capture_default_str();
  c.add_option("--chunk", o.chunk, "Prompt tokens of one prefill step")->capture_default_str();
  c.add_flag("--invariant", o.invariant, "Run in the invariant mode");
  c.add_option("--backend", o.backend, "Attention backend; default: that of the architecture");
  add_prefill_form_option(c, o.prefill_form);
  add_machine_options(c, o.machine);
  add_device_options(c, o.device);
  c.callback([options, &c] {
    // What only a model reads is refused rather than ignored, but for --device, which may come from the environment.
    if (!options->model)
      for (const char* name : {"--backend", "--chunk", "--index-dtype", "--index-hadamard", "--invariant", "--kv-dtype",
                               "--kv-scale", "--page-size", "--precision", "--prefill-form", "--query-dtype"})
        if (c.count(name) > 0) refuse(name, "given", "only with --model");
    run_verify(*options);
  });
}
