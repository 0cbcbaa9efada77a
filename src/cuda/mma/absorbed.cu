// Launches absorbed_kernel: which configuration, how many parts, how much scratch.
#include "cuda/mma/absorbed.cuh"

#include <algorithm>
#include <bit>
#include <type_traits>

#include "cuda/common/check.h"
#include "cuda/common/launch.cuh"
#include "cuda/mma/set.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace mma {

namespace {

// Lanes and stages of a block: 226, 189 and 169 KB on sm_90 and newer; 154 and 95 where a block has less.
using Wide = Config<64, 2>;
using Middle = Config<32, 2>;
using Narrow = Config<16, 2>;
using WideSmall = Config<64, 1>;
using NarrowSmall = Config<16, 1>;

struct Shape {
  int64_t num_groups, lanes_per_group;
};

Shape shape_of(const MlaDecode& p) { return {p.rows.seq_lens.shape[0], p.q.shape[1] * p.rows.q_len}; }
Shape shape_of(const SparseAttention& p) { return {p.q.shape[0], p.q.shape[1]}; }

/// Calls f with the configuration for so many lanes that the device has shared memory for. Requests with ragged rows
/// may have any number of lanes, and take the widest.
template <class Problem, class F>
auto with_config(const char* function, int64_t lanes, int device, F&& f) {
  int shared = 0;
  GANNET_CUDA(function, cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  if constexpr (!std::is_same_v<Problem, Ragged>) {
    if (lanes <= Narrow::kLanes) return shared >= Narrow::kSharedBytes ? f(Narrow{}) : f(NarrowSmall{});
    if (lanes <= Middle::kLanes && shared >= Middle::kSharedBytes) return f(Middle{});
  }
  if (shared >= Wide::kSharedBytes) return f(Wide{});
  return shared >= WideSmall::kSharedBytes ? f(WideSmall{}) : f(NarrowSmall{});
}

/// Scratch: which groups were cut, and two partial results a part with their LSE and largest scores.
struct Layout {
  int num_parts, lane_blocks;
  int64_t partials;  // lanes of partial results
  size_t cut_bytes, partial_bytes;
  size_t total() const { return cut_bytes + partial_bytes + 2 * static_cast<size_t>(partials) * sizeof(float); }
};

template <class C>
Layout layout_of(const char* function, const Shape& s, int device) {
  int sms = 0;
  GANNET_CUDA(function, cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  Layout l{};
  l.lane_blocks = static_cast<int>((s.lanes_per_group + C::kLanes - 1) / C::kLanes);
  l.num_parts = std::clamp(sms / l.lane_blocks, 1, kMaxParts);
  l.partials = int64_t{2} * l.num_parts * l.lane_blocks * C::kLanes;
  l.cut_bytes = 2 * kMaxParts * sizeof(int);
  l.partial_bytes = static_cast<size_t>(l.partials) * kLatent * sizeof(float);
  return l;
}

template <class Params>
void fill_common(Common& c, const Params& p) {
  c.q = static_cast<const uint16_t*>(p.q.data);
  c.q_e4m3 = p.q.dtype == DType::kE4m3;
  c.q_row_stride = p.q.stride[0];
  c.q_head_stride = p.q.stride[1];
  c.num_heads = static_cast<int>(p.q.shape[1]);
  c.num_rows = p.q.shape[0];
  c.cache = with_row_stride(p.cache);
  c.softmax_scale = p.softmax_scale * p.q_scale;
  c.out = p.out.data;
  c.out_dtype = p.out.dtype;
  c.out_row_stride = p.out.stride[0];
  c.out_head_stride = p.out.stride[1];
  c.lse = p.lse.given() ? static_cast<float*>(p.lse.data) : nullptr;
  c.lse_row_stride = p.lse.given() ? p.lse.stride[0] : 0;
  c.sink = p.attn_sink.given() ? static_cast<const float*>(p.attn_sink.data) : nullptr;
  c.max_logits = p.max_logits.given() ? static_cast<float*>(p.max_logits.data) : nullptr;
  c.max_row_stride = p.max_logits.given() ? p.max_logits.stride[0] : 0;
}

template <class C, LatentFormat kFormat, class Operands = Bf16Operands, class Problem>
void launch_config(const char* function, Problem& p, const Shape& s, int device, const RunContext& c) {
  const Layout l = layout_of<C>(function, s, device);
  p.partial = reinterpret_cast<float*>(c.workspace + l.cut_bytes);
  p.partial_lse = reinterpret_cast<float*>(c.workspace + l.cut_bytes + l.partial_bytes);
  Schedule schedule{};
  schedule.cut_group = reinterpret_cast<int*>(c.workspace);
  schedule.cut_parts = schedule.cut_group + kMaxParts;
  schedule.partial_max = p.partial_lse + l.partials;
  schedule.num_parts = l.num_parts;
  schedule.lane_blocks = l.lane_blocks;
  schedule.num_groups = static_cast<int>(s.num_groups);
  const auto page_size = static_cast<uint32_t>(p.cache.page_size);
  schedule.page_shift = std::has_single_bit(page_size) ? std::countr_zero(page_size) : -1;
  const int64_t blocks = int64_t{l.num_parts} * l.lane_blocks;
  launch_kernel(function, absorbed_kernel<C, kFormat, Operands, Problem>,
                {.blocks = blocks, .threads = kThreads, .shared_bytes = C::kSharedBytes}, c.stream, p, schedule);
  launch_kernel(function, combine_kernel<C::kLanes, Problem>,
                {.blocks = blocks * (C::kLanes / kCombineLanes), .threads = kCombineThreads}, c.stream, p, schedule);
}

template <class Problem>
void launch(const char* function, Problem& p, Shape s, Device device, const RunContext& c) {
  const DeviceGuard guard(function, device.index);
  with_config<Problem>(function, s.lanes_per_group, device.index, [&](auto config) {
    using C = decltype(config);
    if constexpr (std::is_same_v<Problem, Ragged>) {  // a group is a block of lanes: see there
      p.block = C::kLanes;
      s = {p.num_rows * p.num_heads / C::kLanes + p.rows.num_requests + 1, C::kLanes};
    }
    switch (p.cache.format) {
      case LatentFormat::kBf16: return launch_config<C, LatentFormat::kBf16>(function, p, s, device.index, c);
      case LatentFormat::kE4m3:
        if (p.q_e4m3) return launch_config<C, LatentFormat::kE4m3, HalfOperands>(function, p, s, device.index, c);
        return launch_config<C, LatentFormat::kE4m3>(function, p, s, device.index, c);
      case LatentFormat::kPacked656: return launch_config<C, LatentFormat::kPacked656>(function, p, s, device.index, c);
      default: break;  // refused by the set
    }
  });
}

template <class Problem>
size_t workspace(const char* function, const Shape& s, Device device) {
  return with_config<Problem>(function, s.lanes_per_group, device.index, [&](auto config) {
    using C = decltype(config);
    const int64_t lanes = std::is_same_v<Problem, Ragged> ? C::kLanes : s.lanes_per_group;
    return layout_of<C>(function, {s.num_groups, lanes}, device.index).total();
  });
}

}  // namespace

size_t workspace_mla_decode(const MlaDecode& p, int) {
  const Device device = p.q.device;
  return p.rows.cu_q_lens.given() ? workspace<Ragged>(MlaDecode::kName, shape_of(p), device)
                                  : workspace<Dense>(MlaDecode::kName, shape_of(p), device);
}
size_t workspace_sparse_attention(const SparseAttention& p, int) {
  return workspace<Sparse>(SparseAttention::kName, shape_of(p), p.q.device);
}

void run_mla_decode(const MlaDecode& p, const RunContext& c) {
  const auto run = [&](auto d) {
    fill_common(d, p);
    d.rows = make_rows(p.rows);
    d.pages = make_pages(p.pages);
    d.max_q_len = p.rows.q_len;
    launch(MlaDecode::kName, d, shape_of(p), p.q.device, c);
  };
  if (p.rows.cu_q_lens.given()) run(Ragged{});
  else run(Dense{});
}

void run_sparse_attention(const SparseAttention& p, const RunContext& c) {
  Sparse s{};
  fill_common(s, p);
  s.slots = static_cast<const int32_t*>(p.topk_slots.data);
  s.lens = p.topk_lens.given() ? static_cast<const int32_t*>(p.topk_lens.data) : nullptr;
  s.slots_row_stride = p.topk_slots.stride[0];
  s.list_width = p.topk_slots.shape[1];
  launch(SparseAttention::kName, s, shape_of(p), p.q.device, c);
}

}  // namespace mma
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
