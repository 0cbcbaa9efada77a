#include "model/linear.h"

#include <algorithm>
#include <memory>

#include "core/format.h"
#include "model/product_kernels.h"

#if GANNET_HAVE_ONEDNN
#include <oneapi/dnnl/dnnl.h>
extern "C" void omp_set_num_threads(int);  // oneDNN's threads are OpenMP's; the workers are ours
#endif

namespace gannet {
inline namespace v0 {
namespace {

// Up to this many rows the streaming loop wins over widening panels and calling the library. One Zen 4 core, bf16
// weights, GFLOP/s: of [512, 256] the loop runs at 45 and the library at 71 from 17 rows, 105 from 128; of [2048, 7168]
// the loop runs at 70 to 84, the library at 38 for 25 rows, 85 to 92 from 129 to 512.
constexpr int64_t few_rows(int64_t k) { return k <= 512 ? 16 : 128; }

// A panel of W is what one task handles. The library gets it widened, kMaxPanel columns at a time and as much of K as
// stays in half of a 1 MiB L2.
constexpr int64_t kPanelBytes = 512 * 1024;
constexpr int64_t kFloatBytes = sizeof(float);
constexpr int64_t kStridePadding = 16;  // rows a multiple of 4 KiB apart would share the sets of the caches
constexpr int64_t kMinPanel = 16;
constexpr int64_t kMaxPanel = 128;

// Rows of x that one task takes: bounds what the streaming loop rereads (16 rows of 7168 are 448 KiB) and gives work to
// all workers where W is narrow.
constexpr int64_t kLoopRows = 16;
constexpr int64_t kGemmRows = 256;

const ProductKernels* choose(const std::string& name) {
  for (const ProductKernels* kernels : {&kAvx512Products, &kPortableProducts}) {
    if (name.empty() ? !kernels->runs_here() : name != kernels->name) continue;
    if (!kernels->runs_here())
      fail(ErrorCode::kUnsupported, "Projector", "impl is \"{}\"; this machine lacks its instructions", name);
    return kernels;
  }
  fail_argument("Projector", "impl is \"{}\"; accepted: avx512, portable", name);
}

const std::byte* row_address(const WeightView& w, int64_t row) {
  return static_cast<const std::byte*>(w.data) + row * w.cols * static_cast<int64_t>(size_of(w.dtype));
}

void widen(const ProductKernels& kernels, const WeightView& w, int64_t row, int64_t first, int64_t n, float* dst) {
  const std::byte* src = row_address(w, row);
  switch (w.dtype) {
    case DType::kF32: std::copy_n(reinterpret_cast<const float*>(src) + first, n, dst); return;
    case DType::kBf16: kernels.widen_bf16(reinterpret_cast<const Bf16*>(src) + first, n, dst); return;
    case DType::kE4m3: {
      const float* scales = w.scales + (w.first_row + row) / w.block_rows * w.scale_cols();
      for (int64_t i = first; i < first + n;) {
        const int64_t end = std::min(first + n, (i / w.block_cols + 1) * w.block_cols);
        kernels.widen_e4m3(reinterpret_cast<const E4m3*>(src) + i, end - i, scales[i / w.block_cols],
                           dst + (i - first));
        i = end;
      }
      return;
    }
    default: fail_argument("Projector", "weight is {}; accepted: bf16, fp32, e4m3", to_string(w.dtype));
  }
}

}  // namespace

WeightView WeightView::row_slice(int64_t first, int64_t count) const noexcept {
  WeightView m = *this;
  m.data = row_address(*this, first);
  m.rows = count;
  m.first_row = first_row + first;
  return m;
}

void widen_row(const WeightView& w, int64_t row, int64_t first, int64_t n, float* dst) {
  widen(kPortableProducts, w, row, first, n, dst);
}

struct alignas(64) Projector::Scratch {
  std::unique_ptr<float[]> panel;
  int64_t size = 0;

  float* grow(int64_t n) {
    if (n > size) {
      panel = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(n));
      size = n;
    }
    return panel.get();
  }
};

Projector::Projector(Executor& executor, const ProjectorOptions& options)
    : executor_(&executor), options_(options), kernels_(choose(options.impl)) {
  scratch_.resize(static_cast<size_t>(executor.num_workers()));
}

Projector::~Projector() = default;

std::string projector_impl(const std::string& impl) {
  if (impl == "portable" || impl == "ref") return "portable";
  return {};
}

const char* Projector::impl() const noexcept { return kernels_->name; }

std::string Projector::gemm_library() {
#if GANNET_HAVE_ONEDNN
  const dnnl_version_t* v = dnnl_version();
  return fmt::format("oneDNN {}.{}.{}", v->major, v->minor, v->patch);
#else
  return "none";
#endif
}

void Projector::linear(const float* x, int64_t rows, const WeightView& w, float* y) {
  const Product p{.x = x, .x_stride = w.cols, .rows = rows, .w = w, .y = y, .y_stride = w.rows};
  run({&p, 1});
}

void Projector::run(std::span<const Product> products) {
  // A task is a panel of W's output columns times a block of rows. The list is built here and not in the tasks: its
  // order is fixed, but no result depends on it.
  struct Task {
    const Product* p;
    int64_t first_row, rows, first_col, cols;
    bool library;
  };
  std::vector<Task> tasks;
  for (const Product& p : products) {
    if (p.rows <= 0 || p.n() <= 0) continue;
    if (p.w.dtype != DType::kF32 && p.w.dtype != DType::kBf16 && p.w.dtype != DType::kE4m3)
      fail_argument("Projector", "weight is {}; accepted: bf16, fp32, e4m3", to_string(p.w.dtype));
    if (p.w.dtype == DType::kE4m3 && p.w.scales == nullptr) fail_argument("Projector", "an e4m3 weight has no scales");
    const bool library = GANNET_HAVE_ONEDNN && !options_.invariant && p.rows > few_rows(p.k());
    const int64_t loop_panel = kPanelBytes / (std::max<int64_t>(1, p.k()) * kFloatBytes) / kMinPanel * kMinPanel;
    const int64_t panel = library ? kMaxPanel : std::clamp(loop_panel, kMinPanel, kMaxPanel);
    const int64_t block = library ? kGemmRows : std::max<int64_t>(kLoopRows, p.w.dtype == DType::kE4m3 ? kGemmRows : 0);
    for (int64_t col = 0; col < p.n(); col += panel)
      for (int64_t row = 0; row < p.rows; row += block)
        tasks.push_back({&p, row, std::min(block, p.rows - row), col, std::min(panel, p.n() - col), library});
  }
  executor_->parallel_for(static_cast<int64_t>(tasks.size()), [&](int64_t index, int worker) {
    const Task& t = tasks[static_cast<size_t>(index)];
    const Product& p = *t.p;
    Scratch& scratch = scratch_[static_cast<size_t>(worker)];
    const float* x = p.x + t.first_row * p.x_stride;
    float* y = p.y + t.first_row * p.y_stride + t.first_col;
    const bool transposed = p.form == ProductForm::kTransposed;
    const int64_t k = p.k();

    // W[first_col + n, first_k + i] of a task as fp32: [cols, k] transposed, [k, cols] plain, rows `wide_stride` apart.
    const auto wide_stride = [&](int64_t num_k) { return (transposed ? num_k : t.cols) + kStridePadding; };
    const auto widen_panel = [&](int64_t first_k, int64_t num_k) {
      const int64_t stride = wide_stride(num_k);
      float* wide = scratch.grow((transposed ? t.cols : num_k) * stride);
      if (transposed)
        for (int64_t n = 0; n < t.cols; ++n) widen(*kernels_, p.w, t.first_col + n, first_k, num_k, wide + n * stride);
      else
        for (int64_t i = 0; i < num_k; ++i) widen(*kernels_, p.w, first_k + i, t.first_col, t.cols, wide + i * stride);
      return wide;
    };
#if GANNET_HAVE_ONEDNN
    if (t.library) {
      omp_set_num_threads(1);  // a setting of this thread alone, and cheap
      const int64_t most_k = kPanelBytes / (t.cols * kFloatBytes);
      for (int64_t first_k = 0; first_k < k; first_k += most_k) {
        const int64_t num_k = std::min(most_k, k - first_k);
        const float* wide = widen_panel(first_k, num_k);
        const dnnl_status_t status =
            dnnl_sgemm('N', transposed ? 'T' : 'N', t.rows, t.cols, num_k, 1.0f, x + first_k, p.x_stride, wide,
                       wide_stride(num_k), first_k == 0 ? 0.0f : 1.0f, y, p.y_stride);
        if (status != dnnl_success)
          fail(ErrorCode::kDevice, "Projector", "dnnl_sgemm returned status {}", static_cast<int>(status));
      }
      return;
    }
#endif
    // The loop reads bf16 and fp32 as they lie.
    const void* panel = nullptr;
    int64_t panel_stride = p.w.cols;
    DType dtype = p.w.dtype;
    if (dtype == DType::kE4m3) {
      panel = widen_panel(0, k);
      panel_stride = wide_stride(k);
      dtype = DType::kF32;
    } else {
      panel = transposed ? row_address(p.w, t.first_col)
                         : row_address(p.w, 0) + t.first_col * static_cast<int64_t>(size_of(dtype));
    }
    const auto kernel = transposed ? kernels_->transposed : kernels_->plain;
    for (int64_t row = 0; row < t.rows; row += kLoopRows)
      kernel(x + row * p.x_stride, p.x_stride, std::min(kLoopRows, t.rows - row), panel, dtype, panel_stride, t.cols, k,
             y + row * p.y_stride, p.y_stride);
  });
}

}  // namespace v0
}  // namespace gannet
