// Other libraries' ways to the problems of this benchmark, timed in the same process and the same rounds. Each is part
// of the build only where CMake finds its library: none is needed for anything else.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "bench/problems.h"
#include "gannet/ops.h"

namespace gannet {
inline namespace v0 {
namespace bench {

/// Peers for one bf16 row of one request over a bf16 cache (dense and sparse decode), or for bf16 rows of one request
/// over bf16 or e4m3 index keys; empty for other problems. They read copies of the same keys, laid out one behind the
/// other as they want them. `storage` owns what `copies` point to.
std::vector<Peer> peers_of(const std::vector<MlaDecode>& copies, const std::shared_ptr<void>& storage);
std::vector<Peer> peers_of(const std::vector<SparseAttention>& copies, const std::shared_ptr<void>& storage);
std::vector<Peer> peers_of(const std::vector<IndexSelect>& copies, const std::shared_ptr<void>& storage);

/// Keys of a request of `p` one behind the other: bf16 [keys, latent_dim + rope_dim].
std::vector<uint16_t> contiguous_keys(const MlaDecode& p);

/// A selection as a result to compare: for each row and slot of the pool 1 where it was chosen, else 0, so that the
/// relative error is sqrt(2 * missed / chosen). slots: [rows][topk], -1 behind the chosen ones.
std::vector<float> selection_result(const IndexSelect& p, std::span<const int32_t> slots);

// Of each library; peers_<library>.cpp or its stub no_<library>_peers.cpp.
void add_onednn_peers(const std::vector<MlaDecode>& copies, const std::shared_ptr<void>& storage,
                      std::vector<Peer>& peers);
void add_ggml_peers(const std::vector<MlaDecode>& copies, const std::shared_ptr<void>& storage,
                    std::vector<Peer>& peers);
void add_ggml_peers(const std::vector<SparseAttention>& copies, const std::shared_ptr<void>& storage,
                    std::vector<Peer>& peers);
void add_ggml_peers(const std::vector<IndexSelect>& copies, const std::shared_ptr<void>& storage,
                    std::vector<Peer>& peers);

// ---- peer_softmax_avx512_bf16.cpp ----

/// One block of an online softmax by rows, for peers that leave it to us. scores: fp32 [rows][keys], keys a multiple
/// of 16; weights: bf16 [rows][keys]; m, z: running maximum (in units of log2) and sum; o: fp32 [rows][columns],
/// columns a multiple of 16, multiplied by what the new maximum asks for.
void peer_softmax_avx512_bf16(const float* scores, int rows, int keys, float scale_log2e, float* m, float* z,
                              uint16_t* weights, float* o, int columns);
/// o (+)= of another state (m2, z2, o2) of one row.
void peer_merge_avx512_bf16(float* m, float* z, float* o, float m2, float z2, const float* o2, int columns);
/// out = bf16(o / z).
void peer_write_avx512_bf16(const float* o, float z, uint16_t* out, int columns);

}  // namespace bench
}  // namespace v0
}  // namespace gannet
