// Arguments of the C++ interface as those of the C API, for tests that hand the same problem to both.
#pragma once

#include <algorithm>

#include "capi/capi.h"
#include "gannet/c_api.h"
#include "gannet/gannet.h"

namespace gannet_test {

// What the library itself hands out: a field that it forgot is caught by the tests of what pools give.
inline gannet_device c_of(gannet::Device d) { return {static_cast<gannet_device_kind>(d.kind), d.index}; }
inline gannet_tensor c_of(const gannet::TensorView& v) { return gannet::capi::to_c(v); }
inline gannet_latent_cache c_of(const gannet::LatentCacheView& v) { return gannet::capi::to_c(v); }
inline gannet_index_cache c_of(const gannet::IndexCacheView& v) { return gannet::capi::to_c(v); }

inline gannet_page_table c_of(const gannet::PageTableView& v) {
  return {sizeof(gannet_page_table),
          static_cast<gannet_page_table_form>(v.form),
          c_of(v.pages),
          c_of(v.row_indices),
          c_of(v.indptr),
          c_of(v.indices)};
}

inline gannet_query_rows c_of(const gannet::QueryRows& v) {
  return {c_of(v.seq_lens), c_of(v.cu_q_lens), v.q_len, static_cast<gannet_row_bound>(v.bound)};
}

inline gannet_selection c_of(const gannet::TopKSelection& v) {
  return {sizeof(gannet_selection), c_of(v.slots), c_of(v.lens), c_of(v.positions)};
}

inline gannet_kv_rows c_of(const gannet::KvRows& v) {
  return {sizeof(gannet_kv_rows), c_of(v.latent), c_of(v.rope), c_of(v.index_k)};
}

inline gannet_capture_shape c_of(const gannet::CaptureShape& v) {
  return {sizeof(gannet_capture_shape), v.num_requests, v.q_len, static_cast<gannet_row_bound>(v.decode_bound),
          v.max_seq_len};
}

/// The caches of layers, and what points to them.
struct CLayers {
  explicit CLayers(std::span<const gannet::LayerCaches> caches) : latent(caches.size()), index(caches.size()) {
    for (size_t l = 0; l < caches.size(); ++l) {
      latent[l] = c_of(caches[l].latent);
      if (caches[l].index) index[l] = c_of(*caches[l].index);
      layers.push_back({&latent[l], caches[l].index ? &index[l] : nullptr});
    }
  }
  const gannet_layer* data() const { return layers.data(); }
  int32_t size() const { return static_cast<int32_t>(layers.size()); }

  std::vector<gannet_latent_cache> latent;
  std::vector<gannet_index_cache> index;
  std::vector<gannet_layer> layers;
};

/// Throws what a call of C++ would have thrown.
inline void must(gannet_status status) {
  if (status == GANNET_OK) return;
  if (status == GANNET_INTERNAL) throw std::runtime_error(gannet_last_error());
  throw gannet::Error(static_cast<gannet::ErrorCode>(status), gannet_last_error());
}

/// Arguments of an operation in C, with the structs that they point to.
template <class Params, class CArgs>
struct CArgsOf {
  CArgs args{};
  gannet_latent_cache latent{};
  gannet_index_cache index{};
  gannet_page_table pages{};

