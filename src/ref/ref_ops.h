// The oracle: every operation in plain double loops, written from the contract (docs/semantics.md), never from a
// kernel. Slow, and allowed to allocate: it runs only when it is forced by name.
#pragma once

#include "core/implementation.h"

namespace gannet {
inline namespace v0 {
namespace ref {

#define GANNET_DECLARE(Params, member) void run_##member(const Params& p, const RunContext& context);
GANNET_FOR_EACH_OP(GANNET_DECLARE)
#undef GANNET_DECLARE

}  // namespace ref
}  // namespace v0
}  // namespace gannet
