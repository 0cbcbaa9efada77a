#include "cuda/runtime.h"

#include <algorithm>
#include <mutex>
#include <vector>

#include "core/format.h"
#include "cuda/common/check.h"
#include "cuda/common/small_kernels.h"
#include "gannet/cuda.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace {

cudaStream_t handle(Stream s) { return static_cast<cudaStream_t>(s.handle); }

class CudaMemory final : public MemoryResource {
 public:
  explicit CudaMemory(int index) : index_(index) {}
  Device device() const noexcept override { return {DeviceKind::kCuda, index_}; }

  void* allocate(size_t bytes, size_t alignment) override {
    constexpr const char* kName = "cuda_memory";
    constexpr size_t kDriverAlignment = 256;  // CUDA C++ programming guide, "Device memory accesses"
    if (alignment > kDriverAlignment)
      fail_argument(kName, "alignment is {}; accepted: up to {}", alignment, kDriverAlignment);
    const DeviceGuard guard(kName, index_);
    void* p = nullptr;
    const cudaError_t status = cudaMalloc(&p, std::max<size_t>(bytes, 1));
    if (status == cudaErrorMemoryAllocation) {
      cudaGetLastError();  // it is told here: the next launch must not tell it again
      size_t free = 0, total = 0;
      GANNET_CUDA(kName, cudaMemGetInfo(&free, &total));
      fail(ErrorCode::kOutOfMemory, kName, "{} bytes cannot be had on {}: {} of {} are free", bytes,
           to_string(device()), free, total);
    }
    check(status, kName, "cudaMalloc");
    return p;
  }

  void deallocate(void* p, size_t, size_t) noexcept override {
    cudaFree(p);  // knows the device of the address; waits for it
  }

 private:
  int index_;
};

}  // namespace

void require_device(const char* function, int index) {
  std::string why;
  const int count = cuda_device_count(&why);
  if (count == 0) fail(ErrorCode::kUnsupported, function, "there is no CUDA device here: {}", why);
  if (index < 0 || index >= count)
    fail_argument(function, "the device is cuda:{}; accepted: 0 to {}", index, count - 1);
}

void copy(const char* function, int index, void* to, const void* from, size_t bytes, Stream stream) {
  if (bytes == 0) return;
  const DeviceGuard guard(function, index);
  GANNET_CUDA(function, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, handle(stream)));
}

void copy_rows(const char* function, int index, void* to, size_t to_pitch, const void* from, size_t from_pitch,
               size_t row_bytes, size_t rows, Stream stream) {
  if (row_bytes == 0 || rows == 0) return;
  const DeviceGuard guard(function, index);
  GANNET_CUDA(function,
              cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, row_bytes, rows, cudaMemcpyDefault, handle(stream)));
}

void clear(const char* function, int index, void* to, size_t bytes, Stream stream) {
  if (bytes == 0) return;
  const DeviceGuard guard(function, index);
  GANNET_CUDA(function, cudaMemsetAsync(to, 0, bytes, handle(stream)));
}

void wait(const char* function, int index, Stream stream) {
  const DeviceGuard guard(function, index);
  GANNET_CUDA(function, cudaStreamSynchronize(handle(stream)));
}

void refuse_capture(const char* function, int index, Stream stream) {
  const DeviceGuard guard(function, index);
  cudaStreamCaptureStatus status{};
  GANNET_CUDA(function, cudaStreamIsCapturing(handle(stream), &status));
  if (status != cudaStreamCaptureStatusNone)
    fail_argument(function, "the stream is being captured into a graph; accepted: before the capture and each replay");
}

void gather_int32_rows(const char* function, int index, std::span<const int32_t> rows, const int32_t* from,
                       int64_t from_stride, int32_t* to, int64_t to_stride, int64_t width, int32_t fill,
                       Stream stream) {
  if (width == 0) return;
  const DeviceGuard guard(function, index);
  RowList list{};
  for (size_t begin = 0; begin < rows.size(); begin += RowList::kMost) {
    const size_t n = std::min<size_t>(rows.size() - begin, RowList::kMost);
    std::copy_n(rows.data() + begin, n, list.rows);
    launch_gather_int32_rows(list, static_cast<int>(n), from, from_stride, to + static_cast<int64_t>(begin) * to_stride,
                             to_stride, width, fill, stream);
    GANNET_CUDA(function, cudaGetLastError());
  }
}

void hadamard(const char* function, const TensorView& from, const TensorView& to, int64_t rows, int n, float scale,
              Stream stream) {
  const DeviceGuard guard(function, from.device.index);
  launch_hadamard(function, from, to, rows, n, scale, stream);
}

