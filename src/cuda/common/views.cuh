// Views as kernels see them: plain structs passed by value, and the arithmetic of rows, bounds, pages and slots.
#pragma once

#include "cuda/common/convert.cuh"
#include "gannet/kv_cache.h"
#include "gannet/page_table.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

/// The rows of a call on the device: which request a row belongs to and how many keys it sees.
struct Rows {
  const int32_t* seq_lens;
  const int32_t* cu_q_lens;  // or nullptr: q_len rows each
  int64_t num_requests;
  int32_t q_len;
  RowBound bound;
};

inline Rows make_rows(const QueryRows& r) {
  return {static_cast<const int32_t*>(r.seq_lens.data),
          r.cu_q_lens.given() ? static_cast<const int32_t*>(r.cu_q_lens.data) : nullptr, r.seq_lens.shape[0], r.q_len,
          r.bound};
}

struct RowPlace {
  int64_t request;  // -1: the row belongs to none (beyond cu_q_lens' end)
  int64_t num_keys;
};

/// The page table on the device.
struct Pages {
  const int32_t* pages;        // padded
  const int32_t* row_indices;  // padded, or nullptr
  const int32_t* indptr;       // CSR, or nullptr
  const int32_t* indices;      // CSR
  int64_t row_stride;
  int64_t num_columns;
  int64_t num_table_rows;
  int64_t num_indices;
};

inline Pages make_pages(const PageTableView& t) {
  Pages p{};
  if (t.form == PageTableForm::kPadded) {
    p.pages = static_cast<const int32_t*>(t.pages.data);
    p.row_indices = t.row_indices.given() ? static_cast<const int32_t*>(t.row_indices.data) : nullptr;
    p.row_stride = t.pages.stride[0];
    p.num_columns = t.pages.shape[1];
    p.num_table_rows = t.pages.shape[0];
  } else {
    p.indptr = static_cast<const int32_t*>(t.indptr.data);
    p.indices = static_cast<const int32_t*>(t.indices.data);
    p.num_indices = t.indices.shape[0];
  }
  return p;
}

/// A request's pages: num_pages page ids.
struct PageList {
  const int32_t* ids;
  int64_t num_pages;
};

__device__ inline PageList page_list(const Pages& t, int64_t request) {
  if (t.indptr != nullptr) {
    int64_t begin = t.indptr[request], end = t.indptr[request + 1];
    if (begin < 0) begin = 0;
    if (end > t.num_indices) end = t.num_indices;  // memory protection only: the host checks what it can
    return {t.indices + begin, end > begin ? end - begin : 0};
  }
  const int64_t row = t.row_indices != nullptr ? t.row_indices[request] : request;
  if (row < 0 || row >= t.num_table_rows) return {t.pages, 0};
  return {t.pages + row * t.row_stride, t.num_columns};
}

/// Slot of a position, or -1 where the table names a page outside the pool.
__device__ inline int64_t slot_of(const PageList& list, int64_t position, int page_size, int64_t num_pages) {
  const int64_t page = list.ids[position / page_size];
  return page >= 0 && page < num_pages ? page * page_size + position % page_size : -1;
}

__device__ inline RowPlace place_row(const Rows& r, const Pages& t, int page_size, int64_t row) {
  int64_t request, j, count;
  if (r.cu_q_lens != nullptr) {
    int64_t low = 0, high = r.num_requests;  // the last request whose first row is at or before this one
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      if (r.cu_q_lens[middle] <= row) low = middle;
      else high = middle;
    }
    request = low;
    j = row - r.cu_q_lens[request];
    count = r.cu_q_lens[request + 1] - r.cu_q_lens[request];
    if (j < 0 || j >= count) return {-1, 0};
  } else {
    request = row / r.q_len;
    j = row % r.q_len;
    count = r.q_len;
  }
  int64_t n = row_bound(r.bound, r.seq_lens[request], count, j);
  const int64_t reach = page_list(t, request).num_pages * page_size;
  return {request, n < reach ? n : reach};
}

/// A cache as kernels take it: with a row stride even where rows lie one behind the other.
inline LatentCacheView with_row_stride(LatentCacheView c) {
  c.row_stride_bytes = c.row_stride();
  return c;
}

/// Value d of a latent row as fp32; d < R is latent, the rest rope. The cache went through with_row_stride.
__device__ inline float load_latent(const LatentCacheView& c, int64_t slot, int d) {
  const auto* page = static_cast<const unsigned char*>(c.data) + slot / c.page_size * c.page_stride_bytes;
  const int64_t offset = slot % c.page_size;
  const unsigned char* row = page + offset * c.row_stride_bytes;
  const int r = c.geometry.latent_dim;
  switch (c.format) {
    case LatentFormat::kF32: return reinterpret_cast<const float*>(row)[d];
    case LatentFormat::kBf16: return bf16_to_float(reinterpret_cast<const uint16_t*>(row)[d]);
    case LatentFormat::kE4m3: return e4m3_to_float(row[d]) * c.scale;
    case LatentFormat::kPacked656: {
      const int groups = (r + 127) / 128;
      if (d < r) return e4m3_to_float(row[d]) * reinterpret_cast<const float*>(row + r)[d / 128];
      return bf16_to_float(reinterpret_cast<const uint16_t*>(row + r + 4 * groups)[d - r]);
    }
    case LatentFormat::kE4m3PerToken: {
      const float* scales = reinterpret_cast<const float*>(page + int64_t{c.page_size} * r);
      if (d < r) return e4m3_to_float(page[offset * r + d]) * scales[offset];
      const auto* rope = reinterpret_cast<const uint16_t*>(scales + c.page_size);
      return bf16_to_float(rope[offset * c.geometry.rope_dim + d - r]) * scales[offset];
    }
  }
  return 0.0f;
}

/// Value d of an index key as stored; the scale of an e4m3 key is index_k_scale.
__device__ inline float load_index_k(const IndexCacheView& c, int64_t slot, int d) {
  const auto* page = static_cast<const unsigned char*>(c.data) + slot / c.page_size * c.page_stride_bytes;
  const int64_t i = slot % c.page_size * c.head_dim + d;
  switch (c.format) {
    case IndexKFormat::kF32: return reinterpret_cast<const float*>(page)[i];
    case IndexKFormat::kBf16: return bf16_to_float(reinterpret_cast<const uint16_t*>(page)[i]);
    case IndexKFormat::kE4m3: return e4m3_to_float(page[i]);
  }
  return 0.0f;
}
__device__ inline float index_k_scale(const IndexCacheView& c, int64_t slot) {
  if (c.format != IndexKFormat::kE4m3) return 1.0f;
  const auto* page = static_cast<const unsigned char*>(c.data) + slot / c.page_size * c.page_stride_bytes;
  return reinterpret_cast<const float*>(page + int64_t{c.page_size} * c.head_dim)[slot % c.page_size];
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
