// Kernels for processors with AVX-512 (F, BW, VL, DQ, VBMI) AVX512_BF16 and AMX; compiled with those flags.
#define GANNET_ISA amx_bf16
#include "cpu/vec_amx_bf16.h"  // first: the kernels are written over its names

#include "cpu/kernels/index_k-inl.h"
#include "cpu/kernels/latent-inl.h"
#include "cpu/kernels/rope-inl.h"
