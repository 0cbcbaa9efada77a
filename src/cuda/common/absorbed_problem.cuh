// What the tensor-core kernels of absorbed attention know about their two problems, dense over pages and sparse over
// slot lists: groups of lanes that share keys, how many keys each sees, and where a key lies.
#pragma once

#include <cstdint>

#include "cuda/common/views.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace absorbed {

constexpr int kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
constexpr int kChunks = kWidth / 8;  // 16-byte pieces of a bf16 row

/// What both operations give the kernel.
struct Common {
  const uint16_t* q;  // bf16
  int64_t q_row_stride, q_head_stride;
  int num_heads;
  LatentCacheView cache;
  float softmax_scale;
  // Results of the only split go to out; of several, to partial [split][row][head][512] fp32 and partial_lse (natural).
  void* out;
  DType out_dtype;
  int64_t out_row_stride, out_head_stride;
  float* lse;  // or nullptr
  int64_t lse_row_stride;
  const float* sink;  // of each head, or nullptr
  float* max_logits;  // or nullptr
  int64_t max_row_stride;
  bool q_e4m3;  // q holds e4m3 instead, strides in values; its scale is part of softmax_scale
  float* partial;
  float* partial_lse;
  int num_splits;
  int64_t num_rows;
};

/// Lanes are rows x heads of one request.
struct Dense : Common {
  Rows rows;
  Pages pages;
  int max_q_len;

  struct Place {
    int64_t request, first_row, num_rows;
    PageList list;
    int64_t keys;      // of the row that sees most
    int64_t min_keys;  // of the row that sees least
  };
  __device__ int64_t lanes_per_group() const { return int64_t{max_q_len} * num_heads; }
  __device__ bool place(Place& g, int64_t request) const {
    g.request = request;
    g.first_row = rows.cu_q_lens != nullptr ? rows.cu_q_lens[request] : request * rows.q_len;
    g.num_rows = rows.cu_q_lens != nullptr ? rows.cu_q_lens[request + 1] - g.first_row : rows.q_len;
    g.list = page_list(pages, request);
    return g.num_rows > 0;
  }
  __device__ int64_t keys_of(const Place& g, int64_t row) const {
    const int64_t n = row_bound(rows.bound, rows.seq_lens[g.request], g.num_rows, row),
                  reach = g.list.num_pages * cache.page_size;
    return n < reach ? n : reach;
  }
  __device__ int64_t slot(const Place& g, int64_t key) const {
    return slot_of(g.list, key, cache.page_size, cache.num_pages);
  }
  /// Where a bf16 row lies; nullptr for a page outside the pool. Positions and sizes fit 32 bits, offsets do not.
  __device__ const unsigned char* bf16_row(const Place& g, int64_t key) const {
    const auto position = static_cast<uint32_t>(key), size = static_cast<uint32_t>(cache.page_size);
    const int64_t page = g.list.ids[position / size];
    if (page < 0 || page >= cache.num_pages) return nullptr;
    return static_cast<const unsigned char*>(cache.data) + page * cache.page_stride_bytes +
           position % size * (2 * kWidth);
  }
};

/// Lanes are heads of one row.
struct Sparse : Common {
  const int32_t* slots;
  const int32_t* lens;  // or nullptr
  int64_t slots_row_stride, list_width;

  struct Place {
    int64_t first_row, num_rows;
    const int32_t* list;
  };
  __device__ int64_t lanes_per_group() const { return num_heads; }
  __device__ bool place(Place& g, int64_t row) const {
    g.first_row = row;
    g.num_rows = 1;
    g.list = slots + row * slots_row_stride;
    return true;
  }
  __device__ int64_t keys_of(const Place& g, int64_t) const {
    return lens == nullptr ? list_width : max(int64_t{0}, min(list_width, static_cast<int64_t>(lens[g.first_row])));
  }
  __device__ int64_t slot(const Place& g, int64_t key) const {
    const int64_t s = g.list[key];
    return s >= 0 && s < cache.num_pages * cache.page_size ? s : -1;
  }
  __device__ const unsigned char* bf16_row(const Place& g, int64_t key) const {
    const int32_t slot = g.list[key];
    if (slot < 0 || slot >= cache.num_pages * cache.page_size) return nullptr;
    const auto position = static_cast<uint32_t>(slot), size = static_cast<uint32_t>(cache.page_size);
    return static_cast<const unsigned char*>(cache.data) + position / size * cache.page_stride_bytes +
           position % size * (2 * kWidth);
  }
};

__device__ inline uint32_t pack_bf16(float low, float high) {
  return static_cast<uint32_t>(float_to_bf16(low)) | static_cast<uint32_t>(float_to_bf16(high)) << 16;
}

/// Eight values of a row, from column 8 * chunk, as bf16 pairs.
template <LatentFormat kFormat>
__device__ inline uint4 load_chunk(const LatentCacheView& c, int64_t slot, int chunk) {
  if constexpr (kFormat == LatentFormat::kBf16) {
    const auto* row = static_cast<const unsigned char*>(c.data) + slot / c.page_size * c.page_stride_bytes +
                      slot % c.page_size * (2 * kWidth);
    return *reinterpret_cast<const uint4*>(row + 16 * chunk);
  } else {
    float x[8];
    for (int i = 0; i < 8; ++i) x[i] = load_latent(c, slot, 8 * chunk + i);
    return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
  }
}

/// Replaces NaN and infinities by zeros; true if there were any.
__device__ inline bool drop_non_finite(uint4& v) {
  bool found = false;
  auto fix = [&](uint32_t& w) {
    if ((w & 0x7f80u) == 0x7f80u) w &= 0xffff0000u, found = true;
    if ((w & 0x7f800000u) == 0x7f800000u) w &= 0x0000ffffu, found = true;
  };
  fix(v.x), fix(v.y), fix(v.z), fix(v.w);
  return found;
}

}  // namespace absorbed
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
