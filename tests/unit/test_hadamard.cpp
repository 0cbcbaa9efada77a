// The rotation of index keys and queries against its definition, and that rotated rows and others never meet.
#include "gannet/hadamard.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <memory>

#include "gannet/cuda.h"
#include "gannet/kv_transfer.h"
#include "unit/attention_world.h"

namespace gannet_test {
namespace {

float value(int64_t i) { return static_cast<float>((i * 7919 + 13) % 255 - 127) / 32.0f; }

// The definition in fp64. Rounding: log2(n) additions of numbers up to sum |x|, each rounded to 2^-24, one product, and
// the dtype's own rounding at the end.
TEST(Hadamard, IsItsDefinition) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const int64_t n : {8, 32, 64, 128, 1024}) {
      Tensor x(dtype, {5, 3, n}), y(dtype, {5, 3, n});
      for (int64_t i = 0; i < 15 * n; ++i) x.set(value(i), i / (3 * n), i / n % 3, i % n);
      hadamard({}, x.view, y.view);
      for (int64_t row = 0; row < 15; ++row) {
        double magnitude = 0.0;
        for (int64_t j = 0; j < n; ++j) magnitude += std::abs(double{x.get(row / 3, row % 3, j)});
        const double rounding = (std::log2(static_cast<double>(n)) + 2.0) * 0x1p-24 * magnitude / std::sqrt(double(n));
        for (int64_t i = 0; i < n; ++i) {
          double sum = 0.0;
          for (int64_t j = 0; j < n; ++j)
            sum += (std::popcount(static_cast<uint64_t>(i & j)) % 2 == 0 ? 1.0 : -1.0) *
                   double{x.get(row / 3, row % 3, j)};
          const double expected = sum / std::sqrt(static_cast<double>(n));
          const double tolerance = rounding + (dtype == DType::kBf16 ? 0x1p-8 * std::abs(expected) : 0.0);
          ASSERT_NEAR(y.get(row / 3, row % 3, i), expected, tolerance) << to_string(dtype) << " " << n << " " << row;
        }
      }
    }
  }
}

// In place, over rows with gaps, on other numbers of workers, a row alone: the same bits. Twice: the identity.
TEST(Hadamard, RowsDependOnThemselvesAlone) {
  constexpr int64_t kRows = 300, kN = 128, kGap = 192;
  Tensor x(DType::kF32, {kRows, kN}), y(DType::kF32, {kRows, kN}), wide(DType::kF32, {kRows, kGap});
  TensorView part = wide.view;
  part.shape[1] = kN;
  for (int64_t i = 0; i < kRows * kN; ++i) x.set(value(i), i / kN, i % kN), wide.set(value(i), i / kN, i % kN);
  hadamard({}, x.view, y.view);
  for (const int workers : {1, 3}) {
    OddExecutor executor(workers);
    Tensor z(DType::kF32, {kRows, kN});
    hadamard({.executor = &executor}, part, z.view);
    EXPECT_TRUE(same_bits(y, z)) << workers;
  }
  Tensor one(DType::kF32, {1, kN});
  hadamard({}, x.rows(17, 18), one.view);
  EXPECT_EQ(0, std::memcmp(one.view.data, y.rows(17, 18).data, kN * sizeof(float)));
  hadamard({}, part, part);
  for (int64_t r = 0; r < kRows; ++r) {
    EXPECT_EQ(0, std::memcmp(wide.view.ptr<float>(r), y.view.ptr<float>(r), kN * sizeof(float))) << r;
    EXPECT_TRUE(std::isnan(wide.get(r, kN))) << r;  // between the rows nothing is written
  }
  hadamard({}, y.view, y.view);
  for (int64_t i = 0; i < kRows * kN; ++i) ASSERT_NEAR(y.get(i / kN, i % kN), x.get(i / kN, i % kN), 2e-5f) << i;
}

