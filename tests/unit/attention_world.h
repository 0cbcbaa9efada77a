// A batch of requests with known tokens, caches that hold them, and an fp64 oracle that knows neither pages nor chunks.
//
// All data are multiples of 1/128 in [-1, 1): exact in bf16, so that fp32 and bf16 runs see the same numbers. The
// up-projections only pick coordinates: k_nope(h, n) = latent[k_map(h, n)], v(h, d) = latent[v_map(h, d)], both
// injective in one head. So the absorbed query is exact too, and one oracle serves both forms.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/implementation.h"
#include "gannet/attention.h"
#include "gannet/kv_pool.h"
#include "gannet/ops.h"
#include "harness/odd_executor.h"
#include "unit/device_world.h"

namespace gannet_test {

using namespace gannet;

/// A tensor of its own, filled with NaN bytes at first.
class Tensor {
 public:
  Tensor() = default;
  Tensor(DType dtype, std::initializer_list<int64_t> shape) {
    view = gannet::view(nullptr, dtype, shape, test_device());
    buffer_ = Buffer(std::max<size_t>(static_cast<size_t>(view.num_elements()) * size_of(dtype), 64),
                     memory_of(test_device()));
    std::memset(buffer_.data(), 0xff, buffer_.size());
    view.data = buffer_.data();
  }
  void set(float x, int64_t i, int64_t j = 0, int64_t k = 0) {
    if (view.dtype == DType::kF32) view.ptr<float>(i, j, k)[0] = x;
    else view.ptr<Bf16>(i, j, k)[0] = Bf16::from_float(x);
  }
  float get(int64_t i, int64_t j = 0, int64_t k = 0) const {
    return view.dtype == DType::kF32 ? view.ptr<float>(i, j, k)[0] : view.ptr<Bf16>(i, j, k)[0].to_float();
  }
  /// Rows [begin, end).
  TensorView rows(int64_t begin, int64_t end) const {
    TensorView v = view;
    v.shape[0] = end - begin;
    v.data = static_cast<std::byte*>(v.data) + begin * v.stride[0] * static_cast<int64_t>(size_of(v.dtype));
    return v;
  }
  size_t bytes() const { return static_cast<size_t>(view.num_elements()) * size_of(view.dtype); }

  TensorView view;

 private:
  Buffer buffer_;
};

inline testing::AssertionResult same_bits(const Tensor& a, const Tensor& b) {
  if (a.bytes() != b.bytes()) return testing::AssertionFailure() << a.bytes() << " and " << b.bytes() << " bytes";
  const auto* x = static_cast<const uint8_t*>(a.view.data);
  const auto* y = static_cast<const uint8_t*>(b.view.data);
  for (size_t i = 0; i < a.bytes(); ++i)
    if (x[i] != y[i]) {
      const size_t row = i / size_of(a.view.dtype) / static_cast<size_t>(a.view.stride[0]);
      return testing::AssertionFailure() << "byte " << i << " (row " << row << ") is " << int{x[i]} << " and "
                                         << int{y[i]};
    }
  return testing::AssertionSuccess();
}

/// Memory of a device that is full of one byte.
class FilledMemory final : public MemoryResource {
 public:
  explicit FilledMemory(uint8_t fill, Device device = {}) : base_(&memory_of(device)), fill_(fill) {}
  Device device() const noexcept override { return base_->device(); }
  void* allocate(size_t bytes, size_t alignment) override {
    void* p = base_->allocate(bytes, alignment);
    std::memset(p, fill_, bytes);
    ++allocations;
    return p;
  }
  void deallocate(void* p, size_t bytes, size_t alignment) noexcept override { base_->deallocate(p, bytes, alignment); }
  int64_t allocations = 0;

 private:
  MemoryResource* base_;
  uint8_t fill_;
};

/// For WorldOptions::impl: whatever is chosen on a CUDA device.
inline constexpr const char* kAutoCuda = "cuda_auto";

inline Device device_of(const std::string& impl) {
  if (impl == kAutoCuda) return {DeviceKind::kCuda, 0};
  for (const ImplementationSet* s : implementation_sets())
    if (impl == s->name) return {s->device, 0};
  return {};
}

/// A request of a step. Extends: `prefix` tokens in the cache and `rows` new ones. Decodes: seq_len = prefix + rows.
struct Request {
  int32_t prefix = 0;
  int32_t rows = 1;
  int32_t id = 0;  ///< whose tokens; equal ids have equal tokens
  int32_t len() const { return prefix + rows; }
};

struct WorldOptions {
  std::string impl = {};  ///< of a set, or kAutoCuda; its device is the world's
  AttentionArch arch = AttentionArch::kMla;
  DType dtype = DType::kF32;  ///< activations
  LatentFormat latent_format = LatentFormat::kF32;
  float latent_scale = 0.0f;  ///< kE4m3 only
  IndexKFormat index_format = IndexKFormat::kF32;
  int32_t num_heads = 2;
  int32_t page_size = 64;
  int32_t topk = 2048;
  int64_t chunk_capacity = 32768;
  uint8_t fill = 0xff;  ///< NaN in fp32 and bf16; 0x7e is 1e38 in both
  uint32_t page_seed = 1;
  bool batch_invariant = false;  ///< of what is chosen on a CUDA device
  Executor* executor = nullptr;
};

class World {
 public:
  static constexpr int32_t kR = 512, kP = 64, kN = 128, kV = 128, kHi = 8, kDi = 128;
  static constexpr int32_t kLayers = 2;  // layer 0 has an indexer (dsa), layer 1 shares its selection

  World(const WorldOptions& o, std::vector<Request> extends, std::vector<Request> decodes, int32_t q_len = 1)
      : options(o),
        q_len(q_len),
        num_extends(static_cast<int64_t>(extends.size())),
        device(test_device() = device_of(o.impl)),
        memory(o.fill, device) {
    requests = extends;
    requests.insert(requests.end(), decodes.begin(), decodes.end());
    int64_t num_pages = 1, columns = 1;
    for (const Request& r : requests) {
      const int64_t n = pages_for(r.len(), o.page_size);
      num_pages += n;
      columns = std::max(columns, n);
    }
    num_pages += 3;  // some that nobody owns
    latent = std::make_unique<LatentPool>(LatentPoolOptions{.num_layers = kLayers,
                                                            .format = o.latent_format,
                                                            .geometry = {kR, kP},
                                                            .num_pages = num_pages,
                                                            .page_size = o.page_size,
                                                            .scale = o.latent_scale},
                                          memory);
    if (o.arch == AttentionArch::kDsa)
      index = std::make_unique<IndexKPool>(IndexKPoolOptions{.layers = {0},
                                                             .format = o.index_format,
                                                             .head_dim = kDi,
                                                             .num_pages = num_pages,
                                                             .page_size = o.page_size},
                                           memory);
    // Pages in some order.
    std::vector<int32_t> ids;
    for (int32_t p = 1; p < num_pages; ++p) ids.push_back(p);
    uint32_t state = o.page_seed;
    for (size_t i = ids.size(); i > 1; --i)
      std::swap(ids[i - 1], ids[(state = state * 1664525u + 1013904223u) / 65536 % i]);
    table = std::make_unique<PageTable>(static_cast<int32_t>(requests.size()), static_cast<int32_t>(columns + 2));
    size_t next = 0;
    for (size_t r = 0; r < requests.size(); ++r) {
      const auto n = static_cast<size_t>(pages_for(requests[r].len(), o.page_size));
      table->set_row(static_cast<int32_t>(r), std::span(ids).subspan(next, n));
      next += n;
    }
    // Rows, in the order of a step, and the tokens that are in the caches before it.
    for (size_t r = 0; r < requests.size(); ++r) {
      seq_lens.push_back(requests[r].len());
      const bool extends_now = static_cast<int64_t>(r) < num_extends;
      if (extends_now) {
        prefix_lens.push_back(requests[r].prefix);
        extend_lens.push_back(requests[r].rows);
      }
      const int32_t rows_here = extends_now ? requests[r].rows : q_len;
      for (int32_t j = 0; j < rows_here; ++j)
        rows.push_back({static_cast<int32_t>(r), requests[r].len() - rows_here + j});
      for (int32_t p = 0; p < requests[r].len() - rows_here; ++p) put_by_hand(static_cast<int32_t>(r), p);
    }
    for (const RowId& r : rows) num_prefill += r.request < num_extends ? 1 : 0;
    backend = make_backend();
  }

