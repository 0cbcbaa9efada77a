#include "cpu/cpu_set.h"

#ifndef GANNET_EMULATE_TILES
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace gannet {
inline namespace v0 {
namespace cpu {

namespace {
const KernelTable kKernels = {
#define GANNET_KERNEL(Params, member) &amx_bf16::run_##member, &amx_bf16::workspace_##member,
    GANNET_FOR_EACH_OP(GANNET_KERNEL)
#undef GANNET_KERNEL
};

bool has_vectors() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
}

#ifdef GANNET_EMULATE_TILES
bool has_tiles() { return true; }
#else
// Linux saves 8 KiB of tiles a thread only for processes that have asked for it (5.16 and later); a child has its
// parent's leave.
bool ask_for_tiles() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;          // CPUID 7.0, edx
  constexpr unsigned kSaved = 1u << 27;                           // CPUID 1, ecx: xgetbv is there
  constexpr unsigned kVectorState = 0xe6, kTileState = 3u << 17;  // XCR0
  constexpr long kAskForState = 0x1023, kTileData = 18;           // ARCH_REQ_XCOMP_PERM
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kSaved) == 0) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kBf16) == 0 || (d & kTile) == 0) return false;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & (kVectorState | kTileState)) != (kVectorState | kTileState)) return false;
  return syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
}

// Once: each plan asks, and in a virtual machine a CPUID is an exit to its host. They were 0.8 ms of the 1.8 of a token
// of tiny-dsv32.
bool has_tiles() {
  static const bool has = ask_for_tiles();
  return has;
}
#endif
}  // namespace

const ImplementationSet& amx_bf16_set() noexcept {
  static const ImplementationSet set = make_set(
      "amx_bf16", [] { return has_vectors() && has_tiles(); }, kKernels);
  return set;
}

}  // namespace cpu
}  // namespace v0
}  // namespace gannet
