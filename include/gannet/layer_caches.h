// The caches of a layer together: what backends bind, and what travels.
#pragma once

#include <optional>

#include "gannet/kv_cache.h"

namespace gannet {
inline namespace v0 {

/// The caches of one layer. All layers of a backend share format, geometry, pages and strides.
struct LayerCaches {
  LatentCacheView latent;
  std::optional<IndexCacheView> index = {};  ///< layers with an indexer
};

}  // namespace v0
}  // namespace gannet
