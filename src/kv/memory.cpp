#include "gannet/memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "core/format.h"

namespace gannet {
inline namespace v0 {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;  // x86-64 and aarch64 with 4 KiB base pages

size_t mapped_bytes(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

class HostMemory final : public MemoryResource {
 public:
  void* allocate(size_t bytes, size_t alignment) override {
    if (bytes > std::numeric_limits<size_t>::max() / 2) refuse(bytes, "more than the address space");
    if (bytes >= kHugePage && alignment <= kHugePage) return map(bytes);
    void* p = ::operator new (bytes > 0 ? bytes : 1, std::align_val_t{alignment}, std::nothrow);
    if (p == nullptr) refuse(bytes, "the C++ heap is exhausted");
    return p;
  }

  void deallocate(void* p, size_t bytes, size_t alignment) noexcept override {
    if (bytes >= kHugePage && alignment <= kHugePage) ::munmap(p, mapped_bytes(bytes));
    else ::operator delete (p, std::align_val_t{alignment});
  }

 private:
  [[noreturn]] static void refuse(size_t bytes, const char* why) {
    fail(ErrorCode::kOutOfMemory, "host_memory", "{} bytes cannot be had: {}", bytes, why);
  }

  // A huge page needs an aligned 2 MiB range: map one unit more than needed and give the ragged ends back.
  static void* map(size_t bytes) {
    const size_t size = mapped_bytes(bytes);
    void* raw = ::mmap(nullptr, size + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) refuse(bytes, std::strerror(errno));
    const auto begin = reinterpret_cast<uintptr_t>(raw);
    const uintptr_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
    const size_t head = aligned - begin;
    if (head > 0) ::munmap(raw, head);
    ::munmap(reinterpret_cast<void*>(aligned + size), kHugePage - head);
    void* p = reinterpret_cast<void*>(aligned);
    ::madvise(p, size, MADV_HUGEPAGE);  // a wish; without it the mapping works all the same
    return p;
  }
};

}  // namespace

MemoryResource::~MemoryResource() = default;

MemoryResource& host_memory() noexcept {
  static HostMemory memory;
  return memory;
}

Buffer::Buffer(size_t bytes, MemoryResource& resource, size_t alignment)
    : bytes_(bytes), alignment_(alignment), resource_(&resource) {
  if (bytes > 0) data_ = static_cast<std::byte*>(resource.allocate(bytes, alignment));
}

Buffer::~Buffer() {
  if (data_ != nullptr) resource_->deallocate(data_, bytes_, alignment_);
}

void Buffer::reserve(size_t bytes, MemoryResource& resource) {
  if (bytes <= bytes_) return;
  *this = Buffer();  // first, so that both never exist at once
  *this = Buffer(bytes, resource);
}

void Buffer::swap(Buffer& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(alignment_, other.alignment_);
  std::swap(resource_, other.resource_);
}

}  // namespace v0
}  // namespace gannet
