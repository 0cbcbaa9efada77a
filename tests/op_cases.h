// The grid of src/verify as test assertions, and what the tests of the operations share beside it.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "verify/problem.h"
#include "verify/verify.h"

namespace gannet_tests {

/// Runs the grid of one operation, prints its lines, and fails for each that fails and where nothing ran.
void expect_grid(const std::string& op);

/// Names of the implementations, the oracle left out, that run here and take these arguments; printed. Fails where
/// there is none unless `may_be_none`; a refusal is printed with its reason.
template <class Params>
std::vector<std::string> taking(const Params& params, bool may_be_none = false) {
  std::vector<std::string> names;
  for (const gannet::ImplInfo& info : gannet::list_implementations<Params>()) {
    if (info.name == "ref") continue;
    if (!info.runs_here) {
      std::printf("%s %s does not run here\n", info.op.c_str(), info.name.c_str());
      continue;
    }
    try {
      const gannet::OpPlan<Params> plan(gannet::Context{}, params, {.impl = info.name});
      names.push_back(info.name);
      std::printf("%s %s\n", info.op.c_str(), info.name.c_str());
    } catch (const gannet::Error& e) {
      if (e.code() != gannet::ErrorCode::kUnsupported) throw;
      std::printf("%s %s refuses: %s\n", info.op.c_str(), info.name.c_str(), e.what());
    }
  }
  EXPECT_TRUE(may_be_none || !names.empty()) << Params::kName << " has no implementation here for these arguments";
  return names;
}

}  // namespace gannet_tests