// ---- staging ------------------------------------------------------------------------------------------------------

struct Staging::Slot {
  std::byte* data = nullptr;
  size_t bytes = 0;
  cudaEvent_t copied = nullptr;
};

Staging::Staging(int index) : index_(index), slots_(std::make_unique<Slot[]>(kDepth)) {}

Staging::~Staging() {
  for (int i = 0; i < kDepth; ++i) {
    const Slot& s = slots_[static_cast<size_t>(i)];
    if (s.copied != nullptr) {
      cudaEventSynchronize(s.copied);
      cudaEventDestroy(s.copied);
    }
    if (s.data != nullptr) cudaFreeHost(s.data);
  }
}

std::byte* Staging::begin(const char* function, size_t bytes) {
  Slot& s = slots_[static_cast<size_t>(next_)];
  const DeviceGuard guard(function, index_);
  if (s.copied == nullptr) GANNET_CUDA(function, cudaEventCreateWithFlags(&s.copied, cudaEventDisableTiming));
  else GANNET_CUDA(function, cudaEventSynchronize(s.copied));
  if (bytes > s.bytes) {
    if (s.data != nullptr) cudaFreeHost(s.data);
    s = {.data = nullptr, .bytes = 0, .copied = s.copied};
    void* p = nullptr;
    GANNET_CUDA(function, cudaMallocHost(&p, bytes));
    s.data = static_cast<std::byte*>(p);
    s.bytes = bytes;
  }
  return s.data;
}

void Staging::done(const char* function, Stream stream) {
  const DeviceGuard guard(function, index_);
  GANNET_CUDA(function, cudaEventRecord(slots_[static_cast<size_t>(next_)].copied, handle(stream)));
  next_ = (next_ + 1) % kDepth;
}

}  // namespace cuda

// ---- gannet/cuda.h ------------------------------------------------------------------------------------------------

int cuda_device_count(std::string* why) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) {
    cudaGetLastError();
    count = 0;
  }
  if (count == 0 && why != nullptr)
    *why = status == cudaSuccess ? "the driver offers no device" : std::string(cudaGetErrorString(status));
  return count;
}

std::string cuda_device_name(int index) {
  constexpr const char* kName = "cuda_device_name";
  cuda::require_device(kName, index);
  cudaDeviceProp properties{};
  GANNET_CUDA(kName, cudaGetDeviceProperties(&properties, index));
  return properties.name;
}

MemoryResource& cuda_memory(int index) {
  cuda::require_device("cuda_memory", index);
  static std::mutex mutex;
  static std::vector<std::unique_ptr<cuda::CudaMemory>> all;
  const std::lock_guard lock(mutex);
  while (all.size() <= static_cast<size_t>(index))
    all.push_back(std::make_unique<cuda::CudaMemory>(static_cast<int>(all.size())));
  return *all[static_cast<size_t>(index)];
}

void cuda_copy(void* to, const void* from, size_t bytes, Device device, Stream stream) {
  if (device.kind != DeviceKind::kCuda)
    fail_argument("cuda_copy", "device is {}; accepted: a CUDA device", to_string(device));
  cuda::copy("cuda_copy", device.index, to, from, bytes, stream);
}

void cuda_wait(Device device, Stream stream) {
  if (device.kind != DeviceKind::kCuda)
    fail_argument("cuda_wait", "device is {}; accepted: a CUDA device", to_string(device));
  cuda::wait("cuda_wait", device.index, stream);
}

StreamCounter::StreamCounter(int device_index) : device_index_(device_index) {
  constexpr const char* kName = "StreamCounter";
  cuda::require_device(kName, device_index);
  const cuda::DeviceGuard guard(kName, device_index);
  void *host = nullptr, *device = nullptr;
  GANNET_CUDA(kName, cudaHostAlloc(&host, sizeof(uint64_t), cudaHostAllocMapped | cudaHostAllocPortable));
  host_ = static_cast<uint64_t*>(host);
  *host_ = 0;
  GANNET_CUDA(kName, cudaHostGetDevicePointer(&device, host, 0));
  device_ = static_cast<uint64_t*>(device);
}

StreamCounter::~StreamCounter() {
  if (host_ != nullptr) cudaFreeHost(host_);  // waits for the device
}

void StreamCounter::signal(Stream stream) {
  const cuda::DeviceGuard guard("StreamCounter::signal", device_index_);
  cuda::launch_signal(device_, stream);
  GANNET_CUDA("StreamCounter::signal", cudaGetLastError());
}

uint64_t StreamCounter::value() const noexcept { return __atomic_load_n(host_, __ATOMIC_ACQUIRE); }

}  // namespace v0
}  // namespace gannet
