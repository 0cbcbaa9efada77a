#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const SparseAttention&) {}

template <>
bool is_empty(const SparseAttention&) {
  return false;
}

GANNET_INSTANTIATE_OP(SparseAttention)

}  // namespace v0
}  // namespace gannet
