// Every implementation of every operation against the fp64 oracle, on this machine: the grid that the tests of the
// operations and `gannet verify` share.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace gannet {
inline namespace v0 {
namespace verify {

/// One line of the report: all cases of a class with one implementation and one combination of formats.
struct Line {
  std::string op;
  std::string impl;
  std::string format;      ///< "q bf16, cache bf16, out fp32"
  std::string case_class;  ///< "lengths", "heads", "unused bytes", "workers", ...
  int64_t num_cases = 0;
  double error = 0.0;      ///< of the case nearest to or farthest beyond its tolerance
  double tolerance = 0.0;  ///< of that case; 0: bit for bit
  bool pass = true;
  std::string note = {};  ///< what failed, or why the implementation refuses these formats
  bool refused = false;   ///< the implementation does not take these formats: nothing ran
};

/// How many cases of an operation ran: each counts once for a kind of device, however many implementations took it.
struct Coverage {
  std::string op;
  int64_t cpu_cases = 0;
  int64_t cuda_cases = 0;
  bool cuda_here = false;                  ///< an implementation of CUDA runs here
  std::vector<std::string> left_out = {};  ///< cases that ran on the CPU alone, by format and class, with the reasons
};

struct Options {
  std::string op = {};                                    ///< only this operation
  std::string impl = {};                                  ///< only this implementation
  std::string format = {};                                ///< only formats with this in their name
  bool small = false;                                     ///< not the grid but a few small cases, as below
  std::function<void(const Line&)> on_line = {};          ///< called as soon as a line is complete
  std::function<void(const Coverage&)> on_coverage = {};  ///< called behind the lines of an operation
};

/// Runs the grid. Lines of one operation are in the order of its case classes.
///
/// `small`: between them the cases launch every kernel of a GPU over tens of keys to hundreds: for tools under which a
/// kernel takes a thousand times as long. (Requests of more than 16 parts, whose merge takes more warps, they do not
/// have.) Workspaces are left as they were allocated, so that a tool which looks for reads of memory that nobody wrote
/// has them to look at.
std::vector<Line> verify_operations(const Options& options = {});

/// "mla_decode  avx512_bf16  q bf16, ...  lengths  14 cases  2.1e-03 of 7.8e-03  ok"
std::string to_string(const Line& line);

}  // namespace verify
}  // namespace v0
}  // namespace gannet
