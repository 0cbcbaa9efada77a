// To be written.
#pragma once

#include "cpu/kernel_table.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
void run_sparse_attention(const SparseAttention&, const RunContext&) { __builtin_trap(); }
size_t workspace_sparse_attention(const SparseAttention&, int) { return 0; }

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet
