// Names, conversions, views, and the worked addresses of docs/kv_layouts.md.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "core/implementation.h"
#include "gannet/gannet.h"

namespace {

using gannet::Bf16;
using gannet::DType;
using gannet::E4m3;
using gannet::IndexCacheView;
using gannet::IndexKFormat;
using gannet::LatentCacheView;
using gannet::LatentFormat;

constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNan = std::nanf("");

TEST(E4m3, RoundTripsEveryCode) {
  for (int code = 0; code < 256; ++code) {
    const float x = E4m3{static_cast<uint8_t>(code)}.to_float();
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(x));
      EXPECT_EQ(E4m3::from_float(x).bits, 0x7f);
    } else {
      EXPECT_EQ(E4m3::from_float(x).bits, code) << x;
    }
  }
}

TEST(E4m3, RoundsToNearestEvenBetweenAllNeighbours) {
  for (int code = 0; code < 0x7e; ++code) {
    const float low = E4m3{static_cast<uint8_t>(code)}.to_float();
    const float high = E4m3{static_cast<uint8_t>(code + 1)}.to_float();
    const float middle = (low + high) / 2;  // exact: 4 significant bits
    const int even = (code & 1) == 0 ? code : code + 1;
    EXPECT_EQ(E4m3::from_float(middle).bits, even) << middle;
    EXPECT_EQ(E4m3::from_float(std::nextafter(middle, 0.0f)).bits, code) << middle;
    EXPECT_EQ(E4m3::from_float(std::nextafter(middle, kInf)).bits, code + 1) << middle;
    EXPECT_EQ(E4m3::from_float(-middle).bits, even | 0x80) << middle;
  }
}

TEST(E4m3, SaturatesAndKeepsNan) {
  for (const float x : {448.0f, 449.0f, 464.0f, 480.0f, 1e30f, std::numeric_limits<float>::max(), kInf}) {
    EXPECT_EQ(E4m3::from_float(x).to_float(), 448.0f) << x;
    EXPECT_EQ(E4m3::from_float(-x).to_float(), -448.0f) << x;
  }
  EXPECT_EQ(E4m3::from_float(kNan).bits, 0x7f);
  EXPECT_EQ(E4m3::from_float(-kNan).bits, 0x7f);
  EXPECT_EQ(E4m3::from_float(0x1p-10f).bits, 0);  // half of the smallest, a tie: to the even 0
  EXPECT_EQ(E4m3::from_float(-0.0f).bits, 0x80);
  EXPECT_EQ(E4m3::from_float(0x1.8p-10f).to_float(), 0x1p-9f);
}

TEST(Bf16, RoundsToNearestEvenAndKeepsNan) {
  EXPECT_EQ(Bf16::from_float(1.0f).bits, 0x3f80);
  EXPECT_EQ(Bf16::from_float(1.0f + 0x1p-8f).bits, 0x3f80);            // a tie: to the even neighbour below
  EXPECT_EQ(Bf16::from_float(1.0f + 0x1p-7f + 0x1p-8f).bits, 0x3f82);  // a tie: to the even neighbour above
  EXPECT_EQ(Bf16::from_float(1.0f + 0x1p-8f + 0x1p-20f).bits, 0x3f81);
  EXPECT_EQ(Bf16::from_float(std::numeric_limits<float>::max()).to_float(), kInf);
  EXPECT_EQ(Bf16::from_float(-kInf).to_float(), -kInf);
  const uint32_t signalling = 0x7f800001;  // its upper half alone would be an infinity
  float nan;
  std::memcpy(&nan, &signalling, sizeof nan);
  EXPECT_TRUE(std::isnan(Bf16::from_float(nan).to_float()));
}

TEST(Version, IsTheHeadersInEveryForm) {
  const std::string expected = std::to_string(GANNET_VERSION_MAJOR) + "." + std::to_string(GANNET_VERSION_MINOR) + "." +
                               std::to_string(GANNET_VERSION_PATCH);
  EXPECT_EQ(gannet::version(), expected);
  EXPECT_EQ(gannet_version(), expected);
}

TEST(View, IsPackedRowMajorAndAddressesWith64Bits) {
  float data[24];
  const gannet::TensorView v = gannet::view(data, {2, 3, 4});
  EXPECT_EQ(v.dtype, DType::kF32);
  EXPECT_EQ(v.num_elements(), 24);
  EXPECT_EQ(v.ptr<float>(1, 2, 3), data + 23);
  EXPECT_EQ(gannet::describe(v), "fp32[2, 3, 4] strides [12, 4, 1] on cpu");
  EXPECT_EQ(gannet::describe({}), "absent");
  EXPECT_FALSE(gannet::TensorView{}.given());
  // Beyond 2^31 elements; only the address is computed.
  gannet::TensorView far = gannet::view(static_cast<uint8_t*>(nullptr), {int64_t{1} << 24, 1024});
  far.data = data;
  EXPECT_EQ(
      reinterpret_cast<uintptr_t>(far.ptr<uint8_t>((int64_t{1} << 24) - 1, 1023)) - reinterpret_cast<uintptr_t>(data),
      (uintptr_t{1} << 34) - 1);
}

