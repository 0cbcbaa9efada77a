// Known faults of steps: kinds F and G (sub-batches, rows a request), H (plans that are kept), and what the backends
// must agree on at the edges: sparse and dense, chunks of long prefixes.
#include <gtest/gtest.h>

#include <iostream>

#include "case_counts.h"
#include "unit/attention_world.h"

namespace gannet_test {
namespace {

struct FormatCase {
  std::string impl;
  DType dtype;
  LatentFormat latent;
  IndexKFormat index;
};

/// Every implementation, the oracle too, with every format that `dsa` binds.
std::vector<FormatCase> format_cases() {
  std::vector<FormatCase> cases;
  for (const std::string& impl : running_implementations()) {
    for (const DType t : {DType::kF32, DType::kBf16}) {
      for (const LatentFormat f :
           {LatentFormat::kF32, LatentFormat::kBf16, LatentFormat::kE4m3, LatentFormat::kPacked656})
        cases.push_back({impl, t, f,
                         f == LatentFormat::kF32    ? IndexKFormat::kF32
                         : f == LatentFormat::kBf16 ? IndexKFormat::kBf16
                                                    : IndexKFormat::kE4m3});
    }
  }
  return cases;
}
std::string name_of(const testing::TestParamInfo<FormatCase>& info) {
  return info.param.impl + "_" + to_string(info.param.dtype) + "_" + to_string(info.param.latent);
}
void PrintTo(const FormatCase& c, std::ostream* os) { *os << c.impl << " " << to_string(c.latent); }

class FaultsOfSteps : public testing::TestWithParam<FormatCase> {
 protected:
  void SetUp() override {
    std::cout << "implementation " << GetParam().impl << ", activations " << to_string(GetParam().dtype) << ", cache "
              << to_string(GetParam().latent) << ", index keys " << to_string(GetParam().index) << "\n";
  }
  WorldOptions options(AttentionArch arch) const {
    const FormatCase& c = GetParam();
    return {.impl = c.impl,
            .arch = arch,
            .dtype = c.dtype,
            .latent_format = c.latent,
            .latent_scale = c.latent == LatentFormat::kE4m3 ? 1.0f / 256.0f : 0.0f,
            .index_format = c.index};
  }
};
INSTANTIATE_TEST_SUITE_P(Attention, FaultsOfSteps, testing::ValuesIn(format_cases()), name_of);

struct Result {
  Tensor out, lse;
  std::vector<int32_t> lists;
};

void expect_same(const Result& a, const Result& b, const std::string& what) {
  EXPECT_TRUE(same_bits(a.out, b.out)) << what;
  EXPECT_TRUE(same_bits(a.lse, b.lse)) << what;
  EXPECT_EQ(a.lists, b.lists) << what;
}

/// Layer 0 writes, selects and attends by its lists.
Result sparse(World& w, StepRows part) {
  Result r{w.out(part), w.lse(part), {}};
  SelectionBuffer buffer(w.options.topk, false, memory_of(test_device()));
  const int64_t rows = w.end(part) - w.begin(part);
  buffer.reserve(rows);
  const TopKSelection s = buffer.view(rows);
  const World::Kv kv = w.kv(0, part);
  const Tensor iq = w.index_q(part), weights = w.index_weights(part), q = w.q_absorbed(part);
  w.backend->select({.layer = 0, .rows = part, .q = iq.view, .weights = weights.view, .write = kv.rows(), .out = s});
  w.backend->attend({.layer = 0,
                     .rows = part,
                     .q = q.view,
                     .write = AlreadyWritten{},
                     .selection = s,
                     .out = r.out.view,
                     .lse = r.lse.view});
  for (int64_t i = 0; i < rows; ++i)
    for (int32_t c = 0; c < w.options.topk; ++c) r.lists.push_back(*s.slots.ptr<int32_t>(i, c));
  return r;
}

/// Layer 1 attends to everything.
Result dense(World& w, StepRows part) {
  Result r{w.out(part), w.lse(part), {}};
  const World::Kv kv = w.kv(1, part);
  const Tensor q = w.q_absorbed(part);
  w.backend->attend({.layer = 1,
                     .rows = part,
                     .q = q.view,
                     .write = kv.rows(),
                     .selection = AttendAll{},
                     .out = r.out.view,
                     .lse = r.lse.view});
  return r;
}

Result prefill(World& w, int32_t layer = 1) {
  Result r{Tensor(w.options.dtype, {w.num_prefill, w.options.num_heads, World::kV}), w.lse(StepRows::kPrefill), {}};
  const World::Kv kv = w.kv(layer, StepRows::kPrefill);
  const Tensor q = w.q_expanded(StepRows::kPrefill), k = w.k_nope(), v = w.v();
  w.backend->dense_prefill({.layer = layer,
                            .q = q.view,
                            .k_nope = k.view,
                            .k_rope = kv.rope.view,
                            .v = v.view,
                            .write = kv.rows(),
                            .expand = w.expand(),
                            .out = r.out.view,
                            .lse = r.lse.view});
  return r;
}

std::vector<std::byte> pool_bytes(const World& w) {
  std::vector<std::byte> all;
  const auto add = [&](const auto& c) {
    const auto* p = static_cast<const std::byte*>(c.data);
    all.insert(all.end(), p, p + c.num_pages * c.page_stride_bytes);
  };
  for (const LayerCaches& l : w.layers()) {
    add(l.latent);
    if (l.index) add(*l.index);
  }
  return all;
}

// Running decodes over lists and a short new prompt, dense, its prefix gathered from packed rows too, in one step: each
// is what it is in a step of its own, and so is every byte of the caches.
TEST_P(FaultsOfSteps, BL19_ShortPromptsBesideSparseDecodes) {
  WorldOptions o = options(AttentionArch::kDsa);
  o.topk = 150;
  o.chunk_capacity = 128;
  o.batch_invariant = true;  // bits of rows in other company are compared
  const std::vector<Request> prompts = {{.prefix = 70, .rows = 3, .id = 1}, {.prefix = 0, .rows = 5, .id = 2}},
                             decodes = {{.prefix = 147, .rows = 1, .id = 3}, {.prefix = 99, .rows = 1, .id = 4}};
  World mixed(o, prompts, decodes), alone(o, prompts, decodes);
  mixed.backend->prepare(mixed.step());
  const Result one_prefill = prefill(mixed, 0), one_decode = sparse(mixed, StepRows::kDecode);
  // The same requests, pages and caches, in two steps.
  const std::vector<int32_t> lens = alone.seq_lens;
  alone.backend->prepare({.seq_lens = std::span(lens).first(2),
                          .prefix_lens = alone.prefix_lens,
                          .extend_lens = alone.extend_lens,
                          .pages = alone.table->view()});
  const Result two_prefill = prefill(alone, 0);
  PageTableView rest = alone.table->view();
  const std::vector<int32_t> rows = {2, 3};
  rest.row_indices = gannet::view(rows.data(), {2});
  alone.backend->prepare({.seq_lens = std::span(lens).last(2), .prefix_lens = {}, .extend_lens = {}, .pages = rest});
  const Result two_decode = sparse(alone, StepRows::kDecode);
  expect_same(one_prefill, two_prefill, "prompts");
  expect_same(one_decode, two_decode, "decodes");
  EXPECT_EQ(pool_bytes(mixed), pool_bytes(alone));
}

/// Makes the rows of the world those of a decode step of all its requests.
void set_rows(World& w, const std::vector<int32_t>& lens, int32_t q_len) {
  w.rows.clear();
  for (size_t r = 0; r < lens.size(); ++r)
    for (int32_t j = 0; j < q_len; ++j) w.rows.push_back({static_cast<int32_t>(r), lens[r] - q_len + j});
}

// Verify of four rows a request, then a draft of one, on one backend: each row belongs to its own request, for reads
// and for writes. 1, 2 and 64 requests, so that row i of the draft is not request i / 4.
TEST_P(FaultsOfSteps, BL23_VerifyThenDraft) {
  for (const int32_t batch : {1, 2, 64}) {
    if (batch == 64 && GetParam().impl == "ref") continue;
    std::vector<Request> requests;
    for (int32_t r = 0; r < batch; ++r) requests.push_back({.prefix = 10 + r % 7, .rows = 4, .id = r});
    WorldOptions o = options(AttentionArch::kDsa);
    o.topk = 8;
    o.num_heads = 1;
    World kept(o, {}, requests, 4), fresh(o, {}, requests, 4);
    kept.backend->prepare(kept.step());
    fresh.backend->prepare(fresh.step());
    expect_same(sparse(kept, StepRows::kDecode), sparse(fresh, StepRows::kDecode), "verify");
    std::vector<int32_t> accepted, lens(static_cast<size_t>(batch));
    for (int32_t r = 0; r < batch; ++r) accepted.push_back(1 + r % 3);
    narrow_seq_lens(kept.backend->step(), accepted, lens);
    kept.backend->advance({.steps = 1, .seq_lens = lens, .pages = {}});
    for (int32_t& n : lens) ++n;
    fresh.backend = fresh.make_backend();
    fresh.backend->prepare({.seq_lens = lens, .prefix_lens = {}, .extend_lens = {}, .pages = fresh.table->view()});
    set_rows(kept, lens, 1);
    set_rows(fresh, lens, 1);
    expect_same(sparse(kept, StepRows::kDecode), sparse(fresh, StepRows::kDecode), "draft");
    EXPECT_EQ(pool_bytes(kept), pool_bytes(fresh)) << batch << " requests";
  }
}

// Three chunks of one prompt on one backend, the first of which ramps up to index_topk keys while the others are beyond
// it, then two requests that change places: a plan that is kept must not hold what was read for other lengths.
TEST_P(FaultsOfSteps, BL24_ChunksOfOnePromptOnOneBackend) {
  WorldOptions o = options(AttentionArch::kDsa);
  o.topk = 32;
  o.num_heads = 1;
  constexpr int32_t kChunk = 40;
  World kept(o, {{.prefix = 0, .rows = 3 * kChunk, .id = 1}, {.prefix = 0, .rows = 6, .id = 2}}, {});
  World fresh(o, {{.prefix = 0, .rows = 3 * kChunk, .id = 1}, {.prefix = 0, .rows = 6, .id = 2}}, {});
  const auto chunk = [&](World& w, const std::vector<int32_t>& table_rows, const std::vector<int32_t>& prefixes,
                         const std::vector<int32_t>& fresh_rows) {
    std::vector<int32_t> lens;
    w.rows.clear();
    for (size_t i = 0; i < table_rows.size(); ++i) {
      lens.push_back(prefixes[i] + fresh_rows[i]);
      for (int32_t j = 0; j < fresh_rows[i]; ++j) w.rows.push_back({table_rows[i], prefixes[i] + j});
    }
    w.num_prefill = w.num_rows();
    PageTableView pages = w.table->view();
    pages.row_indices = gannet::view(table_rows.data(), {static_cast<int64_t>(table_rows.size())});
    w.backend->prepare({.seq_lens = lens, .prefix_lens = prefixes, .extend_lens = fresh_rows, .pages = pages});
    return sparse(w, StepRows::kAll);
  };
  struct Step {
    std::vector<int32_t> rows, prefixes, fresh;
  };
  for (const Step& s : {Step{{0}, {0}, {kChunk}},
                        {{0}, {kChunk}, {kChunk}},
                        {{0}, {2 * kChunk}, {kChunk}},
                        {{0, 1}, {kChunk, 0}, {4, 4}},
                        {{1, 0}, {0, kChunk}, {4, 4}}}) {
    fresh.backend = fresh.make_backend();
    const Result a = chunk(kept, s.rows, s.prefixes, s.fresh), b = chunk(fresh, s.rows, s.prefixes, s.fresh);
    expect_same(a, b, "prefix " + std::to_string(s.prefixes[0]));
  }
}

// Lists and all keys agree where every row sees at most index_topk keys, up to exactly as many; with one key more they
// do not, and attending to all is refused.
TEST_P(FaultsOfSteps, SparseIsDenseUpToTheLengthOfTheLists) {
  for (const int32_t topk : {70, 71, 72, 100}) {
    WorldOptions o = options(AttentionArch::kDsa);
    o.topk = topk;
    const std::vector<Request> extends = {{.prefix = 64, .rows = 8, .id = 1}, {.prefix = 0, .rows = 2, .id = 2}},
                               decodes = {{.prefix = 70, .rows = 2, .id = 3}, {.prefix = 1, .rows = 2, .id = 4}};
    World w(o, extends, decodes, 2);
    w.backend->prepare(w.step());
    const Result lists = sparse(w, StepRows::kAll);
    if (topk < 72) {
      EXPECT_TRUE(has(error_of([&] { (void)dense(w, StepRows::kAll); }), "at most index_topk"));
      continue;
    }
    const Result all = dense(w, StepRows::kAll);
    double worst = 0.0, worst_lse = 0.0;
    for (int64_t i = 0; i < w.num_rows(); ++i) {
      for (int32_t h = 0; h < o.num_heads; ++h) {
        worst_lse = std::max<double>(worst_lse, std::fabs(lists.lse.get(i, h) - all.lse.get(i, h)));
        for (int32_t d = 0; d < World::kR; ++d)
          worst = std::max<double>(worst, std::fabs(lists.out.get(i, h, d) - all.out.get(i, h, d)));
      }
    }
    EXPECT_LE(worst, w.out_tolerance());
    EXPECT_LE(worst_lse, w.lse_tolerance());
  }
}

// A prefix of 30,000 tokens in one chunk and in five, beside short prefixes and none (spec 5.4.1; shorter ones are in
// EveryImplementation.ChunkedPrefixesAreOnePass).
TEST(Faults, ChunkedPrefixOfThirtyThousand) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "too slow under a sanitizer";
#endif
  for (const std::string& impl : running_implementations()) {
    if (impl == "ref") continue;  // slow, and long prefixes add nothing to what it shows
    std::cout << "implementation " << impl << "\n";
    for (const DType t : {DType::kF32, DType::kBf16}) {
      for (const int32_t ne : {1, 3, 8}) {
        if (t == DType::kBf16 && ne != 3) continue;
        std::vector<Request> extends;
        for (const int32_t prefix : {30000, 0, 4096, 1, 63, 64, 65, 300})
          if (static_cast<int32_t>(extends.size()) < ne) extends.push_back({.prefix = prefix, .rows = 1, .id = prefix});
        for (const int64_t loops : {1, 5}) {
          WorldOptions o{.impl = impl,
                         .dtype = t,
                         .latent_format = t == DType::kF32 ? LatentFormat::kF32 : LatentFormat::kBf16,
                         .num_heads = 1,
                         .chunk_capacity = pages_for((30000 + loops - 1) / loops, 64) * 64 * ne};
          World w(o, extends, {});
          w.backend->prepare(w.step());
          EXPECT_EQ(static_cast<int64_t>(w.backend->step().prefix_chunks().chunks.size()), loops);
          const Result r = prefill(w);
          SCOPED_TRACE(testing::Message() << ne << " requests, " << loops << " loops");
          w.expect_expanded(r.out, &r.lse);
        }
      }
    }
  }
}

}  // namespace
}  // namespace gannet_test
