// Plan, then run.
//
//   gannet::MlaDecode p{...};                              // the arguments; data pointers may still be null
//   gannet::OpPlan<gannet::MlaDecode> plan(context, p);    // checks everything, picks the implementation
//   std::vector<std::byte> workspace(plan.workspace_bytes());
//   plan.run(p, workspace);                                // launches only
//
// A plan checks shapes, dtypes, strides, devices and alignment once. run() takes arguments of the same shapes,
// dtypes, strides and options with whatever data pointers, and refuses others. Contents (lengths, page tables) may
// change between runs.
//
// Thread safety: a plan is immutable; several threads may run it, each with its own workspace, if the executor of the
// context allows concurrent calls.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "gannet/context.h"
#include "gannet/device.h"
#include "gannet/error.h"

namespace gannet {
inline namespace v0 {

struct PlanOptions {
  std::string impl = {};  ///< name of the implementation to force; empty: the first that takes the arguments
  /// Only implementations whose result for a row does not depend on the rest of the batch, bit for bit. All of the CPU
  /// are; on a GPU the fast ones cut the work of a batch into equal parts and are not.
  bool batch_invariant = false;
};

/// Base pointers must be multiples of this, in bytes; workspaces too.
inline constexpr size_t kBaseAlignment = 16;

template <class Params>
class GANNET_API OpPlan {
 public:
  /// Throws Error: kInvalidArgument for an argument outside the contract, kUnsupported where no implementation (or
  /// not the forced one) takes it.
  OpPlan(const Context& context, const Params& params, const PlanOptions& options = {});

  /// Name of the implementation that runs.
  const char* impl() const noexcept;
  /// Scratch that run() needs; its contents never matter.
  size_t workspace_bytes() const noexcept { return workspace_bytes_; }
  void run(const Params& params, std::span<std::byte> workspace, Stream stream = {}) const;

 private:
  const Context* context_;
  Params planned_;
  const void* implementation_;
  size_t workspace_bytes_;
};

/// Plans, allocates a workspace and runs: for a single call and for examples.
template <class Params>
GANNET_API void run_once(const Context& context, const Params& params, const PlanOptions& options = {});

/// An implementation of an operation as `gannet info` lists it.
struct ImplInfo {
  std::string op;    ///< "mla_decode"
  std::string name;  ///< "avx512_bf16"
  DeviceKind device;
  bool runs_here;        ///< the machine has what it needs
  bool batch_invariant;  ///< see PlanOptions
};

/// All implementations of one operation in this build in order of preference; the fp64 oracle "ref" is last and only
/// runs when forced.
template <class Params>
GANNET_API std::vector<ImplInfo> list_implementations();

/// Of every operation.
GANNET_API std::vector<ImplInfo> list_all_implementations();

}  // namespace v0
}  // namespace gannet
