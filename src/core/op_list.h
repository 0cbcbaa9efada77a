// The list of operations, for code that does the same thing for each: X(Params, member) where member is the name of
// its entry in an implementation set.
#pragma once

#define GANNET_FOR_EACH_OP(X)      \
  X(LatentWrite, latent_write)     \
  X(LatentGather, latent_gather)   \
  X(IndexKWrite, index_k_write)    \
  X(IndexKGather, index_k_gather)  \
  X(Rope, rope)                    \
  X(RaggedPrefill, ragged_prefill) \
  X(MergeState, merge_state)       \
  X(MlaDecode, mla_decode)         \
  X(IndexLogits, index_logits)     \
  X(TopK, topk)                    \
  X(IndexSelect, index_select)     \
  X(SparseAttention, sparse_attention)
