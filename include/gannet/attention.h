// The attention backends: what an engine calls each step and each layer.
//
//   auto backend = gannet::make_attention_backend(context, config);        // by architecture; or by name
//   backend->bind(layers);                                                 // the caches of every layer
//   backend->prepare(step);                                                // once a step: every check, every plan
//   for each layer:
//     backend->select({.layer = l, .rows = StepRows::kAll, .q = iq, .weights = w,           // layers with an indexer
//                      .write = KvRows{c, k_pe, ik}, .out = buffer.view(rows)});
//     backend->attend({.layer = l, .rows = StepRows::kAll, .q = q, .write = AlreadyWritten{},
//                      .selection = buffer.view(rows), .out = o});
//
// Rows of a call are named (StepRows): `rows` of them, in the order of the step, are what q, out and the others hold.
// A mixed step may be attended in one call (kAll; not with kUniformBlock decode rows) or in two; the results are the
// same bit for bit.
//
// On a CUDA device the caches, every tensor of a call and the memory resource are the device's, while steps and their
// page tables stay in host memory. Calls enqueue on the stream (set_stream) and return; nothing waits for the device,
// but where the host is four steps ahead of it. After the first run of a shape nothing is allocated. A captured batch
// (capture) can be captured into a CUDA graph: run its layers once without, for the plans and the workspace, then once
// under stream capture; for each step refresh, then launch the graph.
//
// Errors: Error with the name of the call. kInvalidArgument for a call before bind or prepare, after an idle step, for
// a layer that is not bound, for shapes unlike the config; kUnsupported for what the backend does not do. Thread
// safety: a backend is used by one thread at a time. Several live side by side.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "gannet/context.h"
#include "gannet/kv_cache.h"
#include "gannet/layer_caches.h"
#include "gannet/memory.h"
#include "gannet/op_plan.h"
#include "gannet/shared_page_table.h"
#include "gannet/step.h"
#include "gannet/tensor.h"

