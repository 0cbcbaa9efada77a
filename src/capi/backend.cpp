// The attention backends.
#include <cstring>

#include "capi/capi.h"

using namespace gannet;
using namespace gannet::capi;

// The backend goes first: on its way it may call hooks and give memory back.
struct gannet_backend {
  std::shared_ptr<ContextState> context;
  Memory memory;
  std::vector<std::shared_ptr<SharedTable>> tables;  // that batches are captured with
  std::unique_ptr<AttentionBackend> backend;
};

namespace {

AttentionBackend& backend_of(const char* function, gannet_backend* b) {
  return *given(function, "backend", b)->backend;
}
const AttentionBackend& backend_of(const char* function, const gannet_backend* b) {
  return *given(function, "backend", b)->backend;
}

AttentionConfig config_of(const char* function, const gannet_backend_config* config) {
  const gannet_backend_config c = read(function, "config", config);
  AttentionConfig o;
  o.arch = enum_of(function, "config.arch", c.arch, AttentionArch::kDsa);
  o.num_heads = c.num_heads;
  o.geometry = {c.latent_dim, c.rope_dim};
  o.qk_nope_head_dim = c.qk_nope_head_dim;
  o.v_head_dim = c.v_head_dim;
  o.q_lora_rank = c.q_lora_rank;
  o.softmax_scale = c.softmax_scale;
  o.logit_soft_cap = c.logit_soft_cap;
  o.indexer = {.num_heads = c.index_num_heads, .head_dim = c.index_head_dim, .topk = c.index_topk};
  o.page_size = c.page_size;
  o.max_context_len = c.max_context_len;
  if (c.prefix_chunk_capacity != 0) o.prefix_chunk_capacity = c.prefix_chunk_capacity;
  o.device = device_of(function, "config", c.device);
  o.plan = plan_options_of(function, c.plan);
  return o;
}

BatchStep step_of(const char* function, const gannet_step* step) {
  const gannet_step c = read(function, "step", step);
  BatchStep s;
  s.seq_lens = span_of(function, "seq_lens", c.seq_lens, c.num_requests);
  s.prefix_lens = span_of(function, "prefix_lens", c.prefix_lens, c.num_extends);
  s.extend_lens = span_of(function, "extend_lens", c.extend_lens, c.num_extends);
  if (c.num_requests > c.num_extends) s.q_len = c.q_len;  // nothing decodes: it may be 0 like the rest
  s.decode_bound = enum_of(function, "decode_bound", c.decode_bound, RowBound::kUniformBlock);
  if (c.num_requests > 0) s.pages = pages_of(function, c.pages);
  return s;
}

CaptureShape shape_of(const char* function, const gannet_capture_shape* shape) {
  const gannet_capture_shape c = read(function, "shape", shape);
  return {.mode = StepMode::kDecode,
          .num_requests = c.num_requests,
          .q_len = c.q_len,
          .decode_bound = enum_of(function, "decode_bound", c.decode_bound, RowBound::kUniformBlock),
          .max_seq_len = c.max_seq_len};
}

StepRows rows_of(const char* function, gannet_step_rows rows) {
  switch (rows) {
    case GANNET_ROWS_ALL: return StepRows::kAll;
    case GANNET_ROWS_PREFILL: return StepRows::kPrefill;
    case GANNET_ROWS_DECODE: return StepRows::kDecode;
    default:
      fail_argument(function, "rows is {}; accepted: {} (all), {} (prefill) or {} (decode)", rows, +GANNET_ROWS_ALL,
                    +GANNET_ROWS_PREFILL, +GANNET_ROWS_DECODE);
  }
}

KvRows kv_of(const char* function, const gannet_kv_rows* kv) {
  const gannet_kv_rows c = read(function, "kv", kv);
  return {.latent = tensor_of(function, "latent", c.latent),
          .rope = tensor_of(function, "rope", c.rope),
          .index_k = tensor_of(function, "index_k", c.index_k)};
}

StepWrite write_of(const char* function, gannet_write_mode mode, const gannet_kv_rows* kv) {
  if (mode != GANNET_WRITE_ROWS && kv != nullptr)
    fail_argument(function, "write is {} and kv is given; accepted: kv with {} (write rows) only", mode,
                  +GANNET_WRITE_ROWS);
  switch (mode) {
    case GANNET_WRITE_NOT_GIVEN: return {};  // the backend says what is wrong with that
    case GANNET_ALREADY_WRITTEN: return AlreadyWritten{};
    case GANNET_WRITE_ROWS: return kv_of(function, kv);
    default:
      fail_argument(function, "write is {}; accepted: {} (already written) or {} (write rows)", mode,
                    +GANNET_ALREADY_WRITTEN, +GANNET_WRITE_ROWS);
  }
}

TopKSelection selection_of(const char* function, const char* name, const gannet_selection* selection) {
  const gannet_selection c = read(function, name, selection);
  return {.slots = tensor_of(function, "selection.slots", c.slots),
          .lens = tensor_of(function, "selection.lens", c.lens),
          .positions = tensor_of(function, "selection.positions", c.positions)};
}

Selection selection_of(const char* function, gannet_selection_mode mode, const gannet_selection* selection) {
  if (mode != GANNET_ATTEND_SELECTION && selection != nullptr)
    fail_argument(function, "attend is {} and selection is given; accepted: a selection with {} only", mode,
                  +GANNET_ATTEND_SELECTION);
  switch (mode) {
    case GANNET_SELECTION_NOT_GIVEN: return {};  // as above
    case GANNET_ATTEND_ALL: return AttendAll{};
    case GANNET_ATTEND_SELECTION: return selection_of(function, "selection", selection);
    default:
      fail_argument(function, "attend is {}; accepted: {} (all) or {} (selection)", mode, +GANNET_ATTEND_ALL,
                    +GANNET_ATTEND_SELECTION);
  }
}

DensePrefillCall dense_prefill_of(const char* function, const gannet_dense_prefill_call* call) {
  const gannet_dense_prefill_call c = read(function, "call", call);
  DensePrefillCall o;
  o.layer = c.layer;
  o.q = tensor_of(function, "q", c.q);
  o.k_nope = tensor_of(function, "k_nope", c.k_nope);
  o.k_rope = tensor_of(function, "k_rope", c.k_rope);
  o.v = tensor_of(function, "v", c.v);
  o.write = write_of(function, c.write, c.kv);
  if (c.expand != nullptr)
    o.expand = [function, expand = c.expand, user = c.expand_user](const TensorView& latent, const TensorView& k_nope,
                                                                   const TensorView& v) {
      const gannet_tensor cl = to_c(latent), ck = to_c(k_nope), cv = to_c(v);
      call_back(function, "expand", [&] { return expand(user, &cl, &ck, &cv); });
    };
  o.out = tensor_of(function, "out", c.out);
  o.lse = tensor_of(function, "lse", c.lse);
  return o;
}

}  // namespace

gannet_status gannet_backend_create(gannet_context* context, const gannet_backend_config* config, const char* name,
                                    const gannet_memory* memory, gannet_backend** out) {
  constexpr const char* kName = "gannet_backend_create";
  return guard(kName, [&] {
    *given(kName, "out", out) = nullptr;
    given(kName, "context", context);
    const AttentionConfig c = config_of(kName, config);
    auto b = std::make_unique<gannet_backend>(
        gannet_backend{context->state, Memory(kName, memory, config->device), {}, nullptr});
    b->backend = make_attention_backend(b->context->context, c, name == nullptr ? "" : name, b->memory.resource());
    b->backend->set_stream(b->context->stream(nullptr));
    *out = b.release();
  });
}

void gannet_backend_free(gannet_backend** backend) { free_handle(backend); }

const char* gannet_backend_name(const gannet_backend* backend) {
  return backend == nullptr ? nullptr : backend->backend->name();
}

gannet_status gannet_backend_capabilities(const gannet_backend* backend, gannet_capabilities* out) {
  constexpr const char* kName = "gannet_backend_capabilities";
  return guard(kName, [&] {
    const AttentionCapabilities& c = backend_of(kName, backend).capabilities();
    uint32_t formats = 0;
    for (const LatentFormat f : c.latent_formats) formats |= uint32_t{1} << static_cast<int>(f);
    const gannet_capabilities all = {sizeof(all),        c.dense_prefill, c.attend_all,
                                     c.attend_sparse,    formats,         static_cast<int32_t>(c.page_sizes.size()),
                                     c.page_sizes.data()};
    write_struct(kName, "out", all, out);
  });
}

gannet_status gannet_backend_implementations(const gannet_backend* backend, gannet_visit_implementation visit,
                                             void* user) {
  constexpr const char* kName = "gannet_backend_implementations";
  return guard(kName, [&] {
    given(kName, "visit", reinterpret_cast<const void*>(visit));
    const std::vector<ImplInfo> known = list_all_implementations();
    for (const auto& [op, impl] : backend_of(kName, backend).implementations())
      for (const ImplInfo& i : known) {
        if (i.op != op || i.name != impl) continue;
        const gannet_implementation info = {
            sizeof(info), op.c_str(), impl.c_str(), static_cast<int32_t>(i.device), i.runs_here, i.batch_invariant};
        visit(user, &info);
      }
  });
}

gannet_status gannet_backend_bind(gannet_backend* backend, const gannet_layer* layers, int32_t num_layers) {
  constexpr const char* kName = "gannet_backend_bind";
  return guard(kName, [&] {
    backend_of(kName, backend).bind(layers_of(kName, layers, num_layers));
    backend->tables.clear();  // with the batches that were captured
  });
}

gannet_status gannet_backend_set_stream(gannet_backend* backend, void* stream) {
  constexpr const char* kName = "gannet_backend_set_stream";
  return guard(kName, [&] { backend_of(kName, backend).set_stream(backend->context->stream(stream)); });
}

gannet_status gannet_backend_set_layer_hooks(gannet_backend* backend, const gannet_layer_hooks* hooks) {
  constexpr const char* kName = "gannet_backend_set_layer_hooks";
  return guard(kName, [&] {
    LayerHooks h;
    if (hooks != nullptr) {
      const gannet_layer_hooks c = read(kName, "hooks", hooks);
      if (c.record != nullptr)
        h.record = [c](int32_t layer, LayerRecord record) {
          call_back("layer hook", fmt::format("record of layer {}", layer),
                    [&] { return c.record(c.user, layer, static_cast<gannet_layer_record>(record)); });
        };
      if (c.wait != nullptr)
        h.wait = [c](int32_t layer) {
          call_back("layer hook", fmt::format("wait for layer {}", layer), [&] { return c.wait(c.user, layer); });
        };
    }
    backend_of(kName, backend).set_layer_hooks(std::move(h));
  });
}

// ---- steps --------------------------------------------------------------------------------------------------------

gannet_status gannet_backend_prepare(gannet_backend* backend, const gannet_step* step) {
  constexpr const char* kName = "gannet_backend_prepare";
  return guard(kName, [&] { backend_of(kName, backend).prepare(step_of(kName, step)); });
}

gannet_status gannet_backend_capture(gannet_backend* backend, const gannet_capture_shape* shape) {
  constexpr const char* kName = "gannet_backend_capture";
  return guard(kName, [&] { backend_of(kName, backend).capture(shape_of(kName, shape)); });
}

gannet_status gannet_backend_capture_shared(gannet_backend* backend, const gannet_capture_shape* shape,
                                            const gannet_shared_page_table* table) {
  constexpr const char* kName = "gannet_backend_capture_shared";
  return guard(kName, [&] {
    AttentionBackend& b = backend_of(kName, backend);
    const std::shared_ptr<SharedTable>& state = given(kName, "table", table)->state;
    auto& kept = backend->tables;  // before the backend points to it
    if (std::find(kept.begin(), kept.end(), state) == kept.end()) kept.push_back(state);
    b.capture(shape_of(kName, shape), state->table);
  });
}

gannet_status gannet_backend_refresh(gannet_backend* backend, const gannet_step* step, int32_t num_requests) {
  constexpr const char* kName = "gannet_backend_refresh";
  return guard(kName, [&] { backend_of(kName, backend).refresh(step_of(kName, step), num_requests); });
}

