// ggml as llama.cpp and ik_llama.cpp build it. Dense decode and sparse decode are its flash attention on the absorbed
// form: q [576] of every head against one head of keys, whose first (dense) or last (sparse) 512 values are the values.
// Sparse decode and selection are of ik_llama.cpp's tree alone. One graph for each copy of a problem; the plan's memory
// is made before.
#include <ggml.h>
#if __has_include(<ggml-cpu.h>)
#include <ggml-cpu.h>
#endif

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <set>

#include "bench/peers.h"
#include "core/format.h"

namespace gannet {
inline namespace v0 {
namespace bench {

namespace {

// What a tree has of them. Values behind the rotated part of a key are a view that starts inside the row, which a row
// of q8_KV, one scale and then the row, does not have; and keys of an indexer are multiplied with fp32 queries, which
// have no product with bf16.
constexpr const char* kDenseTypes[] = {"f16", "bf16", "q8_0", "q8_KV"};
constexpr const char* kSparseTypes[] = {"f16", "bf16", "q8_0"};
constexpr const char* kSelectTypes[] = {"f16", "q8_0"};
constexpr int64_t kMaskRows = 64;              // at least what ggml pads one row to
constexpr size_t kOverhead = size_t{4} << 20;  // tensors and graphs beside their data

ggml_type type_named(const char* name) {
  for (int t = 0; t < GGML_TYPE_COUNT; ++t) {
    const char* other = ggml_type_name(static_cast<ggml_type>(t));
    if (other != nullptr && std::strcmp(name, other) == 0) return static_cast<ggml_type>(t);
  }
  return GGML_TYPE_COUNT;
}

// The number of arguments differs between trees.
template <class Graph>
ggml_cplan plan_of(Graph* graph, int threads) {
  if constexpr (requires { ggml_graph_plan(graph, threads); }) return ggml_graph_plan(graph, threads);
  else return ggml_graph_plan(graph, threads, nullptr);
}

/// Graphs over tensors in a context of their own.
class GgmlCall : public Call {
 public:
  ~GgmlCall() override { ggml_free(context_); }
  GgmlCall(const GgmlCall&) = delete;
  GgmlCall& operator=(const GgmlCall&) = delete;
  const char* impl() const override { return name_.c_str(); }
  void run(int64_t iteration) override { compute(graphs_[static_cast<size_t>(iteration) % graphs_.size()]); }

 protected:
  /// data_bytes: of all tensors of all copies.
  GgmlCall(const Context& context, std::shared_ptr<void> storage, ggml_type type, size_t copies, size_t data_bytes)
      : type_(type),
        name_(fmt::format("ggml {}", ggml_type_name(type))),
        threads_(context.executor->num_workers()),
        storage_(std::move(storage)) {
    context_ = ggml_init({.mem_size = data_bytes + (copies + 1) * kOverhead, .mem_buffer = nullptr, .no_alloc = false});
    if (context_ == nullptr) fail(ErrorCode::kOutOfMemory, "bench", "ggml gave no context");
  }

  ggml_tensor* zeros(ggml_type type, int64_t columns, int64_t rows) {
    ggml_tensor* t = ggml_new_tensor_2d(context_, type, columns, rows);
    std::memset(t->data, 0, ggml_nbytes(t));
    return t;
  }
  /// [rows, columns] of this call's type, row i being what fill(i, float*) writes; the scratch for it is made once.
  template <class Fill>
  ggml_tensor* converted(int64_t columns, int64_t rows, const Fill& fill) {
    if (wide_ == nullptr) wide_ = ggml_new_tensor_3d(context_, GGML_TYPE_F32, columns, rows, 1);
    for (int64_t i = 0; i < rows; ++i) fill(i, static_cast<float*>(wide_->data) + i * columns);
    ggml_tensor* t = ggml_new_tensor_3d(context_, type_, columns, rows, 1);
    ggml_cgraph* convert = ggml_new_graph(context_);
    ggml_build_forward_expand(convert, ggml_cpy(context_, wide_, t));
    compute(convert);
    return t;
  }
  void add_graph(ggml_tensor* out) {
    graphs_.push_back(ggml_new_graph(context_));
    ggml_build_forward_expand(graphs_.back(), out);
    if (out_ == nullptr) out_ = out;
  }
  std::vector<float> first_output() {
    run(0);
    const auto* values = static_cast<const float*>(out_->data);
    return {values, values + ggml_nelements(out_)};
  }

  ggml_type type_;
  ggml_context* context_ = nullptr;
  ggml_tensor* out_ = nullptr;  // of the first graph

 private:
  void compute(ggml_cgraph* graph) {
    ggml_cplan plan = plan_of(graph, threads_);
    if (work_.size() < plan.work_size) work_.resize(plan.work_size);
    plan.work_data = work_.data();
    if (ggml_graph_compute(graph, &plan) != GGML_STATUS_SUCCESS) fail(ErrorCode::kDevice, "bench", "ggml failed");
  }

  std::string name_;
  int threads_;
  std::shared_ptr<void> storage_;
  ggml_tensor* wide_ = nullptr;
  std::vector<ggml_cgraph*> graphs_;
  std::vector<uint8_t> work_;
};

void widen(const Bf16* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = from[i].to_float();
}

size_t row_bytes(ggml_type type, int64_t columns, int64_t rows) {
  return ggml_row_size(type, columns) * static_cast<size_t>(rows);
}

class DenseCall final : public GgmlCall {
 public:
  DenseCall(const Context& context, const std::vector<MlaDecode>& copies, std::shared_ptr<void> storage, ggml_type type)
      : GgmlCall(context, std::move(storage), type, copies.size(), data_bytes(copies, type)) {
    const MlaDecode& p = copies.front();
    const int64_t heads = p.q.shape[1], width = p.q.shape[2], dim = p.out.shape[2];
    const int64_t keys = p.rows.seq_lens.ptr<const int32_t>()[0];
    ggml_tensor* q = ggml_new_tensor_3d(context_, GGML_TYPE_F32, width, 1, heads);
    widen(p.q.ptr<const Bf16>(), heads * width, static_cast<float*>(q->data));
    ggml_tensor* mask = zeros(GGML_TYPE_F16, keys, kMaskRows);
    for (const MlaDecode& copy : copies) {
      const std::vector<uint16_t> rows = contiguous_keys(copy);
      const auto* values = reinterpret_cast<const Bf16*>(rows.data());
      ggml_tensor* k = converted(width, keys, [&](int64_t i, float* row) { widen(values + i * width, width, row); });
      ggml_tensor* v = ggml_view_3d(context_, k, dim, keys, 1, k->nb[1], k->nb[2], 0);
      add_graph(ggml_flash_attn_ext(context_, q, k, v, mask, p.softmax_scale, 0.0f, 0.0f));
    }
  }
  std::vector<float> result() override { return first_output(); }

 private:
  static size_t data_bytes(const std::vector<MlaDecode>& copies, ggml_type type) {
    const MlaDecode& p = copies.front();
    const int64_t heads = p.q.shape[1], width = p.q.shape[2], keys = p.rows.seq_lens.ptr<const int32_t>()[0];
    return copies.size() * (row_bytes(type, width, keys) + row_bytes(GGML_TYPE_F32, p.out.shape[2], heads)) +
           row_bytes(GGML_TYPE_F32, width, heads + keys) + row_bytes(GGML_TYPE_F16, keys, kMaskRows);
  }
};

/// Flash attention over the rows that src[5] lists, which ik_llama.cpp's sparse models hand over so. The rotated part
/// lies first, as it does there: with values that begin where keys begin, its gather mistakes the length of a row
/// (commit 8337e4cd3).
class SparseCall final : public GgmlCall {
 public:
  SparseCall(const Context& context, const std::vector<SparseAttention>& copies, std::shared_ptr<void> storage,
             ggml_type type)
      : GgmlCall(context, std::move(storage), type, copies.size(), data_bytes(copies, type)) {
    const SparseAttention& p = copies.front();
    const int64_t heads = p.q.shape[1], width = p.q.shape[2], dim = p.out.shape[2], rope = width - dim;
    const int64_t slots = num_slots(p);
    const auto rope_first = [&](const Bf16* from, float* to) {
      widen(from + dim, rope, to);
      widen(from, dim, to + rope);
    };
    ggml_tensor* q = ggml_new_tensor_3d(context_, GGML_TYPE_F32, width, 1, heads);
    for (int64_t h = 0; h < heads; ++h) rope_first(p.q.ptr<const Bf16>(0, h), static_cast<float*>(q->data) + h * width);
    ggml_tensor* mask = zeros(GGML_TYPE_F16, slots, kMaskRows);
    std::map<const void*, ggml_tensor*> pools;  // several selections share one
    for (const SparseAttention& copy : copies) {
      ggml_tensor*& k = pools[copy.cache.data];
      if (k == nullptr)
        k = converted(width, slots, [&](int64_t slot, float* row) {
          const std::byte* page = static_cast<const std::byte*>(copy.cache.data) +
                                  slot / copy.cache.page_size * copy.cache.page_stride_bytes;
          rope_first(reinterpret_cast<const Bf16*>(page) + slot % copy.cache.page_size * width, row);
        });
      ggml_tensor* v = ggml_view_3d(context_, k, dim, slots, 1, k->nb[1], k->nb[2], ggml_row_size(type, rope));
      const int64_t chosen = *copy.topk_lens.ptr<const int32_t>(0);
      ggml_tensor* indices = ggml_new_tensor_2d(context_, GGML_TYPE_I32, chosen, 1);
      std::memcpy(indices->data, copy.topk_slots.ptr<const int32_t>(0), ggml_nbytes(indices));
      ggml_tensor* out = ggml_flash_attn_ext(context_, q, k, v, mask, p.softmax_scale, 0.0f, 0.0f);
      out->src[5] = indices;
      add_graph(out);
    }
  }
  std::vector<float> result() override { return first_output(); }

 private:
  static int64_t num_slots(const SparseAttention& p) { return p.cache.num_pages * p.cache.page_size; }
  static size_t data_bytes(const std::vector<SparseAttention>& copies, ggml_type type) {
    const SparseAttention& p = copies.front();
    const int64_t heads = p.q.shape[1], width = p.q.shape[2], slots = num_slots(p);
    std::set<const void*> pools;
    for (const SparseAttention& copy : copies) pools.insert(copy.cache.data);
    return pools.size() * row_bytes(type, width, slots) +
           copies.size() *
               (row_bytes(GGML_TYPE_F32, p.out.shape[2], heads) + row_bytes(GGML_TYPE_I32, p.topk_slots.shape[1], 1)) +
           row_bytes(GGML_TYPE_F32, width, heads + slots) + row_bytes(GGML_TYPE_F16, slots, kMaskRows);
  }
};

/// ik_llama.cpp's indexer and its selection in one operation, over keys in the order of their positions.
class SelectCall final : public GgmlCall {
 public:
  SelectCall(const Context& context, const std::vector<IndexSelect>& copies, std::shared_ptr<void> storage,
             ggml_type type)
      : GgmlCall(context, std::move(storage), type, copies.size(), data_bytes(copies, type)), first_(copies.front()) {
    const IndexSelect& p = first_;
    const int64_t rows = p.q.shape[0], heads = p.q.shape[1], dim = p.q.shape[2], keys = num_keys(p);
    ggml_tensor* q = ggml_new_tensor_3d(context_, GGML_TYPE_F32, dim, heads, rows);
    widen(p.q.ptr<const Bf16>(), rows * heads * dim, static_cast<float*>(q->data));
    ggml_tensor* weights = ggml_new_tensor_2d(context_, GGML_TYPE_F32, heads, rows);
    std::memcpy(weights->data, p.weights.data, ggml_nbytes(weights));
    // Each row sees its own token and what stands before it.
    ggml_tensor* mask = zeros(GGML_TYPE_F32, keys, rows);
    for (int64_t r = 0; r < rows; ++r) {
      auto* values = static_cast<float*>(mask->data) + r * keys;
      std::fill(values + row_bound(p.rows.bound, keys, p.rows.q_len, r), values + keys,
                -std::numeric_limits<float>::infinity());
    }
    for (const IndexSelect& copy : copies) {
      const IndexCacheView& cache = copy.cache;
      ggml_tensor* k = converted(dim, keys, [&](int64_t position, float* row) {
        const int64_t slot = slot_of(copy, position);
        if (cache.format == IndexKFormat::kBf16) {
          widen(reinterpret_cast<const Bf16*>(cache.values(slot)), dim, row);
          return;
        }
        const auto* values = reinterpret_cast<const E4m3*>(cache.values(slot));
        for (int64_t d = 0; d < dim; ++d) row[d] = values[d].to_float() * *cache.scale(slot);
      });
      add_graph(make(context_, k, q, weights, mask, static_cast<int>(p.topk_slots.shape[1])));
    }
  }
  std::vector<float> result() override {
    run(0);
    std::vector<int32_t> slots(static_cast<size_t>(ggml_nelements(out_)));
    for (size_t i = 0; i < slots.size(); ++i)
      slots[i] = static_cast<int32_t>(slot_of(first_, static_cast<const int32_t*>(out_->data)[i]));
    return selection_result(first_, slots);
  }

  // A tree may lack the operation: looked up where the argument's type is known.
  template <class GgmlContext, class Tensor>
  static Tensor* make(GgmlContext* context, Tensor* k, Tensor* q, Tensor* weights, Tensor* mask, int topk) {
    if constexpr (requires { ggml_indexer_topk(context, k, q, weights, mask, GGML_UNARY_OP_RELU, topk); })
      return ggml_indexer_topk(context, k, q, weights, mask, GGML_UNARY_OP_RELU, topk);
    else return nullptr;
  }

 private:
  static int64_t num_keys(const IndexSelect& p) { return *p.rows.seq_lens.ptr<const int32_t>(); }
  static int64_t slot_of(const IndexSelect& p, int64_t position) {
    const int64_t page = p.pages.pages.ptr<const int32_t>(0)[position / p.cache.page_size];
    return page * p.cache.page_size + position % p.cache.page_size;
  }
  static size_t data_bytes(const std::vector<IndexSelect>& copies, ggml_type type) {
    const IndexSelect& p = copies.front();
    const int64_t rows = p.q.shape[0], heads = p.q.shape[1], dim = p.q.shape[2], keys = num_keys(p);
    return copies.size() * (row_bytes(type, dim, keys) + row_bytes(GGML_TYPE_I32, p.topk_slots.shape[1], rows)) +
           row_bytes(GGML_TYPE_F32, dim, rows * heads + keys) + row_bytes(GGML_TYPE_F32, heads + keys, rows);
  }
  IndexSelect first_;
};

/// Whether the tree is one whose attention takes lists and whose indexer selects: they came together.
template <class GgmlContext>
constexpr bool has_sparse() {
  return requires(GgmlContext * c, ggml_tensor * t) { ggml_indexer_topk(c, t, t, t, t, GGML_UNARY_OP_RELU, 1); };
}

template <class TheCall, class Params, size_t kCount>
void add_types(const char* const (&types)[kCount], const std::vector<Params>& copies,
               const std::shared_ptr<void>& storage, std::vector<Peer>& peers) {
  for (const char* name : types) {
    const ggml_type type = type_named(name);
    if (type == GGML_TYPE_COUNT) continue;
    peers.push_back({std::string("ggml ") + name, [copies, storage, type](const Context& context) {
                       return std::make_unique<TheCall>(context, copies, storage, type);
                     }});
  }
}

}  // namespace

void add_ggml_peers(const std::vector<MlaDecode>& copies, const std::shared_ptr<void>& storage,
                    std::vector<Peer>& peers) {
  add_types<DenseCall>(kDenseTypes, copies, storage, peers);
}

void add_ggml_peers(const std::vector<SparseAttention>& copies, const std::shared_ptr<void>& storage,
                    std::vector<Peer>& peers) {
  if constexpr (has_sparse<ggml_context>()) add_types<SparseCall>(kSparseTypes, copies, storage, peers);
}

void add_ggml_peers(const std::vector<IndexSelect>& copies, const std::shared_ptr<void>& storage,
                    std::vector<Peer>& peers) {
  if constexpr (has_sparse<ggml_context>()) add_types<SelectCall>(kSelectTypes, copies, storage, peers);
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet
