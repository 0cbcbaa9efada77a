// Several KV heads in one pool, each a problem of its own (gannet/kv_heads.h).
#include <cstring>

#include "op_cases.h"

namespace {

using namespace gannet;
using gannet::verify::make_tensor;
using gannet::verify::Paged;
using gannet::verify::Rng;
using gannet::verify::Tensor;

constexpr int32_t kKvHeads = 3;
constexpr int64_t kHeads = 6;
constexpr int64_t kPageGap = 64;

/// One pool of kKvHeads rows a token, and each head again in a pool of its own; poison between and behind.
struct Heads {
  Paged paged;
  std::vector<verify::LatentPool> alone;
  std::shared_ptr<verify::Buffer> buffer;
  LatentCacheView pool;

  explicit Heads(LatentFormat format) : paged({.seq_lens = {100, 0, 65}, .q_len = 2, .page_size = 16}) {
    for (int32_t g = 0; g < kKvHeads; ++g)
      alone.push_back(make_latent_pool(paged, format, static_cast<uint64_t>(10 + g)));
    pool = alone[0].view;
    const int64_t row_bytes = latent_row_bytes(format, pool.geometry);
    pool.page_stride_bytes = pool.page_size * kKvHeads * row_bytes + kPageGap;
    buffer = std::make_shared<verify::Buffer>(static_cast<size_t>(pool.num_pages * pool.page_stride_bytes));
    pool.data = buffer->data();
    for (int32_t g = 0; g < kKvHeads; ++g) {
      const LatentCacheView head = kv_head_of(pool, kKvHeads, g);
      for (int64_t slot = 0; slot < pool.num_slots(); ++slot)
        std::memcpy(head.row(slot, head.row_stride()), alone[static_cast<size_t>(g)].view.row(slot, row_bytes),
                    static_cast<size_t>(row_bytes));
    }
  }
};

constexpr LatentFormat kRowFormats[] = {LatentFormat::kF32, LatentFormat::kBf16, LatentFormat::kE4m3,
                                        LatentFormat::kPacked656};

struct Results {
  Tensor out, lse, max_logits;
  explicit Results(int64_t rows)
      : out(make_tensor(DType::kBf16, {rows, kHeads, 512})),
        lse(make_tensor(DType::kF32, {rows, kHeads})),
        max_logits(make_tensor(DType::kF32, {rows, kHeads})) {}
  friend bool operator==(const Results& a, const Results& b) {
    const auto same = [](const Tensor& x, const Tensor& y) {
      return std::memcmp(x.buffer->data(), y.buffer->data(), x.buffer->size()) == 0;
    };
    return same(a.out, b.out) && same(a.lse, b.lse) && same(a.max_logits, b.max_logits);
  }
};

/// Runs one call a KV head over `cache(g)`, as the header says.
template <class Params, class CacheOf>
Results run_heads(const Params& all, const std::string& impl, int64_t rows, CacheOf&& cache) {
  Results r(rows);
  for (int32_t g = 0; g < kKvHeads; ++g) {
    Params one = all;
    one.cache = cache(g);
    one.q = head_group_of(all.q, kKvHeads, g);
    one.attn_sink = head_group_of(all.attn_sink, kKvHeads, g);
    one.out = head_group_of(r.out.view, kKvHeads, g);
    one.lse = head_group_of(r.lse.view, kKvHeads, g);
    one.max_logits = head_group_of(r.max_logits.view, kKvHeads, g);
    gannet_tests::run_here(one, impl);
  }
  return r;
}

template <class Params>
void expect_independent(const Heads& h, Params all) {
  const int64_t rows = h.paged.num_rows;
  const Tensor q = make_tensor(DType::kBf16, {rows, kHeads, 576});
  verify::fill_normal(q, Rng(4));
  const Tensor sink = make_tensor(DType::kF32, {kHeads});
  verify::fill_normal(sink, Rng(5));
  const Results shapes(rows);
  all.q = q.view;
  all.attn_sink = sink.view;
  all.softmax_scale = 0.0625f;
  Params probe = all;
  probe.cache = kv_head_of(h.pool, kKvHeads, 1);
  probe.q = head_group_of(q.view, kKvHeads, 1);
  probe.attn_sink = head_group_of(sink.view, kKvHeads, 1);
  probe.out = head_group_of(shapes.out.view, kKvHeads, 1);
  std::vector<std::string> names = gannet_tests::taking(probe);
  names.emplace_back("ref");
  for (const std::string& impl : names) {
    const Results together = run_heads(all, impl, rows, [&](int32_t g) { return kv_head_of(h.pool, kKvHeads, g); });
    const Results apart = run_heads(all, impl, rows, [&](int32_t g) { return h.alone[static_cast<size_t>(g)].view; });
    EXPECT_TRUE(together == apart) << impl;
    EXPECT_EQ(verify::get(together.out.view, 2, 5, 511), 0.0f) << "a row without keys";
    EXPECT_NE(verify::get(together.out.view, 0, 5, 511), verify::get(together.out.view, 0, 0, 511)) << impl;
  }
}

TEST(KvHeads, DenseAttentionOfEachHeadIsThatOfItsOwnPool) {
  for (const LatentFormat format : kRowFormats) {
    SCOPED_TRACE(to_string(format));
    const Heads h(format);
    MlaDecode p;
    p.pages = h.paged.table();
    p.rows = h.paged.rows();
    expect_independent(h, p);
  }
}

TEST(KvHeads, ListsNameTokensWhateverTheHead) {
  for (const LatentFormat format : kRowFormats) {
    SCOPED_TRACE(to_string(format));
    const Heads h(format);
    const Tensor slots = make_tensor(DType::kI32, {h.paged.num_rows, 40});
    for (int64_t row = 0; row < h.paged.num_rows; ++row) {
      const int64_t keys = h.paged.keys_of_row[static_cast<size_t>(row)];
      for (int64_t c = 0; c < 40; ++c)
        *slots.view.ptr<int32_t>(row, c) =
            c < keys
                ? static_cast<int32_t>(h.paged.slot(h.paged.request_of_row[static_cast<size_t>(row)], keys - 1 - c))
                : -1;
    }
    SparseAttention p;
    p.topk_slots = slots.view;
    expect_independent(h, p);
  }
}

TEST(KvHeads, WritesAndGathersTouchTheirHeadAlone) {
  for (const LatentFormat format : kRowFormats) {
    SCOPED_TRACE(to_string(format));
    const Heads h(format);
    const Tensor latent = make_tensor(DType::kF32, {4, 512}), rope = make_tensor(DType::kF32, {4, 64});
    verify::fill_normal(latent, Rng(1));
    verify::fill_normal(rope, Rng(2));
    const Tensor slots = verify::make_ints({3, -1, 70, 16});
    LatentWrite w;
    w.latent = latent.view;
    w.rope = rope.view;
    w.slots = slots.view;
    w.cache = kv_head_of(h.pool, kKvHeads, 1);
    LatentWrite of_own = w;
    of_own.cache = h.alone[1].view;
    for (const std::string& impl : gannet_tests::taking(w)) {
      gannet_tests::run_here(w, impl);
      gannet_tests::run_here(of_own, impl);
      const int64_t row_bytes = latent_row_bytes(format, {});
      for (int32_t g = 0; g < kKvHeads; ++g) {
        const LatentCacheView head = kv_head_of(h.pool, kKvHeads, g);
        for (int64_t slot = 0; slot < h.pool.num_slots(); ++slot)
          ASSERT_EQ(
              std::memcmp(head.row(slot, head.row_stride()), h.alone[static_cast<size_t>(g)].view.row(slot, row_bytes),
                          static_cast<size_t>(row_bytes)),
              0)
              << impl << " head " << g << " slot " << slot;
      }
      LatentGather gather;
      const Tensor latent_out = make_tensor(DType::kF32, {4, 512}), rope_out = make_tensor(DType::kF32, {4, 64});
      gather.slots = slots.view;
      gather.cache = w.cache;
      gather.latent = latent_out.view;
      gather.rope = rope_out.view;
      LatentGather from_own = gather;
      from_own.cache = of_own.cache;
      EXPECT_EQ(verify::run(gather, {.impl = impl}), verify::run(from_own, {.impl = impl})) << impl;
    }
  }
}

TEST(KvHeads, WhatIsNoHeadIsRefused) {
  LatentCacheView pool;
  pool.page_stride_bytes = 64 * 1152 * 2;
  pool.num_pages = 1;
  const auto refused = [](const char* text, auto&& f) {
    try {
      f();
      ADD_FAILURE() << "took what should say: " << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument);
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
  };
  EXPECT_EQ(kv_head_of(pool, 2, 1).row_stride_bytes, 2304);
  EXPECT_EQ(kv_head_of(pool, 1, 0).row_stride(), pool.row_stride());
  refused("[kv_head_of] num_kv_heads is 0; accepted: 1 or more", [&] { kv_head_of(pool, 0, 0); });
  refused("[kv_head_of] kv_head is 2; accepted: 0 to 1", [&] { kv_head_of(pool, 2, 2); });
  refused("[kv_head_of] kv_head is -1", [&] { kv_head_of(pool, 2, -1); });
  pool.row_stride_bytes = 2288;
  refused("pool.row_stride_bytes is 2288; accepted: 0, or 2 rows of 1152 bytes or more",
          [&] { kv_head_of(pool, 2, 1); });
  pool.row_stride_bytes = 0;
  pool.format = LatentFormat::kE4m3PerToken;
  refused("pool.format is e4m3_per_token; accepted: a format whose rows are whole", [&] { kv_head_of(pool, 2, 1); });
  const Tensor q = make_tensor(DType::kF32, {2, 6, 32});
  refused("[head_group_of] num_groups is 4; accepted: a divisor of the 6 heads of fp32[2, 6, 32]",
          [&] { head_group_of(q.view, 4, 0); });
  refused("[head_group_of] num_groups is 0", [&] { head_group_of(q.view, 0, 0); });
  refused("[head_group_of] group is 3; accepted: 0 to 2", [&] { head_group_of(q.view, 3, 3); });
  EXPECT_FALSE(head_group_of(TensorView{}, 4, 0).given());
}

}  // namespace
