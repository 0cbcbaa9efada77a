// Pages, page tables and pools.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <set>

#include "gannet/error.h"
#include "gannet/kv_pool.h"

namespace {

using namespace gannet;

/// The text of the error that f throws, "" where it throws none.
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

std::vector<int32_t> ids_of(const PageList& l) { return {l.ids().begin(), l.ids().end()}; }

TEST(PageAllocator, NeverHandsOutPageZero) {
  PageAllocator pages(5);
  EXPECT_EQ(pages.num_free(), 4);
  const PageList all = pages.acquire(4);
  EXPECT_EQ(ids_of(all), (std::vector<int32_t>{1, 2, 3, 4}));
  EXPECT_EQ(pages.num_used(), 4);
  EXPECT_FALSE(pages.try_acquire(1));
}

TEST(PageAllocator, AcquiresAllOrNothing) {
  PageAllocator pages(4);
  PageList one = pages.acquire(1);
  EXPECT_TRUE(
      has(error_of([&] { (void)pages.acquire(3); }, ErrorCode::kOutOfMemory), "3 pages are wanted; 2 of 3 are free"));
  EXPECT_EQ(pages.num_free(), 2);
  EXPECT_EQ(pages.acquire(0).size(), 0);
  EXPECT_EQ(pages.acquire(2).size(), 2);  // a temporary: given back at once
  EXPECT_EQ(pages.num_free(), 2);
  one.clear();
  EXPECT_EQ(pages.num_free(), 3);
  one.clear();  // nothing left to give back
  EXPECT_EQ(pages.num_free(), 3);
}

TEST(PageAllocator, RefusesBadCounts) {
  EXPECT_TRUE(has(error_of([] { PageAllocator pages(0); }), "num_pages is 0"));
  EXPECT_TRUE(has(error_of([] { PageAllocator pages(int64_t{1} << 31); }), "num_pages is 2147483648"));
  PageAllocator pages(2);
  EXPECT_TRUE(has(error_of([&] { (void)pages.acquire(-1); }), "count is -1"));
}

TEST(PageAllocator, CountsReferences) {
  PageAllocator pages(4);
  PageList a = pages.acquire(3);
  PageList b = a.share(0, 2);
  PageRef r = a.ref(0);
  EXPECT_EQ(r.use_count(), 3);
  a.clear();
  EXPECT_EQ(pages.num_free(), 1);  // only the page that nobody shares
  b.clear();
  EXPECT_EQ(pages.num_free(), 2);
  EXPECT_EQ(r.id(), 1);
  PageRef copy = r;
  r = PageRef();
  EXPECT_EQ(pages.num_free(), 2);
  EXPECT_EQ(copy.use_count(), 1);
  copy = PageRef();
  EXPECT_EQ(pages.num_free(), 3);
  EXPECT_FALSE(copy);
}

TEST(PageAllocator, MovesReferencesWithoutCountingThem) {
  PageAllocator pages(6);
  PageList a = pages.acquire(2);
  PageList b = pages.acquire(1);
  a.append(std::move(b));
  EXPECT_TRUE(b.empty());
  EXPECT_EQ(ids_of(a), (std::vector<int32_t>{1, 2, 3}));
  a.append(a.ref(0));
  EXPECT_EQ(a.ref(0).use_count(), 3);  // twice in the list, and the temporary
  EXPECT_EQ(pages.num_used(), 3);
  a.truncate(1);
  EXPECT_EQ(pages.num_used(), 1);
  PageList c = std::move(a);
  EXPECT_EQ(pages.num_used(), 1);
  c = PageList();
  EXPECT_EQ(pages.num_used(), 0);
}

TEST(PageAllocator, RefusesPagesOfAnother) {
  PageAllocator one(3), other(3);
  PageList a = one.acquire(1);
  EXPECT_TRUE(has(error_of([&] { a.append(other.acquire(1)); }), "another allocator"));
  EXPECT_TRUE(has(error_of([&] { a.append(other.acquire(1).ref(0)); }), "another allocator"));
  EXPECT_TRUE(has(error_of([&] { a.append(PageRef()); }), "empty"));
  EXPECT_EQ(other.num_free(), 2);
  EXPECT_EQ(ids_of(a), std::vector<int32_t>{1});
  EXPECT_TRUE(has(error_of([&] { (void)a.ref(1); }), "i is 1"));
  EXPECT_TRUE(has(error_of([&] { (void)a.share(0, 2); }), "count 2"));
  EXPECT_TRUE(has(error_of([&] { a.append(std::move(a)); }), "a list cannot be appended to itself"));
  EXPECT_EQ(ids_of(a), std::vector<int32_t>{1});
  EXPECT_TRUE(has(error_of([&] { a.truncate(-1); }), "count is -1; accepted: 0 and more"));
}

TEST(PageAllocator, ReferencesMayOutliveIt) {
  PageRef r;
  {
    PageAllocator pages(2);
    r = pages.acquire(1).ref(0);
  }
  EXPECT_EQ(r.use_count(), 1);
}

TEST(PageAllocator, NoPageIsHeldTwiceOverRandomTraffic) {
  PageAllocator pages(64);
  std::vector<PageList> held;
  uint32_t state = 1;
  const auto next = [&] { return state = state * 1664525u + 1013904223u, state >> 16; };
  for (int i = 0; i < 5000; ++i) {
    if (next() % 2 == 0 || held.empty()) {
      if (auto l = pages.try_acquire(next() % 9)) held.push_back(std::move(*l));
    } else {
      const size_t victim = next() % held.size();
      std::swap(held[victim], held.back());
      held.pop_back();
    }
    std::set<int32_t> seen;
    int64_t total = 0;
    for (const PageList& l : held) {
      total += l.size();
      seen.insert(l.ids().begin(), l.ids().end());
    }
    ASSERT_EQ(static_cast<int64_t>(seen.size()), total);
    ASSERT_EQ(pages.num_used(), total);
    ASSERT_FALSE(seen.contains(0));
  }
}

TEST(PageTable, ClearsWhatARowNoLongerUses) {
  PageTable table(2, 4);
  table.set_row(0, std::vector<int32_t>{7, 8, 9});
  table.append(0, std::vector<int32_t>{10});
  EXPECT_EQ(std::vector<int32_t>(table.row(0).begin(), table.row(0).end()), (std::vector<int32_t>{7, 8, 9, 10}));
  table.set_row(0, std::vector<int32_t>{5});
  EXPECT_EQ(std::vector<int32_t>(table.row(0).begin(), table.row(0).end()), (std::vector<int32_t>{5, 0, 0, 0}));
  EXPECT_EQ(table.num_pages(0), 1);
  EXPECT_EQ(table.num_pages(1), 0);
  EXPECT_TRUE(has(error_of([&] { table.append(0, std::vector<int32_t>{1, 2, 3, 4}); }), "row 0 would have 5 pages"));
  EXPECT_TRUE(has(error_of([&] { table.set_row(1, std::vector<int32_t>{-1}); }), "-1"));
  EXPECT_TRUE(has(error_of([&] { table.set_row(2, {}); }), "row is 2"));
  EXPECT_EQ(table.num_pages(0), 1);
}

TEST(PageTable, RefusesRowsThatItHasNot) {
  EXPECT_TRUE(has(error_of([] { PageTable t(-1, 2); }), "rows is -1 and max_pages 2; accepted: 0 and more"));
  EXPECT_TRUE(has(error_of([] { PageTable t(2, -1); }), "rows is 2 and max_pages -1; accepted: 0 and more"));
  PageTable t(2, 2);
  EXPECT_TRUE(has(error_of([&] { t.clear_row(2); }), "row is 2; accepted: 0 to 1"));
  EXPECT_TRUE(has(error_of([&] { (void)t.row(-1); }), "row is -1; accepted: 0 to 1"));
  EXPECT_TRUE(has(error_of([&] {
                    t.append(0, std::vector<int32_t>{1, 2, 3});
                  }),
                  "row 0 would have 3 pages; accepted: at most 2"));
  EXPECT_TRUE(
      has(error_of([&] { t.set_row(1, std::vector<int32_t>{-2}); }), "a page of row 1 is -2; accepted: 0 and more"));
}

TEST(PageTable, ExportsCsr) {
  PageTable table(3, 4);
  table.set_row(0, std::vector<int32_t>{7, 8});
  table.set_row(2, std::vector<int32_t>{3});
  const CsrPageTable csr = table.csr(std::vector<int32_t>{2, 1, 0});
  EXPECT_EQ(csr.indptr, (std::vector<int32_t>{0, 1, 1, 3}));
  EXPECT_EQ(csr.indices, (std::vector<int32_t>{3, 7, 8}));
}

// spec appendix C: bytes of a token and of a page of 64.
TEST(PoolSizes, AreThoseOfTheContract) {
  const auto latent = [](LatentFormat f) {
    return latent_pool_sizes(
        {.num_layers = 2, .format = f, .num_pages = 3, .scale = f == LatentFormat::kE4m3 ? 1.0f : 0.0f});
  };
  EXPECT_EQ(latent(LatentFormat::kBf16).token_bytes, 1152);
  EXPECT_EQ(latent(LatentFormat::kBf16).page_bytes, 73728);
  EXPECT_EQ(latent(LatentFormat::kE4m3).page_bytes, 36864);
  EXPECT_EQ(latent(LatentFormat::kPacked656).page_bytes, 41984);
  EXPECT_EQ(latent(LatentFormat::kE4m3PerToken).page_bytes, 41216);
  const PoolSizes index = index_k_pool_sizes({.layers = {0, 3}, .num_pages = 3});
  EXPECT_EQ(index.token_bytes, 132);
  EXPECT_EQ(index.page_bytes, 8448);
  EXPECT_EQ(index.layer_stride_bytes, 28672);  // 3 * 8448 rounded up to 4 KiB
  EXPECT_EQ(index.total_bytes, 2 * 28672);
}

TEST(PoolSizes, RefuseOverflowAndNonsense) {
  const auto text = [](LatentPoolOptions o) { return error_of([&] { (void)latent_pool_sizes(o); }); };
  EXPECT_TRUE(has(text({.num_layers = 1, .num_pages = 1 << 30, .page_size = 64}), "2^31 - 1 tokens"));
  EXPECT_TRUE(has(text({.num_layers = std::numeric_limits<int32_t>::max(),
                        .geometry = {1 << 20, 1 << 20},
                        .num_pages = 1 << 20,
                        .page_size = 1024}),
                  "more than 2^63 - 1"));
  EXPECT_TRUE(has(text({.num_layers = 1, .num_pages = 4, .page_stride_bytes = 100}), "page_stride_bytes is 100"));
  EXPECT_TRUE(has(text({.num_layers = 1, .num_pages = 4, .page_stride_bytes = 73736}), "page_stride_bytes is 73736"));
  EXPECT_TRUE(has(text({.num_layers = -1, .num_pages = 4}), "num_layers is -1"));
  EXPECT_TRUE(has(text({.num_layers = 1, .num_pages = 0}), "num_pages is 0"));
  EXPECT_TRUE(has(text({.num_layers = 1, .num_pages = 1, .page_size = 0}), "page_size is 0"));
  EXPECT_TRUE(has(text({.num_layers = 1, .geometry = {0, 64}, .num_pages = 1}), "latent_dim is 0"));
  for (const float scale : {0.0f, -1.0f, std::nanf(""), std::numeric_limits<float>::infinity()})
    EXPECT_TRUE(
        has(text({.num_layers = 1, .format = LatentFormat::kE4m3, .num_pages = 1, .scale = scale}), "scale is"));
  EXPECT_TRUE(has(text({.num_layers = 1, .num_pages = 1, .scale = 1.0f}), "scale is 1"));
  EXPECT_TRUE(has(text({.num_layers = 1, .format = static_cast<LatentFormat>(9), .num_pages = 1}),
                  "format is 9; accepted: a LatentFormat"));
  EXPECT_TRUE(
      has(text({.num_layers = 1, .num_pages = 1, .page_stride_bytes = std::numeric_limits<int64_t>::max() - 15}),
          "9223372036854775792 + "));
  EXPECT_TRUE(has(error_of([] { (void)index_k_pool_sizes({.layers = {1, 1}, .num_pages = 1}); }), "layers[1] is 1"));
  EXPECT_TRUE(has(error_of([] { (void)index_k_pool_sizes({.format = static_cast<IndexKFormat>(3), .num_pages = 1}); }),
                  "format is 3; accepted: an IndexKFormat"));
  EXPECT_EQ(pages_for(0, 64), 0);
  EXPECT_EQ(pages_for(65, 64), 2);
  EXPECT_EQ(pages_for(std::numeric_limits<int64_t>::max(), 1), std::numeric_limits<int64_t>::max());
  EXPECT_TRUE(has(error_of([] { (void)pages_for(-1, 64); }), "tokens is -1"));
}

/// Fills what it hands out with NaN and counts.
class PoisonedMemory final : public MemoryResource {
 public:
  void* allocate(size_t bytes, size_t alignment) override {
    void* p = host_memory().allocate(bytes, alignment);
    std::memset(p, 0xff, bytes);
    live += bytes;
    return p;
  }
  void deallocate(void* p, size_t bytes, size_t alignment) noexcept override {
    live -= bytes;
    host_memory().deallocate(p, bytes, alignment);
  }
  size_t live = 0;
};

TEST(Pools, ClearPageZeroOfEveryLayerAndNothingElse) {
  PoisonedMemory memory;
  {
    const LatentPool latent({.num_layers = 3, .num_pages = 4, .page_stride_bytes = 73728 + 16}, memory);
    EXPECT_EQ(memory.live, static_cast<size_t>(latent.sizes().total_bytes));
    for (int l = 0; l < 3; ++l) {
      const LatentCacheView v = latent.layer(l);
      EXPECT_EQ(v.page_stride_bytes, 73744);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(v.data) % 256, 0u);
      const auto* bytes = static_cast<const uint8_t*>(v.data);
      for (int64_t i = 0; i < v.page_stride_bytes; ++i) ASSERT_EQ(bytes[i], 0) << i;
      EXPECT_EQ(bytes[v.page_stride_bytes], 0xff);
    }
    EXPECT_TRUE(has(error_of([&] { (void)latent.layer(3); }), "layer is 3"));
    const IndexKPool index({.layers = {0, 2}, .num_pages = 4}, memory);
    EXPECT_TRUE(index.has_layer(2));
    EXPECT_FALSE(index.has_layer(1));
    EXPECT_TRUE(has(error_of([&] { (void)index.layer(1); }), "layers with an indexer (0, 2)"));
    EXPECT_NE(index.layer(0).data, index.layer(2).data);
    // spec 3.3: value d of slot s at page * 8448 + offset * 128 + d; its scale at page * 8448 + 8192 + offset * 4.
    const IndexCacheView v = index.layer(2);
    EXPECT_EQ(v.values(64 + 3) - static_cast<std::byte*>(v.data), 8448 + 3 * 128);
    EXPECT_EQ(reinterpret_cast<std::byte*>(v.scale(64 + 3)) - static_cast<std::byte*>(v.data), 8448 + 8192 + 12);
    const auto* bytes = static_cast<const uint8_t*>(v.data);
    for (int64_t i = 0; i < 8448; ++i) ASSERT_EQ(bytes[i], 0) << i;
  }
  EXPECT_EQ(memory.live, 0u);
}

TEST(Memory, SaysWhatCannotBeHad) {
  const auto text = [](size_t bytes, size_t alignment) {
    return error_of([&] { host_memory().deallocate(host_memory().allocate(bytes, alignment), bytes, alignment); },
                    ErrorCode::kOutOfMemory);
  };
  const size_t most = std::numeric_limits<size_t>::max();
  EXPECT_TRUE(
      has(text(most, 64), "[host_memory] 18446744073709551615 bytes cannot be had: more than the address space"));
  EXPECT_TRUE(has(text(most / 4, 64), "bytes cannot be had: "));
}

TEST(Memory, LargeBuffersAreAlignedToHugePagesAndZero) {
  Buffer b((size_t{4} << 20) + 100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b.data()) % (size_t{2} << 20), 0u);
  for (size_t i = 0; i < b.size(); i += 4096) ASSERT_EQ(b.data()[i], std::byte{0});
  b.data()[b.size() - 1] = std::byte{1};
  Buffer small(10);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(small.data()) % Buffer::kAlignment, 0u);
  small.reserve(5);
  EXPECT_EQ(small.size(), 10u);
  small = std::move(b);
  EXPECT_EQ(small.data()[small.size() - 1], std::byte{1});
  EXPECT_TRUE(
      has(error_of([] { Buffer huge(std::numeric_limits<size_t>::max()); }, ErrorCode::kOutOfMemory), "address space"));
}

}  // namespace
