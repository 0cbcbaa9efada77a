#include "tensors.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstring>

#include "core/format.h"

namespace gannet_python {
using namespace gannet;

namespace {

std::optional<DType> dtype_of_name(const char* name) {
  constexpr Name<DType> kNames[] = {
      {"float32", DType::kF32}, {"bfloat16", DType::kBf16}, {"float16", DType::kF16}, {"float8_e4m3fn", DType::kE4m3},
      {"uint8", DType::kU8},    {"int8", DType::kU8},       {"int32", DType::kI32},   {"int64", DType::kI64},
  };
  for (const auto& [n, value] : kNames)
    if (std::strcmp(n, name) == 0) return value;
  return std::nullopt;
}

std::optional<DType> dtype_of_dlpack(const dlpack::DataType& t) {
  if (t.lanes != 1) return std::nullopt;
  switch (t.code) {
    case dlpack::kFloat:
      return t.bits == 32 ? std::optional(DType::kF32) : t.bits == 16 ? std::optional(DType::kF16) : std::nullopt;
    case dlpack::kBfloat: return t.bits == 16 ? std::optional(DType::kBf16) : std::nullopt;
    case dlpack::kFloat8E4m3fn: return t.bits == 8 ? std::optional(DType::kE4m3) : std::nullopt;
    case dlpack::kInt:
    case dlpack::kUInt:
      if (t.bits == 8) return DType::kU8;
      if (t.code == dlpack::kInt && t.bits == 32) return DType::kI32;
      if (t.code == dlpack::kInt && t.bits == 64) return DType::kI64;
      return std::nullopt;
    default: return std::nullopt;
  }
}

/// The exchange table of a tensor type, found once a type: types of tensors live as long as their framework.
const dlpack::ExchangeApi* exchange_of(PyTypeObject* type) {
  struct Entry {
    PyTypeObject* type;
    const dlpack::ExchangeApi* api;
  };
  constexpr size_t kEntries = 8;  // a process has one or two frameworks
  static Entry entries[kEntries];
  static size_t next = 0;
  for (const Entry& e : entries)
    if (e.type == type) return e.api;
  const dlpack::ExchangeApi* api = nullptr;
  const nb::object capsule =
      nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), "__dlpack_c_exchange_api__", nb::none());
  if (!capsule.is_none() && PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) {
    api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    while (api != nullptr && api->version.major != 1) api = api->previous;
    if (api != nullptr && api->tensor_from_object == nullptr) api = nullptr;
  }
  Py_INCREF(reinterpret_cast<PyObject*>(type));  // so that its address is nobody else's
  entries[next % kEntries] = {type, api};
  ++next;
  return api;
}

void packed_strides(TensorView& v) {
  int64_t s = 1;
  for (int i = v.rank - 1; i >= 0; --i) {
    v.stride[static_cast<size_t>(i)] = s;
    s *= v.shape[static_cast<size_t>(i)];
  }
}

std::string name_of_type(nb::handle object) { return nb::cast<std::string>(nb::getattr(object.type(), "__name__")); }

}  // namespace

Reader::~Reader() = default;

void Reader::unknown_dtype(const char* name, const std::string& dtype) const {
  fail_argument(function_, "{} is {}; accepted: float32, bfloat16, float8_e4m3fn, uint8, int8, int32, int64", name,
                dtype);
}

void Reader::keep_dlpack(const dlpack::Tensor& t, const char* name, TensorView& v) const {
  const std::optional<DType> dtype = dtype_of_dlpack(t.dtype);
  if (!dtype) unknown_dtype(name, fmt::format("of DLPack type {}, {} bits", t.dtype.code, t.dtype.bits));
  v.dtype = *dtype;
  v.data = static_cast<std::byte*>(t.data) + t.byte_offset;
  if (t.device.type == dlpack::kCuda || t.device.type == dlpack::kCudaManaged)
    v.device = {DeviceKind::kCuda, t.device.id};
  else if (t.device.type != dlpack::kCpu && t.device.type != dlpack::kCudaHost)
    fail_argument(function_, "{} is on DLPack device {}; accepted: 1 (CPU) and 2 (CUDA)", name, t.device.type);
  if (t.ndim < 1 || t.ndim > TensorView::kMaxRank)
    fail_argument(function_, "{} has {} dimensions; accepted: 1 to {}", name, t.ndim, TensorView::kMaxRank);
  v.rank = t.ndim;
  for (int i = 0; i < t.ndim; ++i) v.shape[static_cast<size_t>(i)] = t.shape[i];
  if (t.strides == nullptr) packed_strides(v);
  else
    for (int i = 0; i < t.ndim; ++i) v.stride[static_cast<size_t>(i)] = t.strides[i];
}

bool Reader::from_exchange(nb::handle object, const char* name, TensorView& v) {
  const dlpack::ExchangeApi* api = exchange_of(Py_TYPE(object.ptr()));
  if (api == nullptr) return false;
  dlpack::Tensor t{};
  if (api->tensor_from_object(object.ptr(), &t) != 0) {
    PyErr_Clear();  // a dtype that the framework does not export: the other ways remain
    return false;
  }
  if (!dtype_of_dlpack(t.dtype)) return false;
  keep_dlpack(t, name, v);
  if (v.device.kind == DeviceKind::kCuda && stream_of_ == StreamOf::kNobody) {
    stream_of_ = StreamOf::kExchange;
    exchange_ = api;
    torch_ = nb::hasattr(object, "data_ptr");
  }
  return true;
}

/// PyTorch without that table, and its narrow floats, which its __dlpack__ did not export for long.
bool Reader::from_torch(nb::handle object, const char* name, TensorView& v) {
  if (!nb::hasattr(object, "data_ptr") || !nb::hasattr(object, "stride")) return false;
  const std::string dtype = nb::cast<std::string>(nb::str(nb::handle(nb::object(object.attr("dtype")))));
  constexpr std::string_view kPrefix = "torch.";
  const std::optional<DType> known =
      dtype_of_name(dtype.starts_with(kPrefix) ? dtype.c_str() + kPrefix.size() : dtype.c_str());
  if (!known) unknown_dtype(name, dtype);
  const std::string device = nb::cast<std::string>(object.attr("device").attr("type"));
  if (device != "cpu" && device != "cuda") return false;
  v.dtype = *known;
  if (device == "cuda") {
    v.device = {DeviceKind::kCuda, nb::cast<int>(object.attr("device").attr("index"))};
    if (stream_of_ == StreamOf::kNobody) {
      stream_of_ = StreamOf::kTorch;
      torch_ = true;
    }
  }
  v.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(object.attr("data_ptr")()));
  const nb::object shape = object.attr("shape"), stride = object.attr("stride")();
  const size_t rank = nb::len(shape);
  if (rank < 1 || rank > TensorView::kMaxRank)
    fail_argument(function_, "{} has {} dimensions; accepted: 1 to {}", name, rank, TensorView::kMaxRank);
  v.rank = static_cast<int>(rank);
  for (size_t i = 0; i < rank; ++i) {
    v.shape[i] = nb::cast<int64_t>(shape[i]);
    v.stride[i] = nb::cast<int64_t>(stride[i]);
  }
  return true;
}

/// Waits for an array that JAX may still be computing, on threads or streams of its own; false: it is not JAX's.
static bool wait_for_jax(nb::handle object) {
  if (!nb::hasattr(object, "block_until_ready")) return false;
  object.attr("block_until_ready")();
  return true;
}

/// NumPy (__array_interface__), CuPy and JAX (__cuda_array_interface__). Their DLPack knows nothing of ml_dtypes.
bool Reader::from_interface(nb::handle object, const char* name, const char* attribute, DeviceKind kind, TensorView& v,
                            bool& writable) {
  const nb::object interface = nb::getattr(object, attribute, nb::none());
  if (interface.is_none() || !nb::isinstance<nb::dict>(interface) || !nb::hasattr(object, "dtype")) return false;
  const nb::dict d = nb::cast<nb::dict>(interface);
  const nb::object dtype_name = nb::getattr(object.attr("dtype"), "name", nb::none());
  if (dtype_name.is_none()) return false;
  const std::string dtype = nb::cast<std::string>(dtype_name);
  const std::optional<DType> known = dtype_of_name(dtype.c_str());
  if (!known) unknown_dtype(name, dtype);
  v.dtype = *known;
  const nb::tuple data = nb::cast<nb::tuple>(d["data"]);
  v.data = reinterpret_cast<void*>(nb::cast<uintptr_t>(data[0]));
  writable = !nb::cast<bool>(data[1]);
  const nb::tuple shape = nb::cast<nb::tuple>(d["shape"]);
  if (nb::len(shape) < 1 || nb::len(shape) > TensorView::kMaxRank)
    fail_argument(function_, "{} has {} dimensions; accepted: 1 to {}", name, nb::len(shape), TensorView::kMaxRank);
  v.rank = static_cast<int>(nb::len(shape));
  for (size_t i = 0; i < nb::len(shape); ++i) v.shape[i] = nb::cast<int64_t>(shape[i]);
  const nb::object strides = d.contains("strides") ? nb::object(d["strides"]) : nb::object(nb::none());
  if (strides.is_none()) packed_strides(v);
  else {
    const auto bytes = static_cast<int64_t>(size_of(v.dtype));
    for (size_t i = 0; i < nb::len(shape); ++i) {
      const int64_t s = nb::cast<int64_t>(strides[i]);
      if (s % bytes != 0)
        fail_argument(function_, "{} has a stride of {} bytes; accepted: multiples of {}", name, s, bytes);
      v.stride[i] = s / bytes;
    }
  }
  if (kind == DeviceKind::kCuda) {
    const nb::object device = nb::getattr(object, "device", nb::none());
    v.device = {kind, device.is_none() ? 0 : nb::cast<int>(nb::getattr(device, "id", nb::int_(0)))};
    if (!wait_for_jax(object) && stream_of_ == StreamOf::kNobody) stream_of_ = StreamOf::kCupy;
  }
  return true;
}

bool Reader::from_capsule(nb::handle object, const char* name, TensorView& v, bool& writable) {
  if (!nb::hasattr(object, "__dlpack__")) return false;
  wait_for_jax(object);
  nb::object capsule;
  try {
    capsule = object.attr("__dlpack__")(nb::arg("max_version") = nb::make_tuple(1, 0));
  } catch (nb::python_error& e) {
    if (!e.matches(PyExc_TypeError)) throw;  // an older one, without max_version
    capsule = object.attr("__dlpack__")();
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned")) {
    const auto* m =
        static_cast<dlpack::ManagedTensorVersioned*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
    keep_dlpack(m->tensor, name, v);
    writable = (m->flags & dlpack::kReadOnly) == 0;
  } else if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    keep_dlpack(static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"))->tensor, name, v);
  } else {
    return false;
  }
  capsules_.push_back(std::move(capsule));  // never renamed "used_": its own destructor frees what it holds
  return true;
}

TensorView Reader::tensor(nb::handle object, const char* name, Access access) {
  TensorView v;
  bool writable = true;
  if (!from_exchange(object, name, v) && !from_torch(object, name, v) &&
      !from_interface(object, name, "__cuda_array_interface__", DeviceKind::kCuda, v, writable) &&
      !from_interface(object, name, "__array_interface__", DeviceKind::kCpu, v, writable) &&
      !from_capsule(object, name, v, writable))
    throw nb::type_error(
        fmt::format("[{}] {} is a {}; accepted: a tensor of PyTorch, NumPy, CuPy or another that speaks DLPack",
                    function_, name, name_of_type(object))
            .c_str());
  if (access == Access::kWrite && !writable)
    fail_argument(function_, "{} is read-only; accepted: memory that can be written to", name);
  if (!on_device_) {
    device_ = v.device;
    on_device_ = v.device.kind == DeviceKind::kCuda;
  }
  return v;
}

TensorView Reader::optional(nb::handle object, const char* name, Access access) {
  return object.is_none() ? TensorView{} : tensor(object, name, access);
}

std::vector<int32_t> Reader::ints(nb::handle object, const char* name) {
  std::vector<int32_t> values;
  if (object.is_none()) return values;
  if (nb::isinstance<nb::list>(object) || nb::isinstance<nb::tuple>(object)) {
    for (const nb::handle h : object) values.push_back(nb::cast<int32_t>(h));
    return values;
  }
  const TensorView v = tensor(object, name);
  if (v.rank != 1 || v.device.kind != DeviceKind::kCpu || (v.dtype != DType::kI32 && v.dtype != DType::kI64))
    fail_argument(function_, "{} is {}; accepted: one dimension of int32 or int64 on the CPU, or a list", name,
                  describe(v));
  for (int64_t i = 0; i < v.shape[0]; ++i) {
    const int64_t x = v.dtype == DType::kI32 ? *v.ptr<int32_t>(i) : *v.ptr<int64_t>(i);
    if (x != static_cast<int32_t>(x)) fail_argument(function_, "{}[{}] is {}; accepted: an int32", name, i, x);
    values.push_back(static_cast<int32_t>(x));
  }
  return values;
}

Stream Reader::current_stream() const {
  if (!on_device_) return {};
  switch (stream_of_) {
    case StreamOf::kExchange: {
      void* handle = nullptr;
      if (exchange_->current_work_stream == nullptr ||
          exchange_->current_work_stream(dlpack::kCuda, device_.index, &handle) != 0) {
        PyErr_Clear();
        return stream_of(nb::module_::import_("torch").attr("cuda").attr("current_stream")(device_.index));
      }
      return {handle};
    }
    case StreamOf::kTorch:
      return stream_of(nb::module_::import_("torch").attr("cuda").attr("current_stream")(device_.index));
    case StreamOf::kCupy: return stream_of(nb::module_::import_("cupy").attr("cuda").attr("get_current_stream")());
    case StreamOf::kNobody: break;
  }
  return {};
}

nb::object Reader::torch_scratch(size_t bytes) const {
  // Looked up once, and never given back: the interpreter may be gone before statics are.
  static const nb::object& empty = *new nb::object(nb::module_::import_("torch").attr("empty"));
  static nb::dict& options = *new nb::dict();
  static int device = -1;
  if (device != device_.index) {
    const nb::module_ torch = nb::module_::import_("torch");
    options["dtype"] = torch.attr("uint8");
    options["device"] = torch.attr("device")("cuda", device_.index);
    device = device_.index;
  }
  return empty(bytes, **options);
}

Stream Reader::stream(nb::handle given) const {
  Stream s = stream_of(given);
  if (names_no_stream(given)) s.handle = current_stream().handle;
  return s;
}

bool names_no_stream(nb::handle object) {
  return object.is_none() || (nb::isinstance<PyStream>(object) && nb::cast<PyStream&>(object).stream.is_none());
}

Stream stream_of(nb::handle object) {
  if (object.is_none()) return {};
  if (nb::isinstance<PyStream>(object)) {
    const auto& given = nb::cast<PyStream&>(object);
    Stream s = stream_of(given.stream);
    s.overlap = given.overlap;
    return s;
  }
  if (nb::isinstance<nb::int_>(object)) return {reinterpret_cast<void*>(nb::cast<uintptr_t>(object))};
  for (const char* attribute : {"cuda_stream", "ptr"})
    if (nb::hasattr(object, attribute)) return {reinterpret_cast<void*>(nb::cast<uintptr_t>(object.attr(attribute)))};
  throw nb::type_error(fmt::format("stream is a {}; accepted: None, an address, torch.cuda.Stream, cupy.cuda.Stream, "
                                   "gannet.Stream",
                                   name_of_type(object))
                           .c_str());
}

nb::object to_python(const TensorView& v, nb::handle owner) {
  size_t shape[TensorView::kMaxRank];
  int64_t strides[TensorView::kMaxRank];
  for (size_t i = 0; i < static_cast<size_t>(v.rank); ++i) {
    shape[i] = static_cast<size_t>(v.shape[i]);
    strides[i] = v.stride[i];
  }
  nb::dlpack::dtype t{};
  t.lanes = 1;
  t.bits = static_cast<uint8_t>(size_of(v.dtype) * 8);
  switch (v.dtype) {
    case DType::kF32:
    case DType::kF16: t.code = dlpack::kFloat; break;
    case DType::kBf16: t.code = dlpack::kBfloat; break;
    case DType::kE4m3: t.code = dlpack::kFloat8E4m3fn; break;
    case DType::kU8: t.code = dlpack::kUInt; break;
    case DType::kI32:
    case DType::kI64: t.code = dlpack::kInt; break;
  }
  const bool on_cpu = v.device.kind == DeviceKind::kCpu;
  const nb::ndarray<> array(v.data, static_cast<size_t>(v.rank), shape, owner, strides, t,
                            on_cpu ? dlpack::kCpu : dlpack::kCuda, v.device.index);
  // NumPy where NumPy can: on the CPU, and of a dtype that it has.
  if (on_cpu && v.dtype != DType::kBf16 && v.dtype != DType::kE4m3) {
    const nb::ndarray<nb::numpy> numpy(array);
    return nb::cast(numpy, nb::rv_policy::reference);
  }
  return nb::cast(array, nb::rv_policy::reference);
}

Device device_of(const char* function, nb::handle object) {
  const std::string text = nb::cast<std::string>(nb::str(object));
  if (text == "cpu") return {};
  constexpr std::string_view kCuda = "cuda";
  if (text == kCuda) return {DeviceKind::kCuda, 0};
  if (text.starts_with("cuda:") && text.size() > kCuda.size() + 1 && text.size() < kCuda.size() + 6 &&
      text.find_first_not_of("0123456789", kCuda.size() + 1) == std::string::npos)
    return {DeviceKind::kCuda, std::stoi(text.substr(kCuda.size() + 1))};
  fail_argument(function, "device is \"{}\"; accepted: \"cpu\", \"cuda\", \"cuda:N\"", text);
}

}  // namespace gannet_python
