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

/// Absorbed attention reads fp32 and bf16 latent rows so far.
inline std::string refuses_latent_format(LatentFormat format) {
  if (format == LatentFormat::kF32 || format == LatentFormat::kBf16) return {};
  return fmt::format("cache.format is {}; accepted: fp32 or bf16", to_string(format));
}
template <>
inline std::string refuses(const MlaDecode& p) {
  return refuses_latent_format(p.cache.format);
}
template <>
inline std::string refuses(const SparseAttention& p) {
  return refuses_latent_format(p.cache.format);
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
