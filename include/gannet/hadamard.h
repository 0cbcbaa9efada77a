// The Walsh-Hadamard rotation of index keys and index queries (spec 3.2, A.12). It is orthogonal, so that scores are
// those without it; what it changes is how evenly a key's values are spread, and with that the error of e4m3 keys.
// DeepSeek-V3.2's own code rotates, others do not: rows cached with and without it must never meet, which is why a pool
// says at its creation what its rows are (IndexKPoolOptions::hadamard) and everything that touches them is asked.
//
// An engine that goes through a backend sets that option and does nothing else: the backend rotates keys before they
// are written and queries before they select. Who calls the operations rotates both by this function and says so in
// their `hadamard`.
#pragma once

#include "gannet/context.h"
#include "gannet/device.h"
#include "gannet/tensor.h"

namespace gannet {
inline namespace v0 {

/// to[..., :] = H x from[..., :] * n^-0.5 over the last dimension n, a power of two up to 1,024; H in Sylvester order,
/// H(i, j) = (-1)^(number of ones of i & j). Applied twice it is the identity. Both are on one device, fp32 or bf16, of
/// the same shape and dtype, with rows that begin at multiples of 16 bytes; they may be the same tensor and else do not
/// overlap. fp32 arithmetic, rounded to the dtype once. A row's bits depend on that row alone and are the same on every
/// device.
///
/// Host memory: works on the context's executor and is done on return. CUDA: enqueued on `stream`, without allocation
/// or synchronisation, so that it can be captured into a graph.
///
/// Throws Error(kInvalidArgument) for other shapes and dtypes, kUnsupported for a CUDA device where this build has
/// none. Thread safety: any.
GANNET_API void hadamard(const Context& context, const TensorView& from, const TensorView& to, Stream stream = {});

}  // namespace v0
}  // namespace gannet
