// Dense attention behind the backends: absorbed over every visible key, and prefill in the expanded form. `mla` is
// this; `dsa` falls back on it where it is asked to by type.
#pragma once

#include <memory>
#include <vector>

#include "attention/backend_core.h"

namespace gannet {
inline namespace v0 {
namespace attention {

class DenseDelegate {
 public:
  explicit DenseDelegate(BackendCore& core);

  /// A new step has been prepared.
  void on_prepare() noexcept { slots_ready_ = false; }

  /// Everything of an AttendCall but its write and selection.
  void attend_all(const AttendCall& call);

  void dense_prefill(const DensePrefillCall& call);
  void prefill_new_tokens(const DensePrefillCall& call);
  void gather_prefix(int32_t layer, int64_t chunk, const TensorView& latent, const TensorView& rope);
  void prefill_prefix(const PrefixPassCall& call);

 private:
  void check_prefill(const char* call, const DensePrefillCall& args, bool lse_required) const;
  void causal_pass(const DensePrefillCall& call, const TensorView& lse);
  const PrefixChunk& chunk_at(const char* call, int64_t chunk) const;
  TensorView chunk_slots(int64_t chunk);
  void gather(int32_t layer, int64_t chunk, const TensorView& latent, const TensorView& rope);
  /// Runs the pass into (part_out, part_lse) and merges.
  void pass(const PrefixPassCall& call, const TensorView& part_out, const TensorView& part_lse);

  BackendCore& core_;
  Buffer scratch_;  // of a prefill: gathered and expanded rows, partial results
  bool slots_ready_ = false;
  std::vector<int32_t> slots_;         // of all chunks, one after the other
  std::vector<int64_t> slot_offsets_;  // [chunks]
  DeviceArrays slot_copies_;
};

}  // namespace attention
}  // namespace v0
}  // namespace gannet
