// Stands in for peers_ggml.cpp where the library was not found.
#include "bench/peers.h"

namespace gannet {
inline namespace v0 {
namespace bench {

void add_ggml_peers(const std::vector<MlaDecode>&, const std::shared_ptr<void>&, std::vector<Peer>&) {}
void add_ggml_peers(const std::vector<SparseAttention>&, const std::shared_ptr<void>&, std::vector<Peer>&) {}
void add_ggml_peers(const std::vector<IndexSelect>&, const std::shared_ptr<void>&, std::vector<Peer>&) {}

}  // namespace bench
}  // namespace v0
}  // namespace gannet
