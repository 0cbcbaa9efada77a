// latent_write: what it accepts. The contract stands in gannet/ops.h.
#include "core/op_plan_impl.h"

namespace gannet {
inline namespace v0 {

template <>
void check(const LatentWrite& p) {
  const char* const fn = LatentWrite::kName;
  check_tensor(fn, "latent", p.latent, {DType::kF32, DType::kBf16},
               {{"rows"}, {"latent_dim", p.cache.geometry.latent_dim}});
  const int64_t rows = p.latent.shape[0];
  check_tensor(fn, "rope", p.rope, {p.latent.dtype}, {{"rows", rows}, {"rope_dim", p.cache.geometry.rope_dim}});
  check_tensor(fn, "slots", p.slots, {DType::kI32, DType::kI64}, {{"rows", rows}});
  check_cache(fn, p.cache, p.latent.device);
}

template <>
bool is_empty(const LatentWrite& p) {
  return p.latent.shape[0] == 0;
}

template <>
void check_contents(const LatentWrite& p) {
  check_slots(LatentWrite::kName, p.slots, p.cache.num_slots());
}

GANNET_INSTANTIATE_OP(LatentWrite)

}  // namespace v0
}  // namespace gannet
