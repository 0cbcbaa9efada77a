#include "op_cases.h"

namespace {

TEST(LatentGather, AgreesWithTheOracleOnTheGrid) { gannet_tests::expect_grid("latent_gather"); }

}  // namespace