TEST(RowBound, MeansWhatItsNameSays) {
  using gannet::row_bound;
  using gannet::RowBound;
  // Length 64, two rows: the values of spec 5.3.
  EXPECT_EQ(row_bound(RowBound::kCausalFull, 64, 2, 0), 63);
  EXPECT_EQ(row_bound(RowBound::kCausalFull, 64, 2, 1), 64);
  EXPECT_EQ(row_bound(RowBound::kCausalFromFirst, 64, 2, 0), 64);
  EXPECT_EQ(row_bound(RowBound::kCausalFromFirst, 64, 2, 1), 65);
  EXPECT_EQ(row_bound(RowBound::kUniformBlock, 64, 2, 0), 64);
  EXPECT_EQ(row_bound(RowBound::kUniformBlock, 64, 2, 1), 64);
  EXPECT_EQ(row_bound(RowBound::kCausalFull, 2, 4, 0), 0);  // not -1: rows before the first token see nothing
  EXPECT_EQ(row_bound(RowBound::kCausalFull, 0, 1, 0), 0);
}

// ---- docs/kv_layouts.md -------------------------------------------------------------------------------------------

constexpr int64_t kPage = 3;
constexpr int64_t kOffset = 5;
constexpr int32_t kPageSize = 64;
constexpr int64_t kSlot = kPage * kPageSize + kOffset;

/// Writes one token with the implementation and gives back where bytes changed, as [first, last] per run of bytes.
std::vector<int64_t> touched_by_latent_write(LatentFormat format, const std::string& impl) {
  const int64_t row_bytes = gannet::latent_row_bytes(format, {});
  const LatentCacheView shape{.data = nullptr,
                              .format = format,
                              .num_pages = kPage + 1,
                              .page_size = kPageSize,
                              .page_stride_bytes = kPageSize * row_bytes,
                              .scale = format == LatentFormat::kE4m3 ? 1.0f : 0.0f};
  gannet::Buffer memory(static_cast<size_t>(shape.num_pages * shape.page_stride_bytes));
  // 0xEE is no byte of any encoding of 1.0 or of a scale of 1 / 448.
  std::memset(memory.data(), 0xEE, memory.size());
  LatentCacheView cache = shape;
  cache.data = memory.data();
  const std::vector<float> latent(512, 1.0f);
  const std::vector<float> rope(64, 1.0f);
  const int32_t slot = static_cast<int32_t>(kSlot);
  gannet::run_once(gannet::Context{},
                   gannet::LatentWrite{.latent = gannet::view(latent.data(), {1, 512}),
                                       .rope = gannet::view(rope.data(), {1, 64}),
                                       .slots = gannet::view(&slot, {1}),
                                       .cache = cache},
                   {.impl = impl});
  std::vector<int64_t> runs;
  const auto changed = [&](size_t i) { return memory.data()[i] != std::byte{0xEE}; };
  for (size_t i = 0; i < memory.size(); ++i) {
    if (changed(i) && (i == 0 || !changed(i - 1))) runs.push_back(static_cast<int64_t>(i));
    if (changed(i) && (i + 1 == memory.size() || !changed(i + 1))) runs.push_back(static_cast<int64_t>(i));
  }
  return runs;
}

TEST(KvLayouts, LatentRowsLieWhereTheDocumentSays) {
  struct Case {
    LatentFormat format;
    int64_t bytes;
    std::vector<int64_t> runs;
  };
  const std::vector<Case> cases = {
      {LatentFormat::kF32, 2304, {453888, 453888 + 2303}},
      {LatentFormat::kBf16, 1152, {226944, 226944 + 1151}},
      {LatentFormat::kE4m3, 576, {113472, 113472 + 575}},
      {LatentFormat::kPacked656, 656, {129232, 129232 + 655}},
      {LatentFormat::kE4m3PerToken, 644, {126208, 126208 + 511, 156436, 156439, 157312, 157312 + 127}},
  };
  int ran = 0;
  for (const gannet::ImplInfo& info : gannet::list_implementations<gannet::LatentWrite>()) {
    if (!info.runs_here) continue;
    ++ran;
    std::printf("latent_write by %s\n", info.name.c_str());
    for (const Case& c : cases) {
      SCOPED_TRACE(std::string(gannet::to_string(c.format)) + " by " + info.name);
      EXPECT_EQ(gannet::latent_row_bytes(c.format, {}), c.bytes);
      EXPECT_EQ(touched_by_latent_write(c.format, info.name), c.runs);
    }
  }
  EXPECT_GE(ran, 2) << "the oracle and the portable kernels run everywhere";
}

TEST(KvLayouts, PartsOfARowLieWhereTheDocumentSays) {
  // bf16: rope value 7 of the row.
  EXPECT_EQ(kPage * 73728 + kOffset * 1152 + 512 * 2 + 7 * 2, 227982);
  char base;
  const LatentCacheView bf16{
      .data = &base, .format = LatentFormat::kBf16, .num_pages = 4, .page_size = 64, .page_stride_bytes = 73728};
  EXPECT_EQ(reinterpret_cast<char*>(bf16.row(kSlot, 1152)) - &base, 226944);
  // One of several KV heads.
  LatentCacheView pool = bf16;
  pool.page_stride_bytes = 3 * 73728;
  const LatentCacheView head = gannet::kv_head_of(pool, 3, 2);
  EXPECT_EQ(reinterpret_cast<char*>(head.row(kSlot, head.row_stride())) - &base, 683136);
}

TEST(KvLayouts, IndexKeysLieWhereTheDocumentSays) {
  char base;
  const auto at = [&](IndexKFormat format, int64_t page_bytes) {
    EXPECT_EQ(gannet::index_k_token_bytes(format, 128) * kPageSize, page_bytes);
    return IndexCacheView{
        .data = &base, .format = format, .num_pages = 4, .page_size = kPageSize, .page_stride_bytes = page_bytes};
  };
  const auto offset = [&](const void* p) { return static_cast<const char*>(p) - &base; };
  EXPECT_EQ(offset(at(IndexKFormat::kF32, 32768).values(kSlot)), 100864);
  EXPECT_EQ(offset(at(IndexKFormat::kBf16, 16384).values(kSlot)), 50432);
  const IndexCacheView planar = at(IndexKFormat::kE4m3, 8448);
  EXPECT_EQ(offset(planar.values(kSlot)), 25984);
  EXPECT_EQ(offset(planar.scale(kSlot)), 33556);
}

// ---- implementations ----------------------------------------------------------------------------------------------

TEST(Implementations, AreListedInOrderOfPreferenceAndForcedByName) {
  const auto infos = gannet::list_implementations<gannet::TopK>();
  ASSERT_GE(infos.size(), 3u);
  EXPECT_EQ(infos.back().name, "ref");
  const std::vector<float> logits = {1.0f, 3.0f, 2.0f};
  const int32_t len = 3;
  std::string chosen;
  for (const gannet::ImplInfo& info : infos) {
    std::printf("topk: %s%s\n", info.name.c_str(), info.runs_here ? "" : " (does not run here)");
    int32_t position = -1;
    int32_t count = -1;
    const gannet::TopK p{.logits = gannet::view(logits.data(), {1, 3}),
                         .lens = gannet::view(&len, {1}),
                         .positions = gannet::view(&position, {1, 1}),
                         .counts = gannet::view(&count, {1})};
    const gannet::Context context;
    if (!info.runs_here) {
      EXPECT_THROW(gannet::OpPlan<gannet::TopK>(context, p, {.impl = info.name}), gannet::Error);
      continue;
    }
    if (chosen.empty()) chosen = info.name;
    EXPECT_EQ(gannet::OpPlan<gannet::TopK>(context, p, {.impl = info.name}).impl(), info.name);
    gannet::run_once(context, p, {.impl = info.name});
    EXPECT_EQ(position, 1);
    EXPECT_EQ(count, 1);
    EXPECT_EQ(gannet::OpPlan<gannet::TopK>(context, p).impl(), chosen) << "the first that runs here";
  }
}

TEST(Implementations, AnUnknownNameListsTheAcceptedOnes) {
  try {
    gannet::run_once(gannet::Context{}, gannet::TopK{}, {.impl = "avx3"});
    FAIL() << "accepted";
  } catch (const gannet::Error& e) {
    const std::string text = e.what();
    EXPECT_EQ(text.find("[topk]"), 0u) << text;
  }
}

TEST(Implementations, EverySetOffersEveryOperation) {
  std::vector<std::string> ops;
  for (const gannet::ImplInfo& info : gannet::list_all_implementations())
    if (info.name == "ref") ops.push_back(info.op);
  EXPECT_EQ(ops.size(), 12u);
  for (const gannet::ImplementationSet* set : gannet::implementation_sets()) {
    // The faster sets of a GPU leave what only moves bytes to cuda_generic, which offers everything.
    if (!set->compiled || (set->device == gannet::DeviceKind::kCuda && set->rope.run == nullptr)) continue;
    size_t offered = 0;
    for (const gannet::ImplInfo& info : gannet::list_all_implementations()) offered += info.name == set->name;
    EXPECT_EQ(offered, ops.size()) << set->name;
  }
}

TEST(Errors, NameTheirCode) {
  EXPECT_STREQ(gannet::to_string(gannet::ErrorCode::kInvalidArgument), "invalid argument");
  EXPECT_STREQ(gannet::to_string(gannet::ErrorCode::kCorruptFile), "corrupt file");
  const gannet::Error e(gannet::ErrorCode::kDevice, "text");
  EXPECT_EQ(e.code(), gannet::ErrorCode::kDevice);
  EXPECT_STREQ(e.what(), "text");
}

}  // namespace
