// The oracle as an implementation set: every operation in plain fp64 loops.
#include "core/implementation.h"
#include "ref/ref_ops.h"

namespace gannet {
inline namespace v0 {
namespace ref {

const ImplementationSet& oracle_set() noexcept {
  static const ImplementationSet set = {
    .name = "ref",
    .device = DeviceKind::kCpu,
    .only_when_forced = true,
    .compiled = true,
    .runs_here = [] { return true; },
#define GANNET_ENTRY(Params, member) .member = {.run = &run_##member},
    GANNET_FOR_EACH_OP(GANNET_ENTRY)
#undef GANNET_ENTRY
  };
  return set;
}

}  // namespace ref
}  // namespace v0
}  // namespace gannet
