// What follows from a step.
#include <gtest/gtest.h>

#include <limits>

#include "gannet/error.h"
#include "gannet/kv_pool.h"
#include "gannet/step.h"

namespace {

using namespace gannet;
using Ints = std::vector<int32_t>;

Ints ints(std::span<const int32_t> s) { return {s.begin(), s.end()}; }
Ints ints(const TensorView& v) { return {v.ptr<int32_t>(), v.ptr<int32_t>() + v.num_elements()}; }

template <class F>
std::string error_of(F&& f) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument) << e.what();
    return e.what();
  }
  return {};
}

testing::AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << text << "\" lacks \"" << part << "\"";
}

constexpr StepLimits kLimits{.page_size = 64, .num_pages = 100, .max_context_len = 1000, .prefix_chunk_capacity = 128};

/// spec appendix B: C (prefix 0, new 5), D (prefix 130, new 3), A (length 65), B (length 200); two rows a decode
/// request.
struct MiniBatch {
  Ints seq_lens{5, 133, 65, 200}, prefix_lens{0, 130}, extend_lens{5, 3};
  PageTable table{4, 5};
  BatchStep step;
  MiniBatch() {
    table.set_row(0, Ints{9});
    table.set_row(1, Ints{4, 2, 7});
    table.set_row(2, Ints{1, 3});
    table.set_row(3, Ints{8, 5, 6, 10});
    step = {.seq_lens = seq_lens,
            .prefix_lens = prefix_lens,
            .extend_lens = extend_lens,
            .q_len = 2,
            .pages = table.view()};
  }
};

TEST(StepPlan, MiniBatchOfTheContract) {
  const MiniBatch b;
  StepPlan p;
  p.assign(b.step, kLimits);
  EXPECT_EQ(p.mode(), StepMode::kMixed);
  EXPECT_EQ(p.num_rows(), 12);
  EXPECT_EQ(ints(p.cu_rows()), (Ints{0, 5, 8, 10, 12}));
  EXPECT_EQ(ints(p.cu_q_lens(StepRows::kPrefill)), (Ints{0, 5, 8}));
  EXPECT_EQ(ints(p.cu_q_lens(StepRows::kDecode)), (Ints{0, 2, 4}));
  EXPECT_EQ(ints(p.seq_lens_view(StepRows::kDecode)), (Ints{65, 200}));
  EXPECT_EQ(p.rows(StepRows::kPrefill), (Range{0, 8}));
  EXPECT_EQ(p.rows(StepRows::kDecode), (Range{8, 12}));
  EXPECT_EQ(p.requests(StepRows::kDecode), (Range{2, 4}));
  EXPECT_EQ(ints(p.row_lens()), (Ints{1, 2, 3, 4, 5, 131, 132, 133, 64, 65, 199, 200}));
  EXPECT_EQ(ints(p.positions()), (Ints{0, 1, 2, 3, 4, 130, 131, 132, 63, 64, 198, 199}));
  EXPECT_EQ(ints(p.write_slots()), (Ints{576, 577, 578, 579, 580, 7 * 64 + 2, 7 * 64 + 3, 7 * 64 + 4, 64 + 63, 3 * 64,
                                         10 * 64 + 6, 10 * 64 + 7}));
  EXPECT_EQ(p.max_row_len(), 200);
  EXPECT_EQ(p.max_row_len(StepRows::kPrefill), 133);
  Ints requests;
  for (int64_t t = 0; t < 12; ++t) requests.push_back(static_cast<int32_t>(p.request_of_row(t)));
  EXPECT_EQ(requests, (Ints{0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 3}));
  ASSERT_EQ(p.prefix_chunks().chunks.size(), 3u);
  Ints slots(64);
  p.fill_chunk_slots(p.prefix_chunks().chunks[1], slots);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(slots[static_cast<size_t>(i)], 2 * 64 + i);
  Ints two(2);
  p.fill_chunk_slots(p.prefix_chunks().chunks[2], two);
  EXPECT_EQ(two, (Ints{448, 449}));
  EXPECT_TRUE(has(error_of([&] { p.fill_chunk_slots(p.prefix_chunks().chunks[0], two); }), "slots has 2 entries"));
}

TEST(StepPlan, EveryFormOfTableGivesTheSamePlan) {
  MiniBatch b;
  StepPlan padded;
  padded.assign(b.step, kLimits);
  const CsrPageTable csr = b.table.csr(Ints{0, 1, 2, 3});
  b.step.pages = csr.view();
  StepPlan from_csr;
  from_csr.assign(b.step, kLimits);
  EXPECT_EQ(ints(padded.write_slots()), ints(from_csr.write_slots()));
  EXPECT_EQ(ints(padded.pages(StepRows::kAll).pages), ints(from_csr.pages(StepRows::kAll).pages));
  // Rows anywhere in a larger table.
  PageTable pool(9, 5);
  const Ints where{7, 0, 3, 8};
  for (int32_t r = 0; r < 4; ++r)
    pool.set_row(where[static_cast<size_t>(r)], b.table.row(r).first(static_cast<size_t>(b.table.num_pages(r))));
  b.step.pages = pool.view(view(where.data(), {4}));
  StepPlan indexed;
  indexed.assign(b.step, kLimits);
  EXPECT_EQ(ints(padded.write_slots()), ints(indexed.write_slots()));
}

// spec 1.6: S = 2, base [64, 128] sees [64, 65, 128, 129] as kCausalFromFirst and [63, 64, 127, 128] as kCausalFull.
TEST(StepPlan, RowBounds) {
  const Ints lens{64, 128};
  PageTable table(2, 3);
  table.set_row(0, Ints{1, 2});
  table.set_row(1, Ints{3, 4, 5});
  StepPlan p;
  BatchStep step{.seq_lens = lens, .prefix_lens = {}, .extend_lens = {}, .q_len = 2, .pages = table.view()};
  p.assign(step, kLimits);
  EXPECT_EQ(ints(p.row_lens()), (Ints{63, 64, 127, 128}));
  EXPECT_EQ(ints(p.positions()), (Ints{62, 63, 126, 127}));
  step.decode_bound = RowBound::kCausalFromFirst;
  p.assign(step, kLimits);
  EXPECT_EQ(p.decode_bound(), RowBound::kCausalFull);
  EXPECT_EQ(ints(p.seq_lens()), (Ints{65, 129}));
  EXPECT_EQ(ints(p.row_lens()), (Ints{64, 65, 128, 129}));
  EXPECT_EQ(ints(p.positions()), (Ints{63, 64, 127, 128}));
  EXPECT_EQ(ints(p.write_slots()), (Ints{64 + 63, 128, 4 * 64 + 63, 5 * 64}));
  step.decode_bound = RowBound::kUniformBlock;
  p.assign(step, kLimits);
  EXPECT_EQ(ints(p.row_lens()), (Ints{64, 64, 128, 128}));
  EXPECT_EQ(ints(p.positions()), (Ints{62, 63, 126, 127}));
}

// spec 1.4: valid 100, S = 4: positions 100..103; row j sees L - (S - 1) + j keys.
// spec 1.5: accepted [2, 1, 4, 3] leaves lengths [102, 101, 104, 103]; accepted [0, 1, 4, 99] goes on from [0, 4, 11,
// 15].
TEST(StepPlan, VerifyAndWhatIsLeftOfIt) {
  const Ints lens{104, 104, 104, 104};
  PageTable table(5, 2);
  for (int32_t r = 0; r < 5; ++r) table.set_row(r, Ints{2 * r + 1, 2 * r + 2});
  StepPlan p;
  p.assign({.seq_lens = lens, .prefix_lens = {}, .extend_lens = {}, .q_len = 4, .pages = table.view()}, kLimits);
  EXPECT_EQ(ints(p.positions().first(4)), (Ints{100, 101, 102, 103}));
  EXPECT_EQ(ints(p.row_lens().first(4)), (Ints{101, 102, 103, 104}));
  EXPECT_EQ(ints(p.write_slots().first(4)), (Ints{164, 165, 166, 167}));
  Ints rows(4), left(4);
  narrow_rows(p, Ints{0, 1, 4, 99}, rows);
  EXPECT_EQ(rows, (Ints{0, 4, 11, 15}));
  for (int i = 0; i < 2; ++i) {  // nothing is subtracted in place
    narrow_seq_lens(p, Ints{2, 1, 4, 3}, left);
    EXPECT_EQ(left, (Ints{102, 101, 104, 103}));
  }
  EXPECT_TRUE(
      has(error_of([&] { narrow_rows(p, Ints{1}, rows); }), "accepted has 1 entries; the step has 4 decode requests"));
  EXPECT_TRUE(has(error_of([&] {
                    narrow_rows(p, Ints{1, 1, 1, 1}, std::span(rows).first(3));
                  }),
                  "the output has 3 entries"));
  // Mixed: an extend of 3 rows, one without rows, a padded decode, a decode.
  const Ints mixed{5, 7, 0, 104}, prefixes{2, 7}, extends{3, 0};
  p.assign({.seq_lens = mixed, .prefix_lens = prefixes, .extend_lens = extends, .q_len = 4, .pages = table.view()},
           kLimits);
  narrow_rows(p, Ints{2, 2}, rows);
  narrow_seq_lens(p, Ints{2, 2}, left);
  EXPECT_EQ(rows, (Ints{2, -1, 4, 8}));
  EXPECT_EQ(left, (Ints{5, 7, 0, 102}));
}

TEST(StepPlan, PaddedRequestsWriteNowhereAndSeeNothing) {
  const Ints lens{0, 1, 3};
  PageTable table(3, 1);
  table.set_row(1, Ints{1});
  table.set_row(2, Ints{2});
  for (const RowBound bound : {RowBound::kCausalFull, RowBound::kCausalFromFirst, RowBound::kUniformBlock}) {
    StepPlan p;
    p.assign({.seq_lens = lens,
              .prefix_lens = {},
              .extend_lens = {},
              .q_len = 2,
              .decode_bound = bound,
              .pages = table.view()},
             kLimits);
    EXPECT_EQ(ints(p.row_lens().first(2)), (Ints{0, 0})) << to_string(bound);
    EXPECT_EQ(ints(p.write_slots().first(2)), (Ints{-1, -1})) << to_string(bound);
    EXPECT_EQ(ints(p.positions().first(2)), (Ints{0, 0})) << to_string(bound);
    if (bound == RowBound::kCausalFull) {
      EXPECT_EQ(ints(p.row_lens()), (Ints{0, 0, 0, 1, 2, 3}));
      EXPECT_EQ(ints(p.write_slots()), (Ints{-1, -1, -1, 64, 129, 130}));
    }
  }
}

TEST(StepPlan, RequestsWithoutNewRows) {
  const Ints lens{10, 3}, prefixes{10, 0}, extends{0, 3};
  PageTable table(2, 1);
  table.set_row(0, Ints{1});
  table.set_row(1, Ints{2});
  StepPlan p;
  p.assign({.seq_lens = lens, .prefix_lens = prefixes, .extend_lens = extends, .pages = table.view()}, kLimits);
  EXPECT_EQ(ints(p.cu_rows()), (Ints{0, 0, 3}));
  EXPECT_EQ(p.request_of_row(0), 1);
  EXPECT_EQ(ints(p.write_slots()), (Ints{128, 129, 130}));
}

TEST(StepPlan, ForgetsTheStepBefore) {
  const MiniBatch b;
  StepPlan p;
  p.assign(b.step, kLimits);
  // The same shapes with shorter rows: no page of the step before may be left in the copy.
  const Ints lens{5, 3, 60, 1}, prefixes{0, 0}, extends{5, 3};
  BatchStep step = b.step;
  step.seq_lens = lens;
  step.prefix_lens = prefixes;
  step.extend_lens = extends;
  p.assign(step, kLimits);
  const TensorView cells = p.pages(StepRows::kAll).pages;
  for (int64_t r = 0; r < 4; ++r)
    for (int64_t c = 1; c < cells.shape[1]; ++c) EXPECT_EQ(*cells.ptr<int32_t>(r, c), 0) << r << ", " << c;
  p.assign({}, kLimits);
  EXPECT_EQ(p.mode(), StepMode::kIdle);
  EXPECT_EQ(p.num_rows(), 0);
  EXPECT_EQ(p.rows(StepRows::kAll), (Range{0, 0}));
  EXPECT_TRUE(p.prefix_chunks().chunks.empty());
}

TEST(StepPlan, NamesWhatIsWrong) {
  const auto text = [&](auto&& change, StepLimits limits = kLimits) {
    MiniBatch m;
    StepPlan p;
    p.assign(m.step, kLimits);  // the batch itself is fine
    change(m);
    const std::string e = error_of([&] { p.assign(m.step, limits); });
    EXPECT_EQ(p.mode(), StepMode::kIdle);
    EXPECT_EQ(p.num_rows(), 0);
    return e;
  };
  const auto nothing = [](MiniBatch&) {};
  EXPECT_TRUE(
      has(text([](MiniBatch& m) { m.seq_lens[1] = 130; }), "seq_lens[1] is 130; prefix_lens + extend_lens is 130 + 3"));
  EXPECT_TRUE(has(text([](MiniBatch& m) { m.seq_lens[2] = -1; }), "seq_lens[2] is -1"));
  EXPECT_TRUE(has(text([](MiniBatch& m) { m.prefix_lens[0] = -1; }), "prefix_lens[0] is -1"));
  EXPECT_TRUE(has(text([](MiniBatch& m) { m.step.q_len = 0; }), "q_len is 0; accepted: 1 to 4096"));
  EXPECT_TRUE(has(text([](MiniBatch& m) { m.step.q_len = 4097; }), "q_len is 4097; accepted: 1 to 4096"));
  EXPECT_TRUE(
      has(text([](MiniBatch& m) { m.step.q_len = std::numeric_limits<int32_t>::max(); }), "q_len is 2147483647"));
  EXPECT_TRUE(has(text([](MiniBatch& m) { m.step.decode_bound = static_cast<RowBound>(3); }),
                  "decode_bound is 3; accepted: a RowBound"));
  EXPECT_TRUE(has(text([](MiniBatch& m) { m.step.pages.form = static_cast<PageTableForm>(2); }),
                  "pages.form is 2; accepted: a PageTableForm"));
  EXPECT_TRUE(has(text([](MiniBatch& m) { m.step.pages.pages.stride[1] = 2; }), "accepted: last stride 1"));
  EXPECT_TRUE(has(text([](MiniBatch& m) { m.step.prefix_lens = m.step.prefix_lens.first(1); }),
                  "prefix_lens has 1 entries and extend_lens 2"));
  EXPECT_TRUE(has(text([](MiniBatch& m) { m.step.seq_lens = m.step.seq_lens.first(1); }), "num_extends is 2"));
  EXPECT_TRUE(has(text([](MiniBatch& m) { m.seq_lens[3] = 400; }),
                  "request 3 has 400 tokens; its row of the page table reaches 320"));
  EXPECT_TRUE(has(text([](MiniBatch& m) { m.seq_lens[3] = 1001; }), "at most max_context_len, 1000"));
  EXPECT_TRUE(has(text([](MiniBatch& m) {
                    m.table.set_row(3, Ints{8, 5, 100, 10});
                  }),
                  "page 2 of request 3 is 100; accepted: 0 to 99"));
  EXPECT_TRUE(has(text([](MiniBatch& m) { m.step.pages.pages.dtype = DType::kI64; }), "pages is int64"));
  EXPECT_TRUE(has(text([](MiniBatch& m) { m.step.pages.pages.shape[0] = 3; }), "the step has 4 requests"));
  EXPECT_TRUE(has(text([](MiniBatch& m) { m.step.pages.pages.data = nullptr; }), "pages.data is null"));
  EXPECT_TRUE(has(text([](MiniBatch& m) { m.step.pages.pages.device = {DeviceKind::kCuda, 0}; }), "host memory"));
  const Ints where{0, 1, 2, 4};
  EXPECT_TRUE(
      has(text([&](MiniBatch& m) { m.step.pages.row_indices = view(where.data(), {4}); }), "row_indices[3] is 4"));
  EXPECT_TRUE(
      has(text([&](MiniBatch& m) { m.step.pages.row_indices = view(where.data(), {3}); }), "row_indices is int32[3]"));
  const Ints indptr{0, 1, 4, 3, 9}, indices(9, 1);
  EXPECT_TRUE(has(text([&](MiniBatch& m) {
                    m.step.pages = PageTableView::csr(view(indptr.data(), {5}), view(indices.data(), {9}));
                  }),
                  "indptr[2..3] is 4, 3"));
  EXPECT_TRUE(has(text([&](MiniBatch& m) {
                    m.step.pages = PageTableView::csr(view(indptr.data(), {4}), view(indices.data(), {9}));
                  }),
                  "needs one entry more"));
  StepLimits limits = kLimits;
  limits.page_size = 0;
  EXPECT_TRUE(has(text(nothing, limits), "page_size is 0"));
  limits = kLimits;
  limits.prefix_chunk_capacity = 0;
  EXPECT_TRUE(has(text(nothing, limits), "capacity is 0"));
  limits = kLimits;
  limits.max_context_len = int64_t{1} << 31;
  EXPECT_TRUE(has(text(nothing, limits), "max_context_len is 2147483648"));
  limits = kLimits;
  limits.num_pages = -1;
  EXPECT_TRUE(has(text(nothing, limits), "num_pages is -1; accepted: 0 and more"));
  const Ints many(std::numeric_limits<int32_t>::max() / kMaxQLen + 1, 0);
  EXPECT_TRUE(has(text([&](MiniBatch& m) {
                    m.step.seq_lens = many;
                    m.step.prefix_lens = m.step.extend_lens = {};
                    m.step.q_len = kMaxQLen;
                  }),
                  "more than 2^31 - 1 rows"));
}

