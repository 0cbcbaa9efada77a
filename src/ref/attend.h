// Absorbed attention of one query row over a list of slots: what mla_decode and sparse_attention have in common.
#pragma once

#include <cstdint>
#include <span>

#include "gannet/kv_cache.h"
#include "gannet/tensor.h"

namespace gannet {
inline namespace v0 {
namespace ref {

/// out[row, h, :] and lse[row, h] (where given) for every head h (spec A.2).
void attend(const TensorView& q, const LatentCacheView& cache, std::span<const int64_t> slots, double softmax_scale,
            int64_t row, const TensorView& out, const TensorView& lse);

}  // namespace ref
}  // namespace v0
}  // namespace gannet
