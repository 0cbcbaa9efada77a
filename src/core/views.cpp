#include "core/views.h"

#include <cmath>

namespace gannet {
inline namespace v0 {

namespace {

/// "fp32", "fp32 or bf16", "int32, int64 or ..."
std::string names_of(std::initializer_list<DType> dtypes) {
  std::string text;
  size_t i = 0;
  for (const DType d : dtypes) {
    text += fmt::format("{}{}", i == 0 ? "" : i + 1 == dtypes.size() ? " or " : ", ", to_string(d));
    ++i;
  }
  return text;
}

std::string names_of(std::initializer_list<Axis> shape) {
  std::string text;
  for (const Axis& a : shape) {
    if (!text.empty()) text += ", ";
    text += a.label;
    if (a.size != Axis::kAny) text += fmt::format(" = {}", a.size);
    else if (a.multiple > 1) text += fmt::format(", a positive multiple of {}", a.multiple);
    else if (a.minimum > 0) text += fmt::format(" >= {}", a.minimum);
  }
  return text;
}

bool fits(const Axis& a, int64_t size) {
  if (a.size != Axis::kAny) return size == a.size;
  return size >= a.minimum && size % a.multiple == 0 && (a.multiple == 1 || size > 0);
}

__extension__ typedef __int128 Wide;  // products of sizes that a caller may have made up

// A byte offset must fit an int64 with room for a kernel's own additions.
constexpr Wide kMaxOffset = static_cast<Wide>(1) << 62;

void check_page_stride(const char* function, const LatentCacheView& c, Wide page_bytes) {
  if (c.page_stride_bytes < page_bytes)
    fail_argument(function, "cache.page_stride_bytes is {}; accepted: {} rows at a distance of {} bytes or more",
                  c.page_stride_bytes, c.page_size, c.row_stride_bytes);
}

template <class Cache>
void check_pages(const char* function, const Cache& c, int64_t token_bytes, Device device) {
  if (!(c.device == device))
    fail_argument(function, "cache is on {}; the first argument is on {}", to_string(c.device), to_string(device));
  if (c.num_pages < 0) fail_argument(function, "cache.num_pages is {}; accepted: 0 or more", c.num_pages);
  if (c.page_size < 1) fail_argument(function, "cache.page_size is {}; accepted: 1 or more", c.page_size);
  if (c.page_stride_bytes < static_cast<Wide>(token_bytes) * c.page_size)
    fail_argument(function, "cache.page_stride_bytes is {}; accepted: {} tokens of {} bytes or more",
                  c.page_stride_bytes, c.page_size, token_bytes);
  if (c.page_stride_bytes % static_cast<int64_t>(kBaseAlignment) != 0)
    fail_argument(function, "cache.page_stride_bytes is {}; accepted: a multiple of {}", c.page_stride_bytes,
                  kBaseAlignment);
  if (static_cast<Wide>(c.num_pages) * c.page_stride_bytes > kMaxOffset)
    fail_argument(function, "cache.num_pages is {}; {} pages of {} bytes are more than any address", c.num_pages,
                  c.num_pages, c.page_stride_bytes);
}

/// Widths that keep every row and every plane of every format aligned, and vectors whole.
constexpr int32_t kWidthMultiple = 16;
/// Latent values that share a scale in a packed row.
constexpr int32_t kPackedGroup = 128;

}  // namespace

bool is_natural(std::string_view name, DType dtype) noexcept {
  if (dtype == DType::kI32 || dtype == DType::kI64) return true;
  for (const std::string_view small :
       {"lse", "lse_a", "lse_b", "max_logits", "attn_sink", "weights", "logits", "cos_sin"}) {
    if (name == small) return true;
  }
  return false;
}

void check_same_view(const char* function, const char* name, const TensorView& planned, const TensorView& given) {
  bool same = planned.rank == given.rank && planned.dtype == given.dtype && planned.device == given.device;
  for (size_t i = 0; same && i < static_cast<size_t>(given.rank); ++i)
    same = planned.shape[i] == given.shape[i] && planned.stride[i] == given.stride[i];
  if (!same) fail_argument(function, "{} is {}; planned was {}", name, describe(given), describe(planned));
}

void check_view_data(const char* function, const char* name, const TensorView& v) {
  if (v.num_elements() == 0) return;
  if (v.data == nullptr) fail_argument(function, "{}.data is null", name);
  const size_t alignment = is_natural(name, v.dtype) ? size_of(v.dtype) : kBaseAlignment;
  if (reinterpret_cast<uintptr_t>(v.data) % alignment != 0)
    fail_argument(function, "{}.data is {}; accepted: a multiple of {} bytes", name, v.data, alignment);
}

void check_view_form(const char* function, const char* name, const TensorView& v, Device device) {
  if (!(v.device == device))
    fail_argument(function, "{} is on {}; the first argument is on {}", name, to_string(v.device), to_string(device));
  const auto element = static_cast<int64_t>(size_of(v.dtype));
  const auto alignment = static_cast<int64_t>(is_natural(name, v.dtype) ? size_of(v.dtype) : kBaseAlignment);
  Wide extent = 0;
  for (size_t i = 0; i < static_cast<size_t>(v.rank); ++i) {
    const bool last = i + 1 == static_cast<size_t>(v.rank);
    if (v.shape[i] <= 1) continue;
    if (last && v.stride[i] != 1) fail_argument(function, "{} is {}; accepted: last stride 1", name, describe(v));
    if (v.stride[i] < 0) fail_argument(function, "{} is {}; accepted: strides of 0 or more", name, describe(v));
    if (!last && static_cast<Wide>(v.stride[i]) * element % alignment != 0)
      fail_argument(function, "{} is {}; accepted: strides that are multiples of {} bytes", name, describe(v),
                    alignment);
    extent += static_cast<Wide>(v.shape[i] - 1) * v.stride[i] * element;
    if (extent > kMaxOffset) fail_argument(function, "{} is {}; accepted: byte offsets below 2^62", name, describe(v));
  }
}

void check_tensor(const char* function, const char* name, const TensorView& v, std::initializer_list<DType> dtypes,
                  std::initializer_list<Axis> shape, Access access) {
  if (v.given() && v.dtype == DType::kF16)
    fail(ErrorCode::kUnsupported, function, "{} is fp16; accepted: {} (convert the tensor)", name, names_of(dtypes));
  bool good = v.rank == static_cast<int>(shape.size());
  bool dtype_good = false;
  for (const DType d : dtypes) dtype_good = dtype_good || v.dtype == d;
  size_t i = 0;
  for (const Axis& a : shape) {
    if (!good) break;
    good = v.shape[i] >= 0 && fits(a, v.shape[i]);
    ++i;
  }
  if (!good || !dtype_good)
    fail_argument(function, "{} is {}; accepted: {} [{}]", name, describe(v), names_of(dtypes), names_of(shape));
  if (access == Access::kWrite && v.num_elements() > 0) {
    for (size_t d = 0; d < static_cast<size_t>(v.rank); ++d) {
      if (v.shape[d] > 1 && v.stride[d] == 0)
        fail_argument(function, "{} is {}; accepted: positive strides, since it is written", name, describe(v));
    }
  }
}

void check_optional(const char* function, const char* name, const TensorView& v, std::initializer_list<DType> dtypes,
                    std::initializer_list<Axis> shape, Access access) {
  if (v.given()) check_tensor(function, name, v, dtypes, shape, access);
}

void check_softmax_scale(const char* function, float scale) {
  if (!std::isfinite(scale) || !(scale > 0.0f))
    fail_argument(function, "softmax_scale is {}; accepted: a finite positive number", scale);
}

void check_query_scale(const char* function, DType q, LatentFormat cache, float scale) {
  if (q != DType::kE4m3) {
    if (scale != 1.0f) fail_argument(function, "q_scale is {}; accepted: 1 (q is {})", scale, to_string(q));
    return;
  }
  if (cache != LatentFormat::kE4m3 && cache != LatentFormat::kE4m3PerToken)
    fail_argument(function, "q is e4m3 and the cache is {}; accepted: fp32 or bf16 (e4m3 with a cache of e4m3 or {})",
                  to_string(cache), to_string(LatentFormat::kE4m3PerToken));
  if (!std::isfinite(scale) || !(scale > 0.0f))
    fail_argument(function, "q_scale is {}; accepted: a finite positive number", scale);
}

void check_cache(const char* function, const LatentCacheView& c, Device device) {
  if (c.format > LatentFormat::kE4m3PerToken)
    fail_argument(function, "cache.format is {}; accepted: a LatentFormat", static_cast<int>(c.format));
  const RowGeometry g = c.geometry;
  const int32_t multiple = c.format == LatentFormat::kPacked656 ? kPackedGroup : kWidthMultiple;
  if (g.latent_dim <= 0 || g.latent_dim % multiple != 0)
    fail_argument(function, "cache.geometry.latent_dim is {}; accepted: a positive multiple of {} (format {})",
                  g.latent_dim, multiple, to_string(c.format));
  if (g.rope_dim <= 0 || g.rope_dim % kWidthMultiple != 0)
    fail_argument(function, "cache.geometry.rope_dim is {}; accepted: a positive multiple of {}", g.rope_dim,
                  kWidthMultiple);
  if (g.latent_dim > std::numeric_limits<int32_t>::max() / 2 || g.rope_dim > std::numeric_limits<int32_t>::max() / 2)
    fail_argument(function, "cache.geometry is {} + {}; accepted: a sum below 2^31", g.latent_dim, g.rope_dim);
  if (c.format == LatentFormat::kE4m3 && !(std::isfinite(c.scale) && c.scale > 0.0f))
    fail_argument(function, "cache.scale is {}; accepted: a finite positive number (1 for a checkpoint without scales)",
                  c.scale);
  const int64_t row_bytes = latent_row_bytes(c.format, g);
  if (c.row_stride_bytes != 0) {
    if (c.format == LatentFormat::kE4m3PerToken)
      fail_argument(function, "cache.row_stride_bytes is {}; accepted: 0 (format {}, whose pages are planes)",
                    c.row_stride_bytes, to_string(c.format));
    const bool apart = c.row_stride_bytes > row_bytes && c.row_stride_bytes % static_cast<int64_t>(kBaseAlignment) == 0;
    if (c.row_stride_bytes != row_bytes && !apart)
      fail_argument(function, "cache.row_stride_bytes is {}; accepted: 0, or a multiple of {} from {} (a row)",
                    c.row_stride_bytes, kBaseAlignment, row_bytes);
    check_page_stride(function, c, static_cast<Wide>(c.row_stride_bytes) * (c.page_size - 1) + row_bytes);
  }
  check_pages(function, c, row_bytes, device);
}

void check_cache(const char* function, const IndexCacheView& c, Device device) {
  if (c.format > IndexKFormat::kE4m3)
    fail_argument(function, "cache.format is {}; accepted: an IndexKFormat", static_cast<int>(c.format));
  if (c.scale_format > ScaleFormat::kPowerOfTwo)
    fail_argument(function, "cache.scale_format is {}; accepted: a ScaleFormat", static_cast<int>(c.scale_format));
  if (c.head_dim <= 0 || c.head_dim % kWidthMultiple != 0)
    fail_argument(function, "cache.head_dim is {}; accepted: a positive multiple of {}", c.head_dim, kWidthMultiple);
  if (c.hadamard && (c.head_dim & (c.head_dim - 1)) != 0)
    fail_argument(function, "cache.head_dim is {}; accepted: a power of two (hadamard is true)", c.head_dim);
  check_pages(function, c, index_k_token_bytes(c.format, c.head_dim), device);
}

void check_hadamard(const char* function, const IndexCacheView& cache, bool hadamard) {
  if (hadamard != cache.hadamard)
    fail_argument(function, "hadamard is {}; accepted: {}, as the cache has it: rotated rows and others never mix",
                  hadamard, cache.hadamard);
}

void check_paged_rows(const char* function, const PageTableView& pages, const QueryRows& rows, int64_t num_rows) {
  if (rows.bound > RowBound::kUniformBlock)
    fail_argument(function, "rows.bound is {}; accepted: a RowBound", static_cast<int>(rows.bound));
  check_tensor(function, "seq_lens", rows.seq_lens, {DType::kI32}, {{"num_requests"}});
  const int64_t num_requests = rows.seq_lens.shape[0];
  if (rows.cu_q_lens.given()) {
    check_tensor(function, "cu_q_lens", rows.cu_q_lens, {DType::kI32}, {{"num_requests + 1", num_requests + 1}});
  } else {
    if (rows.q_len < 1) fail_argument(function, "rows.q_len is {}; accepted: 1 or more", rows.q_len);
    if (static_cast<Wide>(num_requests) * rows.q_len != num_rows)
      fail_argument(function, "q has {} rows; accepted: num_requests * q_len = {} * {}", num_rows, num_requests,
                    rows.q_len);
  }
  switch (pages.form) {
    case PageTableForm::kPadded:
      if (pages.indptr.given() || pages.indices.given())
        fail_argument(function, "indptr or indices is given; accepted: neither in the padded form of a page table");
      check_tensor(function, "pages", pages.pages, {DType::kI32}, {{"table_rows"}, {"max_pages"}});
      check_optional(function, "row_indices", pages.row_indices, {DType::kI32}, {{"num_requests", num_requests}});
      if (!pages.row_indices.given() && pages.pages.shape[0] < num_requests)
        fail_argument(function, "pages is {}; accepted: a row for each of {} requests, or row_indices",
                      describe(pages.pages), num_requests);
      break;
    case PageTableForm::kCsr:
      if (pages.pages.given() || pages.row_indices.given())
        fail_argument(function, "pages or row_indices is given; accepted: neither in the CSR form of a page table");
      check_tensor(function, "indptr", pages.indptr, {DType::kI32}, {{"num_requests + 1", num_requests + 1}});
      check_tensor(function, "indices", pages.indices, {DType::kI32}, {{"num_pages_listed"}});
      break;
    default: fail_argument(function, "pages.form is {}; accepted: a PageTableForm", static_cast<int>(pages.form));
  }
}

void check_cumulative(const char* function, const char* name, const TensorView& v, int64_t end, bool exact) {
  const auto* x = v.ptr<int32_t>();
  const int64_t n = v.shape[0];
  if (x[0] != 0) fail_argument(function, "{}[0] is {}; accepted: 0", name, x[0]);
  for (int64_t i = 1; i < n; ++i) {
    if (x[i] < x[i - 1])
      fail_argument(function, "{}[{}] is {}, less than the {} before it; accepted: values that never fall", name, i,
                    x[i], x[i - 1]);
  }
  if (exact ? x[n - 1] != end : x[n - 1] > end)
    fail_argument(function, "{} ends at {}; accepted: {}{} rows", name, x[n - 1], exact ? "" : "at most ", end);
}

void check_paged_contents(const char* function, const PageTableView& pages, const QueryRows& rows, int64_t num_rows,
                          int64_t num_pages, int32_t page_size, int64_t max_keys, const char* max_keys_name) {
  const int64_t num_requests = rows.seq_lens.shape[0];
  if (rows.cu_q_lens.given()) check_cumulative(function, "cu_q_lens", rows.cu_q_lens, num_rows, true);
  for (int64_t i = 0; i < num_requests; ++i) {
    const int32_t* list = nullptr;
    int64_t columns = 0;
    if (pages.form == PageTableForm::kPadded) {
      const int64_t row = pages.row_indices.given() ? *pages.row_indices.ptr<int32_t>(i) : i;
      if (row < 0 || row >= pages.pages.shape[0])
        fail_argument(function, "row_indices[{}] is {}; accepted: 0 to {}", i, row, pages.pages.shape[0] - 1);
      columns = pages.pages.shape[1];
      list = pages.pages.ptr<int32_t>(row);
    } else {
      const int64_t begin = *pages.indptr.ptr<int32_t>(i);
      const int64_t end = *pages.indptr.ptr<int32_t>(i + 1);
      if (begin < 0 || end < begin || end > pages.indices.shape[0])
        fail_argument(function, "indptr[{}] and the next are {} and {}; accepted: rising, within the {} indices", i,
                      begin, end, pages.indices.shape[0]);
      columns = end - begin;
      list = pages.indices.ptr<int32_t>(begin);
    }
    const int64_t num_rows_here =
        rows.cu_q_lens.given() ? *rows.cu_q_lens.ptr<int32_t>(i + 1) - *rows.cu_q_lens.ptr<int32_t>(i) : rows.q_len;
    if (num_rows_here == 0) continue;
    // The last row sees the most under every bound.
    int64_t keys = row_bound(rows.bound, *rows.seq_lens.ptr<int32_t>(i), num_rows_here, num_rows_here - 1);
    if ((keys + page_size - 1) / page_size > columns) keys = columns * page_size;
    if (keys > max_keys)
      fail_argument(function, "request {} sees {} keys; accepted: at most {} ({})", i, keys, max_keys, max_keys_name);
    const int64_t used = (keys + page_size - 1) / page_size;
    for (int64_t c = 0; c < used; ++c) {
      if (list[c] < 0 || list[c] >= num_pages)
        fail_argument(function, "page {} of request {} is {}; accepted: 0 to {} (pages of the cache)", c, i, list[c],
                      num_pages - 1);
    }
  }
}

void check_slots(const char* function, const TensorView& slots, int64_t num_slots) {
  for (int64_t t = 0; t < slots.shape[0]; ++t) {
    const int64_t slot = slots.dtype == DType::kI64 ? *slots.ptr<int64_t>(t) : *slots.ptr<int32_t>(t);
    if (slot >= num_slots)
      fail_argument(function, "slots[{}] is {}; accepted: less than {} (slots of the cache), negative for none", t,
                    slot, num_slots);
  }
}

}  // namespace v0
}  // namespace gannet
