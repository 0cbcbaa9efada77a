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

/// A map of three dimensions, the innermost first, read in boxes with rows of 128 bytes; `strides`: bytes, of all but
/// the innermost. An error says what describe() does.
template <class Describe>
CUtensorMap encode_map(const char* function, CUtensorMapDataType type, void* data, const int64_t (&dims)[3],
                       const int64_t (&strides)[2], const int (&box)[3], Describe&& describe) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = encode_function(function);
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(dims[0]), static_cast<cuuint64_t>(dims[1]),
                              static_cast<cuuint64_t>(dims[2])};
  const cuuint64_t steps_of[] = {static_cast<cuuint64_t>(strides[0]), static_cast<cuuint64_t>(strides[1])};
  const cuuint32_t boxes[] = {static_cast<cuuint32_t>(box[0]), static_cast<cuuint32_t>(box[1]),
                              static_cast<cuuint32_t>(box[2])};
  const cuuint32_t steps[] = {1, 1, 1};
  CUtensorMap map{};
  const CUresult status =
      encode(&map, type, 3, data, sizes, steps_of, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    fail(ErrorCode::kDevice, function,
         "cuTensorMapEncodeTiled returned {} for {} at {} with strides of {} and {} bytes", static_cast<int>(status),
         describe(), data, strides[1], strides[0]);
  return map;
}

}  // namespace

CUtensorMap map_rows(const char* function, const TensorView& t, int box_rows) {
  const bool has_heads = t.rank == 3;
  const int64_t heads = has_heads ? t.shape[1] : 1, width = t.shape[has_heads ? 2 : 1];
  const auto bytes = static_cast<int64_t>(size_of(t.dtype));
  // The stride of a single head is never used, but must be a legal one.
  const int64_t head_stride = heads > 1 ? t.stride[1] * bytes : width * bytes;
  const int64_t row_stride = t.shape[0] > 1 ? t.stride[0] * bytes : heads * head_stride;
  return encode_map(function, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, t.data, {width, heads, t.shape[0]},
                    {head_stride, row_stride}, {kMapColumns, 1, box_rows},
                    [&] { return fmt::format("a tensor [{}, {}, {}]", t.shape[0], heads, width); });
}

CUtensorMap map_pages(const char* function, const LatentCacheView& cache, int box_rows) {
  const int64_t width = cache.geometry.latent_dim + cache.geometry.rope_dim, row_bytes = cache.row_stride();
  const bool bytes = cache.format == LatentFormat::kE4m3;
  // The stride of a single page is never used, but must be a legal one.
  const int64_t page_stride = cache.num_pages > 1 ? cache.page_stride_bytes : cache.page_size * row_bytes;
  return encode_map(function, bytes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, cache.data,
                    {width, cache.page_size, cache.num_pages}, {row_bytes, page_stride},
                    {bytes ? kMapByteColumns : kMapColumns, box_rows, 1},
                    [&] { return fmt::format("a cache of {} pages of {} rows", cache.num_pages, cache.page_size); });
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
