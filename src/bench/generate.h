// Times whole generate runs of a checkpoint, with and without the invariant mode, and says what that mode costs.
#pragma once

#include <iosfwd>
#include <string>

#include "bench/roofs.h"
#include "gannet/context.h"
#include "gannet/kv_cache.h"

namespace gannet {
inline namespace v0 {
namespace bench {

struct GenerateGrid {
  std::string model = {};  ///< directory of a checkpoint; empty: nothing is run
  int prompt_tokens = 512;
  int new_tokens = 64;
  int chunk = 512;  ///< prompt tokens of a step
};

/// Prints a row a mode and the cost; appends a line a mode to `json` unless it is nullptr. The prompt is random ids, an
/// end of sequence is ignored, and the two modes alternate for `rounds` rounds. Throws gannet::Error.
void run_generate(const Context& context, const GenerateGrid& grid, const std::string& impl, int rounds,
                  LatentFormat latent, IndexKFormat index, const Roofs& roofs, std::ostream& out, std::ostream* json);

}  // namespace bench
}  // namespace v0
}  // namespace gannet
