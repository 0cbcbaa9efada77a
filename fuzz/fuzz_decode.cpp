// Differential: mla_decode. Bytes decide shapes, lengths, tables, formats, options and data, unused
// bytes are NaN, infinite or huge; every CPU implementation is held to the oracle and to its own invariances
// (tests/harness/op_problems.h). A Failure that escapes is a finding.
#include "fuzz.h"
#include "harness/op_problems.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace gannet_test;
  Source in(data, size);
  check_operation<gannet::MlaDecode>(in);
  return 0;
}
