// Timing: a CUDA graph of many calls over `sets` distinct sets of buffers (as many as the row of the peer says, so that
// both find the same part of their data in the L2), replayed with events around each replay; the median replay divided
// by its calls. Data is random; page tables are permuted.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>

#include <nlohmann/json.hpp>

#include "bench/cuda_bench.h"
#include "bench_commit.h"
#include "cuda/common/check.h"
#include "cuda/common/convert.cuh"
#include "gannet/ops.h"

namespace gannet {
inline namespace v0 {
namespace bench {

namespace {

using nlohmann::json;
constexpr const char* kName = "bench";
constexpr int kLatent = 512, kRope = 64, kWidth = kLatent + kRope, kIndexDim = 128, kPage = 64;

// ---- device memory with random contents -----------------------------------------------------------------------

__device__ uint32_t mix(uint64_t x) {  // a few rounds of multiply and shift: enough for data that no kernel can guess
  x ^= x >> 33;
  x *= 0xff51afd7ed558ccdull;
  x ^= x >> 33;
  x *= 0xc4ceb9fe1a85ec53ull;
  return static_cast<uint32_t>(x >> 32);
}
/// About normal with deviation 1: the sum of four uniform numbers, scaled.
__device__ float about_normal(uint64_t i, uint64_t seed) {
  const uint32_t a = mix(i * 2 + seed), b = mix(i * 2 + 1 + seed);
  const float s = static_cast<float>(a & 0xffff) + static_cast<float>(a >> 16) + static_cast<float>(b & 0xffff) +
                  static_cast<float>(b >> 16);
  return (s / 65536.0f - 2.0f) * 1.7320508f;
}
__global__ void fill_kernel(void* p, DType t, int64_t n, uint64_t seed, float scale) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
    const float x = about_normal(i, seed) * scale;
    if (t == DType::kF32) static_cast<float*>(p)[i] = x;
    else if (t == DType::kBf16) static_cast<uint16_t*>(p)[i] = cuda::float_to_bf16(x);
    else static_cast<uint8_t*>(p)[i] = cuda::float_to_e4m3(x);
  }
}
/// Rows of 656 bytes: e4m3 values, four scales that are powers of two, bf16 rope.
__global__ void fill_packed_kernel(unsigned char* p, int64_t rows, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < rows * kWidth;
       i += int64_t{gridDim.x} * blockDim.x) {
    unsigned char* row = p + i / kWidth * 656;
    const int d = static_cast<int>(i % kWidth);
    const float x = about_normal(i, seed);
    if (d < kLatent) row[d] = cuda::float_to_e4m3(x * 64.0f);
    else reinterpret_cast<uint16_t*>(row + kLatent + 16)[d - kLatent] = cuda::float_to_bf16(x);
    if (d < 4) reinterpret_cast<float*>(row + kLatent)[d] = 1.0f / 64.0f;
  }
}
/// Scores as top-k meets them: normal; narrow (all in [1, 1.245)); ties (few distinct values).
__global__ void fill_scores_kernel(float* p, int64_t n, uint64_t seed, int kind) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x) {
    const float u = static_cast<float>(mix(i + seed) >> 8) * 0x1p-24f;
    p[i] = kind == 0 ? about_normal(i, seed) : kind == 1 ? 1.0f + 0.245f * u : floorf(u * 64.0f);
  }
}

class Memory {
 public:
  ~Memory() { release(); }
  void release() {
    for (void* p : blocks_) cudaFree(p);
    blocks_.clear();
  }
  void* raw(size_t bytes) {
    void* p = nullptr;
    GANNET_CUDA(kName, cudaMalloc(&p, std::max<size_t>(bytes, 256)));
    blocks_.push_back(p);
    return p;
  }
  TensorView random(DType t, std::initializer_list<int64_t> shape, float scale = 1.0f) {
    TensorView v = view(nullptr, t, shape, device());
    v.data = raw(static_cast<size_t>(v.num_elements()) * size_of(t));
    fill_kernel<<<1024, 256>>>(v.data, t, v.num_elements(), ++seed_ << 40, scale);
    GANNET_CUDA(kName, cudaGetLastError());
    return v;
  }
  TensorView empty(DType t, std::initializer_list<int64_t> shape) {
    TensorView v = view(nullptr, t, shape, device());
    v.data = raw(static_cast<size_t>(v.num_elements()) * size_of(t));
    return v;
  }
  TensorView ints(const std::vector<int32_t>& host, std::initializer_list<int64_t> shape) {
    TensorView v = empty(DType::kI32, shape);
    GANNET_CUDA(kName, cudaMemcpy(v.data, host.data(), host.size() * 4, cudaMemcpyHostToDevice));
    return v;
  }
  uint64_t next_seed() { return ++seed_ << 40; }
  void set_device(int index) { index_ = index; }
  Device device() const { return {DeviceKind::kCuda, index_}; }

 private:
  std::vector<void*> blocks_;
  uint64_t seed_ = 1;
  int index_ = 0;
};

// ---- problems ---------------------------------------------------------------------------------------------------

/// A row of the peers' file made into calls: one for each set of buffers, and what a call costs by arithmetic.
struct Problem {
  std::vector<std::function<void(cudaStream_t)>> calls;
  std::string impl;
  double flops = 0, bytes = 0;
};

struct Maker {
  Memory& memory;
  const Context& context;
  PlanOptions options;
  std::mt19937 rng{7};

  template <class Params>
  void add(Problem& problem, std::shared_ptr<OpPlan<Params>>& plan, std::span<std::byte>& workspace, const Params& p) {
    if (!plan) {
      plan = std::make_shared<OpPlan<Params>>(context, p, options);
      workspace = {static_cast<std::byte*>(memory.raw(plan->workspace_bytes())), plan->workspace_bytes()};
      problem.impl = plan->impl();
    }
    problem.calls.push_back([plan, workspace, p](cudaStream_t s) { plan->run(p, workspace, Stream{s}); });
  }

  LatentCacheView latent_cache(LatentFormat format, int64_t pages) {
    LatentCacheView c;
    c.format = format;
    c.num_pages = pages;
    c.page_size = kPage;
    c.page_stride_bytes = kPage * latent_row_bytes(format, c.geometry);
    c.scale = format == LatentFormat::kE4m3 ? 1.0f / 64.0f : 0.0f;
    c.device = memory.device();
    if (format == LatentFormat::kPacked656) {
      c.data = memory.raw(static_cast<size_t>(pages * c.page_stride_bytes));
      fill_packed_kernel<<<1024, 256>>>(static_cast<unsigned char*>(c.data), pages * kPage, memory.next_seed());
      GANNET_CUDA(kName, cudaGetLastError());
    } else {
      const bool narrow = format == LatentFormat::kE4m3;
      c.data = memory.random(narrow ? DType::kE4m3 : DType::kBf16, {pages * kPage, kWidth}, narrow ? 64.0f : 1.0f).data;
    }
    return c;
  }

