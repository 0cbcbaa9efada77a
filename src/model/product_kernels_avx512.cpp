// Compiled for AVX-512 where the build is for x86 (src/model/CMakeLists.txt); elsewhere a table that never runs.
#if defined(__AVX512F__)
#include "model/product_kernels-inl.h"
#else
#include "model/product_kernels.h"
#endif

namespace gannet {
inline namespace v0 {

#if defined(__AVX512F__)
const ProductKernels kAvx512Products = {"avx512",
                                        [] {
                                          return __builtin_cpu_supports("avx512f") &&
                                                 __builtin_cpu_supports("avx512bw") &&
                                                 __builtin_cpu_supports("avx512vl") &&
                                                 __builtin_cpu_supports("avx512dq");
                                        },
                                        transposed,
                                        plain,
                                        widen_bf16,
                                        widen_e4m3};
#else
const ProductKernels kAvx512Products = {"avx512", [] { return false; }, nullptr, nullptr, nullptr, nullptr};
#endif

}  // namespace v0
}  // namespace gannet
