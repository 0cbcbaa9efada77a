#include "cli.h"

#include <fmt/core.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <limits>

#include "model/json_file.h"

namespace gannet::cli {
namespace {

volatile std::sig_atomic_t interrupt_seen = 0;

extern "C" void on_interrupt(int) {
  interrupt_seen = 1;
  std::signal(SIGINT, SIG_DFL);
}

constexpr int kBarWidth = 30;

}  // namespace

void refuse(const std::string& option, const std::string& value, const std::string& accepted) {
  throw Error(ErrorCode::kInvalidArgument, fmt::format("{} is {}; accepted: {}", option, value, accepted));
}

void add_machine_options(CLI::App& command, MachineOptions& options) {
  command.add_option("--threads", options.threads, "Threads; 0: as many as this process may run on")
      ->envname("GANNET_THREADS")
      ->check(CLI::Range(0, kMaxThreads))
      ->capture_default_str();
  command
      .add_option(
          "--impl", options.impl,
          "Implementation to force for every attention operation (see gannet info); default: the best that runs here")
      ->envname("GANNET_IMPL");
}

Machine::Machine(const MachineOptions& options) : pool({.num_threads = options.threads}), context{.executor = &pool} {}

void check_impl(const std::string& impl) {
  if (impl.empty()) return;
  std::string names;
  bool known = false, here = false;
  for (const ImplInfo& i : list_all_implementations()) {
    known = known || i.name == impl;
    here = here || (i.name == impl && i.runs_here);
    if (i.runs_here && names.find(i.name) == std::string::npos)
      names += (names.empty() ? "" : ", ") + std::string(i.name);
  }
  if (!known) refuse("--impl", impl, names);
  if (!here) refuse("--impl", impl + ", which does not run on this machine", names);
}

void add_device_options(CLI::App& command, DeviceOptions& options) {
  command
      .add_option(
          "--device", options.device,
          "Where the model runs: cpu, cuda, cuda:N, or auto: the first CUDA device, the CPU where there is none")
      ->envname("GANNET_DEVICE")
      ->capture_default_str();
  command
      .add_option(
          "--precision", options.precision,
          "What a GPU's projections round weights and activations to: fp32, bf16, or auto: bf16 unless the latent "
          "cache is fp32")
      ->capture_default_str();
}

ChosenDevice choose_device(const DeviceOptions& options, const std::string& impl, LatentFormat latent) {
  std::string why;
  const int count = cuda_device_count(&why);
  std::string accepted = "auto, cpu";
  if (count > 0) accepted += ", cuda";
  for (int i = 0; i < count; ++i) accepted += fmt::format(", cuda:{}", i);
  ChosenDevice c;
  std::string reason;
  int index = -1;
  if (options.device == "auto") {
    std::optional<DeviceKind> of_impl;
    for (const ImplInfo& i : list_all_implementations())
      if (i.name == impl) of_impl = i.device;
    const bool cuda = of_impl ? *of_impl == DeviceKind::kCuda : count > 0;
    if (cuda) index = 0;
    reason = of_impl ? fmt::format(" (auto: the device of --impl {})", impl)
             : cuda  ? " (auto)"
                     : fmt::format(" (auto: no CUDA device, {})", why);
  } else if (options.device.rfind("cuda", 0) == 0) {
    const std::string rest = options.device.substr(4);
    if (rest.empty()) index = 0;
    for (int i = 0; i < count; ++i)
      if (rest == fmt::format(":{}", i)) index = i;
    if (count == 0) refuse("--device", options.device, fmt::format("{} (no CUDA device: {})", accepted, why));
    if (index < 0) refuse("--device", options.device, accepted);
  } else if (options.device != "cpu") {
    refuse("--device", options.device, accepted);
  }
  const bool narrow = latent != LatentFormat::kF32;
  if (options.precision != "auto" && options.precision != "fp32" && options.precision != "bf16")
    refuse("--precision", options.precision, "auto, fp32, bf16");
  if (index < 0) {
    if (options.precision == "bf16") refuse("--precision", "bf16", "auto, fp32 on the CPU");
    c.text = "cpu" + reason;
    return c;
  }
  c.device = {DeviceKind::kCuda, index};
  c.precision = options.precision == "bf16" || (options.precision == "auto" && narrow) ? ComputePrecision::kBf16
                                                                                       : ComputePrecision::kF32;
  c.text = fmt::format("{}, {}{}", to_string(c.device), cuda_device_name(index), reason);
  return c;
}

CLI::Validator number_from(double low, double high) {
  return CLI::Validator(
      [low, high](const std::string& text) {
        double value = 0.0;
        const char* const end = text.data() + text.size();
        const auto [stop, error] = std::from_chars(text.data(), end, value);
        if (error == std::errc() && stop == end && value >= low && value <= high) return std::string();
        return fmt::format("\"{}\" is no number from {} to {}", text, low, high);
      },
      fmt::format("NUMBER in [{} - {}]", low, high));
}

void add_cache_options(CLI::App& command, CacheOptions& options) {
  command.add_option("--kv-dtype", options.kv_dtype, fmt::format("Latent cache: {}", kLatentNames))
      ->capture_default_str();
  add_scale_option(command, options.kv_scale);
  command
      .add_option("--index-dtype", options.index_dtype,
                  fmt::format("Index-key cache of sparse models: {} (fp8 with power-of-two scales)", kIndexNames))
      ->capture_default_str();
  add_hadamard_option(command, options.index_hadamard);
  add_query_option(command, options.query_dtype);
  command
      .add_option("--page-size", options.page_size, "Tokens of a page: 32 or 64 for dense models, 64 for sparse ones")
      ->capture_default_str();
}

CacheFormats cache_formats(const std::string& kv_dtype, std::optional<float> kv_scale, const std::string& index_dtype) {
  CacheFormats f;
  bool found = false;
  for (const LatentFormat latent : {LatentFormat::kF32, LatentFormat::kBf16, LatentFormat::kE4m3,
                                    LatentFormat::kPacked656, LatentFormat::kE4m3PerToken})
    if (kv_dtype == to_string(latent)) f.latent = latent, found = true;
  if (!found) refuse("--kv-dtype", kv_dtype, kLatentNames);
  if (f.latent == LatentFormat::kE4m3) f.latent_scale = kv_scale.value_or(1.0f);
  else if (kv_scale) refuse("--kv-scale", fmt::format("{}", *kv_scale), "none, but with --kv-dtype e4m3");
  if (f.latent == LatentFormat::kE4m3 && !(std::isfinite(f.latent_scale) && f.latent_scale > 0.0f))
    refuse("--kv-scale", fmt::format("{}", f.latent_scale), "a finite positive number");
  if (index_dtype == "fp32") f.index = IndexKFormat::kF32;
  else if (index_dtype == "bf16") f.index = IndexKFormat::kBf16;
  else if (index_dtype == "fp8") f.index = IndexKFormat::kE4m3;
  else if (index_dtype == "fp8_pow2") f.index_scale = ScaleFormat::kPowerOfTwo;
  else refuse("--index-dtype", index_dtype, kIndexNames);
  return f;
}

void check_cache_options(const ModelConfig& config, LatentFormat latent, int32_t page_size, int64_t num_pages,
                         bool index_dtype_given, bool index_hadamard) {
  if (!config.is_dsa()) {
    if (index_dtype_given) refuse("--index-dtype", "given", "only for models with an indexer, which this one has not");
    if (index_hadamard) refuse("--index-hadamard", "given", "only for models with an indexer, which this one has not");
  }
  if (page_size != 64 && (config.is_dsa() || page_size != 32))
    refuse("--page-size", std::to_string(page_size), config.is_dsa() ? "64, for models with an indexer" : "32 or 64");
  std::string formats;
  bool known = false;
  for (const LatentFormat f : latent_formats(config)) {
    formats += fmt::format("{}{}", formats.empty() ? "" : ", ", to_string(f));
    known = known || f == latent;
  }
  if (!known) refuse("--kv-dtype", to_string(latent), formats + ", for this model");
  const int64_t most = std::numeric_limits<int32_t>::max() / page_size - 1;
  if (num_pages > most)
    refuse("--pages", std::to_string(num_pages), fmt::format("at most {} of {} tokens", most, page_size));
}

QueryPrecision query_precision(const std::string& name, LatentFormat latent, bool sparse, const ChosenDevice& device) {
  // Measured on tiny-dsv32 with bf16 latents and fp8 index keys: bf16 queries move the mean NLL by at most 0.01 % more
  // and prefill 1.5 times as fast. In dense models they would round the expanded keys and values too: v3-fp8 moved
  // by 1.4 %.
  if (name == "auto" && device.device.kind == DeviceKind::kCuda)
    return device.precision == ComputePrecision::kBf16 ? QueryPrecision::kBf16 : QueryPrecision::kF32;
  if (name == "auto") return sparse && latent != LatentFormat::kF32 ? QueryPrecision::kBf16 : QueryPrecision::kF32;
  if (name == "fp32") return QueryPrecision::kF32;
  if (name == "bf16") return QueryPrecision::kBf16;
  refuse("--query-dtype", name, "auto, fp32, bf16");
}

void add_query_option(CLI::App& command, std::string& query_dtype) {
  command
      .add_option(
          "--query-dtype", query_dtype,
          "Queries as attention reads them: fp32, bf16, or auto: bf16 in sparse models unless the latent cache is fp32")
      ->capture_default_str();
}

void add_scale_option(CLI::App& command, std::optional<float>& kv_scale) {
  command.add_option("--kv-scale", kv_scale,
                     "The scale of --kv-dtype e4m3: a value is stored divided by it; default 1");
}

void add_prefill_form_option(CLI::App& command, std::string& form) {
  command
      .add_option("--prefill-form", form,
                  "Attention of a dense model's prompt: expanded (keys and values of every head), absorbed (over the "
                  "latents, as decode), or auto: on a CPU the one that measured rates say is faster for each step")
      ->capture_default_str();
}

PrefillForm prefill_form(const std::string& name, bool sparse, bool invariant, const ChosenDevice& device) {
  for (const PrefillForm form : {PrefillForm::kAuto, PrefillForm::kExpanded, PrefillForm::kAbsorbed}) {
    if (name != to_string(form)) continue;
    const std::string accepted = prefill_form_refusal(form, only_prefill_form(sparse, invariant, device.device));
    if (!accepted.empty()) refuse("--prefill-form", name, accepted);
    return form;
  }
  refuse("--prefill-form", name, "auto, expanded, absorbed");
}

std::string prefill_form_text(const std::string& name, const DecoderStats& stats) {
  return fmt::format("{}: expanded in {} steps, absorbed in {}", name, stats.expanded_steps, stats.absorbed_steps);
}

void add_hadamard_option(CLI::App& command, bool& index_hadamard) {
  command.add_flag("--index-hadamard", index_hadamard,
                   "Keep index keys rotated by the Walsh-Hadamard matrix, as DeepSeek-V3.2's own code does");
}

void warn_unknown_tensors(const Decoder& decoder) {
  constexpr size_t kShown = 3;
  const std::vector<std::string>& names = decoder.unknown_tensors();
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i)
    std::fprintf(stderr, "gannet: warning: tensor %s is not part of this model and is not used\n",
                 show_text(names[i]).c_str());
  if (names.size() > kShown)
    std::fprintf(stderr, "gannet: warning: and %zu more tensors that are not used\n", names.size() - kShown);
}

std::string Table::text() const {
  size_t width = 0;
  for (const auto& [name, value] : rows_) width = std::max(width, name.size());
  std::string out;
  for (const auto& [name, value] : rows_) out += fmt::format("{:<{}}  {}\n", name, width, value);
  return out;
}

std::string bytes_text(double bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB"};
  size_t unit = 0;
  while (bytes >= 1000.0 && unit + 1 < std::size(kUnits)) {
    bytes /= 1000.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{:.0f} B", bytes) : fmt::format("{:.1f} {}", bytes, kUnits[unit]);
}

ProgressBar::ProgressBar(std::string label, int64_t total)
    : label_(std::move(label)), total_(total), visible_(total > 0 && isatty(STDERR_FILENO) == 1) {}

void ProgressBar::update(int64_t amount) {
  if (!visible_) return;
  const int per_mille = static_cast<int>(std::clamp<int64_t>(amount, 0, total_) * 1000 / total_);
  if (per_mille == shown_) return;
  shown_ = per_mille;
  const auto filled = static_cast<size_t>(per_mille * kBarWidth / 1000);
  std::fputs(fmt::format("\r{} [{}{}] {:3d} %", label_, std::string(filled, '#'),
                         std::string(static_cast<size_t>(kBarWidth) - filled, ' '), per_mille / 10)
                 .c_str(),
             stderr);
  std::fflush(stderr);
}

void ProgressBar::done() {
  if (!visible_ || shown_ < 0) return;
  std::fputs("\r\x1b[K", stderr);
  std::fflush(stderr);
  shown_ = -1;
}

void catch_interrupts() {
  interrupt_seen = 0;
  std::signal(SIGINT, on_interrupt);
}

bool interrupted() noexcept { return interrupt_seen != 0; }

int64_t peak_memory_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

}  // namespace gannet::cli
