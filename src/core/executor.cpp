// The built-in thread pool.
//
// A layer of a decode step is a handful of operations of 10 to 1,000 us each, so the cost of a fork and join counts:
// a futex wake-up alone is 5 to 50 us. Workers therefore spin for kSpin before they sleep, and joining does not wait
// for workers that never woke up: the caller works through the tasks itself, closes the gate and waits only for those
// that entered. On an idle two-core machine a fork-join of two tasks that do nothing takes about 1 us.
//
// The gate is one 64-bit word: epoch (number of the job) | open bit | number of workers inside. A worker enters by
// compare-and-swap while the job is open; the job's fields are written only while the gate is closed and empty, so a
// late worker can never mix two jobs.
//
// Sleeping is on futexes, so that a wake-up takes no lock. Who sleeps says so first and then looks at what it waits
// for; who changes that does so first and then looks for sleepers. Each side's first step is a read-modify-write, which
// is a full barrier everywhere, so at least one of the two sees the other.
#include "gannet/executor.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "core/format.h"

namespace gannet {
inline namespace v0 {

Executor::~Executor() = default;

int SerialExecutor::num_workers() const noexcept { return 1; }

void SerialExecutor::parallel_for(int64_t num_tasks, TaskRef f) {
  for (int64_t t = 0; t < num_tasks; ++t) f(t, 0);
}

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kCacheLine = 64;
// Longer than the serial work between two operations of a layer (a few us), shorter than a scheduler's time slice by
// a factor of 60, so that a pool that is not used costs next to nothing.
constexpr auto kSpin = std::chrono::microseconds(50);
// Between two looks at the clock (20 to 30 ns); a pause is 1 to 140 cycles depending on the processor.
constexpr int kPausesPerClock = 16;
// Bounded by the bits of the gate; far above any machine.
constexpr int kMaxThreads = 1 << 14;

constexpr uint64_t kInsideMask = 0xffff;
constexpr uint64_t kOpen = uint64_t{1} << 16;
constexpr int kEpochShift = 32;

inline uint32_t epoch_of(uint64_t gate) { return static_cast<uint32_t>(gate >> kEpochShift); }
inline uint64_t inside(uint64_t gate) { return gate & kInsideMask; }

using FutexWord = std::atomic<uint32_t>;
static_assert(sizeof(FutexWord) == sizeof(uint32_t) && FutexWord::is_always_lock_free);

/// Sleeps while the word holds `value`; may return at any time.
void futex_wait(FutexWord& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void futex_wake(FutexWord& word, int64_t count) {
  constexpr int64_t kAll = std::numeric_limits<int>::max();
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, static_cast<int>(count < kAll ? count : kAll), nullptr, nullptr, 0);
}

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // "yield" does nothing on most cores
#endif
}

/// Spins until `done()`, at most for `limit`; returns done().
template <class Done>
bool spin(std::chrono::nanoseconds limit, Done done) {
  if (done()) return true;
  if (limit.count() == 0) return false;
  const Clock::time_point end = Clock::now() + limit;
  do {
    for (int i = 0; i < kPausesPerClock; ++i) {
      cpu_pause();
      if (done()) return true;
    }
  } while (Clock::now() < end);
  return false;
}

struct Affinity {
  cpu_set_t mask;
  bool known;
  int count;
};

Affinity calling_thread_affinity() {
  Affinity a{};
  CPU_ZERO(&a.mask);
  a.known = sched_getaffinity(0, sizeof a.mask, &a.mask) == 0;
  const int fallback = static_cast<int>(std::thread::hardware_concurrency());
  a.count = a.known ? CPU_COUNT(&a.mask) : fallback;
  if (a.count < 1) a.count = 1;
  return a;
}

std::string list_cpus(const Affinity& a) {
  std::string text;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &a.mask)) text += fmt::format("{}{}", text.empty() ? "" : ", ", cpu);
  return text;
}

bool pin_thread(pthread_t thread, int cpu) {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(cpu, &one);
  return pthread_setaffinity_np(thread, sizeof one, &one) == 0;
}

}  // namespace

struct ThreadPool::State {
  // Written by the caller while the gate is closed and empty.
  TaskRef* job = nullptr;
  int64_t num_tasks = 0;

  alignas(kCacheLine) std::atomic<uint64_t> gate{0};
  alignas(kCacheLine) std::atomic<int64_t> next{0};  // first task that nobody has claimed
  alignas(kCacheLine) FutexWord bell{0};             // the epoch again, for workers to sleep on
  std::atomic<int> sleepers{0};
  FutexWord caller_sleeps{0};
  std::atomic<bool> stop{false};
  std::atomic<bool> busy{false};

  std::mutex error_mutex;
  std::exception_ptr error;

  std::chrono::nanoseconds spin_limit{0};
  int num_workers = 1;
  std::vector<std::thread> threads;

  bool pinned_caller = false;
  pthread_t caller{};
  cpu_set_t caller_mask{};

