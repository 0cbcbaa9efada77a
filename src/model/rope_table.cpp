#include "model/rope_table.h"

#include <cmath>

namespace gannet {
inline namespace v0 {

RopeTable::RopeTable(const RopeConfig& rope, int64_t rope_dim)
    : rope_dim_(rope_dim),
      frequencies_(rope_inverse_frequencies(rope, rope_dim)),
      magnitude_(static_cast<float>(rope_magnitude(rope))) {}

void RopeTable::reserve(int64_t positions) {
  if (positions <= positions_) return;
  const int64_t pairs = rope_dim_ / 2;
  values_.resize(static_cast<size_t>(positions * rope_dim_));
  for (int64_t p = positions_; p < positions; ++p) {
    float* row = values_.data() + p * rope_dim_;
    for (int64_t i = 0; i < pairs; ++i) {
      const float angle = static_cast<float>(p) * frequencies_[static_cast<size_t>(i)];
      // The fp32 angle's own cosine, correctly rounded: libraries' fp32 cosines differ in the last bit.
      row[i] = static_cast<float>(std::cos(static_cast<double>(angle))) * magnitude_;
      row[pairs + i] = static_cast<float>(std::sin(static_cast<double>(angle))) * magnitude_;
    }
  }
  positions_ = positions;
}

}  // namespace v0
}  // namespace gannet
