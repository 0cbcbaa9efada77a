// Absorbed attention of one query row over a list of slots: what mla_decode and sparse_attention have in common.
#pragma once

#include <cstdint>
#include <span>

#include "gannet/ops.h"

namespace gannet {
inline namespace v0 {
namespace ref {

/// What the two operations have in common.
struct Attention {
  TensorView q;
  LatentCacheView cache;
  double scale;  ///< of a score, that of a quantised query included
  TensorView attn_sink, out, lse, max_logits;

  template <class Params>
  explicit Attention(const Params& p)
      : q(p.q),
        cache(p.cache),
        scale(static_cast<double>(p.softmax_scale) * static_cast<double>(p.q_scale)),
        attn_sink(p.attn_sink),
        out(p.out),
        lse(p.lse),
        max_logits(p.max_logits) {}
};

/// out[row, h, :], lse[row, h] and max_logits[row, h] (where given) for every head h (spec A.2).
void attend(const Attention& a, std::span<const int64_t> slots, int64_t row);

}  // namespace ref
}  // namespace v0
}  // namespace gannet