  /// A permuted table for these lengths over pages 0..n-1; returns it and n.
  std::pair<TensorView, int64_t> table(const std::vector<int32_t>& lens) {
    int64_t total = 0, widest = 1;
    for (const int32_t l : lens) {
      total += (l + kPage - 1) / kPage;
      widest = std::max<int64_t>(widest, (l + kPage - 1) / kPage);
    }
    std::vector<int32_t> ids(static_cast<size_t>(total));
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), rng);
    std::vector<int32_t> cells(lens.size() * static_cast<size_t>(widest), 0);
    size_t next = 0;
    for (size_t i = 0; i < lens.size(); ++i)
      for (int32_t j = 0; j < (lens[i] + kPage - 1) / kPage; ++j)
        cells[i * static_cast<size_t>(widest) + static_cast<size_t>(j)] = ids[next++];
    return {memory.ints(cells, {static_cast<int64_t>(lens.size()), widest}), total};
  }

  static std::vector<int32_t> lens_of(const json& row, int64_t batch, const char* key) {
    if (row.contains("lens")) return row["lens"].get<std::vector<int32_t>>();
    return std::vector<int32_t>(static_cast<size_t>(batch), row[key].get<int32_t>());
  }

  Problem dense_decode(const json& row, LatentFormat format) {
    const int64_t b = row["b"], h = row["h"], s = row["s_q"];
    const std::vector<int32_t> lens = lens_of(row, b, "kv");
    Problem problem;
    std::shared_ptr<OpPlan<MlaDecode>> plan;
    std::span<std::byte> workspace;
    double keys = 0;
    for (const int32_t l : lens) keys += l;
    for (int64_t set = 0; set < row.value("sets", 1); ++set) {
      MlaDecode p;
      auto [pages, count] = table(lens);
      // Peers of e4m3 caches take e4m3 queries.
      const bool narrow = format == LatentFormat::kE4m3;
      p.q = memory.random(narrow ? DType::kE4m3 : DType::kBf16, {b * s, h, kWidth}, narrow ? 64.0f : 1.0f);
      if (narrow) p.q_scale = 1.0f / 64.0f;
      p.cache = latent_cache(format, count);
      p.pages = PageTableView::padded(pages);
      p.rows.seq_lens = memory.ints(lens, {b});
      p.rows.q_len = static_cast<int32_t>(s);
      p.out = memory.empty(DType::kBf16, {b * s, h, kLatent});
      p.lse = memory.empty(DType::kF32, {b * s, h});
      p.softmax_scale = 0.0721688f;
      add(problem, plan, workspace, p);
    }
    problem.flops = 2.0 * static_cast<double>(h * s) * keys * (kWidth + kLatent);
    problem.bytes = keys * static_cast<double>(latent_row_bytes(format, {})) +
                    static_cast<double>(b * s * h) * 2 * (kWidth + kLatent);
    return problem;
  }

  Problem sparse(const json& row, LatentFormat format, int64_t rows, int64_t slots) {
    const int64_t h = row["h"], k = row["topk"];
    Problem problem;
    std::shared_ptr<OpPlan<SparseAttention>> plan;
    std::span<std::byte> workspace;
    for (int64_t set = 0; set < row.value("sets", 1); ++set) {
      SparseAttention p;
      p.q = memory.random(DType::kBf16, {rows, h, kWidth});
      p.cache = latent_cache(format, (slots + kPage - 1) / kPage);
      std::vector<int32_t> list(static_cast<size_t>(rows * k));
      std::uniform_int_distribution<int32_t> any(0, static_cast<int32_t>(slots - 1));
      for (int32_t& x : list) x = any(rng);
      for (int64_t r = 0; r < rows; ++r) std::sort(list.begin() + r * k, list.begin() + (r + 1) * k);
      p.topk_slots = memory.ints(list, {rows, k});
      p.out = memory.empty(DType::kBf16, {rows, h, kLatent});
      p.lse = memory.empty(DType::kF32, {rows, h});
      p.softmax_scale = 0.0721688f;
      add(problem, plan, workspace, p);
    }
    problem.flops = 2.0 * static_cast<double>(rows * h * k) * (kWidth + kLatent);
    problem.bytes = static_cast<double>(std::min(rows * k, slots)) * static_cast<double>(latent_row_bytes(format, {})) +
                    static_cast<double>(rows * h) * 2 * (kWidth + kLatent) + 4.0 * static_cast<double>(rows * k);
    return problem;
  }

  Problem logits(const json& row, int64_t b, int64_t rows_each, int64_t kv, bool causal_tail) {
    const int64_t h = row["h"];
    const std::vector<int32_t> lens(static_cast<size_t>(b), static_cast<int32_t>(kv));
    Problem problem;
    std::shared_ptr<OpPlan<IndexLogits>> plan;
    std::span<std::byte> workspace;
    for (int64_t set = 0; set < row.value("sets", 1); ++set) {
      IndexLogits p;
      auto [pages, count] = table(lens);
      p.q = memory.random(DType::kE4m3, {b * rows_each, h, kIndexDim}, 64.0f);
      p.weights = memory.random(DType::kF32, {b * rows_each, h});
      p.cache.num_pages = count;
      p.cache.page_stride_bytes = kPage * (kIndexDim + 4);
      p.cache.device = memory.device();
      p.cache.data = memory.random(DType::kE4m3, {count * kPage * (kIndexDim + 4)}, 64.0f).data;
      // Scales that are ordinary numbers.
      fill_scales(p.cache);
      p.pages = PageTableView::padded(pages);
      p.rows.seq_lens = memory.ints(lens, {b});
      p.rows.q_len = static_cast<int32_t>(rows_each);
      p.rows.bound = causal_tail ? RowBound::kCausalFull : RowBound::kUniformBlock;
      p.logits = memory.empty(DType::kF32, {b * rows_each, kv});
      add(problem, plan, workspace, p);
    }
    double pairs = static_cast<double>(b * rows_each) * static_cast<double>(kv);
    if (causal_tail)
      pairs -= static_cast<double>(b) * static_cast<double>(rows_each) * static_cast<double>(rows_each - 1) / 2;
    problem.flops = 2.0 * pairs * static_cast<double>(h) * kIndexDim;
    problem.bytes = static_cast<double>(b * kv) * (kIndexDim + 4) + 4.0 * pairs +
                    static_cast<double>(b * rows_each * h) * (kIndexDim + 4);
    return problem;
  }
  void fill_scales(const IndexCacheView& c) {
    std::vector<float> scales(kPage, 1.0f / 64.0f);
    GANNET_CUDA(kName, cudaMemcpy2D(static_cast<std::byte*>(c.data) + kPage * kIndexDim,
                                    static_cast<size_t>(c.page_stride_bytes), repeat(scales, c.num_pages).data(),
                                    kPage * 4, kPage * 4, static_cast<size_t>(c.num_pages), cudaMemcpyHostToDevice));
  }
  static std::vector<float> repeat(const std::vector<float>& v, int64_t n) {
    std::vector<float> all;
    for (int64_t i = 0; i < n; ++i) all.insert(all.end(), v.begin(), v.end());
    return all;
  }

  Problem topk(const json& row) {
    const int64_t rows = row["rows"], n = row["n"], k = row["k"];
    const std::string dist = row["dist"];
    Problem problem;
    std::shared_ptr<OpPlan<TopK>> plan;
    std::span<std::byte> workspace;
    for (int64_t set = 0; set < row.value("sets", 1); ++set) {
      TopK p;
      p.logits = memory.empty(DType::kF32, {rows, n});
      fill_scores_kernel<<<1024, 256>>>(static_cast<float*>(p.logits.data), rows * n, memory.next_seed(),
                                        dist == "normal"   ? 0
                                        : dist == "narrow" ? 1
                                                           : 2);
      GANNET_CUDA(kName, cudaGetLastError());
      p.lens = memory.ints(std::vector<int32_t>(static_cast<size_t>(rows), static_cast<int32_t>(n)), {rows});
      p.positions = memory.empty(DType::kI32, {rows, k});
      p.counts = memory.empty(DType::kI32, {rows});
      add(problem, plan, workspace, p);
    }
    problem.bytes = 4.0 * static_cast<double>(rows * (n + k));
    return problem;
  }

  /// Rows and keys of each request of a prefill row of the peers' file.
  static std::pair<std::vector<int32_t>, std::vector<int32_t>> prefill_lens(const json& row) {
    const auto b = row["b"].get<size_t>();
    if (row["s"].is_number()) {
      const std::vector<int32_t> lens(b, row["s"].get<int32_t>());
      return {lens, lens};
    }
    const std::string s = row["s"];
    int q = 0, kv = 0;
    if (std::sscanf(s.c_str(), "q%d kv%d", &q, &kv) == 2)
      return {std::vector<int32_t>(b, q), std::vector<int32_t>(b, kv)};
    // "mixed 128..8192 max 5138": the file does not give the lengths. These are as many, with the same sum (16,384),
    // the same longest and, to 0.1 %, the same pairs of row and key as the peers' TFLOP/s and times say (24.72
    // million).
    const std::vector<int32_t> mixed = {1100, 128, 5138, 450, 800, 148, 3500, 300, 600, 2300, 220, 1700};
    if (s.starts_with("mixed") && b == mixed.size()) return {mixed, mixed};
    throw Error(ErrorCode::kInvalidArgument,
                "[bench] prefill row with s \"" + s + "\"; accepted: a number, qN kvM, mixed");
  }

  Problem prefill(const json& row) {
    const int64_t h = row["h"];
    const auto [q_lens, kv_lens] = prefill_lens(row);
    std::vector<int32_t> cu_q = {0}, cu_kv = {0};
    double pairs = 0;
    RaggedPrefill p;
    p.causal = row.value("causal", true);
    for (size_t i = 0; i < q_lens.size(); ++i) {
      const double q = q_lens[i], kv = kv_lens[i];
      cu_q.push_back(cu_q.back() + q_lens[i]);
      cu_kv.push_back(cu_kv.back() + kv_lens[i]);
      pairs += p.causal ? q * kv - q * (q - 1) / 2 : q * kv;
    }
    const int64_t b = row["b"], n = cu_q.back(), keys = cu_kv.back();
    Problem problem;
    std::shared_ptr<OpPlan<RaggedPrefill>> plan;
    std::span<std::byte> workspace;
    p.q = memory.random(DType::kBf16, {n, h, 192});
    p.k = memory.random(DType::kBf16, {keys, h, 192});
    p.v = memory.random(DType::kBf16, {keys, h, 128});
    p.cu_q_lens = memory.ints(cu_q, {b + 1});
    p.cu_kv_lens = memory.ints(cu_kv, {b + 1});
    p.out = memory.empty(DType::kBf16, {n, h, 128});
    p.lse = memory.empty(DType::kF32, {n, h});
    p.softmax_scale = 0.0721688f;
    add(problem, plan, workspace, p);
    problem.flops = 2.0 * static_cast<double>(h) * pairs * (192 + 128);
    problem.bytes =
        static_cast<double>(n * h) * (2 * (192 + 128) + 4) + static_cast<double>(keys * h) * 2 * (192 + 128);
    return problem;
  }

  Problem merge(const json& row) {
    const int64_t t = row["tokens"], h = row["h"], d = row["d"];
    Problem problem;
    std::shared_ptr<OpPlan<MergeState>> plan;
    std::span<std::byte> workspace;
    MergeState p;
    p.out_a = memory.random(DType::kBf16, {t, h, d});
    p.out_b = memory.random(DType::kBf16, {t, h, d});
    p.lse_a = memory.random(DType::kF32, {t, h});
    p.lse_b = memory.random(DType::kF32, {t, h});
    add(problem, plan, workspace, p);
    problem.bytes = static_cast<double>(t * h) * (6.0 * static_cast<double>(d) + 12);
    return problem;
  }

  /// Rows of bf16 to slots of a pool that they fill, or from there: token by token in pages that lie in any order, as a
  /// prefill has them, or in any order at all.
  Problem cache_rows(const json& row) {
    const std::string op = row["op"], format = row["format"];
    const int64_t n = row["rows"];
    const int64_t pages = (n + kPage - 1) / kPage;
    Problem problem;
    std::shared_ptr<OpPlan<LatentWrite>> latent_write;
    std::shared_ptr<OpPlan<LatentGather>> latent_gather;
    std::shared_ptr<OpPlan<IndexKWrite>> index_k_write;
    std::shared_ptr<OpPlan<IndexKGather>> index_k_gather;
    std::span<std::byte> workspace;
    std::vector<int32_t> order(static_cast<size_t>(pages * kPage));
    std::iota(order.begin(), order.end(), 0);
    for (int64_t set = 0; set < row.value("sets", 1); ++set) {
      if (row["slots"] == "in pages") {
        std::vector<int32_t> list(static_cast<size_t>(pages));
        std::iota(list.begin(), list.end(), 0);
        std::shuffle(list.begin(), list.end(), rng);
        for (size_t i = 0; i < order.size(); ++i) order[i] = list[i / kPage] * kPage + static_cast<int32_t>(i % kPage);
      } else {
        std::shuffle(order.begin(), order.end(), rng);
      }
      const TensorView slots = memory.ints({order.begin(), order.begin() + n}, {n});
      if (op == "index_k_write" || op == "index_k_gather") {
        IndexCacheView cache;
        cache.num_pages = pages;
        cache.device = memory.device();
        if (format == "bf16") {
          cache.format = IndexKFormat::kBf16;
          cache.page_stride_bytes = kPage * kIndexDim * 2;
          cache.data = memory.random(DType::kBf16, {pages * kPage * kIndexDim}).data;
        } else {
          cache.page_stride_bytes = kPage * (kIndexDim + 4);
          cache.data = memory.random(DType::kE4m3, {pages * kPage * (kIndexDim + 4)}, 64.0f).data;
          fill_scales(cache);
        }
        const TensorView k = memory.random(DType::kBf16, {n, kIndexDim});
        if (op == "index_k_write") add(problem, index_k_write, workspace, IndexKWrite{k, slots, cache});
        else add(problem, index_k_gather, workspace, IndexKGather{slots, cache, k});
      } else {
        const LatentCacheView cache = latent_cache(latent_format(format), pages);
        const TensorView latent = memory.random(DType::kBf16, {n, kLatent});
        const TensorView rope = memory.random(DType::kBf16, {n, kRope});
        if (op == "latent_write") add(problem, latent_write, workspace, LatentWrite{latent, rope, slots, cache});
        else add(problem, latent_gather, workspace, LatentGather{slots, cache, latent, rope});
      }
    }
    problem.bytes = cache_rows_bytes(op, format, n);
    return problem;
  }
  static LatentFormat latent_format(const std::string& name) {
    for (const LatentFormat f : {LatentFormat::kBf16, LatentFormat::kE4m3, LatentFormat::kPacked656})
      if (name == to_string(f)) return f;
    throw Error(ErrorCode::kInvalidArgument, "[bench] format " + name + "; accepted: bf16, e4m3, packed656");
  }
  static double cache_rows_bytes(const std::string& op, const std::string& format, int64_t n) {
    const bool index = op == "index_k_write" || op == "index_k_gather";
    const int64_t cached =
        index ? index_k_token_bytes(format == "bf16" ? IndexKFormat::kBf16 : IndexKFormat::kE4m3, kIndexDim)
              : latent_row_bytes(latent_format(format), {});
    return static_cast<double>(n * (2 * (index ? kIndexDim : kWidth) + cached + 4));
  }

  /// The rotated part of MLA's queries ("q": 64 of 192 values of each head), or of index keys ("k": 64 of 128).
  Problem rope(const json& row) {
    const int64_t n = row["rows"], h = row["h"];
    const bool queries = row["x"] == "q";
    constexpr int64_t kPositions = 4096;
    Problem problem;
    std::shared_ptr<OpPlan<Rope>> plan;
    std::span<std::byte> workspace;
    std::vector<int32_t> positions(static_cast<size_t>(n));
    for (int32_t& x : positions) x = static_cast<int32_t>(rng() % kPositions);
    const TensorView table = memory.random(DType::kF32, {kPositions, kRope}, 0.5f);
    for (int64_t set = 0; set < row.value("sets", 1); ++set) {
      Rope p;
      p.x = memory.random(DType::kBf16, {n, h, queries ? 192 : kIndexDim});
      p.positions = memory.ints(positions, {n});
      p.cos_sin = table;
      p.offset = queries ? 128 : 0;
      p.pairing = queries ? RopePairing::kInterleaved : RopePairing::kHalfSplit;
      add(problem, plan, workspace, p);
    }
    problem.bytes = rope_bytes(n, h);
    return problem;
  }
  static double rope_bytes(int64_t n, int64_t h) {  // the table is small and stays in the L2
    return static_cast<double>(n * h) * 2 * 2 * kRope + 4.0 * static_cast<double>(n);
  }

  std::optional<Problem> make(const json& row) {
    const std::string op = row["op"];
    if (op == "latent_write" || op == "latent_gather" || op == "index_k_write" || op == "index_k_gather")
      return cache_rows(row);
    if (op == "dense_decode") return dense_decode(row, LatentFormat::kBf16);
    if (op == "dense_decode_fp8") return dense_decode(row, LatentFormat::kE4m3);
    if (op == "dense_decode_packed656") return dense_decode(row, LatentFormat::kPacked656);
    // The peers gather from a pool of the batch's own rows; 65,536 rows a request, as decode at long context has them.
    if (op == "sparse_decode_bf16" || op == "sparse_decode_fp8") {
      const int64_t rows = row["b"].get<int64_t>() * row["s_q"].get<int64_t>();
      return sparse(row, op == "sparse_decode_bf16" ? LatentFormat::kBf16 : LatentFormat::kPacked656, rows,
                    row["b"].get<int64_t>() * 2048);
    }
    if (op == "sparse_prefill") return sparse(row, LatentFormat::kBf16, row["s_q"], row["s_kv"]);
    if (op == "paged_mqa_logits") return logits(row, row["b"], row["next_n"], row["kv"], true);
    if (op == "mqa_logits") return logits(row, 1, row["s_q"], row["s_kv"], true);
    if (op == "topk") return topk(row);
    if (op == "prefill") return prefill(row);
    if (op == "merge") return merge(row);
    if (op == "rope") return rope(row);
    return std::nullopt;
  }
};

