#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const IndexSelect&) {}

template <>
bool is_empty(const IndexSelect&) {
  return false;
}

GANNET_INSTANTIATE_OP(IndexSelect)

}  // namespace v0
}  // namespace gannet
