// rope: what it accepts. The contract stands in gannet/ops.h.
#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const Rope& p) {
  const char* const fn = Rope::kName;
  check_tensor(fn, "x", p.x, {DType::kF32, DType::kBf16}, {{"rows"}, {"heads"}, {"width"}}, Access::kWrite);
  check_tensor(fn, "positions", p.positions, {DType::kI32}, {{"rows", p.x.shape[0]}});
  check_tensor(fn, "cos_sin", p.cos_sin, {DType::kF32}, {{"max_positions"}, {.label = "P", .multiple = 2}});
  const int64_t width = p.x.shape[2];
  const int64_t rotated = p.cos_sin.shape[1];
  if (p.offset < 0 || p.offset + rotated > width)
    fail_argument(fn, "offset is {}; accepted: 0 to width - P = {} - {}", p.offset, width, rotated);
  if (p.pairing > RopePairing::kHalfSplit)
    fail_argument(fn, "pairing is {}; accepted: a RopePairing", static_cast<int>(p.pairing));
}

template <>
bool is_empty(const Rope& p) {
  return p.x.num_elements() == 0;
}

template <>
void check_contents(const Rope& p) {
  const int64_t limit = p.cos_sin.shape[0];
  for (int64_t t = 0; t < p.positions.shape[0]; ++t) {
    const int32_t position = *p.positions.ptr<int32_t>(t);
    if (position < 0 || position >= limit)
      fail_argument(Rope::kName, "positions[{}] is {}; accepted: 0 to {} (rows of cos_sin)", t, position, limit - 1);
  }
}

GANNET_INSTANTIATE_OP(Rope)

}  // namespace v0
}  // namespace gannet