  CArgsOf(const Params& p, gannet_op_kind kind) {
    args.op = {sizeof(CArgs), kind};
    if constexpr (requires { args.cache; }) {
      if constexpr (requires { p.cache.geometry; }) {
        latent = c_of(p.cache);
        args.cache = &latent;
      } else {
        index = c_of(p.cache);
        args.cache = &index;
      }
    }
    if constexpr (requires { args.pages; }) {
      pages = c_of(p.pages);
      args.pages = &pages;
      args.rows = c_of(p.rows);
    }
#define GANNET_FIELD(name) \
  if constexpr (requires { args.name; }) args.name = c_of(p.name);
    GANNET_FIELD(latent)
    GANNET_FIELD(rope)
    GANNET_FIELD(slots)
    GANNET_FIELD(x)
    GANNET_FIELD(positions)
    GANNET_FIELD(cos_sin)
    GANNET_FIELD(q)
    GANNET_FIELD(k)
    GANNET_FIELD(k_rope)
    GANNET_FIELD(v)
    GANNET_FIELD(cu_q_lens)
    GANNET_FIELD(cu_kv_lens)
    GANNET_FIELD(attn_sink)
    GANNET_FIELD(max_logits)
    GANNET_FIELD(out)
    GANNET_FIELD(lse)
    GANNET_FIELD(out_a)
    GANNET_FIELD(lse_a)
    GANNET_FIELD(out_b)
    GANNET_FIELD(lse_b)
    GANNET_FIELD(count_a)
    GANNET_FIELD(count_b)
    GANNET_FIELD(weights)
    GANNET_FIELD(logits)
    GANNET_FIELD(lens)
    GANNET_FIELD(counts)
    GANNET_FIELD(topk_slots)
    GANNET_FIELD(topk_lens)
    GANNET_FIELD(topk_positions)
#undef GANNET_FIELD
#define GANNET_OPTION(name) \
  if constexpr (requires { args.name; }) args.name = static_cast<decltype(args.name)>(p.name);
    GANNET_OPTION(softmax_scale)
    GANNET_OPTION(q_scale)
    GANNET_OPTION(causal)
    GANNET_OPTION(offset)
    GANNET_OPTION(pairing)
    GANNET_OPTION(base)
    GANNET_OPTION(max_seq_len)
    GANNET_OPTION(hadamard)
#undef GANNET_OPTION
  }
  CArgsOf(const CArgsOf&) = delete;
  CArgsOf& operator=(const CArgsOf&) = delete;
};

/// A backend of C behind the interface of C++, so that one driver can use either.
class CBackend final : public gannet::AttentionBackend {
 public:
  using gannet::AttentionBackend::capture;
  using gannet::AttentionBackend::refresh;

  CBackend(gannet_context* context, const gannet::AttentionConfig& c) : config_(c) {
    const gannet_plan_options plan = {sizeof plan, c.plan.impl.c_str(), c.plan.batch_invariant};
    gannet_backend_config o{};
    o.struct_size = sizeof o;
    o.arch = static_cast<gannet_arch>(c.arch);
    o.num_heads = c.num_heads;
    o.latent_dim = c.geometry.latent_dim;
    o.rope_dim = c.geometry.rope_dim;
    o.qk_nope_head_dim = c.qk_nope_head_dim;
    o.v_head_dim = c.v_head_dim;
    o.q_lora_rank = c.q_lora_rank;
    o.softmax_scale = c.softmax_scale;
    o.logit_soft_cap = c.logit_soft_cap;
    o.index_num_heads = c.indexer.num_heads;
    o.index_head_dim = c.indexer.head_dim;
    o.index_topk = c.indexer.topk;
    o.page_size = c.page_size;
    o.max_context_len = c.max_context_len;
    o.prefix_chunk_capacity = c.prefix_chunk_capacity;
    o.device = c_of(c.device);
    o.plan = &plan;
    must(gannet_backend_create(context, &o, nullptr, nullptr, &backend_));
    gannet_capabilities all{};
    all.struct_size = sizeof all;
    must(gannet_backend_capabilities(backend_, &all));
    capabilities_.dense_prefill = all.dense_prefill != 0;
    capabilities_.attend_all = all.attend_all != 0;
    capabilities_.attend_sparse = all.attend_sparse != 0;
    capabilities_.page_sizes.assign(all.page_sizes, all.page_sizes + all.num_page_sizes);
    for (int f = 0; f < 32; ++f)
      if ((all.latent_formats >> f & 1) != 0)
        capabilities_.latent_formats.push_back(static_cast<gannet::LatentFormat>(f));
  }
  ~CBackend() override { gannet_backend_free(&backend_); }

  gannet_backend* get() const { return backend_; }
  const char* name() const noexcept override { return gannet_backend_name(backend_); }
  const gannet::AttentionCapabilities& capabilities() const noexcept override { return capabilities_; }
  const gannet::AttentionConfig& config() const noexcept override { return config_; }

  void bind(std::span<const gannet::LayerCaches> layers) override {
    const CLayers l(layers);
    must(gannet_backend_bind(backend_, l.data(), l.size()));
  }

