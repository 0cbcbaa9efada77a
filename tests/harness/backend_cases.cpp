#include "harness/backend_cases.h"

#include <fmt/core.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "core/implementation.h"
#include "gannet/attention.h"
#include "gannet/kv_pool.h"
#include "gannet/ops.h"
#include "harness/odd_executor.h"
#include "verify/problem.h"
#include "verify/tolerances.h"

namespace gannet_test {

using namespace gannet;
using verify::Rng;

void BackendReport::add(const BackendReport& o) {
  steps += o.steps;
  extends += o.extends;
  decodes += o.decodes;
  mixed += o.mixed;
  idle += o.idle;
  refreshes += o.refreshes;
  advances += o.advances;
  rows += o.rows;
}

namespace {

using Ints = std::vector<int32_t>;

// The tolerances are derived for standard deviations; the farthest of some ten thousand rows lie about twice as far
// out.
constexpr double kTails = 2.0;

template <class... Args>
void require(bool holds, fmt::format_string<Args...> text, Args&&... args) {
  if (!holds) throw Failure(fmt::format(text, std::forward<Args>(args)...));
}

/// A multiple of 1/128 in [-1, 1): exact in bf16.
float draw(Rng& rng) { return static_cast<float>(rng.below(256) - 128) / 128.0f; }

/// The bytes of 4 that fill memory of that type.
uint32_t word_of(verify::Poison poison, DType as) {
  switch (poison) {
    case verify::Poison::kNan: return 0xFFFFFFFFu;
    case verify::Poison::kInf: return as == DType::kBf16 ? 0x7F807F80u : 0x7F800000u;
    case verify::Poison::kHuge: return as == DType::kBf16 ? 0x714A714Au : 0x7149F2CAu;  // 1e30
    default: return 0;
  }
}

void fill_words(std::byte* p, size_t bytes, uint32_t word) {
  for (size_t i = 0; i + sizeof word <= bytes; i += sizeof word) std::memcpy(p + i, &word, sizeof word);
}

class PoisonedMemory final : public MemoryResource {
 public:
  void* allocate(size_t bytes, size_t alignment) override {
    void* p = host_memory().allocate(bytes, alignment);
    fill_words(static_cast<std::byte*>(p), bytes, word);
    ++allocations;
    return p;
  }
  void deallocate(void* p, size_t bytes, size_t alignment) noexcept override {
    host_memory().deallocate(p, bytes, alignment);
  }
  uint32_t word = 0;
  int64_t allocations = 0;
};

/// A packed tensor full of NaN, or of another poison.
struct Block {
  Block() = default;
  Block(DType dtype, std::initializer_list<int64_t> shape, verify::Poison poison = verify::Poison::kNan)
      : view(gannet::view(nullptr, dtype, shape)) {
    buffer = gannet::Buffer(std::max<size_t>(bytes(), 64));
    fill_words(buffer.data(), buffer.size(), word_of(poison, dtype));
    view.data = buffer.data();
  }
  size_t bytes() const { return static_cast<size_t>(view.num_elements()) * size_of(view.dtype); }
  void set(float x, int64_t i, int64_t j = 0, int64_t k = 0) { verify::set(view, x, i, j, k); }
  float get(int64_t i, int64_t j = 0, int64_t k = 0) const { return verify::get(view, i, j, k); }
  TensorView rows(const Range& r) const {
    TensorView v = view;
    v.shape[0] = r.size();
    v.data = static_cast<std::byte*>(v.data) + r.begin * v.stride[0] * static_cast<int64_t>(size_of(v.dtype));
    return v;
  }
  TensorView view;
  gannet::Buffer buffer;
};

bool same_bytes(const Block& a, const Block& b, size_t bytes) {
  return std::memcmp(a.view.data, b.view.data, bytes) == 0;
}

/// A request with tokens in the caches: which of the bank's tokens stands at which position, and in which pages.
struct Live {
  Ints tokens;
  PageList pages;
};

/// A request of a step.
struct Entry {
  Live* live = nullptr;  // nullptr: padding
  bool extends = false;
  int32_t prefix = 0;  // tokens before the step
  int32_t len = 0;     // after it; a decode shorter than its rows has some at negative positions
};

/// A row of a step.
struct RowOf {
  Live* live = nullptr;
  int32_t position = -1;  // negative: written nowhere
  int32_t sees = 0;
};

struct Shape {
  int32_t num_requests, q_len;
  RowBound bound;
};

class Sequence {
 public:
  Sequence(Source& in, const BackendCases& cases);
  BackendReport run();

 private:
  // ---- setting up ----
  void draw_config();
  void make_bank();

  // ---- batches ----
  Live* fresh();
  Live* unused(const std::vector<Entry>& batch);
  void retire(const std::vector<Entry>& keep);
  bool ensure_pages(Live& live, int64_t tokens, const std::vector<Entry>& batch);
  void write_tokens(Live& live, int32_t begin, int32_t end);
  std::vector<Entry> draw_decodes(int64_t n, int32_t q_len, RowBound bound, std::vector<Entry> batch);
  struct Table;
  PageTableView table_of(const std::vector<Entry>& batch, Table& table);
  void rows_of(const std::vector<Entry>& batch, int32_t q_len, RowBound bound);

  // ---- steps ----
  void eager_step();
  void captured_step();
  void capture();
  void drafts(std::vector<Entry> batch, int32_t q_len, bool captured);
  struct Inputs;
  struct Results;
  Inputs make_inputs();
  Results make_results() const;
  void run_fixed(AttentionBackend& b, const Inputs& x, Results& r, bool write);
  void run_varied(const Inputs& x, Results& r, bool split_only);
  void dense_prefill(const Inputs& x, Results& r, int32_t layer, bool by_parts);
  void check_results(const Inputs& x, const Results& r, const char* what);
  void check_same(const Results& a, const Results& b, int64_t rows, const char* what);
  void check_caches(const Inputs& x);

  // ---- oracle ----
  struct Answer {
    std::vector<double> value;
    double lse;
  };
  Answer attend(const Inputs& x, int64_t row, int32_t h, const std::array<int32_t, 48>& counts) const;
  void check_absorbed(const Inputs& x, const Block& out, const Block& lse, const Block* selected,
                      const char* what) const;
  void check_selection(const Inputs& x, const Results& r) const;
  void check_prefill(const Inputs& x, const Results& r) const;
  void compare_row(const double* want, double want_lse, const Block& out, const Block& lse, int64_t row, int32_t h,
                   int64_t width, double tolerance, double lse_tolerance, const char* what) const;

  static constexpr int32_t kBank = 48;
  static constexpr int32_t kLayers = 2;  // layer 0 has an indexer (dsa); layer 1 shares its selection
  static constexpr int64_t kPages = 28;

  Source& in_;
  BackendCases cases_;
  Rng rng_{0};
  BackendReport report_;

  AttentionConfig config_;
  DType dtype_ = DType::kF32;
  LatentFormat format_ = LatentFormat::kF32;
  float scale_ = 0.0f;
  IndexKFormat index_format_ = IndexKFormat::kF32;
  ScaleFormat scale_format_ = ScaleFormat::kFp32;
  std::string text_;
  verify::Poison poison_ = verify::Poison::kNan;
  std::unique_ptr<OddExecutor> executor_;
  Context context_;
  PoisonedMemory memory_;
  std::unique_ptr<LatentPool> latent_, mirror_;
  std::unique_ptr<IndexKPool> index_, index_mirror_;
  std::unique_ptr<AttentionBackend> backend_, twin_;
  std::unique_ptr<PageAllocator> allocator_;
  std::vector<std::unique_ptr<Live>> live_;
  std::vector<Shape> captured_;
  std::vector<RowOf> rows_;
  int64_t num_prefill_ = 0;

