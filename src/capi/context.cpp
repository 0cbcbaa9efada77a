// The caller's threads and memory behind the interfaces of C++.
#include <atomic>
#include <exception>
#include <string>

#include "capi/capi.h"
#include "gannet/cuda.h"

namespace gannet {
inline namespace v0 {
namespace capi {
namespace {

class CallerExecutor final : public Executor {
 public:
  explicit CallerExecutor(const gannet_executor& executor) : executor_(executor) {
    constexpr const char* kName = "gannet_context_create";
    if (executor.num_workers < 1)
      fail_argument(kName, "executor.num_workers is {}; accepted: 1 and more", executor.num_workers);
    given(kName, "executor.parallel_for", reinterpret_cast<const void*>(executor.parallel_for));
  }

  int num_workers() const noexcept override { return executor_.num_workers; }

  void parallel_for(int64_t num_tasks, TaskRef f) override {
    if (num_tasks <= 0) return;
    Job job{f, num_tasks, executor_.num_workers};
    call_back("executor", "parallel_for",
              [&] { return executor_.parallel_for(executor_.user, num_tasks, &CallerExecutor::run_task, &job); });
    const int64_t done = job.done.load(std::memory_order_acquire);
    if (job.error) std::rethrow_exception(job.error);
    if (const int64_t task = job.bad_task.load(); task != kNone || job.bad_worker.load() != kNone)
      fail(ErrorCode::kDevice, "executor", "parallel_for ran a task {} as a worker {}; accepted: below {} and {}", task,
           job.bad_worker.load(), num_tasks, executor_.num_workers);
    if (done != num_tasks)
      fail(ErrorCode::kDevice, "executor", "parallel_for returned after {} of {} tasks", done, num_tasks);
  }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::min();
  struct Job {
    TaskRef f;
    int64_t num_tasks;
    int32_t num_workers;
    std::atomic<int64_t> done = 0;
    std::atomic<bool> failed = false;
    std::exception_ptr error = nullptr;  // of the first task that failed
    std::atomic<int64_t> bad_task = kNone, bad_worker = kNone;
  };

  // Exceptions must not pass through the caller's frames, which are those of C.
  static void run_task(void* data, int64_t task, int32_t worker) noexcept {
    Job& job = *static_cast<Job*>(data);
    if (task < 0 || task >= job.num_tasks || worker < 0 || worker >= job.num_workers) {
      job.bad_task = task;
      job.bad_worker = worker;
      return;
    }
    if (!job.failed.load(std::memory_order_relaxed)) {
      try {
        job.f(task, worker);
      } catch (...) {
        if (!job.failed.exchange(true)) job.error = std::current_exception();
      }
    }
    job.done.fetch_add(1, std::memory_order_release);
  }

  gannet_executor executor_;
};

class CallerMemory final : public MemoryResource {
 public:
  CallerMemory(const char* function, const gannet_memory& memory)
      : memory_(memory), device_(device_of(function, "memory", memory.device)) {
    given(function, "memory.allocate", reinterpret_cast<const void*>(memory.allocate));
    given(function, "memory.deallocate", reinterpret_cast<const void*>(memory.deallocate));
  }
  Device device() const noexcept override { return device_; }
  void* allocate(size_t bytes, size_t alignment) override {
    void* p = memory_.allocate(memory_.user, bytes, alignment);
    if (p == nullptr) fail(ErrorCode::kOutOfMemory, "memory", "allocate had no {} bytes", bytes);
    if (reinterpret_cast<uintptr_t>(p) % alignment != 0) {
      memory_.deallocate(memory_.user, p, bytes, alignment);
      fail_argument("memory", "allocate returned {}; accepted: a multiple of {} bytes", p, alignment);
    }
    return p;
  }
  void deallocate(void* p, size_t bytes, size_t alignment) noexcept override {
    memory_.deallocate(memory_.user, p, bytes, alignment);
  }

 private:
  gannet_memory memory_;
  Device device_;
};

}  // namespace

Memory::Memory(const char* function, const gannet_memory* memory, gannet_device device) : resource_(&host_memory()) {
  const Device d = device_of(function, "options", device);
  if (memory != nullptr) {
    own_ = std::make_unique<CallerMemory>(function, read(function, "memory", memory));
    resource_ = own_.get();
  } else if (d.kind == DeviceKind::kCuda) {
    resource_ = &cuda_memory(d.index);
  }
}

}  // namespace capi
}  // namespace v0
}  // namespace gannet

using namespace gannet;
using namespace gannet::capi;

gannet_status gannet_context_create(const gannet_context_options* options, gannet_context** out) {
  constexpr const char* kName = "gannet_context_create";
  return guard(kName, [&] {
    *given(kName, "out", out) = nullptr;
    gannet_context_options o{};
    if (options != nullptr) o = read(kName, "options", options);
    auto state = std::make_shared<ContextState>();
    if (o.num_threads < -1)
      fail_argument(kName, "num_threads is {}; accepted: -1 (as many as the process may run on), 0 and more",
                    o.num_threads);
    if (o.executor != nullptr && o.num_threads != 0)
      fail_argument(kName, "num_threads is {} and executor is given; accepted: one of the two", o.num_threads);
    if (o.executor != nullptr) state->executor = std::make_unique<CallerExecutor>(read(kName, "executor", o.executor));
    else if (o.num_threads != 0)
      state->executor =
          std::make_unique<ThreadPool>(ThreadPoolOptions{.num_threads = o.num_threads < 0 ? 0 : o.num_threads});
    state->context.executor = state->executor.get();
    state->overlap = !flag_of(kName, "no_overlap", o.no_overlap);
    if (o.log != nullptr)
      state->context.log = [log = o.log, user = o.log_user](LogLevel level, std::string_view text) {
        log(user, static_cast<gannet_log_level>(level), std::string(text).c_str());
      };
    *out = new gannet_context{std::move(state)};
  });
}

void gannet_context_free(gannet_context** context) { free_handle(context); }
