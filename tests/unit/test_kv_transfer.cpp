// Pages and tokens that move within a pool, and pages that travel from one to another, in every format.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "gannet/cuda.h"
#include "gannet/error.h"
#include "gannet/kv_pool.h"
#include "gannet/kv_transfer.h"
#include "gannet/ops.h"

namespace {

using namespace gannet;
using Bytes = std::vector<std::byte>;
using Ints = std::vector<int32_t>;

template <class F>
std::string error_of(F&& f, ErrorCode code = ErrorCode::kInvalidArgument) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    return e.what();
  }
  return {};
}

testing::AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << text << "\" lacks \"" << part << "\"";
}

struct Format {
  LatentFormat latent;
  IndexKFormat index;
  int32_t page_size;
};

std::string name_of(const testing::TestParamInfo<Format>& info) {
  const Format& f = info.param;
  return std::string(to_string(f.latent)) + "_" + to_string(f.index) + "_" + std::to_string(f.page_size);
}
void PrintTo(const Format& f, std::ostream* os) {
  *os << to_string(f.latent) << ", " << to_string(f.index) << ", pages of " << f.page_size;
}

std::vector<Format> formats() {
  std::vector<Format> all;
  for (const LatentFormat l : {LatentFormat::kF32, LatentFormat::kBf16, LatentFormat::kE4m3, LatentFormat::kPacked656,
                               LatentFormat::kE4m3PerToken})
    for (const IndexKFormat i : {IndexKFormat::kF32, IndexKFormat::kBf16, IndexKFormat::kE4m3})
      for (const int32_t page_size : {1, 4, 64}) all.push_back({l, i, page_size});
  return all;
}

/// Pools of three layers, of which 0 and 2 have index keys, with gaps between pages; all bytes are noise, gaps too.
class Pools {
 public:
  static constexpr int32_t kLayers = 3, kPages = 8, kR = 128, kP = 64, kDi = 32;

  Pools(const Format& f, int64_t gap, uint32_t seed)
      : latent_({.num_layers = kLayers,
                 .format = f.latent,
                 .geometry = {kR, kP},
                 .num_pages = kPages,
                 .page_size = f.page_size,
                 .page_stride_bytes = stride(f.page_size * latent_row_bytes(f.latent, {kR, kP}), gap),
                 .scale = f.latent == LatentFormat::kE4m3 ? 0.5f : 0.0f}),
        index_({.layers = {0, 2},
                .format = f.index,
                .head_dim = kDi,
                .num_pages = kPages,
                .page_size = f.page_size,
                .page_stride_bytes = stride(f.page_size * index_k_token_bytes(f.index, kDi), gap)}) {
    uint32_t state = seed;
    for (const std::span<std::byte> s : spans())
      for (std::byte& b : s) b = static_cast<std::byte>((state = state * 1664525u + 1013904223u) >> 24);
  }
  static int64_t stride(int64_t bytes, int64_t gap) { return (bytes + 15) / 16 * 16 + gap; }

  std::vector<LayerCaches> layers() const { return layer_caches(latent_, &index_); }
  int64_t num_slots() const { return latent_.num_slots(); }

  std::vector<std::span<std::byte>> spans() const {
    std::vector<std::span<std::byte>> all;
    const auto add = [&](const auto& c) {
      all.emplace_back(static_cast<std::byte*>(c.data), static_cast<size_t>(c.num_pages * c.page_stride_bytes));
    };
    for (const LayerCaches& l : layers()) {
      add(l.latent);
      if (l.index) add(*l.index);
    }
    return all;
  }
  std::vector<Bytes> snapshot() const {
    std::vector<Bytes> all;
    for (const auto s : spans()) all.emplace_back(s.begin(), s.end());
    return all;
  }

  /// Writes a row of its own into every slot of every layer, by the operations.
  void write_all() {
    const Context context;
    const int64_t n = num_slots();
    std::vector<float> latent(static_cast<size_t>(n * kR)), rope(static_cast<size_t>(n * kP)),
        keys(static_cast<size_t>(n * kDi));
    Ints slots(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) slots[static_cast<size_t>(i)] = static_cast<int32_t>(i);
    uint32_t state = 7;
    const auto fill = [&](std::vector<float>& v) {
      for (float& x : v) x = static_cast<float>((state = state * 1664525u + 1013904223u) >> 16) / 8192.0f - 4.0f;
    };
    for (const LayerCaches& l : layers()) {
      fill(latent), fill(rope), fill(keys);
      run_once(context, LatentWrite{.latent = view(latent.data(), {n, kR}),
                                    .rope = view(rope.data(), {n, kP}),
                                    .slots = view(slots.data(), {n}),
                                    .cache = l.latent});
      if (l.index)
        run_once(context,
                 IndexKWrite{.k = view(keys.data(), {n, kDi}), .slots = view(slots.data(), {n}), .cache = *l.index});
    }
  }

