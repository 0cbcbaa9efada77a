// Pages that move: within a pool, out of it into one buffer, and back. Latent rows and index keys of a token always go
// together: a token without its index keys is not a cached token.
//
//   // A prefill node, layer by layer (LayerHooks::record) or all at once:
//   std::vector<std::byte> buffer(exported_bytes(layers, pages.size()));
//   export_pages(layers, pages.ids(), buffer);
//   // A decode node, after comparing page_layout of both sides:
//   import_pages(layers, mine.ids(), buffer);
//
// The buffer (docs/kv_layouts.md, "Exported pages"): layer after layer, in a layer first the latent pages and then the
// index pages, pages in the order given, without gaps. So the part of layer l begins at exported_bytes of the layers
// before it, and one layer exported by itself is the same bytes.
//
// Errors: kInvalidArgument for caches outside their contract, pages or slots outside a pool, a buffer of another size.
// All checks come first: where they throw, nothing has been copied. Caches may lie on CUDA devices (the buffer is host
// memory, pinned for speed): copies are made in the order of `stream`, one for each page of a cache, and when a
// function returns they are done. Thread safety: reads and writes the bytes that it is about, and no others.
#pragma once

#include <span>

#include "gannet/kv_cache.h"
#include "gannet/layer_caches.h"

namespace gannet {
inline namespace v0 {

// ---- movement -----------------------------------------------------------------------------------------------------

struct PageMove {
  int32_t from = 0;
  int32_t to = 0;
};

struct SlotMove {
  int32_t from = 0;
  int32_t to = 0;
};

/// Copies pages in every layer, one after the other in the order given: a later move reads what an earlier one has
/// written.
GANNET_API void copy_pages(std::span<const LayerCaches> layers, std::span<const PageMove> moves, Stream stream = {});

/// The same for single tokens, each plane of planar pages by itself (values and scale of an e4m3 index key).
GANNET_API void copy_slots(std::span<const LayerCaches> layers, std::span<const SlotMove> moves, Stream stream = {});

// ---- export and import --------------------------------------------------------------------------------------------

/// What two pools must have in common for the pages of a layer to travel as bytes: compare with ==. Strides and the
/// number of pages may differ.
struct PageLayout {
  int32_t page_size = 0;
  LatentFormat latent_format{};
  RowGeometry geometry{};
  float latent_scale = 0.0f;      ///< 0 but for kE4m3
  int64_t latent_page_bytes = 0;  ///< page_size * latent_row_bytes
  bool has_index = false;
  IndexKFormat index_format{};
  ScaleFormat index_scale_format{};
  int32_t index_head_dim = 0;
  bool index_hadamard = false;   ///< rotated keys are no use to a pool of others
  int64_t index_page_bytes = 0;  ///< page_size * index_k_token_bytes; 0 without an index cache

  int64_t page_bytes() const noexcept { return latent_page_bytes + index_page_bytes; }
  friend bool operator==(const PageLayout&, const PageLayout&) = default;
};

GANNET_API PageLayout page_layout(const LayerCaches& layer);

/// num_pages * the sum over the layers of page_layout(layer).page_bytes(). Throws beyond 2^63 - 1.
GANNET_API int64_t exported_bytes(std::span<const LayerCaches> layers, int64_t num_pages);

/// Copies pages of the layers into the buffer, which has exactly exported_bytes.
GANNET_API void export_pages(std::span<const LayerCaches> layers, std::span<const int32_t> pages,
                             std::span<std::byte> buffer, Stream stream = {});

/// Copies the buffer into pages of the layers: byte i of the page that export_pages was given as pages[j] becomes byte
/// i of this pages[j].
GANNET_API void import_pages(std::span<const LayerCaches> layers, std::span<const int32_t> pages,
                             std::span<const std::byte> buffer, Stream stream = {});

}  // namespace v0
}  // namespace gannet
