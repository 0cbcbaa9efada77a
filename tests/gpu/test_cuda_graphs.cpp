// Decode steps captured once in a CUDA graph and replayed for other lengths, tables and paddings, against the same
// steps run eagerly; and what else only exists on a device. Skipped, with the reason, where there is none.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "core/workspaces.h"
#include "gannet/attention.h"
#include "gannet/cuda.h"
#include "gannet/kv_pool.h"
#include "gannet/kv_transfer.h"
#include "gannet/ops.h"
#include "gannet/shared_page_table.h"
#include "unit/c_views.h"

namespace gannet_test {
namespace {

using namespace gannet;

constexpr Device kDevice{DeviceKind::kCuda, 0};
constexpr int32_t kR = 512, kP = 64, kDi = 128, kHi = 32, kPage = 64, kTopk = 96, kLayers = 2;
constexpr int32_t kMaxLen = 640, kColumns = kMaxLen / kPage, kNumPages = 96;

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (cuda_device_count(&why) == 0) GTEST_SKIP() << "no CUDA device: " << why;
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }
  Stream stream() const { return {stream_}; }
  void wait() const { ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess); }

  cudaStream_t stream_ = nullptr;
};

/// Device memory with a tensor in it.
class DeviceTensor {
 public:
  DeviceTensor() = default;
  DeviceTensor(DType dtype, std::initializer_list<int64_t> shape) {
    view = gannet::view(nullptr, dtype, shape, kDevice);
    memory_ = Buffer(bytes(), cuda_memory());
    view.data = memory_.data();
  }
  size_t bytes() const { return static_cast<size_t>(view.num_elements()) * size_of(view.dtype); }
  TensorView rows(int64_t n) const {
    TensorView v = view;
    v.shape[0] = n;
    return v;
  }
  std::vector<std::byte> read(Stream s) const {
    std::vector<std::byte> host(bytes());
    cuda_copy(host.data(), view.data, host.size(), kDevice, s);
    cuda_wait(kDevice, s);
    return host;
  }
  void poison(Stream s) const { cudaMemsetAsync(view.data, 0xff, bytes(), static_cast<cudaStream_t>(s.handle)); }

  TensorView view;

 private:
  Buffer memory_;
};

using Random = std::mt19937;

uint16_t random_bf16(Random& r) {  // about uniform in [-1, 1)
  const float x = static_cast<float>(static_cast<int>(r() % 4096) - 2048) / 2048.0f;
  return Bf16::from_float(x).bits;
}

void fill_bf16(const DeviceTensor& t, Random& r, Stream s) {
  std::vector<uint16_t> host(static_cast<size_t>(t.view.num_elements()));
  for (uint16_t& x : host) x = random_bf16(r);
  cuda_copy(t.view.data, host.data(), t.bytes(), kDevice, s);
  cuda_wait(kDevice, s);
}
void fill_f32(const DeviceTensor& t, Random& r, Stream s) {
  std::vector<float> host(static_cast<size_t>(t.view.num_elements()));
  for (float& x : host) x = static_cast<float>(static_cast<int>(r() % 4096) - 2048) / 2048.0f;
  cuda_copy(t.view.data, host.data(), t.bytes(), kDevice, s);
  cuda_wait(kDevice, s);
}

/// Device memory that counts.
class CountingMemory final : public MemoryResource {
 public:
  Device device() const noexcept override { return kDevice; }
  void* allocate(size_t bytes, size_t alignment) override {
    ++allocations;
    return cuda_memory().allocate(bytes, alignment);
  }
  void deallocate(void* p, size_t bytes, size_t alignment) noexcept override {
    cuda_memory().deallocate(p, bytes, alignment);
  }
  int64_t allocations = 0;
};

/// Pools full of finite rows, and the tensors of a step at fixed addresses.
struct Engine {
  Engine(AttentionArch arch, int32_t heads, int32_t most_rows, uint32_t seed, Stream s)
      : arch(arch),
        latent({.num_layers = kLayers, .geometry = {kR, kP}, .num_pages = kNumPages, .page_size = kPage},
               cuda_memory()),
        index({.layers = {0}, .head_dim = kDi, .num_pages = kNumPages, .page_size = kPage}, cuda_memory()),
        heads(heads),
        selection(kTopk, true, cuda_memory()),
        random(seed) {
    q = DeviceTensor(DType::kBf16, {most_rows, heads, kR + kP});
    c = DeviceTensor(DType::kBf16, {most_rows, kR});
    rope = DeviceTensor(DType::kBf16, {most_rows, kP});
    k = DeviceTensor(DType::kBf16, {most_rows, kDi});
    iq = DeviceTensor(DType::kBf16, {most_rows, kHi, kDi});
    w = DeviceTensor(DType::kF32, {most_rows, kHi});
    selection.reserve(most_rows);
    // Every slot is written once, through the operations themselves.
    const int64_t slots = int64_t{kNumPages} * kPage;
    DeviceTensor all_c(DType::kBf16, {slots, kR}), all_rope(DType::kBf16, {slots, kP}),
        all_k(DType::kBf16, {slots, kDi}), ids(DType::kI32, {slots});
    fill_bf16(all_c, random, s);
    fill_bf16(all_rope, random, s);
    fill_bf16(all_k, random, s);
    std::vector<int32_t> host(static_cast<size_t>(slots));
    for (size_t i = 0; i < host.size(); ++i) host[i] = static_cast<int32_t>(i);
    cuda_copy(ids.view.data, host.data(), ids.bytes(), kDevice, s);
    const Context context;
    for (int32_t l = 0; l < kLayers; ++l) {
      const LatentWrite op{.latent = all_c.view, .rope = all_rope.view, .slots = ids.view, .cache = latent.layer(l)};
      OpPlan<LatentWrite>(context, op).run(op, {}, s);
    }
    const IndexKWrite op{.k = all_k.view, .slots = ids.view, .cache = index.layer(0)};
    OpPlan<IndexKWrite>(context, op).run(op, {}, s);
    cuda_wait(kDevice, s);
    fresh_inputs(s);  // warm-up runs read them too
  }

