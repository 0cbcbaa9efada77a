// Kernels for any machine.
#define GANNET_ISA portable
#include "cpu/vec_portable.h"  // first: the kernels are written over its names

#include "cpu/kernels/mla_decode-inl.h"
#include "cpu/kernels/sparse_attention-inl.h"
