"""FlashInfer's MLA interface over Gannet's kernels: names, argument order, defaults, results, LSE bases and errors as at commit
fb28d72 (2026-08-22).

    from gannet.compat import flashinfer       # or: gannet.compat.install(); import flashinfer.mla

Here are mla.BatchMLAPagedAttentionWrapper, mla.trtllm_batch_decode_with_kv_cache_mla, prefill.trtllm_ragged_attention_deepseek,
merge_state, merge_state_in_place, merge_states. Beyond the original: every one of them on Hopper and on CPUs, any page size,
plan() without a copy to the host. Logarithms are to base 2, -inf without keys, but where return_lse_base_on_e says otherwise, and in
trtllm_batch_decode_with_kv_cache_mla where the original returns what its CuTe DSL kernels wrote: natural ones, +inf without keys.

A wrapper whose ckv_cache and kpe_cache are two slices of one tensor [pages, page, 512 + 64] reads them where they lie; of two
tensors it first copies the planned pages into one. Workspace buffers are accepted and not used.

NotImplementedError: fp16, the backend "cutlass", scales as tensors (ckv_scale_arr, bmm1_scale), profiling, context parallelism
(enable_dcp), skip-softmax, sliding windows, sage attention, separate page tables for K and V.
"""

import math
import types
from typing import Optional

import torch

from .. import _ops
from ._torch import LOG2_E, aligned, decode, lacking, latent_cache, rows, slot_rows, unit_columns

_PEER = "flashinfer"


