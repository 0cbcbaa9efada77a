// Stands in for the files of x86 instruction sets on other processors.
#include "bench/roof_loops.h"

namespace gannet {
inline namespace v0 {
namespace bench {

const RoofLoops kAvx2Loops = {nullptr, nullptr, nullptr, nullptr};
const RoofLoops kAvx512Bf16Loops = {nullptr, nullptr, nullptr, nullptr};
const RoofLoops kAmxBf16Loops = {nullptr, nullptr, nullptr, nullptr};

}  // namespace bench
}  // namespace v0
}  // namespace gannet
