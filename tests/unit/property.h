// Property tests: RapidCheck makes bytes, the harness makes cases of them; a failure is shrunk to few and small bytes.
//
//   RC_PARAMS="seed=1234 max_success=100000" build/release/tests/test_property     another seed, more cases
//   RC_PARAMS="reproduce=..." ...                                                  the case that a failure names
#pragma once

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "harness/source.h"

namespace gannet_test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kFewer = 20;  ///< cases are divided by this where a sanitizer makes each some ten times as slow
#else
inline constexpr int kFewer = 1;
#endif

/// Checks `property(Source&)`, which throws Failure, on `cases` inputs. RC_PARAMS wins over the numbers given here.
template <class Property>
void expect_property(const std::string& name, int cases, Property&& property) {
  rc::detail::TestMetadata metadata;
  metadata.id = name;
  metadata.description = name;
  rc::detail::TestParams params = rc::detail::configuration().testParams;
  const char* given = std::getenv("RC_PARAMS");
  const std::string text = given == nullptr ? "" : given;
  if (text.find("max_success") == std::string::npos) params.maxSuccess = cases / kFewer;
  // Fixed unless given, so that every run of CI sees the same cases.
  if (text.find("seed") == std::string::npos) params.seed = 20260101;
  std::printf("%s: %d cases, seed %llu\n", name.c_str(), params.maxSuccess,
              static_cast<unsigned long long>(params.seed));
  // The size does not grow from case to case: a generator reads the bytes that it needs, and finds zeros behind them.
  constexpr int kBytes = 200;
  const auto bytes = rc::gen::resize(kBytes, rc::gen::arbitrary<std::vector<uint8_t>>());
  const auto result = rc::detail::checkTestable(
      [&] {
        const std::vector<uint8_t> input = *bytes;
        Source in(input);
        property(in);
      },
      metadata, params);
  std::ostringstream message;
  rc::detail::printResultMessage(result, message);
  EXPECT_TRUE(result.template is<rc::detail::SuccessResult>()) << message.str();
}

}  // namespace gannet_test
