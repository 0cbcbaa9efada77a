// gannet generate: text or token ids in, text out, as it is made; then a table, or one JSON object for everything.
#include "cmd_generate.h"

#include <fmt/core.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli.h"
#include "engine/engine.h"
#include "model/json_file.h"
#include "model/tokenizer.h"

namespace gannet::cli {
namespace {

constexpr int64_t kMost = 1'000'000'000;  // of tokens and pages: above every context, far from overflow

struct GenerateOptions {
  std::string model;
  std::optional<std::string> prompt, prompt_file, ids, tokenizer;
  bool ignore_eos = false;
  bool invariant = false;
  int64_t max_new_tokens = 128;
  std::optional<float> temperature, top_p;
  uint64_t seed = 0;
  int64_t chunk = 0;
  int64_t pages = 0;
  int32_t speculate = 0;
  std::string backend;
  std::string prefill_form = "auto";
  bool json = false;
  bool text_only = false;
  bool index_dtype_given = false;
  CacheOptions cache;
  MachineOptions machine;
  DeviceOptions device;
};

// Prompt tokens of one step unless --chunk says otherwise: rows bring about this many bytes of activations with them,
// so that 512 rows of a small model and 90 of one with 128 heads take the same 64 MB.
constexpr int64_t kChunkBytes = int64_t{64} << 20;
constexpr int64_t kMaxDefaultChunk = 512;
constexpr int64_t kMinDefaultChunk = 16;

int64_t default_chunk(const ModelConfig& c) {
  const int64_t row = c.num_attention_heads *
                          (2 * c.kv_lora_rank + c.qk_rope_head_dim + c.qk_head_dim() + 2 * c.v_head_dim) *
                          static_cast<int64_t>(sizeof(float)) +
                      (c.num_experts_per_tok + 4) * c.hidden_size * static_cast<int64_t>(sizeof(float));
  return std::clamp(kChunkBytes / row, kMinDefaultChunk, kMaxDefaultChunk);
}

// A token stands for some four bytes of text. What has more than this many for each token of the context cannot be a
// prompt, and an endless file is not read for ever.
constexpr int64_t kMaxTokenBytes = 256;

std::string read_all(std::istream& in, const std::string& name, int64_t most) {
  try {
    in.exceptions(std::ios::badbit);
    std::string text;
    char block[1 << 16];
    while (in.read(block, sizeof(block)), in.gcount() > 0) {
      text.append(block, static_cast<size_t>(in.gcount()));
      if (static_cast<int64_t>(text.size()) > most)
        throw Error(ErrorCode::kInvalidArgument,
                    fmt::format("{}: the prompt has more than {} bytes; accepted: at most {} for each of the tokens of "
                                "max_position_embeddings",
                                name, most, kMaxTokenBytes));
    }
    return text;
  } catch (const std::ios_base::failure& e) {  // a directory, a device that fails
    throw Error(ErrorCode::kCorruptFile, fmt::format("{}: cannot be read: {}", name, e.what()));
  }
}

std::vector<int32_t> parse_ids(const std::string& text) {
  std::vector<int32_t> ids;
  const char* p = text.data();
  const char* const end = p + text.size();
  while (p < end) {
    int32_t id = 0;
    const auto [next, error] = std::from_chars(p, end, id);
    if (error != std::errc{} || (next < end && *next != ',') || next + 1 == end)
      refuse("--ids", fmt::format("\"{}\"", text), "token ids separated by commas, such as 1,2,3");
    ids.push_back(id);
    p = next + (next < end ? 1 : 0);
  }
  if (ids.empty()) refuse("--ids", "empty", "token ids separated by commas, such as 1,2,3");
  return ids;
}

/// A model whose pages are read for the first time on first use looks hung: read them with a bar first.
void read_ahead(Checkpoint& checkpoint) {
  constexpr int64_t kWorthwhile = int64_t{1} << 30;
  constexpr int64_t kPage = 4096;
  if (checkpoint.mapped_bytes() < kWorthwhile) return;
  ProgressBar bar("load", checkpoint.mapped_bytes());
  if (!bar.visible()) return;
  int64_t done = 0;
  for (const std::string& name : checkpoint.names()) {
    const TensorRef& t = *checkpoint.find(name);
    for (int64_t i = 0; i < t.num_bytes; i += kPage)
      static_cast<void>(*static_cast<const volatile std::byte*>(t.data + i));
    done += t.num_bytes;
    bar.update(done);
    if (interrupted()) break;
  }
}

std::string implementations_text(Decoder& decoder) {
  // Operations that run on one implementation are named together.
  std::vector<std::pair<std::string, std::vector<std::string>>> by_name;
  for (const auto& [op, impl] : decoder.backend().implementations()) {
    auto at = std::find_if(by_name.begin(), by_name.end(), [&](const auto& e) { return e.first == impl; });
    if (at == by_name.end()) at = by_name.insert(at, {impl, {}});
    at->second.push_back(op);
  }
  std::string text;
  for (const auto& [impl, ops] : by_name) {
    if (!text.empty()) text += "; ";
    text += impl;
    if (by_name.size() > 1) {
      text += " (";
      for (size_t i = 0; i < ops.size(); ++i) text += (i > 0 ? ", " : "") + ops[i];
      text += ")";
    }
  }
  return text;
}

void run_generate(const GenerateOptions& o) {
  if (int{o.prompt.has_value()} + int{o.prompt_file.has_value()} + int{o.ids.has_value()} > 1)
    throw Error(ErrorCode::kInvalidArgument, "--prompt, --prompt-file and --ids exclude each other");
  const CacheFormats formats = cache_formats(o.cache.kv_dtype, o.cache.kv_scale, o.cache.index_dtype);
  check_impl(o.machine.impl);
  if (o.cache.page_size < 1) refuse("--page-size", std::to_string(o.cache.page_size), "32, 64");

  Checkpoint checkpoint = Checkpoint::open(o.model);
  const ModelConfig& config = checkpoint.config();
  check_cache_options(config, formats.latent, o.cache.page_size, o.pages, o.index_dtype_given, o.cache.index_hadamard);

  // The prompt. Token ids need no tokenizer; without one the answer is ids too.
  std::optional<Tokenizer> tokenizer;
  std::vector<int32_t> prompt;
  const auto load_tokenizer = [&] { tokenizer = Tokenizer::load(o.tokenizer ? *o.tokenizer : o.model); };
  if (o.ids) {
    prompt = parse_ids(*o.ids);
    if (o.tokenizer || file_exists(join_path(o.model, "tokenizer.json"))) load_tokenizer();
  } else {
    std::string text, name = "--prompt";
    const int64_t most = kMaxTokenBytes * config.max_position_embeddings;
    if (o.prompt) {
      text = *o.prompt;
    } else if (o.prompt_file) {
      name = *o.prompt_file;
      std::ifstream in(name, std::ios::binary);
      if (!in) throw Error(ErrorCode::kCorruptFile, fmt::format("--prompt-file {}: cannot be opened", name));
      text = read_all(in, name, most);
    } else {
      name = "standard input";
      text = read_all(std::cin, name, most);
    }
    if (text.empty())
      throw Error(ErrorCode::kInvalidArgument, fmt::format("{}: the prompt is empty; accepted: UTF-8 text", name));
    load_tokenizer();
    try {
      prompt = tokenizer->encode(text);
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("{}: {}", name, e.what()));
    }
  }

