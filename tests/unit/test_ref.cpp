// The oracle against values worked out by hand: it judges everything else, so it is judged by nothing else.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "verify/problem.h"

namespace {

using namespace gannet;
using gannet::verify::make_ints;
using gannet::verify::make_tensor;
using gannet::verify::Tensor;

constexpr float kInf = std::numeric_limits<float>::infinity();
const Context kContext{};
const PlanOptions kRef{.impl = "ref"};

Tensor zeros(std::initializer_list<int64_t> shape) {
  Tensor t = make_tensor(DType::kF32, shape);
  std::memset(t.buffer->data(), 0, t.buffer->size());
  return t;
}

/// An fp32 latent pool of `pages` pages of 2 tokens, width 16 + 16.
struct SmallPool {
  std::vector<float> memory;
  LatentCacheView view;
  explicit SmallPool(int64_t pages) : memory(static_cast<size_t>(pages) * 2 * 32, NAN) {
    view.data = memory.data();
    view.format = LatentFormat::kF32;
    view.geometry = {16, 16};
    view.num_pages = pages;
    view.page_size = 2;
    view.page_stride_bytes = 2 * 32 * 4;
  }
  float* row(int64_t slot) { return memory.data() + slot * 32; }
  void key(int64_t slot, float score, float value) {  // q = e16 reads the score from the rope part
    for (int64_t d = 0; d < 32; ++d) row(slot)[d] = 0.0f;
    row(slot)[0] = value;
    row(slot)[16] = score;
  }
};

TEST(Ref, DecodeOfTwoKeysIsTheirWeightedMean) {
  SmallPool pool(4);
  pool.key(3 * 2 + 0, std::log(3.0f), 5.0f);  // position 0: page 3
  pool.key(3 * 2 + 1, 0.0f, 1.0f);            // position 1
  pool.key(1 * 2 + 0, 100.0f, 777.0f);        // position 2, page 1: beyond the first row
  const Tensor q = zeros({2, 1, 32});
  verify::set(q.view, 2.0f, 0, 0, 16);
  verify::set(q.view, 2.0f, 1, 0, 16);
  const Tensor table = make_tensor(DType::kI32, {1, 3});
  table.view.ptr<int32_t>()[0] = 3;
  table.view.ptr<int32_t>()[1] = 1;
  table.view.ptr<int32_t>()[2] = 99;  // never used
  const Tensor lens = make_ints({3});
  const Tensor out = make_tensor(DType::kF32, {2, 1, 16});
  const Tensor lse = make_tensor(DType::kF32, {2, 1});
  MlaDecode p;
  p.q = q.view;
  p.cache = pool.view;
  p.pages = PageTableView::padded(table.view);
  p.rows = {.seq_lens = lens.view, .q_len = 2, .cu_q_lens = {}, .bound = RowBound::kCausalFull};
  p.out = out.view;
  p.lse = lse.view;
  p.softmax_scale = 0.5f;
  run_once(kContext, p, kRef);
  // Row 0 sees two keys with weights 3 : 1.
  EXPECT_FLOAT_EQ(verify::get(out.view, 0, 0, 0), (3.0f * 5.0f + 1.0f) / 4.0f);
  EXPECT_FLOAT_EQ(verify::get(lse.view, 0, 0), std::log(4.0f));
  EXPECT_EQ(verify::get(out.view, 0, 0, 1), 0.0f);
  // Row 1 sees the third as well, whose score drowns the others. The LSE is the natural logarithm.
  EXPECT_FLOAT_EQ(verify::get(out.view, 1, 0, 0), 777.0f);
  EXPECT_FLOAT_EQ(verify::get(lse.view, 1, 0), 100.0f);
}

TEST(Ref, RowBoundsAreThoseOfTheContract) {
  // Verify metadata of spec 5.3: lengths [64, 128], two rows each; and the three meanings of appendix A.1.
  EXPECT_EQ(row_bound(RowBound::kCausalFull, 64, 2, 0), 63);
  EXPECT_EQ(row_bound(RowBound::kCausalFull, 64, 2, 1), 64);
  EXPECT_EQ(row_bound(RowBound::kCausalFull, 2, 4, 0), 0);
  EXPECT_EQ(row_bound(RowBound::kCausalFromFirst, 64, 2, 1), 65);
  EXPECT_EQ(row_bound(RowBound::kUniformBlock, 11, 4, 0), 11);
  for (const RowBound b : {RowBound::kCausalFull, RowBound::kCausalFromFirst, RowBound::kUniformBlock})
    EXPECT_EQ(row_bound(b, 0, 4, 3), 0);

  // The oracle counts the same keys: equal scores, so that lse = ln(keys).
  for (const RowBound b : {RowBound::kCausalFull, RowBound::kCausalFromFirst, RowBound::kUniformBlock}) {
    SmallPool pool(6);
    for (int64_t slot = 0; slot < 12; ++slot) pool.key(slot, 0.0f, 1.0f);
    const Tensor q = zeros({5, 1, 32});
    const Tensor table = make_tensor(DType::kI32, {2, 3});
    for (int i = 0; i < 6; ++i) table.view.ptr<int32_t>()[i] = i;
    const Tensor lens = make_ints({5, 0});
    const Tensor cu = make_ints({0, 3, 5});
    const Tensor out = make_tensor(DType::kF32, {5, 1, 16});
    const Tensor lse = make_tensor(DType::kF32, {5, 1});
    MlaDecode p;
    p.q = q.view;
    p.cache = pool.view;
    p.pages = PageTableView::padded(table.view);
    p.rows = {.seq_lens = lens.view, .q_len = 1, .cu_q_lens = cu.view, .bound = b};
    p.out = out.view;
    p.lse = lse.view;
    p.softmax_scale = 1.0f;
    run_once(kContext, p, kRef);
    // From the first row the table's reach of 6 ends the third row's 7.
    const std::vector<float> want = b == RowBound::kCausalFull        ? std::vector<float>{3, 4, 5}
                                    : b == RowBound::kCausalFromFirst ? std::vector<float>{5, 6, 6}
                                                                      : std::vector<float>{5, 5, 5};
    for (int64_t row = 0; row < 3; ++row)
      EXPECT_FLOAT_EQ(verify::get(lse.view, row, 0), std::log(want[static_cast<size_t>(row)])) << to_string(b) << row;
    for (int64_t row = 3; row < 5; ++row) {
      EXPECT_EQ(verify::get(lse.view, row, 0), -kInf);
      EXPECT_EQ(verify::get(out.view, row, 0, 0), 0.0f);
    }
  }
}

TEST(Ref, SparseListsCountValidEntriesOnly) {
  SmallPool pool(2);
  for (int64_t slot = 0; slot < 4; ++slot) pool.key(slot, 0.0f, static_cast<float>(slot));
  const Tensor q = zeros({3, 1, 32});
  const Tensor slots = make_tensor(DType::kI32, {3, 4});
  const int32_t lists[3][4] = {{3, -1, 4, 1}, {2, 0, 1, 3}, {-1, 4, 0x7FFFFFFF, -5}};
  std::memcpy(slots.view.data, lists, sizeof lists);
  const Tensor lens = make_ints({4, 1, 4});
  const Tensor out = make_tensor(DType::kF32, {3, 1, 16});
  const Tensor lse = make_tensor(DType::kF32, {3, 1});
  SparseAttention p;
  p.q = q.view;
  p.cache = pool.view;
  p.topk_slots = slots.view;
  p.topk_lens = lens.view;
  p.out = out.view;
  p.lse = lse.view;
  p.softmax_scale = 1.0f;
  run_once(kContext, p, kRef);
  EXPECT_FLOAT_EQ(verify::get(out.view, 0, 0, 0), 2.0f);
  EXPECT_FLOAT_EQ(verify::get(lse.view, 0, 0), std::log(2.0f));
  EXPECT_FLOAT_EQ(verify::get(out.view, 1, 0, 0), 2.0f);
  EXPECT_EQ(verify::get(out.view, 2, 0, 0), 0.0f);
  EXPECT_EQ(verify::get(lse.view, 2, 0), -kInf);
}

TEST(Ref, PrefillIsAlignedAtTheLowerRight) {
  // 8 queries, 5 keys (known fault BL-04): rows 0 to 2 see nothing, row 3 equals the first value exactly.
  const Tensor q = zeros({8, 1, 16});
  const Tensor k = zeros({5, 1, 16});
  const Tensor v = zeros({5, 1, 16});
  for (int64_t b = 0; b < 5; ++b) verify::set(v.view, static_cast<float>(b + 1), b, 0, 2);
  const Tensor cu_q = make_ints({0, 8});
  const Tensor cu_kv = make_ints({0, 5});
  const Tensor out = make_tensor(DType::kF32, {8, 1, 16});
  const Tensor lse = make_tensor(DType::kF32, {8, 1});
  RaggedPrefill p;
  p.q = q.view;
  p.k = k.view;
  p.v = v.view;
  p.cu_q_lens = cu_q.view;
  p.cu_kv_lens = cu_kv.view;
  p.out = out.view;
  p.lse = lse.view;
  p.softmax_scale = 1.0f;
  run_once(kContext, p, kRef);
  for (int64_t row = 0; row < 3; ++row) {
    EXPECT_EQ(verify::get(out.view, row, 0, 2), 0.0f);
    EXPECT_EQ(verify::get(lse.view, row, 0), -kInf);
  }
  for (int64_t row = 3; row < 8; ++row) {
    const auto n = static_cast<float>(row - 2);
    EXPECT_FLOAT_EQ(verify::get(out.view, row, 0, 2), (n + 1) / 2);  // the mean of 1 .. n
    EXPECT_FLOAT_EQ(verify::get(lse.view, row, 0), std::log(n));
  }
}

TEST(Ref, MergeWeighsByTheSumsBehindTheLse) {
  for (const LseBase base : {LseBase::kNatural, LseBase::kTwo}) {
    const auto log = [&](float x) { return base == LseBase::kNatural ? std::log(x) : std::log2(x); };
    const Tensor a = zeros({1, 1, 4});
    const Tensor b = zeros({1, 1, 4});
    verify::set(a.view, 1.0f, 0, 0, 0);
    verify::set(b.view, 5.0f, 0, 0, 0);
    const Tensor la = make_tensor(DType::kF32, {1, 1});
    const Tensor lb = make_tensor(DType::kF32, {1, 1});
    verify::set(la.view, log(3.0f), 0, 0);
    verify::set(lb.view, log(1.0f), 0, 0);
    MergeState p;
    p.out_a = a.view;
    p.lse_a = la.view;
    p.out_b = b.view;
    p.lse_b = lb.view;
    p.base = base;
    run_once(kContext, p, kRef);
    EXPECT_FLOAT_EQ(verify::get(a.view, 0, 0, 0), 2.0f);
    EXPECT_FLOAT_EQ(verify::get(la.view, 0, 0), log(4.0f));
  }
}

TEST(Ref, IndexScoresClipEachHeadBeforeTheWeight) {
  std::vector<float> keys(2 * 16, 0.0f);
  keys[0] = 1.0f;
  keys[16] = -2.0f;
  IndexCacheView cache;
  cache.data = keys.data();
  cache.format = IndexKFormat::kF32;
  cache.head_dim = 16;
  cache.num_pages = 1;
  cache.page_size = 2;
  cache.page_stride_bytes = 2 * 16 * 4;
  const Tensor q = zeros({1, 3, 16});
  verify::set(q.view, 3.0f, 0, 0, 0);   // scores 3 and clipped
  verify::set(q.view, -1.0f, 0, 1, 0);  // clipped and 2
  verify::set(q.view, 1.0f, 0, 2, 0);   // 1 and clipped
  const Tensor weights = make_tensor(DType::kF32, {1, 3});
  verify::set(weights.view, 10.0f, 0, 0);
  verify::set(weights.view, -0.5f, 0, 1);
  verify::set(weights.view, 1.0f, 0, 2);
  const Tensor table = make_ints({0});
  TensorView pages = view(table.view.ptr<int32_t>(), {1, 1});
  const Tensor lens = make_ints({2});
  const Tensor logits = make_tensor(DType::kF32, {1, 3});
  verify::set(logits.view, 42.0f, 0, 2);
  IndexLogits p;
  p.q = q.view;
  p.weights = weights.view;
  p.cache = cache;
  p.pages = PageTableView::padded(pages);
  p.rows = {.seq_lens = lens.view, .q_len = 1, .cu_q_lens = {}, .bound = RowBound::kCausalFull};
  p.logits = logits.view;
  run_once(kContext, p, kRef);
  EXPECT_EQ(verify::get(logits.view, 0, 0), 31.0f);
  EXPECT_EQ(verify::get(logits.view, 0, 1), -1.0f);
  EXPECT_EQ(verify::get(logits.view, 0, 2), 42.0f);  // a column that the row does not see
}

TEST(Ref, TopKOrdersNanLastAndSmallerPositionsFirst) {
  std::vector<float> scores = {NAN, 1.0f, -kInf, 1.0f, 0.0f, -0.0f, kInf, 1.0f};
  const auto choose = [&](int32_t n, int64_t k) {
    const Tensor lens = make_ints({n});
    const Tensor positions = make_tensor(DType::kI32, {1, k});
    const Tensor counts = make_ints({-9});
    TopK p;
    p.logits = view(scores.data(), {1, 8});
    p.lens = lens.view;
    p.positions = positions.view;
    p.counts = counts.view;
    run_once(kContext, p, kRef);
    const auto* x = positions.view.ptr<int32_t>();
    std::vector<int32_t> result(x, x + k);
    result.push_back(*counts.view.ptr<int32_t>());
    return result;
  };
  using Ints = std::vector<int32_t>;
  EXPECT_EQ(choose(8, 1), (Ints{6, 1}));
  EXPECT_EQ(choose(8, 3), (Ints{1, 3, 6, 3}));
  EXPECT_EQ(choose(8, 5), (Ints{1, 3, 4, 6, 7, 5}));        // 0 and -0 are equal: position 4
  EXPECT_EQ(choose(8, 7), (Ints{1, 2, 3, 4, 5, 6, 7, 7}));  // the NaN is the one left out
  EXPECT_EQ(choose(3, 2), (Ints{1, 2, 2}));
  EXPECT_EQ(choose(2, 4), (Ints{0, 1, -1, -1, 2}));  // no look at the scores
  EXPECT_EQ(choose(-1, 2), (Ints{-1, -1, 0}));
}

TEST(Ref, PackedRowsHoldWhatTheLayoutSays) {
  std::vector<std::byte> memory(2 * 656, std::byte{0xFF});
  LatentCacheView cache;
  cache.data = memory.data();
  cache.format = LatentFormat::kPacked656;
  cache.num_pages = 1;
  cache.page_size = 2;
  cache.page_stride_bytes = 2 * 656;
  ASSERT_EQ(latent_row_bytes(cache.format, cache.geometry), 656);
  const Tensor latent = zeros({1, 512});
  const Tensor rope = zeros({1, 64});
  verify::set(latent.view, 448.0f, 0, 0);  // group 0: scale 1
  verify::set(latent.view, -1.5f, 0, 1);
  verify::set(latent.view, 449.0f, 0, 128);  // group 1: just above, scale 2
  verify::set(latent.view, 1e-6f, 0, 256);   // group 2: the floor, 2^-13 >= 1e-4
  verify::set(rope.view, 3.25f, 0, 63);
  const Tensor slots = make_ints({1});
  LatentWrite p;
  p.latent = latent.view;
  p.rope = rope.view;
  p.slots = slots.view;
  p.cache = cache;
  run_once(kContext, p, kRef);
  const std::byte* row = memory.data() + 656;
  EXPECT_EQ(row[0], std::byte{0x7E});  // 448
  EXPECT_EQ(row[1], std::byte{0xBC});  // -1.5
  EXPECT_EQ(row[128], std::byte{E4m3::from_float(224.5f).bits});
  float scales[4];
  std::memcpy(scales, row + 512, sizeof scales);
  EXPECT_EQ(scales[0], 1.0f);
  EXPECT_EQ(scales[1], 2.0f);
  EXPECT_EQ(scales[2], 0x1p-13f);
  EXPECT_EQ(scales[3], 0x1p-13f);
  Bf16 last;
  std::memcpy(&last, row + 512 + 16 + 63 * 2, 2);
  EXPECT_EQ(last.to_float(), 3.25f);
  for (size_t i = 0; i < 656; ++i) ASSERT_EQ(memory[i], std::byte{0xFF}) << "slot 0 was written at " << i;
}

TEST(Ref, PerTokenRowsHoldWhatTheLayoutSays) {
  constexpr int32_t kPage = 4;
  std::vector<std::byte> memory(2 * kPage * 644, std::byte{0xFF});
  LatentCacheView cache;
  cache.data = memory.data();
  cache.format = LatentFormat::kE4m3PerToken;
  cache.num_pages = 2;
  cache.page_size = kPage;
  cache.page_stride_bytes = kPage * 644;
  const Tensor latent = zeros({1, 512});
  const Tensor rope = zeros({1, 64});
  verify::set(latent.view, -896.0f, 0, 511);  // scale 2
  verify::set(rope.view, 5.0f, 0, 1);
  const Tensor slots = make_ints({kPage + 3});
  LatentWrite p;
  p.latent = latent.view;
  p.rope = rope.view;
  p.slots = slots.view;
  p.cache = cache;
  run_once(kContext, p, kRef);
  const std::byte* page = memory.data() + kPage * 644;
  EXPECT_EQ(page[3 * 512 + 511], std::byte{0xFE});
  float scale;
  std::memcpy(&scale, page + kPage * 512 + 3 * 4, 4);
  EXPECT_EQ(scale, 2.0f);
  Bf16 x;
  std::memcpy(&x, page + kPage * 516 + 3 * 128 + 2, 2);
  EXPECT_EQ(x.to_float(), 2.5f);  // the rope is stored divided by the scale too
}

TEST(Ref, IndexKeyPagesArePlanar) {
  // Spec 3.3: page of 64 tokens, 8448 bytes: values first, scales from byte 8192 (known fault BL-14).
  std::vector<std::byte> memory(2 * 8448, std::byte{0xFF});
  IndexCacheView cache;
  cache.data = memory.data();
  cache.num_pages = 2;
  cache.page_stride_bytes = 8448;
  for (const ScaleFormat format : {ScaleFormat::kFp32, ScaleFormat::kPowerOfTwo}) {
    cache.scale_format = format;
    const Tensor k = zeros({3, 128});
    verify::set(k.view, 896.0f, 0, 0);
    verify::set(k.view, 3.0f, 1, 127);
    const Tensor slots = make_ints({64, 65, 127});
    IndexKWrite p;
    p.k = k.view;
    p.slots = slots.view;
    p.cache = cache;
    run_once(kContext, p, kRef);
    const std::byte* page = memory.data() + 8448;
    float scales[64];
    std::memcpy(scales, page + 8192, sizeof scales);
    EXPECT_EQ(page[0], std::byte{0x7E});
    EXPECT_EQ(scales[0], 2.0f);
    if (format == ScaleFormat::kFp32) {
      EXPECT_EQ(scales[1], 3.0f / 448.0f);
      EXPECT_EQ(page[128 + 127], std::byte{0x7E});
      EXPECT_EQ(scales[63], 1e-10f / 448.0f);
    } else {
      EXPECT_EQ(scales[1], 0x1p-7f);  // 3 / 448 = 0.0067, 2^-7 = 0.0078
      EXPECT_EQ(page[128 + 127], std::byte{E4m3::from_float(384.0f).bits});
      EXPECT_EQ(scales[63], 0x1p-22f);  // 1e-4 / 448 = 2.2e-7, 2^-22 = 2.4e-7
    }
    for (size_t i = 0; i < 8448; ++i) ASSERT_EQ(memory[i], std::byte{0xFF});
  }
}

TEST(Ref, E4m3PerTensorDividesOnTheWayInAndMultipliesOnTheWayOut) {
  std::vector<std::byte> memory(576, std::byte{0xFF});
  LatentCacheView cache;
  cache.data = memory.data();
  cache.format = LatentFormat::kE4m3;
  cache.num_pages = 1;
  cache.page_size = 1;
  cache.page_stride_bytes = 576;
  cache.scale = 0.5f;
  const Tensor latent = zeros({1, 512});
  const Tensor rope = zeros({1, 64});
  verify::set(latent.view, 3.0f, 0, 0);
  verify::set(latent.view, 1e9f, 0, 1);
  verify::set(latent.view, -kInf, 0, 2);
  verify::set(latent.view, NAN, 0, 3);
  verify::set(rope.view, 1.0f, 0, 0);
  const Tensor slots = make_ints({0});
  LatentWrite w;
  w.latent = latent.view;
  w.rope = rope.view;
  w.slots = slots.view;
  w.cache = cache;
  run_once(kContext, w, kRef);
  const Tensor latent_out = make_tensor(DType::kF32, {2, 512});
  const Tensor rope_out = make_tensor(DType::kF32, {2, 64});
  const Tensor wanted = make_ints({0, -1});
  LatentGather g;
  g.slots = wanted.view;
  g.cache = cache;
  g.latent = latent_out.view;
  g.rope = rope_out.view;
  run_once(kContext, g, kRef);
  EXPECT_EQ(memory[0], std::byte{E4m3::from_float(6.0f).bits});
  EXPECT_EQ(verify::get(latent_out.view, 0, 0), 3.0f);
  EXPECT_EQ(verify::get(latent_out.view, 0, 1), 224.0f);  // saturated
  EXPECT_EQ(verify::get(latent_out.view, 0, 2), -224.0f);
  EXPECT_TRUE(std::isnan(verify::get(latent_out.view, 0, 3)));
  EXPECT_EQ(memory[3], std::byte{0x7F});
  EXPECT_EQ(verify::get(rope_out.view, 0, 0), 1.0f);    // the rope too
  EXPECT_EQ(verify::get(latent_out.view, 1, 0), 0.0f);  // a negative slot gives zeros
  EXPECT_EQ(verify::get(rope_out.view, 1, 63), 0.0f);
}

TEST(Ref, RopePairings) {
  const Tensor table = make_tensor(DType::kF32, {2, 4});
  const float row[4] = {0.0f, 1.0f, 1.0f, 0.0f};  // cos 0, 1; sin 1, 0: pair 0 turns by 90 degrees, pair 1 stays
  std::memcpy(table.view.ptr<float>(1), row, sizeof row);
  const Tensor positions = make_ints({1});
  for (const RopePairing pairing : {RopePairing::kInterleaved, RopePairing::kHalfSplit}) {
    const Tensor x = make_tensor(DType::kF32, {1, 1, 8});
    for (int64_t i = 0; i < 8; ++i) verify::set(x.view, static_cast<float>(i), 0, 0, i);
    Rope p;
    p.x = x.view;
    p.positions = positions.view;
    p.cos_sin = table.view;
    p.offset = 4;
    p.pairing = pairing;
    run_once(kContext, p, kRef);
    std::vector<float> got;
    for (int64_t i = 0; i < 8; ++i) got.push_back(verify::get(x.view, 0, 0, i));
    const std::vector<float> interleaved = {0, 1, 2, 3, -5, 4, 6, 7};
    const std::vector<float> half_split = {0, 1, 2, 3, -6, 5, 4, 7};
    EXPECT_EQ(got, pairing == RopePairing::kInterleaved ? interleaved : half_split);
  }
}

}  // namespace
