// Views of memory that somebody else owns.
//
//   std::vector<float> q(rows * 128 * 576);
//   gannet::TensorView v = gannet::view(q.data(), {rows, 128, 576});
//
// Strides count elements. An input is a view too; no operation writes to an argument that its contract calls an input.
// Thread safety: an ordinary value.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "gannet/device.h"
#include "gannet/dtype.h"

namespace gannet {
inline namespace v0 {

struct TensorView {
  static constexpr int kMaxRank = 4;

  void* data = nullptr;
  DType dtype = DType::kF32;
  int rank = 0;  ///< 0: the optional argument is not given
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> stride{};  ///< in elements
  Device device{};

  bool given() const noexcept { return rank > 0; }
  explicit operator bool() const noexcept { return given(); }
  int64_t num_elements() const noexcept {
    int64_t n = rank > 0 ? 1 : 0;
    for (int i = 0; i < rank; ++i) n *= shape[static_cast<size_t>(i)];
    return n;
  }
  /// Address of the element at the given leading indices; 64-bit arithmetic throughout.
  template <class T>
  T* ptr(int64_t i0 = 0, int64_t i1 = 0, int64_t i2 = 0) const noexcept {
    return static_cast<T*>(data) + i0 * stride[0] + i1 * stride[1] + i2 * stride[2];
  }
};

/// "bf16[3, 128, 576] strides [73728, 576, 1] on cpu", for error texts.
GANNET_API std::string describe(const TensorView& v);

template <class T>
constexpr DType dtype_of() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, float>) return DType::kF32;
  else if constexpr (std::is_same_v<U, Bf16>) return DType::kBf16;
  else if constexpr (std::is_same_v<U, E4m3>) return DType::kE4m3;
  else if constexpr (std::is_same_v<U, uint8_t>) return DType::kU8;
  else if constexpr (std::is_same_v<U, int32_t>) return DType::kI32;
  else {
    static_assert(std::is_same_v<U, int64_t>, "no DType for this C++ type");
    return DType::kI64;
  }
}

/// A packed row-major view of `shape`.
inline TensorView view(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = {}) {
  TensorView v;
  v.data = data;
  v.dtype = dtype;
  v.device = device;
  v.rank = static_cast<int>(shape.size());
  size_t i = 0;
  for (const int64_t n : shape) v.shape[i++] = n;
  int64_t s = 1;
  for (int d = v.rank - 1; d >= 0; --d) {
    v.stride[static_cast<size_t>(d)] = s;
    s *= v.shape[static_cast<size_t>(d)];
  }
  return v;
}

template <class T>
TensorView view(T* data, std::initializer_list<int64_t> shape, Device device = {}) {
  return view(const_cast<std::remove_const_t<T>*>(data), dtype_of<T>(), shape, device);
}

}  // namespace v0
}  // namespace gannet
