// What calls share: threads, plans by shape, scratch by stream.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "core/op_list.h"
#include "gannet/gannet.h"
#include "tensors.h"

namespace gannet_python {

/// Plans of one operation, most recently used first. Engines call an operation with few shapes; a plan is some hundred
/// bytes and costs about a microsecond, so that losing one hurts little.
template <class P>
class Plans {
 public:
  const gannet::OpPlan<P>& plan(const gannet::Context& context, const P& params, const gannet::PlanOptions& options) {
    for (auto e = entries_.begin(); e != entries_.end(); ++e) {
      if (!same(e->params, params) || e->options.batch_invariant != options.batch_invariant ||
          e->options.impl != options.impl)
        continue;
      if (e != entries_.begin()) entries_.splice(entries_.begin(), entries_, e);
      return entries_.front().plan;
    }
    gannet::OpPlan<P> made(context, params, options);
    if (entries_.size() >= kMost) entries_.pop_back();
    entries_.push_front({params, options, std::move(made)});
    return entries_.front().plan;
  }

 private:
  static constexpr size_t kMost = 32;
  struct Entry {
    P params;
    gannet::PlanOptions options;
    gannet::OpPlan<P> plan;
  };

  static bool same(const P& a, const P& b) {
    constexpr size_t kMostViews = 24;
    const gannet::TensorView* views[kMostViews];
    size_t n = 0;
    P::for_each_view(a, [&](const char*, const gannet::TensorView& v) { views[n++] = &v; });
    n = 0;
    bool equal = true;
    P::for_each_view(b, [&](const char*, const gannet::TensorView& v) {
      const gannet::TensorView& u = *views[n++];
      equal = equal && u.rank == v.rank && u.dtype == v.dtype && u.device == v.device;
      for (size_t i = 0; equal && i < static_cast<size_t>(v.rank); ++i)
        equal = u.shape[i] == v.shape[i] && u.stride[i] == v.stride[i];
    });
    return equal && a.options() == b.options();
  }

  std::list<Entry> entries_;
};

/// Threads for the CPU, plans and scratch. Calls from several Python threads take turns on the CPU; the GIL is released
/// while an operation runs.
class PyContext {
 public:
  explicit PyContext(int num_threads);
  PyContext(const PyContext&) = delete;
  PyContext& operator=(const PyContext&) = delete;

  const gannet::Context& context() const noexcept { return context_; }
  int num_threads() const noexcept { return threads_ ? threads_->num_workers() : 1; }
  std::mutex& mutex() noexcept { return mutex_; }

  template <class P>
  Plans<P>& plans() noexcept {
    return std::get<Plans<P>>(plans_);
  }
  /// Scratch that work of this stream may use until the next call for it; it stays where it is, since a CUDA graph may
  /// have captured its address: growing adds memory and frees none.
  std::span<std::byte> scratch(gannet::Device device, gannet::Stream stream, size_t bytes);
  /// Frees all scratch: for a caller that knows of no work in flight and no graph that would use it.
  void release_scratch();
  int64_t scratch_bytes() const;

 private:
  std::unique_ptr<gannet::ThreadPool> threads_;
  gannet::Context context_;
  std::mutex mutex_;
  std::tuple<Plans<gannet::LatentWrite>, Plans<gannet::LatentGather>, Plans<gannet::IndexKWrite>,
             Plans<gannet::IndexKGather>, Plans<gannet::Rope>, Plans<gannet::RaggedPrefill>, Plans<gannet::MergeState>,
             Plans<gannet::MlaDecode>, Plans<gannet::IndexLogits>, Plans<gannet::TopK>, Plans<gannet::IndexSelect>,
             Plans<gannet::SparseAttention>>
      plans_;
  std::map<std::tuple<gannet::DeviceKind, int, void*>, std::vector<gannet::Buffer>> scratch_;
};

}  // namespace gannet_python
