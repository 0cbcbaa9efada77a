// For processors with AVX-512 and AVX512_BF16; compiled with those flags. What asks whether they are there is in
// peers_onednn.cpp, compiled without them.
#define GANNET_ISA avx512_bf16
#include "cpu/vec_avx512_bf16.h"

#include "cpu/kernels/math-inl.h"  // needs the vocabulary before it

namespace gannet {
inline namespace v0 {
namespace bench {

using namespace cpu::avx512_bf16;

void peer_softmax_avx512_bf16(const float* scores, int rows, int keys, float scale_log2e, float* m, float* z,
                              uint16_t* weights, float* o, int columns) {
  const F scale = set1(scale_log2e);
  for (int r = 0; r < rows; ++r, scores += keys, weights += keys, o += columns) {
    F top0 = loadu(scores), top1 = top0;
    for (int i = 0; i < keys; i += 2 * kLanes) {
      top0 = max(loadu(scores + i), top0);
      if (i + kLanes < keys) top1 = max(loadu(scores + i + kLanes), top1);
    }
    const float block = reduce_max(max(top0, top1)) * scale_log2e;
    const float now = block > m[r] ? block : m[r];
    const F minus_base = set1(-now);
    F sum = zero();
    for (int i = 0; i < keys; i += kLanes) {
      const F e = fast_exp2(fma(loadu(scores + i), scale, minus_base));
      sum = add(sum, e);
      store_bf16(weights + i, e);
    }
    float factor[kLanes];
    storeu(factor, fast_exp2(set1(m[r] - now)));
    z[r] = z[r] * factor[0] + reduce_add(sum);
    if (now != m[r]) {
      for (int i = 0; i < columns; i += kLanes) storeu(o + i, mul(loadu(o + i), set1(factor[0])));
    }
    m[r] = now;
  }
}

void peer_merge_avx512_bf16(float* m, float* z, float* o, float m2, float z2, const float* o2, int columns) {
  const float now = m2 > *m ? m2 : *m;
  const F keep = fast_exp2(set1(*m - now)), take = fast_exp2(set1(m2 - now));
  float factors[2 * kLanes];
  storeu(factors, keep);
  storeu(factors + kLanes, take);
  for (int i = 0; i < columns; i += kLanes) storeu(o + i, fma(loadu(o + i), keep, mul(loadu(o2 + i), take)));
  *z = *z * factors[0] + z2 * factors[kLanes];
  *m = now;
}

void peer_write_avx512_bf16(const float* o, float z, uint16_t* out, int columns) {
  const F factor = set1(1.0f / z);
  for (int i = 0; i < columns; i += kLanes) store_bf16(out + i, mul(loadu(o + i), factor));
}

}  // namespace bench
}  // namespace v0
}  // namespace gannet
