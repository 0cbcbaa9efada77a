#include "ref/cache_rows.h"

#include <cmath>
#include <cstring>

namespace gannet {
inline namespace v0 {
namespace ref {

namespace {

constexpr float kMax = 448.0f;         // largest e4m3
constexpr int64_t kPackedGroup = 128;  // latent values per scale of a packed row

template <class T>
T get(const std::byte* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <class T>
void put(std::byte* p, T x) {
  std::memcpy(p, &x, sizeof x);
}

double e4m3_at(const std::byte* p) { return get<E4m3>(p).to_float(); }
double bf16_at(const std::byte* p) { return get<Bf16>(p).to_float(); }

/// The largest magnitude; NaN values have none.
float amax(const float* x, int64_t n) {
  float m = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    if (std::fabs(x[i]) > m) m = std::fabs(x[i]);
  }
  return m;
}

/// The smallest power of two that is not below x, for x > 0: 2^ceil(log2(x)) without a logarithm.
float power_of_two_above(float x) {
  if (!std::isfinite(x)) return x;
  int exponent = 0;
  const float mantissa = std::frexp(x, &exponent);  // in [0.5, 1)
  return std::ldexp(1.0f, mantissa == 0.5f ? exponent - 1 : exponent);
}

std::byte* page_of(void* data, int64_t slot, int64_t page_size, int64_t page_stride_bytes) {
  return static_cast<std::byte*>(data) + slot / page_size * page_stride_bytes;
}

}  // namespace

void read_latent(const LatentCacheView& cache, int64_t slot, double* row) {
  const int64_t r = cache.geometry.latent_dim;
  const int64_t p = cache.geometry.rope_dim;
  const std::byte* page = page_of(cache.data, slot, cache.page_size, cache.page_stride_bytes);
  const int64_t offset = slot % cache.page_size;
  switch (cache.format) {
    case LatentFormat::kF32:
      for (int64_t d = 0; d < r + p; ++d) row[d] = get<float>(page + offset * cache.row_stride() + d * 4);
      break;
    case LatentFormat::kBf16:
      for (int64_t d = 0; d < r + p; ++d) row[d] = bf16_at(page + offset * cache.row_stride() + d * 2);
      break;
    case LatentFormat::kE4m3:
      for (int64_t d = 0; d < r + p; ++d)
        row[d] = e4m3_at(page + offset * cache.row_stride() + d) * static_cast<double>(cache.scale);
      break;
    case LatentFormat::kPacked656: {
      const int64_t groups = (r + kPackedGroup - 1) / kPackedGroup;
      const std::byte* values = page + offset * cache.row_stride();
      const std::byte* scales = values + r;
      const std::byte* rope = scales + 4 * groups;
      for (int64_t d = 0; d < r; ++d)
        row[d] = e4m3_at(values + d) * static_cast<double>(get<float>(scales + d / kPackedGroup * 4));
      for (int64_t d = 0; d < p; ++d) row[r + d] = bf16_at(rope + d * 2);
      break;
    }
    case LatentFormat::kE4m3PerToken: {
      const std::byte* values = page + offset * r;
      const std::byte* scales = page + cache.page_size * r;
      const std::byte* rope = scales + int64_t{cache.page_size} * 4 + offset * p * 2;
      const double scale = get<float>(scales + offset * 4);
      for (int64_t d = 0; d < r; ++d) row[d] = e4m3_at(values + d) * scale;
      for (int64_t d = 0; d < p; ++d) row[r + d] = bf16_at(rope + d * 2) * scale;
      break;
    }
  }
}

void write_latent(const LatentCacheView& cache, int64_t slot, const float* row) {
  const int64_t r = cache.geometry.latent_dim;
  const int64_t p = cache.geometry.rope_dim;
  std::byte* page = page_of(cache.data, slot, cache.page_size, cache.page_stride_bytes);
  const int64_t offset = slot % cache.page_size;
  switch (cache.format) {
    case LatentFormat::kF32:
      for (int64_t d = 0; d < r + p; ++d) put(page + offset * cache.row_stride() + d * 4, row[d]);
      break;
    case LatentFormat::kBf16:
      for (int64_t d = 0; d < r + p; ++d) put(page + offset * cache.row_stride() + d * 2, Bf16::from_float(row[d]));
      break;
    case LatentFormat::kE4m3:
      for (int64_t d = 0; d < r + p; ++d)
        put(page + offset * cache.row_stride() + d, E4m3::from_float(row[d] / cache.scale));
      break;
    case LatentFormat::kPacked656: {
      // A power of two, so that readers that round the scale to bf16 are exact too (spec 3.10); floor 1e-4.
      const int64_t groups = (r + kPackedGroup - 1) / kPackedGroup;
      std::byte* values = page + offset * cache.row_stride();
      std::byte* scales = values + r;
      std::byte* rope = scales + 4 * groups;
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t begin = g * kPackedGroup;
        const int64_t end = begin + kPackedGroup < r ? begin + kPackedGroup : r;
        const float scale = power_of_two_above(std::fmax(amax(row + begin, end - begin) / kMax, 1e-4f));
        put(scales + g * 4, scale);
        for (int64_t d = begin; d < end; ++d) put(values + d, E4m3::from_float(row[d] / scale));
      }
      for (int64_t d = 0; d < p; ++d) put(rope + d * 2, Bf16::from_float(row[r + d]));
      break;
    }
    case LatentFormat::kE4m3PerToken: {
      std::byte* values = page + offset * r;
      std::byte* scales = page + cache.page_size * r;
      std::byte* rope = scales + int64_t{cache.page_size} * 4 + offset * p * 2;
      const float scale = std::fmax(amax(row, r), 1e-26f) / kMax;
      put(scales + offset * 4, scale);
      for (int64_t d = 0; d < r; ++d) put(values + d, E4m3::from_float(row[d] / scale));
      for (int64_t d = 0; d < p; ++d) put(rope + d * 2, Bf16::from_float(row[r + d] / scale));
      break;
    }
  }
}

void read_index_k(const IndexCacheView& cache, int64_t slot, double* key) {
  const int64_t n = cache.head_dim;
  const std::byte* page = page_of(cache.data, slot, cache.page_size, cache.page_stride_bytes);
  const int64_t offset = slot % cache.page_size;
  switch (cache.format) {
    case IndexKFormat::kF32:
      for (int64_t d = 0; d < n; ++d) key[d] = get<float>(page + (offset * n + d) * 4);
      break;
    case IndexKFormat::kBf16:
      for (int64_t d = 0; d < n; ++d) key[d] = bf16_at(page + (offset * n + d) * 2);
      break;
    case IndexKFormat::kE4m3: {
      const double scale = get<float>(page + cache.page_size * n + offset * 4);
      for (int64_t d = 0; d < n; ++d) key[d] = e4m3_at(page + offset * n + d) * scale;
      break;
    }
  }
}

void write_index_k(const IndexCacheView& cache, int64_t slot, const float* key) {
  const int64_t n = cache.head_dim;
  std::byte* page = page_of(cache.data, slot, cache.page_size, cache.page_stride_bytes);
  const int64_t offset = slot % cache.page_size;
  switch (cache.format) {
    case IndexKFormat::kF32:
      for (int64_t d = 0; d < n; ++d) put(page + (offset * n + d) * 4, key[d]);
      break;
    case IndexKFormat::kBf16:
      for (int64_t d = 0; d < n; ++d) put(page + (offset * n + d) * 2, Bf16::from_float(key[d]));
      break;
    case IndexKFormat::kE4m3: {
      const float largest = amax(key, n);
      const float scale = cache.scale_format == ScaleFormat::kFp32
                              ? std::fmax(largest, 1e-10f) / kMax
                              : power_of_two_above(std::fmax(largest, 1e-4f) / kMax);
      put(page + cache.page_size * n + offset * 4, scale);
      for (int64_t d = 0; d < n; ++d) put(page + offset * n + d, E4m3::from_float(key[d] / scale));
      break;
    }
  }
}

}  // namespace ref
}  // namespace v0
}  // namespace gannet
