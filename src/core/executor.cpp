#include "gannet/executor.h"

namespace gannet {
inline namespace v0 {

Executor::~Executor() = default;

void SerialExecutor::parallel_for(int64_t num_tasks, TaskRef f) {
  for (int64_t t = 0; t < num_tasks; ++t) f(t, 0);
}

}  // namespace v0
}  // namespace gannet