  // The bank: tokens as an engine computes them, as the caches hold them, and as gathers give them.
  std::vector<float> raw_, stored_, gathered_;   // [kBank, R + P]
  std::vector<float> raw_index_, stored_index_;  // [kBank, Di]
};

// ---- setting up ---------------------------------------------------------------------------------------------------

void Sequence::draw_config() {
  AttentionConfig& c = config_;
  c.arch = in_.pick({AttentionArch::kMla, AttentionArch::kDsa});
  const bool dsa = c.arch == AttentionArch::kDsa;
  std::vector<std::string> impls;
  for (const ImplementationSet* s : implementation_sets())
    if (s->compiled && s->device == DeviceKind::kCpu && s->runs_here()) impls.emplace_back(s->name);
  // The oracle is an implementation like the others, but slow.
  const auto drawn = static_cast<size_t>(in_.between(0, static_cast<int64_t>(impls.size() * 2) - 2));
  c.plan.impl = cases_.impl.empty() ? impls[std::min(drawn / 2, impls.size() - 1)] : cases_.impl;
  dtype_ = in_.pick({DType::kBf16, DType::kF32});
  format_ = in_.pick({LatentFormat::kBf16, LatentFormat::kF32, LatentFormat::kE4m3, LatentFormat::kPacked656,
                      LatentFormat::kE4m3PerToken});
  if (dsa && format_ == LatentFormat::kE4m3PerToken) format_ = LatentFormat::kF32;
  if (format_ == LatentFormat::kE4m3) scale_ = in_.pick({0.03f, 0.01f});
  index_format_ = in_.pick({IndexKFormat::kE4m3, IndexKFormat::kBf16, IndexKFormat::kF32});
  scale_format_ = in_.pick({ScaleFormat::kFp32, ScaleFormat::kPowerOfTwo});
  c.geometry = in_.pick({RowGeometry{128, 16}, RowGeometry{128, 32}});
  if (format_ != LatentFormat::kPacked656 && in_.one_in(3)) c.geometry = {64, 16};
  c.num_heads = static_cast<int32_t>(in_.between(1, 3));
  c.qk_nope_head_dim = in_.pick({32, 16, 48});
  c.v_head_dim = in_.pick({48, 64});
  c.softmax_scale = 4.5f / std::sqrt(static_cast<float>(c.geometry.width()));  // scores of deviation 1.5
  c.page_size = dsa ? 64 : in_.pick({32, 64});
  c.max_context_len = 1024;
  c.prefix_chunk_capacity = in_.pick<int64_t>({32768, 64, 130, 256});
  if (dsa) {
    c.q_lora_rank = 96;
    c.indexer = {.num_heads = static_cast<int32_t>(in_.between(1, 4)),
                 .head_dim = in_.pick({32, 64, 128}),
                 .topk = static_cast<int32_t>(in_.one_in(3) ? in_.between(1, 16) : in_.between(17, 200))};
  }
  poison_ = in_.pick({verify::Poison::kNan, verify::Poison::kInf, verify::Poison::kHuge, verify::Poison::kZero});
  if (cases_.poison) poison_ = *cases_.poison;
  memory_.word = word_of(poison_, format_ == LatentFormat::kBf16 ? DType::kBf16 : DType::kF32);
  const auto workers = in_.between(0, 4);
  if (workers > 0) executor_ = std::make_unique<OddExecutor>(static_cast<int>(workers) * 2 - 1);
  context_.executor = cases_.executor != nullptr ? cases_.executor : executor_.get();
  rng_ = Rng(static_cast<uint64_t>(in_.between(0, 0xFFFFFF)));
  text_ = fmt::format(
      "{} {}, {}, latent {} {} + {}, index keys {}{}, {} heads, page size {}, topk {}, chunks of {}, {} workers",
      dsa ? "dsa" : "mla", c.plan.impl, to_string(dtype_), to_string(format_), c.geometry.latent_dim,
      c.geometry.rope_dim, to_string(index_format_), scale_format_ == ScaleFormat::kPowerOfTwo ? " (2^n)" : "",
      c.num_heads, c.page_size, c.indexer.topk, c.prefix_chunk_capacity, executor_ ? executor_->num_workers() : 1);
}

void Sequence::make_bank() {
  const RowGeometry g = config_.geometry;
  const int32_t width = g.width();
  raw_.resize(static_cast<size_t>(kBank * width));
  for (float& x : raw_) x = draw(rng_);
  // What a format makes of them, by the oracle's own writer and reader, whose tests are elsewhere (test_ref).
  LatentPool pool(
      {.num_layers = 1, .format = format_, .geometry = g, .num_pages = kBank, .page_size = 1, .scale = scale_});
  Ints slots(kBank);
  for (int32_t i = 0; i < kBank; ++i) slots[static_cast<size_t>(i)] = i;
  const TensorView slot_view = view(slots.data(), {kBank});
  const auto parts = [&](std::vector<float>& rows) {
    TensorView latent = view(rows.data(), {kBank, width}), rope = latent;
    latent.shape[1] = g.latent_dim;
    rope.shape[1] = g.rope_dim;
    rope.data = rows.data() + g.latent_dim;
    return std::pair{latent, rope};
  };
  const auto [latent, rope] = parts(raw_);
  run_once(Context{}, LatentWrite{.latent = latent, .rope = rope, .slots = slot_view, .cache = pool.layer(0)},
           {.impl = "ref"});
  stored_.resize(raw_.size());
  const auto [stored_latent, stored_rope] = parts(stored_);
  run_once(Context{},
           LatentGather{.slots = slot_view, .cache = pool.layer(0), .latent = stored_latent, .rope = stored_rope},
           {.impl = "ref"});
  gathered_ = stored_;
  if (dtype_ == DType::kBf16)
    for (float& x : gathered_) x = Bf16::from_float(x).to_float();
  if (config_.arch != AttentionArch::kDsa) return;
  const int32_t dim = config_.indexer.head_dim;
  raw_index_.resize(static_cast<size_t>(kBank * dim));
  for (float& x : raw_index_) x = draw(rng_);
  IndexKPool keys({.layers = {0},
                   .format = index_format_,
                   .scale_format = scale_format_,
                   .head_dim = dim,
                   .num_pages = kBank,
                   .page_size = 1});
  run_once(Context{},
           IndexKWrite{.k = view(raw_index_.data(), {kBank, dim}), .slots = slot_view, .cache = keys.layer(0)},
           {.impl = "ref"});
  stored_index_.resize(raw_index_.size());
  run_once(Context{},
           IndexKGather{.slots = slot_view, .cache = keys.layer(0), .k = view(stored_index_.data(), {kBank, dim})},
           {.impl = "ref"});
}

Sequence::Sequence(Source& in, const BackendCases& cases) : in_(in), cases_(cases) {
  draw_config();
  make_bank();
  const LatentPoolOptions latent{.num_layers = kLayers,
                                 .format = format_,
                                 .geometry = config_.geometry,
                                 .num_pages = kPages,
                                 .page_size = config_.page_size,
                                 .scale = scale_};
  latent_ = std::make_unique<LatentPool>(latent, memory_);
  mirror_ = std::make_unique<LatentPool>(latent, memory_);
  if (config_.arch == AttentionArch::kDsa) {
    const IndexKPoolOptions index{.layers = {0},
                                  .format = index_format_,
                                  .scale_format = scale_format_,
                                  .head_dim = config_.indexer.head_dim,
                                  .num_pages = kPages,
                                  .page_size = config_.page_size};
    index_ = std::make_unique<IndexKPool>(index, memory_);
    index_mirror_ = std::make_unique<IndexKPool>(index, memory_);
  }
  allocator_ = std::make_unique<PageAllocator>(kPages);
  if (cases.other_pages) {  // what is given back last goes first
    const PageList all = allocator_->acquire(kPages - 1);
    std::vector<PageRef> refs;
    for (int64_t i = 0; i < all.size(); ++i) refs.push_back(all.ref(i * 7 % all.size()));
  }
  for (auto* b : {&backend_, &twin_}) {
    *b = make_attention_backend(context_, config_, {}, memory_);
    (*b)->bind(layer_caches(*latent_, index_.get()));
  }
}

// ---- batches ------------------------------------------------------------------------------------------------------

Live* Sequence::fresh() {
  live_.push_back(std::make_unique<Live>());
  return live_.back().get();
}

Live* Sequence::unused(const std::vector<Entry>& batch) {
  for (size_t tries = 0; tries < live_.size(); ++tries) {
    Live* l = live_[static_cast<size_t>(rng_.below(static_cast<int64_t>(live_.size())))].get();
    if (std::none_of(batch.begin(), batch.end(), [&](const Entry& e) { return e.live == l; })) return l;
  }
  return nullptr;
}

/// Gives up a request that is not in the batch; its pages go to others with their bytes in them.
void Sequence::retire(const std::vector<Entry>& keep) {
  for (size_t i = 0; i < live_.size(); ++i) {
    if (std::any_of(keep.begin(), keep.end(), [&](const Entry& e) { return e.live == live_[i].get(); })) continue;
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(i));
    return;
  }
}

bool Sequence::ensure_pages(Live& live, int64_t tokens, const std::vector<Entry>& batch) {
  const int64_t missing = pages_for(tokens, config_.page_size) - live.pages.size();
  if (missing <= 0) return true;
  while (true) {
    if (auto pages = allocator_->try_acquire(missing)) {
      live.pages.append(std::move(*pages));
      return true;
    }
    const size_t before = live_.size();
    std::vector<Entry> keep = batch;
    keep.push_back({.live = &live});
    retire(keep);
    if (live_.size() == before) return false;
  }
}

/// Positions [begin, end) get new tokens; what stood behind is forgotten.
void Sequence::write_tokens(Live& live, int32_t begin, int32_t end) {
  live.tokens.resize(static_cast<size_t>(begin));
  while (static_cast<int32_t>(live.tokens.size()) < end) live.tokens.push_back(static_cast<int32_t>(rng_.below(kBank)));
}

std::vector<Entry> Sequence::draw_decodes(int64_t n, int32_t q_len, RowBound bound, std::vector<Entry> batch) {
  for (int64_t i = 0; i < n; ++i) {
    const auto kind = in_.between(0, 7);
    Live* l = kind == 0 ? nullptr : kind == 1 ? fresh() : unused(batch);
    if (kind != 0 && l == nullptr) l = fresh();
    if (l == nullptr) {
      batch.push_back({});
      continue;
    }
    Entry e{.live = l, .prefix = static_cast<int32_t>(l->tokens.size())};
    e.len = e.prefix + q_len;
    // A request of fewer tokens than rows: the first rows are padding.
    if (e.prefix == 0 && bound != RowBound::kCausalFromFirst && in_.one_in(3))
      e.len = static_cast<int32_t>(in_.between(1, q_len));
    if (e.len > config_.max_context_len || e.len > 300 || !ensure_pages(*l, e.len, batch)) {
      batch.push_back({});
      continue;
    }
    batch.push_back(e);
    write_tokens(*l, e.prefix, e.len);
  }
  return batch;
}

struct Sequence::Table {
  Ints cells, row_indices, indptr;
};

/// The pages of a batch in one of the forms; what no row sees is garbage.
PageTableView Sequence::table_of(const std::vector<Entry>& batch, Table& t) {
  const auto n = static_cast<int64_t>(batch.size());
  const auto garbage = [&](size_t i) { return i % 2 == 0 ? 0x7FFFFFFF : -123456789; };
  const auto used = [&](const Entry& e) {
    return e.live == nullptr ? int64_t{0} : pages_for(e.len, config_.page_size);
  };
  int64_t columns = in_.between(0, 2);
  for (const Entry& e : batch) columns = std::max(columns, used(e));
  const auto form = in_.between(0, 2);
  if (form == 2) {
    t.indptr = {0};
    for (const Entry& e : batch) {
      for (int64_t c = 0; c < used(e); ++c) t.cells.push_back(e.live->pages.ids()[static_cast<size_t>(c)]);
      if (t.indptr.size() % 2 == 0) t.cells.push_back(garbage(t.cells.size()));
      t.indptr.push_back(static_cast<int32_t>(t.cells.size()));
    }
    return PageTableView::csr(view(t.indptr.data(), {n + 1}),
                              view(t.cells.data(), {static_cast<int64_t>(t.cells.size())}));
  }
  const int64_t table_rows = form == 1 ? 2 * n + 1 : n;
  for (int64_t i = 0; i < table_rows * columns; ++i) t.cells.push_back(garbage(static_cast<size_t>(i)));
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = form == 1 ? 2 * (n - 1 - i) + 1 : i;
    t.row_indices.push_back(static_cast<int32_t>(row));
    const Entry& e = batch[static_cast<size_t>(i)];
    for (int64_t c = 0; c < used(e); ++c)
      t.cells[static_cast<size_t>(row * columns + c)] = e.live->pages.ids()[static_cast<size_t>(c)];
  }
  const TensorView cells = view(t.cells.data(), {table_rows, columns});
  return form == 1 ? PageTableView::padded(cells, view(t.row_indices.data(), {n})) : PageTableView::padded(cells);
}

void Sequence::rows_of(const std::vector<Entry>& batch, int32_t q_len, RowBound bound) {
  rows_.clear();
  num_prefill_ = 0;
  for (const Entry& e : batch) {
    const int32_t n = e.extends ? e.len - e.prefix : q_len;
    for (int32_t j = 0; j < n; ++j) {
      RowOf r{.live = e.live, .position = e.live == nullptr ? -1 : e.len - n + j, .sees = 0};
      if (e.live != nullptr)
        r.sees = !e.extends && bound == RowBound::kUniformBlock ? e.len : std::max(0, e.len - n + j + 1);
      rows_.push_back(r);
    }
    if (e.extends) num_prefill_ += n;
  }
}

// ---- arguments of a step ------------------------------------------------------------------------------------------

struct Sequence::Inputs {
  Block q, latent, rope, index_k, index_q, weights;  // of all rows
  Block q_expanded, k_nope, v;                       // of prefill rows
};

struct Sequence::Results {
  std::array<Block, kLayers> out, lse;
  std::array<bool, kLayers> has{};  // absorbed results of that layer
  std::array<bool, kLayers> sparse{};
  Block prefill_out, prefill_lse;  // expanded, of the prefill rows
  bool has_prefill = false;
  Block slots, lens, positions;
  bool has_selection = false;
};

int32_t k_map(int32_t h, int32_t n, int32_t latent_dim) { return (h * 131 + n * 3 + 5) % latent_dim; }
int32_t v_map(int32_t h, int32_t d, int32_t latent_dim) { return (h * 61 + d * 3 + 1) % latent_dim; }

Sequence::Inputs Sequence::make_inputs() {
  const AttentionConfig& c = config_;
  const auto n = static_cast<int64_t>(rows_.size());
  const int32_t width = c.geometry.width(), latent_dim = c.geometry.latent_dim;
  const bool dsa = c.arch == AttentionArch::kDsa;
  Inputs x;
  x.q = Block(dtype_, {n, c.num_heads, width}, poison_);
  x.latent = Block(dtype_, {n, latent_dim}, poison_);
  x.rope = Block(dtype_, {n, c.geometry.rope_dim}, poison_);
  x.q_expanded = Block(dtype_, {num_prefill_, c.num_heads, c.qk_nope_head_dim + c.geometry.rope_dim}, poison_);
  x.k_nope = Block(dtype_, {num_prefill_, c.num_heads, c.qk_nope_head_dim}, poison_);
  x.v = Block(dtype_, {num_prefill_, c.num_heads, c.v_head_dim}, poison_);
  if (dsa) {
    x.index_k = Block(dtype_, {n, c.indexer.head_dim}, poison_);
    x.index_q = Block(dtype_, {n, c.indexer.num_heads, c.indexer.head_dim}, poison_);
    x.weights = Block(DType::kF32, {n, c.indexer.num_heads}, poison_);
  }
  for (int64_t i = 0; i < n; ++i) {
    const RowOf& r = rows_[static_cast<size_t>(i)];
    if (r.position >= 0) {  // other rows are written nowhere: they stay poison
      const auto token = static_cast<size_t>(r.live->tokens[static_cast<size_t>(r.position)]);
      const float* t = raw_.data() + token * static_cast<size_t>(width);
      for (int32_t d = 0; d < latent_dim; ++d) x.latent.set(t[d], i, d);
      for (int32_t d = latent_dim; d < width; ++d) x.rope.set(t[d], i, d - latent_dim);
      if (dsa)
        for (int32_t d = 0; d < c.indexer.head_dim; ++d)
          x.index_k.set(raw_index_[token * static_cast<size_t>(c.indexer.head_dim) + static_cast<size_t>(d)], i, d);
      if (i < num_prefill_)
        for (int32_t h = 0; h < c.num_heads; ++h) {
          for (int32_t d = 0; d < c.qk_nope_head_dim; ++d) x.k_nope.set(t[k_map(h, d, latent_dim)], i, h, d);
          for (int32_t d = 0; d < c.v_head_dim; ++d) x.v.set(t[v_map(h, d, latent_dim)], i, h, d);
        }
    }
    if (r.sees == 0) continue;  // a row without keys: whatever its query holds
    for (int32_t h = 0; h < c.num_heads; ++h) {
      for (int32_t d = 0; d < width; ++d) x.q.set(draw(rng_), i, h, d);
      if (i < num_prefill_)
        for (int32_t d = 0; d < c.qk_nope_head_dim + c.geometry.rope_dim; ++d) x.q_expanded.set(draw(rng_), i, h, d);
    }
    if (!dsa) continue;
    for (int32_t h = 0; h < c.indexer.num_heads; ++h) {
      x.weights.set(draw(rng_), i, h);
      for (int32_t d = 0; d < c.indexer.head_dim; ++d) x.index_q.set(draw(rng_), i, h, d);
    }
  }
  return x;
}

Sequence::Results Sequence::make_results() const {
  const auto n = static_cast<int64_t>(rows_.size());
  Results r;
  for (size_t l = 0; l < kLayers; ++l) {
    r.out[l] = Block(dtype_, {n, config_.num_heads, config_.geometry.latent_dim}, poison_);
    r.lse[l] = Block(DType::kF32, {n, config_.num_heads}, poison_);
  }
  r.prefill_out = Block(dtype_, {num_prefill_, config_.num_heads, config_.v_head_dim}, poison_);
  r.prefill_lse = Block(DType::kF32, {num_prefill_, config_.num_heads}, poison_);
  const int64_t k = std::max(config_.indexer.topk, 1);
  r.slots = Block(DType::kI32, {n, k}, poison_);
  r.positions = Block(DType::kI32, {n, k}, poison_);
  r.lens = Block(DType::kI32, {n}, poison_);
  return r;
}

/// The calls of a captured batch, always the same: an indexer layer, then one that shares; or the two dense layers.
void Sequence::run_fixed(AttentionBackend& b, const Inputs& x, Results& r, bool write) {
  const auto kv = [&](int32_t layer) -> StepWrite {
    if (!write) return AlreadyWritten{};
    KvRows rows{.latent = x.latent.view, .rope = x.rope.view, .index_k = {}};
    if (layer == 0 && index_) rows.index_k = x.index_k.view;
    return rows;
  };
  Selection selection = AttendAll{};
  if (index_) {
    const TopKSelection s{.slots = r.slots.view, .lens = r.lens.view, .positions = r.positions.view};
    b.select(
        {.layer = 0, .rows = StepRows::kAll, .q = x.index_q.view, .weights = x.weights.view, .write = kv(0), .out = s});
    selection = s;
    r.has_selection = true;
  }
  for (int32_t l = 0; l < kLayers; ++l) {
    const auto i = static_cast<size_t>(l);
    b.attend({.layer = l,
              .rows = StepRows::kAll,
              .q = x.q.view,
              .write = index_ && l == 0 ? StepWrite(AlreadyWritten{}) : kv(l),
              .selection = selection,
              .out = r.out[i].view,
              .lse = r.lse[i].view});
    r.has[i] = true;
    r.sparse[i] = index_ != nullptr;
  }
}

void Sequence::dense_prefill(const Inputs& x, Results& r, int32_t layer, bool by_parts) {
  const AttentionConfig& c = config_;
  const Range prefill{0, num_prefill_};
  KvRows kv{.latent = x.latent.rows(prefill), .rope = x.rope.rows(prefill), .index_k = {}};
  if (layer == 0 && index_) kv.index_k = x.index_k.rows(prefill);
  const ExpandLatent expand = [&](const TensorView& latent, const TensorView& k, const TensorView& v) {
    for (int64_t i = 0; i < latent.shape[0]; ++i)
      for (int32_t h = 0; h < c.num_heads; ++h) {
        for (int32_t d = 0; d < c.qk_nope_head_dim; ++d)
          verify::set(k, verify::get(latent, i, k_map(h, d, c.geometry.latent_dim)), i, h, d);
        for (int32_t d = 0; d < c.v_head_dim; ++d)
          verify::set(v, verify::get(latent, i, v_map(h, d, c.geometry.latent_dim)), i, h, d);
      }
  };
  DensePrefillCall call{.layer = layer,
                        .q = x.q_expanded.view,
                        .k_nope = x.k_nope.view,
                        .k_rope = kv.rope,
                        .v = x.v.view,
                        .write = kv,
                        .expand = expand,
                        .out = r.prefill_out.view,
                        .lse = r.prefill_lse.view};
  if (!by_parts) {
    backend_->dense_prefill(call);
  } else {
    backend_->prefill_new_tokens(call);
    const auto& chunks = backend_->step().prefix_chunks().chunks;
    for (size_t i = 0; i < chunks.size(); ++i) {
      const int64_t n = chunks[i].num_tokens;
      Block latent(dtype_, {n, c.geometry.latent_dim}), rope(dtype_, {n, c.geometry.rope_dim}),
          k(dtype_, {n, c.num_heads, c.qk_nope_head_dim}), v(dtype_, {n, c.num_heads, c.v_head_dim});
      backend_->gather_prefix(layer, static_cast<int64_t>(i), latent.view, rope.view);
      expand(latent.view, k.view, v.view);
      backend_->prefill_prefix({.layer = layer,
                                .chunk = static_cast<int64_t>(i),
                                .q = call.q,
                                .k_nope = k.view,
                                .k_rope = rope.view,
                                .v = v.view,
                                .out = call.out,
                                .lse = call.lse});
    }
  }
  r.has_prefill = num_prefill_ > 0;
}