gannet_status gannet_backend_refresh_shared(gannet_backend* backend, const gannet_shared_step* step) {
  constexpr const char* kName = "gannet_backend_refresh_shared";
  return guard(kName, [&] {
    const gannet_shared_step c = read(kName, "step", step);
    backend_of(kName, backend)
        .refresh({.table = &given(kName, "table", c.table)->state->table,
                  .generation = c.generation,
                  .q_len = c.q_len,
                  .decode_bound = enum_of(kName, "decode_bound", c.decode_bound, RowBound::kUniformBlock),
                  .seq_lens = tensor_of(kName, "seq_lens", c.seq_lens),
                  .steps = c.steps});
  });
}

gannet_status gannet_backend_advance(gannet_backend* backend, const gannet_draft* draft) {
  constexpr const char* kName = "gannet_backend_advance";
  return guard(kName, [&] {
    const gannet_draft c = read(kName, "draft", draft);
    DraftAdvance a;
    a.steps = c.steps;
    a.seq_lens = span_of(kName, "seq_lens", c.seq_lens, c.num_seq_lens);
    if (c.pages != nullptr) a.pages = pages_of(kName, c.pages);
    backend_of(kName, backend).advance(a);
  });
}

gannet_status gannet_backend_narrow(const gannet_backend* backend, const int32_t* accepted, int64_t num_accepted,
                                    int32_t* rows, int32_t* seq_lens, int64_t num_requests) {
  constexpr const char* kName = "gannet_backend_narrow";
  return guard(kName, [&] {
    const StepPlan& step = backend_of(kName, backend).step();
    const std::span<const int32_t> a = span_of(kName, "accepted", accepted, num_accepted);
    if (num_requests < 0) fail_argument(kName, "num_requests is {}; accepted: 0 and more", num_requests);
    const auto n = static_cast<size_t>(num_requests);
    if (rows != nullptr) narrow_rows(step, a, {rows, n});
    if (seq_lens != nullptr) narrow_seq_lens(step, a, {seq_lens, n});
  });
}

gannet_status gannet_backend_step(const gannet_backend* backend, gannet_step_info* out) {
  constexpr const char* kName = "gannet_backend_step";
  return guard(kName, [&] {
    const StepPlan& s = backend_of(kName, backend).step();
    gannet_step_info info{};
    info.mode = static_cast<gannet_step_mode>(s.mode());
    info.q_len = s.q_len();
    info.num_requests = s.num_requests();
    info.num_extends = s.num_extends();
    info.num_rows = s.num_rows();
    info.num_prefill_rows = s.rows(StepRows::kPrefill).size();
    info.num_prefix_chunks = static_cast<int64_t>(s.prefix_chunks().chunks.size());
    info.max_row_len = s.max_row_len();
    info.seq_lens = s.seq_lens().data();
    info.cu_rows = s.cu_rows().data();
    info.positions = s.positions().data();
    info.write_slots = s.write_slots().data();
    info.row_lens = s.row_lens().data();
    info.lens_known = s.lens_known() ? 1 : 0;
    write_struct(kName, "out", info, out);
  });
}

gannet_status gannet_backend_step_tensors(const gannet_backend* backend, gannet_step_tensors* out) {
  constexpr const char* kName = "gannet_backend_step_tensors";
  return guard(kName, [&] {
    const StepTensors t = backend_of(kName, backend).step_tensors();
    const gannet_step_tensors all = {sizeof all, to_c(t.positions), to_c(t.write_slots), to_c(t.row_lens)};
    write_struct(kName, "out", all, out);
  });
}

gannet_status gannet_backend_prefix_chunk(const gannet_backend* backend, int64_t chunk, gannet_prefix_chunk* out) {
  constexpr const char* kName = "gannet_backend_prefix_chunk";
  return guard(kName, [&] {
    const auto& chunks = backend_of(kName, backend).step().prefix_chunks().chunks;
    if (chunk < 0 || static_cast<size_t>(chunk) >= chunks.size())
      fail_argument(kName, "chunk is {}; accepted: below {}, the prefix chunks of the step", chunk, chunks.size());
    const PrefixChunk& c = chunks[static_cast<size_t>(chunk)];
    const gannet_prefix_chunk all = {sizeof(all), c.first_request, c.num_requests, c.begin, c.num_tokens};
    write_struct(kName, "out", all, out);
  });
}

// ---- layers -------------------------------------------------------------------------------------------------------

gannet_status gannet_gather_selection(const gannet_selection* from, const int32_t* rows, int64_t num_rows,
                                      const gannet_selection* to, void* stream) {
  constexpr const char* kName = "gannet_gather_selection";
  return guard(kName, [&] {
    gather_selection(selection_of(kName, "from", from), span_of(kName, "rows", rows, num_rows),
                     selection_of(kName, "to", to), {stream});
  });
}

gannet_status gannet_backend_write(gannet_backend* backend, int32_t layer, gannet_step_rows rows,
                                   const gannet_kv_rows* kv) {
  constexpr const char* kName = "gannet_backend_write";
  return guard(kName, [&] { backend_of(kName, backend).write(layer, rows_of(kName, rows), kv_of(kName, kv)); });
}

gannet_status gannet_backend_select(gannet_backend* backend, const gannet_select_call* call) {
  constexpr const char* kName = "gannet_backend_select";
  return guard(kName, [&] {
    const gannet_select_call c = read(kName, "call", call);
    backend_of(kName, backend)
        .select({.layer = c.layer,
                 .rows = rows_of(kName, c.rows),
                 .q = tensor_of(kName, "q", c.q),
                 .weights = tensor_of(kName, "weights", c.weights),
                 .write = write_of(kName, c.write, c.kv),
                 .out = selection_of(kName, "out", c.out)});
  });
}

gannet_status gannet_backend_attend(gannet_backend* backend, const gannet_attend_call* call) {
  constexpr const char* kName = "gannet_backend_attend";
  return guard(kName, [&] {
    const gannet_attend_call c = read(kName, "call", call);
    backend_of(kName, backend)
        .attend({.layer = c.layer,
                 .rows = rows_of(kName, c.rows),
                 .q = tensor_of(kName, "q", c.q),
                 .write = write_of(kName, c.write, c.kv),
                 .selection = selection_of(kName, c.attend, c.selection),
                 .out = tensor_of(kName, "out", c.out),
                 .lse = tensor_of(kName, "lse", c.lse)});
  });
}

gannet_status gannet_backend_dense_prefill(gannet_backend* backend, const gannet_dense_prefill_call* call) {
  constexpr const char* kName = "gannet_backend_dense_prefill";
  return guard(kName, [&] { backend_of(kName, backend).dense_prefill(dense_prefill_of(kName, call)); });
}

gannet_status gannet_backend_prefill_new_tokens(gannet_backend* backend, const gannet_dense_prefill_call* call) {
  constexpr const char* kName = "gannet_backend_prefill_new_tokens";
  return guard(kName, [&] { backend_of(kName, backend).prefill_new_tokens(dense_prefill_of(kName, call)); });
}

gannet_status gannet_backend_gather_prefix(gannet_backend* backend, int32_t layer, int64_t chunk,
                                           const gannet_tensor* latent, const gannet_tensor* rope) {
  constexpr const char* kName = "gannet_backend_gather_prefix";
  return guard(kName, [&] {
    backend_of(kName, backend)
        .gather_prefix(layer, chunk, tensor_of(kName, "latent", *given(kName, "latent", latent)),
                       tensor_of(kName, "rope", *given(kName, "rope", rope)));
  });
}

gannet_status gannet_backend_prefill_prefix(gannet_backend* backend, const gannet_prefix_pass_call* call) {
  constexpr const char* kName = "gannet_backend_prefill_prefix";
  return guard(kName, [&] {
    const gannet_prefix_pass_call c = read(kName, "call", call);
    backend_of(kName, backend)
        .prefill_prefix({.layer = c.layer,
                         .chunk = c.chunk,
                         .q = tensor_of(kName, "q", c.q),
                         .k_nope = tensor_of(kName, "k_nope", c.k_nope),
                         .k_rope = tensor_of(kName, "k_rope", c.k_rope),
                         .v = tensor_of(kName, "v", c.v),
                         .out = tensor_of(kName, "out", c.out),
                         .lse = tensor_of(kName, "lse", c.lse)});
  });
}
