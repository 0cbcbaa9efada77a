// Random sequences of steps through the backends `mla` and `dsa`: extend, decode, mixed and idle steps, speculative
// verify, drafts, captured batches, padded and empty requests, against an fp64 oracle that knows neither pages nor
// chunks nor formats' layouts.
#pragma once

#include <cstdint>
#include <string>

#include "harness/source.h"

namespace gannet_test {

struct BackendCases {
  int most_steps = 6;               ///< of a sequence, drawn
  int exact_steps = 0;              ///< this many instead
  bool persistent = false;          ///< mostly captured batches
  std::string impl = {};            ///< empty: drawn
  int64_t (*num_news)() = nullptr;  ///< counts allocations: captured batches make none
};

struct BackendReport {
  int64_t steps = 0, extends = 0, decodes = 0, mixed = 0, idle = 0, refreshes = 0, advances = 0, rows = 0;
  void add(const BackendReport& other);
};

/// Throws Failure.
BackendReport check_backend(Source& in, const BackendCases& cases);

}  // namespace gannet_test
