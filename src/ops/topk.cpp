// topk: what it accepts. The contract stands in gannet/ops.h.
#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const TopK& p) {
  const char* const fn = TopK::kName;
  check_tensor(fn, "logits", p.logits, {DType::kF32, DType::kBf16}, {{"rows"}, {"max_keys"}});
  const int64_t rows = p.logits.shape[0];
  if (p.logits.shape[1] > std::numeric_limits<int32_t>::max())
    fail_argument(fn, "logits is {}; accepted: fewer than 2^31 columns (positions are int32)", describe(p.logits));
  check_tensor(fn, "lens", p.lens, {DType::kI32}, {{"rows", rows}});
  check_tensor(fn, "positions", p.positions, {DType::kI32}, {{"rows", rows}, {.label = "k", .minimum = 1}},
               Access::kWrite);
  check_tensor(fn, "counts", p.counts, {DType::kI32}, {{"rows", rows}}, Access::kWrite);
}

template <>
bool is_empty(const TopK& p) {
  return p.logits.shape[0] == 0;
}

template <>
void check_contents(const TopK& p) {
  for (int64_t t = 0; t < p.lens.shape[0]; ++t) {
    if (*p.lens.ptr<int32_t>(t) > p.logits.shape[1])
      fail_argument(TopK::kName, "lens[{}] is {}; accepted: at most {} (columns of logits)", t, *p.lens.ptr<int32_t>(t),
                    p.logits.shape[1]);
  }
}

GANNET_INSTANTIATE_OP(TopK)

}  // namespace v0
}  // namespace gannet
