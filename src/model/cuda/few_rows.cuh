// Products of few rows with their neighbours, for NVIDIA GPUs from sm_80 on. docs/kernels/decoder_cuda.md has the count
// of launches, the prediction and what was measured.
//
// Shapes. tiny-dsv32: 256 to 1,024 inputs, 8 to 2,048 outputs, 1 to 64 rows; 22 MB of weights in all, which lie in the
// L2 (50 MB and more) after a first step. A product reads 16 KiB to 1 MiB and multiplies at most 64 x 2,048 x 256: 0.1
// us at 1 % of the tensor cores' speed. So what counts is latency: one launch, one round of loads, one exchange.
//
// A block makes 16 outputs of 16 rows: more rows are more blocks, which read the weights again, from the L2; blocks of
// 64 rows took half as long again. Its eight warps share the inputs out, 32 at a time in turn, so that all
// loads of a product of 256 inputs are in flight at once; the sums of the warps meet in shared memory, in the order of
// the warps. A thread takes 16 bytes of a weight row, eight inputs k..k+7, for two m16n8k16 products: which input is
// which column of the fragments does not matter as long as both operands agree, so nothing passes through shared memory
// on its way to the tensor cores. Inputs in fp32 are rounded to bf16 in registers.
//
// An RMSNorm before the product costs no pass: the sum of squares is taken along, and the row's factor, a scalar, is
// applied to the outputs. The weight of the norm is applied before the rounding.
//
// The order of a row's sums depends on nothing but K: rows of other tiles, or absent ones, are zeros that are added.
//
// The first weights are loaded before wait_for_stream(). That is beyond the rule of launch.cuh and safe for one reason:
// no kernel of a step writes a weight, or a pointer to one, and place() has waited for the copies that did.
#pragma once

#include <cuda_bf16.h>

#include "cuda/common/launch.cuh"
#include "cuda/common/mma.cuh"
#include "model/cuda/block.cuh"
#include "model/cuda/kernels.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace few {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kTileRows = 16, kTileCols = 16, kStep = 32;  // of a block; inputs that a warp takes at a time
constexpr int kStride = kWarps * kStep;
constexpr int kOutputThreads = 4 * kTileRows;
constexpr unsigned kAll = 0xffffffffu;

using Weight = const __nv_bfloat16*;

/// What the warps bring together.
struct Exchange {
  float sums[kWarps][2][kTileRows][8];
  float squares[kWarps][kTileRows];
};

struct Lane {
  int warp, group, quad;  // a fragment's row (or column) and its place in it
  __device__ Lane()
      : warp(static_cast<int>(threadIdx.x) / 32),
        group(static_cast<int>(threadIdx.x) % 32 / 4),
        quad(static_cast<int>(threadIdx.x) % 4) {}
};

__device__ inline uint4 load_weight(Weight row, int64_t at, int64_t k) {
  return row != nullptr && at < k ? *reinterpret_cast<const uint4*>(row + at) : uint4{0, 0, 0, 0};
}

/// Eight inputs of a row, as they lie.
template <bool kBf16>
struct Eight;
template <>
struct Eight<true> {
  uint4 v;
  __device__ void load(const void* row, int64_t at, bool there) {
    v = there ? *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(row) + at) : uint4{0, 0, 0, 0};
  }
  template <bool kNorm>
  __device__ void pack(const float (&)[8], float&, uint32_t (&out)[4]) const {
    out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
  }
};
template <>
struct Eight<false> {
  float4 a, b;
  __device__ void load(const void* row, int64_t at, bool there) {
    const auto* p = reinterpret_cast<const float4*>(static_cast<const float*>(row) + at);
    a = there ? p[0] : float4{0, 0, 0, 0};
    b = there ? p[1] : float4{0, 0, 0, 0};
  }
  template <bool kNorm>
  __device__ void pack(const float (&norm)[8], float& squares, uint32_t (&out)[4]) const {
    float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
    if constexpr (kNorm) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        squares += x[i] * x[i];
        x[i] *= norm[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = round_to_bf16x2(x[2 * i], x[2 * i + 1]);
  }
};

/// Sums of a warp: rows group and group + 8 by columns 8 j + 2 quad and the next.
struct Sums {
  float value[2][4] = {};
  float squares[2] = {};
};

/// 32 inputs of a warp: what it loads for them, and their products.
template <bool kBf16, bool kNorm>
struct Step {
  uint4 w[2];
  Eight<kBf16> in[2];
  Eight<false> norm;

  __device__ void load_weights(Weight low, Weight high, int64_t at, int64_t k) {
    w[0] = load_weight(low, at, k);
    w[1] = load_weight(high, at, k);
  }
  /// rows[h] is row 8 h + group or null.
  __device__ void load_inputs(const void* const (&rows)[2], const float* norm_weight, int64_t at, int64_t k) {
#pragma unroll
    for (int h = 0; h < 2; ++h) in[h].load(rows[h], at, at < k && rows[h] != nullptr);
    if constexpr (kNorm) norm.load(norm_weight, at, at < k);
  }
  __device__ void multiply(Sums& sums) const {
    float factors[8];
    if constexpr (kNorm) {
      factors[0] = norm.a.x, factors[1] = norm.a.y, factors[2] = norm.a.z, factors[3] = norm.a.w;
      factors[4] = norm.b.x, factors[5] = norm.b.y, factors[6] = norm.b.z, factors[7] = norm.b.w;
    }
    const uint32_t b[2][4] = {{w[0].x, w[0].y, w[0].z, w[0].w}, {w[1].x, w[1].y, w[1].z, w[1].w}};
    uint32_t a[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) in[h].template pack<kNorm>(factors, sums.squares[h], a[h]);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const uint32_t fragment[4] = {a[0][2 * s], a[1][2 * s], a[0][2 * s + 1], a[1][2 * s + 1]};
#pragma unroll
      for (int j = 0; j < 2; ++j) mma_bf16(sums.value[j], fragment, b[j][2 * s], b[j][2 * s + 1]);
    }
  }
};

/// A warp's products over its share of k inputs, whose first weights are loaded: a round's weights are on their way
/// while the one before is multiplied. norm and k are references so that they stay parameters of the kernel, in
/// constant memory: as values they took registers, and product_kernel spilled 32 to 48 bytes.
template <bool kBf16, bool kNorm, int kAhead>
__device__ __forceinline__ void multiply(Sums& sums, Step<kBf16, kNorm> (&steps)[kAhead], Weight low, Weight high,
                                         const void* const (&rows)[2], const float* const& norm, int64_t first_input,
                                         const int64_t& k) {
  for (int64_t base = 0; base < k; base += kAhead * kStride) {
    const int64_t at = base + first_input;
#pragma unroll
    for (int d = 0; d < kAhead; ++d) steps[d].load_inputs(rows, norm, at + d * kStride, k);
#pragma unroll
    for (int d = 0; d < kAhead; ++d) steps[d].multiply(sums);
#pragma unroll
    for (int d = 0; d < kAhead; ++d) steps[d].load_weights(low, high, at + (kAhead + d) * kStride, k);
  }
}

/// Brings the warps' sums together. Then thread t below 64 has row t / 4 and, of either half, columns 2 (t % 4) and the
/// next.
__device__ inline void exchange(const Lane& lane, const Sums& sums, Exchange& x, bool norm) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = 8 * h + lane.group;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float* to = &x.sums[lane.warp][j][row][2 * lane.quad];
      to[0] = sums.value[j][2 * h];
      to[1] = sums.value[j][2 * h + 1];
    }
    if (norm) {
      float squares = sums.squares[h];
      squares += __shfl_xor_sync(kAll, squares, 1);
      squares += __shfl_xor_sync(kAll, squares, 2);
      if (lane.quad == 0) x.squares[lane.warp][row] = squares;
    }
  }
  __syncthreads();
}

/// The outputs of a thread after exchange(), times the factor of the norm.
struct Outputs {
  float v[2][2];
  __device__ Outputs(const Exchange& x, bool norm, int64_t k, float eps) {
    const int row = static_cast<int>(threadIdx.x) / 4, quad = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      v[j][0] = v[j][1] = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        v[j][0] += x.sums[w][j][row][2 * quad];
        v[j][1] += x.sums[w][j][row][2 * quad + 1];
      }
    }
    if (!norm) return;
    float squares = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) squares += x.squares[w][row];
    const float factor = 1.0f / sqrtf(squares / static_cast<float>(k) + eps);
#pragma unroll
    for (int j = 0; j < 2; ++j) v[j][0] *= factor, v[j][1] *= factor;
  }
};

// ---- products -----------------------------------------------------------------------------------------------------

struct ProductParams {
  FewRowsProducts p;
  int first_tile[FewRowsProducts::kMost + 1];  // tiles of 16 outputs, counted through the products
};

