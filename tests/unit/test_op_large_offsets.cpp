// Rows whose byte offset exceeds 2^31 and 2^32 (known faults BL-09, BL-10), in address space that is reserved and never
// filled: only what is touched has memory.
#include <sys/mman.h>

#include <cmath>
#include <cstring>

#include "op_cases.h"

namespace {

using namespace gannet;
using gannet::verify::make_ints;
using gannet::verify::make_tensor;
using gannet::verify::Rng;
using gannet::verify::Tensor;

/// `bytes` of zeros that take memory when they are written.
class Reserved {
 public:
  explicit Reserved(int64_t bytes) : bytes_(static_cast<size_t>(bytes)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) throw std::bad_alloc();
  }
  ~Reserved() { munmap(data_, bytes_); }
  Reserved(const Reserved&) = delete;
  Reserved& operator=(const Reserved&) = delete;
  void* data() const { return data_; }

 private:
  size_t bytes_;
  void* data_;
};

constexpr int64_t kBig = (int64_t{1} << 31) + 4096;  // a page stride: page 1 lies beyond 2^31, page 2 beyond 2^32
constexpr int64_t kPages = 4;

/// The pages 3, 1, 2 as a table of one request, 150 tokens.
struct FarTable {
  Tensor pages = make_tensor(DType::kI32, {1, 3});
  Tensor lens = make_ints({150});
  FarTable() {
    const int32_t list[3] = {3, 1, 2};
    std::memcpy(pages.view.data, list, sizeof list);
  }
  PageTableView table() const { return PageTableView::padded(pages.view); }
  QueryRows rows(int32_t q_len) const {
    QueryRows r;
    r.seq_lens = lens.view;
    r.q_len = q_len;
    return r;
  }
  Tensor slots() const {
    std::vector<int32_t> list;
    for (int32_t t = 0; t < 150; ++t) list.push_back(pages.view.ptr<int32_t>()[t / 64] * 64 + t % 64);
    return make_ints(list);
  }
};

// A device would get copies of pools of 4 GiB and more, most of which is never touched here.
constexpr const char* kNotOnCuda = "pools beyond 2^31 elements on a GPU are those of tests/gpu/test_cuda_limits.cpp";

/// The implementations of the CPU that run here and take these arguments.
template <class Params>
std::vector<std::string> taking_here(const Params& params, bool may_be_none = false) {
  return gannet_tests::taking(params, may_be_none, false, kNotOnCuda);
}

/// Every implementation of the CPU that writes latent rows, the oracle too.
std::vector<std::string> writers() {
  std::vector<std::string> names = {"ref"};
  for (const ImplInfo& info : list_implementations<LatentWrite>()) {
    if (info.runs_here && info.device == DeviceKind::kCpu && info.name != "ref") names.push_back(info.name);
  }
  return names;
}

/// The same pool with pages side by side, for the oracle's own view of the contents.
template <class Params>
void expect_like_compact(const Params& far, const Params& compact, const std::vector<std::string>& names) {
  const verify::Outputs want = verify::run(compact, {.impl = "ref"});
  for (const std::string& impl : names) {
    const verify::Outputs here = verify::run(compact, {.impl = impl});
    EXPECT_EQ(verify::run(far, {.impl = impl}), here) << impl;
    EXPECT_EQ(here.fault, "");
  }
  EXPECT_EQ(verify::run(far, {.impl = "ref"}), want);
}

