// Who runs CPU work. An engine gives its own pool by implementing Executor; ThreadPool is the built-in one.
//
//   gannet::ThreadPool pool({.num_threads = 8});
//   gannet::Context context{.executor = &pool};
//
// No result depends on the number of workers or on which worker ran a task.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "gannet/export.h"

namespace gannet {
inline namespace v0 {

/// A non-owning reference to a callable `void(int64_t task, int worker)`; valid while the callable lives.
class TaskRef {
 public:
  template <class F, class = std::enable_if_t<!std::is_same_v<std::remove_cvref_t<F>, TaskRef>>>
  TaskRef(F&& f) noexcept : object_(const_cast<void*>(static_cast<const void*>(&f))), call_(&call<F>) {}
  void operator()(int64_t task, int worker) const { call_(object_, task, worker); }

 private:
  template <class F>
  static void call(void* object, int64_t task, int worker) {
    (*static_cast<std::remove_reference_t<F>*>(object))(task, worker);
  }

  void* object_;
  void (*call_)(void*, int64_t, int);
};

/// Runs independent tasks. Implementations must call `f(t, w)` exactly once for every t in [0, num_tasks), with
/// 0 <= w < num_workers() and no two concurrent calls sharing a w, and return when all calls have returned. An
/// exception from a task is rethrown to the caller of parallel_for after the other tasks have stopped.
/// parallel_for is not called from inside a task.
class GANNET_API Executor {
 public:
  virtual ~Executor();
  virtual int num_workers() const noexcept = 0;
  virtual void parallel_for(int64_t num_tasks, TaskRef f) = 0;
};

/// Runs everything on the calling thread.
class GANNET_API SerialExecutor final : public Executor {
 public:
  int num_workers() const noexcept override;  // not inline: kernel files of an instruction set would hold a copy
  void parallel_for(int64_t num_tasks, TaskRef f) override;
};

struct ThreadPoolOptions {
  int num_threads = 0;         ///< workers including the caller; 0: as many as the process may run on
  std::vector<int> cpus = {};  ///< pin worker i to cpus[i]; empty: not pinned; else one entry per worker
};

/// A pool whose fork-join costs a few microseconds: workers spin for a short while before they sleep. The caller of
/// parallel_for is worker 0. Used by one thread at a time.
class GANNET_API ThreadPool final : public Executor {
 public:
  explicit ThreadPool(const ThreadPoolOptions& options = {});
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;
  int num_workers() const noexcept override;
  void parallel_for(int64_t num_tasks, TaskRef f) override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace v0
}  // namespace gannet