__device__ inline void rotate(float& x0, float& x1, float c, float s) {
  const float y0 = x0 * c - x1 * s, y1 = x1 * c + x0 * s;
  x0 = y0, x1 = y1;
}

__device__ inline void store(void* to, int64_t i, float x, bool bf16) {
  if (bf16) static_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(round_to_bf16x2(x, x));
  else static_cast<float*>(to)[i] = x;
}

/// One row of kv_a and of the indexer's key.
__device__ inline void finish_kv(const FewRowsKv& a, const FewRowsRope& rope, int64_t row, float* partial) {
  const int p = rope.rope_dim, half = p / 2;
  const float* kv = a.kv + row * (a.latent_dim + p);
  float squares = 0.0f;
  for (int i = threadIdx.x; i < a.latent_dim; i += kThreads) squares += kv[i] * kv[i];
  const float factor = 1.0f / sqrtf(block_sum<kWarps>(squares, partial) / static_cast<float>(a.latent_dim) + a.eps);
  for (int i = threadIdx.x; i < a.latent_dim; i += kThreads)
    store(a.latent, row * a.latent_dim + i, kv[i] * factor * a.norm[i], a.latent_bf16);
  const int64_t position = rope.positions[row];
  const bool turns = position >= 0 && position < rope.num_positions;  // the host cannot see positions of the device
  const float* table = rope.table + position * p;
  for (int i = threadIdx.x; i < half; i += kThreads) {
    float x0 = kv[a.latent_dim + 2 * i], x1 = kv[a.latent_dim + 2 * i + 1];
    if (turns) rotate(x0, x1, table[i], table[half + i]);
    store(a.rope, row * p + 2 * i, x0, a.latent_bf16);
    store(a.rope, row * p + 2 * i + 1, x1, a.latent_bf16);
  }
  if (a.index_k == nullptr) return;
  const float* in = a.index_k + row * a.index_dim;
  float sum = 0.0f;
  for (int i = threadIdx.x; i < a.index_dim; i += kThreads) sum += in[i];
  const float mean = block_sum<kWarps>(sum, partial) / static_cast<float>(a.index_dim);
  float spread = 0.0f;  // two passes: mean(x^2) - mean^2 would cancel
  for (int i = threadIdx.x; i < a.index_dim; i += kThreads) spread += (in[i] - mean) * (in[i] - mean);
  const float scale = 1.0f / sqrtf(block_sum<kWarps>(spread, partial) / static_cast<float>(a.index_dim) + a.eps);
  const auto normed = [&](int i) { return (in[i] - mean) * scale * a.index_norm[i] + a.index_bias[i]; };
  for (int i = threadIdx.x; i < half; i += kThreads) {
    const bool neighbours = a.index_pairing == RopePairing::kInterleaved;
    const int first = neighbours ? 2 * i : i, second = neighbours ? 2 * i + 1 : half + i;
    float x0 = normed(first), x1 = normed(second);
    if (turns) rotate(x0, x1, table[i], table[half + i]);
    store(a.index_out, row * a.index_dim + first, x0, a.index_bf16);
    store(a.index_out, row * a.index_dim + second, x1, a.index_bf16);
  }
  for (int i = p + threadIdx.x; i < a.index_dim; i += kThreads)
    store(a.index_out, row * a.index_dim + i, normed(i), a.index_bf16);
}

/// kAhead: steps whose loads a warp has in flight; where a warp has one step, the registers of a second would only keep
/// a third block from the multiprocessor.
template <bool kBf16, bool kNorm, int kAhead>
__global__ void __launch_bounds__(kThreads, kNorm&& kAhead > 1 ? 2 : 3)
    product_kernel(const __grid_constant__ ProductParams a) {
  __shared__ Exchange shared;
  const FewRowsInput& in = a.p.in;
  const int count = a.p.count, tiles = a.first_tile[count];
  const int row_tiles = static_cast<int>((in.rows + kTileRows - 1) / kTileRows);
  const int block = static_cast<int>(blockIdx.x);
  if (block >= tiles * row_tiles) {
    wait_for_stream();
    let_next_start();
    finish_kv(a.p.kv, a.p.rope, block - tiles * row_tiles, shared.squares[0]);
    return;
  }
  const int tile = block % tiles;
  const int64_t first_row = static_cast<int64_t>(block / tiles) * kTileRows;
  int number = 0;
  while (tile >= a.first_tile[number + 1]) ++number;
  const FewRowsProduct& p = a.p.products[number];

  // Which outputs: two runs of eight, `low` and `high`, side by side but where halves rotate with each other.
  const int per_repeat = static_cast<int>((p.n + kTileCols - 1) / kTileCols);
  const int repeat = (tile - a.first_tile[number]) / per_repeat, at = (tile - a.first_tile[number]) % per_repeat;
  int head = 0, low = at * kTileCols, high = low + 8, rotated = -1;  // within the head; the first pair that rotates
  if (p.head_dim > 0) {
    head = low / p.head_dim;
    low -= head * p.head_dim;
    high = low + 8;
    if (low >= p.rope_first && low < p.rope_first + p.rope_dim) {
      rotated = (low - p.rope_first) / 2;
      if (p.pairing == RopePairing::kHalfSplit) {
        low = p.rope_first + rotated;
        high = low + p.rope_dim / 2;
      }
    }
  }
  const Lane lane;
  const Weight w = static_cast<Weight>(p.w) + repeat * p.w_step + static_cast<int64_t>(head) * p.head_dim * p.k;
  const int64_t left = p.n - static_cast<int64_t>(head) * p.head_dim;  // outputs from the head on
  const Weight low_row = w + (low + lane.group) * p.k, high_row = high < left ? w + (high + lane.group) * p.k : nullptr;
  const int64_t first_input = lane.warp * kStep + lane.quad * 8;
  Step<kBf16, kNorm> steps[kAhead];
#pragma unroll
  for (int d = 0; d < kAhead; ++d) steps[d].load_weights(low_row, high_row, first_input + d * kStride, p.k);

  wait_for_stream();
  let_next_start();
  constexpr int kElement = kBf16 ? 2 : 4;
  const void* rows[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t row = first_row + 8 * h + lane.group;
    rows[h] =
        row < in.rows ? static_cast<const char*>(in.x) + (row * in.stride + repeat * p.x_step) * kElement : nullptr;
  }
  Sums sums;
  multiply(sums, steps, low_row, high_row, rows, in.norm, first_input, p.k);
  exchange(lane, sums, shared, kNorm);
  if (threadIdx.x >= kOutputThreads) return;
  const int64_t row = first_row + threadIdx.x / 4;
  if (row >= in.rows) return;
  Outputs out(shared, kNorm, p.k, in.eps);
#pragma unroll
  for (int j = 0; j < 2; ++j) out.v[j][0] *= p.factor, out.v[j][1] *= p.factor;

  const int place = 2 * lane.quad;
  char* y = static_cast<char*>(p.y);
  int64_t offset = row * p.y_stride + repeat * p.y_step + head * p.y_head;
  if (rotated >= 0) {
    const int64_t position = a.p.rope.positions[row];
    if (position >= 0 && position < a.p.rope.num_positions) {  // the host cannot see positions of the device
      const int half = p.rope_dim / 2;
      const float* cosines = a.p.rope.table + position * p.rope_dim;
      const float* sines = cosines + half;
      if (p.pairing == RopePairing::kInterleaved) {
        const int pair = rotated + lane.quad;
        rotate(out.v[0][0], out.v[0][1], cosines[pair], sines[pair]);
        rotate(out.v[1][0], out.v[1][1], cosines[pair + 4], sines[pair + 4]);
      } else {
        const int pair = rotated + place;
        rotate(out.v[0][0], out.v[1][0], cosines[pair], sines[pair]);
        rotate(out.v[0][1], out.v[1][1], cosines[pair + 1], sines[pair + 1]);
      }
    }
    y = static_cast<char*>(p.y_rope);
    offset = row * p.rope_stride + head * p.rope_head - p.rope_first;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const int col = (j == 0 ? low : high) + place;
    if (j == 1 && high_row == nullptr) continue;
    if (p.y_bf16) {
      *reinterpret_cast<uint32_t*>(reinterpret_cast<uint16_t*>(y) + offset + col) =
          round_to_bf16x2(out.v[j][0], out.v[j][1]);
    } else {
      auto* to = reinterpret_cast<float2*>(reinterpret_cast<float*>(y) + offset + col);
      float2 v{out.v[j][0], out.v[j][1]};
      if (p.add) v.x += to->x, v.y += to->y;
      *to = v;
    }
  }
}

// ---- MLPs ---------------------------------------------------------------------------------------------------------

constexpr int kMostChoices = DeviceMlp::kMostChoices, kMostExperts = 512;

/// hidden = weight * silu(gate) * up. A block has eight units of one expert: their gates are its first eight columns,
/// their ups the others. The experts' rows are found by looking through the choices of the block's rows.
template <int kAhead>
__global__ void __launch_bounds__(kThreads, kAhead > 1 ? 2 : 3) mlp_in_kernel(const __grid_constant__ DeviceMlp a) {
  __shared__ Exchange shared;
  __shared__ int picked[kTileRows];  // row of the tile * kMostChoices + choice
  const int shared_tiles = static_cast<int>(a.shared_width / 8), tiles_of_expert = static_cast<int>(a.width / 8);
  const int tiles = shared_tiles + a.num_experts * tiles_of_expert;
  const int tile = static_cast<int>(blockIdx.x) % tiles;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x / static_cast<unsigned>(tiles)) * kTileRows;
  const int rows_here = static_cast<int>(a.rows - first_row < kTileRows ? a.rows - first_row : kTileRows);
  const bool is_shared = tile < shared_tiles;
  const int expert = is_shared ? -1 : (tile - shared_tiles) / tiles_of_expert;
  const int unit = 8 * (is_shared ? tile : (tile - shared_tiles) % tiles_of_expert);
  const Lane lane;
  const Weight gate = static_cast<Weight>(is_shared ? a.gate : a.expert_gate[expert]) + (unit + lane.group) * a.dim;
  const Weight up = static_cast<Weight>(is_shared ? a.up : a.expert_up[expert]) + (unit + lane.group) * a.dim;
  const int64_t first_input = lane.warp * kStep + lane.quad * 8;
  Step<false, true> steps[kAhead];
#pragma unroll
  for (int d = 0; d < kAhead; ++d) steps[d].load_weights(gate, up, first_input + d * kStride, a.dim);

  wait_for_stream();
  let_next_start();
  int count = rows_here;
  if (!is_shared) {
    // Every warp looks by itself; the first one notes what it found for the threads with outputs.
    const int row = static_cast<int>(threadIdx.x) % 32;
    int choice = -1;
    if (row < rows_here)
      for (int j = 0; j < a.per_row; ++j)
        if (a.ids[(first_row + row) * a.per_row + j] == expert) choice = j;
    const unsigned mask = __ballot_sync(kAll, choice >= 0);
    count = __popc(mask);
    if (count == 0) return;
    if (choice >= 0 && lane.warp == 0) picked[__popc(mask & ((1u << row) - 1))] = row * kMostChoices + choice;
    __syncthreads();
  }
  const void* rows[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int place = 8 * h + lane.group;
    const int row = place >= count ? 0 : is_shared ? place : picked[place] / kMostChoices;
    rows[h] = place < count ? a.x + (first_row + row) * a.dim : nullptr;
  }
  Sums sums;
  multiply(sums, steps, gate, up, rows, a.norm, first_input, a.dim);
  exchange(lane, sums, shared, true);
  const int place = static_cast<int>(threadIdx.x) / 4;
  if (threadIdx.x >= kOutputThreads || place >= count) return;
  const Outputs out(shared, true, a.dim, a.eps);
  float weight = 1.0f;
  uint16_t* to = a.shared_hidden + (first_row + place) * a.shared_width;
  if (!is_shared) {
    const int64_t pair = (first_row + picked[place] / kMostChoices) * a.per_row + picked[place] % kMostChoices;
    weight = a.weights[pair];
    to = a.hidden + pair * a.width;
  }
  *reinterpret_cast<uint32_t*>(to + unit + 2 * lane.quad) =
      round_to_bf16x2(weight * (silu(out.v[0][0]) * out.v[1][0]), weight * (silu(out.v[0][1]) * out.v[1][1]));
}

