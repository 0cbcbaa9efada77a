// The decoder's arithmetic for steps of few rows on a GPU in bf16: products with the norm before them and the rotation,
// activation or sum behind them in one launch, so that a layer takes a dozen launches rather than fifty. A decode step
// of a small model is nothing but launches: its weights are read in microseconds.
//
// Arrays lie on the device; nothing here waits or allocates. Sums run in fp32 in an order that depends on the row
// alone: the bits of a row do not depend on how many rows there are.
#pragma once

#include <cstdint>

#include "gannet/ops.h"
#include "model/moe.h"

namespace gannet {
inline namespace v0 {

/// Rows that products read, rounded to bf16 as they are read.
struct FewRowsInput {
  const void* x = nullptr;  ///< [rows, K], fp32 or bf16
  bool bf16 = false;
  int64_t stride = 0;           ///< elements from row to row
  int64_t rows = 0;             ///< at most FewRows::kMostRows
  const float* norm = nullptr;  ///< [K] weight of an RMSNorm before the product; null: none. fp32 rows only
  float eps = 0.0f;             ///< of that norm
};

/// y = x W^T, repeated over evenly spaced parts (the heads of a layer).
struct FewRowsProduct {
  const void* w = nullptr;  ///< bf16 [repeats][n, k], rows packed
  int64_t n = 0, k = 0;     ///< multiples of 8
  int64_t repeats = 1;
  int64_t w_step = 0, x_step = 0, y_step = 0;  ///< from repeat to repeat, in elements
  void* y = nullptr;                           ///< [rows, n]
  int64_t y_stride = 0;
  bool y_bf16 = false;
  bool add = false;     ///< y += instead, fp32 only
  float factor = 1.0f;  ///< y is multiplied by it before it is stored
  // Rotation: the n outputs are heads of head_dim values, of which rope_dim from rope_first on are rotated. 0: none.
  int32_t head_dim = 0, rope_first = 0, rope_dim = 0;  ///< multiples of 16
  RopePairing pairing = RopePairing::kInterleaved;
  int64_t y_head = 0;                      ///< from head to head of y
  void* y_rope = nullptr;                  ///< where the rotated ones go, of the type of y
  int64_t rope_stride = 0, rope_head = 0;  ///< from row to row and from head to head there
};

/// cos | sin by position, and the position of each row.
struct FewRowsRope {
  const int32_t* positions = nullptr;
  const float* table = nullptr;  ///< [num_positions, rope_dim]
  int64_t num_positions = 0;
  int32_t rope_dim = 0;
};

/// What becomes of kv_a and of the indexer's key before they go to the caches.
struct FewRowsKv {
  const float* kv = nullptr;       ///< [rows, R + P]; null: nothing is to be done
  const float* norm = nullptr;     ///< [R]
  bool latent_bf16 = false;        ///< latent and rope, else fp32
  void* latent = nullptr;          ///< out [rows, R], normalised
  void* rope = nullptr;            ///< out [rows, P], rotated
  const float* index_k = nullptr;  ///< [rows, Di], or null
  const float *index_norm = nullptr, *index_bias = nullptr;
  bool index_bf16 = false;
  void* index_out = nullptr;  ///< [rows, Di], LayerNorm and rotated
  int32_t latent_dim = 0, index_dim = 0;
  RopePairing index_pairing = RopePairing::kHalfSplit;
  float eps = 0.0f;
};

struct FewRowsProducts {
  static constexpr int kMost = 4;
  FewRowsInput in = {};
  FewRowsProduct products[kMost] = {};
  int32_t count = 0;
  FewRowsRope rope = {};  ///< for products that rotate, and for kv
  FewRowsKv kv = {};      ///< done beside the products
};

/// The MLP of a layer behind its norm: x += down(silu(gate(n)) * up(n)), n = norm(x), over the shared experts (or the
/// one MLP of a dense layer) and those that the router picked.
struct FewRowsMlp {
  float* x = nullptr;  ///< [rows, dim] packed
  int64_t rows = 0;
  const float* norm = nullptr;  ///< [dim]
  float eps = 0.0f;
  MlpWeights shared = {};  ///< data null: none
  int32_t experts = -1;    ///< their number in Compute; -1: a dense layer
  RouterParams router = {};
  const float* router_weight = nullptr;  ///< fp32 [E, dim]
  const float* router_bias = nullptr;
};

class FewRows {
 public:
  static constexpr int64_t kMostRows = 128;  ///< beyond, products are bound by arithmetic and cuBLASLt is better
  virtual ~FewRows() = default;

  /// A copy of `repeats` matrices [rows, cols], w_step apart, as [repeats][cols, rows] packed: once, at load.
  virtual const void* place_transposed(const void* w, int64_t rows, int64_t cols, int64_t repeats, int64_t w_step) = 0;
  virtual void run(const FewRowsProducts& products) = 0;
  virtual void run(const FewRowsMlp& mlp) = 0;
  /// ids[r] = the index of the largest logit of row r, the smaller among equals, NaN below everything; -1: all NaN.
  virtual void argmax(const float* logits, int64_t rows, int64_t vocab, int32_t* ids) = 0;
};

}  // namespace v0
}  // namespace gannet
