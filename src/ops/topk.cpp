#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const TopK&) {}

template <>
bool is_empty(const TopK&) {
  return false;
}

GANNET_INSTANTIATE_OP(TopK)

}  // namespace v0
}  // namespace gannet
