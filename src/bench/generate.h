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

/// Decode steps of `batch` requests on a CUDA device, as `gannet generate --device cuda` runs them: bf16, a graph a
/// step. Each step is timed by itself on the host, with its wait for the tokens. Prints median and spread of new_tokens
/// steps, and how long the first one of its shape took; appends a JSON line to the file unless its name is empty.
void run_decode_steps(const Context& context, const GenerateGrid& grid, int batch, const std::string& impl,
                      LatentFormat latent, IndexKFormat index, const std::string& json_file, std::ostream& out);

}  // namespace bench
}  // namespace v0
}  // namespace gannet
