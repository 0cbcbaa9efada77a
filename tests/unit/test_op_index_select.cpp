#include <cmath>

#include "unit/fault_problems.h"

namespace {

using namespace gannet;
using gannet_tests::IndexProblem;

TEST(IndexSelect, AgreesWithTheOracleOnTheGrid) { gannet_tests::expect_grid("index_select"); }

TEST(IndexSelect, ANanKeyIsChosenLast) {
  // Known fault BL-29: the finite keys are chosen as if it were absent.
  for (const gannet_tests::IndexerFormat& format : gannet_tests::kIndexerFormats) {
    for (const int64_t k : {149, 148, 20}) {
      const IndexProblem p({.seq_lens = {150, 33}}, format, 4, k);
      std::byte* key = p.pool.view.values(p.paged.slot(0, 17));
      if (format.cache == IndexKFormat::kF32) reinterpret_cast<float*>(key)[5] = NAN;
      else if (format.cache == IndexKFormat::kBf16) reinterpret_cast<Bf16*>(key)[5] = Bf16::from_float(NAN);
      else reinterpret_cast<uint8_t*>(key)[5] = 0x7F;
      for (const std::string& impl : gannet_tests::taking(p.scores)) {
        const std::vector<float> scores = verify::run(p.scores, {.impl = impl}).floats("logits");
        for (size_t t = 0; t < 150; ++t) EXPECT_EQ(std::isnan(scores[t]), t == 17) << impl << " key " << t;
      }
      for (const std::string& impl : gannet_tests::taking(p.select)) {
        const std::vector<int32_t> chosen = verify::run(p.select, {.impl = impl}).ints("topk_positions");
        for (int64_t c = 0; c < k; ++c) {
          EXPECT_GE(chosen[static_cast<size_t>(c)], 0) << impl;
          EXPECT_NE(chosen[static_cast<size_t>(c)], 17) << impl << " k " << k;
        }
        // The second row has 33 keys: with k above that all are taken, NaN or not.
        if (k > 33) {
          EXPECT_EQ(chosen[static_cast<size_t>(k + 32)], 32) << impl;
        }
      }
    }
  }
}

}  // namespace
