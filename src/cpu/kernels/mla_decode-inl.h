// Dense absorbed attention over pages: where the keys of a request lie and how many each of its rows sees. The
// computation is in absorbed-inl.h.
#ifndef GANNET_CPU_KERNELS_MLA_DECODE_INL_H_
#define GANNET_CPU_KERNELS_MLA_DECODE_INL_H_

#include "cpu/kernels/absorbed-inl.h"
#include "cpu/kernels/query_rows-inl.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace {

struct PagedKeys {
  using Item = RequestRows;
  static constexpr bool kList = false;
  const MlaDecode& p;
  int64_t row_stride;  // from a row to the next; of planar pages, from its latent part
  int64_t num_items;   // requests

  explicit PagedKeys(const MlaDecode& params)
      : p(params),
        row_stride(params.cache.format == LatentFormat::kE4m3PerToken ? params.cache.geometry.latent_dim
                                                                      : row_stride_of(params.cache)),
        num_items(params.rows.seq_lens.shape[0]) {}

  Item item(int64_t i) const { return request_rows(p.pages, p.rows, p.cache.page_size, p.q.shape[0], i); }
  int64_t num_keys(const Item& r, int64_t j) const { return visible_keys(r, p.rows.bound, j); }
  int gather(const Item& r, int32_t segment, int n, const std::byte** rows, int32_t* offsets) const {
    const int64_t first = int64_t{segment} * kSegmentKeys;
    int64_t page = first / p.cache.page_size, offset = first % p.cache.page_size;
    for (int t = 0; t < n; ++page, offset = 0) {
      const std::byte* at = static_cast<const std::byte*>(p.cache.data) + r.pages[page] * p.cache.page_stride_bytes;
      for (; t < n && offset < p.cache.page_size; ++t, ++offset) {
        rows[t] = at + offset * row_stride;
        offsets[t] = static_cast<int32_t>(offset);
      }
    }
    return n;
  }
};

Problem problem_of(const MlaDecode& p) {
  int64_t lanes = p.rows.cu_q_lens.given() ? p.q.shape[0] : p.rows.q_len;
  lanes *= p.q.shape[1];
  return make_problem(p, lanes);
}

// More than any request has: the segments that a table row, or all of a CSR table, can reach.
int64_t max_segments_of(const MlaDecode& p) {
  const int64_t columns = p.pages.form == PageTableForm::kCsr ? p.pages.indices.shape[0] : p.pages.pages.shape[1];
  return (columns * p.cache.page_size + kSegmentKeys - 1) / kSegmentKeys;
}

}  // namespace

size_t workspace_mla_decode(const MlaDecode& p, int num_workers) {
  return absorbed_workspace(problem_of(p), max_segments_of(p), num_workers);
}

void run_mla_decode(const MlaDecode& p, const RunContext& ctx) {
  run_absorbed(problem_of(p), PagedKeys(p), max_segments_of(p), ctx);
}

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet

#endif  // GANNET_CPU_KERNELS_MLA_DECODE_INL_H_
