#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const MlaDecode&) {}

template <>
bool is_empty(const MlaDecode&) {
  return false;
}

GANNET_INSTANTIATE_OP(MlaDecode)

}  // namespace v0
}  // namespace gannet
