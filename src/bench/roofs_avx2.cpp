// For processors with AVX2 and FMA; compiled with those flags. What asks whether they are
// there is in roofs.cpp, compiled without them.
#define GANNET_ISA avx2
#include "cpu/vec_avx2.h"

#include "bench/roof_loops-inl.h"  // needs the vocabulary before it

namespace gannet {
inline namespace v0 {
namespace bench {

const RoofLoops kAvx2Loops = {"avx2", &cpu::avx2::roof_fp32_fma, nullptr, &cpu::avx2::roof_read};

}  // namespace bench
}  // namespace v0
}  // namespace gannet
