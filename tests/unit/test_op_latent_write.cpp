#include "op_cases.h"

namespace {

TEST(LatentWrite, AgreesWithTheOracleOnTheGrid) { gannet_tests::expect_grid("latent_write"); }

}  // namespace
