// Names, conversions and views.
#include <gtest/gtest.h>

#include <cmath>

#include "gannet/gannet.h"

namespace {

using gannet::E4m3;

TEST(E4m3, RoundTripsEveryCode) {
  for (int code = 0; code < 256; ++code) {
    const float x = E4m3{static_cast<uint8_t>(code)}.to_float();
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(x));
      EXPECT_EQ(E4m3::from_float(x).bits, 0x7f);
    } else {
      EXPECT_EQ(E4m3::from_float(x).bits, code) << x;
    }
  }
}

}  // namespace
