#include "op_cases.h"

namespace {

TEST(IndexLogits, AgreesWithTheOracleOnTheGrid) { gannet_tests::expect_grid("index_logits"); }

}  // namespace
