// merge_state: what it accepts. The contract stands in gannet/ops.h.
#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const MergeState& p) {
  const char* const fn = MergeState::kName;
  check_tensor(fn, "out_a", p.out_a, {DType::kF32, DType::kBf16}, {{"rows"}, {"num_heads"}, {"head_dim"}},
               Access::kWrite);
  const int64_t rows = p.out_a.shape[0];
  const int64_t heads = p.out_a.shape[1];
  check_tensor(fn, "lse_a", p.lse_a, {DType::kF32}, {{"rows", rows}, {"num_heads", heads}}, Access::kWrite);
  check_tensor(fn, "out_b", p.out_b, {p.out_a.dtype},
               {{"rows", rows}, {"num_heads", heads}, {"head_dim", p.out_a.shape[2]}});
  check_tensor(fn, "lse_b", p.lse_b, {DType::kF32}, {{"rows", rows}, {"num_heads", heads}});
  check_optional(fn, "count_a", p.count_a, {DType::kI32}, {{"rows", rows}});
  check_optional(fn, "count_b", p.count_b, {DType::kI32}, {{"rows", rows}});
  if (p.base > LseBase::kTwo) fail_argument(fn, "base is {}; accepted: an LseBase", static_cast<int>(p.base));
}

template <>
bool is_empty(const MergeState& p) {
  return p.out_a.shape[0] == 0 || p.out_a.shape[1] == 0;
}

template <>
void check_contents(const MergeState& p) {
  static_cast<void>(p);
}

GANNET_INSTANTIATE_OP(MergeState)

}  // namespace v0
}  // namespace gannet
