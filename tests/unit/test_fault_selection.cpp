// Known faults of kinds I (top-k) and J (what the indexer is given), and traps 6.2 and 6.40.
#include <limits>

#include "fault_problems.h"

namespace {

using namespace gannet;
using namespace gannet_tests;
using gannet::verify::make_ints;
using gannet::verify::make_tensor;
using gannet::verify::Paged;
using gannet::verify::Rng;
using gannet::verify::Tensor;

struct Rows {
  Tensor scores, lens, positions, counts;
  TopK params;
  Rows(int64_t rows, int64_t columns, int64_t k, const std::function<float(Rng&, int64_t)>& at)
      : scores(make_tensor(DType::kF32, {rows, columns})),
        lens(make_ints(std::vector<int32_t>(static_cast<size_t>(rows), static_cast<int32_t>(columns)))),
        positions(make_tensor(DType::kI32, {rows, k})),
        counts(make_tensor(DType::kI32, {rows})) {
    Rng rng(17);
    for (int64_t r = 0; r < rows; ++r) {
      float* x = scores.view.ptr<float>(r);
      for (int64_t i = 0; i < columns; ++i) x[i] = at(rng, i);
    }
    params.logits = scores.view;
    params.lens = lens.view;
    params.positions = positions.view;
    params.counts = counts.view;
  }
};

/// The rule, by sorting: larger scores first, NaN below all, smaller positions first among equals.
std::vector<int32_t> sorted_choice(const float* x, int64_t n, int64_t k) {
  std::vector<int32_t> order(static_cast<size_t>(n));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    if (std::isnan(x[a]) || std::isnan(x[b])) return !std::isnan(x[a]) && std::isnan(x[b]);
    return x[a] > x[b];
  });
  order.resize(static_cast<size_t>(std::min(n, k)));
  std::sort(order.begin(), order.end());
  order.resize(static_cast<size_t>(k), -1);
  return order;
}

void expect_sorted_choice(const Rows& s, const std::string& what) {
  const int64_t k = s.params.positions.shape[1], n = s.params.logits.shape[1];
  std::vector<int32_t> want;
  for (int64_t r = 0; r < s.params.logits.shape[0]; ++r) {
    const std::vector<int32_t> row = sorted_choice(s.params.logits.ptr<float>(r), n, k);
    want.insert(want.end(), row.begin(), row.end());
  }
  for (const std::string& impl : takers(s.params, what))
    EXPECT_EQ(verify::run(s.params, {.impl = impl, .num_workers = 2}).ints("positions"), want) << impl << " " << what;
}

// 100 winners and 8,220 zeros: 1,948 of the zeros are taken, and no place of a full row is -1.
TEST(Faults, BL26_ManyTiesAtTheThreshold) {
  expect_sorted_choice(
      Rows(3, 8320, 2048,
           [](Rng& rng, int64_t i) { return i % 83 == 7 && i < 8300 ? static_cast<float>(1 + rng.uniform()) : 0.0f; }),
      "100 winners");
  expect_sorted_choice(Rows(2, 8320, 2048, [](Rng&, int64_t) { return -2.5f; }), "all equal");
  expect_sorted_choice(Rows(2, 8320, 2048,
                            [](Rng& rng, int64_t) {
                              const int64_t x = rng.below(3);
                              return x == 0 ? 0.0f : x == 1 ? INFINITY : -INFINITY;
                            }),
                       "infinities");
}

// Threshold buckets that no fixed buffer holds, up to 2^20 columns.
TEST(Faults, BL27_CrowdedThresholds) {
  const auto narrow = [](Rng& rng, int64_t) { return static_cast<float>(1.0 + 0.245 * rng.uniform()); };
  const auto last_bits = [](Rng& rng, int64_t) { return 1.0f + static_cast<float>(rng.below(64)) * 0x1p-23f; };
  const auto rising = [](Rng&, int64_t i) { return static_cast<float>(i) * 0.25f; };
  const auto equal = [](Rng&, int64_t) { return 3.0f; };
  expect_sorted_choice(Rows(kSanitized ? 2 : 33, 16384, 2048, narrow), "narrow, 16384");
  expect_sorted_choice(Rows(kSanitized ? 2 : 33, 16385, 2048, narrow), "narrow, 16385");
  expect_sorted_choice(Rows(2, 16448, 2048, rising), "rising, 16448");
  expect_sorted_choice(Rows(1, 262144, 2048, last_bits), "last bits, 262144");
  if (kSanitized) return;
  expect_sorted_choice(Rows(1, 1 << 20, 2048, narrow), "narrow, 2^20");
  expect_sorted_choice(Rows(1, 1 << 20, 2048, equal), "equal, 2^20");
  expect_sorted_choice(Rows(1, 1 << 20, 2048, [](Rng& rng, int64_t) { return static_cast<float>(rng.normal()); }),
                       "normal, 2^20");
}

// Thousands of exact ties at the threshold, side by side: the same choice in 20 runs, by any number of workers (each as
// good as a rank of its own), and in a batch of 64. Lists of three lengths, so that they end within a vector of ties.
TEST(Faults, BL28_TiesAreChosenByPosition) {
  constexpr int64_t kLength = 20000;
  for (const int64_t taken : {2047, 2048, 2049}) {
    const Rows one(1, kLength, taken,
                   [](Rng& rng, int64_t i) { return i % 13 == 5 ? static_cast<float>(2.0 + rng.uniform()) : 1.0f; });
    Rows many(64, kLength, taken, [](Rng&, int64_t) { return 0.0f; });
    for (int64_t r = 0; r < 64; ++r)
      std::memcpy(many.scores.view.ptr<float>(r), one.scores.view.data, kLength * sizeof(float));
    const std::vector<int32_t> want = sorted_choice(one.scores.view.ptr<float>(), kLength, taken);
    for (const std::string& impl : takers(one.params)) {
      for (int round = 0; round < 20; ++round)
        ASSERT_EQ(verify::run(one.params, {.impl = impl, .num_workers = 1 + round % 5}).ints("positions"), want)
            << impl;
      const std::vector<int32_t> batch = verify::run(many.params, {.impl = impl, .num_workers = 3}).ints("positions");
      for (size_t r = 0; r < 64; ++r) {
        const auto row = batch.begin() + static_cast<std::ptrdiff_t>(r) * taken;
        ASSERT_TRUE(std::equal(want.begin(), want.end(), row)) << impl << " row " << r;
      }
    }
  }
}

// NaN in one score, in some, in all, in rows longer and shorter than the list.
TEST(Faults, BL29_NanScores) {
  for (const int64_t n : {40, 64, 65, 3000}) {
    for (const int64_t nans : {int64_t{1}, n / 2, n - 1, n}) {
      expect_sorted_choice(Rows(3, n, 64,
                                [&](Rng& rng, int64_t i) {
                                  return i * 7919 % n < nans ? (i % 2 == 0 ? NAN : -NAN)
                                                             : static_cast<float>(rng.normal());
                                }),
                           std::to_string(nans) + " NaN of " + std::to_string(n));
    }
  }
}

/// Index queries and keys of 128 values of which the first 64 are rotated.
struct Rotated {
  static constexpr int64_t kHeads = 4, kDim = 128, kRotated = 64;
  std::vector<int32_t> positions;
  Tensor q, k, table;

  explicit Rotated(std::vector<int32_t> at) : positions(std::move(at)) {
    const auto n = static_cast<int64_t>(positions.size());
    q = make_tensor(DType::kF32, {n, kHeads, kDim});
    k = make_tensor(DType::kF32, {n, 1, kDim});
    fill_normal(q, Rng(1));
    fill_normal(k, Rng(2));
    table = make_tensor(DType::kF32, {*std::max_element(positions.begin(), positions.end()) + 1, kRotated});
    for (const int32_t p : positions) {
      for (int64_t i = 0; i < kRotated / 2; ++i) {
        verify::set(table.view, static_cast<float>(std::cos(angle(p, i))), p, i);
        verify::set(table.view, static_cast<float>(std::sin(angle(p, i))), p, kRotated / 2 + i);
      }
    }
  }
  static double angle(int32_t position, int64_t i) {
    return position * std::pow(10000.0, -2.0 * static_cast<double>(i) / kRotated);
  }
  /// A.10, in fp64.
  static double rotated(const Tensor& x, const std::vector<int32_t>& positions, int64_t row, int64_t head, int64_t d,
                        RopePairing pairing) {
    if (d >= kRotated) return verify::get(x.view, row, head, d);
    const bool interleaved = pairing == RopePairing::kInterleaved;
    const int64_t i = interleaved ? d / 2 : d % (kRotated / 2);
    const bool first = interleaved ? d % 2 == 0 : d < kRotated / 2;
    const int64_t partner = interleaved ? d ^ 1 : (first ? d + kRotated / 2 : d - kRotated / 2);
    const double a = angle(positions[static_cast<size_t>(row)], i), own = verify::get(x.view, row, head, d),
                 other = verify::get(x.view, row, head, partner);
    return first ? own * std::cos(a) - other * std::sin(a) : other * std::sin(a) + own * std::cos(a);
  }
};

// Both pairings at the first positions and far out, queries of several heads and keys of one.
TEST(Faults, BL30_RotationOfIndexQueriesAndKeys) {
  const Rotated s({0, 1, 4095, 131071});
  const Tensor at = make_ints(s.positions);
  for (const RopePairing pairing : {RopePairing::kInterleaved, RopePairing::kHalfSplit}) {
    for (const Tensor* x : {&s.q, &s.k}) {
      Rope p;
      p.x = x->view;
      p.positions = at.view;
      p.cos_sin = s.table.view;
      p.pairing = pairing;
      for (const std::string& impl : takers(p)) {
        const std::vector<float> got = verify::run(p, {.impl = impl}).floats("x");
        size_t e = 0;
        for (int64_t row = 0; row < 4; ++row) {
          for (int64_t h = 0; h < x->view.shape[1]; ++h) {
            for (int64_t d = 0; d < 128; ++d, ++e)
              ASSERT_NEAR(got[e], Rotated::rotated(*x, s.positions, row, h, d, pairing), 1e-6 * (4 + std::fabs(got[e])))
                  << impl << " position " << s.positions[static_cast<size_t>(row)] << " value " << d;
          }
        }
      }
    }
  }
}

// A row that sees 2,500 keys, of which 2,048 are taken: each pairing gives the list of its own fp64 scores, and another
// one than the other pairing.
TEST(Faults, BL31_ThePairingDecidesTheSelection) {
  constexpr int32_t kLength = 2500;
  constexpr int64_t kTaken = 2048;
  std::vector<int32_t> all(kLength);
  for (int32_t t = 0; t < kLength; ++t) all[static_cast<size_t>(t)] = t;
  const Rotated s(all);
  const Tensor at = make_ints(s.positions), last = make_ints({kLength - 1});
  Tensor query = s.q;
  query.view = cut(s.q.view, kLength - 1, 1);
  std::vector<std::vector<int32_t>> lists;
  for (const RopePairing pairing : {RopePairing::kInterleaved, RopePairing::kHalfSplit}) {
    std::vector<double> scores(kLength, 0.0);
    for (int64_t h = 0; h < Rotated::kHeads; ++h) {
      std::vector<double> q(128);
      for (int64_t d = 0; d < 128; ++d)
        q[static_cast<size_t>(d)] = Rotated::rotated(s.q, s.positions, kLength - 1, h, d, pairing);
      for (int64_t t = 0; t < kLength; ++t) {
        double dot = 0.0;
        for (int64_t d = 0; d < 128; ++d)
          dot += q[static_cast<size_t>(d)] * Rotated::rotated(s.k, s.positions, t, 0, d, pairing);
        scores[static_cast<size_t>(t)] += (h == 1 ? -0.5 : 1.0) * std::max(dot, 0.0);
      }
    }
    std::vector<double> order = scores;
    std::sort(order.begin(), order.end());
    const double threshold = order[static_cast<size_t>(kLength - kTaken)];
    const Paged paged({.seq_lens = {kLength}});
    const verify::IndexPool pool = make_index_pool(paged, IndexKFormat::kF32, ScaleFormat::kFp32, 128, 1);
    std::vector<int32_t> slots;
    for (int32_t t = 0; t < kLength; ++t) slots.push_back(static_cast<int32_t>(paged.slot(0, t)));
    const Tensor list = make_ints(slots), weights = make_tensor(DType::kF32, {1, Rotated::kHeads});
    for (int64_t h = 0; h < Rotated::kHeads; ++h) verify::set(weights.view, h == 1 ? -0.5f : 1.0f, 0, h);
    const Tensor out = make_tensor(DType::kI32, {1, kTaken}), out_positions = make_tensor(DType::kI32, {1, kTaken}),
                 lens = make_tensor(DType::kI32, {1}), seq_lens = make_ints({kLength});
    Rope rope_q, rope_k;
    rope_q.x = query.view;
    rope_q.positions = last.view;
    rope_k.x = s.k.view;
    rope_k.positions = at.view;
    rope_q.cos_sin = rope_k.cos_sin = s.table.view;
    rope_q.pairing = rope_k.pairing = pairing;
    IndexSelect p;
    p.weights = weights.view;
    p.cache = pool.view;
    p.pages = paged.table();
    p.rows.seq_lens = seq_lens.view;
    p.max_seq_len = kLength;
    p.topk_slots = out.view;
    p.topk_lens = lens.view;
    p.topk_positions = out_positions.view;
    p.q = query.view;
    for (const std::string& impl : takers(p)) {
      std::vector<float> q = verify::run(rope_q, {.impl = impl}).floats("x"),
                         k = verify::run(rope_k, {.impl = impl}).floats("x");
      p.q = view(q.data(), {1, Rotated::kHeads, 128});
      IndexKWrite w{.k = view(k.data(), {kLength, 128}), .slots = list.view, .cache = pool.view};
      run_once(Context{}, w, {.impl = "ref"});
      const std::vector<int32_t> chosen = verify::run(p, {.impl = impl}).ints("topk_positions");
      for (const int32_t t : chosen)  // fp32 errors of scores of size 30
        ASSERT_GE(scores[static_cast<size_t>(t)], threshold - 1e-3) << impl << " position " << t;
      lists.push_back(chosen);
    }
  }
  EXPECT_NE(lists.front(), lists.back());
}

