// The C API against the C++ interface: every operation and every call of the backends, bit for bit.
#include <gtest/gtest.h>

#include <functional>

#include "unit/attention_world.h"
#include "unit/c_views.h"
#include "verify/problem.h"

namespace gannet_test {
namespace {

/// A context whose executor is a callback that does what a thread pool of three may do: tasks in any order.
class CContext {
 public:
  CContext() {
    const gannet_executor executor = {sizeof executor, this, 3, &CContext::run};
    gannet_context_options options{};
    options.struct_size = sizeof options;
    options.executor = &executor;
    must(gannet_context_create(&options, &context));
  }
  ~CContext() { gannet_context_free(&context); }
  CContext(const CContext&) = delete;
  CContext& operator=(const CContext&) = delete;
  gannet_context* context = nullptr;
  int64_t num_jobs = 0;

 private:
  static gannet_status run(void* user, int64_t num_tasks, gannet_task task, void* data) {
    ++static_cast<CContext*>(user)->num_jobs;
    for (int64_t t = num_tasks - 1; t >= 0; --t) task(data, t, static_cast<int32_t>((t * 7 + 1) % 3));
    return GANNET_OK;
  }
};

// ---- operations ---------------------------------------------------------------------------------------------------

/// The arguments of an operation with everything that they point to.
template <class Params>
struct Problem {
  Params p;
  std::vector<std::shared_ptr<void>> kept;
  std::span<std::byte> cache = {};  ///< where the operation writes one
  verify::Tensor keep(verify::Tensor t) {
    kept.push_back(t.buffer);
    return t;
  }
  TensorView normal(DType dtype, std::initializer_list<int64_t> shape, uint64_t seed) {
    const verify::Tensor t = keep(verify::make_tensor(dtype, shape));
    verify::fill_normal(t, verify::Rng(seed));
    return t.view;
  }
  TensorView empty(DType dtype, std::initializer_list<int64_t> shape) {
    return keep(verify::make_tensor(dtype, shape)).view;
  }
  TensorView ints(const std::vector<int32_t>& values) { return keep(verify::make_ints(values)).view; }
  verify::Paged& paged(verify::PagedSpec spec) {
    auto paged = std::make_shared<verify::Paged>(std::move(spec));
    kept.push_back(paged);
    return *paged;
  }
};

template <class Params>
int num_views() {
  int n = 0;
  Params p;
  Params::for_each_view(p, [&](const char*, TensorView&) { ++n; });
  return n;
}

/// Runs one problem through each interface, planned and at once, with every implementation that runs here.
template <class CArgs, class Params, class Make>
void expect_same(gannet_op_kind kind, int num_arguments, Make&& make) {
  EXPECT_EQ(num_views<Params>(), num_arguments) << Params::kName << " has another argument: c_api.h must have it too";
  const CContext c;
  int num_ran = 0;
  for (const ImplInfo& info : list_implementations<Params>()) {
    if (!info.runs_here || info.device != DeviceKind::kCpu) continue;
    SCOPED_TRACE(info.name);
    Problem<Params> one = make(), planned = make(), once = make();
    const gannet_plan_options options = {sizeof options, info.name.c_str(), 1};
    try {
      run_once(Context{}, one.p, {.impl = info.name});
    } catch (const Error& e) {  // what one refuses the other refuses in the same words
      std::printf("%s %s refuses: %s\n", Params::kName, info.name.c_str(), e.what());
      const CArgsOf<Params, CArgs> args(once.p, kind);
      EXPECT_EQ(gannet_run_once(c.context, &args.args.op, &options), static_cast<gannet_status>(e.code()));
      EXPECT_STREQ(gannet_last_error(), e.what());
      continue;
    }
    ++num_ran;
    std::printf("%s %s\n", Params::kName, info.name.c_str());
    {
      const CArgsOf<Params, CArgs> args(planned.p, kind);
      gannet_plan* plan = nullptr;
      must(gannet_plan_create(c.context, &args.args.op, &options, &plan));
      EXPECT_EQ(gannet_plan_impl(plan), info.name);
      std::vector<std::byte> workspace(gannet_plan_workspace_bytes(plan), std::byte{0xff});
      must(gannet_plan_run(plan, &args.args.op, workspace.data(), workspace.size(), nullptr));
      gannet_plan_free(&plan);
      EXPECT_EQ(plan, nullptr);
    }
    const CArgsOf<Params, CArgs> args(once.p, kind);
    must(gannet_run_once(c.context, &args.args.op, &options));
    for (const Problem<Params>* other : {&planned, &once}) {
      std::vector<TensorView> views;
      Params::for_each_view(one.p, [&](const char*, TensorView& v) { views.push_back(v); });
      size_t i = 0;
      Params::for_each_view(other->p, [&](const char* name, const TensorView& v) {
        const TensorView& w = views[i++];
        ASSERT_EQ(v.num_elements(), w.num_elements());
        const size_t bytes = static_cast<size_t>(v.num_elements()) * size_of(v.dtype);
        EXPECT_TRUE(bytes == 0 || std::memcmp(v.data, w.data, bytes) == 0) << name;
      });
      EXPECT_TRUE(std::equal(one.cache.begin(), one.cache.end(), other->cache.begin(), other->cache.end()));
    }
  }
  EXPECT_GE(num_ran, 2) << Params::kName << ": the oracle and at least one more";
}

constexpr int64_t kRows = 4, kHeads = 3, kR = 512, kP = 64, kDi = 128;
const verify::PagedSpec kSpec = {.seq_lens = {70, 9}, .q_len = 2, .form = PageTableForm::kCsr};

template <class Params>
Problem<Params> with_latent(LatentFormat format) {
  Problem<Params> x;
  verify::Paged& paged = x.paged(kSpec);
  const verify::LatentPool pool = verify::make_latent_pool(paged, format, 7);
  x.kept.push_back(pool.buffer);
  x.p.cache = pool.view;
  if constexpr (requires { x.p.pages; }) {
    x.p.pages = paged.table();
    x.p.rows = paged.rows();
  }
  return x;
}

template <class Params>
Problem<Params> with_index() {
  Problem<Params> x;
  verify::PagedSpec spec = kSpec;
  spec.form = PageTableForm::kPadded;
  spec.row_indices = true;
  verify::Paged& paged = x.paged(spec);
  const verify::IndexPool pool = verify::make_index_pool(paged, IndexKFormat::kE4m3, ScaleFormat::kPowerOfTwo, kDi, 8);
  x.kept.push_back(pool.buffer);
  x.p.cache = pool.view;
  if constexpr (requires { x.p.pages; }) {
    x.p.pages = paged.table();
    x.p.rows = paged.rows();
    x.p.q = x.normal(DType::kF32, {kRows, 8, kDi}, 1);
    x.p.weights = x.normal(DType::kF32, {kRows, 8}, 2);
  }
  return x;
}

TEST(CApiOps, CachesAndRope) {
  expect_same<gannet_latent_write, LatentWrite>(GANNET_OP_LATENT_WRITE, 3, [] {
    auto x = with_latent<LatentWrite>(LatentFormat::kE4m3);
    x.p.latent = x.normal(DType::kBf16, {3, kR}, 1);
    x.p.rope = x.normal(DType::kBf16, {3, kP}, 2);
    x.p.slots = x.ints({64, -1, 70});
    x.cache = {static_cast<std::byte*>(x.p.cache.data),
               static_cast<size_t>(x.p.cache.num_pages * x.p.cache.page_stride_bytes)};
    return x;
  });
  expect_same<gannet_latent_gather, LatentGather>(GANNET_OP_LATENT_GATHER, 3, [] {
    auto x = with_latent<LatentGather>(LatentFormat::kPacked656);
    x.p.slots = x.ints({64, -1, 65});
    x.p.latent = x.empty(DType::kF32, {3, kR});
    x.p.rope = x.empty(DType::kF32, {3, kP});
    return x;
  });
  expect_same<gannet_index_k_write, IndexKWrite>(GANNET_OP_INDEX_K_WRITE, 2, [] {
    auto x = with_index<IndexKWrite>();
    x.p.k = x.normal(DType::kF32, {3, kDi}, 1);
    x.p.slots = x.ints({64, -1, 70});
    x.cache = {static_cast<std::byte*>(x.p.cache.data),
               static_cast<size_t>(x.p.cache.num_pages * x.p.cache.page_stride_bytes)};
    return x;
  });
  expect_same<gannet_index_k_gather, IndexKGather>(GANNET_OP_INDEX_K_GATHER, 2, [] {
    auto x = with_index<IndexKGather>();
    x.p.slots = x.ints({64, -1, 65});
    x.p.k = x.empty(DType::kBf16, {3, kDi});
    return x;
  });
  expect_same<gannet_rope, Rope>(GANNET_OP_ROPE, 3, [] {
    Problem<Rope> x;
    x.p.x = x.normal(DType::kBf16, {kRows, kHeads, 192}, 1);
    x.p.positions = x.ints({0, 3, 9, 9});
    x.p.cos_sin = x.normal(DType::kF32, {10, kP}, 2);
    x.p.offset = 128;
    x.p.pairing = RopePairing::kHalfSplit;
    return x;
  });
}

TEST(CApiOps, Dense) {
  for (const bool causal : {false, true})
    expect_same<gannet_ragged_prefill, RaggedPrefill>(GANNET_OP_RAGGED_PREFILL, 8, [&] {
      Problem<RaggedPrefill> x;
      x.p.q = x.normal(DType::kF32, {5, kHeads, 192}, 1);
      x.p.k = x.normal(DType::kF32, {9, kHeads, 128}, 2);
      x.p.k_rope = x.normal(DType::kF32, {9, 64}, 3);
      x.p.v = x.normal(DType::kF32, {9, kHeads, 128}, 4);
      x.p.cu_q_lens = x.ints({0, 2, 5});
      x.p.cu_kv_lens = x.ints({0, 5, 9});
      x.p.out = x.empty(DType::kF32, {5, kHeads, 128});
      x.p.lse = x.empty(DType::kF32, {5, kHeads});
      x.p.softmax_scale = 0.1f;
      x.p.causal = causal;
      return x;
    });
  expect_same<gannet_merge_state, MergeState>(GANNET_OP_MERGE_STATE, 6, [] {
    Problem<MergeState> x;
    x.p.out_a = x.normal(DType::kF32, {kRows, kHeads, 128}, 1);
    x.p.lse_a = x.normal(DType::kF32, {kRows, kHeads}, 2);
    x.p.out_b = x.normal(DType::kF32, {kRows, kHeads, 128}, 3);
    x.p.lse_b = x.normal(DType::kF32, {kRows, kHeads}, 4);
    x.p.count_a = x.ints({1, 0, 3, 0});
    x.p.count_b = x.ints({1, 1, 0, 0});
    x.p.base = LseBase::kTwo;
    return x;
  });
  for (const bool options : {false, true})
    expect_same<gannet_mla_decode, MlaDecode>(GANNET_OP_MLA_DECODE, 11, [&] {
      auto x = with_latent<MlaDecode>(options ? LatentFormat::kE4m3 : LatentFormat::kBf16);
      x.p.rows.bound = RowBound::kUniformBlock;
      x.p.q = x.normal(options ? DType::kE4m3 : DType::kBf16, {kRows, kHeads, kR + kP}, 1);
      if (options) x.p.q_scale = 0.5f;
      x.p.out = x.empty(DType::kF32, {kRows, kHeads, kR});
      x.p.lse = x.empty(DType::kF32, {kRows, kHeads});
      if (options) x.p.attn_sink = x.normal(DType::kF32, {kHeads}, 2);
      if (options) x.p.max_logits = x.empty(DType::kF32, {kRows, kHeads});
      x.p.softmax_scale = 0.05f;
      return x;
    });
}

TEST(CApiOps, Sparse) {
  expect_same<gannet_index_logits, IndexLogits>(GANNET_OP_INDEX_LOGITS, 9, [] {
    auto x = with_index<IndexLogits>();
    x.p.logits = x.empty(DType::kF32, {kRows, 72});
    return x;
  });
  expect_same<gannet_topk, TopK>(GANNET_OP_TOPK, 4, [] {
    Problem<TopK> x;
    x.p.logits = x.normal(DType::kF32, {3, 40}, 1);
    x.p.lens = x.ints({40, 0, 5});
    x.p.positions = x.empty(DType::kI32, {3, 8});
    x.p.counts = x.empty(DType::kI32, {3});
    return x;
  });
  expect_same<gannet_index_select, IndexSelect>(GANNET_OP_INDEX_SELECT, 11, [] {
    auto x = with_index<IndexSelect>();
    x.p.max_seq_len = 70;
    x.p.topk_slots = x.empty(DType::kI32, {kRows, 16});
    x.p.topk_lens = x.empty(DType::kI32, {kRows});
    x.p.topk_positions = x.empty(DType::kI32, {kRows, 16});
    return x;
  });
  for (const bool options : {false, true})
    expect_same<gannet_sparse_attention, SparseAttention>(GANNET_OP_SPARSE_ATTENTION, 7, [&] {
      auto x = with_latent<SparseAttention>(options ? LatentFormat::kE4m3 : LatentFormat::kBf16);
      x.p.q = x.normal(options ? DType::kE4m3 : DType::kBf16, {2, kHeads, kR + kP}, 1);
      if (options) x.p.q_scale = 0.5f;
      const verify::Tensor slots = x.keep(verify::make_tensor(DType::kI32, {2, 4}));
      const verify::Paged paged(kSpec);
      for (int64_t i = 0; i < 2; ++i)
        for (int64_t k = 0; k < 4; ++k)
          *slots.view.ptr<int32_t>(i, k) = k == 3 ? -1 : static_cast<int32_t>(paged.slot(i, 2 * k));
      x.p.topk_slots = slots.view;
      x.p.topk_lens = x.ints({4, 2});
      x.p.out = x.empty(DType::kF32, {2, kHeads, kR});
      x.p.lse = x.empty(DType::kF32, {2, kHeads});
      if (options) x.p.attn_sink = x.normal(DType::kF32, {kHeads}, 2);
      if (options) x.p.max_logits = x.empty(DType::kF32, {2, kHeads});
      x.p.softmax_scale = 0.05f;
      return x;
    });
}

TEST(CApiOps, TheListOfImplementationsIsTheSame) {
  std::vector<std::string> c, cpp;
  const auto line = [](const std::string& op, const std::string& name, int device, int runs, int invariant) {
    return op + " " + name + " " + std::to_string(device) + std::to_string(runs) + std::to_string(invariant);
  };
  for (const ImplInfo& i : list_all_implementations())
    cpp.push_back(line(i.op, i.name, static_cast<int>(i.device), i.runs_here, i.batch_invariant));
  std::function<void(const gannet_implementation&)> note = [&](const gannet_implementation& i) {
    c.push_back(line(i.op, i.name, i.device, i.runs_here, i.batch_invariant));
  };
  must(gannet_list_implementations(
      [](void* user, const gannet_implementation* i) {
        (*static_cast<std::function<void(const gannet_implementation&)>*>(user))(*i);
      },
      &note));
  EXPECT_EQ(c, cpp);
  EXPECT_GT(c.size(), 12u);
}

// ---- backends -----------------------------------------------------------------------------------------------------

/// What a driver has written, in its order.
struct Written {
  std::vector<Tensor> tensors;
  std::string log;
};

Tensor i32(std::initializer_list<int64_t> shape) { return Tensor(DType::kI32, shape); }

void attend_layer(World& w, int32_t layer, StepRows part, const Selection& selection, StepWrite write, Written& to) {
  Tensor out = w.out(part), lse = w.lse(part);
  const Tensor q = w.q_absorbed(part);
  w.backend->attend({.layer = layer,
                     .rows = part,
                     .q = q.view,
                     .write = std::move(write),
                     .selection = selection,
                     .out = out.view,
                     .lse = lse.view});
  to.tensors.push_back(std::move(out));
  to.tensors.push_back(std::move(lse));
}

/// A mixed step by every road that the backend has.
Written drive(World& w) {
  Written to;
  const bool sparse = w.backend->capabilities().attend_sparse;
  w.backend->set_layer_hooks(
      {.record = [&](int32_t l, LayerRecord r) { to.log += "record " + std::to_string(l) + to_string(r) + "\n"; },
       .wait = [&](int32_t l) { to.log += "wait " + std::to_string(l) + "\n"; }});
  w.backend->prepare(w.step());
  Selection selection = AttendAll{};
  Tensor slots, lens, positions;
  const World::Kv kv0 = w.kv(0), kv1 = w.kv(1, StepRows::kPrefill);
  if (sparse) {
    const int64_t n = w.num_rows();
    slots = i32({n, w.options.topk});
    lens = i32({n});
    positions = i32({n, w.options.topk});
    const Tensor q = w.index_q(), weights = w.index_weights();
    const TopKSelection chosen{.slots = slots.view, .lens = lens.view, .positions = positions.view};
    w.backend->select({.layer = 0, .q = q.view, .weights = weights.view, .write = kv0.rows(), .out = chosen});
    selection = chosen;
  } else {
    w.backend->write(0, StepRows::kAll, kv0.rows());
  }
  attend_layer(w, 0, StepRows::kAll, selection, AlreadyWritten{}, to);
  const World::Kv all1 = w.kv(1);
  attend_layer(w, 1, StepRows::kAll, selection, all1.rows(), to);
  if (!sparse || w.options.topk >= 512) {
    const auto prefill_args = [&](Tensor& out, Tensor& lse, const World::Kv& kv, const Tensor& q, const Tensor& k,
                                  const Tensor& v) {
      return DensePrefillCall{.layer = 1,
                              .q = q.view,
                              .k_nope = k.view,
                              .k_rope = kv.rope.view,
                              .v = v.view,
                              .write = kv.rows(),
                              .expand = w.expand(),
                              .out = out.view,
                              .lse = lse.view};
    };
    const Tensor q = w.q_expanded(StepRows::kPrefill), k = w.k_nope(), v = w.v();
    const int64_t h = w.options.num_heads, n = w.num_prefill;
    Tensor out(w.options.dtype, {n, h, World::kV}), lse(DType::kF32, {n, h});
    w.backend->dense_prefill(prefill_args(out, lse, kv1, q, k, v));
    to.tensors.push_back(std::move(out));
    to.tensors.push_back(std::move(lse));
    // The same by its parts.
    Tensor parts(w.options.dtype, {n, h, World::kV}), parts_lse(DType::kF32, {n, h});
    w.backend->prefill_new_tokens(prefill_args(parts, parts_lse, kv1, q, k, v));
    World plain(w.options, {w.requests.begin(), w.requests.begin() + w.num_extends},
                {w.requests.begin() + w.num_extends, w.requests.end()}, w.q_len);
    plain.backend->prepare(plain.step());
    const auto& chunks = plain.backend->step().prefix_chunks().chunks;
    for (size_t i = 0; i < chunks.size(); ++i) {
      const int64_t t = chunks[i].num_tokens;
      Tensor latent(w.options.dtype, {t, World::kR}), rope(w.options.dtype, {t, World::kP}),
          k_nope(w.options.dtype, {t, h, World::kN}), values(w.options.dtype, {t, h, World::kV});
      w.backend->gather_prefix(1, static_cast<int64_t>(i), latent.view, rope.view);
      w.expand()(latent.view, k_nope.view, values.view);
      w.backend->prefill_prefix({.layer = 1,
                                 .chunk = static_cast<int64_t>(i),
                                 .q = q.view,
                                 .k_nope = k_nope.view,
                                 .k_rope = rope.view,
                                 .v = values.view,
                                 .out = parts.view,
                                 .lse = parts_lse.view});
    }
    EXPECT_GT(chunks.size(), 1u);
    to.tensors.push_back(std::move(parts));
    to.tensors.push_back(std::move(parts_lse));
  }
  // A draft that goes on from the last rows, and an idle step.
  w.backend->advance({.steps = 0, .seq_lens = w.seq_lens});
  if (!sparse) {
    const Tensor q(w.options.dtype, {static_cast<int64_t>(w.requests.size()), w.options.num_heads, 576});
    std::memset(q.view.data, 0, q.bytes());
    Tensor out(w.options.dtype, {static_cast<int64_t>(w.requests.size()), w.options.num_heads, 512});
    w.backend->attend({.layer = 0, .q = q.view, .write = AlreadyWritten{}, .selection = AttendAll{}, .out = out.view});
    to.tensors.push_back(std::move(out));
  }
  w.backend->prepare({});
  for (auto& [op, impl] : w.backend->implementations()) to.log += op + " " + impl + "\n";
  w.backend->set_layer_hooks({});
  if (slots.view.given()) {
    to.tensors.push_back(std::move(slots));
    to.tensors.push_back(std::move(lens));
    to.tensors.push_back(std::move(positions));
  }
  return to;
}

/// Decode steps of a captured batch, growing and shrinking.
Written drive_captured(World& w) {
  Written to;
  const auto n = static_cast<int32_t>(w.requests.size());
  w.backend->capture({.num_requests = n + 1, .q_len = w.q_len, .max_seq_len = 1024});
  for (const int32_t given : {n, n - 1}) {
    BatchStep step = w.step();
    step.seq_lens = step.seq_lens.first(static_cast<size_t>(given));
    step.pages.pages.shape[0] = given;
    w.backend->refresh(step, n + 1);
    const int64_t rows = int64_t{n + 1} * w.q_len;
    Tensor q(w.options.dtype, {rows, w.options.num_heads, 576}), out(w.options.dtype, {rows, w.options.num_heads, 512});
    std::memset(q.view.data, 0, q.bytes());
    const Tensor some = w.q_absorbed();
    std::memcpy(q.view.data, some.view.data, some.bytes());
    World::Kv kv{Tensor(w.options.dtype, {rows, 512}), Tensor(w.options.dtype, {rows, 64}), {}};
    const World::Kv mine = w.kv(1);
    std::memcpy(kv.latent.view.data, mine.latent.view.data, mine.latent.bytes());
    std::memcpy(kv.rope.view.data, mine.rope.view.data, mine.rope.bytes());
    w.backend->attend({.layer = 1, .q = q.view, .write = kv.rows(), .selection = AttendAll{}, .out = out.view});
    to.tensors.push_back(std::move(out));
  }
  return to;
}

void expect_same(const Written& a, const Written& b) {
  EXPECT_EQ(a.log, b.log);
  ASSERT_EQ(a.tensors.size(), b.tensors.size());
  for (size_t i = 0; i < a.tensors.size(); ++i) EXPECT_TRUE(same_bits(a.tensors[i], b.tensors[i])) << "tensor " << i;
}

World mixed_world(const WorldOptions& o) {
  return World(o, {{.prefix = 150, .rows = 3, .id = 1}, {.prefix = 0, .rows = 5, .id = 2}},
               {{.prefix = 69, .rows = 1, .id = 3}});
}

TEST(CApiBackends, EveryCallGivesTheSameBits) {
  for (const AttentionArch arch : {AttentionArch::kMla, AttentionArch::kDsa})
    for (const int32_t topk : {16, 512}) {
      if (arch == AttentionArch::kMla && topk == 16) continue;
      WorldOptions o;
      o.arch = arch;
      o.topk = topk;
      o.chunk_capacity = 128;
      o.dtype = DType::kBf16;
      o.latent_format = LatentFormat::kBf16;
      o.index_format = IndexKFormat::kE4m3;
      World cpp = mixed_world(o), c = mixed_world(o);
      CContext context;
      c.backend = std::make_unique<CBackend>(context.context, c.config());
      c.backend->bind(c.layers());
      EXPECT_STREQ(c.backend->name(), cpp.backend->name());
      EXPECT_EQ(c.backend->capabilities().page_sizes, cpp.backend->capabilities().page_sizes);
      EXPECT_EQ(c.backend->capabilities().latent_formats, cpp.backend->capabilities().latent_formats);
      const Written expected = drive(cpp);
      expect_same(expected, drive(c));
      EXPECT_GT(context.num_jobs, 0);
      EXPECT_NE(expected.log.find("record 0written"), std::string::npos) << expected.log;
      std::printf("%s", expected.log.c_str());
    }
}

TEST(CApiBackends, CapturedBatchesGiveTheSameBits) {
  for (const AttentionArch arch : {AttentionArch::kMla, AttentionArch::kDsa}) {
    WorldOptions o;
    o.arch = arch;
    World cpp(o, {}, {{.prefix = 150, .rows = 2, .id = 1}, {.prefix = 7, .rows = 2, .id = 2}}, 2);
    World c(o, {}, {{.prefix = 150, .rows = 2, .id = 1}, {.prefix = 7, .rows = 2, .id = 2}}, 2);
    CContext context;
    c.backend = std::make_unique<CBackend>(context.context, c.config());
    c.backend->bind(c.layers());
    expect_same(drive_captured(cpp), drive_captured(c));
  }
}

/// A shared page table of each interface, for the pages of a world.
struct SharedTables {
  SharedTables(const World& w, int32_t num_requests)
      : cpp({.num_requests = num_requests,
             .max_seq_len = 512,
             .page_size = w.options.page_size,
             .num_pages = w.latent->options().num_pages,
             .lookahead = 2}) {
    gannet_shared_page_table_options o{};
    o.struct_size = sizeof o;
    o.num_requests = num_requests;
    o.page_size = w.options.page_size;
    o.max_seq_len = 512;
    o.num_pages = w.latent->options().num_pages;
    o.lookahead = 2;
    must(gannet_shared_page_table_create(&o, nullptr, &c));
  }
  ~SharedTables() { gannet_shared_page_table_free(&c); }
  SharedTables(const SharedTables&) = delete;
  SharedTables& operator=(const SharedTables&) = delete;

  /// In both, which must say the same.
  bool refresh(uint64_t generation, std::span<const int32_t> lens, const PageTableView& pages) {
    const gannet_page_table p = c_of(pages);
    int32_t copied = -1;
    must(gannet_shared_page_table_refresh(c, generation, lens.data(), static_cast<int64_t>(lens.size()), &p, nullptr,
                                          &copied));
    const bool did = cpp.refresh(generation, lens, pages);
    EXPECT_EQ(copied, did ? 1 : 0);
    EXPECT_EQ(gannet_shared_page_table_generation(c), generation);
    gannet_tensor l{}, t{};
    must(gannet_shared_page_table_tensors(c, &l, &t));
    const TensorView wanted_lens = cpp.seq_lens(), wanted_pages = cpp.pages().pages;
    const auto same = [](const gannet_tensor& got, const TensorView& wanted) {
      ASSERT_EQ(got.rank, wanted.rank);
      ASSERT_EQ(got.dtype, GANNET_I32);
      for (size_t i = 0; i < static_cast<size_t>(wanted.rank); ++i) {
        ASSERT_EQ(got.shape[i], wanted.shape[i]);
        ASSERT_EQ(got.stride[i], wanted.stride[i]);
      }
      EXPECT_EQ(std::memcmp(got.data, wanted.data, static_cast<size_t>(wanted.num_elements()) * sizeof(int32_t)), 0);
    };
    same(l, wanted_lens);
    same(t, wanted_pages);
    return did;
  }

