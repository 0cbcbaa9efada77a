#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const Rope&) {}

template <>
bool is_empty(const Rope&) {
  return false;
}

GANNET_INSTANTIATE_OP(Rope)

}  // namespace v0
}  // namespace gannet
