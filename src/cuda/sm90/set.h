// The Hopper implementations (sm_90a) as plain functions; set.cpp makes an implementation set of them.
#pragma once

#include "core/implementation.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace sm90 {

size_t workspace_mla_decode(const MlaDecode& p, int num_workers);
size_t workspace_sparse_attention(const SparseAttention& p, int num_workers);
void run_mla_decode(const MlaDecode& p, const RunContext& c);
void run_sparse_attention(const SparseAttention& p, const RunContext& c);

}  // namespace sm90
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
