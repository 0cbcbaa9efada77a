// Memory of the caches: one allocation a pool, layer after layer.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/checked.h"
#include "cuda/runtime.h"
#include "gannet/kv_pool.h"
#include "gannet/op_plan.h"

namespace gannet {
inline namespace v0 {
namespace {

constexpr int64_t kLayerAlignment = 4096;  // a base page: layers can be locked, advised and shipped by themselves

// Fills in everything but token_bytes.
PoolSizes pool_sizes(const char* function, int64_t token_bytes, int64_t num_layers, int64_t num_pages,
                     int32_t page_size, int64_t page_stride_bytes) {
  if (page_size < 1) fail_argument(function, "page_size is {}; accepted: 1 and more", page_size);
  if (num_pages < 1) fail_argument(function, "num_pages is {}; accepted: 1 and more (page 0 is reserved)", num_pages);
  if (num_pages > std::numeric_limits<int32_t>::max() / page_size)
    fail_argument(function, "num_pages is {} of {} tokens; accepted: at most 2^31 - 1 tokens", num_pages, page_size);
  PoolSizes s;
  s.token_bytes = token_bytes;
  s.page_bytes = checked_mul(function, "the size of a page", page_size, token_bytes);
  s.page_stride_bytes = page_stride_bytes != 0
                            ? page_stride_bytes
                            : checked_round_up(function, "page_stride_bytes", s.page_bytes, kBaseAlignment);
  if (s.page_stride_bytes < s.page_bytes || s.page_stride_bytes % static_cast<int64_t>(kBaseAlignment) != 0)
    fail_argument(function, "page_stride_bytes is {}; accepted: 0, or a multiple of {} from {}", s.page_stride_bytes,
                  kBaseAlignment, s.page_bytes);
  s.layer_stride_bytes =
      checked_round_up(function, "the size of a layer",
                       checked_mul(function, "the size of a layer", num_pages, s.page_stride_bytes), kLayerAlignment);
  s.total_bytes = checked_mul(function, "the size of the pool", num_layers, s.layer_stride_bytes);
  return s;
}

void check_dim(const char* function, const char* name, int32_t value, int32_t least) {
  // 2^20 is far beyond any model and keeps the bytes of a token within 32 bits.
  constexpr int32_t kMost = 1 << 20;
  if (value < least || value > kMost)
    fail_argument(function, "{} is {}; accepted: {} to {}", name, value, least, kMost);
}

void clear_first_page(const char* function, const Buffer& memory, Device device, int64_t num_layers,
                      const PoolSizes& s) {
  for (int64_t i = 0; i < num_layers; ++i) {
    std::byte* page = memory.data() + i * s.layer_stride_bytes;
    const auto bytes = static_cast<size_t>(s.page_stride_bytes);
    if (device.kind == DeviceKind::kCpu) std::memset(page, 0, bytes);
    else cuda::clear(function, device.index, page, bytes, {});
  }
  // Whatever stream comes next finds the page cleared.
  if (device.kind != DeviceKind::kCpu && num_layers > 0) cuda::wait(function, device.index, {});
}

}  // namespace

int64_t pages_for(int64_t tokens, int32_t page_size) {
  if (tokens < 0) fail_argument("pages_for", "tokens is {}; accepted: 0 and more", tokens);
  if (page_size < 1) fail_argument("pages_for", "page_size is {}; accepted: 1 and more", page_size);
  return tokens / page_size + (tokens % page_size != 0 ? 1 : 0);
}

PoolSizes latent_pool_sizes(const LatentPoolOptions& o) {
  constexpr const char* kName = "LatentPool";
  if (o.num_layers < 0) fail_argument(kName, "num_layers is {}; accepted: 0 and more", o.num_layers);
  check_dim(kName, "latent_dim", o.geometry.latent_dim, 1);
  check_dim(kName, "rope_dim", o.geometry.rope_dim, 0);
  if (o.format == LatentFormat::kE4m3) {
    if (!std::isfinite(o.scale) || o.scale <= 0.0f)
      fail_argument(kName, "scale is {}; accepted for {} rows: finite and positive (1 where a checkpoint has none)",
                    o.scale, to_string(o.format));
  } else if (o.scale != 0.0f) {
    fail_argument(kName, "scale is {}; accepted for {} rows: 0 (they have none)", o.scale, to_string(o.format));
  }
  const int64_t token_bytes = latent_row_bytes(o.format, o.geometry);
  if (token_bytes <= 0) fail_argument(kName, "format is {}; accepted: a LatentFormat", static_cast<int>(o.format));
  return pool_sizes(kName, token_bytes, o.num_layers, o.num_pages, o.page_size, o.page_stride_bytes);
}

PoolSizes index_k_pool_sizes(const IndexKPoolOptions& o) {
  constexpr const char* kName = "IndexKPool";
  check_dim(kName, "head_dim", o.head_dim, 1);
  for (size_t i = 0; i < o.layers.size(); ++i)
    if (o.layers[i] < 0 || (i > 0 && o.layers[i] <= o.layers[i - 1]))
      fail_argument(kName, "layers[{}] is {}; accepted: ascending layer numbers from 0", i, o.layers[i]);
  if (o.hadamard && (o.head_dim & (o.head_dim - 1)) != 0)
    fail_argument(kName, "head_dim is {}; accepted: a power of two (hadamard is true)", o.head_dim);
  const int64_t token_bytes = index_k_token_bytes(o.format, o.head_dim);
  if (token_bytes <= 0) fail_argument(kName, "format is {}; accepted: an IndexKFormat", static_cast<int>(o.format));
  return pool_sizes(kName, token_bytes, static_cast<int64_t>(o.layers.size()), o.num_pages, o.page_size,
                    o.page_stride_bytes);
}

LatentPool::LatentPool(const LatentPoolOptions& options, MemoryResource& resource)
    : options_(options),
      sizes_(latent_pool_sizes(options)),
      device_(resource.device()),
      memory_(static_cast<size_t>(sizes_.total_bytes), resource) {
  clear_first_page("LatentPool", memory_, device_, options_.num_layers, sizes_);
}

LatentCacheView LatentPool::layer(int32_t layer) const {
  if (layer < 0 || layer >= options_.num_layers)
    fail_argument("LatentPool::layer", "layer is {}; accepted: 0 to {}", layer, options_.num_layers - 1);
  LatentCacheView v;
  v.data = memory_.data() + layer * sizes_.layer_stride_bytes;
  v.format = options_.format;
  v.geometry = options_.geometry;
  v.num_pages = options_.num_pages;
  v.page_size = options_.page_size;
  v.page_stride_bytes = sizes_.page_stride_bytes;
  v.scale = options_.scale;
  v.device = device_;
  return v;
}

IndexKPool::IndexKPool(const IndexKPoolOptions& options, MemoryResource& resource)
    : options_(options),
      sizes_(index_k_pool_sizes(options)),
      device_(resource.device()),
      memory_(static_cast<size_t>(sizes_.total_bytes), resource) {
  clear_first_page("IndexKPool", memory_, device_, static_cast<int64_t>(options_.layers.size()), sizes_);
}

int64_t IndexKPool::place_of(int32_t layer) const noexcept {
  const auto it = std::lower_bound(options_.layers.begin(), options_.layers.end(), layer);
  return it != options_.layers.end() && *it == layer ? it - options_.layers.begin() : -1;
}

bool IndexKPool::has_layer(int32_t layer) const noexcept { return place_of(layer) >= 0; }

IndexCacheView IndexKPool::layer(int32_t layer) const {
  const int64_t place = place_of(layer);
  if (place < 0) {
    std::string layers;
    for (const int32_t l : options_.layers) layers += fmt::format("{}{}", layers.empty() ? "" : ", ", l);
    fail_argument("IndexKPool::layer", "layer is {}; accepted: layers with an indexer ({})", layer, layers);
  }
  IndexCacheView v;
  v.data = memory_.data() + place * sizes_.layer_stride_bytes;
  v.format = options_.format;
  v.scale_format = options_.scale_format;
  v.hadamard = options_.hadamard;
  v.head_dim = options_.head_dim;
  v.num_pages = options_.num_pages;
  v.page_size = options_.page_size;
  v.page_stride_bytes = sizes_.page_stride_bytes;
  v.device = device_;
  return v;
}

std::vector<LayerCaches> layer_caches(const LatentPool& latent, const IndexKPool* index) {
  std::vector<LayerCaches> layers;
  const int32_t num_layers = latent.options().num_layers;
  for (int32_t l = 0; l < num_layers; ++l) {
    layers.push_back({.latent = latent.layer(l), .index = {}});
    if (index != nullptr && index->has_layer(l)) layers.back().index = index->layer(l);
  }
  if (index != nullptr && !index->options().layers.empty() && index->options().layers.back() >= num_layers)
    fail_argument("layer_caches", "index has layer {}; accepted: 0 to {}, the layers of latent",
                  index->options().layers.back(), num_layers - 1);
  return layers;
}

}  // namespace v0
}  // namespace gannet
