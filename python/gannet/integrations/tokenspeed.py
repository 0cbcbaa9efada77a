"""Attention backends for the TokenSpeed engine, with the method names, arguments and metadata fields of its `trtllm_mla` and `dsa`
backends, and Gannet's kernels behind them.

    gannet.integrations.tokenspeed.register()          # in the engine's process: "gannet_mla" and "gannet_dsa"
    --attention-backend gannet_dsa

The classes work by themselves too (duck-typed config, layer and pool, as tests use them); `register` combines them with the engine's
AttentionBackend. Either way of naming pages is taken: `page_table`, batch-ordered (2026-08), or `req_to_page` with req_pool_indices
(2026-07). Where the reference is silent or differs from itself, docs/semantics.md holds: LSE is the natural logarithm and -inf for a
row without keys, lengths below 1 are no keys, k_scale applies to scores and values.

Sparse prefill records the layer's step once (`step_counter.record_cache`), and dense prefill in its causal call only.
"""

import contextlib
import dataclasses
from typing import Optional

import torch

from .. import _core, _ops

PAGE_SIZES = (32, 64)
SPARSE_PAGE_SIZE = 64


@dataclasses.dataclass
class PrefillMetadata:
    max_seq_len: int
    cum_seq_lens: torch.Tensor
    seq_lens: torch.Tensor


@dataclasses.dataclass
class ChunkedPrefillMetadata:
    extend_prefix_lens: torch.Tensor
    extend_prefix_lens_cpu: torch.Tensor
    extend_seq_lens: torch.Tensor
    extend_seq_lens_cpu: torch.Tensor
    req_pool_indices: Optional[torch.Tensor]
    cum_extend_seq_lens: torch.Tensor
    max_extend_seq_len: int
    chunked_loop_num: int
    chunk_kv_indices_list: list
    chunked_seq_len: torch.Tensor
    cu_chunked_seq_len: torch.Tensor
    max_chunk_len_per_loop: list
    page_table: Optional[torch.Tensor] = None


@dataclasses.dataclass
class DecodeMetadata:
    num_extends: int = 0
    block_kv_indices: Optional[torch.Tensor] = None
    max_seq_len_k: Optional[int] = None
    seq_lens_k: Optional[torch.Tensor] = None


