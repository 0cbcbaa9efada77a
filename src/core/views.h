// Checks that every operation shares: alignment, devices, unit last stride, and that run() gets what was planned.
#pragma once

#include "core/format.h"
#include "gannet/op_plan.h"
#include "gannet/ops.h"

namespace gannet {
inline namespace v0 {

/// Throws unless the views agree in dtype, shape and stride.
void check_same_view(const char* function, const char* name, const TensorView& planned, const TensorView& given);
/// Throws unless data is set and a multiple of kBaseAlignment, for a view with elements.
void check_view_data(const char* function, const char* name, const TensorView& v);
/// Throws unless fp16 is absent, the last stride is 1, other strides are multiples of 4 bytes (dimensions of size 1
/// and rank-1 views aside) and the device is `device`.
void check_view_form(const char* function, const char* name, const TensorView& v, Device device);

template <class Params>
Device check_common(const Params& p) {
  Device device{};
  bool first = true;
  Params::for_each_view(p, [&](const char* name, const TensorView& v) {
    if (!v.given()) return;
    if (first) device = v.device;
    first = false;
    check_view_form(Params::kName, name, v, device);
  });
  return device;
}

template <class Params>
void check_data(const Params& p) {
  Params::for_each_view(p, [&](const char* name, const TensorView& v) { check_view_data(Params::kName, name, v); });
  if constexpr (requires { p.cache; }) {
    if (p.cache.data == nullptr && p.cache.num_pages > 0) fail_argument(Params::kName, "cache.data is null");
    if (reinterpret_cast<uintptr_t>(p.cache.data) % kBaseAlignment != 0)
      fail_argument(Params::kName, "cache.data is {}; accepted: a multiple of {} bytes", p.cache.data, kBaseAlignment);
  }
}

template <class Params>
void check_same_as_planned(const Params& planned, const Params& given) {
  TensorView before[24];
  int n = 0;
  Params::for_each_view(planned, [&](const char*, const TensorView& v) { before[n++] = v; });
  n = 0;
  Params::for_each_view(
      given, [&](const char* name, const TensorView& v) { check_same_view(Params::kName, name, before[n++], v); });
  if (!(planned.options() == given.options()))
    fail_argument(Params::kName, "options differ from the planned ones; make a new plan");
}

}  // namespace v0
}  // namespace gannet
