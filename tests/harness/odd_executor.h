#pragma once

#include "gannet/executor.h"

namespace gannet_test {

/// Runs tasks on the calling thread in another order than anybody would, and as changing workers.
class OddExecutor final : public gannet::Executor {
 public:
  explicit OddExecutor(int num_workers) : num_workers_(num_workers) {}
  int num_workers() const noexcept override { return num_workers_; }
  void parallel_for(int64_t num_tasks, gannet::TaskRef f) override {
    for (int64_t t = num_tasks - 1; t >= 0; --t) f(t, static_cast<int>((t * 7 + 3) % num_workers_));
  }

 private:
  int num_workers_;
};

}  // namespace gannet_test
