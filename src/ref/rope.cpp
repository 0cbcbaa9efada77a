#include "ref/elements.h"
#include "ref/ref_ops.h"

namespace gannet {
inline namespace v0 {
namespace ref {

void run_rope(const Rope& p, const RunContext&) {
  const int64_t half = p.cos_sin.shape[1] / 2;
  for (int64_t t = 0; t < p.x.shape[0]; ++t) {
    const int64_t position = load_int(p.positions, t);
    for (int64_t h = 0; h < p.x.shape[1]; ++h) {
      for (int64_t i = 0; i < half; ++i) {
        const double c = load(p.cos_sin, position, i);
        const double s = load(p.cos_sin, position, half + i);
        const int64_t first = p.offset + (p.pairing == RopePairing::kInterleaved ? 2 * i : i);
        const int64_t second = p.offset + (p.pairing == RopePairing::kInterleaved ? 2 * i + 1 : i + half);
        const double a = load(p.x, t, h, first);
        const double b = load(p.x, t, h, second);
        store(p.x, a * c - b * s, t, h, first);
        store(p.x, b * c + a * s, t, h, second);
      }
    }
  }
}

}  // namespace ref
}  // namespace v0
}  // namespace gannet
