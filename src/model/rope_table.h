// The table of cosines and sines for rotary position embedding.
#pragma once

#include <cstdint>
#include <vector>

#include "model/config.h"

namespace gannet {
inline namespace v0 {

/// fp32 [positions, P]: P/2 cosines, then P/2 sines, of the angle position * inverse frequency with the product in
/// fp32, as the reference library has it (at position 131,071 that differs from exact angles by 3.6e-3).
///
/// Grows on demand: a table for a million positions would take 256 MB that a short prompt never reads.
/// Thread safety: one writer, or any number of readers.
class RopeTable {
 public:
  RopeTable(const RopeConfig& rope, int64_t rope_dim);
  /// Makes rows [0, positions) available; earlier pointers become invalid.
  void reserve(int64_t positions);
  int64_t positions() const noexcept { return positions_; }
  int64_t rope_dim() const noexcept { return rope_dim_; }
  const float* data() const noexcept { return values_.data(); }

 private:
  int64_t rope_dim_;
  std::vector<float> frequencies_;
  float magnitude_;
  int64_t positions_ = 0;
  std::vector<float> values_;
};

}  // namespace v0
}  // namespace gannet
