// The operations and their plans. Each takes its arguments as one tuple in the order of gannet/_ops.py, which gives
// them names, defaults and documentation: one reader serves the call and the plan.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>

#include "context.h"
#include "core/format.h"
#include "gannet/cuda.h"

namespace gannet_python {
using namespace gannet;

PyContext::PyContext(int num_threads) {
  if (num_threads < 0)
    fail_argument("Context", "num_threads is {}; accepted: 0 (as many as the process may run on) and more",
                  num_threads);
  if (num_threads != 1) threads_ = std::make_unique<ThreadPool>(ThreadPoolOptions{.num_threads = num_threads});
  context_.executor = threads_.get();
}

std::span<std::byte> PyContext::scratch(Device device, Stream stream, size_t bytes) {
  if (bytes == 0) return {};
  std::vector<Buffer>& buffers = scratch_[{device.kind, device.index, stream.handle}];
  if (buffers.empty() || buffers.back().size() < bytes) {
    const size_t size = buffers.empty() ? bytes : std::max(bytes, 2 * buffers.back().size());
    if (device.kind == DeviceKind::kCpu) buffers.clear();  // no graph there, and nothing in flight
    buffers.emplace_back(size, device.kind == DeviceKind::kCpu ? host_memory() : cuda_memory(device.index));
  }
  return buffers.back().span();
}

void PyContext::release_scratch() { scratch_.clear(); }

int64_t PyContext::scratch_bytes() const {
  size_t bytes = 0;
  for (const auto& [key, buffers] : scratch_)
    for (const Buffer& b : buffers) bytes += b.size();
  return static_cast<int64_t>(bytes);
}

namespace {

/// The arguments of an operation in order.
class Args {
 public:
  Args(Reader& reader, const nb::tuple& args) : reader_(reader), args_(args) {}

  TensorView in(const char* name) { return reader_.tensor(next(), name); }
  TensorView optional_in(const char* name) { return reader_.optional(next(), name); }
  TensorView out(const char* name) { return reader_.tensor(next(), name, Access::kWrite); }
  TensorView optional_out(const char* name) { return reader_.optional(next(), name, Access::kWrite); }
  LatentCacheView latent_cache() { return cache<LatentCache>("gannet.LatentCache").view; }
  IndexCacheView index_cache() { return cache<IndexCache>("gannet.IndexCache").view; }
  PageTableView pages() { return pages_of(reader_, next()); }
  QueryRows rows() {
    QueryRows r;
    r.seq_lens = in("seq_lens");
    r.q_len = static_cast<int32_t>(integer());
    r.cu_q_lens = optional_in("cu_q_lens");
    r.bound = name(kRowBounds, "bound");
    return r;
  }
  float number() { return nb::cast<float>(next()); }
  int64_t integer() { return nb::cast<int64_t>(next()); }
  bool flag() { return nb::cast<bool>(next()); }
  template <class E, size_t n>
  E name(const Name<E> (&names)[n], const char* argument) {
    return named(reader_.function(), argument, nb::cast<std::string>(next()), names);
  }

 private:
  nb::handle next() {
    if (at_ >= args_.size()) throw nb::type_error("too few arguments");
    return args_[at_++];
  }
  template <class C>
  const C& cache(const char* accepted) {
    const nb::handle h = next();
    if (!nb::isinstance<C>(h))
      throw nb::type_error(fmt::format("[{}] cache is a {}; accepted: a {}", reader_.function(),
                                       nb::cast<std::string>(nb::getattr(h.type(), "__name__")), accepted)
                               .c_str());
    return nb::cast<const C&>(h);
  }

