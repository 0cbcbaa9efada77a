// Where memory lives and work runs.
#pragma once

#include <string>

#include "gannet/export.h"

namespace gannet {
inline namespace v0 {

enum class DeviceKind : unsigned char { kCpu, kCuda };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

/// "cpu", "cuda:1".
GANNET_API std::string to_string(Device d);

/// The caller's stream: a cudaStream_t as an opaque pointer on CUDA devices, nothing on the CPU, where a run has
/// finished when it returns.
struct Stream {
  void* handle = nullptr;
  /// Programmatic dependent launch, on Hopper and newer: a kernel is set up while the one before it ends, and waits on
  /// the device for its results before it reads or writes anything. The same bits either way; older GPUs and kernels
  /// built for them launch one after the other whatever this says.
  bool overlap = true;
};

}  // namespace v0
}  // namespace gannet
