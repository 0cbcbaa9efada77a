#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const IndexLogits&) {}

template <>
bool is_empty(const IndexLogits&) {
  return false;
}

GANNET_INSTANTIATE_OP(IndexLogits)

}  // namespace v0
}  // namespace gannet
