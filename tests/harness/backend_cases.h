// Random sequences of steps through the backends `mla` and `dsa`: extend, decode, mixed and idle steps, speculative
// verify, drafts, captured batches, padded and empty requests, against an fp64 oracle that knows neither pages nor
// chunks nor formats' layouts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gannet/executor.h"
#include "harness/source.h"
#include "verify/problem.h"

namespace gannet_test {

struct BackendCases {
  int most_steps = 6;               ///< of a sequence, drawn
  int exact_steps = 0;              ///< this many instead
  bool persistent = false;          ///< mostly captured batches
  std::string impl = {};            ///< empty: drawn
  int64_t (*num_news)() = nullptr;  ///< counts allocations: captured batches make none

  // What no result may depend on.
  std::optional<gannet::verify::Poison> poison = {};  ///< of pools, scratch and outputs before; else drawn
  gannet::Executor* executor = nullptr;               ///< else drawn
  bool other_pages = false;                           ///< other pages in another order
  std::vector<std::byte>* results = nullptr;          ///< gets every result, slots left out
};

struct BackendReport {
  int64_t steps = 0, extends = 0, decodes = 0, mixed = 0, idle = 0, refreshes = 0, advances = 0, rows = 0;
  void add(const BackendReport& other);
};

/// Throws Failure.
BackendReport check_backend(Source& in, const BackendCases& cases);

}  // namespace gannet_test