  void set_layer_hooks(gannet::LayerHooks hooks) override {
    // The old ones stay: they may be called once more, for layers that are abandoned.
    gannet::LayerHooks& kept = *hooks_.emplace_back(std::make_unique<gannet::LayerHooks>(std::move(hooks)));
    gannet_layer_hooks h{};
    h.struct_size = sizeof h;
    h.user = &kept;
    if (kept.record)
      h.record = [](void* user, int32_t layer, gannet_layer_record record) {
        return caught(
            [&] { static_cast<gannet::LayerHooks*>(user)->record(layer, static_cast<gannet::LayerRecord>(record)); });
      };
    if (kept.wait)
      h.wait = [](void* user, int32_t layer) {
        return caught([&] { static_cast<gannet::LayerHooks*>(user)->wait(layer); });
      };
    must(gannet_backend_set_layer_hooks(backend_, &h));
  }

  void set_stream(gannet::Stream stream) override { must(gannet_backend_set_stream(backend_, stream.handle)); }
  gannet::StepTensors step_tensors() const override {
    gannet_step_tensors t{};
    t.struct_size = sizeof t;
    must(gannet_backend_step_tensors(backend_, &t));
    return {view_of(t.positions), view_of(t.write_slots), view_of(t.row_lens)};
  }
  void prepare(const gannet::BatchStep& step) override {
    const CStep s(step);
    must(gannet_backend_prepare(backend_, &s.step));
  }
  void capture(const gannet::CaptureShape& shape) override {
    const gannet_capture_shape c = c_of(shape);
    must(gannet_backend_capture(backend_, &c));
  }
  void refresh(const gannet::BatchStep& step, int32_t num_requests) override {
    const CStep s(step);
    must(gannet_backend_refresh(backend_, &s.step, num_requests));
  }
  void advance(const gannet::DraftAdvance& advance) override {
    const gannet_page_table pages = c_of(advance.pages);
    const bool with_pages = advance.pages.pages.given() || advance.pages.indptr.given();
    const gannet_draft c = {sizeof c, advance.steps, advance.seq_lens.data(),
                            static_cast<int64_t>(advance.seq_lens.size()), with_pages ? &pages : nullptr};
    must(gannet_backend_advance(backend_, &c));
  }
  const gannet::StepPlan& step() const override { throw std::logic_error("the C API has gannet_backend_step"); }

  void write(int32_t layer, gannet::StepRows rows, const gannet::KvRows& kv) override {
    const gannet_kv_rows c = c_of(kv);
    must(gannet_backend_write(backend_, layer, rows_of(rows), &c));
  }
  void select(const gannet::SelectCall& call) override {
    const CWrite w(call.write);
    const gannet_selection out = c_of(call.out);
    const gannet_select_call c = {sizeof c,           call.layer, rows_of(call.rows), c_of(call.q),
                                  c_of(call.weights), w.mode,     w.given(),          &out};
    must(gannet_backend_select(backend_, &c));
  }
  void attend(const gannet::AttendCall& call) override {
    const CWrite w(call.write);
    const auto* topk = std::get_if<gannet::TopKSelection>(&call.selection);
    const gannet_selection selection = topk != nullptr ? c_of(*topk) : gannet_selection{};
    const gannet_attend_call c = {sizeof c,
                                  call.layer,
                                  rows_of(call.rows),
                                  c_of(call.q),
                                  w.mode,
                                  static_cast<gannet_selection_mode>(call.selection.index()),
                                  w.given(),
                                  topk != nullptr ? &selection : nullptr,
                                  c_of(call.out),
                                  c_of(call.lse)};
    must(gannet_backend_attend(backend_, &c));
  }
  void dense_prefill(const gannet::DensePrefillCall& call) override {
    prefill(call, [&](const gannet_dense_prefill_call& c) { return gannet_backend_dense_prefill(backend_, &c); });
  }
  void prefill_new_tokens(const gannet::DensePrefillCall& call) override {
    prefill(call, [&](const gannet_dense_prefill_call& c) { return gannet_backend_prefill_new_tokens(backend_, &c); });
  }
  void gather_prefix(int32_t layer, int64_t chunk, const gannet::TensorView& latent,
                     const gannet::TensorView& rope) override {
    const gannet_tensor l = c_of(latent), r = c_of(rope);
    must(gannet_backend_gather_prefix(backend_, layer, chunk, &l, &r));
  }
  void prefill_prefix(const gannet::PrefixPassCall& call) override {
    const gannet_prefix_pass_call c = {sizeof c,     call.layer,        call.chunk,
                                       c_of(call.q), c_of(call.k_nope), c_of(call.k_rope),
                                       c_of(call.v), c_of(call.out),    c_of(call.lse)};
    must(gannet_backend_prefill_prefix(backend_, &c));
  }
  std::vector<std::pair<std::string, std::string>> implementations() const override {
    std::vector<std::pair<std::string, std::string>> all;
    must(gannet_backend_implementations(
        backend_,
        [](void* user, const gannet_implementation* i) {
          static_cast<std::vector<std::pair<std::string, std::string>>*>(user)->emplace_back(i->op, i->name);
        },
        &all));
    return all;
  }

