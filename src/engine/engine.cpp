#include "engine/engine.h"

#include <algorithm>
#include <chrono>

#include "core/format.h"

namespace gannet {
inline namespace v0 {

const char* to_string(RequestState s) noexcept {
  switch (s) {
    case RequestState::kWaiting: return "waiting";
    case RequestState::kPrefill: return "prefill";
    case RequestState::kDecode: return "decode";
    case RequestState::kStopped: return "stop token";
    case RequestState::kLength: return "max new tokens";
    case RequestState::kContext: return "context full";
    case RequestState::kPool: return "no page left";
  }
  return "?";
}

struct Engine::Running {
  explicit Running(const Request& r) : request(r), sampler(r.sampling) {}
  Request request;
  Sampler sampler;
  RequestStatus status;
  PageList pages;
  int32_t table_row = -1;
  int64_t cached = 0;  // tokens in the cache
};

Engine::Engine(Decoder& decoder, const EngineOptions& options, EngineHooks hooks)
    : decoder_(&decoder),
      options_(options),
      hooks_(std::move(hooks)),
      pages_(decoder.num_pages()),
      table_(options.max_requests,
             static_cast<int32_t>(std::min(pages_for(decoder.options().max_context_len, decoder.options().page_size),
                                           std::max<int64_t>(1, decoder.num_pages() - 1)))),
      shuffle_(options.page_order) {
  if (options.chunk < 1) fail_argument("Engine", "chunk is {}; accepted: 1 and more", options.chunk);
  for (int32_t row = options.max_requests - 1; row >= 0; --row) free_rows_.push_back(row);
}

Engine::~Engine() = default;

int64_t Engine::add(const Request& request) {
  const auto n = static_cast<int64_t>(request.prompt.size());
  const int64_t context = decoder_->options().max_context_len;
  const int64_t pool = (decoder_->num_pages() - 1) * decoder_->options().page_size;
  if (n == 0) fail_argument("prompt", "the prompt is empty; accepted: 1 token and more");
  if (n > context) fail_argument("prompt", "the prompt has {} tokens; the context holds {}", n, context);
  if (n > pool)
    fail_argument("prompt", "the prompt has {} tokens; the pool holds {} ({} pages of {})", n, pool,
                  decoder_->num_pages() - 1, decoder_->options().page_size);
  if (request.max_new_tokens < 0)
    fail_argument("prompt", "max_new_tokens is {}; accepted: 0 and more", request.max_new_tokens);
  for (const auto* ids : {&request.prompt, &request.forced})
    for (const int32_t id : *ids)
      if (id < 0 || id >= decoder_->config().vocab_size)
        fail_argument("prompt", "token id is {}; accepted: 0 to {}", id, decoder_->config().vocab_size - 1);
  auto running = std::make_unique<Running>(request);
  running->status.prompt_tokens = n;
  requests_.push_back(std::move(running));
  return static_cast<int64_t>(requests_.size()) - 1;
}

const RequestStatus& Engine::request(int64_t id) const {
  if (id < 0 || id >= static_cast<int64_t>(requests_.size()))
    fail_argument("Engine", "request is {}; there are {}", id, requests_.size());
  return requests_[static_cast<size_t>(id)]->status;
}

/// Requests start in order, each when pages for its whole prompt are there.
void Engine::admit() {
  for (auto& r : requests_) {
    if (r->status.state != RequestState::kWaiting) continue;
    if (free_rows_.empty()) return;
    r->table_row = free_rows_.back();
    if (!grow(*r, r->status.prompt_tokens)) {
      r->table_row = -1;
      return;
    }
    free_rows_.pop_back();
    r->status.state = RequestState::kPrefill;
  }
}

bool Engine::grow(Running& r, int64_t tokens) {
  const int64_t missing = pages_for(tokens, decoder_->options().page_size) - r.pages.size();
  if (missing <= 0) return true;
  std::optional<PageList> more = pages_.try_acquire(missing);
  if (!more) return false;
  if (options_.page_order != 0) {
    std::vector<int64_t> order(static_cast<size_t>(missing));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(i);
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[shuffle_() % i]);
    for (const int64_t i : order) r.pages.append(more->ref(i));
  } else {
    r.pages.append(std::move(*more));
  }
  table_.set_row(r.table_row, r.pages.ids());
  return true;
}

void Engine::finish(Running& r, RequestState state) {
  r.status.state = state;
  r.pages.clear();
  table_.clear_row(r.table_row);
  free_rows_.push_back(r.table_row);
  r.table_row = -1;
}

void Engine::choose(int64_t id, Running& r, std::span<const float> logits) {
  const size_t made = r.status.tokens.size();
  if (static_cast<int64_t>(made) >= r.request.max_new_tokens) return finish(r, RequestState::kLength);
  const int32_t token = made < r.request.forced.size() ? r.request.forced[made] : r.sampler.sample(logits);
  r.status.tokens.push_back(token);
  ++stats_.generated_tokens;
  if (hooks_.on_token) hooks_.on_token(id, token);
  const std::vector<int32_t>& stops = r.request.stop_ids;
  if (std::find(stops.begin(), stops.end(), token) != stops.end()) return finish(r, RequestState::kStopped);
  if (static_cast<int64_t>(made) + 1 >= r.request.max_new_tokens) return finish(r, RequestState::kLength);
  if (r.cached >= decoder_->options().max_context_len) return finish(r, RequestState::kContext);
  if (!grow(r, r.cached + 1)) return finish(r, RequestState::kPool);
  r.status.state = RequestState::kDecode;
}

bool Engine::step() {
  admit();
  // Requests that extend come first in a step.
  std::vector<int64_t> batch;
  std::vector<int32_t> seq_lens, prefix_lens, extend_lens, rows, ids;
  int64_t budget = options_.chunk;
  const auto count = static_cast<int64_t>(requests_.size());
  for (int64_t i = 0; i < count && budget > 0; ++i) {
    const Running& r = *requests_[static_cast<size_t>(i)];
    if (r.status.state != RequestState::kPrefill) continue;
    const int64_t n = std::min(budget, r.status.prompt_tokens - r.cached);
    budget -= n;
    batch.push_back(i);
    prefix_lens.push_back(static_cast<int32_t>(r.cached));
    extend_lens.push_back(static_cast<int32_t>(n));
    seq_lens.push_back(static_cast<int32_t>(r.cached + n));
    rows.push_back(r.table_row);
    ids.insert(ids.end(), r.request.prompt.begin() + r.cached, r.request.prompt.begin() + r.cached + n);
  }
  const size_t num_extends = batch.size();
  for (int64_t i = 0; i < count; ++i) {
    const Running& r = *requests_[static_cast<size_t>(i)];
    if (r.status.state != RequestState::kDecode) continue;
    batch.push_back(i);
    seq_lens.push_back(static_cast<int32_t>(r.cached + 1));
    rows.push_back(r.table_row);
    ids.push_back(r.status.tokens.back());
  }
  if (batch.empty()) return false;

  // Rows whose logits are wanted: the last of a prompt and every decode row; or all.
  std::vector<int64_t> logit_rows;
  int64_t row = 0;
  for (size_t b = 0; b < batch.size(); ++b) {
    const int64_t n = b < num_extends ? extend_lens[b] : 1;
    const Running& r = *requests_[static_cast<size_t>(batch[b])];
    const bool ends_prompt = b >= num_extends || seq_lens[b] == r.status.prompt_tokens;
    for (int64_t j = 0; j < n; ++j, ++row)
      if (hooks_.all_logits || (ends_prompt && j == n - 1)) logit_rows.push_back(row);
  }
  const int64_t vocab = decoder_->config().vocab_size;
  logits_.resize(logit_rows.size() * static_cast<size_t>(vocab));

  const auto start = std::chrono::steady_clock::now();
  decoder_->forward({.seq_lens = seq_lens,
                     .prefix_lens = prefix_lens,
                     .extend_lens = extend_lens,
                     .pages = table_.view(gannet::view(rows.data(), {static_cast<int64_t>(rows.size())}))},
                    ids, {.logit_rows = logit_rows, .logits = logits_.data(), .on_selection = hooks_.on_selection});
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  (num_extends > 0 ? stats_.prefill_seconds : stats_.decode_seconds) += seconds;

  const float* logits = logits_.data();
  for (size_t b = 0; b < batch.size(); ++b) {
    Running& r = *requests_[static_cast<size_t>(batch[b])];
    const int64_t n = b < num_extends ? extend_lens[b] : 1;
    const int64_t first = r.cached;
    r.cached += n;
    if (b < num_extends) {
      r.status.prefilled_tokens = r.cached;
      stats_.prompt_tokens += n;
    } else if (num_extends == 0) {
      ++stats_.decoded_tokens;
    }
    const bool ends_prompt = b >= num_extends || r.cached == r.status.prompt_tokens;
    for (int64_t j = 0; j < n; ++j) {
      const bool chooses = ends_prompt && j == n - 1;
      if (!hooks_.all_logits && !chooses) continue;
      const std::span<const float> at(logits, static_cast<size_t>(vocab));
      logits += vocab;
      if (hooks_.on_logits) hooks_.on_logits(batch[b], first + j, at);
      if (chooses) choose(batch[b], r, at);
    }
  }
  return true;
}

}  // namespace v0
}  // namespace gannet
