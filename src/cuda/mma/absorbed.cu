// Launches absorbed_kernel: which configuration, how many splits, how much scratch.
#include <algorithm>

#include "cuda/common/check.h"
#include "cuda/common/launch.cuh"
#include "cuda/mma/absorbed.cuh"
#include "cuda/mma/set.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace mma {

namespace {

// Lanes, keys and stages of a block. 64 lanes: as many as 128 accumulator registers allow. 16: a wider key tile
// instead, since eight warps share the keys. Shared memory 197, 161 and 174 KB: one block on a multiprocessor of sm_80
// has 163 KB, so stages are dropped there.
using Wide = Config<64, 32, 3>;
using WideSmall = Config<64, 32, 2>;
using Middle = Config<32, 32, 3>;
using Narrow = Config<16, 64, 2>;

struct Machine {
  int num_sms;
  size_t shared_bytes;
};

Machine machine(const char* function, int device) {
  int sms = 0, shared = 0;
  GANNET_CUDA(function, cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  GANNET_CUDA(function, cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return {sms, static_cast<size_t>(shared)};
}

struct Shape {
  int64_t groups, lanes_per_group, max_keys, num_rows, num_heads;
};

int lanes_of(const Shape& s) { return s.lanes_per_group <= 16 ? 16 : s.lanes_per_group <= 32 ? 32 : 64; }

/// As many splits as fill the chip once, each of at least kMinTiles tiles of 32 keys: below that the merge costs more
/// than the split saves.
int splits_of(const Shape& s, int num_sms) {
  constexpr int64_t kMinKeys = 256, kMaxSplits = 64;
  const int64_t blocks = s.groups * ((s.lanes_per_group + lanes_of(s) - 1) / lanes_of(s));
  const int64_t fill = num_sms / std::max<int64_t>(blocks, 1), room = s.max_keys / kMinKeys;
  return static_cast<int>(std::clamp<int64_t>(std::min(fill, room), 1, kMaxSplits));
}

size_t scratch_bytes(const Shape& s, int splits) {
  return splits == 1 ? 0 : static_cast<size_t>(splits * s.num_rows * s.num_heads) * (kLatent + 1) * sizeof(float);
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

template <class C, LatentFormat kFormat, class Problem>
void launch_config(const char* function, const Problem& p, int64_t groups, Stream stream) {
  const int64_t lane_blocks = (p.num_rows * p.num_heads / groups + C::kLanes - 1) / C::kLanes;
  launch_kernel(
      function, absorbed_kernel<C, kFormat, Problem>,
      {.blocks = groups * lane_blocks * p.num_splits, .threads = kThreads, .shared_bytes = C::kSharedBytes}, stream, p);
  if (p.num_splits > 1)
    launch_kernel(function, combine_kernel, {.blocks = p.num_rows * p.num_heads, .threads = kLatent / 4}, stream,
                  static_cast<const Common&>(p));
}

template <LatentFormat kFormat, class Problem>
void launch_format(const char* function, const Problem& p, const Shape& s, const Machine& m, Stream stream) {
  const int lanes = lanes_of(s);
  if (lanes == 16) launch_config<Narrow, kFormat>(function, p, s.groups, stream);
  else if (lanes == 32) launch_config<Middle, kFormat>(function, p, s.groups, stream);
  else if (m.shared_bytes >= Wide::kSharedBytes) launch_config<Wide, kFormat>(function, p, s.groups, stream);
  else launch_config<WideSmall, kFormat>(function, p, s.groups, stream);
}

template <class Problem>
void launch(const char* function, Problem& p, const Shape& s, Device device, const RunContext& c) {
  const DeviceGuard guard(function, device.index);
  const Machine m = machine(function, device.index);
  p.num_splits = splits_of(s, m.num_sms);
  p.partial = reinterpret_cast<float*>(c.workspace);
  p.partial_lse = p.partial + static_cast<int64_t>(p.num_splits) * s.num_rows * s.num_heads * kLatent;
  switch (p.cache.format) {
    case LatentFormat::kBf16: return launch_format<LatentFormat::kBf16>(function, p, s, m, c.stream);
    case LatentFormat::kE4m3: return launch_format<LatentFormat::kE4m3>(function, p, s, m, c.stream);
    case LatentFormat::kPacked656: return launch_format<LatentFormat::kPacked656>(function, p, s, m, c.stream);
    default: break;  // refused by the set
  }
}

Shape shape_of(const MlaDecode& p) {
  const int64_t columns = p.pages.form == PageTableForm::kPadded ? p.pages.pages.shape[1] : p.pages.indices.shape[0];
  return {p.rows.seq_lens.shape[0], p.q.shape[1] * p.rows.q_len, columns * p.cache.page_size, p.q.shape[0],
          p.q.shape[1]};
}

Shape shape_of(const SparseAttention& p) {
  return {p.q.shape[0], p.q.shape[1], p.topk_slots.shape[1], p.q.shape[0], p.q.shape[1]};
}

template <class Params>
size_t workspace(const Params& p) {
  const Shape s = shape_of(p);
  return scratch_bytes(s, splits_of(s, machine(Params::kName, p.q.device.index).num_sms));
}

}  // namespace

size_t workspace_mla_decode(const MlaDecode& p, int) { return workspace(p); }
size_t workspace_sparse_attention(const SparseAttention& p, int) { return workspace(p); }

void run_mla_decode(const MlaDecode& p, const RunContext& c) {
  Dense d{};
  fill_common(d, p);
  d.rows = make_rows(p.rows);
  d.pages = make_pages(p.pages);
  d.max_q_len = p.rows.q_len;
  launch(MlaDecode::kName, d, shape_of(p), p.q.device, c);
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