/// A step in one of the ways that an engine may take it.
void Sequence::run_varied(const Inputs& x, Results& r, bool split_only) {
  AttentionBackend& b = *backend_;
  const auto n = static_cast<int64_t>(rows_.size());
  const bool dsa = index_ != nullptr;
  const bool dense_allowed = !dsa || b.step().max_row_len() <= config_.indexer.topk;
  const bool split = split_only || in_.one_in(2);
  std::vector<std::pair<StepRows, Range>> parts;
  if (split) parts = {{StepRows::kPrefill, {0, num_prefill_}}, {StepRows::kDecode, {num_prefill_, n}}};
  else parts = {{StepRows::kAll, {0, n}}};
  const auto kv = [&](int32_t layer, const Range& rows) {
    KvRows k{.latent = x.latent.rows(rows), .rope = x.rope.rows(rows), .index_k = {}};
    if (layer == 0 && index_) k.index_k = x.index_k.rows(rows);
    return k;
  };
  if (dsa && !(dense_allowed && in_.one_in(3))) {
    for (const auto& [part, rows] : parts) {
      const TopKSelection s{
          .slots = r.slots.rows(rows), .lens = r.lens.rows(rows), .positions = r.positions.rows(rows)};
      const bool first = in_.one_in(2);
      if (first) b.write(0, part, kv(0, rows));
      b.select({.layer = 0,
                .rows = part,
                .q = x.index_q.rows(rows),
                .weights = x.weights.rows(rows),
                .write = first ? StepWrite(AlreadyWritten{}) : StepWrite(kv(0, rows)),
                .out = s});
      for (int32_t l = 0; l < kLayers; ++l) {
        const auto i = static_cast<size_t>(l);
        b.attend({.layer = l,
                  .rows = part,
                  .q = x.q.rows(rows),
                  .write = l == 0 ? StepWrite(AlreadyWritten{}) : StepWrite(kv(l, rows)),
                  .selection = s,
                  .out = r.out[i].rows(rows),
                  .lse = r.lse[i].rows(rows)});
        r.has[i] = r.sparse[i] = true;
      }
    }
    r.has_selection = true;
    return;
  }
  for (int32_t l = 0; l < kLayers; ++l) {
    const auto i = static_cast<size_t>(l);
    const bool expanded = num_prefill_ > 0 && l == 1 && in_.one_in(2);
    if (expanded) {
      dense_prefill(x, r, l, in_.one_in(2));
      const Range prefill{0, num_prefill_}, decode{num_prefill_, n};
      // The absorbed form of the same rows, which are in the caches now.
      for (const auto& [part, rows] : {std::pair{StepRows::kPrefill, prefill}, std::pair{StepRows::kDecode, decode}})
        b.attend({.layer = l,
                  .rows = part,
                  .q = x.q.rows(rows),
                  .write = part == StepRows::kPrefill ? StepWrite(AlreadyWritten{}) : StepWrite(kv(l, rows)),
                  .selection = AttendAll{},
                  .out = r.out[i].rows(rows),
                  .lse = r.lse[i].rows(rows)});
    } else {
      for (const auto& [part, rows] : parts) {
        const bool first = in_.one_in(2);
        if (first) b.write(l, part, kv(l, rows));
        b.attend({.layer = l,
                  .rows = part,
                  .q = x.q.rows(rows),
                  .write = first ? StepWrite(AlreadyWritten{}) : StepWrite(kv(l, rows)),
                  .selection = AttendAll{},
                  .out = r.out[i].rows(rows),
                  .lse = r.lse[i].rows(rows)});
      }
    }
    r.has[i] = true;
  }
}

// ---- oracle -------------------------------------------------------------------------------------------------------

/// Attention over tokens of the bank, each `counts` times.
Sequence::Answer Sequence::attend(const Inputs& x, int64_t row, int32_t h,
                                  const std::array<int32_t, 48>& counts) const {
  const int32_t width = config_.geometry.width(), latent_dim = config_.geometry.latent_dim;
  Answer a{std::vector<double>(static_cast<size_t>(latent_dim), 0.0), -std::numeric_limits<double>::infinity()};
  std::vector<double> q(static_cast<size_t>(width));
  for (int32_t d = 0; d < width; ++d) q[static_cast<size_t>(d)] = x.q.get(row, h, d);
  std::array<double, kBank> score{};
  double top = -std::numeric_limits<double>::infinity();
  for (size_t t = 0; t < kBank; ++t) {
    if (counts[t] == 0) continue;
    const float* k = stored_.data() + t * static_cast<size_t>(width);
    double dot = 0.0;
    for (size_t d = 0; d < q.size(); ++d) dot += q[d] * double{k[d]};
    score[t] = dot * double{config_.softmax_scale};
    top = std::max(top, score[t]);
  }
  if (std::isinf(top)) return a;
  double sum = 0.0;
  for (size_t t = 0; t < kBank; ++t) {
    if (counts[t] == 0) continue;
    const double p = counts[t] * std::exp(score[t] - top);
    sum += p;
    const float* k = stored_.data() + t * static_cast<size_t>(width);
    for (size_t d = 0; d < a.value.size(); ++d) a.value[d] += p * double{k[d]};
  }
  for (double& v : a.value) v /= sum;
  a.lse = top + std::log(sum);
  return a;
}

void Sequence::compare_row(const double* want, double want_lse, const Block& out, const Block& lse, int64_t row,
                           int32_t h, int64_t width, double tolerance, double lse_tolerance, const char* what) const {
  double error = 0.0, norm = 0.0;
  for (int64_t d = 0; d < width; ++d) {
    const double y = out.get(row, h, d);
    error += (y - want[d]) * (y - want[d]);
    norm += want[d] * want[d];
  }
  const double got_lse = lse.get(row, h);
  if (std::isinf(want_lse)) {
    for (int64_t d = 0; d < width; ++d)
      require(out.get(row, h, d) == 0.0f, "{}: row {} sees nothing, and its value {} is {}", what, row, d,
              out.get(row, h, d));
    require(got_lse == want_lse, "{}: row {} sees nothing, and its lse is {}", what, row, got_lse);
    return;
  }
  require(std::sqrt(error / norm) <= tolerance, "{}: row {} head {} is off by {:.3g}, tolerance {:.3g}", what, row, h,
          std::sqrt(error / norm), tolerance);
  require(std::fabs(got_lse - want_lse) <= lse_tolerance,
          "{}: lse of row {} head {} is {}; the oracle has {}, tolerance {:.3g}", what, row, h, got_lse, want_lse,
          lse_tolerance);
}

void Sequence::check_absorbed(const Inputs& x, const Block& out, const Block& lse, const Block* selected,
                              const char* what) const {
  verify::AttentionPrecision precision;
  precision.fp32 = dtype_ == DType::kF32 || format_ == LatentFormat::kF32;
  precision.rounds_inputs = format_ != LatentFormat::kBf16;
  precision.output_bf16 = dtype_ == DType::kBf16;
  precision.width = config_.geometry.width();
  precision.score_deviation = 1.5;
  for (size_t i = 0; i < rows_.size(); ++i) {
    const RowOf& r = rows_[i];
    const auto row = static_cast<int64_t>(i);
    std::array<int32_t, kBank> counts{};
    int64_t keys = r.sees;
    if (selected != nullptr) {
      keys = 0;
      for (int64_t c = 0; c < selected->view.shape[1]; ++c) {
        const int32_t p = *selected->view.ptr<int32_t>(row, c);
        if (p < 0) break;
        ++counts[static_cast<size_t>(r.live->tokens[static_cast<size_t>(p)])];
        ++keys;
      }
    } else {
      for (int32_t p = 0; p < r.sees; ++p) ++counts[static_cast<size_t>(r.live->tokens[static_cast<size_t>(p)])];
    }
    precision.num_keys = static_cast<double>(std::max<int64_t>(keys, 1));
    for (int32_t h = 0; h < config_.num_heads; ++h) {
      const Answer a = attend(x, row, h, counts);
      compare_row(a.value.data(), a.lse, out, lse, row, h, config_.geometry.latent_dim,
                  kTails * verify::attention_tolerance(precision), kTails * verify::lse_tolerance(precision, a.lse),
                  what);
    }
  }
}

void Sequence::check_selection(const Inputs& x, const Results& r) const {
  const int32_t k = config_.indexer.topk, dim = config_.indexer.head_dim, heads = config_.indexer.num_heads;
  for (size_t i = 0; i < rows_.size(); ++i) {
    const RowOf& row = rows_[i];
    const auto t = static_cast<int64_t>(i);
    const int32_t n = std::min(row.sees, k);
    require(*r.lens.view.ptr<int32_t>(t) == n, "row {} lists {} of {}", t, *r.lens.view.ptr<int32_t>(t), n);
    // Equal tokens score equally.
    std::array<double, kBank> score{};
    double bound = 0.0;
    for (int32_t h = 0; h < heads && row.sees > 0; ++h) {
      const double w = x.weights.get(t, h);
      double norm = 0.0;
      for (int32_t d = 0; d < dim; ++d) norm += std::pow(x.index_q.get(t, h, d), 2.0);
      bound += std::fabs(w) * std::sqrt(norm) * std::sqrt(static_cast<double>(dim));
      for (size_t b = 0; b < kBank; ++b) {
        double dot = 0.0;
        for (int32_t d = 0; d < dim; ++d)
          dot += double{x.index_q.get(t, h, d)} * stored_index_[b * static_cast<size_t>(dim) + static_cast<size_t>(d)];
        score[b] += w * std::max(dot, 0.0);
      }
    }
    std::vector<bool> taken(static_cast<size_t>(row.sees), false);
    double lowest = std::numeric_limits<double>::infinity(), highest = -lowest;
    for (int32_t c = 0; c < k; ++c) {
      const int32_t p = *r.positions.view.ptr<int32_t>(t, c), slot = *r.slots.view.ptr<int32_t>(t, c);
      if (c >= n) {
        require(p == -1 && slot == -1, "row {} entry {} behind its list: position {}, slot {}", t, c, p, slot);
        continue;
      }
      require(p < row.sees && p > (c == 0 ? -1 : *r.positions.view.ptr<int32_t>(t, c - 1)),
              "row {} entry {} is position {}", t, c, p);
      const int32_t page = row.live->pages.ids()[static_cast<size_t>(p / config_.page_size)];
      require(slot == page * config_.page_size + p % config_.page_size, "row {} position {} is slot {}", t, p, slot);
      taken[static_cast<size_t>(p)] = true;
      lowest = std::min(lowest, score[static_cast<size_t>(row.live->tokens[static_cast<size_t>(p)])]);
    }
    std::array<bool, kBank> left_out{};
    for (int32_t p = 0; p < row.sees; ++p) {
      const auto token = static_cast<size_t>(row.live->tokens[static_cast<size_t>(p)]);
      if (!taken[static_cast<size_t>(p)]) {
        highest = std::max(highest, score[token]);
        left_out[token] = true;
      } else {
        require(!left_out[token], "row {} takes position {} and leaves out an equal key before it", t, p);
      }
    }
    const double tolerance = kTails * verify::logit_tolerance(dim, heads, bound);
    require(n == row.sees || highest - lowest <= 2.0 * tolerance, "row {} leaves out a score of {} and takes one of {}",
            t, highest, lowest);
  }
}

/// Expanded: the new tokens as the engine computed them, the prefix as gathers give it.
void Sequence::check_prefill(const Inputs& x, const Results& r) const {
  const AttentionConfig& c = config_;
  const int32_t width = c.geometry.width(), latent_dim = c.geometry.latent_dim;
  const StepPlan& plan = backend_->step();
  verify::AttentionPrecision precision;
  precision.fp32 = dtype_ == DType::kF32;
  precision.output_bf16 = dtype_ == DType::kBf16;
  precision.width = c.qk_nope_head_dim + c.geometry.rope_dim;
  precision.score_deviation = 1.5;
  // Each merge rounds the output once more, and its weights are two exponentials.
  const double unit = dtype_ == DType::kBf16 ? 2.0 * verify::kUnitBf16 : 16.0 * verify::kUnitFp32;
  const double merges = static_cast<double>(plan.prefix_chunks().chunks.size()) * unit;
  for (int64_t row = 0; row < num_prefill_; ++row) {
    const RowOf& of = rows_[static_cast<size_t>(row)];
    const int32_t prefix = plan.prefix_lens()[static_cast<size_t>(plan.request_of_row(row))];
    precision.num_keys = of.sees;
    for (int32_t h = 0; h < c.num_heads; ++h) {
      std::vector<double> score(static_cast<size_t>(of.sees)), value(static_cast<size_t>(c.v_head_dim), 0.0);
      double top = -std::numeric_limits<double>::infinity(), sum = 0.0;
      const auto key = [&](int32_t p) {
        return (p < prefix ? gathered_ : raw_).data() +
               static_cast<size_t>(of.live->tokens[static_cast<size_t>(p)]) * static_cast<size_t>(width);
      };
      for (int32_t p = 0; p < of.sees; ++p) {
        const float* t = key(p);
        double dot = 0.0;
        for (int32_t d = 0; d < c.qk_nope_head_dim; ++d)
          dot += double{x.q_expanded.get(row, h, d)} * t[k_map(h, d, latent_dim)];
        for (int32_t d = 0; d < c.geometry.rope_dim; ++d)
          dot += double{x.q_expanded.get(row, h, c.qk_nope_head_dim + d)} * t[latent_dim + d];
        score[static_cast<size_t>(p)] = dot * double{c.softmax_scale};
        top = std::max(top, score[static_cast<size_t>(p)]);
      }
      for (int32_t p = 0; p < of.sees; ++p) {
        const double weight = std::exp(score[static_cast<size_t>(p)] - top);
        sum += weight;
        const float* t = key(p);
        for (int32_t d = 0; d < c.v_head_dim; ++d) value[static_cast<size_t>(d)] += weight * t[v_map(h, d, latent_dim)];
      }
      for (double& v : value) v /= sum;
      const double lse = top + std::log(sum);
      compare_row(value.data(), lse, r.prefill_out, r.prefill_lse, row, h, c.v_head_dim,
                  kTails * (verify::attention_tolerance(precision) + merges),
                  kTails * (verify::lse_tolerance(precision, lse) + merges), "dense prefill");
    }
  }
}

void Sequence::check_results(const Inputs& x, const Results& r, const char* what) {
  if (cases_.results != nullptr) {
    const auto keep = [&](const Block& b) {
      const auto* p = static_cast<const std::byte*>(b.view.data);
      cases_.results->insert(cases_.results->end(), p, p + b.bytes());
    };
    if (r.has_selection) {
      keep(r.positions);
      keep(r.lens);
    }
    for (size_t l = 0; l < kLayers; ++l)
      if (r.has[l]) {
        keep(r.out[l]);
        keep(r.lse[l]);
      }
    if (r.has_prefill) {
      keep(r.prefill_out);
      keep(r.prefill_lse);
    }
  }
  if (r.has_selection) check_selection(x, r);
  for (size_t l = 0; l < kLayers; ++l)
    if (r.has[l]) check_absorbed(x, r.out[l], r.lse[l], r.sparse[l] ? &r.positions : nullptr, what);
  if (r.has_prefill) check_prefill(x, r);
}

/// The first `rows` rows of both.
void Sequence::check_same(const Results& a, const Results& b, int64_t rows, const char* what) {
  const auto compare = [&](const Block& p, const Block& q, const char* name) {
    const size_t bytes = static_cast<size_t>(rows * p.view.stride[0]) * size_of(p.view.dtype);
    require(same_bytes(p, q, bytes), "{}: {} differs", what, name);
  };
  if (a.has_selection && b.has_selection) {
    compare(a.slots, b.slots, "the selection");
    compare(a.positions, b.positions, "the selection");
    compare(a.lens, b.lens, "the selection");
  }
  for (size_t l = 0; l < kLayers; ++l) {
    if (!a.has[l] || !b.has[l] || a.sparse[l] != b.sparse[l]) continue;
    compare(a.out[l], b.out[l], "out");
    compare(a.lse[l], b.lse[l], "lse");
  }
}

/// The caches hold this step's rows at their slots, and everything else is as it was.
void Sequence::check_caches(const Inputs& x) {
  const auto n = static_cast<int64_t>(rows_.size());
  Ints slots;
  for (const RowOf& r : rows_)
    slots.push_back(r.position < 0
                        ? -1
                        : r.live->pages.ids()[static_cast<size_t>(r.position / config_.page_size)] * config_.page_size +
                              r.position % config_.page_size);
  const TensorView slot_view = view(slots.data(), {n});
  for (int32_t l = 0; l < kLayers; ++l) {
    run_once(Context{},
             LatentWrite{.latent = x.latent.view, .rope = x.rope.view, .slots = slot_view, .cache = mirror_->layer(l)},
             {.impl = "ref"});
    const LatentCacheView mine = latent_->layer(l), other = mirror_->layer(l);
    require(std::memcmp(mine.data, other.data, static_cast<size_t>(mine.num_pages * mine.page_stride_bytes)) == 0,
            "the latent cache of layer {} is not what the step's rows make of it", l);
  }
  if (!index_) return;
  run_once(Context{}, IndexKWrite{.k = x.index_k.view, .slots = slot_view, .cache = index_mirror_->layer(0)},
           {.impl = "ref"});
  const IndexCacheView mine = index_->layer(0), other = index_mirror_->layer(0);
  require(std::memcmp(mine.data, other.data, static_cast<size_t>(mine.num_pages * mine.page_stride_bytes)) == 0,
          "the index cache is not what the step's rows make of it");
}

// ---- steps --------------------------------------------------------------------------------------------------------

void Sequence::eager_step() {
  if (in_.one_in(16)) {
    backend_->prepare({});
    require(backend_->step().mode() == StepMode::kIdle, "a step without requests is not idle");
    ++report_.idle;
    return;
  }
  const int32_t q_len = in_.one_in(2) ? static_cast<int32_t>(in_.between(1, 8)) : 1;
  const RowBound bound = in_.pick({RowBound::kCausalFull, RowBound::kCausalFromFirst, RowBound::kUniformBlock});
  std::vector<Entry> batch;
  for (int64_t i = 0, n = in_.between(0, 3); i < n; ++i) {
    Live* l = in_.one_in(2) ? unused(batch) : nullptr;
    if (l == nullptr) l = fresh();
    Entry e{.live = l, .extends = true, .prefix = static_cast<int32_t>(l->tokens.size())};
    const auto rows = in_.one_in(6) ? in_.between(20, 80) : in_.between(0, 8);
    e.len = e.prefix + static_cast<int32_t>(rows);
    if (e.len > 300 || !ensure_pages(*l, e.len, batch)) continue;
    batch.push_back(e);
    write_tokens(*l, e.prefix, e.len);
  }
  const auto num_extends = static_cast<int64_t>(batch.size());
  batch = draw_decodes(in_.between(0, 3), q_len, bound, std::move(batch));
  if (batch.empty()) return;
  Ints seq_lens, prefix_lens, extend_lens;
  for (const Entry& e : batch) {
    if (e.extends) {
      prefix_lens.push_back(e.prefix);
      extend_lens.push_back(e.len - e.prefix);
    }
    // kCausalFromFirst: what the first row sees.
    seq_lens.push_back(!e.extends && e.live != nullptr && bound == RowBound::kCausalFromFirst ? e.len - q_len + 1
                                                                                              : e.len);
  }
  Table table;
  const BatchStep step{.seq_lens = seq_lens,
                       .prefix_lens = prefix_lens,
                       .extend_lens = extend_lens,
                       .q_len = q_len,
                       .decode_bound = bound,
                       .pages = table_of(batch, table)};
  backend_->prepare(step);
  rows_of(batch, q_len, bound);
  const auto n = static_cast<int64_t>(rows_.size());
  const StepPlan& plan = backend_->step();
  require(plan.num_rows() == n && plan.num_extends() == num_extends, "the plan has {} rows, the step {}",
          plan.num_rows(), n);
  const bool mixed = num_extends > 0 && num_extends < static_cast<int64_t>(batch.size());
  ++(mixed ? report_.mixed : num_extends > 0 ? report_.extends : report_.decodes);
  report_.rows += n;
  const Inputs x = make_inputs();
  Results r = make_results();
  run_varied(x, r, mixed && bound == RowBound::kUniformBlock);
  check_results(x, r, "step");
  check_caches(x);
  // Another backend over the same caches, in one call: the same bits.
  if (in_.one_in(4) && !(mixed && bound == RowBound::kUniformBlock)) {
    twin_->prepare(step);
    Results again = make_results();
    run_fixed(*twin_, x, again, false);
    check_same(r, again, n, "the step in one call");
  }
  if (in_.one_in(3)) drafts(batch, q_len, false);
}

void Sequence::capture() {
  Shape s{.num_requests = static_cast<int32_t>(in_.between(1, 5)),
          .q_len = in_.pick({1, 2, 4, 8, 1}),
          .bound = in_.one_in(4) ? RowBound::kUniformBlock : RowBound::kCausalFull};
  for (const Shape& other : captured_)
    if (other.num_requests == s.num_requests && other.q_len == s.q_len) s = other;  // again
  backend_->capture({.num_requests = s.num_requests, .q_len = s.q_len, .decode_bound = s.bound, .max_seq_len = 400});
  // Warm up: every request is padding, and is written nowhere.
  rows_.assign(static_cast<size_t>(s.num_requests * s.q_len), {});
  num_prefill_ = 0;
  const Inputs x = make_inputs();
  Results r = make_results();
  run_fixed(*backend_, x, r, true);
  check_results(x, r, "warm-up");
  check_caches(x);
  captured_.push_back(s);
}

void Sequence::captured_step() {
  if (captured_.empty() || (captured_.size() < 8 && in_.one_in(6))) capture();
  const Shape s = captured_[static_cast<size_t>(rng_.below(static_cast<int64_t>(captured_.size())))];
  const RowBound bound = s.bound == RowBound::kCausalFull && in_.one_in(4) ? RowBound::kCausalFromFirst : s.bound;
  const std::vector<Entry> batch = draw_decodes(in_.between(0, s.num_requests), s.q_len, bound, {});
  Ints seq_lens;
  for (const Entry& e : batch)
    seq_lens.push_back(e.live != nullptr && bound == RowBound::kCausalFromFirst ? e.len - s.q_len + 1 : e.len);
  Table table;
  const BatchStep step{.seq_lens = seq_lens,
                       .prefix_lens = {},
                       .extend_lens = {},
                       .q_len = s.q_len,
                       .decode_bound = bound,
                       .pages = table_of(batch, table)};
  std::vector<Entry> padded = batch;
  padded.resize(static_cast<size_t>(s.num_requests));
  rows_of(padded, s.q_len, bound);
  const auto n = static_cast<int64_t>(rows_.size());
  report_.rows += n;
  ++report_.refreshes;
  const Inputs x = make_inputs();
  Results r = make_results();
  const int64_t before = (cases_.num_news != nullptr ? cases_.num_news() : 0) + memory_.allocations;
  backend_->refresh(step, s.num_requests);
  run_fixed(*backend_, x, r, true);
  const int64_t after = (cases_.num_news != nullptr ? cases_.num_news() : 0) + memory_.allocations;
  // The oracle allocates in its loops, by design.
  require(config_.plan.impl == "ref" || after == before,
          "a refreshed batch of {} requests of {} rows allocates {} times", s.num_requests, s.q_len, after - before);
  check_results(x, r, "refreshed step");
  check_caches(x);
  if (!batch.empty()) {
    twin_->prepare(step);
    Results eager = make_results();
    Inputs mine;  // the twin has the rows of the batch alone
    const Range range{0, static_cast<int64_t>(batch.size()) * s.q_len};
    const auto cut = [&](const Block& from) {
      Block to;
      to.view = from.rows(range);
      return to;
    };
    mine.q = cut(x.q);
    if (index_) {
      mine.index_q = cut(x.index_q);
      mine.weights = cut(x.weights);
    }
    Results few = std::move(eager);
    for (size_t l = 0; l < kLayers; ++l) {
      few.out[l].view = few.out[l].rows(range);
      few.lse[l].view = few.lse[l].rows(range);
    }
    few.slots.view = few.slots.rows(range);
    few.positions.view = few.positions.rows(range);
    few.lens.view = few.lens.rows(range);
    run_fixed(*twin_, mine, few, false);
    check_same(r, few, range.size(), "refreshed against prepared");
  }
  const bool draft_shape = std::any_of(captured_.begin(), captured_.end(), [&](const Shape& o) {
    return o.num_requests == s.num_requests && o.q_len == 1 && o.bound == RowBound::kCausalFull;
  });
  if (draft_shape && in_.one_in(2)) drafts(padded, s.q_len, true);
}

/// The later steps of a draft, from the lengths of the step or from narrowed ones.
void Sequence::drafts(std::vector<Entry> batch, int32_t q_len, bool captured) {
  const StepPlan& plan = backend_->step();
  const size_t n = batch.size();
  Ints start;
  for (const Entry& e : batch) start.push_back(e.len);
  const bool narrow = in_.one_in(2);
  if (narrow) {
    Ints accepted, rows(n), lens(n);
    for (const Entry& e : batch)
      if (!e.extends) accepted.push_back(in_.pick({1, 2, 3, 0, 99}));
    narrow_rows(plan, accepted, rows);
    narrow_seq_lens(plan, accepted, lens);
    int32_t first_row = 0;
    size_t decode = 0;
    for (size_t r = 0; r < n; ++r) {
      Entry& e = batch[r];
      const int32_t count = e.extends ? e.len - e.prefix : q_len;
      const int32_t stand = e.extends ? count : std::clamp(accepted[decode++], 1, q_len);
      const int32_t kept = e.len == 0 ? 0 : std::max(1, e.len - (count - stand));
      require(rows[r] == (count == 0 ? -1 : first_row + stand - 1), "narrow_rows[{}] is {}", r, rows[r]);
      require(lens[r] == kept, "narrow_seq_lens[{}] is {}, not {}", r, lens[r], kept);
      first_row += count;
      if (e.live != nullptr) e.live->tokens.resize(static_cast<size_t>(kept));
      start[r] = kept;
    }
  }
  const auto count = in_.between(1, 3);
  for (int32_t steps = 1; steps <= count; ++steps) {
    std::vector<Entry> next;
    for (size_t r = 0; r < n; ++r) {
      Entry e = batch[r];
      e.extends = false;
      if (start[r] == 0) e.live = nullptr;  // nothing to go on from
      e.prefix = e.live == nullptr ? 0 : start[r] + steps - 1;
      e.len = e.live == nullptr ? 0 : start[r] + steps;
      if (e.live != nullptr && !ensure_pages(*e.live, e.len, batch)) return;
      next.push_back(e);
    }
    for (const Entry& e : next)
      if (e.live != nullptr) write_tokens(*e.live, e.prefix, e.len);
    Table table;
    DraftAdvance advance{.steps = steps, .seq_lens = {}, .pages = table_of(next, table)};
    if (narrow) advance.seq_lens = start;
    rows_of(next, 1, RowBound::kCausalFull);
    const auto rows = static_cast<int64_t>(rows_.size());
    ++report_.advances;
    report_.rows += rows;
    const Inputs x = make_inputs();
    Results r = make_results();
    const int64_t before = (cases_.num_news != nullptr ? cases_.num_news() : 0) + memory_.allocations;
    backend_->advance(advance);
    if (in_.one_in(4)) backend_->advance(advance);  // changes nothing
    run_fixed(*backend_, x, r, true);
    const int64_t after = (cases_.num_news != nullptr ? cases_.num_news() : 0) + memory_.allocations;
    require(!captured || config_.plan.impl == "ref" || after == before, "an advanced captured batch allocates {} times",
            after - before);
    check_results(x, r, "advanced step");
    check_caches(x);
    Ints lens;
    for (const Entry& e : next) lens.push_back(e.len);
    Table same;
    twin_->prepare({.seq_lens = lens, .prefix_lens = {}, .extend_lens = {}, .q_len = 1, .pages = table_of(next, same)});
    Results eager = make_results();
    run_fixed(*twin_, x, eager, false);
    check_same(r, eager, rows, "advanced against prepared");
  }
}

BackendReport Sequence::run() {
  const auto steps = cases_.exact_steps > 0 ? cases_.exact_steps : static_cast<int>(in_.between(1, cases_.most_steps));
  try {
    while (report_.steps < steps) {
      ++report_.steps;
      const bool captured = cases_.persistent ? in_.between(0, 7) != 7 : in_.one_in(3);
      if (captured) captured_step();
      else eager_step();
    }
  } catch (const Failure& e) {
    throw Failure(fmt::format("step {}: {} ({})", report_.steps, e.what(), text_));
  } catch (const Error& e) {
    throw Failure(fmt::format("step {} was refused: {} ({})", report_.steps, e.what(), text_));
  }
  return report_;
}

}  // namespace

BackendReport check_backend(Source& in, const BackendCases& cases) {
  Sequence s(in, cases);
  return s.run();
}

}  // namespace gannet_test
