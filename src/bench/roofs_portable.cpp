#define GANNET_ISA portable
#include "cpu/vec_portable.h"

#include "bench/roof_loops-inl.h"  // needs the vocabulary before it

namespace gannet {
inline namespace v0 {
namespace bench {

const RoofLoops& portable_loops() noexcept {
  static constexpr RoofLoops kLoops = {"portable", &cpu::portable::roof_fp32_fma, nullptr, &cpu::portable::roof_read};
  return kLoops;
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet
