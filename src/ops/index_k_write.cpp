// index_k_write: what it accepts. The contract stands in gannet/ops.h.
#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const IndexKWrite& p) {
  const char* const fn = IndexKWrite::kName;
  check_tensor(fn, "k", p.k, {DType::kF32, DType::kBf16}, {{"rows"}, {"head_dim", p.cache.head_dim}});
  check_tensor(fn, "slots", p.slots, {DType::kI32, DType::kI64}, {{"rows", p.k.shape[0]}});
  check_cache(fn, p.cache, p.k.device);
  check_hadamard(fn, p.cache, p.hadamard);
}

template <>
bool is_empty(const IndexKWrite& p) {
  return p.k.shape[0] == 0;
}

template <>
void check_contents(const IndexKWrite& p) {
  check_slots(IndexKWrite::kName, p.slots, p.cache.num_slots());
}

GANNET_INSTANTIATE_OP(IndexKWrite)

}  // namespace v0
}  // namespace gannet
