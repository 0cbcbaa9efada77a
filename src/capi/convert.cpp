// Structs of C as values of C++.
#include <algorithm>
#include <cstring>

#include "capi/capi.h"

namespace gannet {
inline namespace v0 {
namespace capi {

void read_struct(const char* function, const char* name, const void* from, void* to, size_t known) {
  size_t size = 0;
  std::memcpy(&size, from, sizeof(size));
  constexpr size_t kMostBytes = 1 << 16;  // no struct comes near: a size beyond it was never set
  // The first ABI knows no smaller structs than these. A struct that grows keeps its first size here.
  if (size < known || size > kMostBytes)
    fail_argument(function, "{}.struct_size is {}; accepted: sizeof of the struct, {} and more", name, size, known);
  for (size_t i = known; i < size; ++i)
    if (static_cast<const unsigned char*>(from)[i] != 0)
      fail(ErrorCode::kUnsupported, function,
           "{}.struct_size is {} and byte {} is set; accepted: 0 beyond the {} bytes that gannet {} knows", name, size,
           i, known, gannet_version());
  std::memcpy(to, from, known);
}

bool flag_of(const char* function, const char* name, int32_t value) {
  if (value != 0 && value != 1) fail_argument(function, "{} is {}; accepted: 0 or 1", name, value);
  return value == 1;
}

Device device_of(const char* function, const char* name, gannet_device d) {
  if (d.kind != GANNET_CPU && d.kind != GANNET_CUDA)
    fail_argument(function, "{}.device.kind is {}; accepted: 0 (cpu) or 1 (cuda)", name, d.kind);
  if (d.index < 0) fail_argument(function, "{}.device.index is {}; accepted: 0 and more", name, d.index);
  return {static_cast<DeviceKind>(d.kind), d.index};
}

TensorView tensor_of(const char* function, const char* name, const gannet_tensor& t) {
  TensorView v;
  if (t.rank == 0) return v;
  if (t.rank < 0 || t.rank > TensorView::kMaxRank)
    fail_argument(function, "{}.rank is {}; accepted: 0 (absent) to {}", name, t.rank, TensorView::kMaxRank);
  if (t.dtype < GANNET_F32 || t.dtype > GANNET_I64)
    fail_argument(function, "{}.dtype is {}; accepted: {} to {}", name, t.dtype, +GANNET_F32, +GANNET_I64);
  v.data = t.data;
  v.dtype = static_cast<DType>(t.dtype);
  v.rank = t.rank;
  std::copy_n(t.shape, t.rank, v.shape.begin());
  std::copy_n(t.stride, t.rank, v.stride.begin());
  v.device = device_of(function, name, t.device);
  return v;
}

gannet_tensor to_c(const TensorView& v) {
  gannet_tensor t{};
  t.data = v.data;
  t.dtype = static_cast<gannet_dtype>(v.dtype);
  t.rank = v.rank;
  std::copy(v.shape.begin(), v.shape.end(), t.shape);
  std::copy(v.stride.begin(), v.stride.end(), t.stride);
  t.device = {static_cast<gannet_device_kind>(v.device.kind), v.device.index};
  return t;
}

gannet_latent_cache to_c(const LatentCacheView& v) {
  gannet_latent_cache c{};
  c.struct_size = sizeof c;
  c.data = v.data;
  c.format = static_cast<gannet_latent_format>(v.format);
  c.latent_dim = v.geometry.latent_dim;
  c.rope_dim = v.geometry.rope_dim;
  c.page_size = v.page_size;
  c.num_pages = v.num_pages;
  c.page_stride_bytes = v.page_stride_bytes;
  c.scale = v.scale;
  c.device = {static_cast<gannet_device_kind>(v.device.kind), v.device.index};
  c.row_stride_bytes = v.row_stride_bytes;
  return c;
}

gannet_index_cache to_c(const IndexCacheView& v) {
  gannet_index_cache c{};
  c.struct_size = sizeof c;
  c.data = v.data;
  c.format = static_cast<gannet_index_k_format>(v.format);
  c.scale_format = static_cast<gannet_scale_format>(v.scale_format);
  c.head_dim = v.head_dim;
  c.page_size = v.page_size;
  c.num_pages = v.num_pages;
  c.page_stride_bytes = v.page_stride_bytes;
  c.device = {static_cast<gannet_device_kind>(v.device.kind), v.device.index};
  c.hadamard = v.hadamard ? 1 : 0;
  return c;
}

LatentCacheView latent_cache_of(const char* function, const char* name, const gannet_latent_cache* cache) {
  const gannet_latent_cache c = read(function, name, cache);
  LatentCacheView v;
  v.data = c.data;
  v.format = enum_of(function, "cache.format", c.format, LatentFormat::kE4m3PerToken);
  v.geometry = {c.latent_dim, c.rope_dim};
  v.num_pages = c.num_pages;
  v.page_size = c.page_size;
  v.page_stride_bytes = c.page_stride_bytes;
  v.scale = c.scale;
  v.device = device_of(function, name, c.device);
  v.row_stride_bytes = c.row_stride_bytes;
  return v;
}

IndexCacheView index_cache_of(const char* function, const char* name, const gannet_index_cache* cache) {
  const gannet_index_cache c = read(function, name, cache);
  IndexCacheView v;
  v.data = c.data;
  v.format = enum_of(function, "cache.format", c.format, IndexKFormat::kE4m3);
  v.scale_format = enum_of(function, "cache.scale_format", c.scale_format, ScaleFormat::kPowerOfTwo);
  v.head_dim = c.head_dim;
  v.num_pages = c.num_pages;
  v.page_size = c.page_size;
  v.page_stride_bytes = c.page_stride_bytes;
  v.device = device_of(function, name, c.device);
  v.hadamard = flag_of(function, "cache.hadamard", c.hadamard);
  return v;
}

std::vector<LayerCaches> layers_of(const char* function, const gannet_layer* layers, int32_t num_layers) {
  std::vector<LayerCaches> caches;
  for (const gannet_layer& l : span_of(function, "layers", layers, num_layers)) {
    LayerCaches c;
    c.latent = latent_cache_of(function, "layers.latent", l.latent);
    if (l.index != nullptr) c.index = index_cache_of(function, "layers.index", l.index);
    caches.push_back(c);
  }
  return caches;
}

PageTableView pages_of(const char* function, const gannet_page_table* pages) {
  const gannet_page_table p = read(function, "pages", pages);
  PageTableView v;
  v.form = enum_of(function, "pages.form", p.form, PageTableForm::kCsr);
  v.pages = tensor_of(function, "pages", p.pages);
  v.row_indices = tensor_of(function, "row_indices", p.row_indices);
  v.indptr = tensor_of(function, "indptr", p.indptr);
  v.indices = tensor_of(function, "indices", p.indices);
  return v;
}

PlanOptions plan_options_of(const char* function, const gannet_plan_options* options) {
  PlanOptions o;
  if (options == nullptr) return o;
  const gannet_plan_options c = read(function, "options", options);
  if (c.impl != nullptr) o.impl = c.impl;
  o.batch_invariant = flag_of(function, "options.batch_invariant", c.batch_invariant);
  return o;
}

}  // namespace capi
}  // namespace v0
}  // namespace gannet