namespace gannet {
inline namespace v0 {

// ---- configuration ------------------------------------------------------------------------------------------------

enum class AttentionArch : uint8_t { kMla, kDsa };

GANNET_API const char* to_string(AttentionArch a) noexcept;

struct IndexerConfig {
  int32_t num_heads = 0;   ///< Hi
  int32_t head_dim = 128;  ///< Di
  int32_t topk = 0;        ///< index_topk: tokens that a sparse layer attends to, any number from 1
};

struct AttentionConfig {
  AttentionArch arch = AttentionArch::kMla;
  int32_t num_heads = 0;         ///< query heads of this process, H
  RowGeometry geometry{};        ///< R + P
  int32_t qk_nope_head_dim = 0;  ///< N; dense prefill only
  int32_t v_head_dim = 0;        ///< V; dense prefill only
  int32_t q_lora_rank = 0;       ///< 0: absent, which DSA refuses (its indexer reads the q latent)
  float softmax_scale = 0.0f;    ///< always given: (N+P)^-0.5, times what YaRN adds; never guessed
  float logit_soft_cap = 0.0f;   ///< any other value is refused
  IndexerConfig indexer{};       ///< DSA only
  int32_t page_size = 64;
  int64_t max_context_len = 0;
  int64_t prefix_chunk_capacity = 32768;  ///< tokens of a prefix that are gathered and expanded at a time
  PlanOptions plan{};                     ///< the implementation to force, for every operation
  Device device{};
};

/// What a backend can do; ask this, not its name.
struct AttentionCapabilities {
  bool dense_prefill = false;  ///< dense_prefill and its parts
  bool attend_all = false;     ///< attend over every visible key, whatever the length
  bool attend_sparse = false;  ///< select, and attend over a TopKSelection
  std::vector<int32_t> page_sizes;
  std::vector<LatentFormat> latent_formats;  ///< that bind takes
};

// ---- arguments ----------------------------------------------------------------------------------------------------

/// This step's rows of one layer, for the rows of the call; each written to the step's slots.
struct KvRows {
  TensorView latent;        ///< fp32 or bf16 [rows, R], the normalised kv_a
  TensorView rope;          ///< same dtype [rows, P], the rotated k_pe
  TensorView index_k = {};  ///< fp32 or bf16 [rows, Di]; only for a layer with an index cache
};

/// The rows are in the caches: by write(), by an earlier call on this layer, or by the engine's own hand.
struct AlreadyWritten {};

/// Says who writes this step's rows; there is no default.
using StepWrite = std::variant<std::monostate, AlreadyWritten, KvRows>;

/// Every key that a row sees. `dsa` takes it only where no row of the step sees more than index_topk keys.
struct AttendAll {};

/// The keys that an indexer chose: a list of slots for each row, packed, -1 behind it.
struct TopKSelection {
  TensorView slots;           ///< int32 [rows, index_topk]
  TensorView lens;            ///< int32 [rows]
  TensorView positions = {};  ///< optional int32 [rows, index_topk]: the same as positions in the request
};

/// What a row attends to; there is no default.
using Selection = std::variant<std::monostate, AttendAll, TopKSelection>;

/// Owns the memory of a selection; a model keeps one for as long as layers share it. Grows only.
class GANNET_API SelectionBuffer {
 public:
  SelectionBuffer(int32_t topk, bool with_positions, MemoryResource& resource = host_memory());
  /// Room for at least that many rows; growing drops the contents and ends the life of earlier views.
  void reserve(int64_t rows);
  int64_t capacity() const noexcept { return capacity_; }
  /// Rows [begin, begin + rows) of the buffer. Throws beyond the capacity.
  TopKSelection view(int64_t rows, int64_t begin = 0) const;

 private:
  MemoryResource* resource_;
  Buffer memory_;
  int32_t topk_;
  bool with_positions_;
  int64_t capacity_ = 0;
};

/// Row i of `to` becomes row rows[i] of `from`: what is left of a step's selection when a draft goes on from one row a
/// request (narrow_rows), so that its later steps reuse it. rows: [rows of to] in host memory; -1 gives an empty list,
/// the row of a request that has none. `to` shares no memory with `from`, has its width and device, and positions only
/// where `from` has them. Throws for anything else.
GANNET_API void gather_selection(const TopKSelection& from, std::span<const int32_t> rows, const TopKSelection& to,
                                 Stream stream = {});

struct SelectCall {
  int32_t layer = 0;
  StepRows rows = StepRows::kAll;
  TensorView q;        ///< fp32 or bf16 [rows, Hi, Di], rotated
  TensorView weights;  ///< fp32 [rows, Hi], with Di^-0.5 and Hi^-0.5 in them
  StepWrite write;     ///< a token must be able to select itself: its index key is written before
  TopKSelection out;
};

struct AttendCall {
  int32_t layer = 0;
  StepRows rows = StepRows::kAll;
  TensorView q;  ///< fp32 or bf16 [rows, H, R+P], absorbed
  StepWrite write;
  Selection selection;
  TensorView out;       ///< fp32 or bf16 [rows, H, R]
  TensorView lse = {};  ///< optional fp32 [rows, H], natural logarithm
};

/// Up-projection of latent rows by kv_b: latent [n, R] -> k_nope [n, H, N], v [n, H, V], all packed and of q's dtype.
using ExpandLatent = std::function<void(const TensorView& latent, const TensorView& k_nope, const TensorView& v)>;

/// Dense prefill in the expanded form over the rows of the extend requests (StepRows::kPrefill).
struct DensePrefillCall {
  int32_t layer = 0;
  TensorView q;       ///< fp32 or bf16 [rows, H, N+P], rotated
  TensorView k_nope;  ///< same dtype [rows, H, N], of the new tokens
  TensorView k_rope;  ///< same dtype [rows, P], of the new tokens, rotated
  TensorView v;       ///< same dtype [rows, H, V], of the new tokens
  StepWrite write;
  ExpandLatent expand;  ///< called once for each prefix chunk; required where a request has a prefix
  TensorView out;       ///< same dtype [rows, H, V]
  TensorView lse = {};  ///< optional fp32 [rows, H], natural logarithm
};

/// A pass of dense prefill over one prefix chunk, for an engine that runs the loop itself.
struct PrefixPassCall {
  int32_t layer = 0;
  int64_t chunk = 0;  ///< index into step().prefix_chunks().chunks
  TensorView q;       ///< [rows, H, N+P] of the whole prefill
  TensorView k_nope;  ///< [chunk.num_tokens, H, N]
  TensorView k_rope;  ///< [chunk.num_tokens, P]
  TensorView v;       ///< [chunk.num_tokens, H, V]
  TensorView out;     ///< in/out [rows, H, V]: the chunk is merged into it
  TensorView lse;     ///< in/out fp32 [rows, H], natural logarithm
};

/// A step of a draft after its first: one row for every request of the step that was prepared, refreshed or captured
/// last, extends included, whose lengths are
///   seq_lens[r] + steps, 0 stays 0 (padding)
/// Counted from that step and not from the advance before, so that a repeated call changes nothing (spec 1.5; the
/// reference subtracts in place). Nothing is kept of the arrays but copies.
struct DraftAdvance {
  int32_t steps = 1;  ///< 0 and more
  /// [num_requests] the lengths to count from, such as narrow_seq_lens gives; after a refresh those of its requests
  /// will do. Absent: the lengths of that step.
  std::span<const int32_t> seq_lens = {};
  PageTableView pages = {};  ///< needed where a length reaches beyond the pages of that step
};

/// Arrays of the current step where the operations read them: in host memory on the CPU, else copies on the device,
/// for an engine's own kernels. Those of a captured batch keep their places. int32, [rows of the step].
struct StepTensors {
  TensorView positions;    ///< padding 0: for RoPE
  TensorView write_slots;  ///< padding -1
  TensorView row_lens;     ///< keys that a row sees
};

// ---- layer hooks --------------------------------------------------------------------------------------------------

/// What became of a layer's rows in a prefill step.
enum class LayerRecord : uint8_t {
  kWritten,    ///< the rows of all extend requests are in the caches, latent and index keys alike
  kAbandoned,  ///< the step has ended without them
};
GANNET_API const char* to_string(LayerRecord r) noexcept;

/// What a backend calls around the rows of a layer, on the thread that called the backend, until they are replaced or
/// the backend is gone. Either may be empty. On a CUDA device "written" means enqueued: a record marks the place in the
/// stream, for example by an event of the caller's or by StreamCounter (gannet/cuda.h), and `wait` lets the stream
/// wait.
struct LayerHooks {
  /// For whoever ships a layer as soon as it is written (spec 1.8): exactly one record a layer a prefill step (extend
  /// or mixed), on every path, and none of other steps. kWritten comes after the last row of the extend requests, from
  /// the first call that writes them or finds them written (AlreadyWritten), before anything is attended: an attention
  /// that throws does not take it back, and calls that follow do not repeat it. Layers without a record when the step
  /// ends - by prepare, refresh, advance, bind, set_layer_hooks or destruction - are kAbandoned, so that nobody waits
  /// for ever: after an error an engine ends the step, for example by preparing an idle one. An exception from a
  /// kWritten record passes to the caller; one from a kAbandoned record is dropped.
  std::function<void(int32_t layer, LayerRecord record)> record = {};
  /// For rows that are still being brought in: called before the backend touches the bytes of a layer's caches, of
  /// either kind, for every call that reads or writes them (a page that comes in whole would undo a write), so perhaps
  /// several times a layer. Returns once they are there, or throws, and then nothing has been touched.
  std::function<void(int32_t layer)> wait = {};
};

// ---- backends -----------------------------------------------------------------------------------------------------

class GANNET_API AttentionBackend {
 public:
  virtual ~AttentionBackend();

  virtual const char* name() const noexcept = 0;
  virtual const AttentionCapabilities& capabilities() const noexcept = 0;
  virtual const AttentionConfig& config() const noexcept = 0;

  /// The caches of layers 0, 1, ...; replaces earlier ones and ends the current step. Checks format, geometry, page
  /// size, and that layers agree.
  virtual void bind(std::span<const LayerCaches> layers) = 0;

  /// The stream of a CUDA device on which everything that follows is enqueued, the copies that prepare, capture,
  /// refresh and advance make included; those are not for a graph: they come before its capture and before each replay,
  /// which reads the arrays where they lie. The default stream at first. On the CPU it means nothing.
  virtual void set_stream(Stream stream) = 0;

  /// Replaces the hooks and ends the current step.
  virtual void set_layer_hooks(LayerHooks hooks) = 0;

  /// Plans a step; the arrays of `step` may be freed afterwards. A step without requests is idle: calls other than
  /// prepare are errors until the next one. So they are after an error here.
  virtual void prepare(const BatchStep& step) = 0;
  /// The plan of the current step. Throws before prepare.
  virtual const StepPlan& step() const = 0;
  /// Arrays of the current step on the device of the config. Throws before prepare.
  virtual StepTensors step_tensors() const = 0;

  /// Makes the persistent plan of a batch of decode requests (CaptureShape, StepPlan::capture), one for each
  /// (num_requests, q_len), and makes the batch, all padding, the current step: run the layers once, and every
  /// operation is planned for it. Bind forgets all of them. Capturing the same shape again is allowed; the same
  /// (num_requests, q_len) with other values, or another mode than decode, is an error.
  virtual void capture(const CaptureShape& shape) = 0;
  /// Like prepare, into the plan captured for (num_requests, step.q_len), which neither allocates nor moves: for a
  /// decode step of up to num_requests requests; those that are missing are padding (length 0, write slot -1), which
  /// sees and writes nothing. The results are those of prepare bit for bit. Throws for a batch that was never captured.
  virtual void refresh(const BatchStep& step, int32_t num_requests) = 0;

  /// The same with a page table and lengths that the batch shares with others, such as a target with its draft
  /// (gannet/shared_page_table.h), which outlives the backend or its next bind. One table a shape, for good. Throws
  /// kUnsupported unless the backend overrides both, as those of this library do.
  virtual void capture(const CaptureShape& shape, const SharedPageTable& table);
  /// Makes the step that the table is of the current one, in the plan captured with it for (num_requests of the table,
  /// q_len). On a CUDA device lengths and pages are read there, in the order of the stream: one kernel, no copy, no
  /// wait, and it may be captured into a graph in front of the layers; step().lens_known() is false then, and what
  /// depends on lengths on the host is bounded by the max_seq_len of table and batch. On the CPU they are read now.
  /// Throws for a table that is of another generation than the step. As soon as it is, every call but those that make
  /// another step the current one throws too: the step is stale.
  virtual void refresh(const SharedStep& step);

  /// Makes the next step of a draft the current one (DraftAdvance). After a refresh it goes into the plan captured for
  /// (num_requests, 1). Throws where there is no step, or an idle one, to go on from; then, and for arguments that are
  /// refused, the current step stays. Not from a step of a shared table, which has SharedStep::steps for it.
  virtual void advance(const DraftAdvance& advance) = 0;

  /// Writes this step's rows of a layer.
  virtual void write(int32_t layer, StepRows rows, const KvRows& kv) = 0;

  /// Chooses the keys of each row by the layer's indexer. `dsa` only.
  virtual void select(const SelectCall& call) = 0;

  /// Absorbed attention, over prefill rows as well as decode rows.
  virtual void attend(const AttendCall& call) = 0;

  /// Causal pass over the new tokens, then for each prefix chunk: gather, expand, pass, merge.
  virtual void dense_prefill(const DensePrefillCall& call) = 0;

  /// The parts of dense_prefill. prefill_new_tokens requires lse and does not look at expand; gather_prefix fills
  /// latent [chunk.num_tokens, R] and rope [chunk.num_tokens, P], fp32 or bf16.
  virtual void prefill_new_tokens(const DensePrefillCall& call) = 0;
  virtual void gather_prefix(int32_t layer, int64_t chunk, const TensorView& latent, const TensorView& rope) = 0;
  virtual void prefill_prefix(const PrefixPassCall& call) = 0;

  /// Implementation that each operation used so far ran on, for reports: {"mla_decode", "avx512_bf16"}.
  virtual std::vector<std::pair<std::string, std::string>> implementations() const = 0;
};

// ---- registry -----------------------------------------------------------------------------------------------------

struct AttentionBackendEntry {
  std::string name;
  std::vector<AttentionArch> archs;        ///< that it serves
  std::vector<AttentionArch> default_for;  ///< where no name is given
  std::function<std::unique_ptr<AttentionBackend>(const Context&, const AttentionConfig&, MemoryResource&)> make;
};

/// Backends by name and architecture: an ordinary value, so that an engine can add its own.
class GANNET_API AttentionRegistry {
 public:
  /// Empty.
  AttentionRegistry() = default;
  /// "mla" and "dsa".
  static AttentionRegistry builtin();

  /// Throws for a name that is there already, without archs, or for a second default of an architecture.
  void add(AttentionBackendEntry entry);
  const std::vector<AttentionBackendEntry>& entries() const noexcept { return entries_; }
  /// The backend of that name, or the default of config.arch for an empty name. Throws, listing what there is, for an
  /// unknown name, a name that does not serve the architecture, an architecture without default.
  std::unique_ptr<AttentionBackend> make(const Context& context, const AttentionConfig& config,
                                         std::string_view name = {}, MemoryResource& resource = host_memory()) const;

 private:
  std::vector<AttentionBackendEntry> entries_;
};

/// AttentionRegistry::builtin().make(...). `context` and `resource` must outlive the backend.
GANNET_API std::unique_ptr<AttentionBackend> make_attention_backend(const Context& context,
                                                                    const AttentionConfig& config,
                                                                    std::string_view name = {},
                                                                    MemoryResource& resource = host_memory());

}  // namespace v0
}  // namespace gannet
