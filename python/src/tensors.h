// Python objects as views of this library and back. Nothing is copied: what a framework's tensor holds is read and
// written where it lies.
#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <vector>

#include "dlpack.h"
#include "gannet/gannet.h"

namespace gannet_python {
namespace nb = nanobind;

enum class Access : uint8_t { kRead, kWrite };

/// Views of a PyTorch tensor, a NumPy or CuPy array (with the dtypes of ml_dtypes too), or anything that speaks DLPack.
/// They are valid while this and the objects live.
class Reader {
 public:
  explicit Reader(const char* function) : function_(function) {}
  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  /// TypeError for what is no tensor, Error for a dtype or a device that nothing here knows, or memory that is not to
  /// be written to.
  gannet::TensorView tensor(nb::handle object, const char* name, Access access = Access::kRead);
  /// The same; None is absent.
  gannet::TensorView optional(nb::handle object, const char* name, Access access = Access::kRead);
  /// int32 numbers in host memory: a sequence of ints, or a tensor of int32 or int64 on the CPU.
  std::vector<int32_t> ints(nb::handle object, const char* name);

  const char* function() const noexcept { return function_; }
  /// The stream that the framework of the first tensor on a CUDA device is working on; nothing without such a tensor.
  gannet::Stream current_stream() const;
  /// The stream that the caller gave, else that one.
  gannet::Stream stream(nb::handle given) const;
  /// That tensor is PyTorch's.
  bool on_torch_device() const noexcept { return on_device_ && torch_; }
  /// Bytes of PyTorch's allocator beside it: a uint8 tensor.
  nb::object torch_scratch(size_t bytes) const;

 private:
  bool from_exchange(nb::handle object, const char* name, gannet::TensorView& v);
  bool from_torch(nb::handle object, const char* name, gannet::TensorView& v);
  bool from_interface(nb::handle object, const char* name, const char* attribute, gannet::DeviceKind kind,
                      gannet::TensorView& v, bool& writable);
  bool from_capsule(nb::handle object, const char* name, gannet::TensorView& v, bool& writable);
  void keep_dlpack(const dlpack::Tensor& t, const char* name, gannet::TensorView& v) const;
  [[noreturn]] void unknown_dtype(const char* name, const std::string& dtype) const;

  const char* function_;
  gannet::Device device_{};
  bool on_device_ = false;
  bool torch_ = false;
  enum class StreamOf : uint8_t { kNobody, kExchange, kTorch, kCupy } stream_of_ = StreamOf::kNobody;
  const dlpack::ExchangeApi* exchange_ = nullptr;
  std::vector<nb::object> capsules_;
};

/// gannet.Stream: a stream, and whether kernels on it may overlap.
struct PyStream {
  nb::object stream;
  bool overlap;
};

/// A stream that the caller gave: an address, or an object with `cuda_stream` (PyTorch) or `ptr` (CuPy), or one of
/// these in a PyStream; None is the default stream.
gannet::Stream stream_of(nb::handle object);
/// The caller gave no stream, though perhaps a PyStream without one.
bool names_no_stream(nb::handle object);

/// An object that speaks DLPack over memory of this library; `owner` stays alive with it.
nb::object to_python(const gannet::TensorView& v, nb::handle owner);

/// "cpu", "cuda", "cuda:1", or an object whose str is one of them (torch.device).
gannet::Device device_of(const char* function, nb::handle object);

template <class E>
struct Name {
  const char* name;
  E value;
};
template <class E, size_t n>
E named(const char* function, const char* argument, const std::string& given, const Name<E> (&names)[n]) {
  std::string accepted;
  for (const auto& [name, value] : names) {
    if (given == name) return value;
    accepted += (accepted.empty() ? "\"" : ", \"") + std::string(name) + "\"";
  }
  throw gannet::Error(gannet::ErrorCode::kInvalidArgument,
                      std::string("[") + function + "] " + argument + " is \"" + given + "\"; accepted: " + accepted);
}
template <class E, size_t n>
const char* name_of(E value, const Name<E> (&names)[n]) {
  for (const auto& [name, v] : names)
    if (v == value) return name;
  return "?";
}

inline constexpr Name<gannet::LatentFormat> kLatentFormats[] = {
    {"fp32", gannet::LatentFormat::kF32},
    {"bf16", gannet::LatentFormat::kBf16},
    {"e4m3", gannet::LatentFormat::kE4m3},
    {"packed656", gannet::LatentFormat::kPacked656},
    {"e4m3_per_token", gannet::LatentFormat::kE4m3PerToken},
};
inline constexpr Name<gannet::IndexKFormat> kIndexKFormats[] = {
    {"fp32", gannet::IndexKFormat::kF32},
    {"bf16", gannet::IndexKFormat::kBf16},
    {"e4m3", gannet::IndexKFormat::kE4m3},
};
inline constexpr Name<gannet::ScaleFormat> kScaleFormats[] = {
    {"fp32", gannet::ScaleFormat::kFp32},
    {"power_of_two", gannet::ScaleFormat::kPowerOfTwo},
};
inline constexpr Name<gannet::RowBound> kRowBounds[] = {
    {"causal_full", gannet::RowBound::kCausalFull},
    {"causal_from_first", gannet::RowBound::kCausalFromFirst},
    {"uniform_block", gannet::RowBound::kUniformBlock},
};
inline constexpr Name<gannet::RopePairing> kRopePairings[] = {
    {"interleaved", gannet::RopePairing::kInterleaved},
    {"half_split", gannet::RopePairing::kHalfSplit},
};
inline constexpr Name<gannet::LseBase> kLseBases[] = {
    {"e", gannet::LseBase::kNatural},
    {"2", gannet::LseBase::kTwo},
};
inline constexpr Name<gannet::StepRows> kStepRows[] = {
    {"prefill", gannet::StepRows::kPrefill},
    {"decode", gannet::StepRows::kDecode},
    {"all", gannet::StepRows::kAll},
};

/// A cache of one layer, and what owns its memory.
struct LatentCache {
  gannet::LatentCacheView view;
  nb::object owner;
};
struct IndexCache {
  gannet::IndexCacheView view;
  nb::object owner;
};
/// A page table, and what owns its memory.
struct PageTableRef {
  gannet::PageTableView view;
  std::vector<nb::object> owners;
};

/// A page table in one of its forms: an int32 tensor [rows, max_pages], a pair (indptr, indices), a PageTable.
gannet::PageTableView pages_of(Reader& reader, nb::handle object);

void bind_caches(nb::module_& m);
void bind_ops(nb::module_& m);
void bind_pools(nb::module_& m);
void bind_backend(nb::module_& m);

}  // namespace gannet_python
