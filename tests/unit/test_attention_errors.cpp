// What the backends refuse, and how they say it.
#include <gtest/gtest.h>

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
  EXPECT_TRUE(has(error_of([&] { builtin.add(mine); }), "serves no architecture"));
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

template <class F>
std::string config_error(const WorldOptions& o, F&& change, ErrorCode code = ErrorCode::kInvalidArgument) {
  const Context context;
  AttentionConfig c = small_world(o).config();
  change(c);
  return error_of([&] { make_attention_backend(context, c); }, code);
}

TEST(AttentionConfig, NamesWhatIsWrong) {
  const WorldOptions mla;
  using C = AttentionConfig;
  EXPECT_EQ(config_error(mla, [](C&) {}), "");
  EXPECT_EQ(config_error(mla, [](C& c) { c.page_size = 32; }), "");
  EXPECT_TRUE(
      has(config_error(mla, [](C& c) { c.page_size = 48; }), "[mla config] page_size is 48; accepted: 32 or 64"));
  EXPECT_TRUE(has(config_error(dsa(), [](C& c) { c.page_size = 32; }), "[dsa config] page_size is 32; accepted: 64"));
  EXPECT_TRUE(has(config_error(
                      mla, [](C& c) { c.logit_soft_cap = 30; }, kUnsupported),
                  "logit_soft_cap is 30"));
  EXPECT_TRUE(has(config_error(
                      dsa(), [](C& c) { c.logit_soft_cap = 30; }, kUnsupported),
                  "logit_soft_cap is 30"));
  EXPECT_TRUE(has(config_error(dsa(), [](C& c) { c.q_lora_rank = 0; }), "q_lora_rank is 0"));
  EXPECT_TRUE(has(config_error(dsa(), [](C& c) { c.indexer.topk = 0; }), "indexer.topk is 0"));
  EXPECT_TRUE(has(config_error(dsa(), [](C& c) { c.indexer.num_heads = 0; }), "indexer.num_heads is 0"));
  EXPECT_TRUE(has(config_error(dsa(), [](C& c) { c.indexer.head_dim = 32; }), "indexer.head_dim is 32"));
  EXPECT_TRUE(has(config_error(mla, [](C& c) { c.softmax_scale = 0; }), "softmax_scale is 0"));
  EXPECT_TRUE(has(config_error(mla, [](C& c) { c.softmax_scale = std::nanf(""); }), "softmax_scale is nan"));
  EXPECT_TRUE(has(config_error(mla, [](C& c) { c.num_heads = 0; }), "num_heads is 0"));
  EXPECT_TRUE(has(config_error(mla, [](C& c) { c.geometry.latent_dim = 0; }), "latent_dim is 0"));
  EXPECT_TRUE(has(config_error(mla, [](C& c) { c.geometry.rope_dim = 0; }), "rope_dim is 0"));
  EXPECT_TRUE(has(config_error(mla, [](C& c) { c.v_head_dim = -1; }), "v_head_dim is -1"));
  EXPECT_TRUE(has(config_error(mla, [](C& c) { c.max_context_len = 0; }), "max_context_len is 0"));
  EXPECT_TRUE(has(config_error(mla, [](C& c) { c.prefix_chunk_capacity = 0; }), "prefix_chunk_capacity is 0"));
  EXPECT_TRUE(has(config_error(mla, [](C& c) { c.plan.impl = "sse9"; }), "impl is \"sse9\"; accepted: "));
  EXPECT_TRUE(has(config_error(dsa(),
                               [](C& c) {
                                 c.device = {DeviceKind::kCuda, 1};
                               }),
                  "the memory resource is on cpu; accepted: memory of cuda:1, the device of the config"));
}

TEST(AttentionBind, NamesWhatIsWrong) {
  const auto text = [](const WorldOptions& o, auto&& change, ErrorCode code = ErrorCode::kInvalidArgument) {
    World w = small_world(o);
    std::vector<LayerCaches> layers = w.layers();
    change(layers);
    return error_of([&] { w.backend->bind(layers); }, code);
  };
  using L = std::vector<LayerCaches>;
  const WorldOptions mla;
  EXPECT_EQ(text(dsa(), [](L&) {}), "");
  EXPECT_TRUE(has(text(mla, [](L& l) { l.clear(); }), "no layers"));
  EXPECT_TRUE(has(text(mla, [](L& l) { l[1].latent.page_size = 32; }), "page_size of layer 1 is 32"));
  EXPECT_TRUE(
      has(text(mla, [](L& l) { l[1].latent.geometry.latent_dim = 256; }), "the latent rows of layer 1 are 256 + 64"));
  EXPECT_TRUE(has(text(mla, [](L& l) { l[1].latent.num_pages = 3; }), "layer 1 has 3 pages"));
  EXPECT_TRUE(has(text(mla, [](L& l) { l[0].latent.data = nullptr; }), "latent.data of layer 0 is null"));
  EXPECT_TRUE(has(text(mla, [](L& l) { l[0].latent.device = {DeviceKind::kCuda, 0}; }), "is on cuda:0"));
  EXPECT_TRUE(has(text(
                      dsa(), [](L& l) { l[0].latent.format = LatentFormat::kE4m3PerToken; }, kUnsupported),
                  "e4m3_per_token; accepted: fp32"));
  EXPECT_TRUE(has(text(mla, [](L& l) { l[0].index.emplace(); }), "layer 0 has an index cache; accepted: none"));
  EXPECT_TRUE(has(text(dsa(), [](L& l) { l[0].index->head_dim = 64; }), "index head_dim of layer 0 is 64"));
  EXPECT_TRUE(has(text(dsa(), [](L& l) { l[0].index->num_pages = 1; }), "the index cache of layer 0 has 1 pages"));
  // What no implementation takes is refused here, not by the first layer of the first step.
  EXPECT_TRUE(has(text(mla,
                       [](L& l) {
                         for (LayerCaches& c : l) c.latent.page_stride_bytes = 16;
                       }),
                  "page_stride_bytes is 16"));
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
    return error_of([&] { w.backend->attend(c); });
  };
  EXPECT_TRUE(has(attend([](AttendCall& c) { c.q.shape[1] = 3; }), "q is fp32[4, 3, 576]"));
  EXPECT_TRUE(has(attend([](AttendCall& c) { c.q.dtype = DType::kF16; }), "accepted: fp32 or bf16 [4, 2, 576]"));
  EXPECT_TRUE(has(attend([](AttendCall& c) { c.out.shape[2] = 128; }), "out is fp32[4, 2, 128]"));
  EXPECT_TRUE(has(attend([&](AttendCall& c) { c.lse = short_lse.view; }), "lse is fp32[3, 2]"));
  EXPECT_TRUE(has(attend([](AttendCall& c) { c.layer = 2; }), "layer is 2; accepted: 0 to 1"));
  EXPECT_TRUE(has(attend([&](AttendCall& c) { c.selection = buffer.view(n + 1); }), "selection.slots is int32[5, 64]"));
  EXPECT_TRUE(has(attend([&](AttendCall& c) { c.selection = SelectionBuffer(64, false).view(0); }),
                  "selection.slots is int32[0, 64]"));
  EXPECT_TRUE(has(attend([&](AttendCall& c) {
                    TopKSelection s = buffer.view(n);
                    s.slots.shape[1] = 63;
                    c.selection = s;
                  }),
                  "accepted: int32 [4, 64]"));
  EXPECT_TRUE(has(attend([&](AttendCall& c) {
                    c.layer = 0;
                    c.write = kv0.rows();
                  }),
                  "they are written before select"));
  EXPECT_TRUE(has(attend([&](AttendCall& c) { c.write = kv0.rows(); }), "layer 1 has no index cache"));
  EXPECT_TRUE(has(attend([&](AttendCall& c) {
                    KvRows rows = kv1.rows();
                    rows.latent.shape[0] = 1;
                    c.write = rows;
                  }),
                  "latent is fp32[1, 512]"));
  const auto select = [&](auto&& change) {
    SelectCall c{.layer = 0,
                 .rows = StepRows::kAll,
                 .q = iq.view,
                 .weights = weights.view,
                 .write = kv0.rows(),
                 .out = buffer.view(n)};
    change(c);
    return error_of([&] { w.backend->select(c); });
  };
  EXPECT_EQ(select([](SelectCall&) {}), "");
  EXPECT_TRUE(has(select([](SelectCall& c) { c.q.shape[2] = 64; }), "q is fp32[4, 8, 64]"));
  EXPECT_TRUE(has(select([](SelectCall& c) { c.weights.dtype = DType::kBf16; }), "weights is bf16"));
  EXPECT_TRUE(
      has(select([&](SelectCall& c) { c.write = kv1.rows(); }), "index_k is absent; layer 0 has an index cache"));
  EXPECT_TRUE(has(select([](SelectCall& c) { c.layer = 1; }), "layer 1 has no index cache"));
  EXPECT_TRUE(has(error_of([&] { (void)buffer.view(n + 2); }), "rows 6 from 0"));
  EXPECT_TRUE(has(error_of([] { SelectionBuffer none(0, false); }), "topk is 0"));
}

TEST(AttentionArguments, DensePrefillChecks) {
  World w = small_world();
  w.backend->prepare(w.step());
  const World::Kv kv = w.kv(1, StepRows::kPrefill);
  const Tensor q = w.q_expanded(StepRows::kPrefill), k = w.k_nope(), v = w.v(),
               out(DType::kF32, {w.num_prefill, 2, World::kV});
  const auto text = [&](auto&& change, ErrorCode code = ErrorCode::kInvalidArgument) {
    DensePrefillCall c{.layer = 1,
                       .q = q.view,
                       .k_nope = k.view,
                       .k_rope = kv.rope.view,
                       .v = v.view,
                       .write = kv.rows(),
                       .expand = w.expand(),
                       .out = out.view,
                       .lse = {}};
    change(c);
    return error_of([&] { w.backend->dense_prefill(c); }, code);
  };
  using C = DensePrefillCall;
  EXPECT_EQ(text([](C&) {}), "");
  EXPECT_TRUE(has(text([](C& c) { c.expand = {}; }), "expand is not given"));
  EXPECT_TRUE(has(text([](C& c) { c.q.shape[2] = 128; }), "q is fp32[3, 2, 128]"));
  EXPECT_TRUE(has(text([](C& c) { c.v.dtype = DType::kBf16; }), "v is bf16"));
  EXPECT_TRUE(has(text([](C& c) { c.k_rope = {}; }), "k_rope is absent"));
  EXPECT_TRUE(has(text([](C& c) { c.write = {}; }), "write is not given"));
  EXPECT_TRUE(
      has(error_of([&] { w.backend->gather_prefix(1, 1, {}, {}); }), "chunk is 1; the step has 1 prefix chunks"));
  EXPECT_TRUE(has(error_of([&] { w.backend->gather_prefix(1, 0, {}, {}); }), "latent is absent"));
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
