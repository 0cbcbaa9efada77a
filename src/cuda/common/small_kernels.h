// Launchers of kernels that serve the host side rather than an operation.
#pragma once

#include <cstdint>

#include "gannet/device.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

/// Travels as a kernel argument: 4 KiB is what every driver takes.
struct RowList {
  static constexpr int kMost = 960;
  int32_t rows[kMost];
};

void launch_gather_int32_rows(const RowList& list, int n, const int32_t* from, int64_t from_stride, int32_t* to,
                              int64_t to_stride, int64_t width, int32_t fill, Stream stream);
void launch_signal(uint64_t* counter, Stream stream);

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
