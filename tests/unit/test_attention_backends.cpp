// The backends against the oracle, on every implementation that runs here.
#include <gtest/gtest.h>

#include <iostream>

#include "case_counts.h"
#include "gannet/kv_transfer.h"
#include "unit/attention_world.h"
#include "unit/counting_new.h"

namespace gannet_test {
namespace {

// ---- the two ways through a step ----------------------------------------------------------------------------------

struct Result {
  Tensor out, lse;
};

/// Absorbed attention over every key, rows written first.
Result attend_all(World& w, StepRows part, int32_t layer = 1) {
  Result r{w.out(part), w.lse(part)};
  const World::Kv kv = w.kv(layer, part);
  const Tensor q = w.q_absorbed(part);
  w.backend->attend({.layer = layer,
                     .rows = part,
                     .q = q.view,
                     .write = kv.rows(),
                     .selection = AttendAll{},
                     .out = r.out.view,
                     .lse = r.lse.view});
  return r;
}

struct SparseResult {
  Result result;
  SelectionBuffer buffer;
  TopKSelection selection;
};

/// Layer 0 writes, selects and attends.
SparseResult select_and_attend(World& w, StepRows part) {
  SparseResult r{{w.out(part), w.lse(part)}, SelectionBuffer(w.options.topk, true, memory_of(w.device)), {}};
  const int64_t rows = w.end(part) - w.begin(part);
  r.buffer.reserve(rows);
  r.selection = r.buffer.view(rows);
  const World::Kv kv = w.kv(0, part);
  const Tensor iq = w.index_q(part), weights = w.index_weights(part), q = w.q_absorbed(part);
  w.backend->select(
      {.layer = 0, .rows = part, .q = iq.view, .weights = weights.view, .write = kv.rows(), .out = r.selection});
  w.backend->attend({.layer = 0,
                     .rows = part,
                     .q = q.view,
                     .write = AlreadyWritten{},
                     .selection = r.selection,
                     .out = r.result.out.view,
                     .lse = r.result.lse.view});
  return r;
}

std::vector<int32_t> listed(const TopKSelection& s, int64_t row) {
  const int32_t n = *s.lens.ptr<int32_t>(row);
  const int32_t* p = s.positions.ptr<int32_t>(row);
  return {p, p + n};
}

/// Checks lists against the scores of the oracle: packed, ascending, slots of the positions, and nothing better left
/// out.
void expect_selection(const World& w, const TopKSelection& s, StepRows part) {
  // Scores are sums of 8 heads of 128 products of bf16-exact values, of size 10: fp32 errors of some 1e-5.
  constexpr double kTie = 1e-4;
  const int32_t k = w.options.topk;
  for (int64_t i = 0; i < s.slots.shape[0]; ++i) {
    const World::RowId r = w.rows[static_cast<size_t>(i + w.begin(part))];
    const int32_t n = std::min(r.position + 1, k);
    ASSERT_EQ(*s.lens.ptr<int32_t>(i), n) << i;
    const int32_t* positions = s.positions.ptr<int32_t>(i);
    const int32_t* slots = s.slots.ptr<int32_t>(i);
    std::vector<bool> chosen(static_cast<size_t>(r.position) + 1, false);
    for (int32_t c = 0; c < k; ++c) {
      if (c >= n) {
        ASSERT_EQ(positions[c], -1);
        ASSERT_EQ(slots[c], -1);
        continue;
      }
      ASSERT_GE(positions[c], c == 0 ? 0 : positions[c - 1] + 1);
      ASSERT_LE(positions[c], r.position);
      chosen[static_cast<size_t>(positions[c])] = true;
      const int32_t page = w.table->row(r.request)[static_cast<size_t>(positions[c] / w.options.page_size)];
      ASSERT_EQ(slots[c], page * w.options.page_size + positions[c] % w.options.page_size);
    }
    double worst_chosen = std::numeric_limits<double>::infinity(), best_other = -worst_chosen;
    for (int32_t p = 0; p <= r.position; ++p) {
      const double score = w.index_score(r, p);
      if (chosen[static_cast<size_t>(p)]) worst_chosen = std::min(worst_chosen, score);
      else best_other = std::max(best_other, score);
    }
    EXPECT_LE(best_other, worst_chosen + kTie) << i;
  }
}

Result dense_prefill(World& w, bool with_lse = true) {
  Result r{Tensor(w.options.dtype, {w.num_prefill, w.options.num_heads, World::kV}), w.lse(StepRows::kPrefill)};
  const World::Kv kv = w.kv(1, StepRows::kPrefill);
  const Tensor q = w.q_expanded(StepRows::kPrefill), k = w.k_nope(), v = w.v();
  w.backend->dense_prefill({.layer = 1,
                            .q = q.view,
                            .k_nope = k.view,
                            .k_rope = kv.rope.view,
                            .v = v.view,
                            .write = kv.rows(),
                            .expand = w.expand(),
                            .out = r.out.view,
                            .lse = with_lse ? r.lse.view : TensorView{}});
  return r;
}

/// spec appendix B: C (0 + 5), D (130 + 3), A (63 + 2), B (198 + 2).
World mini_batch(WorldOptions o) {
  o.chunk_capacity = 128;
  return World(o, {{.prefix = 0, .rows = 5, .id = 1}, {.prefix = 130, .rows = 3, .id = 2}},
               {{.prefix = 63, .rows = 2, .id = 3}, {.prefix = 198, .rows = 2, .id = 4}}, 2);
}

class EveryImplementation : public testing::TestWithParam<ImplCase> {
 protected:
  void SetUp() override {
    std::cout << "implementation " << GetParam().impl << ", " << GetParam().formats.name << "\n";
  }
  WorldOptions options(AttentionArch arch = AttentionArch::kMla) const {
    const Formats& f = GetParam().formats;
    return {
        .impl = GetParam().impl, .arch = arch, .dtype = f.dtype, .latent_format = f.latent, .index_format = f.index};
  }
};
INSTANTIATE_TEST_SUITE_P(Attention, EveryImplementation, testing::ValuesIn(impl_cases()), case_name);

// ---- mla ----------------------------------------------------------------------------------------------------------

TEST_P(EveryImplementation, MlaMiniBatchOfTheContract) {
  World w = mini_batch(options());
  w.backend->prepare(w.step());
  const Result prefill = dense_prefill(w);
  w.expect_expanded(prefill.out, &prefill.lse);
  const Result decode = attend_all(w, StepRows::kDecode);
  w.expect_dense(decode.out, decode.lse, StepRows::kDecode);
  // The absorbed form of the same prefill rows.
  const Result absorbed = attend_all(w, StepRows::kPrefill);
  w.expect_dense(absorbed.out, absorbed.lse, StepRows::kPrefill);
  for (const auto& [op, impl] : w.backend->implementations()) {
    if (GetParam().impl == kAutoCuda) continue;
    EXPECT_EQ(impl, GetParam().impl) << op;
  }
}

TEST_P(EveryImplementation, MixedStepIsItsParts) {
  for (const AttentionArch arch : {AttentionArch::kMla, AttentionArch::kDsa}) {
    WorldOptions o = options(arch);
    o.batch_invariant = true;  // bits of rows in other company are compared
    World whole = mini_batch(o), parts = mini_batch(o);
    whole.backend->prepare(whole.step());
    parts.backend->prepare(parts.step());
    const Result all = attend_all(whole, StepRows::kAll);
    const Result prefill = attend_all(parts, StepRows::kPrefill), decode = attend_all(parts, StepRows::kDecode);
    const auto compare = [&](const Tensor& a, const Tensor& p, const Tensor& d) {
      ASSERT_EQ(a.bytes(), p.bytes() + d.bytes());
      EXPECT_EQ(std::memcmp(a.view.data, p.view.data, p.bytes()), 0);
      EXPECT_EQ(std::memcmp(static_cast<std::byte*>(a.view.data) + p.bytes(), d.view.data, d.bytes()), 0);
    };
    compare(all.out, prefill.out, decode.out);
    compare(all.lse, prefill.lse, decode.lse);
    // And as steps of their own: one for each request.
    for (size_t r = 0; r < whole.requests.size(); ++r) {
      const bool extends = static_cast<int64_t>(r) < whole.num_extends;
      World alone(parts.options, extends ? std::vector{whole.requests[r]} : std::vector<Request>{},
                  extends ? std::vector<Request>{} : std::vector{whole.requests[r]}, 2);
      alone.backend->prepare(alone.step());
      const Result one = attend_all(alone, StepRows::kAll);
      size_t first = 0;
      while (whole.rows[first].request != static_cast<int32_t>(r)) ++first;
      EXPECT_EQ(std::memcmp(all.out.rows(static_cast<int64_t>(first), all.out.view.shape[0]).data, one.out.view.data,
                            one.out.bytes()),
                0)
          << "request " << r;
    }
  }
}

TEST_P(EveryImplementation, MixedSparseStepIsItsParts) {
  WorldOptions o = options(AttentionArch::kDsa);
  o.topk = 50;
  World whole = mini_batch(o), parts = mini_batch(o);
  whole.backend->prepare(whole.step());
  parts.backend->prepare(parts.step());
  const SparseResult all = select_and_attend(whole, StepRows::kAll);
  const SparseResult prefill = select_and_attend(parts, StepRows::kPrefill),
                     decode = select_and_attend(parts, StepRows::kDecode);
  EXPECT_EQ(std::memcmp(all.result.out.view.data, prefill.result.out.view.data, prefill.result.out.bytes()), 0);
  EXPECT_EQ(std::memcmp(static_cast<std::byte*>(all.result.out.view.data) + prefill.result.out.bytes(),
                        decode.result.out.view.data, decode.result.out.bytes()),
            0);
  for (int64_t i = 0; i < 12; ++i)
    EXPECT_EQ(listed(all.selection, i), i < 8 ? listed(prefill.selection, i) : listed(decode.selection, i - 8));
}

TEST_P(EveryImplementation, RowsWrittenFirstOrFoundWritten) {
  for (const AttentionArch arch : {AttentionArch::kMla, AttentionArch::kDsa}) {
    World first = mini_batch(options(arch)), found = mini_batch(options(arch));
    first.backend->prepare(first.step());
    found.backend->prepare(found.step());
    const Result a = attend_all(first, StepRows::kDecode);
    const World::Kv kv = found.kv(1, StepRows::kDecode);
    found.backend->write(1, StepRows::kDecode, kv.rows());
    Result b{found.out(StepRows::kDecode), found.lse(StepRows::kDecode)};
    const Tensor q = found.q_absorbed(StepRows::kDecode);
    found.backend->attend({.layer = 1,
                           .rows = StepRows::kDecode,
                           .q = q.view,
                           .write = AlreadyWritten{},
                           .selection = AttendAll{},
                           .out = b.out.view,
                           .lse = b.lse.view});
    EXPECT_TRUE(same_bits(a.out, b.out));
    EXPECT_TRUE(same_bits(a.lse, b.lse));
  }
}

TEST_P(EveryImplementation, StaleBytesNeverReachAResult) {
  // 0xff is NaN, 0x7e 1e38, 0 what a fresh pool often holds; other pages, tails of pages, page 0's neighbours, scratch.
  for (const AttentionArch arch : {AttentionArch::kMla, AttentionArch::kDsa}) {
    std::vector<Result> dense, prefill;
    std::vector<SparseResult> sparse;
    for (const uint8_t fill : {uint8_t{0xff}, uint8_t{0x7e}, uint8_t{0}}) {
      WorldOptions o = options(arch);
      o.fill = fill;
      World w = mini_batch(o);
      w.backend->prepare(w.step());
      dense.push_back(attend_all(w, StepRows::kAll));
      World p = mini_batch(o);
      p.backend->prepare(p.step());
      prefill.push_back(dense_prefill(p));
      if (arch != AttentionArch::kDsa) continue;
      o.topk = 50;
      World s = mini_batch(o);
      s.backend->prepare(s.step());
      sparse.push_back(select_and_attend(s, StepRows::kAll));
    }
    for (size_t i = 1; i < dense.size(); ++i) {
      EXPECT_TRUE(same_bits(dense[0].out, dense[i].out)) << to_string(arch) << " fill " << i;
      EXPECT_TRUE(same_bits(prefill[0].out, prefill[i].out)) << to_string(arch) << " fill " << i;
      if (sparse.empty()) continue;
      EXPECT_TRUE(same_bits(sparse[0].result.out, sparse[i].result.out)) << "fill " << i;
    }
  }
}

TEST_P(EveryImplementation, WorkersAndPageOrderDoNotMatter) {
  for (const AttentionArch arch : {AttentionArch::kMla, AttentionArch::kDsa}) {
    WorldOptions o = options(arch);
    o.topk = arch == AttentionArch::kDsa ? 50 : 2048;
    std::vector<Tensor> outs;
    OddExecutor three(3), eight(8);
    for (Executor* e :
         {static_cast<Executor*>(nullptr), static_cast<Executor*>(&three), static_cast<Executor*>(&eight)}) {
      o.executor = e;
      o.page_seed += 10;
      World w = mini_batch(o);
      w.backend->prepare(w.step());
      outs.push_back(arch == AttentionArch::kDsa ? select_and_attend(w, StepRows::kAll).result.out
                                                 : attend_all(w, StepRows::kAll).out);
    }
    EXPECT_TRUE(same_bits(outs[0], outs[1])) << to_string(arch);
    EXPECT_TRUE(same_bits(outs[0], outs[2])) << to_string(arch);
  }
}

TEST_P(EveryImplementation, RowsOfARequestDoNotDependOnQLen) {
  // Four rows at once, or as four steps of one.
  World four(options(), {}, {{.prefix = 62, .rows = 4, .id = 5}}, 4);
  four.backend->prepare(four.step());
  const Result all = attend_all(four, StepRows::kDecode);
  for (int32_t j = 0; j < 4; ++j) {
    World one(options(), {}, {{.prefix = 62 + j, .rows = 1, .id = 5}}, 1);
    one.backend->prepare(one.step());
    const Result r = attend_all(one, StepRows::kDecode);
    EXPECT_EQ(std::memcmp(all.out.rows(j, j + 1).data, r.out.view.data, r.out.bytes()), 0) << j;
  }
}

// ---- requests with nothing ----------------------------------------------------------------------------------------

TEST_P(EveryImplementation, EmptyRequests) {
  for (const AttentionArch arch : {AttentionArch::kMla, AttentionArch::kDsa}) {
    // An extend without new rows, a padded decode of length 0, one shorter than its rows.
    World w(options(arch), {{.prefix = 70, .rows = 0, .id = 1}, {.prefix = 0, .rows = 3, .id = 2}},
            {{.prefix = 0, .rows = 0, .id = 3}, {.prefix = 0, .rows = 1, .id = 4}, {.prefix = 64, .rows = 2, .id = 5}},
            2);
    w.backend->prepare(w.step());
    EXPECT_EQ(w.num_rows(), 3 + 6);
    const Result r = attend_all(w, StepRows::kAll);
    w.expect_dense(r.out, r.lse, StepRows::kAll);
    for (const int64_t i : {3, 4, 5}) EXPECT_EQ(r.lse.get(i, 0), -std::numeric_limits<float>::infinity()) << i;
    const Result p = dense_prefill(w);
    w.expect_expanded(p.out, &p.lse);
    if (arch != AttentionArch::kDsa) continue;
    const SparseResult s = select_and_attend(w, StepRows::kAll);
    w.expect_dense(s.result.out, s.result.lse, StepRows::kAll);
  }
  // No rows of a part: nothing to do, whatever the arguments.
  World decode_only(options(), {}, {{.prefix = 3, .rows = 1, .id = 1}});
  decode_only.backend->prepare(decode_only.step());
  decode_only.backend->attend({.layer = 0,
                               .rows = StepRows::kPrefill,
                               .q = {},
                               .write = AlreadyWritten{},
                               .selection = AttendAll{},
                               .out = {},
                               .lse = {}});
  decode_only.backend->dense_prefill({.layer = 0,
                                      .q = {},
                                      .k_nope = {},
                                      .k_rope = {},
                                      .v = {},
                                      .write = AlreadyWritten{},
                                      .expand = {},
                                      .out = {},
                                      .lse = {}});
}

// ---- chunked prefill ----------------------------------------------------------------------------------------------

TEST_P(EveryImplementation, ChunkedPrefixesAreOnePass) {
  // ref is slow, and long prefixes add nothing to what it shows.
  const bool quick = GetParam().impl == "ref";
  for (const int32_t prefix : {0, 1, 63, 64, 65, 4096}) {
    if (quick && prefix > 65) continue;
    for (const int32_t ne : {1, 3, 8}) {
      std::vector<Request> extends;
      for (int32_t r = 0; r < ne; ++r) extends.push_back({.prefix = prefix, .rows = 2, .id = r});
      int64_t loops_seen = 0;
      for (const int32_t loops : {1, 2, 3, 5}) {
        if (loops > 1 && prefix < 64 * loops && !(prefix == 65 && loops == 2)) continue;
        WorldOptions o = options();
        const int64_t chunk = pages_for((prefix + loops - 1) / loops, 64) * 64;
        o.chunk_capacity = std::max<int64_t>(chunk, 64) * ne;
        World w(o, extends, {});
        w.backend->prepare(w.step());
        loops_seen = static_cast<int64_t>(w.backend->step().prefix_chunks().chunks.size());
        EXPECT_EQ(loops_seen, prefix == 0 ? 0 : loops) << prefix << " by " << o.chunk_capacity;
        const Result r = dense_prefill(w);
        SCOPED_TRACE(testing::Message() << "prefix " << prefix << ", " << ne << " requests, " << loops << " loops");
        w.expect_expanded(r.out, &r.lse);
      }
    }
  }
}

TEST_P(EveryImplementation, UnevenPrefixesInManyChunks) {
  // Requests without prefix, shorter than a page, of whole pages; capacities from all at once to less than a page each.
  const std::vector<Request> extends = {{.prefix = 300, .rows = 3, .id = 1}, {.prefix = 0, .rows = 2, .id = 2},
                                        {.prefix = 1, .rows = 1, .id = 3},   {.prefix = 64, .rows = 4, .id = 4},
                                        {.prefix = 129, .rows = 0, .id = 5}, {.prefix = 0, .rows = 1, .id = 6}};
  for (const int64_t capacity : {32768, 1000, 500, 128, 64, 1}) {
    for (const int32_t page_size : {32, 64}) {
      WorldOptions o = options();
      o.chunk_capacity = capacity;
      o.page_size = page_size;
      World w(o, extends, {});
      w.backend->prepare(w.step());
      const Result r = dense_prefill(w);
      SCOPED_TRACE(testing::Message() << "capacity " << capacity << ", page size " << page_size);
      w.expect_expanded(r.out, &r.lse);
      World again(o, extends, {});
      again.backend->prepare(again.step());
      EXPECT_TRUE(same_bits(r.out, dense_prefill(again, false).out)) << "without an LSE of the caller's";
    }
  }
}

TEST_P(EveryImplementation, TheLoopByHandIsTheLoop) {
  WorldOptions o = options();
  o.chunk_capacity = 128;
  const std::vector<Request> extends = {
      {.prefix = 100, .rows = 3, .id = 1}, {.prefix = 0, .rows = 2, .id = 2}, {.prefix = 200, .rows = 1, .id = 3}};
  World w(o, extends, {}), hand(o, extends, {});
  w.backend->prepare(w.step());
  hand.backend->prepare(hand.step());
  const Result r = dense_prefill(w);

  Result mine{Tensor(o.dtype, {hand.num_prefill, o.num_heads, World::kV}), hand.lse(StepRows::kPrefill)};
  const World::Kv kv = hand.kv(1, StepRows::kPrefill);
  const Tensor q = hand.q_expanded(StepRows::kPrefill), k = hand.k_nope(), v = hand.v();
  hand.backend->prefill_new_tokens({.layer = 1,
                                    .q = q.view,
                                    .k_nope = k.view,
                                    .k_rope = kv.rope.view,
                                    .v = v.view,
                                    .write = kv.rows(),
                                    .expand = {},
                                    .out = mine.out.view,
                                    .lse = mine.lse.view});
  const auto& chunks = hand.backend->step().prefix_chunks().chunks;
  ASSERT_GT(chunks.size(), 2u);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const int64_t n = chunks[i].num_tokens;
    const auto chunk = static_cast<int64_t>(i);
    const Tensor c(o.dtype, {n, World::kR}), rope(o.dtype, {n, World::kP});
    const Tensor ck(o.dtype, {n, o.num_heads, World::kN}), cv(o.dtype, {n, o.num_heads, World::kV});
    hand.backend->gather_prefix(1, chunk, c.view, rope.view);
    hand.expand()(c.view, ck.view, cv.view);
    hand.backend->prefill_prefix({.layer = 1,
                                  .chunk = chunk,
                                  .q = q.view,
                                  .k_nope = ck.view,
                                  .k_rope = rope.view,
                                  .v = cv.view,
                                  .out = mine.out.view,
                                  .lse = mine.lse.view});
  }
  EXPECT_TRUE(same_bits(r.out, mine.out));
  EXPECT_TRUE(same_bits(r.lse, mine.lse));
}

// ---- dsa ----------------------------------------------------------------------------------------------------------

TEST_P(EveryImplementation, DsaMiniBatchOfTheContract) {
  World w = mini_batch(options(AttentionArch::kDsa));
  w.backend->prepare(w.step());
  const SparseResult s = select_and_attend(w, StepRows::kAll);
  expect_selection(w, s.selection, StepRows::kAll);
  std::vector<int32_t> lens(s.selection.lens.ptr<int32_t>(), s.selection.lens.ptr<int32_t>() + 12);
  EXPECT_EQ(lens, (std::vector<int32_t>{1, 2, 3, 4, 5, 131, 132, 133, 64, 65, 199, 200}));
  w.expect_dense(s.result.out, s.result.lse, StepRows::kAll);
  // Dense, asked for by type: every row sees at most 2,048.
  const Result dense = attend_all(w, StepRows::kAll);
  w.expect_dense(dense.out, dense.lse, StepRows::kAll);
  // The layer that shares: its own latent rows, the selection of layer 0.
  const World::Kv kv = w.kv(1);
  const Tensor q = w.q_absorbed();
  Result shared{w.out(), w.lse()};
  w.backend->attend({.layer = 1,
                     .rows = StepRows::kAll,
                     .q = q.view,
                     .write = kv.rows(),
                     .selection = s.selection,
                     .out = shared.out.view,
                     .lse = shared.lse.view});
  EXPECT_TRUE(same_bits(shared.out, s.result.out));
}

TEST_P(EveryImplementation, DsaAttendsToTheBest) {
  for (const int32_t topk : {1, 33, 64, 200}) {
    WorldOptions o = options(AttentionArch::kDsa);
    o.topk = topk;
    World w = mini_batch(o);
    w.backend->prepare(w.step());
    const SparseResult s = select_and_attend(w, StepRows::kAll);
    expect_selection(w, s.selection, StepRows::kAll);
    w.expect_absorbed(s.result.out, s.result.lse, StepRows::kAll, [&](int64_t i) { return listed(s.selection, i); });
  }
}

// A list length below the entries that are there cuts the list.
TEST_P(EveryImplementation, DsaKeepsToTheLengthsOfTheLists) {
  WorldOptions o = options(AttentionArch::kDsa);
  o.topk = 64;
  World w = mini_batch(o);
  w.backend->prepare(w.step());
  SparseResult s = select_and_attend(w, StepRows::kAll);
  for (int64_t i = 0; i < w.num_rows(); ++i) *s.selection.lens.ptr<int32_t>(i) /= 2;
  const Tensor q = w.q_absorbed();
  w.backend->attend({.layer = 0,
                     .rows = StepRows::kAll,
                     .q = q.view,
                     .write = AlreadyWritten{},
                     .selection = s.selection,
                     .out = s.result.out.view,
                     .lse = s.result.lse.view});
  w.expect_absorbed(s.result.out, s.result.lse, StepRows::kAll, [&](int64_t i) { return listed(s.selection, i); });
}

// ---- pages that travel --------------------------------------------------------------------------------------------

// BL-45: a prefix restored from outside, latent rows and index keys, onto other pages, is the prefix that was computed
// here. The lengths lie around index_topk, where a selection begins to depend on the keys.
TEST_P(EveryImplementation, ARestoredPrefixIsTheColdOne) {
  for (const int32_t prefix : {2047, 2048, 2049, 8192}) {
    WorldOptions o = options(AttentionArch::kDsa);
    o.num_heads = 1;
    o.page_seed = 3;
    World cold(o, {}, {{.prefix = prefix, .rows = 1, .id = 1}});
    o.page_seed = 4;
    World warm(o, {}, {{.prefix = prefix, .rows = 1, .id = 1}});
    const auto pages = [&](const World& w) {
      return w.table->row(0).first(static_cast<size_t>(pages_for(prefix + 1, o.page_size)));
    };
    ASSERT_FALSE(std::equal(pages(cold).begin(), pages(cold).end(), pages(warm).begin()));
    const auto wipe = [](const auto& c) {
      std::memset(c.data, 0xff, static_cast<size_t>(c.num_pages * c.page_stride_bytes));
    };
    for (const LayerCaches& l : warm.layers()) {
      wipe(l.latent);
      if (l.index) wipe(*l.index);
    }
    const std::vector<LayerCaches> from = cold.layers(), to = warm.layers();
    std::vector<std::byte> shipped(static_cast<size_t>(exported_bytes(from, static_cast<int64_t>(pages(cold).size()))));
    export_pages(from, pages(cold), shipped);
    import_pages(to, pages(warm), shipped);
    cold.backend->prepare(cold.step());
    warm.backend->prepare(warm.step());
    const SparseResult a = select_and_attend(cold, StepRows::kAll), b = select_and_attend(warm, StepRows::kAll);
    EXPECT_EQ(listed(a.selection, 0).size(), static_cast<size_t>(std::min(prefix + 1, 2048)));
    EXPECT_EQ(listed(a.selection, 0), listed(b.selection, 0)) << prefix;
    EXPECT_TRUE(same_bits(a.result.out, b.result.out)) << prefix;
    EXPECT_TRUE(same_bits(a.result.lse, b.result.lse)) << prefix;
  }
}

// ---- allocations --------------------------------------------------------------------------------------------------

TEST_P(EveryImplementation, ARepeatedShapeAllocatesNothing) {
  if (GetParam().impl == "ref") GTEST_SKIP() << "the oracle allocates in its loops, by design";
  WorldOptions o = options(AttentionArch::kDsa);
  o.topk = 200;
  World w = mini_batch(o);
  const World::Kv kv0 = w.kv(0), kv1 = w.kv(1), kvp = w.kv(1, StepRows::kPrefill);
  const Tensor iq = w.index_q(), weights = w.index_weights(), q = w.q_absorbed(), out = w.out();
  const Tensor qp = w.q_expanded(StepRows::kPrefill), k = w.k_nope(), v = w.v(),
               outp(o.dtype, {w.num_prefill, o.num_heads, World::kV});
  SelectionBuffer buffer(o.topk, true, memory_of(test_device()));
  buffer.reserve(w.num_rows());
  const TopKSelection selection = buffer.view(w.num_rows());
  const ExpandLatent expand = w.expand();
  const BatchStep step = w.step();
  int64_t counted = 0;
  for (int round = 0; round < 2; ++round) {
    const int64_t before = num_news() + w.memory.allocations;
    w.backend->prepare(step);
    w.backend->select({.layer = 0, .q = iq.view, .weights = weights.view, .write = kv0.rows(), .out = selection});
    w.backend->attend(
        {.layer = 0, .q = q.view, .write = AlreadyWritten{}, .selection = selection, .out = out.view, .lse = {}});
    w.backend->attend(
        {.layer = 1, .q = q.view, .write = kv1.rows(), .selection = selection, .out = out.view, .lse = {}});
    w.backend->dense_prefill({.layer = 1,
                              .q = qp.view,
                              .k_nope = k.view,
                              .k_rope = kvp.rope.view,
                              .v = v.view,
                              .write = AlreadyWritten{},
                              .expand = expand,
                              .out = outp.view,
                              .lse = {}});
    counted = num_news() + w.memory.allocations - before;
    if (round == 0) {
      EXPECT_GT(counted, 0);
    }
  }
  EXPECT_EQ(counted, 0);
}

}  // namespace
}  // namespace gannet_test
