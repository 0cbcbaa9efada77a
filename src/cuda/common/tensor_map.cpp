#include "cuda/common/tensor_map.h"

#include <cudaTypedefs.h>

#include "core/format.h"
#include "cuda/common/check.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

namespace {

// Found at run time: the library does not link to the driver.
PFN_cuTensorMapEncodeTiled_v12000 encode_function(const char* function) {
  constexpr unsigned kSince = 12000;  // CUDA 12.0
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  GANNET_CUDA(function,
              cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &address, kSince, cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess || address == nullptr)
    fail(ErrorCode::kDevice, function, "the driver has no cuTensorMapEncodeTiled; needed: one for CUDA 12.0 or newer");
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(address);
}

}  // namespace

CUtensorMap map_rows(const char* function, const TensorView& t, int box_rows) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = encode_function(function);
  const bool has_heads = t.rank == 3;
  const int64_t heads = has_heads ? t.shape[1] : 1, width = t.shape[has_heads ? 2 : 1];
  const auto bytes = static_cast<int64_t>(size_of(t.dtype));
  // The stride of a single head is never used, but must be a legal one.
  const int64_t head_stride = heads > 1 ? t.stride[1] * bytes : width * bytes;
  const int64_t row_stride = t.shape[0] > 1 ? t.stride[0] * bytes : heads * head_stride;
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(heads),
                             static_cast<cuuint64_t>(t.shape[0])};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(head_stride), static_cast<cuuint64_t>(row_stride)};
  const cuuint32_t box[] = {kMapColumns, 1, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map{};
  const CUresult status = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, t.data, dims, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    fail(ErrorCode::kDevice, function,
         "cuTensorMapEncodeTiled returned {} for a tensor [{}, {}, {}] at {} with strides of {} and {} bytes",
         static_cast<int>(status), t.shape[0], heads, width, t.data, row_stride, head_stride);
  return map;
}

CUtensorMap map_pages(const char* function, const LatentCacheView& cache, int box_rows) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = encode_function(function);
  const int64_t width = cache.geometry.latent_dim + cache.geometry.rope_dim, row_bytes = cache.row_stride();
  const bool bytes = cache.format == LatentFormat::kE4m3;
  // The stride of a single page is never used, but must be a legal one.
  const int64_t page_stride = cache.num_pages > 1 ? cache.page_stride_bytes : cache.page_size * row_bytes;
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(cache.page_size),
                             static_cast<cuuint64_t>(cache.num_pages)};
  const cuuint64_t strides[] = {static_cast<cuuint64_t>(row_bytes), static_cast<cuuint64_t>(page_stride)};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(bytes ? kMapByteColumns : kMapColumns),
                            static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map{};
  const CUresult status =
      encode(&map, bytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, cache.data, dims,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    fail(ErrorCode::kDevice, function,
         "cuTensorMapEncodeTiled returned {} for a cache of {} pages of {} rows at {} with strides of {} and {} bytes",
         static_cast<int>(status), cache.num_pages, cache.page_size, cache.data, row_bytes, page_stride);
  return map;
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
