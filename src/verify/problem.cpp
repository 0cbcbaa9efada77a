#include "verify/problem.h"
#include "verify/device_mirror.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <numbers>
#include <string_view>
#include <type_traits>

namespace gannet {
inline namespace v0 {
namespace verify {

// ---- memory -------------------------------------------------------------------------------------------------------

Rng Rng::of(uint64_t seed, uint64_t a, uint64_t b) noexcept {
  Rng r(seed);
  Rng s(r.next() ^ (a * 0x9E3779B97F4A7C15u));
  return Rng(s.next() ^ (b * 0xD1B54A32D192ED03u));
}

uint64_t Rng::next() noexcept {
  uint64_t z = (state_ += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

double Rng::normal() noexcept {
  // Box-Muller, one of the pair: this is not what takes the time.
  const double u = 1.0 - uniform();
  const double v = uniform();
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

namespace {

void poison_bytes(std::byte* p, size_t n, Poison poison, DType as) {
  uint32_t word = 0xFFFFFFFFu;
  if (poison == Poison::kZero) word = 0;
  if (poison == Poison::kInf) word = as == DType::kF32 ? 0x7F800000u : as == DType::kBf16 ? 0x7F807F80u : 0x7E7E7E7Eu;
  if (poison == Poison::kHuge) word = as == DType::kF32 ? 0x7149F2CAu : as == DType::kBf16 ? 0x714A714Au : 0x7E7E7E7Eu;
  size_t i = 0;
  for (; i + sizeof word <= n; i += sizeof word) std::memcpy(p + i, &word, sizeof word);
  for (; i < n; ++i) p[i] = static_cast<std::byte>(word >> (i % 4 * 8));
}

}  // namespace

void Buffer::Free::operator()(std::byte* p) const noexcept { std::free(p); }

Buffer::Buffer(size_t size, Poison poison, DType poisoned_as) : size_(size) {
  const size_t total = (size + 2 * kGuard + 63) / 64 * 64;
  memory_.reset(static_cast<std::byte*>(std::aligned_alloc(64, total)));
  if (memory_ == nullptr) throw std::bad_alloc();
  std::memset(memory_.get(), 0xFF, total);
  poison_bytes(data(), size, poison, poisoned_as);
}

bool Buffer::guards_intact() const noexcept {
  for (size_t i = 0; i < kGuard; ++i) {
    if (memory_[i] != std::byte{0xFF} || memory_[kGuard + size_ + i] != std::byte{0xFF}) return false;
  }
  return true;
}

Tensor make_tensor(DType dtype, std::initializer_list<int64_t> shape, int64_t padding) {
  Tensor t;
  t.view = view(nullptr, dtype, shape);
  int64_t stride = 1;
  for (int d = t.view.rank - 1; d >= 0; --d) {
    const auto i = static_cast<size_t>(d);
    t.view.stride[i] = stride;
    stride = stride * t.view.shape[i] + padding;
  }
  t.buffer = std::make_shared<Buffer>(static_cast<size_t>(stride) * size_of(dtype));
  t.view.data = t.buffer->data();
  return t;
}

void set(const TensorView& v, float x, int64_t i0, int64_t i1, int64_t i2) {
  if (v.dtype == DType::kBf16) *v.ptr<Bf16>(i0, i1, i2) = Bf16::from_float(x);
  else if (v.dtype == DType::kE4m3) *v.ptr<E4m3>(i0, i1, i2) = E4m3::from_float(x);
  else *v.ptr<float>(i0, i1, i2) = x;
}

float get(const TensorView& v, int64_t i0, int64_t i1, int64_t i2) {
  switch (v.dtype) {
    case DType::kBf16: return v.ptr<Bf16>(i0, i1, i2)->to_float();
    case DType::kE4m3: return v.ptr<E4m3>(i0, i1, i2)->to_float();
    default: return *v.ptr<float>(i0, i1, i2);
  }
}

namespace {

/// Calls f(i0, i1, i2) for every element of a view of rank 1 to 3.
template <class F>
void for_each_index(const TensorView& v, F&& f) {
  const int64_t n1 = v.rank > 1 ? v.shape[1] : 1;
  const int64_t n2 = v.rank > 2 ? v.shape[2] : 1;
  for (int64_t i = 0; i < v.shape[0]; ++i) {
    for (int64_t j = 0; j < n1; ++j) {
      for (int64_t k = 0; k < n2; ++k) f(i, j, k);
    }
  }
}

}  // namespace

void fill_normal(const Tensor& t, Rng rng, double deviation) {
  for_each_index(t.view, [&](int64_t i, int64_t j, int64_t k) {
    set(t.view, static_cast<float>(rng.normal() * deviation), i, j, k);
  });
}

Tensor make_ints(const std::vector<int32_t>& values) {
  Tensor t = make_tensor(DType::kI32, {static_cast<int64_t>(values.size())});
  std::copy(values.begin(), values.end(), t.view.ptr<int32_t>());
  return t;
}

// ---- pages --------------------------------------------------------------------------------------------------------

namespace {

/// Cells that nobody may use: any of them as a page leads far outside the pool.
int32_t garbage_cell(size_t i) { return i % 2 == 0 ? 0x7FFFFFFF : -123456789; }

}  // namespace

Paged::Paged(PagedSpec s) : spec(std::move(s)) {
  const size_t n = spec.seq_lens.size();
  std::vector<int32_t> cu = {0};
  int64_t total_pages = 0;
  int64_t widest = 0;
  pages_of.resize(n);
  for (size_t i = 0; i < n; ++i) {
    const int64_t num = spec.ragged.empty() ? spec.q_len : spec.ragged[i];
    int64_t most = 0;
    for (int64_t j = 0; j < num; ++j) {
      request_of_row.push_back(static_cast<int64_t>(i));
      keys_of_row.push_back(row_bound(spec.bound, spec.seq_lens[i], num, j));
      most = std::max(most, keys_of_row.back());
    }
    keys_of.push_back(most);
    cu.push_back(cu.back() + static_cast<int32_t>(num));
    pages_of[i].resize(static_cast<size_t>((most + spec.page_size - 1) / spec.page_size));
    total_pages += static_cast<int64_t>(pages_of[i].size());
    widest = std::max(widest, static_cast<int64_t>(pages_of[i].size()));
  }
  num_rows = cu.back();
  num_pages = total_pages + 3;  // page 0 and two at the end are nobody's
  std::vector<int32_t> order(static_cast<size_t>(total_pages));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i + 1);
  Rng rng(spec.page_seed);
  for (size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[static_cast<size_t>(rng.below(static_cast<int64_t>(i)))]);
  size_t next = 0;
  for (auto& list : pages_of) {
    for (int32_t& page : list) page = order[next++];
  }
  seq_lens = make_ints(spec.seq_lens);
  if (!spec.ragged.empty()) cu_q_lens = make_ints(cu);
  if (spec.form == PageTableForm::kPadded) {
    const auto table_rows = static_cast<int64_t>(spec.row_indices ? 2 * n + 1 : n);
    const int64_t columns = widest + spec.spare_columns;
    pages = make_tensor(DType::kI32, {table_rows, columns}, spec.row_indices ? 3 : 0);
    size_t cell = 0;
    for_each_index(pages.view,
                   [&](int64_t r, int64_t c, int64_t) { *pages.view.ptr<int32_t>(r, c) = garbage_cell(cell++); });
    std::vector<int32_t> rows_of(n);
    for (size_t i = 0; i < n; ++i) {
      rows_of[i] = static_cast<int32_t>(spec.row_indices ? 2 * (n - 1 - i) + 1 : i);
      for (size_t c = 0; c < pages_of[i].size(); ++c)
        *pages.view.ptr<int32_t>(rows_of[i], static_cast<int64_t>(c)) = pages_of[i][c];
    }
    if (spec.row_indices) row_indices = make_ints(rows_of);
  } else {
    std::vector<int32_t> pointers = {0};
    std::vector<int32_t> list;
    for (size_t i = 0; i < n; ++i) {
      list.insert(list.end(), pages_of[i].begin(), pages_of[i].end());
      for (int32_t c = 0; c < spec.spare_columns; ++c) list.push_back(garbage_cell(static_cast<size_t>(c)));
      pointers.push_back(static_cast<int32_t>(list.size()));
    }
    indptr = make_ints(pointers);
    indices = make_ints(list);
  }
}

PageTableView Paged::table() const {
  return spec.form == PageTableForm::kPadded ? PageTableView::padded(pages.view, row_indices.view)
                                             : PageTableView::csr(indptr.view, indices.view);
}

QueryRows Paged::rows() const {
  QueryRows r;
  r.seq_lens = seq_lens.view;
  r.q_len = spec.q_len;
  r.cu_q_lens = cu_q_lens.view;
  r.bound = spec.bound;
  return r;
}

int64_t Paged::slot(int64_t request, int64_t position) const {
  const auto& list = pages_of[static_cast<size_t>(request)];
  return static_cast<int64_t>(list[static_cast<size_t>(position / spec.page_size)]) * spec.page_size +
         position % spec.page_size;
}

int64_t Paged::max_keys() const {
  int64_t most = 0;
  for (const int64_t k : keys_of_row) most = std::max(most, k);
  return most;
}

Paged Paged::alone(int64_t row) const {
  PagedSpec s;
  s.seq_lens = {static_cast<int32_t>(keys_of_row[static_cast<size_t>(row)])};
  s.page_size = spec.page_size;
  s.form = PageTableForm::kCsr;
  Paged one(s);
  // The same pages as in the batch, so that both read one pool.
  const auto& list = pages_of[static_cast<size_t>(request_of_row[static_cast<size_t>(row)])];
  for (size_t c = 0; c < one.pages_of[0].size(); ++c) {
    one.pages_of[0][c] = list[c];
    one.indices.view.ptr<int32_t>()[c] = list[c];
  }
  return one;
}

// ---- pools --------------------------------------------------------------------------------------------------------

namespace {

template <class Cache>
std::shared_ptr<Buffer> make_pages(const Paged& paged, Cache& view, int64_t token_bytes, Poison poison, DType as,
                                   int64_t page_gap_bytes) {
  view.num_pages = paged.num_pages;
  view.page_size = paged.spec.page_size;
  const auto alignment = static_cast<int64_t>(kBaseAlignment);
  view.page_stride_bytes = (token_bytes * view.page_size + page_gap_bytes + alignment - 1) / alignment * alignment;
  auto buffer = std::make_shared<Buffer>(static_cast<size_t>(view.num_pages * view.page_stride_bytes), poison, as);
  view.data = buffer->data();
  return buffer;
}

std::vector<int64_t> used_slots(const Paged& paged) {
  std::vector<int64_t> slots;
  for (size_t i = 0; i < paged.keys_of.size(); ++i) {
    for (int64_t t = 0; t < paged.keys_of[i]; ++t) slots.push_back(paged.slot(static_cast<int64_t>(i), t));
  }
  return slots;
}

Tensor used_rows(const Paged& paged, int64_t width, uint64_t seed, bool integers) {
  int64_t total = 0;
  for (const int64_t k : paged.keys_of) total += k;
  Tensor rows = make_tensor(DType::kF32, {total, width});
  int64_t row = 0;
  for (size_t i = 0; i < paged.keys_of.size(); ++i) {
    for (int64_t t = 0; t < paged.keys_of[i]; ++t, ++row) {
      Rng rng = Rng::of(seed, i, static_cast<uint64_t>(t));
      float* x = rows.view.ptr<float>(row);
      for (int64_t d = 0; d < width; ++d)
        x[d] = integers ? static_cast<float>(rng.below(7) - 3) : static_cast<float>(rng.normal());
    }
  }
  return rows;
}

/// Makes the scales of odd positions anything but powers of two, which is what writers make but not all that is read.
void change_packed_scales(const Paged& paged, const LatentCacheView& cache) {
  constexpr int32_t kGroup = 128;
  for (size_t i = 0; i < paged.keys_of.size(); ++i) {
    for (int64_t t = 1; t < paged.keys_of[i]; t += 2) {
      std::byte* scales =
          cache.row(paged.slot(static_cast<int64_t>(i), t), cache.row_stride()) + cache.geometry.latent_dim;
      for (int32_t g = 0; g < cache.geometry.latent_dim / kGroup; ++g) {
        float scale;
        std::memcpy(&scale, scales + g * sizeof scale, sizeof scale);
        scale *= 0.7f + 0.1f * static_cast<float>(g);
        std::memcpy(scales + g * sizeof scale, &scale, sizeof scale);
      }
    }
  }
}

}  // namespace

LatentPool make_latent_pool(const Paged& paged, LatentFormat format, uint64_t seed, Poison poison,
                            int64_t page_gap_bytes, RowGeometry geometry, float scale, int64_t row_gap_bytes) {
  LatentPool pool;
  pool.view.format = format;
  pool.view.geometry = geometry;
  if (format == LatentFormat::kE4m3) pool.view.scale = scale;
  const DType as = format == LatentFormat::kF32    ? DType::kF32
                   : format == LatentFormat::kBf16 ? DType::kBf16
                                                   : DType::kE4m3;
  if (row_gap_bytes > 0) {
    const auto alignment = static_cast<int64_t>(kBaseAlignment);
    pool.view.row_stride_bytes =
        (latent_row_bytes(format, geometry) + row_gap_bytes + alignment - 1) / alignment * alignment;
  }
  pool.buffer = make_pages(paged, pool.view, pool.view.row_stride(), poison, as, page_gap_bytes);
  Tensor rows = used_rows(paged, geometry.width(), seed, false);
  std::vector<int64_t> slots = used_slots(paged);
  const auto n = static_cast<int64_t>(slots.size());
  LatentWrite p;
  p.latent = rows.view;
  p.latent.shape[1] = geometry.latent_dim;
  p.rope = rows.view;
  p.rope.shape[1] = geometry.rope_dim;
  p.rope.data = rows.view.ptr<float>() + geometry.latent_dim;
  p.slots = view(slots.data(), {n});
  p.cache = pool.view;
  run_once(Context{}, p, {.impl = "ref"});
  if (format == LatentFormat::kPacked656) change_packed_scales(paged, pool.view);
  return pool;
}

IndexPool make_index_pool(const Paged& paged, IndexKFormat format, ScaleFormat scale_format, int32_t head_dim,
                          uint64_t seed, Poison poison, int64_t page_gap_bytes, bool integers) {
  IndexPool pool;
  pool.view.format = format;
  pool.view.scale_format = scale_format;
  pool.view.head_dim = head_dim;
  const DType as = format == IndexKFormat::kF32    ? DType::kF32
                   : format == IndexKFormat::kBf16 ? DType::kBf16
                                                   : DType::kE4m3;
  pool.buffer = make_pages(paged, pool.view, index_k_token_bytes(format, head_dim), poison, as, page_gap_bytes);
  Tensor rows = used_rows(paged, head_dim, seed, integers);
  std::vector<int64_t> slots = used_slots(paged);
  IndexKWrite p;
  p.k = rows.view;
  p.slots = view(slots.data(), {static_cast<int64_t>(slots.size())});
  p.cache = pool.view;
  run_once(Context{}, p, {.impl = "ref"});
  return pool;
}

// ---- running ------------------------------------------------------------------------------------------------------

const std::vector<std::byte>& Outputs::of(const std::string& name) const {
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == name) return bytes[i];
  }
  throw Error(ErrorCode::kInvalidArgument, "[verify] no output named " + name);
}

std::vector<float> Outputs::floats(const std::string& name) const {
  const std::vector<std::byte>& raw = of(name);
  size_t i = 0;
  while (names[i] != name) ++i;
  std::vector<float> x(raw.size() / size_of(dtypes[i]));
  for (size_t e = 0; e < x.size(); ++e) {
    if (dtypes[i] == DType::kBf16) {
      Bf16 b;
      std::memcpy(&b, raw.data() + 2 * e, 2);
      x[e] = b.to_float();
    } else {
      std::memcpy(&x[e], raw.data() + 4 * e, 4);
    }
  }
  return x;
}

std::vector<int32_t> Outputs::ints(const std::string& name) const {
  const std::vector<std::byte>& raw = of(name);
  std::vector<int32_t> x(raw.size() / 4);
  if (!x.empty()) std::memcpy(x.data(), raw.data(), raw.size());
  return x;
}

namespace {

enum class Role { kInput, kOutput, kInOut };

template <class Params>
Role role_of(std::string_view name) {
  const auto is = [&](std::initializer_list<std::string_view> list) {
    return std::find(list.begin(), list.end(), name) != list.end();
  };
  if constexpr (std::is_same_v<Params, LatentGather>) {
    if (is({"latent", "rope"})) return Role::kOutput;
  } else if constexpr (std::is_same_v<Params, IndexKGather>) {
    if (is({"k"})) return Role::kOutput;
  } else if constexpr (std::is_same_v<Params, Rope>) {
    if (is({"x"})) return Role::kInOut;
  } else if constexpr (std::is_same_v<Params, MergeState>) {
    if (is({"out_a", "lse_a"})) return Role::kInOut;
  } else {
    if (is({"out", "lse", "max_logits", "logits", "positions", "counts", "topk_slots", "topk_lens",
            "topk_positions"})) {
      const bool reads = (std::is_same_v<Params, TopK> && name == "logits") ||
                         (std::is_same_v<Params, SparseAttention> && is({"topk_slots", "topk_lens"}));
      return reads ? Role::kInput : Role::kOutput;
    }
  }
  return Role::kInput;
}

template <class Params>
constexpr bool kWritesCache = std::is_same_v<Params, LatentWrite> || std::is_same_v<Params, IndexKWrite>;

Executor* pool_of(int num_workers) {
  if (num_workers <= 1) return nullptr;
  thread_local std::map<int, std::unique_ptr<ThreadPool>> pools;
  auto& pool = pools[num_workers];
  if (pool == nullptr) pool = std::make_unique<ThreadPool>(ThreadPoolOptions{.num_threads = num_workers, .cpus = {}});
  return pool.get();
}

DType poisoned_as(DType t) { return t == DType::kBf16 ? DType::kBf16 : DType::kF32; }

/// Bytes from the first element to behind the last.
size_t extent_of(const TensorView& v) {
  if (v.num_elements() == 0) return 0;
  int64_t last = 0;
  for (size_t d = 0; d < static_cast<size_t>(v.rank); ++d) last += (v.shape[d] - 1) * v.stride[d];
  return static_cast<size_t>(last + 1) * size_of(v.dtype);
}

}  // namespace

namespace {
/// Where the implementation of that name works; the CPU for an empty or unknown name.
template <class Params>
DeviceKind device_of(const std::string& impl) {
  for (const ImplInfo& info : list_implementations<Params>()) {
    if (info.name == impl) return info.device;
  }
  return DeviceKind::kCpu;
}
}  // namespace

template <class Params>
Outputs run(const Params& params, const RunOptions& options) {
  Params p = params;
  struct Rebound {
    std::string name;
    TensorView view;
    std::shared_ptr<Buffer> buffer;
  };
  std::vector<Rebound> outputs;
  Params::for_each_view(p, [&](const char* name, TensorView& v) {
    const Role role = role_of<Params>(name);
    if (!v.given() || role == Role::kInput) return;
    TensorView fresh = v;
    if (options.fp32_outputs && v.dtype == DType::kBf16) fresh.dtype = DType::kF32;
    auto buffer = std::make_shared<Buffer>(extent_of(fresh), options.poison, poisoned_as(fresh.dtype));
    fresh.data = buffer->data();
    if (role == Role::kInOut)
      for_each_index(v, [&](int64_t i, int64_t j, int64_t k) { set(fresh, get(v, i, j, k), i, j, k); });
    v = fresh;
    outputs.push_back({name, fresh, buffer});
  });
  Tensor wider_b;
  if constexpr (std::is_same_v<Params, MergeState>) {
    if (p.out_b.dtype != p.out_a.dtype) {  // side a became fp32: so does the other
      wider_b = make_tensor(DType::kF32, {p.out_b.shape[0], p.out_b.shape[1], p.out_b.shape[2]});
      for_each_index(p.out_b,
                     [&](int64_t i, int64_t j, int64_t k) { set(wider_b.view, get(p.out_b, i, j, k), i, j, k); });
      p.out_b = wider_b.view;
    }
  }
  std::shared_ptr<Buffer> cache;
  if constexpr (kWritesCache<Params>) {
    const auto size = static_cast<size_t>(extent_of(p.cache));
    cache = std::make_shared<Buffer>(size);
    if (size > 0) std::memcpy(cache->data(), p.cache.data, size);
    p.cache.data = cache->data();
  }

  const Context context{.executor = options.executor != nullptr ? options.executor : pool_of(options.num_workers),
                        .log = {}};
  Outputs result;
  if (device_of<Params>(options.impl) == DeviceKind::kCuda) {
    DeviceMirror mirror;
    const Params there = mirror.to_device(p);
    const OpPlan<Params> plan(context, there, {.impl = options.impl});
    plan.run(there, mirror.scratch(plan.workspace_bytes(), options.poison_workspace));
    mirror.copy_back();
  } else {
    const OpPlan<Params> plan(context, p, {.impl = options.impl});
    Buffer workspace(plan.workspace_bytes(), options.poison);
    plan.run(p, {workspace.data(), workspace.size()});
    if (!workspace.guards_intact()) result.fault = "bytes outside the workspace were written";
  }
  for (const Rebound& o : outputs) {
    if (!o.buffer->guards_intact()) result.fault = "bytes outside " + o.name + " were written";
    const size_t element = size_of(o.view.dtype);
    std::vector<std::byte> packed;
    std::vector<bool> owned(o.buffer->size(), false);
    for_each_index(o.view, [&](int64_t i, int64_t j, int64_t k) {
      const auto offset =
          static_cast<size_t>(i * o.view.stride[0] + j * o.view.stride[1] + k * o.view.stride[2]) * element;
      for (size_t b = 0; b < element; ++b) {
        owned[offset + b] = true;
        packed.push_back(o.buffer->data()[offset + b]);
      }
    });
    const Buffer before(o.buffer->size(), options.poison, poisoned_as(o.view.dtype));
    for (size_t b = 0; b < owned.size(); ++b) {
      if (!owned[b] && o.buffer->data()[b] != before.data()[b])
        result.fault = "gaps between rows of " + o.name + " were written";
    }
    result.names.push_back(o.name);
    result.dtypes.push_back(o.view.dtype);
    result.bytes.push_back(std::move(packed));
  }
  if (cache != nullptr) {
    if (!cache->guards_intact()) result.fault = "bytes outside the cache were written";
    result.names.push_back("cache");
    result.dtypes.push_back(DType::kU8);
    result.bytes.emplace_back(cache->data(), cache->data() + cache->size());
  }
  return result;
}

template Outputs run(const LatentWrite&, const RunOptions&);
template Outputs run(const LatentGather&, const RunOptions&);
template Outputs run(const IndexKWrite&, const RunOptions&);
template Outputs run(const IndexKGather&, const RunOptions&);
template Outputs run(const Rope&, const RunOptions&);
template Outputs run(const RaggedPrefill&, const RunOptions&);
template Outputs run(const MergeState&, const RunOptions&);
template Outputs run(const MlaDecode&, const RunOptions&);
template Outputs run(const IndexLogits&, const RunOptions&);
template Outputs run(const TopK&, const RunOptions&);
template Outputs run(const IndexSelect&, const RunOptions&);
template Outputs run(const SparseAttention&, const RunOptions&);

}  // namespace verify
}  // namespace v0
}  // namespace gannet
