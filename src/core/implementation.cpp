#include "core/implementation.h"

#include <array>

namespace gannet {
inline namespace v0 {

std::span<const ImplementationSet* const> implementation_sets() noexcept {
  static const std::array<const ImplementationSet*, 8> kSets = {
      &cuda::sm90_set(),       &cuda::mma_set(), &cuda::generic_set(), &cpu::amx_bf16_set(),
      &cpu::avx512_bf16_set(), &cpu::avx2_set(), &cpu::portable_set(), &ref::oracle_set()};
  return kSets;
}

std::vector<ImplInfo> list_all_implementations() {
  std::vector<ImplInfo> all;
#define GANNET_APPEND(Params, member) \
  for (ImplInfo & info : list_implementations<Params>()) all.push_back(std::move(info));
  GANNET_FOR_EACH_OP(GANNET_APPEND)
#undef GANNET_APPEND
  return all;
}

}  // namespace v0
}  // namespace gannet
