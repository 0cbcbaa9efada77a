// To be written.
#pragma once

#include "cpu/kernel_table.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
void run_index_k_write(const IndexKWrite&, const RunContext&) { __builtin_trap(); }
size_t workspace_index_k_write(const IndexKWrite&, int) { return 0; }
void run_index_k_gather(const IndexKGather&, const RunContext&) { __builtin_trap(); }
size_t workspace_index_k_gather(const IndexKGather&, int) { return 0; }

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
