// Reading safetensors files, memory-mapped.
//
//   u64 little-endian header length | JSON header {name: {dtype, shape, data_offsets [begin, end)}} | data
//
// Offsets count from the end of the header; values are row-major and little-endian. A file is checked in whole when it
// is opened: header length, JSON (no duplicate key), dtype names, shapes, and that the tensors cover the data exactly,
// without overlap, hole or rest, as the format demands. After that every TensorRef is safe to read.
//
// Errors: Error(kCorruptFile) names the file, the tensor or field, and the value; Error(kDevice) where the operating
// system fails.
// Thread safety: immutable once opened; any number of readers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "gannet/dtype.h"

namespace gannet {
inline namespace v0 {

/// A file mapped read-only. Moved, not copied; unmapped at the end of its life.
class MappedFile {
 public:
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  std::span<const std::byte> bytes() const noexcept { return {data_, size_}; }
  /// Asks the system to read ahead the whole file.
  void will_need() const noexcept;

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

/// One tensor of an open file: a view of the mapping, valid as long as the file object.
struct TensorRef {
  std::string name;
  std::string dtype_name;  ///< as the file spells it: "BF16", "F32", "F8_E4M3", "I32", ...
  bool readable = false;   ///< dtype_name has a DType here; else `dtype` means nothing and require() refuses
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;       ///< row-major, packed; [] is a scalar
  const std::byte* data = nullptr;  ///< a multiple of size_of(dtype), whatever the file's own alignment
  int64_t num_bytes = 0;
  std::string file;

  int64_t num_elements() const noexcept;
  /// The values; throws Error(kCorruptFile) unless the tensor's dtype is that of T.
  template <class T>
  std::span<const T> values() const;
  /// The values widened to fp32 into out[num_elements()]; F32, BF16 and F8_E4M3 only (no block scales applied).
  void to_float(float* out) const;
};

/// "BF16[2048, 256]", for error texts.
std::string describe(const TensorRef& t);

class SafetensorsFile {
 public:
  static SafetensorsFile open(const std::string& path);
  /// Reads from memory that outlives the object; `name` stands for the file in errors.
  static SafetensorsFile parse(std::span<const std::byte> bytes, const std::string& name);
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;
  ~SafetensorsFile();

  const std::string& path() const noexcept;
  /// Sorted by name.
  const std::vector<TensorRef>& tensors() const noexcept;
  const std::map<std::string, std::string>& metadata() const noexcept;
  /// nullptr where the file has no such tensor.
  const TensorRef* find(std::string_view name) const noexcept;
  /// Throws Error(kCorruptFile) unless the tensor is there with one of `dtypes` and this shape.
  const TensorRef& require(std::string_view name, std::initializer_list<DType> dtypes,
                           std::initializer_list<int64_t> shape) const;
  int64_t num_bytes() const noexcept;
  void will_need() const noexcept;

 private:
  struct State;
  explicit SafetensorsFile(std::unique_ptr<State> state);
  std::unique_ptr<State> state_;
};

/// Throws Error(kCorruptFile) unless `t` has one of `dtypes` and `shape`. `function` goes into the text.
void check_tensor(const char* function, const TensorRef& t, std::initializer_list<DType> dtypes,
                  std::span<const int64_t> shape);
/// Throws Error(kCorruptFile) naming the tensor, its dtype and `accepted`.
void check_values_dtype(const TensorRef& t, DType accepted);

template <class T>
std::span<const T> TensorRef::values() const {
  check_values_dtype(*this, [] {
    if constexpr (std::is_same_v<T, float>) return DType::kF32;
    else if constexpr (std::is_same_v<T, Bf16>) return DType::kBf16;
    else if constexpr (std::is_same_v<T, E4m3>) return DType::kE4m3;
    else if constexpr (std::is_same_v<T, uint8_t>) return DType::kU8;
    else if constexpr (std::is_same_v<T, int32_t>) return DType::kI32;
    else {
      static_assert(std::is_same_v<T, int64_t>, "no DType for this C++ type");
      return DType::kI64;
    }
  }());
  return {reinterpret_cast<const T*>(data), static_cast<size_t>(num_elements())};
}

}  // namespace v0
}  // namespace gannet
