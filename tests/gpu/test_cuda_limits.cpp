// Sizes at which 32-bit arithmetic and the limits of a grid would show: pools beyond 2^31 values and 4 GiB, batches of
// 65,536, prefills of 65,537 rows; and bits that stay the same over 20 launches beside a busy stream. What is expected
// comes from the same implementation on a problem of a few rows, which the grid of src/verify holds against the oracle.
// Skipped, with the reason, where there is no device.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gannet/cuda.h"
#include "unit/fault_problems.h"
#include "verify/device_mirror.h"
#include "verify/problem.h"
#include "verify/tolerances.h"

namespace gannet_test {
namespace {

using namespace gannet;
using gannet_tests::AbsorbedFormat;
using gannet_tests::DecodeProblem;
using gannet_tests::IndexProblem;
using gannet_tests::SparseProblem;
using verify::make_ints;
using verify::make_tensor;
using verify::Outputs;
using verify::Paged;
using verify::Rng;
using verify::Tensor;

constexpr Device kDevice{DeviceKind::kCuda, 0};

/// A batch of it, and the rows of a prefill that go one beyond what a grid's second dimension holds.
constexpr int64_t kBatch = 65536, kPrefillRows = 65537;

class CudaLimits : public testing::Test {
 protected:
  void SetUp() override {
    std::string why;
    if (cuda_device_count(&why) == 0) GTEST_SKIP() << "no CUDA device: " << why;
  }
};

/// The implementations on the device that take these arguments; each is printed, and so is why another does not.
template <class Params>
std::vector<ImplInfo> on_device(const Params& params) {
  std::vector<ImplInfo> list;
  for (const ImplInfo& info : list_implementations<Params>()) {
    if (info.device != DeviceKind::kCuda || !info.runs_here) continue;
    try {
      const OpPlan<Params> plan(Context{}, verify::placed_on(DeviceKind::kCuda, params), {.impl = info.name});
      std::printf("%s %s\n", info.op.c_str(), info.name.c_str());
      list.push_back(info);
    } catch (const Error& e) {
      if (e.code() != ErrorCode::kUnsupported) throw;
      std::printf("%s %s refuses: %s\n", info.op.c_str(), info.name.c_str(), e.what());
    }
  }
  EXPECT_FALSE(list.empty()) << Params::kName << " has no implementation on the device for these arguments";
  return list;
}

/// Memory of the device, 0xFF throughout.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes) : memory_(bytes, cuda_memory()) { poison(); }
  void poison() { EXPECT_EQ(cudaMemset(memory_.data(), 0xff, memory_.size()), cudaSuccess); }
  std::byte* data() { return static_cast<std::byte*>(static_cast<void*>(memory_.data())); }
  size_t size() const { return memory_.size(); }

 private:
  gannet::Buffer memory_;
};

size_t bytes_of(const TensorView& v) { return static_cast<size_t>(v.num_elements()) * size_of(v.dtype); }

std::vector<std::byte> host_bytes(const TensorView& v) {
  const auto* p = static_cast<const std::byte*>(v.data);
  return {p, p + bytes_of(v)};
}

/// Arguments with compact tensors, moved to the device. `change` may replace a tensor's shape and bytes on the way.
template <class Params>
class OnDevice {
 public:
  using Change = std::function<void(const std::string& name, TensorView& v, std::vector<std::byte>& bytes)>;
  OnDevice(const Params& host, const Change& change) : params(verify::placed_on(DeviceKind::kCuda, host)) {
    Params::for_each_view(params, [&](const char* name, TensorView& v) {
      if (!v.given()) return;
      std::vector<std::byte> bytes = host_bytes(v);
      change(name, v, bytes);
      int64_t stride = 1;
      for (int i = v.rank - 1; i >= 0; --i) {
        v.stride[static_cast<size_t>(i)] = stride;
        stride *= v.shape[static_cast<size_t>(i)];
      }
      memory_.push_back(std::make_unique<DeviceMemory>(bytes.size()));
      v.data = memory_.back()->data();
      cuda_copy(v.data, bytes.data(), bytes.size(), kDevice);
    });
  }
  void run(const std::string& impl) const {
    const Context context;
    const OpPlan<Params> plan(context, params, {.impl = impl});
    DeviceMemory workspace(plan.workspace_bytes() + 16);
    plan.run(params, {workspace.data(), plan.workspace_bytes()});
    cuda_wait(kDevice);
  }
  std::vector<std::byte> read(const std::string& wanted) const {
    std::vector<std::byte> host;
    Params::for_each_view(params, [&](const char* name, const TensorView& v) {
      if (wanted != name) return;
      host.resize(bytes_of(v));
      cuda_copy(host.data(), v.data, host.size(), kDevice);
    });
    cuda_wait(kDevice);
    return host;
  }

  Params params;

 private:
  std::vector<std::unique_ptr<DeviceMemory>> memory_;
};

void add_to_ints(std::vector<std::byte>& bytes, int32_t shift) {  // to those that are not negative, nor garbage
  for (size_t i = 0; i + 4 <= bytes.size(); i += 4) {
    int32_t x;
    std::memcpy(&x, bytes.data() + i, 4);
    if (x >= 0 && x < INT32_MAX - shift) x += shift;
    std::memcpy(bytes.data() + i, &x, 4);
  }
}

// ---- pools beyond 4 GiB ------------------------------------------------------------------------------------------

constexpr size_t kPoolBytes = size_t{5} << 30;  // 2.7e9 bf16 values

/// The end of a pool that takes kPoolBytes of poison: where the pages of a small pool go.
template <class Cache>
struct FarPool {
  FarPool(const Cache& near, DeviceMemory& memory) : view(near) {
    memory.poison();
    view.num_pages = static_cast<int64_t>(memory.size()) / near.page_stride_bytes;
    view.data = memory.data();
    view.device = kDevice;
    page_shift = view.num_pages - near.num_pages;
    first = memory.data() + page_shift * view.page_stride_bytes;
    bytes = static_cast<size_t>(near.num_pages * near.page_stride_bytes);
    EXPECT_GT(page_shift * view.page_stride_bytes, int64_t{1} << 32);
    std::printf("%lld pages of %lld bytes\n", static_cast<long long>(view.num_pages),
                static_cast<long long>(view.page_stride_bytes));
  }
  void fill(const void* near) const { cuda_copy(first, near, bytes, kDevice); }
  std::vector<std::byte> read() const {
    std::vector<std::byte> host(bytes);
    cuda_copy(host.data(), first, bytes, kDevice);
    cuda_wait(kDevice);
    return host;
  }
  int32_t slot_shift() const { return static_cast<int32_t>(page_shift * view.page_size); }

  Cache view;
  int64_t page_shift = 0;
  std::byte* first = nullptr;
  size_t bytes = 0;
};

/// The arguments for the far pool: pages and slots moved there.
template <class Params, class Cache>
OnDevice<Params> far_arguments(const Params& near, const FarPool<Cache>& pool) {
  Params far = near;
  far.cache = pool.view;
  return OnDevice<Params>(far, [&](const std::string& name, TensorView&, std::vector<std::byte>& bytes) {
    if (name == "pages" || name == "indices") add_to_ints(bytes, static_cast<int32_t>(pool.page_shift));
    if (name == "slots" || name == "topk_slots") add_to_ints(bytes, pool.slot_shift());
  });
}

/// Reads of a filled pool: the bits of the small one, but for slots that are written.
template <class Params, class Cache>
void expect_same_far(const Params& near, const FarPool<Cache>& pool) {
  for (const ImplInfo& info : on_device(near)) {
    const Outputs want = verify::run(near, {.impl = info.name});
    const OnDevice<Params> far = far_arguments(near, pool);
    far.run(info.name);
    for (const std::string& name : want.names) {
      std::vector<std::byte> expected = want.of(name);
      if (name == "topk_slots") add_to_ints(expected, pool.slot_shift());
      EXPECT_EQ(far.read(name), expected) << info.name << " " << name;
    }
  }
}

/// Writes: the pages hold what the oracle puts into the small pool, and the page before them is as it was.
template <class Params, class Cache>
void expect_written_far(const Params& near, const FarPool<Cache>& pool) {
  run_once(Context{}, near, {.impl = "ref"});
  const auto* const bytes = static_cast<const std::byte*>(near.cache.data);
  for (const ImplInfo& info : on_device(near)) {
    ASSERT_EQ(cudaMemset(pool.first, 0xff, pool.bytes), cudaSuccess);
    far_arguments(near, pool).run(info.name);
    EXPECT_EQ(pool.read(), std::vector<std::byte>(bytes, bytes + pool.bytes)) << info.name;
    std::vector<std::byte> before(static_cast<size_t>(pool.view.page_stride_bytes));
    cuda_copy(before.data(), pool.first - before.size(), before.size(), kDevice);
    cuda_wait(kDevice);
    EXPECT_TRUE(std::all_of(before.begin(), before.end(), [](std::byte b) { return b == std::byte{0xff}; }))
        << info.name << " wrote to the page before";
  }
}

/// Slots of all keys of a request, in an order that is not theirs, a few of them negative.
Tensor slots_of(const Paged& paged, int64_t request) {
  std::vector<int32_t> list;
  const int64_t keys = paged.keys_of[static_cast<size_t>(request)];
  for (int64_t i = 0; i < keys; ++i) list.push_back(static_cast<int32_t>(paged.slot(request, (i * 7) % keys)));
  for (size_t i = 5; i < list.size(); i += 50) list[i] = -1;
  return make_ints(list);
}

const verify::PagedSpec kFewRequests{.seq_lens = {150, 3, 641}, .q_len = 2};

/// Lists of every fifth key of a request, a row's behind the one before, some with invalid entries in between.
SparseProblem lists_of(const DecodeProblem& d, int64_t request, int64_t k, bool holes) {
  SparseProblem s(d, k);
  const int64_t keys = d.paged.keys_of[static_cast<size_t>(request)];
  for (int64_t row = 0; row < d.paged.num_rows; ++row)
    for (int64_t i = 0; i < k; ++i)
      *s.slots.view.ptr<int32_t>(row, i) =
          holes && i % 9 == 8 ? -1 : static_cast<int32_t>(d.paged.slot(request, (row * 64 + i * 5) % keys));
  s.params.topk_lens = {};
  return s;
}

TEST_F(CudaLimits, LatentPoolsBeyondFourGiB) {
  DeviceMemory memory(kPoolBytes);
  const Tensor slots = slots_of(Paged(kFewRequests), 2);
  const int64_t n = slots.view.shape[0];
  const Tensor latent = make_tensor(DType::kBf16, {n, 512}), rope = make_tensor(DType::kBf16, {n, 64});
  verify::fill_normal(latent, Rng(1));
  verify::fill_normal(rope, Rng(2));
  for (const LatentFormat format : {LatentFormat::kF32, LatentFormat::kBf16, LatentFormat::kE4m3,
                                    LatentFormat::kPacked656, LatentFormat::kE4m3PerToken}) {
    std::printf("%s\n", to_string(format));
    const DecodeProblem d(kFewRequests, {DType::kBf16, format}, 16);
    const verify::LatentPool& near = d.pool;
    const FarPool<LatentCacheView> far(near.view, memory);
    far.fill(near.view.data);
    expect_same_far(LatentGather{slots.view, near.view, latent.view, rope.view}, far);
    expect_same_far(d.params, far);
    expect_same_far(lists_of(d, 2, 64, true).params, far);

    verify::Buffer written(far.bytes);
    LatentWrite w;
    w.latent = latent.view;
    w.rope = rope.view;
    w.slots = slots.view;
    w.cache = near.view;
    w.cache.data = written.data();
    expect_written_far(w, far);
  }
}

TEST_F(CudaLimits, IndexPoolsBeyondFourGiB) {
  DeviceMemory memory(kPoolBytes);
  const Tensor slots = slots_of(Paged(kFewRequests), 2);
  const Tensor k = make_tensor(DType::kBf16, {slots.view.shape[0], 128});
  verify::fill_normal(k, Rng(1));
  for (const IndexKFormat format : {IndexKFormat::kF32, IndexKFormat::kBf16, IndexKFormat::kE4m3}) {
    std::printf("%s\n", to_string(format));
    const IndexProblem p(kFewRequests, {DType::kBf16, format}, 32, 64),
        narrow(kFewRequests, {DType::kE4m3, format}, 32, 64);  // the same pool
    const verify::IndexPool& near = p.pool;
    const FarPool<IndexCacheView> far(near.view, memory);
    far.fill(near.view.data);
    expect_same_far(IndexKGather{slots.view, near.view, k.view}, far);
    for (const IndexProblem* of : {&p, &narrow}) {
      expect_same_far(of->scores, far);
      expect_same_far(of->select, far);
    }

    verify::Buffer written(far.bytes);
    IndexKWrite w;
    w.k = k.view;
    w.slots = slots.view;
    w.cache = near.view;
    w.cache.data = written.data();
    expect_written_far(w, far);
  }
}

// ---- rows --------------------------------------------------------------------------------------------------------

constexpr int64_t kFewRows = 7;

/// Whether a row of `n` values of "out" or "lse" may come from sums of the same terms in another order, with weights in
/// bf16: each is as far from the truth as the grid allows.
bool close(const std::string& name, const float* got, const float* want, size_t n) {
  verify::AttentionPrecision p;
  p.num_keys = 200;
  p.score_deviation = gannet_tests::kScoreDeviation;
  double error = 0.0, norm = 0.0;
  for (size_t i = 0; i < n; ++i) {
    if (got[i] == want[i]) continue;  // infinities too
    const double difference = static_cast<double>(got[i]) - want[i];
    if (name == "lse" && !(std::fabs(difference) <= 2.0 * verify::lse_tolerance(p, want[i]))) return false;
    error += difference * difference;
  }
  for (size_t i = 0; i < n; ++i) norm += static_cast<double>(want[i]) * want[i];
  const double tolerance = 2.0 * verify::attention_tolerance(p);
  return name == "lse" || error <= tolerance * tolerance * norm;  // not with NaN
}

/// A problem of kFewRows rows, its tensors repeated to `rows` rows: every repetition gives the same, bit for bit where
/// the implementation promises that, else as `close` says.
template <class Params>
void expect_repeats(const Params& few, int64_t rows, bool may_be_close = false) {
  for (const ImplInfo& info : on_device(few)) {
    const Outputs want = verify::run(few, {.impl = info.name});
    OnDevice<Params> many(few, [&](const std::string&, TensorView& v, std::vector<std::byte>& bytes) {
      if (v.shape[0] != kFewRows) return;
      v.shape[0] = rows;
      const size_t row_bytes = bytes.size() / kFewRows;
      bytes.resize(static_cast<size_t>(rows) * row_bytes);
      for (size_t i = kFewRows * row_bytes; i < bytes.size(); i += row_bytes)
        std::memcpy(&bytes[i], &bytes[i - kFewRows * row_bytes], row_bytes);
    });
    std::unique_ptr<DeviceMemory> pool;
    if constexpr (requires { few.cache; }) {
      pool = std::make_unique<DeviceMemory>(static_cast<size_t>(verify::extent_of(few.cache)));
      cuda_copy(pool->data(), few.cache.data, pool->size(), kDevice);
      many.params.cache.data = pool->data();
    }
    many.run(info.name);
    for (const std::string& name : want.names) {
      const std::vector<std::byte>& expected = want.of(name);
      const std::vector<std::byte> got = many.read(name);
      const size_t row_bytes = expected.size() / kFewRows;
      ASSERT_EQ(got.size(), static_cast<size_t>(rows) * row_bytes);
      int64_t wrong = 0, first_wrong = -1;
      for (int64_t t = 0; t < rows; ++t) {
        const std::byte* x = &got[static_cast<size_t>(t) * row_bytes];
        const std::byte* y = &expected[static_cast<size_t>(t % kFewRows) * row_bytes];
        bool same = std::memcmp(x, y, row_bytes) == 0;
        if (!same && !info.batch_invariant && may_be_close) {
          std::vector<float> u(row_bytes / 4), v(row_bytes / 4);
          std::memcpy(u.data(), x, row_bytes);
          std::memcpy(v.data(), y, row_bytes);
          same = close(name, u.data(), v.data(), u.size());
        }
        if (same) continue;
        if (wrong++ == 0) first_wrong = t;
      }
      EXPECT_EQ(wrong, 0) << info.name << " " << name << ": the first wrong row is " << first_wrong;
    }
  }
}

const verify::PagedSpec kFewRowsSpec{.seq_lens = {1, 3, 64, 65, 130, 17, 200}};

TEST_F(CudaLimits, AttentionOverABatchOf65536) {
  const DecodeProblem d(kFewRowsSpec, {DType::kBf16, LatentFormat::kBf16}, 2);
  expect_repeats(d.params, kBatch, true);
  expect_repeats(lists_of(d, 6, 64, true).params, kBatch, true);
}

TEST_F(CudaLimits, SelectionOverABatchOf65536) {
  // Whole numbers: every order of sums gives the same bits.
  const IndexProblem p(kFewRowsSpec, {DType::kE4m3, IndexKFormat::kE4m3}, 32, 32, verify::Poison::kNan, 0, true);
  Rng rng(5);
  for (int64_t t = 0; t < kFewRows; ++t)
    for (int64_t h = 0; h < 32; ++h) {
      verify::set(p.weights.view, static_cast<float>(rng.below(5)) - 2.0f, t, h);
      for (int64_t d = 0; d < 128; ++d) verify::set(p.q.view, static_cast<float>(rng.below(5)) - 2.0f, t, h, d);
    }
  expect_repeats(p.scores, kBatch);
  expect_repeats(p.select, kBatch);

  verify::fill_normal(p.logits, Rng(6));
  const Tensor columns = make_ints({200, 1, 0, 33, 64, 199, 100});
  expect_repeats(TopK{p.logits.view, columns.view, p.positions.view, p.lens.view}, kBatch);
}

TEST_F(CudaLimits, MergeRopeAndGathersOf65536Rows) {
  const Tensor a = make_tensor(DType::kBf16, {kFewRows, 3, 128}), b = make_tensor(DType::kBf16, {kFewRows, 3, 128});
  const Tensor la = make_tensor(DType::kF32, {kFewRows, 3}), lb = make_tensor(DType::kF32, {kFewRows, 3});
  verify::fill_normal(a, Rng(1));
  verify::fill_normal(b, Rng(2));
  verify::fill_normal(la, Rng(3));
  verify::fill_normal(lb, Rng(4));
  MergeState m;
  m.out_a = a.view;
  m.lse_a = la.view;
  m.out_b = b.view;
  m.lse_b = lb.view;
  expect_repeats(m, kBatch);

  const Tensor table = make_tensor(DType::kF32, {100, 64});
  verify::fill_normal(table, Rng(5));
  const Tensor positions = make_ints({0, 99, 5, 6, 50, 51, 7});
  Rope r;
  r.x = a.view;
  r.positions = positions.view;
  r.cos_sin = table.view;
  r.offset = 64;
  expect_repeats(r, kBatch);

  const Paged paged(kFewRowsSpec);
  std::vector<int32_t> list;
  for (int64_t i = 0; i < kFewRows; ++i) list.push_back(i == 3 ? -1 : static_cast<int32_t>(paged.slot(6, 20 * i)));
  const Tensor slots = make_ints(list);
  const Tensor latent = make_tensor(DType::kBf16, {kFewRows, 512}), rope = make_tensor(DType::kBf16, {kFewRows, 64});
  for (const LatentFormat format : {LatentFormat::kBf16, LatentFormat::kE4m3, LatentFormat::kPacked656}) {
    const verify::LatentPool pool = verify::make_latent_pool(paged, format, 4);
    LatentGather g;
    g.slots = slots.view;
    g.cache = pool.view;
    g.latent = latent.view;
    g.rope = rope.view;
    expect_repeats(g, kBatch);
  }
  const verify::IndexPool pool = verify::make_index_pool(paged, IndexKFormat::kE4m3, ScaleFormat::kFp32, 128, 4);
  const Tensor k = make_tensor(DType::kBf16, {kFewRows, 128});
  IndexKGather g;
  g.slots = slots.view;
  g.cache = pool.view;
  g.k = k.view;
  expect_repeats(g, kBatch);
}

/// 65,536 rows written to as many slots, and read back as a write of seven is.
TEST_F(CudaLimits, WritesOf65536Rows) {
  constexpr int64_t kPages = kBatch / 64;
  const Tensor latent = make_tensor(DType::kBf16, {kFewRows, 512}), rope = make_tensor(DType::kBf16, {kFewRows, 64});
  verify::fill_normal(latent, Rng(1));
  verify::fill_normal(rope, Rng(2));
  const Tensor few_slots = make_ints({0, 1, 2, 3, 4, 5, 6});
  for (const LatentFormat format : {LatentFormat::kBf16, LatentFormat::kE4m3, LatentFormat::kPacked656}) {
    LatentWrite w;
    w.latent = latent.view;
    w.rope = rope.view;
    w.slots = few_slots.view;
    w.cache.format = format;
    w.cache.num_pages = kPages;
    w.cache.scale = 0.03f;
    w.cache.page_stride_bytes = 64 * latent_row_bytes(format, {});
    const auto row_bytes = static_cast<size_t>(latent_row_bytes(format, {}));
    verify::Buffer few(kFewRows * row_bytes);
    w.cache.data = few.data();
    run_once(Context{}, w, {.impl = "ref"});  // touches the first seven rows alone
    for (const ImplInfo& info : on_device(w)) {
      OnDevice<LatentWrite> many(w, [&](const std::string& name, TensorView& v, std::vector<std::byte>& bytes) {
        v.shape[0] = kBatch;
        const size_t line = bytes.size() / kFewRows;
        bytes.resize(kBatch * line);
        for (int64_t t = kFewRows; t < kBatch; ++t) {
          const auto slot = static_cast<int32_t>(t);
          const void* from =
              name == "slots" ? static_cast<const void*>(&slot) : &bytes[static_cast<size_t>(t % kFewRows) * line];
          std::memcpy(&bytes[static_cast<size_t>(t) * line], from, line);
        }
      });
      DeviceMemory pool(static_cast<size_t>(w.cache.page_stride_bytes * kPages));
      many.params.cache.data = pool.data();
      many.run(info.name);
      std::vector<std::byte> got(pool.size());
      cuda_copy(got.data(), pool.data(), got.size(), kDevice);
      cuda_wait(kDevice);
      int64_t wrong = 0;
      for (int64_t t = 0; t < kBatch; ++t)
        wrong += std::memcmp(&got[static_cast<size_t>(t) * row_bytes],
                             few.data() + static_cast<size_t>(t % kFewRows) * row_bytes, row_bytes) != 0;
      EXPECT_EQ(wrong, 0) << info.name << " " << to_string(format);
    }
  }
}

struct Prefill {
  Prefill(const std::vector<int32_t>& q_lens, const std::vector<int32_t>& kv_lens) {
    std::vector<int32_t> cu_q = {0}, cu_kv = {0};
    for (const int32_t n : q_lens) cu_q.push_back(cu_q.back() + n);
    for (const int32_t n : kv_lens) cu_kv.push_back(cu_kv.back() + n);
    q = make_tensor(DType::kBf16, {cu_q.back(), 2, 192});
    k = make_tensor(DType::kBf16, {cu_kv.back(), 2, 192});
    v = make_tensor(DType::kBf16, {cu_kv.back(), 2, 128});
    out = make_tensor(DType::kF32, {cu_q.back(), 2, 128});
    lse = make_tensor(DType::kF32, {cu_q.back(), 2});
    q_starts = make_ints(cu_q);
    kv_starts = make_ints(cu_kv);
    params.q = q.view;
    params.k = k.view;
    params.v = v.view;
    params.out = out.view;
    params.lse = lse.view;
    params.cu_q_lens = q_starts.view;
    params.cu_kv_lens = kv_starts.view;
    params.softmax_scale = gannet_tests::kSoftmaxScale;
  }
  void fill() const {
    verify::fill_normal(q, Rng(1));
    verify::fill_normal(k, Rng(2));
    verify::fill_normal(v, Rng(3));
  }
  Tensor q, k, v, out, lse, q_starts, kv_starts;  // NaN, all but the starts
  RaggedPrefill params;
};

/// The last rows of `t`, from the first of `few` on, become those of `few`.
void end_with(const Tensor& t, const Tensor& few) {
  const size_t bytes = bytes_of(few.view);
  std::memcpy(static_cast<std::byte*>(t.view.data) + bytes_of(t.view) - bytes, few.view.data, bytes);
}

void expect_rows(const std::string& name, const ImplInfo& info, const std::vector<float>& got,
                 const std::vector<float>& want) {
  ASSERT_EQ(got.size(), want.size());
  const size_t width = name == "out" ? 128 : 2;
  int64_t wrong = 0;
  for (size_t row = 0; row < want.size(); row += width) {
    if (std::memcmp(&got[row], &want[row], width * 4) == 0) continue;
    if (!info.batch_invariant && close(name, &got[row], &want[row], width)) continue;
    if (wrong++ == 0) {
      const auto at = static_cast<size_t>(std::mismatch(&got[row], &got[row] + width, &want[row]).first - got.data());
      std::printf("%s %s: row %zu has %.9g, expected %.9g\n", info.name.c_str(), name.c_str(), row / width, got[at],
                  want[at]);
    }
  }
  EXPECT_EQ(wrong, 0) << info.name << " " << name;
}

/// One request of 65,537 rows over 40 keys: causal, so that only the last 40 see any; the queries of others are NaN.
TEST_F(CudaLimits, PrefillOf65537Rows) {
  constexpr int32_t kKeys = 40, kLast = 48;
  const Prefill few({kLast}, {kKeys});
  const Prefill many({static_cast<int32_t>(kPrefillRows)}, {kKeys});
  few.fill();
  end_with(many.q, few.q);
  end_with(many.k, few.k);
  end_with(many.v, few.v);
  for (const ImplInfo& info : on_device(many.params)) {
    const Outputs want = verify::run(few.params, {.impl = info.name});
    const Outputs got = verify::run(many.params, {.impl = info.name});
    EXPECT_EQ(got.fault, "");
    for (const std::string name : {"out", "lse"}) {
      const std::vector<float> all = got.floats(name), last = want.floats(name);
      const size_t empty = all.size() - last.size();
      const float nothing = name == "out" ? 0.0f : -INFINITY;
      EXPECT_TRUE(
          std::all_of(all.begin(), all.begin() + static_cast<int64_t>(empty), [&](float x) { return x == nothing; }))
          << info.name << " " << name << " of rows without keys";
      expect_rows(name, info, {all.begin() + static_cast<int64_t>(empty), all.end()}, last);
    }
  }
}

/// 65,537 requests of one row each, over one to seven keys.
TEST_F(CudaLimits, PrefillOf65537Requests) {
  std::vector<int32_t> one_each(kFewRows, 1), keys, all_one(kPrefillRows, 1), all_keys;
  for (int32_t i = 0; i < kFewRows; ++i) keys.push_back(i + 1);
  for (int64_t i = 0; i < kPrefillRows; ++i) all_keys.push_back(keys[static_cast<size_t>(i % kFewRows)]);
  const Prefill few(one_each, keys);
  const Prefill many(all_one, all_keys);
  few.fill();
  const auto repeat = [](const Tensor& t, const Tensor& of) {
    const size_t bytes = bytes_of(t.view), period = bytes_of(of.view);
    for (size_t i = 0; i < bytes; i += period)
      std::memcpy(static_cast<std::byte*>(t.view.data) + i, of.view.data, std::min(period, bytes - i));
  };
  repeat(many.q, few.q);
  repeat(many.k, few.k);
  repeat(many.v, few.v);
  for (const ImplInfo& info : on_device(many.params)) {
    const Outputs want = verify::run(few.params, {.impl = info.name});
    const Outputs got = verify::run(many.params, {.impl = info.name});
    EXPECT_EQ(got.fault, "");
    for (const std::string name : {"out", "lse"}) {
      const std::vector<float> period = want.floats(name);
      std::vector<float> expected(got.floats(name).size());
      for (size_t i = 0; i < expected.size(); ++i) expected[i] = period[i % period.size()];
      expect_rows(name, info, got.floats(name), expected);
    }
  }
}

// ---- padding ----------------------------------------------------------------------------------------------------

/// The first `n` of a view's rows; absent views stay absent.
TensorView first_rows(TensorView v, int64_t n) {
  if (v.given()) v.shape[0] = n;
  return v;
}

/// cuda_sm90 cuts requests by what all of them have; requests without keys take no part in that, so that the graph of
/// a larger batch gives the bits of the batch itself. More requests than parts, and fewer; short ones, which stay
/// whole, and such that are cut.
TEST_F(CudaLimits, PaddedBatchesGiveTheSameBits) {
  bool here = false;
  for (const ImplInfo& info : list_implementations<MlaDecode>()) here |= info.name == "cuda_sm90" && info.runs_here;
  if (!here) GTEST_SKIP() << "cuda_sm90 does not run here";
  struct Kind {
    AbsorbedFormat format;
    int64_t heads;
  };
  for (const auto& [real, padded] : {std::pair{1, 30}, {5, 200}, {40, 150}, {100, 256}, {140, 256}, {3, 500}}) {
    for (const Kind& kind : {Kind{{DType::kBf16, LatentFormat::kBf16}, 16},
                             {{DType::kBf16, LatentFormat::kBf16}, 128},
                             {{DType::kE4m3, LatentFormat::kE4m3}, 16},
                             {{DType::kE4m3, LatentFormat::kE4m3}, 64},
                             {{DType::kBf16, LatentFormat::kPacked656}, 16}}) {
      bool ran = false;
      verify::PagedSpec spec;
      for (int i = 0; i < padded; ++i) spec.seq_lens.push_back(i >= real ? 0 : i % 16 == 0 ? 2900 : 1 + i * 97 % 300);
      const DecodeProblem d(spec, kind.format, kind.heads);
      MlaDecode batch = d.params;
      batch.rows.seq_lens = first_rows(batch.rows.seq_lens, real);
      batch.pages.pages = first_rows(batch.pages.pages, real);
      for (TensorView* const v : {&batch.q, &batch.out, &batch.lse, &batch.max_logits}) *v = first_rows(*v, real);
      for (const ImplInfo& info : on_device(d.params)) {
        if (info.name != "cuda_sm90") continue;
        ran = true;
        const Outputs want = verify::run(batch, {.impl = info.name}), got = verify::run(d.params, {.impl = info.name});
        for (const std::string name : {"out", "lse"}) {
          const std::vector<float> a = want.floats(name), b = got.floats(name);
          ASSERT_LE(a.size(), b.size());
          EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0)
              << name << ", " << real << " of " << padded << " requests, " << kind.heads << " heads";
          const float empty = name == "out" ? 0.0f : -std::numeric_limits<float>::infinity();
          EXPECT_TRUE(std::all_of(b.begin() + static_cast<std::ptrdiff_t>(a.size()), b.end(),
                                  [&](float x) { return x == empty; }));
        }
      }
      EXPECT_TRUE(ran) << "cuda_sm90 took no such batch: " << kind.heads << " heads";
    }
  }
}

