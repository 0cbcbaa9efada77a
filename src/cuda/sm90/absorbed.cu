// Launches the Hopper kernel of absorbed attention: the shape of the schedule and its scratch.
#include <algorithm>

#include "cuda/common/check.h"
#include "cuda/common/launch.cuh"
#include "cuda/common/tensor_map.h"
#include "cuda/sm90/absorbed.cuh"
#include "cuda/sm90/absorbed_fp8.cuh"
#include "cuda/sm90/absorbed_packed.cuh"
#include "cuda/sm90/set.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace sm90 {

namespace {

struct Shape {
  int64_t num_groups, lanes_per_group, num_rows;
};

Shape shape_of(const MlaDecode& p) { return {p.rows.seq_lens.shape[0], p.q.shape[1] * p.rows.q_len, p.q.shape[0]}; }
Shape shape_of(const SparseAttention& p) { return {p.q.shape[0], p.q.shape[1], p.q.shape[0]}; }

/// Scratch: which groups were cut, and two partial results a part.
struct Layout {
  int num_parts, lane_blocks, num_slots, sms;
  int64_t partials;  // lanes of partial results
  size_t cut_bytes, partial_bytes, lse_bytes;
  size_t total() const { return cut_bytes + partial_bytes + lse_bytes; }
};

Layout layout_of(const char* function, const Shape& s, int device) {
  Layout l{};
  GANNET_CUDA(function, cudaDeviceGetAttribute(&l.sms, cudaDevAttrMultiProcessorCount, device));
  l.lane_blocks = static_cast<int>((s.lanes_per_group + kLanes - 1) / kLanes);
  l.num_parts = std::clamp(l.sms / l.lane_blocks, 1, kMaxParts);
  l.num_slots = static_cast<int>(std::min<int64_t>(s.num_groups, l.num_parts));
  l.partials = int64_t{2} * l.num_parts * l.lane_blocks * kLanes;
  l.cut_bytes = kMaxParts * sizeof(int4);
  l.partial_bytes = static_cast<size_t>(l.partials) * kLatent * sizeof(float);
  l.lse_bytes = static_cast<size_t>(l.partials) * sizeof(float);
  return l;
}

/// `bytes` from `from` on, shared by `blocks`; what is more than the L2 has room for beside the cache is left alone.
Early early_of(const void* from, int64_t bytes, int64_t blocks) {
  constexpr int64_t kMost = int64_t{16} << 20;
  constexpr uintptr_t kUnit = 16;
  const auto begin = (reinterpret_cast<uintptr_t>(from) + kUnit - 1) / kUnit * kUnit,
             end = (reinterpret_cast<uintptr_t>(from) + static_cast<uintptr_t>(bytes)) / kUnit * kUnit;
  if (bytes <= 0 || bytes > kMost || end <= begin) return {};
  const auto share = (end - begin + static_cast<uintptr_t>(blocks) - 1) / static_cast<uintptr_t>(blocks);
  return {reinterpret_cast<const unsigned char*>(begin), reinterpret_cast<const unsigned char*>(end),
          static_cast<uint32_t>((share + kUnit - 1) / kUnit * kUnit)};
}
Early early_list(const Dense& d, int64_t blocks) {
  constexpr int64_t kId = sizeof(int32_t);
  if (d.pages.indptr != nullptr) return early_of(d.pages.indices, d.pages.num_indices * kId, blocks);
  if (d.pages.num_table_rows == 0) return {};
  return early_of(d.pages.pages, ((d.pages.num_table_rows - 1) * d.pages.row_stride + d.pages.num_columns) * kId,
                  blocks);
}
Early early_list(const Sparse& s, int64_t blocks) {
  if (s.num_rows == 0) return {};
  return early_of(s.slots, ((s.num_rows - 1) * s.slots_row_stride + s.list_width) * int64_t{sizeof(int32_t)}, blocks);
}

template <class Params>
void fill_common(Common& c, const Params& p) {
  c.q = static_cast<const uint16_t*>(p.q.data);
  c.q_row_stride = p.q.stride[0];
  c.q_head_stride = p.q.stride[1];
  c.num_heads = static_cast<int>(p.q.shape[1]);
  c.num_rows = p.q.shape[0];
  c.cache = with_row_stride(p.cache);
  c.softmax_scale = p.softmax_scale;
  c.out = p.out.data;
  c.out_dtype = p.out.dtype;
  c.out_row_stride = p.out.stride[0];
  c.out_head_stride = p.out.stride[1];
  c.lse = p.lse.given() ? static_cast<float*>(p.lse.data) : nullptr;
  c.lse_row_stride = p.lse.given() ? p.lse.stride[0] : 0;
}

/// `kernel` and the merge of what it cut.
template <class Problem>
void launch(const char* function, void (*kernel)(Problem, Schedule, CUtensorMap), size_t shared_bytes, Problem& p,
            const Shape& s, Device device, const RunContext& c, const CUtensorMap& map) {
  const DeviceGuard guard(function, device.index);
  const Layout l = layout_of(function, s, device.index);
  p.partial = reinterpret_cast<float*>(c.workspace + l.cut_bytes);
  p.partial_lse = reinterpret_cast<float*>(c.workspace + l.cut_bytes + l.partial_bytes);
  Schedule schedule{};
  schedule.cuts = reinterpret_cast<int4*>(c.workspace);
  schedule.num_parts = l.num_parts;
  schedule.lane_blocks = l.lane_blocks;
  schedule.num_groups = static_cast<int>(s.num_groups);
  schedule.num_slots = l.num_slots;
  const int64_t blocks = int64_t{l.num_parts} * l.lane_blocks;
  const bool dense_rows = p.q_head_stride == kWidth && p.q_row_stride == p.num_heads * p.q_head_stride;
  const int64_t query_bytes = p.num_rows * p.q_row_stride * (p.q_e4m3 ? 1 : 2);
  if (dense_rows) schedule.early[0] = early_of(p.q, query_bytes, blocks);
  schedule.early[1] = early_list(p, blocks);
  launch_kernel(function, kernel, {.blocks = blocks, .threads = kThreads, .shared_bytes = shared_bytes}, c.stream, p,
                schedule, map);
  const int64_t merges = int64_t{l.num_slots} * s.lanes_per_group * kHalves;  // as many as there can be
  launch_kernel(function, combine_kernel<Problem>,
                {.blocks = std::min<int64_t>(2 * l.sms, merges), .threads = kCombineThreads}, c.stream, p, schedule);
}

template <bool kPages, class Problem>
void launch(const char* function, Problem& p, const Shape& s, Device device, const RunContext& c,
            const CUtensorMap& map) {
  launch<Problem>(function, absorbed_kernel<Problem, kPages>, kSharedBytes, p, s, device, c, map);
}

template <int kColumns>
void launch_fp8(const char* function, Dense& p, const Shape& s, Device device, const RunContext& c,
                const CUtensorMap& map) {
  launch<Dense>(function, fp8::absorbed_fp8_kernel<kColumns>, fp8::Config<kColumns>::kSharedBytes, p, s, device, c,
                map);
}

template <int kColumns>
void launch_packed(const char* function, Dense& p, const Shape& s, Device device, const RunContext& c) {
  launch<Dense>(function, packed::absorbed_packed_kernel<kColumns>, packed::Config<kColumns>::kSharedBytes, p, s,
                device, c, CUtensorMap{});
}

}  // namespace