// ---- timing -----------------------------------------------------------------------------------------------------

struct Timing {
  double median_us = 0, low_us = 0, high_us = 0;
};

double event_us(cudaEvent_t from, cudaEvent_t to) {
  float ms = 0;
  GANNET_CUDA(kName, cudaEventElapsedTime(&ms, from, to));
  return 1e3 * ms;
}

std::optional<Timing> time_problem(const Problem& problem, const CudaBenchOptions& o, cudaStream_t stream) {
  cudaEvent_t from, to;
  GANNET_CUDA(kName, cudaEventCreate(&from));
  GANNET_CUDA(kName, cudaEventCreate(&to));
  problem.calls[0](stream);  // loads the kernel
  GANNET_CUDA(kName, cudaStreamSynchronize(stream));
  GANNET_CUDA(kName, cudaEventRecord(from, stream));
  problem.calls[problem.calls.size() > 1 ? 1 : 0](stream);
  GANNET_CUDA(kName, cudaEventRecord(to, stream));
  GANNET_CUDA(kName, cudaEventSynchronize(to));
  const double once = event_us(from, to);
  if (once * 1e-3 * (o.replays + 2) > o.max_row_ms) return std::nullopt;
  constexpr double kGraphUs = 1500;  // long enough that the launch of the graph does not show
  const int sets = static_cast<int>(problem.calls.size());
  int calls = std::clamp(static_cast<int>(kGraphUs / once), 1, 400);
  calls = std::max(calls, std::min(sets, 200));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  GANNET_CUDA(kName, cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i) problem.calls[static_cast<size_t>(i % sets)](stream);
  GANNET_CUDA(kName, cudaStreamEndCapture(stream, &graph));
  GANNET_CUDA(kName, cudaGraphInstantiate(&exec, graph, 0));
  GANNET_CUDA(kName, cudaGraphLaunch(exec, stream));
  std::vector<double> us;
  for (int r = 0; r < o.replays; ++r) {
    GANNET_CUDA(kName, cudaEventRecord(from, stream));
    GANNET_CUDA(kName, cudaGraphLaunch(exec, stream));
    GANNET_CUDA(kName, cudaEventRecord(to, stream));
    GANNET_CUDA(kName, cudaEventSynchronize(to));
    us.push_back(event_us(from, to) / calls);
  }
  GANNET_CUDA(kName, cudaGraphExecDestroy(exec));
  GANNET_CUDA(kName, cudaGraphDestroy(graph));
  GANNET_CUDA(kName, cudaEventDestroy(from));
  GANNET_CUDA(kName, cudaEventDestroy(to));
  std::sort(us.begin(), us.end());
  return Timing{us[us.size() / 2], us.front(), us.back()};
}

