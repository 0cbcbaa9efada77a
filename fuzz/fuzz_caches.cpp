// Differential: the cache operations and RoPE. Bytes decide shapes, lengths, tables, formats, options and data, unused
// bytes are NaN, infinite or huge; every CPU implementation is held to the oracle and to its own invariances
// (tests/harness/op_problems.h). A Failure that escapes is a finding.
#include "fuzz.h"
#include "harness/op_problems.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace gannet_test;
  Source in(data, size);
  switch (in.byte() % 5) {
    case 0: check_operation<gannet::LatentWrite>(in); break;
    case 1: check_operation<gannet::LatentGather>(in); break;
    case 2: check_operation<gannet::IndexKWrite>(in); break;
    case 3: check_operation<gannet::IndexKGather>(in); break;
    default: check_operation<gannet::Rope>(in); break;
  }
  return 0;
}
