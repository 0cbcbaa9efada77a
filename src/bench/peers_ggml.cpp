// ggml's flash attention on the absorbed form, as llama.cpp and ik_llama.cpp build it: q [576] of every head against
// one head of keys, values being the first 512 of each key. One graph for each copy of the cache; the plan's memory is
// made before.
#include <ggml.h>
#if __has_include(<ggml-cpu.h>)
#include <ggml-cpu.h>
#endif

#include <algorithm>
#include <cstring>

#include "bench/peers.h"
#include "core/format.h"

namespace gannet {
inline namespace v0 {
namespace bench {

namespace {

constexpr const char* kTypes[] = {"f16", "bf16", "q8_0", "q8_KV"};  // what a tree has of them
constexpr int64_t kMaskRows = 64;                                   // at least what ggml pads one row to
constexpr size_t kOverhead = size_t{4} << 20;                       // tensors and graphs beside their data

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

class GgmlCall final : public Call {
 public:
  GgmlCall(const Context& context, const std::vector<MlaDecode>& copies, std::shared_ptr<void> storage, ggml_type type)
      : name_(fmt::format("ggml {}", ggml_type_name(type))),
        threads_(context.executor->num_workers()),
        storage_(std::move(storage)) {
    const MlaDecode& p = copies.front();
    const int64_t heads = p.q.shape[1], width = p.q.shape[2], dim = p.out.shape[2];
    const int64_t keys = p.rows.seq_lens.ptr<const int32_t>()[0];
    const size_t copy_bytes = ggml_row_size(type, width) * static_cast<size_t>(keys);
    const auto shared = static_cast<size_t>(heads * width * 4 + kMaskRows * keys * 2 + keys * width * 4);
    const auto out_bytes = static_cast<size_t>(heads * dim * 4);
    context_ = ggml_init({.mem_size = copies.size() * (copy_bytes + out_bytes + kOverhead) + shared + kOverhead,
                          .mem_buffer = nullptr,
                          .no_alloc = false});
    if (context_ == nullptr) fail(ErrorCode::kOutOfMemory, "bench", "ggml gave no context");
    ggml_tensor* q = ggml_new_tensor_3d(context_, GGML_TYPE_F32, width, 1, heads);
    auto* q_values = static_cast<float*>(q->data);
    for (int64_t i = 0; i < heads * width; ++i) q_values[i] = static_cast<const Bf16*>(p.q.data)[i].to_float();
    ggml_tensor* mask = ggml_new_tensor_2d(context_, GGML_TYPE_F16, keys, kMaskRows);
    std::memset(mask->data, 0, ggml_nbytes(mask));
    ggml_tensor* wide = ggml_new_tensor_3d(context_, GGML_TYPE_F32, width, keys, 1);
    for (const MlaDecode& copy : copies) {
      const std::vector<uint16_t> rows = contiguous_keys(copy);
      const auto* values = reinterpret_cast<const Bf16*>(rows.data());
      for (int64_t i = 0; i < keys * width; ++i) static_cast<float*>(wide->data)[i] = values[i].to_float();
      ggml_tensor* k = ggml_new_tensor_3d(context_, type, width, keys, 1);
      ggml_cgraph* convert = ggml_new_graph(context_);
      ggml_build_forward_expand(convert, ggml_cpy(context_, wide, k));
      compute(convert);
      ggml_tensor* v = ggml_view_3d(context_, k, dim, keys, 1, k->nb[1], k->nb[2], 0);
      ggml_tensor* out = ggml_flash_attn_ext(context_, q, k, v, mask, p.softmax_scale, 0.0f, 0.0f);
      graphs_.push_back(ggml_new_graph(context_));
      ggml_build_forward_expand(graphs_.back(), out);
      if (out_ == nullptr) out_ = out;
    }
  }
  ~GgmlCall() override { ggml_free(context_); }

  const char* impl() const override { return name_.c_str(); }
  void run(int64_t iteration) override { compute(graphs_[static_cast<size_t>(iteration) % graphs_.size()]); }
  std::vector<float> result() override {
    run(0);
    const auto* values = static_cast<const float*>(out_->data);
    return {values, values + ggml_nelements(out_)};
  }

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
  ggml_context* context_ = nullptr;
  ggml_tensor* out_ = nullptr;
  std::vector<ggml_cgraph*> graphs_;
  std::vector<uint8_t> work_;
};

}  // namespace

void add_ggml_peers(const std::vector<MlaDecode>& copies, const std::shared_ptr<void>& storage,
                    std::vector<Peer>& peers) {
  for (const char* name : kTypes) {
    const ggml_type type = type_named(name);
    if (type == GGML_TYPE_COUNT) continue;
    peers.push_back({std::string("ggml ") + name, [copies, storage, type](const Context& context) {
                       return std::make_unique<GgmlCall>(context, copies, storage, type);
                     }});
  }
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet
