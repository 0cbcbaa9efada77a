// Kernels for any machine.
#define GANNET_ISA portable
#include "cpu/vec_portable.h"  // first: the kernels are written over its names

#include "cpu/kernels/index_logits-inl.h"
#include "cpu/kernels/index_select-inl.h"
#include "cpu/kernels/topk-inl.h"
