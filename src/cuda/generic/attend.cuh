// Attention with plain fp32 FMA, for every shape and format: the yardstick on the device and the fallback for what the
// tuned kernels do not take. Speed is no object; correctness, and never touching what is masked, are.
//
// A block serves kLanes lanes that share keys: heads of one row (absorbed form: the latent row is key and value for all
// of them) or rows of one head (expanded form). It walks the keys in tiles of kTileKeys:
//   load      key (and value) rows to shared memory as fp32; a key that no lane may see is not loaded and reads as 0
//   score     kLanes x kTileKeys dot products, two threads each
//   softmax   online, one thread a lane; a masked pair gets weight -1, which the next phase skips by a branch, since
//             0 * NaN would be NaN
//   value     each thread owns output elements lane * value_dim + d with d strided over threads
// Sums of weights and of weighted values have three levels, so that a row of n keys has roundings of 16 + 64 + n / 1024
// additions and not of n: the keys of a tile, the tiles of a fold, the folds. (One chain over a list of 20,001 slots
// that names rows many times each, where roundings repeat, was off by 550 units.) When the largest score rises, a tile
// scales its fold's sums at once, and the next fold those of earlier ones by the product of the factors.
// Tiles start at multiples of kTileKeys, so a row's bits do not depend on its neighbours, nor on the launch.
// Shared memory: (kLanes * dk + kTileKeys * (dk + 1) [+ kTileKeys * dv]) fp32: 55 KB for 576/512, 42 KB for 192/128.
#pragma once

#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/common/views.cuh"
#include "cuda/generic/attend_shape.h"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace generic {

constexpr int kThreads = 256;
constexpr int kOutPerThread = kLanes * kMaxValueDim / kThreads;

struct AttendOutput {
  void* out;
  DType out_dtype;
  float* lse;         // or nullptr
  float* max_logits;  // or nullptr; its rows lie as those of lse do, at a stride of their own
  const float* sink;  // of each head, or nullptr
};

