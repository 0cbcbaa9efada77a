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

std::vector<float> selection_result(const IndexSelect& p, std::span<const int32_t> slots) {
  const int64_t rows = p.topk_slots.shape[0], topk = p.topk_slots.shape[1], all = p.cache.num_pages * p.cache.page_size;
  std::vector<float> chosen(static_cast<size_t>(rows * all));
  for (int64_t i = 0; i < rows * topk; ++i)
    if (const int32_t slot = slots[static_cast<size_t>(i)]; slot >= 0)
      chosen[static_cast<size_t>(i / topk * all + slot)] = 1.0f;
  return chosen;
}

std::vector<Peer> peers_of(const std::vector<MlaDecode>& copies, const std::shared_ptr<void>& storage) {
  std::vector<Peer> peers;
  const MlaDecode& p = copies.front();
  if (p.q.shape[0] != 1 || p.q.dtype != DType::kBf16 || p.cache.format != LatentFormat::kBf16) return peers;
  add_onednn_peers(copies, storage, peers);
  add_ggml_peers(copies, storage, peers);
  return peers;
}

std::vector<Peer> peers_of(const std::vector<SparseAttention>& copies, const std::shared_ptr<void>& storage) {
  std::vector<Peer> peers;
  const SparseAttention& p = copies.front();
  if (p.q.shape[0] == 1 && p.q.dtype == DType::kBf16 && p.cache.format == LatentFormat::kBf16)
    add_ggml_peers(copies, storage, peers);
  return peers;
}

std::vector<Peer> peers_of(const std::vector<IndexSelect>& copies, const std::shared_ptr<void>& storage) {
  std::vector<Peer> peers;
  const IndexSelect& p = copies.front();
  // An indexer that selects all there is has nothing to do, and is refused there.
  if (p.rows.seq_lens.shape[0] == 1 && p.q.dtype == DType::kBf16 && p.cache.format != IndexKFormat::kF32 &&
      *p.rows.seq_lens.ptr<const int32_t>() > p.topk_slots.shape[1])
    add_ggml_peers(copies, storage, peers);
  return peers;
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet
