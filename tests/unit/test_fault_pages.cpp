// Known faults of kinds F (geometry of page tables) and G (several rows a request).
#include <set>

#include "fault_problems.h"
#include "gannet/kv_pool.h"
#include "gannet/step.h"

namespace {

using namespace gannet;
using namespace gannet_tests;
using gannet::verify::make_ints;
using gannet::verify::make_tensor;
using gannet::verify::Paged;
using gannet::verify::PagedSpec;
using gannet::verify::Rng;
using gannet::verify::Tensor;

// Score of position p: the page of the table's cell p / page_size, the place p % page_size, of value and scale alike.
// Keys here are one number, so that a score says which token it was computed from.
TEST(Faults, BL15_PositionsGoThroughThePageTable) {
  for (const int32_t page_size : {1, 16, 32, 64, 128, 256}) {
    constexpr int32_t kTokens = 300;
    const Paged paged({.seq_lens = {kTokens, 5}, .page_size = page_size, .page_seed = 8});
    for (const IndexKFormat format : {IndexKFormat::kF32, IndexKFormat::kBf16, IndexKFormat::kE4m3}) {
      verify::IndexPool pool = make_index_pool(paged, format, ScaleFormat::kFp32, 128, 1);
      const Tensor k = make_tensor(DType::kF32, {kTokens, 128});
      std::vector<int32_t> slots;
      for (int32_t t = 0; t < kTokens; ++t) {
        slots.push_back(static_cast<int32_t>(paged.slot(0, t)));
        for (int64_t d = 0; d < 128; ++d) verify::set(k.view, d == 0 ? static_cast<float>(t + 1) : 0.0f, t, d);
      }
      const Tensor list = make_ints(slots);
      run_once(Context{}, IndexKWrite{.k = k.view, .slots = list.view, .cache = pool.view}, {.impl = "ref"});
      const Tensor q = make_tensor(DType::kF32, {2, 1, 128}), weights = make_tensor(DType::kF32, {2, 1}),
                   logits = make_tensor(DType::kF32, {2, kTokens});
      for (int64_t d = 0; d < 128; ++d) {
        verify::set(q.view, d == 0 ? 1.0f : 0.0f, 0, 0, d);
        verify::set(q.view, 0.0f, 1, 0, d);
      }
      verify::set(weights.view, 1.0f, 0, 0);
      verify::set(weights.view, 1.0f, 1, 0);
      IndexLogits p;
      p.q = q.view;
      p.weights = weights.view;
      p.cache = pool.view;
      p.pages = paged.table();
      p.rows = paged.rows();
      p.logits = logits.view;
      const std::string name = std::string(to_string(format)) + " page size " + std::to_string(page_size);
      for (const std::string& impl : takers(p, name)) {
        const std::vector<float> scores = verify::run(p, {.impl = impl}).floats("logits");
        for (int32_t t = 0; t < kTokens; ++t)  // bf16 has 256 whole numbers, then every second; fp8 has its scale
          ASSERT_NEAR(scores[static_cast<size_t>(t)], t + 1, format == IndexKFormat::kBf16 ? 1.0 : 1e-4)
              << impl << " " << t;
      }
    }
  }
}

// Steps of a prompt in chunks beside decodes: as many slots as tokens, each the table's own.
TEST(Faults, BL16_EveryTokenHasASlotOfItsOwn) {
  for (const int32_t page_size : {1, 16, 32, 64, 640}) {
    constexpr int32_t kPrompt = 1500;
    PageAllocator allocator(8000);
    const StepLimits limits{.page_size = page_size, .num_pages = 8000, .max_context_len = 4096};
    PageTable table(3, static_cast<int32_t>(pages_for(kPrompt + 64, page_size)));
    std::vector<PageList> owned;
    for (int32_t r = 0; r < 3; ++r) {
      owned.push_back(allocator.acquire(pages_for(r == 0 ? kPrompt : 64, page_size)));
      table.set_row(r, owned.back().ids());
    }
    std::set<int32_t> written;
    int64_t tokens = 0;
    StepPlan plan;
    const auto step = [&](const std::vector<int32_t>& prefix, const std::vector<int32_t>& fresh,
                          const std::vector<int32_t>& lens, int32_t q_len) {
      plan.assign(
          {.seq_lens = lens, .prefix_lens = prefix, .extend_lens = fresh, .q_len = q_len, .pages = table.view()},
          limits);
      for (const int32_t slot : plan.write_slots()) written.insert(slot);
      tokens += plan.num_rows();
      ASSERT_EQ(static_cast<int64_t>(written.size()), tokens) << "page size " << page_size;
    };
    int32_t done = 0;
    for (const int32_t chunk : {640, 1, 640, 219}) {
      const int32_t others = 2 * (tokens == 0 ? 0 : static_cast<int32_t>((tokens - done) / 4));
      step({done}, {chunk}, {done + chunk, others + 2, others + 2}, 2);
      done += chunk;
    }
    ASSERT_EQ(done, kPrompt);
    for (int32_t r = 0; r < 3; ++r) {
      const int32_t n = r == 0 ? kPrompt : 8;
      for (int32_t t = 0; t < n; ++t)
        ASSERT_EQ(written.count(owned[static_cast<size_t>(r)].ids()[static_cast<size_t>(t / page_size)] * page_size +
                                t % page_size),
                  1u);
    }
    // A table too narrow for a length is refused when the step is made.
    EXPECT_THROW(plan.assign({.seq_lens = std::vector<int32_t>{static_cast<int32_t>(table.max_pages()) * page_size + 1},
                              .prefix_lens = {},
                              .extend_lens = {},
                              .pages = table.view()},
                             limits),
                 Error);
  }
}

// Draft rows at the end of the context: up to its last token they are right (BL21 below attends at the reach of a
// table), one more is refused before anything is launched.
TEST(Faults, BL17_DraftsNearTheEndOfTheContext) {
  constexpr int32_t kContext = 202;  // no whole number of pages
  for (const int32_t page_size : {1, 32, 64}) {
    const StepLimits limits{.page_size = page_size, .num_pages = 1000, .max_context_len = kContext};
    PageTable table(1, static_cast<int32_t>(pages_for(kContext, page_size)));
    PageAllocator allocator(1000);
    const PageList pages = allocator.acquire(pages_for(kContext, page_size));
    table.set_row(0, pages.ids());
    StepPlan plan;
    for (const int32_t drafts : {2, 3, 4}) {
      plan.assign({.seq_lens = std::vector<int32_t>{kContext},
                   .prefix_lens = {},
                   .extend_lens = {},
                   .q_len = drafts,
                   .pages = table.view()},
                  limits);
      EXPECT_EQ(plan.row_lens().back(), kContext);
      EXPECT_EQ(plan.write_slots().back(), plan.slot_of(0, kContext - 1));
      try {
        plan.assign({.seq_lens = std::vector<int32_t>{kContext - 1},
                     .prefix_lens = {},
                     .extend_lens = {},
                     .q_len = drafts,
                     .decode_bound = RowBound::kCausalFromFirst,
                     .pages = table.view()},
                    limits);
        EXPECT_EQ(drafts, 2);  // 201 keys for the first row, 202 for the second
      } catch (const Error& e) {
        EXPECT_GT(drafts, 2);
        EXPECT_NE(std::string(e.what()).find("max_context_len, 202"), std::string::npos) << e.what();
      }
    }
  }
}

/// Makes the first pages of every request equal to those of request 0.
template <class Cache>
void copy_pages_of_first(const Paged& paged, size_t shared, const Cache& cache) {
  for (size_t i = 1; i < paged.pages_of.size(); ++i) {
    for (size_t c = 0; c < shared; ++c)
      std::memcpy(static_cast<std::byte*>(cache.data) + paged.pages_of[i][c] * cache.page_stride_bytes,
                  static_cast<std::byte*>(cache.data) + paged.pages_of[0][c] * cache.page_stride_bytes,
                  static_cast<size_t>(cache.page_stride_bytes));
  }
}

/// A pool of the pages that are left when the first ones are kept once, and the table that leads to them.
template <class Cache>
struct SharedPool {
  verify::Buffer memory;
  Cache cache;
  Tensor pages;

  SharedPool(const Paged& paged, size_t shared, const Cache& whole)
      : memory(
            static_cast<size_t>((1 + static_cast<int64_t>(shared + paged.pages_of.size())) * whole.page_stride_bytes)),
        cache(whole),
        pages(
            make_tensor(DType::kI32, {static_cast<int64_t>(paged.pages_of.size()), static_cast<int64_t>(shared + 1)})) {
    cache.data = memory.data();
    cache.num_pages = 1 + static_cast<int64_t>(shared + paged.pages_of.size());
    for (size_t i = 0; i < paged.pages_of.size(); ++i) {
      for (size_t c = 0; c <= shared; ++c) {
        const size_t page = 1 + (c < shared ? c : shared + i);
        *pages.view.ptr<int32_t>(static_cast<int64_t>(i), static_cast<int64_t>(c)) = static_cast<int32_t>(page);
        std::memcpy(memory.data() + static_cast<int64_t>(page) * cache.page_stride_bytes,
                    static_cast<std::byte*>(whole.data) + paged.pages_of[i][c] * cache.page_stride_bytes,
                    static_cast<size_t>(cache.page_stride_bytes));
      }
    }
  }
  int32_t slot(int64_t request, int64_t t) const {
    return *pages.view.ptr<int32_t>(request, t / cache.page_size) * cache.page_size +
           static_cast<int32_t>(t % cache.page_size);
  }
};

// 8 requests of 100 tokens with 96 in common: 800 between them, in a pool of 240.
TEST(Faults, BL18_RequestsShareTheirPrefix) {
  const PagedSpec spec{.seq_lens = std::vector<int32_t>(8, 100), .q_len = 2, .page_size = 16};
  constexpr size_t kShared = 6;
  for (const AbsorbedFormat& f : kAbsorbedFormats) {
    const DecodeProblem d(spec, f, 2);
    copy_pages_of_first(d.paged, kShared, d.pool.view);
    const SharedPool<LatentCacheView> pool(d.paged, kShared, d.pool.view);
    ASSERT_EQ(pool.cache.num_slots(), 240);
    MlaDecode shared = d.params;
    shared.cache = pool.cache;
    shared.pages.pages = pool.pages.view;
    for (const std::string& impl : takers(shared, name_of(f)))
      EXPECT_EQ(verify::run(shared, {.impl = impl}), verify::run(d.params, {.impl = impl})) << impl;
    // What is gathered is more than the pool has.
    std::vector<int32_t> slots, own_slots;
    for (int32_t t = 0; t < 800; ++t) {
      slots.push_back(pool.slot(t / 100, t % 100));
      own_slots.push_back(static_cast<int32_t>(d.paged.slot(t / 100, t % 100)));
    }
    const Tensor list = make_ints(slots), own_list = make_ints(own_slots), c = make_tensor(DType::kF32, {800, 512}),
                 r = make_tensor(DType::kF32, {800, 64});
    const LatentGather g{.slots = list.view, .cache = pool.cache, .latent = c.view, .rope = r.view};
    const LatentGather own_gather{.slots = own_list.view, .cache = d.pool.view, .latent = c.view, .rope = r.view};
    for (const std::string& impl : takers(g, name_of(f)))
      EXPECT_EQ(verify::run(g, {.impl = impl}), verify::run(own_gather, {.impl = impl})) << impl;
    const SparseProblem own(d, 100), common(d, 100);
    for (int64_t row = 0; row < 16; ++row) {
      for (int64_t t = 0; t < 99 + row % 2; ++t) *common.slots.view.ptr<int32_t>(row, t) = pool.slot(row / 2, t);
    }
    SparseAttention lists = common.params;
    lists.cache = pool.cache;
    for (const std::string& impl : takers(lists, name_of(f)))
      EXPECT_EQ(verify::run(lists, {.impl = impl}), verify::run(own.params, {.impl = impl})) << impl;
  }
  for (const IndexerFormat& f : kIndexerFormats) {
    const IndexProblem s(spec, f, 2, 40);
    copy_pages_of_first(s.paged, kShared, s.pool.view);
    const SharedPool<IndexCacheView> pool(s.paged, kShared, s.pool.view);
    IndexSelect shared = s.select;
    shared.cache = pool.cache;
    shared.pages.pages = pool.pages.view;
    for (const std::string& impl : takers(shared, to_string(f.cache)))
      EXPECT_EQ(verify::run(shared, {.impl = impl}).of("topk_positions"),
                verify::run(s.select, {.impl = impl}).of("topk_positions"))
          << impl;
  }
}

/// The rows of a call as requests of one row each, with their own bounds and the table rows of their requests (what a
/// kernel for one row a request would be given).
struct Flat {
  Tensor lens, table_rows;
  explicit Flat(const Paged& paged) {
    std::vector<int32_t> n, r;
    for (size_t i = 0; i < paged.keys_of_row.size(); ++i) {
      n.push_back(static_cast<int32_t>(paged.keys_of_row[i]));
      r.push_back(static_cast<int32_t>(paged.request_of_row[i]));
    }
    lens = make_ints(n);
    table_rows = make_ints(r);
  }
  template <class Params>
  Params of(Params p) const {
    p.pages.row_indices = table_rows.view;
    p.rows = {};
    p.rows.seq_lens = lens.view;
    return p;
  }
};

template <class Params>
void expect_rows_are_requests(const Params& p, const Flat& flat, const std::string& format) {
  const Params single = flat.of(p);
  for (const std::string& impl : takers(p, format, true))
    EXPECT_EQ(verify::run(p, {.impl = impl}), verify::run(single, {.impl = impl})) << Params::kName << " " << impl;
}

// 256 requests of three rows, a table of 8 columns.
TEST(Faults, BL20_MoreRowsThanTableRows) {
  const auto requests = [](size_t n) {
    std::vector<int32_t> lens;
    Rng rng(3);
    while (lens.size() < n) lens.push_back(static_cast<int32_t>(3 + rng.below(20)));
    lens[7] = 512;
    PagedSpec spec{.seq_lens = lens, .q_len = 3};
    spec.spare_columns = 0;
    return spec;
  };
  const PagedSpec many = requests(kSanitized ? 40 : 256), spec = requests(40);
  for (const AbsorbedFormat& f : kAbsorbedFormats) {
    const bool usual = f.q == DType::kBf16 && (f.cache == LatentFormat::kBf16 || f.cache == LatentFormat::kE4m3);
    const DecodeProblem d(usual ? many : spec, f, usual ? 8 : 2);
    ASSERT_EQ(d.params.pages.pages.shape[1], 8);
    expect_rows_are_requests(d.params, Flat(d.paged), name_of(f));
  }
  for (const IndexerFormat& f : kIndexerFormats) {
    const IndexProblem s(many, f, 4, 16);
    expect_rows_are_requests(s.scores, Flat(s.paged), to_string(f.cache));
    expect_rows_are_requests(s.select, Flat(s.paged), to_string(f.cache));
  }
}

// One to eight rows a request, odd numbers too: 1 request and 33, lengths of S and around pages and blocks of keys, the
// last of them all that the table reaches. Each row is the row that it would be alone; its neighbours see one more, so
// a bound that is off by one, or applied to the last block alone, is seen. Spec 5.4.4, traps 6.5, 6.8, 6.19.
TEST(Faults, BL21_OneToEightRowsARequest) {
  const std::vector<int32_t> edges = {63, 64, 65, 66, 127, 128, 129, 130, 255, 256, 257, 258};
  for (int32_t s = 1; s <= 8; ++s) {
    if (kSanitized && s != 3 && s != 8) continue;
    std::vector<int32_t> lens = {320, s};  // 320: the end of the table
    lens.insert(lens.end(), edges.begin(), edges.end());
    for (const AbsorbedFormat& f : kAbsorbedFormats) {
      const bool plain = f.cache == LatentFormat::kBf16 || f.cache == LatentFormat::kF32;
      if (f.q == DType::kF32 ? s != 3 : !plain && s != 3 && s != 8) continue;
      PagedSpec spec{.seq_lens = lens, .q_len = s};
      spec.spare_columns = 0;
      const DecodeProblem d(spec, f, 1);
      expect_rows_are_requests(d.params, Flat(d.paged), name_of(f));
    }
    for (int32_t i = 0; lens.size() < 33; ++i) lens.push_back(s + 7 * i);
    for (const bool one : {false, true}) {
      PagedSpec spec{.seq_lens = one ? std::vector<int32_t>{130} : lens, .q_len = s};
      spec.spare_columns = 0;
      for (const IndexerFormat& f : kIndexerFormats) {
        const IndexProblem p(spec, f, 2, 64);
        expect_rows_are_requests(p.scores, Flat(p.paged), to_string(f.cache));
        expect_rows_are_requests(p.select, Flat(p.paged), to_string(f.cache));
      }
    }
  }
}

// Uneven numbers of rows are the calls of each request by itself, in the packed order.
TEST(Faults, BL22_UnevenNumbersOfRows) {
  for (const std::vector<int32_t>& rows : {std::vector<int32_t>{1, 4, 2, 4}, {2, 2, 1}}) {
    std::vector<int32_t> lens = {70, 300, 9, 64};
    lens.resize(rows.size());
    const PagedSpec spec{.seq_lens = lens, .ragged = rows, .page_size = 32};
    const auto expect_parts = [&](const auto& p, const Paged& paged, const std::string& format,
                                  const std::vector<std::string>& outputs) {
      using Params = std::remove_cvref_t<decltype(p)>;
      for (const std::string& impl : takers(p, format, true)) {
        const verify::Outputs all = verify::run(p, {.impl = impl});
        EXPECT_EQ(all.fault, "");
        int64_t first = 0;
        for (size_t i = 0; i < rows.size(); first += rows[i], ++i) {
          const Tensor len = make_ints({lens[i]}), table_row = make_ints({static_cast<int32_t>(i)});
          Params one = p;
          Params::for_each_view(one, [&](const char*, TensorView& v) {
            if (v.given() && v.shape[0] == paged.num_rows) v = cut(v, first, rows[i]);
          });
          one.pages.row_indices = table_row.view;
          one.rows = {};
          one.rows.seq_lens = len.view;
          one.rows.q_len = rows[i];
          const verify::Outputs part = verify::run(one, {.impl = impl});
          for (const std::string& name : outputs) {
            for (int32_t j = 0; j < rows[i]; ++j)
              EXPECT_EQ(row_bytes(part, name, j, rows[i]), row_bytes(all, name, first + j, paged.num_rows))
                  << Params::kName << " " << impl << " request " << i << " row " << j << " " << name;
          }
        }
      }
    };
    for (const AbsorbedFormat& f : kAbsorbedFormats) {
      const DecodeProblem d(spec, f, 3);
      expect_parts(d.params, d.paged, name_of(f), {"out", "lse"});
    }
    for (const IndexerFormat& f : kIndexerFormats) {
      const IndexProblem s(spec, f, 3, 32);
      expect_parts(s.scores, s.paged, to_string(f.cache), {"logits"});
      expect_parts(s.select, s.paged, to_string(f.cache), {"topk_slots", "topk_lens", "topk_positions"});
    }
  }
}

}  // namespace
