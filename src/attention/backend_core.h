// What a backend and its dense delegate share: configuration, caches, the step, scratch, and every precondition check.
#pragma once

#include <initializer_list>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "attention/device_arrays.h"
#include "attention/op_cache.h"
#include "core/format.h"
#include "core/op_list.h"
#include "gannet/attention.h"

namespace gannet {
inline namespace v0 {
namespace attention {

class BackendCore {
 public:
  /// Throws for a configuration that no layer of any backend takes.
  BackendCore(std::string name, AttentionCapabilities capabilities, const Context& context,
              const AttentionConfig& config, MemoryResource& memory);

  const std::string& name() const noexcept { return name_; }
  const AttentionConfig& config() const noexcept { return config_; }
  const AttentionCapabilities& capabilities() const noexcept { return capabilities_; }
  MemoryResource& memory() const noexcept { return memory_; }

  ~BackendCore();
  BackendCore(const BackendCore&) = delete;
  BackendCore& operator=(const BackendCore&) = delete;

  void bind(std::span<const LayerCaches> layers);
  void set_stream(Stream stream) noexcept { stream_ = stream; }
  Stream stream() const noexcept { return stream_; }
  /// Through which arrays go to the device; none on the CPU.
  cuda::Staging* staging() const noexcept { return staging_.get(); }
  void set_layer_hooks(LayerHooks hooks);
  void prepare(const BatchStep& step);
  /// `table`: null for a batch with a table of its own.
  void capture(const CaptureShape& shape, const SharedPageTable* table);
  void refresh(const BatchStep& step, int32_t num_requests);
  void refresh(const SharedStep& step);
  void advance(const DraftAdvance& advance);
  void write(const char* call, int32_t layer, StepRows part, const KvRows& kv);
  /// Does what `write` says; throws where it says nothing.
  void apply(const char* call, int32_t layer, StepRows part, const StepWrite& write);

  /// Throws Error(kInvalidArgument) "[name call] ...".
  template <class... Args>
  [[noreturn]] void refuse(const char* call, fmt::format_string<Args...> text, Args&&... args) const {
    fail_argument(where(call).c_str(), text, std::forward<Args>(args)...);
  }
  template <class... Args>
  [[noreturn]] void refuse_unsupported(const char* call, fmt::format_string<Args...> text, Args&&... args) const {
    fail(ErrorCode::kUnsupported, where(call).c_str(), text, std::forward<Args>(args)...);
  }

  /// The plan of the step; throws where there is none.
  const StepPlan& step(const char* call) const;
  /// The plan of a step with requests; throws where there is none.
  const StepPlan& active_step(const char* call) const;
  /// The form of a layer's caches, for checks. Who touches their bytes asks open_layer.
  const LayerCaches& layer(const char* call, int32_t layer) const;
  /// The caches of a layer that layer() has checked, once their rows are there (LayerHooks::wait).
  const LayerCaches& open_layer(int32_t layer) const;
  /// Throws for a value that is none of StepRows.
  void check_rows(const char* call, StepRows part) const;
  /// kAll as the one part that the step has; throws where one launch cannot hold both.
  StepRows effective(const char* call, StepRows part) const;
  // The arrays of the current plan where the operations read them.
  QueryRows query_rows(StepRows part) const;
  PageTableView pages(StepRows part) const;
  StepTensors step_tensors() const;
  TensorView on_device(const TensorView& array) const { return arrays_->on_device(array); }

  /// Throws unless the view has that shape and is fp32 or bf16.
  void check_float(const char* call, const char* argument, const TensorView& v,
                   std::initializer_list<int64_t> shape) const;
  void check_typed(const char* call, const char* argument, const TensorView& v, DType dtype,
                   std::initializer_list<int64_t> shape) const;

  /// Plans if these shapes are new, and runs.
  template <class Params>
  void run(const Params& params) {
    const OpPlan<Params>& plan = std::get<OpCache<Params>>(*ops_).plan(context_, params, config_.plan);
    grow(workspace_, plan.workspace_bytes());
    plan.run(params, workspace_.span(), stream_);
  }

  /// Makes a buffer of the device at least that large. What it had is kept for the graphs that captured it.
  void grow(Buffer& buffer, size_t bytes);

  /// The queries of a select call as the cache has its keys: rotated into memory of the backend, or as they are.
  TensorView rotated_query(const TensorView& q, const IndexCacheView& cache) { return rotated(q, cache, rotated_q_); }

  /// Checks the tensors of an attention call and writes its rows. False where there are none: nothing is to be done.
  bool begin_attend(const AttendCall& call);

  std::vector<std::pair<std::string, std::string>> implementations() const;

 private:
  enum class State { kUnbound, kBound, kIdle, kActive };

#define GANNET_CACHE(Params, member) , OpCache<Params>
  template <class, class... Caches>
  struct TupleOf {
    using Type = std::tuple<Caches...>;
  };
  using Ops = TupleOf < void GANNET_FOR_EACH_OP(GANNET_CACHE)
  > ::Type;
#undef GANNET_CACHE

  /// The plan of a step and the plans of its operations: a captured batch has its own, which no other shape displaces.
  struct Planned {
    Planned(Device device, MemoryResource& memory) : arrays(device, memory) {}
    StepPlan plan;
    Ops ops;
    DeviceArrays arrays;
    const SharedPageTable* table = nullptr;
  };

  TensorView rotated(const TensorView& x, const IndexCacheView& cache, Buffer& room);
  std::string where(const char* call) const { return name_ + " " + call; }
  /// Throws unless an implementation takes these caches, so that a pool is refused when it is bound rather than by the
  /// first layer of the first step.
  void probe(const LayerCaches& caches) const;
  StepLimits limits() const noexcept;
  /// Brings the arrays of a plan that has been filled to the device.
  void upload(Planned& planned);
  /// A plan that has been filled becomes the current one, which drafts go on from.
  void begin_step(Planned& planned);
  void make_current(Planned& planned) noexcept;
  Planned* find_captured(int64_t num_requests, int32_t q_len) noexcept;
  Planned& captured(const char* call, int64_t num_requests, int32_t q_len);
  /// A call has written these rows, or says that they are written.
  void record_written(int32_t layer, StepRows part);
  /// Abandons what has no record.
  void end_step() noexcept;

  std::string name_;
  AttentionCapabilities capabilities_;
  const Context& context_;
  AttentionConfig config_;
  MemoryResource& memory_;
  Stream stream_;
  std::unique_ptr<cuda::Staging> staging_;
  std::vector<LayerCaches> layers_;
  LayerHooks hooks_;
  bool recording_ = false;           // the step is one of prefill, and there is a hook
  std::vector<uint8_t> has_record_;  // [layers]
  State state_ = State::kUnbound;
  Planned eager_{config_.device, memory_}, draft_{config_.device, memory_};
  std::vector<std::unique_ptr<Planned>> captured_;
  StepPlan* current_ = &eager_.plan;
  Ops* ops_ = &eager_.ops;
  const DeviceArrays* arrays_ = &eager_.arrays;
  const SharedPageTable* table_ = nullptr;  // of the current step, which belongs to this generation of it
  uint64_t generation_ = 0;
  const Planned* base_ = &eager_;   // what advance goes on from
  std::vector<int32_t> base_lens_;  // of base_, which an advance into it overwrites
  std::vector<int32_t> next_lens_;
  Buffer workspace_, rotated_q_, rotated_k_;
  std::vector<Buffer> outgrown_;
};

}  // namespace attention
}  // namespace v0
}  // namespace gannet
