// ragged_prefill: what it accepts. The contract stands in gannet/ops.h.
#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

namespace {
constexpr int32_t kWidthMultiple = 16;  // rows stay aligned in fp32 and bf16, and vectors whole
}

template <>
void check(const RaggedPrefill& p) {
  const char* const fn = RaggedPrefill::kName;
  check_tensor(fn, "q", p.q, {DType::kF32, DType::kBf16},
               {{"q_rows"}, {.label = "num_heads", .minimum = 1}, {.label = "N + P", .multiple = kWidthMultiple}});
  const int64_t q_rows = p.q.shape[0];
  const int64_t heads = p.q.shape[1];
  const int64_t width = p.q.shape[2];
  check_tensor(fn, "k", p.k, {p.q.dtype},
               {{"kv_rows"}, {"num_heads", heads}, {.label = "N + P, or N", .multiple = kWidthMultiple}});
  const int64_t kv_rows = p.k.shape[0];
  const int64_t own = p.k.shape[2];
  if (p.k_rope.given()) {
    if (own >= width)
      fail_argument(fn, "k is {}; accepted: fewer than {} values a head, since k_rope holds the others", describe(p.k),
                    width);
    check_tensor(fn, "k_rope", p.k_rope, {p.q.dtype}, {{"kv_rows", kv_rows}, {"P", width - own}});
  } else if (own != width) {
    fail_argument(fn, "k is {}; accepted: {} values a head as in q, or fewer and k_rope", describe(p.k), width);
  }
  check_tensor(fn, "v", p.v, {p.q.dtype},
               {{"kv_rows", kv_rows}, {"num_heads", heads}, {.label = "V", .multiple = kWidthMultiple}});
  check_tensor(fn, "cu_q_lens", p.cu_q_lens, {DType::kI32}, {{.label = "num_requests + 1", .minimum = 1}});
  check_tensor(fn, "cu_kv_lens", p.cu_kv_lens, {DType::kI32}, {{"num_requests + 1", p.cu_q_lens.shape[0]}});
  check_tensor(fn, "out", p.out, {DType::kF32, DType::kBf16},
               {{"q_rows", q_rows}, {"num_heads", heads}, {"V", p.v.shape[2]}}, Access::kWrite);
  check_optional(fn, "lse", p.lse, {DType::kF32}, {{"q_rows", q_rows}, {"num_heads", heads}}, Access::kWrite);
  check_softmax_scale(fn, p.softmax_scale);
}

template <>
bool is_empty(const RaggedPrefill& p) {
  return p.q.shape[0] == 0;
}

template <>
void check_contents(const RaggedPrefill& p) {
  check_cumulative(RaggedPrefill::kName, "cu_q_lens", p.cu_q_lens, p.q.shape[0], true);
  check_cumulative(RaggedPrefill::kName, "cu_kv_lens", p.cu_kv_lens, p.k.shape[0], false);
}

GANNET_INSTANTIATE_OP(RaggedPrefill)

}  // namespace v0
}  // namespace gannet
