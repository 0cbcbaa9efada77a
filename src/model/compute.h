// What a decoder computes beside attention, on one device: projections, norms, activations, the mixture of experts and
// the moves between them. One decoder runs over either device; what differs is behind this.
//
// Arrays are fp32 in memory of the device unless said otherwise, rows packed unless a stride is given. Calls are in
// order of each other and of the attention backend's; on a GPU they are enqueued and return at once, but for fetch().
// Errors: what the device reports. Thread safety: used by one thread at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gannet/context.h"
#include "gannet/memory.h"
#include "model/few_rows.h"
#include "model/linear.h"
#include "model/moe.h"

namespace gannet {
inline namespace v0 {

/// What activations and weights of projections are rounded to on a GPU, sums being fp32.
enum class ComputePrecision : uint8_t {
  kF32,   ///< nothing: weights are widened as they are placed
  kBf16,  ///< both
};

struct ComputeOptions {
  Device device{};
  ComputePrecision precision = ComputePrecision::kF32;  ///< of a GPU; the CPU computes in fp32
  ProjectorOptions projector{};                         ///< of the CPU
};

/// Memory of the device that grows without keeping what it held.
class Array {
 public:
  explicit Array(MemoryResource& memory) : memory_(&memory) {}
  template <class T = float>
  T* room(int64_t n) {
    buffer_.reserve(static_cast<size_t>(n) * sizeof(T), *memory_);
    return data<T>();
  }
  template <class T = float>
  T* data() const noexcept {
    return reinterpret_cast<T*>(buffer_.data());
  }
  size_t bytes() const noexcept { return buffer_.size(); }

 private:
  MemoryResource* memory_;
  Buffer buffer_;
};

class Compute {
 public:
  virtual ~Compute() = default;

  /// "avx512", "cuBLASLt 13.1.0, bf16": what projections run on.
  virtual std::string name() const = 0;
  virtual Device device() const noexcept = 0;
  virtual MemoryResource& memory() const noexcept = 0;
  virtual Stream stream() const noexcept { return {}; }

  // ---- weights, once --------------------------------------------------------------------------------------------
  /// The weight as products on this device read it, valid as long as this object. `exact`: fp32 whatever the precision
  /// (a router, whose ties decide).
  virtual WeightView place(const WeightView& weight, bool exact = false) = 0;
  virtual const float* place(std::vector<float> values) = 0;
  /// Experts of one layer, placed already; the returned number names them in run_experts.
  virtual int32_t place_experts(std::vector<MlpWeights> experts) = 0;

  // ---- between host and device ----------------------------------------------------------------------------------
  /// `ids` of the host become an array that embed() reads, at the same place for the same `capacity`.
  virtual const int32_t* upload_ids(std::span<const int32_t> ids, int64_t capacity) = 0;
  /// Waits, and copies to the host; nothing where both are the same.
  virtual void fetch(const void* from, size_t bytes, void* to) = 0;

  // ---- recordings -----------------------------------------------------------------------------------------------
  /// What `work` enqueues, as one launch; nullptr on the CPU. Everything in it must have run before with these shapes,
  /// so that nothing is planned or allocated. A recording ends its life with the memory that it uses: one made when
  /// memory().allocations was another number is not to be replayed.
  class Recording {
   public:
    virtual ~Recording() = default;
    virtual void replay() = 0;
  };
  virtual std::unique_ptr<Recording> record(const std::function<void()>& work) = 0;
  /// Allocations of memory() so far, on a GPU.
  virtual int64_t allocations() const noexcept = 0;

  // ---- rows -----------------------------------------------------------------------------------------------------
  /// x[r, :] = row ids[r] of the weight.
  virtual void embed(const WeightView& weight, const int32_t* ids, int64_t rows, float* x) = 0;
  virtual void run(std::span<const Product> products) = 0;
  void linear(const float* x, int64_t rows, const WeightView& w, float* y) {
    const Product p{.x = x, .x_stride = w.cols, .rows = rows, .w = w, .y = y, .y_stride = w.rows};
    run({&p, 1});
  }
  virtual void rms_norm(const float* x, int64_t x_stride, int64_t rows, int64_t dim, const float* weight, float eps,
                        float* y, int64_t y_stride) = 0;
  virtual void layer_norm(const float* x, int64_t rows, int64_t dim, const float* weight, const float* bias, float eps,
                          float* y) = 0;
  virtual void add(float* x, const float* y, int64_t rows, int64_t dim) = 0;  ///< x += y
  virtual void scale(float* x, float factor, int64_t n) = 0;                  ///< x *= factor
  virtual void clear(float* x, int64_t n) = 0;
  /// y[i, :n] = x[i, :n].
  virtual void copy_rows(const float* x, int64_t x_stride, int64_t rows, int64_t n, float* y, int64_t y_stride) = 0;
  /// y[i, :] = x[rows[i], :], zeros for -1; `rows` lies on the host.
  virtual void gather_rows(const float* x, std::span<const int64_t> rows, int64_t n, float* y) = 0;
  virtual void to_bf16(const float* x, int64_t n, Bf16* y) = 0;
  virtual void from_bf16(const Bf16* x, int64_t n, float* y) = 0;

  /// For steps of up to FewRows::kMostRows rows; nullptr where there is no such thing.
  virtual FewRows* few_rows() noexcept { return nullptr; }

  // ---- MLPs -----------------------------------------------------------------------------------------------------
  /// y[rows, D] = mlp(x[rows, D]).
  virtual void run_mlp(const MlpWeights& mlp, const float* x, int64_t rows, float* y) = 0;
  /// route_experts (model/moe.h) over logits [rows, E] and run_experts: y[rows, D] += what the picked experts make of
  /// x.
  virtual void run_experts(int32_t experts, const RouterParams& params, const float* logits, const float* bias,
                           const float* x, int64_t rows, float* y) = 0;
};

/// Throws kUnsupported where the device, or the library behind its projections, is not there.
std::unique_ptr<Compute> make_compute(const Context& context, const ComputeOptions& options);

/// Behind make_compute: src/model/cuda/compute.cpp, or src/model/no_cuda.cpp.
std::unique_ptr<Compute> make_cuda_compute(const ComputeOptions& options);

}  // namespace v0
}  // namespace gannet
