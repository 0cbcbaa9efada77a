// latent_write, latent_gather, index_k_write, index_k_gather.
#include <vector>

#include "ref/cache_rows.h"
#include "ref/elements.h"
#include "ref/ref_ops.h"

namespace gannet {
inline namespace v0 {
namespace ref {

void run_latent_write(const LatentWrite& p, const RunContext&) {
  const int64_t r = p.cache.geometry.latent_dim;
  const int64_t width = p.cache.geometry.width();
  std::vector<float> row(static_cast<size_t>(width));
  for (int64_t t = 0; t < p.latent.shape[0]; ++t) {
    const int64_t slot = load_int(p.slots, t);
    if (slot < 0) continue;
    for (int64_t d = 0; d < width; ++d)
      row[static_cast<size_t>(d)] = static_cast<float>(d < r ? load(p.latent, t, d) : load(p.rope, t, d - r));
    write_latent(p.cache, slot, row.data());
  }
}

void run_latent_gather(const LatentGather& p, const RunContext&) {
  const int64_t r = p.cache.geometry.latent_dim;
  const int64_t width = p.cache.geometry.width();
  std::vector<double> row(static_cast<size_t>(width));
  for (int64_t t = 0; t < p.latent.shape[0]; ++t) {
    const int64_t slot = load_int(p.slots, t);
    if (slot < 0) row.assign(row.size(), 0.0);
    else read_latent(p.cache, slot, row.data());
    for (int64_t d = 0; d < r; ++d) store(p.latent, row[static_cast<size_t>(d)], t, d);
    for (int64_t d = r; d < width; ++d) store(p.rope, row[static_cast<size_t>(d)], t, d - r);
  }
}

void run_index_k_write(const IndexKWrite& p, const RunContext&) {
  std::vector<float> key(static_cast<size_t>(p.cache.head_dim));
  for (int64_t t = 0; t < p.k.shape[0]; ++t) {
    const int64_t slot = load_int(p.slots, t);
    if (slot < 0) continue;
    for (int64_t d = 0; d < p.cache.head_dim; ++d) key[static_cast<size_t>(d)] = static_cast<float>(load(p.k, t, d));
    write_index_k(p.cache, slot, key.data());
  }
}

void run_index_k_gather(const IndexKGather& p, const RunContext&) {
  std::vector<double> key(static_cast<size_t>(p.cache.head_dim));
  for (int64_t t = 0; t < p.k.shape[0]; ++t) {
    const int64_t slot = load_int(p.slots, t);
    if (slot < 0) key.assign(key.size(), 0.0);
    else read_index_k(p.cache, slot, key.data());
    for (int64_t d = 0; d < p.cache.head_dim; ++d) store(p.k, key[static_cast<size_t>(d)], t, d);
  }
}

}  // namespace ref
}  // namespace v0
}  // namespace gannet
