"""FlashMLA's Python interface over Gannet's kernels: names, argument order, defaults, results and errors as at commit 9241ae3
(2026-04-29), the metadata API before that, and `flash_mla_with_kvcache_fp8` of vLLM's fork.

    from gannet.compat import flash_mla        # or: gannet.compat.install(); import flash_mla

Beyond the original: any page size, any number of heads, any topk, any next_n, on CPUs as well as GPUs, and metadata that
depends on shapes alone (lengths may change between calls). Rows without keys have an LSE of +inf, as there. Tensors whose rows
or heads do not begin at multiples of 16 bytes are copied first.

NotImplementedError: fp16, head dim 512 (MODEL1, 584-byte rows), extra caches, flash_attn_varlen_*.
"""

import dataclasses
from typing import Optional, Tuple

import torch

from .. import _ops
from ._torch import aligned, decode, lacking, latent_cache, num_sms, rows, slot_rows, unit_columns

_WIDTH, _LATENT, _PACKED_ROW = 576, 512, 656
_METADATA_COLUMNS = 8  # of a row of tile_scheduler_metadata; nothing here reads what is in them


@dataclasses.dataclass
class FlashMLASchedMeta:
    """What get_mla_metadata gives: filled by the first call, whose shapes later calls must have."""

    @dataclasses.dataclass
    class Config:
        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: Optional[int]
        extra_page_block_size: Optional[int]
        extra_topk: Optional[int]

    have_initialized: bool = False
    config: Optional[Config] = None
    tile_scheduler_metadata: Optional[torch.Tensor] = None
    num_splits: Optional[torch.Tensor] = None


def get_mla_metadata(*args, **kwargs):
    """Without arguments (FlashMLA today): (FlashMLASchedMeta, None). With cache_seqlens, num_q_tokens_per_head_k, num_heads_k,
    num_heads_q=None, is_fp8_kvcache=False, topk=None (FlashMLA before 2026, vLLM's fork): two int32 tensors
    (tile_scheduler_metadata [parts, 8], num_splits [b + 1]). Either may be passed to the calls below."""
    if not args and not kwargs:
        return FlashMLASchedMeta(), None
    cache_seqlens = args[0] if args else kwargs["cache_seqlens"]
    return _metadata(cache_seqlens.shape[0], cache_seqlens.device)


def get_mla_metadata_dense_fp8(cache_seqlens, num_heads_per_head_k, num_heads_k):
    """vLLM's fork: (tile_scheduler_metadata, num_splits) for flash_mla_with_kvcache_fp8."""
    return _metadata(cache_seqlens.shape[0], cache_seqlens.device)


def _metadata(b, device):
    return (
        torch.zeros(num_sms(device), _METADATA_COLUMNS, dtype=torch.int32, device=device),
        torch.arange(b + 1, dtype=torch.int32, device=device),
    )


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: Optional[torch.Tensor],
    cache_seqlens: Optional[torch.Tensor],
    head_dim_v: int,
    tile_scheduler_metadata,
    num_splits=None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Optional[torch.Tensor] = None,
    attn_sink: Optional[torch.Tensor] = None,
    extra_k_cache: Optional[torch.Tensor] = None,
    extra_indices_in_kvcache: Optional[torch.Tensor] = None,
    topk_length: Optional[torch.Tensor] = None,
    extra_topk_length: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Decode over a paged cache: dense, or, with indices, sparse over 656-byte rows.

    q: bf16 [b, s_q, h_q, 576]. k_cache: dense bf16 [pages, page, h_k, 576]; sparse float8_e4m3fn, int8 or uint8
    [pages, page, 1, 656]. block_table: int32 [b, max_pages], cache_seqlens: int32 [b]; both None for sparse.
    indices: int32 [b, s_q, topk], page * page_size + offset, invalid ones negative. attn_sink: fp32 [h_q]. topk_length: int32 [b].
    Returns out [b, s_q, h_q, 512] and softmax_lse fp32 [b, h_q, s_q], natural logarithm, +inf without keys.

    AssertionError where arguments contradict the metadata's first call; RuntimeError for shapes and dtypes.
    """
    meta = tile_scheduler_metadata
    topk = indices.shape[-1] if indices is not None else None
    extra_page = extra_k_cache.shape[1] if extra_k_cache is not None else None
    extra_topk = extra_indices_in_kvcache.shape[-1] if extra_indices_in_kvcache is not None else None
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    if isinstance(meta, FlashMLASchedMeta):
        assert num_splits is None, "num_splits must be None"
        given = FlashMLASchedMeta.Config(
            q.shape[0],
            q.shape[1],
            q.shape[2],
            k_cache.shape[1],
            k_cache.shape[2],
            causal,
            is_fp8_kvcache,
            topk,
            extra_page,
            extra_topk,
        )
        if not meta.have_initialized:
            if indices is not None:
                assert not causal, (
                    "causal must be False when indices_in_kvcache is not None (i.e. sparse attention is enabled)"
                )
            meta.have_initialized, meta.config = True, given
            meta.tile_scheduler_metadata, meta.num_splits = _metadata(q.shape[0], q.device)
        elif meta.config != given:
            for field in dataclasses.fields(given):
                assert getattr(meta.config, field.name) == getattr(given, field.name), (
                    f"sched_meta.config.{field.name} is {getattr(meta.config, field.name)}, but the arguments have "
                    f"{getattr(given, field.name)}: arguments must be the same across calls with one sched_meta"
                )
    else:
        assert isinstance(meta, torch.Tensor), "tile_scheduler_metadata must be of type FlashMLASchedMeta"

    if extra_k_cache is not None or extra_indices_in_kvcache is not None or extra_topk_length is not None:
        raise lacking("flash_mla", "an extra cache (extra_k_cache, extra_indices_in_kvcache, extra_topk_length)")
    if topk is not None:
        assert not causal, "causal must be False when sparse attention is enabled"
        assert is_fp8_kvcache, "is_fp8_kvcache must be True when sparse attention is enabled"
        return _sparse_decode(q, k_cache, indices, topk_length, attn_sink, head_dim_v, softmax_scale)
    assert attn_sink is None and topk_length is None, (
        "indices_in_kvcache, attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length and extra_topk_length must be None "
        "when dense attention is used."
    )
    assert block_table is not None and cache_seqlens is not None, (
        "block_table and cache_seqlens must be provided when dense attention is used."
    )
    if is_fp8_kvcache:
        raise lacking("flash_mla", "dense attention with is_fp8_kvcache (flash_mla_with_kvcache_fp8 has it)")
    return _dense_decode(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal)


def _check(condition, text):
    if not condition:
        raise RuntimeError(text)


def _check_query(q, head_dim_v):
    _check(q.dim() == 4, "q must have shape (batch_size, seqlen_q, num_heads_q, head_dim)")
    _check(head_dim_v == _LATENT, "head_dim_v must be 512")
    if q.dtype == torch.float16:
        raise lacking("flash_mla", "fp16")
    if q.shape[-1] == _LATENT:
        raise lacking("flash_mla", "head dim 512 (MODEL1)")
    _check(q.shape[-1] == _WIDTH, "head_dim must be 576")
    _check(q.stride(-1) == 1, "q must have contiguous last dimension")


def _dense_decode(q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal, k_scale=None, q_scale=1.0):
    _check_query(q, head_dim_v)
    b, s_q, h_q, _ = q.shape
    _check(
        k_cache.dim() == 4 and k_cache.shape[-1] == _WIDTH,
        "k_cache must have shape (num_blocks, page_block_size, num_heads_k, 576)",
    )
    if k_scale is None:
        _check(q.dtype in (torch.bfloat16, torch.float32), "Unsupported dtype of q: expected bfloat16")
        _check(k_cache.dtype == q.dtype, "query and key must have the same dtype")
    _check(k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension")
    h_k = k_cache.shape[2]
    _check(h_q % h_k == 0, "Number of heads in key/value must divide number of heads in query")
    _check(block_table.dtype == torch.int32, "block_table must have dtype torch.int32")
    _check(tuple(block_table.shape[:1]) == (b,), "block_table must have shape (batch_size, max_num_blocks_per_seq)")
    _check(cache_seqlens.dtype == torch.int32, "seqlens_k must have dtype int32")
    _check(
        tuple(cache_seqlens.shape) == (b,) and cache_seqlens.is_contiguous(),
        "seqlens_k must have shape (batch_size) and be contiguous",
    )
    out = torch.empty(
        b, s_q, h_q, _LATENT, dtype=torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype, device=q.device
    )
    lse = torch.empty(b * s_q, h_q, dtype=torch.float32, device=q.device)
    q_rows, out_rows, table = rows(q, 2), out.view(b * s_q, h_q, _LATENT), unit_columns(block_table)
    options = {} if k_scale is None else dict(format="e4m3", scale=k_scale)
    group = h_q // h_k
    for g in range(h_k):  # independent problems over rows of one token side by side (include/gannet/kv_heads.h)
        heads = slice(g * group, (g + 1) * group)
        decode(
            q_rows[:, heads],
            latent_cache(k_cache[:, :, g], **options),
            table,
            cache_seqlens,
            softmax_scale,
            "causal_full" if causal else "uniform_block",
            q_len=s_q,
            out=out_rows[:, heads],
            lse=lse[:, heads],
            q_scale=q_scale,
        )
    return out, _lse(lse, b, s_q)


def _lse(lse, b, s_q):
    """[b * s_q, h] with -inf for no keys, as [b, h, s_q] with +inf."""
    lse.masked_fill_(lse == float("-inf"), float("inf"))
    return lse.view(b, s_q, -1).transpose(1, 2)


def _sparse_decode(q, k_cache, indices, topk_length, attn_sink, head_dim_v, softmax_scale):
    _check_query(q, head_dim_v)
    b, s_q, h_q, _ = q.shape
    _check(k_cache.dim() == 4 and k_cache.shape[2] == 1, "Only support MQA for sparse decoding (num_heads_k == 1)")
    _check(
        k_cache.dtype in (torch.float8_e4m3fn, torch.int8, torch.uint8),
        "k_cache must have dtype fp8_e4m3fn, int8 or uint8",
    )
    if k_cache.shape[-1] == 584:
        raise lacking("flash_mla", "rows of 584 bytes (MODEL1)")
    _check(
        k_cache.shape[-1] == _PACKED_ROW and k_cache.stride(1) == _PACKED_ROW,
        "k_cache must have rows of 656 bytes, one behind the other",
    )
    _check(
        indices.dtype == torch.int32 and tuple(indices.shape[:2]) == (b, s_q),
        "indices must have dtype int32 and shape (b, s_q, topk)",
    )
    out = torch.empty(b, s_q, h_q, _LATENT, dtype=torch.bfloat16, device=q.device)
    lse = torch.empty(b * s_q, h_q, dtype=torch.float32, device=q.device)
    if topk_length is not None and s_q > 1:
        topk_length = topk_length.repeat_interleave(s_q, output_size=b * s_q)
    _ops.sparse_attention(
        rows(q, 2),
        latent_cache(k_cache, format="packed656"),
        slot_rows(indices, 3),
        topk_length,
        softmax_scale=softmax_scale,
        attn_sink=attn_sink,
        out=out.view(b * s_q, h_q, _LATENT),
        lse=lse,
    )
    return out, _lse(lse, b, s_q)


def flash_mla_with_kvcache_fp8(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    descale_q: Optional[torch.Tensor] = None,
    descale_k: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """vLLM's fork: dense decode with q and cache in float8_e4m3fn, one scale each.

    q: [b, s_q, h_q, 576]. k_cache: [pages, page, h_k, 576]. descale_q, descale_k: fp32 [1], None: 1. Returns out, bf16
    [b, s_q, h_q, 512], and softmax_lse. Scales that are on a GPU stay there: q is then multiplied by them as bf16 (rounded once),
    and out by descale_k; on the host they go into the kernel.
    """
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** (-0.5)
    _check(
        q.dtype == torch.float8_e4m3fn and k_cache.dtype == torch.float8_e4m3fn,
        "q and k_cache must have dtype float8_e4m3fn",
    )
    on_device = [s for s in (descale_q, descale_k) if s is not None and s.device.type != "cpu"]
    if not on_device:
        ks = 1.0 if descale_k is None else float(descale_k)
        qs = 1.0 if descale_q is None else float(descale_q)
        return _dense_decode(
            q, k_cache, block_table, cache_seqlens, head_dim_v, softmax_scale, causal, k_scale=ks, q_scale=qs
        )
    scale = torch.ones(1, device=q.device)
    for s in (descale_q, descale_k):
        if s is not None:
            scale = scale * s.to(q.device)
    out, lse = _dense_decode(
        (q.float() * scale).bfloat16(),
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        softmax_scale,
        causal,
        k_scale=1.0,
    )
    if descale_k is not None:
        out.mul_(descale_k.to(q.device))
    return out, lse


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Optional[torch.Tensor] = None,
    topk_length: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sparse prefill over rows that are not paged.

    q: bf16 [s_q, h_q, 576]. kv: bf16 [s_kv, 1, 576]. indices: int32 [s_q, 1, topk]; negative ones and those from s_kv on are
    invalid. attn_sink: fp32 [h_q]. topk_length: int32 [s_q]. Returns out [s_q, h_q, 512], max_logits and lse, fp32 [s_q, h_q],
    natural; without valid indices 0, -inf, +inf.
    """
    _check(q.dim() == 3 and kv.dim() == 3 and indices.dim() == 3, "q, kv and indices must have 3 dimensions")
    if q.dtype == torch.float16:
        raise lacking("flash_mla", "fp16")
    if q.shape[-1] == _LATENT:
        raise lacking("flash_mla", "head dim 512 (MODEL1)")
    _check(q.shape[-1] == _WIDTH and kv.shape[-1] == _WIDTH, "Unsupported d_qk: expected 576")
    _check(d_v == _LATENT, "d_v must be 512")
    _check(kv.shape[1] == 1 and indices.shape[1] == 1, "h_kv must be 1")
    _check(indices.dtype == torch.int32, "indices must have dtype int32")
    _check(indices.shape[0] == q.shape[0], "indices must have shape (s_q, h_kv, topk)")
    s_q, h_q, _ = q.shape
    out = torch.empty(s_q, h_q, _LATENT, dtype=q.dtype, device=q.device)
    lse = torch.empty(s_q, h_q, dtype=torch.float32, device=q.device)
    max_logits = torch.empty_like(lse)
    _ops.sparse_attention(
        aligned(q),
        latent_cache(aligned(kv)),
        slot_rows(indices, 3),
        topk_length,
        softmax_scale=sm_scale,
        attn_sink=attn_sink,
        out=out,
        lse=lse,
        max_logits=max_logits,
    )
    lse.masked_fill_(lse == float("-inf"), float("inf"))
    return out, max_logits, lse


def flash_attn_varlen_func(*args, **kwargs):
    raise lacking("flash_mla", "flash_attn_varlen_func")


def flash_attn_varlen_qkvpacked_func(*args, **kwargs):
    raise lacking("flash_mla", "flash_attn_varlen_qkvpacked_func")


def flash_attn_varlen_kvpacked_func(*args, **kwargs):
    raise lacking("flash_mla", "flash_attn_varlen_kvpacked_func")
