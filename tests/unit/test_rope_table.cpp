// The table of rotations against its definition, with angles in fp32.
#include "model/rope_table.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

namespace gannet {
namespace {

TEST(RopeTable, HoldsCosinesThenSinesOfFp32Angles) {
  const RopeConfig rope{.theta = 10000.0};
  RopeTable table(rope, 64);
  table.reserve(5000);
  ASSERT_EQ(table.positions(), 5000);
  for (const int64_t p : {0, 1, 63, 4999})
    for (int64_t i = 0; i < 32; ++i) {
      const float inverse = static_cast<float>(std::pow(10000.0, -2.0 * static_cast<double>(i) / 64.0));
      const float angle = static_cast<float>(p) * inverse;
      // Five roundings apart, each 2^-24 of the angle: there a power, a reciprocal and the product, here a power and
      // the product.
      const double tolerance = 1e-7 + 5.0 * 0x1p-24 * double{angle};
      EXPECT_NEAR(table.data()[p * 64 + i], std::cos(double{angle}), tolerance) << p << " " << i;
      EXPECT_NEAR(table.data()[p * 64 + 32 + i], std::sin(double{angle}), tolerance) << p << " " << i;
    }
  EXPECT_EQ(table.data()[0], 1.0f);

  // From the frequencies as the config gives them the product in fp32 is one value: half an ulp of the cosine is left.
  // In fp64 it would be off by up to 5000 * 2^-24 = 3e-4.
  const std::vector<float> frequencies = rope_inverse_frequencies(rope, 64);
  for (int64_t p = 0; p < 5000; p += 7)
    for (int64_t i = 0; i < 32; ++i) {
      const float angle = static_cast<float>(p) * frequencies[static_cast<size_t>(i)];
      ASSERT_NEAR(table.data()[p * 64 + i], std::cos(double{angle}), 0x1p-24) << p << " " << i;
      ASSERT_NEAR(table.data()[p * 64 + 32 + i], std::sin(double{angle}), 0x1p-24) << p << " " << i;
    }
}

TEST(RopeTable, YarnScalesTheTableAndHoldsAtShortPositions) {
  // Only mscale: cosines are multiplied by m(f, 1) = 0.1 ln f + 1; pair 31 turns by 1/f of the plain frequency.
  const RopeConfig rope{.theta = 10000.0, .yarn = YarnConfig{.factor = 40.0, .original_max_position_embeddings = 128}};
  RopeTable table(rope, 64);
  table.reserve(2);
  const double m = 0.1 * std::log(40.0) + 1.0;
  EXPECT_NEAR(table.data()[0], m, 1e-6);
  const double slow = std::pow(10000.0, -62.0 / 64.0) / 40.0;
  EXPECT_NEAR(table.data()[64 + 63], m * std::sin(slow), 1e-9);
  EXPECT_NEAR(table.data()[64 + 32], m * std::sin(1.0), 1e-6);  // ramp 0: the plain frequency
}

TEST(RopeTable, GrowingKeepsEarlierRows) {
  RopeTable small({}, 64), large({}, 64);
  small.reserve(10);
  small.reserve(100);
  small.reserve(50);
  large.reserve(100);
  ASSERT_EQ(small.positions(), 100);
  EXPECT_EQ(0, std::memcmp(small.data(), large.data(), 100 * 64 * sizeof(float)));
}

}  // namespace
}  // namespace gannet
