// Modes and prefix chunks.
#include <gtest/gtest.h>

#include <limits>

#include "gannet/error.h"
#include "gannet/step.h"

namespace {

using namespace gannet;
using Ints = std::vector<int32_t>;

TEST(StepMode, FollowsFromTheCounts) {
  EXPECT_EQ(step_mode(0, 0), StepMode::kIdle);
  EXPECT_EQ(step_mode(0, 3), StepMode::kDecode);
  EXPECT_EQ(step_mode(1, 3), StepMode::kMixed);
  EXPECT_EQ(step_mode(3, 3), StepMode::kExtend);
  EXPECT_THROW((void)step_mode(4, 3), Error);
  EXPECT_THROW((void)step_mode(-1, 3), Error);
  EXPECT_THROW((void)step_mode(1, 0), Error);
  EXPECT_TRUE(is_extend_or_mixed(StepMode::kMixed) && is_extend_or_mixed(StepMode::kExtend));
  EXPECT_FALSE(is_extend(StepMode::kMixed) || is_mixed(StepMode::kExtend) || is_decode(StepMode::kIdle));
  EXPECT_TRUE(is_decode_or_idle(StepMode::kIdle) && is_decode_or_idle(StepMode::kDecode));
}

std::vector<Ints> lens_of(const PrefixChunkPlan& p) {
  std::vector<Ints> all;
  for (size_t i = 0; i < p.chunks.size(); ++i) {
    const auto cu = p.cu_kv_lens(i);
    Ints lens;
    for (size_t r = 0; r + 1 < cu.size(); ++r) lens.push_back(cu[r + 1] - cu[r]);
    all.push_back(lens);
  }
  return all;
}

PrefixChunkPlan plan_of(const Ints& prefixes, int64_t capacity, int64_t unit) {
  PrefixChunkPlan p;
  plan_prefix_chunks(prefixes, capacity, unit, p);
  return p;
}

// The example of spec 2.5, which keeps the plain floor: unit 1.
TEST(PrefixChunks, ExampleOfTheContract) {
  const PrefixChunkPlan p = plan_of({5000, 0, 9000}, 12000, 1);
  EXPECT_EQ(p.chunk_len, 4000);
  EXPECT_EQ(p.num_loops, 3);
  EXPECT_EQ(lens_of(p), (std::vector<Ints>{{4000, 0, 4000}, {1000, 0, 4000}, {0, 0, 1000}}));
  EXPECT_EQ(p.chunks[1].max_len, 4000);
  EXPECT_EQ(p.chunks[1].begin, 4000);
  EXPECT_EQ(p.max_tokens, 8000);
}

TEST(PrefixChunks, AreWholePages) {
  const PrefixChunkPlan p = plan_of({5000, 0, 9000}, 12000, 64);
  EXPECT_EQ(p.chunk_len, 3968);  // 62 pages
  EXPECT_EQ(lens_of(p), (std::vector<Ints>{{3968, 0, 3968}, {1032, 0, 3968}, {0, 0, 1064}}));
}

// spec appendix B
TEST(PrefixChunks, MiniBatch) {
  const PrefixChunkPlan p = plan_of({0, 130}, 128, 64);
  EXPECT_EQ(p.chunk_len, 64);
  EXPECT_EQ(lens_of(p), (std::vector<Ints>{{0, 64}, {0, 64}, {0, 2}}));
  EXPECT_EQ(Ints(p.cu_kv_lens(2).begin(), p.cu_kv_lens(2).end()), (Ints{0, 0, 2}));
  EXPECT_EQ(p.chunks[2].max_len, 2);
}

TEST(PrefixChunks, NoPrefixNoChunk) {
  EXPECT_TRUE(plan_of({0, 0}, 128, 64).chunks.empty());
  EXPECT_EQ(plan_of({0, 0}, 128, 64).num_loops, 0);
  EXPECT_TRUE(plan_of({}, 128, 64).chunks.empty());
}

// The reference divides by zero where there are more requests than tokens of capacity (spec 6.37).
TEST(PrefixChunks, TakeSubsetsOfManyRequests) {
  const PrefixChunkPlan p = plan_of({70, 1, 64, 0, 65}, 128, 64);
  EXPECT_EQ(p.chunk_len, 64);
  EXPECT_EQ(p.requests_per_chunk, 2);
  EXPECT_EQ(lens_of(p), (std::vector<Ints>{
                            {64, 1, 0, 0, 0}, {0, 0, 64, 0, 0}, {0, 0, 0, 0, 64}, {6, 0, 0, 0, 0}, {0, 0, 0, 0, 1}}));
  EXPECT_EQ(p.chunks[4].first_request, 4);
  EXPECT_EQ(p.chunks[4].num_requests, 1);
  EXPECT_EQ(p.chunks[4].begin, 64);
  EXPECT_LE(p.max_tokens, 128);
  EXPECT_EQ(plan_of({3, 3, 3}, 1, 2).requests_per_chunk, 1);  // never less than one unit of one request
}

TEST(PrefixChunks, CoverEveryTokenOnce) {
  uint32_t state = 7;
  const auto next = [&](uint32_t n) { return state = state * 1664525u + 1013904223u, (state >> 8) % n; };
  for (int i = 0; i < 2000; ++i) {
    Ints prefixes(next(9));
    for (int32_t& p : prefixes) p = static_cast<int32_t>(next(3) == 0 ? 0 : next(300));
    const int64_t unit = 1 + next(80);
    const int64_t capacity = 1 + next(500);
    const PrefixChunkPlan p = plan_of(prefixes, capacity, unit);
    Ints covered(prefixes.size(), 0);
    for (size_t c = 0; c < p.chunks.size(); ++c) {
      const auto cu = p.cu_kv_lens(c);
      ASSERT_EQ(cu.back(), p.chunks[c].num_tokens);
      ASSERT_GT(cu.back(), 0);
      ASSERT_LE(cu.back(), std::max(capacity, unit));
      for (size_t r = 0; r < prefixes.size(); ++r) {
        const int32_t len = cu[r + 1] - cu[r];
        ASSERT_LE(len, p.chunks[c].max_len);
        if (len == 0) continue;
        ASSERT_EQ(covered[r], p.chunks[c].begin);  // the parts follow one another
        ASSERT_GE(static_cast<int64_t>(r), p.chunks[c].first_request);
        ASSERT_LT(static_cast<int64_t>(r), p.chunks[c].first_request + p.chunks[c].num_requests);
        covered[r] += len;
      }
    }
    ASSERT_EQ(covered, prefixes);
  }
}

TEST(PrefixChunks, RefuseNonsense) {
  EXPECT_THROW(plan_of({1}, 0, 64), Error);
  EXPECT_THROW(plan_of({1}, 64, 0), Error);
  EXPECT_THROW(plan_of({-1}, 64, 64), Error);
  constexpr int32_t kMost = std::numeric_limits<int32_t>::max();
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  EXPECT_THROW(plan_of({kMost}, 1, 1), Error);             // 2^31 chunks
  EXPECT_THROW(plan_of({kMost, kMost}, kHuge, 1), Error);  // a chunk of 2^32 tokens
  EXPECT_EQ(lens_of(plan_of({kMost}, kHuge, kHuge)), (std::vector<Ints>{{kMost}}));
}

}  // namespace
