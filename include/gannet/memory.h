// Where pools and scratch get their memory: give your own by implementing MemoryResource.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "gannet/device.h"

namespace gannet {
inline namespace v0 {

/// Source of memory on one device. Called at creation, growth and destruction, never by a launch that was planned.
class GANNET_API MemoryResource {
 public:
  virtual ~MemoryResource();
  virtual Device device() const noexcept { return {}; }
  /// Never null: throws Error(kOutOfMemory). `alignment` is a power of two; contents are arbitrary.
  virtual void* allocate(size_t bytes, size_t alignment) = 0;
  /// With the values that allocate was called with.
  virtual void deallocate(void* p, size_t bytes, size_t alignment) noexcept = 0;
};

/// Host memory; one object for the whole process, without state. Requests of 2 MiB and more come straight from the
/// operating system, aligned to 2 MiB, with huge pages asked for, and take physical memory only as they are touched;
/// they are zero at first.
GANNET_API MemoryResource& host_memory() noexcept;

/// Owns one allocation. Movable. The resource must outlive it.
class GANNET_API Buffer {
 public:
  /// A cache line and a zmm register on the CPU, and what GPUs like: 256 bytes.
  static constexpr size_t kAlignment = 256;

  Buffer() = default;
  explicit Buffer(size_t bytes, MemoryResource& resource = host_memory(), size_t alignment = kAlignment);
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer moved(static_cast<Buffer&&>(other));
    swap(moved);
    return *this;
  }
  ~Buffer();

  std::byte* data() const noexcept { return data_; }
  size_t size() const noexcept { return bytes_; }
  std::span<std::byte> span() const noexcept { return {data_, bytes_}; }
  /// At least `bytes` large afterwards; growing drops the contents. Never shrinks.
  void reserve(size_t bytes, MemoryResource& resource = host_memory());
  void swap(Buffer& other) noexcept;

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  size_t alignment_ = 0;
  MemoryResource* resource_ = nullptr;
};

}  // namespace v0
}  // namespace gannet
