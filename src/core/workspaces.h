// What a decode step of a large batch needs of scratch: for `gannet info`, and for the test of the limit.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "gannet/op_plan.h"
#include "gannet/ops.h"

namespace gannet {
inline namespace v0 {

/// Most scratch of an operation by an implementation, over contexts from 4,096 to 1,048,576 tokens.
struct WorkspaceSize {
  std::string op, impl, format;
  size_t bytes = 0;
};

/// 256 requests of two rows, DeepSeek-V3's 128 heads over rows of 512 + 64, lists of 2,048, 64 index heads. Only
/// implementations that run here: what those of a GPU take follows from its number of multiprocessors.
inline std::vector<WorkspaceSize> decode_workspaces(const Context& context) {
  constexpr int64_t kRequests = 256, kQLen = 2, kRows = kRequests * kQLen, kHeads = 128, kPage = 64, kTopk = 2048,
                    kIndexHeads = 64, kIndexDim = 128;
  std::vector<WorkspaceSize> sizes;
  const auto add = [&](const std::string& format, int64_t max_context, auto params) {
    using Params = decltype(params);
    for (const ImplInfo& info : list_implementations<Params>()) {
      if (!info.runs_here || info.name == "ref") continue;
      Params p = params;
      Params::for_each_view(p, [&](const char*, TensorView& v) { v.device = {info.device, 0}; });
      p.cache.device = {info.device, 0};
      p.cache.num_pages = kRequests * max_context / kPage;
      size_t bytes = 0;
      try {
        bytes = OpPlan<Params>(context, p, {.impl = info.name}).workspace_bytes();
      } catch (const Error& e) {
        if (e.code() != ErrorCode::kUnsupported) throw;
        continue;
      }
      const auto same = [&](const WorkspaceSize& s) {
        return s.op == info.op && s.impl == info.name && s.format == format;
      };
      const auto found = std::find_if(sizes.begin(), sizes.end(), same);
      if (found == sizes.end()) sizes.push_back({info.op, info.name, format, bytes});
      else found->bytes = std::max(found->bytes, bytes);
    }
  };
  for (const int64_t context_len : {4096, 131072, 1048576}) {
    const PageTableView pages = PageTableView::padded(view(nullptr, DType::kI32, {kRequests, context_len / kPage}));
    QueryRows rows;
    rows.seq_lens = view(nullptr, DType::kI32, {kRequests});
    rows.q_len = kQLen;
    for (const LatentFormat format : {LatentFormat::kBf16, LatentFormat::kE4m3, LatentFormat::kPacked656}) {
      LatentCacheView cache;
      cache.format = format;
      cache.scale = format == LatentFormat::kE4m3 ? 1.0f : 0.0f;
      cache.page_size = kPage;
      cache.page_stride_bytes = kPage * latent_row_bytes(format, cache.geometry);
      MlaDecode dense;
      dense.q = view(nullptr, DType::kBf16, {kRows, kHeads, cache.geometry.width()});
      dense.cache = cache;
      dense.pages = pages;
      dense.rows = rows;
      dense.out = view(nullptr, DType::kBf16, {kRows, kHeads, cache.geometry.latent_dim});
      dense.softmax_scale = 1.0f;
      add(to_string(format), context_len, dense);
      SparseAttention sparse;
      sparse.q = dense.q;
      sparse.cache = cache;
      sparse.topk_slots = view(nullptr, DType::kI32, {kRows, kTopk});
      sparse.topk_lens = view(nullptr, DType::kI32, {kRows});
      sparse.out = dense.out;
      sparse.softmax_scale = 1.0f;
      add(to_string(format), context_len, sparse);
    }
    IndexSelect select;
    select.q = view(nullptr, DType::kBf16, {kRows, kIndexHeads, kIndexDim});
    select.weights = view(nullptr, DType::kF32, {kRows, kIndexHeads});
    select.cache.page_size = kPage;
    select.cache.page_stride_bytes = kPage * index_k_token_bytes(select.cache.format, kIndexDim);
    select.pages = pages;
    select.rows = rows;
    select.max_seq_len = context_len;
    select.topk_slots = view(nullptr, DType::kI32, {kRows, kTopk});
    select.topk_lens = view(nullptr, DType::kI32, {kRows});
    add(to_string(select.cache.format), context_len, select);
  }
  return sizes;
}

}  // namespace v0
}  // namespace gannet
