// What the backends refuse, and how they say it.
#include <gtest/gtest.h>

#include <functional>

#include "unit/attention_world.h"

namespace gannet_test {
namespace {

constexpr ErrorCode kUnsupported = ErrorCode::kUnsupported;

WorldOptions dsa(int32_t topk = 2048) {
  WorldOptions o;
  o.arch = AttentionArch::kDsa;
  o.topk = topk;
  return o;
}

World small_world(const WorldOptions& o = {}) {
  return World(o, {{.prefix = 70, .rows = 3, .id = 1}}, {{.prefix = 9, .rows = 1, .id = 2}});
}

// ---- registry -----------------------------------------------------------------------------------------------------

TEST(AttentionRegistry, PicksByArchitectureOrName) {
  const Context context;
  const World mla = small_world(), sparse = small_world(dsa());
  EXPECT_STREQ(make_attention_backend(context, mla.config())->name(), "mla");
  EXPECT_STREQ(make_attention_backend(context, sparse.config())->name(), "dsa");
  EXPECT_STREQ(make_attention_backend(context, sparse.config(), "dsa")->name(), "dsa");
  EXPECT_TRUE(has(error_of([&] { make_attention_backend(context, mla.config(), "mlb"); }),
                  "backend is \"mlb\"; accepted: mla (for MLA), dsa (for DSA)"));
  EXPECT_TRUE(has(error_of([&] { make_attention_backend(context, mla.config(), "dsa"); }),
                  "backend dsa does not serve the architecture MLA; accepted: mla (for MLA), dsa (for DSA)"));
}

TEST(AttentionRegistry, TakesOthers) {
  AttentionRegistry registry;
  const Context context;
  const World w = small_world();
  EXPECT_TRUE(has(error_of([&] { registry.make(context, w.config()); }),
                  "no default backend for the architecture MLA; name one of: none"));
  AttentionBackendEntry mine{.name = "mine",
                             .archs = {AttentionArch::kMla},
                             .default_for = {},
                             .make = AttentionRegistry::builtin().entries()[0].make};
  registry.add(mine);
  EXPECT_TRUE(has(error_of([&] { registry.make(context, w.config()); }), "name one of: mine (for MLA)"));
  EXPECT_NE(registry.make(context, w.config(), "mine"), nullptr);
  EXPECT_TRUE(has(error_of([&] { registry.add(mine); }), "mine is registered already"));
  AttentionRegistry builtin = AttentionRegistry::builtin();
  mine.default_for = {AttentionArch::kMla};
  EXPECT_TRUE(has(error_of([&] { builtin.add(mine); }), "cannot be the default for MLA: mla is"));
  mine.default_for = {AttentionArch::kDsa};
  EXPECT_TRUE(has(error_of([&] { builtin.add(mine); }), "does not serve"));
  mine.archs = {};
  EXPECT_TRUE(has(error_of([&] { builtin.add(mine); }), "backend mine serves no architecture"));
  mine.archs = {AttentionArch::kMla};
  mine.default_for = {};
  mine.make = {};
  EXPECT_TRUE(has(error_of([&] { builtin.add(mine); }), "backend mine has no factory"));
  mine.name = {};
  EXPECT_TRUE(has(error_of([&] { builtin.add(mine); }), "name is empty"));
}

TEST(AttentionRegistry, CapabilitiesAreFlags) {
  const Context context;
  const auto mla = make_attention_backend(context, small_world().config());
  const auto sparse = make_attention_backend(context, small_world(dsa()).config());
  EXPECT_FALSE(mla->capabilities().attend_sparse);
  EXPECT_TRUE(sparse->capabilities().attend_sparse);
  EXPECT_EQ(mla->capabilities().page_sizes, (std::vector<int32_t>{32, 64}));
  EXPECT_EQ(sparse->capabilities().page_sizes, std::vector<int32_t>{64});
}

// ---- configuration ------------------------------------------------------------------------------------------------

/// One thing wrong with a T, and how it is said: argument, value, what is accepted.
template <class T>
struct Wrong {
  const char* text;
  std::function<void(T&)> change;
  ErrorCode code = ErrorCode::kInvalidArgument;
};

/// `attempt(change)` makes something good, changes it, and does what should be refused.
template <class T, class Attempt>
void expect_refused(const char* function, Attempt&& attempt, const std::vector<Wrong<T>>& list) {
  EXPECT_EQ(error_of([&] { attempt([](T&) {}); }), "") << function << " takes what is right";
  for (const Wrong<T>& wrong : list) {
    const std::string text = error_of([&] { attempt(wrong.change); }, wrong.code);
    EXPECT_TRUE(has(text, wrong.text));
    EXPECT_EQ(text.substr(0, text.find(']')).compare(1, std::string::npos, function), 0) << text;
  }
}

TEST(AttentionConfig, NamesWhatIsWrong) {
  using C = AttentionConfig;
  const auto attempt = [](const WorldOptions& o) {
    return [o](auto&& change) {
      C c = small_world(o).config();
      change(c);
      make_attention_backend(Context{}, c);
    };
  };
  expect_refused<C>(
      "mla config", attempt({}),
      {
          {"page_size is 48; accepted: 32 or 64", [](C& c) { c.page_size = 48; }},
          {"logit_soft_cap is 30; accepted: 0", [](C& c) { c.logit_soft_cap = 30; }, kUnsupported},
          {"softmax_scale is 0; accepted: finite and positive", [](C& c) { c.softmax_scale = 0; }},
          {"softmax_scale is -1; accepted: finite and positive", [](C& c) { c.softmax_scale = -1; }},
          {"softmax_scale is nan; accepted: finite and positive", [](C& c) { c.softmax_scale = std::nanf(""); }},
          {"softmax_scale is inf; accepted: finite and positive", [](C& c) { c.softmax_scale = INFINITY; }},
          {"num_heads is 0; accepted: 1 to 1048576", [](C& c) { c.num_heads = 0; }},
          {"num_heads is 1048577; accepted: 1 to 1048576", [](C& c) { c.num_heads = 1048577; }},
          {"geometry.latent_dim is 0; accepted: 1 to", [](C& c) { c.geometry.latent_dim = 0; }},
          {"geometry.rope_dim is 0; accepted: 1 to", [](C& c) { c.geometry.rope_dim = 0; }},
          {"qk_nope_head_dim is -1; accepted: 0 to", [](C& c) { c.qk_nope_head_dim = -1; }},
          {"v_head_dim is -1; accepted: 0 to", [](C& c) { c.v_head_dim = -1; }},
          {"max_context_len is 0; accepted: 1 to 2147483647", [](C& c) { c.max_context_len = 0; }},
          {"max_context_len is 2147483648; accepted: 1 to", [](C& c) { c.max_context_len = int64_t{1} << 31; }},
          {"prefix_chunk_capacity is 0 tokens; accepted: 1 and more", [](C& c) { c.prefix_chunk_capacity = 0; }},
          {"impl is \"sse9\"; accepted: ", [](C& c) { c.plan.impl = "sse9"; }},
          {"the memory resource is on cpu; accepted: memory of cuda:1, the device of the config",
           [](C& c) { c.device.kind = DeviceKind::kCuda, c.device.index = 1; }},
      });
  expect_refused<C>("mla config", attempt({}), {});
  C small = small_world().config();
  small.page_size = 32;
  EXPECT_EQ(error_of([&] { make_attention_backend(Context{}, small); }), "");
  expect_refused<C>("dsa config", attempt(dsa()),
                    {
                        {"page_size is 32; accepted: 64", [](C& c) { c.page_size = 32; }},
                        {"logit_soft_cap is 30; accepted: 0", [](C& c) { c.logit_soft_cap = 30; }, kUnsupported},
                        {"q_lora_rank is 0; accepted: 1 and more", [](C& c) { c.q_lora_rank = 0; }},
                        {"indexer.topk is 0; accepted: 1 and more", [](C& c) { c.indexer.topk = 0; }},
                        {"indexer.num_heads is 0; accepted: 1 to", [](C& c) { c.indexer.num_heads = 0; }},
                        {"indexer.head_dim is 32; accepted: 64 to", [](C& c) { c.indexer.head_dim = 32; }},
                    });
}

TEST(AttentionBind, NamesWhatIsWrong) {
  using L = std::vector<LayerCaches>;
  const auto attempt = [](const WorldOptions& o) {
    return [o](auto&& change) {
      World w = small_world(o);
      L layers = w.layers();
      change(layers);
      w.backend->bind(layers);
    };
  };
  expect_refused<L>(
      "mla bind", attempt({}),
      {
          {"no layers are given; accepted: 1 and more", [](L& l) { l.clear(); }},
          {"page_size of layer 1 is 32; accepted: 64, that of the config", [](L& l) { l[1].latent.page_size = 32; }},
          {"the latent rows of layer 1 are 256 + 64 wide; accepted: 512 + 64",
           [](L& l) { l[1].latent.geometry.latent_dim = 256; }},
          {"layer 1 has 3 pages of fp32", [](L& l) { l[1].latent.num_pages = 3; }},
          {"layer 1 has 7 pages of bf16", [](L& l) { l[1].latent.format = LatentFormat::kBf16; }},
          {"with a stride of 4096 bytes; layer 0 has", [](L& l) { l[1].latent.page_stride_bytes = 4096; }},
          {"layer 0 has 0 pages; accepted: 1 and more", [](L& l) { l[0].latent.num_pages = 0; }},
          {"layer 0 has 33554432 pages; accepted: 1 and more, at most 2^31 - 1 tokens",
           [](L& l) { l[0].latent.num_pages = 1 << 25; }},
          {"latent.data of layer 0 is null", [](L& l) { l[0].latent.data = nullptr; }},
          {"the latent cache of layer 0 is on cuda:0; the backend is on cpu",
           [](L& l) { l[0].latent.device.kind = DeviceKind::kCuda; }},
          {"layer 0 has an index cache; accepted: none", [](L& l) { l[0].index.emplace(); }},
      });
  expect_refused<L>("dsa bind", attempt(dsa()),
                    {
                        {"the latent format of layer 0 is e4m3_per_token; accepted: fp32",
                         [](L& l) { l[0].latent.format = LatentFormat::kE4m3PerToken; }, kUnsupported},
                        {"index.data of layer 0 is null", [](L& l) { l[0].index->data = nullptr; }},
                        {"the index cache of layer 0 is on cuda:0; the backend is on cpu",
                         [](L& l) { l[0].index->device.kind = DeviceKind::kCuda; }},
                        {"index head_dim of layer 0 is 64; accepted: 128, that of the config",
                         [](L& l) { l[0].index->head_dim = 64; }},
                        {"the index cache of layer 0 has 1 pages of 64 tokens; its latent cache has",
                         [](L& l) { l[0].index->num_pages = 1; }},
                        {"the index cache of layer 1 is bf16 with a stride of",
                         [](L& l) {
                           l[1].index = l[0].index;
                           l[1].index->format = IndexKFormat::kBf16;
                         }},
                    });
  // What no implementation takes is refused here, by the operation, not by the first layer of the first step.
  expect_refused<L>("latent_write", attempt({}),
                    {
                        {"cache.page_stride_bytes is 16; accepted: 64 tokens of 2304 bytes or more",
                         [](L& l) {
                           for (LayerCaches& c : l) c.latent.page_stride_bytes = 16;
                         }},
                    });
}

// ---- order of calls -----------------------------------------------------------------------------------------------

template <class F>
void every_call(AttentionBackend& b, F&& expect) {
  const TensorView none;
  expect([&] { b.write(0, StepRows::kAll, {}); });
  expect([&] {
    b.attend({.layer = 0, .q = none, .write = AlreadyWritten{}, .selection = AttendAll{}, .out = none, .lse = none});
  });
  expect([&] {
    b.dense_prefill({.layer = 0,
                     .q = none,
                     .k_nope = none,
                     .k_rope = none,
                     .v = none,
                     .write = AlreadyWritten{},
                     .expand = {},
                     .out = none,
                     .lse = none});
  });
  expect([&] {
    b.prefill_new_tokens({.layer = 0,
                          .q = none,
                          .k_nope = none,
                          .k_rope = none,
                          .v = none,
                          .write = AlreadyWritten{},
                          .expand = {},
                          .out = none,
                          .lse = none});
  });
  expect([&] { b.gather_prefix(0, 0, none, none); });
  expect([&] {
    b.prefill_prefix(
        {.layer = 0, .chunk = 0, .q = none, .k_nope = none, .k_rope = none, .v = none, .out = none, .lse = none});
  });
  if (b.capabilities().attend_sparse)
    expect([&] { b.select({.layer = 0, .q = none, .weights = none, .write = AlreadyWritten{}, .out = {}}); });
}

TEST(AttentionOrder, EveryCallNeedsAStep) {
  for (const WorldOptions& o : {WorldOptions{}, dsa()}) {
    World w = small_world(o);
    const auto fresh = make_attention_backend(w.context, w.config());
    every_call(*fresh, [](auto&& f) { EXPECT_TRUE(has(error_of(f), "no caches are bound")); });
    EXPECT_TRUE(has(error_of([&] { fresh->prepare(w.step()); }), " prepare] no caches are bound"));
    const auto bound = [](auto&& f) { EXPECT_TRUE(has(error_of(f), "no step is prepared")); };
    every_call(*w.backend, bound);
    EXPECT_TRUE(has(error_of([&] { (void)w.backend->step(); }), "no step is prepared"));
    w.backend->prepare(w.step());
    EXPECT_EQ(w.backend->step().mode(), StepMode::kMixed);
    // After an idle step.
    w.backend->prepare({});
    every_call(*w.backend, [](auto&& f) { EXPECT_TRUE(has(error_of(f), "the step is idle")); });
    // After a step that was refused.
    w.backend->prepare(w.step());
    BatchStep bad = w.step();
    bad.q_len = 0;
    EXPECT_TRUE(has(error_of([&] { w.backend->prepare(bad); }), "q_len is 0"));
    every_call(*w.backend, bound);
    // After another pool.
    w.backend->prepare(w.step());
    w.backend->bind(w.layers());
    every_call(*w.backend, bound);
  }
}

TEST(AttentionOrder, PagesAreCheckedAgainstThePool) {
  World w = small_world();
  w.table->set_row(1, std::vector<int32_t>{static_cast<int32_t>(w.latent->options().num_pages)});
  EXPECT_TRUE(has(error_of([&] { w.backend->prepare(w.step()); }), "page 0 of request 1 is"));
}

// ---- arguments ----------------------------------------------------------------------------------------------------

TEST(AttentionArguments, NothingIsAssumed) {
  World w = small_world(dsa());
  w.backend->prepare(w.step());
  const Tensor q = w.q_absorbed(), out = w.out();
  EXPECT_TRUE(has(error_of([&] {
                    w.backend->attend(
                        {.layer = 1, .q = q.view, .write = {}, .selection = AttendAll{}, .out = out.view, .lse = {}});
                  }),
                  "write is not given; accepted: AlreadyWritten, or the KvRows"));
  EXPECT_TRUE(
      has(error_of([&] {
            w.backend->attend(
                {.layer = 1, .q = q.view, .write = AlreadyWritten{}, .selection = {}, .out = out.view, .lse = {}});
          }),
          "selection is not given; accepted: TopKSelection or AttendAll"));
  World m = small_world();
  m.backend->prepare(m.step());
  EXPECT_TRUE(
      has(error_of([&] {
            m.backend->attend(
                {.layer = 1, .q = q.view, .write = AlreadyWritten{}, .selection = {}, .out = out.view, .lse = {}});
          }),
          "selection is not given; accepted: AttendAll"));
  EXPECT_TRUE(has(error_of(
                      [&] {
                        m.backend->attend({.layer = 1,
                                           .q = q.view,
                                           .write = AlreadyWritten{},
                                           .selection = TopKSelection{},
                                           .out = out.view,
                                           .lse = {}});
                      },
                      kUnsupported),
                  "TopKSelection; accepted: AttendAll"));
  EXPECT_TRUE(has(error_of([&] { m.backend->select({}); }, kUnsupported), "no indexer"));
}

// The reference lets a prefix plus new tokens beyond index_topk slip through (spec 6.36).
TEST(AttentionArguments, AttendAllCountsTheFullContext) {
  World fits = small_world(dsa(73)), over = small_world(dsa(72));
  const auto attend = [](World& w, StepRows part) {
    const Tensor q = w.q_absorbed(part), out = w.out(part);
    const World::Kv kv = w.kv(1, part);
    w.backend->attend({.layer = 1,
                       .rows = part,
                       .q = q.view,
                       .write = kv.rows(),
                       .selection = AttendAll{},
                       .out = out.view,
                       .lse = {}});
  };
  const auto prefill = [](World& w) {
    const World::Kv kv = w.kv(1, StepRows::kPrefill);
    const Tensor q = w.q_expanded(StepRows::kPrefill), k = w.k_nope(), v = w.v(),
                 out(DType::kF32, {w.num_prefill, 2, World::kV});
    w.backend->dense_prefill({.layer = 1,
                              .q = q.view,
                              .k_nope = k.view,
                              .k_rope = kv.rope.view,
                              .v = v.view,
                              .write = kv.rows(),
                              .expand = w.expand(),
                              .out = out.view,
                              .lse = {}});
  };
  fits.backend->prepare(fits.step());
  over.backend->prepare(over.step());
  EXPECT_EQ(error_of([&] { attend(fits, StepRows::kPrefill); }), "");
  EXPECT_EQ(error_of([&] { prefill(fits); }), "");
  const std::string text = "a row of the step sees 73 tokens; accepted: at most index_topk, 72";
  EXPECT_TRUE(has(error_of([&] { attend(over, StepRows::kPrefill); }), text));
  EXPECT_TRUE(has(error_of([&] { attend(over, StepRows::kDecode); }), text));
  EXPECT_TRUE(has(error_of([&] { prefill(over); }), text));
}

TEST(AttentionArguments, ShapesAreThoseOfTheConfig) {
  World w = small_world(dsa(64));
  w.backend->prepare(w.step());
  const int64_t n = w.num_rows();
  const Tensor q = w.q_absorbed(), out = w.out(), iq = w.index_q(), weights = w.index_weights(),
               short_lse(DType::kF32, {n - 1, 2});
  SelectionBuffer buffer(64, false);
  buffer.reserve(n + 1);
  const World::Kv kv0 = w.kv(0), kv1 = w.kv(1);
  const auto attend = [&](auto&& change) {
    AttendCall c{.layer = 1,
                 .rows = StepRows::kAll,
                 .q = q.view,
                 .write = kv1.rows(),
                 .selection = buffer.view(n),
                 .out = out.view,
                 .lse = {}};
    change(c);
    w.backend->attend(c);
  };
  std::fill_n(buffer.view(n).lens.ptr<int32_t>(), n, 0);
  const auto with_rows = [&](auto&& change) {
    return [&kv1, change](AttendCall& c) {
      KvRows rows = kv1.rows();
      change(rows);
      c.write = rows;
    };
  };
  const auto with_selection = [&](auto&& change) {
    return [&buffer, n, change](AttendCall& c) {
      TopKSelection s = buffer.view(n);
      change(s);
      c.selection = s;
    };
  };
  using A = AttendCall;
  expect_refused<A>(
      "dsa attend", attend,
      {
          {"q is fp32[4, 3, 576] strides [1152, 576, 1] on cpu; accepted: fp32 or bf16 [4, 2, 576]",
           [](A& c) { c.q.shape[1] = 3; }},
          {"q is fp16[4, 2, 576]", [](A& c) { c.q.dtype = DType::kF16; }},
          {"out is fp32[4, 2, 128]", [](A& c) { c.out.shape[2] = 128; }},
          {"lse is fp32[3, 2] strides [2, 1] on cpu; accepted: fp32 [4, 2]", [&](A& c) { c.lse = short_lse.view; }},
          {"layer is 2; accepted: 0 to 1", [](A& c) { c.layer = 2; }},
          {"layer is -1; accepted: 0 to 1", [](A& c) { c.layer = -1; }},
          {"rows is 3; accepted: a StepRows", [](A& c) { c.rows = static_cast<StepRows>(3); }},
          {"write is not given; accepted: AlreadyWritten, or the KvRows", [](A& c) { c.write = {}; }},
          {"selection is not given; accepted: TopKSelection or AttendAll", [](A& c) { c.selection = {}; }},
          {"selection.slots is int32[5, 64]", [&](A& c) { c.selection = buffer.view(n + 1); }},
          {"selection.slots is int32[0, 64]", [&](A& c) { c.selection = SelectionBuffer(64, false).view(0); }},
          {"accepted: int32 [4, 64]", with_selection([](TopKSelection& s) { s.slots.shape[1] = 63; })},
          {"selection.lens is absent; accepted: int32 [4]", with_selection([](TopKSelection& s) { s.lens = {}; })},
          {"selection.positions is int32[4]", with_selection([](TopKSelection& s) { s.positions = s.lens; })},
          {"write has the rows of layer 0, which has an index cache: they are written before select",
           [&](A& c) {
             c.layer = 0;
             c.write = kv0.rows();
           }},
          {"index_k is fp32[4, 128] strides [128, 1] on cpu; layer 1 has no index cache",
           [&](A& c) { c.write = kv0.rows(); }},
          {"latent is fp32[1, 512]", with_rows([](KvRows& r) { r.latent.shape[0] = 1; })},
          {"rope is fp32[4, 32]", with_rows([](KvRows& r) { r.rope.shape[1] = 32; })},
      });
  const auto select = [&](auto&& change) {
    SelectCall c{.layer = 0,
                 .rows = StepRows::kAll,
                 .q = iq.view,
                 .weights = weights.view,
                 .write = kv0.rows(),
                 .out = buffer.view(n)};
    change(c);
    w.backend->select(c);
  };
  using S = SelectCall;
  expect_refused<S>(
      "dsa select", select,
      {
          {"q is fp32[4, 8, 64]", [](S& c) { c.q.shape[2] = 64; }},
          {"weights is bf16", [](S& c) { c.weights.dtype = DType::kBf16; }},
          {"index_k is absent; layer 0 has an index cache", [&](S& c) { c.write = kv1.rows(); }},
          {"layer 1 has no index cache; accepted: the selection of an earlier layer", [](S& c) { c.layer = 1; }},
          {"write is not given; accepted: AlreadyWritten, or the KvRows", [](S& c) { c.write = {}; }},
          {"rows is 9; accepted: a StepRows", [](S& c) { c.rows = static_cast<StepRows>(9); }},
          {"selection.slots is absent; accepted: int32 [4, 64]", [](S& c) { c.out = {}; }},
      });
  const World::Kv all = w.kv(1);
  expect_refused<StepRows>("dsa write",
                           [&](auto&& change) {
                             StepRows rows = StepRows::kAll;
                             change(rows);
                             w.backend->write(1, rows, all.rows());
                           },
                           {{"rows is 7; accepted: a StepRows", [](StepRows& r) { r = static_cast<StepRows>(7); }}});
  EXPECT_TRUE(has(error_of([&] { (void)buffer.view(n + 2); }), "rows 6 from 0 are wanted; the buffer has room for 5"));
  EXPECT_TRUE(has(error_of([] { SelectionBuffer none(0, false); }), "topk is 0; accepted: 1 and more"));
  EXPECT_TRUE(has(error_of([&] { buffer.reserve(-1); }), "rows is -1; accepted: 0 and more"));
  EXPECT_TRUE(has(error_of([&] { buffer.reserve(int64_t{1} << 60); }), "the size is "));
}

TEST(AttentionArguments, DensePrefillChecks) {
  World w = small_world();
  w.backend->prepare(w.step());
  const World::Kv kv = w.kv(1, StepRows::kPrefill);
  const Tensor q = w.q_expanded(StepRows::kPrefill), k = w.k_nope(), v = w.v(),
               out(DType::kF32, {w.num_prefill, 2, World::kV}), lse(DType::kF32, {w.num_prefill, 2});
  using C = DensePrefillCall;
  const auto call = [&](auto&& change) {
    C c{.layer = 1,
        .q = q.view,
        .k_nope = k.view,
        .k_rope = kv.rope.view,
        .v = v.view,
        .write = kv.rows(),
        .expand = w.expand(),
        .out = out.view,
        .lse = lse.view};
    change(c);
    return c;
  };
  const std::vector<Wrong<C>> both = {
      {"q is fp32[3, 2, 128] strides [384, 192, 1] on cpu; accepted: fp32 or bf16 [3, 2, 192]",
       [](C& c) { c.q.shape[2] = 128; }},
      {"k_nope is fp32[3, 2, 64]", [](C& c) { c.k_nope.shape[2] = 64; }},
      {"k_rope is absent; accepted: fp32 [3, 64]", [](C& c) { c.k_rope = {}; }},
      {"v is bf16[3, 2, 128] strides [256, 128, 1] on cpu; accepted: fp32 [3, 2, 128]",
       [](C& c) { c.v.dtype = DType::kBf16; }},
      {"out is fp32[2, 2, 128]", [](C& c) { c.out.shape[0] = 2; }},
      {"lse is bf16", [](C& c) { c.lse.dtype = DType::kBf16; }},
      {"write is not given", [](C& c) { c.write = {}; }},
      {"layer is 2; accepted: 0 to 1", [](C& c) { c.layer = 2; }},
  };
  const auto dense = [&](auto&& change) { w.backend->dense_prefill(call(change)); };
  const auto new_tokens = [&](auto&& change) { w.backend->prefill_new_tokens(call(change)); };
  expect_refused<C>("mla dense_prefill", dense, both);
  expect_refused<C>("mla dense_prefill", dense,
                    {{"expand is not given; a request of the step has a prefix", [](C& c) { c.expand = {}; }}});
  expect_refused<C>("mla prefill_new_tokens", new_tokens, both);
  expect_refused<C>("mla prefill_new_tokens", new_tokens,
                    {{"lse is absent; accepted: fp32 [3, 2]", [](C& c) { c.lse = {}; }}});

  const Tensor latent(DType::kF32, {70, World::kR}), rope(DType::kF32, {70, World::kP}),
      k_prefix(DType::kF32, {70, 2, World::kN}), v_prefix(DType::kF32, {70, 2, World::kV});
  struct Gather {
    int32_t layer = 1;
    int64_t chunk = 0;
    TensorView latent, rope;
  };
  expect_refused<Gather>("mla gather_prefix",
                         [&](auto&& change) {
                           Gather g{1, 0, latent.view, rope.view};
                           change(g);
                           w.backend->gather_prefix(g.layer, g.chunk, g.latent, g.rope);
                         },
                         {
                             {"chunk is 1; the step has 1 prefix chunks", [](Gather& g) { g.chunk = 1; }},
                             {"chunk is -1; the step has 1 prefix chunks", [](Gather& g) { g.chunk = -1; }},
                             {"layer is 7; accepted: 0 to 1", [](Gather& g) { g.layer = 7; }},
                             {"latent is absent; accepted: fp32 or bf16 [70, 512]", [](Gather& g) { g.latent = {}; }},
                             {"rope is bf16", [](Gather& g) { g.rope.dtype = DType::kBf16; }},
                         });
  using P = PrefixPassCall;
  expect_refused<P>("mla prefill_prefix",
                    [&](auto&& change) {
                      P p{.layer = 1,
                          .chunk = 0,
                          .q = q.view,
                          .k_nope = k_prefix.view,
                          .k_rope = rope.view,
                          .v = v_prefix.view,
                          .out = out.view,
                          .lse = lse.view};
                      change(p);
                      w.backend->prefill_prefix(p);
                    },
                    {
                        {"chunk is 1; the step has 1 prefix chunks", [](P& p) { p.chunk = 1; }},
                        {"layer is 7; accepted: 0 to 1", [](P& p) { p.layer = 7; }},
                        {"q is fp32[2, 2, 192]", [](P& p) { p.q.shape[0] = 2; }},
                        {"k_nope is fp32[69, 2, 128]", [](P& p) { p.k_nope.shape[0] = 69; }},
                        {"k_rope is fp32[69, 64]", [](P& p) { p.k_rope.shape[0] = 69; }},
                        {"v is fp32[70, 1, 128]", [](P& p) { p.v.shape[1] = 1; }},
                        {"out is bf16", [](P& p) { p.out.dtype = DType::kBf16; }},
                        {"lse is absent; accepted: fp32 [3, 2]", [](P& p) { p.lse = {}; }},
                    });

  // Dense prefill needs widths that attention in the absorbed form does not.
  AttentionConfig absorbed_only = w.config();
  absorbed_only.v_head_dim = 0;
  const auto backend = make_attention_backend(w.context, absorbed_only);
  backend->bind(w.layers());
  backend->prepare(w.step());
  EXPECT_TRUE(
      has(error_of([&] { backend->dense_prefill(call([](C&) {})); }),
          "[mla dense_prefill] qk_nope_head_dim is 128 and v_head_dim 0 in the config; dense prefill needs both"));
}

TEST(AttentionArguments, UniformBlocksOfAMixedStepGoByThemselves) {
  World w(WorldOptions{}, {{.prefix = 5, .rows = 2, .id = 1}}, {{.prefix = 9, .rows = 2, .id = 2}}, 2);
  BatchStep step = w.step();
  step.decode_bound = RowBound::kUniformBlock;
  w.backend->prepare(step);
  const Tensor q = w.q_absorbed(), out = w.out();
  EXPECT_TRUE(has(error_of(
                      [&] {
                        w.backend->attend({.layer = 0,
                                           .q = q.view,
                                           .write = AlreadyWritten{},
                                           .selection = AttendAll{},
                                           .out = out.view,
                                           .lse = {}});
                      },
                      kUnsupported),
                  "uniform_block"));
}

}  // namespace
}  // namespace gannet_test
