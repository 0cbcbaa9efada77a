// What the commands share: options about the machine, one way to report errors, tables, a progress bar, Ctrl-C.
//
// Exit codes: 0 done; 1 a check failed, or the machine did (memory, devices); 2 bad input, one line on stderr that
// names the file or option, the value and what is accepted; 130 ended by Ctrl-C, after what the command prints at its
// end.
#pragma once

#include <CLI/CLI.hpp>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gannet/gannet.h"
#include "model/decoder.h"

namespace gannet::cli {

inline constexpr int kExitFailed = 1;
inline constexpr int kExitBadInput = 2;
inline constexpr int kExitInterrupted = 130;

/// Thrown by a command to end with a code, having printed what it had to say.
struct Exit {
  int code;
};

/// Throws Error(kInvalidArgument) "option is value; accepted: ...".
[[noreturn]] void refuse(const std::string& option, const std::string& value, const std::string& accepted);

struct MachineOptions {
  int threads = 0;
  std::string impl;
};
// A pool of more threads than any machine here has CPUs only takes memory; three times as many as there are is a test.
inline constexpr int kMaxThreads = 1024;
/// --threads (GANNET_THREADS) and --impl (GANNET_IMPL).
void add_machine_options(CLI::App& command, MachineOptions& options);
/// Throws for an --impl that no operation has, or that does not run here.
void check_impl(const std::string& impl);
/// Accepts numbers from `low` to `high`, and no NaN, which CLI::Range lets pass.
CLI::Validator number_from(double low, double high);

/// Where a model runs, chosen from --device and --precision.
struct DeviceOptions {
  std::string device = "auto";
  std::string precision = "auto";
};
/// --device (GANNET_DEVICE) and --precision.
void add_device_options(CLI::App& command, DeviceOptions& options);
struct ChosenDevice {
  Device device{};
  ComputePrecision precision = ComputePrecision::kF32;
  std::string text;  ///< "cuda:0, NVIDIA H200, projections in bf16 (auto)"
};
/// Throws for a device that is not there. `auto` is the device of --impl where that is given; else the first CUDA
/// device, or the CPU where there is none. Projections on a GPU round to bf16 unless the latent cache is fp32.
ChosenDevice choose_device(const DeviceOptions& options, const std::string& impl, LatentFormat latent);

/// A pool of threads and the context over it.
struct Machine {
  explicit Machine(const MachineOptions& options);
  ThreadPool pool;
  Context context;
};

struct CacheOptions {
  std::string kv_dtype = "bf16";
  std::optional<float> kv_scale;
  std::string index_dtype = "fp8";
  bool index_hadamard = false;
  std::string query_dtype = "auto";
  int32_t page_size = 64;
};
/// --kv-dtype, --kv-scale, --index-dtype, --query-dtype and --page-size.
void add_cache_options(CLI::App& command, CacheOptions& options);

/// Formats of the caches, by the names that the command has for them.
struct CacheFormats {
  LatentFormat latent = LatentFormat::kBf16;
  float latent_scale = 0.0f;
  IndexKFormat index = IndexKFormat::kE4m3;
  ScaleFormat index_scale = ScaleFormat::kFp32;
};
inline constexpr const char* kLatentNames = "fp32, bf16, e4m3, packed656, e4m3_per_token";
inline constexpr const char* kIndexNames = "fp32, bf16, fp8, fp8_pow2";
/// Throws for names that are none of those, and for a scale of another format than e4m3, whose scale is 1 by default.
CacheFormats cache_formats(const std::string& kv_dtype, std::optional<float> kv_scale, const std::string& index_dtype);
/// Throws, naming the option, where the model's caches cannot be as the options say: a page size or a latent format
/// that its backend does not take, more pages than have slots; and for options of index keys given to a model that has
/// none.
void check_cache_options(const ModelConfig& config, LatentFormat latent, int32_t page_size, int64_t num_pages,
                         bool index_dtype_given, bool index_hadamard);
/// `auto` rounds on a GPU where projections do, for its tensor cores.
QueryPrecision query_precision(const std::string& name, LatentFormat latent, bool sparse,
                               const ChosenDevice& device = {});
/// --query-dtype alone, and --kv-scale alone.
void add_query_option(CLI::App& command, std::string& query_dtype);
void add_scale_option(CLI::App& command, std::optional<float>& kv_scale);
/// --prefill-form: auto, expanded or absorbed.
void add_prefill_form_option(CLI::App& command, std::string& form);
/// Throws for a name that is none of those, and for a form that the model cannot take there.
PrefillForm prefill_form(const std::string& name, bool sparse, bool invariant, const ChosenDevice& device);
/// What became of it: "auto: expanded in 3 steps, absorbed in 1".
std::string prefill_form_text(const std::string& name, const DecoderStats& stats);
/// --index-hadamard.
void add_hadamard_option(CLI::App& command, bool& index_hadamard);

/// Writes a warning for each tensor that the model does not know (up to a few).
void warn_unknown_tensors(const Decoder& decoder);

/// "name  value" lines, the names padded to one width.
class Table {
 public:
  void row(std::string name, std::string value) { rows_.emplace_back(std::move(name), std::move(value)); }
  std::string text() const;

 private:
  std::vector<std::pair<std::string, std::string>> rows_;
};

/// "1.5 MB", in units of 1000.
std::string bytes_text(double bytes);

/// One line on stderr, only where that is a terminal; erased by done() and at the end of its life.
class ProgressBar {
 public:
  ProgressBar(std::string label, int64_t total);
  ~ProgressBar() { done(); }
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  bool visible() const noexcept { return visible_; }
  void update(int64_t amount);
  void done();

 private:
  std::string label_;
  int64_t total_;
  bool visible_;
  int shown_ = -1;  // per mille
};

/// Set by SIGINT once catch_interrupts() ran; a second SIGINT kills the process as usual.
void catch_interrupts();
bool interrupted() noexcept;

/// Largest resident size of this process so far, in bytes.
int64_t peak_memory_bytes();

}  // namespace gannet::cli
