// Element types and the two narrow floats that caches use.
//
//   bf16   upper half of an fp32; conversion rounds to nearest even, NaN stays NaN.
//   e4m3   1 sign, 4 exponent (bias 7), 3 mantissa bits; no infinities; max 448, min normal 2^-6, min subnormal 2^-9;
//          NaN is 0x7F and 0xFF. Conversion rounds to nearest even and saturates finite overflow and infinities to
//          +-448; NaN is written as 0x7F (contract: spec 0.1.7, A.5).
//
// Thread safety: pure functions and values.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "gannet/export.h"

namespace gannet {
inline namespace v0 {

enum class DType : uint8_t {
  kF32,
  kBf16,
  kF16,  ///< named so that it can be refused by name
  kE4m3,
  kU8,
  kI32,
  kI64,
};

/// Bytes of one element.
constexpr size_t size_of(DType t) noexcept {
  switch (t) {
    case DType::kF32:
    case DType::kI32: return 4;
    case DType::kI64: return 8;
    case DType::kBf16:
    case DType::kF16: return 2;
    case DType::kE4m3:
    case DType::kU8: return 1;
  }
  return 0;
}

/// "fp32", "bf16", "e4m3", "int32", ...
GANNET_API const char* to_string(DType t) noexcept;

/// A bf16 value; `bits` is the upper half of the fp32 of the same value.
struct Bf16 {
  uint16_t bits;
  static Bf16 from_float(float x) noexcept {
    const uint32_t u = std::bit_cast<uint32_t>(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((u >> 16) | 0x40u)};  // NaN stays a quiet NaN
    return {static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
  }
  float to_float() const noexcept { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};
static_assert(sizeof(Bf16) == 2);

/// An e4m3 value (OCP "e4m3fn").
struct E4m3 {
  uint8_t bits;
  GANNET_API static E4m3 from_float(float x) noexcept;
  GANNET_API float to_float() const noexcept;
};
static_assert(sizeof(E4m3) == 1);

}  // namespace v0
}  // namespace gannet
