// "mla": dense multi-head latent attention.
#include "attention/backends.h"
#include "attention/dense_delegate.h"

namespace gannet {
inline namespace v0 {
namespace attention {
namespace {

AttentionCapabilities capabilities() {
  return {.dense_prefill = true,
          .attend_all = true,
          .attend_sparse = false,
          .page_sizes = {32, 64},
          .latent_formats = {LatentFormat::kF32, LatentFormat::kBf16, LatentFormat::kE4m3, LatentFormat::kPacked656,
                             LatentFormat::kE4m3PerToken}};
}

class MlaBackend final : public AttentionBackend {
 public:
  MlaBackend(const Context& context, const AttentionConfig& config, MemoryResource& memory)
      : core_("mla", attention::capabilities(), context, config, memory), dense_(core_) {}

  const char* name() const noexcept override { return core_.name().c_str(); }
  const AttentionCapabilities& capabilities() const noexcept override { return core_.capabilities(); }
  const AttentionConfig& config() const noexcept override { return core_.config(); }
  void bind(std::span<const LayerCaches> layers) override { core_.bind(layers); }
  void set_stream(Stream stream) override { core_.set_stream(stream); }
  void set_layer_hooks(LayerHooks hooks) override { core_.set_layer_hooks(std::move(hooks)); }
  void prepare(const BatchStep& step) override {
    dense_.on_prepare();
    core_.prepare(step);
  }
  void capture(const CaptureShape& shape) override {
    dense_.on_prepare();
    core_.capture(shape);
  }
  void refresh(const BatchStep& step, int32_t num_requests) override {
    dense_.on_prepare();
    core_.refresh(step, num_requests);
  }
  void advance(const DraftAdvance& advance) override {
    dense_.on_prepare();
    core_.advance(advance);
  }
  const StepPlan& step() const override { return core_.step("step"); }
  StepTensors step_tensors() const override { return core_.step_tensors(); }
  void write(int32_t layer, StepRows rows, const KvRows& kv) override { core_.write("write", layer, rows, kv); }

  void select(const SelectCall&) override {
    core_.refuse_unsupported("select", "the backend has no indexer; accepted: a backend with sparse attention (dsa)");
  }

  void attend(const AttendCall& call) override {
    constexpr const char* kCall = "attend";
    if (std::holds_alternative<TopKSelection>(call.selection))
      core_.refuse_unsupported(
          kCall, "selection is a TopKSelection; accepted: AttendAll (the backend has no sparse attention)");
    if (!std::holds_alternative<AttendAll>(call.selection))
      core_.refuse(kCall, "selection is not given; accepted: AttendAll");
    if (core_.begin_attend(call)) dense_.attend_all(call);
  }

  void dense_prefill(const DensePrefillCall& call) override { dense_.dense_prefill(call); }
  void prefill_new_tokens(const DensePrefillCall& call) override { dense_.prefill_new_tokens(call); }
  void gather_prefix(int32_t layer, int64_t chunk, const TensorView& latent, const TensorView& rope) override {
    dense_.gather_prefix(layer, chunk, latent, rope);
  }
  void prefill_prefix(const PrefixPassCall& call) override { dense_.prefill_prefix(call); }

  std::vector<std::pair<std::string, std::string>> implementations() const override { return core_.implementations(); }

 private:
  BackendCore core_;
  DenseDelegate dense_;
};

}  // namespace

std::unique_ptr<AttentionBackend> make_mla(const Context& context, const AttentionConfig& config,
                                           MemoryResource& memory) {
  return std::make_unique<MlaBackend>(context, config, memory);
}

}  // namespace attention
}  // namespace v0
}  // namespace gannet