  AttentionConfig config(bool batch_invariant) const {
    AttentionConfig a;
    a.arch = arch;
    a.num_heads = heads;
    a.geometry = {kR, kP};
    a.qk_nope_head_dim = a.v_head_dim = 128;
    a.q_lora_rank = 192;
    a.softmax_scale = 0.2f;
    a.indexer = {.num_heads = kHi, .head_dim = kDi, .topk = kTopk};
    a.page_size = kPage;
    a.max_context_len = kMaxLen;
    a.plan.batch_invariant = batch_invariant;
    a.device = kDevice;
    return a;
  }
  std::unique_ptr<AttentionBackend> backend(bool batch_invariant, Stream s) {
    auto b = make_attention_backend(context, config(batch_invariant), {}, memory);
    b->set_stream(s);
    b->bind(layer_caches(latent, arch == AttentionArch::kDsa ? &index : nullptr));
    return b;
  }
  void fresh_inputs(Stream s) {
    for (const DeviceTensor* t : {&q, &c, &rope, &k, &iq}) fill_bf16(*t, random, s);
    fill_f32(w, random, s);
  }
  /// The layers of a step of that many rows.
  void run(AttentionBackend& b, int64_t rows, const DeviceTensor& out, const DeviceTensor& lse) const {
    const KvRows kv{.latent = c.rows(rows), .rope = rope.rows(rows)};
    KvRows kv0 = kv;
    kv0.index_k = k.rows(rows);
    if (arch == AttentionArch::kMla) {
      for (int32_t l = 0; l < kLayers; ++l)
        b.attend({.layer = l,
                  .q = q.rows(rows),
                  .write = kv,
                  .selection = AttendAll{},
                  .out = out.rows(rows),
                  .lse = lse.rows(rows)});
      return;
    }
    const TopKSelection s = selection.view(rows);
    b.select({.layer = 0, .q = iq.rows(rows), .weights = w.rows(rows), .write = kv0, .out = s});
    for (int32_t l = 0; l < kLayers; ++l) {
      const StepWrite write = l == 0 ? StepWrite(AlreadyWritten{}) : StepWrite(kv);
      b.attend({.layer = l,
                .q = q.rows(rows),
                .write = write,
                .selection = s,
                .out = out.rows(rows),
                .lse = lse.rows(rows)});
    }
  }

  AttentionArch arch;
  Context context{};
  CountingMemory memory;
  LatentPool latent;
  IndexKPool index;
  int32_t heads;
  SelectionBuffer selection;
  Random random;
  DeviceTensor q, c, rope, k, iq, w;
};

class Graph {
 public:
  template <class F>
  Graph(cudaStream_t stream, F&& work) {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    work();
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    count_overlaps(graph);
    EXPECT_EQ(cudaGraphInstantiate(&exec_, graph, 0), cudaSuccess);
    cudaGraphDestroy(graph);
  }
  ~Graph() { cudaGraphExecDestroy(exec_); }
  Graph(const Graph&) = delete;
  void launch(cudaStream_t stream) const { ASSERT_EQ(cudaGraphLaunch(exec_, stream), cudaSuccess); }
  /// Kernels that are set up before the one ahead of them has ended.
  int64_t num_overlaps() const { return num_overlaps_; }

 private:
  void count_overlaps(cudaGraph_t graph) {
#if CUDART_VERSION >= 13000
    constexpr auto get_edges = cudaGraphGetEdges;
#else
    constexpr auto get_edges = cudaGraphGetEdges_v2;
#endif
    size_t n = 0;
    EXPECT_EQ(get_edges(graph, nullptr, nullptr, nullptr, &n), cudaSuccess);
    std::vector<cudaGraphNode_t> from(n), to(n);
    std::vector<cudaGraphEdgeData> edges(n);
    EXPECT_EQ(get_edges(graph, from.data(), to.data(), edges.data(), &n), cudaSuccess);
    for (const cudaGraphEdgeData& e : edges) num_overlaps_ += e.type == cudaGraphDependencyTypeProgrammatic;
  }

  int64_t num_overlaps_ = 0;
  cudaGraphExec_t exec_ = nullptr;
};

struct Shape {
  AttentionArch arch;
  int32_t q_len;
  int32_t heads;
  bool invariant;
};
void PrintTo(const Shape& s, std::ostream* os) {
  *os << to_string(s.arch) << " q_len " << s.q_len << " heads " << s.heads << (s.invariant ? " invariant" : "");
}

