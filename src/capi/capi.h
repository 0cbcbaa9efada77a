// What the files of the C API share: statuses from exceptions, structs that carry their size, and the views of C as
// those of C++. Each function of gannet/c_api.h is a few lines here: read the structs, call the C++ interface, which
// makes the checks, and turn what it throws into a status.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>

#include "core/format.h"
#include "gannet/attention.h"
#include "gannet/c_api.h"
#include "gannet/ops.h"

namespace gannet {
inline namespace v0 {
namespace capi {

// ---- errors -------------------------------------------------------------------------------------------------------

/// The status of the exception that is being handled; keeps its text for gannet_last_error.
gannet_status keep_error(const char* function) noexcept;

/// Runs f and returns the status of what it throws. Nothing leaves it.
template <class F>
gannet_status guard(const char* function, F&& f) noexcept {
  try {
    f();
    return GANNET_OK;
  } catch (...) {
    return keep_error(function);
  }
}

/// Calls back, and throws where the callback returns another status than GANNET_OK: an Error of that status with what
/// the callback itself heard from here, if anything. `what` begins the text.
void call_back(const char* function, const std::string& what, const std::function<gannet_status()>& callback);

// ---- reading arguments --------------------------------------------------------------------------------------------

/// Throws where p is null.
template <class T>
T* given(const char* function, const char* name, T* p) {
  if (p == nullptr) fail_argument(function, "{} is null; accepted: a pointer", name);
  return p;
}

/// Copies `known` bytes of a struct that begins with its size: what is missing is 0, and what is unknown must be.
/// Fields are only ever added behind `known`, never into padding at the end of a struct.
void read_struct(const char* function, const char* name, const void* from, void* to, size_t known);

/// The struct as this library knows it.
template <class T>
T read(const char* function, const char* name, const T* from) {
  T to;
  read_struct(function, name, given(function, name, from), &to, sizeof(T));
  return to;
}

/// The same for a struct that a function fills: *to keeps its size, and gets as much of `from` as it has room for.
template <class T>
void write_struct(const char* function, const char* name, T from, T* to) {
  from.struct_size = read(function, name, to).struct_size;
  std::memcpy(to, &from, std::min(from.struct_size, sizeof(T)));
}

/// A named value of an enum whose values count from 0 to `last`.
template <class E>
E enum_of(const char* function, const char* name, int32_t value, E last) {
  if (value < 0 || value > static_cast<int32_t>(last))
    fail_argument(function, "{} is {}; accepted: 0 to {}", name, value, static_cast<int32_t>(last));
  return static_cast<E>(value);
}

bool flag_of(const char* function, const char* name, int32_t value);

/// `count` values at p, which may be null only without any.
template <class T>
std::span<T> span_of(const char* function, const char* name, T* p, int64_t count) {
  if (count < 0) fail_argument(function, "{} has {} entries; accepted: 0 and more", name, count);
  if (count > 0) given(function, name, p);
  return {p, static_cast<size_t>(count)};
}

Device device_of(const char* function, const char* name, gannet_device d);
TensorView tensor_of(const char* function, const char* name, const gannet_tensor& t);
gannet_tensor to_c(const TensorView& v);
gannet_latent_cache to_c(const LatentCacheView& v);
gannet_index_cache to_c(const IndexCacheView& v);
LatentCacheView latent_cache_of(const char* function, const char* name, const gannet_latent_cache* cache);
IndexCacheView index_cache_of(const char* function, const char* name, const gannet_index_cache* cache);
std::vector<LayerCaches> layers_of(const char* function, const gannet_layer* layers, int32_t num_layers);
PageTableView pages_of(const char* function, const gannet_page_table* pages);
PlanOptions plan_options_of(const char* function, const gannet_plan_options* options);

/// The caller's memory, or where there is none that of a device.
class Memory {
 public:
  Memory(const char* function, const gannet_memory* memory, gannet_device device);
  MemoryResource& resource() const noexcept { return *resource_; }

 private:
  std::unique_ptr<MemoryResource> own_;
  MemoryResource* resource_;
};

/// What plans and backends hold on to.
struct ContextState {
  std::unique_ptr<Executor> executor;
  Context context;
  bool overlap = true;
  Stream stream(void* handle) const noexcept { return {.handle = handle, .overlap = overlap}; }
};

/// A shared page table goes before the memory that it came from.
struct SharedTable {
  SharedTable(Memory from, const SharedPageTableOptions& options)
      : memory(std::move(from)), table(options, memory.resource()) {}
  Memory memory;
  SharedPageTable table;
};

template <class T>
void free_handle(T** handle) noexcept {
  if (handle == nullptr) return;
  delete *handle;
  *handle = nullptr;
}

}  // namespace capi
}  // namespace v0
}  // namespace gannet

struct gannet_context {
  std::shared_ptr<gannet::capi::ContextState> state;
};

struct gannet_shared_page_table {
  std::shared_ptr<gannet::capi::SharedTable> state;
};
