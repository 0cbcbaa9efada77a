// Known faults of kinds C (bytes outside the mask), E (strides, views, layouts) and Q (strided queries, values that are
// a view of the keys).
#include "fault_problems.h"

namespace {

using namespace gannet;
using namespace gannet_tests;
using gannet::verify::make_ints;
using gannet::verify::make_tensor;
using gannet::verify::Poison;
using gannet::verify::Rng;
using gannet::verify::Tensor;

/// Every byte that differs between the two pools, which is every unused one, becomes `fill`.
void fill_unused(verify::Buffer& pool, const verify::Buffer& other, std::byte fill) {
  ASSERT_EQ(pool.size(), other.size());
  for (size_t i = 0; i < pool.size(); ++i) {
    if (pool.data()[i] != other.data()[i]) pool.data()[i] = fill;
  }
}

template <class Params>
void expect_same_for_all(const std::vector<Params>& variants, const std::string& format) {
  for (const std::string& impl : takers(variants[0], format)) {
    const verify::Outputs first = verify::run(variants[0], {.impl = impl});
    EXPECT_EQ(first.fault, "");
    for (size_t i = 1; i < variants.size(); ++i) {
      if (std::string why; !takes(impl, variants[i], &why)) {  // honoured, or refused by name
        std::printf("%s %s refuses variant %zu: %s\n", Params::kName, impl.c_str(), i, why.c_str());
        continue;
      }
      EXPECT_EQ(verify::run(variants[i], {.impl = impl}), first) << Params::kName << " " << impl << " variant " << i;
    }
  }
}

// Pages of 4 tokens, 13 of which the request has; the rest of its last page, the pages of nobody and page 0 hold
// anything, also both codes of NaN of e4m3.
TEST(Faults, BL07_UnusedSlotsOfTheLastPage) {
  const verify::PagedSpec spec{.seq_lens = {13, 6}, .q_len = 1, .page_size = 4};
  constexpr Poison kPoisons[] = {Poison::kZero, Poison::kNan, Poison::kInf, Poison::kHuge, Poison::kNan};
  for (const AbsorbedFormat& f : kAbsorbedFormats) {
    std::vector<DecodeProblem> dense;
    for (const Poison poison : kPoisons) dense.emplace_back(spec, f, 3, poison);
    fill_unused(*dense.back().pool.buffer, *dense[0].pool.buffer, std::byte{0x7F});
    std::vector<SparseProblem> lists;
    std::vector<MlaDecode> decodes;
    std::vector<SparseAttention> sparse;
    for (const DecodeProblem& d : dense) {
      decodes.push_back(d.params);
      lists.emplace_back(d, 64);
      sparse.push_back(lists.back().params);
    }
    expect_same_for_all(decodes, name_of(f));
    expect_same_for_all(sparse, name_of(f));
  }
  for (const IndexerFormat& f : kIndexerFormats) {
    std::vector<IndexProblem> problems;
    for (const Poison poison : kPoisons) problems.emplace_back(spec, f, 3, 8, poison);
    fill_unused(*problems.back().pool.buffer, *problems[0].pool.buffer, std::byte{0x7F});
    std::vector<IndexLogits> scores;
    std::vector<IndexSelect> selects;
    for (const IndexProblem& s : problems) {
      scores.push_back(s.scores);
      selects.push_back(s.select);
    }
    expect_same_for_all(scores, to_string(f.cache));
    expect_same_for_all(selects, to_string(f.cache));
  }
}

// A pool of 100 tokens, lists of 128 whose last 28 entries lead nowhere: in front of the pool or right behind it. Slot
// 0 and what lies around the pool are NaN.
TEST(Faults, BL08_InvalidEntriesAreNeverLoaded) {
  for (const AbsorbedFormat& f : kAbsorbedFormats) {
    DecodeProblem d({.seq_lens = {100, 40}, .page_size = 1}, f, 3);
    const SparseProblem exact(d, 100);
    SparseAttention want = exact.params;
    want.topk_lens = {};  // the entries behind the 40 of the second row are -1
    const auto end = static_cast<int32_t>(d.pool.view.num_slots());
    for (const int32_t filler : {-1, end, -0x7FFFFFFF - 1, 0x7FFFFFFF}) {
      SparseProblem padded(d, 128);
      for (int64_t row = 0; row < 2; ++row) {
        for (int64_t c = row == 0 ? 100 : 40; c < 128; ++c) *padded.slots.view.ptr<int32_t>(row, c) = filler;
      }
      SparseAttention p = padded.params;
      p.topk_lens = {};
      SparseAttention nothing = p;  // a row of invalid entries alone
      Tensor none = make_tensor(DType::kI32, {2, 128});
      for (int64_t c = 0; c < 256; ++c) none.view.ptr<int32_t>()[c] = filler;
      nothing.topk_slots = none.view;
      for (const std::string& impl : takers(p, name_of(f))) {
        EXPECT_EQ(verify::run(p, {.impl = impl}), verify::run(want, {.impl = impl})) << impl << " filler " << filler;
        const verify::Outputs empty = verify::run(nothing, {.impl = impl});
        for (const float x : empty.floats("out")) ASSERT_EQ(x, 0.0f) << impl;
        for (const float x : empty.floats("lse")) ASSERT_EQ(x, -INFINITY) << impl;
      }
    }
  }
}

template <class Params>
void expect_refused(const Params& p, const char* wanted) {
  try {
    const OpPlan<Params> plan(Context{}, p);
    ADD_FAILURE() << Params::kName << " took what should say: " << wanted;
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(wanted), std::string::npos) << "wanted: " << wanted << "\ngot: " << e.what();
  }
}

/// A slice of `v` as part of something wider: the same elements, rows farther apart, NaN bytes between them.
Tensor slice_of(const TensorView& v, int64_t wider) {
  Tensor t = v.rank == 2 ? make_tensor(v.dtype, {v.shape[0], v.shape[1] + wider})
                         : make_tensor(v.dtype, {v.shape[0], v.shape[1] + wider, v.shape[2]});
  t.view.shape = v.shape;
  const auto bytes = static_cast<size_t>(v.shape[static_cast<size_t>(v.rank - 1)]) * size_of(v.dtype);
  const auto at = [](const TensorView& x, int64_t i, int64_t j) {
    return static_cast<std::byte*>(x.data) +
           (i * x.stride[0] + j * x.stride[1]) * static_cast<int64_t>(size_of(x.dtype));
  };
  for (int64_t i = 0; i < v.shape[0]; ++i) {
    if (v.rank == 2) std::memcpy(at(t.view, i, 0), at(v, i, 0), bytes);
    else
      for (int64_t j = 0; j < v.shape[1]; ++j) std::memcpy(at(t.view, i, j), at(v, i, j), bytes);
  }
  return t;
}

TensorView transposed(TensorView v) {
  std::swap(v.shape[0], v.shape[1]);
  std::swap(v.stride[0], v.stride[1]);
  return v;
}

// Tables, lists and outputs as slices, broadcasts and transposes: honoured, or refused by name. run() checks that
// nothing was written between the rows of a sliced output.
TEST(Faults, BL12_SlicedBroadcastAndTransposedLists) {
  const verify::PagedSpec spec{.seq_lens = {90, 33, 64}, .q_len = 1};
  for (const IndexerFormat& f : kIndexerFormats) {
    const IndexProblem s(spec, f, 3, 32);
    IndexSelect sliced = s.select;
    const Tensor pages = slice_of(s.select.pages.pages, 5), slots = slice_of(s.select.topk_slots, 7),
                 positions = slice_of(s.select.topk_positions, 3), weights = slice_of(s.select.weights, 2);
    sliced.pages.pages = pages.view;
    sliced.topk_slots = slots.view;
    sliced.topk_positions = positions.view;
    sliced.weights = weights.view;
    expect_same_for_all<IndexSelect>({s.select, sliced}, to_string(f.cache));
    IndexSelect bad = s.select;
    bad.topk_slots.stride[0] = 0;
    expect_refused(bad, "positive strides, since it is written");
    bad = s.select;
    bad.topk_slots = transposed(make_tensor(DType::kI32, {32, 3}).view);
    expect_refused(bad, "topk_slots is int32[3, 32] strides [1, 3]");
    bad = s.select;
    bad.pages.pages = transposed(make_tensor(DType::kI32, {4, 3}).view);
    expect_refused(bad, "pages is int32[3, 4] strides [1, 3]");
    bad = s.select;
    bad.topk_slots.dtype = DType::kI64;
    expect_refused(bad, "topk_slots is int64");
  }
  for (const AbsorbedFormat& f : kAbsorbedFormats) {
    const DecodeProblem d(spec, f, 2);
    const SparseProblem s(d, 40);
    const Tensor slots = slice_of(s.params.topk_slots, 9), out = slice_of(s.params.out, 2),
                 lse = slice_of(s.params.lse, 4), q = slice_of(s.params.q, 3),
                 pages = slice_of(d.params.pages.pages, 6);
    SparseAttention sliced = s.params;
    sliced.topk_slots = slots.view;
    sliced.out = out.view;
    sliced.lse = lse.view;
    sliced.q = q.view;
    expect_same_for_all<SparseAttention>({s.params, sliced}, name_of(f));
    MlaDecode dense = d.params;
    dense.pages.pages = pages.view;
    dense.out = out.view;
    dense.lse = lse.view;
    dense.q = q.view;
    expect_same_for_all<MlaDecode>({d.params, dense}, name_of(f));
    // One list, one query for all rows, or copies of them.
    const Tensor lists = make_tensor(DType::kI32, {3, 40}), queries = make_tensor(f.q, {3, 2, 576});
    const auto row_size = static_cast<size_t>(2 * 576) * size_of(f.q);
    for (int64_t r = 0; r < 3; ++r) {
      std::memcpy(lists.view.ptr<int32_t>(r), s.slots.view.ptr<int32_t>(0), 40 * sizeof(int32_t));
      std::memcpy(cut(queries.view, r, 1).data, d.q.view.data, row_size);
    }
    SparseAttention copies = s.params, broadcast = s.params;
    copies.topk_lens = broadcast.topk_lens = {};
    copies.topk_slots = lists.view;
    copies.q = queries.view;
    broadcast.topk_slots.stride[0] = 0;
    broadcast.q.stride[0] = 0;
    expect_same_for_all<SparseAttention>({copies, broadcast}, name_of(f));
    SparseAttention bad = s.params;
    bad.topk_slots = transposed(make_tensor(DType::kI32, {40, 3}).view);
    expect_refused(bad, "topk_slots is int32[3, 40] strides [1, 3]");
    bad = s.params;
    bad.topk_slots.dtype = DType::kI64;
    expect_refused(bad, "topk_slots is int64");
    bad = s.params;
    bad.out.stride[0] = 0;
    expect_refused(bad, "positive strides, since it is written");
  }
}

/// The same rows in a pool whose pages lie three pages apart, as in an allocation that holds a page of three layers
/// side by side.
template <class Cache>
std::shared_ptr<verify::Buffer> spread(Cache& view, int64_t page_bytes) {
  Cache wide = view;
  wide.page_stride_bytes = 3 * ((page_bytes + 15) / 16 * 16);
  auto memory = std::make_shared<verify::Buffer>(static_cast<size_t>(wide.num_pages * wide.page_stride_bytes));
  wide.data = memory->data();
  for (int64_t p = 0; p < view.num_pages; ++p)
    std::memcpy(memory->data() + p * wide.page_stride_bytes,
                static_cast<std::byte*>(view.data) + p * view.page_stride_bytes, static_cast<size_t>(page_bytes));
  view = wide;
  return memory;
}

TEST(Faults, BL13_PoolsWhosePagesLieApart) {
  const verify::PagedSpec spec{.seq_lens = {200, 65, 0, 3}, .q_len = 2};
  for (const AbsorbedFormat& f : kAbsorbedFormats) {
    const DecodeProblem d(spec, f, 3);
    const SparseProblem s(d, 200);
    const int64_t page_bytes = 64 * latent_row_bytes(f.cache, {});
    MlaDecode far = d.params;
    const auto memory = spread(far.cache, page_bytes);
    SparseAttention far_sparse = s.params;
    far_sparse.cache = far.cache;
    expect_same_for_all<MlaDecode>({d.params, far}, name_of(f));
    expect_same_for_all<SparseAttention>({s.params, far_sparse}, name_of(f));
    std::vector<int32_t> slots;
    for (int32_t t = 0; t < 200; ++t) slots.push_back(static_cast<int32_t>(d.paged.slot(0, t)));
    const Tensor list = make_ints(slots), c = make_tensor(DType::kF32, {200, 512}),
                 r = make_tensor(DType::kF32, {200, 64});
    const LatentGather g{.slots = list.view, .cache = d.pool.view, .latent = c.view, .rope = r.view};
    LatentGather far_gather = g;
    far_gather.cache = far.cache;
    expect_same_for_all<LatentGather>({g, far_gather}, name_of(f));
    // A write leaves the pages of other layers alone, and writes the same bytes.
    fill_normal(c, Rng(8));
    fill_normal(r, Rng(9));
    LatentWrite w{.latent = c.view, .rope = r.view, .slots = list.view, .cache = d.pool.view};
    LatentWrite far_write = w;
    far_write.cache = far.cache;
    for (const std::string& impl : takers(w, name_of(f))) {
      const std::vector<std::byte> near_bytes = verify::run(w, {.impl = impl}).of("cache");
      const std::vector<std::byte> far_bytes = verify::run(far_write, {.impl = impl}).of("cache");
      for (int64_t p = 0; p < far.cache.num_pages; ++p) {
        const std::byte* a = near_bytes.data() + p * d.pool.view.page_stride_bytes;
        const std::byte* b = far_bytes.data() + p * far.cache.page_stride_bytes;
        EXPECT_EQ(std::memcmp(a, b, static_cast<size_t>(page_bytes)), 0) << impl << " page " << p;
        if (p + 1 == far.cache.num_pages) break;  // what run() gives back ends with the last row
        for (int64_t i = page_bytes; i < far.cache.page_stride_bytes; ++i) ASSERT_EQ(b[i], std::byte{0xFF}) << impl;
      }
    }
  }
  for (const IndexerFormat& f : kIndexerFormats) {
    const IndexProblem s(spec, f, 3, 50);
    const int64_t page_bytes = 64 * index_k_token_bytes(f.cache, 128);
    IndexLogits far = s.scores;
    const auto memory = spread(far.cache, page_bytes);
    IndexSelect far_select = s.select;
    far_select.cache = far.cache;
    expect_same_for_all<IndexLogits>({s.scores, far}, to_string(f.cache));
    expect_same_for_all<IndexSelect>({s.select, far_select}, to_string(f.cache));
    std::vector<int32_t> slots;
    for (int32_t t = 0; t < 200; ++t) slots.push_back(static_cast<int32_t>(s.paged.slot(0, t)));
    const Tensor list = make_ints(slots), k = make_tensor(DType::kF32, {200, 128});
    const IndexKGather g{.slots = list.view, .cache = s.pool.view, .k = k.view};
    IndexKGather far_gather = g;
    far_gather.cache = far.cache;
    expect_same_for_all<IndexKGather>({g, far_gather}, to_string(f.cache));
    fill_normal(k, Rng(8));
    IndexKWrite w{.k = k.view, .slots = list.view, .cache = s.pool.view};
    IndexKWrite far_write = w;
    far_write.cache = far.cache;
    for (const std::string& impl : takers(w, to_string(f.cache))) {
      const std::vector<std::byte> near_bytes = verify::run(w, {.impl = impl}).of("cache");
      const std::vector<std::byte> far_bytes = verify::run(far_write, {.impl = impl}).of("cache");
      for (int64_t p = 0; p < far.cache.num_pages; ++p) {
        const std::byte* b = far_bytes.data() + p * far.cache.page_stride_bytes;
        EXPECT_EQ(
            std::memcmp(near_bytes.data() + p * s.pool.view.page_stride_bytes, b, static_cast<size_t>(page_bytes)), 0)
            << impl << " page " << p;
        if (p + 1 == far.cache.num_pages) break;  // what run() gives back ends with the last row
        for (int64_t i = page_bytes; i < far.cache.page_stride_bytes; ++i) ASSERT_EQ(b[i], std::byte{0xFF}) << impl;
      }
    }
  }
}

