// Plans of one operation, kept by shape: the layers of a step, and steps of equal shape, plan once.
#pragma once

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gannet/op_plan.h"
#include "gannet/ops.h"

namespace gannet {
inline namespace v0 {
namespace attention {

template <class Params>
class OpCache {
 public:
  /// The plan for these shapes and options, made if there is none.
  const OpPlan<Params>& plan(const Context& context, const Params& params, const PlanOptions& options) {
    for (Entry& e : entries_)
      if (same(e.params, params)) return e.plan;
    Entry fresh{params, OpPlan<Params>(context, params, options)};
    if (entries_.size() < kMaxEntries) return entries_.emplace_back(std::move(fresh)).plan;
    Entry& victim = entries_[next_victim_];
    next_victim_ = (next_victim_ + 1) % kMaxEntries;
    victim = std::move(fresh);
    return victim.plan;
  }

  void list(std::set<std::pair<std::string, std::string>>& names) const {
    for (const Entry& e : entries_) names.emplace(Params::kName, e.plan.impl());
  }
  void clear() noexcept { entries_.clear(); }

 private:
  // A step has at most a few shapes of an operation: prefill and decode rows, full and last chunks. A plan is a few
  // hundred bytes and costs about a microsecond, so that losing one hurts little.
  static constexpr size_t kMaxEntries = 16;

  struct Entry {
    Params params;
    OpPlan<Params> plan;
  };

  static bool same(const Params& a, const Params& b) {
    constexpr size_t kMaxViews = 24;
    TensorView views[kMaxViews];
    size_t n = 0;
    Params::for_each_view(a, [&](const char*, const TensorView& v) { views[n++] = v; });
    n = 0;
    bool equal = true;
    Params::for_each_view(b, [&](const char*, const TensorView& v) {
      const TensorView& u = views[n++];
      equal = equal && u.rank == v.rank && u.dtype == v.dtype && u.device == v.device;
      for (size_t i = 0; equal && i < static_cast<size_t>(v.rank); ++i)
        equal = u.shape[i] == v.shape[i] && u.stride[i] == v.stride[i];
    });
    return equal && a.options() == b.options();
  }

  std::vector<Entry> entries_;
  size_t next_victim_ = 0;
};

}  // namespace attention
}  // namespace v0
}  // namespace gannet
