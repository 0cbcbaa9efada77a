#include "cpu/cpu_set.h"

namespace gannet {
inline namespace v0 {
namespace cpu {

namespace {
const KernelTable kKernels = {
#define GANNET_KERNEL(Params, member) &portable::run_##member, &portable::workspace_##member,
    GANNET_FOR_EACH_OP(GANNET_KERNEL)
#undef GANNET_KERNEL
};
}  // namespace

const ImplementationSet& portable_set() noexcept {
  static const ImplementationSet set = make_set(
      "portable", [] { return true; }, kKernels);
  return set;
}

}  // namespace cpu
}  // namespace v0
}  // namespace gannet
