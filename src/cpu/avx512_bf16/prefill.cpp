// Kernels for processors with AVX-512 (F, BW, VL, DQ, VBMI) and AVX512_BF16; compiled with those flags.
#define GANNET_ISA avx512_bf16
#include "cpu/vec_avx512_bf16.h"  // first: the kernels are written over its names

#include "cpu/kernels/merge_state-inl.h"
#include "cpu/kernels/ragged_prefill-inl.h"