// Problem (a struct passed by value) offers:
//   int key_dim, value_dim; float softmax_scale; static constexpr bool kValueIsKey; AttendOutput output;
//   struct Group;                                   what the lanes of a block share
//   bool group(Group&) const                        of blockIdx; false: nothing to do
//   int num_lanes(g), int64_t max_keys(g), int64_t lane_keys(g, lane)
//   float query(g, lane, d)
//   bool key_valid(g, key)                          whether the key may be loaded at all
//   float key(g, key, d), float value(g, key, d)
//   int64_t out_offset(g, lane), int64_t lse_offset(g, lane)
//   int64_t max_offset(g, lane), int head(g, lane)  where the output has max_logits and sink
template <class Problem>
__global__ void __launch_bounds__(kThreads, 2) attend_kernel(const Problem p) {
  wait_for_stream();
  let_next_start();
  extern __shared__ float shared[];
  __shared__ float weights[kLanes][kTileKeys];
  __shared__ float rescale[kLanes], row_max[kLanes], row_sum[kLanes];
  __shared__ float earlier_sum[kLanes], earlier_rescale[kLanes];  // of folds before this one
  __shared__ float fold_rescale[kLanes];                          // what earlier_rescale was when the last fold ended
  __shared__ int64_t bounds[kLanes];
  __shared__ bool valid[kTileKeys];
  typename Problem::Group g;
  if (!p.group(g)) return;
  const int lanes = p.num_lanes(g), dk = p.key_dim, key_stride = dk + 1;
  const int first_value = static_cast<int>(blockIdx.y) * kMaxValueDim;
  const int dv = min(kMaxValueDim, p.value_dim - first_value);  // of this block
  float* query = shared;
  float* keys = query + kLanes * dk;
  float* values = keys + kTileKeys * key_stride;
  const int tid = threadIdx.x;

  for (int i = tid; i < lanes * dk; i += kThreads) query[i] = p.query(g, i / dk, i % dk);
  if (tid < kLanes) {
    row_max[tid] = -INFINITY;
    row_sum[tid] = earlier_sum[tid] = 0.0f;
    earlier_rescale[tid] = 1.0f;
    bounds[tid] = tid < lanes ? p.lane_keys(g, tid) : 0;
  }
  float acc[kOutPerThread], earlier[kOutPerThread];
#pragma unroll
  for (int i = 0; i < kOutPerThread; ++i) acc[i] = earlier[i] = 0.0f;

  const int64_t max_keys = p.max_keys(g);
  for (int64_t first = 0; first < max_keys; first += kTileKeys) {
    constexpr int64_t kFoldKeys = int64_t{kFoldTiles} * kTileKeys;
    const bool begins_fold = first % kFoldKeys == 0;
    __syncthreads();
    for (int k = tid / 32; k < kTileKeys; k += kThreads / 32) {
      const int64_t key = first + k;
      const bool ok = key < max_keys && p.key_valid(g, key);
      if (tid % 32 == 0) valid[k] = ok;
      for (int d = tid % 32; d < dk; d += 32) keys[k * key_stride + d] = ok ? p.key(g, key, d) : 0.0f;
      if constexpr (!Problem::kValueIsKey)
        for (int d = tid % 32; d < dv; d += 32) values[k * dv + d] = ok ? p.value(g, key, first_value + d) : 0.0f;
    }
    __syncthreads();
    {
      const int pair = tid / 2, lane = pair / kTileKeys, k = pair % kTileKeys;
      static_assert(kThreads == 2 * kLanes * kTileKeys);
      float sum = 0.0f;
      if (lane < lanes)
        for (int d = tid % 2; d < dk; d += 2) sum = fmaf(query[lane * dk + d], keys[k * key_stride + d], sum);
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      if (tid % 2 == 0 && lane < lanes)
        weights[lane][k] = valid[k] && first + k < bounds[lane] ? sum * p.softmax_scale : -INFINITY;
    }
    __syncthreads();
    if (tid < lanes) {
      if (begins_fold) {
        earlier_sum[tid] = fmaf(earlier_sum[tid], earlier_rescale[tid], row_sum[tid]);
        row_sum[tid] = 0.0f;
        fold_rescale[tid] = earlier_rescale[tid];
        earlier_rescale[tid] = 1.0f;
      }
      float factor = 1.0f, sum = 0.0f;
      // A score of a visible key can itself be NaN or infinite; masked keys are told apart by bounds and valid.
      float m = row_max[tid];
      bool any = false;
      for (int k = 0; k < kTileKeys; ++k)
        if (valid[k] && first + k < bounds[tid]) {
          m = fmaxf(m, weights[tid][k]);
          any = true;
        }
      if (any) {
        const float base = m == -INFINITY ? 0.0f : m;  // scores of -inf alone: weights of 0, not NaN
        factor = row_max[tid] == m ? 1.0f : expf(row_max[tid] - m);
        row_max[tid] = m;
        for (int k = 0; k < kTileKeys; ++k) {
          if (!(valid[k] && first + k < bounds[tid])) {
            weights[tid][k] = -1.0f;
            continue;
          }
          const float w = expf(weights[tid][k] - base);
          weights[tid][k] = w;
          sum += w;
        }
      } else {
        for (int k = 0; k < kTileKeys; ++k) weights[tid][k] = -1.0f;
      }
      row_sum[tid] = row_sum[tid] * factor + sum;
      earlier_rescale[tid] *= factor;
      rescale[tid] = factor;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOutPerThread; ++i) {
      const int e = tid + i * kThreads;
      if (e >= lanes * dv) break;
      const int lane = e / dv, d = e % dv;
      float tile = 0.0f;
      for (int k = 0; k < kTileKeys; ++k) {
        const float w = weights[lane][k];
        const float* value = Problem::kValueIsKey ? keys + k * key_stride + first_value : values + k * dv;
        if (!(w < 0.0f)) tile = fmaf(w, value[d], tile);
      }
      if (begins_fold) {
        earlier[i] = fmaf(earlier[i], fold_rescale[lane], acc[i]);
        acc[i] = 0.0f;
      }
      acc[i] = acc[i] * rescale[lane] + tile;
    }
  }
  __syncthreads();
  if (tid < lanes) {  // blocks that share a row write the same
    const float sum = fmaf(earlier_sum[tid], earlier_rescale[tid], row_sum[tid]);
    float all = sum;  // what the weights are divided by; 0: there are none
    if (p.output.sink != nullptr && sum != 0.0f) all += expf(p.output.sink[p.head(g, tid)] - row_max[tid]);
    rescale[tid] = all;
    if (p.output.lse != nullptr)
      p.output.lse[p.lse_offset(g, tid)] = sum == 0.0f ? -INFINITY : row_max[tid] + logf(sum);
    if (p.output.max_logits != nullptr) p.output.max_logits[p.max_offset(g, tid)] = row_max[tid];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOutPerThread; ++i) {
    const int e = tid + i * kThreads;
    if (e >= lanes * dv) break;
    const int lane = e / dv, d = e % dv;
    const float all = rescale[lane], sum = fmaf(earlier[i], earlier_rescale[lane], acc[i]);
    store_element(p.output.out, p.out_offset(g, lane) + first_value + d, p.output.out_dtype,
                  all == 0.0f ? 0.0f : sum / all);
  }
}

}  // namespace generic
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
