"""The operations of the library, one function each, and their plans.

Every tensor may be PyTorch's (CPU or CUDA), NumPy's, CuPy's or anything that speaks DLPack; nothing is copied. bf16 and
fp8 are torch.bfloat16 and torch.float8_e4m3fn, or ml_dtypes' for NumPy. On a CUDA device a call enqueues on `stream`, or on
the stream that the framework of its tensors is working on, and returns at once.

Common keyword arguments:
    impl             name of an implementation to force (gannet.implementations()); "" takes the first that can
    batch_invariant  only implementations whose result for a row does not depend on the rest of the batch, bit for bit
    stream           None, an address, torch.cuda.Stream, cupy.cuda.Stream, gannet.Stream
    workspace        uint8 tensor of at least the plan's workspace_bytes; None: scratch of the context
    context          gannet.Context; None: gannet.default_context()

Errors: InvalidArgumentError (a ValueError) for arguments outside the contract, UnsupportedError (a NotImplementedError)
where no implementation takes them, TypeError for what is no tensor. docs/semantics.md is the contract.
"""

from typing import Any

from . import _core
from ._core import Context, IndexCache, LatentCache, Pages, PageTable
from ._arrays import empty as _empty, wide as _wide

Tensor = Any  # of PyTorch, NumPy, CuPy, or another that speaks DLPack

_default_context = None
_last_impls = {}


def default_context() -> Context:
    """The context of calls that give none: as many threads as the process may run on. Made at the first call."""
    global _default_context
    if _default_context is None:
        _default_context = _core.Context()
    return _default_context


def set_default_context(context: Context | None) -> None:
    """Replaces the context of calls that give none, for example by one of fewer threads."""
    global _default_context
    _default_context = context


def last_impl(op):
    """Name of the implementation that the latest call of an operation ran on, by function or name; None before the first."""
    return _last_impls.get(op if isinstance(op, str) else op.__name__)


class Plan:
    """An operation planned for shapes, dtypes, strides and options: run(...) takes other data of the same kind.

    Made by ``gannet.plan(op, ...)`` with the arguments of the operation's function. ``run`` takes the same arguments and
    neither plans nor allocates; with a `workspace` of the caller's (else scratch of the context) it may be captured into a
    CUDA graph from the first call on.
    """

    def __init__(self, function, args, impl, batch_invariant, context):
        self._plan = getattr(_core, function.__name__ + "_plan")(
            context or default_context(), impl, batch_invariant, args
        )
        self._function = function

    @property
    def impl(self):
        """Name of the implementation that runs."""
        return self._plan.impl

    @property
    def workspace_bytes(self):
        """Scratch that run() needs; its contents never matter."""
        return self._plan.workspace_bytes

    def run(self, *args, stream=None, workspace=None, **kwargs):
        """As the operation's function; returns what that returns."""
        return self._function(*args, stream=stream, workspace=workspace, _run=self._plan.run, **kwargs)


def plan(op, *args, impl="", batch_invariant=False, context=None, **kwargs):
    """Plans an operation: ``plan(gannet.mla_decode, q, cache, pages, seq_lens, softmax_scale=s)``.

    op is one of the functions of this module. Outputs that are not given are made, as the function does. Raises what the
    function raises.
    """
    planned = []

    def make(stream, workspace, arguments):
        planned.append(Plan(op, arguments, impl, batch_invariant, context))

    op(*args, _run=make, **kwargs)
    return planned[0]


def _call(name, args, impl, batch_invariant, stream, workspace, context, run):
    if run is not None:
        run(stream, workspace, args)
        return
    _last_impls[name] = getattr(_core, name)(
        context or _default_context or default_context(), impl, batch_invariant, stream, workspace, args
    )


def _shape(tensor, rank, function, name):
    shape = getattr(tensor, "shape", None)
    if shape is None:
        raise TypeError(
            f"[{function}] {name} is a {type(tensor).__name__}; accepted: a tensor of PyTorch, NumPy, CuPy or another that speaks DLPack"
        )
    if len(shape) != rank:
        from ._errors import InvalidArgumentError

        raise InvalidArgumentError(f"[{function}] {name} has {len(shape)} dimensions; accepted: {rank}")
    return shape


def _latent(cache, function):
    if not isinstance(cache, _core.LatentCache):
        raise TypeError(f"[{function}] cache is a {type(cache).__name__}; accepted: a gannet.LatentCache")
    return cache


def latent_write(
    latent: Tensor,
    rope: Tensor,
    slots: Tensor,
    cache: LatentCache,
    *,
    impl: str = "",
    batch_invariant: bool = False,
    stream: Any = None,
    workspace: Tensor | None = None,
    context: Context | None = None,
    _run: Any = None,
) -> None:
    """Scatters latent rows: cache[slots[t]] = [latent[t] | rope[t]], converted to the cache's format (e4m3 saturates).

    latent: fp32 or bf16 [rows, R], the normalised kv_a. rope: same dtype [rows, P], the rotated k_pe. slots: int32 or int64
    [rows], page * page_size + offset; a negative one skips the row. cache: LatentCache.
    """
    _call("latent_write", (latent, rope, slots, cache), impl, batch_invariant, stream, workspace, context, _run)


def latent_gather(
    slots: Tensor,
    cache: LatentCache,
    *,
    latent: Tensor | None = None,
    rope: Tensor | None = None,
    dtype: str = "bfloat16",
    impl: str = "",
    batch_invariant: bool = False,
    stream: Any = None,
    workspace: Tensor | None = None,
    context: Context | None = None,
    _run: Any = None,
) -> tuple[Tensor, Tensor]:
    """Gathers and dequantises latent rows; a negative slot gives zeros. Returns (latent [rows, R], rope [rows, P]).

    slots: int32 or int64 [rows]. latent, rope: outputs, fp32 or bf16; made with `dtype` where not given.
    """
    rows = slots.shape[0]
    if latent is None:
        latent = _empty(slots, (rows, _latent(cache, "latent_gather").latent_dim), dtype)
    if rope is None:
        rope = _empty(slots, (rows, _latent(cache, "latent_gather").rope_dim), dtype)
    _call("latent_gather", (slots, cache, latent, rope), impl, batch_invariant, stream, workspace, context, _run)
    return latent, rope


def index_k_write(
    k: Tensor,
    slots: Tensor,
    cache: IndexCache,
    *,
    hadamard: bool = False,
    impl: str = "",
    batch_invariant: bool = False,
    stream: Any = None,
    workspace: Tensor | None = None,
    context: Context | None = None,
    _run: Any = None,
) -> None:
    """Quantises index keys to the cache's format and scatters them.

    k: fp32 or bf16 [rows, head_dim], rotated by RoPE. slots: int32 or int64 [rows]; a negative one skips the row.
    cache: IndexCache. hadamard: k was rotated by gannet.hadamard; must be what the cache says.
    """
    _call("index_k_write", (k, slots, cache, hadamard), impl, batch_invariant, stream, workspace, context, _run)


def index_k_gather(
    slots: Tensor,
    cache: IndexCache,
    *,
    k: Tensor | None = None,
    dtype: str = "bfloat16",
    hadamard: bool = False,
    impl: str = "",
    batch_invariant: bool = False,
    stream: Any = None,
    workspace: Tensor | None = None,
    context: Context | None = None,
    _run: Any = None,
) -> Tensor:
    """Gathers and dequantises index keys; a negative slot gives zeros. Returns k, fp32 or bf16 [rows, head_dim]."""
    if k is None:
        k = _empty(slots, (slots.shape[0], cache.head_dim), dtype)
    _call("index_k_gather", (slots, cache, k, hadamard), impl, batch_invariant, stream, workspace, context, _run)
    return k


def rope(
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    offset: int = 0,
    pairing: str = "interleaved",
    impl: str = "",
    batch_invariant: bool = False,
    stream: Any = None,
    workspace: Tensor | None = None,
    context: Context | None = None,
    _run: Any = None,
) -> Tensor:
    """Rotates x[..., offset : offset + P] in place: (a, b) -> (a c - b s, b c + a s). Returns x.

    x: fp32 or bf16 [rows, heads, width]. positions: int32 [rows]. cos_sin: fp32 [max_positions, P], P/2 cosines, then P/2
    sines. pairing: "interleaved", pairs (2i, 2i+1), for MLA's q_pe and k_pe and GLM-5's indexer; "half_split", pairs
    (i, i + P/2), for DeepSeek-V3.2's indexer.
    """
    _call("rope", (x, positions, cos_sin, offset, pairing), impl, batch_invariant, stream, workspace, context, _run)
    return x


def ragged_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q_lens: Tensor,
    cu_kv_lens: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    k_rope: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    return_lse: bool = False,
    impl: str = "",
    batch_invariant: bool = False,
    stream: Any = None,
    workspace: Tensor | None = None,
    context: Context | None = None,
    _run: Any = None,
) -> Any:
    """Attention in the expanded form over ragged batches. Query a of a request of nq sees key b of nk iff not causal or
    b <= a + (nk - nq).

    q: fp32 or bf16 [q_rows, H, N + P]. k: same dtype [kv_rows, H, N + P], or [kv_rows, H, N] with k_rope [kv_rows, P], the part
    that all heads share. v: same dtype [kv_rows, H, V]. cu_q_lens, cu_kv_lens: int32 [requests + 1].
    Returns out [q_rows, H, V], and with return_lse lse, fp32 [q_rows, H], natural logarithm. A row without keys: 0 and -inf.
    """
    rows, heads, _ = _shape(q, 3, "ragged_prefill", "q")
    if out is None:
        out = _empty(q, (rows, heads, v.shape[-1]), _wide(q))
    if lse is None and return_lse:
        lse = _empty(q, (rows, heads), "float32")
    _call(
        "ragged_prefill",
        (q, k, k_rope, v, cu_q_lens, cu_kv_lens, out, lse, softmax_scale, causal),
        impl,
        batch_invariant,
        stream,
        workspace,
        context,
        _run,
    )
    return (out, lse) if return_lse else out


def merge_state(
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    *,
    count_a: Tensor | None = None,
    count_b: Tensor | None = None,
    base: str = "e",
    impl: str = "",
    batch_invariant: bool = False,
    stream: Any = None,
    workspace: Tensor | None = None,
    context: Context | None = None,
    _run: Any = None,
) -> tuple[Tensor, Tensor]:
    """Merges two partial attention results in place into side a. Returns (out_a, lse_a).

    out_a, out_b: fp32 or bf16 [rows, H, D]. lse_a, lse_b: fp32 [rows, H], logarithms to `base` "e" or "2". An empty side (lse
    of -inf, or a count of 0 where count_a, count_b, int32 [rows], are given) is never read.
    """
    _call(
        "merge_state",
        (out_a, lse_a, out_b, lse_b, count_a, count_b, base),
        impl,
        batch_invariant,
        stream,
        workspace,
        context,
        _run,
    )
    return out_a, lse_a


def mla_decode(
    q: Tensor,
    cache: LatentCache,
    pages: Tensor | Pages | PageTable | tuple[Tensor, Tensor],
    seq_lens: Tensor,
    *,
    softmax_scale: float,
    q_len: int = 1,
    cu_q_lens: Tensor | None = None,
    bound: str = "causal_full",
    q_scale: float = 1.0,
    attn_sink: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_logits: Tensor | None = None,
    return_lse: bool = False,
    impl: str = "",
    batch_invariant: bool = False,
    stream: Any = None,
    workspace: Tensor | None = None,
    context: Context | None = None,
    _run: Any = None,
) -> Any:
    """Absorbed ("MQA") attention over the paged latent cache: decode, speculative verify, any ragged rows.

    q: fp32, bf16, or e4m3 (then times q_scale) [rows, H, R + P], the absorbed query [Wk^T q_nope | rotated q_pe].
    cache: LatentCache. pages: int32 [requests, max_pages], Pages, PageTable, or (indptr, indices).
    seq_lens: int32 [requests], tokens including this step's; 0: no keys. Rows stand request by request: q_len each, or ragged
    by cu_q_lens, int32 [requests + 1]. bound: what row j of S sees of a request of length L: "causal_full" L - (S - 1) + j
    keys, "causal_from_first" L + j, "uniform_block" L.
    softmax_scale: always given, (N + P)^-0.5 times what YaRN adds; never guessed.
    attn_sink: fp32 [H], a key without a value that every row sees; not in lse.
    max_logits: output, fp32 [rows, H], the largest scaled score.
    Returns out [rows, H, R] (dtype of q, bf16 of e4m3), and with return_lse lse, fp32 [rows, H], natural logarithm. A row
    without keys: 0 and -inf.
    """
    rows, heads, _ = _shape(q, 3, "mla_decode", "q")
    if out is None:
        out = _empty(q, (rows, heads, _latent(cache, "mla_decode").latent_dim), _wide(q))
    if lse is None and return_lse:
        lse = _empty(q, (rows, heads), "float32")
    _call(
        "mla_decode",
        (q, cache, pages, seq_lens, q_len, cu_q_lens, bound, attn_sink, out, lse, max_logits, softmax_scale, q_scale),
        impl,
        batch_invariant,
        stream,
        workspace,
        context,
        _run,
    )
    return (out, lse) if return_lse else out


def index_logits(
    q: Tensor,
    weights: Tensor,
    cache: IndexCache,
    pages: Tensor | Pages | PageTable | tuple[Tensor, Tensor],
    seq_lens: Tensor,
    *,
    q_len: int = 1,
    cu_q_lens: Tensor | None = None,
    bound: str = "causal_full",
    logits: Tensor | None = None,
    max_keys: int | None = None,
    hadamard: bool = False,
    impl: str = "",
    batch_invariant: bool = False,
    stream: Any = None,
    workspace: Tensor | None = None,
    context: Context | None = None,
    _run: Any = None,
) -> Tensor:
    """Indexer scores: logits[t, s] = sum over heads of weights[t, h] * relu(q[t, h] . k[s]) for the keys s that row t sees.

    q: fp32, bf16 or e4m3 [rows, heads, head_dim], rotated. weights: fp32 [rows, heads], with head_dim^-0.5, heads^-0.5 and the
    scale of a quantised q in them. cache: IndexCache. pages, seq_lens, q_len, cu_q_lens, bound: as of mla_decode.
    logits: output, fp32 or bf16 [rows, max_keys]; made as fp32 with max_keys columns where not given. Columns that a row does
    not see are left alone. Returns logits.
    """
    if logits is None:
        if max_keys is None:
            raise TypeError("index_logits needs logits or max_keys")
        logits = _empty(q, (q.shape[0], max_keys), "float32")
    _call(
        "index_logits",
        (q, weights, cache, pages, seq_lens, q_len, cu_q_lens, bound, logits, hadamard),
        impl,
        batch_invariant,
        stream,
        workspace,
        context,
        _run,
    )
    return logits


def topk(
    logits: Tensor,
    lens: Tensor,
    k: int | None = None,
    *,
    positions: Tensor | None = None,
    counts: Tensor | None = None,
    impl: str = "",
    batch_invariant: bool = False,
    stream: Any = None,
    workspace: Tensor | None = None,
    context: Context | None = None,
    _run: Any = None,
) -> tuple[Tensor, Tensor]:
    """Exact top-k of each row: NaN lowest, the smaller position first among equals. Returns (positions, counts).

    logits: fp32 or bf16 [rows, columns]. lens: int32 [rows], the leading columns that count. positions: int32 [rows, k],
    ascending, then -1. counts: int32 [rows], min(len, k).
    """
    rows = logits.shape[0]
    if positions is None:
        if k is None:
            raise TypeError("topk needs k or positions")
        positions = _empty(logits, (rows, k), "int32")
    if counts is None:
        counts = _empty(logits, (rows,), "int32")
    _call("topk", (logits, lens, positions, counts), impl, batch_invariant, stream, workspace, context, _run)
    return positions, counts


def index_select(
    q: Tensor,
    weights: Tensor,
    cache: IndexCache,
    pages: Tensor | Pages | PageTable | tuple[Tensor, Tensor],
    seq_lens: Tensor,
    k: int | None = None,
    *,
    max_seq_len: int,
    q_len: int = 1,
    cu_q_lens: Tensor | None = None,
    bound: str = "causal_full",
    topk_slots: Tensor | None = None,
    topk_lens: Tensor | None = None,
    topk_positions: Tensor | None = None,
    return_positions: bool = False,
    hadamard: bool = False,
    impl: str = "",
    batch_invariant: bool = False,
    stream: Any = None,
    workspace: Tensor | None = None,
    context: Context | None = None,
    _run: Any = None,
) -> Any:
    """Index logits, top-k and the translation to slots in one pass with bounded memory.

    Arguments as of index_logits; max_seq_len: no row sees more keys (it sizes the workspace). Returns (topk_slots int32
    [rows, k], topk_lens int32 [rows]), and with return_positions topk_positions int32 [rows, k]: ascending, packed, then -1.
    """
    rows = q.shape[0]
    if topk_slots is None:
        if k is None:
            raise TypeError("index_select needs k or topk_slots")
        topk_slots = _empty(q, (rows, k), "int32")
    if topk_lens is None:
        topk_lens = _empty(q, (rows,), "int32")
    if topk_positions is None and return_positions:
        topk_positions = _empty(q, tuple(topk_slots.shape), "int32")
    _call(
        "index_select",
        (
            q,
            weights,
            cache,
            pages,
            seq_lens,
            q_len,
            cu_q_lens,
            bound,
            max_seq_len,
            topk_slots,
            topk_lens,
            topk_positions,
            hadamard,
        ),
        impl,
        batch_invariant,
        stream,
        workspace,
        context,
        _run,
    )
    return (topk_slots, topk_lens, topk_positions) if return_positions else (topk_slots, topk_lens)


def sparse_attention(
    q: Tensor,
    cache: LatentCache,
    topk_slots: Tensor,
    topk_lens: Tensor | None = None,
    *,
    softmax_scale: float,
    q_scale: float = 1.0,
    attn_sink: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    max_logits: Tensor | None = None,
    return_lse: bool = False,
    impl: str = "",
    batch_invariant: bool = False,
    stream: Any = None,
    workspace: Tensor | None = None,
    context: Context | None = None,
    _run: Any = None,
) -> Any:
    """Absorbed attention of each row over its list of slots.

    topk_slots: int32 [rows, k]; an entry counts iff 0 <= slot < cache.num_slots and its column is below topk_lens (int32
    [rows], where given); others are never loaded, and a slot listed twice counts twice. q, attn_sink, max_logits and results
    as of mla_decode.
    """
    rows, heads, _ = _shape(q, 3, "sparse_attention", "q")
    if out is None:
        out = _empty(q, (rows, heads, _latent(cache, "sparse_attention").latent_dim), _wide(q))
    if lse is None and return_lse:
        lse = _empty(q, (rows, heads), "float32")
    _call(
        "sparse_attention",
        (q, cache, topk_slots, topk_lens, attn_sink, out, lse, max_logits, softmax_scale, q_scale),
        impl,
        batch_invariant,
        stream,
        workspace,
        context,
        _run,
    )
    return (out, lse) if return_lse else out


def hadamard(x: Tensor, *, out: Tensor | None = None, stream: Any = None, context: Context | None = None) -> Tensor:
    """The Walsh-Hadamard rotation of the last dimension n (a power of two), times n^-0.5; fp32 or bf16.

    In place unless `out` is given. Returns the result. Its own inverse.
    """
    out = x if out is None else out
    _core.hadamard(context or default_context(), x, out, stream)
    return out
