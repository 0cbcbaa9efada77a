// Records of written layers and gates of layers that are being brought in (spec 1.8, trap 6.20, BL-42), on every path
// and every implementation.
#include <gtest/gtest.h>

#include <chrono>
#include <iostream>
#include <optional>
#include <set>
#include <thread>

#include "gannet/layer_gate.h"
#include "unit/attention_world.h"

namespace gannet_test {
namespace {

// ---- the paths through a layer ------------------------------------------------------------------------------------

/// What a path produces, to compare runs.
using Outputs = std::vector<Tensor>;

struct Path {
  const char* name;
  AttentionArch arch;
  bool prefill;        ///< the step extends
  int32_t num_layers;  ///< that the path goes through, from layer 0
  Outputs (*run)(World&);
};

Outputs attend(World& w, StepRows part, int32_t layer, StepWrite write, Selection selection = AttendAll{}) {
  Tensor out = w.out(part), lse = w.lse(part);
  const Tensor q = w.q_absorbed(part);
  w.backend->attend({.layer = layer,
                     .rows = part,
                     .q = q.view,
                     .write = write,
                     .selection = selection,
                     .out = out.view,
                     .lse = lse.view});
  Outputs o;
  o.push_back(std::move(out));
  o.push_back(std::move(lse));
  return o;
}

void append(Outputs& all, Outputs more) {
  for (Tensor& t : more) all.push_back(std::move(t));
}

struct PrefillTensors {
  explicit PrefillTensors(const World& w)
      : kv(w.kv(0, StepRows::kPrefill)),
        q(w.q_expanded(StepRows::kPrefill)),
        k(w.k_nope()),
        v(w.v()),
        out(w.options.dtype, {w.num_prefill, w.options.num_heads, World::kV}),
        lse(w.lse(StepRows::kPrefill)) {}
  DensePrefillCall call(const StepWrite& write, ExpandLatent expand) const {
    return {.layer = 0,
            .q = q.view,
            .k_nope = k.view,
            .k_rope = kv.rope.view,
            .v = v.view,
            .write = write,
            .expand = std::move(expand),
            .out = out.view,
            .lse = lse.view};
  }
  Outputs outputs() {
    Outputs o;
    o.push_back(std::move(out));
    o.push_back(std::move(lse));
    return o;
  }
  World::Kv kv;
  Tensor q, k, v, out, lse;
};

Outputs by_hand(World& w) {
  PrefillTensors t(w);
  w.backend->prefill_new_tokens(t.call(t.kv.rows(), {}));
  const auto& chunks = w.backend->step().prefix_chunks().chunks;
  for (size_t i = 0; i < chunks.size(); ++i) {
    const int64_t n = chunks[i].num_tokens;
    const auto chunk = static_cast<int64_t>(i);
    const Tensor c(w.options.dtype, {n, World::kR}), rope(w.options.dtype, {n, World::kP});
    const Tensor k(w.options.dtype, {n, w.options.num_heads, World::kN}),
        v(w.options.dtype, {n, w.options.num_heads, World::kV});
    w.backend->gather_prefix(0, chunk, c.view, rope.view);
    w.expand()(c.view, k.view, v.view);
    w.backend->prefill_prefix({.layer = 0,
                               .chunk = chunk,
                               .q = t.q.view,
                               .k_nope = k.view,
                               .k_rope = rope.view,
                               .v = v.view,
                               .out = t.out.view,
                               .lse = t.lse.view});
  }
  return t.outputs();
}

Outputs sparse(World& w, StepRows part) {
  SelectionBuffer buffer(w.options.topk, true, w.memory);
  const int64_t rows = w.end(part) - w.begin(part);
  buffer.reserve(rows);
  const TopKSelection selection = buffer.view(rows);
  const World::Kv kv = w.kv(0, part), shared = w.kv(1, part);
  const Tensor iq = w.index_q(part), weights = w.index_weights(part);
  w.backend->select(
      {.layer = 0, .rows = part, .q = iq.view, .weights = weights.view, .write = kv.rows(), .out = selection});
  Outputs o = attend(w, part, 0, AlreadyWritten{}, selection);
  append(o, attend(w, part, 1, shared.rows(), selection));
  return o;
}

/// A draft: all rows of the target's step are written, then one row a request is attended.
Outputs draft(World& w) {
  const World::Kv kv = w.kv(0);
  w.backend->write(0, StepRows::kAll, kv.rows());
  std::vector<int32_t> accepted(w.requests.size() - static_cast<size_t>(w.num_extends), 1);
  std::vector<int32_t> rows(w.requests.size()), lens(w.requests.size());
  narrow_rows(w.backend->step(), accepted, rows);
  narrow_seq_lens(w.backend->step(), accepted, lens);
  w.backend->prepare({.seq_lens = lens, .prefix_lens = {}, .extend_lens = {}, .q_len = 1, .pages = w.table->view()});
  const Tensor all = w.q_absorbed();
  const auto n = static_cast<int64_t>(rows.size());
  const Tensor q(w.options.dtype, {n, w.options.num_heads, World::kR + World::kP});
  Tensor out(w.options.dtype, {n, w.options.num_heads, World::kR});
  const size_t bytes = q.bytes() / rows.size();
  for (size_t i = 0; i < rows.size(); ++i)
    std::memcpy(static_cast<std::byte*>(q.view.data) + i * bytes, all.rows(rows[i], rows[i] + 1).data, bytes);
  w.backend->attend(
      {.layer = 0, .q = q.view, .write = AlreadyWritten{}, .selection = AttendAll{}, .out = out.view, .lse = {}});
  Outputs o;
  o.push_back(std::move(out));
  return o;
}

constexpr AttentionArch kMla = AttentionArch::kMla, kDsa = AttentionArch::kDsa;
const Path kPaths[] = {
    {"absorbed prefill", kMla, true, 1,
     [](World& w) { return attend(w, StepRows::kPrefill, 0, w.kv(0, StepRows::kPrefill).rows()); }},
    {"absorbed mixed step", kMla, true, 1, [](World& w) { return attend(w, StepRows::kAll, 0, w.kv(0).rows()); }},
    {"mixed step in two calls", kMla, true, 1,
     [](World& w) {
       Outputs o = attend(w, StepRows::kDecode, 0, w.kv(0, StepRows::kDecode).rows());
       append(o, attend(w, StepRows::kPrefill, 0, w.kv(0, StepRows::kPrefill).rows()));
       return o;
     }},
    {"write, then absorbed", kMla, true, 1,
     [](World& w) {
       w.backend->write(0, StepRows::kAll, w.kv(0).rows());
       return attend(w, StepRows::kAll, 0, AlreadyWritten{});
     }},
    {"dense prefill", kMla, true, 1,
     [](World& w) {
       PrefillTensors t(w);
       w.backend->dense_prefill(t.call(t.kv.rows(), w.expand()));
       return t.outputs();
     }},
    {"write, dense prefill, decode", kMla, true, 1,
     [](World& w) {
       w.backend->write(0, StepRows::kAll, w.kv(0).rows());
       PrefillTensors t(w);
       w.backend->dense_prefill(t.call(AlreadyWritten{}, w.expand()));
       Outputs o = t.outputs();
       append(o, attend(w, StepRows::kDecode, 0, AlreadyWritten{}));
       return o;
     }},
    {"dense prefill by hand", kMla, true, 1, by_hand},
    {"draft", kMla, true, 1, draft},
    {"sparse prefill", kDsa, true, 2, [](World& w) { return sparse(w, StepRows::kPrefill); }},
    {"sparse mixed step", kDsa, true, 2, [](World& w) { return sparse(w, StepRows::kAll); }},
    {"dense prefill of dsa", kDsa, true, 1,
     [](World& w) {
       World::Kv kv = w.kv(0, StepRows::kPrefill);
       PrefillTensors t(w);
       w.backend->dense_prefill(t.call(kv.rows(), w.expand()));
       return t.outputs();
     }},
    {"draft of dsa", kDsa, true, 1, draft},
    {"decode", kMla, false, 1, [](World& w) { return attend(w, StepRows::kAll, 0, w.kv(0).rows()); }},
    {"sparse decode", kDsa, false, 2, [](World& w) { return sparse(w, StepRows::kAll); }},
};

/// Rows of both kinds, prefixes of one, two and no pages, in chunks of 64 tokens.
World world_of(const Path& path, WorldOptions o) {
  o.arch = path.arch;
  o.topk = 300;  // all keys of every row: dense attention is allowed as well
  o.chunk_capacity = 128;
  std::vector<Request> extends;
  if (path.prefill)
    extends = {
        {.prefix = 70, .rows = 3, .id = 1}, {.prefix = 0, .rows = 5, .id = 2}, {.prefix = 130, .rows = 1, .id = 3}};
  return World(o, extends, {{.prefix = 63, .rows = 2, .id = 4}, {.prefix = 5, .rows = 2, .id = 5}}, 2);
}

class EveryPath : public testing::TestWithParam<ImplCase> {
 protected:
  void SetUp() override {
    std::cout << "implementation " << GetParam().impl << ", " << GetParam().formats.name << "\n";
  }
  WorldOptions options() const {
    const Formats& f = GetParam().formats;
    return {.impl = GetParam().impl, .dtype = f.dtype, .latent_format = f.latent, .index_format = f.index};
  }
};
INSTANTIATE_TEST_SUITE_P(Attention, EveryPath, testing::ValuesIn(impl_cases()), case_name);

/// Whether all rows of the step's extend requests are in a layer's caches: fresh pools are full of 0xff, NaN in every
/// format, which no row holds.
bool rows_are_there(const World& w, int32_t layer) {
  wait_for_device();  // where "written" means enqueued
  const StepPlan& step = w.backend->step();
  const Range rows = step.rows(StepRows::kPrefill);
  const auto fresh = [](const std::byte* p, int64_t n) {
    return std::all_of(p, p + n, [](std::byte b) { return b == std::byte{0xff}; });
  };
  for (int64_t i = rows.begin; i < rows.end; ++i) {
    const int32_t slot = step.write_slots()[static_cast<size_t>(i)];
    const LatentCacheView c = w.latent->layer(layer);
    const int64_t bytes = latent_row_bytes(c.format, c.geometry);
    if (fresh(c.row(slot, bytes), bytes)) return false;
    if (w.index == nullptr || !w.index->has_layer(layer)) continue;
    const IndexCacheView k = w.index->layer(layer);
    if (fresh(k.values(slot), k.head_dim)) return false;
    if (k.format == IndexKFormat::kE4m3 && fresh(reinterpret_cast<std::byte*>(k.scale(slot)), 4)) return false;
  }
  return true;
}

/// Keeps the records of a world's backend, for as long as it lives itself.
struct Records {
  explicit Records(World& w) : world(w) {
    w.backend->set_layer_hooks({.record =
                                    [this, &w](int32_t layer, LayerRecord r) {
                                      all.emplace_back(layer, r);
                                      if (r == LayerRecord::kWritten) {
                                        EXPECT_TRUE(rows_are_there(w, layer));
                                      }
                                    },
                                .wait = {}});
  }
  ~Records() {
    if (world.backend != nullptr) world.backend->set_layer_hooks({});
  }
  Records(const Records&) = delete;
  Records& operator=(const Records&) = delete;