/// x += hidden W^T over all experts: one long product whose inputs are those of the shared experts, then those of each
/// expert, zeros for rows that did not pick it. Which warp takes an input depends on its place in that whole, so that
/// the order of a row's sums does not depend on what other rows picked.
__global__ void __launch_bounds__(kThreads, 2) mlp_out_kernel(const __grid_constant__ DeviceMlp a) {
  __shared__ Exchange shared;
  __shared__ int16_t ids[kTileRows][kMostChoices];
  __shared__ unsigned active[kMostExperts / 32];
  const int tiles = static_cast<int>((a.dim + kTileCols - 1) / kTileCols);
  const int first_col = static_cast<int>(blockIdx.x) % tiles * kTileCols;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x / static_cast<unsigned>(tiles)) * kTileRows;
  const int rows_here = static_cast<int>(a.rows - first_row < kTileRows ? a.rows - first_row : kTileRows);
  const Lane lane;
  const bool has_high = first_col + 8 < a.dim;
  const int shared_steps = static_cast<int>((a.shared_width + kStep - 1) / kStep);
  const int steps_of_expert = static_cast<int>((a.width + kStep - 1) / kStep);
  const int num_steps = shared_steps + a.num_experts * steps_of_expert;
  wait_for_stream();
  let_next_start();
  if (a.num_experts > 0) {
    if (threadIdx.x < kMostExperts / 32) active[threadIdx.x] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < rows_here * a.per_row; i += kThreads) {
      const int id = a.ids[first_row * a.per_row + i];
      ids[i / a.per_row][i % a.per_row] = static_cast<int16_t>(id);
      atomicOr(&active[id / 32], 1u << (id % 32));
    }
    __syncthreads();
  }
  constexpr int kDeep = 4;  // a step is few registers here, and each may belong to another expert
  Sums sums;
  for (int first = lane.warp; first < num_steps; first += kDeep * kWarps) {
    Step<true, false> steps[kDeep];
#pragma unroll
    for (int d = 0; d < kDeep; ++d) {
      const int step = first + d * kWarps;
      const bool is_shared = step < shared_steps, is_experts = !is_shared && step < num_steps;
      const int expert = is_experts ? (step - shared_steps) / steps_of_expert : 0;
      const bool any = is_shared || (is_experts && (active[expert / 32] >> (expert % 32) & 1u) != 0);
      const int64_t width = is_shared ? a.shared_width : a.width;
      const int of_expert = is_shared ? step : is_experts ? (step - shared_steps) % steps_of_expert : 0;
      const int64_t at = int64_t{of_expert} * kStep + lane.quad * 8;
      Weight low = nullptr, high = nullptr;
      const void* rows[2] = {nullptr, nullptr};
      if (any) {
        low = static_cast<Weight>(is_shared ? a.down : a.expert_down[expert]) + (first_col + lane.group) * width;
        high = has_high ? low + 8 * width : nullptr;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = 8 * h + lane.group;
          if (row >= rows_here) continue;
          if (is_shared) rows[h] = a.shared_hidden + (first_row + row) * width;
          for (int j = 0; j < a.per_row && !is_shared; ++j)
            if (ids[row][j] == expert) rows[h] = a.hidden + ((first_row + row) * a.per_row + j) * width;
        }
      }
      steps[d].load_weights(low, high, at, width);
      steps[d].load_inputs(rows, nullptr, at, width);
    }
#pragma unroll
    for (int d = 0; d < kDeep; ++d) steps[d].multiply(sums);
  }
  exchange(lane, sums, shared, false);
  const int row = static_cast<int>(threadIdx.x) / 4;
  if (threadIdx.x >= kOutputThreads || row >= rows_here) return;
  const Outputs out(shared, false, 0, 0.0f);
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (j == 1 && !has_high) continue;
    auto* to = reinterpret_cast<float2*>(a.x + (first_row + row) * a.dim + first_col + 8 * j + 2 * lane.quad);
    *to = {to->x + out.v[j][0], to->y + out.v[j][1]};
  }
}

// ---- sampling -----------------------------------------------------------------------------------------------------

struct ArgmaxParams {
  const float* logits;
  int64_t vocab;
  int32_t* ids;
};

__global__ void __launch_bounds__(kThreads) argmax_kernel(const __grid_constant__ ArgmaxParams a) {
  wait_for_stream();
  let_next_start();
  __shared__ float values[kWarps];
  __shared__ int indices[kWarps];
  const float* row = a.logits + blockIdx.x * a.vocab;
  float best = 0.0f;
  int index = -1;  // none yet: NaN never becomes the best
  const auto take = [&](float v, int i) {
    if (i >= 0 && v == v && (index < 0 || v > best || (v == best && i < index))) best = v, index = i;
  };
  for (int i = threadIdx.x; i < a.vocab; i += kThreads) take(row[i], i);
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    const float v = __shfl_xor_sync(kAll, best, offset);
    const int i = static_cast<int>(__shfl_xor_sync(kAll, static_cast<uint32_t>(index), offset));
    take(v, i);
  }
  if (threadIdx.x % 32 == 0) values[threadIdx.x / 32] = best, indices[threadIdx.x / 32] = index;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kWarps; ++w) take(values[w], indices[w]);
  a.ids[blockIdx.x] = index;
}

}  // namespace few
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
