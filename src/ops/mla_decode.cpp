// mla_decode: what it accepts. The contract stands in gannet/ops.h.
#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const MlaDecode& p) {
  const char* const fn = MlaDecode::kName;
  const RowGeometry g = p.cache.geometry;
  check_tensor(
      fn, "q", p.q, {DType::kF32, DType::kBf16, DType::kE4m3},
      {{"rows"}, {.label = "num_heads", .minimum = 1}, {"latent_dim + rope_dim", int64_t{g.latent_dim} + g.rope_dim}});
  const int64_t rows = p.q.shape[0];
  const int64_t heads = p.q.shape[1];
  check_cache(fn, p.cache, p.q.device);
  check_paged_rows(fn, p.pages, p.rows, rows);
  check_tensor(fn, "out", p.out, {DType::kF32, DType::kBf16},
               {{"rows", rows}, {"num_heads", heads}, {"latent_dim", g.latent_dim}}, Access::kWrite);
  check_optional(fn, "lse", p.lse, {DType::kF32}, {{"rows", rows}, {"num_heads", heads}}, Access::kWrite);
  check_optional(fn, "max_logits", p.max_logits, {DType::kF32}, {{"rows", rows}, {"num_heads", heads}}, Access::kWrite);
  check_optional(fn, "attn_sink", p.attn_sink, {DType::kF32}, {{"num_heads", heads}});
  check_softmax_scale(fn, p.softmax_scale);
  check_query_scale(fn, p.q.dtype, p.cache.format, p.q_scale);
}

template <>
bool is_empty(const MlaDecode& p) {
  return p.q.shape[0] == 0;
}

template <>
void check_contents(const MlaDecode& p) {
  check_paged_contents(MlaDecode::kName, p.pages, p.rows, p.q.shape[0], p.cache.num_pages, p.cache.page_size);
}

GANNET_INSTANTIATE_OP(MlaDecode)

}  // namespace v0
}  // namespace gannet
