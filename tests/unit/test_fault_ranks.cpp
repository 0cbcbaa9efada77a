// Known faults of kind M: the keys of a request lie on several ranks (decode context parallel), here eight of them, and
// the results are merged.
#include <numeric>

#include "fault_problems.h"
#include "gannet/kv_transfer.h"
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

constexpr int32_t kRanks = 8;

/// Tokens are dealt out in runs of `interleave`: token t belongs to rank (t / interleave) % 8.
struct Deal {
  int32_t interleave;
  int32_t rank_of(int64_t t) const { return static_cast<int32_t>(t / interleave % kRanks); }
  /// Of the first n tokens those of a rank; also the place of token n on its rank.
  int32_t count(int32_t rank, int64_t n) const {
    const int64_t round = int64_t{interleave} * kRanks;
    return static_cast<int32_t>(n / round * interleave +
                                std::clamp<int64_t>(n % round - int64_t{rank} * interleave, 0, interleave));
  }
};

/// A problem whose pool also has the pages of eight ranks, each with its own tokens of every request, byte for byte.
struct Shards {
  Deal deal;
  Paged paged;  ///< with the pages of the ranks counted in
  std::vector<Tensor> tables;

  Shards(const PagedSpec& spec, int32_t interleave) : deal{interleave}, paged(spec) {
    const auto requests = static_cast<int64_t>(spec.seq_lens.size());
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      int64_t columns = 1;
      for (const int64_t n : paged.keys_of) columns = std::max(columns, pages_of(deal.count(rank, n)));
      tables.push_back(make_tensor(DType::kI32, {requests, columns}));
      for (int64_t i = 0; i < requests; ++i) {
        for (int64_t c = 0; c < columns; ++c) {
          const bool used = c < pages_of(deal.count(rank, paged.keys_of[static_cast<size_t>(i)]));
          *tables.back().view.ptr<int32_t>(i, c) = used ? static_cast<int32_t>(paged.num_pages++) : 0x7FFFFFFF;
        }
      }
    }
  }
  int64_t pages_of(int64_t tokens) const { return (tokens + paged.spec.page_size - 1) / paged.spec.page_size; }
  int32_t slot_on_rank(int64_t request, int64_t t) const {
    const int32_t rank = deal.rank_of(t), place = deal.count(rank, t);
    return *tables[static_cast<size_t>(rank)].view.ptr<int32_t>(request, place / paged.spec.page_size) *
               paged.spec.page_size +
           place % paged.spec.page_size;
  }
  void fill(const LatentCacheView& cache) const {
    std::vector<SlotMove> moves;
    for (size_t i = 0; i < paged.keys_of.size(); ++i) {
      for (int64_t t = 0; t < paged.keys_of[i]; ++t)
        moves.push_back(
            {static_cast<int32_t>(paged.slot(static_cast<int64_t>(i), t)), slot_on_rank(static_cast<int64_t>(i), t)});
    }
    const LayerCaches layer{.latent = cache, .index = {}};
    copy_slots(std::span(&layer, 1), moves);
  }
};

/// What a rank hands over, and the number of keys behind each row.
struct Part {
  std::vector<float> out, lse;
  std::vector<int32_t> keys;
};

/// Merges the parts in the order given, in place into the first of them.
Part merged(std::vector<Part> parts, const std::vector<int32_t>& order, int64_t heads, bool counted,
            const std::string& impl) {
  const auto rows = static_cast<int64_t>(parts[0].keys.size());
  const auto width = static_cast<int64_t>(parts[0].out.size()) / (rows * heads);
  Part sum = std::move(parts[static_cast<size_t>(order[0])]);
  for (size_t i = 1; i < order.size(); ++i) {
    Part& b = parts[static_cast<size_t>(order[i])];
    // Nothing of an empty side may be read: make it NaN, and where counts say what is empty its LSE a plain number.
    for (Part* p : {&sum, &b}) {
      for (int64_t r = 0; r < rows; ++r) {
        if (p->keys[static_cast<size_t>(r)] > 0) continue;
        for (int64_t x = r * heads * width; x < (r + 1) * heads * width; ++x) p->out[static_cast<size_t>(x)] = NAN;
        for (int64_t x = r * heads; x < (r + 1) * heads; ++x)
          p->lse[static_cast<size_t>(x)] = counted ? 0.0f : -INFINITY;
      }
    }
    MergeState m;
    m.out_a = view(sum.out.data(), {rows, heads, width});
    m.lse_a = view(sum.lse.data(), {rows, heads});
    m.out_b = view(b.out.data(), {rows, heads, width});
    m.lse_b = view(b.lse.data(), {rows, heads});
    if (counted) {
      m.count_a = view(sum.keys.data(), {rows});
      m.count_b = view(b.keys.data(), {rows});
    }
    const verify::Outputs got = verify::run(m, {.impl = or_neighbour(impl, m)});
    sum.out = got.floats("out_a");
    sum.lse = got.floats("lse_a");
    for (size_t r = 0; r < sum.keys.size(); ++r) sum.keys[r] += b.keys[r];
  }
  return sum;
}

void expect_one_rank(const verify::Outputs& one, const Part& sum, const AbsorbedFormat& f, const std::string& what,
                     const std::string& impl = {}) {
  const std::vector<float> want = one.floats("out"), want_lse = one.floats("lse");
  const size_t heads = want_lse.size() / sum.keys.size(), width = want.size() / want_lse.size();
  for (size_t line = 0; line < want_lse.size(); ++line) {
    const int32_t keys = sum.keys[line / heads];
    if (keys == 0) {
      EXPECT_EQ(want_lse[line], -INFINITY) << what;
      EXPECT_EQ(sum.lse[line], -INFINITY) << what;
      for (size_t d = line * width; d < (line + 1) * width; ++d) ASSERT_EQ(sum.out[d], 0.0f) << what;
      continue;
    }
    const verify::AttentionPrecision p = precision_of(f, keys, impl);
    double error = 0.0, norm = 0.0;
    for (size_t d = line * width; d < (line + 1) * width; ++d) {
      error += std::pow(static_cast<double>(sum.out[d]) - want[d], 2.0);
      norm += std::pow(static_cast<double>(want[d]), 2.0);
    }
    // Both sides are results of a kernel; an error of a part's LSE is one of its weight; each merge rounds once more.
    ASSERT_LE(std::sqrt(error / norm), 2.0 * verify::attention_tolerance(p) + verify::lse_tolerance(p, want_lse[line]) +
                                           16.0 * kRanks * verify::kUnitFp32)
        << what << " line " << line << " of " << keys << " keys";
    ASSERT_LE(
        std::fabs(static_cast<double>(sum.lse[line]) - want_lse[line]),
        2.0 * verify::lse_tolerance(p, want_lse[line]) + 4.0 * kRanks * verify::kUnitFp32 * std::fabs(want_lse[line]))
        << what << " line " << line;
  }
}

constexpr int64_t kHeads = 1;