TEST(StepPlan, NamesWhatIsWrongWithABatchForACapturedPlan) {
  const CaptureShape shape{.num_requests = 2, .q_len = 2, .max_seq_len = 128};
  StepPlan p;
  p.capture(shape, kLimits);
  const Ints lens{5, 6}, cells{1, 2, 3, 4};
  const auto text = [&](auto&& change, ErrorCode code = ErrorCode::kInvalidArgument) {
    BatchStep step{.seq_lens = lens,
                   .prefix_lens = {},
                   .extend_lens = {},
                   .q_len = 2,
                   .pages = PageTableView::padded(view(cells.data(), {2, 2}))};
    change(step);
    try {
      p.assign(step, kLimits);
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), code);
      return std::string(e.what());
    }
    return std::string();
  };
  using S = BatchStep;
  const Ints one{1}, three{1, 1, 1};
  EXPECT_EQ(text([](S&) {}), "");
  EXPECT_TRUE(has(text([&](S& s) { s.prefix_lens = s.extend_lens = one; }, ErrorCode::kUnsupported),
                  "[StepPlan] the step is mixed; accepted for a captured batch: decode"));
  EXPECT_TRUE(has(text([](S& s) { s.q_len = 1; }), "q_len is 1; the captured batch has 2"));
  EXPECT_TRUE(has(text([&](S& s) { s.seq_lens = three; }), "the step has 3 requests; the captured batch has 2"));
  EXPECT_TRUE(has(text([](S& s) { s.decode_bound = RowBound::kUniformBlock; }),
                  "decode_bound is uniform_block; the captured batch has causal_full"));
}