TEST(LargeOffsets, LatentRowsAreWrittenReadAndAttended) {
  for (const LatentFormat format : {LatentFormat::kF32, LatentFormat::kBf16, LatentFormat::kE4m3,
                                    LatentFormat::kPacked656, LatentFormat::kE4m3PerToken}) {
    const bool narrow = format != LatentFormat::kF32 && format != LatentFormat::kBf16;  // may be refused by name
    const FarTable table;
    const Tensor slots = table.slots();
    LatentCacheView near;
    near.format = format;
    near.scale = 0.03f;
    near.num_pages = kPages;
    near.page_size = 64;
    near.page_stride_bytes = 64 * latent_row_bytes(format, near.geometry);
    const Tensor latent = make_tensor(DType::kF32, {150, 512});
    const Tensor rope = make_tensor(DType::kF32, {150, 64});
    verify::fill_normal(latent, Rng(1));
    verify::fill_normal(rope, Rng(2));
    for (const std::string& writer : writers()) {
      Reserved far_memory(kBig * kPages);
      verify::Buffer near_memory(static_cast<size_t>(near.page_stride_bytes * kPages), verify::Poison::kZero);
      near.data = near_memory.data();
      LatentCacheView far = near;
      far.page_stride_bytes = kBig;
      far.data = far_memory.data();
      LatentWrite w;
      w.latent = latent.view;
      w.rope = rope.view;
      w.slots = slots.view;
      w.cache = near;
      gannet_tests::run_here(w, writer);
      w.cache = far;
      gannet_tests::run_here(w, writer);
      for (int64_t page = 0; page < kPages; ++page) {
        EXPECT_EQ(std::memcmp(static_cast<std::byte*>(far.data) + page * kBig,
                              near_memory.data() + page * near.page_stride_bytes,
                              static_cast<size_t>(near.page_stride_bytes)),
                  0)
            << writer << " " << to_string(format) << " page " << page;
      }
      LatentGather g;
      const Tensor latent_out = make_tensor(DType::kF32, {150, 512});
      const Tensor rope_out = make_tensor(DType::kF32, {150, 64});
      g.slots = slots.view;
      g.latent = latent_out.view;
      g.rope = rope_out.view;
      g.cache = near;
      LatentGather g_far = g;
      g_far.cache = far;
      expect_like_compact(g_far, g, taking_here(g));

      const Tensor q = make_tensor(DType::kBf16, {2, 4, 576});
      verify::fill_normal(q, Rng(3));
      const Tensor out = make_tensor(DType::kF32, {2, 4, 512});
      MlaDecode d;
      d.q = q.view;
      d.cache = near;
      d.pages = table.table();
      d.rows = table.rows(2);
      d.out = out.view;
      d.softmax_scale = 0.06f;
      MlaDecode d_far = d;
      d_far.cache = far;
      expect_like_compact(d_far, d, taking_here(d, narrow));

      SparseAttention s;
      TensorView lists = slots.view;
      lists.rank = 2;
      lists.shape = {2, 150};
      lists.stride = {0, 1};
      s.q = q.view;
      s.cache = near;
      s.topk_slots = lists;
      s.out = out.view;
      s.softmax_scale = 0.06f;
      SparseAttention s_far = s;
      s_far.cache = far;
      expect_like_compact(s_far, s, taking_here(s, narrow));
    }
  }
}

TEST(LargeOffsets, TightPoolsBeyondTwoToThe31Elements) {
  // Known fault BL-09: 576 * slot reaches 2^31 at slot 3,728,271.
  constexpr int64_t kSlots[] = {3728269, 3728270, 3728271, 3728272, 4000000};
  constexpr int64_t kNumPages = 62600;
  const int64_t row_bytes = latent_row_bytes(LatentFormat::kBf16, {});
  for (const std::string& impl : writers()) {
    Reserved memory(kNumPages * 64 * row_bytes);
    LatentCacheView cache;
    cache.data = memory.data();
    cache.num_pages = kNumPages;
    cache.page_stride_bytes = 64 * row_bytes;
    const Tensor latent = make_tensor(DType::kBf16, {5, 512});
    const Tensor rope = make_tensor(DType::kBf16, {5, 64});
    verify::fill_normal(latent, Rng(5));
    verify::fill_normal(rope, Rng(6));
    const Tensor slots = make_tensor(DType::kI64, {5});
    std::memcpy(slots.view.data, kSlots, sizeof kSlots);
    LatentWrite w;
    w.latent = latent.view;
    w.rope = rope.view;
    w.slots = slots.view;
    w.cache = cache;
    gannet_tests::run_here(w, impl);
    for (int64_t t = 0; t < 5; ++t) {
      const std::byte* row = static_cast<std::byte*>(memory.data()) + kSlots[t] * row_bytes;
      EXPECT_EQ(std::memcmp(row, latent.view.ptr<Bf16>(t), 1024), 0) << impl << " slot " << kSlots[t];
      EXPECT_EQ(std::memcmp(row + 1024, rope.view.ptr<Bf16>(t), 128), 0) << impl << " slot " << kSlots[t];
    }
    const auto* before =
        reinterpret_cast<const uint64_t*>(static_cast<std::byte*>(memory.data()) + (kSlots[0] - 1) * row_bytes);
    const auto* behind =
        reinterpret_cast<const uint64_t*>(static_cast<std::byte*>(memory.data()) + (kSlots[3] + 1) * row_bytes);
    for (int64_t i = 0; i < row_bytes / 8; ++i) {
      ASSERT_EQ(before[i], 0u);
      ASSERT_EQ(behind[i], 0u);
    }
  }
}

TEST(LargeOffsets, IndexKeysAreWrittenReadScoredAndSelected) {
  for (const IndexKFormat format : {IndexKFormat::kF32, IndexKFormat::kBf16, IndexKFormat::kE4m3}) {
    const FarTable table;
    const Tensor slots = table.slots();
    IndexCacheView near;
    near.format = format;
    near.num_pages = kPages;
    near.page_stride_bytes = 64 * index_k_token_bytes(format, near.head_dim);
    const Tensor keys = make_tensor(DType::kF32, {150, 128});
    verify::fill_normal(keys, Rng(1));
    Reserved far_memory(kBig * kPages);
    verify::Buffer near_memory(static_cast<size_t>(near.page_stride_bytes * kPages), verify::Poison::kZero);
    near.data = near_memory.data();
    IndexCacheView far = near;
    far.page_stride_bytes = kBig;
    far.data = far_memory.data();
    IndexKWrite w;
    w.k = keys.view;
    w.slots = slots.view;
    w.cache = near;
    run_once(Context{}, w, {.impl = "ref"});
    w.cache = far;
    for (const std::string& impl : taking_here(w)) {
      std::memset(far_memory.data(), 0, 4096);
      gannet_tests::run_here(w, impl);
      for (int64_t page = 0; page < kPages; ++page) {
        EXPECT_EQ(std::memcmp(static_cast<std::byte*>(far.data) + page * kBig,
                              near_memory.data() + page * near.page_stride_bytes,
                              static_cast<size_t>(near.page_stride_bytes)),
                  0)
            << impl << " " << to_string(format) << " page " << page;
      }
    }
    IndexKGather g;
    const Tensor out = make_tensor(DType::kF32, {150, 128});
    g.slots = slots.view;
    g.k = out.view;
    g.cache = near;
    IndexKGather g_far = g;
    g_far.cache = far;
    expect_like_compact(g_far, g, taking_here(g));

    const Tensor q = make_tensor(DType::kBf16, {2, 4, 128});
    verify::fill_normal(q, Rng(3));
    const Tensor weights = make_tensor(DType::kF32, {2, 4});
    verify::fill_normal(weights, Rng(4));
    const Tensor logits = make_tensor(DType::kF32, {2, 150});
    IndexLogits l;
    l.q = q.view;
    l.weights = weights.view;
    l.cache = near;
    l.pages = table.table();
    l.rows = table.rows(2);
    l.logits = logits.view;
    IndexLogits l_far = l;
    l_far.cache = far;
    expect_like_compact(l_far, l, taking_here(l));

    const Tensor list = make_tensor(DType::kI32, {2, 40});
    const Tensor lens = make_tensor(DType::kI32, {2});
    IndexSelect s;
    s.q = q.view;
    s.weights = weights.view;
    s.cache = near;
    s.pages = table.table();
    s.rows = table.rows(2);
    s.max_seq_len = 150;
    s.topk_slots = list.view;
    s.topk_lens = lens.view;
    IndexSelect s_far = s;
    s_far.cache = far;
    expect_like_compact(s_far, s, taking_here(s));
  }
}

TEST(LargeOffsets, ScoresAndRowsBeyondTwoToThe32Bytes) {
  // Rows of scores, queries and outputs 2^31 elements and more apart (known fault BL-10).
  constexpr int64_t kRowStride = (int64_t{1} << 30) + 16;
  constexpr int64_t kRows = 3;
  Reserved memory(kRowStride * kRows * 4);
  TensorView logits = view(static_cast<float*>(memory.data()), {kRows, 1000});
  logits.stride[0] = kRowStride;
  Rng rng(8);
  for (int64_t t = 0; t < kRows; ++t) {
    for (int64_t i = 0; i < 1000; ++i) verify::set(logits, static_cast<float>(rng.normal()), t, i);
  }
  const Tensor lens = make_ints({1000, 900, 1000});
  const Tensor positions = make_tensor(DType::kI32, {kRows, 64});
  const Tensor counts = make_tensor(DType::kI32, {kRows});
  TopK p;
  p.logits = logits;
  p.lens = lens.view;
  p.positions = positions.view;
  p.counts = counts.view;
  const verify::Outputs want = verify::run(p, {.impl = "ref"});
  for (const std::string& impl : taking_here(p)) EXPECT_EQ(verify::run(p, {.impl = impl}), want) << impl;

  // rope in place, rows far apart
  Reserved far(kRowStride * kRows * 4);
  TensorView x = view(static_cast<float*>(far.data()), {kRows, 2, 64});
  x.stride[0] = kRowStride;
  const Tensor table = make_tensor(DType::kF32, {8, 64});
  verify::fill_normal(table, Rng(9));
  const Tensor at = make_ints({0, 3, 7});
  const auto fill = [&] {
    Rng r(10);
    for (int64_t t = 0; t < kRows; ++t) {
      for (int64_t h = 0; h < 2; ++h) {
        for (int64_t d = 0; d < 64; ++d) verify::set(x, static_cast<float>(r.normal()), t, h, d);
      }
    }
  };
  Rope rope;
  rope.x = x;
  rope.positions = at.view;
  rope.cos_sin = table.view;
  for (const std::string& impl : taking_here(rope)) {
    fill();
    run_once(Context{}, rope, {.impl = "ref"});
    std::vector<float> expected;
    for (int64_t t = 0; t < kRows; ++t) expected.insert(expected.end(), x.ptr<float>(t), x.ptr<float>(t) + 128);
    fill();
    gannet_tests::run_here(rope, impl);
    for (int64_t t = 0; t < kRows; ++t) {
      for (int64_t d = 0; d < 128; ++d)
        EXPECT_NEAR(x.ptr<float>(t)[d], expected[static_cast<size_t>(t * 128 + d)], 4e-6) << impl << " row " << t;
    }
  }
}

}  // namespace