  SharedPageTable cpp;
  gannet_shared_page_table* c = nullptr;
};

// A target and its draft over one table, both in one backend: C says and gives what C++ does.
TEST(CApiBackends, SharedPageTablesGiveTheSameBits) {
  constexpr int32_t kRequests = 2, kRows = 3;
  for (const AttentionArch arch : {AttentionArch::kMla, AttentionArch::kDsa}) {
    WorldOptions o;
    o.arch = arch;
    o.topk = 512;  // `dsa` attends to all
    const std::vector<Request> decodes = {{.prefix = 150, .rows = kRows, .id = 1},
                                          {.prefix = 7, .rows = kRows, .id = 2}};
    World cpp(o, {}, decodes, kRows), other(o, {}, decodes, kRows);
    CContext context;
    CBackend c(context.context, other.config());
    c.bind(other.layers());
    SharedTables tables(cpp, kRequests);
    for (const int32_t q_len : {kRows, 1}) {
      const CaptureShape shape{.num_requests = kRequests, .q_len = q_len};
      cpp.backend->capture(shape, tables.cpp);
      const gannet_capture_shape s = c_of(shape);
      must(gannet_backend_capture_shared(c.get(), &s, tables.c));
    }
    const auto attend = [&](uint64_t generation, int32_t q_len, const TensorView& lens, int32_t steps) {
      cpp.backend->refresh(
          {.table = &tables.cpp, .generation = generation, .q_len = q_len, .seq_lens = lens, .steps = steps});
      gannet_shared_step s{};
      s.struct_size = sizeof s;
      s.table = tables.c;
      s.generation = generation;
      s.q_len = q_len;
      s.seq_lens = c_of(lens);
      s.steps = steps;
      must(gannet_backend_refresh_shared(c.get(), &s));
      gannet_step_info info{};
      info.struct_size = sizeof info;
      must(gannet_backend_step(c.get(), &info));
      const StepPlan& plan = cpp.backend->step();
      EXPECT_EQ(info.lens_known, plan.lens_known() ? 1 : 0);
      EXPECT_EQ(info.max_row_len, plan.max_row_len());
      EXPECT_TRUE(std::equal(plan.row_lens().begin(), plan.row_lens().end(), info.row_lens));
      const int64_t rows = int64_t{kRequests} * q_len;
      Tensor q(o.dtype, {rows, o.num_heads, 576});
      const Tensor some = cpp.q_absorbed();
      std::memcpy(q.view.data, some.view.data, q.bytes());
      const World::Kv kv = cpp.kv(1);
      const auto call = [&](AttentionBackend& b) {
        Tensor out(o.dtype, {rows, o.num_heads, 512});
        StepWrite write = AlreadyWritten{};
        if (q_len == kRows) write = kv.rows();
        b.attend({.layer = 1, .q = q.view, .write = write, .selection = AttendAll{}, .out = out.view});
        return out;
      };
      const Tensor one = call(*cpp.backend), two = call(c);
      EXPECT_TRUE(same_bits(one, two)) << "generation " << generation << ", " << q_len << " rows";
      EXPECT_FALSE(std::isnan(one.get(0))) << "it saw what was written";
    };
    const BatchStep step = cpp.step();
    EXPECT_TRUE(tables.refresh(1, step.seq_lens, step.pages));
    EXPECT_FALSE(tables.refresh(1, step.seq_lens, step.pages));
    attend(1, kRows, {}, 0);
    std::vector<int32_t> accepted = {152, 0};
    attend(1, 1, gannet::view(accepted.data(), {kRequests}), 1);
    // Lengths that somebody has written in place.
    gannet_tensor lens{};
    must(gannet_shared_page_table_tensors(tables.c, &lens, nullptr));
    static_cast<int32_t*>(lens.data)[1] = 9;
    tables.cpp.seq_lens().ptr<int32_t>()[1] = 9;
    must(gannet_shared_page_table_mark(tables.c, 4));
    tables.cpp.mark(4);
    EXPECT_EQ(gannet_backend_write(c.get(), 0, GANNET_ROWS_ALL, nullptr), GANNET_INVALID_ARGUMENT);
    gannet_step_info info{};
    info.struct_size = sizeof info;
    EXPECT_EQ(gannet_backend_step(c.get(), &info), GANNET_INVALID_ARGUMENT);
    EXPECT_STREQ(gannet_last_error(), error_of([&] { (void)cpp.backend->step(); }).c_str()) << "the step is stale";
    attend(4, kRows, {}, 0);
    gannet_shared_page_table_free(&tables.c);
    EXPECT_EQ(tables.c, nullptr);
    must(gannet_backend_step(c.get(), &info));
    EXPECT_EQ(info.num_rows, int64_t{kRequests} * kRows) << "the backend keeps what its batches are captured with";
  }
}

// The step as C sees it.
TEST(CApiBackends, StepsChunksAndDraftsAreThoseOfThePlan) {
  WorldOptions o;
  o.chunk_capacity = 128;
  World w = mixed_world(o);
  CContext context;
  CBackend c(context.context, w.config());
  c.bind(w.layers());
  // What an engine's own backend says that has no more than a backend has to have.
  const SharedPageTable table({.num_requests = 1, .max_seq_len = 64});
  EXPECT_TRUE(has(error_of([&] { c.capture({.num_requests = 1}, table); }, ErrorCode::kUnsupported),
                  "the backend takes no shared page table; accepted: capture without one"));
  EXPECT_TRUE(has(error_of([&] { c.refresh({.table = &table}); }, ErrorCode::kUnsupported),
                  "the backend takes no shared page table; accepted: refresh without one"));
  c.prepare(w.step());
  w.backend->prepare(w.step());
  const StepPlan& plan = w.backend->step();
  gannet_step_info info{};
  info.struct_size = sizeof info;
  must(gannet_backend_step(c.get(), &info));
  EXPECT_EQ(info.mode, GANNET_STEP_MIXED);
  EXPECT_EQ(info.num_requests, plan.num_requests());
  EXPECT_EQ(info.num_extends, plan.num_extends());
  EXPECT_EQ(info.num_rows, plan.num_rows());
  EXPECT_EQ(info.num_prefill_rows, plan.rows(StepRows::kPrefill).size());
  EXPECT_EQ(info.max_row_len, plan.max_row_len());
  EXPECT_EQ(info.q_len, plan.q_len());
  const auto same = [](const int32_t* a, std::span<const int32_t> b) {
    EXPECT_TRUE(std::equal(b.begin(), b.end(), a));
  };
  same(info.seq_lens, plan.seq_lens());
  same(info.cu_rows, plan.cu_rows());
  same(info.positions, plan.positions());
  same(info.write_slots, plan.write_slots());
  same(info.row_lens, plan.row_lens());
  c.set_stream({});
  const StepTensors on_device = c.step_tensors();
  ASSERT_EQ(on_device.positions.shape[0], plan.num_rows());
  same(on_device.positions.ptr<int32_t>(), plan.positions());
  same(on_device.write_slots.ptr<int32_t>(), plan.write_slots());
  same(on_device.row_lens.ptr<int32_t>(), plan.row_lens());
  ASSERT_EQ(info.num_prefix_chunks, static_cast<int64_t>(plan.prefix_chunks().chunks.size()));
  ASSERT_GT(info.num_prefix_chunks, 1);
  for (int64_t i = 0; i < info.num_prefix_chunks; ++i) {
    gannet_prefix_chunk chunk{};
    chunk.struct_size = sizeof chunk;
    must(gannet_backend_prefix_chunk(c.get(), i, &chunk));
    const PrefixChunk& wanted = plan.prefix_chunks().chunks[static_cast<size_t>(i)];
    EXPECT_EQ(chunk.first_request, wanted.first_request);
    EXPECT_EQ(chunk.num_requests, wanted.num_requests);
    EXPECT_EQ(chunk.begin, wanted.begin);
    EXPECT_EQ(chunk.num_tokens, wanted.num_tokens);
  }
  const int32_t accepted[] = {1};
  int32_t rows[3], lens[3], wanted_rows[3], wanted_lens[3];
  must(gannet_backend_narrow(c.get(), accepted, 1, rows, lens, 3));
  narrow_rows(plan, accepted, wanted_rows);
  narrow_seq_lens(plan, accepted, wanted_lens);
  same(rows, wanted_rows);
  same(lens, wanted_lens);
}

// ---- selections and pools -----------------------------------------------------------------------------------------

TEST(CApiPools, AreThoseOfCpp) {
  gannet_latent_pool_options lo{};
  lo.struct_size = sizeof lo;
  lo.num_layers = 2;
  lo.format = GANNET_LATENT_E4M3;
  lo.latent_dim = 512;
  lo.rope_dim = 64;
  lo.num_pages = 5;
  lo.page_size = 64;
  lo.scale = 0.5f;
  const int32_t index_layers[] = {1};
  gannet_index_k_pool_options io{};
  io.struct_size = sizeof io;
  io.layers = index_layers;
  io.num_layers = 1;
  io.format = GANNET_INDEX_K_E4M3;
  io.scale_format = GANNET_SCALE_POWER_OF_TWO;
  io.head_dim = 128;
  io.num_pages = 5;
  io.page_size = 64;
  const LatentPoolOptions lcpp{.num_layers = 2, .format = LatentFormat::kE4m3, .num_pages = 5, .scale = 0.5f};
  const IndexKPoolOptions icpp{.layers = {1}, .scale_format = ScaleFormat::kPowerOfTwo, .num_pages = 5};
  const auto same_sizes = [](const gannet_pool_sizes& a, const PoolSizes& b) {
    EXPECT_EQ(a.token_bytes, b.token_bytes);
    EXPECT_EQ(a.page_bytes, b.page_bytes);
    EXPECT_EQ(a.page_stride_bytes, b.page_stride_bytes);
    EXPECT_EQ(a.layer_stride_bytes, b.layer_stride_bytes);
    EXPECT_EQ(a.total_bytes, b.total_bytes);
  };
  gannet_pool_sizes sizes{};
  sizes.struct_size = sizeof sizes;
  must(gannet_latent_pool_sizes_of(&lo, &sizes));
  same_sizes(sizes, latent_pool_sizes(lcpp));
  must(gannet_index_k_pool_sizes_of(&io, &sizes));
  same_sizes(sizes, index_k_pool_sizes(icpp));

  // Over the caller's memory.
  struct Counted {
    int64_t bytes = 0;
    int calls = 0;
  } counted;
  const gannet_memory memory = {sizeof memory,
                                &counted,
                                {GANNET_CPU, 0},
                                [](void* user, size_t bytes, size_t alignment) {
                                  static_cast<Counted*>(user)->bytes += static_cast<int64_t>(bytes);
                                  ++static_cast<Counted*>(user)->calls;
                                  return host_memory().allocate(bytes, alignment);
                                },
                                [](void* user, void* p, size_t bytes, size_t alignment) {
                                  static_cast<Counted*>(user)->bytes -= static_cast<int64_t>(bytes);
                                  host_memory().deallocate(p, bytes, alignment);
                                }};
  gannet_latent_pool* latent = nullptr;
  gannet_index_k_pool* index = nullptr;
  must(gannet_latent_pool_create(&lo, &memory, &latent));
  must(gannet_index_k_pool_create(&io, &memory, &index));
  EXPECT_EQ(counted.calls, 2);
  gannet_latent_cache l[2] = {{}, {}};
  gannet_index_cache i{};
  EXPECT_EQ(gannet_latent_pool_layer(latent, 0, &l[0]), GANNET_INVALID_ARGUMENT) << "its struct_size is not set";
  l[0].struct_size = l[1].struct_size = sizeof l[0];
  i.struct_size = sizeof i;
  must(gannet_latent_pool_layer(latent, 0, &l[0]));
  must(gannet_latent_pool_layer(latent, 1, &l[1]));
  must(gannet_index_k_pool_layer(index, 1, &i));
  EXPECT_EQ(l[1].scale, 0.5f);
  EXPECT_EQ(l[1].latent_dim, 512);
  EXPECT_EQ(l[1].rope_dim, 64);
  EXPECT_EQ(l[1].num_pages, 5);
  EXPECT_EQ(static_cast<char*>(l[1].data) - static_cast<char*>(l[0].data), latent_pool_sizes(lcpp).layer_stride_bytes);
  EXPECT_EQ(l[1].format, GANNET_LATENT_E4M3);
  EXPECT_EQ(l[1].page_size, 64);
  EXPECT_EQ(l[1].page_stride_bytes, latent_pool_sizes(lcpp).page_stride_bytes);
  EXPECT_EQ(l[1].row_stride_bytes, 0);
  EXPECT_EQ(l[1].device.kind, GANNET_CPU);
  EXPECT_EQ(i.format, GANNET_INDEX_K_E4M3);
  EXPECT_EQ(i.head_dim, 128);
  EXPECT_EQ(i.scale_format, GANNET_SCALE_POWER_OF_TWO);
  EXPECT_EQ(i.page_size, 64);
  EXPECT_EQ(i.num_pages, 5);
  EXPECT_EQ(i.page_stride_bytes, index_k_pool_sizes(icpp).page_stride_bytes);
  EXPECT_EQ(i.hadamard, 0);
  EXPECT_EQ(i.device.kind, GANNET_CPU);

  // Pages that travel: what goes out of pages 1 and 2 comes back into 4 and 3.
  const gannet_layer layers[] = {{&l[0], nullptr}, {&l[1], &i}};
  const int32_t from[] = {1, 2}, to[] = {4, 3};
  int64_t bytes = 0;
  must(gannet_exported_bytes(layers, 2, 2, &bytes));
  EXPECT_EQ(bytes, 2 * 2 * latent_pool_sizes(lcpp).page_bytes + 2 * index_k_pool_sizes(icpp).page_bytes);
  for (const gannet_latent_cache& c : l)
    for (int64_t b = 0; b < 5 * c.page_stride_bytes; ++b)
      static_cast<uint8_t*>(c.data)[b] = static_cast<uint8_t>(b * 7 % 251);
  for (int64_t b = 0; b < 5 * i.page_stride_bytes; ++b)
    static_cast<uint8_t*>(i.data)[b] = static_cast<uint8_t>(b * 5 % 253);
  std::vector<uint8_t> buffer(static_cast<size_t>(bytes)), again(buffer.size());
  must(gannet_export_pages(layers, 2, from, 2, buffer.data(), buffer.size(), nullptr));
  must(gannet_import_pages(layers, 2, to, 2, buffer.data(), buffer.size(), nullptr));
  must(gannet_export_pages(layers, 2, to, 2, again.data(), again.size(), nullptr));
  EXPECT_EQ(buffer, again);
  const gannet_move move = {1, 3};
  must(gannet_copy_pages(layers, 2, &move, 1, nullptr));
  const int32_t pages13[] = {1, 3};
  must(gannet_export_pages(layers, 2, pages13, 2, again.data(), again.size(), nullptr));
  EXPECT_EQ(std::memcmp(again.data(), again.data() + 64 * 576, 64 * 576), 0);
  const gannet_move slot = {64, 5};
  must(gannet_copy_slots(layers, 2, &slot, 1, nullptr));
  EXPECT_EQ(std::memcmp(static_cast<uint8_t*>(l[0].data) + l[0].page_stride_bytes,
                        static_cast<uint8_t*>(l[0].data) + 5 * 576, 576),
            0);
  // What the two layers are to a pool elsewhere.
  gannet_page_layout here{}, there{};
  here.struct_size = there.struct_size = sizeof here;
  must(gannet_page_layout_of(&layers[1], &here));
  const PageLayout cpp =
      page_layout(LayerCaches{.latent = LatentPool(lcpp).layer(1), .index = IndexKPool(icpp).layer(1)});
  EXPECT_EQ(here.latent_page_bytes, cpp.latent_page_bytes);
  EXPECT_EQ(here.index_page_bytes, cpp.index_page_bytes);
  EXPECT_EQ(here.index_scale_format, GANNET_SCALE_POWER_OF_TWO);
  must(gannet_page_layout_of(&layers[1], &there));
  EXPECT_EQ(gannet_page_layouts_equal(&here, &there), 1);
  must(gannet_page_layout_of(&layers[0], &there));
  EXPECT_EQ(gannet_page_layouts_equal(&here, &there), 0);
  EXPECT_EQ(gannet_page_layouts_equal(&here, nullptr), 0);
  gannet_latent_pool_free(&latent);
  gannet_index_k_pool_free(&index);
  EXPECT_EQ(latent, nullptr);
  EXPECT_EQ(index, nullptr);
  EXPECT_EQ(counted.bytes, 0);
}

// Rotated keys: a pool of them, an operation over it, and the rotation itself.
TEST(CApiOps, RotatedIndexKeys) {
  gannet_context* context = nullptr;
  must(gannet_context_create(nullptr, &context));
  const int32_t layer = 0;
  gannet_index_k_pool_options o{};
  o.struct_size = sizeof o;
  o.layers = &layer;
  o.num_layers = 1;
  o.format = GANNET_INDEX_K_F32;
  o.head_dim = 128;
  o.num_pages = 2;
  o.page_size = 64;
  o.hadamard = 1;
  gannet_index_k_pool* pool = nullptr;
  must(gannet_index_k_pool_create(&o, nullptr, &pool));
  gannet_index_cache cache{};
  cache.struct_size = sizeof cache;
  must(gannet_index_k_pool_layer(pool, 0, &cache));
  EXPECT_EQ(cache.hadamard, 1);
  std::vector<float> k(128), rotated(128), back(128);
  for (size_t i = 0; i < k.size(); ++i) k[i] = static_cast<float>(i % 7) - 3.0f;
  const gannet_tensor from = gannet_tensor_2d(k.data(), GANNET_F32, 1, 128),
                      to = gannet_tensor_2d(rotated.data(), GANNET_F32, 1, 128),
                      again = gannet_tensor_2d(back.data(), GANNET_F32, 1, 128);
  must(gannet_hadamard(context, &from, &to, nullptr));
  must(gannet_hadamard(context, &to, &again, nullptr));
  EXPECT_NE(k, rotated);
  for (size_t i = 0; i < k.size(); ++i) EXPECT_NEAR(back[i], k[i], 1e-5);
  EXPECT_EQ(gannet_hadamard(context, nullptr, &to, nullptr), GANNET_INVALID_ARGUMENT);
  const int32_t slot = 70;
  gannet_index_k_write write{};
  write.op = {sizeof write, GANNET_OP_INDEX_K_WRITE};
  write.k = to;
  write.slots = gannet_tensor_1d(&slot, GANNET_I32, 1);
  write.cache = &cache;
  EXPECT_EQ(gannet_run_once(context, &write.op, nullptr), GANNET_INVALID_ARGUMENT) << "keys as they are";
  write.hadamard = 1;
  must(gannet_run_once(context, &write.op, nullptr));
  gannet_index_k_gather gather{};
  gather.op = {sizeof gather, GANNET_OP_INDEX_K_GATHER};
  gather.slots = write.slots;
  gather.cache = &cache;
  gather.k = again;
  gather.hadamard = 1;
  must(gannet_run_once(context, &gather.op, nullptr));
  EXPECT_EQ(back, rotated);
  gannet_index_k_pool_free(&pool);
  gannet_context_free(&context);
}

// Several KV heads in one pool: the views that C++ gives, whatever already stands in the caller's.
TEST(CApiOps, KvHeads) {
  alignas(16) static std::byte memory[64];
  LatentCacheView pool;
  pool.data = memory;
  pool.num_pages = 7;
  pool.page_size = 32;
  pool.page_stride_bytes = 1 << 20;
  const gannet_latent_cache from = c_of(pool);
  const TensorView whole = gannet::view(memory, DType::kBf16, {3, 6, 576}),
                   sink = gannet::view(memory, DType::kF32, {6}), absent;
  for (int32_t g = 0; g < 3; ++g) {
    const LatentCacheView head = kv_head_of(pool, 3, g);
    gannet_latent_cache out;
    std::memset(&out, 0xff, sizeof out);
    out.struct_size = sizeof out;
    must(gannet_kv_head_of(&from, 3, g, &out));
    EXPECT_EQ(out.struct_size, sizeof out);
    EXPECT_EQ(out.data, head.data);
    EXPECT_EQ(out.format, GANNET_LATENT_BF16);
    EXPECT_EQ(out.latent_dim, 512);
    EXPECT_EQ(out.rope_dim, 64);
    EXPECT_EQ(out.page_size, 32);
    EXPECT_EQ(out.num_pages, 7);
    EXPECT_EQ(out.page_stride_bytes, 1 << 20);
    EXPECT_EQ(out.row_stride_bytes, 3 * 1152);
    for (const TensorView& t : {whole, sink, absent}) {
      const gannet_tensor given = c_of(t), wanted = c_of(head_group_of(t, 3, g));
      gannet_tensor group;
      must(gannet_head_group_of(&given, 3, g, &group));
      EXPECT_EQ(group.data, wanted.data);
      EXPECT_EQ(group.rank, wanted.rank);
      EXPECT_TRUE(std::equal(std::begin(group.shape), std::end(group.shape), wanted.shape));
      EXPECT_TRUE(std::equal(std::begin(group.stride), std::end(group.stride), wanted.stride));
    }
  }
}

TEST(CApiOps, SelectionSources) {
  const char* const words[] = {"full", "shared", "F", "S", "S"};
  gannet_index_sharing s{};
  s.struct_size = sizeof s;
  s.num_hidden_layers = 4;
  s.indexer_types = words;
  s.num_indexer_types = 5;
  std::vector<int32_t> sources(4);
  must(gannet_selection_sources(&s, sources.data()));
  EXPECT_EQ(sources, (std::vector<int32_t>{0, 0, 2, 2}));
  s.indexer_types = nullptr;
  s.index_topk_pattern = words + 2;
  s.num_index_topk_pattern = 3;
  EXPECT_EQ(gannet_selection_sources(&s, sources.data()), GANNET_INVALID_ARGUMENT) << "three words for four layers";
  s.index_topk_pattern = nullptr;
  must(gannet_selection_sources(&s, sources.data()));
  EXPECT_EQ(sources, (std::vector<int32_t>{0, 1, 2, 3}));
  s.index_topk_freq = 2;
  s.has_index_skip_topk_offset = 1;
  s.index_skip_topk_offset = 1;
  must(gannet_selection_sources(&s, sources.data()));
  EXPECT_EQ(sources, (std::vector<int32_t>{0, 0, 2, 2}));
  EXPECT_EQ(gannet_selection_sources(&s, nullptr), GANNET_INVALID_ARGUMENT);
}

TEST(CApiPools, PagesAreCounted) {
  gannet_page_allocator* pages = nullptr;
  must(gannet_page_allocator_create(8, &pages));
  EXPECT_EQ(gannet_page_allocator_num_free(pages), 7);
  gannet_page_list *a = nullptr, *b = nullptr, *tail = nullptr;
  must(gannet_page_list_acquire(pages, 3, &a));
  must(gannet_page_list_share(a, 0, 2, &b));
  must(gannet_page_list_acquire(pages, 1, &tail));
  must(gannet_page_list_append(b, &tail));
  EXPECT_EQ(tail, nullptr);
  int64_t count = 0;
  const int32_t* ids = gannet_page_list_ids(b, &count);
  EXPECT_EQ(std::vector<int32_t>(ids, ids + count), (std::vector<int32_t>{1, 2, 4}));
  gannet_page_list_free(&a);
  EXPECT_EQ(gannet_page_allocator_num_free(pages), 4) << "two of its pages are the other list's too";
  must(gannet_page_list_truncate(b, 1));
  EXPECT_EQ(gannet_page_allocator_num_free(pages), 6);
  gannet_page_allocator_free(&pages);
  gannet_page_list_free(&b);  // outlives the allocator
}

TEST(CApiPools, SelectionsAreGathered) {
  const int32_t slots[] = {1, 2, 3, 4}, lens[] = {2, 1}, rows[] = {1, -1};
  int32_t out[4], out_lens[2];
  const gannet_selection from = {
      sizeof from, gannet_tensor_2d(slots, GANNET_I32, 2, 2), gannet_tensor_1d(lens, GANNET_I32, 2), {}};
  const gannet_selection to = {
      sizeof to, gannet_tensor_2d(out, GANNET_I32, 2, 2), gannet_tensor_1d(out_lens, GANNET_I32, 2), {}};
  must(gannet_gather_selection(&from, rows, 2, &to, nullptr));
  EXPECT_EQ(std::vector<int32_t>(out, out + 4), (std::vector<int32_t>{3, 4, -1, -1}));
  EXPECT_EQ(std::vector<int32_t>(out_lens, out_lens + 2), (std::vector<int32_t>{1, 0}));
}

}  // namespace
}  // namespace gannet_test