def _check_shape_dtype_device(x, shape, dtype, device, name):
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"Invalid shape of {name}: expected {tuple(shape)}, got {tuple(x.shape)}")
    if x.dtype != dtype:
        raise ValueError(f"Invalid dtype of {name}: expected {dtype}, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"Invalid device of {name}: expected {device}, got {x.device}")


def _positive(name, value):
    value = float(value)
    if not math.isfinite(value) or value <= 0.0:
        raise ValueError(f"{name} must be a finite positive value, got {value}")
    return value


class BatchMLAPagedAttentionWrapper:
    """Absorbed attention over a paged cache of two parts; plan() once for shapes and page tables, run() for each layer."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Optional[torch.Tensor] = None,
        kv_indptr: Optional[torch.Tensor] = None,
        kv_indices: Optional[torch.Tensor] = None,
        kv_len_arr: Optional[torch.Tensor] = None,
        backend: str = "auto",
    ) -> None:
        if backend == "cutlass":
            raise lacking(_PEER, "the backend cutlass")
        self.device = float_workspace_buffer.device
        self._use_cuda_graph = use_cuda_graph
        self._qo_indptr, self._kv_indptr, self._kv_indices, self._kv_len = qo_indptr, kv_indptr, kv_indices, kv_len_arr

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """qo_indptr, kv_indptr: int32 [b + 1]. kv_indices: int32, pages of each request. kv_len_arr: int32 [b], tokens. With
        use_cuda_graph they are copied into the buffers that the constructor was given."""
        if kv_data_type == torch.float16 or q_data_type == torch.float16:
            raise lacking(_PEER, "fp16")
        if kv_data_type not in (torch.bfloat16, torch.float8_e4m3fn, torch.float32):
            raise ValueError(
                f"MLA kv_data_type {kv_data_type} is not supported. Supported dtypes: {[torch.bfloat16, torch.float8_e4m3fn]}."
            )
        if head_dim_kpe < 0:
            raise ValueError(f"head_dim_kpe must be >= 0, got {head_dim_kpe}.")
        if head_dim_kpe == 0:
            raise lacking(_PEER, "head_dim_kpe 0 (NoPE MLA)")
        if kv_data_type == torch.float8_e4m3fn:
            if q_data_type != torch.bfloat16:
                raise ValueError(
                    f"FP8 kv_data_type for MLA currently only supports q_data_type=torch.bfloat16, got {q_data_type}."
                )
            if head_dim_ckv != 512 or head_dim_kpe not in (0, 64):
                raise ValueError(
                    "FP8 kv_data_type for MLA currently only supports head_dim_ckv=512 and head_dim_kpe in (0, 64), got "
                    f"head_dim_ckv={head_dim_ckv}, head_dim_kpe={head_dim_kpe}."
                )
        if use_profiler:
            raise lacking(_PEER, "use_profiler")
        if self._use_cuda_graph:
            self._qo_indptr.copy_(qo_indptr, non_blocking=True)
            self._kv_indptr.copy_(kv_indptr, non_blocking=True)
            self._kv_indices[: len(kv_indices)].copy_(kv_indices, non_blocking=True)
            self._kv_len.copy_(kv_len_arr, non_blocking=True)
        else:
            self._qo_indptr, self._kv_indptr, self._kv_indices, self._kv_len = (
                t.to(self.device, torch.int32, non_blocking=True)
                for t in (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
            )
        self._num_heads, self._page_size, self._causal, self._sm_scale = num_heads, page_size, causal, float(sm_scale)
        self._latent, self._rope, self._q_dtype, self._kv_dtype = head_dim_ckv, head_dim_kpe, q_data_type, kv_data_type

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: Optional[torch.Tensor] = None,
        lse: Optional[torch.Tensor] = None,
        return_lse: bool = False,
        profiler_buffer: Optional[torch.Tensor] = None,
        kv_len: Optional[torch.Tensor] = None,
        page_table: Optional[torch.Tensor] = None,
        return_lse_base_on_e: bool = False,
        o_scale: Optional[float] = None,
        *,
        ckv_scale: Optional[float] = None,
        ckv_scale_arr: Optional[torch.Tensor] = None,
        kpe_scale: Optional[float] = None,
    ):
        """q_nope: [n, h, 512], q_pe: [n, h, 64]. ckv_cache: [pages, page, 512], kpe_cache: [pages, page, 64]; e4m3 with ckv_scale and
        kpe_scale. Returns out like q_nope, and with return_lse lse, fp32 [n, h], base 2 (e with return_lse_base_on_e)."""
        if o_scale is not None:
            raise ValueError("o_scale is only supported with the cutlass backend for now.")
        for name, t, planned, what in (
            ("q_nope", q_nope, self._q_dtype, "q_data_type"),
            ("q_pe", q_pe, self._q_dtype, "q_data_type"),
            ("ckv_cache", ckv_cache, self._kv_dtype, "kv_data_type"),
            ("kpe_cache", kpe_cache, self._kv_dtype, "kv_data_type"),
        ):
            if t.dtype != planned:
                raise ValueError(f"{name}.dtype={t.dtype} does not match the planned {what}={planned}.")
        options = {}
        if self._kv_dtype == torch.float8_e4m3fn:
            if (ckv_scale is None) == (ckv_scale_arr is None):
                raise ValueError("Exactly one of ckv_scale or ckv_scale_arr is required when kv_data_type is FP8.")
            if kpe_scale is None:
                raise ValueError("kpe_scale is required when kv_data_type is FP8.")
            if ckv_scale_arr is not None:
                raise lacking(_PEER, "ckv_scale_arr")
            ckv, kpe = _positive("ckv_scale", ckv_scale), _positive("kpe_scale", kpe_scale)
            options = dict(format="e4m3", scale=ckv)
            if kpe != ckv:  # one scale for the whole row: the rest goes into the rotated part of the query
                q_pe = q_pe * (kpe / ckv)
        elif ckv_scale is not None or ckv_scale_arr is not None or kpe_scale is not None:
            raise ValueError("ckv_scale / ckv_scale_arr / kpe_scale are only valid when kv_data_type is FP8.")
        if out is None:
            out = torch.empty_like(q_nope)
        else:
            _check_shape_dtype_device(out, q_nope.shape, q_nope.dtype, q_nope.device, "out")
        if return_lse:
            if lse is None:
                lse = torch.empty(q_nope.shape[:2], dtype=torch.float32, device=q_nope.device)
            else:
                _check_shape_dtype_device(lse, q_nope.shape[:2], torch.float32, q_nope.device, "lse")
        cache, indices = self._one_cache(ckv_cache, kpe_cache, options)
        decode(
            torch.cat([q_nope, q_pe], dim=-1),
            cache,
            (self._kv_indptr, indices),
            self._kv_len,
            self._sm_scale,
            "causal_full" if self._causal else "uniform_block",
            cu_q_lens=self._qo_indptr,
            out=out,
            lse=lse if return_lse else None,
        )
        if not return_lse:
            return out
        return out, (lse if return_lse_base_on_e else lse.mul_(LOG2_E))

    run_return_lse = property(lambda self: lambda *args, **kwargs: self.run(*args, return_lse=True, **kwargs))

    def _one_cache(self, ckv, kpe, options):
        width = self._latent + self._rope
        options = dict(options, latent_dim=self._latent, rope_dim=self._rope)
        size = ckv.element_size()
        if (
            kpe.data_ptr() == ckv.data_ptr() + self._latent * size
            and ckv.stride() == kpe.stride()
            and ckv.stride(1) >= width
        ):
            whole = ckv.as_strided((*ckv.shape[:2], width), ckv.stride())
            return latent_cache(whole, **options), self._kv_indices
        pages = self._kv_indices.long().clamp_(
            0, ckv.shape[0] - 1
        )  # a buffer of a captured batch ends in what it held before
        bytes_ = torch.uint8 if size == 1 else ckv.dtype
        both = torch.cat([ckv.view(bytes_)[pages], kpe.view(bytes_)[pages]], dim=-1).view(ckv.dtype)
        return latent_cache(both, **options), torch.arange(len(pages), dtype=torch.int32, device=pages.device)


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    sparse_mla_top_k: int = 0,
    out: Optional[torch.Tensor] = None,
    bmm1_scale=1.0,
    bmm2_scale=1.0,
    sinks=None,
    skip_softmax_threshold_scale_factor: Optional[float] = None,
    enable_pdl: Optional[bool] = None,
    backend: str = "auto",
    is_var_seq: bool = True,
    uses_shared_paged_kv_idx: bool = True,
    lse: Optional[torch.Tensor] = None,
    return_lse: bool = False,
    cute_dsl_impl: str = "auto",
    kv_scale_format: str = "auto",
    cum_seq_lens_q: Optional[torch.Tensor] = None,
    max_q_len: Optional[int] = None,
    multi_ctas_kv_counter_buffer: Optional[torch.Tensor] = None,
    sparse_mla_top_k_lens: Optional[torch.Tensor] = None,
    enable_dcp: bool = False,
    cp_world: int = 1,
    cp_rank: int = 0,
    causal_seqlens_kv_global: Optional[torch.Tensor] = None,
    use_fp16_softmax: Optional[bool] = None,
):
    """Decode and verify over a paged cache, causal within a request's tokens (the last one sees seq_lens).

    query: bf16 or e4m3 [b, q, h, 576], or [n, h, 576] with cum_seq_lens_q, int32 [b + 1]. kv_cache: same dtype [pages, page, 576] or
    [pages, 1, page, 576]. block_tables: int32 [b, max_pages], or [b, q, topk] token indices with sparse_mla_top_k.
    bmm1_scale: softmax scale times the scales of query and cache; bmm2_scale: of the output. sinks: fp32 [h].
    Returns out [b, q, h, 512] (bf16), and with return_lse lse, fp32 [b * q, h], or in the shape that the caller's has, which may also be
    [b, q, h]. It is that of the kernels that the original takes: to base 2, -inf without keys (trtllm-gen, its first choice); natural,
    +inf without keys, with the backend "cute-dsl", and with "auto" and cum_seq_lens_q, where only those kernels have an LSE.
    """
    if skip_softmax_threshold_scale_factor is not None:
        raise lacking(_PEER, "skip_softmax_threshold_scale_factor")
    if enable_dcp or cp_world != 1 or causal_seqlens_kv_global is not None:
        raise lacking(_PEER, "context parallelism (enable_dcp, cp_world, causal_seqlens_kv_global)")
    if use_fp16_softmax:
        raise lacking(_PEER, "use_fp16_softmax")
    if not uses_shared_paged_kv_idx:
        raise lacking(_PEER, "separate page tables of K and V (uses_shared_paged_kv_idx=False)")
    if isinstance(bmm1_scale, torch.Tensor) or isinstance(bmm2_scale, torch.Tensor):
        raise lacking(
            _PEER, "bmm1_scale or bmm2_scale as a tensor (give a float: a kernel's scale is known when it is launched)"
        )
    if query.dtype == torch.float16:
        raise lacking(_PEER, "fp16")
    if query.ndim not in (3, 4):
        raise ValueError(f"Expected query.ndim == 3 or 4, got {query.ndim}")
    if query.ndim == 3 and cum_seq_lens_q is None:
        raise ValueError("cum_seq_lens_q is required when query.ndim == 3")
    if kv_cache.ndim == 4:
        if kv_cache.shape[1] != 1:
            raise ValueError(f"Expected kv_cache.shape[1] == 1, got {kv_cache.shape[1]}")
        kv_cache = kv_cache.squeeze(1)
    elif kv_cache.ndim != 3:
        raise ValueError(f"Expected kv_cache.ndim == 3 or 4, got {kv_cache.ndim}")
    width = kv_lora_rank + qk_rope_head_dim
    if query.shape[-1] != width or kv_cache.shape[-1] != width:
        raise ValueError(
            f"Expected head dim {width} for query and kv_cache, got {query.shape[-1]} and {kv_cache.shape[-1]}"
        )
    flat = aligned(query) if query.ndim == 3 else rows(query, 2)
    shape = (*query.shape[:-1], kv_lora_rank)
    if out is None:
        out = torch.empty(
            shape, dtype=torch.bfloat16 if query.dtype == torch.float8_e4m3fn else query.dtype, device=query.device
        )
    elif tuple(out.shape) != shape:
        raise ValueError(f"Invalid shape of out: expected {shape}, got {tuple(out.shape)}")
    natural = backend == "cute-dsl" or (backend == "auto" and cum_seq_lens_q is not None)
    if return_lse:
        if lse is None:
            lse = torch.empty(flat.shape[:2], dtype=torch.float32, device=query.device)
        elif tuple(lse.shape) not in (tuple(flat.shape[:2]), tuple(query.shape[:-1])):
            raise ValueError(
                f"lse must have shape {tuple(flat.shape[:2])} or {tuple(query.shape[:-1])}; got {tuple(lse.shape)}"
            )
        flat_lse = lse.view(flat.shape[:2])
    if isinstance(sinks, (list, tuple)):
        sinks = sinks[0]
    options = dict(latent_dim=kv_lora_rank, rope_dim=qk_rope_head_dim)
    if kv_cache.dtype == torch.float8_e4m3fn:
        options.update(format="e4m3", scale=1.0)
    cache = latent_cache(kv_cache, **options)
    flat_out = out.view(-1, *shape[-2:])
    if sparse_mla_top_k > 0:
        expected = (*query.shape[:-2], sparse_mla_top_k)
        if tuple(block_tables.shape) != expected:
            raise ValueError(f"Expected page_table.shape == {expected}, got {tuple(block_tables.shape)}")
        lens = None if sparse_mla_top_k_lens is None else sparse_mla_top_k_lens.reshape(-1)
        if lens is not None and lens.shape[0] != flat.shape[0]:
            lens = lens.repeat_interleave(query.shape[1], output_size=flat.shape[0])
        _ops.sparse_attention(
            flat,
            cache,
            slot_rows(block_tables, block_tables.ndim - 1),
            lens,
            softmax_scale=float(bmm1_scale),
            attn_sink=sinks,
            out=flat_out,
            lse=flat_lse if return_lse else None,
        )
    else:
        if block_tables.ndim != 2 or (query.ndim == 4 and block_tables.shape[0] != query.shape[0]):
            raise ValueError(
                f"Expected block_tables of shape [{query.shape[0]}, pages], got {tuple(block_tables.shape)}"
            )
        decode(
            flat,
            cache,
            unit_columns(block_tables),
            seq_lens,
            float(bmm1_scale),
            "causal_full",
            q_len=query.shape[1] if query.ndim == 4 else 1,
            cu_q_lens=cum_seq_lens_q,
            out=flat_out,
            lse=flat_lse if return_lse else None,
            sink=sinks,
        )
    if float(bmm2_scale) != 1.0:
        out.mul_(float(bmm2_scale))
    if not return_lse:
        return out
    if natural:
        return out, lse.masked_fill_(lse == float("-inf"), float("inf"))
    return out, lse.mul_(LOG2_E)


def trtllm_ragged_attention_deepseek(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    workspace_buffer: torch.Tensor,
    seq_lens: torch.Tensor,
    max_q_len: int,
    max_kv_len: int,
    bmm1_scale,
    bmm2_scale,
    o_sf_scale: float,
    batch_size: int,
    window_left: int,
    cum_seq_lens_q: torch.Tensor,
    cum_seq_lens_kv: torch.Tensor,
    enable_pdl: Optional[bool],
    is_causal: bool,
    return_lse: bool,
    attention_sinks: Optional[torch.Tensor] = None,
    skip_softmax_threshold_scale_factor: Optional[float] = None,
    out: Optional[torch.Tensor] = None,
    lse: Optional[torch.Tensor] = None,
    sage_attn_sfs=(None, None, None, None),
    num_elts_per_sage_attn_blk=(0, 0, 0, 0),
    backend: str = "trtllm-gen",
    q_seq_lens_cpu: Optional[torch.Tensor] = None,
    kv_seq_lens_cpu: Optional[torch.Tensor] = None,
    use_fp16_softmax: Optional[bool] = None,
    uses_spcompress: Optional[bool] = None,
):
    """Ragged prefill in the expanded form. query, key: bf16 [n, h, 192], value: [m, h, 128] (or 128/128/128, 256/256/256);
    cum_seq_lens_q, cum_seq_lens_kv: int32 [b + 1]. Returns out [n, h, dv], and with return_lse lse, fp32 [n, h], base 2; rows without
    keys 0 and -inf."""
    dims = (query.shape[2], key.shape[2], value.shape[2])
    assert dims in ((192, 192, 128), (128, 128, 128), (256, 256, 256)), (
        f"Unsupported head dimensions: query={dims[0]}, key={dims[1]}, value={dims[2]}. "
        "Supported: (192, 192, 128) for DeepSeek-R1, (128, 128, 128), or (256, 256, 256) for GLM-5."
    )
    for name, given in (
        ("attention_sinks", attention_sinks is not None),
        ("window_left", window_left >= 0),
        ("skip_softmax_threshold_scale_factor", skip_softmax_threshold_scale_factor is not None),
        ("sage attention", sum(num_elts_per_sage_attn_blk) != 0),
        ("use_fp16_softmax", bool(use_fp16_softmax)),
        ("uses_spcompress", bool(uses_spcompress)),
        ("a scale as a tensor", isinstance(bmm1_scale, torch.Tensor) or isinstance(bmm2_scale, torch.Tensor)),
        ("fp16", query.dtype == torch.float16),
        ("fp8 queries", query.element_size() == 1),
    ):
        if given:
            raise lacking(_PEER, name)
    shape = (query.shape[0], query.shape[1], value.shape[2])
    if out is None:
        out = torch.empty(shape, device=query.device, dtype=query.dtype)
    elif tuple(out.shape) != shape:
        raise ValueError(f"out must have shape {shape}, got {tuple(out.shape)}")
    if return_lse and lse is None:
        lse = torch.empty(shape[:2], device=query.device, dtype=torch.float32)
    _ops.ragged_prefill(
        aligned(query),
        aligned(key),
        aligned(value),
        cum_seq_lens_q,
        cum_seq_lens_kv,
        softmax_scale=float(bmm1_scale),
        causal=bool(is_causal),
        out=out,
        lse=lse if return_lse else None,
    )
    if float(bmm2_scale) != 1.0:
        out.mul_(float(bmm2_scale))
    return (out, lse.mul_(LOG2_E)) if return_lse else out


def merge_state(v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor):
    """Two partial results as one: v [n, h, d], s fp32 [n, h], base 2. Returns new (v, s)."""
    return _ops.merge_state(v_a.clone(), s_a.to(torch.float32, copy=True), aligned(v_b), s_b.float(), base="2")


def merge_state_in_place(
    v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: Optional[torch.Tensor] = None
):
    """Merges into v and s. mask: not implemented."""
    if mask is not None:
        raise lacking(_PEER, "merge_state_in_place with a mask")
    _ops.merge_state(v, s, aligned(v_other), s_other.float(), base="2")


def merge_states(v: torch.Tensor, s: torch.Tensor):
    """Many partial results as one: v [n, states, h, d], s fp32 [n, states, h], base 2. Returns (v [n, h, d], s [n, h])."""
    merged, logs = v[:, 0].clone(), s[:, 0].to(torch.float32, copy=True)
    for i in range(1, v.shape[1]):
        _ops.merge_state(merged, logs, v[:, i], s[:, i].float(), base="2")
    return merged, logs


def _module(name, **members):
    module = types.ModuleType(f"{__name__}.{name}", f"flashinfer.{name} over Gannet's kernels")
    module.__dict__.update(members)
    return module


mla = _module(
    "mla",
    BatchMLAPagedAttentionWrapper=BatchMLAPagedAttentionWrapper,
    trtllm_batch_decode_with_kv_cache_mla=trtllm_batch_decode_with_kv_cache_mla,
)
prefill = _module("prefill", trtllm_ragged_attention_deepseek=trtllm_ragged_attention_deepseek)
decode_module = _module("decode", trtllm_batch_decode_with_kv_cache_mla=trtllm_batch_decode_with_kv_cache_mla)
cascade = _module(
    "cascade", merge_state=merge_state, merge_state_in_place=merge_state_in_place, merge_states=merge_states
)
