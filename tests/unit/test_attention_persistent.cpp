// Persistent plans: captured once, refreshed in place, equal to eager ones bit for bit; and the steps of a draft.
#include <gtest/gtest.h>

#include <iostream>

#include "case_counts.h"
#include "unit/attention_world.h"
#include "unit/counting_new.h"

namespace gannet_test {
namespace {

class EveryPersistent : public testing::TestWithParam<ImplCase> {
 protected:
  void SetUp() override {
    std::cout << "implementation " << GetParam().impl << ", " << GetParam().formats.name << "\n";
  }
  WorldOptions options(AttentionArch arch) const {
    const Formats& f = GetParam().formats;
    return {.impl = GetParam().impl,
            .arch = arch,
            .dtype = f.dtype,
            .latent_format = f.latent,
            .index_format = f.index,
            .topk = 50};
  }
};
INSTANTIATE_TEST_SUITE_P(Attention, EveryPersistent, testing::ValuesIn(impl_cases()), case_name);

/// A decode step over some requests of a world, at some of their lengths.
struct Batch {
  std::vector<int32_t> requests, lens;
};

/// Five requests of up to 200 tokens, nearly all of them in the caches.
World decode_world(const WorldOptions& o, int32_t q_len) {
  std::vector<Request> requests;
  for (const int32_t len : {200, 64, 130, 65, 7}) requests.push_back({.prefix = len - q_len, .rows = q_len, .id = len});
  return World(o, {}, requests, q_len);
}

BatchStep step_of(const World& w, const Batch& b, int32_t q_len) {
  PageTableView pages = w.table->view();
  pages.row_indices = gannet::view(b.requests.data(), {static_cast<int64_t>(b.requests.size())});
  return {.seq_lens = b.lens, .prefix_lens = {}, .extend_lens = {}, .q_len = q_len, .pages = pages};
}

/// Makes the rows of the world those of the batch, and of so many padded requests.
void set_rows(World& w, const Batch& b, int32_t q_len, size_t num_requests) {
  w.rows.clear();
  for (size_t i = 0; i < num_requests; ++i)
    for (int32_t j = 0; j < q_len; ++j) {
      const bool real = i < b.requests.size() && b.lens[i] > 0;
      w.rows.push_back({real ? b.requests[i] : 0, real ? b.lens[i] - q_len + j : -1});
    }
}

struct Outputs {
  Tensor dense, lse, sparse;
  std::vector<int32_t> lists;  // of the selection, padded to 50
};

/// What an engine does in a step: layer 1 densely (mla), layer 0 sparsely and layer 1 by its selection (dsa).
Outputs run_layers(World& w) {
  Outputs o{w.out(), w.lse(), {}, {}};
  const Tensor q = w.q_absorbed();
  if (w.options.arch == AttentionArch::kMla) {
    const World::Kv kv = w.kv(1);
    w.backend->attend({.layer = 1,
                       .q = q.view,
                       .write = kv.rows(),
                       .selection = AttendAll{},
                       .out = o.dense.view,
                       .lse = o.lse.view});
    return o;
  }
  SelectionBuffer buffer(w.options.topk, false, w.memory);
  buffer.reserve(w.num_rows());
  const TopKSelection s = buffer.view(w.num_rows());
  const World::Kv kv0 = w.kv(0), kv1 = w.kv(1);
  const Tensor iq = w.index_q(), weights = w.index_weights();
  o.sparse = w.out();
  w.backend->select({.layer = 0, .q = iq.view, .weights = weights.view, .write = kv0.rows(), .out = s});
  w.backend->attend(
      {.layer = 0, .q = q.view, .write = AlreadyWritten{}, .selection = s, .out = o.sparse.view, .lse = {}});
  w.backend->attend(
      {.layer = 1, .q = q.view, .write = kv1.rows(), .selection = s, .out = o.dense.view, .lse = o.lse.view});
  for (int64_t i = 0; i < w.num_rows(); ++i)
    for (int32_t c = 0; c < w.options.topk; ++c) o.lists.push_back(*s.slots.ptr<int32_t>(i, c));
  return o;
}

/// The first rows of the captured run are the eager run; the rest is empty.
void expect_same(const World& w, const Outputs& eager, const Outputs& captured) {
  const auto compare = [](const Tensor& e, const Tensor& c) {
    ASSERT_LE(e.bytes(), c.bytes());
    EXPECT_EQ(std::memcmp(e.view.data, c.view.data, e.bytes()), 0);
  };
  compare(eager.dense, captured.dense);
  compare(eager.lse, captured.lse);
  if (w.options.arch == AttentionArch::kDsa) compare(eager.sparse, captured.sparse);
  ASSERT_LE(eager.lists.size(), captured.lists.size());
  EXPECT_TRUE(std::equal(eager.lists.begin(), eager.lists.end(), captured.lists.begin()));
  for (size_t i = eager.lists.size(); i < captured.lists.size(); ++i) ASSERT_EQ(captured.lists[i], -1);
  for (int64_t i = eager.dense.view.shape[0]; i < captured.dense.view.shape[0]; ++i)
    for (int32_t h = 0; h < w.options.num_heads; ++h) {
      EXPECT_EQ(captured.lse.get(i, h), -std::numeric_limits<float>::infinity()) << i;
      for (int32_t d = 0; d < World::kR; ++d) ASSERT_EQ(captured.dense.get(i, h, d), 0.0f) << i;
    }
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

/// Where a plan's arrays lie.
std::vector<const void*> addresses(const StepPlan& p) {
  return {p.seq_lens().data(),
          p.positions().data(),
          p.write_slots().data(),
          p.row_lens().data(),
          p.cu_rows().data(),
          p.seq_lens_view(StepRows::kDecode).data,
          p.cu_q_lens(StepRows::kDecode).data,
          p.pages(StepRows::kDecode).pages.data};
}

/// Growing and shrinking, in number and in length, over pages that other requests had before; one is all padding and
/// one has a padded request between others.
const Batch kBatches[] = {
    {{0, 1, 2}, {200, 64, 130}}, {{3}, {65}},          {{4, 0, 1, 3}, {5, 129, 63, 65}}, {{}, {}},
    {{2, 3, 0}, {64, 0, 66}},    {{0, 2}, {199, 128}}, {{1, 2, 3, 4}, {64, 130, 65, 7}},
};

TEST_P(EveryPersistent, RefreshedIsEager) {
  for (const AttentionArch arch : {AttentionArch::kMla, AttentionArch::kDsa}) {
    for (const int32_t q_len : {1, 3}) {
      SCOPED_TRACE(testing::Message() << to_string(arch) << ", " << q_len << " rows a request");
      constexpr int32_t kCaptured = 4;
      World eager = decode_world(options(arch), q_len), captured = decode_world(options(arch), q_len);
      captured.backend->capture({.num_requests = kCaptured, .q_len = q_len, .max_seq_len = 256});
      captured.backend->capture({.num_requests = 2, .q_len = q_len, .max_seq_len = 256});  // another one in between
      captured.backend->capture({.num_requests = kCaptured, .q_len = q_len, .max_seq_len = 256});
      const auto places = addresses(captured.backend->step());
      set_rows(captured, {}, q_len, kCaptured);
      const auto before = pool_bytes(captured);
      const Outputs warm_up = run_layers(captured);
      EXPECT_EQ(pool_bytes(captured), before) << "padding is written nowhere";
      set_rows(eager, {}, q_len, 0);
      expect_same(eager, {eager.out(), eager.lse(), eager.out(), {}}, warm_up);
      for (const Batch& b : kBatches) {
        SCOPED_TRACE(testing::Message() << b.requests.size() << " requests");
        set_rows(eager, b, q_len, b.requests.size());
        set_rows(captured, b, q_len, kCaptured);
        captured.backend->refresh(step_of(captured, b, q_len), kCaptured);
        EXPECT_EQ(addresses(captured.backend->step()), places);
        const Outputs mine = run_layers(captured);
        eager.backend->prepare(step_of(eager, b, q_len));
        Outputs expected{eager.out(), eager.lse(), eager.out(), {}};
        if (!b.requests.empty()) expected = run_layers(eager);
        expect_same(eager, expected, mine);
        ASSERT_EQ(pool_bytes(captured), pool_bytes(eager)) << "nobody's rows but those of the batch";
      }
    }
  }
}

TEST_P(EveryPersistent, ARefreshAllocatesNothing) {
  if (GetParam().impl == "ref") GTEST_SKIP() << "the oracle allocates in its loops, by design";
  World w = decode_world(options(AttentionArch::kDsa), 2);
  // Eighteen other batches: none displaces the plans of another.
  for (int32_t n = 1; n <= 18; ++n) {
    w.backend->capture({.num_requests = n, .q_len = 2, .max_seq_len = 256});
    set_rows(w, {}, 2, static_cast<size_t>(n));
    (void)run_layers(w);
  }
  SelectionBuffer buffer(w.options.topk, false, w.memory);
  buffer.reserve(8);
  const TopKSelection s = buffer.view(8);
  for (const Batch& b : kBatches) {
    set_rows(w, b, 2, 4);
    const World::Kv kv0 = w.kv(0), kv1 = w.kv(1);
    const Tensor iq = w.index_q(), weights = w.index_weights(), q = w.q_absorbed(), out = w.out(), lse = w.lse();
    const BatchStep step = step_of(w, b, 2);
    const int64_t before = num_news() + w.memory.allocations;
    w.backend->refresh(step, 4);
    w.backend->select({.layer = 0, .q = iq.view, .weights = weights.view, .write = kv0.rows(), .out = s});
    w.backend->attend({.layer = 1, .q = q.view, .write = kv1.rows(), .selection = s, .out = out.view, .lse = lse.view});
    EXPECT_EQ(num_news() + w.memory.allocations - before, 0) << b.requests.size();
  }
}

// ---- drafts -------------------------------------------------------------------------------------------------------

using Ints = std::vector<int32_t>;
Ints ints(std::span<const int32_t> s) { return {s.begin(), s.end()}; }

/// Four requests of 100 committed tokens and four rows to verify; the pages hold a few tokens more.
World verify_world(const WorldOptions& o) {
  std::vector<Request> requests;
  for (int32_t i = 0; i < 4; ++i) requests.push_back({.prefix = 100, .rows = 4, .id = i});
  return World(o, {}, requests, 4);
}

/// The step that an engine would prepare for these lengths.
Outputs prepared(World& w, const Ints& lens) {
  const Batch b{{0, 1, 2, 3}, lens};
  w.backend->prepare(step_of(w, b, 1));
  set_rows(w, b, 1, 4);
  return run_layers(w);
}

// spec 1.5: valid 100, S 4, accept [2, 1, 4, 3] -> attention sees [102, 101, 104, 103]; then one more a step.
TEST_P(EveryPersistent, AdvancedIsPrepared) {
  for (const bool persistent : {false, true}) {
    for (const AttentionArch arch : {AttentionArch::kMla, AttentionArch::kDsa}) {
      SCOPED_TRACE(testing::Message() << to_string(arch) << (persistent ? ", persistent" : ", eager"));
      World w = verify_world(options(arch)), expected = verify_world(options(arch));
      const BatchStep verify = w.step();
      if (persistent) {
        w.backend->capture({.num_requests = 4, .q_len = 1, .max_seq_len = 256});
        w.backend->capture({.num_requests = 4, .q_len = 4, .max_seq_len = 256});
        w.backend->refresh(verify, 4);
      } else {
        w.backend->prepare(verify);
      }
      (void)run_layers(w);
      expected.backend->prepare(expected.step());
      (void)run_layers(expected);
      Ints lens(4);
      narrow_seq_lens(w.backend->step(), Ints{2, 1, 4, 3}, lens);
      for (const int32_t steps : {0, 1, 2, 1}) {  // also back
        for (int repeat = 0; repeat < 2; ++repeat) {
          Ints buffer = lens;
          w.backend->advance({.steps = steps, .seq_lens = buffer, .pages = {}});
          EXPECT_EQ(buffer, lens);
          std::fill(buffer.begin(), buffer.end(), -7);  // nobody looks at it again (6.12, 6.38)
          Ints now = lens;
          for (int32_t& n : now) n += steps;
          EXPECT_EQ(ints(w.backend->step().seq_lens()), now);
          EXPECT_EQ(w.backend->step().q_len(), 1);
          EXPECT_EQ(ints(w.backend->step().row_lens()), now);
          set_rows(w, {{0, 1, 2, 3}, now}, 1, 4);
          const Outputs mine = run_layers(w);
          expect_same(w, prepared(expected, now), mine);
          EXPECT_EQ(pool_bytes(w), pool_bytes(expected));
        }
      }
      // Without a buffer: from the lengths of the verified step.
      w.backend->advance({.steps = 3, .seq_lens = {}, .pages = {}});
      EXPECT_EQ(ints(w.backend->step().seq_lens()), Ints(4, 107));
    }
  }
}

TEST(AttentionDrafts, GoOnFromEveryMode) {
  // Extends and decodes together; extends alone (6.17); one row a request afterwards, in the order of the requests.
  World mixed(WorldOptions{}, {{.prefix = 70, .rows = 3, .id = 1}, {.prefix = 5, .rows = 0, .id = 2}},
              {{.prefix = 9, .rows = 2, .id = 3}, {.prefix = 0, .rows = 0, .id = 4}}, 2);
  mixed.backend->prepare(mixed.step());
  mixed.backend->advance({.steps = 1, .seq_lens = {}, .pages = {}});
  const StepPlan& plan = mixed.backend->step();
  EXPECT_EQ(plan.mode(), StepMode::kDecode);
  EXPECT_EQ(plan.num_extends(), 0);
  EXPECT_EQ(ints(plan.seq_lens()), (Ints{74, 6, 12, 0}));
  EXPECT_EQ(ints(plan.positions()), (Ints{73, 5, 11, 0}));
  EXPECT_EQ(plan.write_slots()[3], -1) << "padding stays padding";
  EXPECT_EQ(plan.rows(StepRows::kPrefill).size(), 0);
  EXPECT_TRUE(plan.prefix_chunks().chunks.empty());
  World extend(WorldOptions{}, {{.prefix = 0, .rows = 3, .id = 1}}, {});
  extend.backend->prepare(extend.step());
  extend.backend->advance({.steps = 2, .seq_lens = {}, .pages = {}});
  EXPECT_EQ(ints(extend.backend->step().seq_lens()), Ints{5});
}

TEST(AttentionDrafts, NewPagesComeWithTheAdvance) {
  for (const bool persistent : {false, true}) {
    World w(WorldOptions{}, {}, {{.prefix = 63, .rows = 1, .id = 1}, {.prefix = 62, .rows = 1, .id = 2}});
    if (persistent) {
      w.backend->capture({.num_requests = 3, .q_len = 1, .max_seq_len = 128});
      w.backend->refresh(w.step(), 3);
    } else {
      w.backend->prepare(w.step());
    }
    w.backend->advance({.steps = 0, .seq_lens = {}, .pages = {}});
    const std::string text = error_of([&] { w.backend->advance({.steps = 1, .seq_lens = {}, .pages = {}}); });
    EXPECT_TRUE(has(text, "request 0 has 65 tokens; the step to go on from (give pages) reaches 64"));
    EXPECT_EQ(ints(w.backend->step().seq_lens()).front(), 64) << "as it was";
    const int32_t fresh = static_cast<int32_t>(w.latent->options().num_pages) - 1;
    const Ints first = ints(w.table->row(0)).empty() ? Ints{} : Ints{w.table->row(0)[0]};
    w.table->append(0, Ints{fresh});
    w.backend->advance({.steps = 1, .seq_lens = {}, .pages = w.table->view()});
    EXPECT_EQ(w.backend->step().write_slots()[0], fresh * 64);
    EXPECT_EQ(w.backend->step().write_slots()[1], w.table->row(1)[0] * 64 + 63);
    EXPECT_EQ(w.backend->step().slot_of(0, 0), first[0] * 64);
  }
}

// ---- a table that several batches share ----------------------------------------------------------------------------

SharedPageTableOptions table_options(const World& w, int32_t num_requests, int32_t lookahead = 0) {
  return {.num_requests = num_requests,
          .max_seq_len = 256,
          .page_size = w.options.page_size,
          .num_pages = w.latent->options().num_pages,
          .lookahead = lookahead};
}

// Every batch through the table is the batch prepared: growing, shrinking, padded; its rows where an engine's own
// kernels find them.
TEST_P(EveryPersistent, ASharedTableIsEager) {
  for (const AttentionArch arch : {AttentionArch::kMla, AttentionArch::kDsa}) {
    for (const int32_t q_len : {1, 3}) {
      SCOPED_TRACE(testing::Message() << to_string(arch) << ", " << q_len << " rows a request");
      constexpr int32_t kCaptured = 4;
      World eager = decode_world(options(arch), q_len), shared = decode_world(options(arch), q_len);
      SharedPageTable table(table_options(shared, kCaptured), shared.memory);
      shared.backend->capture({.num_requests = kCaptured, .q_len = q_len}, table);
      set_rows(shared, {}, q_len, kCaptured);
      const auto before = pool_bytes(shared);
      (void)run_layers(shared);
      EXPECT_EQ(pool_bytes(shared), before) << "padding is written nowhere";
      uint64_t generation = 0;
      for (const Batch& b : kBatches) {
        SCOPED_TRACE(testing::Message() << b.requests.size() << " requests");
        ++generation;
        const BatchStep step = step_of(shared, b, q_len);
        EXPECT_TRUE(table.refresh(generation, step.seq_lens, step.pages));
        shared.backend->refresh({.table = &table, .generation = generation, .q_len = q_len});
        set_rows(eager, b, q_len, b.requests.size());
        set_rows(shared, b, q_len, kCaptured);
        const Outputs mine = run_layers(shared);
        eager.backend->prepare(step_of(eager, b, q_len));
        Outputs expected{eager.out(), eager.lse(), eager.out(), {}};
        if (!b.requests.empty()) expected = run_layers(eager);
        expect_same(eager, expected, mine);
        ASSERT_EQ(pool_bytes(shared), pool_bytes(eager)) << "nobody's rows but those of the batch";
        const StepTensors rows = shared.backend->step_tensors();
        wait_for_device();
        const StepPlan& plan = eager.backend->step();
        ASSERT_EQ(rows.positions.shape[0], int64_t{kCaptured} * q_len);
        for (int64_t i = 0; i < rows.positions.shape[0]; ++i) {
          const auto t = static_cast<size_t>(i);
          const bool real = i < plan.num_rows();
          EXPECT_EQ(*rows.positions.ptr<int32_t>(i), real ? plan.positions()[t] : 0);
          EXPECT_EQ(*rows.write_slots.ptr<int32_t>(i), real ? plan.write_slots()[t] : -1);
          EXPECT_EQ(*rows.row_lens.ptr<int32_t>(i), real ? plan.row_lens()[t] : 0);
        }
        EXPECT_EQ(shared.backend->step().lens_known(), test_device().kind == DeviceKind::kCpu);
      }
    }
  }
}

// A target that verifies four rows a request and its draft that goes on from what was accepted, on backends of their
// own: the table is filled once a step, whoever comes first, and the results are the same.
TEST_P(EveryPersistent, TargetAndDraftShareATableInEitherOrder) {
  const AttentionArch arch = AttentionArch::kDsa;
  std::vector<Outputs> targets, drafts;
  World expected = verify_world(options(arch));
  expected.backend->prepare(expected.step());
  const Outputs verified = run_layers(expected);
  const Ints lens{102, 101, 0, 103};  // the third request is padding
  const Outputs drafted = prepared(expected, {103, 102, 0, 104});
  for (const bool target_first : {true, false}) {
    World w = verify_world(options(arch));
    auto target = w.make_backend(), draft = w.make_backend();
    SharedPageTable table(table_options(w, 4, 2), w.memory);
    target->capture({.num_requests = 4, .q_len = 4}, table);
    draft->capture({.num_requests = 4, .q_len = 1}, table);
    Tensor accepted(DType::kI32, {4});
    std::copy(lens.begin(), lens.end(), accepted.view.ptr<int32_t>());
    const BatchStep step = w.step();
    const Batch now{{0, 1, 2, 3}, {103, 102, 0, 104}};
    const std::vector<World::RowId> rows_of_verify = w.rows;
    const auto run_target = [&](uint64_t generation, bool first) {
      EXPECT_EQ(table.refresh(generation, step.seq_lens, step.pages), first);
      target->refresh({.table = &table, .generation = generation, .q_len = 4});
      w.rows = rows_of_verify;
      std::swap(w.backend, target);
      targets.push_back(run_layers(w));
      std::swap(w.backend, target);
    };
    const auto run_draft = [&](uint64_t generation, bool first) {
      EXPECT_EQ(table.refresh(generation, step.seq_lens, step.pages), first);
      draft->refresh({.table = &table, .generation = generation, .q_len = 1, .seq_lens = accepted.view, .steps = 1});
      set_rows(w, now, 1, 4);
      std::swap(w.backend, draft);
      drafts.push_back(run_layers(w));
      std::swap(w.backend, draft);
    };
    run_target(1, true);  // what the draft reads is there in both orders
    drafts.clear();
    for (uint64_t generation = 2; generation < 4; ++generation) {
      if (target_first) {
        run_target(generation, true);
        run_draft(generation, false);
      } else {
        run_draft(generation, true);
        run_target(generation, false);
      }
    }
    for (const Outputs& o : targets) expect_same(expected, verified, o);
    targets.clear();
    for (const Outputs& o : drafts) {
      EXPECT_TRUE(same_bits(o.dense, drafted.dense));
      EXPECT_TRUE(same_bits(o.sparse, drafted.sparse));
      EXPECT_EQ(o.lists, drafted.lists);
    }
  }
}

// Lengths that a kernel of the caller's has put into the table: here the CPU poses as it.
TEST_P(EveryPersistent, LengthsMayBeWrittenInPlace) {
  World w = verify_world(options(AttentionArch::kMla)), expected = verify_world(options(AttentionArch::kMla));
  expected.backend->prepare(expected.step());
  (void)run_layers(expected);
  SharedPageTable table(table_options(w, 4), w.memory);
  w.backend->capture({.num_requests = 4, .q_len = 4}, table);
  w.backend->capture({.num_requests = 4, .q_len = 1}, table);
  ASSERT_TRUE(table.refresh(1, w.step().seq_lens, w.table->view()));
  w.backend->refresh({.table = &table, .generation = 1, .q_len = 4});
  (void)run_layers(w);
  uint64_t generation = 1;
  for (const Ints& lens : {Ints{102, 101, 104, 103}, Ints{103, 0, 104, 104}, Ints{100, 100, 100, 100}}) {
    wait_for_device();
    std::copy(lens.begin(), lens.end(), table.seq_lens().ptr<int32_t>());
    table.mark(++generation);
    w.backend->refresh({.table = &table, .generation = generation});
    set_rows(w, {{0, 1, 2, 3}, lens}, 1, 4);
    const Outputs mine = run_layers(w);
    expect_same(w, prepared(expected, lens), mine);
    EXPECT_EQ(pool_bytes(w), pool_bytes(expected));
  }
}

TEST(AttentionSharedTable, AStaleUseIsAnError) {
  for (const AttentionArch arch : {AttentionArch::kMla, AttentionArch::kDsa}) {
    World w = verify_world({.arch = arch});
    SharedPageTable table(table_options(w, 4), w.memory);
    AttentionBackend& b = *w.backend;
    b.capture({.num_requests = 4, .q_len = 4}, table);
    const BatchStep step = w.step();
    ASSERT_TRUE(table.refresh(5, step.seq_lens, step.pages));
    // Since the capture the table is another one: nobody has refreshed the backend.
    const std::string stale = "the step is stale: it is of generation 0 of the page table, which is of 5 now";
    EXPECT_TRUE(has(error_of([&] { (void)b.step(); }), stale));
    b.refresh({.table = &table, .generation = 5, .q_len = 4});
    const Tensor q = w.q_absorbed(), out = w.out(), iq = w.index_q(), weights = w.index_weights();
    const World::Kv kv = w.kv(0);
    SelectionBuffer buffer(w.options.topk, false);
    buffer.reserve(w.num_rows());
    const TopKSelection s = buffer.view(w.num_rows());
    const std::vector<std::pair<const char*, std::function<void()>>> calls{
        {"attend",
         [&] {
           b.attend({.layer = 0,
                     .q = q.view,
                     .write = AlreadyWritten{},
                     .selection = AttendAll{},
                     .out = out.view,
                     .lse = {}});
         }},
        {"write", [&] { b.write(0, StepRows::kAll, kv.rows()); }},
        {"step", [&] { (void)b.step(); }},
        {"step_tensors", [&] { (void)b.step_tensors(); }},
        {"select", [&] {
           if (arch == AttentionArch::kDsa)
             b.select({.layer = 0, .q = iq.view, .weights = weights.view, .write = kv.rows(), .out = s});
           else (void)b.step();
         }}};
    for (const auto& [name, call] : calls) EXPECT_EQ(error_of(call), "") << name;
    const auto before = pool_bytes(w);
    table.mark(6);
    for (const auto& [name, call] : calls)
      EXPECT_TRUE(has(error_of(call), "the step is stale: it is of generation 5 of the page table, which is of 6 now"))
          << name;
    EXPECT_EQ(pool_bytes(w), before) << "and nothing is written";
    EXPECT_TRUE(has(error_of([&] { b.refresh({.table = &table, .generation = 5, .q_len = 4}); }),
                    "refresh] generation is 5; accepted: that of the page table, 6"));
    b.refresh({.table = &table, .generation = 6, .q_len = 4});
    for (const auto& [name, call] : calls) EXPECT_EQ(error_of(call), "") << name;
  }
}

TEST(AttentionSharedTable, NamesWhatIsWrong) {
  const auto made = [](const SharedPageTableOptions& o) { return error_of([&] { SharedPageTable t(o); }); };
  EXPECT_TRUE(has(made({.num_requests = 0, .max_seq_len = 9}), "[SharedPageTable] num_requests is 0"));
  EXPECT_TRUE(has(made({.num_requests = 1, .max_seq_len = 9, .page_size = 0}), "page_size is 0"));
  EXPECT_TRUE(has(made({.num_requests = 1, .max_seq_len = 0}), "max_seq_len is 0; accepted: 1 to 2147483647"));
  EXPECT_TRUE(has(made({.num_requests = 1, .max_seq_len = 9, .num_pages = -1}), "num_pages is -1"));
  EXPECT_TRUE(has(made({.num_requests = 1, .max_seq_len = 9, .lookahead = -1}), "lookahead is -1"));
  World w = verify_world({});
  SharedPageTable table(table_options(w, 4, 100), w.memory), other(table_options(w, 4), w.memory);
  const auto refresh = [&](uint64_t generation, const Ints& lens, const PageTableView& pages) {
    return error_of([&] { table.refresh(generation, lens, pages); });
  };
  const PageTableView pages = w.table->view();
  EXPECT_TRUE(has(refresh(0, {1}, pages), "generation is 0; accepted: that of the table, 0, or more"));
  EXPECT_TRUE(has(refresh(1, Ints(5, 1), pages), "seq_lens has 5 entries; accepted: at most num_requests, 4"));
  EXPECT_TRUE(has(refresh(1, {1, -1}, pages), "seq_lens[1] is -1; accepted: 0 to max_seq_len, 256"));
  EXPECT_TRUE(has(refresh(1, {257}, pages), "seq_lens[0] is 257"));
  PageTableView narrow = pages;
  narrow.pages.shape[1] = 2;
  EXPECT_TRUE(has(refresh(1, {104}, narrow),
                  "request 0 has 104 tokens and 100 of lookahead; its row of the page table reaches 128"));
  w.table->set_row(2, Ints{1, 1 << 20});
  EXPECT_TRUE(has(refresh(1, {20, 20, 10}, pages), "page 1 of request 2 is 1048576; accepted: 0 to"));
  EXPECT_EQ(table.generation(), 0u) << "as it was";
  EXPECT_EQ(*table.seq_lens().ptr<int32_t>(0), 0);
  EXPECT_EQ(refresh(7, {20, 20}, pages), "");
  EXPECT_EQ(refresh(7, Ints(9, -1), {}), "") << "it is done: nothing is looked at";
  EXPECT_TRUE(has(refresh(6, {20}, pages), "generation is 6; accepted: that of the table, 7, or more"));
  EXPECT_TRUE(has(error_of([&] { table.mark(7); }), "generation is 7; accepted: more than that of the table, 7"));
  EXPECT_EQ(*table.pages().pages.ptr<int32_t>(1, 1), w.table->row(1)[1]) << "what the lookahead needs";
  EXPECT_EQ(*table.pages().pages.ptr<int32_t>(2, 0), 0);

  AttentionBackend& b = *w.backend;
  const auto capture = [&](const CaptureShape& s, const SharedPageTable& t) {
    return error_of([&] { b.capture(s, t); });
  };
  EXPECT_TRUE(has(capture({.num_requests = 3}, table), "num_requests is 3; the page table is one of 4"));
  SharedPageTableOptions o = table_options(w, 4);
  o.page_size = 32;
  SharedPageTable pages32(o);
  EXPECT_TRUE(has(capture({.num_requests = 4}, pages32), "the page table has pages of 32 tokens; accepted: 64"));
  o = table_options(w, 4);
  ++o.num_pages;
  SharedPageTable large(o);
  EXPECT_TRUE(has(capture({.num_requests = 4}, large), "the page table is for 13 pages; accepted: at most 12"));
  EXPECT_EQ(capture({.num_requests = 4}, table), "");
  EXPECT_EQ(b.step().capture_shape().max_seq_len, 256) << "no more than the table has";
  EXPECT_TRUE(has(capture({.num_requests = 4}, other), "of 4 requests of 1 rows is captured with another page table"));
  EXPECT_TRUE(has(error_of([&] { b.capture({.num_requests = 4, .max_seq_len = 256}); }),
                  "of 4 requests of 1 rows is captured with another page table"));
  b.capture({.num_requests = 4, .q_len = 2, .max_seq_len = 256});
  EXPECT_TRUE(has(capture({.num_requests = 4, .q_len = 2}, table), "is captured without a shared page table"));
  const auto shared = [&](const SharedStep& s) { return error_of([&] { b.refresh(s); }); };
  EXPECT_TRUE(has(shared({}), "[mla refresh] table is null"));
  EXPECT_TRUE(has(shared({.table = &other}), "of 4 requests of 1 rows is captured with another page table"));
  EXPECT_TRUE(has(shared({.table = &table, .q_len = 2}), "of 4 requests of 2 rows is captured without a shared"));
  EXPECT_TRUE(has(shared({.table = &table, .q_len = 3}), "a batch of 4 requests of 3 rows was never captured"));
  EXPECT_TRUE(has(shared({.table = &table, .generation = 8}), "generation is 8; accepted: that of the page table, 7"));
  EXPECT_TRUE(has(shared({.table = &table, .generation = 7, .steps = -1}), "steps is -1; accepted: 0 and more"));
  EXPECT_TRUE(has(shared({.table = &table, .generation = 7, .decode_bound = RowBound::kUniformBlock}),
                  "decode_bound is uniform_block; the captured batch has causal_full"));
  Ints lens(8, 1);
  EXPECT_TRUE(has(shared({.table = &table, .generation = 7, .seq_lens = gannet::view(lens.data(), {3})}),
                  "seq_lens is int32[3] strides [1] on cpu; accepted: int32 [4]"));
  TensorView strided = gannet::view(lens.data(), {4});
  strided.stride[0] = 2;
  EXPECT_TRUE(has(shared({.table = &table, .generation = 7, .seq_lens = strided}), "accepted: packed, on cpu"));
  lens[1] = -1;
  EXPECT_TRUE(has(shared({.table = &table, .generation = 7, .seq_lens = gannet::view(lens.data(), {4})}),
                  "seq_lens[1] is -1 and steps 0"));
  EXPECT_EQ(shared({.table = &table, .generation = 7}), "");
  EXPECT_TRUE(
      has(error_of([&] { b.advance({}); }), "the step is one of a shared page table; accepted: refresh from it"));
  EXPECT_TRUE(
      has(error_of([&] { b.refresh(BatchStep{}, 4); }), "captured with a shared page table; accepted: a Shared"));
  w.table->set_row(2, Ints{1, 2});
  b.refresh({.seq_lens = Ints(4, 5), .prefix_lens = {}, .extend_lens = {}, .q_len = 2, .pages = pages}, 4);
  EXPECT_TRUE(has(error_of([&] { b.advance({}); }), "of 4 requests of 1 row is captured with a shared page table"));
  const auto fresh = make_attention_backend(w.context, w.config());
  EXPECT_TRUE(has(error_of([&] { fresh->refresh({.table = &table}); }), "[mla refresh] no caches are bound"));
  EXPECT_TRUE(has(error_of([&] { fresh->capture({.num_requests = 4}, table); }), "[mla capture] no caches are bound"));
}

// ---- what is refused ----------------------------------------------------------------------------------------------

TEST(AttentionPersistent, CallsOutOfOrder) {
  constexpr ErrorCode kUnsupported = ErrorCode::kUnsupported;
  World w = verify_world({});
  const auto fresh = make_attention_backend(w.context, w.config());
  EXPECT_TRUE(has(error_of([&] { fresh->capture({.num_requests = 4}); }), "[mla capture] no caches are bound"));
  EXPECT_TRUE(has(error_of([&] { fresh->refresh(w.step(), 4); }), "[mla refresh] no caches are bound"));
  EXPECT_TRUE(has(error_of([&] { fresh->advance({}); }), "[mla advance] no caches are bound"));
  AttentionBackend& b = *w.backend;
  // Run before plan, advance without a step of decode.
  const Tensor q = w.q_absorbed(), out = w.out();
  const auto attend = [&] {
    b.attend(
        {.layer = 1, .q = q.view, .write = AlreadyWritten{}, .selection = AttendAll{}, .out = out.view, .lse = {}});
  };
  EXPECT_TRUE(has(error_of(attend), "no step is prepared"));
  EXPECT_TRUE(has(error_of([&] { b.advance({}); }), "[mla advance] no step is prepared"));
  b.prepare({});
  EXPECT_TRUE(has(error_of([&] { b.advance({}); }), "[mla advance] the step is idle"));
  EXPECT_TRUE(has(error_of(attend), "the step is idle"));
  // Capture of extend or mixed.
  for (const StepMode mode : {StepMode::kExtend, StepMode::kMixed, StepMode::kIdle})
    EXPECT_TRUE(has(error_of([&] { b.capture({.mode = mode, .num_requests = 4}); }, kUnsupported),
                    std::string("the mode to capture is ") + to_string(mode) + "; accepted: decode"));
  // Refresh of a batch never captured.
  EXPECT_TRUE(has(error_of([&] { b.refresh(w.step(), 4); }),
                  "a batch of 4 requests of 4 rows was never captured; captured: none"));
  b.capture({.num_requests = 4, .q_len = 1});
  b.capture({.num_requests = 8, .q_len = 4});
  EXPECT_TRUE(has(error_of([&] { b.refresh(w.step(), 4); }),
                  "a batch of 4 requests of 4 rows was never captured; captured: 4 of 1, 8 of 4"));
  EXPECT_TRUE(has(error_of(attend), "no step is prepared")) << "after an error there is no step";
  // Refresh by extend or mixed.
  World m(WorldOptions{}, {{.prefix = 70, .rows = 3, .id = 1}}, {{.prefix = 9, .rows = 1, .id = 2}});
  m.backend->capture({.num_requests = 2});
  EXPECT_TRUE(has(error_of([&] { m.backend->refresh(m.step(), 2); }, kUnsupported), "the step is mixed"));
  // A draft goes on from a captured batch in a captured batch.
  b.refresh(w.step(), 8);
  EXPECT_TRUE(has(error_of([&] { b.advance({}); }), "a batch of 8 requests of 1 row was never captured"));
  EXPECT_EQ(b.step().q_len(), 4) << "the current step stays";
  // Other caches: captured batches are gone.
  b.bind(w.layers());
  EXPECT_TRUE(has(error_of([&] { b.refresh(w.step(), 8); }), "captured: none"));
}

TEST(AttentionPersistent, NamesWhatIsWrong) {
  World w = verify_world({});
  AttentionBackend& b = *w.backend;
  const auto capture = [&](const CaptureShape& s) { return error_of([&] { b.capture(s); }); };
  EXPECT_TRUE(has(capture({.num_requests = 0}), "num_requests is 0; accepted: 1 and more"));
  EXPECT_TRUE(has(capture({.num_requests = 1, .q_len = 0}), "q_len is 0"));
  EXPECT_TRUE(has(capture({.num_requests = 1, .max_seq_len = -1}), "max_seq_len is -1"));
  EXPECT_TRUE(has(capture({.num_requests = 1, .max_seq_len = (1 << 20) + 1}), "max_seq_len is 1048577"));
  EXPECT_TRUE(has(capture({.num_requests = 1 << 20, .q_len = kMaxQLen}), "2^31 - 1 rows"));
  EXPECT_EQ(capture({.num_requests = 4, .q_len = 4, .max_seq_len = 103}), "");
  EXPECT_TRUE(has(capture({.num_requests = 4, .q_len = 4, .max_seq_len = 104}),
                  "a batch of 4 requests of 4 rows is captured for causal_full and 103 tokens"));
  EXPECT_TRUE(has(error_of([&] { b.refresh(w.step(), 4); }),
                  "seq_lens[0] makes 104 tokens; accepted: at most max_seq_len of the captured batch, 103"));
  EXPECT_EQ(capture({.num_requests = 2, .q_len = 4}), "");
  EXPECT_TRUE(has(error_of([&] { b.refresh(w.step(), 2); }), "the step has 4 requests; the captured batch has 2"));
  EXPECT_EQ(capture({.num_requests = 5, .q_len = 4}), "");
  BatchStep block = w.step();
  block.decode_bound = RowBound::kUniformBlock;
  EXPECT_TRUE(
      has(error_of([&] { b.refresh(block, 5); }), "decode_bound is uniform_block; the captured batch has causal"));
  b.refresh(w.step(), 5);
  EXPECT_EQ(capture({.num_requests = 5}), "");
  b.refresh(w.step(), 5);
  const auto advance = [&](const DraftAdvance& a) {
    const std::string text = error_of([&] { b.advance(a); });
    EXPECT_EQ(b.step().q_len(), 4) << "the current step stays";
    return text;
  };
  EXPECT_TRUE(has(advance({.steps = -1, .seq_lens = {}, .pages = {}}), "steps is -1; accepted: 0 and more"));
  const Ints six(6, 1), below{1, -1, 1, 1}, beyond{1, 1, 1 << 20, 1};
  EXPECT_TRUE(has(advance({.steps = 0, .seq_lens = six, .pages = {}}), "seq_lens has 6 entries; the step has 5"));
  EXPECT_TRUE(has(advance({.steps = 0, .seq_lens = below, .pages = {}}), "seq_lens[1] is -1 and steps 0"));
  EXPECT_TRUE(has(advance({.steps = 1, .seq_lens = beyond, .pages = {}}), "seq_lens[2] is 1048576 and steps 1"));
  EXPECT_TRUE(has(advance({.steps = 30, .seq_lens = {}, .pages = {}}), "request 0 has 134 tokens"));
  w.table->set_row(2, Ints{1, 1 << 20});
  EXPECT_TRUE(has(advance({.steps = 0, .seq_lens = {}, .pages = w.table->view()}), "page 1 of request 2 is 1048576"));
}

}  // namespace
}  // namespace gannet_test
