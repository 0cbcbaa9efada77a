// index_select: what it accepts. The contract stands in gannet/ops.h.
#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const IndexSelect& p) {
  const char* const fn = IndexSelect::kName;
  check_tensor(fn, "q", p.q, {DType::kF32, DType::kBf16, DType::kE4m3},
               {{"rows"}, {.label = "index_heads", .minimum = 1}, {"head_dim", p.cache.head_dim}});
  const int64_t rows = p.q.shape[0];
  check_tensor(fn, "weights", p.weights, {DType::kF32}, {{"rows", rows}, {"index_heads", p.q.shape[1]}});
  check_cache(fn, p.cache, p.q.device);
  check_hadamard(fn, p.cache, p.hadamard);
  check_paged_rows(fn, p.pages, p.rows, rows);
  if (p.max_seq_len < 0 || p.max_seq_len > std::numeric_limits<int32_t>::max())
    fail_argument(fn, "max_seq_len is {}; accepted: 0 to 2^31 - 1", p.max_seq_len);
  if (p.cache.num_pages > std::numeric_limits<int32_t>::max() / p.cache.page_size)
    fail_argument(fn, "cache.num_pages is {}; accepted: at most {} pages of {} tokens (slots in lists are int32)",
                  p.cache.num_pages, std::numeric_limits<int32_t>::max() / p.cache.page_size, p.cache.page_size);
  check_tensor(fn, "topk_slots", p.topk_slots, {DType::kI32}, {{"rows", rows}, {.label = "k", .minimum = 1}},
               Access::kWrite);
  check_tensor(fn, "topk_lens", p.topk_lens, {DType::kI32}, {{"rows", rows}}, Access::kWrite);
  check_optional(fn, "topk_positions", p.topk_positions, {DType::kI32}, {{"rows", rows}, {"k", p.topk_slots.shape[1]}},
                 Access::kWrite);
}

template <>
bool is_empty(const IndexSelect& p) {
  return p.q.shape[0] == 0;
}

template <>
void check_contents(const IndexSelect& p) {
  check_paged_contents(IndexSelect::kName, p.pages, p.rows, p.q.shape[0], p.cache.num_pages, p.cache.page_size,
                       p.max_seq_len, "max_seq_len");
}

GANNET_INSTANTIATE_OP(IndexSelect)

}  // namespace v0
}  // namespace gannet
