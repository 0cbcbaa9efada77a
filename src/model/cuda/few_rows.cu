#include "model/cuda/few_rows.cuh"

#include <algorithm>

namespace gannet {
inline namespace v0 {
namespace cuda {

namespace {

constexpr const char* kName = "Compute";
int row_tiles(int64_t rows) { return static_cast<int>((rows + few::kTileRows - 1) / few::kTileRows); }

template <class Params>
void launch(void (*kernel)(Params), int64_t blocks, Stream stream, const Params& params) {
  launch_kernel(kName, kernel, {.blocks = blocks, .threads = few::kThreads}, stream, params);
}

template <int kAhead>
auto* product_kernel(const FewRowsInput& in) {
  if (in.bf16) return few::product_kernel<true, false, kAhead>;
  return in.norm != nullptr ? few::product_kernel<false, true, kAhead> : few::product_kernel<false, false, kAhead>;
}

}  // namespace

void launch_products(const FewRowsProducts& products, Stream stream) {
  const int64_t rows = products.in.rows;
  if (rows <= 0) return;
  few::ProductParams a{};
  int64_t k = 0;
  a.p = products;
  for (int i = 0; i < products.count; ++i) {
    const FewRowsProduct& p = products.products[i];
    k = std::max(k, p.k);
    const int64_t tiles = (p.n + few::kTileCols - 1) / few::kTileCols * p.repeats;
    a.first_tile[i + 1] = a.first_tile[i] + static_cast<int>(tiles);
  }
  const int blocks =
      a.first_tile[products.count] * row_tiles(rows) + (products.kv.kv != nullptr ? static_cast<int>(rows) : 0);
  launch(k > few::kStride ? product_kernel<2>(products.in) : product_kernel<1>(products.in), blocks, stream, a);
}

void launch_mlp(const DeviceMlp& m, Stream stream) {
  if (m.rows <= 0) return;
  const int64_t in_tiles = m.shared_width / 8 + m.num_experts * (m.width / 8);
  const int64_t out_tiles = (m.dim + few::kTileCols - 1) / few::kTileCols;
  launch(m.dim > few::kStride ? few::mlp_in_kernel<2> : few::mlp_in_kernel<1>,
         static_cast<int>(in_tiles) * row_tiles(m.rows), stream, m);
  launch(few::mlp_out_kernel, static_cast<int>(out_tiles) * row_tiles(m.rows), stream, m);
}

void launch_argmax(const float* logits, int64_t rows, int64_t vocab, int32_t* ids, Stream stream) {
  if (rows > 0) launch(few::argmax_kernel, static_cast<int>(rows), stream, few::ArgmaxParams{logits, vocab, ids});
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