class MLABackend:
    """Dense MLA: `trtllm_mla`'s contract. chunked_prefill_capacity: tokens of prefixes that are gathered at a time."""

    chunked_prefill_capacity = 32768

    def __init__(self, config):
        self.device = config.device
        self.is_draft = getattr(config, "is_draft", False)
        self.spec_num_tokens = getattr(config, "speculative_num_draft_tokens", 1) or 1
        self.draft_block_decode = getattr(config, "draft_block_decode", False)
        self.max_context_len = config.context_len
        self.kernel_page_size = (
            getattr(config, "kernel_page_size", None) or getattr(config, "page_size", None) or SPARSE_PAGE_SIZE
        )
        if self.kernel_page_size not in PAGE_SIZES:
            raise ValueError(f"gannet_mla backend requires page_size 32 or 64, got {self.kernel_page_size}")
        self.kv_lora_rank, self.qk_rope_head_dim = config.kv_lora_rank, config.qk_rope_head_dim
        self.qk_nope_head_dim, self.v_head_dim = config.qk_nope_head_dim, config.v_head_dim
        self.kv_cache_dim = self.kv_lora_rank + self.qk_rope_head_dim
        self.scaling = config.scaling
        self.data_type, self.q_data_type = config.kv_cache_dtype, config.dtype
        if config.num_attention_heads % config.attn_tp_size:
            raise ValueError(
                f"num_attention_heads is {config.num_attention_heads}; accepted: a multiple of attn_tp_size {config.attn_tp_size}"
            )
        self.num_local_heads = config.num_attention_heads // config.attn_tp_size
        self.step_counter = None
        self.forward_decode_metadata = self.forward_prefill_metadata = self.chunked_prefill_metadata = None
        self.decode_cuda_graph_metadata = {}
        self.decode_cuda_graph_kv_indices = self.cuda_graph_seq_lens_buf = None

    # ---- metadata ----

    def register_step_counter(self, step_counter):
        self.step_counter = step_counter

    def _table(self, bs, req_pool_indices, page_table, req_to_page):
        if page_table is None:
            page_table = req_to_page[req_pool_indices[:bs].long()]
        return page_table[:bs].to(torch.int32)

    def init_forward_metadata(
        self, bs, num_extends, req_pool_indices, seq_lens, forward_mode, page_table=None, req_to_page=None, **extras
    ):
        """Plans a step. Extend and mixed steps need extend_prefix_lens, extend_prefix_lens_cpu, extend_seq_lens and
        extend_seq_lens_cpu: KeyError without. An idle step forgets the one before."""
        self.forward_decode_metadata = self.forward_prefill_metadata = self.chunked_prefill_metadata = None
        if forward_mode.is_idle():
            return
        assert seq_lens.dtype == torch.int32, f"seq_lens must be int32, got {seq_lens.dtype}"
        table = self._table(bs, req_pool_indices, page_table, req_to_page)
        if forward_mode.is_extend_or_mixed():
            self._init_prefill_metadata(
                seq_lens[:num_extends],
                None if req_pool_indices is None else req_pool_indices[:num_extends],
                table[:num_extends],
                extras["extend_prefix_lens"],
                extras["extend_prefix_lens_cpu"],
                extras["extend_seq_lens"],
                extras["extend_seq_lens_cpu"],
            )
        if not forward_mode.is_extend() or self.is_draft:
            self.forward_decode_metadata = DecodeMetadata(num_extends, table, self.max_context_len, seq_lens)

    def _init_prefill_metadata(self, seq_lens, req_pool_indices, table, prefix, prefix_cpu, extend, extend_cpu):
        def cumulative(lens):
            return torch.nn.functional.pad(lens.cumsum(-1, dtype=torch.int32), (1, 0))

        self.forward_prefill_metadata = PrefillMetadata(self.max_context_len, cumulative(seq_lens), seq_lens)
        # Passes over the prefixes: as many positions of each request as fit, in whole pages, so that none gathers part of one twice.
        page, requests = self.kernel_page_size, max(len(prefix_cpu), 1)
        length = max(page, self.chunked_prefill_capacity // requests // page * page)
        loops = -(-int(prefix_cpu.max()) // length) if len(prefix_cpu) else 0
        lens, slots = [], []
        for i in range(loops):
            chunk = (prefix_cpu - i * length).clamp(0, length).to(torch.int32)
            lens.append(chunk)
            request = torch.repeat_interleave(torch.arange(len(chunk)), chunk.long())
            starts = (chunk.cumsum(0) - chunk).long()
            position = torch.arange(int(chunk.sum())) - starts[request] + i * length
            request, position = request.to(table.device), position.to(table.device)
            slots.append((table[request, position // page].long() * page + position % page).to(torch.int32))
        stacked = torch.stack(lens) if lens else torch.zeros(0, len(prefix_cpu), dtype=torch.int32)
        stacked = stacked.to(table.device)
        self.chunked_prefill_metadata = ChunkedPrefillMetadata(
            prefix,
            prefix_cpu,
            extend,
            extend_cpu,
            req_pool_indices,
            cumulative(extend),
            int(extend_cpu.max()) if len(extend_cpu) else 0,
            loops,
            slots,
            stacked,
            cumulative(stacked),
            [int(c.max()) for c in lens],
            table,
        )

    @contextlib.contextmanager
    def override_num_extends(self, num_extends):
        assert self.forward_decode_metadata is not None
        before = self.forward_decode_metadata.num_extends
        self.forward_decode_metadata.num_extends = num_extends
        try:
            yield
        finally:
            self.forward_decode_metadata.num_extends = before

    def advance_draft_forward_metadata(self, seq_lens=None):
        metadata = self.forward_decode_metadata
        if metadata is None:
            raise RuntimeError("gannet: draft decode metadata was not initialized")
        if seq_lens is None:
            metadata.seq_lens_k.add_(1)
        else:
            metadata.seq_lens_k.copy_(seq_lens[: metadata.seq_lens_k.numel()])

    # ---- CUDA graphs ----

    def get_cuda_graph_seq_len_fill_value(self):
        return 1

    def init_cuda_graph_state(self, max_bs, seq_lens_buf=None):
        """Persistent lengths and table. seq_lens_buf (2026-07): int32 [>= max_bs], aliased where given."""
        if seq_lens_buf is not None:
            assert seq_lens_buf.dtype == torch.int32 and seq_lens_buf.dim() == 1 and len(seq_lens_buf) >= max_bs, (
                "seq_lens_buf is int32 [max_bs]"
            )
        self._aliased = seq_lens_buf is not None
        self.cuda_graph_seq_lens_buf = (
            seq_lens_buf if self._aliased else torch.zeros(max_bs, dtype=torch.int32, device=self.device)
        )
        columns = -(-self.max_context_len // self.kernel_page_size)
        self.decode_cuda_graph_kv_indices = torch.zeros(max_bs, columns, dtype=torch.int32, device=self.device)

    def init_forward_metadata_capture_cuda_graph(self, bs, req_pool_indices, seq_lens, forward_mode, **extras):
        if forward_mode.is_extend_or_mixed():
            raise NotImplementedError(f"gannet CUDA graph capture not supported for {forward_mode}")
        metadata = DecodeMetadata(
            0, self.decode_cuda_graph_kv_indices[:bs], self.max_context_len, self.cuda_graph_seq_lens_buf[:bs]
        )
        if not self._aliased:
            metadata.seq_lens_k.copy_(seq_lens[:bs])
        self.decode_cuda_graph_metadata[bs] = self.forward_decode_metadata = metadata

    def init_forward_metadata_replay_cuda_graph(
        self, bs, req_pool_indices, seq_lens, forward_mode=None, page_table=None, req_to_page=None, **extras
    ):
        if forward_mode is not None and forward_mode.is_extend_or_mixed():
            raise NotImplementedError(f"gannet CUDA graph replay not supported for {forward_mode}")
        metadata = self.decode_cuda_graph_metadata[bs]
        if not self._aliased:
            metadata.seq_lens_k.copy_(seq_lens[:bs])
        if page_table is not None or req_to_page is not None:
            table = self._table(bs, req_pool_indices, page_table, req_to_page)
            columns = min(table.shape[1], metadata.block_kv_indices.shape[1])
            metadata.block_kv_indices.zero_()
            metadata.block_kv_indices[: len(table), :columns] = table[:, :columns]
        self.forward_decode_metadata = metadata

    init_forward_metadata_capture = init_forward_metadata_capture_cuda_graph
    init_forward_metadata_replay = init_forward_metadata_replay_cuda_graph

    # ---- attention ----

    def _cache(self, layer, pool):
        buffer = pool.get_key_buffer(layer.layer_id)
        if buffer.dtype != self.data_type:
            raise RuntimeError(f"gannet: the pool is {buffer.dtype}, the config says {self.data_type}")
        if buffer.shape[0] % self.kernel_page_size:
            raise RuntimeError(
                f"gannet: the pool has {buffer.shape[0]} slots; accepted: multiples of {self.kernel_page_size}"
            )
        pages = buffer.view(-1, self.kernel_page_size, self.kv_cache_dim)
        options = {}
        if buffer.dtype == torch.float8_e4m3fn:
            options = dict(format="e4m3", scale=getattr(layer, "k_scale_float", None) or 1.0)
        return _core.LatentCache(pages, latent_dim=self.kv_lora_rank, rope_dim=self.qk_rope_head_dim, **options)

    def _out(self, q, layer):
        dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
        return torch.empty(q.shape[0], layer.tp_q_head_num, self.kv_lora_rank, dtype=dtype, device=q.device)

    def _check_logit_cap(self, cap):
        if cap and cap > 0:
            raise NotImplementedError(f"gannet: logits_soft_cap={cap}")

    def _save(self, k, layer, out_cache_loc, pool):
        assert k is not None
        pool.set_mla_kv_buffer(layer, out_cache_loc, k[..., : self.kv_lora_rank], k[..., self.kv_lora_rank :])

    def forward(self, q, k, v, layer, out_cache_loc, token_to_kv_pool, forward_mode, bs, save_kv_cache=True, **kwargs):
        """Decode steps only: the model calls forward_extend_chunked and forward_sparse_prefill itself."""
        if not forward_mode.is_decode():
            raise NotImplementedError(
                f"gannet: forward of {forward_mode}; call forward_extend_chunked or forward_sparse_prefill"
            )
        return self.forward_decode(q, k, v, layer, out_cache_loc, token_to_kv_pool, bs, save_kv_cache, **kwargs)

    def forward_decode(self, q, k, v, layer, out_cache_loc, token_to_kv_pool, bs, save_kv_cache=True, **kwargs):
        """q: [rows, H * 576] or [rows, H, 576]; bs: decode requests, of rows / bs rows each. Returns [rows, H * 512]."""
        self._check_logit_cap(layer.logit_cap)
        if save_kv_cache:
            self._save(k, layer, out_cache_loc, token_to_kv_pool)
        metadata = self.forward_decode_metadata
        if metadata is None:
            raise RuntimeError("gannet: decode metadata was not initialized")
        rows = q.shape[0]
        if bs <= 0 or rows % bs:
            raise RuntimeError(f"gannet: {rows} query rows of {bs} requests; accepted: equally many a request")
        first = 0 if self.draft_block_decode else metadata.num_extends
        q_len = rows // bs
        bound = "causal_full"
        if self.is_draft and q_len > 1:  # lengths are then what the first row sees, or the block's end
            bound = "uniform_block" if self.draft_block_decode else "causal_from_first"
        out = self._out(q, layer)
        _ops.mla_decode(
            q.view(rows, layer.tp_q_head_num, self.kv_cache_dim),
            self._cache(layer, token_to_kv_pool),
            metadata.block_kv_indices[first : first + bs],
            metadata.seq_lens_k[first : first + bs],
            softmax_scale=layer.scaling,
            q_len=q_len,
            bound=bound,
            out=out,
        )
        return out.view(rows, -1)

    def forward_extend_chunked(
        self,
        q,
        k,
        v,
        scaling,
        logits_soft_cap,
        *,
        cum_seq_lens_q,
        cum_seq_lens_kv,
        max_q_len,
        max_kv_len,
        seq_lens,
        batch_size,
        causal,
        out=None,
    ):
        """q, k: [rows, H, N + P], v: [rows, H, V]. Returns (out [rows, H, V], lse fp32 [rows, H], natural logarithm)."""
        self._check_logit_cap(logits_soft_cap)
        if causal and self.step_counter is not None:
            self.step_counter.record_cache()  # the model has written the layer's rows
        heads = self.num_local_heads
        q = q.view(-1, heads, self.qk_nope_head_dim + self.qk_rope_head_dim)
        k, v = k.reshape(-1, heads, q.shape[-1]), v.reshape(-1, heads, self.v_head_dim)
        if out is None:
            out = torch.empty(q.shape[0], heads, self.v_head_dim, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        _ops.ragged_prefill(
            q,
            k,
            v,
            cum_seq_lens_q,
            cum_seq_lens_kv,
            softmax_scale=scaling,
            causal=causal,
            out=out.view(q.shape[0], heads, -1),
            lse=lse,
        )
        return out, lse


class DSABackend(MLABackend):
    """Sparse MLA: `dsa`'s contract; calls without a selection are dense and exact only up to index_topk tokens, as there."""

    def __init__(self, config):
        super().__init__(config)
        self.index_topk = config.index_topk
        if self.kernel_page_size != SPARSE_PAGE_SIZE:
            raise ValueError(f"gannet_dsa backend requires page_size {SPARSE_PAGE_SIZE}, got {self.kernel_page_size}")

    def forward_decode(
        self,
        q,
        k,
        v,
        layer,
        out_cache_loc,
        token_to_kv_pool,
        bs,
        save_kv_cache=True,
        topk_indices=None,
        topk_lens=None,
        **kwargs,
    ):
        if topk_indices is None:
            return super().forward_decode(q, k, v, layer, out_cache_loc, token_to_kv_pool, bs, save_kv_cache)
        return self.forward_sparse_decode(
            q=q,
            k=k,
            v=v,
            layer=layer,
            out_cache_loc=out_cache_loc,
            token_to_kv_pool=token_to_kv_pool,
            bs=bs,
            save_kv_cache=save_kv_cache,
            topk_indices=topk_indices,
            topk_lens=topk_lens,
        )

    def forward_sparse_decode(
        self, *, q, k, v, layer, out_cache_loc, token_to_kv_pool, bs, save_kv_cache, topk_indices, topk_lens
    ):
        """topk_indices: int32 [rows, index_topk], slots, packed, -1 behind; topk_lens: int32 [rows] or None. Returns [rows, H * 512]."""
        self._check_sparse(layer, token_to_kv_pool)
        if save_kv_cache:
            self._save(k, layer, out_cache_loc, token_to_kv_pool)
        if topk_indices.shape[-1] != self.index_topk:
            raise RuntimeError(
                f"gannet: top-k width mismatch: indices={topk_indices.shape[-1]}, expected={self.index_topk}"
            )
        if topk_lens is not None and tuple(topk_lens.shape) != (q.shape[0],):
            raise RuntimeError(f"gannet: top-k length mismatch: lens={tuple(topk_lens.shape)}, q_tokens={q.shape[0]}")
        return self._sparse(q, layer, token_to_kv_pool, topk_indices.view(q.shape[0], -1).to(torch.int32), topk_lens)

    def forward_sparse_prefill(
        self,
        *,
        q,
        layer,
        token_to_kv_pool,
        page_table=None,
        block_tables=None,
        seq_lens=None,
        workspace_indices,
        topk_lens,
        kv_workspace_slots=None,
        max_seq_len=None,
    ):
        """workspace_indices: int32 [rows, index_topk] into kv_workspace_slots, -1 for none; without kv_workspace_slots they are slots
        already. The rows are in the cache. Returns [rows, H * 512]."""
        self._check_sparse(layer, token_to_kv_pool)
        rows = q.shape[0]
        if workspace_indices.shape[0] != rows or topk_lens.shape[0] != rows:
            raise RuntimeError(
                f"gannet: token mismatch: indices={workspace_indices.shape[0]}, lens={topk_lens.shape[0]}, q_tokens={rows}"
            )
        slots = workspace_indices
        if rows == 0:
            out = q.new_empty(0, layer.tp_q_head_num * self.kv_lora_rank)
        else:
            if kv_workspace_slots is not None:
                listed = kv_workspace_slots.to(torch.int32)[workspace_indices.clamp(min=0).long()]
                slots = torch.where(workspace_indices < 0, -1, listed)
            out = self._sparse(q, layer, token_to_kv_pool, slots, topk_lens.to(torch.int32))
        if self.step_counter is not None:
            self.step_counter.record_cache()
        return out

    def _check_sparse(self, layer, pool):
        self._check_logit_cap(layer.logit_cap)
        if getattr(pool, "quant_method", None) == "per_token_head":
            raise RuntimeError("gannet: sparse attention over kv_cache_quant_method='per_token_head'")

    def _sparse(self, q, layer, pool, slots, lens):
        rows = q.shape[0]
        out = self._out(q, layer)
        _ops.sparse_attention(
            q.view(rows, layer.tp_q_head_num, self.kv_cache_dim),
            self._cache(layer, pool),
            slots,
            lens,
            softmax_scale=layer.scaling,
            out=out,
        )
        return out.view(rows, -1)


def register():
    """Registers "gannet_mla" and "gannet_dsa" with the engine, whose package must be importable. Returns the two classes."""
    from tokenspeed.runtime.configs.model_config import AttentionArch
    from tokenspeed.runtime.layers.attention.backends.base import AttentionBackend
    from tokenspeed.runtime.layers.attention.registry import register_backend

    made = []
    for name, ours, archs in (
        ("gannet_mla", MLABackend, {AttentionArch.MLA}),
        ("gannet_dsa", DSABackend, {AttentionArch.DSA}),
    ):

        def init(self, config, ours=ours):
            AttentionBackend.__init__(self, config)
            ours.__init__(self, config)

        # Our methods first: of the engine's base class remain the hooks that ours have none of.
        cls = type(
            "Gannet" + ours.__name__,
            (ours, AttentionBackend),
            {
                "__init__": init,
                "forward": AttentionBackend.forward,
                "register_step_counter": AttentionBackend.register_step_counter,
                "cache_consumer_families": frozenset({"history"}),
            },
        )
        register_backend(name, archs, cls)
        made.append(cls)
    return made
