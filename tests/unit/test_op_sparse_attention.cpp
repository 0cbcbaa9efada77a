#include "op_cases.h"

namespace {

TEST(SparseAttention, AgreesWithTheOracleOnTheGrid) { gannet_tests::expect_grid("sparse_attention"); }

}  // namespace