/// One rank against eight, for every format: dense, and over lists each of which is on several ranks.
void expect_ranks_are_one(const PagedSpec& spec, int32_t interleave) {
  const Shards shards(spec, interleave);
  const auto rows = static_cast<size_t>(shards.paged.num_rows);
  std::vector<int32_t> forward(kRanks), other = {3, 6, 0, 7, 1, 5, 2, 4};
  std::iota(forward.begin(), forward.end(), 0);
  for (const AbsorbedFormat& f : kAbsorbedFormats) {
    if (kSanitized && f.q != DType::kBf16) continue;
    const std::string what = name_of(f) + ", interleave " + std::to_string(interleave) + ", page size " +
                             std::to_string(spec.page_size) + ", q_len " + std::to_string(spec.q_len);
    DecodeProblem d(spec, f, kHeads);
    d.paged = shards.paged;
    d.pool = make_latent_pool(d.paged, f.cache, 3);
    d.params.cache = d.pool.view;
    d.params.pages = d.paged.table();
    d.params.rows = d.paged.rows();
    shards.fill(d.pool.view);
    for (const std::string& impl : takers(d.params, what)) {
      std::vector<Part> parts;
      for (int32_t rank = 0; rank < kRanks; ++rank) {
        Part part;
        std::vector<int32_t> table_rows;
        for (size_t r = 0; r < rows; ++r) {
          part.keys.push_back(shards.deal.count(rank, shards.paged.keys_of_row[r]));
          table_rows.push_back(static_cast<int32_t>(shards.paged.request_of_row[r]));
        }
        const Tensor lens = make_ints(part.keys), index = make_ints(table_rows);
        MlaDecode p = d.params;
        p.pages = PageTableView::padded(shards.tables[static_cast<size_t>(rank)].view, index.view);
        p.rows = {};
        p.rows.seq_lens = lens.view;
        const verify::Outputs got = verify::run(p, {.impl = impl});
        ASSERT_EQ(got.fault, "");
        part.out = got.floats("out");
        part.lse = got.floats("lse");
        for (size_t r = 0; r < rows; ++r) {  // a rank without keys says so
          if (part.keys[r] > 0) continue;
          for (size_t h = 0; h < kHeads; ++h) ASSERT_EQ(part.lse[r * kHeads + h], -INFINITY) << impl << what;
          for (size_t x = r * kHeads * 512; x < (r + 1) * kHeads * 512; ++x)
            ASSERT_EQ(part.out[x], 0.0f) << impl << what;
        }
        parts.push_back(part);
      }
      const verify::Outputs one = verify::run(d.params, {.impl = impl});
      expect_one_rank(one, merged(parts, forward, kHeads, false, impl), f, impl + ", " + what, impl);
      if (f.q != DType::kF32) continue;  // the order of merges is no matter of formats
      expect_one_rank(one, merged(parts, other, kHeads, true, impl), f, impl + ", " + what);
    }
    // Lists: every third key that a row sees; a rank turns those of others into -1 where they stand.
    const SparseProblem lists(d, 64);
    std::vector<int32_t> lens;
    for (size_t r = 0; r < rows; ++r) {
      int32_t n = 0;
      for (int64_t t = 0; t < shards.paged.keys_of_row[r] && n < 64; t += 3)
        *lists.slots.view.ptr<int32_t>(static_cast<int64_t>(r), n++) =
            static_cast<int32_t>(shards.paged.slot(shards.paged.request_of_row[r], t));
      lens.push_back(n);
    }
    const Tensor list_lens = make_ints(lens);
    SparseAttention whole = lists.params;
    whole.topk_lens = list_lens.view;
    for (const std::string& impl : takers(whole, what)) {
      std::vector<Part> parts;
      for (int32_t rank = 0; rank < kRanks; ++rank) {
        Part part;
        const Tensor slots = make_tensor(DType::kI32, {shards.paged.num_rows, 64});
        for (size_t r = 0; r < rows; ++r) {
          int32_t mine = 0;
          for (int32_t c = 0; c < 64; ++c) {
            const bool here = c < lens[r] && shards.deal.rank_of(3 * c) == rank;
            *slots.view.ptr<int32_t>(static_cast<int64_t>(r), c) =
                here ? shards.slot_on_rank(shards.paged.request_of_row[r], 3 * c) : -1;
            mine += here ? 1 : 0;
          }
          part.keys.push_back(mine);
        }
        SparseAttention p = whole;
        p.topk_slots = slots.view;
        const verify::Outputs got = verify::run(p, {.impl = impl});
        part.out = got.floats("out");
        part.lse = got.floats("lse");
        for (size_t r = 0; r < rows; ++r) {
          if (part.keys[r] == 0) {
            ASSERT_EQ(part.lse[r * kHeads], -INFINITY) << impl << what;
          }
        }
        parts.push_back(part);
      }
      expect_one_rank(verify::run(whole, {.impl = impl}), merged(parts, forward, kHeads, true, impl), f,
                      impl + " lists, " + what);
    }
  }
}

// Short requests leave ranks without keys.
TEST(Faults, BL36_ShortRequestsOnEightRanks) {
  std::vector<int32_t> lens(17);
  std::iota(lens.begin(), lens.end(), 1);
  for (const int32_t q_len : {1, 4}) {
    expect_ranks_are_one({.seq_lens = lens, .q_len = q_len, .page_size = 8}, 1);
    expect_ranks_are_one({.seq_lens = lens, .q_len = q_len, .page_size = 4}, 2);
  }
}

// Longer ones, in runs below, of and above a page.
TEST(Faults, BL36_LongRequestsOnEightRanks) {
  for (const auto& [page_size, interleave] : {std::pair{64, 1}, {64, 64}, {16, 48}, {1, 4}, {32, 256}})
    expect_ranks_are_one({.seq_lens = {300, 0, 515, 64}, .q_len = 2, .page_size = page_size}, interleave);
}

// Chunks of prefixes that every rank can share out: a multiple of whole pages and of whole rounds of all ranks, for any
// number of prefills, and every token once.
TEST(Faults, BL37_ChunksOfRanksAndPages) {
  struct Shape {
    int64_t capacity, page, interleave;
  };
  for (const Shape& s : {Shape{65536, 64, 64}, {65536, 64, 1}, {65536, 16, 3}, {9362, 64, 1}, {100, 64, 64}}) {
    const int64_t unit = std::lcm(s.page, kRanks * s.interleave);
    for (const int32_t prefills : {1, 3, 7, 1025}) {
      std::vector<int32_t> prefixes;
      for (int32_t i = 0; i < prefills; ++i) prefixes.push_back(i % 3 == 0 ? 5000 : i % 7 * 100);
      PrefixChunkPlan plan;
      plan_prefix_chunks(prefixes, s.capacity, unit, plan);
      ASSERT_GT(plan.chunk_len, 0);
      ASSERT_EQ(plan.chunk_len % unit, 0) << prefills << " prefills";
      EXPECT_LE(plan.max_tokens, std::max(s.capacity, unit));
      const Deal deal{static_cast<int32_t>(s.interleave)};
      std::vector<int32_t> covered(prefixes.size(), 0);
      std::vector<int64_t> at(static_cast<size_t>(prefills) * kRanks, 0);  // tokens of a request that a rank has given
      for (size_t i = 0; i < plan.chunks.size(); ++i) {
        const auto cu = plan.cu_kv_lens(i);
        for (size_t r = 0; r < prefixes.size(); ++r) {
          const int32_t len = cu[r + 1] - cu[r];
          if (len == 0) continue;
          ASSERT_EQ(plan.chunks[i].begin, covered[r]);
          for (int32_t rank = 0; rank < kRanks; ++rank) {
            // On each rank the chunk is one run of its own tokens, which begins where the chunk before ended.
            const int32_t first = deal.count(rank, plan.chunks[i].begin);
            ASSERT_EQ(first, at[r * kRanks + static_cast<size_t>(rank)]);
            ASSERT_EQ(first, plan.chunks[i].begin / kRanks) << "all ranks begin at the same place";
            at[r * kRanks + static_cast<size_t>(rank)] = deal.count(rank, plan.chunks[i].begin + len);
          }
          covered[r] += len;
        }
      }
      EXPECT_EQ(covered, prefixes);
    }
  }
}

