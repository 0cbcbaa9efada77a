// What no result may depend on, for every operation and every CPU implementation, bit for bit: bytes outside the mask,
// scratch and what the outputs held before (NaN, infinities, 1e30); the run, the number of workers and the order of
// their tasks; the order of the pages; the other rows and requests of the batch and the rows of the own request. Then
// the same for whole sequences of steps through the backends, and several of them side by side in several threads.
#include <gtest/gtest.h>

#include <atomic>
#include <iostream>
#include <map>
#include <set>
#include <thread>

#include "core/op_list.h"
#include "harness/backend_cases.h"
#include "harness/odd_executor.h"
#include "harness/op_problems.h"

namespace gannet_test {
namespace {

using namespace gannet;

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(__aarch64__)  // under an emulator, mostly
constexpr uint64_t kProblems = 5, kSequences = 3;
#else
constexpr uint64_t kProblems = 150, kSequences = 30;
#endif
constexpr int kRuns = 20;  // what the contract asks for

std::vector<uint8_t> bytes_of(uint64_t seed, size_t n = 400) {
  verify::Rng rng(seed);
  std::vector<uint8_t> bytes(n);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(rng.next() >> 56);
  return bytes;
}

/// `formats`: combinations of types and formats that the problems go through at least.
template <class Params>
void expect_invariance(size_t formats) {
  std::set<std::string> seen;
  std::string names;
  for (const ImplInfo& info : list_implementations<Params>())
    if (info.runs_here && info.device == DeviceKind::kCpu) names += " " + info.name;
  std::cout << Params::kName << ":" << names << "\n";
  for (uint64_t seed = 0; seed < kProblems; ++seed) {
    const std::vector<uint8_t> bytes = bytes_of(seed);
    try {
      seen.insert(check_every_invariance<Params>(Source(bytes), seed < 10 ? kRuns - 1 : 1));
    } catch (const Failure& e) {
      FAIL() << "problem " << seed << ": " << e.what();
    }
  }
  seen.erase("");
  for (const std::string& format : seen) std::cout << "  " << format << "\n";
  if (kProblems >= 150) {
    EXPECT_GE(seen.size(), formats);
  }
}

size_t formats_of(const std::string& op) {
  const std::map<std::string, size_t> formats = {
      {"latent_write", 10}, {"latent_gather", 10}, {"index_k_write", 12}, {"index_k_gather", 12},
      {"rope", 4},          {"ragged_prefill", 3}, {"merge_state", 4},    {"mla_decode", 10},
      {"index_logits", 18}, {"topk", 2},           {"index_select", 18},  {"sparse_attention", 8}};
  return formats.at(op);
}

#define GANNET_INVARIANCE(Params, member) \
  TEST(Invariance, Params) { expect_invariance<gannet::Params>(formats_of(gannet::Params::kName)); }
GANNET_FOR_EACH_OP(GANNET_INVARIANCE)
#undef GANNET_INVARIANCE

// ---- backends -----------------------------------------------------------------------------------------------------

std::vector<std::byte> results_of(uint64_t seed, BackendCases cases) {
  std::vector<std::byte> results;
  cases.exact_steps = 6;
  cases.results = &results;
  const std::vector<uint8_t> bytes = bytes_of(seed, 4000);
  Source in(bytes);
  check_backend(in, cases);
  return results;
}

TEST(Invariance, WholeStepsUnderEveryPoison) {
  size_t bytes = 0;
  for (uint64_t seed = 0; seed < kSequences; ++seed) {
    const auto first = results_of(seed, {.poison = verify::Poison::kNan});
    bytes += first.size();
    for (const verify::Poison poison : {verify::Poison::kInf, verify::Poison::kHuge, verify::Poison::kZero})
      ASSERT_EQ(results_of(seed, {.poison = poison}) == first, true)
          << "sequence " << seed << " poison " << static_cast<int>(poison);
  }
  EXPECT_GT(bytes, kSequences * 1000);
}

TEST(Invariance, WholeStepsWithAnyWorkersAndPages) {
  ThreadPool two({.num_threads = 2}), three({.num_threads = 3});
  SerialExecutor serial;
  OddExecutor odd(5);
  for (uint64_t seed = 100; seed < 100 + kSequences; ++seed) {
    const auto first = results_of(seed, {.executor = &serial});
    for (Executor* e : {static_cast<Executor*>(&two), static_cast<Executor*>(&three), static_cast<Executor*>(&odd)})
      ASSERT_EQ(results_of(seed, {.executor = e}) == first, true)
          << "sequence " << seed << ", " << e->num_workers() << " workers";
    ASSERT_EQ(results_of(seed, {.executor = &two, .other_pages = true}) == first, true) << "sequence " << seed;
  }
}

// A backend belongs to one thread; several of them, each with a context of its own, do not meet.
TEST(Invariance, SideBySideInSeveralThreads) {
  constexpr int kThreads = 4;
  std::vector<std::vector<std::byte>> expected;
  for (uint64_t seed = 200; seed < 200 + kThreads; ++seed) expected.push_back(results_of(seed, {}));
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t)
    threads.emplace_back([&, t] {
      try {
        ThreadPool pool({.num_threads = 2});
        for (int i = 0; i < 3; ++i) {
          const auto seed = static_cast<uint64_t>(200 + (t + i) % kThreads);
          if (results_of(seed, {.executor = &pool}) != expected[static_cast<size_t>((t + i) % kThreads)]) ++failures;
        }
      } catch (const std::exception& e) {
        ADD_FAILURE() << e.what();
        ++failures;
      }
    });
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(failures, 0);
}

}  // namespace
}  // namespace gannet_test