bool selected(const json& row, const CudaBenchOptions& o) {
  const std::string op = row["op"];
  if (!o.ops.empty() && std::find(o.ops.begin(), o.ops.end(), op) == o.ops.end()) return false;
  std::stringstream terms(o.where);
  std::string term;
  while (std::getline(terms, term, ',')) {
    const size_t eq = term.find('=');
    if (eq == std::string::npos) continue;
    const std::string key = term.substr(0, eq), value = term.substr(eq + 1);
    if (!row.contains(key)) return false;
    const std::string have = row[key].is_string() ? row[key].get<std::string>() : row[key].dump();
    if (have != value) return false;
  }
  return true;
}

/// Rows that no peer has a kernel for: measured against a copy of as many bytes.
std::vector<json> rows_without_peers() {
  constexpr double kDistinctBytes = 192e6;  // three times an L2, as the peers' rows
  std::vector<json> rows;
  for (const auto& [op, format] : {std::pair{"latent_write", "bf16"},
                                   {"latent_write", "e4m3"},
                                   {"latent_write", "packed656"},
                                   {"latent_gather", "bf16"},
                                   {"latent_gather", "e4m3"},
                                   {"latent_gather", "packed656"},
                                   {"index_k_write", "bf16"},
                                   {"index_k_write", "e4m3"},
                                   {"index_k_gather", "bf16"},
                                   {"index_k_gather", "e4m3"}}) {
    for (const char* const slots : {"any order", "in pages"}) {
      for (const int64_t n : {1, 256, 1024, 4096, 65536, 262144}) {
        if (n == 1 && std::string(slots) == "in pages") continue;  // the same
        const double sets = std::clamp(kDistinctBytes / Maker::cache_rows_bytes(op, format, n), 1.0, 32.0);
        rows.push_back({{"op", op},
                        {"format", format},
                        {"rows", n},
                        {"slots", slots},
                        {"sets", static_cast<int64_t>(sets)},
                        {"peers", json::object()}});
      }
    }
  }
  // Batches, rows and lengths of the peers' rows over e4m3, whose times times 656 / 576 are what to compare with.
  constexpr int kHeads = 16;
  for (const auto& [b, q_len, kv] : {std::tuple{1, 1, 2048},
                                     {2, 1, 4096},
                                     {4, 1, 8192},
                                     {16, 1, 1024},
                                     {32, 1, 2048},
                                     {8, 1, 16384},
                                     {64, 1, 4096},
                                     {16, 1, 32768},
                                     {128, 1, 8192},
                                     {256, 1, 16384},
                                     {1, 2, 32768},
                                     {64, 2, 2048},
                                     {128, 2, 4096},
                                     {32, 2, 32768}}) {
    const double bytes =
        static_cast<double>(b) * kv * static_cast<double>(latent_row_bytes(LatentFormat::kPacked656, {}));
    rows.push_back({{"op", "dense_decode_packed656"},
                    {"b", b},
                    {"h", kHeads},
                    {"s_q", q_len},
                    {"kv", kv},
                    {"sets", static_cast<int64_t>(std::clamp(kDistinctBytes / bytes, 1.0, 32.0))},
                    {"peers", json::object()}});
  }
  for (const auto& [x, heads] : {std::pair{"q", 128}, {"q", 16}, {"k", 1}}) {
    for (const int64_t n : {1, 256, 4096, 16384}) {
      const double sets = std::clamp(kDistinctBytes / Maker::rope_bytes(n, heads), 1.0, 32.0);
      rows.push_back({{"op", "rope"},
                      {"x", x},
                      {"h", heads},
                      {"rows", n},
                      {"sets", static_cast<int64_t>(sets)},
                      {"peers", json::object()}});
    }
  }
  return rows;
}