 private:
  struct CStep {
    explicit CStep(const gannet::BatchStep& s)
        : pages(c_of(s.pages)),
          step{sizeof(gannet_step),
               s.seq_lens.data(),
               s.num_requests(),
               s.prefix_lens.data(),
               s.extend_lens.data(),
               s.num_extends(),
               s.q_len,
               static_cast<gannet_row_bound>(s.decode_bound),
               &pages} {}
    CStep(const CStep&) = delete;
    CStep& operator=(const CStep&) = delete;
    gannet_page_table pages;
    gannet_step step;
  };
  struct CWrite {
    explicit CWrite(const gannet::StepWrite& w) : mode(static_cast<gannet_write_mode>(w.index())) {
      if (const auto* rows = std::get_if<gannet::KvRows>(&w)) kv = c_of(*rows);
    }
    const gannet_kv_rows* given() const { return mode == GANNET_WRITE_ROWS ? &kv : nullptr; }
    gannet_write_mode mode;
    gannet_kv_rows kv{};
  };
  static gannet_step_rows rows_of(gannet::StepRows rows) {
    return rows == gannet::StepRows::kAll       ? GANNET_ROWS_ALL
           : rows == gannet::StepRows::kPrefill ? GANNET_ROWS_PREFILL
                                                : GANNET_ROWS_DECODE;
  }
  /// What a callback in C would do with an error: give back a status.
  template <class F>
  static gannet_status caught(F&& f) {
    try {
      f();
      return GANNET_OK;
    } catch (const gannet::Error& e) {
      return static_cast<gannet_status>(e.code());
    } catch (...) {
      return GANNET_INTERNAL;
    }
  }
  template <class Call>
  void prefill(const gannet::DensePrefillCall& call, Call&& f) {
    const CWrite w(call.write);
    gannet_dense_prefill_call c = {sizeof c,          call.layer,        w.mode,         c_of(call.q),
                                   c_of(call.k_nope), c_of(call.k_rope), c_of(call.v),   w.given(),
                                   nullptr,           nullptr,           c_of(call.out), c_of(call.lse)};
    if (call.expand) {
      c.expand_user = const_cast<gannet::ExpandLatent*>(&call.expand);
      c.expand = [](void* user, const gannet_tensor* latent, const gannet_tensor* k_nope, const gannet_tensor* v) {
        return caught(
            [&] { (*static_cast<gannet::ExpandLatent*>(user))(view_of(*latent), view_of(*k_nope), view_of(*v)); });
      };
    }
    must(f(c));
  }
  static gannet::TensorView view_of(const gannet_tensor& t) {
    gannet::TensorView v;
    v.data = t.data;
    v.dtype = static_cast<gannet::DType>(t.dtype);
    v.rank = t.rank;
    std::copy(t.shape, t.shape + 4, v.shape.begin());
    std::copy(t.stride, t.stride + 4, v.stride.begin());
    return v;
  }

  gannet::AttentionConfig config_;
  gannet::AttentionCapabilities capabilities_;
  gannet_backend* backend_ = nullptr;
  std::vector<std::unique_ptr<gannet::LayerHooks>> hooks_;  // all that were ever set
};

}  // namespace gannet_test
