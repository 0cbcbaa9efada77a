#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const IndexKGather&) {}

template <>
bool is_empty(const IndexKGather&) {
  return false;
}

GANNET_INSTANTIATE_OP(IndexKGather)

}  // namespace v0
}  // namespace gannet
