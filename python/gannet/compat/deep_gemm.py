"""DeepGEMM's MQA logits (the scores of DSA's indexer) over Gannet's kernels: names, argument order, defaults, results and errors
as at commit 54e2261 (2.6.1), in both spellings.

    from gannet.compat import deep_gemm        # or: gannet.compat.install(); import deep_gemm

Beyond the original: any next_n, any number of heads, any page size, head dims that are multiples of 16, 1-D context lengths
(older callers), on CPUs as well as GPUs. Shapes and dtypes that are not accepted raise RuntimeError.

NotImplementedError: fp4 (a query with scales), `indices` (varlen of SM100), bf16 weights. GEMMs are not part of this module.
"""

from typing import Optional, Tuple

import torch

from .. import _core, _ops
from ._torch import lacking, num_sms, unit_columns

_BLOCK_QH, _BLOCK_KV = 128, 256  # of DeepGEMM's tiles: they show in the strides of results
_STRIDE_BYTES = 1024  # a row of logits begins at a multiple of it
_PAGE = 64  # of the pages that unpaged keys are laid out in
_BLOCK_BYTES = 256 << 20  # of temporaries, at most (compressed and cleaned logits)

_num_sms = None


def get_num_sms():
    """SMs of the current GPU, 1 without one, or what set_num_sms said."""
    if _num_sms is not None:
        return _num_sms
    return num_sms(torch.device("cuda", torch.cuda.current_device())) if torch.cuda.is_available() else 1


def set_num_sms(new_num_sms: int):
    """Only what get_num_sms returns; Gannet's kernels use the whole GPU."""
    global _num_sms
    _num_sms = new_num_sms


def _assert(condition, text):
    if not condition:
        raise RuntimeError(f"Assertion error (gannet/compat/deep_gemm.py): {text}")


