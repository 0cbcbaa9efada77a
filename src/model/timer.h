// Adds the life of an object to a counter of wall-clock seconds.
#pragma once

#include <chrono>

namespace gannet {
inline namespace v0 {

class Timer {
 public:
  explicit Timer(double& total) : total_(&total), start_(Clock::now()) {}
  ~Timer() { *total_ += std::chrono::duration<double>(Clock::now() - start_).count(); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  double* total_;
  Clock::time_point start_;
};

}  // namespace v0
}  // namespace gannet
