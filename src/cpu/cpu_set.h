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

template <class Params>
std::string refuses_extras(const Params& p) {
  if (p.q.dtype == DType::kE4m3) return "q is e4m3; accepted: fp32 or bf16";
  if (p.attn_sink.given()) return "attn_sink is given; accepted: none";
  if (p.max_logits.given()) return "max_logits is given; accepted: none";
  return {};
}

/// Rows with others between them.
inline std::string refuses_apart(const LatentCacheView& c) {
  if (c.row_stride() == latent_row_bytes(c.format, c.geometry)) return {};
  return fmt::format("cache.row_stride_bytes is {}; accepted: 0", c.row_stride_bytes);
}

template <>
inline std::string refuses(const LatentWrite& p) {
  return refuses_apart(p.cache);
}

template <>
inline std::string refuses(const LatentGather& p) {
  return refuses_apart(p.cache);
}

template <>
inline std::string refuses(const IndexLogits& p) {
  return p.logits.dtype == DType::kF32 ? "" : "logits is bf16; accepted: fp32";
}

template <>
inline std::string refuses(const TopK& p) {
  return p.logits.dtype == DType::kF32 ? "" : "logits is bf16; accepted: fp32";
}

template <>
inline std::string refuses(const MlaDecode& p) {
  const std::string apart = refuses_apart(p.cache);
  return apart.empty() ? refuses_extras(p) : apart;
}

template <>
inline std::string refuses(const SparseAttention& p) {
  const std::string reason = refuses_apart(p.cache) + refuses_extras(p);
  if (!reason.empty()) return reason;
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
