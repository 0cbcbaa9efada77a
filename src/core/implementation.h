// How an implementation of an operation is described, and the sets that hold them.
//
// A set is one way to run operations: "portable", "avx512_bf16", "cuda_mma", "ref". It is a plain constant: nothing
// registers itself at start-up. An entry with run == nullptr is not offered by that set (fast ones of a GPU have few).
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "core/op_list.h"
#include "gannet/context.h"
#include "gannet/ops.h"

namespace gannet {
inline namespace v0 {

/// What run() of an implementation gets beside the arguments.
struct RunContext {
  Executor& executor;
  std::byte* workspace;  ///< workspace_bytes() bytes, 64-byte aligned, contents arbitrary
  Stream stream;
};

template <class Params>
struct Implementation {
  /// Why these (already checked) arguments are not taken: "latent_dim is 128; accepted: 512"; empty: they are taken.
  std::string (*refuses)(const Params&) = nullptr;
  /// Scratch for these shapes with this many workers; nullptr: none. Must not read data.
  size_t (*workspace_bytes)(const Params&, int num_workers) = nullptr;
  void (*run)(const Params&, const RunContext&) = nullptr;
  /// How work is cut depends on the batch, for speed, and with it a row's bits. Else they depend on that row alone.
  bool depends_on_batch = false;
};

struct ImplementationSet {
  const char* name;
  DeviceKind device;
  bool only_when_forced;  ///< the oracle: too slow to be anybody's choice
  bool compiled;          ///< false in a stub
  bool (*runs_here)();    ///< the machine has the instructions, the driver ...
#define GANNET_MEMBER(Params, member) Implementation<Params> member{};
  GANNET_FOR_EACH_OP(GANNET_MEMBER)
#undef GANNET_MEMBER
};

/// All sets in order of preference.
std::span<const ImplementationSet* const> implementation_sets() noexcept;

/// The entry of one operation in a set.
template <class Params>
const Implementation<Params>& entry_of(const ImplementationSet& set) noexcept;
#define GANNET_ENTRY(Params, member)                                                             \
  template <>                                                                                    \
  inline const Implementation<Params>& entry_of<Params>(const ImplementationSet& set) noexcept { \
    return set.member;                                                                           \
  }
GANNET_FOR_EACH_OP(GANNET_ENTRY)
#undef GANNET_ENTRY

namespace cpu {
const ImplementationSet& portable_set() noexcept;  // src/cpu/portable/set.cpp
// src/cpu/<name>/set.cpp, or the stubs in src/cpu/no_x86.cpp
const ImplementationSet& amx_bf16_set() noexcept;
const ImplementationSet& avx2_set() noexcept;
const ImplementationSet& avx512_bf16_set() noexcept;
}  // namespace cpu
namespace cuda {
// src/cuda/<name>/set.cpp, or the stubs in src/cuda/no_cuda.cpp
const ImplementationSet& sm90_set() noexcept;
const ImplementationSet& mma_set() noexcept;
const ImplementationSet& generic_set() noexcept;
}  // namespace cuda
namespace ref {
const ImplementationSet& oracle_set() noexcept;  // src/ref/set_ref.cpp
}  // namespace ref

}  // namespace v0
}  // namespace gannet
