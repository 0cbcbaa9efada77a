// Checks that operations share. A plan checks shapes, dtypes, strides and options once and reads no data; a run checks
// pointers, and on the CPU the contents that would lead a kernel outside its memory.
//
// Alignment: base pointers of data are multiples of 16 bytes, and so are the strides of their rows and pages.
// "Natural" tensors need the alignment of one element only: int32 and int64 tensors of any shape, and the small fp32
// ones that engines slice as they like: lse, lse_a, lse_b, max_logits, attn_sink, weights, logits, cos_sin.
#pragma once

#include <initializer_list>
#include <limits>
#include <string_view>

#include "core/format.h"
#include "gannet/op_plan.h"
#include "gannet/ops.h"

namespace gannet {
inline namespace v0 {

/// Throws unless the views agree in dtype, shape and stride.
void check_same_view(const char* function, const char* name, const TensorView& planned, const TensorView& given);
/// Throws unless data is set and aligned, for a view with elements.
void check_view_data(const char* function, const char* name, const TensorView& v);
/// Throws unless fp16 is absent, no size or stride is negative, the last stride is 1, the other strides keep rows
/// aligned (dimensions of size 1 aside), every offset fits 63 bits and the device is `device`.
void check_view_form(const char* function, const char* name, const TensorView& v, Device device);
/// Whether the tensor of this name and dtype is natural (see above).
bool is_natural(std::string_view name, DType dtype) noexcept;

/// One dimension of an accepted shape.
struct Axis {
  static constexpr int64_t kAny = -1;
  const char* label;
  int64_t size = kAny;  ///< kAny: any size of at least `minimum` that `multiple` divides
  int64_t minimum = 0;
  int64_t multiple = 1;
};

enum class Access : uint8_t { kRead, kWrite };

/// Throws unless v is given with one of the dtypes and of the shape. A tensor that is written has no two elements at
/// one address through a zero stride.
void check_tensor(const char* function, const char* name, const TensorView& v, std::initializer_list<DType> dtypes,
                  std::initializer_list<Axis> shape, Access access = Access::kRead);
/// The same where the tensor may be absent.
void check_optional(const char* function, const char* name, const TensorView& v, std::initializer_list<DType> dtypes,
                    std::initializer_list<Axis> shape, Access access = Access::kRead);

void check_softmax_scale(const char* function, float scale);
/// The scale of a query, and whether a cache of that format meets a query of that dtype.
void check_query_scale(const char* function, DType q, LatentFormat cache, float scale);
void check_cache(const char* function, const LatentCacheView& cache, Device device);
void check_cache(const char* function, const IndexCacheView& cache, Device device);
/// Throws unless keys or queries are rotated where the cache's are, and only there.
void check_hadamard(const char* function, const IndexCacheView& cache, bool hadamard);
/// The page table and the query rows of a call with `num_rows` rows.
void check_paged_rows(const char* function, const PageTableView& pages, const QueryRows& rows, int64_t num_rows);

inline constexpr int64_t kNoKeyLimit = std::numeric_limits<int64_t>::max();

// Contents. O(requests + pages) integer comparisons, never one per key: nothing beside the work they guard.

/// Throws unless cumulative rows start at 0, never fall and end at num_rows; CSR bounds never fall and lie inside the
/// list; every page that a row reaches exists; and no row sees more than max_keys keys.
void check_paged_contents(const char* function, const PageTableView& pages, const QueryRows& rows, int64_t num_rows,
                          int64_t num_pages, int32_t page_size, int64_t max_keys = kNoKeyLimit,
                          const char* max_keys_name = "");
/// Throws unless every slot is below num_slots. Negative ones are the operation's own business.
void check_slots(const char* function, const TensorView& slots, int64_t num_slots);
/// Throws unless v starts at 0 and never falls; `end` is the last value wanted, or the largest where `exact` is false.
void check_cumulative(const char* function, const char* name, const TensorView& v, int64_t end, bool exact);

template <class Params>
Device check_common(const Params& p) {
  Device device{};
  bool first = true;
  Params::for_each_view(p, [&](const char* name, const TensorView& v) {
    if (!v.given()) return;
    if (first) device = v.device;
    first = false;
    check_view_form(Params::kName, name, v, device);
  });
  return device;
}

template <class Params>
void check_data(const Params& p) {
  Params::for_each_view(p, [&](const char* name, const TensorView& v) { check_view_data(Params::kName, name, v); });
  if constexpr (requires { p.cache; }) {
    if (p.cache.data == nullptr && p.cache.num_pages > 0) fail_argument(Params::kName, "cache.data is null");
    if (reinterpret_cast<uintptr_t>(p.cache.data) % kBaseAlignment != 0)
      fail_argument(Params::kName, "cache.data is {}; accepted: a multiple of {} bytes", p.cache.data, kBaseAlignment);
  }
}

template <class Params>
void check_same_as_planned(const Params& planned, const Params& given) {
  TensorView before[24];
  int n = 0;
  Params::for_each_view(planned, [&](const char*, const TensorView& v) { before[n++] = v; });
  n = 0;
  Params::for_each_view(
      given, [&](const char* name, const TensorView& v) { check_same_view(Params::kName, name, before[n++], v); });
  if (!(planned.options() == given.options()))
    fail_argument(Params::kName, "options differ from the planned ones; make a new plan");
}

}  // namespace v0
}  // namespace gannet