  /// Every slot's values in every layer, by the operations: [slot] of all bits that a reader sees.
  std::vector<std::vector<float>> read_all() const {
    const Context context;
    const int64_t n = num_slots();
    Ints slots(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) slots[static_cast<size_t>(i)] = static_cast<int32_t>(i);
    std::vector<std::vector<float>> all(static_cast<size_t>(n));
    const auto keep = [&](const std::vector<float>& values, int64_t width) {
      for (int64_t i = 0; i < n; ++i)
        all[static_cast<size_t>(i)].insert(all[static_cast<size_t>(i)].end(), values.begin() + i * width,
                                           values.begin() + (i + 1) * width);
    };
    for (const LayerCaches& l : layers()) {
      std::vector<float> latent(static_cast<size_t>(n * kR)), rope(static_cast<size_t>(n * kP));
      run_once(context, LatentGather{.slots = view(slots.data(), {n}),
                                     .cache = l.latent,
                                     .latent = view(latent.data(), {n, kR}),
                                     .rope = view(rope.data(), {n, kP})});
      keep(latent, kR), keep(rope, kP);
      if (!l.index) continue;
      std::vector<float> keys(static_cast<size_t>(n * kDi));
      IndexKGather gather;
      gather.slots = view(slots.data(), {n});
      gather.cache = *l.index;
      gather.k = view(keys.data(), {n, kDi});
      run_once(context, gather);
      keep(keys, kDi);
    }
    return all;
  }

 private:
  LatentPool latent_;
  IndexKPool index_;
};

class EveryFormat : public testing::TestWithParam<Format> {};
INSTANTIATE_TEST_SUITE_P(KvTransfer, EveryFormat, testing::ValuesIn(formats()), name_of);

/// How many bytes differ.
int64_t num_different(const std::vector<Bytes>& a, const std::vector<Bytes>& b) {
  int64_t n = 0;
  for (size_t i = 0; i < a.size(); ++i)
    for (size_t j = 0; j < a[i].size(); ++j) n += a[i][j] != b[i][j] ? 1 : 0;
  return n;
}

int64_t token_bytes(const std::vector<LayerCaches>& layers) {
  return exported_bytes(layers, 1) / layers[0].latent.page_size;
}

TEST_P(EveryFormat, CopiesTokens) {
  Pools pools(GetParam(), 48, 1);
  pools.write_all();
  const auto before = pools.read_all();
  const auto bytes = pools.snapshot();
  const auto last = static_cast<int32_t>(pools.num_slots() - 1);
  // One into its own page where there is room, one to the last page, one onto itself, and a chain: 6 gets what 5 had
  // gets from 2.
  const std::vector<SlotMove> moves = {{1, 3}, {4, last}, {7, 7}, {2, 5}, {5, 6}};
  copy_slots(pools.layers(), moves);
  auto expected = before;
  for (const SlotMove& m : moves) expected[static_cast<size_t>(m.to)] = expected[static_cast<size_t>(m.from)];
  EXPECT_EQ(pools.read_all(), expected);
  EXPECT_EQ(expected[6], before[2]);
  // Nothing else: no gap, no neighbour.
  EXPECT_LE(num_different(bytes, pools.snapshot()), 4 * token_bytes(pools.layers()));
}

TEST_P(EveryFormat, CopiesPages) {
  Pools pools(GetParam(), 16, 2);
  pools.write_all();
  const auto before = pools.read_all();
  const auto bytes = pools.snapshot();
  const std::vector<PageMove> moves = {{1, 6}, {3, 0}, {2, 2}, {6, 7}};
  copy_pages(pools.layers(), moves);
  auto expected = before;
  const int32_t n = GetParam().page_size;
  for (const PageMove& m : moves)
    for (int32_t i = 0; i < n; ++i)
      expected[static_cast<size_t>(m.to * n + i)] = expected[static_cast<size_t>(m.from * n + i)];
  EXPECT_EQ(pools.read_all(), expected);
  EXPECT_EQ(expected[static_cast<size_t>(7 * n)], before[static_cast<size_t>(n)]);
  EXPECT_LE(num_different(bytes, pools.snapshot()), 3 * n * token_bytes(pools.layers()));
}

// Noise in all bytes, NaN scales among it: what travels are bytes, not numbers.
TEST_P(EveryFormat, PagesTravelByteForByte) {
  const Pools a(GetParam(), 32, 3);
  const Pools b(GetParam(), 0, 4);
  const Ints from = {5, 1, 6}, to = {2, 7, 3};
  const auto source = a.layers(), target = b.layers();
  ASSERT_EQ(exported_bytes(source, 3), exported_bytes(target, 3));
  Bytes buffer(static_cast<size_t>(exported_bytes(source, 3)));
  export_pages(source, from, buffer);
  const auto before = b.snapshot();
  import_pages(target, to, buffer);
  // The documented layout, and nothing but these pages.
  auto expected = before;
  const std::byte* p = buffer.data();
  size_t plane = 0;
  for (size_t l = 0; l < source.size(); ++l) {
    const auto check = [&](const auto& s, int64_t page_bytes) {
      for (size_t i = 0; i < from.size(); ++i, p += page_bytes) {
        const std::byte* page = static_cast<const std::byte*>(s.data) + from[i] * s.page_stride_bytes;
        EXPECT_EQ(std::memcmp(p, page, static_cast<size_t>(page_bytes)), 0) << "layer " << l << ", page " << i;
        const int64_t stride = (page_bytes + 15) / 16 * 16;
        std::copy(p, p + page_bytes, expected[plane].begin() + to[i] * stride);
      }
      ++plane;
    };
    check(source[l].latent, GetParam().page_size * latent_row_bytes(GetParam().latent, {Pools::kR, Pools::kP}));
    if (source[l].index)
      check(*source[l].index, GetParam().page_size * index_k_token_bytes(GetParam().index, Pools::kDi));
  }
  EXPECT_EQ(p, buffer.data() + buffer.size());
  EXPECT_EQ(b.snapshot(), expected);
  // And back.
  Bytes again(buffer.size());
  export_pages(target, to, again);
  EXPECT_EQ(again, buffer);
  // A layer by itself is its part of the whole.
  for (size_t l = 0; l < source.size(); ++l) {
    const auto one = std::span(source).subspan(l, 1);
    Bytes part(static_cast<size_t>(exported_bytes(one, 3)));
    export_pages(one, from, part);
    const auto begin = buffer.begin() + exported_bytes(std::span(source).first(l), 3);
    EXPECT_TRUE(std::equal(part.begin(), part.end(), begin)) << "layer " << l;
  }
}

TEST(KvTransfer, SizesAreThoseOfTheContract) {
  // spec appendix C: pages of 64 of a bf16 row and an index key of 128, in 3 layers of which 2 have an indexer.
  const LatentPool latent({.num_layers = 3, .num_pages = 2});
  const IndexKPool index({.layers = {0, 2}, .num_pages = 2});
  const auto layers = layer_caches(latent, &index);
  EXPECT_EQ(exported_bytes(layers, 5), 5 * (3 * 73728 + 2 * 8448));
  EXPECT_EQ(exported_bytes(layers, 0), 0);
  EXPECT_EQ(exported_bytes({}, 5), 0);
  EXPECT_EQ(page_layout(layers[0]).page_bytes(), 73728 + 8448);
  EXPECT_EQ(page_layout(layers[1]).page_bytes(), 73728);
  export_pages(layers, {}, {});  // nothing of anything
  copy_pages(layers, {});
  copy_slots(layers, {});
  EXPECT_TRUE(has(error_of([&] { (void)exported_bytes(layers, std::numeric_limits<int64_t>::max() / 2); }),
                  "the size of the pages is 4611686018427387903 * 238080, more than 2^63 - 1"));
  EXPECT_TRUE(has(error_of([&] { (void)exported_bytes(layers, -1); }), "num_pages is -1"));
}

TEST(KvTransfer, LayoutsTellPoolsApart) {
  const auto layout = [](auto&& change) {
    LatentPoolOptions l{.num_layers = 1, .num_pages = 2};
    IndexKPoolOptions i{.layers = {0}, .num_pages = 2};
    change(l, i);
    return page_layout(layer_caches(LatentPool(l), std::make_unique<IndexKPool>(i).get())[0]);
  };
  using L = LatentPoolOptions&;
  using I = IndexKPoolOptions&;
  const PageLayout first = layout([](L, I) {});
  EXPECT_EQ(first, layout([](L l, I i) {  // not of the layout: how many, and how far apart
              l.num_pages = i.num_pages = 9;
              l.page_stride_bytes = 1 << 20;
            }));
  EXPECT_NE(first, layout([](L l, I) { l.format = LatentFormat::kF32; }));
  EXPECT_NE(first, layout([](L l, I i) { l.page_size = i.page_size = 32; }));
  EXPECT_NE(first, layout([](L l, I) { l.geometry = {256, 64}; }));
  EXPECT_NE(first, layout([](L, I i) { i.format = IndexKFormat::kBf16; }));
  EXPECT_NE(first, layout([](L, I i) { i.scale_format = ScaleFormat::kPowerOfTwo; }));
  EXPECT_NE(first, layout([](L, I i) { i.head_dim = 64; }));
  EXPECT_NE(first, layout([](L, I i) { i.layers = {}; }));
  const auto scaled = [&](float scale) {
    return layout([&](L l, I) {
      l.format = LatentFormat::kE4m3;
      l.scale = scale;
    });
  };
  EXPECT_EQ(scaled(0.5f), scaled(0.5f));
  EXPECT_NE(scaled(0.5f), scaled(0.25f));
}

TEST(KvTransfer, RefusesBeforeItCopies) {
  const Pools pools({LatentFormat::kBf16, IndexKFormat::kE4m3, 4}, 0, 5);
  const auto layers = pools.layers();
  const auto before = pools.snapshot();
  const auto refused = [&](auto&& f, const std::string& part, ErrorCode code = ErrorCode::kInvalidArgument) {
    EXPECT_TRUE(has(error_of(f, code), part));
    EXPECT_EQ(pools.snapshot(), before);
  };
  refused(
      [&] {
        copy_pages(layers, std::vector<PageMove>{{1, 2}, {8, 1}});
      },
      "[copy_pages] moves.from[1] is 8; accepted: 0 to 7, in layer 0");
  refused([&] { copy_pages(layers, std::vector<PageMove>{{1, 2}, {1, -1}}); }, "moves.to[1] is -1");
  refused(
      [&] {
        copy_slots(layers, std::vector<SlotMove>{{1, 2}, {1, 32}});
      },
      "[copy_slots] moves.to[1] is 32; accepted: 0 to 31, in layer 0");
  refused([&] { copy_slots(layers, std::vector<SlotMove>{{-1, 2}}); }, "moves.from[0] is -1");
  Bytes buffer(static_cast<size_t>(exported_bytes(layers, 2)));
  refused([&] { import_pages(layers, Ints{1, 8}, buffer); }, "[import_pages] pages[1] is 8; accepted: 0 to 7");
  refused([&] { export_pages(layers, Ints{-1, 0}, buffer); }, "[export_pages] pages[0] is -1");
  refused([&] { export_pages(layers, Ints{1}, buffer); }, "[export_pages] buffer has");
  buffer.pop_back();
  refused([&] { import_pages(layers, Ints{1, 2}, buffer); }, "2 pages of 3 layers, 2 of them with index keys");
  // BL-45: a buffer that holds the latent rows alone is not a restored prefix.
  auto no_index = layers;
  for (LayerCaches& l : no_index) l.index.reset();
  buffer.resize(static_cast<size_t>(exported_bytes(no_index, 2)));
  export_pages(no_index, Ints{1, 2}, buffer);
  refused([&] { import_pages(layers, Ints{1, 2}, buffer); }, "2 of them with index keys");
  auto bad = layers;
  bad[1].latent.device = {DeviceKind::kCuda, 0};
  if (cuda_device_count() == 0) refused([&] { copy_pages(bad, {}); }, "CUDA", ErrorCode::kUnsupported);
  bad = layers;
  bad[2].index->num_pages = 7;
  refused([&] { copy_slots(bad, {}); }, "the index cache of layer 2 has 7 pages of 4 tokens; its latent cache has 8");
  bad = layers;
  bad[0].index->data = nullptr;
  refused([&] { copy_pages(bad, {}); }, "the index cache of layer 0 has no data");
  bad = layers;
  bad[1].latent.row_stride_bytes = latent_row_bytes(bad[1].latent.format, bad[1].latent.geometry) + 16;
  bad[1].latent.page_stride_bytes *= 2;
  refused([&] { copy_slots(bad, {}); }, "the latent cache of layer 1 has a row_stride_bytes of");
  refused([&] { (void)exported_bytes(layers, -1); }, "num_pages is -1; accepted: 0 and more");
  bad = layers;
  bad[0].latent.page_stride_bytes = 16;
  refused([&] { (void)exported_bytes(bad, 1); }, "page_stride_bytes is 16");
}

TEST(KvTransfer, LayersOfPools) {
  const LatentPool latent({.num_layers = 2, .num_pages = 2});
  EXPECT_FALSE(layer_caches(latent)[1].index);
  const IndexKPool index({.layers = {1}, .num_pages = 2}), more({.layers = {1, 2}, .num_pages = 2});
  const auto layers = layer_caches(latent, &index);
  ASSERT_EQ(layers.size(), 2u);
  EXPECT_FALSE(layers[0].index);
  EXPECT_EQ(layers[1].index->data, index.layer(1).data);
  EXPECT_TRUE(has(error_of([&] { (void)layer_caches(latent, &more); }), "index has layer 2; accepted: 0 to 1"));
}

}  // namespace
