// The decoder's arithmetic on a CUDA device. Everything is enqueued on one stream of its own; only fetch() waits.
#include "model/compute.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <deque>

#include "core/format.h"
#include "cuda/common/check.h"
#include "gannet/cuda.h"
#include "model/cuda/blas.h"
#include "model/cuda/kernels.h"

namespace gannet {
inline namespace v0 {
namespace {

using namespace cuda;

constexpr const char* kName = "Compute";

/// Device memory that counts.
class CountedMemory final : public MemoryResource {
 public:
  explicit CountedMemory(int device) : base_(&cuda_memory(device)) {}
  Device device() const noexcept override { return base_->device(); }
  void* allocate(size_t bytes, size_t alignment) override {
    ++allocations;
    return base_->allocate(bytes, alignment);
  }
  void deallocate(void* p, size_t bytes, size_t alignment) noexcept override { base_->deallocate(p, bytes, alignment); }
  int64_t allocations = 0;

 private:
  MemoryResource* base_;
};

class Graph final : public Compute::Recording {
 public:
  Graph(int device, cudaStream_t stream, const std::function<void()>& work) : device_(device), stream_(stream) {
    const DeviceGuard guard(kName, device);
    cudaGraph_t graph = nullptr;
    GANNET_CUDA(kName, cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    try {
      work();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      throw;
    }
    GANNET_CUDA(kName, cudaStreamEndCapture(stream, &graph));
    const cudaError_t status = cudaGraphInstantiate(&exec_, graph, 0);
    cudaGraphDestroy(graph);
    check(status, kName, "cudaGraphInstantiate");
  }
  ~Graph() override { cudaGraphExecDestroy(exec_); }
  void replay() override {
    const DeviceGuard guard(kName, device_);
    GANNET_CUDA(kName, cudaGraphLaunch(exec_, stream_));
  }

 private:
  int device_;
  cudaStream_t stream_;
  cudaGraphExec_t exec_ = nullptr;
};

/// Memory of the host that copies from the device reach without the driver's own copy.
class PinnedMemory {
 public:
  PinnedMemory() = default;
  ~PinnedMemory() { cudaFreeHost(data_); }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  void* room(size_t bytes) {
    if (bytes <= bytes_) return data_;
    cudaFreeHost(data_);
    data_ = nullptr;
    bytes_ = 0;
    GANNET_CUDA(kName, cudaMallocHost(&data_, bytes));
    bytes_ = bytes;
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

class CudaCompute final : public Compute, public FewRows {
 public:
  explicit CudaCompute(const ComputeOptions& options)
      : device_(options.device),
        bf16_(options.precision == ComputePrecision::kBf16),
        memory_(options.device.index),
        blas_(options.device.index),
        packed_(memory_),
        hidden_(memory_),
        expert_out_(memory_),
        expert_ids_(memory_),
        expert_weights_(memory_),
        expert_first_(memory_),
        expert_order_(memory_),
        expert_places_(memory_),
        ids_(memory_),
        rows_(memory_),
        hidden16_(memory_),
        shared_hidden16_(memory_) {
    const DeviceGuard guard = on_device();
    cudaStream_t s = nullptr;
    GANNET_CUDA(kName, cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    stream_ = {s};
  }
  ~CudaCompute() override {
    cudaStreamSynchronize(handle());
    cudaStreamDestroy(handle());
  }

  std::string name() const override { return fmt::format("{}, {}", blas_.version(), bf16_ ? "bf16" : "fp32"); }
  Device device() const noexcept override { return device_; }
  MemoryResource& memory() const noexcept override { return memory_; }
  Stream stream() const noexcept override { return stream_; }

  WeightView place(const WeightView& w, bool exact) override {
    const DeviceGuard guard = on_device();
    const bool bf16 = bf16_ && !exact;
    const int64_t n = w.rows * w.cols;
    WeightView placed{.data = nullptr, .dtype = bf16 ? DType::kBf16 : DType::kF32, .rows = w.rows, .cols = w.cols};
    Buffer& there = owned_.emplace_back(static_cast<size_t>(n) * size_of(placed.dtype), memory_);
    placed.data = there.data();
    if (w.dtype == placed.dtype) {
      upload(there.data(), w.data, static_cast<size_t>(n) * size_of(w.dtype));
      return placed;
    }
    if (w.dtype == DType::kF32) {  // rounded on the host: few checkpoints have any
      std::vector<Bf16> rounded(static_cast<size_t>(n));
      for (int64_t i = 0; i < n; ++i)
        rounded[static_cast<size_t>(i)] = Bf16::from_float(static_cast<const float*>(w.data)[i]);
      upload(there.data(), rounded.data(), rounded.size() * sizeof(Bf16));
      return placed;
    }
    const Buffer raw(static_cast<size_t>(n) * size_of(w.dtype), memory_);
    upload(raw.data(), w.data, raw.size());
    if (w.dtype == DType::kBf16) {
      launch_from_bf16(raw.data(), n, reinterpret_cast<float*>(there.data()), stream_);
    } else {
      if (w.first_row != 0) fail_argument(kName, "first_row of an e4m3 weight is {}; accepted: 0", w.first_row);
      const int64_t num_scales = (w.rows + w.block_rows - 1) / w.block_rows * w.scale_cols();
      const Buffer scales(static_cast<size_t>(num_scales) * sizeof(float), memory_);
      upload(scales.data(), w.scales, scales.size());
      launch_widen_e4m3(raw.data(), reinterpret_cast<const float*>(scales.data()), w.rows, w.cols, w.block_rows,
                        w.block_cols, w.scale_cols(), there.data(), bf16, stream_);
      launched();
      wait();  // before `raw` and `scales` go
      return placed;
    }
    launched();
    wait();  // before `raw` goes
    return placed;
  }
  const float* place(std::vector<float> values) override {
    const DeviceGuard guard = on_device();
    Buffer& there = owned_.emplace_back(values.size() * sizeof(float), memory_);
    upload(there.data(), values.data(), there.size());
    return reinterpret_cast<const float*>(there.data());
  }
  int32_t place_experts(std::vector<MlpWeights> experts) override {
    const DeviceGuard guard = on_device();
    Experts e{.weights = std::move(experts), .pointers = Buffer(), .on_device = {}};
    const size_t n = e.weights.size();
    std::vector<const void*> pointers;
    for (const auto which : {&MlpWeights::gate, &MlpWeights::up, &MlpWeights::down})
      for (const MlpWeights& w : e.weights) pointers.push_back((w.*which).data);
    e.pointers = Buffer(pointers.size() * sizeof(void*), memory_);
    upload(e.pointers.data(), pointers.data(), e.pointers.size());
    const auto* base = reinterpret_cast<const void* const*>(e.pointers.data());
    const WeightView& gate = e.weights[0].gate;
    e.on_device = {.gate = base,
                   .up = base + n,
                   .down = base + 2 * n,
                   .bf16 = gate.dtype == DType::kBf16,
                   .dim = gate.cols,
                   .width = gate.rows};
    experts_.push_back(std::move(e));
    return static_cast<int32_t>(experts_.size()) - 1;
  }

  const int32_t* upload_ids(std::span<const int32_t> ids, int64_t capacity) override {
    const DeviceGuard guard = on_device();
    int32_t* there = ids_.room<int32_t>(std::max(capacity, static_cast<int64_t>(ids.size())));
    GANNET_CUDA(kName, cudaMemcpyAsync(there, ids.data(), ids.size_bytes(), cudaMemcpyHostToDevice, handle()));
    return there;
  }
  void fetch(const void* from, size_t bytes, void* to) override {
    if (from == to || bytes == 0) return;
    const DeviceGuard guard = on_device();
    constexpr size_t kMostStaged = size_t{4} << 20;  // beyond, the copy itself outweighs what the driver adds
    void* there = bytes <= kMostStaged ? pinned_.room(bytes) : to;
    GANNET_CUDA(kName, cudaMemcpyAsync(there, from, bytes, cudaMemcpyDeviceToHost, handle()));
    wait();
    if (there != to) std::memcpy(to, there, bytes);
  }

  std::unique_ptr<Recording> record(const std::function<void()>& work) override {
    return std::make_unique<Graph>(device_.index, handle(), work);
  }
  int64_t allocations() const noexcept override { return memory_.allocations; }

  void embed(const WeightView& w, const int32_t* ids, int64_t rows, float* x) override {
    const DeviceGuard guard = on_device();
    launch_embed({w.data, w.dtype == DType::kBf16}, ids, rows, w.cols, x, stream_);
    launched();
  }

  // Products of one shape whose addresses advance evenly - the heads of a layer - are one call. Products of one input
  // share its rounded copy.
  void run(std::span<const Product> products) override {
    const DeviceGuard guard = on_device();
    packed_from_ = {};
    for (size_t i = 0; i < products.size();) {
      const Product& p = products[i];
      size_t n = 1;
      const auto offset = [](const void* a, const void* b) {
        return static_cast<const std::byte*>(b) - static_cast<const std::byte*>(a);
      };
      while (i + n < products.size()) {
        const Product &a = products[i + n - 1], &b = products[i + n], &second = products[i + 1];
        const bool alike = b.rows == p.rows && b.w.rows == p.w.rows && b.w.cols == p.w.cols && b.form == p.form &&
                           b.w.dtype == p.w.dtype && b.x_stride == p.x_stride && b.y_stride == p.y_stride;
        if (!alike || offset(a.x, b.x) != offset(p.x, second.x) ||
            offset(a.w.data, b.w.data) != offset(p.w.data, second.w.data) || offset(a.y, b.y) != offset(p.y, second.y))
          break;
        ++n;
      }
      run_alike(products.subspan(i, n));
      i += n;
    }
  }

  void rms_norm(const float* x, int64_t x_stride, int64_t rows, int64_t dim, const float* weight, float eps, float* y,
                int64_t y_stride) override {
    const DeviceGuard guard = on_device();
    launch_rms_norm(x, x_stride, rows, dim, weight, eps, y, y_stride, stream_);
    launched();
  }
  void layer_norm(const float* x, int64_t rows, int64_t dim, const float* weight, const float* bias, float eps,
                  float* y) override {
    const DeviceGuard guard = on_device();
    launch_layer_norm(x, rows, dim, weight, bias, eps, y, stream_);
    launched();
  }
  void add(float* x, const float* y, int64_t rows, int64_t dim) override {
    const DeviceGuard guard = on_device();
    launch_add(x, y, rows * dim, stream_);
    launched();
  }
  void scale(float* x, float factor, int64_t n) override {
    const DeviceGuard guard = on_device();
    launch_scale(x, factor, n, stream_);
    launched();
  }
  void clear(float* x, int64_t n) override {
    const DeviceGuard guard = on_device();
    GANNET_CUDA(kName, cudaMemsetAsync(x, 0, static_cast<size_t>(n) * sizeof(float), handle()));
  }
  void copy_rows(const float* x, int64_t x_stride, int64_t rows, int64_t n, float* y, int64_t y_stride) override {
    const DeviceGuard guard = on_device();
    launch_copy_rows(x, x_stride, rows, n, y, y_stride, stream_);
    launched();
  }
  void gather_rows(const float* x, std::span<const int64_t> rows, int64_t n, float* y) override {
    const DeviceGuard guard = on_device();
    auto* list = rows_.room<int64_t>(static_cast<int64_t>(rows.size()));
    upload(reinterpret_cast<std::byte*>(list), rows.data(), rows.size_bytes());
    launch_gather_rows(x, list, static_cast<int64_t>(rows.size()), n, y, stream_);
    launched();
  }
  void to_bf16(const float* x, int64_t n, Bf16* y) override {
    const DeviceGuard guard = on_device();
    launch_pack_bf16(x, 1, 0, 1, 0, n, y, stream_);
    launched();
  }
  void from_bf16(const Bf16* x, int64_t n, float* y) override {
    const DeviceGuard guard = on_device();
    launch_from_bf16(x, n, y, stream_);
    launched();
  }

  void run_mlp(const MlpWeights& mlp, const float* x, int64_t rows, float* y) override {
    const DeviceGuard guard = on_device();
    const int64_t width = mlp.gate.rows;
    float* gate = hidden_.room(2 * rows * width);
    float* up = gate + rows * width;
    const auto product = [&](const WeightView& w, float* out) {
      return Product{.x = x, .x_stride = w.cols, .rows = rows, .w = w, .y = out, .y_stride = w.rows};
    };
    const Product in[] = {product(mlp.gate, gate), product(mlp.up, up)};
    run(in);
    launch_silu_mul(gate, up, rows * width, stream_);
    launched();
    linear(gate, rows, mlp.down, y);
  }

  void run_experts(int32_t experts, const RouterParams& params, const float* logits, const float* bias, const float* x,
                   int64_t rows, float* y) override {
    check_experts(params);
    const DeviceGuard guard = on_device();
    const DeviceExperts& e = experts_[static_cast<size_t>(experts)].on_device;
    const int64_t pairs = rows * params.experts_per_token;
    if (pairs == 0) return;
    auto* ids = expert_ids_.room<int32_t>(pairs);
    float* weights = expert_weights_.room(pairs);
    auto* first = expert_first_.room<int32_t>(params.num_experts + 1);
    auto* order = expert_order_.room<int32_t>(pairs);
    auto* places = expert_places_.room<int32_t>(pairs);
    float* hidden = hidden_.room(pairs * e.width);
    float* out = expert_out_.room(pairs * e.dim);
    launch_route(params, logits, bias, rows, ids, weights, stream_);
    launch_sort_pairs(ids, pairs, params.num_experts, first, order, places, stream_);
    launch_experts_in(e, params.num_experts, first, order, pairs, params.experts_per_token, x, hidden, stream_);
    launch_experts_out(e, params.num_experts, first, pairs, hidden, out, stream_);
    launch_experts_add(out, places, weights, rows, params.experts_per_token, e.dim, y, stream_);
    launched();
  }

  // ---- few rows -------------------------------------------------------------------------------------------------
  FewRows* few_rows() noexcept override { return bf16_ ? this : nullptr; }

  const void* place_transposed(const void* w, int64_t rows, int64_t cols, int64_t repeats, int64_t w_step) override {
    const DeviceGuard guard = on_device();
    Buffer& there = owned_.emplace_back(static_cast<size_t>(rows * cols * repeats) * sizeof(Bf16), memory_);
    launch_transpose(w, rows, cols, repeats, w_step, there.data(), stream_);
    launched();
    wait();
    return there.data();
  }
  void run(const FewRowsProducts& products) override {
    const DeviceGuard guard = on_device();
    launch_products(products, stream_);
    launched();
  }
  void run(const FewRowsMlp& mlp) override {
    const DeviceGuard guard = on_device();
    DeviceMlp m{};
    m.x = mlp.x;
    m.norm = mlp.norm;
    m.eps = mlp.eps;
    m.rows = mlp.rows;
    if (mlp.shared.gate.data != nullptr) {
      m.gate = mlp.shared.gate.data;
      m.up = mlp.shared.up.data;
      m.down = mlp.shared.down.data;
      m.shared_width = mlp.shared.gate.rows;
      m.dim = mlp.shared.gate.cols;
      m.shared_hidden = shared_hidden16_.room<uint16_t>(m.rows * m.shared_width);
    }
    if (mlp.experts >= 0) {
      check_experts(mlp.router);
      const DeviceExperts& e = experts_[static_cast<size_t>(mlp.experts)].on_device;
      m.expert_gate = e.gate;
      m.expert_up = e.up;
      m.expert_down = e.down;
      m.width = e.width;
      m.dim = e.dim;
      m.num_experts = mlp.router.num_experts;
      m.per_row = mlp.router.experts_per_token;
      const int64_t pairs = m.rows * m.per_row;
      auto* ids = expert_ids_.room<int32_t>(pairs);
      float* weights = expert_weights_.room(pairs);
      m.ids = ids;
      m.weights = weights;
      m.hidden = hidden16_.room<uint16_t>(pairs * m.width);
      launch_norm_route(mlp.router, m.x, m.dim, m.norm, m.eps, mlp.router_weight, mlp.router_bias, m.rows, ids, weights,
                        stream_);
    }
    launch_mlp(m, stream_);
    launched();
  }
  void argmax(const float* logits, int64_t rows, int64_t vocab, int32_t* ids) override {
    const DeviceGuard guard = on_device();
    launch_argmax(logits, rows, vocab, ids, stream_);
    launched();
  }

 private:
  void check_experts(const RouterParams& params) const {
    constexpr int32_t kMostExperts = 511;  // a thread each in kernels.cu, and one number more
    if (params.num_experts > kMostExperts)
      fail(ErrorCode::kUnsupported, kName, "a layer has {} experts; accepted on {}: up to {}", params.num_experts,
           to_string(device_), kMostExperts);
  }
  /// What packed_ holds a rounded copy of.
  struct PackedFrom {
    const float* x = nullptr;
    int64_t batches = 0, x_batch = 0, rows = 0, x_stride = 0, k = 0;
    friend bool operator==(const PackedFrom&, const PackedFrom&) = default;
  };
  struct Experts {
    std::vector<MlpWeights> weights;
    Buffer pointers;
    DeviceExperts on_device;
  };

  /// Held by every call that reaches the device: the current device is the caller's again afterwards.
  DeviceGuard on_device() const { return {kName, device_.index}; }
  cudaStream_t handle() const { return static_cast<cudaStream_t>(stream_.handle); }
  void wait() const { GANNET_CUDA(kName, cudaStreamSynchronize(handle())); }
  static void launched() { GANNET_CUDA(kName, cudaGetLastError()); }
  /// From pageable memory: the bytes have been read when this returns.
  void upload(std::byte* to, const void* from, size_t bytes) const {
    if (bytes > 0) GANNET_CUDA(kName, cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, handle()));
  }

  void run_alike(std::span<const Product> products) {
    const Product& p = products[0];
    const auto n = static_cast<int64_t>(products.size());
    GemmShape s{.bf16 = p.w.dtype == DType::kBf16,
                .plain = p.form == ProductForm::kPlain,
                .m = p.rows,
                .n = p.n(),
                .k = p.k(),
                .x_stride = p.x_stride,
                .w_stride = p.w.cols,
                .y_stride = p.y_stride,
                .batches = n};
    if (s.m == 0 || s.n == 0) return;
    if (n > 1) {
      const Product& q = products[1];
      s.x_batch = q.x - p.x;
      s.y_batch = q.y - p.y;
      s.w_batch = (static_cast<const std::byte*>(q.w.data) - static_cast<const std::byte*>(p.w.data)) /
                  static_cast<int64_t>(size_of(p.w.dtype));
    }
    const void* x = p.x;
    if (s.bf16) {
      const int64_t batches = s.x_batch == 0 ? 1 : n;
      const PackedFrom from{p.x, batches, s.x_batch, s.m, s.x_stride, s.k};
      Bf16* packed = packed_.room<Bf16>(batches * s.m * s.k);
      if (!(from == packed_from_)) {
        launch_pack_bf16(p.x, batches, s.x_batch, s.m, s.x_stride, s.k, packed, stream_);
        launched();
        packed_from_ = from;
      }
      s.x_stride = s.k;
      s.x_batch = s.x_batch == 0 ? 0 : s.m * s.k;
      x = packed;
    }
    blas_.gemm(s, x, p.w.data, p.y, stream_);
  }

  Device device_;
  bool bf16_;
  mutable CountedMemory memory_;
  Blas blas_;
  Stream stream_;
  std::deque<Buffer> owned_;
  std::vector<Experts> experts_;
  PackedFrom packed_from_;  // within one run()
  Array packed_, hidden_, expert_out_, expert_ids_, expert_weights_, expert_first_, expert_order_, expert_places_, ids_,
      rows_, hidden16_, shared_hidden16_;
  PinnedMemory pinned_;
};

}  // namespace

std::unique_ptr<Compute> make_cuda_compute(const ComputeOptions& options) {
  return std::make_unique<CudaCompute>(options);
}

}  // namespace v0
}  // namespace gannet
