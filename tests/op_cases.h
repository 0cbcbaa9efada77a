// The grid of src/verify as test assertions, and what the tests of the operations share beside it.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "case_counts.h"
#include "verify/device_mirror.h"
#include "verify/problem.h"
#include "verify/verify.h"

namespace gannet_tests {

/// Runs the grid of one operation, prints its lines, and fails for each that fails and where nothing ran.
void expect_grid(const std::string& op);

/// Whether the implementation of that name takes these arguments, wherever it works; `why`, where given, receives its
/// reason.
template <class Params>
bool takes(const std::string& impl, const Params& params, std::string* why = nullptr) {
  for (const gannet::ImplInfo& info : gannet::list_implementations<Params>()) {
    if (info.name != impl) continue;
    try {
      const gannet::OpPlan<Params> plan(gannet::Context{}, gannet::verify::placed_on(info.device, params),
                                        {.impl = impl});
      return true;
    } catch (const gannet::Error& e) {
      if (e.code() != gannet::ErrorCode::kUnsupported) throw;
      if (why != nullptr) *why = e.what();
      return false;
    }
  }
  if (why != nullptr) *why = impl + " does not offer this operation";
  return false;
}

/// The implementation itself where it takes these arguments, else another of its device that does: the faster sets of a
/// GPU leave what only moves bytes to others.
template <class Params>
std::string or_neighbour(const std::string& impl, const Params& params) {
  if (takes(impl, params)) return impl;
  gannet::DeviceKind device = gannet::DeviceKind::kCpu;
  for (const gannet::ImplInfo& info : gannet::list_all_implementations())
    if (info.name == impl) device = info.device;
  for (const gannet::ImplInfo& info : gannet::list_implementations<Params>())
    if (info.name != "ref" && info.device == device && info.runs_here && takes(info.name, params)) return info.name;
  return impl;
}

/// Runs a call over the memory that it names, whose results are there afterwards: on a CUDA device over copies.
template <class Params>
void run_here(const Params& params, const std::string& impl) {
  for (const gannet::ImplInfo& info : gannet::list_implementations<Params>()) {
    if (info.name != impl || info.device != gannet::DeviceKind::kCuda) continue;
    gannet::verify::DeviceMirror mirror;
    const Params there = mirror.to_device(params);
    const gannet::Context context;
    const gannet::OpPlan<Params> plan(context, there, {.impl = impl});
    plan.run(there, mirror.scratch(plan.workspace_bytes()));
    return mirror.copy_back();
  }
  run_once(gannet::Context{}, params, {.impl = impl});
}

/// Names of the implementations, the oracle left out, that run here and take these arguments; printed. Fails where
/// there is none unless `may_be_none`; a refusal is printed with its reason. across_batches: only those whose bits do
/// not depend on the rest of the batch. not_on_cuda: why the case is none for a GPU.
template <class Params>
std::vector<std::string> taking(const Params& params, bool may_be_none = false, bool across_batches = false,
                                const char* not_on_cuda = nullptr) {
  std::vector<std::string> names;
  bool on_cpu = false, on_cuda = false;
  std::string reasons;
  for (const gannet::ImplInfo& info : gannet::list_implementations<Params>()) {
    if (info.name == "ref") continue;
    const bool cuda = info.device == gannet::DeviceKind::kCuda;
    std::string why;
    if (!info.runs_here) why = "does not run here";
    else if (cuda && not_on_cuda != nullptr) why = std::string("left out: ") + not_on_cuda;
    else if (across_batches && !info.batch_invariant) why = "left out: its bits depend on the batch";
    else if (!takes(info.name, params, &why)) why = "refuses: " + why;
    std::printf("%s %s%s%s\n", info.op.c_str(), info.name.c_str(), why.empty() ? "" : " ", why.c_str());
    if (why.empty()) {
      names.push_back(info.name);
      (cuda ? on_cuda : on_cpu) = true;
    } else if (cuda) {
      reasons += (reasons.empty() ? "" : "; ") + info.name + " " + why;
    }
  }
  const testing::TestInfo* test = testing::UnitTest::GetInstance()->current_test_info();
  CaseCounts::get().note(std::string(test->test_suite_name()) + "." + test->name() + " " + Params::kName, on_cpu,
                         on_cuda, reasons);
  EXPECT_TRUE(may_be_none || !names.empty()) << Params::kName << " has no implementation here for these arguments";
  return names;
}

}  // namespace gannet_tests