TEST(Hadamard, RefusesWhatItCannotRotate) {
  const Tensor a(DType::kF32, {4, 96}), b(DType::kF32, {4, 64}), c(DType::kBf16, {4, 64}), d(DType::kF32, {3, 64}),
      ids(DType::kI32, {4, 64}), large(DType::kF32, {1, 2048});
  EXPECT_NE(error_of([&] { hadamard({}, a.view, a.view); }).find("power of two"), std::string::npos);
  EXPECT_NE(error_of([&] { hadamard({}, large.view, large.view); }).find("1024"), std::string::npos);
  EXPECT_NE(error_of([&] { hadamard({}, b.view, c.view); }).find("shape and dtype of from"), std::string::npos);
  EXPECT_NE(error_of([&] { hadamard({}, b.view, d.view); }).find("shape and dtype of from"), std::string::npos);
  EXPECT_NE(error_of([&] { hadamard({}, ids.view, ids.view); }).find("fp32 or bf16"), std::string::npos);
  TensorView away = b.view;
  away.device = {DeviceKind::kCuda, 0};
  EXPECT_NE(error_of([&] { hadamard({}, b.view, away); }).find("to is on cuda:0"), std::string::npos);
  std::string why;
  if (cuda_device_count(&why) == 0 && why.find("this build") != std::string::npos) {
    EXPECT_NE(error_of([&] { hadamard({}, away, away); }, ErrorCode::kUnsupported).find("CUDA"), std::string::npos);
  }
}

// The bits of the host, whatever the width, the dtype and the gaps between rows; in place too.
TEST(Hadamard, OnADeviceTheBitsAreTheHosts) {
  std::string why;
  if (cuda_device_count(&why) == 0) GTEST_SKIP() << "no CUDA device: " << why;
  const Device device{DeviceKind::kCuda, 0};
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (const int64_t n : {1, 2, 8, 16, 32, 64, 128, 256, 512, 1024}) {
      constexpr int64_t kRows = 7, kHeads = 3;
      const int64_t pitch = (n + 15) / 8 * 8;  // rows begin at multiples of 16 bytes
      const auto element = static_cast<int64_t>(size_of(dtype));
      const int64_t bytes = kRows * kHeads * pitch * element;
      Tensor x(dtype, {kRows, kHeads, pitch}), y(dtype, {kRows, kHeads, pitch}), back(dtype, {kRows, kHeads, pitch});
      for (int64_t i = 0; i < kRows * kHeads * pitch; ++i) {
        const int64_t row = i / (kHeads * pitch), head = i / pitch % kHeads, d = i % pitch;
        x.set(value(i * 31 + n), row, head, d), y.set(value(i), row, head, d);
      }
      const auto part = [&](TensorView v, int64_t rows) {
        v.shape = {rows, kHeads, n};
        return v;
      };
      const auto free = [&](void* p) { cuda_memory(0).deallocate(p, static_cast<size_t>(bytes), 256); };
      const auto there = [&](const TensorView& v) {
        std::unique_ptr<void, decltype(free)> p(cuda_memory(0).allocate(static_cast<size_t>(bytes), 256), free);
        cuda_copy(p.get(), v.data, static_cast<size_t>(bytes), device);
        return p;
      };
      const auto a = there(x.view), b = there(y.view);
      TensorView from = part(x.view, kRows), to = part(y.view, kRows);
      from.data = a.get(), to.data = b.get();
      from.device = to.device = device;
      hadamard({}, from, to);
      hadamard({}, part(x.view, kRows), part(y.view, kRows));
      cuda_copy(back.view.data, b.get(), static_cast<size_t>(bytes), device);
      cuda_wait(device);
      EXPECT_EQ(0, std::memcmp(back.view.data, y.view.data, static_cast<size_t>(bytes)))
          << to_string(dtype) << " " << n;
      hadamard({}, to, to);
      hadamard({}, part(y.view, kRows), part(y.view, kRows));
      cuda_copy(back.view.data, b.get(), static_cast<size_t>(bytes), device);
      cuda_wait(device);
      EXPECT_EQ(0, std::memcmp(back.view.data, y.view.data, static_cast<size_t>(bytes))) << "in place " << n;
    }
  }
}

// Trap 6.25: what a pool holds is fixed when it is made, and everything that touches it is asked.
TEST(Hadamard, RotatedRowsAndOthersNeverMeet) {
  const auto pool = [](bool rotated, int32_t layers = 1, int32_t head_dim = 128) {
    IndexKPoolOptions o{.head_dim = head_dim, .num_pages = 2, .hadamard = rotated};
    for (int32_t l = 0; l < layers; ++l) o.layers.push_back(l);
    return IndexKPool(o);
  };
  EXPECT_NE(error_of([&] { pool(true, 1, 96); }).find("power of two"), std::string::npos);
  EXPECT_NO_THROW(pool(false, 1, 96));
  const IndexKPool rotated = pool(true), plain = pool(false);
  EXPECT_TRUE(rotated.layer(0).hadamard);

  // Pages do not travel between them.
  const LatentPool latent({.num_layers = 1, .num_pages = 2});
  const PageLayout a = page_layout(layer_caches(latent, &rotated)[0]), b = page_layout(layer_caches(latent, &plain)[0]);
  EXPECT_EQ(a.page_bytes(), b.page_bytes());
  EXPECT_FALSE(a == b);

  // Views of one's own are held to the same.
  IndexCacheView odd = rotated.layer(0);
  odd.head_dim = 96;
  const Tensor wide(DType::kF32, {1, 96});
  std::vector<int32_t> slot = {70};
  EXPECT_NE(error_of([&] {
              OpPlan<IndexKWrite>(
                  {}, {.k = wide.view, .slots = gannet::view(slot.data(), {1}), .cache = odd, .hadamard = true});
            }).find("power of two"),
            std::string::npos);

  // A backend takes one kind.
  World w({.arch = AttentionArch::kDsa, .topk = 50}, {{.prefix = 0, .rows = 3, .id = 1}}, {});
  std::vector<LayerCaches> mixed = layer_caches(*w.latent, w.index.get());
  mixed[1].index = mixed[0].index;
  mixed[1].index->hadamard = true;
  EXPECT_NE(error_of([&] { w.backend->bind(mixed); }).find("hadamard"), std::string::npos);

  // Operations are told what they get.
  const Tensor k(DType::kF32, {1, 128}), q(DType::kF32, {1, 2, 128}), weights(DType::kF32, {1, 2}),
      logits(DType::kF32, {1, 64});
  std::vector<int32_t> one = {1}, page = {1}, list(16);
  const TensorView ones = gannet::view(one.data(), {1});
  const PageTableView pages = PageTableView::padded(gannet::view(page.data(), {1, 1}));
  for (const bool cache_rotated : {false, true}) {
    const IndexCacheView cache = (cache_rotated ? rotated : plain).layer(0);
    for (const bool given : {false, true}) {
      const auto expect = [&](auto op, const char* what) {
        op.hadamard = given;
        if (given == cache_rotated) {
          EXPECT_NO_THROW((OpPlan<decltype(op)>({}, op))) << what;
          return;
        }
        EXPECT_NE(error_of([&] { OpPlan<decltype(op)>({}, op); }).find("hadamard"), std::string::npos) << what;
      };
      expect(IndexKWrite{.k = k.view, .slots = ones, .cache = cache}, "index_k_write");
      expect(IndexKGather{.slots = ones, .cache = cache, .k = k.view}, "index_k_gather");
      IndexLogits scores;
      scores.q = q.view;
      scores.weights = weights.view;
      scores.cache = cache;
      scores.pages = pages;
      scores.rows.seq_lens = ones;
      scores.logits = logits.view;
      expect(scores, "index_logits");
      IndexSelect select;
      select.q = q.view;
      select.weights = weights.view;
      select.cache = cache;
      select.pages = pages;
      select.rows.seq_lens = ones;
      select.max_seq_len = 64;
      select.topk_slots = gannet::view(list.data(), {1, 16});
      select.topk_lens = ones;
      expect(select, "index_select");
    }
  }
}

}  // namespace
}  // namespace gannet_test
