// To be written.
#pragma once

#include "cpu/kernel_table.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
void run_latent_write(const LatentWrite&, const RunContext&) { __builtin_trap(); }
size_t workspace_latent_write(const LatentWrite&, int) { return 0; }
void run_latent_gather(const LatentGather&, const RunContext&) { __builtin_trap(); }
size_t workspace_latent_gather(const LatentGather&, int) { return 0; }

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
