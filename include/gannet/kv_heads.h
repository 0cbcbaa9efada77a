// Several KV heads, as independent MLA problems.
//
// MLA has one latent row a token. A pool of several rows a token, [pages, page_size, num_kv_heads, R + P], is as many
// problems side by side: query head h belongs to KV head h / (H / num_kv_heads). Each is a call of its own over views
// of the same memory:
//
//   for (int32_t g = 0; g < num_kv_heads; ++g) {
//     gannet::MlaDecode one = all;                       // all.cache is the pool with the geometry of one head
//     one.cache = gannet::kv_head_of(all.cache, num_kv_heads, g);
//     one.q = gannet::head_group_of(all.q, num_kv_heads, g);
//     one.out = gannet::head_group_of(all.out, num_kv_heads, g);
//     one.lse = gannet::head_group_of(all.lse, num_kv_heads, g);
//     gannet::run_once(context, one);
//   }
//
// The same views serve writes, gathers and lists of slots: a slot names a token, whatever the head. Pages of the form
// [pages, num_kv_heads, page_size, R + P] need none of this: a head is `data` moved on by page_size rows.
#pragma once

#include "gannet/kv_cache.h"
#include "gannet/tensor.h"

namespace gannet {
inline namespace v0 {

/// KV head `kv_head` of a pool that holds num_kv_heads rows a token, one behind the other. `pool` has the geometry of
/// one head and the page stride of all; its row stride is 0 (tokens one behind the other) or the bytes from a token to
/// the next. Throws Error(kInvalidArgument) for planar pages (kE4m3PerToken) and heads that do not exist.
GANNET_API LatentCacheView kv_head_of(const LatentCacheView& pool, int32_t num_kv_heads, int32_t kv_head);

/// Heads [group * H / num_groups, (group + 1) * H / num_groups) of a tensor [rows, H], [rows, H, width] or, with one
/// dimension, [H] (an attention sink). An absent tensor stays absent. Throws Error(kInvalidArgument) unless num_groups
/// divides H.
GANNET_API TensorView head_group_of(const TensorView& t, int32_t num_groups, int32_t group);

}  // namespace v0
}  // namespace gannet
