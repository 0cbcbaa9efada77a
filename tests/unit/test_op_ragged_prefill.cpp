#include "op_cases.h"

namespace {

TEST(RaggedPrefill, AgreesWithTheOracleOnTheGrid) { gannet_tests::expect_grid("ragged_prefill"); }

}  // namespace
