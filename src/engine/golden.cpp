#include "engine/golden.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "core/format.h"
#include "gannet/hadamard.h"
#include "gannet/ops.h"
#include "model/json_file.h"

namespace gannet {
inline namespace v0 {
namespace {

constexpr int64_t kMaxGoldenBytes = int64_t{64} << 20;

double log_sum_exp(std::span<const float> logits) {
  double top = logits[0];
  for (const float x : logits) top = std::max(top, double{x});
  double sum = 0.0;
  for (const float x : logits) sum += std::exp(double{x} - top);
  return top + std::log(sum);
}

/// Rows of logits against golden rows of the top 8.
class RowErrors {
 public:
  RowErrors(const std::vector<int32_t>& ids, const std::vector<float>& logprobs, double top1_gap)
      : ids_(ids), logprobs_(logprobs), top1_gap_(top1_gap) {}

  /// `total` is the logarithm of the sum of the exponentials.
  void add(int64_t row, std::span<const float> logits, double total) {
    constexpr int64_t kTop = GoldenPrompt::kTop;
    const float* golden = logprobs_.data() + row * kTop;
    const int32_t* ids = ids_.data() + row * kTop;
    double worst = 0.0;
    for (int64_t i = 0; i < kTop; ++i) {
      const double error = std::abs(double{logits[static_cast<size_t>(ids[i])]} - total - double{golden[i]});
      if (!(error <= worst)) worst = error;  // NaN too, which std::max would drop
    }
    errors_.push_back(std::isnan(worst) ? INFINITY : worst);
    if (double{golden[0]} - double{golden[1]} > top1_gap_) {
      ++compared_;
      if (argmax(logits) != ids[0]) ++wrong_;
    }
  }

  GoldenCheck top1(const std::string& what, double departures, int64_t rows) const {
    return {what, static_cast<double>(wrong_ - rows) <= departures * static_cast<double>(compared_),
            fmt::format("{} of {} rows differ where the golden gap exceeds {}", wrong_, compared_, top1_gap_)};
  }
  /// `rows` is how many there must be; the share `ties` of them, rounded down, are left out, the worst ones.
  GoldenCheck logprobs(const std::string& what, int64_t rows, double ties, const GoldenCriteria& criteria) const {
    std::vector<double> sorted = errors_;
    std::sort(sorted.begin(), sorted.end());
    const auto left_out = static_cast<size_t>(ties * static_cast<double>(sorted.size()));
    // The largest error of 99 % of the positions: the rest are the floor(n / 100) worst ones.
    const double most = sorted.empty() ? 0.0 : sorted[sorted.size() - 1 - sorted.size() / 100];
    const double worst = sorted.empty() ? 0.0 : sorted.back();
    const double rest = sorted.empty() ? 0.0 : sorted[sorted.size() - 1 - left_out];
    const bool passed = static_cast<int64_t>(sorted.size()) == rows &&
                        (!criteria.logprob_most || most <= *criteria.logprob_most) &&
                        (!criteria.logprob_rest || rest <= *criteria.logprob_rest);
    return {
        what, passed,
        fmt::format("{} rows, top 8 off by {:.2e} at 99 % of them, {:.2e} at the worst", sorted.size(), most, worst)};
  }

 private:
  const std::vector<int32_t>& ids_;
  const std::vector<float>& logprobs_;
  double top1_gap_;
  std::vector<double> errors_;  // per row: largest over the golden top 8
  int64_t compared_ = 0, wrong_ = 0;
};

/// One row of one layer's selection: positions, and the scores of all candidates.
struct ChosenRow {
  std::vector<int32_t> positions;
  std::vector<float> scores;
};

/// Scores of the row at `position`, by the operation of its own.
std::vector<float> row_scores(const Context& context, const SelectionEvent& event, int64_t row, int64_t visible,
                              const std::string& impl) {
  std::vector<float> scores(static_cast<size_t>((visible + 3) / 4 * 4), 0.0f);
  auto seq_len = static_cast<int32_t>(visible);
  TensorView q = event.q, weights = event.weights;
  q.shape[0] = weights.shape[0] = 1;
  q.data = event.q.ptr<float>(row);
  weights.data = event.weights.ptr<float>(row);
  std::vector<float> rotated(static_cast<size_t>(q.num_elements()));
  if (event.cache.hadamard) {
    const TensorView to = view(rotated.data(), {1, q.shape[1], q.shape[2]});
    hadamard(context, q, to);
    q = to;
  }
  PageTableView pages = event.step.pages(StepRows::kAll);
  pages.pages.shape[0] = 1;  // the first request's
  run_once(context,
           IndexLogits{.q = q,
                       .weights = weights,
                       .cache = event.cache,
                       .pages = pages,
                       .rows = {.seq_lens = view(&seq_len, {1}), .cu_q_lens = {}},
                       .logits = view(scores.data(), {1, static_cast<int64_t>(scores.size())}),
                       .hadamard = event.cache.hadamard},
           {.impl = impl});
  scores.resize(static_cast<size_t>(visible));
  return scores;
}

struct SelectionComparison {
  int64_t rows = 0;
  int64_t differences = 0;  // golden entries not chosen
  int64_t unexplained = 0;  // entries on one side only that are no tie
  double worst_tie = 0.0;   // largest distance from the k-th score, as a share of the row's range
  double least_overlap = 1.0;
};

void compare_row(std::span<const int32_t> golden, const ChosenRow& ours, double tie, SelectionComparison& total) {
  ++total.rows;
  std::vector<int32_t> mine = ours.positions, missing, extra;
  std::sort(mine.begin(), mine.end());
  std::set_difference(golden.begin(), golden.end(), mine.begin(), mine.end(), std::back_inserter(missing));
  std::set_difference(mine.begin(), mine.end(), golden.begin(), golden.end(), std::back_inserter(extra));
  total.differences += static_cast<int64_t>(missing.size());
  total.least_overlap =
      std::min(total.least_overlap, 1.0 - static_cast<double>(missing.size()) / static_cast<double>(golden.size()));
  if (missing.empty() && extra.empty()) return;
  const auto [low, high] = std::minmax_element(ours.scores.begin(), ours.scores.end());
  const double range = double{*high} - double{*low};
  double kth = *high;
  for (const int32_t p : mine) kth = std::min(kth, double{ours.scores[static_cast<size_t>(p)]});
  for (const auto* side : {&missing, &extra})
    for (const int32_t p : *side) {
      if (p < 0 || static_cast<size_t>(p) >= ours.scores.size()) {
        ++total.unexplained;
        continue;
      }
      const double distance = std::abs(ours.scores[static_cast<size_t>(p)] - kth) / std::max(range, 1e-30);
      total.worst_tie = std::max(total.worst_tie, distance);
      if (distance > tie) ++total.unexplained;
    }
}

}  // namespace

std::vector<GoldenPrompt> load_golden(const std::string& directory, const ModelConfig& config) {
  const std::string json_path = join_path(directory, "golden.json");
  const Json parsed = parse_json("golden", read_file("golden", json_path, kMaxGoldenBytes), json_path);
  const JsonObject described("golden", json_path, "", parsed);
  const SafetensorsFile file = SafetensorsFile::open(join_path(directory, "golden.safetensors"));
  const std::string mtp_path = join_path(directory, "golden_mtp.safetensors");
  std::optional<SafetensorsFile> mtp_file;
  if (file_exists(mtp_path)) mtp_file = SafetensorsFile::open(mtp_path);
  std::vector<GoldenPrompt> prompts;
  for (const auto& [name, unused] : parsed.items()) {
    const JsonObject entry = described.object(name);
    GoldenPrompt p;
    p.name = name;
    p.text = entry.string_or("prompt", "");
    const int64_t n = entry.integer("tokens", 1, std::numeric_limits<int32_t>::max());
    p.mean_nll = entry.number("mean_nll", 0.0, 1e6);
    const std::vector<Json>& greedy = entry.array("greedy_ids");
    const int64_t room = config.max_position_embeddings - n;  // each of them is fed but the last
    if (greedy.empty() || static_cast<int64_t>(greedy.size()) - 1 > room)
      entry.refuse("greedy_ids", fmt::format("1 to {} token ids, which the context has room for", room + 1));
    for (const Json& id : greedy) {
      if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= config.vocab_size)
        entry.refuse("greedy_ids", fmt::format("token ids from 0 to {}", config.vocab_size - 1));
      p.continuation.push_back(id.get<int32_t>());
    }
    const auto copy = [](const auto& span) { return std::vector(span.begin(), span.end()); };
    p.ids = copy(file.require(name + ".ids", {DType::kI32}, {n}).values<int32_t>());
    p.top_ids = copy(file.require(name + ".top8_ids", {DType::kI32}, {n, GoldenPrompt::kTop}).values<int32_t>());
    p.top_logprobs =
        copy(file.require(name + ".top8_logprobs", {DType::kF32}, {n, GoldenPrompt::kTop}).values<float>());
    p.last_logits = copy(file.require(name + ".last_logits", {DType::kF32}, {config.vocab_size}).values<float>());
    for (int32_t layer = 0; layer < static_cast<int32_t>(config.layers.size()); ++layer) {
      const std::string tensor = fmt::format("{}.topk.layer{}.last_rows", name, layer);
      if (file.find(tensor) == nullptr) continue;
      p.selections[layer] = copy(
          file.require(tensor, {DType::kI32}, {GoldenPrompt::kSelectionRows, config.index_topk}).values<int32_t>());
    }
    if (mtp_file && n > 1) {
      const std::string prefix = name + ".mtp.";
      p.mtp_top_ids =
          copy(mtp_file->require(prefix + "top8_ids", {DType::kI32}, {n - 1, GoldenPrompt::kTop}).values<int32_t>());
      p.mtp_top_logprobs =
          copy(mtp_file->require(prefix + "top8_logprobs", {DType::kF32}, {n - 1, GoldenPrompt::kTop}).values<float>());
    }
    const auto check_ids = [&](const std::string& tensor, const std::vector<int32_t>& ids) {
      for (const int32_t id : ids) {
        if (id < 0 || id >= config.vocab_size)
          fail(ErrorCode::kCorruptFile, "golden", "{}: {} holds token id {}; accepted: 0 to {}", directory, tensor, id,
               config.vocab_size - 1);
      }
    };
    check_ids(name + ".ids", p.ids);
    check_ids(name + ".top8_ids", p.top_ids);
    check_ids(name + ".mtp.top8_ids", p.mtp_top_ids);
    const auto check_finite = [&](const std::string& tensor, const std::vector<float>& values) {
      for (const float x : values) {
        if (!std::isfinite(x))
          fail(ErrorCode::kCorruptFile, "golden", "{}: {} holds {}; accepted: finite numbers", directory, tensor, x);
      }
    };
    check_finite(name + ".top8_logprobs", p.top_logprobs);
    check_finite(name + ".last_logits", p.last_logits);
    check_finite(name + ".mtp.top8_logprobs", p.mtp_top_logprobs);
    prompts.push_back(std::move(p));
  }
  if (prompts.empty()) fail(ErrorCode::kCorruptFile, "golden", "{}: holds no prompts", json_path);
  std::stable_sort(prompts.begin(), prompts.end(),
                   [](const GoldenPrompt& a, const GoldenPrompt& b) { return a.ids.size() < b.ids.size(); });
  return prompts;
}

bool has_mtp(const std::vector<GoldenPrompt>& prompts) noexcept {
  return std::any_of(prompts.begin(), prompts.end(), [](const GoldenPrompt& p) { return !p.mtp_top_ids.empty(); });
}

GoldenResult compare_golden(Decoder& decoder, const Context& context, const EngineOptions& options,
                            const GoldenPrompt& prompt, const GoldenCriteria& criteria) {
  const auto n = static_cast<int64_t>(prompt.ids.size());

  // One run: prompt rows against the golden rows, then the greedy continuation.
  double nll = 0.0;
  RowErrors errors(prompt.top_ids, prompt.top_logprobs, criteria.top1_gap);
  RowErrors mtp_errors(prompt.mtp_top_ids, prompt.mtp_top_logprobs, criteria.top1_gap);
  const bool with_mtp = !prompt.mtp_top_ids.empty() && decoder.options().draft;
  std::map<int32_t, std::vector<ChosenRow>> chosen;
  EngineHooks hooks{.all_logits = true};
  hooks.on_logits = [&](int64_t, int64_t position, std::span<const float> logits) {
    if (position >= n) return;
    const double total = log_sum_exp(logits);
    if (position + 1 < n)
      nll += total - double{logits[static_cast<size_t>(prompt.ids[static_cast<size_t>(position + 1)])]};
    errors.add(position, logits, total);
  };
  if (with_mtp)
    hooks.on_mtp_logits = [&](int64_t, int64_t position, std::span<const float> logits) {
      if (position < n - 1) mtp_errors.add(position, logits, log_sum_exp(logits));
    };
  hooks.on_selection = [&](const SelectionEvent& event) {
    if (!prompt.selections.contains(event.layer)) return;
    const std::span<const int32_t> positions = event.step.positions();
    for (int64_t row = 0; row < static_cast<int64_t>(positions.size()); ++row) {
      const int64_t position = positions[static_cast<size_t>(row)];
      if (position < n - GoldenPrompt::kSelectionRows || position >= n) continue;
      ChosenRow c;
      const auto len = *event.chosen.lens.ptr<const int32_t>(row);
      const auto* list = event.chosen.positions.ptr<const int32_t>(row);
      c.positions.assign(list, list + len);
      c.scores = row_scores(context, event, row, position + 1, decoder.options().impl);
      chosen[event.layer].push_back(std::move(c));
    }
  };
  Request request{.prompt = prompt.ids, .max_new_tokens = static_cast<int64_t>(prompt.continuation.size())};
  std::vector<int32_t> continued;
  {
    Engine engine(decoder, options, hooks);
    const int64_t id = engine.add(request);
    engine.run();
    continued = engine.request(id).tokens;
  }

  GoldenResult result{.prompt = prompt.name, .tokens = n, .checks = {}};
  result.checks.push_back(errors.top1("top-1", criteria.top1_departures, criteria.top1_rows));
  const double mean = n > 1 ? nll / static_cast<double>(n - 1) : 0.0;
  const double relative =
      prompt.mean_nll != 0.0 ? std::abs(mean - prompt.mean_nll) / std::abs(prompt.mean_nll) : std::abs(mean);
  const double allowed = n < GoldenCriteria::kShortPrompt ? criteria.nll_relative_short : criteria.nll_relative;
  result.checks.push_back({"mean NLL", relative <= allowed,
                           fmt::format("{:.6f}, golden {:.6f}: off by {:.5f} % of {} %", mean, prompt.mean_nll,
                                       relative * 100.0, allowed * 100.0)});
  result.checks.push_back(errors.logprobs("log-probabilities", n, 0.0, criteria));
  if (with_mtp) {
    result.checks.push_back(mtp_errors.top1("MTP top-1", criteria.mtp_departures, 0));
    result.checks.push_back(mtp_errors.logprobs("MTP log-prob.", n - 1, criteria.mtp_ties, criteria));
  }

  if (!prompt.selections.empty()) {
    SelectionComparison total;
    bool complete_rows = true;
    for (const auto& [layer, golden] : prompt.selections) {
      const std::vector<ChosenRow>& rows = chosen[layer];
      complete_rows = complete_rows && static_cast<int64_t>(rows.size()) == GoldenPrompt::kSelectionRows;
      const size_t k = golden.size() / static_cast<size_t>(GoldenPrompt::kSelectionRows);
      for (size_t r = 0; r < rows.size() && r < static_cast<size_t>(GoldenPrompt::kSelectionRows); ++r)
        compare_row(std::span(golden).subspan(r * k, k), rows[r], criteria.selection_tie.value_or(INFINITY), total);
    }
    const bool passed = complete_rows && total.least_overlap >= criteria.selection_overlap && total.unexplained == 0;
    result.checks.push_back(
        {"selections", passed,
         fmt::format(
             "{} rows: {} entries differ, least overlap {:.2f} %, {} beyond a tie (farthest {:.1e} of the range)",
             total.rows, total.differences, total.least_overlap * 100.0, total.unexplained, total.worst_tie)});
  }

  if (criteria.continuations) {
    const auto departure = static_cast<int64_t>(
        std::mismatch(continued.begin(), continued.end(), prompt.continuation.begin(), prompt.continuation.end())
            .first -
        continued.begin());
    const auto wanted = static_cast<int64_t>(prompt.continuation.size());
    if (departure == wanted) {
      result.checks.push_back({"continuation", true, fmt::format("{} of {} tokens equal", wanted, wanted)});
    } else {
      // After a departure the golden tokens are forced; each of them must be the first here too, or tied with it.
      constexpr double kTie = 2e-4;  // logits; the tie in `recall` is 4e-5 wide, rounding adds about as much
      int64_t row = 0, wrong = 0, ties = 0;
      double widest = 0.0;
      EngineHooks forced_hooks;
      forced_hooks.on_logits = [&](int64_t, int64_t, std::span<const float> logits) {
        if (row >= wanted) return;
        const int32_t golden = prompt.continuation[static_cast<size_t>(row++)];
        const int32_t best = argmax(logits);
        if (best == golden) return;
        const double gap = double{logits[static_cast<size_t>(best)]} - double{logits[static_cast<size_t>(golden)]};
        widest = std::max(widest, gap);
        ++(gap <= kTie ? ties : wrong);
      };
      Engine engine(decoder, options, forced_hooks);
      request.forced = prompt.continuation;
      engine.add(request);
      engine.run();
      result.checks.push_back(
          {"continuation", wrong == 0 && row == wanted,
           fmt::format("departs at token {}; with golden tokens forced {} of {} are first, {} tied (gap {:.1e})",
                       departure + 1, wanted - wrong - ties, wanted, ties, widest)});
    }
  }
  return result;
}

}  // namespace v0
}  // namespace gannet
