// What the tuned kernels of absorbed attention leave to the generic set, in the words of an error.
#pragma once

#include <string>

#include "core/format.h"
#include "gannet/ops.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

/// Optional arguments of MlaDecode and SparseAttention, and rows with others between them.
template <class Params>
std::string refuses_options(const Params& p) {
  if (p.attn_sink.given()) return "attn_sink is given; accepted: none";
  if (p.max_logits.given()) return "max_logits is given; accepted: none";
  if (p.cache.row_stride() != latent_row_bytes(p.cache.format, p.cache.geometry))
    return fmt::format("cache.row_stride_bytes is {}; accepted: 0", p.cache.row_stride_bytes);
  return {};
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
