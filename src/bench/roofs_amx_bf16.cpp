// For processors with AVX-512 (F, BW, VL, DQ) AVX512_BF16 and AMX; compiled with those flags. What asks whether they
// are there is in roofs.cpp, compiled without them.
#define GANNET_ISA amx_bf16
#include "cpu/vec_amx_bf16.h"

#include "bench/roof_loops-inl.h"  // needs the vocabulary before it

namespace gannet {
inline namespace v0 {
namespace bench {

const RoofLoops kAmxBf16Loops = {"amx_bf16", &cpu::amx_bf16::roof_fp32_fma, &cpu::amx_bf16::roof_bf16_tiles,
                                 &cpu::amx_bf16::roof_read};

}  // namespace bench
}  // namespace v0
}  // namespace gannet
