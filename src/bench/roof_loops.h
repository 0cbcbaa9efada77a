// The loops that measure what an instruction set can do at most. As with kernels, each is compiled in a file named
// after its instruction set and called only where that runs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gannet {
inline namespace v0 {
namespace bench {

struct RoofLoops {
  const char* isa;
  /// Runs `iterations` rounds of independent fp32 multiply-adds (bf16 pair dot products) in registers and returns the
  /// floating-point operations done. bf16_dot is nullptr where the instruction set has no such instruction.
  double (*fp32_fma)(int64_t iterations);
  double (*bf16_dot)(int64_t iterations);
  /// Reads `count` words (a multiple of kReadWords) and returns their sum, so that the reads cannot be left out.
  uint32_t (*read)(const uint32_t* words, int64_t count);
};

/// A read of this many words is one step of RoofLoops::read.
inline constexpr int64_t kReadWords = 256;

const RoofLoops& portable_loops() noexcept;
/// nullptr where the machine lacks the instructions or the build has no such file.
const RoofLoops* avx512_bf16_loops() noexcept;
/// Of roofs_avx512_bf16.cpp or roofs_no_x86.cpp; isa is nullptr in the latter. Call it through avx512_bf16_loops().
extern const RoofLoops kAvx512Bf16Loops;
/// Likewise, of roofs_avx2.cpp and roofs_amx_bf16.cpp.
extern const RoofLoops kAvx2Loops;
extern const RoofLoops kAmxBf16Loops;

}  // namespace bench
}  // namespace v0
}  // namespace gannet