// Rows of a request behind others choose among their own keys alone, from position 0 (trap 6.2: bounds of rows and
// columns of scores that begin elsewhere).
TEST(Faults, T6_2_RowsBehindOtherRequests) {
  const verify::PagedSpec spec{.seq_lens = {20, 75, 85}, .ragged = {3, 6, 5}, .page_size = 16};
  for (const IndexerFormat& f : kIndexerFormats) {
    const IndexProblem s(spec, f, 3, 12);
    for (const std::string& impl : takers(s.select, to_string(f.cache))) {
      const verify::Outputs got = verify::run(s.select, {.impl = impl});
      const std::vector<int32_t> positions = got.ints("topk_positions"), slots = got.ints("topk_slots");
      const std::vector<float> scores = verify::run(s.scores, {.impl = impl}).floats("logits");
      const auto columns = static_cast<int64_t>(scores.size()) / s.paged.num_rows;
      for (int64_t r = 0; r < s.paged.num_rows; ++r) {
        const std::vector<int32_t> want =
            sorted_choice(scores.data() + r * columns, s.paged.keys_of_row[static_cast<size_t>(r)], 12);
        for (int64_t c = 0; c < 12; ++c) {
          ASSERT_EQ(positions[static_cast<size_t>(r * 12 + c)], want[static_cast<size_t>(c)]) << impl << " row " << r;
          ASSERT_EQ(slots[static_cast<size_t>(r * 12 + c)],
                    s.paged.slot(s.paged.request_of_row[static_cast<size_t>(r)], want[static_cast<size_t>(c)]));
        }
      }
    }
  }
}

// A list longer than the table reaches, one page of 16 (trap 6.40; spec 5.4.10).
TEST(Faults, T6_40_ListsLongerThanTheTableReaches) {
  verify::PagedSpec spec{.seq_lens = {10, 0, 16}, .page_size = 16};
  spec.spare_columns = 0;
  for (const IndexerFormat& f : kIndexerFormats) {
    const IndexProblem s(spec, f, 3, 2048);
    for (const std::string& impl : takers(s.select, to_string(f.cache))) {
      const verify::Outputs got = verify::run(s.select, {.impl = impl});
      EXPECT_EQ(got.ints("topk_lens"), (std::vector<int32_t>{10, 0, 16})) << impl;
      const std::vector<int32_t> positions = got.ints("topk_positions");
      for (int32_t c = 0; c < 2048; ++c) {
        ASSERT_EQ(positions[static_cast<size_t>(c)], c < 10 ? c : -1) << impl;
        ASSERT_EQ(positions[static_cast<size_t>(2048 + c)], -1) << impl;
        ASSERT_EQ(positions[static_cast<size_t>(4096 + c)], c < 16 ? c : -1) << impl;
      }
    }
  }
}

}  // namespace
