#include "model/cuda/blas.h"

#include <dlfcn.h>

#include <algorithm>

#include "core/format.h"
#include "cuda/common/check.h"
#include "gannet/cuda.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace {

constexpr const char* kName = "cuBLASLt";
constexpr size_t kWorkspace = size_t{32} << 20;  // what NVIDIA's documentation advises for Hopper

void check(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS)
    fail(ErrorCode::kDevice, kName, "{} returned status {}", call, static_cast<int>(status));
}

/// The largest power of two up to 16 that the address and the strides of rows and products are multiples of, in bytes.
int64_t alignment_of(const void* p, int64_t row_bytes, int64_t batch_bytes) {
  int64_t a = 16;
  while (a > 1 && (reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(a) != 0 || row_bytes % a != 0 ||
                   batch_bytes % a != 0))
    a /= 2;
  return a;
}

}  // namespace

#define GANNET_BLAS_FUNCTIONS(X)          \
  X(cublasLtCreate)                       \
  X(cublasLtDestroy)                      \
  X(cublasLtGetVersion)                   \
  X(cublasLtMatmul)                       \
  X(cublasLtMatmulAlgoGetHeuristic)       \
  X(cublasLtMatmulDescCreate)             \
  X(cublasLtMatmulDescDestroy)            \
  X(cublasLtMatmulDescSetAttribute)       \
  X(cublasLtMatmulPreferenceCreate)       \
  X(cublasLtMatmulPreferenceDestroy)      \
  X(cublasLtMatmulPreferenceSetAttribute) \
  X(cublasLtMatrixLayoutCreate)           \
  X(cublasLtMatrixLayoutDestroy)          \
  X(cublasLtMatrixLayoutSetAttribute)

struct Blas::Functions {
#define GANNET_MEMBER(name) decltype(&::name) name = nullptr;
  GANNET_BLAS_FUNCTIONS(GANNET_MEMBER)
#undef GANNET_MEMBER

  /// Opened once, and never closed.
  static const Functions& get() {
    static const Functions all;
    return all;
  }

 private:
  Functions() {
    const std::string names[] = {fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR),
                                 fmt::format("/usr/local/cuda/lib64/libcublasLt.so.{}", CUBLAS_VER_MAJOR)};
    void* library = nullptr;
    for (const std::string& n : names)
      if (library == nullptr) library = dlopen(n.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
      fail(ErrorCode::kUnsupported, kName, "{} cannot be opened: {} (it comes with the CUDA toolkit; LD_LIBRARY_PATH)",
           names[0], dlerror());
#define GANNET_LOAD(n)                                      \
  n = reinterpret_cast<decltype(&::n)>(dlsym(library, #n)); \
  if (n == nullptr) fail(ErrorCode::kUnsupported, kName, "{} lacks the function {}", names[0], #n);
    GANNET_BLAS_FUNCTIONS(GANNET_LOAD)
#undef GANNET_LOAD
  }
};

Blas::Blas(int device) : device_(device), f_(&Functions::get()), workspace_(kWorkspace, cuda_memory(device)) {
  const DeviceGuard guard(kName, device);
  check(f_->cublasLtCreate(&handle_), "cublasLtCreate");
}

Blas::~Blas() {
  for (auto& [key, p] : plans_) {
    f_->cublasLtMatmulDescDestroy(p.operation);
    for (const cublasLtMatrixLayout_t layout : {p.w, p.x, p.y}) f_->cublasLtMatrixLayoutDestroy(layout);
  }
  if (handle_ != nullptr) f_->cublasLtDestroy(handle_);
}

std::string Blas::version() const {
  const size_t v = f_->cublasLtGetVersion();  // 130100 is 13.1.0
  return fmt::format("cuBLASLt {}.{}.{}", v / 10000, v / 100 % 100, v % 100);
}

// The library counts columns first. Seen so, y is [n, m], x is [k, m], and a W of [n, k] rows is [k, n], transposed.
const Blas::Plan& Blas::plan(const GemmShape& s, int64_t x_alignment, int64_t w_alignment, int64_t y_alignment) {
  const auto [it, fresh] = plans_.try_emplace({s, x_alignment, w_alignment, y_alignment});
  Plan& p = it->second;
  if (!fresh) return p;
  const cudaDataType_t type = s.bf16 ? CUDA_R_16BF : CUDA_R_32F;
  check(f_->cublasLtMatmulDescCreate(&p.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  const cublasOperation_t transposed = s.plain ? CUBLAS_OP_N : CUBLAS_OP_T;
  check(f_->cublasLtMatmulDescSetAttribute(p.operation, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof(transposed)),
        "cublasLtMatmulDescSetAttribute");
  const auto layout = [&](cublasLtMatrixLayout_t* l, cudaDataType_t t, int64_t rows, int64_t cols, int64_t stride,
                          int64_t batch) {
    check(f_->cublasLtMatrixLayoutCreate(l, t, static_cast<uint64_t>(rows), static_cast<uint64_t>(cols), stride),
          "cublasLtMatrixLayoutCreate");
    const auto batches = static_cast<int32_t>(s.batches);
    check(f_->cublasLtMatrixLayoutSetAttribute(*l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batches, sizeof(batches)),
          "cublasLtMatrixLayoutSetAttribute");
    check(f_->cublasLtMatrixLayoutSetAttribute(*l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &batch, sizeof(batch)),
          "cublasLtMatrixLayoutSetAttribute");
  };
  layout(&p.w, type, s.plain ? s.n : s.k, s.plain ? s.k : s.n, s.w_stride, s.w_batch);
  layout(&p.x, type, s.k, s.m, s.x_stride, s.x_batch);
  layout(&p.y, CUDA_R_32F, s.n, s.m, s.y_stride, s.y_batch);

  cublasLtMatmulPreference_t preference = nullptr;
  check(f_->cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(f_->cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value)),
          "cublasLtMatmulPreferenceSetAttribute");
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kWorkspace});
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, static_cast<uint32_t>(w_alignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, static_cast<uint32_t>(x_alignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, static_cast<uint32_t>(y_alignment));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, static_cast<uint32_t>(y_alignment));
  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  const cublasStatus_t status =
      f_->cublasLtMatmulAlgoGetHeuristic(handle_, p.operation, p.w, p.x, p.y, p.y, preference, 1, &best, &found);
  f_->cublasLtMatmulPreferenceDestroy(preference);
  check(status, "cublasLtMatmulAlgoGetHeuristic");
  if (found == 0)
    fail(ErrorCode::kUnsupported, kName, "it has no algorithm for {} products of {} x {} x {} in {}", s.batches, s.m,
         s.n, s.k, s.bf16 ? "bf16" : "fp32");
  p.algorithm = best.algo;
  return p;
}

void Blas::gemm(const GemmShape& s, const void* x, const void* w, float* y, Stream stream) {
  if (s.m == 0 || s.n == 0) return;
  const int64_t bytes = s.bf16 ? 2 : 4;
  const Plan& p =
      plan(s, alignment_of(x, s.x_stride * bytes, s.x_batch * bytes),
           alignment_of(w, s.w_stride * bytes, s.w_batch * bytes), alignment_of(y, s.y_stride * 4, s.y_batch * 4));
  const float one = 1.0f, zero = 0.0f;
  check(f_->cublasLtMatmul(handle_, p.operation, &one, w, p.w, x, p.x, &zero, y, p.y, y, p.y, &p.algorithm,
                           workspace_.data(), kWorkspace, static_cast<cudaStream_t>(stream.handle)),
        "cublasLtMatmul");
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
