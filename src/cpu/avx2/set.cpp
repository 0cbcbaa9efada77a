#include "cpu/cpu_set.h"

namespace gannet {
inline namespace v0 {
namespace cpu {

namespace {
const KernelTable kKernels = {
#define GANNET_KERNEL(Params, member) &avx2::run_##member, &avx2::workspace_##member,
    GANNET_FOR_EACH_OP(GANNET_KERNEL)
#undef GANNET_KERNEL
};
}  // namespace

const ImplementationSet& avx2_set() noexcept {
  static const ImplementationSet set = make_set(
      "avx2",
      [] {
        __builtin_cpu_init();
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
      },
      kKernels);
  return set;
}

}  // namespace cpu
}  // namespace v0
}  // namespace gannet
