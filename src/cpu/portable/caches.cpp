// Kernels for any machine.
#define GANNET_ISA portable
#include "cpu/vec_portable.h"  // first: the kernels are written over its names

#include "cpu/kernels/index_k-inl.h"
#include "cpu/kernels/latent-inl.h"
#include "cpu/kernels/rope-inl.h"