class CudaGraphs : public CudaTest, public testing::WithParamInterface<Shape> {};
INSTANTIATE_TEST_SUITE_P(
    Attention, CudaGraphs,
    testing::Values(Shape{AttentionArch::kMla, 1, 16, false}, Shape{AttentionArch::kMla, 3, 128, false},
                    Shape{AttentionArch::kMla, 2, 5, true}, Shape{AttentionArch::kDsa, 1, 64, false},
                    Shape{AttentionArch::kDsa, 4, 16, false}, Shape{AttentionArch::kDsa, 2, 8, true}));

/// A batch of up to `most` requests, all different from the one before: growing, shrinking, with padding.
struct Batch {
  Batch(Random& r, int32_t most, int32_t q_len) : table(most, kColumns) {
    std::vector<int32_t> pages;
    for (int32_t p = 1; p < kNumPages; ++p) pages.push_back(p);
    std::shuffle(pages.begin(), pages.end(), r);
    const auto n = static_cast<int32_t>(r() % static_cast<uint32_t>(most)) + 1;
    size_t next = 0;
    for (int32_t i = 0; i < n; ++i) {
      const bool padding = r() % 8 == 0;
      const int32_t len = padding ? 0 : q_len + static_cast<int32_t>(r() % static_cast<uint32_t>(kMaxLen - q_len - 1));
      seq_lens.push_back(len);
      const auto cells = static_cast<size_t>(pages_for(len + 1, kPage));
      table.set_row(i, std::span(pages).subspan(next, cells));
      next += cells;
    }
  }
  BatchStep step(int32_t q_len) const {
    return {.seq_lens = seq_lens, .prefix_lens = {}, .extend_lens = {}, .q_len = q_len, .pages = table.view()};
  }
  std::vector<int32_t> seq_lens;
  PageTable table;
};

TEST_P(CudaGraphs, ReplayEqualsEagerOverRandomSteps) {
  const Shape shape = GetParam();
  constexpr int32_t kMost = 8;  // requests; 8 of 640 tokens fit the pool
  const int32_t q_len = shape.q_len;
  const int64_t rows = int64_t{kMost} * q_len;
  Engine e(shape.arch, shape.heads, static_cast<int32_t>(rows), 7, stream());
  const auto captured = e.backend(shape.invariant, stream()), eager = e.backend(shape.invariant, stream());
  DeviceTensor out(DType::kBf16, {rows, e.heads, kR}), lse(DType::kF32, {rows, e.heads}),
      out_e(DType::kBf16, {rows, e.heads, kR}), lse_e(DType::kF32, {rows, e.heads});
  // The step and, where it has several rows, the draft that goes on from it.
  captured->capture({.num_requests = kMost, .q_len = q_len});
  e.run(*captured, rows, out, lse);  // plans and workspace
  wait();
  const Graph step(stream_, [&] { e.run(*captured, rows, out, lse); });
  if (q_len > 1) {
    captured->capture({.num_requests = kMost, .q_len = 1});
    e.run(*captured, kMost, out, lse);
  } else {
    captured->refresh({}, kMost);
    captured->advance({.steps = 1});
  }
  wait();
  const Graph draft(stream_, [&] { e.run(*captured, kMost, out, lse); });
  wait();
  std::string names;
  for (const auto& [op, impl] : captured->implementations()) names += op + " " + impl + ", ";
  std::printf("implementations: %s\n", names.c_str());

  const auto compare = [&](int64_t live_rows, const char* what, int i) {
    const auto a = out.read(stream()), b = out_e.read(stream()), x = lse.read(stream()), y = lse_e.read(stream());
    const auto n = static_cast<size_t>(live_rows * e.heads);
    ASSERT_EQ(std::memcmp(a.data(), b.data(), n * kR * 2), 0) << what << " of step " << i;
    ASSERT_EQ(std::memcmp(x.data(), y.data(), n * 4), 0) << what << " of step " << i;
  };
  int64_t allocated = 0;
  constexpr int kSteps = 200;  // of each of the six shapes: 1,200 steps, and half as many drafts
  Random random(11);
  for (int i = 0; i < kSteps; ++i) {
    const Batch batch(random, kMost, q_len);
    e.fresh_inputs(stream());
    for (const DeviceTensor* t : {&out, &lse, &out_e, &lse_e}) t->poison(stream());
    captured->refresh(batch.step(q_len), kMost);
    step.launch(stream_);
    // Where bits may depend on the batch the eager step has the same padding; else only the requests themselves.
    std::vector<int32_t> padded = batch.seq_lens;
    if (!shape.invariant) padded.resize(kMost, 0);
    BatchStep same = batch.step(q_len);
    same.seq_lens = padded;
    const auto n = static_cast<int64_t>(padded.size());
    eager->prepare(same);
    e.run(*eager, n * q_len, out_e, lse_e);
    compare(n * q_len, "the step", i);
    if (HasFatalFailure()) return;
    if (random() % 2 == 0) {
      for (const DeviceTensor* t : {&out, &lse, &out_e, &lse_e}) t->poison(stream());
      captured->advance({.steps = 1, .pages = batch.table.view()});
      draft.launch(stream_);
      eager->advance({.steps = 1, .pages = batch.table.view()});
      e.run(*eager, n, out_e, lse_e);
      compare(n, "the draft", i);
      if (HasFatalFailure()) return;
    }
    if (i == kSteps / 2) allocated = e.memory.allocations;  // every shape of the eager steps has come by then
  }
  EXPECT_EQ(e.memory.allocations, allocated);
}

// Lengths that live on the device: a graph plans its own step from the shared table in front of the layers, the lengths
// are advanced in the stream, and nothing waits for the device between the launches of a run. Each replay is the step
// prepared from the same lengths on the host, bit for bit, and its rows are those of the host's plan.
TEST_P(CudaGraphs, LengthsOnTheDeviceAreReplayedWithoutTheHost) {
  const Shape shape = GetParam();
  constexpr int32_t kMost = 6, kAdvances = 40;
  const int32_t q_len = shape.q_len;
  const int64_t rows = int64_t{kMost} * q_len;
  // Pools and inputs of the same bytes, so that either has its own history.
  Engine e(shape.arch, shape.heads, static_cast<int32_t>(rows), 17, stream()),
      e2(shape.arch, shape.heads, static_cast<int32_t>(rows), 17, stream());
  const auto captured = e.backend(shape.invariant, stream()), eager = e2.backend(shape.invariant, stream());
  DeviceTensor out(DType::kBf16, {rows, e.heads, kR}), lse(DType::kF32, {rows, e.heads}),
      out_e(DType::kBf16, {rows, e.heads, kR}), lse_e(DType::kF32, {rows, e.heads});
  DeviceTensor logs_out(DType::kBf16, {kAdvances, rows, e.heads * kR}),
      logs_lse(DType::kF32, {kAdvances, rows, e.heads}), logs_rows(DType::kI32, {kAdvances, 3, rows}),
      lengths(DType::kI32, {kAdvances, kMost});
  // Every request has all the pages that the table can hold; lengths grow, shrink to the start, and one is padding.
  Random random(23);
  std::vector<int32_t> pages;
  for (int32_t p = 1; p < kNumPages; ++p) pages.push_back(p);
  std::shuffle(pages.begin(), pages.end(), random);
  PageTable table(kMost, kColumns);
  for (int32_t r = 0; r < kMost; ++r)
    table.set_row(r, std::span(pages).subspan(static_cast<size_t>(r * kColumns), kColumns));
  std::vector<int32_t> lens(static_cast<size_t>(kAdvances * kMost));
  for (int32_t i = 0; i < kAdvances; ++i)
    for (int32_t r = 0; r < kMost; ++r)
      lens[static_cast<size_t>(i * kMost + r)] =
          (i + r) % 7 == 0 ? 0 : std::min(kMaxLen, q_len + static_cast<int32_t>(random() % (kMaxLen - q_len)) + 1);
  cuda_copy(lengths.view.data, lens.data(), lengths.bytes(), kDevice, stream());

  SharedPageTable shared(
      {.num_requests = kMost, .max_seq_len = kMaxLen, .page_size = kPage, .num_pages = kNumPages, .lookahead = kMaxLen},
      cuda_memory());
  captured->capture({.num_requests = kMost, .q_len = q_len}, shared);
  ASSERT_TRUE(shared.refresh(1, std::vector<int32_t>(kMost, q_len), table.view(), stream()));
  captured->refresh({.table = &shared, .generation = 1, .q_len = q_len});
  EXPECT_FALSE(captured->step().lens_known());
  e.fresh_inputs(stream());
  e.run(*captured, rows, out, lse);  // plans and workspace
  e2.fresh_inputs(stream());
  eager->prepare({.seq_lens = std::vector<int32_t>(kMost, q_len),
                  .prefix_lens = {},
                  .extend_lens = {},
                  .q_len = q_len,
                  .pages = table.view()});
  e2.run(*eager, rows, out_e, lse_e);
  wait();
  const Graph step(stream_, [&] {
    captured->refresh({.table = &shared, .generation = 1, .q_len = q_len});
    e.run(*captured, rows, out, lse);
  });
  const StepTensors planned = captured->step_tensors();
  const auto log = [&](const DeviceTensor& to, int64_t i, const void* from, size_t bytes) {
    ASSERT_EQ(cudaMemcpyAsync(static_cast<std::byte*>(to.view.data) + static_cast<size_t>(i) * bytes, from, bytes,
                              cudaMemcpyDeviceToDevice, stream_),
              cudaSuccess);
  };
  for (int32_t i = 0; i < kAdvances; ++i) {  // no host length, no wait
    ASSERT_EQ(cudaMemcpyAsync(shared.seq_lens().data, lengths.view.ptr<int32_t>(i), kMost * sizeof(int32_t),
                              cudaMemcpyDeviceToDevice, stream_),
              cudaSuccess);
    out.poison(stream());
    lse.poison(stream());
    step.launch(stream_);
    log(logs_out, i, out.view.data, out.bytes());
    log(logs_lse, i, lse.view.data, lse.bytes());
    const auto row_bytes = static_cast<size_t>(rows) * sizeof(int32_t);
    log(logs_rows, 3 * i, planned.positions.data, row_bytes);
    log(logs_rows, 3 * i + 1, planned.write_slots.data, row_bytes);
    log(logs_rows, 3 * i + 2, planned.row_lens.data, row_bytes);
  }
  const auto all_out = logs_out.read(stream()), all_lse = logs_lse.read(stream()), all_rows = logs_rows.read(stream());
  for (int32_t i = 0; i < kAdvances; ++i) {
    const std::span<const int32_t> now = std::span(lens).subspan(static_cast<size_t>(i * kMost), kMost);
    eager->prepare({.seq_lens = now, .prefix_lens = {}, .extend_lens = {}, .q_len = q_len, .pages = table.view()});
    e2.run(*eager, rows, out_e, lse_e);
    const auto a = out_e.read(stream()), b = lse_e.read(stream());
    ASSERT_EQ(std::memcmp(a.data(), all_out.data() + static_cast<size_t>(i) * a.size(), a.size()), 0) << "step " << i;
    ASSERT_EQ(std::memcmp(b.data(), all_lse.data() + static_cast<size_t>(i) * b.size(), b.size()), 0) << "step " << i;
    const StepPlan& plan = eager->step();
    const auto* at = reinterpret_cast<const int32_t*>(all_rows.data()) + int64_t{3} * i * rows;
    for (const std::span<const int32_t> want : {plan.positions(), plan.write_slots(), plan.row_lens()}) {
      ASSERT_TRUE(std::equal(want.begin(), want.end(), at)) << "step " << i;
      at += rows;
    }
  }
}

// A target and its draft on backends of their own, a graph each over one shared table: in either order of the two, over
// random steps with padding, each is what it is eagerly. Who replays without a refresh is told.
TEST_P(CudaGraphs, TargetAndDraftShareATableInEitherOrder) {
  const Shape shape = GetParam();
  if (shape.q_len == 1) GTEST_SKIP() << "a target that verifies has more than one row a request";
  constexpr int32_t kMost = 6;
  const int32_t q_len = shape.q_len;
  const int64_t rows = int64_t{kMost} * q_len;
  // Layers of their own, and so caches of their own, whose pages are the same.
  Engine e(shape.arch, shape.heads, static_cast<int32_t>(rows), 29, stream()),
      d(shape.arch, shape.heads, static_cast<int32_t>(rows), 30, stream());
  const auto target = e.backend(shape.invariant, stream()), draft = d.backend(shape.invariant, stream()),
             eager = e.backend(shape.invariant, stream()), eager_draft = d.backend(shape.invariant, stream());
  DeviceTensor out(DType::kBf16, {rows, e.heads, kR}), lse(DType::kF32, {rows, e.heads}),
      out_d(DType::kBf16, {rows, e.heads, kR}), lse_d(DType::kF32, {rows, e.heads}),
      out_e(DType::kBf16, {rows, e.heads, kR}), lse_e(DType::kF32, {rows, e.heads}), accepted(DType::kI32, {kMost});
  SharedPageTable shared(
      {.num_requests = kMost, .max_seq_len = kMaxLen, .page_size = kPage, .num_pages = kNumPages, .lookahead = 1},
      cuda_memory());
  target->capture({.num_requests = kMost, .q_len = q_len}, shared);
  e.run(*target, rows, out, lse);
  draft->capture({.num_requests = kMost, .q_len = 1}, shared);
  d.run(*draft, kMost, out_d, lse_d);
  wait();
  const Graph verify(stream_, [&] { e.run(*target, rows, out, lse); });
  const Graph next(stream_, [&] { d.run(*draft, kMost, out_d, lse_d); });
  Random random(31);
  for (uint64_t generation = 1; generation <= 60; ++generation) {
    const Batch batch(random, kMost, q_len);
    e.fresh_inputs(stream());
    d.fresh_inputs(stream());
    for (const DeviceTensor* t : {&out, &lse, &out_d, &lse_d}) t->poison(stream());
    std::vector<int32_t> padded = batch.seq_lens, kept;
    padded.resize(kMost, 0);
    for (const int32_t n : padded) kept.push_back(n == 0 ? 0 : n - static_cast<int32_t>(random() % q_len));
    cuda_copy(accepted.view.data, kept.data(), accepted.bytes(), kDevice, stream());
    const auto replay_target = [&] {
      shared.refresh(generation, batch.seq_lens, batch.table.view(), stream());
      target->refresh({.table = &shared, .generation = generation, .q_len = q_len});
      verify.launch(stream_);
    };
    const auto replay_draft = [&] {
      shared.refresh(generation, batch.seq_lens, batch.table.view(), stream());
      draft->refresh({.table = &shared, .generation = generation, .seq_lens = accepted.view, .steps = 1});
      next.launch(stream_);
    };
    const bool target_first = generation % 2 == 0;
    target_first ? replay_target() : replay_draft();
    target_first ? replay_draft() : replay_target();
    const auto a = out.read(stream()), x = lse.read(stream()), b = out_d.read(stream()), y = lse_d.read(stream());
    const auto run_target = [&] {
      eager->prepare(
          {.seq_lens = padded, .prefix_lens = {}, .extend_lens = {}, .q_len = q_len, .pages = batch.table.view()});
      e.run(*eager, rows, out_e, lse_e);
      const auto o = out_e.read(stream()), l = lse_e.read(stream());
      ASSERT_EQ(std::memcmp(a.data(), o.data(), o.size()), 0) << "the target, generation " << generation;
      ASSERT_EQ(std::memcmp(x.data(), l.data(), l.size()), 0) << "the target, generation " << generation;
    };
    const auto run_draft = [&] {
      std::vector<int32_t> lens;
      for (const int32_t n : kept) lens.push_back(n == 0 ? 0 : n + 1);
      eager_draft->prepare(
          {.seq_lens = lens, .prefix_lens = {}, .extend_lens = {}, .q_len = 1, .pages = batch.table.view()});
      d.run(*eager_draft, kMost, out_e, lse_e);
      const auto o = out_e.read(stream()), l = lse_e.read(stream());
      const size_t n = size_t{kMost} * static_cast<size_t>(e.heads);
      ASSERT_EQ(std::memcmp(b.data(), o.data(), n * kR * 2), 0) << "the draft, generation " << generation;
      ASSERT_EQ(std::memcmp(y.data(), l.data(), n * 4), 0) << "the draft, generation " << generation;
    };
    target_first ? run_target() : run_draft();
    if (HasFatalFailure()) return;
    target_first ? run_draft() : run_target();
    if (HasFatalFailure()) return;
  }
  shared.mark(1000);
  std::string text;
  try {
    d.run(*draft, kMost, out_d, lse_d);
  } catch (const Error& error) {
    text = error.what();
  }
  EXPECT_NE(text.find("the step is stale: it is of generation 60 of the page table, which is of 1000"),
            std::string::npos)
      << text;
  wait();
}

TEST_P(CudaGraphs, TwentyLaunchesAreTheSameBits) {
  const Shape shape = GetParam();
  constexpr int32_t kMost = 6;
  const int64_t rows = int64_t{kMost} * shape.q_len;
  Engine e(shape.arch, shape.heads, static_cast<int32_t>(rows), 3, stream());
  const auto b = e.backend(shape.invariant, stream());
  DeviceTensor out(DType::kBf16, {rows, e.heads, kR}), lse(DType::kF32, {rows, e.heads});
  Random random(5);
  const Batch batch(random, kMost, shape.q_len);
  const auto n = static_cast<int64_t>(batch.seq_lens.size()) * shape.q_len;
  b->prepare(batch.step(shape.q_len));
  // Another stream keeps the device busy with steps of its own, on pools of its own.
  cudaStream_t other = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
  {
    Engine e2(shape.arch, shape.heads, static_cast<int32_t>(rows), 4, {other});
    const auto b2 = e2.backend(shape.invariant, {other});
    DeviceTensor out2(DType::kBf16, {rows, e.heads, kR}), lse2(DType::kF32, {rows, e.heads});
    b2->prepare(batch.step(shape.q_len));
    std::vector<std::byte> first;
    e.fresh_inputs(stream());
    for (int i = 0; i < 20; ++i) {
      for (int j = 0; j < 5; ++j) e2.run(*b2, n, out2, lse2);
      out.poison(stream());
      e.run(*b, n, out, lse);
      const auto bytes = out.read(stream());
      if (i == 0) first = bytes;
      ASSERT_EQ(first, bytes) << "launch " << i;
    }
    cudaStreamSynchronize(other);
  }
  cudaStreamDestroy(other);
}

/// Programmatic dependent launch: steps whose kernels are set up while the ones before them end, eager and in graphs,
/// all enqueued without a wait between them, against the same steps one kernel after the other.
TEST_P(CudaGraphs, OverlapChangesNoBit) {
  const Shape shape = GetParam();
  constexpr int32_t kMost = 8, kSteps = 25, kWays = 4;  // overlapped or not, a graph or eager
  const int64_t rows = int64_t{kMost} * shape.q_len;
  Engine e(shape.arch, shape.heads, static_cast<int32_t>(rows), 13, stream());
  std::vector<std::unique_ptr<AttentionBackend>> backends;
  std::vector<std::unique_ptr<Graph>> graphs(kWays);
  std::vector<DeviceTensor> outs(kWays), lses(kWays);
  for (size_t way = 0; way < kWays; ++way) {
    outs[way] = DeviceTensor(DType::kBf16, {rows, e.heads, kR});
    lses[way] = DeviceTensor(DType::kF32, {rows, e.heads});
    backends.push_back(e.backend(shape.invariant, Stream{.handle = stream_, .overlap = way % 2 == 0}));
    if (way >= 2) continue;
    backends[way]->capture({.num_requests = kMost, .q_len = shape.q_len});
    e.run(*backends[way], rows, outs[way], lses[way]);  // plans and workspace
    wait();
    graphs[way] = std::make_unique<Graph>(stream_, [&] { e.run(*backends[way], rows, outs[way], lses[way]); });
  }
  Random random(17);
  for (int i = 0; i < kSteps; ++i) {
    const Batch batch(random, kMost, shape.q_len);
    BatchStep step = batch.step(shape.q_len);
    std::vector<int32_t> padded = batch.seq_lens;
    padded.resize(kMost, 0);
    step.seq_lens = padded;
    e.fresh_inputs(stream());
    for (size_t way = 0; way < kWays; ++way) {
      outs[way].poison(stream());
      lses[way].poison(stream());
    }
    backends[0]->refresh(batch.step(shape.q_len), kMost);
    backends[1]->refresh(batch.step(shape.q_len), kMost);
    backends[2]->prepare(step);
    backends[3]->prepare(step);
    for (int again = 0; again < 3; ++again) {
      graphs[0]->launch(stream_);
      e.run(*backends[2], rows, outs[2], lses[2]);
      graphs[1]->launch(stream_);
      e.run(*backends[3], rows, outs[3], lses[3]);
    }
    const auto out = outs[1].read(stream()), lse = lses[1].read(stream());  // a graph without overlap
    for (const size_t way : {0, 2, 3}) {
      ASSERT_EQ(outs[way].read(stream()), out) << "way " << way << " of step " << i;
      ASSERT_EQ(lses[way].read(stream()), lse) << "way " << way << " of step " << i;
    }
  }
}

using CudaBackends = CudaTest;

// What Stream::overlap and a context of C say shows in the graph: its kernels are set up early, or none is.
TEST_F(CudaBackends, StreamsAndContextsOfCSayWhetherKernelsOverlap) {
  constexpr int32_t kRows = 4;
  Engine e(AttentionArch::kDsa, 64, kRows, 1, stream());
  DeviceTensor out(DType::kBf16, {kRows, 64, kR}), lse(DType::kF32, {kRows, 64});
  const auto overlaps_of = [&](AttentionBackend& b) {
    b.bind(layer_caches(e.latent, &e.index));
    b.capture({.num_requests = kRows});
    e.run(b, kRows, out, lse);  // plans and workspace
    wait();
    return Graph(stream_, [&] { e.run(b, kRows, out, lse); }).num_overlaps();
  };
  for (const bool overlap : {true, false}) {
    gannet_context_options options{};
    options.struct_size = sizeof options;
    options.no_overlap = overlap ? 0 : 1;
    gannet_context* context = nullptr;
    must(gannet_context_create(&options, &context));
    const auto cpp = e.backend(false, Stream{.handle = stream_, .overlap = overlap});
    CBackend c(context, e.config(false));
    c.set_stream(stream());
    const int64_t n = overlaps_of(*cpp);
    EXPECT_EQ(overlaps_of(c), n);
    bool early = false;  // kernels of this build know how to
    for (const auto& [op, impl] : cpp->implementations()) early = early || impl == "cuda_sm90";
    EXPECT_EQ(n >= 2, overlap && early) << n;
    EXPECT_TRUE(overlap || n == 0) << n;
    std::printf("overlap %d: %lld kernels set up early\n", overlap, static_cast<long long>(n));
    gannet_context_free(&context);
  }
}

// A shared page table of C on the device: lengths and pages are read there, and the bits are those of C++.
TEST_F(CudaBackends, SharedPageTablesOfCAreThoseOfCpp) {
  constexpr int32_t kMost = 4, kQLen = 2, kRows = kMost * kQLen;
  Engine e(AttentionArch::kMla, 16, kRows, 3, stream());
  gannet_context* context = nullptr;
  must(gannet_context_create(nullptr, &context));
  const auto cpp = e.backend(false, stream());
  CBackend c(context, e.config(false));
  c.set_stream(stream());
  c.bind(layer_caches(e.latent, nullptr));
  SharedPageTable table({.num_requests = kMost, .max_seq_len = kMaxLen, .page_size = kPage, .num_pages = kNumPages},
                        cuda_memory());
  gannet_shared_page_table_options o{};
  o.struct_size = sizeof o;
  o.num_requests = kMost;
  o.page_size = kPage;
  o.max_seq_len = kMaxLen;
  o.num_pages = kNumPages;
  o.device = {GANNET_CUDA, 0};
  gannet_shared_page_table* shared = nullptr;
  must(gannet_shared_page_table_create(&o, nullptr, &shared));
  const CaptureShape shape{.num_requests = kMost, .q_len = kQLen};
  const gannet_capture_shape c_shape = c_of(shape);
  cpp->capture(shape, table);
  must(gannet_backend_capture_shared(c.get(), &c_shape, shared));
  DeviceTensor out(DType::kBf16, {kRows, 16, kR}), lse(DType::kF32, {kRows, 16}), out_c(DType::kBf16, {kRows, 16, kR}),
      lse_c(DType::kF32, {kRows, 16});
  Random random(5);
  for (uint64_t generation = 1; generation <= 5; ++generation) {
    const Batch batch(random, kMost, kQLen);
    const BatchStep step = batch.step(kQLen);
    ASSERT_TRUE(table.refresh(generation, step.seq_lens, step.pages, stream()));
    const gannet_page_table pages = c_of(step.pages);
    int32_t copied = 0;
    must(gannet_shared_page_table_refresh(shared, generation, step.seq_lens.data(), step.num_requests(), &pages,
                                          stream_, &copied));
    ASSERT_EQ(copied, 1);
    cpp->refresh({.table = &table, .generation = generation, .q_len = kQLen});
    e.run(*cpp, kRows, out, lse);
    gannet_shared_step s{};
    s.struct_size = sizeof s;
    s.table = shared;
    s.generation = generation;
    s.q_len = kQLen;
    must(gannet_backend_refresh_shared(c.get(), &s));
    gannet_step_info info{};
    info.struct_size = sizeof info;
    must(gannet_backend_step(c.get(), &info));
    EXPECT_EQ(info.lens_known, 0);
    EXPECT_EQ(info.max_row_len, cpp->step().max_row_len());
    e.run(c, kRows, out_c, lse_c);
    ASSERT_EQ(out.read(stream()), out_c.read(stream())) << "generation " << generation;
    ASSERT_EQ(lse.read(stream()), lse_c.read(stream())) << "generation " << generation;
  }
  gannet_shared_page_table_free(&shared);
  gannet_context_free(&context);
}

TEST_F(CudaBackends, PlansAreNotForAGraph) {
  Engine e(AttentionArch::kMla, 16, 4, 1, stream());
  const auto b = e.backend(false, stream());
  const std::vector<int32_t> lens{5, 6};
  PageTable table(2, kColumns);
  table.set_row(0, std::vector<int32_t>{1});
  table.set_row(1, std::vector<int32_t>{2});
  const BatchStep step{.seq_lens = lens, .prefix_lens = {}, .extend_lens = {}, .q_len = 1, .pages = table.view()};
  std::string text;
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  try {
    b->prepare(step);
  } catch (const Error& error) {
    text = error.what();
  }
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  cudaGraphDestroy(graph);
  EXPECT_NE(text.find("the stream is being captured into a graph"), std::string::npos) << text;
  b->prepare(step);  // and goes on
  DeviceTensor out(DType::kBf16, {4, 16, kR}), lse(DType::kF32, {4, 16});
  e.run(*b, 2, out, lse);
  wait();
}

TEST_F(CudaBackends, ACounterFollowsTheStream) {
  StreamCounter counter;
  EXPECT_EQ(counter.value(), 0u);
  Engine e(AttentionArch::kMla, 16, 64, 1, stream());
  const auto b = e.backend(false, stream());
  b->set_layer_hooks({.record = [&](int32_t, LayerRecord) { counter.signal(stream()); }, .wait = {}});
  const std::vector<int32_t> lens{40}, prefix{0}, extend{40};
  PageTable table(1, kColumns);
  table.set_row(0, std::vector<int32_t>{1});
  b->prepare({.seq_lens = lens, .prefix_lens = prefix, .extend_lens = extend, .q_len = 1, .pages = table.view()});
  DeviceTensor out(DType::kBf16, {40, 16, kR}), lse(DType::kF32, {40, 16});
  e.run(*b, 40, out, lse);
  wait();
  EXPECT_EQ(counter.value(), uint64_t{kLayers});
}

TEST_F(CudaBackends, PagesTravelThroughTheHost) {
  Engine from(AttentionArch::kDsa, 16, 4, 1, stream()), to(AttentionArch::kDsa, 16, 4, 2, stream());
  const auto a = layer_caches(from.latent, &from.index), b = layer_caches(to.latent, &to.index);
  const std::vector<int32_t> there{3, 9, 4}, here{1, 2, 90};
  std::vector<std::byte> shipped(static_cast<size_t>(exported_bytes(a, 3))), back(shipped.size()),
      before(shipped.size());
  export_pages(b, here, before, stream());
  export_pages(a, there, shipped, stream());
  ASSERT_NE(shipped, before);
  import_pages(b, here, shipped, stream());
  export_pages(b, here, back, stream());
  EXPECT_EQ(shipped, back);
  copy_pages(b, std::vector<PageMove>{{1, 7}, {2, 8}, {90, 9}}, stream());
  export_pages(b, std::vector<int32_t>{7, 8, 9}, back, stream());
  EXPECT_EQ(shipped, back);
  std::vector<SlotMove> moves;
  for (int32_t i = 0; i < kPage; ++i) moves.push_back({7 * kPage + i, 11 * kPage + (i + 5) % kPage});
  for (int32_t i = 0; i < kPage; ++i) moves.push_back({11 * kPage + (i + 5) % kPage, 12 * kPage + i});
  copy_slots(b, moves, stream());
  export_pages(b, std::vector<int32_t>{12, 8, 9}, back, stream());
  EXPECT_EQ(shipped, back);
}

// What `gannet info` prints: at most 128 MiB for 256 requests of two rows and 128 heads, whatever the context.
TEST_F(CudaBackends, ScratchOfTheLargestDecodeIsBounded) {
  std::set<std::string> seen;
  for (const WorkspaceSize& w : decode_workspaces(Context{})) {
    std::printf("%s %s %s: %.1f MiB\n", w.op.c_str(), w.format.c_str(), w.impl.c_str(),
                static_cast<double>(w.bytes) / (1 << 20));
    if (w.impl.rfind("cuda_", 0) != 0) continue;
    seen.insert(w.op + " " + w.format);
    EXPECT_LE(w.bytes, size_t{128} << 20) << w.op << " " << w.format << " " << w.impl;
  }
  EXPECT_EQ(seen.size(), 7u);  // three formats of both attentions, and selection
}

TEST_F(CudaBackends, MemoryThatIsNotThereIsRefused) {
  try {
    (void)cuda_memory().allocate(size_t{1} << 50, 256);
    FAIL() << "a pebibyte was had";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kOutOfMemory);
    EXPECT_NE(std::string(e.what()).find("bytes cannot be had on cuda:0"), std::string::npos) << e.what();
  }
  EXPECT_THROW((void)cuda_memory(99), Error);
}

}  // namespace
}  // namespace gannet_test
