// Kernels for any machine.
#define GANNET_ISA portable
#include "cpu/vec_portable.h"
#include "cpu/kernels/mla_decode-inl.h"
#include "cpu/kernels/sparse_attention-inl.h"
