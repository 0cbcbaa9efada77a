// Which layers of a sparse model choose keys by themselves, and whose choice the others reuse: the fields that configs
// have for it, as arithmetic.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gannet/export.h"

namespace gannet {
inline namespace v0 {

/// The fields under the names that config.json has for them; an absent or null one is nullopt. Of several that are
/// given the first one counts: indexer_types, index_topk_pattern, index_topk_freq.
struct IndexSharing {
  int64_t num_hidden_layers = 0;
  /// A word a layer: "F" or "full", "S" or "shared". At least num_hidden_layers of them; more are for MTP layers.
  std::optional<std::vector<std::string>> indexer_types = {};
  /// The same. Configs that write it as one word, "FFSS", give its letters.
  std::optional<std::vector<std::string>> index_topk_pattern = {};
  /// 1 and less, and absent: every layer is full. Else layer l is shared unless freq divides max(l - offset + 1, 0);
  /// an absent offset counts as 2.
  std::optional<int64_t> index_topk_freq = {};
  /// Only looked at where index_topk_freq is above 1.
  std::optional<int64_t> index_skip_topk_offset = {};
};

/// [num_hidden_layers]: the layer whose selection layer l attends over, itself for a full layer, else the nearest full
/// one before it. MTP layers are not in it: they always have an indexer of their own.
///
/// Throws Error(kInvalidArgument) for a negative number of layers, a word that is none of the four, a list that does
/// not cover the layers, and whatever would leave layer 0 with nothing to share: a list that calls it shared, an offset
/// of 0 and less with a frequency above 1.
GANNET_API std::vector<int32_t> selection_sources(const IndexSharing& sharing);

}  // namespace v0
}  // namespace gannet
