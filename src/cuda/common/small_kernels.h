// Launchers of kernels that serve the host side rather than an operation.
#pragma once

#include <cstdint>

#include "gannet/device.h"
#include "gannet/tensor.h"

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
/// hadamard() of gannet/hadamard.h over `rows` rows of n values, which has checked them.
void launch_hadamard(const char* function, const TensorView& from, const TensorView& to, int64_t rows, int n,
                     float scale, Stream stream);
void launch_signal(uint64_t* counter, Stream stream);

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
