// The generic CUDA implementations as plain functions; set.cpp makes an implementation set of them.
#pragma once

#include "core/implementation.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace generic {

#define GANNET_DECLARE(Params, member) void run_##member(const Params&, const RunContext&);
GANNET_FOR_EACH_OP(GANNET_DECLARE)
#undef GANNET_DECLARE

}  // namespace generic
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