// Values of all tokens of a page, then their scales: at the addresses of the contract, for the first, the second and
// the last token of a page, each of another size; and scores read the scale of their own token.
TEST(Faults, BL14_PagesOfIndexKeysArePlanar) {
  for (const int32_t page_size : {64, 256}) {
    IndexCacheView cache;
    cache.num_pages = 3;
    cache.page_size = page_size;
    cache.page_stride_bytes = int64_t{page_size} * 132;
    const verify::Buffer memory(static_cast<size_t>(3 * cache.page_stride_bytes), Poison::kZero);
    cache.data = const_cast<std::byte*>(memory.data());
    const Tensor k = make_tensor(DType::kF32, {3, 128});
    // Token i: values (i + 1) * 448 and half of it, so that its scale is i + 1 and its codes are 448 and 224.
    for (int64_t i = 0; i < 3; ++i) {
      for (int64_t d = 0; d < 128; ++d)
        verify::set(k.view, static_cast<float>((i + 1) * (d % 3 == i ? 448 : 224)), i, d);
    }
    const Tensor slots = make_ints({page_size, page_size + 1, 2 * page_size - 1});
    IndexKWrite w{.k = k.view, .slots = slots.view, .cache = cache};
    for (const std::string& impl : takers(w, "page size " + std::to_string(page_size))) {
      const verify::Outputs written = verify::run(w, {.impl = impl});
      const std::byte* page = written.of("cache").data() + cache.page_stride_bytes;
      for (int64_t i = 0; i < 3; ++i) {
        const int64_t offset = i == 2 ? page_size - 1 : i;
        for (int64_t d = 0; d < 128; ++d)
          ASSERT_EQ(std::to_integer<int>(page[offset * 128 + d]), d % 3 == i ? 0x7E : 0x76) << impl << " token " << i;
        float scale;
        std::memcpy(&scale, page + int64_t{page_size} * 128 + offset * 4, sizeof scale);
        EXPECT_EQ(scale, static_cast<float>(i + 1)) << impl << " token " << i;
      }
    }
    run_once(Context{}, w, {.impl = "ref"});
    const Tensor q = make_tensor(DType::kBf16, {1, 1, 128}), weights = make_tensor(DType::kF32, {1, 1}),
                 logits = make_tensor(DType::kF32, {1, page_size}), pages = make_tensor(DType::kI32, {1, 1}),
                 lens = make_ints({page_size});
    for (int64_t d = 0; d < 128; ++d) verify::set(q.view, d == 0 ? 1.0f : 0.0f, 0, 0, d);
    verify::set(weights.view, 1.0f, 0, 0);
    *pages.view.ptr<int32_t>() = 1;
    IndexLogits l;
    l.q = q.view;
    l.weights = weights.view;
    l.cache = cache;
    l.pages = PageTableView::padded(pages.view);
    l.rows.seq_lens = lens.view;
    l.logits = logits.view;
    for (const std::string& impl : takers(l, "page size " + std::to_string(page_size))) {
      const std::vector<float> scores = verify::run(l, {.impl = impl}).floats("logits");
      EXPECT_EQ(scores[0], 448.0f) << impl;
      EXPECT_EQ(scores[1], 2.0f * 224.0f) << impl;
      EXPECT_EQ(scores[static_cast<size_t>(page_size - 1)], 3.0f * 224.0f) << impl;
    }
  }
}

/// `v` [rows, heads, width] as the first heads of a projection of `wider` heads more.
template <class Params>
void expect_slices_count_as_packed(const Params& packed, const std::vector<TensorView Params::*>& members,
                                   const std::string& format) {
  std::vector<Tensor> keep;
  Params sliced = packed;
  for (TensorView Params::*m : members) {
    keep.push_back(slice_of(packed.*m, 16));
    sliced.*m = keep.back().view;
  }
  expect_same_for_all<Params>({packed, sliced}, format);
}

// Requests of several rows whose q is a slice of a wider projection: the first request alone would be right without
// strides.
TEST(Faults, BL43_QueriesAreSlicesOfAProjection) {
  const verify::PagedSpec spec{.seq_lens = {70, 9, 131, 64}, .q_len = 1};
  for (const AbsorbedFormat& f : kAbsorbedFormats) {
    const DecodeProblem d(spec, f, 5);
    expect_slices_count_as_packed<MlaDecode>(d.params, {&MlaDecode::q, &MlaDecode::out}, name_of(f));
    expect_slices_count_as_packed<SparseAttention>(SparseProblem(d, 64).params,
                                                   {&SparseAttention::q, &SparseAttention::out}, name_of(f));
  }
  for (const IndexerFormat& f : kIndexerFormats) {
    const IndexProblem s(spec, f, 5, 20);
    expect_slices_count_as_packed<IndexLogits>(s.scores, {&IndexLogits::q}, to_string(f.cache));
    expect_slices_count_as_packed<IndexSelect>(s.select, {&IndexSelect::q}, to_string(f.cache));
  }
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    const Tensor q = make_tensor(dtype, {4, 32, 128}), k = make_tensor(dtype, {50, 32, 64}),
                 v = make_tensor(dtype, {50, 32, 128}), rope = make_tensor(dtype, {50, 64}),
                 out = make_tensor(dtype, {4, 32, 128}), cu_q = make_ints({0, 1, 2, 4}),
                 cu_kv = make_ints({0, 20, 23, 50});
    for (const Tensor* t : {&q, &k, &v, &rope}) fill_normal(*t, Rng(11));
    RaggedPrefill p;
    p.q = q.view;
    p.k = k.view;
    p.k_rope = rope.view;
    p.v = v.view;
    p.cu_q_lens = cu_q.view;
    p.cu_kv_lens = cu_kv.view;
    p.out = out.view;
    p.softmax_scale = 0.1f;
    // 32 of 48 heads: strides (6144, 128, 1).
    expect_slices_count_as_packed<RaggedPrefill>(
        p, {&RaggedPrefill::q, &RaggedPrefill::k, &RaggedPrefill::v, &RaggedPrefill::out}, to_string(dtype));
    const Tensor x = make_tensor(dtype, {4, 32, 192}), at = make_ints({0, 3, 1, 2}),
                 table = make_tensor(DType::kF32, {4, 64});
    fill_normal(x, Rng(12));
    fill_normal(table, Rng(13));
    Rope r;
    r.x = x.view;
    r.positions = at.view;
    r.cos_sin = table.view;
    r.offset = 128;
    expect_slices_count_as_packed<Rope>(r, {&Rope::x}, to_string(dtype));
  }
}

// The values are the first part of each key row. With one key a result is that key: the first, the second and the last.
TEST(Faults, BL44_ValuesAreThePartsOfKeyRows) {
  for (const AbsorbedFormat& f : kAbsorbedFormats) {
    const DecodeProblem d({.seq_lens = {130}}, f, 2);
    for (const int32_t position : {0, 1, 129}) {
      const Tensor slot = make_ints({static_cast<int32_t>(d.paged.slot(0, position))});
      const Tensor c = make_tensor(DType::kF32, {1, 512}), r = make_tensor(DType::kF32, {1, 64});
      const LatentGather g{.slots = slot.view, .cache = d.pool.view, .latent = c.view, .rope = r.view};
      const std::vector<float> want = verify::run(g, {.impl = "ref"}).floats("latent");
      SparseAttention p = SparseProblem(d, 1).params;
      p.topk_slots = view(slot.view.ptr<int32_t>(), {1, 1});
      p.topk_lens = {};
      std::vector<float> both = want;
      both.insert(both.end(), want.begin(), want.end());
      // Values dequantised to bf16 are off by half a unit of it; a weight of 1 is exact.
      const double tolerance = precision_of(f, 1).fp32 ? 1e-6 : verify::kUnitBf16;
      for (const std::string& impl : takers(p, name_of(f)))
        expect_lines_close(both, verify::run(p, {.impl = impl}).floats("out"), 512, tolerance, impl);
      // The same through a page table: the key's page alone, one key visible or, for others of the page, one too many.
      if (position != 0) continue;
      MlaDecode dense = d.params;
      const Tensor one = make_ints({1});
      dense.rows.seq_lens = one.view;
      for (const std::string& impl : takers(dense, name_of(f)))
        expect_lines_close(both, verify::run(dense, {.impl = impl}).floats("out"), 512, tolerance, impl);
    }
  }
}

}  // namespace
