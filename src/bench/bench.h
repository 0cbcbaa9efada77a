// `gannet bench`: times operations against this machine's roofs. Roofs and operations alternate in one run, and so do
// the implementations of one problem, so that a slow moment of a shared machine meets all of them.
#pragma once

#include <iosfwd>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "bench/generate.h"
#include "bench/problems.h"
#include "bench/roofs.h"

namespace gannet {
inline namespace v0 {
namespace bench {

/// The name, beside problem_ops(), of whole runs of a checkpoint.
inline constexpr const char* kGenerate = "generate";
/// The name of the comparison of the two forms of dense prefill (bench/prefill_forms.h).
inline constexpr const char* kPrefillForm = "prefill_form";

struct Options {
  std::vector<std::string> ops = {};  ///< of problem_ops(), "generate" or "prefill_form"; empty: problem_ops()
  Grid grid{};
  GenerateGrid generate{};             ///< with a model: whole runs of it after the operations
  std::string impl = {};               ///< a name, "all", or empty: the one that a plan chooses
  int threads = 0;                     ///< 0: as many as the process may run on
  ClockKind clock = ClockKind::kWall;  ///< kThreadCpu: threads must be 1
  int rounds = 5;
  double min_time = 0.2;       ///< seconds a round and implementation, at least one call
  bool check = false;          ///< compare with the oracle where results are compared (Call::result)
  std::string json_file = {};  ///< lines are appended; empty: none
};

/// Times of one implementation on one problem. A round gives its fastest call.
struct Timing {
  double min_seconds = 0.0;     ///< of all rounds
  double median_seconds = 0.0;  ///< of the rounds' minima
  int64_t calls = 0;
};

/// One row of the table.
struct Row {
  std::string op;
  std::string label;
  std::string impl;
  Timing time;
  double flops = 0.0;
  double bytes = 0.0;
  bool fp32 = false;
  ClockKind clock = ClockKind::kWall;
  std::shared_ptr<nlohmann::json> shape;
  bool peer = false;    ///< impl is another library
  double error = -1.0;  ///< relative to the oracle's result, L2; negative: not compared
  /// Peers' least times over this row's, of the same rounds.
  std::vector<std::pair<std::string, double>> ratios;
};

/// Repeats calls for `seconds`, at least one; returns the fastest. `calls` counts them.
double round_minimum(Call& call, int64_t& calls, ClockKind clock, double seconds);
Timing timing_of(std::vector<double> minima, int64_t calls);

/// Prints the table to `out` as it grows, remarks to `err`; appends to the JSON file. Throws gannet::Error.
void run(const Options& options, std::ostream& out, std::ostream& err);

// ---- report.cpp ----

void print_roofs(std::ostream& out, const Roofs& roofs);
void print_header(std::ostream& out);
void print_row(std::ostream& out, const Row& row, const Roofs& roofs);
/// One line with figures, roofs, commit and machine. The machine is its processor's name; no host names.
std::string to_json_line(const Row& row, const Roofs& roofs);
/// The same for figures that are no row of the table.
std::string to_json_line(nlohmann::ordered_json figures, const Roofs& roofs);
/// The share of the nearer roof that the fastest call reached, and which one it is: "compute" or "DRAM".
struct RoofShare {
  double share = 0.0;
  const char* bound = "";
};
RoofShare roof_share(const Row& row, const Roofs& roofs);
/// "AMD EPYC ..., 2 CPUs".
std::string machine_name();
/// 1-minute load average, or a negative number where the system does not tell.
double load_average();

}  // namespace bench
}  // namespace v0
}  // namespace gannet
