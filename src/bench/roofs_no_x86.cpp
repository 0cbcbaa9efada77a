// Stands in for roofs_avx512_bf16.cpp on other processors.
#include "bench/roof_loops.h"

namespace gannet {
inline namespace v0 {
namespace bench {

const RoofLoops kAvx512Bf16Loops = {nullptr, nullptr, nullptr, nullptr};

}  // namespace bench
}  // namespace v0
}  // namespace gannet
