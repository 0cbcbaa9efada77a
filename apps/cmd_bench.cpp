#include "cmd_bench.h"

#include <algorithm>
#include <iostream>
#include <map>
#include <memory>

#include "bench/bench.h"
#include "bench/cuda_bench.h"
#include "cli.h"
#include "gannet/error.h"

namespace {

const std::map<std::string, gannet::DType> kDTypes = {{"fp32", gannet::DType::kF32}, {"bf16", gannet::DType::kBf16}};
const std::map<std::string, gannet::LatentFormat> kLatentFormats = {{"fp32", gannet::LatentFormat::kF32},
                                                                    {"bf16", gannet::LatentFormat::kBf16},
                                                                    {"e4m3", gannet::LatentFormat::kE4m3},
                                                                    {"packed656", gannet::LatentFormat::kPacked656}};
const std::map<std::string, gannet::IndexKFormat> kIndexFormats = {
    {"fp32", gannet::IndexKFormat::kF32}, {"bf16", gannet::IndexKFormat::kBf16}, {"fp8", gannet::IndexKFormat::kE4m3}};

constexpr int kMost = 1 << 24;  // above every dimension here; keeps products of dimensions within 64 bits

/// An option that takes one of the names of `values`.
template <class Target, class Value>
void add_choice(CLI::App& command, const char* name, Target& target, const std::map<std::string, Value>& values,
                const char* text) {
  std::vector<std::string> names;
  for (const auto& [key, value] : values) names.push_back(key);
  command
      .add_option_function<std::string>(
          name, [&target, &values](const std::string& key) { target = values.at(key); }, text)
      ->check(CLI::IsMember(names));
}

/// Throws where one of the options was given: `accepted` says what it goes with.
void refuse_given(const CLI::App& command, std::initializer_list<const char*> names, const std::string& accepted) {
  for (const char* name : names)
    if (const CLI::Option* option = command.get_option(name); option->count() > 0)
      gannet::cli::refuse(name, option->results().front(), accepted);
}

/// What can be said about the options before anything is measured.
void check_cpu_options(const CLI::App& command, const gannet::bench::Options& options) {
  refuse_given(command, {"--against", "--where", "--every"}, "only with --device cuda");
  if (options.impl != "all") gannet::cli::check_impl(options.impl);
  const std::vector<int>& keys = options.grid.keys;
  const bool any_prefix = options.ops == std::vector<std::string>{gannet::bench::kPrefillForm};
  if (std::find(keys.begin(), keys.end(), 0) != keys.end() && !any_prefix)
    gannet::cli::refuse("--keys", "0", "1 and more; 0 only with --op prefill_form, whose keys are a cached prefix");
  const bool all = options.ops.empty();
  const bool generate =
      std::find(options.ops.begin(), options.ops.end(), gannet::bench::kGenerate) != options.ops.end();
  if (!all && !generate)
    refuse_given(command, {"--model", "--prompt-tokens", "--new-tokens", "--chunk"}, "only with --op generate, or all");
  if (command.get_option("--model")->count() == 0) {
    refuse_given(command, {"--prompt-tokens", "--new-tokens", "--chunk"}, "only with --model");
    return;
  }
  if (options.generate.model.empty()) gannet::cli::refuse("--model", "empty", "the directory of a checkpoint");
  const gannet::Checkpoint checkpoint = gannet::Checkpoint::open(options.generate.model);
  const int64_t context = checkpoint.config().max_position_embeddings;
  if (options.generate.prompt_tokens > context)
    gannet::cli::refuse("--prompt-tokens", std::to_string(options.generate.prompt_tokens),
                        "at most max_position_embeddings, " + std::to_string(context));
}

/// `bench --device cuda --op generate`: decode steps of a whole checkpoint.
void run_cuda_generate(const CLI::App& command, const gannet::bench::Options& options) {
  refuse_given(command, {"--against", "--where", "--every"}, "only with operations of its rows");
  if (options.generate.model.empty()) gannet::cli::refuse("--model", "empty", "the directory of a checkpoint");
  const gannet::Checkpoint checkpoint = gannet::Checkpoint::open(options.generate.model);
  const int64_t context = checkpoint.config().max_position_embeddings;
  if (options.generate.prompt_tokens + options.generate.new_tokens > context)
    gannet::cli::refuse("--prompt-tokens", std::to_string(options.generate.prompt_tokens),
                        "with --new-tokens at most max_position_embeddings, " + std::to_string(context));
  gannet::bench::run_decode_steps({}, options.generate, options.grid.batch, options.impl, options.grid.latent_format,
                                  options.grid.index_format, options.json_file, std::cout);
}

std::vector<std::string> op_names() {
  std::vector<std::string> names = gannet::bench::problem_ops();
  names.emplace_back(gannet::bench::kPrefillForm);
  names.emplace_back(gannet::bench::kGenerate);
  return names;
}

}  // namespace

void add_bench_command(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "Time the operations against this machine's measured roofs");
  auto options = std::make_shared<gannet::bench::Options>();
  auto cuda = std::make_shared<gannet::bench::CudaBenchOptions>();
  auto device = std::make_shared<std::string>("cpu");
  command->add_option("--device", *device, "cpu, or cuda beside --against")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--against", cuda->against,
                      "With --device cuda: JSON lines of shapes and peers' times; its rows are what is measured");
  command->add_option("--where", cuda->where, "With --device cuda: only rows with these fields, as in h=16,s_q=1");
  command->add_option("--every", cuda->every, "With --device cuda: each n-th of these rows")
      ->check(CLI::Range(1, kMost));
  command
      ->add_option(
          "--op", options->ops,
          "Operations, separated by commas (default: all of them); prefill_form: the two forms of dense prefill; "
          "generate: whole runs; with --device cuda as the file names them")
      ->delimiter(',');
  command->add_option("--heads", options->grid.heads, "Numbers of heads (default: 128,16; indexer 64,32)")
      ->delimiter(',')
      ->check(CLI::Range(1, kMost));
  command
      ->add_option("--keys", options->grid.keys,
                   "Tokens in the cache, of the prompt for ragged_prefill, or of the prefix for prefill_form")
      ->delimiter(',')
      ->check(CLI::Range(0, kMost));
  command->add_option("--rows", options->grid.rows, "Query rows a request; rows for topk, merge_state, latent_*")
      ->delimiter(',')
      ->check(CLI::Range(1, kMost));
  command->add_option("--batch", options->grid.batch, "Requests")->check(CLI::Range(1, kMost))->capture_default_str();
  command->add_option("--topk", options->grid.topk, "Selected tokens")
      ->check(CLI::Range(1, kMost))
      ->capture_default_str();
  command->add_option("--page-size", options->grid.page_size, "Tokens of a page")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  add_choice(*command, "--dtype", options->grid.dtype, kDTypes,
             "Queries, keys and outputs outside the cache: bf16 (default) or fp32");
  add_choice(*command, "--kv-dtype", options->grid.latent_format, kLatentFormats,
             "Latent cache: bf16 (default), fp32, e4m3 or packed656");
  add_choice(*command, "--index-dtype", options->grid.index_format, kIndexFormats,
             "Index keys: fp8 (default), bf16 or fp32");
  command->add_flag("--warm", options->grid.warm,
                    "Work on one cache again and again instead of rotating through cold ones");
  command->add_flag("--peers", options->grid.peers,
                    "Also time the libraries that were found when this was built, where they have the operation");
  command->add_flag("--check", options->check, "Also compare attention with the oracle (slow for large shapes)");
  command->add_option(
      "--model", options->generate.model,
      "Checkpoint directory: also time whole generate runs, with and without --invariant; with --device cuda "
      "--op generate: decode steps of --batch requests");
  command->add_option("--prompt-tokens", options->generate.prompt_tokens, "Of these runs")
      ->check(CLI::Range(1, kMost))
      ->capture_default_str();
  command->add_option("--new-tokens", options->generate.new_tokens, "Of these runs")
      ->check(CLI::Range(2, kMost))
      ->capture_default_str();
  command->add_option("--chunk", options->generate.chunk, "Prompt tokens of a step of these runs")
      ->check(CLI::Range(1, kMost))
      ->capture_default_str();
  command->add_option("--impl", options->impl,
                      "Implementation by name, or \"all\" that run here (default: what a plan chooses)");
  command->add_option("--threads", options->threads, "Threads (default: all)")
      ->check(CLI::Range(1, gannet::cli::kMaxThreads));
  command->add_flag_callback(
      "--cpu-time", [options] { options->clock = gannet::bench::ClockKind::kThreadCpu; },
      "Count the CPU time that the thread got, for a machine that others use; needs --threads 1");
  command->add_option("--rounds", options->rounds, "Interleaved rounds")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  command->add_option("--min-time", options->min_time, "Seconds a round and implementation")
      ->check(gannet::cli::number_from(0.0, 3600.0))
      ->capture_default_str();
  command->add_option("--json", options->json_file, "Append one JSON line a row to this file");
  command->callback([command, options, cuda, device] {
    if (*device == "cuda") {
      refuse_given(*command, {"--peers", "--check"}, "only with --device cpu");
      if (options->ops == std::vector<std::string>{gannet::bench::kGenerate}) {
        run_cuda_generate(*command, *options);
        return;
      }
      refuse_given(*command, {"--model", "--prompt-tokens", "--new-tokens", "--chunk"},
                   "only with --device cpu, or --op generate alone");
      cuda->ops = options->ops;
      cuda->impl = options->impl;
      cuda->json = options->json_file;
      if (gannet::bench::run_cuda_bench(*cuda) != 0)
        throw gannet::Error(gannet::ErrorCode::kInvalidArgument,
                            "[bench] no row of --against was selected by --op and --where");
      return;
    }
    const std::vector<std::string> known = op_names();
    for (const std::string& op : options->ops) {
      if (std::find(known.begin(), known.end(), op) == known.end()) {
        std::string names;
        for (const std::string& name : known) names += (names.empty() ? "" : ", ") + name;
        throw gannet::Error(gannet::ErrorCode::kInvalidArgument, "[bench] --op is \"" + op + "\"; accepted: " + names);
      }
    }
    check_cpu_options(*command, *options);
    gannet::bench::run(*options, std::cout, std::cerr);
  });
}
