// How many cases ran on the CPU and how many on a CUDA device: printed when a test program ends, with each case that
// ran on the CPU alone and the reason. A case counts once for a device, however many implementations of it took it.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <string>

#include "gannet/cuda.h"
#include "gannet/op_plan.h"
#include "gannet/ops.h"

namespace gannet_tests {

class CaseCounts final : public testing::EmptyTestEventListener {
 public:
  /// The one of this program, which gtest owns.
  static CaseCounts& get() {
    static auto* counts = [] {
      auto* c = new CaseCounts;
      testing::UnitTest::GetInstance()->listeners().Append(c);
      return c;
    }();
    return *counts;
  }

  /// A case that the implementations of these devices took. `why`: what those of CUDA say that did not.
  void note(const std::string& name, bool on_cpu, bool on_cuda, const std::string& why) {
    Case& c = cases_[name + " #" + std::to_string(++times_[name])];
    c.cpu = on_cpu;
    c.cuda = on_cuda;
    c.why = why;
  }

  /// A case of a test that has the name of an implementation, or `cuda_auto`, in front of its parameter.
  void OnTestEnd(const testing::TestInfo& test) override {
    const std::string name = std::string(test.test_suite_name()) + "." + test.name();
    const size_t slash = name.rfind('/');
    if (slash == std::string::npos) return;
    const std::string parameter = name.substr(slash + 1);
    for (const gannet::ImplInfo& i : gannet::list_implementations<gannet::Rope>()) {
      if (i.name == "ref" || i.device != gannet::DeviceKind::kCpu || parameter.rfind(i.name + "_", 0) != 0) continue;
      note_test(name.substr(0, slash + 1) + parameter.substr(i.name.size() + 1), test, false);
    }
    for (const char* impl : {"cuda_generic", "cuda_auto"})
      if (parameter.rfind(std::string(impl) + "_", 0) == 0)
        note_test(name.substr(0, slash + 1) + parameter.substr(std::string(impl).size() + 1), test, true);
  }

  void OnTestProgramEnd(const testing::UnitTest&) override {
    if (cases_.empty()) return;
    int64_t cpu = 0, cuda = 0;
    for (const auto& [name, c] : cases_) {
      cpu += c.cpu ? 1 : 0;
      cuda += c.cuda ? 1 : 0;
    }
    std::string why;
    if (gannet::cuda_device_count(&why) == 0) {
      std::printf("cases: %lld on the CPU; none on CUDA: %s\n", static_cast<long long>(cpu), why.c_str());
      return;
    }
    for (const auto& [name, c] : cases_)
      if (c.cpu && !c.cuda) std::printf("left out on CUDA: %s: %s\n", name.c_str(), c.why.c_str());
    std::printf("cases: %lld on the CPU, %lld on CUDA\n", static_cast<long long>(cpu), static_cast<long long>(cuda));
  }

 private:
  struct Case {
    bool cpu = false, cuda = false;
    std::string why = "no such case";
  };

  void note_test(const std::string& name, const testing::TestInfo& test, bool on_cuda) {
    Case& c = cases_[name];
    if (!test.result()->Skipped()) (on_cuda ? c.cuda : c.cpu) = true;
    else if (on_cuda && test.result()->total_part_count() > 0) c.why = test.result()->GetTestPartResult(0).message();
  }

  std::map<std::string, Case> cases_;
  std::map<std::string, int64_t> times_;
};

/// Makes a program count from its start.
inline const bool counts_cases = (CaseCounts::get(), true);

}  // namespace gannet_tests
