// Launchers of the decoder's kernels on a CUDA device. All arrays lie there; sizes are not checked. Sums run in fp32 in
// an order that depends on the row alone.
#pragma once

#include <cstdint>

#include "gannet/device.h"
#include "gannet/dtype.h"
#include "model/few_rows.h"
#include "model/moe.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

/// A [rows, cols] weight in memory of the device, bf16 or fp32.
struct DeviceWeight {
  const void* data;
  bool bf16;
};

void launch_widen_e4m3(const void* values, const float* scales, int64_t rows, int64_t cols, int64_t block_rows,
                       int64_t block_cols, int64_t scale_cols, void* out, bool out_bf16, Stream stream);
void launch_embed(DeviceWeight w, const int32_t* ids, int64_t rows, int64_t dim, float* x, Stream stream);
void launch_rms_norm(const float* x, int64_t x_stride, int64_t rows, int64_t dim, const float* weight, float eps,
                     float* y, int64_t y_stride, Stream stream);
void launch_layer_norm(const float* x, int64_t rows, int64_t dim, const float* weight, const float* bias, float eps,
                       float* y, Stream stream);
void launch_add(float* x, const float* y, int64_t n, Stream stream);
void launch_scale(float* x, float factor, int64_t n, Stream stream);
void launch_silu_mul(float* gate, const float* up, int64_t n, Stream stream);
void launch_copy_rows(const float* x, int64_t x_stride, int64_t rows, int64_t n, float* y, int64_t y_stride,
                      Stream stream);
/// y[i, :] = x[rows[i], :], zeros for -1.
void launch_gather_rows(const float* x, const int64_t* rows, int64_t num_rows, int64_t n, float* y, Stream stream);
/// y[b, r, k] packed = bf16(x[b * batch_stride + r * row_stride + k]).
void launch_pack_bf16(const float* x, int64_t batches, int64_t batch_stride, int64_t rows, int64_t row_stride,
                      int64_t k, void* y, Stream stream);
void launch_from_bf16(const void* x, int64_t n, float* y, Stream stream);

/// out[r, c, k] = w[r * w_step + k * cols + c] of bf16 values.
void launch_transpose(const void* w, int64_t rows, int64_t cols, int64_t repeats, int64_t w_step, void* out,
                      Stream stream);

// ---- mixture of experts -------------------------------------------------------------------------------------------

/// The experts of a layer: pointers of the device, [E] each.
struct DeviceExperts {
  const void* const* gate;
  const void* const* up;
  const void* const* down;
  bool bf16;
  int64_t dim, width;
};

/// route_experts (model/moe.h): ids and weights [rows, experts_per_token].
void launch_route(const RouterParams& params, const float* logits, const float* bias, int64_t rows, int32_t* ids,
                  float* weights, Stream stream);
/// The same from logits that it makes itself, of rows x [rows, dim] behind an RMSNorm.
void launch_norm_route(const RouterParams& params, const float* x, int64_t dim, const float* norm, float eps,
                       const float* router, const float* bias, int64_t rows, int32_t* ids, float* weights,
                       Stream stream);
/// Pairs (row, choice) sorted by expert, each expert's in ascending order: order[place] = pair, place_of[pair] = place,
/// first[e] .. first[e + 1] are the places of expert e.
void launch_sort_pairs(const int32_t* ids, int64_t pairs, int32_t num_experts, int32_t* first, int32_t* order,
                       int32_t* place_of, Stream stream);
/// hidden[place, width] = silu(x Wg^T) * (x Wu^T) of the place's row and expert.
void launch_experts_in(const DeviceExperts& experts, int32_t num_experts, const int32_t* first, const int32_t* order,
                       int64_t pairs, int32_t per_token, const float* x, float* hidden, Stream stream);
/// out[place, dim] = hidden Wd^T.
void launch_experts_out(const DeviceExperts& experts, int32_t num_experts, const int32_t* first, int64_t pairs,
                        const float* hidden, float* out, Stream stream);
/// y[row, :] += weights[row, j] * out[place_of[row, j], :], in the order of j.
void launch_experts_add(const float* out, const int32_t* place_of, const float* weights, int64_t rows,
                        int32_t per_token, int64_t dim, float* y, Stream stream);

// ---- steps of few rows (few_rows.cuh) -----------------------------------------------------------------------------

/// FewRowsMlp with its arrays.
struct DeviceMlp {
  static constexpr int kMostChoices = 16;  ///< experts of a row
  float* x;                                ///< [rows, dim]
  const float* norm;
  float eps;
  int64_t rows, dim;
  const void *gate, *up, *down;    ///< of the shared experts, bf16
  int64_t shared_width;            ///< 0: none
  const void* const* expert_gate;  ///< [E] each
  const void* const* expert_up;
  const void* const* expert_down;
  int64_t width;
  int32_t num_experts, per_row;  ///< 0 in dense layers
  const int32_t* ids;            ///< [rows, per_row]
  const float* weights;
  uint16_t* hidden;         ///< bf16 [rows * per_row, width], times the weight
  uint16_t* shared_hidden;  ///< bf16 [rows, shared_width]
};

void launch_products(const FewRowsProducts& products, Stream stream);
/// Both halves of the MLP.
void launch_mlp(const DeviceMlp& mlp, Stream stream);
void launch_argmax(const float* logits, int64_t rows, int64_t vocab, int32_t* ids, Stream stream);

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
