// 64-bit arithmetic that throws instead of wrapping, for sizes that come from outside.
#pragma once

#include <cstdint>

#include "core/format.h"

namespace gannet {
inline namespace v0 {

inline int64_t checked_mul(const char* function, const char* what, int64_t a, int64_t b) {
  int64_t r = 0;
  if (__builtin_mul_overflow(a, b, &r)) fail_argument(function, "{} is {} * {}, more than 2^63 - 1", what, a, b);
  return r;
}

inline int64_t checked_add(const char* function, const char* what, int64_t a, int64_t b) {
  int64_t r = 0;
  if (__builtin_add_overflow(a, b, &r)) fail_argument(function, "{} is {} + {}, more than 2^63 - 1", what, a, b);
  return r;
}

/// `a` rounded up to a multiple of `unit`; both must not be negative, unit not 0.
inline int64_t checked_round_up(const char* function, const char* what, int64_t a, int64_t unit) {
  const int64_t rest = a % unit;
  return rest == 0 ? a : checked_add(function, what, a, unit - rest);
}

}  // namespace v0
}  // namespace gannet
