// The shape of a block of attend.cuh, for the host too.
#pragma once

#include <algorithm>
#include <cstdint>

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace generic {

constexpr int kLanes = 8;
constexpr int kTileKeys = 16;
constexpr int kFoldTiles = 64;
constexpr int kMaxValueDim = 512;  // of a block; wider values take several, each with the scores of its own

inline int64_t attend_shared_bytes(int64_t key_dim, int64_t value_dim, bool value_is_key) {
  const int64_t values = value_is_key ? 0 : kTileKeys * std::min<int64_t>(value_dim, kMaxValueDim);
  return 4 * (kLanes * key_dim + kTileKeys * (key_dim + 1) + values);
}

}  // namespace generic
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
