// What an engine needs of CUDA beside the operations: device memory, and word from a stream. Without CUDA in the build
// every call throws Error(kUnsupported) and says so; this header needs no CUDA header.
//
//   gannet::LatentPool pool(options, gannet::cuda_memory(0));
//   config.device = {gannet::DeviceKind::kCuda, 0};
//   auto backend = gannet::make_attention_backend(context, config, {}, gannet::cuda_memory(0));
//   backend->set_stream({stream});
#pragma once

#include <cstdint>
#include <string>

#include "gannet/device.h"
#include "gannet/memory.h"

namespace gannet {
inline namespace v0 {

/// CUDA devices that the driver offers; 0 without a driver, a device or CUDA in the build. `why`, where given, receives
/// the reason for 0 in words.
GANNET_API int cuda_device_count(std::string* why = nullptr);

/// "NVIDIA H200". Throws kUnsupported where there is no such device.
GANNET_API std::string cuda_device_name(int index = 0);

/// Memory of a device by cudaMalloc and cudaFree; the latter waits for all work on the device, so that nothing in
/// flight loses its memory. One object a device for the whole process. Throws kUnsupported where there is no such
/// device; allocate throws kOutOfMemory with what was wanted and what is free.
GANNET_API MemoryResource& cuda_memory(int index = 0);

/// Copies in the order of a stream between any memory of the host and of that device; from and to pageable host memory
/// it may wait. What it is about must stay until the stream has come there.
GANNET_API void cuda_copy(void* to, const void* from, size_t bytes, Device device, Stream stream = {});

/// Waits until the stream has done everything.
GANNET_API void cuda_wait(Device device, Stream stream = {});

/// A number in host memory that a stream counts up and any thread reads: how a transfer thread learns, without a call
/// into CUDA, that the rows of a layer are written (LayerHooks::record calls signal, kAbandoned included, and value n
/// means that n layers are done). A signal is work of the stream and may be captured in a graph.
class GANNET_API StreamCounter {
 public:
  explicit StreamCounter(int device_index = 0);
  ~StreamCounter();
  StreamCounter(const StreamCounter&) = delete;
  StreamCounter& operator=(const StreamCounter&) = delete;

  /// Enqueues: the value grows by 1 once all work before it in the stream is done and its writes can be seen by the
  /// host and by other devices. Signals of one counter must be ordered among themselves (one stream).
  void signal(Stream stream);
  /// Any thread, at any time.
  uint64_t value() const noexcept;

 private:
  int device_index_;
  uint64_t* host_ = nullptr;
  uint64_t* device_ = nullptr;
};

}  // namespace v0
}  // namespace gannet
