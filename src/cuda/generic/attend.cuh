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
// Tiles start at multiples of kTileKeys, so a row's bits do not depend on its neighbours, nor on the launch.
// Shared memory: (kLanes * dk + kTileKeys * (dk + 1) [+ kTileKeys * dv]) fp32: 55 KB for 576/512, 42 KB for 192/128.
#pragma once

#include <cstdint>

#include "cuda/common/launch.cuh"
#include "cuda/common/views.cuh"

namespace gannet {
inline namespace v0 {
namespace cuda {
namespace generic {

constexpr int kLanes = 8;
constexpr int kTileKeys = 16;
constexpr int kThreads = 256;
constexpr int kMaxValueDim = 512;
constexpr int kOutPerThread = kLanes * kMaxValueDim / kThreads;

struct AttendOutput {
  void* out;
  DType out_dtype;
  float* lse;         // or nullptr
  float* max_logits;  // or nullptr; its rows lie as those of lse do, at a stride of their own
  const float* sink;  // of each head, or nullptr
};

inline size_t attend_shared_bytes(int key_dim, int value_dim, bool value_is_key) {
  const int values = value_is_key ? 0 : kTileKeys * value_dim;
  return sizeof(float) *
         (static_cast<size_t>(kLanes) * key_dim + static_cast<size_t>(kTileKeys) * (key_dim + 1) + values);
}

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
__global__ void __launch_bounds__(kThreads) attend_kernel(const Problem p) {
  wait_for_stream();
  let_next_start();
  extern __shared__ float shared[];
  __shared__ float weights[kLanes][kTileKeys];
  __shared__ float rescale[kLanes], row_max[kLanes], row_sum[kLanes];
  __shared__ int64_t bounds[kLanes];
  __shared__ bool valid[kTileKeys];
  typename Problem::Group g;
  if (!p.group(g)) return;
  const int lanes = p.num_lanes(g), dk = p.key_dim, dv = p.value_dim, key_stride = dk + 1;
  float* query = shared;
  float* keys = query + kLanes * dk;
  float* values = keys + kTileKeys * key_stride;
  const int tid = threadIdx.x;

  for (int i = tid; i < lanes * dk; i += kThreads) query[i] = p.query(g, i / dk, i % dk);
  if (tid < kLanes) {
    row_max[tid] = -INFINITY;
    row_sum[tid] = 0.0f;
    bounds[tid] = tid < lanes ? p.lane_keys(g, tid) : 0;
  }
  float acc[kOutPerThread];
#pragma unroll
  for (int i = 0; i < kOutPerThread; ++i) acc[i] = 0.0f;

  const int64_t max_keys = p.max_keys(g);
  for (int64_t first = 0; first < max_keys; first += kTileKeys) {
    __syncthreads();
    for (int k = tid / 32; k < kTileKeys; k += kThreads / 32) {
      const int64_t key = first + k;
      const bool ok = key < max_keys && p.key_valid(g, key);
      if (tid % 32 == 0) valid[k] = ok;
      for (int d = tid % 32; d < dk; d += 32) keys[k * key_stride + d] = ok ? p.key(g, key, d) : 0.0f;
      if constexpr (!Problem::kValueIsKey)
        for (int d = tid % 32; d < dv; d += 32) values[k * dv + d] = ok ? p.value(g, key, d) : 0.0f;
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
      // A score of a visible key can itself be NaN or infinite; masked keys are told apart by bounds and valid.
      float m = row_max[tid];
      bool any = false;
      for (int k = 0; k < kTileKeys; ++k)
        if (valid[k] && first + k < bounds[tid]) {
          m = fmaxf(m, weights[tid][k]);
          any = true;
        }
      if (any) {
        const float factor = row_max[tid] == m ? 1.0f : expf(row_max[tid] - m);
        const float base = m == -INFINITY ? 0.0f : m;  // scores of -inf alone: weights of 0, not NaN
        float sum = row_sum[tid] * factor;
        for (int k = 0; k < kTileKeys; ++k) {
          if (!(valid[k] && first + k < bounds[tid])) {
            weights[tid][k] = -1.0f;
            continue;
          }
          const float w = expf(weights[tid][k] - base);
          weights[tid][k] = w;
          sum += w;
        }
        row_sum[tid] = sum;
        row_max[tid] = m;
        rescale[tid] = factor;
      } else {
        for (int k = 0; k < kTileKeys; ++k) weights[tid][k] = -1.0f;
        rescale[tid] = 1.0f;
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOutPerThread; ++i) {
      const int e = tid + i * kThreads;
      if (e >= lanes * dv) break;
      const int lane = e / dv, d = e % dv;
      float a = acc[i] * rescale[lane];
      for (int k = 0; k < kTileKeys; ++k) {
        const float w = weights[lane][k];
        if (!(w < 0.0f)) a = fmaf(w, Problem::kValueIsKey ? keys[k * key_stride + d] : values[k * dv + d], a);
      }
      acc[i] = a;
    }
  }
  __syncthreads();
  if (tid < lanes) {
    const float sum = row_sum[tid];
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
    const float all = rescale[lane];
    store_element(p.output.out, p.out_offset(g, lane) + d, p.output.out_dtype, all == 0.0f ? 0.0f : acc[i] / all);
  }
}

}  // namespace generic
}  // namespace cuda
}  // namespace v0
}  // namespace gannet