/// The driver's copy of as many bytes, read and written, over as many sets of buffers.
Problem copy_problem(Memory& memory, double bytes, int64_t sets) {
  const auto words = std::max<int64_t>(static_cast<int64_t>(bytes) / 2 / 4, 1);
  Problem problem;
  for (int64_t set = 0; set < sets; ++set) {
    void* const from = memory.random(DType::kF32, {words}).data;
    void* const to = memory.raw(static_cast<size_t>(words) * 4);
    problem.calls.push_back([=](cudaStream_t s) {
      GANNET_CUDA(kName, cudaMemcpyAsync(to, from, static_cast<size_t>(words) * 4, cudaMemcpyDeviceToDevice, s));
    });
  }
  return problem;
}

}  // namespace

int run_cuda_bench(const CudaBenchOptions& o) {
  GANNET_CUDA(kName, cudaSetDevice(o.device));
  cudaDeviceProp properties;
  GANNET_CUDA(kName, cudaGetDeviceProperties(&properties, o.device));
  std::ifstream in(o.against);
  if (!in) throw Error(ErrorCode::kCorruptFile, std::string("[bench] --against is ") + o.against + "; no such file");
  std::ofstream out;
  if (!o.json.empty()) out.open(o.json, std::ios::app);
  cudaStream_t stream;
  GANNET_CUDA(kName, cudaStreamCreate(&stream));
  const Context context;
  struct Summary {
    std::vector<double> ratios;
    int left_out = 0;
  };
  std::map<std::string, Summary> summaries;
  std::printf("%s\n%-20s %-44s %-14s %10s %8s %9s %9s %12s %7s\n", properties.name, "op", "shape", "impl", "us",
              "spread", "TFLOP/s", "GB/s", "best peer us", "ratio");
  std::vector<json> rows;
  for (std::string line; std::getline(in, line);)
    if (!line.empty()) rows.push_back(json::parse(line));
  for (json& row : rows_without_peers()) rows.push_back(std::move(row));
  int index = 0;
  for (const json& row : rows) {
    if (!selected(row, o) || index++ % o.every != 0) continue;
    json shape = row;
    for (const char* key : {"op", "peers", "lens", "sets"}) shape.erase(key);
    Memory memory;
    memory.set_device(o.device);
    Maker maker{memory, context, {o.impl}};
    std::optional<Problem> problem;
    try {
      problem = maker.make(row);
    } catch (const Error& e) {
      std::printf("%-20s %-44s %s\n", row["op"].get<std::string>().c_str(), shape.dump().c_str(), e.what());
      continue;
    }
    if (!problem) continue;
    Summary& summary = summaries[row["op"]];
    const auto timing = time_problem(*problem, o, stream);
    if (!timing) {
      ++summary.left_out;
      continue;
    }
    double best = INFINITY;
    for (const auto& [name, peer] : row["peers"].items())
      if (peer.value("rows_wrong", 0) == 0) best = std::min(best, peer["us"].get<double>());
    // What only moves bytes is held against a copy of as many as well.
    std::optional<Timing> copy;
    if (row["peers"].empty() || row["op"] == "merge") {
      memory.release();
      copy = time_problem(copy_problem(memory, problem->bytes, row.value("sets", 1)), o, stream);
      if (copy && row["peers"].empty()) best = copy->median_us;
    }
    const double ratio = best / timing->median_us;
    summary.ratios.push_back(ratio);
    const double tflops = problem->flops / timing->median_us * 1e-6, gbps = problem->bytes / timing->median_us * 1e-3;
    std::printf("%-20s %-44s %-14s %10.2f %7.1f%% %9.1f %9.1f %12.2f %7.3f\n", row["op"].get<std::string>().c_str(),
                shape.dump().c_str(), problem->impl.c_str(), timing->median_us,
                100 * (timing->high_us - timing->low_us) / timing->median_us, tflops, gbps, best, ratio);
    if (copy && !row["peers"].empty())
      std::printf("%-20s   a copy of as many bytes takes %.2f us: ratio %.3f\n", "", copy->median_us,
                  copy->median_us / timing->median_us);
    if (out) {
      json j = shape;
      j["op"] = row["op"];
      j["impl"] = problem->impl;
      j["us"] = timing->median_us;
      j["us_low"] = timing->low_us;
      j["us_high"] = timing->high_us;
      j["tflops"] = tflops;
      j["gbps"] = gbps;
      if (!row["peers"].empty()) j["best_peer_us"] = best;
      if (copy) j["copy_us"] = copy->median_us;
      j["commit"] = kCommit;
      j["machine"] = properties.name;
      out << j.dump() << "\n";
    }
  }
  for (const auto& [op, s] : summaries) {
    if (s.ratios.empty()) {
      std::printf("%-20s no rows measured, %d left out as too slow\n", op.c_str(), s.left_out);
      continue;
    }
    double log_sum = 0, worst = INFINITY;
    int below = 0;
    for (const double r : s.ratios) {
      log_sum += std::log(r);
      worst = std::min(worst, r);
      below += r < 0.95;
    }
    std::printf(
        "%-20s rows %zu, geometric mean of best peer / ours %.3f, below 0.95: %d, worst %.3f, left out as too slow: "
        "%d\n",
        op.c_str(), s.ratios.size(), std::exp(log_sum / static_cast<double>(s.ratios.size())), below, worst,
        s.left_out);
  }
  GANNET_CUDA(kName, cudaStreamDestroy(stream));
  return summaries.empty() ? 1 : 0;
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet
