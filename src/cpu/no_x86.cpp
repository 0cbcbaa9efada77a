// Stands in for the x86 kernels where they are not part of the build.
#include "core/implementation.h"

namespace gannet {
inline namespace v0 {
namespace cpu {

const ImplementationSet& avx512_bf16_set() noexcept {
  static const ImplementationSet set = {
      .name = "avx512_bf16", .device = DeviceKind::kCpu, .only_when_forced = false, .compiled = false, .runs_here = [] {
        return false;
      }};
  return set;
}

}  // namespace cpu
}  // namespace v0
}  // namespace gannet
