// Names and conversions.
#include <bit>
#include <cmath>
#include <cstring>

#include "core/format.h"
#include "gannet/dtype.h"
#include "gannet/error.h"
#include "gannet/kv_cache.h"
#include "gannet/page_table.h"
#include "gannet/tensor.h"
#include "gannet/version.h"

#define GANNET_STRINGIFY_(x) #x
#define GANNET_STRINGIFY(x) GANNET_STRINGIFY_(x)
#define GANNET_VERSION_TEXT              \
  GANNET_STRINGIFY(GANNET_VERSION_MAJOR) \
  "." GANNET_STRINGIFY(GANNET_VERSION_MINOR) "." GANNET_STRINGIFY(GANNET_VERSION_PATCH)

extern "C" const char* gannet_version(void) { return GANNET_VERSION_TEXT; }

namespace gannet {
inline namespace v0 {

const char* version() noexcept { return GANNET_VERSION_TEXT; }

const char* to_string(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "invalid argument";
    case ErrorCode::kUnsupported: return "unsupported";
    case ErrorCode::kOutOfMemory: return "out of memory";
    case ErrorCode::kDevice: return "device error";
    case ErrorCode::kCorruptFile: return "corrupt file";
  }
  return "unknown";
}

const char* to_string(DType t) noexcept {
  switch (t) {
    case DType::kF32: return "fp32";
    case DType::kBf16: return "bf16";
    case DType::kF16: return "fp16";
    case DType::kE4m3: return "e4m3";
    case DType::kU8: return "uint8";
    case DType::kI32: return "int32";
    case DType::kI64: return "int64";
  }
  return "unknown";
}

std::string to_string(Device d) { return d.kind == DeviceKind::kCpu ? "cpu" : fmt::format("cuda:{}", d.index); }

const char* to_string(RowBound b) noexcept {
  switch (b) {
    case RowBound::kCausalFull: return "causal_full";
    case RowBound::kCausalFromFirst: return "causal_from_first";
    case RowBound::kUniformBlock: return "uniform_block";
  }
  return "unknown";
}

const char* to_string(LatentFormat f) noexcept {
  switch (f) {
    case LatentFormat::kF32: return "fp32";
    case LatentFormat::kBf16: return "bf16";
    case LatentFormat::kE4m3: return "e4m3";
    case LatentFormat::kPacked656: return "packed656";
    case LatentFormat::kE4m3PerToken: return "e4m3_per_token";
  }
  return "unknown";
}

const char* to_string(IndexKFormat f) noexcept {
  switch (f) {
    case IndexKFormat::kF32: return "fp32";
    case IndexKFormat::kBf16: return "bf16";
    case IndexKFormat::kE4m3: return "e4m3";
  }
  return "unknown";
}

int64_t latent_row_bytes(LatentFormat format, RowGeometry g) noexcept {
  switch (format) {
    case LatentFormat::kF32: return int64_t{4} * g.width();
    case LatentFormat::kBf16: return int64_t{2} * g.width();
    case LatentFormat::kE4m3: return g.width();
    case LatentFormat::kPacked656:
      return g.latent_dim + int64_t{4} * ((g.latent_dim + 127) / 128) + int64_t{2} * g.rope_dim;
    case LatentFormat::kE4m3PerToken: return g.latent_dim + int64_t{4} + int64_t{2} * g.rope_dim;
  }
  return 0;
}

int64_t index_k_token_bytes(IndexKFormat format, int32_t head_dim) noexcept {
  switch (format) {
    case IndexKFormat::kF32: return int64_t{4} * head_dim;
    case IndexKFormat::kBf16: return int64_t{2} * head_dim;
    case IndexKFormat::kE4m3: return int64_t{head_dim} + 4;
  }
  return 0;
}

E4m3 E4m3::from_float(float x) noexcept {
  if (std::isnan(x)) return {0x7F};
  const uint8_t sign = std::signbit(x) ? 0x80 : 0x00;
  const float a = std::fabs(x);
  if (a >= 448.0f) return {static_cast<uint8_t>(sign | 0x7E)};  // 448 = 0b1111'110; saturates
  // Below 2^-6 the step is 2^-9; above, 2^(exponent - 3). nearbyint rounds to nearest even in the default mode.
  int exponent = 0;
  std::frexp(a, &exponent);  // a = f * 2^exponent, f in [0.5, 1)
  const int e = a < 0x1p-6f ? -6 : exponent - 1;
  const int steps = static_cast<int>(std::nearbyint(std::ldexp(a, 3 - e)));  // in [0, 16]
  // steps counts units of 2^(e-3): 8..15 are normal mantissas, 16 carries into the exponent, below 8 is subnormal.
  const int code = steps < 8 ? steps : ((e + 7) << 3) + (steps - 8);
  return {static_cast<uint8_t>(sign | (code > 0x7E ? 0x7E : code))};
}

float E4m3::to_float() const noexcept {
  const uint32_t exponent = (bits >> 3) & 15u;
  const uint32_t mantissa = bits & 7u;
  if (exponent == 15 && mantissa == 7) return std::nanf("");
  constexpr uint32_t kBias = 127 - 7;  // from the bias of e4m3 to that of fp32
  const float a = exponent == 0 ? static_cast<float>(mantissa) * 0x1p-9f
                                : std::bit_cast<float>((exponent + kBias) << 23 | mantissa << 20);
  return (bits & 0x80) != 0 ? -a : a;
}

std::string describe(const TensorView& v) {
  if (!v.given()) return "absent";
  std::string shape;
  std::string stride;
  for (size_t i = 0; i < static_cast<size_t>(v.rank); ++i) {
    shape += fmt::format("{}{}", i > 0 ? ", " : "", v.shape[i]);
    stride += fmt::format("{}{}", i > 0 ? ", " : "", v.stride[i]);
  }
  return fmt::format("{}[{}] strides [{}] on {}", to_string(v.dtype), shape, stride, to_string(v.device));
}

}  // namespace v0
}  // namespace gannet
