// Cache layouts: what a page of latent rows and a page of index keys look like (docs/kv_layouts.md has worked
// addresses). These are views; owners and the page allocator are in gannet/kv_pool.h.
//
// Address of a latent row: data + page * page_stride_bytes + offset * row_stride, 64-bit throughout.
#pragma once

#include <tuple>

#include "gannet/tensor.h"

namespace gannet {
inline namespace v0 {

enum class LatentFormat : uint8_t {
  kF32,   ///< fp32 [latent | rope]
  kBf16,  ///< bf16 [latent | rope]
  kE4m3,  ///< e4m3 [latent | rope], one scale per tensor: stored value = sat(x / scale), rope included
  /// R e4m3 | R/128 fp32 scales, one per 128 latent values | P bf16 rope, unscaled: 656 bytes for 512 + 64. Written
  /// scales are powers of two, 2^ceil(log2(max(amax / 448, 1e-4))); read are any finite positive ones.
  kPacked656,
  /// Planar page: page_size * R e4m3 latent values, then page_size fp32 scales, then page_size * P bf16 rope values,
  /// token by token in each plane. scale = max(amax(latent), 1e-26) / 448; latent and rope are both stored divided by
  /// it.
  kE4m3PerToken,
};
GANNET_API const char* to_string(LatentFormat f) noexcept;

enum class IndexKFormat : uint8_t {
  kF32,   ///< fp32 [head_dim] a token
  kBf16,  ///< bf16 [head_dim] a token
  kE4m3,  ///< planar page: page_size * head_dim e4m3 values, then page_size fp32 scales
};
GANNET_API const char* to_string(IndexKFormat f) noexcept;

/// How the scale of an e4m3 index key is made. Writers of one pool never mix; readers take any finite positive scale.
enum class ScaleFormat : uint8_t {
  kFp32,        ///< max(amax, 1e-10) / 448
  kPowerOfTwo,  ///< 2^ceil(log2(max(amax, 1e-4) / 448))
};

/// Widths of a latent row. 512 + 64 is tuned; others run through the portable kernels or are refused by name.
struct RowGeometry {
  int32_t latent_dim = 512;  ///< kv_lora_rank, R
  int32_t rope_dim = 64;     ///< qk_rope_head_dim, P
  constexpr int32_t width() const noexcept { return latent_dim + rope_dim; }
  friend bool operator==(const RowGeometry&, const RowGeometry&) = default;
};

/// Bytes of one token's row; for kE4m3PerToken the sum over its planes.
GANNET_API int64_t latent_row_bytes(LatentFormat format, RowGeometry geometry) noexcept;
/// Bytes of one token's index key, scale included.
GANNET_API int64_t index_k_token_bytes(IndexKFormat format, int32_t head_dim) noexcept;

/// The latent cache of one layer.
struct LatentCacheView {
  void* data = nullptr;
  LatentFormat format = LatentFormat::kBf16;
  RowGeometry geometry{};
  int64_t num_pages = 0;
  int32_t page_size = 64;         ///< tokens
  int64_t page_stride_bytes = 0;  ///< at least the tokens of a page
  float scale = 0.0f;             ///< kE4m3 only: finite and positive; no other format reads it
  Device device{};
  /// From a token's row to the next; 0: rows lie one behind the other. Else a multiple of 16, at least
  /// latent_row_bytes, where other rows lie between (gannet/kv_heads.h); never for kE4m3PerToken.
  int64_t row_stride_bytes = 0;

  constexpr int64_t num_slots() const noexcept { return num_pages * page_size; }
  /// row_stride_bytes, or what 0 stands for. Of a planar page (kE4m3PerToken) rows have none.
  int64_t row_stride() const noexcept {
    return row_stride_bytes != 0 ? row_stride_bytes : latent_row_bytes(format, geometry);
  }
  std::byte* row(int64_t slot, int64_t row_bytes) const noexcept {
    return static_cast<std::byte*>(data) + slot / page_size * page_stride_bytes + slot % page_size * row_bytes;
  }
  auto options() const {
    return std::tuple{format, geometry.latent_dim, geometry.rope_dim, num_pages, page_size, page_stride_bytes,
                      scale,  row_stride_bytes};
  }
};

/// The index-key cache of one layer.
struct IndexCacheView {
  void* data = nullptr;
  IndexKFormat format = IndexKFormat::kE4m3;
  ScaleFormat scale_format = ScaleFormat::kFp32;
  int32_t head_dim = 128;
  int64_t num_pages = 0;
  int32_t page_size = 64;
  int64_t page_stride_bytes = 0;  ///< at least page_size * index_k_token_bytes
  Device device{};
  /// Keys are kept rotated (gannet/hadamard.h). Operations take keys and queries that are rotated already and say so,
  /// or they refuse: a cache never holds both kinds. Backends rotate by themselves.
  bool hadamard = false;

  constexpr int64_t num_slots() const noexcept { return num_pages * page_size; }
  /// Address of a token's values. Within a page the values of all formats lie token by token from offset 0.
  std::byte* values(int64_t slot) const noexcept {
    const int64_t value_bytes = head_dim * (format == IndexKFormat::kF32 ? 4 : format == IndexKFormat::kBf16 ? 2 : 1);
    return static_cast<std::byte*>(data) + slot / page_size * page_stride_bytes + slot % page_size * value_bytes;
  }
  /// kE4m3 only: address of a token's scale.
  float* scale(int64_t slot) const noexcept {
    return reinterpret_cast<float*>(static_cast<std::byte*>(data) + slot / page_size * page_stride_bytes +
                                    static_cast<int64_t>(page_size) * head_dim) +
           slot % page_size;
  }
  auto options() const {
    return std::tuple{format, scale_format, head_dim, num_pages, page_size, page_stride_bytes, hadamard};
  }
};

}  // namespace v0
}  // namespace gannet