  struct RowId {
    int32_t request;
    int32_t position;  ///< negative: padding
  };

  AttentionConfig config() const {
    AttentionConfig c;
    c.arch = options.arch;
    c.num_heads = options.num_heads;
    c.geometry = {kR, kP};
    c.qk_nope_head_dim = kN;
    c.v_head_dim = kV;
    c.q_lora_rank = options.arch == AttentionArch::kDsa ? 192 : 0;
    c.softmax_scale = kScale;
    if (options.arch == AttentionArch::kDsa) c.indexer = {.num_heads = kHi, .head_dim = kDi, .topk = options.topk};
    c.page_size = options.page_size;
    c.max_context_len = 1 << 20;
    c.prefix_chunk_capacity = options.chunk_capacity;
    c.plan = {.impl = options.impl == kAutoCuda ? "" : options.impl,
              .batch_invariant = options.batch_invariant && options.impl == kAutoCuda};
    c.device = device;
    return c;
  }

  std::vector<LayerCaches> layers() const {
    std::vector<LayerCaches> all;
    for (int32_t l = 0; l < kLayers; ++l) {
      all.push_back({.latent = latent->layer(l), .index = {}});
      if (index != nullptr && index->has_layer(l)) all.back().index = index->layer(l);
    }
    return all;
  }

  std::unique_ptr<AttentionBackend> make_backend() {
    context = {.executor = options.executor};
    auto b = make_attention_backend(context, config(), {}, memory);
    if (device.kind == DeviceKind::kCuda) b = std::make_unique<WaitingBackend>(std::move(b));
    b->bind(layers());
    return b;
  }

  BatchStep step() const {
    return {.seq_lens = seq_lens,
            .prefix_lens = prefix_lens,
            .extend_lens = extend_lens,
            .q_len = q_len,
            .pages = table->view()};
  }

  int64_t num_rows() const { return static_cast<int64_t>(rows.size()); }
  int64_t begin(StepRows part) const { return part == StepRows::kDecode ? num_prefill : 0; }
  int64_t end(StepRows part) const { return part == StepRows::kPrefill ? num_prefill : num_rows(); }

  // ---- data ----
  enum What : uint32_t { kToken = 1, kQuery, kIndexKey, kIndexQuery, kWeight };

  /// A multiple of 1/128 in [-1, 1), of who (a request id), where and what.
  static float draw(What what, int32_t id, int32_t position, int32_t a, int32_t b = 0) {
    uint64_t x = (uint64_t{what} << 56) ^ (static_cast<uint64_t>(id) << 44) ^ (static_cast<uint64_t>(position) << 20) ^
                 (static_cast<uint64_t>(a) << 10) ^ static_cast<uint64_t>(b);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;  // splitmix64
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    return static_cast<float>(static_cast<int>(x & 0xff) - 128) / 128.0f;
  }
  static int32_t k_map(int32_t h, int32_t n) { return (h * 131 + n * 3 + 5) % kR; }
  static int32_t v_map(int32_t h, int32_t d) { return (h * 61 + d * 3 + 1) % kR; }

