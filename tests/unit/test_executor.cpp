// The thread pool: every task once, worker numbers, exceptions, reuse, pinning. Run under ThreadSanitizer too.
#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "gannet/error.h"
#include "gannet/executor.h"

namespace {

using gannet::Error;
using gannet::ErrorCode;
using gannet::Executor;
using gannet::SerialExecutor;
using gannet::ThreadPool;

std::vector<int> allowed_cpus() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof mask, &mask) != 0) return cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &mask)) cpus.push_back(cpu);
  return cpus;
}

/// Runs n tasks and checks the contract of Executor::parallel_for.
void expect_contract(Executor& executor, int64_t n) {
  const auto workers = static_cast<size_t>(executor.num_workers());
  std::vector<int> calls(static_cast<size_t>(n), 0);  // each is written by one task: a race shows under TSan
  std::vector<std::atomic<int>> inside(workers);
  std::atomic<int> wrong_worker = 0;
  std::atomic<int> shared_worker = 0;
  executor.parallel_for(n, [&](int64_t task, int worker) {
    if (worker < 0 || static_cast<size_t>(worker) >= workers) {
      ++wrong_worker;
      return;
    }
    if (inside[static_cast<size_t>(worker)].fetch_add(1) != 0) ++shared_worker;
    ++calls[static_cast<size_t>(task)];
    inside[static_cast<size_t>(worker)].fetch_sub(1);
  });
  EXPECT_EQ(wrong_worker, 0);
  EXPECT_EQ(shared_worker, 0);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), 1), n);
}

TEST(SerialExecutor, RunsInOrderOnTheCaller) {
  SerialExecutor serial;
  std::vector<int64_t> order;
  serial.parallel_for(5, [&](int64_t task, int worker) {
    EXPECT_EQ(worker, 0);
    order.push_back(task);
  });
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3, 4}));
  expect_contract(serial, 0);
}

TEST(ThreadPool, CountsTheAffinityMaskByDefault) {
  const ThreadPool pool;
  EXPECT_EQ(static_cast<size_t>(pool.num_workers()), allowed_cpus().size());
}

TEST(ThreadPool, CountsANarrowedAffinityMask) {
  const std::vector<int> cpus = allowed_cpus();
  ASSERT_FALSE(cpus.empty());
  std::thread([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpus[0], &one);
    ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
    EXPECT_EQ(ThreadPool().num_workers(), 1);
  }).join();
}

TEST(ThreadPool, RunsEveryTaskOnce) {
  for (const int threads : {1, 2, 3, 4, 16}) {
    SCOPED_TRACE(threads);
    ThreadPool pool({.num_threads = threads});
    ASSERT_EQ(pool.num_workers(), threads);
    for (const int64_t n : {0, 1, 2, 3, 7, 64, 1000}) expect_contract(pool, n);
  }
}

TEST(ThreadPool, NoTasksAreNoWork) {
  ThreadPool pool({.num_threads = 2});
  pool.parallel_for(0, [](int64_t, int) { FAIL(); });
  pool.parallel_for(-3, [](int64_t, int) { FAIL(); });
}

TEST(ThreadPool, OneTaskRunsOnTheCaller) {
  ThreadPool pool({.num_threads = 2});
  std::thread::id ran;
  pool.parallel_for(1, [&](int64_t task, int worker) {
    EXPECT_EQ(task, 0);
    EXPECT_EQ(worker, 0);
    ran = std::this_thread::get_id();
  });
  EXPECT_EQ(ran, std::this_thread::get_id());
}

TEST(ThreadPool, TheCallerIsWorkerZeroAndOthersWorkToo) {
  ThreadPool pool({.num_threads = 2});
  const std::thread::id caller = std::this_thread::get_id();
  std::atomic<int> arrived = 0;
  std::atomic<int> mismatched = 0;
  // Both tasks wait for each other, which only works if two threads run them.
  pool.parallel_for(2, [&](int64_t, int worker) {
    if ((worker == 0) != (std::this_thread::get_id() == caller)) ++mismatched;
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
  });
  EXPECT_EQ(arrived, 2);
  EXPECT_EQ(mismatched, 0);
}

TEST(ThreadPool, ResultsOfTasksAreVisibleToTheCaller) {
  ThreadPool pool({.num_threads = 3});
  std::vector<int64_t> squares(257);
  pool.parallel_for(257, [&](int64_t task, int) { squares[static_cast<size_t>(task)] = task * task; });
  for (int64_t t = 0; t < 257; ++t) EXPECT_EQ(squares[static_cast<size_t>(t)], t * t);
}

TEST(ThreadPool, IsReusedManyTimes) {
  constexpr int kRounds = 100000;
  ThreadPool pool({.num_threads = 2});
  int64_t sums[3] = {};
  for (int round = 0; round < kRounds; ++round) pool.parallel_for(3, [&](int64_t task, int) { sums[task] += round; });
  const int64_t expected = int64_t{kRounds} * (kRounds - 1) / 2;
  for (const int64_t sum : sums) EXPECT_EQ(sum, expected);
}

