#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const MergeState&) {}

template <>
bool is_empty(const MergeState&) {
  return false;
}

GANNET_INSTANTIATE_OP(MergeState)

}  // namespace v0
}  // namespace gannet
