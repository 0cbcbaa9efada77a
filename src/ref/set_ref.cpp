// The oracle as an implementation set: every operation in plain fp64 loops.
#include "core/implementation.h"

namespace gannet {
inline namespace v0 {
namespace ref {

const ImplementationSet& oracle_set() noexcept {
  static const ImplementationSet set = {
      .name = "ref", .device = DeviceKind::kCpu, .only_when_forced = true, .compiled = true, .runs_here = [] {
        return true;
      }};
  return set;
}

}  // namespace ref
}  // namespace v0
}  // namespace gannet
