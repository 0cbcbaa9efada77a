// Stands in for the mirror in a build without CUDA, in which no implementation asks for one.
#include "core/format.h"
#include "verify/device_mirror.h"

namespace gannet {
inline namespace v0 {
namespace verify {

namespace {
[[noreturn]] void absent() { fail(ErrorCode::kUnsupported, "verify", "this build has no CUDA"); }
}  // namespace

struct DeviceMirror::State {};

DeviceMirror::DeviceMirror() { absent(); }
DeviceMirror::~DeviceMirror() = default;
int64_t DeviceMirror::extent(const TensorView&) { absent(); }
void DeviceMirror::note(void*, int64_t) { absent(); }
void DeviceMirror::copy_there() { absent(); }
void* DeviceMirror::on_device(void*) const { absent(); }
std::span<std::byte> DeviceMirror::scratch(size_t, bool) { absent(); }
void DeviceMirror::copy_back() { absent(); }

}  // namespace verify
}  // namespace v0
}  // namespace gannet
