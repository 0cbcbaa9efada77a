// latent_gather: what it accepts. The contract stands in gannet/ops.h.
#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const LatentGather& p) {
  const char* const fn = LatentGather::kName;
  check_tensor(fn, "slots", p.slots, {DType::kI32, DType::kI64}, {{"rows"}});
  const int64_t rows = p.slots.shape[0];
  check_tensor(fn, "latent", p.latent, {DType::kF32, DType::kBf16},
               {{"rows", rows}, {"latent_dim", p.cache.geometry.latent_dim}}, Access::kWrite);
  check_tensor(fn, "rope", p.rope, {p.latent.dtype}, {{"rows", rows}, {"rope_dim", p.cache.geometry.rope_dim}},
               Access::kWrite);
  check_cache(fn, p.cache, p.slots.device);
}

template <>
bool is_empty(const LatentGather& p) {
  return p.slots.shape[0] == 0;
}

template <>
void check_contents(const LatentGather& p) {
  check_slots(LatentGather::kName, p.slots, p.cache.num_slots());
}

GANNET_INSTANTIATE_OP(LatentGather)

}  // namespace v0
}  // namespace gannet
