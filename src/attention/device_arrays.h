// Arrays of the host where the operations read them: themselves on the CPU, copies on a device.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "cuda/runtime.h"
#include "gannet/memory.h"
#include "gannet/page_table.h"
#include "gannet/step.h"

namespace gannet {
inline namespace v0 {
namespace attention {

class DeviceArrays {
 public:
  /// An array as rows of which only the first used_row_bytes matter; others come as one row.
  struct Piece {
    const void* data = nullptr;
    size_t row_bytes = 0;
    size_t rows = 1;
    size_t used_row_bytes = 0;
  };
  template <class T>
  static Piece piece(std::span<const T> s) {
    return {s.data(), s.size_bytes(), 1, s.size_bytes()};
  }

  DeviceArrays(Device device, MemoryResource& memory) : device_(device), memory_(&memory) {}

  /// Makes copies of these arrays, in the order of the stream, the ones that on_device names. The memory on the device
  /// grows only, so that arrays of the same sizes keep their places. Does nothing on the CPU.
  void upload(const char* function, cuda::Staging* staging, std::span<const Piece> pieces, Stream stream);

  /// The same view where operations read it. `host` must lie in an array of the last upload, or be empty.
  TensorView on_device(const TensorView& host) const;
  PageTableView on_device(PageTableView host) const {
    PageTableView::for_each_view(host, [&](const char*, TensorView& v) {
      if (v.given()) v = on_device(v);
    });
    return host;
  }

 private:
  struct Place {
    const std::byte *begin, *end;
    int64_t offset;
  };

  Device device_;
  MemoryResource* memory_;
  Buffer copies_;
  std::vector<Place> places_;
};

/// The arrays of a plan that operations read.
struct PlanPieces {
  explicit PlanPieces(const StepPlan& plan);
  std::span<const DeviceArrays::Piece> span() const noexcept { return {all, count}; }

  DeviceArrays::Piece all[8];
  size_t count = 0;
};

}  // namespace attention
}  // namespace v0
}  // namespace gannet
