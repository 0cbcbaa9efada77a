// Sparse absorbed attention: each row attends to the slots of its own list. The computation is in absorbed-inl.h; since
// it reads cache rows where they lie, a list costs what a dense range of the same length costs.
#ifndef GANNET_CPU_KERNELS_SPARSE_ATTENTION_INL_H_
#define GANNET_CPU_KERNELS_SPARSE_ATTENTION_INL_H_

#include "cpu/kernels/absorbed-inl.h"

namespace gannet {
inline namespace v0 {
namespace cpu {
namespace GANNET_ISA {
namespace {

struct ListedKeys {
  struct Item {
    int64_t first_row;
    int64_t num_rows;
  };
  static constexpr bool kList = true;
  const SparseAttention& p;
  int64_t row_stride;
  int64_t num_slots;
  int64_t num_items;  // query rows

  explicit ListedKeys(const SparseAttention& params)
      : p(params),
        row_stride(row_stride_of(params.cache)),
        num_slots(params.cache.num_pages * params.cache.page_size),
        num_items(params.q.shape[0]) {}

  Item item(int64_t i) const { return {i, 1}; }
  int64_t num_keys(const Item& r, int64_t) const {
    const int64_t columns = p.topk_slots.shape[1];
    if (!p.topk_lens.given()) return columns;
    return larger(0,
                  smaller(columns, static_cast<const int32_t*>(p.topk_lens.data)[r.first_row * p.topk_lens.stride[0]]));
  }
  // Entries outside the pool may stand anywhere; the others keep their order. Planar pages are refused (cpu_set.h).
  int gather(const Item& r, int32_t segment, int n, const std::byte** rows, int32_t*) const {
    const int32_t* slots = static_cast<const int32_t*>(p.topk_slots.data) + r.first_row * p.topk_slots.stride[0] +
                           int64_t{segment} * kSegmentKeys;
    const auto* base = static_cast<const std::byte*>(p.cache.data);
    const bool flat = p.cache.page_stride_bytes == p.cache.page_size * row_stride;
    int valid = 0;
    for (int t = 0; t < n; ++t) {
      const int64_t slot = slots[t];
      if (slot < 0 || slot >= num_slots) continue;
      rows[valid++] =
          flat ? base + slot * row_stride
               : base + slot / p.cache.page_size * p.cache.page_stride_bytes + slot % p.cache.page_size * row_stride;
    }
    return valid;
  }
};

Problem problem_of(const SparseAttention& p) { return make_problem(p, p.q.shape[1]); }

int64_t max_segments_of(const SparseAttention& p) { return (p.topk_slots.shape[1] + kSegmentKeys - 1) / kSegmentKeys; }

}  // namespace

size_t workspace_sparse_attention(const SparseAttention& p, int num_workers) {
  return absorbed_workspace(problem_of(p), max_segments_of(p), num_workers);
}

void run_sparse_attention(const SparseAttention& p, const RunContext& ctx) {
  run_absorbed(problem_of(p), ListedKeys(p), max_segments_of(p), ctx);
}

}  // namespace GANNET_ISA
}  // namespace cpu
}  // namespace v0
}  // namespace gannet

#endif  // GANNET_CPU_KERNELS_SPARSE_ATTENTION_INL_H_
