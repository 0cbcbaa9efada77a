// Stands in for the CUDA kernels in a build without the CUDA toolkit.
#include "core/implementation.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

namespace {

ImplementationSet absent(const char* name) {
  return {.name = name, .device = DeviceKind::kCuda, .only_when_forced = false, .compiled = false, .runs_here = [] {
            return false;
          }};
}

}  // namespace

const ImplementationSet& sm90_set() noexcept {
  static const ImplementationSet set = absent("cuda_sm90");
  return set;
}

const ImplementationSet& mma_set() noexcept {
  static const ImplementationSet set = absent("cuda_mma");
  return set;
}

const ImplementationSet& generic_set() noexcept {
  static const ImplementationSet set = absent("cuda_generic");
  return set;
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