TEST(ThreadPool, IsReusedWithMoreThreadsThanCpus) {
  ThreadPool pool({.num_threads = static_cast<int>(allowed_cpus().size()) * 4 + 1});
  for (int round = 0; round < 500; ++round) expect_contract(pool, 1 + round % 40);
}

TEST(ThreadPool, WakesUpAfterSleeping) {
  ThreadPool pool({.num_threads = 3});
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // 40 times as long as workers spin
    expect_contract(pool, 17);
  }
}

TEST(ThreadPool, CallerSleepsWhileALongTaskRuns) {
  ThreadPool pool({.num_threads = 2});
  std::atomic<int> started = 0;
  std::atomic<int> finished = 0;
  pool.parallel_for(2, [&](int64_t, int worker) {
    ++started;
    while (started < 2) std::this_thread::yield();
    if (worker != 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ++finished;
  });
  EXPECT_EQ(finished, 2);
}

TEST(ThreadPool, RethrowsAnExceptionAndStaysUsable) {
  for (const int threads : {1, 2, 5}) {
    SCOPED_TRACE(threads);
    ThreadPool pool({.num_threads = threads});
    for (const int64_t bad : {0, 5, 99}) {
      std::atomic<int> running = 0;
      try {
        pool.parallel_for(100, [&](int64_t task, int) {
          ++running;
          if (task == bad) {
            --running;
            throw std::runtime_error("task " + std::to_string(task));
          }
          --running;
        });
        FAIL() << "nothing was thrown";
      } catch (const std::runtime_error& e) {
        EXPECT_EQ(e.what(), "task " + std::to_string(bad));
      }
      EXPECT_EQ(running, 0) << "tasks were still running when the exception arrived";
      expect_contract(pool, 100);
    }
  }
}

TEST(ThreadPool, RethrowsOneOfManyExceptions) {
  ThreadPool pool({.num_threads = 4});
  for (int round = 0; round < 100; ++round)
    EXPECT_THROW(pool.parallel_for(50, [](int64_t, int) { throw std::runtime_error("every task"); }),
                 std::runtime_error);
  expect_contract(pool, 50);
}

TEST(ThreadPool, RefusesACallFromInsideATask) {
  ThreadPool pool({.num_threads = 2});
  try {
    pool.parallel_for(4, [&](int64_t, int) { pool.parallel_for(2, [](int64_t, int) {}); });
    FAIL() << "nothing was thrown";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(e.what()).find("one caller at a time"), std::string::npos) << e.what();
  }
  expect_contract(pool, 9);
}

TEST(ThreadPool, IsMadeAndDestroyedWithoutWork) {
  for (int i = 0; i < 200; ++i) {
    const ThreadPool pool({.num_threads = 1 + i % 6});
    if (i % 10 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

// A worker that wakes up for the last job may see the end of the pool while it looks at what there is to do: it must
// not take it for one more job that others have finished, and sleep.
TEST(ThreadPool, IsDestroyedRightAfterWork) {
  for (int i = 0; i < 2000; ++i) {
    ThreadPool pool({.num_threads = 3});
    if (i % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(i % 200));
    for (int job = 0; job < i % 4; ++job) pool.parallel_for(3, [](int64_t, int) {});
  }
}

TEST(ThreadPool, PinsWorkersAndGivesTheCallerItsMaskBack) {
  const std::vector<int> cpus = allowed_cpus();
  ASSERT_FALSE(cpus.empty());
  // The last CPU first, so that worker 0 is not where it would have been anyway.
  std::vector<int> order(cpus.rbegin(), cpus.rend());
  if (order.size() > 8) order.resize(8);
  {
    ThreadPool pool({.cpus = order});
    ASSERT_EQ(static_cast<size_t>(pool.num_workers()), order.size());
    std::vector<std::atomic<int>> ran_on(order.size());
    for (auto& cpu : ran_on) cpu = -1;
    std::atomic<size_t> arrived = 0;
    pool.parallel_for(static_cast<int64_t>(order.size()), [&](int64_t, int worker) {
      ran_on[static_cast<size_t>(worker)] = sched_getcpu();
      ++arrived;
      while (arrived < order.size()) std::this_thread::yield();  // so that every worker takes one
    });
    for (size_t w = 0; w < order.size(); ++w) EXPECT_EQ(ran_on[w], order[w]) << "worker " << w;
  }
  EXPECT_EQ(allowed_cpus(), cpus);
}

TEST(ThreadPool, RefusesBadOptionsByName) {
  const auto expect_refused = [](const gannet::ThreadPoolOptions& options, const std::string& text) {
    try {
      ThreadPool pool(options);
      FAIL() << "accepted; expected: " << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
  };
  expect_refused({.num_threads = -1}, "num_threads is -1");
  expect_refused({.num_threads = 1 << 20}, "num_threads is 1048576");
  expect_refused({.num_threads = 3, .cpus = {allowed_cpus()[0]}}, "cpus has 1 entries");
  expect_refused({.num_threads = 1, .cpus = {-1}}, "cpus[0] is -1");
  expect_refused({.num_threads = 1, .cpus = {1 << 20}}, "cpus[0] is 1048576");
}

}  // namespace