  /// The latent row of a token, [R + P].
  const float* token(int32_t id, int32_t position) const {
    std::vector<float>& all = tokens_[id];
    const size_t width = kR + kP;
    while (all.size() <= static_cast<size_t>(position) * width) {
      const auto p = static_cast<int32_t>(all.size() / width);
      for (int32_t d = 0; d < kR + kP; ++d) all.push_back(draw(kToken, id, p, d));
    }
    return all.data() + static_cast<size_t>(position) * width;
  }
  /// The index key of a token as the cache holds it, [Di].
  const float* index_key(int32_t id, int32_t position) const {
    std::vector<float>& all = index_keys_[id];
    while (all.size() <= static_cast<size_t>(position) * kDi) {
      const auto p = static_cast<int32_t>(all.size() / kDi);
      for (int32_t d = 0; d < kDi; ++d) {
        const float x = draw(kIndexKey, id, p, d);
        all.push_back(options.index_format != IndexKFormat::kE4m3
                          ? x
                          : E4m3::from_float(x / index_scale(id, p)).to_float() * index_scale(id, p));
      }
    }
    return all.data() + static_cast<size_t>(position) * kDi;
  }
  /// spec A.6, fp32 scales.
  static float index_scale(int32_t id, int32_t position) {
    float top = 1e-10f;
    for (int32_t d = 0; d < kDi; ++d) top = std::max(top, std::fabs(draw(kIndexKey, id, position, d)));
    return top / 448.0f;
  }
  float query(const RowId& r, int32_t h, int32_t d) const {
    return draw(kQuery, requests[static_cast<size_t>(r.request)].id, r.position, h, d);
  }
  int32_t id_of(const RowId& r) const { return requests[static_cast<size_t>(r.request)].id; }

  /// A tensor with a value for each row of the step: f(row, i, j).
  template <class F>
  Tensor fill(std::initializer_list<int64_t> row_shape, F&& f, StepRows part = StepRows::kAll,
              DType dtype = DType::kU8) const {
    const DType t = dtype == DType::kU8 ? options.dtype : dtype;
    const int64_t n = end(part) - begin(part);
    const int64_t* s = row_shape.begin();
    Tensor x = row_shape.size() == 1 ? Tensor(t, {n, s[0]}) : Tensor(t, {n, s[0], s[1]});
    for (int64_t i = 0; i < n; ++i) {
      const RowId r = rows[static_cast<size_t>(i + begin(part))];
      for (int64_t a = 0; a < s[0]; ++a)
        for (int64_t b = 0; b < (row_shape.size() == 1 ? 1 : s[1]); ++b)
          x.set(r.position < 0 ? 0.0f : f(r, static_cast<int32_t>(a), static_cast<int32_t>(b)), i, a, b);
    }
    return x;
  }

  Tensor latent_rows(StepRows part = StepRows::kAll) const {
    return fill(
        {kR}, [&](const RowId& r, int32_t d, int32_t) { return token(id_of(r), r.position)[d]; }, part);
  }
  Tensor rope_rows(StepRows part = StepRows::kAll) const {
    return fill(
        {kP}, [&](const RowId& r, int32_t d, int32_t) { return token(id_of(r), r.position)[kR + d]; }, part);
  }
  Tensor index_rows(StepRows part = StepRows::kAll) const {
    return fill(
        {kDi}, [&](const RowId& r, int32_t d, int32_t) { return draw(kIndexKey, id_of(r), r.position, d); }, part);
  }
  /// [q_nope | q_pe]
  Tensor q_expanded(StepRows part = StepRows::kAll) const {
    return fill(
        {options.num_heads, kN + kP}, [&](const RowId& r, int32_t h, int32_t d) { return query(r, h, d); }, part);
  }
  /// [Wk^T q_nope | q_pe]
  Tensor q_absorbed(StepRows part = StepRows::kAll) const {
    Tensor x = fill(
        {options.num_heads, kR + kP}, [](const RowId&, int32_t, int32_t) { return 0.0f; }, part);
    for (int64_t i = 0; i < x.view.shape[0]; ++i) {
      const RowId r = rows[static_cast<size_t>(i + begin(part))];
      if (r.position < 0) continue;
      for (int32_t h = 0; h < options.num_heads; ++h) {
        for (int32_t n = 0; n < kN; ++n) x.set(query(r, h, n), i, h, k_map(h, n));
        for (int32_t p = 0; p < kP; ++p) x.set(query(r, h, kN + p), i, h, kR + p);
      }
    }
    return x;
  }
  Tensor index_q(StepRows part = StepRows::kAll) const {
    return fill(
        {kHi, kDi}, [&](const RowId& r, int32_t h, int32_t d) { return draw(kIndexQuery, id_of(r), r.position, h, d); },
        part);
  }
  Tensor index_weights(StepRows part = StepRows::kAll) const {
    return fill(
        {kHi}, [&](const RowId& r, int32_t h, int32_t) { return draw(kWeight, id_of(r), r.position, h); }, part,
        DType::kF32);
  }
  Tensor k_nope(StepRows part = StepRows::kPrefill) const {
    return fill(
        {options.num_heads, kN},
        [&](const RowId& r, int32_t h, int32_t n) { return token(id_of(r), r.position)[k_map(h, n)]; }, part);
  }
  Tensor v(StepRows part = StepRows::kPrefill) const {
    return fill(
        {options.num_heads, kV},
        [&](const RowId& r, int32_t h, int32_t d) { return token(id_of(r), r.position)[v_map(h, d)]; }, part);
  }
  Tensor out(StepRows part = StepRows::kAll) const {
    return Tensor(options.dtype, {end(part) - begin(part), options.num_heads, kR});
  }
  Tensor lse(StepRows part = StepRows::kAll) const {
    return Tensor(DType::kF32, {end(part) - begin(part), options.num_heads});
  }

  /// The rows' KV of a layer; layer 0 of dsa has index keys.
  struct Kv {
    Tensor latent, rope, index_k;
    KvRows rows() const { return {.latent = latent.view, .rope = rope.view, .index_k = index_k.view}; }
  };
  Kv kv(int32_t layer, StepRows part = StepRows::kAll) const {
    Kv kv{latent_rows(part), rope_rows(part), {}};
    if (index != nullptr && index->has_layer(layer)) kv.index_k = index_rows(part);
    return kv;
  }

  ExpandLatent expand() const {
    return [heads = options.num_heads](const TensorView& c, const TensorView& k, const TensorView& v) {
      wait_for_device();
      const auto copy = [&]<class T>(T) {
        for (int64_t i = 0; i < c.shape[0]; ++i)
          for (int32_t h = 0; h < heads; ++h) {
            for (int32_t n = 0; n < kN; ++n) k.ptr<T>(i, h, n)[0] = c.ptr<T>(i, k_map(h, n))[0];
            for (int32_t d = 0; d < kV; ++d) v.ptr<T>(i, h, d)[0] = c.ptr<T>(i, v_map(h, d))[0];
          }
      };
      if (c.dtype == DType::kF32) copy(float{});
      else copy(Bf16{});
    };
  }

  // ---- oracle ----
  struct Answer {
    std::vector<double> latent;  ///< [R]
    double lse;
  };
  /// Attention of a row's head over the given positions.
  Answer attend(const RowId& r, int32_t h, const std::vector<int32_t>& positions) const {
    Answer a{std::vector<double>(kR, 0.0), -std::numeric_limits<double>::infinity()};
    if (positions.empty() || r.position < 0) return a;
    std::vector<double> q(kN + kP), x(positions.size());
    for (int32_t d = 0; d < kN + kP; ++d) q[static_cast<size_t>(d)] = query(r, h, d);
    double top = -std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < positions.size(); ++i) {
      const float* t = token(id_of(r), positions[i]);
      double dot = 0;
      for (int32_t n = 0; n < kN; ++n) dot += q[static_cast<size_t>(n)] * t[k_map(h, n)];
      for (int32_t p = 0; p < kP; ++p) dot += q[static_cast<size_t>(kN + p)] * t[kR + p];
      x[i] = double{kScale} * dot;
      top = std::max(top, x[i]);
    }
    double sum = 0;
    for (size_t i = 0; i < positions.size(); ++i) {
      const double p = std::exp(x[i] - top);
      sum += p;
      const float* t = token(id_of(r), positions[i]);
      for (int32_t d = 0; d < kR; ++d) a.latent[static_cast<size_t>(d)] += p * t[d];
    }
    for (double& y : a.latent) y /= sum;
    a.lse = top + std::log(sum);
    return a;
  }
  static std::vector<int32_t> all_keys(const RowId& r) {
    std::vector<int32_t> p;
    for (int32_t i = 0; i <= r.position; ++i) p.push_back(i);
    return p;
  }
  double index_score(const RowId& r, int32_t s) const {
    double score = 0;
    for (int32_t h = 0; h < kHi; ++h) {
      double dot = 0;
      for (int32_t d = 0; d < kDi; ++d)
        dot += double{draw(kIndexQuery, id_of(r), r.position, h, d)} * index_key(id_of(r), s)[d];
      score += double{draw(kWeight, id_of(r), r.position, h)} * std::max(dot, 0.0);
    }
    return score;
  }

  // fp32: a logit is a sum of 192 (absorbed: 576) products of at most 1, of size 5 and scaled by 0.3: an error of some
  // 1e-6, which reaches the output times |v| <= 1. bf16 anywhere: the output is rounded by 2^-9 of itself, once a
  // merge, and the probabilities may be rounded to bf16 before they meet the values; spec 2.8 asks for 1e-2.
  bool exact() const { return options.dtype == DType::kF32 && options.latent_format == LatentFormat::kF32; }
  double out_tolerance() const { return exact() ? 2e-5 : 1e-2; }
  double lse_tolerance() const { return exact() ? 2e-5 : 2e-3; }

  /// Compares rows of a part, absorbed form, with the oracle over the positions that `keys(row)` names.
  template <class Keys>
  void expect_absorbed(const Tensor& o, const Tensor& l, StepRows part, Keys&& keys) const {
    double worst = 0, worst_lse = 0;
    for (int64_t i = 0; i < o.view.shape[0]; ++i) {
      const RowId r = rows[static_cast<size_t>(i + begin(part))];
      for (int32_t h = 0; h < options.num_heads; ++h) {
        const Answer a = attend(r, h, keys(i));
        for (int32_t d = 0; d < kR; ++d) note(worst, o.get(i, h, d), a.latent[static_cast<size_t>(d)]);
        note(worst_lse, l.get(i, h), a.lse);
      }
    }
    EXPECT_LE(worst, out_tolerance());
    EXPECT_LE(worst_lse, lse_tolerance());
  }
  void expect_dense(const Tensor& o, const Tensor& l, StepRows part) const {
    expect_absorbed(o, l, part, [&](int64_t i) { return all_keys(rows[static_cast<size_t>(i + begin(part))]); });
  }
  /// The same for dense prefill, whose output is expanded.
  void expect_expanded(const Tensor& o, const Tensor* l) const {
    double worst = 0, worst_lse = 0;
    for (int64_t i = 0; i < num_prefill; ++i) {
      const RowId r = rows[static_cast<size_t>(i)];
      for (int32_t h = 0; h < options.num_heads; ++h) {
        const Answer& a = cached(r, h);
        for (int32_t d = 0; d < kV; ++d) note(worst, o.get(i, h, d), a.latent[static_cast<size_t>(v_map(h, d))]);
        if (l != nullptr) note(worst_lse, l->get(i, h), a.lse);
      }
    }
    EXPECT_LE(worst, out_tolerance());
    EXPECT_LE(worst_lse, lse_tolerance());
  }

  WorldOptions options;
  int32_t q_len;
  int64_t num_extends;
  int64_t num_prefill = 0;
  std::vector<Request> requests;
  std::vector<RowId> rows;
  std::vector<int32_t> seq_lens, prefix_lens, extend_lens;
  Device device;
  FilledMemory memory;
  Context context;
  std::unique_ptr<LatentPool> latent;
  std::unique_ptr<IndexKPool> index;
  std::unique_ptr<PageTable> table;
  std::unique_ptr<AttentionBackend> backend;

  static constexpr float kScale = 0.3f;  // logits of some +-5: neither flat nor one-hot

 private:
  /// |a - b|, where equal infinities are equal and NaN is far from everything.
  static void note(double& worst, double a, double b) {
    const double e = a == b ? 0.0 : std::fabs(a - b);
    worst = std::isnan(e) ? std::numeric_limits<double>::infinity() : std::max(worst, e);
  }
  const Answer& cached(const RowId& r, int32_t h) const {
    static std::map<std::tuple<int32_t, int32_t, int32_t>, Answer> answers;  // of all keys, for every world
    auto [it, fresh] = answers.try_emplace({id_of(r), r.position, h});
    if (fresh) it->second = attend(r, h, all_keys(r));
    return it->second;
  }
  static void put(std::byte* at, bool fp32, int32_t i, float x) {
    if (fp32) reinterpret_cast<float*>(at)[i] = x;
    else reinterpret_cast<Bf16*>(at)[i] = Bf16::from_float(x);
  }
  void put_by_hand(int32_t r, int32_t position) {
    const int32_t id = requests[static_cast<size_t>(r)].id;
    const int64_t slot = int64_t{table->row(r)[static_cast<size_t>(position / options.page_size)]} * options.page_size +
                         position % options.page_size;
    const float* t = token(id, position);
    for (int32_t l = 0; l < kLayers; ++l) {
      LatentCacheView c = latent->layer(l);
      c.device = {};  // by hand, and by the CPU
      if (c.format != LatentFormat::kF32 && c.format != LatentFormat::kBf16) {
        const auto slot32 = static_cast<int32_t>(slot);
        run_once(Context{}, LatentWrite{.latent = gannet::view(t, {1, kR}),
                                        .rope = gannet::view(t + kR, {1, kP}),
                                        .slots = gannet::view(&slot32, {1}),
                                        .cache = c});
        continue;
      }
      std::byte* row = c.row(slot, latent_row_bytes(c.format, c.geometry));
      for (int32_t d = 0; d < kR + kP; ++d) put(row, c.format == LatentFormat::kF32, d, t[d]);
    }
    if (index == nullptr) return;
    const IndexCacheView c = index->layer(0);
    std::byte* key = c.values(slot);
    const float scale = index_scale(id, position);
    for (int32_t d = 0; d < kDi; ++d) {
      const float x = draw(kIndexKey, id, position, d);
      if (c.format == IndexKFormat::kE4m3) reinterpret_cast<E4m3*>(key)[d] = E4m3::from_float(x / scale);
      else put(key, c.format == IndexKFormat::kF32, d, x);
    }
    if (c.format == IndexKFormat::kE4m3) *c.scale(slot) = scale;
  }

  mutable std::map<int32_t, std::vector<float>> index_keys_;
  mutable std::map<int32_t, std::vector<float>> tokens_;
};

/// Names of the implementation sets that run here and offer everything, "ref" included; on a CUDA device also what is
/// chosen there.
inline std::vector<std::string> running_implementations() {
  std::vector<std::string> names;
  for (const ImplementationSet* s : implementation_sets()) {
    if (!s->compiled || !s->runs_here()) continue;
    if (s->device == DeviceKind::kCuda && std::find(names.begin(), names.end(), kAutoCuda) == names.end())
      names.emplace_back(kAutoCuda);
    if (s->rope.run == nullptr) continue;  // the faster sets of a GPU leave what only moves bytes to others
    names.emplace_back(s->name);
  }
  return names;
}

/// What a run computes in and what it reads.
struct Formats {
  const char* name;
  DType dtype;
  LatentFormat latent;
  IndexKFormat index;
};
inline constexpr Formats kFormats[] = {
    {"fp32", DType::kF32, LatentFormat::kF32, IndexKFormat::kF32},
    {"bf16", DType::kBf16, LatentFormat::kBf16, IndexKFormat::kBf16},
    {"fp32_over_bf16_and_e4m3", DType::kF32, LatentFormat::kBf16, IndexKFormat::kE4m3},
};

struct ImplCase {
  std::string impl;
  Formats formats;
};
inline std::vector<ImplCase> impl_cases() {
  std::vector<ImplCase> cases;
  for (const std::string& n : running_implementations())
    for (const Formats& f : kFormats) cases.push_back({n, f});
  return cases;
}
inline std::string case_name(const testing::TestParamInfo<ImplCase>& info) {
  return info.param.impl + "_" + info.param.formats.name;
}
inline void PrintTo(const ImplCase& c, std::ostream* os) { *os << c.impl << " " << c.formats.name; }

template <class F>
std::string error_of(F&& f, ErrorCode code = ErrorCode::kInvalidArgument) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    return e.what();
  }
  return {};
}

inline testing::AssertionResult has(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "\"" << text << "\" lacks \"" << part << "\"";
}

}  // namespace gannet_test
