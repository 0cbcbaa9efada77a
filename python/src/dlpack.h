// The layout of DLPack (https://dmlc.github.io/dlpack/latest), as far as this package needs it: tensors that another
// library owns, and, in newer versions of frameworks, a table of functions per tensor type by which they are read
// without a Python call (`__dlpack_c_exchange_api__`). The structs are ABI: order and types of fields are not ours.
#pragma once

#include <cstdint>

namespace gannet_python::dlpack {

enum DeviceType : int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kFloat8E4m3fn = 10 };

struct Device {
  int32_t type;
  int32_t id;
};
struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: packed
  uint64_t byte_offset;
};
struct ManagedTensor {  // capsule "dltensor"
  Tensor tensor;
  void* manager;
  void (*deleter)(ManagedTensor*);
};
struct Version {
  uint32_t major;
  uint32_t minor;
};
inline constexpr uint64_t kReadOnly = 1;
struct ManagedTensorVersioned {  // capsule "dltensor_versioned"
  Version version;
  void* manager;
  void (*deleter)(ManagedTensorVersioned*);
  uint64_t flags;
  Tensor tensor;
};

/// Capsule "dlpack_exchange_api" under type(tensor).__dlpack_c_exchange_api__.
struct ExchangeApi {
  Version version;
  ExchangeApi* previous;
  void* allocator;
  void* managed_from_object;
  void* managed_to_object;
  int (*tensor_from_object)(void* object, Tensor* out);  // borrowed: valid while the object lives; may be null
  int (*current_work_stream)(int32_t device_type, int32_t device_id, void** out);
};

}  // namespace gannet_python::dlpack
