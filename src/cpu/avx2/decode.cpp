// Kernels for processors with AVX2 and FMA; compiled with those flags.
#define GANNET_ISA avx2
#include "cpu/vec_avx2.h"  // first: the kernels are written over its names

#include "cpu/kernels/mla_decode-inl.h"
#include "cpu/kernels/sparse_attention-inl.h"