// Attention over such chunks: each rank over its own tokens of each chunk, everything merged, is one pass.
TEST(Faults, BL37_ChunkedPrefillOnEightRanks) {
  const std::vector<int32_t> prefixes = {130, 0, 5, 64, 33}, fresh = {3, 2, 1, 2, 4};
  constexpr int64_t kWidth = 96, kValue = 64;
  for (const DType dtype : {DType::kBf16, DType::kF32}) {
    for (const auto& [page, interleave] : {std::pair{4, 1}, {4, 2}, {16, 4}}) {
      std::vector<int32_t> cu_q = {0}, cu_kv = {0};
      for (size_t i = 0; i < prefixes.size(); ++i) {
        cu_q.push_back(cu_q.back() + fresh[i]);
        cu_kv.push_back(cu_kv.back() + prefixes[i] + fresh[i]);
      }
      const int64_t rows = cu_q.back(), tokens = cu_kv.back();
      const Tensor q = make_tensor(dtype, {rows, kHeads, kWidth}), k = make_tensor(dtype, {tokens, kHeads, kWidth}),
                   v = make_tensor(dtype, {tokens, kHeads, kValue}),
                   out = make_tensor(DType::kF32, {rows, kHeads, kValue}),
                   lse = make_tensor(DType::kF32, {rows, kHeads}), q_lens = make_ints(cu_q), kv_lens = make_ints(cu_kv);
      fill_normal(q, Rng(1));
      fill_normal(k, Rng(2));
      fill_normal(v, Rng(3));
      RaggedPrefill whole;
      whole.q = q.view;
      whole.k = k.view;
      whole.v = v.view;
      whole.cu_q_lens = q_lens.view;
      whole.cu_kv_lens = kv_lens.view;
      whole.out = out.view;
      whole.lse = lse.view;
      whole.softmax_scale = static_cast<float>(kScoreDeviation / std::sqrt(static_cast<double>(kWidth)));
      PrefixChunkPlan plan;
      plan_prefix_chunks(prefixes, 160, std::lcm(page, kRanks * interleave), plan);
      ASSERT_GT(plan.chunks.size(), 1u);
      const Deal deal{interleave};
      for (const std::string& impl : takers(whole, to_string(dtype))) {
        // Tokens of each request that `takes(request, token)` names.
        const auto pass = [&](auto&& takes, bool causal) {
          std::vector<int32_t> cu = {0}, source;
          Part part;
          for (size_t i = 0; i < prefixes.size(); ++i) {
            for (int32_t t = 0; t < prefixes[i] + fresh[i]; ++t)
              if (takes(i, t)) source.push_back(cu_kv[i] + t);
            const auto n = static_cast<int32_t>(source.size()) - cu.back();
            for (int32_t a = 0; a < fresh[i]; ++a) part.keys.push_back(causal ? a + 1 : n);
            cu.push_back(static_cast<int32_t>(source.size()));
          }
          const auto total = static_cast<int64_t>(source.size());
          const Tensor ck = make_tensor(dtype, {total, kHeads, kWidth}),
                       cv = make_tensor(dtype, {total, kHeads, kValue}), lens = make_ints(cu);
          for (int64_t t = 0; t < total; ++t) {
            const int64_t from = source[static_cast<size_t>(t)];
            std::memcpy(cut(ck.view, t, 1).data, cut(k.view, from, 1).data,
                        static_cast<size_t>(kHeads * kWidth) * size_of(dtype));
            std::memcpy(cut(cv.view, t, 1).data, cut(v.view, from, 1).data,
                        static_cast<size_t>(kHeads * kValue) * size_of(dtype));
          }
          RaggedPrefill p = whole;
          p.k = ck.view;
          p.v = cv.view;
          p.cu_kv_lens = lens.view;
          p.causal = causal;
          const verify::Outputs got = verify::run(p, {.impl = impl});
          part.out = got.floats("out");
          part.lse = got.floats("lse");
          return part;
        };
        std::vector<Part> parts = {pass([&](size_t i, int32_t t) { return t >= prefixes[i]; }, true)};
        for (const PrefixChunk& c : plan.chunks) {
          for (int32_t rank = 0; rank < kRanks; ++rank)
            parts.push_back(pass(
                [&](size_t i, int32_t t) {
                  return t < prefixes[i] && t >= c.begin && t < c.begin + plan.chunk_len &&
                         static_cast<int32_t>(i) >= c.first_request &&
                         static_cast<int32_t>(i) < c.first_request + c.num_requests && deal.rank_of(t) == rank;
                },
                false));
        }
        std::vector<int32_t> order(parts.size());
        std::iota(order.begin(), order.end(), 0);
        const Part sum = merged(parts, order, kHeads, true, impl);
        for (size_t i = 0; i < prefixes.size(); ++i) {
          for (int32_t a = 0; a < fresh[i]; ++a)
            ASSERT_EQ(sum.keys[static_cast<size_t>(cu_q[i] + a)], prefixes[i] + a + 1) << "every key once";
        }
        const AbsorbedFormat precision{dtype, dtype == DType::kF32 ? LatentFormat::kF32 : LatentFormat::kBf16};
        expect_one_rank(verify::run(whole, {.impl = impl}), sum, precision, impl);
      }
    }
  }
}

}  // namespace
