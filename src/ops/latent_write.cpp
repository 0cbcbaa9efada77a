#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const LatentWrite&) {}

template <>
bool is_empty(const LatentWrite&) {
  return false;
}

GANNET_INSTANTIATE_OP(LatentWrite)

}  // namespace v0
}  // namespace gannet
