#include "op_cases.h"

namespace {

TEST(MlaDecode, AgreesWithTheOracleOnTheGrid) { gannet_tests::expect_grid("mla_decode"); }

}  // namespace
