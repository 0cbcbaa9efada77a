// The two forms of dense multi-head latent attention over the rows of a step, and the products by kv_b that each needs.
//
//   expanded  kv_b makes keys and values of H heads from the latents of the new rows, and chunk by chunk from those of
//             the cached prefix; attention is RaggedPrefill over them. Prefill rows only.
//   absorbed  the keys' half of kv_b goes into the query, attention reads the cache as it lies, and the values' half
//             makes the heads of what comes out. Any rows; sparse attention has this form alone.
//
// Both give the same within rounding; what they cost is in model/prefill_form.h.
//
// Errors: those of the backend. Thread safety: used by one thread at a time.
#pragma once

#include <initializer_list>

#include "gannet/attention.h"
#include "model/compute.h"
#include "model/linear.h"

namespace gannet {
inline namespace v0 {

/// How attention reads a query: the projections give fp32.
enum class QueryPrecision : uint8_t {
  kF32,
  kBf16,  ///< rounded to bf16 before attention; faster where the machine multiplies bf16
};

/// Widths of a layer's attention, as docs/semantics.md names them.
struct MlaWidths {
  int64_t heads = 0;   ///< H
  int64_t latent = 0;  ///< R
  int64_t rope = 0;    ///< P
  int64_t nope = 0;    ///< N
  int64_t v = 0;       ///< V
};

/// What a layer's attention reads and writes: arrays of the decoder's device over all rows of the backend's step, whose
/// latents are in the cache already.
struct MlaRows {
  int32_t layer = 0;
  WeightView kv_b;          ///< [H * (N + V), R], the N rows of a head before its V
  float* q = nullptr;       ///< [rows, H, N + P], rotated
  float* latent = nullptr;  ///< [rows, R], normalised; read by the expanded form
  float* rope = nullptr;    ///< [rows, P], rotated, rows `rope_stride` apart; read by the expanded form
  int64_t rope_stride = 0;
  float* heads = nullptr;  ///< [rows, H, V]: the result
};

class MlaForms {
 public:
  /// `backend` and `compute` outlive this. `seconds` grows by the wall-clock time spent in the backend.
  MlaForms(AttentionBackend& backend, Compute& compute, QueryPrecision query, const MlaWidths& widths, double& seconds);

  /// The prefill rows of the step.
  void expanded(const MlaRows& x);
  /// The rows of that part of the step, over the keys that `selection` says.
  void absorbed(const MlaRows& x, StepRows part, const StepWrite& write, const Selection& selection);

  /// A packed view of fp32 values in the form that attention reads: as they are, or rounded into `storage`.
  TensorView query_view(float* x, std::initializer_list<int64_t> shape, Array& storage);

 private:
  TensorView view_of(float* x, std::initializer_list<int64_t> shape) const {
    return view(x, DType::kF32, shape, compute_.device());
  }
  void absorb_queries(const MlaRows& x, Range rows);
  void expand(const WeightView& kv_b, const float* latent, int64_t rows, float* k_nope, float* v);

  AttentionBackend& backend_;
  Compute& compute_;
  QueryPrecision query_;
  MlaWidths w_;
  double& seconds_;
  Array absorbed_;  // [rows, H, R+P]
  Array attended_;  // [rows, H, R]
  Array rope_;      // [rows, P] packed
  Array k_nope_, v_;
  Array chunk_latent_, chunk_k_, chunk_v_;
  Array q16_, k16_, rope16_, v16_, out16_;
};

}  // namespace v0
}  // namespace gannet
