#include "model/compute.h"

#include <algorithm>
#include <cstring>
#include <deque>

#include "model/norm.h"

namespace gannet {
inline namespace v0 {
namespace {

class HostCompute final : public Compute {
 public:
  HostCompute(const Context& context, const ComputeOptions& options)
      : executor_(context.executor != nullptr ? context.executor : &serial_),
        projector_(*executor_, options.projector) {}

  std::string name() const override { return projector_.impl(); }
  Device device() const noexcept override { return {}; }
  MemoryResource& memory() const noexcept override { return host_memory(); }

  // Weights are read where the file is mapped.
  WeightView place(const WeightView& weight, bool) override { return weight; }
  const float* place(std::vector<float> values) override { return vectors_.emplace_back(std::move(values)).data(); }
  int32_t place_experts(std::vector<MlpWeights> experts) override {
    experts_.push_back(std::move(experts));
    return static_cast<int32_t>(experts_.size()) - 1;
  }

  const int32_t* upload_ids(std::span<const int32_t> ids, int64_t) override { return ids.data(); }
  void fetch(const void* from, size_t bytes, void* to) override {
    if (from != to) std::memcpy(to, from, bytes);
  }
  std::unique_ptr<Recording> record(const std::function<void()>&) override { return nullptr; }
  int64_t allocations() const noexcept override { return 0; }

  void embed(const WeightView& weight, const int32_t* ids, int64_t rows, float* x) override {
    for (int64_t r = 0; r < rows; ++r) widen_row(weight, ids[r], 0, weight.cols, x + r * weight.cols);
  }
  void run(std::span<const Product> products) override { projector_.run(products); }
  void rms_norm(const float* x, int64_t x_stride, int64_t rows, int64_t dim, const float* weight, float eps, float* y,
                int64_t y_stride) override {
    gannet::rms_norm(*executor_, x, x_stride, rows, dim, weight, eps, y, y_stride);
  }
  void layer_norm(const float* x, int64_t rows, int64_t dim, const float* weight, const float* bias, float eps,
                  float* y) override {
    gannet::layer_norm(*executor_, x, dim, rows, dim, weight, bias, eps, y, dim);
  }
  void add(float* x, const float* y, int64_t rows, int64_t dim) override { add_rows(*executor_, x, y, rows, dim); }
  void scale(float* x, float factor, int64_t n) override {
    for (int64_t i = 0; i < n; ++i) x[i] *= factor;
  }
  void clear(float* x, int64_t n) override { std::fill_n(x, n, 0.0f); }
  void copy_rows(const float* x, int64_t x_stride, int64_t rows, int64_t n, float* y, int64_t y_stride) override {
    for (int64_t r = 0; r < rows; ++r) std::copy_n(x + r * x_stride, n, y + r * y_stride);
  }
  void gather_rows(const float* x, std::span<const int64_t> rows, int64_t n, float* y) override {
    for (const int64_t r : rows) y = r < 0 ? std::fill_n(y, n, 0.0f) : std::copy_n(x + r * n, n, y);
  }
  void to_bf16(const float* x, int64_t n, Bf16* y) override {
    constexpr int64_t kPerTask = 1 << 16;
    executor_->parallel_for((n + kPerTask - 1) / kPerTask, [&](int64_t task, int) {
      for (int64_t i = task * kPerTask; i < std::min(n, (task + 1) * kPerTask); ++i) y[i] = Bf16::from_float(x[i]);
    });
  }
  void from_bf16(const Bf16* x, int64_t n, float* y) override {
    for (int64_t i = 0; i < n; ++i) y[i] = x[i].to_float();
  }

  void run_mlp(const MlpWeights& mlp, const float* x, int64_t rows, float* y) override {
    gannet::run_mlp(projector_, mlp, x, rows, y, scratch_);
  }
  void run_experts(int32_t experts, const RouterParams& params, const float* logits, const float* bias, const float* x,
                   int64_t rows, float* y) override {
    const auto picked = static_cast<size_t>(rows * params.experts_per_token);
    if (ids_.size() < picked) ids_.resize(picked);
    if (weights_.size() < picked) weights_.resize(picked);
    route_experts(params, logits, bias, rows, ids_.data(), weights_.data());
    gannet::run_experts(projector_, experts_[static_cast<size_t>(experts)], ids_.data(), weights_.data(),
                        params.experts_per_token, x, rows, y, scratch_);
  }

 private:
  SerialExecutor serial_;
  Executor* executor_;
  Projector projector_;
  std::deque<std::vector<float>> vectors_;
  std::vector<std::vector<MlpWeights>> experts_;
  MlpScratch scratch_;
  std::vector<int32_t> ids_;
  std::vector<float> weights_;
};

}  // namespace

std::unique_ptr<Compute> make_compute(const Context& context, const ComputeOptions& options) {
  if (options.device.kind == DeviceKind::kCuda) return make_cuda_compute(options);
  return std::make_unique<HostCompute>(context, options);
}

}  // namespace v0
}  // namespace gannet
