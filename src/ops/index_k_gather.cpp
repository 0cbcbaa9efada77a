// index_k_gather: what it accepts. The contract stands in gannet/ops.h.
#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const IndexKGather& p) {
  const char* const fn = IndexKGather::kName;
  check_tensor(fn, "slots", p.slots, {DType::kI32, DType::kI64}, {{"rows"}});
  check_tensor(fn, "k", p.k, {DType::kF32, DType::kBf16}, {{"rows", p.slots.shape[0]}, {"head_dim", p.cache.head_dim}},
               Access::kWrite);
  check_cache(fn, p.cache, p.slots.device);
  check_hadamard(fn, p.cache, p.hadamard);
}

template <>
bool is_empty(const IndexKGather& p) {
  return p.slots.shape[0] == 0;
}

template <>
void check_contents(const IndexKGather& p) {
  check_slots(IndexKGather::kName, p.slots, p.cache.num_slots());
}

GANNET_INSTANTIATE_OP(IndexKGather)

}  // namespace v0
}  // namespace gannet
