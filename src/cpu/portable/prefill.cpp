// Kernels for any machine.
#define GANNET_ISA portable
#include "cpu/vec_portable.h"
#include "cpu/kernels/ragged_prefill-inl.h"
#include "cpu/kernels/merge_state-inl.h"
