#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const RaggedPrefill&) {}

template <>
bool is_empty(const RaggedPrefill&) {
  return false;
}

GANNET_INSTANTIATE_OP(RaggedPrefill)

}  // namespace v0
}  // namespace gannet
