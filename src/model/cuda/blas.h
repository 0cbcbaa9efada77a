// cuBLASLt as it is found at run time, and one product through it. The library is opened rather than linked, so that a
// command built with CUDA starts on a machine without it.
#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <map>
#include <string>
#include <tuple>

#include "gannet/device.h"
#include "gannet/memory.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

/// y[b][m, n] = sum over k of x[b][m, k] W[b][n, k], or W[b][k, n] (plain). x and W of one type, y fp32.
struct GemmShape {
  bool bf16 = false;   ///< x and W; else fp32 without TF32
  bool plain = false;  ///< W is [k, n] rather than [n, k]
  int64_t m = 0, n = 0, k = 0;
  int64_t x_stride = 0, w_stride = 0, y_stride = 0;  ///< from row to row, in elements
  int64_t batches = 1;
  int64_t x_batch = 0, w_batch = 0, y_batch = 0;  ///< from product to product, in elements
  auto tie() const {
    return std::tuple(bf16, plain, m, n, k, x_stride, w_stride, y_stride, batches, x_batch, w_batch, y_batch);
  }
  friend bool operator<(const GemmShape& a, const GemmShape& b) { return a.tie() < b.tie(); }
};

class Blas {
 public:
  /// Throws kUnsupported where the library is not found.
  explicit Blas(int device);
  ~Blas();
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;

  std::string version() const;
  /// Enqueues. The algorithm is chosen once a shape, by the library's own estimate: a later run of the shape may be
  /// captured in a graph.
  void gemm(const GemmShape& shape, const void* x, const void* w, float* y, Stream stream);

 private:
  struct Functions;
  struct Plan {
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t w = nullptr, x = nullptr, y = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
  };
  const Plan& plan(const GemmShape& shape, int64_t x_alignment, int64_t w_alignment, int64_t y_alignment);

  int device_;
  const Functions* f_;
  cublasLtHandle_t handle_ = nullptr;
  Buffer workspace_;
  std::map<std::tuple<GemmShape, int64_t, int64_t, int64_t>, Plan> plans_;
};

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