  SamplingOptions sampling{.seed = o.seed};
  if (config.generation.do_sample) {
    sampling.temperature = static_cast<float>(config.generation.temperature);
    sampling.top_p = static_cast<float>(config.generation.top_p);
  }
  if (o.temperature) sampling.temperature = *o.temperature;
  if (o.top_p) sampling.top_p = *o.top_p;
  check_sampling(sampling);

  const auto prompt_tokens = static_cast<int64_t>(prompt.size());
  if (prompt_tokens > config.max_position_embeddings)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the prompt has {} tokens; max_position_embeddings of {}/config.json is {}", prompt_tokens,
                            o.model, config.max_position_embeddings));
  const int64_t longest = std::min(prompt_tokens + std::min(o.max_new_tokens, config.max_position_embeddings),
                                   config.max_position_embeddings);
  const int64_t pages = o.pages > 0 ? o.pages : pages_for(longest, o.cache.page_size);

  Machine machine(o.machine);
  const ChosenDevice device = choose_device(o.device, o.machine.impl, formats.latent);
  const bool gpu = device.device.kind == DeviceKind::kCuda;
  Decoder decoder(machine.context, checkpoint,
                  {.backend = o.backend,
                   .impl = o.machine.impl,
                   .latent_format = formats.latent,
                   .latent_scale = formats.latent_scale,
                   .index_format = formats.index,
                   .index_scale_format = formats.index_scale,
                   .index_hadamard = o.cache.index_hadamard,
                   .page_size = o.cache.page_size,
                   .num_pages = pages + 1,  // page 0 is nobody's
                   .query = query_precision(o.cache.query_dtype, formats.latent, config.is_dsa(), device),
                   .prefill_form = prefill_form(o.prefill_form, config.is_dsa(), o.invariant, device),
                   .device = device.device,
                   .precision = device.precision,
                   .invariant = o.invariant,
                   .draft = o.speculate > 0});
  warn_unknown_tensors(decoder);
  catch_interrupts();
  read_ahead(checkpoint);

  const int64_t chunk = o.chunk > 0 ? o.chunk : default_chunk(config);
  std::optional<Tokenizer::Stream> stream;
  if (tokenizer) stream.emplace(*tokenizer);
  std::string text;
  bool first = true;
  EngineHooks hooks;
  ProgressBar bar("prefill", prompt_tokens > chunk ? prompt_tokens : 0);
  hooks.on_token = [&](int64_t, int32_t token) {
    bar.done();
    std::string piece = stream ? stream->push(token) : fmt::format("{}{}", first ? "" : ",", token);
    first = false;
    if (!o.json) {
      std::fwrite(piece.data(), 1, piece.size(), stdout);
      std::fflush(stdout);
    }
    text += piece;
  };
  Engine engine(decoder, {.chunk = chunk, .max_requests = 1, .speculate = o.speculate}, hooks);
  const int64_t id = engine.add({.prompt = prompt,
                                 .max_new_tokens = o.max_new_tokens,
                                 .sampling = sampling,
                                 .stop_ids = o.ignore_eos ? std::vector<int32_t>{} : config.generation.eos_token_ids});
  while (!interrupted() && engine.step()) bar.update(engine.request(id).prefilled_tokens);
  bar.done();
  if (stream) {
    const std::string tail = stream->finish();
    if (!o.json) std::fwrite(tail.data(), 1, tail.size(), stdout);
    text += tail;
  }

  const RequestStatus& status = engine.request(id);
  const EngineStats& e = engine.stats();
  const DecoderStats& d = decoder.stats();
  const KvCost cost = kv_cost(config, formats.latent, formats.index, o.speculate > 0);
  const auto rate = [](int64_t n, double seconds) { return seconds > 0.0 ? static_cast<double>(n) / seconds : 0.0; };
  const char* finish = is_finished(status.state) ? to_string(status.state) : "interrupted";
  const auto share = [](int64_t part, int64_t whole) {
    return whole > 0 ? static_cast<double>(part) / static_cast<double>(whole) : 0.0;
  };
  const double attention_share = d.total_seconds > 0.0 ? d.attention_seconds / d.total_seconds : 0.0;
  if (o.json) {
    nlohmann::ordered_json out;
    out["text"] = text;
    out["prompt_ids"] = prompt;
    out["ids"] = status.tokens;
    out["finish"] = finish;
    out["prompt_tokens"] = prompt_tokens;
    out["prefilled_tokens"] = status.prefilled_tokens;
    out["generated_tokens"] = e.generated_tokens;
    out["prefill_seconds"] = e.prefill_seconds;
    out["prefill_tokens_per_second"] = rate(e.prompt_tokens, e.prefill_seconds);
    out["decode_seconds"] = e.decode_seconds;
    out["decode_tokens_per_second"] = rate(e.decoded_tokens, e.decode_seconds);
    if (o.speculate > 0) {
      out["speculate"] = o.speculate;
      out["decode_steps"] = e.decode_steps;
      out["drafted_tokens"] = e.drafted_tokens;
      out["accepted_tokens"] = e.accepted_tokens;
      out["acceptance_rate"] = share(e.accepted_tokens, e.drafted_tokens);
    }
    out["kv_bytes_per_token"] = cost.total();
    out["latent_bytes_per_token"] = cost.latent_bytes;
    out["index_bytes_per_token"] = cost.index_bytes;
    if (config.is_dsa()) {
      out["sparse_attended_tokens"] = d.attended_keys;
      out["sparse_visible_tokens"] = d.visible_keys;
    }
    if (!config.is_dsa()) {
      out["prefill_form"] = o.prefill_form;
      out["prefill_steps_expanded"] = d.expanded_steps;
      out["prefill_steps_absorbed"] = d.absorbed_steps;
    }
    out["attention_share_of_time"] = attention_share;
    out["backend"] = decoder.backend().name();
    for (const auto& [op, impl] : decoder.backend().implementations()) out["implementations"][op] = impl;
    out["device"] = to_string(device.device);
    out["projections"] = decoder.compute().name();
    out["gemm_library"] = Projector::gemm_library();
    out["threads"] = machine.pool.num_workers();
    out["invariant"] = o.invariant;
    out["pool_bytes"] = decoder.pool_bytes();
    out["mapped_weight_bytes"] = checkpoint.mapped_bytes();
    out["peak_memory_bytes"] = peak_memory_bytes();
    // A text cut by --max-new-tokens is whole UTF-8 already; replace is for whatever a tokenizer file may hold.
    std::printf("%s\n", out.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  } else if (o.text_only) {
    std::printf("\n");
  } else {
    Table t;
    t.row("prompt", fmt::format("{} tokens", prompt_tokens));
    t.row("generated", fmt::format("{} tokens ({})", e.generated_tokens, finish));
    t.row("prefill", fmt::format("{:.1f} tokens/s ({} in {:.3f} s, chunks of {})",
                                 rate(e.prompt_tokens, e.prefill_seconds), e.prompt_tokens, e.prefill_seconds, chunk));
    t.row("decode", fmt::format("{:.1f} tokens/s ({} in {:.3f} s)", rate(e.decoded_tokens, e.decode_seconds),
                                e.decoded_tokens, e.decode_seconds));
    if (o.speculate > 0)
      t.row("speculation", fmt::format("accepted {} of {} drafts ({:.1f} %), {:.2f} tokens a step", e.accepted_tokens,
                                       e.drafted_tokens, 100.0 * share(e.accepted_tokens, e.drafted_tokens),
                                       share(e.decoded_tokens, e.decode_steps)));
    t.row("KV cache", config.is_dsa()
                          ? fmt::format("{} bytes/token: {} latent {}, {} index keys {}", cost.total(),
                                        cost.latent_bytes, o.cache.kv_dtype, cost.index_bytes, o.cache.index_dtype)
                          : fmt::format("{} bytes/token, {}", cost.total(), o.cache.kv_dtype));
    if (config.is_dsa() && !gpu)
      t.row("sparse layers", fmt::format("attended {} of {} tokens ({:.1f} %)", d.attended_keys, d.visible_keys,
                                         100.0 * share(d.attended_keys, d.visible_keys)));
    t.row("device", device.text);
    const std::string share_text = gpu ? "" : fmt::format("{:.1f} % of the time, ", 100.0 * attention_share);
    t.row("attention",
          fmt::format("{}backend {}, {}", share_text, decoder.backend().name(), implementations_text(decoder)));
    if (!config.is_dsa()) t.row("prefill form", prefill_form_text(o.prefill_form, d));
    t.row("projections",
          gpu ? decoder.compute().name()
              : fmt::format("{}{}; GEMM library {}", decoder.compute().name(), o.invariant ? ", invariant" : "",
                            o.invariant ? "not used" : Projector::gemm_library()));
    t.row("threads", std::to_string(machine.pool.num_workers()));
    t.row("memory",
          fmt::format("peak {}: weights mapped {}, KV pool {}", bytes_text(static_cast<double>(peak_memory_bytes())),
                      bytes_text(static_cast<double>(checkpoint.mapped_bytes())),
                      bytes_text(static_cast<double>(decoder.pool_bytes()))));
    std::printf("\n\n%s", t.text().c_str());
  }
  std::fflush(stdout);
  if (!is_finished(status.state)) throw Exit{kExitInterrupted};
}

}  // namespace
}  // namespace gannet::cli

