// Movement of pages and tokens. Single-threaded: the copies are bound by memory and by the link they feed, and layers
// are independent, so that an engine spreads them over its own threads by calling once a layer.
#include "gannet/kv_transfer.h"

#include <cstring>
#include <string>
#include <vector>

#include "core/checked.h"
#include "core/views.h"
#include "cuda/runtime.h"

namespace gannet {
inline namespace v0 {
namespace {

/// The pages of one cache of a layer, as bytes.
struct Pages {
  std::byte* data;
  int64_t stride;
  int64_t bytes;  // of a page, without what the stride leaves between pages

  std::byte* page(int64_t id) const noexcept { return data + id * stride; }
};

/// A token's bytes lie in up to three planes of a page.
struct Planes {
  static constexpr int kMost = 3;
  int64_t begin[kMost] = {};  // in the page
  int64_t bytes[kMost] = {};  // of a token
  int count = 0;

  void add(int64_t token_bytes, int32_t page_size) noexcept {
    begin[count] = count == 0 ? 0 : begin[count - 1] + page_size * bytes[count - 1];
    bytes[count++] = token_bytes;
  }
};

Planes planes_of(const LatentCacheView& c) noexcept {
  Planes p;
  if (c.format == LatentFormat::kE4m3PerToken) {
    p.add(c.geometry.latent_dim, c.page_size);
    p.add(sizeof(float), c.page_size);
    p.add(int64_t{c.geometry.rope_dim} * static_cast<int64_t>(sizeof(Bf16)), c.page_size);
  } else {
    p.add(latent_row_bytes(c.format, c.geometry), c.page_size);
  }
  return p;
}

Planes planes_of(const IndexCacheView& c) noexcept {
  Planes p;
  if (c.format == IndexKFormat::kE4m3) {
    p.add(c.head_dim, c.page_size);
    p.add(sizeof(float), c.page_size);
  } else {
    p.add(index_k_token_bytes(c.format, c.head_dim), c.page_size);
  }
  return p;
}

Pages pages_of(const LatentCacheView& c) noexcept {
  return {static_cast<std::byte*>(c.data), c.page_stride_bytes, c.page_size * latent_row_bytes(c.format, c.geometry)};
}

Pages pages_of(const IndexCacheView& c) noexcept {
  return {static_cast<std::byte*>(c.data), c.page_stride_bytes,
          c.page_size * index_k_token_bytes(c.format, c.head_dim)};
}

template <class Cache>
void check_one(const char* function, const char* what, size_t layer, const Cache& c) {
  if (c.device.kind == DeviceKind::kCuda) cuda::require_device(function, c.device.index);
  check_cache(function, c, c.device);
  if (c.data == nullptr && c.num_pages > 0)
    fail_argument(function, "the {} cache of layer {} has no data", what, layer);
}

void check_layer(const char* function, size_t l, const LayerCaches& layer) {
  check_one(function, "latent", l, layer.latent);
  if (layer.latent.row_stride() != latent_row_bytes(layer.latent.format, layer.latent.geometry))
    fail_argument(function,
                  "the latent cache of layer {} has a row_stride_bytes of {}; accepted: 0, pages in one piece", l,
                  layer.latent.row_stride_bytes);
  if (!layer.index) return;
  check_one(function, "index", l, *layer.index);
  if (layer.index->page_size != layer.latent.page_size || layer.index->num_pages != layer.latent.num_pages)
    fail_argument(function, "the index cache of layer {} has {} pages of {} tokens; its latent cache has {} of {}", l,
                  layer.index->num_pages, layer.index->page_size, layer.latent.num_pages, layer.latent.page_size);
}

/// Throws unless every layer is sound and holds the ids that each(f) names by f(name, i, id).
template <class Each>
void check_all(const char* function, std::span<const LayerCaches> layers, bool slots, Each&& each) {
  for (size_t l = 0; l < layers.size(); ++l) {
    check_layer(function, l, layers[l]);
    const int64_t limit = slots ? layers[l].latent.num_slots() : layers[l].latent.num_pages;
    each([&](const char* name, size_t i, int64_t id) {
      if (id < 0 || id >= limit)
        fail_argument(function, "{}[{}] is {}; accepted: 0 to {}, in layer {}", name, i, id, limit - 1, l);
    });
  }
}

/// Copies between memory of the host and of devices, done when finish() returns.
class Copier {
 public:
  Copier(const char* function, Stream stream) : function_(function), stream_(stream) {}

  void operator()(Device device, void* to, const void* from, size_t bytes) {
    if (device.kind == DeviceKind::kCpu) {
      std::memcpy(to, from, bytes);
      return;
    }
    cuda::copy(function_, device.index, to, from, bytes, stream_);
    if (!pending_.empty() && pending_.back() == device.index) return;
    pending_.push_back(device.index);
  }
  void finish() {
    for (const int index : pending_) cuda::wait(function_, index, stream_);
  }

 private:
  const char* function_;
  Stream stream_;
  std::vector<int> pending_;
};

template <class F>
void for_each_cache(const LayerCaches& layer, F&& f) {
  f(layer.latent);
  if (layer.index) f(*layer.index);
}

void check_transfer(const char* function, std::span<const LayerCaches> layers, std::span<const int32_t> pages,
                    size_t buffer_bytes) {
  check_all(function, layers, false, [&](auto&& check) {
    for (size_t i = 0; i < pages.size(); ++i) check("pages", i, pages[i]);
  });
  const int64_t needed = exported_bytes(layers, static_cast<int64_t>(pages.size()));
  if (static_cast<uint64_t>(needed) == buffer_bytes) return;
  int64_t with_index = 0;
  for (const LayerCaches& l : layers) with_index += l.index ? 1 : 0;
  fail_argument(function, "buffer has {} bytes; accepted: {}, {} pages of {} layers, {} of them with index keys",
                buffer_bytes, needed, pages.size(), layers.size(), with_index);
}

/// Calls copy(device, page, place in the buffer, bytes) for every page in the order of the buffer.
template <class Byte, class F>
void for_each_page(std::span<const LayerCaches> layers, std::span<const int32_t> pages, Byte* buffer, F&& copy) {
  for (const LayerCaches& layer : layers)
    for_each_cache(layer, [&](const auto& cache) {
      const Pages p = pages_of(cache);
      for (const int32_t page : pages) {
        copy(cache.device, p.page(page), buffer, static_cast<size_t>(p.bytes));
        buffer += p.bytes;
      }
    });
}

}  // namespace

void copy_pages(std::span<const LayerCaches> layers, std::span<const PageMove> moves, Stream stream) {
  check_all("copy_pages", layers, false, [&](auto&& check) {
    for (size_t i = 0; i < moves.size(); ++i) {
      check("moves.from", i, moves[i].from);
      check("moves.to", i, moves[i].to);
    }
  });
  Copier copy("copy_pages", stream);
  for (const LayerCaches& layer : layers)
    for_each_cache(layer, [&](const auto& cache) {
      const Pages p = pages_of(cache);
      for (const PageMove& m : moves)
        if (m.from != m.to) copy(cache.device, p.page(m.to), p.page(m.from), static_cast<size_t>(p.bytes));
    });
  copy.finish();
}

void copy_slots(std::span<const LayerCaches> layers, std::span<const SlotMove> moves, Stream stream) {
  check_all("copy_slots", layers, true, [&](auto&& check) {
    for (size_t i = 0; i < moves.size(); ++i) {
      check("moves.from", i, moves[i].from);
      check("moves.to", i, moves[i].to);
    }
  });
  Copier copy("copy_slots", stream);
  for (const LayerCaches& layer : layers)
    for_each_cache(layer, [&](const auto& cache) {
      const Pages p = pages_of(cache);
      const Planes planes = planes_of(cache);
      const auto at = [&](int64_t slot, int plane) {
        return p.page(slot / cache.page_size) + planes.begin[plane] + slot % cache.page_size * planes.bytes[plane];
      };
      for (const SlotMove& m : moves) {
        if (m.from == m.to) continue;
        for (int i = 0; i < planes.count; ++i)
          copy(cache.device, at(m.to, i), at(m.from, i), static_cast<size_t>(planes.bytes[i]));
      }
    });
  copy.finish();
}

PageLayout page_layout(const LayerCaches& layer) {
  check_layer("page_layout", 0, layer);
  PageLayout p;
  p.page_size = layer.latent.page_size;
  p.latent_format = layer.latent.format;
  p.geometry = layer.latent.geometry;
  p.latent_scale = layer.latent.format == LatentFormat::kE4m3 ? layer.latent.scale : 0.0f;
  p.latent_page_bytes = pages_of(layer.latent).bytes;
  if (!layer.index) return p;
  p.has_index = true;
  p.index_format = layer.index->format;
  p.index_hadamard = layer.index->hadamard;
  // The scale format of other rows is never looked at.
  p.index_scale_format = p.index_format == IndexKFormat::kE4m3 ? layer.index->scale_format : ScaleFormat{};
  p.index_head_dim = layer.index->head_dim;
  p.index_page_bytes = pages_of(*layer.index).bytes;
  return p;
}

int64_t exported_bytes(std::span<const LayerCaches> layers, int64_t num_pages) {
  constexpr const char* kName = "exported_bytes";
  if (num_pages < 0) fail_argument(kName, "num_pages is {}; accepted: 0 and more", num_pages);
  int64_t page = 0;
  for (const LayerCaches& l : layers)
    page = checked_add(kName, "the size of a page of all layers", page, page_layout(l).page_bytes());
  return checked_mul(kName, "the size of the pages", num_pages, page);
}

void export_pages(std::span<const LayerCaches> layers, std::span<const int32_t> pages, std::span<std::byte> buffer,
                  Stream stream) {
  check_transfer("export_pages", layers, pages, buffer.size());
  Copier copy("export_pages", stream);
  for_each_page(
      layers, pages, buffer.data(),
      [&](Device device, const std::byte* page, std::byte* place, size_t bytes) { copy(device, place, page, bytes); });
  copy.finish();
}

void import_pages(std::span<const LayerCaches> layers, std::span<const int32_t> pages,
                  std::span<const std::byte> buffer, Stream stream) {
  check_transfer("import_pages", layers, pages, buffer.size());
  Copier copy("import_pages", stream);
  for_each_page(
      layers, pages, buffer.data(),
      [&](Device device, std::byte* page, const std::byte* place, size_t bytes) { copy(device, page, place, bytes); });
  copy.finish();
}

}  // namespace v0
}  // namespace gannet
