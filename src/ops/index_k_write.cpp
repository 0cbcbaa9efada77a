#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const IndexKWrite&) {}

template <>
bool is_empty(const IndexKWrite&) {
  return false;
}

GANNET_INSTANTIATE_OP(IndexKWrite)

}  // namespace v0
}  // namespace gannet
