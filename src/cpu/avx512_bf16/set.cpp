#include "cpu/cpu_set.h"

namespace gannet {
inline namespace v0 {
namespace cpu {

namespace {
const KernelTable kKernels = {
#define GANNET_KERNEL(Params, member) &avx512_bf16::run_##member, &avx512_bf16::workspace_##member,
    GANNET_FOR_EACH_OP(GANNET_KERNEL)
#undef GANNET_KERNEL
};
}  // namespace

const ImplementationSet& avx512_bf16_set() noexcept {
  static const ImplementationSet set = make_set(
      "avx512_bf16",
      [] {
        __builtin_cpu_init();
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
      },
      kKernels);
  return set;
}

}  // namespace cpu
}  // namespace v0
}  // namespace gannet
