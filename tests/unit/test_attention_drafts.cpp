// Selections that are reused: by layers that share one, and by the later steps of a draft (spec 1.5, 3.2).
#include <gtest/gtest.h>

#include <iostream>

#include "case_counts.h"
#include "gannet/index_sharing.h"
#include "unit/attention_world.h"

namespace gannet_test {
namespace {

class EveryDraft : public testing::TestWithParam<ImplCase> {
 protected:
  void SetUp() override {
    std::cout << "implementation " << GetParam().impl << ", " << GetParam().formats.name << "\n";
  }
  WorldOptions options(int32_t topk) const {
    const Formats& f = GetParam().formats;
    return {.impl = GetParam().impl,
            .arch = AttentionArch::kDsa,
            .dtype = f.dtype,
            .latent_format = f.latent,
            .index_format = f.index,
            .topk = topk};
  }
};
INSTANTIATE_TEST_SUITE_P(Attention, EveryDraft, testing::ValuesIn(impl_cases()), case_name);

/// Verify: two decode requests of four rows behind two extends, the first of which has no new rows.
World verify_world(const WorldOptions& o) {
  return World(o, {{.prefix = 70, .rows = 0, .id = 1}, {.prefix = 100, .rows = 3, .id = 2}},
               {{.prefix = 100, .rows = 4, .id = 3}, {.prefix = 61, .rows = 4, .id = 4}}, 4);
}

TopKSelection select(World& w, SelectionBuffer& buffer) {
  buffer.reserve(w.num_rows());
  const TopKSelection s = buffer.view(w.num_rows());
  const World::Kv kv = w.kv(0);
  const Tensor iq = w.index_q(), weights = w.index_weights();
  w.backend->select({.layer = 0, .q = iq.view, .weights = weights.view, .write = kv.rows(), .out = s});
  return s;
}

Tensor attend(World& w, int32_t layer, const Tensor& q, const StepWrite& write, const Selection& s) {
  Tensor out(w.options.dtype, {q.view.shape[0], w.options.num_heads, World::kR});
  w.backend->attend({.layer = layer, .q = q.view, .write = write, .selection = s, .out = out.view, .lse = {}});
  return out;
}

/// Rows of a tensor, zeros for -1.
Tensor gather(const Tensor& t, const std::vector<int32_t>& rows) {
  Tensor r(t.view.dtype, {static_cast<int64_t>(rows.size()), t.view.shape[1], t.view.shape[2]});
  const size_t bytes = r.bytes() / rows.size();
  for (size_t i = 0; i < rows.size(); ++i) {
    std::byte* to = static_cast<std::byte*>(r.view.data) + i * bytes;
    if (rows[i] < 0) std::memset(to, 0, bytes);
    else std::memcpy(to, t.rows(rows[i], rows[i] + 1).data, bytes);
  }
  return r;
}

// Every layer writes its own rows and attends over the selection of its source.
TEST_P(EveryDraft, LayersReuseTheSelectionOfTheirSource) {
  const std::vector<int32_t> sources =
      selection_sources({.num_hidden_layers = World::kLayers, .index_topk_freq = 2, .index_skip_topk_offset = 1});
  ASSERT_EQ(sources, (std::vector<int32_t>{0, 0}));
  World w = verify_world(options(50));
  w.backend->prepare(w.step());
  SelectionBuffer buffer(50, true, memory_of(test_device()));
  TopKSelection s;
  const Tensor q = w.q_absorbed();
  std::vector<Tensor> outs;
  for (int32_t l = 0; l < World::kLayers; ++l) {
    if (sources[static_cast<size_t>(l)] == l) {
      s = select(w, buffer);
      outs.push_back(attend(w, l, q, AlreadyWritten{}, s));
    } else {
      const World::Kv kv = w.kv(l);
      outs.push_back(attend(w, l, q, kv.rows(), s));
    }
  }
  EXPECT_TRUE(same_bits(outs[0], outs[1]));  // the layers hold the same tokens
}

TEST_P(EveryDraft, LaterStepsReuseTheNarrowedSelection) {
  World w = verify_world(options(50));
  w.backend->prepare(w.step());
  SelectionBuffer buffer(50, true, memory_of(test_device())), narrow_buffer(50, true, memory_of(test_device()));
  const TopKSelection all = select(w, buffer);
  const Tensor q = w.q_absorbed(), out = attend(w, 0, q, AlreadyWritten{}, all);
  const std::vector<int32_t> accepted{2, 99};
  std::vector<int32_t> rows(4), lens(4);
  narrow_rows(w.backend->step(), accepted, rows);
  narrow_seq_lens(w.backend->step(), accepted, lens);
  ASSERT_EQ(rows, (std::vector<int32_t>{-1, 2, 3 + 1, 3 + 4 + 3}));
  ASSERT_EQ(lens, (std::vector<int32_t>{70, 103, 102, 65}));
  narrow_buffer.reserve(4);
  const TopKSelection narrow = narrow_buffer.view(4);
  gather_selection(all, rows, narrow);
  wait_for_device();
  for (int64_t i = 0; i < 4; ++i) {
    const int32_t row = rows[static_cast<size_t>(i)];
    for (int32_t c = 0; c < 50; ++c) {
      ASSERT_EQ(*narrow.slots.ptr<int32_t>(i, c), row < 0 ? -1 : *all.slots.ptr<int32_t>(row, c));
      ASSERT_EQ(*narrow.positions.ptr<int32_t>(i, c), row < 0 ? -1 : *all.positions.ptr<int32_t>(row, c));
    }
    ASSERT_EQ(*narrow.lens.ptr<int32_t>(i), row < 0 ? 0 : *all.lens.ptr<int32_t>(row));
  }
  // A later step: one row a request, over what the first step chose. The rows' own results, bit for bit; the request
  // without a row attends to nothing.
  w.backend->prepare({.seq_lens = lens, .prefix_lens = {}, .extend_lens = {}, .q_len = 1, .pages = w.table->view()});
  const Tensor later = attend(w, 0, gather(q, rows), AlreadyWritten{}, narrow);
  EXPECT_TRUE(same_bits(later, gather(out, rows)));
}

TEST(GatherSelection, NamesWhatIsWrong) {
  SelectionBuffer a(8, true), b(8, true), narrow(7, true), plain(8, false);
  for (SelectionBuffer* s : {&a, &b, &narrow, &plain}) s->reserve(4);
  const auto text = [](const TopKSelection& from, std::vector<int32_t> rows, const TopKSelection& to) {
    return error_of([&] { gather_selection(from, rows, to); });
  };
  const auto view = [](const SelectionBuffer& s, int64_t rows) { return s.view(rows); };
  std::fill_n(a.view(4).lens.ptr<int32_t>(), 4, 0);
  EXPECT_EQ(text(view(a, 4), {3, -1}, view(b, 2)), "");
  EXPECT_EQ(text(view(a, 4), {}, view(b, 0)), "");
  EXPECT_EQ(text(view(a, 4), {3, 0}, view(plain, 2)), "") << "positions may be dropped";
  EXPECT_TRUE(has(text(view(a, 4), {4, 0}, view(b, 2)), "[gather_selection] rows[0] is 4; accepted: -1 to 3"));
  EXPECT_TRUE(has(text(view(a, 4), {0, -2}, view(b, 2)), "rows[1] is -2"));
  EXPECT_TRUE(
      has(text(view(a, 4), {0}, view(b, 2)), "to.slots is int32[2, 8] strides [16, 1] on cpu; accepted: 1 rows"));
  EXPECT_TRUE(has(text(view(a, 4), {0}, view(narrow, 1)),
                  "to.slots is int32[1, 7] strides [16, 1] on cpu; accepted: int32 of rank 2"));
  EXPECT_TRUE(has(text(view(plain, 4), {0}, view(b, 1)), "from.positions is absent"));
  TopKSelection bad = view(a, 4);
  bad.lens = a.view(3).lens;
  EXPECT_TRUE(has(text(bad, {0}, view(b, 1)), "from.lens is int32[3] strides [1] on cpu; accepted: 4 rows"));
  bad = view(a, 4);
  bad.slots.dtype = DType::kI64;
  EXPECT_TRUE(has(text(bad, {0}, view(b, 1)), "from.slots is int64[4, 8]"));
  bad = view(b, 1);
  bad.lens = {};
  EXPECT_TRUE(has(text(view(a, 4), {0}, bad), "to.lens is absent"));
}

}  // namespace
}  // namespace gannet_test
