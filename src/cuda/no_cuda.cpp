// Stands in for everything of CUDA in a build without the CUDA toolkit.
#include <string>

#include "core/format.h"
#include "core/implementation.h"
#include "cuda/runtime.h"
#include "gannet/cuda.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

namespace {

constexpr const char* kWhy = "this build has no CUDA (configure with GANNET_CUDA=ON where nvcc is installed)";

ImplementationSet absent(const char* name) {
  return {.name = name, .device = DeviceKind::kCuda, .only_when_forced = false, .compiled = false, .runs_here = [] {
            return false;
          }};
}

[[noreturn]] void refuse(const char* function) { fail(ErrorCode::kUnsupported, function, "{}", kWhy); }

}  // namespace

void require_device(const char* function, int) { refuse(function); }
void copy(const char* function, int, void*, const void*, size_t, Stream) { refuse(function); }
void copy_rows(const char* function, int, void*, size_t, const void*, size_t, size_t, size_t, Stream) {
  refuse(function);
}
void clear(const char* function, int, void*, size_t, Stream) { refuse(function); }
void wait(const char* function, int, Stream) { refuse(function); }
void refuse_capture(const char* function, int, Stream) { refuse(function); }
void gather_int32_rows(const char* function, int, std::span<const int32_t>, const int32_t*, int64_t, int32_t*, int64_t,
                       int64_t, int32_t, Stream) {
  refuse(function);
}
void hadamard(const char* function, const TensorView&, const TensorView&, int64_t, int, float, Stream) {
  refuse(function);
}

void plan_decode_rows(const char* function, int, const DecodeRows&, Stream) { refuse(function); }

struct Staging::Slot {};
Staging::Staging(int index) : index_(index) { refuse("Staging"); }
Staging::~Staging() = default;
std::byte* Staging::begin(const char* function, size_t) { refuse(function); }
void Staging::done(const char* function, Stream) {
  next_ = 0;
  refuse(function);
}

const ImplementationSet& sm90_set() noexcept {
  static const ImplementationSet set = absent("cuda_sm90");
  return set;
}

const ImplementationSet& mma_set() noexcept {
  static const ImplementationSet set = absent("cuda_mma");
  return set;
}

const ImplementationSet& generic_set() noexcept {
  static const ImplementationSet set = absent("cuda_generic");
  return set;
}

}  // namespace cuda

int cuda_device_count(std::string* why) {
  if (why != nullptr) *why = cuda::kWhy;
  return 0;
}
std::string cuda_device_name(int) { cuda::refuse("cuda_device_name"); }
MemoryResource& cuda_memory(int) { cuda::refuse("cuda_memory"); }
void cuda_copy(void*, const void*, size_t, Device, Stream) { cuda::refuse("cuda_copy"); }
void cuda_wait(Device, Stream) { cuda::refuse("cuda_wait"); }
StreamCounter::StreamCounter(int device_index) : device_index_(device_index) { cuda::refuse("StreamCounter"); }
StreamCounter::~StreamCounter() = default;
void StreamCounter::signal(Stream) { cuda::refuse("StreamCounter::signal"); }
uint64_t StreamCounter::value() const noexcept { return device_ == nullptr ? 0 : *host_; }

}  // namespace v0
}  // namespace gannet
