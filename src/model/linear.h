// Projections over weights that stay in the mapped file: y = x W^T and y = x W with W in bf16, fp32 or block-scaled
// e4m3, activations and sums in fp32. There is never a whole fp32 copy of a weight: a worker widens one panel of rows
// at a time.
//
// Three ways to run a product:
//   few rows      a loop that streams the weights once and is bound by memory (decode);
//   many rows     panels of W widened to fp32, then the library's GEMM, one thread a call (prefill);
//   invariant     the first loop for every row count: each y[m, n] is one chain of additions over k that depends on
//                 x[m, :] and W[n, :] alone, so that a row's bits do not depend on how many rows there are, on its
//                 place among them or on the number of workers.
//
// Thread safety: a Projector is used by one thread at a time (it spreads its work over the executor itself).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "gannet/dtype.h"
#include "gannet/executor.h"

namespace gannet {
inline namespace v0 {

/// A row-major [rows, cols] weight in somebody else's memory.
struct WeightView {
  const void* data = nullptr;
  DType dtype = DType::kBf16;  ///< kBf16, kF32 or kE4m3
  int64_t rows = 0;
  int64_t cols = 0;
  const float* scales =
      nullptr;               ///< kE4m3: fp32 [ceil(R/block_rows), ceil(cols/block_cols)] of the whole tensor: factors
  int64_t block_rows = 128;  ///< kE4m3: values of a block share a scale; the last blocks may be partial
  int64_t block_cols = 128;
  int64_t first_row = 0;  ///< row of the whole tensor at which this one starts: selects the scale blocks

  int64_t scale_cols() const noexcept { return (cols + block_cols - 1) / block_cols; }
  /// `count` rows from `first`; 64-bit offsets.
  WeightView row_slice(int64_t first, int64_t count) const noexcept;
};

enum class ProductForm : uint8_t {
  kTransposed,  ///< y[m, n] = sum over k of x[m, k] W[n, k]: a projection
  kPlain,       ///< y[m, n] = sum over k of x[m, k] W[k, n]: the absorbed query, Wk^T q
};

/// One product. Jobs of a call are independent: outputs do not overlap each other or any input.
struct Product {
  const float* x = nullptr;  ///< [rows, K], rows x_stride apart
  int64_t x_stride = 0;
  int64_t rows = 0;
  WeightView w;
  ProductForm form = ProductForm::kTransposed;
  float* y = nullptr;  ///< [rows, N], rows y_stride apart
  int64_t y_stride = 0;

  int64_t k() const noexcept { return form == ProductForm::kTransposed ? w.cols : w.rows; }
  int64_t n() const noexcept { return form == ProductForm::kTransposed ? w.rows : w.cols; }
};

struct ProjectorOptions {
  bool invariant = false;
  std::string impl = {};  ///< instruction set of the loops: "avx512", "portable"; empty: the best that runs here
};

/// What to give as ProjectorOptions::impl where attention is forced to `impl`: loops follow it as far as there are any.
std::string projector_impl(const std::string& impl);

class Projector {
 public:
  Projector(Executor& executor, const ProjectorOptions& options = {});
  ~Projector();
  Projector(const Projector&) = delete;
  Projector& operator=(const Projector&) = delete;

  void run(std::span<const Product> products);
  /// y[rows, w.rows] = x[rows, w.cols] W^T, packed rows.
  void linear(const float* x, int64_t rows, const WeightView& w, float* y);

  /// Instruction set of the loops.
  const char* impl() const noexcept;
  /// The library behind products of many rows, "oneDNN 2.6.3", or "none" where it was not found at build time.
  static std::string gemm_library();
  bool invariant() const noexcept { return options_.invariant; }
  Executor& executor() const noexcept { return *executor_; }

 private:
  struct Scratch;
  Executor* executor_;
  ProjectorOptions options_;
  const struct ProductKernels* kernels_;
  std::vector<Scratch> scratch_;  // one per worker
};

/// dst[0, n) = row `row`, columns [first, first + n) of `w` in fp32.
void widen_row(const WeightView& w, int64_t row, int64_t first, int64_t n, float* dst);

}  // namespace v0
}  // namespace gannet
