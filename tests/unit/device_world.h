// What lets the tests of the backends, written for host memory, run on a CUDA device unchanged: memory that both sides
// see at the same address, and a backend whose calls have finished when they return.
#pragma once

#include <memory>
#include <utility>

#include "core/format.h"
#include "gannet/attention.h"
#include "gannet/cuda.h"
#ifdef GANNET_CUDA
#include <cuda_runtime_api.h>
#endif

namespace gannet_test {

using namespace gannet;

/// Where the tensors of a test lie: the device of the World that was made last.
inline Device& test_device() {
  static Device device;
  return device;
}

#ifdef GANNET_CUDA
class SharedMemory final : public MemoryResource {
 public:
  Device device() const noexcept override { return {DeviceKind::kCuda, 0}; }
  void* allocate(size_t bytes, size_t) override {
    void* p = nullptr;
    if (cudaMallocManaged(&p, bytes > 0 ? bytes : 1) != cudaSuccess)
      fail(ErrorCode::kOutOfMemory, "SharedMemory", "{} bytes cannot be had", bytes);
    return p;
  }
  void deallocate(void* p, size_t, size_t) noexcept override {
    cudaDeviceSynchronize();
    cudaFree(p);
  }
};
#endif

inline MemoryResource& memory_of([[maybe_unused]] Device device) {
#ifdef GANNET_CUDA
  static SharedMemory shared;
  if (device.kind == DeviceKind::kCuda) return shared;
#endif
  return host_memory();
}

/// Waits for the device of the test; nothing on the CPU.
inline void wait_for_device() {
  if (test_device().kind == DeviceKind::kCuda) cuda_wait(test_device());
}

/// A backend on a device, waited for.
class WaitingBackend final : public AttentionBackend {
 public:
  explicit WaitingBackend(std::unique_ptr<AttentionBackend> b) : b_(std::move(b)) {}
  const char* name() const noexcept override { return b_->name(); }
  const AttentionCapabilities& capabilities() const noexcept override { return b_->capabilities(); }
  const AttentionConfig& config() const noexcept override { return b_->config(); }
  void bind(std::span<const LayerCaches> layers) override { b_->bind(layers); }
  void set_stream(Stream stream) override { b_->set_stream(stream); }
  void set_layer_hooks(LayerHooks hooks) override { b_->set_layer_hooks(std::move(hooks)); }
  void prepare(const BatchStep& step) override { b_->prepare(step); }
  const StepPlan& step() const override { return b_->step(); }
  StepTensors step_tensors() const override { return b_->step_tensors(); }
  void capture(const CaptureShape& shape) override { b_->capture(shape); }
  void refresh(const BatchStep& step, int32_t num_requests) override { b_->refresh(step, num_requests); }
  void capture(const CaptureShape& shape, const SharedPageTable& table) override { b_->capture(shape, table); }
  void refresh(const SharedStep& step) override { b_->refresh(step); }
  void advance(const DraftAdvance& advance) override { b_->advance(advance); }
  void write(int32_t layer, StepRows rows, const KvRows& kv) override {
    b_->write(layer, rows, kv);
    wait_for_device();
  }
  void select(const SelectCall& call) override {
    b_->select(call);
    wait_for_device();
  }
  void attend(const AttendCall& call) override {
    b_->attend(call);
    wait_for_device();
  }
  void dense_prefill(const DensePrefillCall& call) override {
    b_->dense_prefill(call);
    wait_for_device();
  }
  void prefill_new_tokens(const DensePrefillCall& call) override {
    b_->prefill_new_tokens(call);
    wait_for_device();
  }
  void gather_prefix(int32_t layer, int64_t chunk, const TensorView& latent, const TensorView& rope) override {
    b_->gather_prefix(layer, chunk, latent, rope);
    wait_for_device();
  }
  void prefill_prefix(const PrefixPassCall& call) override {
    b_->prefill_prefix(call);
    wait_for_device();
  }
  std::vector<std::pair<std::string, std::string>> implementations() const override { return b_->implementations(); }

 private:
  std::unique_ptr<AttentionBackend> b_;
};

}  // namespace gannet_test
