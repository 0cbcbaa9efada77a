#include "op_cases.h"

namespace {

TEST(MergeState, AgreesWithTheOracleOnTheGrid) { gannet_tests::expect_grid("merge_state"); }

}  // namespace