  using All = std::vector<std::pair<int32_t, LayerRecord>>;
  World& world;
  All all;
};

constexpr LayerRecord kWritten = LayerRecord::kWritten, kAbandoned = LayerRecord::kAbandoned;

// ---- records ------------------------------------------------------------------------------------------------------

TEST_P(EveryPath, MakesOneRecordALayerAPrefillStep) {
  for (const Path& path : kPaths) {
    SCOPED_TRACE(path.name);
    World w = world_of(path, options());
    Records records(w);
    for (int step = 0; step < 2; ++step) {
      records.all.clear();
      w.backend->prepare(w.step());
      path.run(w);
      Records::All expected;
      if (path.prefill)
        for (int32_t l = 0; l < path.num_layers; ++l) expected.emplace_back(l, kWritten);
      // The draft has prepared its own step, with which the one that wrote has ended.
      const bool ended = path.run == draft;
      if (ended) expected.emplace_back(1, kAbandoned);
      EXPECT_EQ(records.all, expected);
      w.backend->prepare({});
      if (path.prefill && path.num_layers == 1 && !ended) expected.emplace_back(1, kAbandoned);
      EXPECT_EQ(records.all, expected);
    }
  }
}

// The index key is written after the latent row: whatever stops the writes, a layer is not called written before both
// are there, and it has one record all the same.
class FailingExecutor final : public Executor {
 public:
  int num_workers() const noexcept override { return 1; }
  void parallel_for(int64_t num_tasks, TaskRef f) override {
    if (calls_left-- == 0) throw std::runtime_error("no more");
    for (int64_t t = 0; t < num_tasks; ++t) f(t, 0);
  }
  int64_t calls_left = std::numeric_limits<int64_t>::max();
};

TEST_P(EveryPath, MakesOneRecordALayerWhateverFails) {
  for (const Path& path : kPaths) {
    if (!path.prefill) continue;
    SCOPED_TRACE(path.name);
    int failures = 0;
    for (int64_t calls = 0; calls < 1000; ++calls) {
      FailingExecutor executor;
      WorldOptions o = options();
      o.executor = &executor;
      World w = world_of(path, o);
      Records records(w);
      w.backend->prepare(w.step());
      executor.calls_left = calls;
      bool failed = false;
      try {
        path.run(w);
      } catch (const std::runtime_error& e) {
        failed = true;
        EXPECT_STREQ(e.what(), "no more");
      }
      w.backend->prepare({});
      ASSERT_EQ(records.all.size(), 2u) << "at call " << calls;
      std::set<int32_t> layers{records.all[0].first, records.all[1].first};
      EXPECT_EQ(layers, (std::set<int32_t>{0, 1}));
      if (!failed) break;
      ++failures;
    }
    EXPECT_LT(failures, 999);
    if (GetParam().impl != "ref" && device_of(GetParam().impl).kind == DeviceKind::kCpu) {  // others run nothing here
      EXPECT_GT(failures, 1);
    }
  }
}

TEST_P(EveryPath, KeepsTheRecordOfALayerWhoseAttentionFails) {
  World w = world_of(kPaths[4], options());
  Records records(w);
  w.backend->prepare(w.step());
  PrefillTensors t(w);
  EXPECT_THROW(w.backend->dense_prefill(
                   t.call(t.kv.rows(), [](const TensorView&, const TensorView&,
                                          const TensorView&) { throw std::runtime_error("out of memory"); })),
               std::runtime_error);
  EXPECT_EQ(records.all, (Records::All{{0, kWritten}}));
  w.backend->dense_prefill(t.call(AlreadyWritten{}, w.expand()));  // tried again: no second one
  EXPECT_EQ(records.all, (Records::All{{0, kWritten}}));
}

TEST(AttentionRecords, EndWithTheStep) {
  const auto ends = [](auto&& end, Records::All expected) {
    World w = world_of(kPaths[0], {});
    Records records(w);
    w.backend->prepare(w.step());
    w.backend->write(1, StepRows::kAll, w.kv(1).rows());
    end(w);
    EXPECT_EQ(records.all, expected);
    w.backend.reset();
    EXPECT_EQ(records.all, expected) << "once only";
  };
  const Records::All all{{1, kWritten}, {0, kAbandoned}};
  ends([](World& w) { w.backend->prepare({}); }, all);
  ends([](World& w) { w.backend->bind(w.layers()); }, all);
  ends([](World& w) { w.backend->set_layer_hooks({}); }, all);
  ends([](World& w) { w.backend.reset(); }, all);
  ends(
      [](World& w) {
        BatchStep bad = w.step();
        bad.q_len = 0;
        EXPECT_NE(error_of([&] { w.backend->prepare(bad); }), "");
      },
      all);
  ends(
      [](World& w) {  // a step that was refused needs no records
        BatchStep bad = w.step();
        bad.q_len = 0;
        EXPECT_NE(error_of([&] { w.backend->prepare(bad); }), "");
        w.backend->prepare({});
      },
      all);
}

TEST(AttentionRecords, MayThrow) {
  World w = world_of(kPaths[0], {});
  int calls = 0;
  w.backend->set_layer_hooks({.record =
                                  [&](int32_t, LayerRecord) {
                                    ++calls;
                                    throw std::runtime_error("link down");
                                  },
                              .wait = {}});
  w.backend->prepare(w.step());
  EXPECT_THROW(w.backend->write(0, StepRows::kAll, w.kv(0).rows()), std::runtime_error);
  w.backend->write(0, StepRows::kAll, w.kv(0).rows());  // it has been made
  EXPECT_EQ(calls, 1);
  w.backend->prepare({});  // abandons layer 1; its exception is dropped
  EXPECT_EQ(calls, 2);
}

// ---- gates --------------------------------------------------------------------------------------------------------

std::span<std::byte> bytes_of(const LatentCacheView& c) {
  return {static_cast<std::byte*>(c.data), static_cast<size_t>(c.num_pages * c.page_stride_bytes)};
}
std::span<std::byte> bytes_of(const IndexCacheView& c) {
  return {static_cast<std::byte*>(c.data), static_cast<size_t>(c.num_pages * c.page_stride_bytes)};
}

// BL-42: the rows of a layer arrive late, latent or index keys; nobody reads, and nobody writes, before they are there.
TEST_P(EveryPath, WaitsForALayerThatIsBroughtIn) {
  for (const Path& path : kPaths) {
    World prompt = world_of(path, options());
    prompt.backend->prepare(prompt.step());
    const Outputs expected = path.run(prompt);
    for (int32_t layer = 0; layer < path.num_layers; ++layer) {
      SCOPED_TRACE(testing::Message() << path.name << ", layer " << layer << " is late");
      World w = world_of(path, options());
      LayerGate gate(World::kLayers);
      w.backend->set_layer_hooks({.record = {}, .wait = [&](int32_t l) { gate.wait(l); }});
      w.backend->prepare(w.step());
      // Takes the rows away; another thread brings them in, whole pages, some time after the step has begun.
      std::vector<std::pair<std::span<std::byte>, std::vector<std::byte>>> planes;
      const auto take = [&](std::span<std::byte> bytes) {
        planes.emplace_back(bytes, std::vector<std::byte>(bytes.begin(), bytes.end()));
        std::fill(bytes.begin(), bytes.end(), std::byte{0xff});
      };
      take(bytes_of(w.latent->layer(layer)));
      if (w.index != nullptr && w.index->has_layer(layer)) take(bytes_of(w.index->layer(layer)));
      gate.close(layer);
      // Joins however the test is left: a thread that is still running would end the program.
      struct Joined {
        ~Joined() { thread.join(); }
        std::thread thread;
      };
      std::optional<Joined> loader;
      loader.emplace(std::thread([&] {
        for (const auto& [bytes, saved] : planes) {
          std::this_thread::sleep_for(std::chrono::milliseconds(3));
          std::copy(saved.begin(), saved.end(), bytes.begin());
        }
        gate.open(layer);
      }));
      const Outputs late = path.run(w);
      loader.reset();
      ASSERT_EQ(late.size(), expected.size());
      for (size_t i = 0; i < late.size(); ++i) EXPECT_TRUE(same_bits(late[i], expected[i])) << "output " << i;
    }
  }
}

TEST_P(EveryPath, TouchesNothingOfALayerThatDoesNotCome) {
  for (const Path& path : kPaths) {
    SCOPED_TRACE(path.name);
    World w = world_of(path, options());
    int records = 0;
    w.backend->set_layer_hooks({.record = [&](int32_t, LayerRecord r) { records += r == kWritten ? 1 : 0; },
                                .wait = [](int32_t) { throw std::runtime_error("not there"); }});
    w.backend->prepare(w.step());
    std::vector<std::vector<std::byte>> before;
    const auto each = [&](auto&& f) {
      for (int32_t l = 0; l < World::kLayers; ++l) f(bytes_of(w.latent->layer(l)));
      if (w.index != nullptr) f(bytes_of(w.index->layer(0)));
    };
    each([&](std::span<std::byte> b) { before.emplace_back(b.begin(), b.end()); });
    EXPECT_THROW(path.run(w), std::runtime_error);
    size_t i = 0;
    each([&](std::span<std::byte> b) { EXPECT_TRUE(std::equal(b.begin(), b.end(), before[i++].begin())); });
    w.backend->set_layer_hooks({});
    EXPECT_EQ(records, 0);
  }
}

// Each call by itself, rows written already: no reader relies on an earlier one having waited.
TEST(AttentionGates, EveryReaderWaits) {
  World w = world_of(kPaths[8], {});
  int waits = 0;
  w.backend->set_layer_hooks({.record = {}, .wait = [&](int32_t l) { waits += l == 0 ? 1 : 100; }});
  w.backend->prepare(w.step());
  const auto counts = [&](auto&& call) {
    waits = 0;
    call();
    return waits;
  };
  SelectionBuffer buffer(w.options.topk, false, w.memory);
  buffer.reserve(w.num_rows());
  const TopKSelection selection = buffer.view(w.num_rows());
  const Tensor iq = w.index_q(), weights = w.index_weights(), c(DType::kF32, {130, World::kR}),
               rope(DType::kF32, {130, World::kP});
  EXPECT_EQ(counts([&] { w.backend->write(0, StepRows::kAll, w.kv(0).rows()); }), 1);
  EXPECT_EQ(counts([&] {
              w.backend->select(
                  {.layer = 0, .q = iq.view, .weights = weights.view, .write = AlreadyWritten{}, .out = selection});
            }),
            1);
  EXPECT_EQ(counts([&] { attend(w, StepRows::kAll, 0, AlreadyWritten{}, selection); }), 1);
  EXPECT_EQ(counts([&] { attend(w, StepRows::kAll, 0, AlreadyWritten{}); }), 1);
  const int64_t n = w.backend->step().prefix_chunks().chunks[0].num_tokens;
  EXPECT_EQ(counts([&] { w.backend->gather_prefix(0, 0, c.rows(0, n), rope.rows(0, n)); }), 1);
  PrefillTensors t(w);
  EXPECT_EQ(counts([&] { w.backend->dense_prefill(t.call(AlreadyWritten{}, w.expand())); }),
            static_cast<int>(w.backend->step().prefix_chunks().chunks.size()));
}

}  // namespace
}  // namespace gannet_test
