// Times the two forms of dense prefill (src/model/mla_forms.h) beside each other, and what the decoder's rule makes of
// them (src/model/prefill_form.h).
#pragma once

#include <iosfwd>
#include <string>

#include "bench/bench.h"

namespace gannet {
inline namespace v0 {
namespace bench {

/// For each point of heads x keys (the cached prefix, here from 0) x rows (new rows a request): the two forms over
/// random weights and a cache of grid.latent_format, with queries of grid.dtype, in alternating rounds. A call is one
/// layer from rotated queries to heads, without what both forms share (projections before and behind, cache writes).
/// Prints a row a point with the form that the rule takes and its time over the better one's, then a summary; appends
/// a line a point to `json` unless it is nullptr. options.impl: one that runs here, "all", or empty. Throws
/// gannet::Error.
void run_prefill_forms(const Context& context, const Options& options, const Roofs& roofs, std::ostream& out,
                       std::ostream* json);

}  // namespace bench
}  // namespace v0
}  // namespace gannet
