"""The attention backends: what an engine calls each step and each layer."""

from . import _core
from ._arrays import empty as _empty, wide as _wide
from ._ops import default_context


class Backend:
    """An attention backend over the caller's caches: plan a step once, then write, select and attend layer by layer.

        backend = gannet.Backend("dsa", num_heads=128, softmax_scale=192**-0.5, max_context_len=163840,
                                 q_lora_rank=1536, index_num_heads=64, index_topk=2048)
        backend.bind(latent_caches, index_caches)          # of every layer
        backend.prepare(seq_lens, page_table, prefix_lens=..., extend_lens=...)
        for layer in range(num_layers):
            slots, lens = backend.select(layer, iq, weights, kv=(latent, k_pe, index_k))
            out = backend.attend(layer, q, selection=(slots, lens))

    arch: "mla" (dense) or "dsa" (sparse: needs q_lora_rank and the index_ arguments). name: a backend by name; "" takes the
    default of the architecture. num_heads: query heads of this process. qk_nope_head_dim, v_head_dim: for dense prefill.
    softmax_scale: always given. prefix_chunk_capacity: tokens of a prefix that are gathered and expanded at a time.
    impl, batch_invariant: as of the operations. device: "cpu", "cuda", "cuda:N", or a torch.device.

    Rows of a step: those of requests that extend first, ragged, in request order, then q_len rows of each decode request.
    Calls name their rows: "all", "prefill", "decode". On a CUDA device tensors of calls are the device's, steps and page
    tables stay in host memory, and everything is enqueued on set_stream()'s. One thread at a time.

    Raises gannet.Error's subclasses with the text of the C++ library (include/gannet/attention.h).
    """

    def __init__(
        self,
        arch="mla",
        *,
        num_heads,
        softmax_scale,
        max_context_len,
        name="",
        latent_dim=512,
        rope_dim=64,
        qk_nope_head_dim=0,
        v_head_dim=0,
        q_lora_rank=0,
        index_num_heads=0,
        index_head_dim=128,
        index_topk=0,
        page_size=64,
        prefix_chunk_capacity=32768,
        impl="",
        batch_invariant=False,
        device="cpu",
        context=None,
    ):
        self._backend = _core.Backend(
            context or default_context(),
            name,
            arch,
            num_heads,
            latent_dim,
            rope_dim,
            qk_nope_head_dim,
            v_head_dim,
            q_lora_rank,
            softmax_scale,
            index_num_heads,
            index_head_dim,
            index_topk,
            page_size,
            max_context_len,
            prefix_chunk_capacity,
            impl,
            batch_invariant,
            device,
        )
        self._latent_dim = latent_dim
        self._rope_dim = rope_dim
        self._topk = index_topk

    @property
    def name(self):
        return self._backend.name

    @property
    def capabilities(self):
        """dict: dense_prefill, attend_all, attend_sparse, page_sizes, latent_formats."""
        return self._backend.capabilities()

    def bind(self, latent, index=None):
        """The caches of layers 0, 1, ...: LatentCache each, and IndexCache or None each. Ends the current step."""
        self._backend.bind(list(latent), list(index or []))

    def set_stream(self, stream):
        """The CUDA stream of everything that follows: an address, torch.cuda.Stream, cupy.cuda.Stream, gannet.Stream."""
        self._backend.set_stream(stream)

    def set_layer_hooks(self, record=None, wait=None):
        """record(layer, "written" | "abandoned"): exactly one a layer a prefill step; wait(layer): before a layer's bytes
        are touched, for rows that are still being brought in."""
        self._backend.set_layer_hooks(record, wait)

    def prepare(self, seq_lens, pages=None, *, prefix_lens=None, extend_lens=None, q_len=1, decode_bound="causal_full"):
        """Plans a step. seq_lens: int32 [requests] on the host (tensor or list), this step's tokens included; the first
        len(extend_lens) requests extend, by extend_lens new tokens after prefix_lens cached ones. pages: a host page table
        in any form. No requests: an idle step."""
        self._backend.prepare(seq_lens, pages, prefix_lens, extend_lens, q_len, decode_bound)

    def capture(self, num_requests, *, q_len=1, decode_bound="causal_full", max_seq_len=0, table=None):
        """Makes the persistent plan of a batch of decode requests, for CUDA graphs, and makes it the current step (all
        padding): run the layers once, then under capture; before each replay refresh(). table: the SharedPageTable that
        lengths and pages come from, for good; then refresh_shared() instead."""
        self._backend.capture(num_requests, q_len, decode_bound, max_seq_len, table)

    def refresh(self, num_requests, seq_lens, pages, *, q_len=1, decode_bound="causal_full"):
        """Like prepare, into the plan captured for (num_requests, q_len), in place; missing requests are padding."""
        self._backend.refresh(num_requests, seq_lens, pages, q_len, decode_bound)

    def refresh_shared(self, table, generation, *, q_len=1, decode_bound="causal_full", seq_lens=None, steps=0):
        """Makes the step that the table is of the current one, in the plan captured with it. seq_lens: int32 [requests] on
        the table's device instead of its own lengths (those of a draft); steps: added to each length but 0. On a CUDA
        device one kernel reads them in the order of the stream, which may be captured in front of the layers; then
        `step` does not know the lengths. Once the table is of another generation calls fail: the step is stale."""
        self._backend.refresh_shared(table, generation, q_len, decode_bound, seq_lens, steps)

    def advance(self, steps=1, *, seq_lens=None, pages=None):
        """The next step of a draft: one row a request, lengths seq_lens (default: those of the step) + steps."""
        self._backend.advance(steps, seq_lens, pages)

    def narrow(self, accepted):
        """After speculative verify, accepted rows of each decode request: (row of each request, its length)."""
        return self._backend.narrow(accepted)

    @property
    def step(self):
        """dict of the current step: mode, q_len, num_requests, num_extends, num_rows, num_prefill_rows, max_row_len,
        seq_lens, cu_rows, prefix_chunk_tokens, lens_known (False: see refresh_shared)."""
        return self._backend.step()

    @property
    def step_tensors(self):
        """(positions, write_slots, row_lens), int32 [rows of the step], on the backend's device: positions for RoPE
        (padding 0), slots that rows are written to (padding -1), keys that rows see."""
        return self._backend.step_tensors()

    def write(self, layer, kv, *, rows="all"):
        """Writes this step's rows: kv = (latent, rope) or (latent, rope, index_k)."""
        latent, rope, index_k = _kv(kv)
        self._backend.write(layer, rows, latent, rope, index_k)

    def select(self, layer, q, weights, *, kv=None, out=None, rows="all"):
        """Chooses the keys of each row. kv: rows to write first; None: they are in the caches. out: (slots, lens) or (slots,
        lens, positions), int32 [rows, index_topk], [rows]; made where not given. Returns (slots, lens)."""
        if out is None:
            n = q.shape[0]
            out = (_empty(q, (n, self._topk), "int32"), _empty(q, (n,), "int32"))
        latent, rope, index_k = _kv(kv)
        positions = out[2] if len(out) > 2 else None
        self._backend.select(layer, rows, q, weights, latent, rope, index_k, kv is None, out[0], out[1], positions)
        return out[0], out[1]

    def attend(self, layer, q, *, selection=None, kv=None, out=None, lse=None, return_lse=False, rows="all"):
        """Absorbed attention. q: [rows, H, R + P]. selection: (slots, lens) of select(), or "all": every visible key.
        kv: rows to write first; None: they are in the caches. Returns out [rows, H, R], with return_lse lse too."""
        if out is None:
            out = _empty(q, (q.shape[0], q.shape[1], self._latent_dim), _wide(q))
        if lse is None and return_lse:
            lse = _empty(q, (q.shape[0], q.shape[1]), "float32")
        latent, rope, index_k = _kv(kv)
        every = isinstance(selection, str) and selection == "all"
        slots, lens = (None, None) if every or selection is None else (selection[0], selection[1])
        self._backend.attend(layer, rows, q, latent, rope, index_k, kv is None, every, slots, lens, out, lse)
        return (out, lse) if return_lse else out

    def dense_prefill(self, layer, q, k_nope, k_rope, v, *, expand=None, kv=None, out=None, lse=None, return_lse=False):
        """Prefill in the expanded form over the rows of the extend requests: a causal pass over the new tokens, then for each
        chunk of cached prefixes gather, expand, attend, merge.

        q: [rows, H, N + P]; k_nope [rows, H, N], k_rope [rows, P], v [rows, H, V] of the new tokens, rotated. expand(latent
        [n, R]) -> (k_nope [n, H, N], v [n, H, V]); needed where a request has a prefix. Returns out [rows, H, V]."""
        if out is None:
            out = _empty(q, (q.shape[0], q.shape[1], v.shape[2]), _wide(q))
        if lse is None:
            lse = _empty(q, (q.shape[0], q.shape[1]), "float32")
        latent, rope, index_k = _kv(kv)
        chunks = self._backend.step()["prefix_chunk_tokens"]
        if chunks and expand is None:
            raise TypeError("dense_prefill needs expand where a request has a prefix")
        self._backend.prefill_new_tokens(layer, q, k_nope, k_rope, v, latent, rope, index_k, kv is None, out, lse)
        for chunk, tokens in enumerate(chunks):
            chunk_latent = _empty(q, (tokens, self._latent_dim), _wide(q))
            chunk_rope = _empty(q, (tokens, self._rope_dim), _wide(q))
            self._backend.gather_prefix(layer, chunk, chunk_latent, chunk_rope)
            chunk_k, chunk_v = expand(chunk_latent)
            self._backend.prefill_prefix(layer, chunk, q, chunk_k, chunk_rope, chunk_v, out, lse)
        return (out, lse) if return_lse else out

    @property
    def implementations(self):
        """dict: operation -> implementation that it ran on."""
        return self._backend.implementations()


def _kv(kv):
    if kv is None:
        return None, None, None
    return kv if len(kv) == 3 else (kv[0], kv[1], None)
