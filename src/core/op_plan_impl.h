// OpPlan<Params>, written once; each src/ops/<op>.cpp includes this and instantiates it for its operation after
// defining check(const Params&).
#pragma once

#include <cstdint>
#include <memory>

#include "core/format.h"
#include "core/implementation.h"
#include "core/views.h"
#include "gannet/op_plan.h"

namespace gannet {
inline namespace v0 {

/// Throws if the arguments are outside the contract of the operation. Reads shapes, never data.
template <class Params>
void check(const Params& p);

/// True where there is nothing to compute: run() returns at once.
template <class Params>
bool is_empty(const Params& p);

/// Throws if the contents of lengths, tables and lists would lead a kernel outside its memory. Called by each run on
/// the CPU, where it costs nothing beside the work; on a device nobody reads contents from the host and the kernels
/// bound what they load.
template <class Params>
void check_contents(const Params& p);

inline constexpr size_t kWorkspaceAlignment = 64;  // a cache line and a zmm register

namespace detail {

template <class Params>
const ImplementationSet& choose(const Params& p, Device device, const PlanOptions& options) {
  const std::string& forced = options.impl;
  std::string reasons;
  for (const ImplementationSet* set : implementation_sets()) {
    if (forced.empty() ? set->only_when_forced : forced != set->name) continue;
    const Implementation<Params>& entry = entry_of<Params>(*set);
    std::string reason;
    if (set->device != device.kind) reason = fmt::format("works on {} only", to_string(Device{set->device, 0}));
    else if (!set->compiled) reason = "not part of this build";
    else if (!set->runs_here()) reason = "this machine lacks its instructions";
    else if (options.batch_invariant && entry.depends_on_batch) reason = "its bits depend on the batch";
    else if (entry.run == nullptr) reason = "does not offer this operation";
    else if (entry.refuses != nullptr) reason = entry.refuses(p);
    if (reason.empty()) return *set;
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", set->name, reason);
  }
  if (reasons.empty()) {
    std::string names;
    for (const ImplementationSet* set : implementation_sets())
      names += fmt::format("{}{}", names.empty() ? "" : ", ", set->name);
    fail_argument(Params::kName, "impl is \"{}\"; accepted: {}", forced, names);
  }
  fail(ErrorCode::kUnsupported, Params::kName, "no implementation takes these arguments ({})", reasons);
}

}  // namespace detail

template <class Params>
OpPlan<Params>::OpPlan(const Context& context, const Params& params, const PlanOptions& options)
    : context_(&context), planned_(params), implementation_(nullptr), workspace_bytes_(0) {
  check(params);
  const Device device = check_common(params);
  const ImplementationSet& set = detail::choose(params, device, options);
  implementation_ = &set;
  const Implementation<Params>& entry = entry_of<Params>(set);
  const int workers = context.executor != nullptr ? context.executor->num_workers() : 1;
  if (entry.workspace_bytes != nullptr && !is_empty(params)) {
    workspace_bytes_ = entry.workspace_bytes(params, workers);
    if (workspace_bytes_ > 0) workspace_bytes_ += kWorkspaceAlignment;  // room to align the caller's pointer
  }
}

template <class Params>
const char* OpPlan<Params>::impl() const noexcept {
  return static_cast<const ImplementationSet*>(implementation_)->name;
}

template <class Params>
void OpPlan<Params>::run(const Params& params, std::span<std::byte> workspace, Stream stream) const {
  check_same_as_planned(planned_, params);
  if (is_empty(params)) return;
  check_data(params);
  const auto& set = *static_cast<const ImplementationSet*>(implementation_);
  if (set.device == DeviceKind::kCpu) check_contents(params);
  if (workspace.size() < workspace_bytes_)
    fail_argument(Params::kName, "workspace has {} bytes; the plan needs {}", workspace.size(), workspace_bytes_);
  auto address = reinterpret_cast<uintptr_t>(workspace.data());
  address = (address + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  SerialExecutor serial;
  Executor& executor = context_->executor != nullptr ? *context_->executor : static_cast<Executor&>(serial);
  entry_of<Params>(set).run(params, RunContext{executor, reinterpret_cast<std::byte*>(address), stream});
}

template <class Params>
void run_once(const Context& context, const Params& params, const PlanOptions& options) {
  const OpPlan<Params> plan(context, params, options);
  const auto workspace = std::make_unique_for_overwrite<std::byte[]>(plan.workspace_bytes());
  plan.run(params, {workspace.get(), plan.workspace_bytes()});
}

template <class Params>
std::vector<ImplInfo> list_implementations() {
  std::vector<ImplInfo> infos;
  for (const ImplementationSet* set : implementation_sets()) {
    if (entry_of<Params>(*set).run == nullptr) continue;  // nor does a stub for what is not built
    infos.push_back(
        {Params::kName, set->name, set->device, set->runs_here(), !entry_of<Params>(*set).depends_on_batch});
  }
  return infos;
}

#define GANNET_INSTANTIATE_OP(Params)                                                           \
  template class OpPlan<Params>;                                                                \
  template GANNET_API void run_once<Params>(const Context&, const Params&, const PlanOptions&); \
  template GANNET_API std::vector<ImplInfo> list_implementations<Params>();

}  // namespace v0
}  // namespace gannet
