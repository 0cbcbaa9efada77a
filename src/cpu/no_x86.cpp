// Stands in for the x86 kernels where they are not part of the build.
#include "core/implementation.h"

namespace gannet {
inline namespace v0 {
namespace cpu {

namespace {
ImplementationSet absent(const char* name) {
  return {.name = name, .device = DeviceKind::kCpu, .only_when_forced = false, .compiled = false, .runs_here = [] {
            return false;
          }};
}
}  // namespace

const ImplementationSet& amx_bf16_set() noexcept {
  static const ImplementationSet set = absent("amx_bf16");
  return set;
}

const ImplementationSet& avx2_set() noexcept {
  static const ImplementationSet set = absent("avx2");
  return set;
}

const ImplementationSet& avx512_bf16_set() noexcept {
  static const ImplementationSet set = absent("avx512_bf16");
  return set;
}

}  // namespace cpu
}  // namespace v0
}  // namespace gannet
