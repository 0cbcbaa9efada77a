// The decoder's kernels beside attention and projections. All but the experts move bytes: one block a row, or one
// thread a value, and no attempt at fusion.
//
// The experts: a grouped product over pairs (row, choice) sorted by expert. A block owns kRows places of one expert and
// kCols outputs; which expert is found from `first`, on the device, so that a step needs no word from the host and can
// be captured. fp32 weights: multiply-adds over fp32 activations, exact enough for any check. bf16 weights: tensor
// cores over activations rounded to bf16; the scalar loops took 109 us for the first half of 64 rows.
// Steps of few rows have kernels of their own: few_rows.cuh.
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cfloat>

#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "model/cuda/block.cuh"
#include "model/cuda/kernels.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace {

constexpr const char* kName = "decoder";  // in errors
constexpr int kThreads = 256;
constexpr unsigned kFull = 0xffffffffu;

unsigned blocks_for(int64_t n) { return static_cast<unsigned>((n + kThreads - 1) / kThreads); }

__device__ float block_sum(float x) {
  __shared__ float partial[kThreads / 32];
  return cuda::block_sum<kThreads / 32>(x, partial);
}

template <class F>
__global__ void each_kernel(int64_t n, F f) {
  wait_for_stream();
  let_next_start();
  const int64_t i = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  if (i < n) f(i);
}
template <class F>
void each(int64_t n, Stream stream, F f) {
  if (n > 0) launch_kernel(kName, each_kernel<F>, {.blocks = blocks_for(n), .threads = kThreads}, stream, n, f);
}

__global__ void __launch_bounds__(kThreads)
    rms_norm_kernel(const float* x, int64_t x_stride, int64_t dim, const float* weight, float eps, float* y,
                    int64_t y_stride) {
  wait_for_stream();
  let_next_start();
  const float* in = x + blockIdx.x * x_stride;
  float* out = y + blockIdx.x * y_stride;
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) squares += in[i] * in[i];
  const float scale = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(dim) + eps);
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) out[i] = in[i] * scale * weight[i];
}

__global__ void __launch_bounds__(kThreads)
    layer_norm_kernel(const float* x, int64_t dim, const float* weight, const float* bias, float eps, float* y) {
  wait_for_stream();
  let_next_start();
  const float* in = x + blockIdx.x * dim;
  float* out = y + blockIdx.x * dim;
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) sum += in[i];
  const float mean = block_sum(sum) / static_cast<float>(dim);
  float squares = 0.0f;  // two passes: mean(x^2) - mean^2 would cancel
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) squares += (in[i] - mean) * (in[i] - mean);
  const float scale = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(dim) + eps);
  for (int64_t i = threadIdx.x; i < dim; i += kThreads) out[i] = (in[i] - mean) * scale * weight[i] + bias[i];
}

// ---- routing ------------------------------------------------------------------------------------------------------

constexpr int kMaxExperts = 512;

/// The block's largest value and, among equals, its smallest index; every thread gets both.
__device__ void block_best(float& value, int& index) {
  __shared__ float values[kThreads / 32];
  __shared__ int indices[kThreads / 32];
  const auto better = [](float a, int i, float b, int j) { return a > b || (a == b && i < j); };
  for (int offset = 16; offset > 0; offset /= 2) {
    const float v = __shfl_xor_sync(kFull, value, offset);
    const int i = __shfl_xor_sync(kFull, index, offset);
    if (better(v, i, value, index)) value = v, index = i;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = value, indices[threadIdx.x / 32] = index;
  __syncthreads();
  value = values[0], index = indices[0];
  for (int w = 1; w < kThreads / 32; ++w)
    if (better(values[w], indices[w], value, index)) value = values[w], index = indices[w];
}

/// One block a row, whose logits, ids and weights these are. Scores, choices and groups are those of route_experts, in
/// its order of operations.
__device__ void route_row(const RouterParams& p, const float* logits, const float* bias, int32_t* ids, float* weights) {
  __shared__ float scores[kMaxExperts], choices[kMaxExperts], groups[kMaxExperts];
  __shared__ bool kept[kMaxExperts];
  const int group_size = p.num_experts / p.num_groups;
  constexpr float kNever = -INFINITY;
  for (int e = threadIdx.x; e < p.num_experts; e += kThreads) {
    scores[e] = 1.0f / (1.0f + expf(-logits[e]));
    choices[e] = scores[e] + bias[e];
  }
  __syncthreads();
  if (p.groups_kept < p.num_groups) {
    for (int g = threadIdx.x; g < p.num_groups; g += kThreads) {
      float first = kNever, second = kNever;
      for (int i = 0; i < group_size; ++i) {
        const float v = choices[g * group_size + i];
        if (v > first) second = first, first = v;
        else if (v > second) second = v;
      }
      groups[g] = group_size > 1 ? first + second : first;
      kept[g] = false;
    }
    __syncthreads();
    if (threadIdx.x == 0) {  // a handful of groups
      for (int i = 0; i < p.groups_kept; ++i) {
        int best = -1;
        for (int g = 0; g < p.num_groups; ++g)
          if (!kept[g] && (best < 0 || groups[g] > groups[best])) best = g;
        kept[best] = true;
      }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < p.num_experts; e += kThreads)
      if (!kept[e / group_size]) choices[e] = kNever;
    __syncthreads();
  }
  // Taken ones must lose even to -inf: they get an index beyond all others.
  float sum = 0.0f;
  __shared__ bool taken[kMaxExperts];
  for (int e = threadIdx.x; e < p.num_experts; e += kThreads) taken[e] = false;
  __syncthreads();
  for (int j = 0; j < p.experts_per_token; ++j) {
    float value = kNever;
    int index = kMaxExperts;
    for (int e = threadIdx.x; e < p.num_experts; e += kThreads)
      if (!taken[e] && (choices[e] > value || index == kMaxExperts)) value = choices[e], index = e;
    block_best(value, index);
    index = min(index, p.num_experts - 1);  // nothing compares with NaN: some expert, but one that there is
    if (threadIdx.x == 0) {
      taken[index] = true;
      ids[j] = index;
      sum += scores[index];
    }
    __syncthreads();
  }
  if (threadIdx.x != 0) return;
  for (int j = 0; j < p.experts_per_token; ++j) {
    float w = scores[ids[j]];
    if (p.normalise) w /= sum + 1e-20f;
    weights[j] = w * p.scaling_factor;
  }
}

__global__ void __launch_bounds__(kThreads)
    route_kernel(RouterParams p, const float* logits, const float* bias, int32_t* ids, float* weights) {
  wait_for_stream();
  let_next_start();
  const int64_t row = blockIdx.x, pairs = row * p.experts_per_token;
  route_row(p, logits + row * p.num_experts, bias, ids + pairs, weights + pairs);
}

struct NormRouteParams {
  RouterParams router;
  const float* x;
  int64_t dim;
  const float* norm;
  float eps;
  const float *weight, *bias;
  int32_t* ids;
  float* weights;
};

/// route_row for up to 32 experts by one warp: lane e has the logit of expert e. The same operations in the same order.
__device__ void route_row_by_warp(const RouterParams& p, float logit, const float* bias, int32_t* ids, float* weights) {
  const int lane = static_cast<int>(threadIdx.x) % 32, group_size = p.num_experts / p.num_groups;
  const bool there = lane < p.num_experts;
  constexpr float kNever = -INFINITY;
  const float score = 1.0f / (1.0f + expf(-logit));
  float choice = there ? score + bias[lane] : kNever;
  if (p.groups_kept < p.num_groups) {
    const int group = there ? lane / group_size : 0;
    float first = kNever, second = kNever;
    for (int i = 0; i < group_size; ++i) {
      const float v = __shfl_sync(kFull, choice, group * group_size + i);
      if (v > first) second = first, first = v;
      else if (v > second) second = v;
    }
    const float value = group_size > 1 ? first + second : first;
    unsigned kept = 0;
    for (int i = 0; i < p.groups_kept; ++i) {
      int best = -1;
      float best_value = kNever;
      for (int g = 0; g < p.num_groups; ++g) {
        const float v = __shfl_sync(kFull, value, g * group_size);
        if ((kept >> g & 1u) == 0 && (best < 0 || v > best_value)) best = g, best_value = v;
      }
      kept |= 1u << best;
    }
    if ((kept >> group & 1u) == 0) choice = kNever;
  }
  bool taken = !there;
  float sum = 0.0f;
  int mine = 0;  // lane j: the index of choice j
  for (int j = 0; j < p.experts_per_token; ++j) {
    float value = taken ? kNever : choice;
    int index = taken ? kMaxExperts : lane;
    for (int offset = 16; offset > 0; offset /= 2) {
      const float v = __shfl_xor_sync(kFull, value, offset);
      const int i = __shfl_xor_sync(kFull, index, offset);
      if (v > value || (v == value && i < index)) value = v, index = i;
    }
    index = __shfl_sync(kFull, min(index, p.num_experts - 1), 0);  // with NaN lanes may differ
    if (lane == index) taken = true;
    if (lane == j) mine = index;
    sum += __shfl_sync(kFull, score, index);
  }
  float weight = __shfl_sync(kFull, score, mine);
  if (p.normalise) weight /= sum + 1e-20f;
  if (lane >= p.experts_per_token) return;
  ids[lane] = mine;
  weights[lane] = weight * p.scaling_factor;
}

/// A block a row; a warp an expert's logit, in fp32 like all that decides a routing. The norm's factor is applied to
/// the sums.
__global__ void __launch_bounds__(kThreads) norm_route_kernel(const __grid_constant__ NormRouteParams a) {
  wait_for_stream();
  let_next_start();
  __shared__ float logits[kMaxExperts];
  const int64_t row = blockIdx.x, pairs = row * a.router.experts_per_token;
  const float* x = a.x + row * a.dim;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int e = static_cast<int>(threadIdx.x) / 32; e < a.router.num_experts; e += kThreads / 32) {
    const float* weight = a.weight + e * a.dim;
    float squares = 0.0f, sum = 0.0f;
#pragma unroll 8
    for (int64_t i = lane; i < a.dim; i += 32) {
      squares += x[i] * x[i];
      sum += x[i] * a.norm[i] * weight[i];
    }
    for (int offset = 16; offset > 0; offset /= 2) {
      squares += __shfl_xor_sync(kFull, squares, offset);
      sum += __shfl_xor_sync(kFull, sum, offset);
    }
    if (lane == 0) logits[e] = sum * (1.0f / sqrtf(squares / static_cast<float>(a.dim) + a.eps));
  }
  __syncthreads();
  if (a.router.num_experts > 32) return route_row(a.router, logits, a.bias, a.ids + pairs, a.weights + pairs);
  if (threadIdx.x < 32)
    route_row_by_warp(a.router, lane < a.router.num_experts ? logits[lane] : 0.0f, a.bias, a.ids + pairs,
                      a.weights + pairs);
}

/// A block an expert: it counts the pairs of the experts before its own, then lists its own in their order.
__global__ void __launch_bounds__(kThreads)
    sort_pairs_kernel(const int32_t* ids, int64_t pairs, int32_t* first, int32_t* order, int32_t* place_of) {
  wait_for_stream();
  let_next_start();
  __shared__ int counts[kThreads / 32];
  const int expert = static_cast<int>(blockIdx.x), warp = static_cast<int>(threadIdx.x) / 32;
  const unsigned below = (1u << (threadIdx.x % 32)) - 1;
  int before = 0;
  for (int64_t p = threadIdx.x; p < pairs; p += kThreads) before += ids[p] < expert ? 1 : 0;
  for (int offset = 16; offset > 0; offset /= 2) before += __shfl_xor_sync(kFull, before, offset);
  if (threadIdx.x % 32 == 0) counts[warp] = before;
  __syncthreads();
  int place = 0;
  for (int w = 0; w < kThreads / 32; ++w) place += counts[w];
  if (threadIdx.x == 0) first[expert] = place;
  for (int64_t base = 0; base < pairs; base += kThreads) {
    const int64_t p = base + threadIdx.x;
    const bool mine = p < pairs && ids[p] == expert;
    const unsigned found = __ballot_sync(kFull, mine);
    __syncthreads();  // everybody has read the counts before
    if (threadIdx.x % 32 == 0) counts[warp] = __popc(found);
    __syncthreads();
    int here = place + __popc(found & below);
    for (int w = 0; w < kThreads / 32; ++w) {
      here += w < warp ? counts[w] : 0;
      place += counts[w];
    }
    if (!mine) continue;
    order[here] = static_cast<int32_t>(p);
    place_of[p] = here;
  }
  if (threadIdx.x == 0 && blockIdx.x + 1 == gridDim.x) first[expert + 1] = place;
}

// ---- grouped products ---------------------------------------------------------------------------------------------

constexpr int kCols = 64, kDepth = 32;  // outputs of a block, and what it sums at a time

__device__ float value_of(float x) { return x; }
__device__ float value_of(__nv_bfloat16 x) { return __bfloat162float(x); }

/// The expert and the first place of a block's tile of kRows places, or expert -1: tiles are numbered through the
/// experts in order.
template <int kRows>
__device__ void find_tile(const int32_t* first, int32_t num_experts, int64_t tile, int& expert, int& begin, int& end) {
  __shared__ int found[3];
  if (threadIdx.x == 0) {
    found[0] = -1;
    int64_t before = 0;
    for (int e = 0; e < num_experts; ++e) {
      const int n = first[e + 1] - first[e];
      const int tiles = (n + kRows - 1) / kRows;
      if (tile < before + tiles) {
        found[0] = e;
        found[1] = first[e] + static_cast<int>(tile - before) * kRows;
        found[2] = min(found[1] + kRows, first[e + 1]);
        break;
      }
      before += tiles;
    }
  }
  __syncthreads();
  expert = found[0], begin = found[1], end = found[2];
}

/// acc[i] += sum over k of rows[r0 + i][k] w[col][k] for the thread's column and kRows / 4 rows; 256 threads are 64
/// columns times 4 groups of rows. `row(i)` gives the address of row i of the tile or nullptr.
template <int kRows, class W, class Row>
__device__ void tile_product(const W* w, int64_t cols, int64_t depth, int64_t first_col, Row row,
                             float (&acc)[kRows / 4]) {
  __shared__ float xs[kRows][kDepth + 1];
  __shared__ float ws[kCols][kDepth + 1];
  const int col = static_cast<int>(threadIdx.x) % kCols, group = static_cast<int>(threadIdx.x) / kCols;
  for (int64_t k0 = 0; k0 < depth; k0 += kDepth) {
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kDepth; i += kThreads) {
      const float* x = row(i / kDepth);
      const int64_t k = k0 + i % kDepth;
      xs[i / kDepth][i % kDepth] = x != nullptr && k < depth ? x[k] : 0.0f;
    }
    for (int i = static_cast<int>(threadIdx.x); i < kCols * kDepth; i += kThreads) {
      const int64_t n = first_col + i / kDepth, k = k0 + i % kDepth;
      ws[i / kDepth][i % kDepth] = n < cols && k < depth ? value_of(w[n * depth + k]) : 0.0f;
    }
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < kDepth; ++k) {
      const float b = ws[col][k];
#pragma unroll
      for (int i = 0; i < kRows / 4; ++i) acc[i] += xs[group * (kRows / 4) + i][k] * b;
    }
  }
}

/// The same products for bf16 weights by tensor cores, x rounded to bf16; kRows is 16 or 64, kWeights matrices of one
/// shape at a time. A warp has the 16 rows 16 (warp % kTiles) and kTiles runs of eight columns; a step of 64 inputs is
/// in registers while the one before is multiplied. Rows of 72 values put the 32 lanes of a fragment in 32 banks.
template <int kRows, int kWeights>
struct MmaTile {
  static constexpr int kTiles = kRows / 16, kInputs = 64, kPitch = kInputs + 8;
  static constexpr int kRowLoads = kRows / 16, kColLoads = kCols / 32;  // of a thread: 4 fp32, or 8 bf16
  struct Shared {
    alignas(16) uint32_t x[kRows][kPitch / 2];
    alignas(16) uint32_t w[kWeights][kCols][kPitch / 2];
  };
  float sums[kWeights][kTiles][4] = {};

  template <class Row>
  __device__ void run(const __nv_bfloat16* const (&w)[kWeights], int64_t cols, int64_t depth, int64_t first_col,
                      Row row, Shared& shared) {
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
    const float* x_rows[kRowLoads];
    for (int j = 0; j < kRowLoads; ++j) x_rows[j] = row(thread / 16 + 16 * j);
    const int x_at = thread % 16 * 4, w_at = thread % 8 * 8;
    float4 x_next[kRowLoads];
    uint4 w_next[kWeights][kColLoads];
    const auto load = [&](int64_t k0) {
#pragma unroll
      for (int j = 0; j < kRowLoads; ++j)
        x_next[j] = x_rows[j] != nullptr && k0 + x_at < depth ? *reinterpret_cast<const float4*>(x_rows[j] + k0 + x_at)
                                                              : float4{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int m = 0; m < kWeights; ++m)
#pragma unroll
        for (int j = 0; j < kColLoads; ++j) {
          const int64_t col = first_col + thread / 8 + 32 * j;
          w_next[m][j] = col < cols && k0 + w_at < depth
                             ? *reinterpret_cast<const uint4*>(w[m] + col * depth + k0 + w_at)
                             : uint4{0, 0, 0, 0};
        }
    };
    load(0);
    const int group = lane / 4, quad = lane % 4, first_row = 16 * (warp % kTiles), run = warp / kTiles * kTiles;
    for (int64_t k0 = 0; k0 < depth; k0 += kInputs) {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kRowLoads; ++j) {
        uint32_t* to = &shared.x[thread / 16 + 16 * j][x_at / 2];
        to[0] = round_to_bf16x2(x_next[j].x, x_next[j].y);
        to[1] = round_to_bf16x2(x_next[j].z, x_next[j].w);
      }
#pragma unroll
      for (int m = 0; m < kWeights; ++m)
#pragma unroll
        for (int j = 0; j < kColLoads; ++j)
          *reinterpret_cast<uint4*>(&shared.w[m][thread / 8 + 32 * j][w_at / 2]) = w_next[m][j];
      __syncthreads();
      if (k0 + kInputs < depth) load(k0 + kInputs);
#pragma unroll
      for (int s = 0; s < kInputs / 2; s += 8) {
        const uint32_t a[4] = {shared.x[first_row + group][s + quad], shared.x[first_row + group + 8][s + quad],
                               shared.x[first_row + group][s + quad + 4],
                               shared.x[first_row + group + 8][s + quad + 4]};
#pragma unroll
        for (int m = 0; m < kWeights; ++m)
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
            const uint32_t* b = shared.w[m][8 * (run + j) + group];
            mma_bf16(sums[m][j], a, b[s + quad], b[s + quad + 4]);
          }
      }
    }
  }
  /// f(row of the tile, column of the tile, values of that place).
  template <class F>
  __device__ void for_each(F f) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float values[kWeights];
        for (int m = 0; m < kWeights; ++m) values[m] = sums[m][j][i];
        f(16 * (warp % kTiles) + lane / 4 + 8 * (i / 2), 8 * (warp / kTiles * kTiles + j) + lane % 4 * 2 + i % 2,
          values);
      }
  }
};

template <int kRows>
__global__ void __launch_bounds__(kThreads)
    experts_in_mma_kernel(DeviceExperts experts, int32_t num_experts, const int32_t* first, const int32_t* order,
                          int32_t per_token, const float* x, float* hidden) {
  wait_for_stream();
  let_next_start();
  using Tile = MmaTile<kRows, 2>;
  __shared__ typename Tile::Shared shared;
  int expert, begin, end;
  find_tile<kRows>(first, num_experts, blockIdx.x, expert, begin, end);
  if (expert < 0) return;
  const auto row = [&](int i) -> const float* {
    return begin + i < end ? x + int64_t{order[begin + i] / per_token} * experts.dim : nullptr;
  };
  const int64_t first_col = int64_t{blockIdx.y} * kCols;
  const __nv_bfloat16* const w[2] = {static_cast<const __nv_bfloat16*>(experts.gate[expert]),
                                     static_cast<const __nv_bfloat16*>(experts.up[expert])};
  Tile tile;
  tile.run(w, experts.width, experts.dim, first_col, row, shared);
  tile.for_each([&](int i, int c, const float(&v)[2]) {
    if (begin + i < end && first_col + c < experts.width)
      hidden[int64_t{begin + i} * experts.width + first_col + c] = silu(v[0]) * v[1];
  });
}

template <int kRows>
__global__ void __launch_bounds__(kThreads)
    experts_out_mma_kernel(DeviceExperts experts, int32_t num_experts, const int32_t* first, const float* hidden,
                           float* out) {
  wait_for_stream();
  let_next_start();
  using Tile = MmaTile<kRows, 1>;
  __shared__ typename Tile::Shared shared;
  int expert, begin, end;
  find_tile<kRows>(first, num_experts, blockIdx.x, expert, begin, end);
  if (expert < 0) return;
  const auto row = [&](int i) -> const float* {
    return begin + i < end ? hidden + int64_t{begin + i} * experts.width : nullptr;
  };
  const int64_t first_col = int64_t{blockIdx.y} * kCols;
  const __nv_bfloat16* const w[1] = {static_cast<const __nv_bfloat16*>(experts.down[expert])};
  Tile tile;
  tile.run(w, experts.dim, experts.width, first_col, row, shared);
  tile.for_each([&](int i, int c, const float(&v)[1]) {
    if (begin + i < end && first_col + c < experts.dim) out[int64_t{begin + i} * experts.dim + first_col + c] = v[0];
  });
}

template <int kRows, class W>
__global__ void __launch_bounds__(kThreads)
    experts_in_kernel(DeviceExperts experts, int32_t num_experts, const int32_t* first, const int32_t* order,
                      int32_t per_token, const float* x, float* hidden) {
  wait_for_stream();
  let_next_start();
  int expert, begin, end;
  find_tile<kRows>(first, num_experts, blockIdx.x, expert, begin, end);
  if (expert < 0) return;
  const auto row = [&](int i) -> const float* {
    return begin + i < end ? x + int64_t{order[begin + i] / per_token} * experts.dim : nullptr;
  };
  const int64_t first_col = int64_t{blockIdx.y} * kCols;
  float gate[kRows / 4] = {}, up[kRows / 4] = {};
  tile_product<kRows>(static_cast<const W*>(experts.gate[expert]), experts.width, experts.dim, first_col, row, gate);
  tile_product<kRows>(static_cast<const W*>(experts.up[expert]), experts.width, experts.dim, first_col, row, up);
  const int64_t col = first_col + threadIdx.x % kCols;
  const int group = static_cast<int>(threadIdx.x) / kCols;
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const int place = begin + group * (kRows / 4) + i;
    if (place < end && col < experts.width) hidden[int64_t{place} * experts.width + col] = silu(gate[i]) * up[i];
  }
}

template <int kRows, class W>
__global__ void __launch_bounds__(kThreads) experts_out_kernel(DeviceExperts experts, int32_t num_experts,
                                                               const int32_t* first, const float* hidden, float* out) {
  wait_for_stream();
  let_next_start();
  int expert, begin, end;
  find_tile<kRows>(first, num_experts, blockIdx.x, expert, begin, end);
  if (expert < 0) return;
  const auto row = [&](int i) -> const float* {
    return begin + i < end ? hidden + int64_t{begin + i} * experts.width : nullptr;
  };
  const int64_t first_col = int64_t{blockIdx.y} * kCols;
  float sum[kRows / 4] = {};
  tile_product<kRows>(static_cast<const W*>(experts.down[expert]), experts.dim, experts.width, first_col, row, sum);
  const int64_t col = first_col + threadIdx.x % kCols;
  const int group = static_cast<int>(threadIdx.x) / kCols;
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const int place = begin + group * (kRows / 4) + i;
    if (place < end && col < experts.dim) out[int64_t{place} * experts.dim + col] = sum[i];
  }
}

/// Places of a tile: few where an expert gets few.
template <class F>
void with_rows(int64_t pairs, int32_t num_experts, F&& f) {
  if (pairs <= int64_t{8} * num_experts) f(std::integral_constant<int, 8>{});
  else f(std::integral_constant<int, 64>{});
}

/// Of a tile on the tensor cores, whose products have 16 rows.
constexpr int mma_rows(int rows) { return rows < 16 ? 16 : rows; }

/// Whether the experts' rows are read 16 bytes at a time.
bool tensor_cores_take(const DeviceExperts& e) { return e.bf16 && e.dim % 8 == 0 && e.width % 8 == 0; }

/// No more tiles than that whatever the routing.
template <int kRows>
unsigned most_tiles(int64_t pairs, int32_t num_experts) {
  const int64_t experts = pairs < num_experts ? pairs : num_experts;
  return static_cast<unsigned>(pairs / kRows + experts);
}

}  // namespace

void launch_widen_e4m3(const void* values, const float* scales, int64_t rows, int64_t cols, int64_t block_rows,
                       int64_t block_cols, int64_t scale_cols, void* out, bool out_bf16, Stream stream) {
  const auto* v = static_cast<const __nv_fp8_e4m3*>(values);
  each(rows * cols, stream, [=] __device__(int64_t i) {
    const float x = static_cast<float>(v[i]) * scales[i / cols / block_rows * scale_cols + i % cols / block_cols];
    if (out_bf16) static_cast<__nv_bfloat16*>(out)[i] = __float2bfloat16_rn(x);
    else static_cast<float*>(out)[i] = x;
  });
}

void launch_embed(DeviceWeight w, const int32_t* ids, int64_t rows, int64_t dim, float* x, Stream stream) {
  each(rows * dim, stream, [=] __device__(int64_t i) {
    const int64_t at = int64_t{ids[i / dim]} * dim + i % dim;
    x[i] = w.bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(w.data)[at])
                  : static_cast<const float*>(w.data)[at];
  });
}

void launch_rms_norm(const float* x, int64_t x_stride, int64_t rows, int64_t dim, const float* weight, float eps,
                     float* y, int64_t y_stride, Stream stream) {
  if (rows > 0)
    launch_kernel(kName, rms_norm_kernel, {.blocks = rows, .threads = kThreads}, stream, x, x_stride, dim, weight, eps,
                  y, y_stride);
}

void launch_layer_norm(const float* x, int64_t rows, int64_t dim, const float* weight, const float* bias, float eps,
                       float* y, Stream stream) {
  if (rows > 0)
    launch_kernel(kName, layer_norm_kernel, {.blocks = rows, .threads = kThreads}, stream, x, dim, weight, bias, eps,
                  y);
}

void launch_add(float* x, const float* y, int64_t n, Stream stream) {
  each(n, stream, [=] __device__(int64_t i) { x[i] += y[i]; });
}
void launch_scale(float* x, float factor, int64_t n, Stream stream) {
  each(n, stream, [=] __device__(int64_t i) { x[i] *= factor; });
}
void launch_silu_mul(float* gate, const float* up, int64_t n, Stream stream) {
  each(n, stream, [=] __device__(int64_t i) { gate[i] = silu(gate[i]) * up[i]; });
}
void launch_copy_rows(const float* x, int64_t x_stride, int64_t rows, int64_t n, float* y, int64_t y_stride,
                      Stream stream) {
  each(rows * n, stream, [=] __device__(int64_t i) { y[i / n * y_stride + i % n] = x[i / n * x_stride + i % n]; });
}
void launch_gather_rows(const float* x, const int64_t* rows, int64_t num_rows, int64_t n, float* y, Stream stream) {
  each(num_rows * n, stream, [=] __device__(int64_t i) {
    const int64_t row = rows[i / n];
    y[i] = row < 0 ? 0.0f : x[row * n + i % n];
  });
}
void launch_pack_bf16(const float* x, int64_t batches, int64_t batch_stride, int64_t rows, int64_t row_stride,
                      int64_t k, void* y, Stream stream) {
  auto* out = static_cast<__nv_bfloat16*>(y);
  each(batches * rows * k, stream, [=] __device__(int64_t i) {
    const int64_t row = i / k;
    out[i] = __float2bfloat16_rn(x[row / rows * batch_stride + row % rows * row_stride + i % k]);
  });
}
void launch_transpose(const void* w, int64_t rows, int64_t cols, int64_t repeats, int64_t w_step, void* out,
                      Stream stream) {
  const auto* in = static_cast<const __nv_bfloat16*>(w);
  auto* y = static_cast<__nv_bfloat16*>(out);
  each(repeats * rows * cols, stream, [=] __device__(int64_t i) {
    const int64_t k = i % rows, c = i / rows % cols, r = i / rows / cols;
    y[i] = in[r * w_step + k * cols + c];
  });
}
void launch_from_bf16(const void* x, int64_t n, float* y, Stream stream) {
  const auto* in = static_cast<const __nv_bfloat16*>(x);
  each(n, stream, [=] __device__(int64_t i) { y[i] = __bfloat162float(in[i]); });
}

void launch_route(const RouterParams& params, const float* logits, const float* bias, int64_t rows, int32_t* ids,
                  float* weights, Stream stream) {
  if (rows > 0)
    launch_kernel(kName, route_kernel, {.blocks = rows, .threads = kThreads}, stream, params, logits, bias, ids,
                  weights);
}

void launch_norm_route(const RouterParams& params, const float* x, int64_t dim, const float* norm, float eps,
                       const float* router, const float* bias, int64_t rows, int32_t* ids, float* weights,
                       Stream stream) {
  if (rows > 0)
    launch_kernel(kName, norm_route_kernel, {.blocks = rows, .threads = kThreads}, stream,
                  NormRouteParams{params, x, dim, norm, eps, router, bias, ids, weights});
}

void launch_sort_pairs(const int32_t* ids, int64_t pairs, int32_t num_experts, int32_t* first, int32_t* order,
                       int32_t* place_of, Stream stream) {
  launch_kernel(kName, sort_pairs_kernel, {.blocks = num_experts, .threads = kThreads}, stream, ids, pairs, first,
                order, place_of);
}

/// Launches the kernel over the experts' tiles that takes their weights.
template <int kRows, class... Params, class... Args>
void launch_tiles(const DeviceExperts& experts, int32_t num_experts, int64_t pairs, int64_t cols, Stream stream,
                  void (*mma)(Params...), void (*bf16)(Params...), void (*fp32)(Params...), const Args&... args) {
  const bool by_mma = tensor_cores_take(experts);
  const Grid grid{
      .blocks = by_mma ? most_tiles<mma_rows(kRows)>(pairs, num_experts) : most_tiles<kRows>(pairs, num_experts),
      .threads = kThreads,
      .blocks_y = (cols + kCols - 1) / kCols};
  launch_kernel(kName, by_mma ? mma : experts.bf16 ? bf16 : fp32, grid, stream, experts, num_experts, args...);
}

void launch_experts_in(const DeviceExperts& experts, int32_t num_experts, const int32_t* first, const int32_t* order,
                       int64_t pairs, int32_t per_token, const float* x, float* hidden, Stream stream) {
  with_rows(pairs, num_experts, [&]<int kRows>(std::integral_constant<int, kRows>) {
    launch_tiles<kRows>(experts, num_experts, pairs, experts.width, stream, experts_in_mma_kernel<mma_rows(kRows)>,
                        experts_in_kernel<kRows, __nv_bfloat16>, experts_in_kernel<kRows, float>, first, order,
                        per_token, x, hidden);
  });
}

void launch_experts_out(const DeviceExperts& experts, int32_t num_experts, const int32_t* first, int64_t pairs,
                        const float* hidden, float* out, Stream stream) {
  with_rows(pairs, num_experts, [&]<int kRows>(std::integral_constant<int, kRows>) {
    launch_tiles<kRows>(experts, num_experts, pairs, experts.dim, stream, experts_out_mma_kernel<mma_rows(kRows)>,
                        experts_out_kernel<kRows, __nv_bfloat16>, experts_out_kernel<kRows, float>, first, hidden, out);
  });
}

void launch_experts_add(const float* out, const int32_t* place_of, const float* weights, int64_t rows,
                        int32_t per_token, int64_t dim, float* y, Stream stream) {
  each(rows * dim, stream, [=] __device__(int64_t i) {
    const int64_t row = i / dim;
    float sum = y[i];
    for (int32_t j = 0; j < per_token; ++j)
      sum += weights[row * per_token + j] * out[int64_t{place_of[row * per_token + j]} * dim + i % dim];
    y[i] = sum;
  });
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
