// The part of a backend that is the same whatever it attends to: steps, caches, writes, and the parts of dense prefill.
#pragma once

#include "attention/backend_core.h"
#include "attention/dense_delegate.h"

namespace gannet {
inline namespace v0 {
namespace attention {

class CommonBackend : public AttentionBackend {
 public:
  CommonBackend(std::string name, AttentionCapabilities capabilities, const Context& context,
                const AttentionConfig& config, MemoryResource& memory)
      : core_(std::move(name), std::move(capabilities), context, config, memory), dense_(core_) {}

  const char* name() const noexcept final { return core_.name().c_str(); }
  const AttentionCapabilities& capabilities() const noexcept final { return core_.capabilities(); }
  const AttentionConfig& config() const noexcept final { return core_.config(); }
  void bind(std::span<const LayerCaches> layers) final { core_.bind(layers); }
  void set_stream(Stream stream) final { core_.set_stream(stream); }
  void set_layer_hooks(LayerHooks hooks) final { core_.set_layer_hooks(std::move(hooks)); }
  void prepare(const BatchStep& step) final {
    dense_.on_prepare();
    core_.prepare(step);
  }
  void capture(const CaptureShape& shape) final {
    dense_.on_prepare();
    core_.capture(shape, nullptr);
  }
  void refresh(const BatchStep& step, int32_t num_requests) final {
    dense_.on_prepare();
    core_.refresh(step, num_requests);
  }
  void capture(const CaptureShape& shape, const SharedPageTable& table) final {
    dense_.on_prepare();
    core_.capture(shape, &table);
  }
  void refresh(const SharedStep& step) final {
    dense_.on_prepare();
    core_.refresh(step);
  }
  void advance(const DraftAdvance& advance) final {
    dense_.on_prepare();
    core_.advance(advance);
  }
  const StepPlan& step() const final { return core_.step("step"); }
  StepTensors step_tensors() const final { return core_.step_tensors(); }
  void write(int32_t layer, StepRows rows, const KvRows& kv) final { core_.write("write", layer, rows, kv); }

  void dense_prefill(const DensePrefillCall& call) final {
    check_dense("dense_prefill");
    dense_.dense_prefill(call);
  }
  void prefill_new_tokens(const DensePrefillCall& call) final {
    check_dense("prefill_new_tokens");
    dense_.prefill_new_tokens(call);
  }
  void gather_prefix(int32_t layer, int64_t chunk, const TensorView& latent, const TensorView& rope) final {
    dense_.gather_prefix(layer, chunk, latent, rope);
  }
  void prefill_prefix(const PrefixPassCall& call) final {
    check_dense("prefill_prefix");
    dense_.prefill_prefix(call);
  }
  std::vector<std::pair<std::string, std::string>> implementations() const final { return core_.implementations(); }

 protected:
  /// Throws where dense attention is not what the backend computes for this step.
  virtual void check_dense(const char* call) const = 0;

  BackendCore core_;
  DenseDelegate dense_;
};

}  // namespace attention
}  // namespace v0
}  // namespace gannet
