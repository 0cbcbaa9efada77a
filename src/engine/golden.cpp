#include "engine/golden.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>

#include "core/format.h"
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
  PageTableView pages = event.step.pages(StepRows::kAll);
  pages.pages.shape[0] = 1;  // the first request's
  run_once(context,
           IndexLogits{.q = q,
                       .weights = weights,
                       .cache = event.cache,
                       .pages = pages,
                       .rows = {.seq_lens = view(&seq_len, {1}), .cu_q_lens = {}},
                       .logits = view(scores.data(), {1, static_cast<int64_t>(scores.size())})},
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
  std::vector<GoldenPrompt> prompts;
  for (const auto& [name, unused] : parsed.items()) {
    const JsonObject entry = described.object(name);
    GoldenPrompt p;
    p.name = name;
    p.text = entry.string_or("prompt", "");
    const int64_t n = entry.integer("tokens", 1, std::numeric_limits<int32_t>::max());
    p.mean_nll = entry.number("mean_nll", 0.0, 1e6);
    for (const Json& id : entry.array("greedy_ids")) {
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
    const auto check_ids = [&](const std::string& tensor, const std::vector<int32_t>& ids) {
      for (const int32_t id : ids) {
        if (id < 0 || id >= config.vocab_size)
          fail(ErrorCode::kCorruptFile, "golden", "{}: {} holds token id {}; accepted: 0 to {}", directory, tensor, id,
               config.vocab_size - 1);
      }
    };
    check_ids(name + ".ids", p.ids);
    check_ids(name + ".top8_ids", p.top_ids);
    for (const auto* values : {&p.top_logprobs, &p.last_logits}) {
      for (const float x : *values) {
        if (!std::isfinite(x))
          fail(ErrorCode::kCorruptFile, "golden", "{}: {} holds {}; accepted: finite numbers", directory,
               name + (values == &p.top_logprobs ? ".top8_logprobs" : ".last_logits"), x);
      }
    }
    prompts.push_back(std::move(p));
  }
  if (prompts.empty()) fail(ErrorCode::kCorruptFile, "golden", "{}: holds no prompts", json_path);
  std::stable_sort(prompts.begin(), prompts.end(),
                   [](const GoldenPrompt& a, const GoldenPrompt& b) { return a.ids.size() < b.ids.size(); });
  return prompts;
}

GoldenResult compare_golden(Decoder& decoder, const Context& context, const EngineOptions& options,
                            const GoldenPrompt& prompt, const GoldenCriteria& criteria) {
  const auto n = static_cast<int64_t>(prompt.ids.size());
  constexpr int64_t kTop = GoldenPrompt::kTop;

  // One run: prompt rows against the golden rows, then the greedy continuation.
  double nll = 0.0;
  int64_t top1_compared = 0, top1_wrong = 0;
  std::vector<double> errors;  // per position: largest over the golden top 8
  std::map<int32_t, std::vector<ChosenRow>> chosen;
  EngineHooks hooks{.all_logits = true};
  hooks.on_logits = [&](int64_t, int64_t position, std::span<const float> logits) {
    if (position >= n) return;
    const double total = log_sum_exp(logits);
    if (position + 1 < n)
      nll += total - double{logits[static_cast<size_t>(prompt.ids[static_cast<size_t>(position + 1)])]};
    const float* golden = prompt.top_logprobs.data() + position * kTop;
    const int32_t* ids = prompt.top_ids.data() + position * kTop;
    double worst = 0.0;
    for (int64_t i = 0; i < kTop; ++i) {
      const double error = std::abs(double{logits[static_cast<size_t>(ids[i])]} - total - double{golden[i]});
      if (!(error <= worst)) worst = error;  // NaN too, which std::max would drop
    }
    errors.push_back(std::isnan(worst) ? INFINITY : worst);
    if (double{golden[0]} - double{golden[1]} > criteria.top1_gap) {
      ++top1_compared;
      if (argmax(logits) != ids[0]) ++top1_wrong;
    }
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
  result.checks.push_back(
      {"top-1", static_cast<double>(top1_wrong) <= criteria.top1_departures * static_cast<double>(top1_compared),
       fmt::format("{} of {} rows differ where the golden gap exceeds {}", top1_wrong, top1_compared,
                   criteria.top1_gap)});
  const double mean = n > 1 ? nll / static_cast<double>(n - 1) : 0.0;
  const double relative =
      prompt.mean_nll != 0.0 ? std::abs(mean - prompt.mean_nll) / std::abs(prompt.mean_nll) : std::abs(mean);
  const double allowed = n < GoldenCriteria::kShortPrompt ? criteria.nll_relative_short : criteria.nll_relative;
  result.checks.push_back({"mean NLL", relative <= allowed,
                           fmt::format("{:.6f}, golden {:.6f}: off by {:.5f} % of {} %", mean, prompt.mean_nll,
                                       relative * 100.0, allowed * 100.0)});
  std::vector<double> sorted = errors;
  std::sort(sorted.begin(), sorted.end());
  // The largest error of 99 % of the positions: the rest are the floor(n / 100) worst ones.
  const double most = sorted.empty() ? INFINITY : sorted[sorted.size() - 1 - sorted.size() / 100];
  const double worst = sorted.empty() ? INFINITY : sorted.back();
  const bool complete = static_cast<int64_t>(errors.size()) == n;
  result.checks.push_back(
      {"log-probabilities",
       complete && (!criteria.logprob_most || most <= *criteria.logprob_most) &&
           (!criteria.logprob_rest || worst <= *criteria.logprob_rest),
       fmt::format("{} rows, top 8 off by {:.2e} at 99 % of them, {:.2e} at the worst", errors.size(), most, worst)});

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
