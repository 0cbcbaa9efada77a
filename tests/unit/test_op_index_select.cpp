#include "op_cases.h"

namespace {

TEST(IndexSelect, AgreesWithTheOracleOnTheGrid) { gannet_tests::expect_grid("index_select"); }

}  // namespace