def _align(n, to):
    return -(-n // to) * to


def _empty_logits(rows, heads, columns, dtype, device):
    block_q = max(_BLOCK_QH // heads, 1)
    stride = _align(columns, _STRIDE_BYTES // dtype.itemsize)
    return torch.empty(_align(rows, block_q), stride, dtype=dtype, device=device)


def _planar_pages(values, scales):
    """[s_kv, d] and [s_kv] as pages of 64 keys, values then scales, as IndexCache has them: a copy of d + 4 bytes a key."""
    s_kv, d = values.shape
    pages = max(-(-s_kv // _PAGE), 1)
    stride = _PAGE * (d + 4)
    buffer = torch.empty(pages, stride, dtype=torch.uint8, device=values.device)
    full = s_kv // _PAGE
    whole = full * _PAGE
    as_bytes, as_scales = values.view(torch.uint8), scales.view(torch.uint8).view(s_kv, 4)
    buffer[:full, : _PAGE * d] = as_bytes[:whole].reshape(full, _PAGE * d)
    buffer[:full, _PAGE * d :] = as_scales[:whole].reshape(full, _PAGE * 4)
    if whole < s_kv:
        rest = s_kv - whole
        buffer[full, : rest * d] = as_bytes[whole:].reshape(-1)
        buffer[full, _PAGE * d : _PAGE * d + 4 * rest] = as_scales[whole:].reshape(-1)
    return _core.IndexCache(buffer, format="e4m3", head_dim=d, page_size=_PAGE)


def fp8_fp4_mqa_logits(
    q: Tuple[torch.Tensor, Optional[torch.Tensor]],
    kv: Tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """logits[i, j] = sum over heads of weights[i, h] * relu(q[i, h] . kv[j]), for ks[i] <= j < ke[i].

    q: (float8_e4m3fn [s, h, d], None). kv: (float8_e4m3fn [s_kv, d], fp32 scales [s_kv]). weights: fp32 [s, h].
    cu_seq_len_k_start, cu_seq_len_k_end: int32 [s]. Returns [s, s_kv] of a wider buffer (row stride a multiple of 1,024 bytes);
    outside [ks, ke) -inf with clean_logits, else anything. With max_seqlen_k > 0 (clean_logits must be False) "compressed":
    [s, max_seqlen_k], column j is key ks + j.
    """
    values, q_scale = q
    if q_scale is not None:
        raise lacking("deep_gemm", "fp4 (a query with scales)")
    keys, key_scales = kv
    _assert(
        values.dim() == 3 and values.dtype == torch.float8_e4m3fn and values.is_contiguous(),
        "q is contiguous float8_e4m3fn [s, h, d]",
    )
    s, h, d = values.shape
    _assert(
        keys.dim() == 2 and keys.shape[1] == d and keys.dtype == torch.float8_e4m3fn and keys.is_contiguous(),
        "kv[0] is contiguous float8_e4m3fn [s_kv, d]",
    )
    s_kv = keys.shape[0]
    _assert(
        tuple(key_scales.shape) == (s_kv,) and key_scales.dtype == torch.float32 and key_scales.is_contiguous(),
        "kv[1] is contiguous float32 [s_kv]",
    )
    _check_weights(weights, s, h, logits_dtype)
    for name, t in (("cu_seq_len_k_start", cu_seq_len_k_start), ("cu_seq_len_k_end", cu_seq_len_k_end)):
        _assert(
            tuple(t.shape) == (s,) and t.dtype == torch.int32 and t.is_contiguous(), f"{name} is contiguous int32 [s]"
        )
    cache = _planar_pages(keys, key_scales)
    device = values.device
    table = torch.arange(cache.num_pages, dtype=torch.int32, device=device)[None]
    lens = torch.full((1,), s_kv, dtype=torch.int32, device=device)
    block = max(1, min(s, _BLOCK_BYTES // max(4 * s_kv, 1)))

    def score(first, last, logits):
        # One request whose rows see every key: rows share the keys that they read, and what a row does not see is masked after.
        _ops.index_logits(
            values[first:last],
            weights[first:last],
            cache,
            table,
            lens,
            q_len=last - first,
            bound="uniform_block",
            logits=logits,
        )

    if max_seqlen_k > 0:
        _assert(not clean_logits, "clean_logits is False where max_seqlen_k is given")
        logits = _empty_logits(s, h, _align(max_seqlen_k, _BLOCK_KV), logits_dtype, device)[:s, :max_seqlen_k]
        columns = torch.arange(max_seqlen_k, dtype=torch.int64, device=device)
        for first in range(0, s, block):
            last = min(first + block, s)
            wide = torch.empty(last - first, _align(s_kv, _PAGE), dtype=logits_dtype, device=device)
            score(first, last, wide[:, :s_kv])
            at = (cu_seq_len_k_start[first:last, None].long() + columns).clamp_(0, max(s_kv - 1, 0))
            logits[first:last].copy_(wide.gather(1, at))
        return logits
    logits = _empty_logits(s, h, s_kv + _BLOCK_KV, logits_dtype, device)[:s, :s_kv]
    score(0, s, logits)
    if clean_logits:
        columns = torch.arange(s_kv, dtype=torch.int32, device=device)
        for first in range(0, s, block):
            last = min(first + block, s)
            seen = (columns >= cu_seq_len_k_start[first:last, None]) & (columns < cu_seq_len_k_end[first:last, None])
            logits[first:last].masked_fill_(seen.logical_not_(), float("-inf"))
    return logits


def fp8_mqa_logits(
    q, kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits: bool = True, max_seqlen_k: int = 0
):
    """fp8_fp4_mqa_logits of an fp8 query tensor, with fp32 logits."""
    return fp8_fp4_mqa_logits((q, None), kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits, max_seqlen_k)


def _check_weights(weights, rows, heads, logits_dtype):
    if weights.dtype == torch.bfloat16:
        raise lacking("deep_gemm", "bf16 weights")
    _assert(
        tuple(weights.shape) == (rows, heads) and weights.stride(1) == 1 and weights.dtype == torch.float32,
        "weights is float32 [rows, heads], the last stride 1",
    )
    _assert(logits_dtype in (torch.float32, torch.bfloat16), "logits_dtype is float32 or bfloat16")


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """int32 [num_sms + 1, 2] for the calls below, which need no plan: nothing reads what is in it."""
    if indices is not None:
        raise lacking("deep_gemm", "indices (varlen)")
    _assert(
        context_lens.dtype == torch.int32 and context_lens.is_contiguous() and context_lens.dim() in (1, 2),
        "context_lens is contiguous int32 [b, next_n]",
    )
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32, device=context_lens.device)


def fp8_fp4_paged_mqa_logits(
    q: Tuple[torch.Tensor, Optional[torch.Tensor]],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = False,
    logits_dtype: torch.dtype = torch.float32,
    indices: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """The same over paged index keys.

    q: (float8_e4m3fn [b, next_n, h, d], None). kv_cache: uint8 [pages, page, 1, d + 4], in a page first all values, then all fp32
    scales; pages may lie apart. weights: fp32 [b * next_n, h]. context_lens: int32 [b, next_n], keys that each row sees; or [b],
    of which row j sees len - next_n + j + 1. block_table: int32 [b, max_pages].
    Returns [b * next_n, max_context_len] of a wider buffer; beyond what a row sees -inf with clean_logits (1-D lengths only),
    else anything.
    """
    values, q_scale = q
    if q_scale is not None:
        raise lacking("deep_gemm", "fp4 (a query with scales)")
    if indices is not None:
        raise lacking("deep_gemm", "indices (varlen)")
    _assert(
        values.dim() == 4 and values.dtype == torch.float8_e4m3fn and values.is_contiguous(),
        "q is contiguous float8_e4m3fn [b, next_n, h, d]",
    )
    b, next_n, h, d = values.shape
    rows = b * next_n
    _assert(
        kv_cache.dim() == 4 and kv_cache.shape[2] == 1 and kv_cache.shape[3] == d + 4 and kv_cache.element_size() == 1,
        "kv_cache is uint8 [pages, page, 1, d + 4]",
    )
    _assert(kv_cache.stride(1) == d + 4 and kv_cache.stride(3) == 1, "keys of a page lie one behind the other")
    _check_weights(weights, rows, h, logits_dtype)
    _assert(
        block_table.dtype == torch.int32 and block_table.shape[0] == b and block_table.stride(1) == 1,
        "block_table is int32 [b, max_pages]",
    )
    _assert(context_lens.dtype == torch.int32 and context_lens.is_contiguous(), "context_lens is contiguous int32")
    two_d = context_lens.dim() == 2
    _assert(tuple(context_lens.shape) == ((b, next_n) if two_d else (b,)), "context_lens is [b, next_n] or [b]")
    _assert(not (clean_logits and two_d), "clean_logits is False with context_lens [b, next_n]")
    cache = _core.IndexCache(
        kv_cache if kv_cache.dtype == torch.uint8 else kv_cache.view(torch.uint8), format="e4m3", head_dim=d
    )
    logits = _empty_logits(rows, h, max_context_len, logits_dtype, values.device)[:rows, :max_context_len]
    if clean_logits:
        logits.fill_(float("-inf"))
    table = unit_columns(block_table)
    if two_d and next_n > 1:  # each row is a request of its own, over the table row that it shares
        table = _core.Pages(
            table, torch.arange(b, dtype=torch.int32, device=values.device).repeat_interleave(next_n, output_size=rows)
        )
    _ops.index_logits(
        values.view(rows, h, d),
        weights,
        cache,
        table,
        context_lens.view(-1),
        q_len=1 if two_d else next_n,
        logits=logits,
    )
    return logits


def fp8_paged_mqa_logits(
    q,
    kv_cache,
    weights,
    context_lens,
    block_table,
    schedule_meta,
    max_context_len: int,
    clean_logits: bool = False,
    indices: Optional[torch.Tensor] = None,
):
    """fp8_fp4_paged_mqa_logits of an fp8 query tensor, with fp32 logits."""
    return fp8_fp4_paged_mqa_logits(
        (q, None),
        kv_cache,
        weights,
        context_lens,
        block_table,
        schedule_meta,
        max_context_len,
        clean_logits,
        torch.float32,
        indices,
    )
