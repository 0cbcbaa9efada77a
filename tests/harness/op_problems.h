// Random problems of every operation, and what must hold for each: every implementation is within its tolerance of the
// oracle, and its bits depend on nothing that a result may not depend on. Property tests, fuzz targets and the tests of
// poison and determinism all draw from here.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gannet/gannet.h"
#include "harness/source.h"
#include "verify/problem.h"

namespace gannet_test {

/// What differs between two problems from the same bytes: nothing that a result depends on.
struct Surroundings {
  gannet::verify::Poison poison = gannet::verify::Poison::kNan;  ///< of every unused byte
  uint64_t page_seed = 1;                                        ///< order of the pages
};

template <class Params>
struct OpProblem {
  Params params;
  std::string text;      ///< formats and shapes, for failures
  std::string format;    ///< types and formats alone
  int64_t num_rows = 0;  ///< query rows, or rows written
  /// Throws Failure where `got` is too far from the oracle.
  std::function<void(const gannet::verify::Outputs& oracle, const gannet::verify::Outputs& got)> compare;
  /// Row `row` as a call of its own, its arguments appended to `keep`.
  std::function<Params(int64_t row, std::vector<std::shared_ptr<void>>& keep)> alone;
  /// Outputs that name slots move with the pages; these do not.
  std::vector<std::string> free_of_pages = {};
  std::vector<std::shared_ptr<void>> keep = {};  ///< what params point to
};

/// The same bytes give the same problem.
template <class Params>
OpProblem<Params> make_problem(Source bytes, const Surroundings& around);

/// Names of the CPU implementations that run here, oracle included, and take these arguments.
template <class Params>
std::vector<std::string> takers(const Params& params);

/// Draws a problem and holds every implementation to the oracle, and one of its invariances bit for bit. Throws
/// Failure. Returns how many implementations ran.
template <class Params>
int check_operation(Source& in);

/// Bit for bit the same: under every poison, again and again, with every number of workers and order of tasks, in
/// another order of pages, and each row alone. `repeats`: runs of the same. Returns the format of the problem, empty
/// where it has no rows.
template <class Params>
std::string check_every_invariance(Source bytes, int repeats);

}  // namespace gannet_test
