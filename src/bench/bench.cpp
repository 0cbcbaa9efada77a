#include "bench/bench.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <ostream>

#include "bench/prefill_forms.h"
#include "core/format.h"
#include "gannet/executor.h"

namespace gannet {
inline namespace v0 {
namespace bench {

namespace {

// Seconds of roof measurement at the start and after each problem.
constexpr double kRoofSecondsFirst = 1.0;
constexpr double kRoofSecondsLater = 0.15;

struct Contestant {
  std::unique_ptr<Call> call;
  std::vector<double> round_minima;
  int64_t calls = 0;
  bool peer = false;
  Timing timing{};
  double error = -1.0;
};

/// |a - b| / |b|, in fp64; infinite where the sizes differ.
double relative_error(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - b[i]) * (double{a[i]} - b[i]);
    norm += double{b[i]} * b[i];
  }
  return std::sqrt(difference / norm);
}

}  // namespace

double round_minimum(Call& call, int64_t& calls, ClockKind clock, double seconds) {
  double best = 0.0;
  const double start = now(clock);
  double before = start;
  do {
    call.run(calls++);
    const double after = now(clock);
    const double taken = after - before;
    best = best == 0.0 ? taken : std::min(best, taken);
    before = after;
  } while (before - start < seconds);
  return best;
}

Timing timing_of(std::vector<double> minima, int64_t calls) {
  std::sort(minima.begin(), minima.end());
  const size_t n = minima.size();
  return {minima.front(), n % 2 == 1 ? minima[n / 2] : 0.5 * (minima[n / 2 - 1] + minima[n / 2]), calls};
}

void run(const Options& options, std::ostream& out, std::ostream& err) {
  if (options.rounds < 1) fail_argument("bench", "rounds is {}; accepted: 1 and more", options.rounds);
  if (options.clock == ClockKind::kThreadCpu && options.threads != 1)
    fail_argument("bench", "threads is {} with thread CPU time; accepted: 1", options.threads);
  const std::vector<std::string>& ops = options.ops.empty() ? problem_ops() : options.ops;
  std::vector<Maker> makers;
  bool generate = options.ops.empty() && !options.generate.model.empty(), prefill_forms = false;
  for (const std::string& op : ops) {
    if (op == kGenerate) {
      if (options.generate.model.empty())
        fail_argument("bench", "op is generate, and model is empty; accepted: a directory");
      generate = true;
      continue;
    }
    if (op == kPrefillForm) {
      prefill_forms = true;
      continue;
    }
    for (Maker& maker : make_problems(op, options.grid)) makers.push_back(std::move(maker));
  }
  std::ofstream json;
  if (!options.json_file.empty()) {
    json.open(options.json_file, std::ios::app);
    if (!json) fail(ErrorCode::kDevice, "bench", "{} cannot be written", options.json_file);
  }

  ThreadPool pool({.num_threads = options.threads});
  const Context context{.executor = &pool};
  RoofMeter meter(pool, options.clock);
  if (const double load = load_average(); load > 0.5 && options.clock == ClockKind::kWall)
    err << fmt::format("note: the load average is {:.1f}: something else runs here, figures will be low\n", load);
  meter.measure(kRoofSecondsFirst);
  print_roofs(out, meter.roofs());
  if (!makers.empty()) print_header(out);
  for (const Maker& make : makers) {
    const Problem problem = make();
    std::vector<std::string> impls{options.impl};
    if (options.impl == "all") {
      impls = problem.impls;
      std::erase(impls, "ref");  // runs only when it is named: it takes minutes where kernels take milliseconds
    }
    std::vector<Contestant> contestants;
    for (const std::string& impl : impls) {
      try {
        contestants.push_back({.call = problem.bind(context, impl), .round_minima = {}});
      } catch (const Error& e) {
        if (e.code() != ErrorCode::kUnsupported || options.impl != "all") throw;
        err << fmt::format("note: {} {} leaves out {}: {}\n", problem.op, problem.label, impl, e.what());
      }
    }
    for (const Peer& peer : problem.peers)
      contestants.push_back({.call = peer.bind(context), .round_minima = {}, .peer = true});
    if (options.check) {
      if (const std::vector<float> expected = problem.bind(context, "ref")->result(); !expected.empty())
        for (Contestant& c : contestants) c.error = relative_error(c.call->result(), expected);
    }
    for (Contestant& c : contestants) c.call->run(c.calls++);  // first touches and the pool's wake-up are not timed
    for (int round = 0; round < options.rounds; ++round) {
      for (Contestant& c : contestants)
        c.round_minima.push_back(round_minimum(*c.call, c.calls, options.clock, options.min_time));
    }
    meter.measure(kRoofSecondsLater);
    for (Contestant& c : contestants) c.timing = timing_of(c.round_minima, c.calls);
    for (const Contestant& c : contestants) {
      Row row{.op = problem.op,
              .label = problem.label,
              .impl = c.call->impl(),
              .time = c.timing,
              .flops = problem.flops,
              .bytes = problem.bytes,
              .fp32 = problem.fp32,
              .clock = options.clock,
              .shape = problem.shape,
              .peer = c.peer,
              .error = c.error,
              .ratios = {}};
      for (const Contestant& other : contestants) {
        if (other.peer && !c.peer)
          row.ratios.emplace_back(other.call->impl(), other.timing.min_seconds / c.timing.min_seconds);
      }
      print_row(out, row, meter.roofs());
      if (json.is_open()) json << to_json_line(row, meter.roofs()) << '\n' << std::flush;
    }
  }
  if (!makers.empty()) print_roofs(out, meter.roofs());
  if (prefill_forms) run_prefill_forms(context, options, meter.roofs(), out, json.is_open() ? &json : nullptr);
  if (generate)
    run_generate(context, options.generate, options.impl == "all" ? "" : options.impl, options.rounds,
                 options.grid.latent_format, options.grid.index_format, meter.roofs(), out,
                 json.is_open() ? &json : nullptr);
  if (json.is_open() && !json) fail(ErrorCode::kDevice, "bench", "writing {} failed", options.json_file);
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet
