// Known faults of kinds D (limits of launches), N (splits, scratch) and P (races).
#include <chrono>
#include <optional>
#include <thread>

#include "fault_problems.h"
#include "gannet/cuda.h"

namespace {

using namespace gannet;
using namespace gannet_tests;
using gannet::verify::make_ints;
using gannet::verify::make_tensor;
using gannet::verify::PagedSpec;
using gannet::verify::Rng;
using gannet::verify::Tensor;

/// Rows of a call of `rows` rows that are compared with the same rows alone: the ends, and around powers of two.
std::vector<int64_t> sample(int64_t rows) {
  std::vector<int64_t> list;
  for (const int64_t r : {int64_t{0}, int64_t{1}, int64_t{4095}, int64_t{4096}, int64_t{32767}, int64_t{32768},
                          int64_t{65534}, int64_t{65535}, rows / 2, rows - 1})
    if (r < rows) list.push_back(r);
  return list;
}

/// `p` has `rows` rows, and whatever else has `rows` entries belongs to them.
template <class Params>
void expect_rows_as_alone(const Params& p, int64_t rows, const std::string& what,
                          const std::function<void(Params&, int64_t)>& make_alone = {}) {
  for (const std::string& impl : takers(p, what, true)) {
    const verify::Outputs all = verify::run(p, {.impl = impl, .num_workers = 2});
    EXPECT_EQ(all.fault, "");
    for (const int64_t row : sample(rows)) {
      Params one = p;
      Params::for_each_view(one, [&](const char*, TensorView& v) {
        if (v.given() && v.shape[0] == rows) v = cut(v, row, 1);
      });
      if (make_alone) make_alone(one, row);
      const verify::Outputs alone = verify::run(one, {.impl = impl});
      for (const std::string& name : alone.names)
        EXPECT_EQ(row_bytes(all, name, row, rows), alone.of(name)) << Params::kName << " " << impl << " row " << row;
    }
  }
}

// A request of 4,095 to 65,536 rows, and 65,536 requests of one, over a few keys; the keys of the shorter ones lie in
// more than one split. Narrow rows, so that it is the number of rows that counts.
TEST(Faults, BL11_ManyRowsAndManyRequests) {
  constexpr RowGeometry kNarrow{16, 16};
  for (const int64_t rows : {4095, 4096, 65535, 65536}) {
    if (kSanitized && rows != 65536) continue;
    const int32_t keys = rows > 5000 ? 9 : 600;  // 512 make a split
    for (const AbsorbedFormat& f : {kAbsorbedFormats[0], kAbsorbedFormats[1]}) {
      // One request: every row of a block sees all keys.
      DecodeProblem d({.seq_lens = {keys}, .q_len = static_cast<int32_t>(rows), .bound = RowBound::kUniformBlock}, f, 1,
                      verify::Poison::kNan, 0, kNarrow);
      const std::string what = name_of(f) + ", " + std::to_string(rows) + " rows";
      expect_rows_as_alone<MlaDecode>(d.params, rows, what, [](MlaDecode& one, int64_t) { one.rows.q_len = 1; });
      if (rows % 2 != 0) continue;
      // As many requests, which share their pages.
      MlaDecode many = d.params;
      const Tensor lens = make_ints(std::vector<int32_t>(static_cast<size_t>(rows), keys)),
                   table = make_ints(std::vector<int32_t>(static_cast<size_t>(rows), 0));
      many.rows = {};
      many.rows.seq_lens = lens.view;
      many.pages.row_indices = table.view;
      expect_rows_as_alone(many, rows, what + " and requests");
      if (rows != 65536) continue;
      // Lower right: rows before the last `keys` see nothing.
      MlaDecode causal = d.params;
      causal.rows.bound = RowBound::kCausalFull;
      for (const std::string& impl : takers(causal, what)) {
        const std::vector<float> lse = verify::run(causal, {.impl = impl}).floats("lse");
        for (int64_t r = 0; r < rows; ++r)
          ASSERT_EQ(lse[static_cast<size_t>(r)] == -INFINITY, r < rows - keys) << impl << " row " << r;
      }
      const SparseProblem lists(d, 33);
      expect_rows_as_alone(lists.params, rows, what);
    }
  }
  constexpr int64_t kRows = 65536;
  const PagedSpec spec{.seq_lens = {20}, .q_len = static_cast<int32_t>(kRows), .bound = RowBound::kUniformBlock};
  for (const IndexerFormat& f : kIndexerFormats) {
    if (kSanitized && f.cache != IndexKFormat::kE4m3) continue;
    const IndexProblem s(spec, f, 1, 8);
    expect_rows_as_alone<IndexLogits>(s.scores, kRows, to_string(f.cache),
                                      [](IndexLogits& one, int64_t) { one.rows.q_len = 1; });
    expect_rows_as_alone<IndexSelect>(s.select, kRows, to_string(f.cache),
                                      [](IndexSelect& one, int64_t) { one.rows.q_len = 1; });
  }
  const Tensor scores = make_tensor(DType::kF32, {kRows, 40}), lens = make_ints(std::vector<int32_t>(kRows, 40)),
               positions = make_tensor(DType::kI32, {kRows, 8}), counts = make_tensor(DType::kI32, {kRows});
  fill_normal(scores, Rng(1));
  TopK topk;
  topk.logits = scores.view;
  topk.lens = lens.view;
  topk.positions = positions.view;
  topk.counts = counts.view;
  expect_rows_as_alone(topk, kRows, "65536 rows");
  const Tensor a = make_tensor(DType::kF32, {kRows, 1, 32}), b = make_tensor(DType::kF32, {kRows, 1, 32}),
               la = make_tensor(DType::kF32, {kRows, 1}), lb = make_tensor(DType::kF32, {kRows, 1});
  for (const Tensor* t : {&a, &b, &la, &lb}) fill_normal(*t, Rng(2));
  MergeState merge;
  merge.out_a = a.view;
  merge.lse_a = la.view;
  merge.out_b = b.view;
  merge.lse_b = lb.view;
  expect_rows_as_alone(merge, kRows, "65536 rows");
  const Tensor q = make_tensor(DType::kF32, {kRows, 1, 32}), k = make_tensor(DType::kF32, {70, 1, 32}),
               out = make_tensor(DType::kF32, {kRows, 1, 32}), at = make_ints(std::vector<int32_t>(kRows, 3)),
               table = make_tensor(DType::kF32, {4, 32});
  for (const Tensor* t : {&q, &k, &table}) fill_normal(*t, Rng(3));
  const Tensor cu_q = make_ints({0, static_cast<int32_t>(kRows)}), cu_kv = make_ints({0, 70}),
               one_row = make_ints({0, 1});
  RaggedPrefill prefill;
  prefill.q = q.view;
  prefill.k = prefill.v = k.view;
  prefill.out = out.view;
  prefill.cu_q_lens = cu_q.view;
  prefill.cu_kv_lens = cu_kv.view;
  prefill.causal = false;
  prefill.softmax_scale = 0.1f;
  expect_rows_as_alone<RaggedPrefill>(prefill, kRows, "65536 rows",
                                      [&](RaggedPrefill& one, int64_t) { one.cu_q_lens = one_row.view; });
  std::vector<int32_t> each(kRows + 1);
  for (size_t i = 0; i < each.size(); ++i) each[i] = static_cast<int32_t>(i);
  const Tensor requests = make_ints(each), no_keys = make_ints(std::vector<int32_t>(kRows + 1, 0));
  RaggedPrefill many = prefill;
  const Tensor empty = make_tensor(DType::kF32, {0, 1, 32}), lse = make_tensor(DType::kF32, {kRows, 1});
  many.cu_q_lens = requests.view;
  many.cu_kv_lens = no_keys.view;
  many.k = many.v = empty.view;
  many.lse = lse.view;
  for (const std::string& impl : takers(many, "65536 requests without keys")) {
    for (const float x : verify::run(many, {.impl = impl}).floats("lse")) ASSERT_EQ(x, -INFINITY) << impl;
  }
  Rope rope;
  rope.x = q.view;
  rope.positions = at.view;
  rope.cos_sin = table.view;
  expect_rows_as_alone(rope, kRows, "65536 rows");
}

// Requests times splits: as many as workers ask for. It ends, and is what one split gives.
TEST(Faults, BL38_SplitsOfEveryBatch) {
  constexpr RowGeometry kNarrow{128, 16};
  const auto begin = std::chrono::steady_clock::now();
  for (const size_t batch : {1, 2, 7, 64, 257}) {
    std::vector<int32_t> lens;
    for (size_t i = 0; i < batch; ++i) lens.push_back(static_cast<int32_t>(i % 5 == 0 && i < 20 ? 2500 : i % 90));
    for (const AbsorbedFormat& f : {kAbsorbedFormats[0], kAbsorbedFormats[1]}) {
      const DecodeProblem d({.seq_lens = lens}, f, 1, verify::Poison::kNan, 0, kNarrow);
      const SparseProblem lists(d, 2048);
      const SparseAttention& s = lists.params;
      for (const std::string& impl : takers(d.params, name_of(f), true)) {
        const verify::Outputs one = verify::run(d.params, {.impl = impl}), list = verify::run(s, {.impl = impl});
        for (const auto& [got, want] :
             {std::pair{one.floats("out"), verify::run(d.params, {.impl = "ref"}).floats("out")},
              {list.floats("out"), verify::run(s, {.impl = "ref"}).floats("out")}})
          expect_lines_close(want, got, kNarrow.latent_dim, verify::attention_tolerance(precision_of(f, 2500)), impl);
        for (const int workers : {2, 5, 32}) {
          EXPECT_EQ(verify::run(d.params, {.impl = impl, .num_workers = workers}), one) << impl << " " << workers;
          EXPECT_EQ(verify::run(s, {.impl = impl, .num_workers = workers}), list) << impl << " " << workers;
        }
      }
    }
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::minutes(5));
}

/// A call with a plan of its own and the result that it has in fresh scratch.
struct Call {
  std::string what;
  bool on_device = false;
  size_t scratch = 0;
  std::function<void(std::span<std::byte>)> run;
  std::function<std::vector<std::byte>()> result;
  std::vector<std::byte> expected;
};

template <class Params>
void add_calls(std::vector<Call>& calls, const Params& p, const TensorView& out, const std::string& format) {
  for (const std::string& impl : takers(p, format)) {
    Call c;
    for (const ImplInfo& info : list_implementations<Params>())
      c.on_device |= info.name == impl && info.device == DeviceKind::kCuda;
    static const Context context{};
    c.what = std::string(Params::kName) + " " + impl + " " + format;
    c.result = [out] {
      const auto* b = static_cast<const std::byte*>(out.data);
      return std::vector<std::byte>(b, b + static_cast<size_t>(out.num_elements()) * size_of(out.dtype));
    };
    if (c.on_device) {
      const auto mirror = std::make_shared<verify::DeviceMirror>();
      const Params there = mirror->to_device(p);
      const auto plan = std::make_shared<OpPlan<Params>>(context, there, PlanOptions{.impl = impl});
      c.scratch = plan->workspace_bytes();
      c.run = [plan, there, mirror](std::span<std::byte> scratch) {
        plan->run(there, scratch);
        mirror->copy_back();
      };
      c.run(mirror->scratch(c.scratch));
    } else {
      const auto plan = std::make_shared<OpPlan<Params>>(context, p, PlanOptions{.impl = impl});
      c.scratch = plan->workspace_bytes();
      c.run = [plan, p](std::span<std::byte> scratch) { plan->run(p, scratch); };
      verify::Buffer zeros(c.scratch, verify::Poison::kZero);
      c.run({zeros.data(), zeros.size()});
    }
    c.expected = c.result();
    calls.push_back(c);
  }
}

// Other shapes and other operations one after the other in one piece of scratch, as they left it and full of 0xFF.
TEST(Faults, BL39_WhatScratchHolds) {
  std::vector<std::unique_ptr<DecodeProblem>> dense;
  std::vector<std::unique_ptr<SparseProblem>> lists;
  std::vector<std::unique_ptr<IndexProblem>> indexers;
  std::vector<Call> calls;
  for (const PagedSpec& spec : {PagedSpec{.seq_lens = {1200}},
                                {.seq_lens = {5, 70, 0, 600}, .q_len = 3},
                                {.seq_lens = {64, 1}, .ragged = {2, 5}}}) {
    for (const AbsorbedFormat& f : kAbsorbedFormats) {
      dense.push_back(std::make_unique<DecodeProblem>(spec, f, 3));
      add_calls(calls, dense.back()->params, dense.back()->out.view, name_of(f));
      lists.push_back(std::make_unique<SparseProblem>(*dense.back(), 700));
      add_calls(calls, lists.back()->params, dense.back()->out.view, name_of(f));
    }
    for (const IndexerFormat& f : kIndexerFormats) {
      indexers.push_back(std::make_unique<IndexProblem>(spec, f, 3, 50));
      add_calls(calls, indexers.back()->select, indexers.back()->positions.view, to_string(f.cache));
      add_calls(calls, indexers.back()->scores, indexers.back()->logits.view, to_string(f.cache));
    }
  }
  const Tensor q = make_tensor(DType::kBf16, {70, 2, 96}), v = make_tensor(DType::kBf16, {700, 2, 48}),
               k = make_tensor(DType::kBf16, {700, 2, 96}), out = make_tensor(DType::kF32, {70, 2, 48}),
               cu_q = make_ints({0, 70}), cu_kv = make_ints({0, 700});
  for (const Tensor* t : {&q, &k, &v}) fill_normal(*t, Rng(5));
  RaggedPrefill prefill;
  prefill.q = q.view;
  prefill.k = k.view;
  prefill.v = v.view;
  prefill.cu_q_lens = cu_q.view;
  prefill.cu_kv_lens = cu_kv.view;
  prefill.out = out.view;
  prefill.softmax_scale = 0.1f;
  add_calls(calls, prefill, out.view, "bf16");
  const Tensor scores = make_tensor(DType::kF32, {2, 9000}), n = make_ints({9000, 40}),
               positions = make_tensor(DType::kI32, {2, 2048}), counts = make_tensor(DType::kI32, {2});
  fill_normal(scores, Rng(6));
  TopK topk;
  topk.logits = scores.view;
  topk.lens = n.view;
  topk.positions = positions.view;
  topk.counts = counts.view;
  add_calls(calls, topk, positions.view, "");
  size_t largest = 0, largest_there = 0;
  for (const Call& c : calls) {
    size_t& most = c.on_device ? largest_there : largest;
    most = std::max(most, c.scratch);
  }
  verify::Buffer scratch(largest);
  std::optional<verify::DeviceMirror> device;
  std::span<std::byte> there;
  const std::vector<std::byte> ones(largest_there, std::byte{0xFF});
  if (std::any_of(calls.begin(), calls.end(), [](const Call& c) { return c.on_device; }))
    there = device.emplace().scratch(largest_there);
  Rng rng(7);
  for (int round = 0; round < (kSanitized ? 100 : 400); ++round) {
    const Call& c = calls[static_cast<size_t>(rng.below(static_cast<int64_t>(calls.size())))];
    if (c.on_device) {
      if (round % 2 == 0 && c.scratch > 0) cuda_copy(there.data(), ones.data(), c.scratch, {DeviceKind::kCuda, 0});
      c.run(there.first(c.scratch));
    } else {
      if (round % 2 == 0) std::memset(scratch.data(), 0xFF, c.scratch);
      c.run({scratch.data(), c.scratch});
    }
    ASSERT_EQ(c.result(), c.expected) << c.what << ", round " << round;
    ASSERT_TRUE(scratch.guards_intact()) << c.what;
  }
}

// 20 launches of the indexer, each right after the keys were written by the same workers, while another pool is busy.
TEST(Faults, BL41_LaunchesAreAlike) {
  std::atomic<bool> stop{false};
  std::thread other([&] {
    ThreadPool pool({.num_threads = 2, .cpus = {}});
    std::atomic<int64_t> sum{0};
    while (!stop) pool.parallel_for(64, [&](int64_t t, int) { sum += t; });
  });
  for (const IndexerFormat& f : kIndexerFormats) {
    const IndexProblem s({.seq_lens = {700, 300}, .q_len = 2}, f, 64, 128);
    const Tensor k = make_tensor(DType::kF32, {700, 128});
    fill_normal(k, Rng(8));
    std::vector<int32_t> list;
    for (int32_t t = 0; t < 700; ++t) list.push_back(static_cast<int32_t>(s.paged.slot(0, t)));
    const Tensor slots = make_ints(list);
    const IndexKWrite write{.k = k.view, .slots = slots.view, .cache = s.pool.view};
    for (const std::string& impl : takers(s.select, to_string(f.cache))) {
      bool on_cpu = false;
      for (const ImplInfo& info : list_implementations<IndexSelect>())
        on_cpu |= info.name == impl && info.device == DeviceKind::kCpu;
      ThreadPool pool({.num_threads = 3, .cpus = {}});
      const Context context{.executor = &pool, .log = {}};
      verify::Outputs first, chosen;
      for (int launch = 0; launch < 20; ++launch) {
        if (on_cpu) {
          for (int32_t t = 0; t < 700; ++t) std::memset(s.pool.view.values(list[static_cast<size_t>(t)]), 0xFF, 128);
          run_once(context, write, {.impl = impl});
        }
        const verify::Outputs got = verify::run(s.select, {.impl = impl, .num_workers = 3});
        const verify::Outputs scores = verify::run(s.scores, {.impl = impl, .num_workers = 3});
        if (launch == 0) first = scores;
        EXPECT_EQ(scores, first) << impl << " launch " << launch;
        if (launch == 0) chosen = got;
        EXPECT_EQ(got, chosen) << impl << " launch " << launch;
      }
    }
  }
  stop = true;
  other.join();
}

}  // namespace
