// Kernels for any machine.
#define GANNET_ISA portable
#include "cpu/vec_portable.h"  // first: the kernels are written over its names

#include "cpu/kernels/merge_state-inl.h"
#include "cpu/kernels/ragged_prefill-inl.h"
