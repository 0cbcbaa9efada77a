// index_logits: what it accepts. The contract stands in gannet/ops.h.
#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const IndexLogits& p) {
  const char* const fn = IndexLogits::kName;
  check_tensor(fn, "q", p.q, {DType::kF32, DType::kBf16, DType::kE4m3},
               {{"rows"}, {.label = "index_heads", .minimum = 1}, {"head_dim", p.cache.head_dim}});
  const int64_t rows = p.q.shape[0];
  check_tensor(fn, "weights", p.weights, {DType::kF32}, {{"rows", rows}, {"index_heads", p.q.shape[1]}});
  check_cache(fn, p.cache, p.q.device);
  check_hadamard(fn, p.cache, p.hadamard);
  check_paged_rows(fn, p.pages, p.rows, rows);
  check_tensor(fn, "logits", p.logits, {DType::kF32, DType::kBf16}, {{"rows", rows}, {"max_keys"}}, Access::kWrite);
}

template <>
bool is_empty(const IndexLogits& p) {
  return p.q.shape[0] == 0 || p.logits.shape[1] == 0;
}

template <>
void check_contents(const IndexLogits& p) {
  check_paged_contents(IndexLogits::kName, p.pages, p.rows, p.q.shape[0], p.cache.num_pages, p.cache.page_size,
                       p.logits.shape[1], "columns of logits");
}

GANNET_INSTANTIATE_OP(IndexLogits)

}  // namespace v0
}  // namespace gannet
