#include "op_cases.h"

namespace {

TEST(IndexKWrite, AgreesWithTheOracleOnTheGrid) { gannet_tests::expect_grid("index_k_write"); }

}  // namespace
