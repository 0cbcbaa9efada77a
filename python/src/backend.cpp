// The attention backends.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "context.h"
#include "core/format.h"
#include "gannet/cuda.h"

namespace gannet_python {
using namespace gannet;

namespace {

struct PyBackend {
  nb::object context_owner;
  PyContext* context = nullptr;
  std::unique_ptr<AttentionBackend> backend;
  nb::object caches;               // what bind was given
  std::vector<nb::object> tables;  // that batches are captured with
  nb::object record, wait;         // hooks
  nb::object stream_owner;

  ~PyBackend() { backend.reset(); }  // first, while its hooks are there: it abandons the layers of its step
};

std::vector<int32_t> ints(Reader& reader, nb::handle h, const char* name) { return reader.ints(h, name); }

StepWrite write_of(Reader& reader, nb::handle latent, nb::handle rope, nb::handle index_k, bool written) {
  if (written) return AlreadyWritten{};
  if (latent.is_none()) return std::monostate{};
  return KvRows{reader.tensor(latent, "latent"), reader.tensor(rope, "rope"), reader.optional(index_k, "index_k")};
}

TopKSelection selection_of(Reader& reader, nb::handle slots, nb::handle lens, nb::handle positions, Access access) {
  return {reader.tensor(slots, "slots", access), reader.tensor(lens, "lens", access),
          reader.optional(positions, "positions", access)};
}

/// A call of the backend: without the GIL, and alone on the context's threads.
template <class F>
void call(PyBackend& b, F&& f) {
  nb::gil_scoped_release release;
  const std::lock_guard lock(b.context->mutex());
  f(*b.backend);
}

/// Adds a method all of whose arguments may be None: what None means is for the method to say.
template <class Class, class Return, class Self, class... A>
void method(Class& c, const char* name, Return (*f)(Self, A...)) {
  [&]<size_t... i>(std::index_sequence<i...>) { c.def(name, f, ((void)i, nb::arg().none())...); }
  (std::index_sequence_for<A...>{});
}

struct Step {
  std::vector<int32_t> seq_lens, prefix_lens, extend_lens;
  BatchStep step;
};

/// The arrays stay in `s` while the backend reads them.
void step_of(Reader& reader, Step& s, nb::handle seq_lens, nb::handle pages, nb::handle prefix_lens,
             nb::handle extend_lens, int32_t q_len, const std::string& bound) {
  s.seq_lens = ints(reader, seq_lens, "seq_lens");
  s.prefix_lens = ints(reader, prefix_lens, "prefix_lens");
  s.extend_lens = ints(reader, extend_lens, "extend_lens");
  s.step.seq_lens = s.seq_lens;
  s.step.prefix_lens = s.prefix_lens;
  s.step.extend_lens = s.extend_lens;
  s.step.q_len = q_len;
  s.step.decode_bound = named(reader.function(), "decode_bound", bound, kRowBounds);
  if (!pages.is_none()) s.step.pages = pages_of(reader, pages);
}

std::vector<int32_t> copy(std::span<const int32_t> s) { return {s.begin(), s.end()}; }

}  // namespace

void bind_backend(nb::module_& m) {
  nb::class_<PyBackend> c(
      m, "Backend",
      "An attention backend: `mla` (dense) or `dsa` (sparse, with an indexer). gannet.Backend has the documentation.");
  c.def("__init__", [](PyBackend* self, nb::object context, const std::string& name, const std::string& arch,
                       int32_t num_heads, int32_t latent_dim, int32_t rope_dim, int32_t qk_nope_head_dim,
                       int32_t v_head_dim, int32_t q_lora_rank, float softmax_scale, int32_t index_num_heads,
                       int32_t index_head_dim, int32_t index_topk, int32_t page_size, int64_t max_context_len,
                       int64_t prefix_chunk_capacity, const std::string& impl, bool batch_invariant,
                       nb::handle device) {
    constexpr const char* kName = "Backend";
    constexpr Name<AttentionArch> kArchs[] = {{"mla", AttentionArch::kMla}, {"dsa", AttentionArch::kDsa}};
    auto& c = nb::cast<PyContext&>(context);
    AttentionConfig config;
    config.arch = named(kName, "arch", arch, kArchs);
    config.num_heads = num_heads;
    config.geometry = {latent_dim, rope_dim};
    config.qk_nope_head_dim = qk_nope_head_dim;
    config.v_head_dim = v_head_dim;
    config.q_lora_rank = q_lora_rank;
    config.softmax_scale = softmax_scale;
    config.indexer = {.num_heads = index_num_heads, .head_dim = index_head_dim, .topk = index_topk};
    config.page_size = page_size;
    config.max_context_len = max_context_len;
    config.prefix_chunk_capacity = prefix_chunk_capacity;
    config.plan = {impl, batch_invariant};
    config.device = device_of(kName, device);
    MemoryResource& memory = config.device.kind == DeviceKind::kCpu ? host_memory() : cuda_memory(config.device.index);
    new (self) PyBackend{
        std::move(context), &c, make_attention_backend(c.context(), config, name, memory), {}, {}, {}, {}, {}};
  });
  c.def_prop_ro("name", [](const PyBackend& b) { return b.backend->name(); });
  method(
      c, "bind", +[](PyBackend& b, nb::list latent, nb::list index) {
        std::vector<LayerCaches> layers;
        for (size_t i = 0; i < latent.size(); ++i) {
          LayerCaches l{nb::cast<LatentCache&>(latent[i]).view, {}};
          if (i < index.size() && !index[i].is_none()) l.index = nb::cast<IndexCache&>(index[i]).view;
          layers.push_back(l);
        }
        b.backend->bind(layers);
        b.caches = nb::make_tuple(latent, index);
        b.tables.clear();
      });
  method(
      c, "set_stream", +[](PyBackend& b, nb::object stream) {
        b.backend->set_stream(stream_of(stream));
        b.stream_owner = std::move(stream);
      });
  method(
      c, "set_layer_hooks", +[](PyBackend& b, nb::object record, nb::object wait) {
        LayerHooks hooks;
        PyBackend* self = &b;
        if (!record.is_none())
          hooks.record = [self](int32_t layer, LayerRecord r) {
            const nb::gil_scoped_acquire acquire;
            self->record(layer, r == LayerRecord::kWritten ? "written" : "abandoned");
          };
        if (!wait.is_none())
          hooks.wait = [self](int32_t layer) {
            const nb::gil_scoped_acquire acquire;
            self->wait(layer);
          };
        b.backend->set_layer_hooks({});
        b.record = std::move(record);
        b.wait = std::move(wait);
        b.backend->set_layer_hooks(std::move(hooks));
      });
  method(
      c, "prepare",
      +[](PyBackend& b, nb::handle seq_lens, nb::handle pages, nb::handle prefix_lens, nb::handle extend_lens,
          int32_t q_len, const std::string& bound) {
        Reader reader("prepare");
        Step s;
        step_of(reader, s, seq_lens, pages, prefix_lens, extend_lens, q_len, bound);
        call(b, [&](AttentionBackend& a) { a.prepare(s.step); });
      });
  method(
      c, "capture",
      +[](PyBackend& b, int32_t num_requests, int32_t q_len, const std::string& bound, int64_t max_seq_len,
          nb::object table) {
        const CaptureShape shape{.num_requests = num_requests,
                                 .q_len = q_len,
                                 .decode_bound = named("capture", "decode_bound", bound, kRowBounds),
                                 .max_seq_len = max_seq_len};
        if (table.is_none()) return call(b, [&](AttentionBackend& a) { a.capture(shape); });
        const auto& shared = nb::cast<const SharedPageTable&>(table);
        b.tables.push_back(std::move(table));  // before the backend points to it
        call(b, [&](AttentionBackend& a) { a.capture(shape, shared); });
      });
  method(
      c, "refresh",
      +[](PyBackend& b, int32_t num_requests, nb::handle seq_lens, nb::handle pages, int32_t q_len,
          const std::string& bound) {
        Reader reader("refresh");
        Step s;
        step_of(reader, s, seq_lens, pages, nb::none(), nb::none(), q_len, bound);
        call(b, [&](AttentionBackend& a) { a.refresh(s.step, num_requests); });
      });
  method(
      c, "refresh_shared",
      +[](PyBackend& b, const SharedPageTable& table, uint64_t generation, int32_t q_len, const std::string& bound,
          nb::handle seq_lens, int32_t steps) {
        Reader reader("refresh_shared");
        const SharedStep step{.table = &table,
                              .generation = generation,
                              .q_len = q_len,
                              .decode_bound = named("refresh_shared", "decode_bound", bound, kRowBounds),
                              .seq_lens = reader.optional(seq_lens, "seq_lens"),
                              .steps = steps};
        call(b, [&](AttentionBackend& a) { a.refresh(step); });
      });
  method(
      c, "advance", +[](PyBackend& b, int32_t steps, nb::handle seq_lens, nb::handle pages) {
        Reader reader("advance");
        const std::vector<int32_t> lens = ints(reader, seq_lens, "seq_lens");
        DraftAdvance advance{.steps = steps, .seq_lens = lens};
        if (!pages.is_none()) advance.pages = pages_of(reader, pages);
        call(b, [&](AttentionBackend& a) { a.advance(advance); });
      });
  method(
      c, "narrow", +[](PyBackend& b, nb::handle accepted) {
        Reader reader("narrow");
        const std::vector<int32_t> a = ints(reader, accepted, "accepted");
        const StepPlan& step = b.backend->step();
        std::vector<int32_t> rows(static_cast<size_t>(step.num_requests())), lens(rows.size());
        narrow_rows(step, a, rows);
        narrow_seq_lens(step, a, lens);
        return nb::make_tuple(rows, lens);
      });
  method(
      c, "step", +[](const PyBackend& b) {
        const StepPlan& s = b.backend->step();
        nb::dict d;
        d["mode"] = to_string(s.mode());
        d["q_len"] = s.q_len();
        d["num_requests"] = s.num_requests();
        d["num_extends"] = s.num_extends();
        d["num_rows"] = s.num_rows();
        d["num_prefill_rows"] = s.rows(StepRows::kPrefill).size();
        d["max_row_len"] = s.max_row_len();
        d["lens_known"] = s.lens_known();
        d["seq_lens"] = copy(s.seq_lens());
        d["cu_rows"] = copy(s.cu_rows());
        nb::list chunks;
        for (const PrefixChunk& c : s.prefix_chunks().chunks) chunks.append(c.num_tokens);
        d["prefix_chunk_tokens"] = chunks;
        return d;
      });
  method(
      c, "step_tensors", +[](nb::handle self) {
        const StepTensors t = nb::cast<PyBackend&>(self).backend->step_tensors();
        return nb::make_tuple(to_python(t.positions, self), to_python(t.write_slots, self),
                              to_python(t.row_lens, self));
      });
  method(
      c, "write",
      +[](PyBackend& b, int32_t layer, const std::string& rows, nb::handle latent, nb::handle rope,
          nb::handle index_k) {
        Reader reader("write");
        const KvRows kv{reader.tensor(latent, "latent"), reader.tensor(rope, "rope"),
                        reader.optional(index_k, "index_k")};
        const StepRows part = named("write", "rows", rows, kStepRows);
        call(b, [&](AttentionBackend& a) { a.write(layer, part, kv); });
      });
  method(
      c, "select",
      +[](PyBackend& b, int32_t layer, const std::string& rows, nb::handle q, nb::handle weights, nb::handle latent,
          nb::handle rope, nb::handle index_k, bool written, nb::handle slots, nb::handle lens, nb::handle positions) {
        Reader reader("select");
        const SelectCall c{.layer = layer,
                           .rows = named("select", "rows", rows, kStepRows),
                           .q = reader.tensor(q, "q"),
                           .weights = reader.tensor(weights, "weights"),
                           .write = write_of(reader, latent, rope, index_k, written),
                           .out = selection_of(reader, slots, lens, positions, Access::kWrite)};
        call(b, [&](AttentionBackend& a) { a.select(c); });
      });
  method(
      c, "attend",
      +[](PyBackend& b, int32_t layer, const std::string& rows, nb::handle q, nb::handle latent, nb::handle rope,
          nb::handle index_k, bool written, bool all, nb::handle slots, nb::handle lens, nb::handle out,
          nb::handle lse) {
        Reader reader("attend");
        AttendCall c{.layer = layer,
                     .rows = named("attend", "rows", rows, kStepRows),
                     .q = reader.tensor(q, "q"),
                     .write = write_of(reader, latent, rope, index_k, written),
                     .selection = {},
                     .out = reader.tensor(out, "out", Access::kWrite),
                     .lse = reader.optional(lse, "lse", Access::kWrite)};
        if (all) c.selection = AttendAll{};
        else if (!slots.is_none()) c.selection = selection_of(reader, slots, lens, nb::none(), Access::kRead);
        call(b, [&](AttentionBackend& a) { a.attend(c); });
      });
  method(
      c, "prefill_new_tokens",
      +[](PyBackend& b, int32_t layer, nb::handle q, nb::handle k_nope, nb::handle k_rope, nb::handle v,
          nb::handle latent, nb::handle rope, nb::handle index_k, bool written, nb::handle out, nb::handle lse) {
        Reader reader("prefill_new_tokens");
        const DensePrefillCall c{.layer = layer,
                                 .q = reader.tensor(q, "q"),
                                 .k_nope = reader.tensor(k_nope, "k_nope"),
                                 .k_rope = reader.tensor(k_rope, "k_rope"),
                                 .v = reader.tensor(v, "v"),
                                 .write = write_of(reader, latent, rope, index_k, written),
                                 .expand = {},
                                 .out = reader.tensor(out, "out", Access::kWrite),
                                 .lse = reader.tensor(lse, "lse", Access::kWrite)};
        call(b, [&](AttentionBackend& a) { a.prefill_new_tokens(c); });
      });
  method(
      c, "gather_prefix", +[](PyBackend& b, int32_t layer, int64_t chunk, nb::handle latent, nb::handle rope) {
        Reader reader("gather_prefix");
        const TensorView l = reader.tensor(latent, "latent", Access::kWrite),
                         r = reader.tensor(rope, "rope", Access::kWrite);
        call(b, [&](AttentionBackend& a) { a.gather_prefix(layer, chunk, l, r); });
      });
  method(
      c, "prefill_prefix",
      +[](PyBackend& b, int32_t layer, int64_t chunk, nb::handle q, nb::handle k_nope, nb::handle k_rope, nb::handle v,
          nb::handle out, nb::handle lse) {
        Reader reader("prefill_prefix");
        const PrefixPassCall c{.layer = layer,
                               .chunk = chunk,
                               .q = reader.tensor(q, "q"),
                               .k_nope = reader.tensor(k_nope, "k_nope"),
                               .k_rope = reader.tensor(k_rope, "k_rope"),
                               .v = reader.tensor(v, "v"),
                               .out = reader.tensor(out, "out", Access::kWrite),
                               .lse = reader.tensor(lse, "lse", Access::kWrite)};
        call(b, [&](AttentionBackend& a) { a.prefill_prefix(c); });
      });
  method(
      c, "implementations", +[](const PyBackend& b) {
        nb::dict d;
        for (const auto& [op, impl] : b.backend->implementations()) d[op.c_str()] = impl;
        return d;
      });
  method(
      c, "capabilities", +[](const PyBackend& b) {
        const AttentionCapabilities& c = b.backend->capabilities();
        nb::dict d;
        d["dense_prefill"] = c.dense_prefill;
        d["attend_all"] = c.attend_all;
        d["attend_sparse"] = c.attend_sparse;
        d["page_sizes"] = c.page_sizes;
        nb::list formats;
        for (const LatentFormat f : c.latent_formats) formats.append(name_of(f, kLatentFormats));
        d["latent_formats"] = formats;
        return d;
      });
}

}  // namespace gannet_python
