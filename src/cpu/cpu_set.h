// How a CPU implementation set is made of its kernel table, and what the CPU kernels do not take: here rather than
// beside the kernels, since this is compiled without special instructions.
#pragma once

#include "core/format.h"
#include "cpu/kernel_table.h"

namespace gannet {
inline namespace v0 {
namespace cpu {

/// Every CPU set is its kernel table plus these; kernels take whatever passes the operation's own checks.
template <class Params>
std::string refuses(const Params&) {
  return {};
}

template <>
inline std::string refuses(const SparseAttention& p) {
  if (p.cache.format != LatentFormat::kE4m3PerToken) return {};
  constexpr const char* kText =
      "cache.format is {}; accepted: fp32, bf16, e4m3 or packed656 (a dsa backend refuses such a pool when it is "
      "bound)";
  return fmt::format(kText, to_string(p.cache.format));
}

inline ImplementationSet make_set(const char* name, bool (*runs_here)(), const KernelTable& k) {
  ImplementationSet set{
      .name = name, .device = DeviceKind::kCpu, .only_when_forced = false, .compiled = true, .runs_here = runs_here};
#define GANNET_FILL(Params, member) set.member = {&refuses<Params>, k.member##_workspace, k.member};
  GANNET_FOR_EACH_OP(GANNET_FILL)
#undef GANNET_FILL
  return set;
}

}  // namespace cpu
}  // namespace v0
}  // namespace gannet
