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
};

}  // namespace v0
}  // namespace gannet
