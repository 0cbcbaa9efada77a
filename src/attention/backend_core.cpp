#include "attention/backend_core.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/implementation.h"
#include "gannet/hadamard.h"

namespace gannet {
inline namespace v0 {
namespace attention {
namespace {

std::string list(const std::vector<int32_t>& values) {
  std::string text;
  for (const int32_t v : values) text += fmt::format("{}{}", text.empty() ? "" : " or ", v);
  return text;
}

std::string list(const std::vector<LatentFormat>& values) {
  std::string text;
  for (const LatentFormat v : values) text += fmt::format("{}{}", text.empty() ? "" : ", ", to_string(v));
  return text;
}

template <class T>
bool contains(const std::vector<T>& values, T value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

std::string shape_text(std::initializer_list<int64_t> shape) {
  std::string text;
  for (const int64_t n : shape) text += fmt::format("{}{}", text.empty() ? "" : ", ", n);
  return "[" + text + "]";
}

}  // namespace

BackendCore::BackendCore(std::string name, AttentionCapabilities capabilities, const Context& context,
                         const AttentionConfig& config, MemoryResource& memory)
    : name_(std::move(name)),
      capabilities_(std::move(capabilities)),
      context_(context),
      config_(config),
      memory_(memory) {
  constexpr const char* kCall = "config";
  constexpr int32_t kMaxDim = 1 << 20;  // keeps products of two dimensions and an element size within 64 bits
  const auto dim = [&](const char* field, int32_t value, int32_t least) {
    if (value < least || value > kMaxDim) refuse(kCall, "{} is {}; accepted: {} to {}", field, value, least, kMaxDim);
  };
  dim("num_heads", config.num_heads, 1);
  dim("geometry.latent_dim", config.geometry.latent_dim, 1);
  dim("geometry.rope_dim", config.geometry.rope_dim, 1);
  dim("qk_nope_head_dim", config.qk_nope_head_dim, 0);
  dim("v_head_dim", config.v_head_dim, 0);
  if (!contains(capabilities_.page_sizes, config.page_size))
    refuse(kCall, "page_size is {}; accepted: {}", config.page_size, list(capabilities_.page_sizes));
  if (!std::isfinite(config.softmax_scale) || config.softmax_scale <= 0.0f)
    refuse(kCall, "softmax_scale is {}; accepted: finite and positive (it is never guessed)", config.softmax_scale);
  if (config.logit_soft_cap != 0.0f)
    refuse_unsupported(kCall, "logit_soft_cap is {}; accepted: 0 (no soft cap)", config.logit_soft_cap);
  constexpr int64_t kMaxContext = std::numeric_limits<int32_t>::max();
  if (config.max_context_len < 1 || config.max_context_len > kMaxContext)
    refuse(kCall, "max_context_len is {}; accepted: 1 to {}", config.max_context_len, kMaxContext);
  if (config.prefix_chunk_capacity < 1)
    refuse(kCall, "prefix_chunk_capacity is {} tokens; accepted: 1 and more", config.prefix_chunk_capacity);
  if (capabilities_.attend_sparse) {
    const IndexerConfig& i = config.indexer;
    if (config.q_lora_rank < 1)
      refuse(kCall, "q_lora_rank is {}; accepted: 1 and more (the indexer reads the q latent)", config.q_lora_rank);
    dim("indexer.num_heads", i.num_heads, 1);
    if (i.topk < 1) refuse(kCall, "indexer.topk is {}; accepted: 1 and more", i.topk);
    dim("indexer.head_dim", i.head_dim, config.geometry.rope_dim);
  }
  if (!(memory.device() == config.device))
    refuse(kCall, "the memory resource is on {}; accepted: memory of {}, the device of the config",
           to_string(memory.device()), to_string(config.device));
  if (config.device.kind == DeviceKind::kCuda) staging_ = std::make_unique<cuda::Staging>(config.device.index);
  if (!config.plan.impl.empty()) {
    std::string names;
    for (const ImplementationSet* set : implementation_sets()) {
      if (config.plan.impl == set->name) return;
      names += fmt::format("{}{}", names.empty() ? "" : ", ", set->name);
    }
    refuse(kCall, "impl is \"{}\"; accepted: {}", config.plan.impl, names);
  }
}

BackendCore::~BackendCore() { end_step(); }

void BackendCore::bind(std::span<const LayerCaches> layers) {
  constexpr const char* kCall = "bind";
  if (layers.empty()) refuse(kCall, "no layers are given; accepted: 1 and more");
  const LatentCacheView& first = layers[0].latent;
  const IndexCacheView* first_index = nullptr;
  for (size_t l = 0; l < layers.size(); ++l) {
    const LatentCacheView& latent = layers[l].latent;
    if (latent.data == nullptr) refuse(kCall, "latent.data of layer {} is null", l);
    if (!(latent.device == config_.device))
      refuse(kCall, "the latent cache of layer {} is on {}; the backend is on {}", l, to_string(latent.device),
             to_string(config_.device));
    if (latent.page_size != config_.page_size)
      refuse(kCall, "page_size of layer {} is {}; accepted: {}, that of the config", l, latent.page_size,
             config_.page_size);
    if (!(latent.geometry == config_.geometry))
      refuse(kCall, "the latent rows of layer {} are {} + {} wide; accepted: {} + {}, the geometry of the config", l,
             latent.geometry.latent_dim, latent.geometry.rope_dim, config_.geometry.latent_dim,
             config_.geometry.rope_dim);
    if (!contains(capabilities_.latent_formats, latent.format))
      refuse_unsupported(kCall, "the latent format of layer {} is {}; accepted: {}", l, to_string(latent.format),
                         list(capabilities_.latent_formats));
    if (latent.num_pages < 1 || latent.num_pages > std::numeric_limits<int32_t>::max() / config_.page_size)
      refuse(kCall, "layer {} has {} pages; accepted: 1 and more, at most 2^31 - 1 tokens", l, latent.num_pages);
    if (latent.format != first.format || latent.num_pages != first.num_pages ||
        latent.page_stride_bytes != first.page_stride_bytes)
      refuse(kCall, "layer {} has {} pages of {} with a stride of {} bytes; layer 0 has {} of {} and {}", l,
             latent.num_pages, to_string(latent.format), latent.page_stride_bytes, first.num_pages,
             to_string(first.format), first.page_stride_bytes);
    if (!layers[l].index) continue;
    const IndexCacheView& index = *layers[l].index;
    if (!capabilities_.attend_sparse)
      refuse(kCall, "layer {} has an index cache; accepted: none (the backend has no sparse attention)", l);
    if (index.data == nullptr) refuse(kCall, "index.data of layer {} is null", l);
    if (!(index.device == config_.device))
      refuse(kCall, "the index cache of layer {} is on {}; the backend is on {}", l, to_string(index.device),
             to_string(config_.device));
    if (index.head_dim != config_.indexer.head_dim)
      refuse(kCall, "index head_dim of layer {} is {}; accepted: {}, that of the config", l, index.head_dim,
             config_.indexer.head_dim);
    if (index.page_size != config_.page_size || index.num_pages != latent.num_pages)
      refuse(kCall, "the index cache of layer {} has {} pages of {} tokens; its latent cache has {} of {}", l,
             index.num_pages, index.page_size, latent.num_pages, latent.page_size);
    if (first_index == nullptr) first_index = &index;
    if (index.hadamard != first_index->hadamard)
      refuse(kCall, "hadamard of the index cache of layer {} is {}; accepted: {}, that of the first one", l,
             index.hadamard, first_index->hadamard);
    if (index.format != first_index->format || index.scale_format != first_index->scale_format ||
        index.page_stride_bytes != first_index->page_stride_bytes)
      refuse(kCall, "the index cache of layer {} is {} with a stride of {} bytes; the first one is {} with {}", l,
             to_string(index.format), index.page_stride_bytes, to_string(first_index->format),
             first_index->page_stride_bytes);
  }
  for (const LayerCaches& l : layers)  // they agree: the first one of a kind speaks for all
    if (&l == &layers[0] || (l.index && &*l.index == first_index)) probe(l);
  end_step();
  make_current(eager_);
  base_ = &eager_;
  captured_.clear();
  outgrown_.clear();
  layers_.assign(layers.begin(), layers.end());
  has_record_.assign(layers.size(), 0);
  state_ = State::kBound;
}

void BackendCore::set_layer_hooks(LayerHooks hooks) {
  end_step();
  hooks_ = std::move(hooks);
  if (state_ != State::kUnbound) state_ = State::kBound;
}

void BackendCore::record_written(int32_t layer, StepRows part) {
  if (!recording_ || part == StepRows::kDecode) return;
  uint8_t& has_record = has_record_[static_cast<size_t>(layer)];
  if (has_record != 0) return;
  has_record = 1;  // first: a record that throws has been made
  hooks_.record(layer, LayerRecord::kWritten);
}

void BackendCore::end_step() noexcept {
  if (!recording_) return;
  recording_ = false;
  for (size_t l = 0; l < has_record_.size(); ++l) {
    if (has_record_[l] != 0) continue;
    try {
      hooks_.record(static_cast<int32_t>(l), LayerRecord::kAbandoned);
    } catch (...) {  // comes from destructors too
    }
  }
}

void BackendCore::probe(const LayerCaches& caches) const {
  const auto plan = [&](const auto& params) {
    (void)OpPlan<std::decay_t<decltype(params)>>(context_, params, config_.plan);
  };
  const int64_t heads = config_.num_heads, r = config_.geometry.latent_dim, p = config_.geometry.rope_dim;
  const auto tensor = [&](DType t, std::initializer_list<int64_t> shape) {
    return view(nullptr, t, shape, config_.device);
  };
  const TensorView slots = tensor(DType::kI32, {1});
  const PageTableView pages = PageTableView::padded(tensor(DType::kI32, {1, 1}));
  const QueryRows rows{
      .seq_lens = tensor(DType::kI32, {1}), .q_len = 1, .cu_q_lens = {}, .bound = RowBound::kCausalFull};
  const auto all = [&](DType t) {
    const TensorView q = tensor(t, {1, heads, r + p}), out = tensor(t, {1, heads, r});
    plan(LatentWrite{.latent = tensor(t, {1, r}), .rope = tensor(t, {1, p}), .slots = slots, .cache = caches.latent});
    MlaDecode dense;
    dense.q = q;
    dense.cache = caches.latent;
    dense.pages = pages;
    dense.rows = rows;
    dense.out = out;
    dense.softmax_scale = config_.softmax_scale;
    plan(dense);
    if (!capabilities_.attend_sparse) return;
    SparseAttention sparse;
    sparse.q = q;
    sparse.cache = caches.latent;
    sparse.topk_slots = tensor(DType::kI32, {1, config_.indexer.topk});
    sparse.out = out;
    sparse.softmax_scale = config_.softmax_scale;
    plan(sparse);
    if (!caches.index) return;
    plan(IndexKWrite{.k = tensor(t, {1, config_.indexer.head_dim}),
                     .slots = slots,
                     .cache = *caches.index,
                     .hadamard = caches.index->hadamard});
    IndexSelect select;
    select.q = tensor(t, {1, config_.indexer.num_heads, config_.indexer.head_dim});
    select.weights = tensor(DType::kF32, {1, config_.indexer.num_heads});
    select.cache = *caches.index;
    select.hadamard = caches.index->hadamard;
    select.pages = pages;
    select.rows = rows;
    select.max_seq_len = config_.page_size;
    select.topk_slots = tensor(DType::kI32, {1, config_.indexer.topk});
    select.topk_lens = slots;
    plan(select);
  };
  // Either type of activation will do; which one comes is not known yet.
  try {
    all(DType::kF32);
  } catch (const Error&) {
    all(DType::kBf16);
  }
}

void BackendCore::prepare(const BatchStep& step) {
  if (state_ == State::kUnbound) refuse("prepare", "no caches are bound; call bind first");
  end_step();
  state_ = State::kBound;  // where this throws, the step before is over all the same
  eager_.plan.assign(step, limits());
  upload(eager_);
  begin_step(eager_);
}

StepLimits BackendCore::limits() const noexcept {
  return {.page_size = config_.page_size,
          .num_pages = layers_[0].latent.num_pages,
          .max_context_len = config_.max_context_len,
          .prefix_chunk_capacity = config_.prefix_chunk_capacity};
}

void BackendCore::begin_step(Planned& planned) {
  make_current(planned);
  base_ = &planned;
  base_lens_.assign(planned.plan.seq_lens().begin(), planned.plan.seq_lens().end());
  next_lens_.reserve(base_lens_.size());  // so that an advance of a captured batch does not allocate
  state_ = is_idle(planned.plan.mode()) ? State::kIdle : State::kActive;
  recording_ = hooks_.record && is_extend_or_mixed(planned.plan.mode());
  std::fill(has_record_.begin(), has_record_.end(), uint8_t{0});
}

void BackendCore::upload(Planned& planned) {
  if (config_.device.kind == DeviceKind::kCpu) return;
  planned.arrays.upload(name_.c_str(), staging_.get(), PlanPieces(planned.plan).span(), stream_);
}

void BackendCore::grow(Buffer& buffer, size_t bytes) {
  if (bytes <= buffer.size()) return;
  if (!captured_.empty() && config_.device.kind != DeviceKind::kCpu && buffer.size() > 0) {
    // Half as much again at least: what is kept adds up to no more than twice the last size.
    bytes = std::max(bytes, buffer.size() + buffer.size() / 2);
    outgrown_.push_back(std::move(buffer));
  }
  buffer.reserve(bytes, memory_);
}

void BackendCore::make_current(Planned& planned) noexcept {
  current_ = &planned.plan;
  ops_ = &planned.ops;
  arrays_ = &planned.arrays;
  table_ = planned.table;
  generation_ = table_ == nullptr ? 0 : table_->generation();
}

BackendCore::Planned* BackendCore::find_captured(int64_t num_requests, int32_t q_len) noexcept {
  for (const std::unique_ptr<Planned>& p : captured_)
    if (p->plan.capture_shape().num_requests == num_requests && p->plan.capture_shape().q_len == q_len) return p.get();
  return nullptr;
}

BackendCore::Planned& BackendCore::captured(const char* call, int64_t num_requests, int32_t q_len) {
  if (Planned* planned = find_captured(num_requests, q_len)) return *planned;
  std::string shapes;
  for (const std::unique_ptr<Planned>& p : captured_)
    shapes += fmt::format("{}{} of {}", shapes.empty() ? "" : ", ", p->plan.capture_shape().num_requests,
                          p->plan.capture_shape().q_len);
  refuse(call, "a batch of {} requests of {} rows was never captured; captured: {}", num_requests, q_len,
         shapes.empty() ? "none" : shapes);
}

void BackendCore::capture(const CaptureShape& given, const SharedPageTable* table) {
  constexpr const char* kCall = "capture";
  if (state_ == State::kUnbound) refuse(kCall, "no caches are bound; call bind first");
  end_step();
  state_ = State::kBound;
  CaptureShape shape = given;
  if (table != nullptr) {
    const SharedPageTableOptions& o = table->options();
    if (!(table->device() == config_.device))
      refuse(kCall, "the page table is on {}; the backend is on {}", to_string(table->device()),
             to_string(config_.device));
    if (o.num_requests != shape.num_requests)
      refuse(kCall, "num_requests is {}; the page table is one of {}", shape.num_requests, o.num_requests);
    if (o.page_size != config_.page_size)
      refuse(kCall, "the page table has pages of {} tokens; accepted: {}, page_size of the config", o.page_size,
             config_.page_size);
    if (o.num_pages > layers_[0].latent.num_pages)
      refuse(kCall, "the page table is for {} pages; accepted: at most {}, those of the caches", o.num_pages,
             layers_[0].latent.num_pages);
    const int64_t most = shape.max_seq_len == 0 ? config_.max_context_len : shape.max_seq_len;
    shape.max_seq_len = std::min(most, o.max_seq_len);
  }
  Planned* planned = find_captured(shape.num_requests, shape.q_len);
  if (planned != nullptr) {
    if (planned->table != table)
      refuse(kCall, "a batch of {} requests of {} rows is captured {}; accepted: the same", shape.num_requests,
             shape.q_len, planned->table == nullptr ? "without a shared page table" : "with another page table");
    planned->plan.capture(shape, limits());
  } else {
    auto fresh = std::make_unique<Planned>(config_.device, memory_);
    fresh->table = table;
    fresh->plan.capture(shape, limits());
    planned = captured_.emplace_back(std::move(fresh)).get();
  }
  upload(*planned);
  begin_step(*planned);
}

void BackendCore::refresh(const BatchStep& step, int32_t num_requests) {
  constexpr const char* kCall = "refresh";
  if (state_ == State::kUnbound) refuse(kCall, "no caches are bound; call bind, then capture");
  end_step();
  state_ = State::kBound;
  if (step.num_extends() > 0)
    refuse_unsupported(kCall, "the step is {}; accepted: decode (prepare takes every mode)",
                       to_string(step_mode(step.num_extends(), step.num_requests())));
  Planned& planned = captured(kCall, num_requests, step.q_len);
  if (planned.table != nullptr)
    refuse(kCall, "a batch of {} requests of {} rows is captured with a shared page table; accepted: a SharedStep",
           num_requests, step.q_len);
  planned.plan.assign(step, limits());
  upload(planned);
  begin_step(planned);
}

void BackendCore::refresh(const SharedStep& step) {
  constexpr const char* kCall = "refresh";
  if (state_ == State::kUnbound) refuse(kCall, "no caches are bound; call bind, then capture");
  if (step.table == nullptr) refuse(kCall, "table is null; accepted: the page table of the captured batch");
  end_step();
  state_ = State::kBound;
  const SharedPageTable& table = *step.table;
  const int64_t n = table.options().num_requests;
  Planned& planned = captured(kCall, n, step.q_len);
  if (planned.table != step.table)
    refuse(kCall, "a batch of {} requests of {} rows is captured {}; accepted: the page table it is captured with", n,
           step.q_len, planned.table == nullptr ? "without a shared page table" : "with another page table");
  if (step.generation != table.generation())
    refuse(kCall,
           "generation is {}; accepted: that of the page table, {} (SharedPageTable::refresh or mark, once a step)",
           step.generation, table.generation());
  if (step.steps < 0) refuse(kCall, "steps is {}; accepted: 0 and more", step.steps);
  if (step.decode_bound > RowBound::kUniformBlock ||
      (step.decode_bound == RowBound::kUniformBlock) !=
          (planned.plan.capture_shape().decode_bound == RowBound::kUniformBlock))
    refuse(kCall, "decode_bound is {}; the captured batch has {}", to_string(step.decode_bound),
           to_string(planned.plan.capture_shape().decode_bound));
  TensorView lens = table.seq_lens();
  if (step.seq_lens.given()) {
    lens = step.seq_lens;
    check_typed(kCall, "seq_lens", lens, DType::kI32, {n});
    if (!(lens.device == config_.device) || lens.data == nullptr || (n > 1 && lens.stride[0] != 1))
      refuse(kCall, "seq_lens is {}; accepted: packed, on {}", describe(lens), to_string(config_.device));
  }
  if (config_.device.kind == DeviceKind::kCpu) {
    next_lens_.assign(static_cast<size_t>(n), 0);
    for (int64_t r = 0; r < n; ++r) {
      const int32_t given = *lens.ptr<const int32_t>(r);
      const int64_t len = given == 0 ? 0 : int64_t{given} + step.steps;
      if (given < 0 || len > config_.max_context_len)
        refuse(kCall, "seq_lens[{}] is {} and steps {}; accepted: a sum of 0 to max_context_len, {}", r, given,
               step.steps, config_.max_context_len);
      next_lens_[static_cast<size_t>(r)] = static_cast<int32_t>(len);
    }
    planned.plan.assign({.seq_lens = next_lens_,
                         .prefix_lens = {},
                         .extend_lens = {},
                         .q_len = step.q_len,
                         .decode_bound = step.decode_bound,
                         .pages = table.pages()},
                        limits());
  } else {
    const int64_t most = planned.plan.capture_shape().max_seq_len;
    planned.plan.assign_unknown(most, limits());
    const StepPlan& plan = planned.plan;
    const auto there = [&](std::span<const int32_t> a) {
      return planned.arrays.on_device(view(a.data(), {static_cast<int64_t>(a.size())})).ptr<int32_t>();
    };
    const PageTableView pages = table.pages();
    cuda::plan_decode_rows(
        name_.c_str(), config_.device.index,
        {.seq_lens = lens.ptr<const int32_t>(),
         .pages = pages.pages.ptr<const int32_t>(),
         .columns = pages.pages.shape[1],
         .num_requests = n,
         .max_len = most,
         .num_pages = layers_[0].latent.num_pages,
         .q_len = step.q_len,
         .page_size = config_.page_size,
         .added = step.steps + (step.decode_bound == RowBound::kCausalFromFirst ? step.q_len - 1 : 0),
         .bound = plan.decode_bound(),
         .out_seq_lens = there(plan.seq_lens()),
         .positions = there(plan.positions()),
         .write_slots = there(plan.write_slots()),
         .row_lens = there(plan.row_lens())},
        stream_);
  }
  begin_step(planned);
}

void BackendCore::advance(const DraftAdvance& advance) {
  constexpr const char* kCall = "advance";
  active_step(kCall);
  if (base_->table != nullptr)
    refuse(kCall, "the step is one of a shared page table; accepted: refresh from it, with steps");
  if (advance.steps < 0) refuse(kCall, "steps is {}; accepted: 0 and more", advance.steps);
  const bool captured = base_->plan.captured();
  const size_t n = base_lens_.size();
  std::span<const int32_t> start = base_lens_;
  if (!advance.seq_lens.empty()) {
    start = advance.seq_lens;
    if (captured ? start.size() > n : start.size() != n)
      refuse(kCall, "seq_lens has {} entries; the step has {} requests", start.size(), n);
  }
  next_lens_.assign(n, 0);  // what the caller's buffer lacks is padding
  for (size_t r = 0; r < start.size(); ++r) {
    const int64_t len = start[r] == 0 ? 0 : int64_t{start[r]} + advance.steps;
    if (start[r] < 0 || len > config_.max_context_len)
      refuse(kCall, "seq_lens[{}] is {} and steps {}; accepted: a sum of 0 to max_context_len, {}", r, start[r],
             advance.steps, config_.max_context_len);
    next_lens_[r] = static_cast<int32_t>(len);
  }
  Planned* target = &draft_;
  if (captured) {
    target = find_captured(static_cast<int64_t>(n), 1);
    if (target == nullptr)
      refuse(kCall, "a batch of {} requests of 1 row was never captured, and the draft goes on from a captured one", n);
    if (target->table != nullptr)
      refuse(kCall, "the batch of {} requests of 1 row is captured with a shared page table; accepted: refresh from it",
             n);
  }
  target->plan.advance(base_->plan, next_lens_, advance.pages, limits());
  upload(*target);
  end_step();
  make_current(*target);
}

const StepPlan& BackendCore::step(const char* call) const {
  if (state_ == State::kUnbound) refuse(call, "no caches are bound; call bind, then prepare");
  if (state_ == State::kBound) refuse(call, "no step is prepared; call prepare first");
  if (table_ != nullptr && table_->generation() != generation_)
    refuse(call, "the step is stale: it is of generation {} of the page table, which is of {} now; refresh first",
           generation_, table_->generation());
  return *current_;
}

const StepPlan& BackendCore::active_step(const char* call) const {
  if (step(call); state_ == State::kIdle)
    refuse(call, "the step is idle (it has no requests); accepted: prepare, with the next step");
  return *current_;
}

void BackendCore::check_rows(const char* call, StepRows part) const {
  if (part > StepRows::kAll) refuse(call, "rows is {}; accepted: a StepRows", static_cast<int>(part));
}

const LayerCaches& BackendCore::layer(const char* call, int32_t layer) const {
  if (layer < 0 || static_cast<size_t>(layer) >= layers_.size())
    refuse(call, "layer is {}; accepted: 0 to {}", layer, static_cast<int64_t>(layers_.size()) - 1);
  return layers_[static_cast<size_t>(layer)];
}

const LayerCaches& BackendCore::open_layer(int32_t layer) const {
  if (hooks_.wait) hooks_.wait(layer);
  return layers_[static_cast<size_t>(layer)];
}

StepRows BackendCore::effective(const char* call, StepRows part) const {
  check_rows(call, part);
  if (part != StepRows::kAll || !is_mixed(current_->mode()))
    return part != StepRows::kAll ? part : is_decode(current_->mode()) ? StepRows::kDecode : StepRows::kPrefill;
  if (current_->decode_bound() != RowBound::kCausalFull)
    refuse_unsupported(
        call, "rows is all in a mixed step whose decode rows are {}; accepted: prefill and decode by themselves",
        to_string(current_->decode_bound()));
  return StepRows::kAll;
}

PageTableView BackendCore::pages(StepRows part) const {
  // A captured batch is decode rows alone.
  if (table_ != nullptr && part != StepRows::kPrefill) return table_->pages();
  return arrays_->on_device(current_->pages(part));
}

StepTensors BackendCore::step_tensors() const {
  const StepPlan& plan = step("step_tensors");
  const auto array = [&](std::span<const int32_t> a) {
    return on_device(view(a.data(), {static_cast<int64_t>(a.size())}));
  };
  return {.positions = array(plan.positions()),
          .write_slots = array(plan.write_slots()),
          .row_lens = array(plan.row_lens())};
}

QueryRows BackendCore::query_rows(StepRows part) const {
  QueryRows rows;
  rows.seq_lens = on_device(current_->seq_lens_view(part));
  if (part == StepRows::kDecode) {
    rows.q_len = current_->q_len();
    rows.bound = current_->decode_bound();
  } else {
    rows.cu_q_lens = on_device(current_->cu_q_lens(part));
  }
  return rows;
}

void BackendCore::check_float(const char* call, const char* argument, const TensorView& v,
                              std::initializer_list<int64_t> shape) const {
  bool good = v.rank == static_cast<int>(shape.size());
  size_t i = 0;
  for (const int64_t n : shape) {
    good = good && v.shape[i] == n;
    ++i;
  }
  if (!good || (v.dtype != DType::kF32 && v.dtype != DType::kBf16))
    refuse(call, "{} is {}; accepted: fp32 or bf16 {}", argument, describe(v), shape_text(shape));
}

void BackendCore::check_typed(const char* call, const char* argument, const TensorView& v, DType dtype,
                              std::initializer_list<int64_t> shape) const {
  bool good = v.rank == static_cast<int>(shape.size()) && v.dtype == dtype;
  size_t i = 0;
  for (const int64_t n : shape) {
    good = good && v.shape[i] == n;
    ++i;
  }
  if (!good) refuse(call, "{} is {}; accepted: {} {}", argument, describe(v), to_string(dtype), shape_text(shape));
}

void BackendCore::write(const char* call, int32_t l, StepRows part, const KvRows& kv) {
  const StepPlan& plan = active_step(call);
  const LayerCaches& caches = layer(call, l);
  check_rows(call, part);
  const Range range = plan.rows(part);
  const int64_t rows = range.size();
  if (rows == 0) return record_written(l, part);
  check_float(call, "latent", kv.latent, {rows, config_.geometry.latent_dim});
  check_float(call, "rope", kv.rope, {rows, config_.geometry.rope_dim});
  if (caches.index) {
    if (!kv.index_k.given())
      refuse(call, "index_k is absent; layer {} has an index cache, whose rows are written with the latent ones", l);
    check_float(call, "index_k", kv.index_k, {rows, config_.indexer.head_dim});
  } else if (kv.index_k.given()) {
    refuse(call, "index_k is {}; layer {} has no index cache", describe(kv.index_k), l);
  }
  const TensorView slots = on_device(view(plan.write_slots().data() + range.begin, {rows}));
  open_layer(l);
  run(LatentWrite{.latent = kv.latent, .rope = kv.rope, .slots = slots, .cache = caches.latent});
  if (caches.index)
    run(IndexKWrite{.k = rotated(kv.index_k, *caches.index, rotated_k_),
                    .slots = slots,
                    .cache = *caches.index,
                    .hadamard = caches.index->hadamard});
  record_written(l, part);
}

TensorView BackendCore::rotated(const TensorView& x, const IndexCacheView& cache, Buffer& room) {
  if (!cache.hadamard) return x;
  TensorView y = x;
  int64_t n = 1;
  for (int d = y.rank - 1; d >= 0; --d) {
    y.stride[d] = n;
    n *= y.shape[d];
  }
  grow(room, static_cast<size_t>(n) * size_of(y.dtype));
  y.data = room.data();
  hadamard(context_, x, y, stream_);
  return y;
}

void BackendCore::apply(const char* call, int32_t l, StepRows part, const StepWrite& w) {
  if (const KvRows* rows = std::get_if<KvRows>(&w)) write(call, l, part, *rows);
  else if (std::holds_alternative<AlreadyWritten>(w)) record_written(l, part);
  else refuse(call, "write is not given; accepted: AlreadyWritten, or the KvRows to write first");
}

bool BackendCore::begin_attend(const AttendCall& call) {
  constexpr const char* kCall = "attend";
  const StepPlan& plan = active_step(kCall);
  layer(kCall, call.layer);
  const int64_t rows = plan.rows(effective(kCall, call.rows)).size();
  if (rows > 0) {
    check_float(kCall, "q", call.q, {rows, config_.num_heads, config_.geometry.width()});
    check_float(kCall, "out", call.out, {rows, config_.num_heads, config_.geometry.latent_dim});
    if (call.lse.given()) check_typed(kCall, "lse", call.lse, DType::kF32, {rows, config_.num_heads});
  }
  apply(kCall, call.layer, call.rows, call.write);
  return rows > 0;
}

std::vector<std::pair<std::string, std::string>> BackendCore::implementations() const {
  std::set<std::pair<std::string, std::string>> names;
  const auto list = [&](const Planned& p) {
    std::apply([&](const auto&... caches) { (caches.list(names), ...); }, p.ops);
  };
  list(eager_);
  list(draft_);
  for (const std::unique_ptr<Planned>& p : captured_) list(*p);
  return {names.begin(), names.end()};
}

}  // namespace attention
}  // namespace v0
}  // namespace gannet
