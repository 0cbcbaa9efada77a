// The kernels of each instruction set as plain functions, and the table of them that makes an implementation set.
//
// kernels/<op>-inl.h defines, inside cpu::GANNET_ISA,
//   void run_<op>(const Params&, const RunContext&);
//   size_t workspace_<op>(const Params&, int num_workers);
// and the files of a folder named after an instruction set compile them over its vocabulary.
#pragma once

#include "core/implementation.h"

namespace gannet {
inline namespace v0 {
namespace cpu {

struct KernelTable {
#define GANNET_MEMBER(Params, member)               \
  void (*member)(const Params&, const RunContext&); \
  size_t (*member##_workspace)(const Params&, int num_workers);
  GANNET_FOR_EACH_OP(GANNET_MEMBER)
#undef GANNET_MEMBER
};

#define GANNET_DECLARE(Params, member)                 \
  void run_##member(const Params&, const RunContext&); \
  size_t workspace_##member(const Params&, int num_workers);
namespace portable {
GANNET_FOR_EACH_OP(GANNET_DECLARE)
}
namespace amx_bf16 {
GANNET_FOR_EACH_OP(GANNET_DECLARE)
}
namespace avx2 {
GANNET_FOR_EACH_OP(GANNET_DECLARE)
}
namespace avx512_bf16 {
GANNET_FOR_EACH_OP(GANNET_DECLARE)
}
#undef GANNET_DECLARE

}  // namespace cpu
}  // namespace v0
}  // namespace gannet
