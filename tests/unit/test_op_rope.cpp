#include "op_cases.h"

namespace {

TEST(Rope, AgreesWithTheOracleOnTheGrid) { gannet_tests::expect_grid("rope"); }

}  // namespace
