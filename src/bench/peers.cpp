#include "bench/peers.h"

#include <cstring>

namespace gannet {
inline namespace v0 {
namespace bench {

std::vector<uint16_t> contiguous_keys(const MlaDecode& p) {
  const int64_t width = p.q.shape[2], keys = p.rows.seq_lens.ptr<const int32_t>()[0];
  const int32_t* pages = p.pages.pages.ptr<const int32_t>(0);
  std::vector<uint16_t> all(static_cast<size_t>(keys * width));
  const auto row_bytes = static_cast<size_t>(width) * sizeof(uint16_t);
  for (int64_t i = 0; i < keys; ++i)
    std::memcpy(all.data() + i * width,
                static_cast<const std::byte*>(p.cache.data) + pages[i / p.cache.page_size] * p.cache.page_stride_bytes +
                    i % p.cache.page_size * static_cast<int64_t>(row_bytes),
                row_bytes);
  return all;
}

std::vector<Peer> mla_decode_peers(const std::vector<MlaDecode>& copies, const std::shared_ptr<void>& storage) {
  std::vector<Peer> peers;
  const MlaDecode& p = copies.front();
  if (p.q.shape[0] != 1 || p.q.dtype != DType::kBf16 || p.cache.format != LatentFormat::kBf16) return peers;
  add_onednn_peers(copies, storage, peers);
  add_ggml_peers(copies, storage, peers);
  return peers;
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet
