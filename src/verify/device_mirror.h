// Arguments on the host, run on a CUDA device: memory is copied there, the operation runs, and all of it is copied
// back, gaps between rows included, so that cases made for host memory, their poison too, serve the device unchanged.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "gannet/ops.h"

namespace gannet {
inline namespace v0 {
namespace verify {

/// The same arguments as if they lay on a device of that kind, data pointers left alone: enough to plan.
template <class Params>
Params placed_on(DeviceKind kind, const Params& params) {
  Params p = params;
  Params::for_each_view(p, [&](const char*, TensorView& v) { v.device = {kind, 0}; });
  if constexpr (requires { p.cache; }) p.cache.device = {kind, 0};
  return p;
}

/// Bytes of the pages of a cache. Of rows with others between them only up to the last row: a view of one head among
/// several begins inside the first page.
inline int64_t extent_of(const LatentCacheView& c) {
  const int64_t row_bytes = latent_row_bytes(c.format, c.geometry);
  if (c.num_pages == 0 || c.row_stride() == row_bytes) return c.num_pages * c.page_stride_bytes;
  return (c.num_pages - 1) * c.page_stride_bytes + (c.page_size - 1) * c.row_stride() + row_bytes;
}
inline int64_t extent_of(const IndexCacheView& c) { return c.num_pages * c.page_stride_bytes; }

/// Copies of host memory on CUDA device 0. Ranges that overlap on the host overlap there in the same way. In a build
/// without CUDA every member throws Error(kUnsupported).
class DeviceMirror {
 public:
  DeviceMirror();
  ~DeviceMirror();

  template <class Params>
  Params to_device(const Params& host) {
    Params::for_each_view(host, [&](const char*, const TensorView& v) { note(v.data, extent(v)); });
    if constexpr (requires { host.cache; }) note(host.cache.data, extent_of(host.cache));
    copy_there();
    Params p = placed_on(DeviceKind::kCuda, host);
    Params::for_each_view(p, [&](const char*, TensorView& v) { v.data = on_device(v.data); });
    if constexpr (requires { p.cache; }) p.cache.data = on_device(p.cache.data);
    return p;
  }
  /// Device memory of that size whose bytes are 0xFF, or as they were allocated.
  std::span<std::byte> scratch(size_t bytes, bool poisoned = true);
  /// Waits for the device, then copies everything back.
  void copy_back();

 private:
  struct State;

  static int64_t extent(const TensorView& v);
  void note(void* data, int64_t bytes);
  void copy_there();
  void* on_device(void* host) const;

  std::unique_ptr<State> state_;
};

}  // namespace verify
}  // namespace v0
}  // namespace gannet
