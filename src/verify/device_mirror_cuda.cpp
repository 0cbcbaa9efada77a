#include <algorithm>
#include <vector>

#include "cuda/common/check.h"
#include "verify/device_mirror.h"

namespace gannet {
inline namespace v0 {
namespace verify {

namespace {
constexpr const char* kName = "verify";
constexpr size_t kLine = 256;  // a device pointer keeps the host pointer's place in a line of this many bytes
}  // namespace

struct DeviceMirror::State {
  struct Range {
    std::byte *begin, *end;
    std::byte *allocation, *device;
  };
  std::vector<Range> ranges;
  std::vector<void*> scratch;
};

DeviceMirror::DeviceMirror() : state_(std::make_unique<State>()) {}

DeviceMirror::~DeviceMirror() {
  for (const State::Range& r : state_->ranges) cudaFree(r.allocation);
  for (void* p : state_->scratch) cudaFree(p);
}

int64_t DeviceMirror::extent(const TensorView& v) {
  if (v.num_elements() == 0) return 0;
  int64_t last = 0;
  for (size_t i = 0; i < static_cast<size_t>(v.rank); ++i) last += (v.shape[i] - 1) * v.stride[i];
  return (last + 1) * static_cast<int64_t>(size_of(v.dtype));
}

void DeviceMirror::note(void* data, int64_t bytes) {
  if (data == nullptr || bytes <= 0) return;
  auto* begin = static_cast<std::byte*>(data);
  state_->ranges.push_back({begin, begin + bytes, nullptr, nullptr});
}

void DeviceMirror::copy_there() {
  std::vector<State::Range>& all = state_->ranges;
  std::sort(all.begin(), all.end(), [](const State::Range& a, const State::Range& b) { return a.begin < b.begin; });
  std::vector<State::Range> merged;
  for (const State::Range& r : all) {
    if (!merged.empty() && r.begin < merged.back().end) merged.back().end = std::max(merged.back().end, r.end);
    else merged.push_back(r);
  }
  all = merged;
  for (State::Range& r : all) {
    const auto bytes = static_cast<size_t>(r.end - r.begin), shift = reinterpret_cast<uintptr_t>(r.begin) % kLine;
    void* memory = nullptr;
    GANNET_CUDA(kName, cudaMalloc(&memory, bytes + shift));
    r.allocation = static_cast<std::byte*>(memory);
    r.device = r.allocation + shift;
    GANNET_CUDA(kName, cudaMemcpy(r.device, r.begin, bytes, cudaMemcpyHostToDevice));
  }
}

void* DeviceMirror::on_device(void* host) const {
  auto* p = static_cast<std::byte*>(host);
  for (const State::Range& r : state_->ranges) {
    if (p >= r.begin && p < r.end) return r.device + (p - r.begin);
  }
  return nullptr;
}

std::span<std::byte> DeviceMirror::scratch(size_t bytes, bool poisoned) {
  void* memory = nullptr;
  GANNET_CUDA(kName, cudaMalloc(&memory, std::max<size_t>(bytes, 1)));
  state_->scratch.push_back(memory);
  if (poisoned) GANNET_CUDA(kName, cudaMemset(memory, 0xFF, bytes));
  return {static_cast<std::byte*>(memory), bytes};
}

void DeviceMirror::copy_back() {
  GANNET_CUDA(kName, cudaDeviceSynchronize());
  for (const State::Range& r : state_->ranges)
    GANNET_CUDA(kName, cudaMemcpy(r.begin, r.device, static_cast<size_t>(r.end - r.begin), cudaMemcpyDeviceToHost));
}

}  // namespace verify
}  // namespace v0
}  // namespace gannet
