#include "op_cases.h"

namespace {

TEST(IndexKGather, AgreesWithTheOracleOnTheGrid) { gannet_tests::expect_grid("index_k_gather"); }

}  // namespace