TEST(StepPlan, NamesWhatIsWrongWithAnAdvance) {
  const MiniBatch m;
  StepPlan from, idle, to;
  from.assign(m.step, kLimits);
  idle.assign({}, kLimits);
  const Ints lens{6, 134, 66, 201}, three{1, 1, 1}, below{1, 1, -1, 1}, beyond{1, 1, 1, 1001};
  const auto text = [&](const StepPlan& base, const Ints& seq_lens, StepLimits limits = kLimits) {
    return error_of([&] { to.advance(base, seq_lens, {}, limits); });
  };
  EXPECT_EQ(text(from, lens), "");
  EXPECT_TRUE(has(text(idle, {}), "the step to go on from is idle; accepted: one with requests"));
  EXPECT_TRUE(has(text(from, three), "seq_lens has 3 entries; the step to go on from has 4 requests"));
  EXPECT_TRUE(has(text(from, below), "seq_lens[2] is -1; accepted: 0 to 1000"));
  EXPECT_TRUE(has(text(from, beyond), "seq_lens[3] is 1001; accepted: 0 to 1000"));
  StepLimits other = kLimits;
  other.page_size = 32;
  EXPECT_TRUE(has(text(from, lens, other), "page_size is 32; that of the step to go on from is 64"));
  EXPECT_TRUE(has(error_of([&] { from.advance(from, lens, {}, kLimits); }),
                  "a plan that is not captured cannot go on from itself; accepted: another plan"));
  StepPlan captured;
  captured.capture({.num_requests = 4, .q_len = 2, .max_seq_len = 128}, kLimits);
  EXPECT_TRUE(has(error_of([&] { captured.advance(from, lens, {}, kLimits); }),
                  "the captured batch has 4 requests of 2 rows; the step needs 4 of 1"));
  EXPECT_EQ(to.num_requests(), 4) << "a refused advance leaves everything as it was";
}

// A step whose lengths are known elsewhere: its shape and its bounds are known, nothing else is taken for true.
TEST(StepPlan, LengthsThatLieOnADevice) {
  StepPlan p;
  EXPECT_TRUE(has(error_of([&] { p.assign_unknown(100, kLimits); }), "need a captured plan; accepted: capture first"));
  p.capture({.num_requests = 3, .q_len = 2, .max_seq_len = 128}, kLimits);
  EXPECT_TRUE(p.lens_known());
  const int32_t* place = p.positions().data();
  EXPECT_TRUE(has(error_of([&] { p.assign_unknown(-1, kLimits); }), "max_seq_len is -1; accepted: 0 and more"));
  for (const int64_t most : {100, 1000}) {
    p.assign_unknown(most, kLimits);
    EXPECT_FALSE(p.lens_known());
    EXPECT_EQ(p.num_rows(), 6);
    EXPECT_EQ(p.max_row_len(), std::min<int64_t>(most, 128)) << "no more than was captured";
    EXPECT_EQ(p.max_row_len(StepRows::kDecode), p.max_row_len());
    EXPECT_EQ(p.positions().data(), place);
  }
  Ints lens(3);
  const Ints accepted{1, 2, 1};
  EXPECT_TRUE(has(error_of([&] { narrow_seq_lens(p, accepted, lens); }), "the lengths of the step lie on a device"));
  Ints rows(3);
  narrow_rows(p, accepted, rows);
  EXPECT_EQ(rows, (Ints{0, 3, 4})) << "which need no lengths";
  StepPlan to;
  EXPECT_TRUE(
      has(error_of([&] { to.advance(p, lens, {}, kLimits); }), "the lengths of the step to go on from lie on a"));
  p.assign({.seq_lens = Ints{5},
            .prefix_lens = {},
            .extend_lens = {},
            .q_len = 2,
            .pages = PageTableView::padded(view(accepted.data(), {1, 1}))},
           kLimits);
  EXPECT_TRUE(p.lens_known()) << "the next step is as any other";
}

}  // namespace