bool has_boxes(const LatentCacheView& c) {
  constexpr int64_t kStrideLimit = int64_t{1} << 40;
  return c.num_pages > 0 && (c.page_size == kKeys / 2 || c.page_size % kKeys == 0) && c.page_stride_bytes % 16 == 0 &&
         c.page_stride_bytes < kStrideLimit && reinterpret_cast<uintptr_t>(c.data) % 16 == 0;
}

size_t workspace_mla_decode(const MlaDecode& p, int) {
  return layout_of(MlaDecode::kName, shape_of(p), p.q.device.index).total();
}
size_t workspace_sparse_attention(const SparseAttention& p, int) {
  return layout_of(SparseAttention::kName, shape_of(p), p.q.device.index).total();
}

void run_mla_decode(const MlaDecode& p, const RunContext& c) {
  Dense d{};
  fill_common(d, p);
  d.rows = make_rows(p.rows);
  d.pages = make_pages(p.pages);
  d.max_q_len = p.rows.q_len;
  if (p.cache.format == LatentFormat::kE4m3) {  // has boxes, or the set refuses it
    d.q_e4m3 = true;
    d.softmax_scale = p.softmax_scale * p.q_scale * p.cache.scale;
    const CUtensorMap map = map_pages(MlaDecode::kName, p.cache, std::min(p.cache.page_size, kKeys));
    const Shape s = shape_of(p);
    if (s.lanes_per_group <= 16) launch_fp8<16>(MlaDecode::kName, d, s, p.q.device, c, map);
    else if (s.lanes_per_group <= 32) launch_fp8<32>(MlaDecode::kName, d, s, p.q.device, c, map);
    else launch_fp8<64>(MlaDecode::kName, d, s, p.q.device, c, map);
  } else if (p.cache.format == LatentFormat::kPacked656) {  // up to kMaxPackedLanes, or the set refuses it
    const Shape s = shape_of(p);
    if (s.lanes_per_group <= 16) launch_packed<16>(MlaDecode::kName, d, s, p.q.device, c);
    else launch_packed<kMaxPackedLanes>(MlaDecode::kName, d, s, p.q.device, c);
  } else if (has_boxes(p.cache)) {
    const CUtensorMap map = map_pages(MlaDecode::kName, p.cache, std::min(p.cache.page_size, kKeys));
    launch<true>(MlaDecode::kName, d, shape_of(p), p.q.device, c, map);
  } else {
    launch<false>(MlaDecode::kName, d, shape_of(p), p.q.device, c, CUtensorMap{});
  }
}

void run_sparse_attention(const SparseAttention& p, const RunContext& c) {
  Sparse s{};
  fill_common(s, p);
  s.slots = static_cast<const int32_t*>(p.topk_slots.data);
  s.lens = p.topk_lens.given() ? static_cast<const int32_t*>(p.topk_lens.data) : nullptr;
  s.slots_row_stride = p.topk_slots.stride[0];
  s.list_width = p.topk_slots.shape[1];
  launch<false>(SparseAttention::kName, s, shape_of(p), p.q.device, c, CUtensorMap{});
}

}  // namespace sm90
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
