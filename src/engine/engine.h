// Generation over one or several requests: each step takes what is left of prompts, up to `chunk` tokens in all, and
// one token of every request that decodes. With `speculate` a decoding request brings its next token and up to that
// many drafts of the MTP layer, all verified in one step: those that the model itself would have chosen stand. So the
// tokens are those of plain decoding, sampled ones included; in the decoder's invariant mode bit for bit, else as far
// as rows of larger steps round alike.
//
//   Engine engine(decoder, {.chunk = 512});
//   const int64_t id = engine.add({.prompt = ids, .max_new_tokens = 48, .stop_ids = eos});
//   while (engine.step()) {}
//   engine.request(id).tokens ...
//
// Errors: Error(kInvalidArgument) from add() for a request that can never run: an empty prompt, ids outside the
// vocabulary, a prompt longer than the context or the pool; from the constructor for options outside their range.
// Thread safety: used by one thread at a time.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "engine/sampler.h"
#include "gannet/kv_pool.h"
#include "model/decoder.h"

namespace gannet {
inline namespace v0 {

struct Request {
  std::vector<int32_t> prompt = {};
  int64_t max_new_tokens = 128;
  SamplingOptions sampling = {};
  std::vector<int32_t> stop_ids = {};  ///< generation ends with any of them
  /// Takes these tokens one after the other whatever the model says: to compare a run step by step with another.
  std::vector<int32_t> forced = {};
};

enum class RequestState : uint8_t {
  kWaiting,  ///< for pages
  kPrefill,
  kDecode,
  kStopped,  ///< a stop token came; it is the last of `tokens`
  kLength,   ///< max_new_tokens
  kContext,  ///< the model's context is full
  kPool,     ///< no page is left
};
const char* to_string(RequestState s) noexcept;
constexpr bool is_finished(RequestState s) noexcept { return s >= RequestState::kStopped; }

struct RequestStatus {
  RequestState state = RequestState::kWaiting;
  std::vector<int32_t> tokens;  ///< generated so far
  int64_t prompt_tokens = 0;
  int64_t prefilled_tokens = 0;  ///< of the prompt
};

struct EngineOptions {
  int64_t chunk = 512;       ///< prompt tokens of one step, over all requests
  int32_t max_requests = 8;  ///< that run at once; others wait
  uint64_t page_order = 0;   ///< 0: pages as the allocator gives them; else a seed to shuffle each request's pages with
  /// Drafts a step, at most kMaxSpeculate; needs DecoderOptions::draft. A draft may take a request's next page early.
  int32_t speculate = 0;

  static constexpr int32_t kMaxSpeculate = 7;  // 8 rows a request
};

struct EngineHooks {
  /// A token was chosen.
  std::function<void(int64_t request, int32_t token)> on_token = {};
  /// Logits of the row at `position` of a request. All rows if `all_logits`, else those that a token is chosen from.
  std::function<void(int64_t request, int64_t position, std::span<const float> logits)> on_logits = {};
  bool all_logits = false;
  std::function<void(const SelectionEvent&)> on_selection = {};
  /// Logits of the MTP layer for every row that stands: of the token at position + 2. Runs that layer, drafts or not.
  std::function<void(int64_t request, int64_t position, std::span<const float> logits)> on_mtp_logits = {};
};

struct EngineStats {
  int64_t prompt_tokens = 0;
  int64_t generated_tokens = 0;
  double prefill_seconds = 0.0;  ///< of steps that held prompt tokens
  double decode_seconds = 0.0;   ///< of the other steps
  int64_t decoded_tokens = 0;    ///< in those: the first token of a request comes with its prefill
  int64_t decode_steps = 0;      ///< requests in them: without drafts each makes one token
  int64_t drafted_tokens = 0;    ///< verified
  int64_t accepted_tokens = 0;   ///< of those
};

class Engine {
 public:
  /// The decoder outlives the engine; its pools are this engine's alone.
  Engine(Decoder& decoder, const EngineOptions& options = {}, EngineHooks hooks = {});
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// Number of the request: 0, 1, ...
  int64_t add(const Request& request);
  /// Runs one step; false when nothing is left to do.
  bool step();
  void run() {
    while (step()) {
    }
  }
  const RequestStatus& request(int64_t id) const;
  const EngineStats& stats() const noexcept { return stats_; }

 private:
  struct Running;
  struct Batch;
  void admit();
  Batch compose() const;
  void forward(Batch& batch);
  void take_tokens(Batch& batch);
  void run_mtp(const Batch& batch);
  void finish(Running& r, RequestState state);
  bool grow(Running& r, int64_t tokens);
  /// What a row of the step says about the next token: logits, or the likeliest token where the decoder picked it.
  struct RowResult {
    std::span<const float> logits = {};
    int32_t token = 0;
  };
  void choose(int64_t id, Running& r, const RowResult& row);

  Decoder* decoder_;
  EngineOptions options_;
  EngineHooks hooks_;
  PageAllocator pages_;
  PageTable table_;
  std::mt19937_64 shuffle_;
  std::vector<std::unique_ptr<Running>> requests_;
  std::vector<int32_t> free_rows_;
  std::vector<float> logits_, draft_logits_;
  std::vector<int32_t> tokens_;  // of the rows of a step whose logits nobody asked for
  EngineStats stats_;
};

}  // namespace v0
}  // namespace gannet
