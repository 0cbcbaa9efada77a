// Kernels for processors with AVX-512 (F, BW, VL, DQ, VBMI) AVX512_BF16 and AMX; compiled with those flags.
#define GANNET_ISA amx_bf16
#include "cpu/vec_amx_bf16.h"  // first: the kernels are written over its names

#include "cpu/kernels/merge_state-inl.h"
#include "cpu/kernels/ragged_prefill-inl.h"
