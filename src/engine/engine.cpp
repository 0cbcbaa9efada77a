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
  int64_t cached = 0;           // tokens in the cache
  std::vector<int32_t> drafts;  // guesses of what follows the last of status.tokens

  /// The token at a position of prompt and answer; 0 where there is none yet.
  int32_t token_at(int64_t position) const {
    if (position < status.prompt_tokens) return request.prompt[static_cast<size_t>(position)];
    const int64_t made = position - status.prompt_tokens;
    return made < static_cast<int64_t>(status.tokens.size()) ? status.tokens[static_cast<size_t>(made)] : 0;
  }
};

/// One step: requests that extend, then those that decode, q_len rows each.
struct Engine::Batch {
  std::vector<int64_t> requests;
  std::vector<int32_t> seq_lens, prefix_lens, extend_lens, table_rows, ids;
  std::vector<int64_t> first;     // [requests] position of a request's first row
  std::vector<int32_t> accepted;  // [decode requests] rows that stand
  std::vector<int64_t> logit_rows;
  int32_t q_len = 1;
  bool picked = false;  // the decoder picked the tokens: there are no logits

  int64_t num_extends() const noexcept { return static_cast<int64_t>(extend_lens.size()); }
  int64_t rows_of(size_t b) const noexcept { return b < extend_lens.size() ? extend_lens[b] : q_len; }
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
  if (options.speculate < 0 || options.speculate > EngineOptions::kMaxSpeculate)
    fail_argument("Engine", "speculate is {}; accepted: 0 to {}", options.speculate, EngineOptions::kMaxSpeculate);
  if ((options.speculate > 0 || hooks_.on_mtp_logits) && !decoder.options().draft)
    fail_argument("Engine", "speculate is {}; accepted: 0, for the decoder was made without `draft`",
                  options.speculate);
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

void Engine::choose(int64_t id, Running& r, const RowResult& row) {
  const size_t made = r.status.tokens.size();
  if (static_cast<int64_t>(made) >= r.request.max_new_tokens) return finish(r, RequestState::kLength);
  const int32_t token = made < r.request.forced.size() ? r.request.forced[made]
                        : row.logits.empty()           ? row.token
                                                       : r.sampler.sample(row.logits);
  if (token < 0) fail_all_nan();
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

Engine::Batch Engine::compose() const {
  Batch batch;
  const auto count = static_cast<int64_t>(requests_.size());
  int64_t budget = options_.chunk;
  for (int64_t i = 0; i < count && budget > 0; ++i) {
    const Running& r = *requests_[static_cast<size_t>(i)];
    if (r.status.state != RequestState::kPrefill) continue;
    const int64_t n = std::min(budget, r.status.prompt_tokens - r.cached);
    budget -= n;
    batch.requests.push_back(i);
    batch.first.push_back(r.cached);
    batch.prefix_lens.push_back(static_cast<int32_t>(r.cached));
    batch.extend_lens.push_back(static_cast<int32_t>(n));
    batch.seq_lens.push_back(static_cast<int32_t>(r.cached + n));
    batch.table_rows.push_back(r.table_row);
    const auto from = r.request.prompt.begin() + r.cached;
    batch.ids.insert(batch.ids.end(), from, from + n);
  }
  // All decode requests of a step have equally many rows: the one with the fewest drafts decides.
  size_t drafts = static_cast<size_t>(options_.speculate);
  for (const auto& r : requests_)
    if (r->status.state == RequestState::kDecode) drafts = std::min(drafts, r->drafts.size());
  batch.q_len = static_cast<int32_t>(drafts) + 1;
  for (int64_t i = 0; i < count; ++i) {
    const Running& r = *requests_[static_cast<size_t>(i)];
    if (r.status.state != RequestState::kDecode) continue;
    batch.requests.push_back(i);
    batch.first.push_back(r.cached);
    batch.seq_lens.push_back(static_cast<int32_t>(r.cached) + batch.q_len);
    batch.table_rows.push_back(r.table_row);
    batch.ids.push_back(r.status.tokens.back());
    batch.ids.insert(batch.ids.end(), r.drafts.begin(), r.drafts.begin() + static_cast<std::ptrdiff_t>(drafts));
    batch.accepted.push_back(0);
  }
  // Rows whose logits are wanted: the last of a prompt and every decode row; or all.
  int64_t row = 0;
  for (size_t b = 0; b < batch.requests.size(); ++b) {
    const Running& r = *requests_[static_cast<size_t>(batch.requests[b])];
    const bool decodes = b >= batch.extend_lens.size(), ends_prompt = batch.seq_lens[b] == r.status.prompt_tokens;
    const int64_t n = batch.rows_of(b);
    for (int64_t j = 0; j < n; ++j, ++row)
      if (hooks_.all_logits || decodes || (ends_prompt && j == n - 1)) batch.logit_rows.push_back(row);
  }
  return batch;
}

void Engine::forward(Batch& batch) {
  // Where everybody takes the likeliest token and nobody looks at logits, four bytes a row leave the device.
  batch.picked = decoder_->picks_tokens() && !hooks_.on_logits &&
                 std::all_of(batch.requests.begin(), batch.requests.end(), [&](int64_t id) {
                   return requests_[static_cast<size_t>(id)]->request.sampling.temperature == 0.0f;
                 });
  if (batch.picked) tokens_.resize(batch.logit_rows.size());
  else logits_.resize(batch.logit_rows.size() * static_cast<size_t>(decoder_->config().vocab_size));
  decoder_->forward(
      {.seq_lens = batch.seq_lens,
       .prefix_lens = batch.prefix_lens,
       .extend_lens = batch.extend_lens,
       .q_len = batch.q_len,
       .pages = table_.view(gannet::view(batch.table_rows.data(), {static_cast<int64_t>(batch.table_rows.size())}))},
      batch.ids,
      {.logit_rows = batch.logit_rows,
       .logits = batch.picked ? nullptr : logits_.data(),
       .tokens = batch.picked ? tokens_.data() : nullptr,
       .on_selection = hooks_.on_selection});
}

/// Chooses tokens from the logits of a step. Of a decode request's rows those stand whose token was chosen: the first
/// one, and each draft for as long as it is what was chosen before it.
void Engine::take_tokens(Batch& batch) {
  const auto vocab = static_cast<size_t>(decoder_->config().vocab_size);
  size_t next = 0;  // of the rows with a result
  const int64_t num_extends = batch.num_extends();
  for (size_t b = 0; b < batch.requests.size(); ++b) {
    const int64_t id = batch.requests[b], n = batch.rows_of(b);
    Running& r = *requests_[static_cast<size_t>(id)];
    const auto next_row = [&]() -> RowResult {
      const size_t at = next++;
      if (batch.picked) return {.token = tokens_[at]};
      return {.logits = std::span<const float>(logits_).subspan(at * vocab, vocab)};
    };
    if (static_cast<int64_t>(b) < num_extends) {
      r.cached += n;
      r.status.prefilled_tokens = r.cached;
      stats_.prompt_tokens += n;
      const bool ends_prompt = r.cached == r.status.prompt_tokens;
      for (int64_t j = 0; j < n; ++j) {
        const bool chooses = ends_prompt && j == n - 1;
        if (!hooks_.all_logits && !chooses) continue;
        const RowResult at = next_row();
        if (hooks_.on_logits) hooks_.on_logits(id, batch.first[b] + j, at.logits);
        if (chooses) choose(id, r, at);
      }
      continue;
    }
    if (num_extends == 0) ++stats_.decode_steps;
    int32_t& accepted = batch.accepted[b - batch.extend_lens.size()];
    bool stands = true;
    for (int64_t j = 0; j < n; ++j) {
      const RowResult at = next_row();
      if (!stands) continue;
      ++accepted;
      ++r.cached;
      if (num_extends == 0) ++stats_.decoded_tokens;
      if (hooks_.on_logits) hooks_.on_logits(id, batch.first[b] + j, at.logits);
      choose(id, r, at);
      stands = r.status.state == RequestState::kDecode && j + 1 < n &&
               r.status.tokens.back() == r.drafts[static_cast<size_t>(j)];
    }
    stats_.drafted_tokens += n - 1;
    stats_.accepted_tokens += accepted - 1;
  }
}

/// The MTP layer over the rows of the step, and from the last row that stands of each request that decodes on, drafts.
void Engine::run_mtp(const Batch& batch) {
  const StepPlan& plan = decoder_->backend().step();
  const size_t count = batch.requests.size(), num_extends = batch.extend_lens.size();
  std::vector<int32_t> next_ids, rows(count), lens(count);
  for (size_t b = 0; b < count; ++b) {
    const Running& r = *requests_[static_cast<size_t>(batch.requests[b])];
    for (int64_t j = 0; j < batch.rows_of(b); ++j) next_ids.push_back(r.token_at(batch.first[b] + j + 1));
  }
  narrow_rows(plan, batch.accepted, rows);
  narrow_seq_lens(plan, batch.accepted, lens);
  // How many drafts each request takes: no more than can be of use, and than there is room for.
  const int64_t context = decoder_->options().max_context_len, page_size = decoder_->options().page_size;
  std::vector<int64_t> wanted(count, 0);
  int64_t most = 0;
  for (size_t b = 0; b < count; ++b) {
    Running& r = *requests_[static_cast<size_t>(batch.requests[b])];
    r.drafts.clear();
    if (r.status.state != RequestState::kDecode) continue;
    const int64_t left = r.request.max_new_tokens - static_cast<int64_t>(r.status.tokens.size());
    int64_t n = std::min({int64_t{options_.speculate}, left - 1, context - r.cached - 1});
    if (n > 0 && !grow(r, r.cached + 1 + n)) n = std::min(n, r.pages.size() * page_size - r.cached - 1);
    wanted[b] = std::max<int64_t>(n, 0);
    most = std::max(most, wanted[b]);
  }
  const auto vocab = static_cast<size_t>(decoder_->config().vocab_size);
  std::vector<int64_t> logit_rows;
  std::vector<size_t> drafting;  // whose logits those are
  const auto next_drafters = [&](int64_t k) {
    drafting.clear();
    logit_rows.clear();
    for (size_t b = 0; b < count; ++b)
      if (wanted[b] > k) drafting.push_back(b);
  };
  const auto take_drafts = [&](size_t offset) {
    for (size_t i = 0; i < drafting.size(); ++i)
      requests_[static_cast<size_t>(batch.requests[drafting[i]])]->drafts.push_back(
          argmax(std::span(draft_logits_).subspan((offset + i) * vocab, vocab)));
  };

  next_drafters(0);
  if (hooks_.on_mtp_logits)
    for (int64_t i = 0; i < plan.num_rows(); ++i) logit_rows.push_back(i);
  const size_t shown = logit_rows.size();
  for (const size_t b : drafting) logit_rows.push_back(rows[b]);
  draft_logits_.resize(logit_rows.size() * vocab);
  decoder_->draft(next_ids,
                  {.logit_rows = logit_rows, .logits = draft_logits_.data(), .on_selection = hooks_.on_selection});
  take_drafts(shown);
  if (hooks_.on_mtp_logits) {
    size_t row = 0;
    for (size_t b = 0; b < count; ++b) {
      const int64_t standing = b < num_extends ? batch.rows_of(b) : batch.accepted[b - num_extends];
      for (int64_t j = 0; j < batch.rows_of(b); ++j, ++row)
        if (j < standing)
          hooks_.on_mtp_logits(batch.requests[b], batch.first[b] + j,
                               std::span(draft_logits_).subspan(row * vocab, vocab));
    }
  }

  const TensorView table_rows = gannet::view(batch.table_rows.data(), {static_cast<int64_t>(count)});
  std::vector<int32_t> ids(count);
  for (int64_t k = 1; k < most; ++k) {
    next_drafters(k);
    for (size_t b = 0; b < count; ++b) {
      const bool drafts = wanted[b] > k;
      ids[b] = drafts ? requests_[static_cast<size_t>(batch.requests[b])]->drafts.back() : 0;
      if (!drafts) lens[b] = 0, rows[b] = -1;  // padding from here on
      else if (k > 1) rows[b] = static_cast<int32_t>(b);
    }
    for (const size_t b : drafting) logit_rows.push_back(static_cast<int64_t>(b));
    draft_logits_.resize(logit_rows.size() * vocab);
    decoder_->draft_next(
        {.steps = static_cast<int32_t>(k), .seq_lens = lens, .pages = table_.view(table_rows)}, rows, ids,
        {.logit_rows = logit_rows, .logits = draft_logits_.data(), .on_selection = hooks_.on_selection});
    take_drafts(0);
  }
}

bool Engine::step() {
  admit();
  Batch batch = compose();
  if (batch.requests.empty()) return false;
  double& seconds = batch.num_extends() > 0 ? stats_.prefill_seconds : stats_.decode_seconds;
  const auto timed = [&](auto&& work) {
    const auto start = std::chrono::steady_clock::now();
    work();
    seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  timed([&] { forward(batch); });
  take_tokens(batch);
  const bool goes_on = std::any_of(batch.requests.begin(), batch.requests.end(), [&](int64_t id) {
    return !is_finished(requests_[static_cast<size_t>(id)]->status.state);
  });
  if (hooks_.on_mtp_logits || (options_.speculate > 0 && goes_on)) timed([&] { run_mtp(batch); });
  return true;
}

}  // namespace v0
}  // namespace gannet
