// The operations of MLA and DSA attention over paged caches. Each is a struct of arguments, run through
// OpPlan<Struct> (gannet/op_plan.h). Sections of the contract are those of docs/semantics.md.
//
// Common rules
//   - rows are tokens; num_heads (H), latent_dim (R, 512), rope_dim (P, 64), index head_dim (Di, 128);
//   - lengths count this step's tokens; a row without keys gives output 0 and LSE -inf;
//   - bytes outside the mask, NaN included, never reach a result;
//   - slots are page * page_size + offset; a negative write location skips the row;
//   - the result of a row is a function of its bytes alone (where ImplInfo::batch_invariant; else of the shapes and
//     lengths of the call too): not of its neighbours, the order of pages or the number of workers, bit for bit;
//   - every stride is honoured; the last dimension is contiguous; empty problems return at once;
//   - fp16 is refused by name;
//   - base pointers, strides of rows and heads, and page strides are multiples of 16 bytes; but integer tensors, lse,
//     max_logits, attn_sink, weights, logits and cos_sin need no more than the alignment of one element;
//   - widths (latent_dim, rope_dim, head_dim, N, P, V) are multiples of 16;
//   - contents: a run on the CPU refuses a page of a visible key that is outside the pool, slots to write or gather
//     beyond it, cumulative lengths that fall or do not end at the number of rows, and lengths beyond what the
//     arguments say holds; on other devices such values are the caller's responsibility and never a wild access.
// Errors: Error(kInvalidArgument) names the argument, its value and what is accepted.
#pragma once

#include <tuple>

#include "gannet/kv_cache.h"
#include "gannet/op_plan.h"
#include "gannet/page_table.h"
#include "gannet/tensor.h"

namespace gannet {
inline namespace v0 {

// ---- writing and reading the caches -------------------------------------------------------------------------------

/// Scatters latent rows: cache[slots[t]] = [latent[t] | rope[t]], converted to the cache's format (saturating for e4m3;
/// fp32 arithmetic, value = e4m3(x / scale) with one rounded division). What a slot holds that two rows name is
/// unspecified.
struct LatentWrite {
  static constexpr const char* kName = "latent_write";
  TensorView latent;  ///< fp32 or bf16 [rows, R], the normalised kv_a
  TensorView rope;    ///< same dtype [rows, P], the rotated k_pe
  TensorView slots;   ///< int32 or int64 [rows]; negative: the row is skipped
  LatentCacheView cache;

  template <class Self, class F>
  static void for_each_view(Self& s, F&& f) {
    f("latent", s.latent);
    f("rope", s.rope);
    f("slots", s.slots);
  }
  auto options() const { return cache.options(); }
};

/// Gathers latent rows and dequantises them: latent[t] | rope[t] = cache[slots[t]]; a negative slot gives zeros.
struct LatentGather {
  static constexpr const char* kName = "latent_gather";
  TensorView slots;  ///< int32 or int64 [rows]
  LatentCacheView cache;
  TensorView latent;  ///< out, fp32 or bf16 [rows, R]
  TensorView rope;    ///< out, same dtype [rows, P]

  template <class Self, class F>
  static void for_each_view(Self& s, F&& f) {
    f("slots", s.slots);
    f("latent", s.latent);
    f("rope", s.rope);
  }
  auto options() const { return cache.options(); }
};

/// Quantises index keys to the cache's format and scatters them (spec 3.3, A.6): fp32 arithmetic, value = e4m3(x /
/// scale) with one rounded division.
struct IndexKWrite {
  static constexpr const char* kName = "index_k_write";
  TensorView k;      ///< fp32 or bf16 [rows, Di]
  TensorView slots;  ///< int32 or int64 [rows]; negative: the row is skipped
  IndexCacheView cache;
  bool hadamard = false;  ///< k is rotated (gannet/hadamard.h): as the cache says, else refused

  template <class Self, class F>
  static void for_each_view(Self& s, F&& f) {
    f("k", s.k);
    f("slots", s.slots);
  }
  auto options() const { return std::tuple_cat(cache.options(), std::tuple{hadamard}); }
};

/// Gathers and dequantises index keys; a negative slot gives zeros.
struct IndexKGather {
  static constexpr const char* kName = "index_k_gather";
  TensorView slots;  ///< int32 or int64 [rows]
  IndexCacheView cache;
  TensorView k;           ///< out, fp32 or bf16 [rows, Di]
  bool hadamard = false;  ///< k comes rotated (gannet/hadamard.h): as the cache says, else refused

  template <class Self, class F>
  static void for_each_view(Self& s, F&& f) {
    f("slots", s.slots);
    f("k", s.k);
  }
  auto options() const { return std::tuple_cat(cache.options(), std::tuple{hadamard}); }
};

enum class RopePairing : uint8_t {
  kInterleaved,  ///< pairs (2i, 2i+1): MLA's q_pe and k_pe; GLM-5's indexer
  kHalfSplit,    ///< pairs (i, i+P/2): DeepSeek-V3.2's indexer
};

/// Rotates the P values x[..., offset : offset + P] in place: (a, b) -> (a c - b s, b c + a s), fp32 arithmetic (A.10).
struct Rope {
  static constexpr const char* kName = "rope";
  TensorView x;          ///< in/out, fp32 or bf16 [rows, heads, width]
  TensorView positions;  ///< int32 [rows], each in [0, table rows)
  TensorView cos_sin;    ///< fp32 [max_positions, P]: P/2 cosines, then P/2 sines
  int32_t offset = 0;    ///< first rotated value: width - P for MLA's q, 0 for the indexer
  RopePairing pairing = RopePairing::kInterleaved;

  template <class Self, class F>
  static void for_each_view(Self& s, F&& f) {
    f("x", s.x);
    f("positions", s.positions);
    f("cos_sin", s.cos_sin);
  }
  auto options() const { return std::tuple{offset, pairing}; }
};

// ---- dense attention ----------------------------------------------------------------------------------------------

/// Attention in the expanded ("MHA") form over ragged batches, for prefill and for prefix chunks (spec 2.7, A.3).
/// Query row a of request r, of nq, sees key b of nk iff not causal or b <= a + (nk - nq).
struct RaggedPrefill {
  static constexpr const char* kName = "ragged_prefill";
  TensorView q;            ///< fp32 or bf16 [q_rows, H, N+P]
  TensorView k;            ///< same dtype [kv_rows, H, N+P], or [kv_rows, H, N] with k_rope
  TensorView k_rope = {};  ///< optional, same dtype [kv_rows, P]: the rotated part that all heads share
  TensorView v;            ///< same dtype [kv_rows, H, V]
  TensorView cu_q_lens;    ///< int32 [B+1]
  TensorView cu_kv_lens;   ///< int32 [B+1]
  TensorView out;          ///< out, fp32 or bf16 [q_rows, H, V]
  TensorView lse = {};     ///< out, optional fp32 [q_rows, H], natural logarithm
  float softmax_scale = 0.0f;
  bool causal = true;

  template <class Self, class F>
  static void for_each_view(Self& s, F&& f) {
    f("q", s.q);
    f("k", s.k);
    f("k_rope", s.k_rope);
    f("v", s.v);
    f("cu_q_lens", s.cu_q_lens);
    f("cu_kv_lens", s.cu_kv_lens);
    f("out", s.out);
    f("lse", s.lse);
  }
  auto options() const { return std::tuple{softmax_scale, causal}; }
};

enum class LseBase : uint8_t { kNatural, kTwo };

/// Merges two partial attention results in place into side a (spec 2.8, A.4). An empty side is never read:
/// merge(empty, x) and merge(x, empty) are x bit for bit, both empty give 0 and -inf. Where counts are given they
/// decide what is empty; else an LSE of -inf does.
struct MergeState {
  static constexpr const char* kName = "merge_state";
  TensorView out_a;         ///< in/out, fp32 or bf16 [rows, H, D]
  TensorView lse_a;         ///< in/out, fp32 [rows, H]
  TensorView out_b;         ///< same dtype [rows, H, D]
  TensorView lse_b;         ///< fp32 [rows, H]
  TensorView count_a = {};  ///< optional int32 [rows]: keys behind side a of each row
  TensorView count_b = {};  ///< optional int32 [rows]
  LseBase base = LseBase::kNatural;

  template <class Self, class F>
  static void for_each_view(Self& s, F&& f) {
    f("out_a", s.out_a);
    f("lse_a", s.lse_a);
    f("out_b", s.out_b);
    f("lse_b", s.lse_b);
    f("count_a", s.count_a);
    f("count_b", s.count_b);
  }
  auto options() const { return std::tuple{base}; }
};

/// Absorbed ("MQA") attention over the paged latent cache (spec 2.4, A.2): decode, verify, and any ragged rows.
///   x(t, h, s) = softmax_scale * q_scale * q(t, h) . [c_s | r_s]       for the visible keys s
///   out(t, h)  = sum over s of exp(x(t, h, s)) * c_s / (sum over s of exp(x(t, h, s)) + exp(attn_sink(h)))
///   lse(t, h)  = ln(sum over s of exp(x(t, h, s)))                     without the sink
/// A key whose score is -inf has weight 0; a row all of whose scores are has no weight at all and gives what a row
/// without keys gives: output 0, LSE -inf (A.4: terms of weight 0 are dropped).
struct MlaDecode {
  static constexpr const char* kName = "mla_decode";
  /// fp32 or bf16 [rows, H, R+P], the absorbed query [Wk^T q_nope | rotated q_pe]; or e4m3 where the cache is kE4m3 or
  /// kE4m3PerToken, the query then being q * q_scale.
  TensorView q;
  LatentCacheView cache;
  PageTableView pages;
  QueryRows rows;
  /// optional fp32 [H], in units of the scores: a key without a value that every row sees, by which the weights sum to
  /// less than 1. -inf: none; +inf: output 0. A row without keys gives 0 whatever the sink.
  TensorView attn_sink = {};
  TensorView out;              ///< out, fp32 or bf16 [rows, H, R]
  TensorView lse = {};         ///< out, optional fp32 [rows, H], natural logarithm
  TensorView max_logits = {};  ///< out, optional fp32 [rows, H]: the largest x, NaN left out; -inf where there is none
  float softmax_scale = 0.0f;
  float q_scale = 1.0f;  ///< of an e4m3 query, finite and positive; 1 for others

  template <class Self, class F>
  static void for_each_view(Self& s, F&& f) {
    f("q", s.q);
    PageTableView::for_each_view(s.pages, f);
    QueryRows::for_each_view(s.rows, f);
    f("attn_sink", s.attn_sink);
    f("out", s.out);
    f("lse", s.lse);
    f("max_logits", s.max_logits);
  }
  auto options() const {
    return std::tuple_cat(cache.options(), pages.options(), rows.options(), std::tuple{softmax_scale, q_scale});
  }
};

// ---- sparse attention ---------------------------------------------------------------------------------------------

/// Indexer scores (spec 3.2, A.7): logits(t, s) = sum over index heads of weights(t, h) * relu(q(t, h) . k(s)) for the
/// keys s that row t sees; relu(NaN) is NaN, so that a NaN key ranks last in a selection (max(0, x) with x as the
/// second operand of the instruction has it for free). The caller folds Di^-0.5, Hi^-0.5 and, for quantised queries,
/// their scale into weights.
struct IndexLogits {
  static constexpr const char* kName = "index_logits";
  TensorView q;        ///< fp32, bf16 or e4m3 [rows, Hi, Di]
  TensorView weights;  ///< fp32 [rows, Hi]
  IndexCacheView cache;
  PageTableView pages;
  QueryRows rows;
  /// out, fp32 or bf16 (the fp32 value, rounded once) [rows, max_keys]; columns that a row does not see are left alone
  TensorView logits;
  bool hadamard = false;  ///< q is rotated (gannet/hadamard.h): as the cache says, else refused

  template <class Self, class F>
  static void for_each_view(Self& s, F&& f) {
    f("q", s.q);
    f("weights", s.weights);
    PageTableView::for_each_view(s.pages, f);
    QueryRows::for_each_view(s.rows, f);
    f("logits", s.logits);
  }
  auto options() const {
    return std::tuple_cat(cache.options(), pages.options(), rows.options(), std::tuple{hadamard});
  }
};

/// Exact top-k of each row (spec 0.1.9, A.8): total order NaN < -inf < finite < +inf, -0 = +0, the smaller position
/// first among equals. Writes min(n, k) distinct positions in ascending order, then -1. n <= k: 0..n-1 without looking
/// at the scores. k may be anything from 1, more than there are columns too.
struct TopK {
  static constexpr const char* kName = "topk";
  TensorView logits;     ///< fp32 or bf16 [rows, max_keys]
  TensorView lens;       ///< int32 [rows]: n, the leading columns that count; less than 0 is 0
  TensorView positions;  ///< out, int32 [rows, k]
  TensorView counts;     ///< out, int32 [rows]: min(n, k)

  template <class Self, class F>
  static void for_each_view(Self& s, F&& f) {
    f("logits", s.logits);
    f("lens", s.lens);
    f("positions", s.positions);
    f("counts", s.counts);
  }
  auto options() const { return std::tuple{}; }
};

/// Index logits, top-k and the translation to slots in one pass with bounded memory (spec 3.4, 3.6, 3.7): what
/// the DSA backends run. Entries are in ascending order of position, packed, then -1.
struct IndexSelect {
  static constexpr const char* kName = "index_select";
  TensorView q;        ///< fp32, bf16 or e4m3 [rows, Hi, Di]
  TensorView weights;  ///< fp32 [rows, Hi]
  IndexCacheView cache;
  PageTableView pages;
  QueryRows rows;
  int64_t max_seq_len = 0;         ///< no row sees more keys than this; sizes the workspace
  TensorView topk_slots;           ///< out, int32 [rows, k]
  TensorView topk_lens;            ///< out, int32 [rows]
  TensorView topk_positions = {};  ///< out, optional int32 [rows, k]
  bool hadamard = false;           ///< q is rotated (gannet/hadamard.h): as the cache says, else refused

  template <class Self, class F>
  static void for_each_view(Self& s, F&& f) {
    f("q", s.q);
    f("weights", s.weights);
    PageTableView::for_each_view(s.pages, f);
    QueryRows::for_each_view(s.rows, f);
    f("topk_slots", s.topk_slots);
    f("topk_lens", s.topk_lens);
    f("topk_positions", s.topk_positions);
  }
  auto options() const {
    return std::tuple_cat(cache.options(), pages.options(), rows.options(), std::tuple{hadamard, max_seq_len});
  }
};

/// Absorbed attention of each row over a list of slots (spec 3.10), of any length k. An entry counts iff 0 <= slot <
/// num_slots and its column is below topk_lens[t] (where given); any other is never loaded. A slot that is listed twice
/// counts twice. Sink, scales, LSE and largest score as for MlaDecode.
struct SparseAttention {
  static constexpr const char* kName = "sparse_attention";
  TensorView q;  ///< as of MlaDecode
  LatentCacheView cache;
  TensorView topk_slots;       ///< int32 [rows, k]
  TensorView topk_lens = {};   ///< optional int32 [rows]; less than 0 is 0, more than k is k
  TensorView attn_sink = {};   ///< optional fp32 [H]
  TensorView out;              ///< out, fp32 or bf16 [rows, H, R]
  TensorView lse = {};         ///< out, optional fp32 [rows, H], natural logarithm
  TensorView max_logits = {};  ///< out, optional fp32 [rows, H]
  float softmax_scale = 0.0f;
  float q_scale = 1.0f;

  template <class Self, class F>
  static void for_each_view(Self& s, F&& f) {
    f("q", s.q);
    f("topk_slots", s.topk_slots);
    f("topk_lens", s.topk_lens);
    f("attn_sink", s.attn_sink);
    f("out", s.out);
    f("lse", s.lse);
    f("max_logits", s.max_logits);
  }
  auto options() const { return std::tuple_cat(cache.options(), std::tuple{softmax_scale, q_scale}); }
};

}  // namespace v0
}  // namespace gannet
