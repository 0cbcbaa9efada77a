// What the tuned kernels leave to the generic set, in the words of an error.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>
#include <utility>

#include "core/format.h"
#include "gannet/ops.h"

namespace gannet {
inline namespace v0 {
namespace cuda {

/// Optional arguments of MlaDecode and SparseAttention, and rows with others between them. Here rather than with its
/// one set, so that a build without CUDA can test its words.
template <class Params>
std::string refuses_options(const Params& p) {
  if (p.attn_sink.given()) return "attn_sink is given; accepted: none";
  if (p.max_logits.given()) return "max_logits is given; accepted: none";
  if (p.cache.row_stride() != latent_row_bytes(p.cache.format, p.cache.geometry))
    return fmt::format("cache.row_stride_bytes is {}; accepted: 0", p.cache.row_stride_bytes);
  return {};
}

/// "a, b" of what `text` says of each of them.
template <class T, class Text>
std::string list_of(std::initializer_list<T> all, Text&& text) {
  std::string list;
  for (const T& one : all) list += (list.empty() ? "" : ", ") + text(one);
  return list;
}

/// IndexLogits, or IndexSelect over scores of the same kernels, by tensor cores.
template <class Params>
std::string refuses_indexer(const Params& p, int64_t num_columns, std::initializer_list<DType> queries,
                            std::initializer_list<int64_t> head_dims) {
  constexpr int64_t kMaxHeads = 64, kMaxColumns = int64_t{1} << 30;  // positions are 32-bit numbers in the kernels
  if (std::find(queries.begin(), queries.end(), p.q.dtype) == queries.end())
    return fmt::format("q is {}; accepted: {}", to_string(p.q.dtype),
                       list_of(queries, [](DType t) { return std::string(to_string(t)); }));
  if (p.cache.format != IndexKFormat::kE4m3)
    return fmt::format("index keys are {}; accepted: e4m3", to_string(p.cache.format));
  if (std::find(head_dims.begin(), head_dims.end(), p.cache.head_dim) == head_dims.end())
    return fmt::format("head_dim is {}; accepted: {}", p.cache.head_dim,
                       list_of(head_dims, [](int64_t d) { return std::to_string(d); }));
  if (p.q.shape[1] > kMaxHeads) return fmt::format("index heads are {}; accepted: up to {}", p.q.shape[1], kMaxHeads);
  if (num_columns > kMaxColumns) return fmt::format("{} keys a row; accepted: up to {}", num_columns, kMaxColumns);
  return {};
}

/// RaggedPrefill by tensor cores; `widths`: of keys and of values.
inline std::string refuses_ragged(const RaggedPrefill& p, std::initializer_list<std::pair<int64_t, int64_t>> widths) {
  if (p.q.dtype != DType::kBf16) return fmt::format("q is {}; accepted: bf16", to_string(p.q.dtype));
  const std::pair width{p.q.shape[2], p.v.shape[2]};
  if (std::find(widths.begin(), widths.end(), width) == widths.end())
    return fmt::format("keys and values are {} and {} wide; accepted: {}", width.first, width.second,
                       list_of(widths, [](const auto& w) { return fmt::format("{} and {}", w.first, w.second); }));
  if (p.k_rope.given() && p.k_rope.shape[1] != 64)
    return fmt::format("k_rope is {} wide; accepted: 64", p.k_rope.shape[1]);
  return {};
}

}  // namespace cuda
}  // namespace v0
}  // namespace gannet