  void work(int worker) {
    const int64_t n = num_tasks;
    const TaskRef& f = *job;
    try {
      for (int64_t t = next.fetch_add(1, std::memory_order_relaxed); t < n;
           t = next.fetch_add(1, std::memory_order_relaxed))
        f(t, worker);
    } catch (...) {
      next.store(n, std::memory_order_relaxed);  // what nobody has started is not started
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  }

  void worker_main(int worker) {
    uint32_t seen = 0;
    for (;;) {
      const auto news = [&] { return epoch_of(gate.load(std::memory_order_seq_cst)) != seen; };
      if (!spin(spin_limit, news)) {
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        while (!news()) futex_wait(bell, seen);
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
      }
      uint64_t g = gate.load(std::memory_order_acquire);
      // After the gate, never before: the last epoch, once seen, is not news again.
      if (stop.load(std::memory_order_acquire)) return;
      seen = epoch_of(g);
      while ((g & kOpen) != 0 && epoch_of(g) == seen) {
        if (!gate.compare_exchange_weak(g, g + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
        work(worker);
        const uint64_t left = gate.fetch_sub(1, std::memory_order_seq_cst) - 1;
        if (inside(left) == 0 && (left & kOpen) == 0 && caller_sleeps.load(std::memory_order_seq_cst) != 0) {
          caller_sleeps.store(0, std::memory_order_seq_cst);
          futex_wake(caller_sleeps, 1);
        }
        break;
      }
    }
  }

  /// Closes one epoch and opens the next, then wakes up to `wanted` of those that sleep.
  void announce(uint64_t flags, int64_t wanted) {
    const uint32_t epoch = epoch_of(gate.load(std::memory_order_relaxed)) + 1;
    gate.store(uint64_t{epoch} << kEpochShift | flags, std::memory_order_release);
    bell.exchange(epoch, std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) > 0) futex_wake(bell, wanted);
  }

  void fork_join(int64_t n, TaskRef& f) {
    job = &f;
    num_tasks = n;
    next.store(0, std::memory_order_relaxed);
    announce(kOpen, n - 1);
    work(0);
    gate.fetch_and(~kOpen, std::memory_order_seq_cst);
    const auto empty = [&] { return inside(gate.load(std::memory_order_seq_cst)) == 0; };
    if (!spin(spin_limit, empty)) {
      for (;;) {
        caller_sleeps.exchange(1, std::memory_order_seq_cst);  // again after each time: a late worker may clear it
        if (empty()) break;
        futex_wait(caller_sleeps, 1);
      }
      caller_sleeps.store(0, std::memory_order_relaxed);
    }
    job = nullptr;
  }

  void shut_down() {
    stop.store(true, std::memory_order_release);
    announce(0, num_workers);
    for (std::thread& t : threads) t.join();
    // A thread's mask is restored only by that thread: it may have ended since, and its id may be another's.
    if (pinned_caller && pthread_equal(caller, pthread_self()) != 0)
      pthread_setaffinity_np(caller, sizeof caller_mask, &caller_mask);
  }
};

ThreadPool::ThreadPool(const ThreadPoolOptions& options) : state_(std::make_unique<State>()) {
  constexpr const char* kFunction = "ThreadPool";
  const Affinity affinity = calling_thread_affinity();
  const auto num_cpus = static_cast<int64_t>(options.cpus.size());
  if (options.num_threads < 0 || options.num_threads > kMaxThreads)
    fail_argument(kFunction, "num_threads is {}; accepted: 0 (all CPUs of the affinity mask) to {}",
                  options.num_threads, kMaxThreads);
  int64_t n = options.num_threads;
  if (n == 0) n = options.cpus.empty() ? affinity.count : num_cpus;
  if (!options.cpus.empty() && num_cpus != n)
    fail_argument(kFunction, "cpus has {} entries; accepted: one for each of the {} workers", num_cpus, n);
  for (size_t i = 0; i < options.cpus.size(); ++i) {
    const int cpu = options.cpus[i];
    if (cpu < 0 || cpu >= CPU_SETSIZE || (affinity.known && !CPU_ISSET(cpu, &affinity.mask)))
      fail_argument(kFunction, "cpus[{}] is {}; accepted: the CPUs of the caller's affinity mask ({})", i, cpu,
                    list_cpus(affinity));
  }

  State& s = *state_;
  s.num_workers = static_cast<int>(n);
  // With more workers than CPUs a spinning worker keeps the one that has the work from running.
  if (n <= affinity.count) s.spin_limit = kSpin;
  try {
    s.threads.reserve(static_cast<size_t>(n) - 1);
    for (int worker = 1; worker < s.num_workers; ++worker)
      s.threads.emplace_back([&s, worker] { s.worker_main(worker); });
    bool pinned = true;
    for (size_t i = 1; i < options.cpus.size(); ++i)
      pinned = pinned && pin_thread(s.threads[i - 1].native_handle(), options.cpus[i]);
    if (!options.cpus.empty() && affinity.known) {
      s.caller = pthread_self();
      s.caller_mask = affinity.mask;
      s.pinned_caller = pin_thread(s.caller, options.cpus[0]);
      pinned = pinned && s.pinned_caller;
    }
    if (!pinned) fail(ErrorCode::kDevice, kFunction, "the system refused to pin a thread to one of cpus");
  } catch (const std::system_error& e) {
    const size_t made = s.threads.size();
    s.shut_down();
    fail(ErrorCode::kDevice, kFunction, "the system gave {} of {} threads: {}", made, n - 1, e.what());
  } catch (...) {
    s.shut_down();
    throw;
  }
}

ThreadPool::~ThreadPool() { state_->shut_down(); }

int ThreadPool::num_workers() const noexcept { return state_->num_workers; }

void ThreadPool::parallel_for(int64_t num_tasks, TaskRef f) {
  State& s = *state_;
  if (num_tasks <= 0) return;
  if (s.busy.exchange(true, std::memory_order_acquire))
    fail_argument("ThreadPool::parallel_for",
                  "called from inside a task or by two threads at once; accepted: one caller at a time");
  struct Release {
    std::atomic<bool>& busy;
    ~Release() { busy.store(false, std::memory_order_release); }
  } release{s.busy};
  if (num_tasks == 1 || s.num_workers == 1) {
    for (int64_t t = 0; t < num_tasks; ++t) f(t, 0);
    return;
  }
  s.fork_join(num_tasks, f);
  if (s.error) std::rethrow_exception(std::exchange(s.error, nullptr));
}

}  // namespace v0
}  // namespace gannet
