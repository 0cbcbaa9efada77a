#include <fmt/core.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <ostream>
#include <thread>

#include "bench/bench.h"
#include "bench_commit.h"
#include "gannet/version.h"

namespace gannet {
inline namespace v0 {
namespace bench {

namespace {
constexpr double kGiga = 1e-9;
constexpr double kMilli = 1e3;
}  // namespace

std::string machine_name() {
  std::string name = "unknown processor";
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string line;
  while (std::getline(cpuinfo, line)) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) name = line.substr(colon + 2);
    break;
  }
  return fmt::format("{}, {} CPUs", name, std::thread::hardware_concurrency());
}

double load_average() {
  double load = 0.0;
  return getloadavg(&load, 1) == 1 ? load : -1.0;
}

void print_roofs(std::ostream& out, const Roofs& r) {
  out << fmt::format("roofs of {} ({} loops), 1 thread / {}:  fp32 {:.1f} / {:.1f} GFLOP/s", machine_name(), r.isa,
                     r.threads, r.fp32_one * kGiga, r.fp32_all * kGiga);
  if (r.bf16_all > 0.0)
    out << fmt::format(",  bf16 dot {:.1f} / {:.1f} GFLOP/s", r.bf16_one * kGiga, r.bf16_all * kGiga);
  out << fmt::format(",  DRAM read {:.1f} / {:.1f} GB/s\n", r.dram_one * kGiga, r.dram_all * kGiga) << std::flush;
}

void print_header(std::ostream& out) {
  out << fmt::format("{:<16} {:<46} {:<12} {:>10} {:>10} {:>9} {:>8} {:>7}  {}\n", "op", "shape", "impl", "min ms",
                     "median ms", "GFLOP/s", "GB/s", "% roof", "bound")
      << std::flush;
}

RoofShare roof_share(const Row& row, const Roofs& roofs) {
  const double compute = row.flops / (row.fp32 ? roofs.fp32_all : roofs.bf16());
  const double memory = row.bytes / roofs.dram_all;
  return {std::max(compute, memory) / row.time.min_seconds, compute >= memory ? "compute" : "DRAM"};
}

void print_row(std::ostream& out, const Row& row, const Roofs& roofs) {
  const RoofShare share = roof_share(row, roofs);
  const double s = row.time.min_seconds;
  std::string more;
  if (row.error >= 0.0) more += fmt::format("  error {:.1e}", row.error);
  for (const auto& [name, ratio] : row.ratios) more += fmt::format("  {:.2f} x {}", ratio, name);
  out << fmt::format("{:<16} {:<46} {:<12} {:>10.4f} {:>10.4f} {:>9.1f} {:>8.1f} {:>6.1f}%  {}{}\n", row.op, row.label,
                     row.impl, s * kMilli, row.time.median_seconds * kMilli, row.flops / s * kGiga,
                     row.bytes / s * kGiga, 100.0 * share.share, share.bound, more)
      << std::flush;
}

std::string to_json_line(nlohmann::ordered_json j, const Roofs& r) {
  char date[32] = "";
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  if (gmtime_r(&now, &utc) != nullptr) std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", &utc);
  j["threads"] = r.threads;
  j["roofs"] = {{"isa", r.isa},
                {"fp32_gflops", r.fp32_all * kGiga},
                {"bf16_gflops", r.bf16_all * kGiga},
                {"dram_gbs", r.dram_all * kGiga}};
  j["load_average"] = load_average();
  j["version"] = version();
  j["commit"] = kCommit;
  j["machine"] = machine_name();
  j["date"] = date;
  return j.dump(-1, ' ', false, decltype(j)::error_handler_t::replace);
}

std::string to_json_line(const Row& row, const Roofs& roofs) {
  const RoofShare share = roof_share(row, roofs);
  const double s = row.time.min_seconds;
  nlohmann::ordered_json j;
  j["op"] = row.op;
  j["shape"] = *row.shape;
  j["impl"] = row.impl;
  j["ms_min"] = s * kMilli;
  j["ms_median"] = row.time.median_seconds * kMilli;
  j["clock"] = row.clock == ClockKind::kWall ? "wall" : "thread CPU time";
  j["calls"] = row.time.calls;
  j["gflops"] = row.flops / s * kGiga;
  j["gbs"] = row.bytes / s * kGiga;
  j["percent_of_roof"] = 100.0 * share.share;
  j["bound"] = share.bound;
  if (row.peer) j["peer"] = true;
  if (row.error >= 0.0) j["relative_error"] = row.error;
  for (const auto& [name, ratio] : row.ratios) j["peer_time_over_ours"][name] = ratio;
  return to_json_line(std::move(j), roofs);
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet
