"""The operations as PyTorch custom operators (torch.library), with fake implementations: a model that calls them compiles with
``torch.compile(fullgraph=True)`` and captures into CUDA graphs. No operator synchronises, and scratch on a GPU comes from
PyTorch's allocator in the order of the current stream.

    import gannet.torch_ops
    out, lse = torch.ops.gannet.mla_decode(q, cache, page_table, seq_lens, softmax_scale)

Caches are tensors here, of the shapes that gannet.LatentCache and gannet.IndexCache take; `format`, `page_size`, `latent_dim`,
`rope_dim`, `scale` and `head_dim` are theirs, and every other argument is that of the function of the same name in gannet. Operators
that return tensors make them; latent_write, index_k_write and rope_ write into an argument. Shapes and dtypes that a fake
implementation lets pass are checked when the operator runs.

`SIGNATURES` maps each operator's name to its schema.
"""

import torch

from . import _core, _ops

_LATENT = "str? format=None, int? page_size=None, int latent_dim=512, int rope_dim=64, float scale=0.0"
_INDEX = 'str? format=None, int? page_size=None, int head_dim=128, str scale_format="fp32", bool hadamard=False'
_ROWS = 'int q_len=1, Tensor? cu_q_lens=None, str bound="causal_full"'

SIGNATURES = {
    "latent_write": f"(Tensor latent, Tensor rope, Tensor slots, Tensor(a!) cache, {_LATENT}) -> ()",
    "latent_gather": f"(Tensor slots, Tensor cache, ScalarType dtype, {_LATENT}) -> (Tensor, Tensor)",
    "index_k_write": f"(Tensor k, Tensor slots, Tensor(a!) cache, {_INDEX}) -> ()",
    "index_k_gather": f"(Tensor slots, Tensor cache, ScalarType dtype, {_INDEX}) -> Tensor",
    "rope_": '(Tensor(a!) x, Tensor positions, Tensor cos_sin, int offset=0, str pairing="interleaved") -> ()',
    "ragged_prefill": "(Tensor q, Tensor k, Tensor v, Tensor cu_q_lens, Tensor cu_kv_lens, float softmax_scale, bool causal=True, "
    "Tensor? k_rope=None) -> (Tensor, Tensor)",
    "merge_state": '(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, str base="e") -> (Tensor, Tensor)',
    "mla_decode": f"(Tensor q, Tensor cache, Tensor pages, Tensor seq_lens, float softmax_scale, {_ROWS}, float q_scale=1.0, "
    f"Tensor? attn_sink=None, {_LATENT}) -> (Tensor, Tensor)",
    "sparse_attention": "(Tensor q, Tensor cache, Tensor topk_slots, Tensor? topk_lens, float softmax_scale, float q_scale=1.0, "
    f"Tensor? attn_sink=None, {_LATENT}) -> (Tensor, Tensor)",
    "index_logits": f"(Tensor q, Tensor weights, Tensor cache, Tensor pages, Tensor seq_lens, SymInt max_keys, {_ROWS}, {_INDEX}) -> Tensor",
    "topk": "(Tensor logits, Tensor lens, SymInt k) -> (Tensor, Tensor)",
    "index_select": "(Tensor q, Tensor weights, Tensor cache, Tensor pages, Tensor seq_lens, SymInt k, SymInt max_seq_len, "
    f"{_ROWS}, {_INDEX}) -> (Tensor, Tensor)",
}

_library = torch.library.Library("gannet", "DEF")


def _define(name, run, fake):
    _library.define(name + SIGNATURES[name])
    for key in ("CPU", "CUDA"):
        _library.impl(name, run, key)
    torch.library.register_fake(f"gannet::{name}", fake, lib=_library)


def _latent(cache, format, page_size, latent_dim, rope_dim, scale):
    return _core.LatentCache(
        cache, format=format, page_size=page_size, latent_dim=latent_dim, rope_dim=rope_dim, scale=scale
    )


def _index(cache, format, page_size, head_dim, scale_format, hadamard):
    return _core.IndexCache(
        cache, format=format, page_size=page_size, head_dim=head_dim, scale_format=scale_format, hadamard=hadamard
    )


def _wide(dtype):
    return torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype


def _nothing(*args, **kwargs):
    return None


def _latent_write(latent, rope, slots, cache, format=None, page_size=None, latent_dim=512, rope_dim=64, scale=0.0):
    _ops.latent_write(latent, rope, slots, _latent(cache, format, page_size, latent_dim, rope_dim, scale))


def _latent_gather(slots, cache, dtype, format=None, page_size=None, latent_dim=512, rope_dim=64, scale=0.0):
    out = _latent_gather_fake(slots, cache, dtype, latent_dim=latent_dim, rope_dim=rope_dim)
    return _ops.latent_gather(
        slots, _latent(cache, format, page_size, latent_dim, rope_dim, scale), latent=out[0], rope=out[1]
    )


def _latent_gather_fake(slots, cache, dtype, format=None, page_size=None, latent_dim=512, rope_dim=64, scale=0.0):
    return tuple(cache.new_empty(slots.shape[0], width, dtype=dtype) for width in (latent_dim, rope_dim))


def _index_k_write(k, slots, cache, format=None, page_size=None, head_dim=128, scale_format="fp32", hadamard=False):
    _ops.index_k_write(k, slots, _index(cache, format, page_size, head_dim, scale_format, hadamard), hadamard=hadamard)


def _index_k_gather(
    slots, cache, dtype, format=None, page_size=None, head_dim=128, scale_format="fp32", hadamard=False
):
    k = _index_k_gather_fake(slots, cache, dtype, head_dim=head_dim)
    return _ops.index_k_gather(
        slots, _index(cache, format, page_size, head_dim, scale_format, hadamard), k=k, hadamard=hadamard
    )


def _index_k_gather_fake(
    slots, cache, dtype, format=None, page_size=None, head_dim=128, scale_format="fp32", hadamard=False
):
    return cache.new_empty(slots.shape[0], head_dim, dtype=dtype)


def _rope_(x, positions, cos_sin, offset=0, pairing="interleaved"):
    _ops.rope(x, positions, cos_sin, offset=offset, pairing=pairing)


def _ragged_prefill(q, k, v, cu_q_lens, cu_kv_lens, softmax_scale, causal=True, k_rope=None):
    return _ops.ragged_prefill(
        q, k, v, cu_q_lens, cu_kv_lens, softmax_scale=softmax_scale, causal=causal, k_rope=k_rope, return_lse=True
    )


def _ragged_prefill_fake(q, k, v, cu_q_lens, cu_kv_lens, softmax_scale, causal=True, k_rope=None):
    return q.new_empty(q.shape[0], q.shape[1], v.shape[2]), q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)


def _merge_state(out_a, lse_a, out_b, lse_b, base="e"):
    return _ops.merge_state(
        out_a.clone(memory_format=torch.contiguous_format),
        lse_a.clone(memory_format=torch.contiguous_format),
        out_b,
        lse_b,
        base=base,
    )


def _merge_state_fake(out_a, lse_a, out_b, lse_b, base="e"):
    return torch.empty_like(out_a, memory_format=torch.contiguous_format), torch.empty_like(
        lse_a, memory_format=torch.contiguous_format
    )


def _mla_decode(
    q,
    cache,
    pages,
    seq_lens,
    softmax_scale,
    q_len=1,
    cu_q_lens=None,
    bound="causal_full",
    q_scale=1.0,
    attn_sink=None,
    format=None,
    page_size=None,
    latent_dim=512,
    rope_dim=64,
    scale=0.0,
):
    return _ops.mla_decode(
        q,
        _latent(cache, format, page_size, latent_dim, rope_dim, scale),
        pages,
        seq_lens,
        softmax_scale=softmax_scale,
        q_len=q_len,
        cu_q_lens=cu_q_lens,
        bound=bound,
        q_scale=q_scale,
        attn_sink=attn_sink,
        return_lse=True,
    )


def _attention_fake(q, latent_dim):
    return (
        q.new_empty(q.shape[0], q.shape[1], latent_dim, dtype=_wide(q.dtype)),
        q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32),
    )


def _mla_decode_fake(
    q,
    cache,
    pages,
    seq_lens,
    softmax_scale,
    q_len=1,
    cu_q_lens=None,
    bound="causal_full",
    q_scale=1.0,
    attn_sink=None,
    format=None,
    page_size=None,
    latent_dim=512,
    rope_dim=64,
    scale=0.0,
):
    return _attention_fake(q, latent_dim)


def _sparse_attention(
    q,
    cache,
    topk_slots,
    topk_lens,
    softmax_scale,
    q_scale=1.0,
    attn_sink=None,
    format=None,
    page_size=None,
    latent_dim=512,
    rope_dim=64,
    scale=0.0,
):
    return _ops.sparse_attention(
        q,
        _latent(cache, format, page_size, latent_dim, rope_dim, scale),
        topk_slots,
        topk_lens,
        softmax_scale=softmax_scale,
        q_scale=q_scale,
        attn_sink=attn_sink,
        return_lse=True,
    )


def _sparse_attention_fake(
    q,
    cache,
    topk_slots,
    topk_lens,
    softmax_scale,
    q_scale=1.0,
    attn_sink=None,
    format=None,
    page_size=None,
    latent_dim=512,
    rope_dim=64,
    scale=0.0,
):
    return _attention_fake(q, latent_dim)


def _index_logits(
    q,
    weights,
    cache,
    pages,
    seq_lens,
    max_keys,
    q_len=1,
    cu_q_lens=None,
    bound="causal_full",
    format=None,
    page_size=None,
    head_dim=128,
    scale_format="fp32",
    hadamard=False,
):
    # Columns that a row does not see are -inf: an operator has no business with uninitialised memory.
    logits = torch.full((q.shape[0], max_keys), float("-inf"), dtype=torch.float32, device=q.device)
    return _ops.index_logits(
        q,
        weights,
        _index(cache, format, page_size, head_dim, scale_format, hadamard),
        pages,
        seq_lens,
        q_len=q_len,
        cu_q_lens=cu_q_lens,
        bound=bound,
        logits=logits,
        hadamard=hadamard,
    )


def _index_logits_fake(
    q,
    weights,
    cache,
    pages,
    seq_lens,
    max_keys,
    q_len=1,
    cu_q_lens=None,
    bound="causal_full",
    format=None,
    page_size=None,
    head_dim=128,
    scale_format="fp32",
    hadamard=False,
):
    return q.new_empty(q.shape[0], max_keys, dtype=torch.float32)


def _topk(logits, lens, k):
    return _ops.topk(logits, lens, k)


def _topk_fake(logits, lens, k):
    return logits.new_empty(logits.shape[0], k, dtype=torch.int32), logits.new_empty(logits.shape[0], dtype=torch.int32)


def _index_select(
    q,
    weights,
    cache,
    pages,
    seq_lens,
    k,
    max_seq_len,
    q_len=1,
    cu_q_lens=None,
    bound="causal_full",
    format=None,
    page_size=None,
    head_dim=128,
    scale_format="fp32",
    hadamard=False,
):
    return _ops.index_select(
        q,
        weights,
        _index(cache, format, page_size, head_dim, scale_format, hadamard),
        pages,
        seq_lens,
        k,
        max_seq_len=max_seq_len,
        q_len=q_len,
        cu_q_lens=cu_q_lens,
        bound=bound,
        hadamard=hadamard,
    )


def _index_select_fake(
    q,
    weights,
    cache,
    pages,
    seq_lens,
    k,
    max_seq_len,
    q_len=1,
    cu_q_lens=None,
    bound="causal_full",
    format=None,
    page_size=None,
    head_dim=128,
    scale_format="fp32",
    hadamard=False,
):
    return _topk_fake(q, seq_lens, k)


_define("latent_write", _latent_write, _nothing)
_define("latent_gather", _latent_gather, _latent_gather_fake)
_define("index_k_write", _index_k_write, _nothing)
_define("index_k_gather", _index_k_gather, _index_k_gather_fake)
_define("rope_", _rope_, _nothing)
_define("ragged_prefill", _ragged_prefill, _ragged_prefill_fake)
_define("merge_state", _merge_state, _merge_state_fake)
_define("mla_decode", _mla_decode, _mla_decode_fake)
_define("sparse_attention", _sparse_attention, _sparse_attention_fake)
_define("index_logits", _index_logits, _index_logits_fake)
_define("topk", _topk, _topk_fake)
_define("index_select", _index_select, _index_select_fake)