  Reader& reader_;
  const nb::tuple& args_;
  size_t at_ = 0;
};

template <class P>
P read(Args& a);

template <>
LatentWrite read(Args& a) {
  return {.latent = a.in("latent"), .rope = a.in("rope"), .slots = a.in("slots"), .cache = a.latent_cache()};
}
template <>
LatentGather read(Args& a) {
  return {.slots = a.in("slots"), .cache = a.latent_cache(), .latent = a.out("latent"), .rope = a.out("rope")};
}
template <>
IndexKWrite read(Args& a) {
  return {.k = a.in("k"), .slots = a.in("slots"), .cache = a.index_cache(), .hadamard = a.flag()};
}
template <>
IndexKGather read(Args& a) {
  return {.slots = a.in("slots"), .cache = a.index_cache(), .k = a.out("k"), .hadamard = a.flag()};
}
template <>
Rope read(Args& a) {
  return {.x = a.out("x"),
          .positions = a.in("positions"),
          .cos_sin = a.in("cos_sin"),
          .offset = static_cast<int32_t>(a.integer()),
          .pairing = a.name(kRopePairings, "pairing")};
}
template <>
RaggedPrefill read(Args& a) {
  return {.q = a.in("q"),
          .k = a.in("k"),
          .k_rope = a.optional_in("k_rope"),
          .v = a.in("v"),
          .cu_q_lens = a.in("cu_q_lens"),
          .cu_kv_lens = a.in("cu_kv_lens"),
          .out = a.out("out"),
          .lse = a.optional_out("lse"),
          .softmax_scale = a.number(),
          .causal = a.flag()};
}
template <>
MergeState read(Args& a) {
  return {.out_a = a.out("out_a"),
          .lse_a = a.out("lse_a"),
          .out_b = a.in("out_b"),
          .lse_b = a.in("lse_b"),
          .count_a = a.optional_in("count_a"),
          .count_b = a.optional_in("count_b"),
          .base = a.name(kLseBases, "base")};
}
template <>
MlaDecode read(Args& a) {
  return {.q = a.in("q"),
          .cache = a.latent_cache(),
          .pages = a.pages(),
          .rows = a.rows(),
          .attn_sink = a.optional_in("attn_sink"),
          .out = a.out("out"),
          .lse = a.optional_out("lse"),
          .max_logits = a.optional_out("max_logits"),
          .softmax_scale = a.number(),
          .q_scale = a.number()};
}
template <>
IndexLogits read(Args& a) {
  return {.q = a.in("q"),
          .weights = a.in("weights"),
          .cache = a.index_cache(),
          .pages = a.pages(),
          .rows = a.rows(),
          .logits = a.out("logits"),
          .hadamard = a.flag()};
}
template <>
TopK read(Args& a) {
  return {.logits = a.in("logits"), .lens = a.in("lens"), .positions = a.out("positions"), .counts = a.out("counts")};
}
template <>
IndexSelect read(Args& a) {
  return {.q = a.in("q"),
          .weights = a.in("weights"),
          .cache = a.index_cache(),
          .pages = a.pages(),
          .rows = a.rows(),
          .max_seq_len = a.integer(),
          .topk_slots = a.out("topk_slots"),
          .topk_lens = a.out("topk_lens"),
          .topk_positions = a.optional_out("topk_positions"),
          .hadamard = a.flag()};
}
template <>
SparseAttention read(Args& a) {
  return {.q = a.in("q"),
          .cache = a.latent_cache(),
          .topk_slots = a.in("topk_slots"),
          .topk_lens = a.optional_in("topk_lens"),
          .attn_sink = a.optional_in("attn_sink"),
          .out = a.out("out"),
          .lse = a.optional_out("lse"),
          .max_logits = a.optional_out("max_logits"),
          .softmax_scale = a.number(),
          .q_scale = a.number()};
}

std::span<std::byte> span_of(const char* function, const TensorView& w) {
  if (!w.given()) return {};
  if (w.rank != 1 || w.stride[0] != 1)
    fail_argument(function, "workspace is {}; accepted: one dimension, contiguous", describe(w));
  return {static_cast<std::byte*>(w.data), static_cast<size_t>(w.shape[0]) * size_of(w.dtype)};
}

/// The device that the arguments are on, which is where scratch has to be.
template <class P>
Device device_of(const P& p) {
  Device d{};
  P::for_each_view(p, [&](const char*, const TensorView& v) {
    if (v.given() && v.device.kind == DeviceKind::kCuda) d = v.device;
  });
  return d;
}

/// Runs a plan on a CUDA device over scratch of PyTorch's allocator, which goes in the order of its stream and may be
/// captured into a graph.
template <class P>
void run_with_torch_scratch(const OpPlan<P>& plan, Reader& reader, const P& p, Stream s) {
  const nb::object scratch = reader.torch_scratch(plan.workspace_bytes());
  const std::span<std::byte> workspace = span_of(P::kName, reader.tensor(scratch, "workspace"));
  nb::gil_scoped_release release;
  plan.run(p, workspace, s);
}

/// Plans, or finds the plan, and runs. Returns the name of the implementation.
template <class P>
const char* run_now(PyContext& context, const std::string& impl, bool batch_invariant, nb::handle stream,
                    nb::handle workspace, nb::tuple args) {
  Reader reader(P::kName);
  Args a(reader, args);
  const P p = read<P>(a);
  const bool of_torch = workspace.is_none() && names_no_stream(stream) && reader.on_torch_device();
  const TensorView given = reader.optional(workspace, "workspace", Access::kWrite);
  const Stream s = reader.stream(stream);
  const PlanOptions options{impl, batch_invariant};
  std::optional<OpPlan<P>> copy;
  {
    // The GIL goes first: whoever has the mutex never waits for it.
    nb::gil_scoped_release release;
    const std::lock_guard lock(context.mutex());
    const OpPlan<P>& plan = context.plans<P>().plan(context.context(), p, options);
    if (!of_torch || plan.workspace_bytes() == 0) {
      plan.run(p, given.given() ? span_of(P::kName, given) : context.scratch(device_of(p), s, plan.workspace_bytes()),
               s);
      return plan.impl();
    }
    copy.emplace(plan);  // others may push it out meanwhile
  }
  run_with_torch_scratch(*copy, reader, p, s);
  return copy->impl();
}

template <class P>
struct PyPlan {
  nb::object owner;  // of the context
  PyContext* context;
  OpPlan<P> plan;

  void run(nb::handle stream, nb::handle workspace, nb::tuple args) const {
    Reader reader(P::kName);
    Args a(reader, args);
    const P p = read<P>(a);
    const bool of_torch = workspace.is_none() && names_no_stream(stream) && reader.on_torch_device();
    const TensorView given = reader.optional(workspace, "workspace", Access::kWrite);
    const Stream s = reader.stream(stream);
    if (of_torch && plan.workspace_bytes() > 0) return run_with_torch_scratch(plan, reader, p, s);
    nb::gil_scoped_release release;
    const std::lock_guard lock(context->mutex());
    plan.run(p, given.given() ? span_of(P::kName, given) : context->scratch(device_of(p), s, plan.workspace_bytes()),
             s);
  }

  /// Seconds of the host that so many calls of run() take in C++: what calls from Python are measured against.
  double time_calls(int64_t calls, nb::handle workspace, nb::tuple args) const {
    Reader reader(P::kName);
    Args a(reader, args);
    const P p = read<P>(a);
    const std::span<std::byte> scratch = span_of(P::kName, reader.optional(workspace, "workspace", Access::kWrite));
    const Stream s = reader.stream(nb::none());
    nb::gil_scoped_release release;
    const std::lock_guard lock(context->mutex());
    const auto start = std::chrono::steady_clock::now();
    for (int64_t i = 0; i < calls; ++i) plan.run(p, scratch, s);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
};

template <class P>
void bind_op(nb::module_& m) {
  m.def(P::kName, &run_now<P>, nb::arg("context"), nb::arg("impl"), nb::arg("batch_invariant"),
        nb::arg("stream").none(), nb::arg("workspace").none(), nb::arg("args"));
  const std::string name = std::string(P::kName) + "_plan";
  nb::class_<PyPlan<P>>(m, name.c_str())
      .def(
          "__init__",
          [](PyPlan<P>* self, nb::object context, const std::string& impl, bool batch_invariant, nb::tuple args) {
            auto& c = nb::cast<PyContext&>(context);
            Reader reader(P::kName);
            Args a(reader, args);
            const P p = read<P>(a);
            new (self) PyPlan<P>{std::move(context), &c, OpPlan<P>(c.context(), p, PlanOptions{impl, batch_invariant})};
          })
      .def_prop_ro("impl", [](const PyPlan<P>& p) { return p.plan.impl(); })
      .def_prop_ro("workspace_bytes", [](const PyPlan<P>& p) { return p.plan.workspace_bytes(); })
      .def("run", &PyPlan<P>::run, nb::arg("stream").none(), nb::arg("workspace").none(), nb::arg("args"))
      .def("_time_calls", &PyPlan<P>::time_calls, nb::arg("calls"), nb::arg("workspace").none(), nb::arg("args"));
}

}  // namespace

void bind_ops(nb::module_& m) {
  nb::class_<PyContext>(m, "Context",
                        "Threads for work on the CPU, plans kept by shape, and scratch kept by stream.\n\n"
                        "num_threads: 0: as many as the process may run on; 1: the calling thread.\n\n"
                        "Calls from several Python threads take turns; the GIL is released while an operation runs. No "
                        "result depends on\n"
                        "the number of threads. A call without `context` uses gannet.default_context().")
      .def(
          "__init__", [](PyContext* self, int num_threads) { new (self) PyContext(num_threads); },
          nb::arg("num_threads") = 0)
      .def_prop_ro("num_threads", &PyContext::num_threads)
      .def_prop_ro("scratch_bytes", &PyContext::scratch_bytes,
                   "Bytes of scratch that calls without `workspace` have needed so far.")
      .def("release_scratch", &PyContext::release_scratch,
           "Frees all scratch. Only while nothing is in flight, and no captured CUDA graph will be replayed that used "
           "it.");

#define GANNET_BIND_OP(Params, member) bind_op<Params>(m);
  GANNET_FOR_EACH_OP(GANNET_BIND_OP)
#undef GANNET_BIND_OP

  nb::class_<PyStream>(m, "Stream",
                       "A CUDA stream for whatever takes `stream`, and how kernels follow each other on it.\n\n"
                       "stream: an address, torch.cuda.Stream, cupy.cuda.Stream; None: what a call would use without.\n"
                       "overlap: on Hopper and newer a kernel is set up while the one before it ends. The same bits "
                       "either way.")
      .def(
          "__init__",
          [](PyStream* self, nb::object stream, bool overlap) {
            if (nb::isinstance<PyStream>(stream)) throw nb::type_error("stream is a gannet.Stream already");
            (void)stream_of(stream);  // refuses what is none
            new (self) PyStream{std::move(stream), overlap};
          },
          nb::arg("stream") = nb::none(), nb::kw_only(), nb::arg("overlap") = true)
      .def_prop_ro("stream", [](const PyStream& s) { return s.stream; })
      .def_prop_ro("overlap", [](const PyStream& s) { return s.overlap; });

  m.def(
      "hadamard",
      [](PyContext& context, nb::handle from, nb::handle to, nb::handle stream) {
        Reader reader("hadamard");
        const TensorView f = reader.tensor(from, "x"), t = reader.tensor(to, "out", Access::kWrite);
        const Stream s = reader.stream(stream);
        nb::gil_scoped_release release;
        const std::lock_guard lock(context.mutex());
        hadamard(context.context(), f, t, s);
      },
      nb::arg("context"), nb::arg("x"), nb::arg("out"), nb::arg("stream").none());
  m.def("implementations", [] {
    nb::list all;
    for (const ImplInfo& i : list_all_implementations()) {
      nb::dict d;
      d["op"] = i.op;
      d["name"] = i.name;
      d["device"] = i.device == DeviceKind::kCpu ? "cpu" : "cuda";
      d["runs_here"] = i.runs_here;
      d["batch_invariant"] = i.batch_invariant;
      all.append(d);
    }
    return all;
  });
  m.def("cuda_device_count", [] { return cuda_device_count(); });
  m.def("why_no_cuda", [] {
    std::string why;
    cuda_device_count(&why);
    return why;
  });
  m.def("version", [] { return version(); });
}

}  // namespace gannet_python
