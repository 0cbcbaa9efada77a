#include "bench/problems.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>

#include "bench/peers.h"
#include "bench/storage.h"
#include "core/format.h"
#include "core/implementation.h"
#include "gannet/gannet.h"

namespace gannet {
inline namespace v0 {
namespace bench {

Call::~Call() = default;

namespace {

using Json = nlohmann::json;

constexpr int kLatentDim = 512;
constexpr int kRopeDim = 64;
constexpr int kIndexHeadDim = 128;
template <class Params>
class PlannedCall final : public Call {
 public:
  PlannedCall(const Context& context, const std::string& impl, std::vector<Params> copies,
              std::shared_ptr<Storage> storage)
      : context_(context),
        plan_(context_, copies.front(), PlanOptions{impl}),
        copies_(std::move(copies)),
        workspace_(plan_.workspace_bytes()),
        storage_(std::move(storage)) {}
  const char* impl() const override { return plan_.impl(); }
  void run(int64_t iteration) override {
    plan_.run(copies_[static_cast<size_t>(iteration) % copies_.size()], workspace_);
  }
  std::vector<float> result() override {
    if constexpr (std::is_same_v<Params, MlaDecode> || std::is_same_v<Params, SparseAttention>) {
      Params p = copies_.front();
      std::vector<float> out(static_cast<size_t>(p.out.num_elements()));
      p.out.data = out.data();
      p.out.dtype = DType::kF32;
      const OpPlan<Params> plan(context_, p, PlanOptions{plan_.impl()});
      std::vector<std::byte> workspace(plan.workspace_bytes());
      plan.run(p, workspace);
      return out;
    } else if constexpr (std::is_same_v<Params, IndexSelect>) {
      const IndexSelect& p = copies_.front();
      plan_.run(p, workspace_);
      return selection_result(p, {p.topk_slots.ptr<const int32_t>(), static_cast<size_t>(p.topk_slots.num_elements())});
    } else {
      return {};
    }
  }

 private:
  Context context_;
  OpPlan<Params> plan_;
  std::vector<Params> copies_;
  std::vector<std::byte> workspace_;
  std::shared_ptr<Storage> storage_;
};

/// The shape of a problem of `grid.batch` requests over paged caches, with what else there is to say.
Json paged_shape(const Grid& grid, int heads, int keys, int q_len, Json shape) {
  shape.update({{"heads", heads},
                {"keys", keys},
                {"batch", grid.batch},
                {"q_len", q_len},
                {"dtype", to_string(grid.dtype)},
                {"page_size", grid.page_size}});
  return shape;
}

template <class Params>
Problem finish(const Grid& grid, std::vector<Params> copies, std::shared_ptr<Storage> storage, std::string label,
               Json shape, double flops, double bytes, bool fp32) {
  Problem p;
  if constexpr (requires { peers_of(copies, storage); }) {
    if (grid.peers) p.peers = peers_of(copies, storage);
  }
  p.op = Params::kName;
  p.label = std::move(label);
  shape["copies"] = copies.size();
  p.shape = std::make_shared<Json>(std::move(shape));
  p.flops = flops;
  p.bytes = bytes;
  p.fp32 = fp32;
  for (const ImplInfo& info : list_implementations<Params>()) {
    if (info.runs_here) p.impls.push_back(info.name);
  }
  p.bind = [copies = std::move(copies), storage = std::move(storage)](const Context& context, const std::string& impl) {
    return std::make_unique<PlannedCall<Params>>(context, impl, copies, storage);
  };
  return p;
}

const char* row_word(DType dtype) { return to_string(dtype); }

DType latent_dtype(LatentFormat format) {
  switch (format) {
    case LatentFormat::kF32: return DType::kF32;
    case LatentFormat::kBf16: return DType::kBf16;
    default: return DType::kE4m3;
  }
}

/// A pool of batch * ceil(keys / page_size) pages and the reserved one, and a shuffled table into it.
struct Paged {
  int64_t num_pages = 0;
  TensorView table;              // int32 [batch, pages]
  std::vector<int32_t> page_of;  // batch-major
  int64_t pages_per_request = 0;
  int64_t slot(int64_t request, int64_t position, int page_size) const {
    return static_cast<int64_t>(page_of[static_cast<size_t>(request * pages_per_request + position / page_size)]) *
               page_size +
           position % page_size;
  }
};

Paged make_pages(Storage& s, const Grid& grid, int keys) {
  Paged p;
  p.pages_per_request = (keys + grid.page_size - 1) / grid.page_size;
  const int64_t used = p.pages_per_request * grid.batch;
  p.num_pages = used + 1;
  p.page_of = s.permutation(1, static_cast<int32_t>(used));
  p.table = s.ints(p.page_of);
  p.table.rank = 2;
  p.table.shape = {grid.batch, p.pages_per_request};
  p.table.stride = {p.pages_per_request, 1};
  return p;
}

LatentCacheView make_latent(Storage& s, const Grid& grid, int64_t num_pages, bool filled) {
  LatentCacheView c;
  c.format = grid.latent_format;
  c.geometry = {kLatentDim, kRopeDim};
  c.num_pages = num_pages;
  c.page_size = grid.page_size;
  const int64_t row_bytes = latent_row_bytes(c.format, c.geometry);
  c.page_stride_bytes = (grid.page_size * row_bytes + 15) / 16 * 16;
  c.scale = c.format == LatentFormat::kE4m3 ? 1.0f : 0.0f;
  const int64_t bytes = num_pages * c.page_stride_bytes;
  c.data = s.allocate(static_cast<size_t>(bytes));
  if (!filled) {
    std::memset(c.data, 0, static_cast<size_t>(bytes));
    return c;
  }
  if (c.format == LatentFormat::kE4m3PerToken)
    fail_argument("bench", "kv-dtype is {}; accepted: fp32, bf16, e4m3, packed656", to_string(c.format));
  if (c.format == LatentFormat::kPacked656) {
    constexpr int kGroups = 4;  // of 128 values with a scale each (docs/kv_layouts.md)
    for (int64_t i = 0; i < num_pages * grid.page_size; ++i) {
      std::byte* row =
          static_cast<std::byte*>(c.data) + i / grid.page_size * c.page_stride_bytes + i % grid.page_size * row_bytes;
      s.fill(DType::kE4m3, row, kLatentDim, 1.0f);
      for (int g = 0; g < kGroups; ++g) reinterpret_cast<float*>(row + kLatentDim)[g] = g % 2 == 0 ? 1.0f : 0.5f;
      s.fill(DType::kBf16, row + kLatentDim + kGroups * sizeof(float), kRopeDim, 1.0f);
    }
    return c;
  }
  const DType dtype = latent_dtype(c.format);
  s.fill(dtype, c.data, bytes / static_cast<int64_t>(size_of(dtype)), 1.0f);
  return c;
}

IndexCacheView make_index(Storage& s, const Grid& grid, int64_t num_pages) {
  IndexCacheView c;
  c.format = grid.index_format;
  c.head_dim = kIndexHeadDim;
  c.num_pages = num_pages;
  c.page_size = grid.page_size;
  c.page_stride_bytes = (grid.page_size * index_k_token_bytes(c.format, c.head_dim) + 15) / 16 * 16;
  c.data = s.allocate(static_cast<size_t>(num_pages * c.page_stride_bytes));
  const DType dtype = c.format == IndexKFormat::kF32    ? DType::kF32
                      : c.format == IndexKFormat::kBf16 ? DType::kBf16
                                                        : DType::kE4m3;
  std::uniform_real_distribution<float> scale(0.005f, 0.02f);
  for (int64_t page = 0; page < num_pages; ++page) {
    // e4m3 keys spread over their range, with scales that bring them back to about 1.
    s.fill(dtype, c.values(page * grid.page_size), int64_t{grid.page_size} * kIndexHeadDim,
           dtype == DType::kE4m3 ? 100.0f : 1.0f);
    if (dtype != DType::kE4m3) continue;
    for (int i = 0; i < grid.page_size; ++i) *c.scale(page * grid.page_size + i) = scale(s.random());
  }
  return c;
}

double dtype_bytes(DType t) { return static_cast<double>(size_of(t)); }

float mla_scale() { return 1.0f / std::sqrt(192.0f); }

Problem mla_decode(const Grid& grid, int heads, int keys, int q_len) {
  auto s = std::make_shared<Storage>(1);
  const int64_t rows = int64_t{grid.batch} * q_len;
  const Paged pages = make_pages(*s, grid, keys);
  MlaDecode p;
  p.q = s->normal(grid.dtype, {rows, heads, kLatentDim + kRopeDim});
  p.pages = PageTableView::padded(pages.table);
  p.rows.seq_lens = s->ints(std::vector<int32_t>(static_cast<size_t>(grid.batch), keys));
  p.rows.q_len = q_len;
  p.out = s->zeros(grid.dtype, {rows, heads, kLatentDim});
  p.lse = s->zeros(DType::kF32, {rows, heads});
  p.softmax_scale = mla_scale();
  const double row_bytes = static_cast<double>(latent_row_bytes(grid.latent_format, {kLatentDim, kRopeDim}));
  const double cache_bytes = static_cast<double>(grid.batch) * keys * row_bytes;
  std::vector<MlaDecode> copies;
  for (int64_t i = 0; i < num_copies(grid, static_cast<int64_t>(cache_bytes)); ++i) {
    p.cache = make_latent(*s, grid, pages.num_pages, true);
    copies.push_back(p);
  }
  double pairs = 0.0;  // (row, key)
  for (int j = 0; j < q_len; ++j) pairs += static_cast<double>(row_bound(p.rows.bound, keys, q_len, j));
  const double flops = 2.0 * grid.batch * pairs * heads * (2 * kLatentDim + kRopeDim);
  const double bytes =
      cache_bytes + static_cast<double>(rows) * heads * (2 * kLatentDim + kRopeDim) * dtype_bytes(grid.dtype);
  return finish(grid, std::move(copies), s,
                fmt::format("H={} n={} B={} S={} q={} kv={}", heads, keys, grid.batch, q_len, row_word(grid.dtype),
                            to_string(grid.latent_format)),
                paged_shape(grid, heads, keys, q_len, {{"kv", to_string(grid.latent_format)}}), flops, bytes,
                grid.dtype == DType::kF32 || grid.latent_format == LatentFormat::kF32);
}

/// Ascending distinct positions below `keys`, as a selection gives them.
std::vector<int32_t> choose(Storage& s, int keys, int k) {
  std::vector<int32_t> all = s.permutation(0, keys);
  all.resize(static_cast<size_t>(std::min(k, keys)));
  std::sort(all.begin(), all.end());
  return all;
}

Problem sparse_attention(const Grid& grid, int heads, int keys, int q_len) {
  auto s = std::make_shared<Storage>(2);
  const int64_t rows = int64_t{grid.batch} * q_len;
  const Paged pages = make_pages(*s, grid, keys);
  const int chosen = std::min(grid.topk, keys);
  SparseAttention p;
  p.q = s->normal(grid.dtype, {rows, heads, kLatentDim + kRopeDim});
  p.topk_lens = s->ints(std::vector<int32_t>(static_cast<size_t>(rows), chosen));
  p.out = s->zeros(grid.dtype, {rows, heads, kLatentDim});
  p.lse = s->zeros(DType::kF32, {rows, heads});
  p.softmax_scale = mla_scale();
  const double row_bytes = static_cast<double>(latent_row_bytes(grid.latent_format, {kLatentDim, kRopeDim}));
  std::vector<SparseAttention> copies;
  // Each copy has a selection of its own; the pools that they select from do not fit into the last level together.
  std::vector<LatentCacheView> pools;
  const double pool_bytes = static_cast<double>(pages.num_pages) * grid.page_size * row_bytes;
  for (int64_t i = 0; i < num_copies(grid, static_cast<int64_t>(pool_bytes)); ++i)
    pools.push_back(make_latent(*s, grid, pages.num_pages, true));
  const int64_t selections = num_copies(grid, static_cast<int64_t>(row_bytes) * chosen * rows);
  for (int64_t i = 0; i < std::max<int64_t>(selections, static_cast<int64_t>(pools.size())); ++i) {
    p.cache = pools[static_cast<size_t>(i) % pools.size()];
    p.topk_slots = s->uninitialised(DType::kI32, {rows, grid.topk});
    for (int64_t row = 0; row < rows; ++row) {
      const std::vector<int32_t> positions = choose(*s, keys, grid.topk);
      int32_t* slots = p.topk_slots.ptr<int32_t>(row);
      std::fill(slots, slots + grid.topk, -1);
      for (size_t j = 0; j < positions.size(); ++j)
        slots[j] = static_cast<int32_t>(pages.slot(row / q_len, positions[j], grid.page_size));
    }
    copies.push_back(p);
  }
  const double flops = 2.0 * static_cast<double>(rows) * chosen * heads * (2 * kLatentDim + kRopeDim);
  const double bytes = static_cast<double>(rows) * (chosen * (row_bytes + sizeof(int32_t)) +
                                                    heads * (2 * kLatentDim + kRopeDim) * dtype_bytes(grid.dtype));
  return finish(grid, std::move(copies), s,
                fmt::format("H={} k={} of n={} B={} S={} q={} kv={}", heads, chosen, keys, grid.batch, q_len,
                            row_word(grid.dtype), to_string(grid.latent_format)),
                paged_shape(grid, heads, keys, q_len, {{"topk", grid.topk}, {"kv", to_string(grid.latent_format)}}),
                flops, bytes, grid.dtype == DType::kF32 || grid.latent_format == LatentFormat::kF32);
}

/// index_logits and index_select have these in common. Rows that see at most `unscored` keys need no scores.
template <class Params>
Problem indexer(const Grid& grid, int heads, int keys, int q_len, Params p, std::shared_ptr<Storage> s,
                double extra_bytes, int unscored) {
  const int64_t rows = int64_t{grid.batch} * q_len;
  const Paged pages = make_pages(*s, grid, keys);
  p.q = s->normal(grid.dtype, {rows, heads, kIndexHeadDim});
  p.weights = s->normal(DType::kF32, {rows, heads}, 0.01f);
  p.pages = PageTableView::padded(pages.table);
  p.rows.seq_lens = s->ints(std::vector<int32_t>(static_cast<size_t>(grid.batch), keys));
  p.rows.q_len = q_len;
  const double cache_bytes = static_cast<double>(grid.batch) * keys *
                             static_cast<double>(index_k_token_bytes(grid.index_format, kIndexHeadDim));
  std::vector<Params> copies;
  for (int64_t i = 0; i < num_copies(grid, static_cast<int64_t>(cache_bytes)); ++i) {
    p.cache = make_index(*s, grid, pages.num_pages);
    copies.push_back(p);
  }
  double pairs = 0.0;
  for (int j = 0; j < q_len; ++j) {
    const int64_t seen = row_bound(p.rows.bound, keys, q_len, j);
    if (seen > unscored) pairs += static_cast<double>(seen);
  }
  const double flops = 2.0 * grid.batch * pairs * heads * kIndexHeadDim;
  const double bytes = (pairs > 0.0 ? cache_bytes : 0.0) +
                       static_cast<double>(rows) * heads * (kIndexHeadDim * dtype_bytes(grid.dtype) + 4.0) +
                       extra_bytes;
  return finish(grid, std::move(copies), s,
                fmt::format("Hi={} n={} B={} S={} q={} k={}", heads, keys, grid.batch, q_len, row_word(grid.dtype),
                            to_string(grid.index_format)),
                paged_shape(grid, heads, keys, q_len, {{"topk", grid.topk}, {"index_k", to_string(grid.index_format)}}),
                flops, bytes, grid.dtype == DType::kF32 || grid.index_format == IndexKFormat::kF32);
}

Problem index_logits(const Grid& grid, int heads, int keys, int q_len) {
  auto s = std::make_shared<Storage>(3);
  const int64_t rows = int64_t{grid.batch} * q_len;
  IndexLogits p;
  p.logits = s->zeros(DType::kF32, {rows, keys});
  return indexer(grid, heads, keys, q_len, p, s, static_cast<double>(rows) * keys * sizeof(float), 0);
}

Problem index_select(const Grid& grid, int heads, int keys, int q_len) {
  auto s = std::make_shared<Storage>(4);
  const int64_t rows = int64_t{grid.batch} * q_len;
  IndexSelect p;
  p.max_seq_len = keys;
  p.topk_slots = s->zeros(DType::kI32, {rows, grid.topk});
  p.topk_lens = s->zeros(DType::kI32, {rows});
  return indexer(grid, heads, keys, q_len, p, s, static_cast<double>(rows) * grid.topk * sizeof(int32_t), grid.topk);
}

Problem topk(const Grid& grid, int keys, int rows) {
  auto s = std::make_shared<Storage>(5);
  TopK p;
  p.lens = s->ints(std::vector<int32_t>(static_cast<size_t>(rows), keys));
  p.positions = s->zeros(DType::kI32, {rows, grid.topk});
  p.counts = s->zeros(DType::kI32, {rows});
  std::vector<TopK> copies;
  // Scores come straight from the indexer, so they are warm; several copies keep branch predictors honest.
  constexpr int kScoreSets = 8;
  for (int i = 0; i < kScoreSets; ++i) {
    p.logits = s->normal(DType::kF32, {rows, keys});
    copies.push_back(p);
  }
  const double bytes = static_cast<double>(rows) * (keys + std::min(keys, grid.topk)) * 4.0;
  return finish(grid, std::move(copies), s, fmt::format("k={} of n={} rows={}", grid.topk, keys, rows),
                {{"topk", grid.topk}, {"keys", keys}, {"rows", rows}}, 0.0, bytes, true);
}

Problem ragged_prefill(const Grid& grid, int heads, int keys, int qk_dim, int v_dim) {
  auto s = std::make_shared<Storage>(6);
  const int64_t rows = int64_t{grid.batch} * keys;
  std::vector<int32_t> cumulative;
  for (int i = 0; i <= grid.batch; ++i) cumulative.push_back(i * keys);
  RaggedPrefill p;
  p.q = s->normal(grid.dtype, {rows, heads, qk_dim});
  p.k = s->normal(grid.dtype, {rows, heads, qk_dim});
  p.v = s->normal(grid.dtype, {rows, heads, v_dim});
  p.cu_q_lens = s->ints(cumulative);
  p.cu_kv_lens = p.cu_q_lens;
  p.out = s->zeros(grid.dtype, {rows, heads, v_dim});
  p.lse = s->zeros(DType::kF32, {rows, heads});
  p.softmax_scale = 1.0f / std::sqrt(static_cast<float>(qk_dim));
  const double pairs = 0.5 * keys * (keys + 1.0) * grid.batch;  // causal: the lower triangle
  const double flops = 2.0 * pairs * heads * (qk_dim + v_dim);
  const double bytes = static_cast<double>(rows) * heads * 2.0 * (qk_dim + v_dim) * dtype_bytes(grid.dtype);
  return finish(
      grid, std::vector<RaggedPrefill>{p}, s,
      fmt::format("H={} n={} B={} {}/{} causal {}", heads, keys, grid.batch, qk_dim, v_dim, row_word(grid.dtype)),
      {{"heads", heads},
       {"keys", keys},
       {"batch", grid.batch},
       {"qk_dim", qk_dim},
       {"v_dim", v_dim},
       {"causal", true},
       {"dtype", to_string(grid.dtype)}},
      flops, bytes, grid.dtype == DType::kF32);
}

Problem merge_state(const Grid& grid, int heads, int rows) {
  auto s = std::make_shared<Storage>(7);
  constexpr int kValueDim = 128;
  MergeState p;
  std::vector<MergeState> copies;
  const double side = static_cast<double>(rows) * heads * (kValueDim * dtype_bytes(grid.dtype) + 4.0);
  for (int64_t i = 0; i < num_copies(grid, static_cast<int64_t>(2.0 * side)); ++i) {
    p.out_a = s->normal(grid.dtype, {rows, heads, kValueDim});
    p.out_b = s->normal(grid.dtype, {rows, heads, kValueDim});
    p.lse_a = s->normal(DType::kF32, {rows, heads});
    p.lse_b = s->normal(DType::kF32, {rows, heads});
    copies.push_back(p);
  }
  return finish(grid, std::move(copies), s,
                fmt::format("H={} rows={} V={} {}", heads, rows, kValueDim, row_word(grid.dtype)),
                {{"heads", heads}, {"rows", rows}, {"v_dim", kValueDim}, {"dtype", to_string(grid.dtype)}},
                3.0 * rows * heads * kValueDim, 3.0 * side, true);
}

/// latent_write and latent_gather: rows at shuffled slots.
template <class Params>
Problem latent_move(const Grid& grid, int rows) {
  auto s = std::make_shared<Storage>(8);
  const int64_t num_pages = (rows + grid.page_size - 1) / grid.page_size + 1;
  Params p;
  p.slots = s->ints(s->permutation(grid.page_size, rows));
  const double cache_bytes =
      static_cast<double>(rows) * static_cast<double>(latent_row_bytes(grid.latent_format, {kLatentDim, kRopeDim}));
  const double dense_bytes = static_cast<double>(rows) * (kLatentDim + kRopeDim) * dtype_bytes(grid.dtype);
  std::vector<Params> copies;
  for (int64_t i = 0; i < num_copies(grid, static_cast<int64_t>(cache_bytes + dense_bytes)); ++i) {
    p.latent = s->normal(grid.dtype, {rows, kLatentDim});
    p.rope = s->normal(grid.dtype, {rows, kRopeDim});
    p.cache = make_latent(*s, grid, num_pages, true);
    copies.push_back(p);
  }
  return finish(grid, std::move(copies), s,
                fmt::format("rows={} {} kv={}", rows, row_word(grid.dtype), to_string(grid.latent_format)),
                {{"rows", rows},
                 {"dtype", to_string(grid.dtype)},
                 {"kv", to_string(grid.latent_format)},
                 {"page_size", grid.page_size}},
                0.0, cache_bytes + dense_bytes + rows * 4.0, true);
}

}  // namespace

const std::vector<std::string>& problem_ops() {
  static const std::vector<std::string> kOps = {"mla_decode",  "sparse_attention", "index_logits",
                                                "topk",        "index_select",     "ragged_prefill",
                                                "merge_state", "latent_write",     "latent_gather"};
  return kOps;
}

std::vector<Maker> make_problems(const std::string& op, const Grid& grid) {
  std::vector<Maker> makers;
  const auto each = [&](const std::vector<int>& heads, const std::vector<int>& keys, const std::vector<int>& rows,
                        auto make) {
    for (const int h : heads) {
      for (const int n : keys) {
        for (const int r : rows) makers.emplace_back([=] { return make(h, n, r); });
      }
    }
  };
  // The defaults: V3's 128 heads and 16 (one of 8 ranks); contexts from L2-sized to larger than an L3.
  const std::vector<int> heads = or_default(grid.heads, {128, 16});
  const std::vector<int> one_row = or_default(grid.rows, {1});
  if (op == "mla_decode") {
    each(heads, or_default(grid.keys, {1024, 4096, 32768}), one_row,
         [grid](int h, int n, int r) { return mla_decode(grid, h, n, r); });
  } else if (op == "sparse_attention") {
    each(heads, or_default(grid.keys, {32768}), one_row,
         [grid](int h, int n, int r) { return sparse_attention(grid, h, n, r); });
  } else if (op == "index_logits" || op == "index_select") {
    // V3.2's 64 index heads, GLM-5's 32; one row (decode) and 64 (a piece of a prefill).
    each(or_default(grid.heads, {64, 32}), or_default(grid.keys, {4096, 32768}), or_default(grid.rows, {1, 64}),
         [grid, op](int h, int n, int r) {
           return op == "index_logits" ? index_logits(grid, h, n, r) : index_select(grid, h, n, r);
         });
  } else if (op == "topk") {
    each({0}, or_default(grid.keys, {4096, 32768, 131072}), or_default(grid.rows, {1, 16}),
         [grid](int, int n, int r) { return topk(grid, n, r); });
  } else if (op == "ragged_prefill") {
    for (const auto& [qk_dim, v_dim] : {std::pair{192, 128}, std::pair{256, 256}}) {
      each(heads, or_default(grid.keys, {1024, 4096}), {0},
           [grid, qk = qk_dim, v = v_dim](int h, int n, int) { return ragged_prefill(grid, h, n, qk, v); });
    }
  } else if (op == "merge_state") {
    each(heads, {0}, or_default(grid.rows, {1024}), [grid](int h, int, int r) { return merge_state(grid, h, r); });
  } else if (op == "latent_write") {
    each({0}, {0}, or_default(grid.rows, {1, 4096}),
         [grid](int, int, int r) { return latent_move<LatentWrite>(grid, r); });
  } else if (op == "latent_gather") {
    each({0}, {0}, or_default(grid.rows, {1, 4096}),
         [grid](int, int, int r) { return latent_move<LatentGather>(grid, r); });
  } else {
    std::string names;
    for (const std::string& name : problem_ops()) names += (names.empty() ? "" : ", ") + name;
    fail_argument("bench", "op is \"{}\"; accepted: {}", op, names);
  }
  return makers;
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet
