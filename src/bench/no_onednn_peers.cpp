// Stands in for peers_onednn.cpp where the library was not found.
#include "bench/peers.h"

namespace gannet {
inline namespace v0 {
namespace bench {

void add_onednn_peers(const std::vector<MlaDecode>&, const std::shared_ptr<void>&, std::vector<Peer>&) {}

}  // namespace bench
}  // namespace v0
}  // namespace gannet
