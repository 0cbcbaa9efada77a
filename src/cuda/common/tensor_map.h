// Descriptions of tensors for the copy engine (TMA) of sm_90 and newer. Host code; kernels take them as
// __grid_constant__ parameters and use common/tma.cuh.
#pragma once

#include <cuda.h>

#include "gannet/kv_cache.h"
#include "gannet/tensor.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

constexpr int kMapColumns = 64;       // bf16 values of a box's row: 128 bytes, the width of the swizzle
constexpr int kMapByteColumns = 128;  // e4m3 values of one

/// A bf16 tensor [rows, heads, width] or [rows, width], to be read in boxes of box_rows rows of one head and
/// kMapColumns columns into the 128-byte swizzle (common/wgmma.cuh). Coordinates are column, head, row; rows beyond the
/// tensor read as zeros. Strides are multiples of 16 bytes below 2^40, as the contract of operations has them. Throws
/// Error(kDevice) naming `function` where the driver has no such call or refuses.
CUtensorMap map_rows(const char* function, const TensorView& t, int box_rows);

/// A cache of bf16 or e4m3 rows that lie one behind the other in a page, as [pages, rows of a page, columns], to be
/// read in boxes of box_rows rows of one page and kMapColumns or kMapByteColumns columns (coordinates: column, row,
/// page); columns beyond the row read as zeros. The cache has a page, and its data and page stride are multiples of 16
/// bytes. Throws as map_rows does.
CUtensorMap map_pages(const char* function, const LatentCacheView& cache, int box_rows);

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