// ---- the same bits, again and again -----------------------------------------------------------------------------

/// Keeps the device busy from a stream of its own.
class BusyStream {
 public:
  BusyStream() : from_(kBytes), to_(kBytes), thread_([this] { run(); }) {
    while (copies_ == 0) std::this_thread::yield();
  }
  ~BusyStream() {
    stop_ = true;
    thread_.join();
  }
  int64_t copies() const { return copies_; }

 private:
  static constexpr size_t kBytes = size_t{64} << 20;
  void run() {
    cudaStream_t stream;
    if (cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess) {
      copies_ = 1;  // and no more
      return;
    }
    while (!stop_) {
      for (int i = 0; i < 8; ++i) cudaMemcpyAsync(to_.data(), from_.data(), kBytes, cudaMemcpyDeviceToDevice, stream);
      cudaStreamSynchronize(stream);
      copies_ += 8;
    }
    cudaStreamDestroy(stream);
  }
  DeviceMemory from_, to_;
  std::atomic<bool> stop_ = false;
  std::atomic<int64_t> copies_ = 0;
  std::thread thread_;  // last: it uses the others
};

/// 20 launches, each into memory of its own, with scratch of 0xFF.
template <class Params>
void expect_same_bits(const Params& params, const BusyStream& busy) {
  for (const ImplInfo& info : on_device(params)) {
    const Outputs first = verify::run(params, {.impl = info.name});
    const int64_t before = busy.copies();
    for (int i = 1; i < 20; ++i)
      ASSERT_EQ(verify::run(params, {.impl = info.name}), first) << info.name << " launch " << i;
    EXPECT_GT(busy.copies(), before) << "the other stream stood still";
  }
}

TEST_F(CudaLimits, TwentyLaunchesBesideABusyStreamGiveTheSameBits) {
  const BusyStream busy;
  const verify::PagedSpec spec{.seq_lens = {2600, 1, 701, 64}, .q_len = 2};
  const Tensor slots = slots_of(Paged(spec), 2);
  const int64_t n = slots.view.shape[0];
  const Tensor latent = make_tensor(DType::kBf16, {n, 512}), rope = make_tensor(DType::kBf16, {n, 64});
  verify::fill_normal(latent, Rng(1));
  verify::fill_normal(rope, Rng(2));
  for (const LatentFormat format : {LatentFormat::kBf16, LatentFormat::kE4m3, LatentFormat::kPacked656}) {
    for (const int64_t heads :
         {8, 32}) {  // of two rows: as many lanes as the narrower blocks of cuda_sm90 have, and more
      const DecodeProblem d(spec, {DType::kBf16, format}, heads);
      expect_same_bits(d.params, busy);
      expect_same_bits(lists_of(d, 0, 512, false).params, busy);
    }
    const DecodeProblem d(spec, {DType::kBf16, format}, 1);
    expect_same_bits(LatentWrite{latent.view, rope.view, slots.view, d.pool.view}, busy);
    expect_same_bits(LatentGather{slots.view, d.pool.view, latent.view, rope.view}, busy);
  }
  for (const int64_t heads : {8, 16, 32})
    expect_same_bits(DecodeProblem(spec, {DType::kE4m3, LatentFormat::kE4m3}, heads).params, busy);

  const IndexProblem p(spec, {DType::kE4m3, IndexKFormat::kE4m3}, 32, 256);
  const Tensor k = make_tensor(DType::kBf16, {n, 128});
  verify::fill_normal(k, Rng(7));
  expect_same_bits(IndexKWrite{k.view, slots.view, p.pool.view}, busy);
  expect_same_bits(IndexKGather{slots.view, p.pool.view, k.view}, busy);
  expect_same_bits(p.scores, busy);
  expect_same_bits(p.select, busy);
  const int64_t rows = p.paged.num_rows;
  verify::fill_normal(p.logits, Rng(10));
  const Tensor columns = make_ints(std::vector<int32_t>(static_cast<size_t>(rows), 2600));
  expect_same_bits(TopK{p.logits.view, columns.view, p.positions.view, p.lens.view}, busy);

  const Prefill prefill({200, 1, 300}, {200, 77, 1000});
  prefill.fill();
  expect_same_bits(prefill.params, busy);
  const Tensor out = make_tensor(DType::kBf16, {rows, 32, 512}), other = make_tensor(DType::kBf16, {rows, 32, 512});
  const Tensor lse = make_tensor(DType::kF32, {rows, 32}), lse_b = make_tensor(DType::kF32, {rows, 32});
  verify::fill_normal(out, Rng(11));
  verify::fill_normal(other, Rng(12));
  verify::fill_normal(lse, Rng(13));
  verify::fill_normal(lse_b, Rng(14));
  MergeState m;
  m.out_a = out.view;
  m.lse_a = lse.view;
  m.out_b = other.view;
  m.lse_b = lse_b.view;
  expect_same_bits(m, busy);
  const Tensor table = make_tensor(DType::kF32, {100, 64});
  verify::fill_normal(table, Rng(15));
  const Tensor positions = make_ints(std::vector<int32_t>(static_cast<size_t>(rows), 7));
  const Tensor q = make_tensor(DType::kBf16, {rows, 32, 576});
  verify::fill_normal(q, Rng(16));
  Rope r;
  r.x = q.view;
  r.positions = positions.view;
  r.cos_sin = table.view;
  r.offset = 512;
  expect_same_bits(r, busy);
}

}  // namespace
}  // namespace gannet_test
