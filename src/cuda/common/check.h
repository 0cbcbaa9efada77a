// CUDA calls as exceptions, and the device that a call runs on. Host code only.
#pragma once

#include <cuda_runtime_api.h>

#include <limits>

namespace gannet {
inline namespace v0 {
namespace cuda {

/// Throws Error(kDevice) naming the call. Apart in check.cpp: nvcc does not take fmt's compile-time format checks.
[[noreturn]] void fail_cuda(cudaError_t status, const char* function, const char* call);

inline void check(cudaError_t status, const char* function, const char* call) {
  if (status != cudaSuccess) fail_cuda(status, function, call);
}
#define GANNET_CUDA(function, call) ::gannet::cuda::check((call), function, #call)

/// Whether there is a device 0, of a compute capability whose major number is in [least, most].
bool has_device(int least = 0, int most = std::numeric_limits<int>::max()) noexcept;

/// Whether `kernel` as it runs on the current device knows how to wait for what is before it on its stream
/// (launch.cuh). One built from the intermediate code of an architecture before sm_90 does not, wherever it runs.
bool can_overlap(const char* function, const void* kernel);

/// Makes `index` the current device of this thread for the life of the guard; restores the caller's.
class DeviceGuard {
 public:
  DeviceGuard(const char* function, int index) {
    GANNET_CUDA(function, cudaGetDevice(&before_));
    if (before_ != index) GANNET_CUDA(function, cudaSetDevice(index));
    changed_ = before_ != index;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
