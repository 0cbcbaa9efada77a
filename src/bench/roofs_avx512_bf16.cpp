// For processors with AVX-512 (F, BW, VL, DQ) and AVX512_BF16; compiled with those flags. What asks whether they are
// there is in roofs.cpp, compiled without them.
#define GANNET_ISA avx512_bf16
#include "cpu/vec_avx512_bf16.h"

#include "bench/roof_loops-inl.h"  // needs the vocabulary before it

namespace gannet {
inline namespace v0 {
namespace bench {

const RoofLoops kAvx512Bf16Loops = {"avx512_bf16", &cpu::avx512_bf16::roof_fp32_fma, &cpu::avx512_bf16::roof_bf16_dot,
                                    &cpu::avx512_bf16::roof_read};

}  // namespace bench
}  // namespace v0
}  // namespace gannet