void add_generate_command(CLI::App& app) {
  using namespace gannet::cli;
  auto options = std::make_shared<GenerateOptions>();
  GenerateOptions& o = *options;
  CLI::App& c = *app.add_subcommand("generate", "Generate text from a checkpoint");
  c.add_option("--model", o.model, "Directory with config.json, safetensors and tokenizer.json")
      ->envname("GANNET_MODEL")
      ->required();
  c.add_option("--prompt", o.prompt,
               "Text to continue; without --prompt, --prompt-file and --ids it is read from standard input");
  c.add_option("--prompt-file", o.prompt_file, "File with the text");
  c.add_option("--ids", o.ids, "Token ids to continue, such as 1,2,3, taken as they are: no BOS is added");
  c.add_option("--tokenizer", o.tokenizer, "tokenizer.json to use instead of the model's");
  c.add_flag("--ignore-eos", o.ignore_eos, "Go on after an end-of-sequence token");
  c.add_flag("--invariant", o.invariant, "The same bits whatever the chunk, page order, threads and batch; slower");
  c.add_option("--max-new-tokens", o.max_new_tokens, "Tokens to generate at most")
      ->check(CLI::Range(int64_t{0}, kMost))
      ->capture_default_str();
  c.add_option("--temperature", o.temperature, "0: the most likely token; default: generation_config.json");
  c.add_option("--top-p", o.top_p, "Sample from the likeliest tokens that reach this probability");
  c.add_option("--seed", o.seed, "Of the random numbers")
      ->check(CLI::Validator(
          [](const std::string& text) {
            uint64_t value = 0;
            const char* end = text.data() + text.size();
            const auto [stop, error] = std::from_chars(text.data(), end, value);
            const bool octal = text.size() > 1 && text[0] == '0';  // which the option's own reader would take it for
            return error == std::errc() && stop == end && !octal
                       ? std::string()
                       : "--seed is " + text + "; accepted: 0 to 18446744073709551615";
          },
          "UINT64"))
      ->capture_default_str();
  c.add_option("--chunk", o.chunk, "Prompt tokens of one prefill step; 0: chosen by the model's size")
      ->check(CLI::Range(int64_t{0}, kMost))
      ->capture_default_str();
  c.add_option("--pages", o.pages, "Pages of the KV pool; 0: as many as prompt and new tokens need")
      ->check(CLI::Range(int64_t{0}, kMost))
      ->capture_default_str();
  c.add_option("--speculate", o.speculate,
               "Tokens that the model's MTP layer drafts for each step; the result is that of plain decoding")
      ->check(CLI::Range(0, gannet::EngineOptions::kMaxSpeculate))
      ->capture_default_str();
  c.add_option("--backend", o.backend, "Attention backend; default: that of the architecture");
  add_prefill_form_option(c, o.prefill_form);
  c.add_flag("--json", o.json, "Print one JSON object at the end instead of text and table");
  c.add_flag("--text-only", o.text_only, "Print the text alone");
  add_cache_options(c, o.cache);
  add_machine_options(c, o.machine);
  add_device_options(c, o.device);
  c.callback([options, &c] {
    options->index_dtype_given = c.count("--index-dtype") > 0;
    run_generate(*options);
  });
}
