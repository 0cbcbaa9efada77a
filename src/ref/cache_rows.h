// The one reader and the one writer of cache rows of every format, for the oracle.
#pragma once

#include "gannet/kv_cache.h"

namespace gannet {
inline namespace v0 {
namespace ref {

/// row[0 .. R+P) = the dequantised row of a slot, exact but for kE4m3PerToken's rope (bf16 times fp32 is exact in
/// fp64).
void read_latent(const LatentCacheView& cache, int64_t slot, double* row);

/// Quantises row[0 .. R+P) into a slot. The arithmetic is fp32, as the formats are defined in it.
void write_latent(const LatentCacheView& cache, int64_t slot, const float* row);

/// key[0 .. Di) = the dequantised index key of a slot, exact.
void read_index_k(const IndexCacheView& cache, int64_t slot, double* key);

/// Quantises key[0 .. Di) into a slot (spec A.6).
void write_index_k(const IndexCacheView& cache, int64_t slot, const float* key);

}  // namespace ref
}  // namespace v0
}  // namespace gannet
