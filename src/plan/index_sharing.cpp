#include "gannet/index_sharing.h"

#include <algorithm>
#include <limits>
#include <string_view>

#include "core/format.h"

namespace gannet {
inline namespace v0 {
namespace {

constexpr const char* kName = "selection_sources";

/// A word from a file as it may stand in an error: escaped, and not long.
std::string shown(std::string_view word) {
  constexpr size_t kMost = 80;
  return fmt::format("{:?}{}", word.substr(0, kMost), word.size() > kMost ? "..." : "");
}

bool is_shared(const char* field, size_t i, const std::string& word) {
  if (word == "S" || word == "shared") return true;
  if (word == "F" || word == "full") return false;
  fail_argument(kName, "{}[{}] is {}; accepted: \"F\", \"S\", \"full\" or \"shared\"", field, i, shown(word));
}

}  // namespace

std::vector<int32_t> selection_sources(const IndexSharing& s) {
  constexpr int64_t kMostLayers = std::numeric_limits<int32_t>::max();
  const int64_t n = s.num_hidden_layers;
  if (n < 0 || n > kMostLayers) fail_argument(kName, "num_hidden_layers is {}; accepted: 0 to {}", n, kMostLayers);
  std::vector<int32_t> sources;
  const auto add = [&](int64_t layer, bool shared) {
    sources.push_back(shared ? sources.back() : static_cast<int32_t>(layer));
  };

  const struct {
    const char* field;
    const std::optional<std::vector<std::string>>& words;
  } lists[] = {{"indexer_types", s.indexer_types}, {"index_topk_pattern", s.index_topk_pattern}};
  for (const auto& [field, words] : lists) {
    if (!words) continue;
    if (static_cast<int64_t>(words->size()) < n)
      fail_argument(kName, "{} has {} entries; accepted: one for each of num_hidden_layers = {} layers", field,
                    words->size(), n);
    for (size_t i = 0; i < words->size(); ++i) {
      const bool shared = is_shared(field, i, (*words)[i]);
      if (static_cast<int64_t>(i) >= n) continue;  // of an MTP layer: checked, not used
      if (i == 0 && shared)
        fail_argument(kName, "{}[0] is {}; accepted: \"full\", since layer 0 has nothing to share", field,
                      shown((*words)[0]));
      add(static_cast<int64_t>(i), shared);
    }
    return sources;
  }

  const int64_t freq = s.index_topk_freq.value_or(1);
  constexpr int64_t kAbsentOffset = 2;  // max(l - 1, 0) % freq
  const int64_t offset = s.index_skip_topk_offset.value_or(kAbsentOffset);
  if (freq > 1 && offset <= 0)
    fail_argument(kName,
                  "index_skip_topk_offset is {}; accepted: at least 1 with index_topk_freq = {}, since layer 0 has "
                  "nothing to share",
                  offset, freq);
  for (int64_t l = 0; l < n; ++l) add(l, freq > 1 && std::max<int64_t>(l - (offset - 1), 0) % freq != 0);
  return sources;
}

}  // namespace v0
}  // namespace gannet
