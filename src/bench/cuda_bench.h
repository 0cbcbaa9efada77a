// `gannet bench --device cuda`: the operations on an NVIDIA GPU, beside a file of measured peers.
#pragma once

#include <string>
#include <vector>

namespace gannet {
inline namespace v0 {
namespace bench {

struct CudaBenchOptions {
  std::string against;  ///< JSON lines {"op", shape fields, "sets", "peers": {name: {"us"}}}; its rows are the shapes
  std::vector<std::string> ops;  ///< of those rows; empty: all that are known
  std::string where;             ///< "h=16,s_q=1": only rows with these fields
  std::string impl;              ///< to force
  std::string json;              ///< file that JSON lines are appended to; empty: none
  int device = 0;
  int every = 1;             ///< take each n-th row
  int replays = 20;          ///< timed replays a row, at least
  double max_row_ms = 2000;  ///< rows that would take longer are left out and counted
};

/// Prints a line a row, and for each operation the geometric mean of (best peer's us / ours), how many rows are below
/// 0.95 and the worst. Returns 0, or 1 where nothing could be measured. Throws Error.
int run_cuda_bench(const CudaBenchOptions& options);

}  // namespace bench
}  // namespace v0
}  // namespace gannet
