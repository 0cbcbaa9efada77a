#include "op_cases.h"

namespace {

TEST(TopK, AgreesWithTheOracleOnTheGrid) { gannet_tests::expect_grid("topk"); }

}  // namespace
