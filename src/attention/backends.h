// The factories of the built-in backends.
#pragma once

#include <memory>

#include "gannet/attention.h"

namespace gannet {
inline namespace v0 {
namespace attention {

std::unique_ptr<AttentionBackend> make_mla(const Context&, const AttentionConfig&, MemoryResource&);
std::unique_ptr<AttentionBackend> make_dsa(const Context&, const AttentionConfig&, MemoryResource&);

}  // namespace attention
}  // namespace v0
}  // namespace gannet
