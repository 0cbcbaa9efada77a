#include "model/mla_forms.h"

#include <vector>

#include "model/timer.h"

namespace gannet {
inline namespace v0 {

MlaForms::MlaForms(AttentionBackend& backend, Compute& compute, QueryPrecision query, const MlaWidths& widths,
                   double& seconds)
    : backend_(backend),
      compute_(compute),
      query_(query),
      w_(widths),
      seconds_(seconds),
      absorbed_(compute.memory()),
      attended_(compute.memory()),
      rope_(compute.memory()),
      k_nope_(compute.memory()),
      v_(compute.memory()),
      chunk_latent_(compute.memory()),
      chunk_k_(compute.memory()),
      chunk_v_(compute.memory()),
      q16_(compute.memory()),
      k16_(compute.memory()),
      rope16_(compute.memory()),
      v16_(compute.memory()),
      out16_(compute.memory()) {}

TensorView MlaForms::query_view(float* x, std::initializer_list<int64_t> shape, Array& storage) {
  TensorView v = view_of(x, shape);
  if (query_ == QueryPrecision::kF32) return v;
  const int64_t n = v.num_elements();
  v.data = storage.room<Bf16>(n);
  v.dtype = DType::kBf16;
  compute_.to_bf16(x, n, storage.data<Bf16>());
  return v;
}

void MlaForms::expanded(const MlaRows& x) {
  const int64_t n = backend_.step().rows(StepRows::kPrefill).size();
  if (n == 0) return;
  expand(x.kv_b, x.latent, n, k_nope_.room(n * w_.heads * w_.nope), v_.room(n * w_.heads * w_.v));
  const bool narrow = query_ == QueryPrecision::kBf16;
  const TensorView q = query_view(x.q, {n, w_.heads, w_.nope + w_.rope}, q16_);
  const TensorView k_nope = query_view(k_nope_.data(), {n, w_.heads, w_.nope}, k16_);
  compute_.copy_rows(x.rope, x.rope_stride, n, w_.rope, rope_.room(n * w_.rope), w_.rope);
  const TensorView k_rope = query_view(rope_.data(), {n, w_.rope}, rope16_);
  const TensorView v = query_view(v_.data(), {n, w_.heads, w_.v}, v16_);
  const auto expand_chunk = [&](const TensorView& latent, const TensorView& k, const TensorView& values) {
    const int64_t m = latent.shape[0];
    if (!narrow) {
      expand(x.kv_b, latent.ptr<const float>(), m, k.ptr<float>(), values.ptr<float>());
      return;
    }
    float* wide = chunk_latent_.room(m * w_.latent);
    compute_.from_bf16(latent.ptr<const Bf16>(), m * w_.latent, wide);
    expand(x.kv_b, wide, m, chunk_k_.room(m * w_.heads * w_.nope), chunk_v_.room(m * w_.heads * w_.v));
    compute_.to_bf16(chunk_k_.data(), m * w_.heads * w_.nope, k.ptr<Bf16>());
    compute_.to_bf16(chunk_v_.data(), m * w_.heads * w_.v, values.ptr<Bf16>());
  };
  TensorView out = view_of(x.heads, {n, w_.heads, w_.v});
  if (narrow) {
    out.data = out16_.room<Bf16>(n * w_.heads * w_.v);
    out.dtype = DType::kBf16;
  }
  {
    const Timer timer(seconds_);
    backend_.dense_prefill({.layer = x.layer,
                            .q = q,
                            .k_nope = k_nope,
                            .k_rope = k_rope,
                            .v = v,
                            .write = AlreadyWritten{},
                            .expand = expand_chunk,
                            .out = out,
                            .lse = {}});
  }
  if (narrow) compute_.from_bf16(out16_.data<Bf16>(), n * w_.heads * w_.v, x.heads);
}

void MlaForms::absorbed(const MlaRows& x, StepRows part, const StepWrite& write, const Selection& selection) {
  const Range rows = backend_.step().rows(part);
  if (rows.size() == 0) return;
  absorb_queries(x, rows);
  {
    const Timer timer(seconds_);
    backend_.attend({.layer = x.layer,
                     .rows = part,
                     .q = query_view(absorbed_.data(), {rows.size(), w_.heads, w_.latent + w_.rope}, q16_),
                     .write = write,
                     .selection = selection,
                     .out = view_of(attended_.data(), {rows.size(), w_.heads, w_.latent}),
                     .lse = {}});
  }
  std::vector<Product> products;
  for (int64_t h = 0; h < w_.heads; ++h)
    products.push_back({.x = attended_.data() + h * w_.latent,
                        .x_stride = w_.heads * w_.latent,
                        .rows = rows.size(),
                        .w = x.kv_b.row_slice(h * (w_.nope + w_.v) + w_.nope, w_.v),
                        .y = x.heads + (rows.begin * w_.heads + h) * w_.v,
                        .y_stride = w_.heads * w_.v});
  compute_.run(products);
}

void MlaForms::absorb_queries(const MlaRows& x, Range rows) {
  const int64_t q_dim = w_.nope + w_.rope, row_dim = w_.latent + w_.rope;
  const float* q = x.q + rows.begin * w_.heads * q_dim;
  float* out = absorbed_.room(rows.size() * w_.heads * row_dim);
  attended_.room(rows.size() * w_.heads * w_.latent);
  std::vector<Product> products;
  for (int64_t h = 0; h < w_.heads; ++h)
    products.push_back({.x = q + h * q_dim,
                        .x_stride = w_.heads * q_dim,
                        .rows = rows.size(),
                        .w = x.kv_b.row_slice(h * (w_.nope + w_.v), w_.nope),
                        .form = ProductForm::kPlain,
                        .y = out + h * row_dim,
                        .y_stride = w_.heads * row_dim});
  compute_.run(products);
  compute_.copy_rows(q + w_.nope, q_dim, rows.size() * w_.heads, w_.rope, out + w_.latent, row_dim);
}

void MlaForms::expand(const WeightView& kv_b, const float* latent, int64_t rows, float* k_nope, float* v) {
  // The heads of one kind one after the other: a GPU makes one batch of them.
  std::vector<Product> products;
  for (int64_t h = 0; h < w_.heads; ++h)
    products.push_back({.x = latent,
                        .x_stride = w_.latent,
                        .rows = rows,
                        .w = kv_b.row_slice(h * (w_.nope + w_.v), w_.nope),
                        .y = k_nope + h * w_.nope,
                        .y_stride = w_.heads * w_.nope});
  for (int64_t h = 0; h < w_.heads; ++h)
    products.push_back({.x = latent,
                        .x_stride = w_.latent,
                        .rows = rows,
                        .w = kv_b.row_slice(h * (w_.nope + w_.v) + w_.nope, w_.v),
                        .y = v + h * w_.v,
                        .y_stride = w_.heads * w_.v});
  compute_.run(products);
}

}  // namespace v0
}  // namespace gannet
