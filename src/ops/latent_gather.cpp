#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const LatentGather&) {}

template <>
bool is_empty(const LatentGather&) {
  return false;
}

GANNET_INSTANTIATE_OP(LatentGather)

}  // namespace v0
}  // namespace gannet
