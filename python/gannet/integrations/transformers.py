"""transformers' DeepSeek-V3, DeepSeek-V3.2 and GLM-5 (GlmMoeDsa) classes with Gannet's attention, on CPUs and GPUs.

    import gannet.integrations.transformers            # registers attn_implementation="gannet"
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="gannet")
    gannet.integrations.transformers.enable(model)
    model.generate(...)

`enable` replaces the attention modules' forward and gives the model a cache of pages (PagedCache): one latent row and, where a
layer has an indexer, one index key a token, in place of expanded keys and values. Sparse layers select slots and attend over
those alone: no mask of [tokens x tokens] is ever built. Weights stay where they are; the projections are transformers' own.

Without `enable` the registered function alone serves prefill in the expanded form without selection, and refuses the rest.
"""

import sys
import types

import torch
from transformers import AttentionInterface, Cache

from .. import _core, _ops

_CLASSES = ("DeepseekV3Attention", "DeepseekV32Attention", "GlmMoeDsaAttention")
_CACHE_NAMES = ("cache", "past_key_values")  # of the argument: newer and older versions of transformers
_PAGE = 64


class PagedCache(Cache):
    """Latent rows and index keys of a batch, in pages of 64 tokens, for a model that `enable` was called on.

    dtype: of latent rows and index keys, that of the model's activations by default. Left-padded batches are taken (padding is
    written nowhere and seen by nobody). Not for beam search's reorder_cache, crop (assisted generation), or static caches.
    """

    is_compileable = False
    is_croppable = False
    is_initialized = True

    def __init__(self, dtype=None):
        super().__init__(layers=[])
        self._dtype = dtype
        self._tokens = 0  # of the longest request, padding included
        self._latent, self._index_k = {}, {}
        self._pages = 0  # of a request
        self._padding = None
        self._batch = 0

    def get_seq_length(self, layer_idx=0):
        return self._tokens

    def get_query_offset(self, layer_idx=0):
        return self._tokens

    def get_mask_sizes(self, query_length, layer_idx=0):
        return self._tokens + (query_length if isinstance(query_length, int) else len(query_length)), 0

    def get_max_length(self, layer_idx=None):
        return -1

    get_max_cache_shape = get_max_length

    @property
    def batch_size(self):
        return self._batch or -1

    def __len__(self):
        return len(self._latent)

    def __repr__(self):
        return f"PagedCache({self._batch} requests, {self._tokens} tokens)"

    def reset(self):
        self.__init__(self._dtype)

    def update(self, *args, **kwargs):
        raise NotImplementedError(
            "gannet PagedCache: update() of expanded keys; call gannet.integrations.transformers.enable(model)"
        )

    def update_indexer(self, *args, **kwargs):
        self.update()

    def reorder_cache(self, beam_idx):
        raise NotImplementedError("gannet PagedCache: beam search (reorder_cache)")

    def crop(self, *args, **kwargs):
        raise NotImplementedError("gannet PagedCache: crop")

    def batch_repeat_interleave(self, repeats):
        raise NotImplementedError("gannet PagedCache: batch_repeat_interleave")

    def batch_select_indices(self, indices):
        raise NotImplementedError("gannet PagedCache: batch_select_indices")

    def _begin(self, batch, tokens, mask, device):
        """A forward pass of `tokens` new tokens a request."""
        if self._batch not in (0, batch):
            raise ValueError(f"gannet PagedCache: a batch of {batch} in a cache of {self._batch} requests")
        if self._batch == 0:
            self._batch = batch
            self._padding = torch.zeros(batch, dtype=torch.int32, device=device)
            if mask is not None:
                holes = mask.bool().logical_not()
                if bool(holes.any()):  # the only look at values, once a generation: prompts of one length have no holes
                    self._padding = holes.sum(dim=1, dtype=torch.int32).to(device)
                    expected = torch.arange(mask.shape[1], device=mask.device) < self._padding.to(mask.device)[:, None]
                    if not torch.equal(holes, expected):
                        raise ValueError(
                            "gannet PagedCache: attention_mask has zeros behind a one; accepted: padding on the left"
                        )
        self._grow(self._tokens + tokens)
        step = _Step()
        step.batch, step.rows_each = batch, tokens
        positions = (
            torch.arange(self._tokens, self._tokens + tokens, dtype=torch.int64, device=device) - self._padding[:, None]
        )
        first = torch.arange(batch, dtype=torch.int64, device=device)[:, None] * (self._pages * _PAGE)
        step.slots = torch.where(positions >= 0, first + positions, -1).view(-1)
        step.seq_lens = self._tokens + tokens - self._padding
        step.table = torch.arange(batch * self._pages, dtype=torch.int32, device=device).view(batch, self._pages)
        step.longest = self._tokens + tokens
        step.whole_prompt = self._tokens == 0
        return step

    def _end(self, step):
        """The pass is over: positions were counted from the tokens before it until now."""
        self._tokens += step.rows_each

    def _grow(self, tokens):
        pages = -(-tokens // _PAGE)
        if pages <= self._pages:
            return
        pages = max(pages, 2 * self._pages if self._pages else 0)
        for held in (self._latent, self._index_k):
            for layer, old in held.items():
                held[layer] = self._new(pages, old.shape[-1], old.dtype, old.device)
                held[layer].view(self._batch, pages, _PAGE, -1)[:, : self._pages] = old.view(
                    self._batch, self._pages, _PAGE, -1
                )
        self._pages = pages

    def _new(self, pages, width, dtype, device):
        return torch.zeros(self._batch * pages, _PAGE, width, dtype=dtype, device=device)

    def _rows(self, held, layer, width, like):
        if layer not in held:
            held[layer] = self._new(self._pages, width, self._dtype or like.dtype, like.device)
        return held[layer]


class _Step:
    """What the layers of one forward pass share."""

    __slots__ = ("batch", "rows_each", "slots", "seq_lens", "table", "longest", "whole_prompt", "cache", "ran")


class _State:
    """Beside a model: the step that is being computed, and what has run."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.step = None
        self.ran = set()


def enable(model, dtype=None):
    """Gives a DeepseekV3ForCausalLM, DeepseekV32ForCausalLM or GlmMoeDsaForCausalLM (or their base models) Gannet's attention.

    dtype: of the cache (torch.float32 or torch.bfloat16); None: that of the activations. Returns the model, changed in place.
    ValueError for other classes and for quantised kv_b_proj weights.
    """
    base = getattr(model, "model", model)
    state = _State(dtype)
    attention = [m for m in base.modules() if type(m).__name__ in _CLASSES]
    if not attention:
        raise ValueError(f"gannet: no attention of {type(model).__name__} is one of {', '.join(_CLASSES)}")
    for module in attention:
        if module.kv_b_proj.weight.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"gannet: kv_b_proj.weight is {module.kv_b_proj.weight.dtype}; accepted: float32, bfloat16"
            )
        module._gannet = state
        module.forward = types.MethodType(_forward, module)
    base.register_forward_pre_hook(lambda module, args, kwargs: _before(state, module, args, kwargs), with_kwargs=True)
    base.register_forward_hook(lambda *_: _after(state))
    if base.config._attn_implementation != "gannet":
        base.config._attn_implementation = "gannet"  # no mask is made for an implementation that has no mask function
    if hasattr(model, "_prepare_cache_for_generation"):
        original = model._prepare_cache_for_generation

        def prepare(self, generation_config, model_kwargs, *args, **kwargs):
            original(generation_config, model_kwargs, *args, **kwargs)
            for name in _CACHE_NAMES:
                if isinstance(model_kwargs.get(name), Cache) and not isinstance(model_kwargs[name], PagedCache):
                    model_kwargs[name] = _instead_of(model_kwargs[name], state)

        model._prepare_cache_for_generation = types.MethodType(prepare, model)
    model._gannet = state
    return model


def implementations(model):
    """After a run: {"mla_decode": "avx512_bf16", ...}, the implementation that each operation used."""
    return {op: impl for op, impl in sorted(model._gannet.ran)}


def _instead_of(cache, state):
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            f"gannet: the cache is a {type(cache).__name__} that holds tokens; accepted: a PagedCache, an empty one, None"
        )
    return PagedCache(state.dtype)


def _before(state, module, args, kwargs):
    ids = kwargs.get("input_ids")
    rows = ids if ids is not None else kwargs.get("inputs_embeds")
    if rows is None:
        rows = args[0]
    name = next((n for n in _CACHE_NAMES if kwargs.get(n) is not None), None)
    cache = kwargs.get(name) if name else None
    if not isinstance(cache, PagedCache):
        cache = _instead_of(cache, state)
        use_cache = kwargs.get("use_cache")
        if name or (module.config.use_cache if use_cache is None else use_cache):
            kwargs[name or _cache_argument(module)] = cache
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2):
        raise ValueError(
            "gannet: attention_mask has other than two dimensions; accepted: None, or ones with zeros on the left"
        )
    state.step = cache._begin(rows.shape[0], rows.shape[1], mask, rows.device)
    state.step.cache, state.step.ran = cache, state.ran
    return args, kwargs


def _after(state):
    state.step.cache._end(state.step)
    state.step = None


def _cache_argument(module):
    import inspect

    names = inspect.signature(inspect.unwrap(type(module).forward)).parameters
    return next(n for n in _CACHE_NAMES if n in names)


def _rotate(module, name, q, k, position_embeddings, unsqueeze_dim):
    """transformers' own rotation, by the functions of the module's file."""
    return getattr(sys.modules[type(module).__module__], name)(q, k, *position_embeddings, unsqueeze_dim=unsqueeze_dim)


def _forward(self, hidden_states, position_embeddings, attention_mask=None, *args, prev_topk_indices=None, **kwargs):
    step = self._gannet.step
    batch, tokens = hidden_states.shape[:2]
    if step is None or (batch, tokens) != (step.batch, step.rows_each):
        raise RuntimeError("gannet: the attention was called outside of its model's forward")
    rows, heads, latent_dim = batch * tokens, self.num_heads, self.kv_lora_rank

    if self.q_lora_rank is None:
        q_resid, q = None, self.q_proj(hidden_states)
    else:
        q_resid = self.q_a_layernorm(self.q_a_proj(hidden_states))
        q = self.q_b_proj(q_resid)
    q = q.view(batch, tokens, heads, self.qk_head_dim)
    q_nope, q_rope = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
    latent, k_rope = self.kv_a_proj_with_mqa(hidden_states).split([latent_dim, self.qk_rope_head_dim], dim=-1)
    latent = self.kv_a_layernorm(latent)
    interleaved = getattr(self.config, "rope_interleave", True)
    q_rope, k_rope = _rotate(
        self,
        "apply_rotary_pos_emb_interleave" if interleaved else "apply_rotary_pos_emb",
        q_rope,
        k_rope.unsqueeze(2),
        position_embeddings,
        2,
    )

    pages = step.cache._rows(step.cache._latent, self.layer_idx, latent_dim + self.qk_rope_head_dim, latent)
    cache = _core.LatentCache(pages, latent_dim=latent_dim, rope_dim=self.qk_rope_head_dim)
    _run(
        step,
        "latent_write",
        _ops.latent_write,
        latent.reshape(rows, latent_dim),
        k_rope.reshape(rows, -1),
        step.slots,
        cache,
    )

    w = self.kv_b_proj.weight.view(heads, self.qk_nope_head_dim + self.v_head_dim, latent_dim)
    w_k, w_v = w[:, : self.qk_nope_head_dim], w[:, self.qk_nope_head_dim :]
    indexer = getattr(self, "indexer", None)
    sparse = indexer is not None or hasattr(self, "skip_topk")
    selection = None
    if sparse:
        selection = (
            _select(indexer, step, hidden_states, q_resid, position_embeddings)
            if indexer is not None
            else prev_topk_indices
        )
        if selection is None:
            raise ValueError("gannet: a layer that shares its selection has none before it")
    if not sparse and step.whole_prompt and tokens > 1 and batch == 1:
        # Nothing is cached yet: the expanded form does a third of the absorbed one's work, over keys that are never stored.
        expanded = self.kv_b_proj(latent).view(rows, heads, -1)
        k_nope, v = expanded.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        ends = torch.tensor([0, rows], dtype=torch.int32, device=q.device)
        out = _run(
            step,
            "ragged_prefill",
            _ops.ragged_prefill,
            torch.cat([q_nope, q_rope], dim=-1).view(rows, heads, -1),
            k_nope.contiguous(),
            v.contiguous(),
            ends,
            ends,
            softmax_scale=self.scaling,
            k_rope=k_rope.reshape(rows, -1),
        )
    else:
        absorbed = torch.cat(
            [
                torch.matmul(q_nope.reshape(rows, heads, -1).transpose(0, 1), w_k).transpose(0, 1),
                q_rope.reshape(rows, heads, -1),
            ],
            dim=-1,
        )
        if sparse:
            out = _run(
                step, "sparse_attention", _ops.sparse_attention, absorbed, cache, *selection, softmax_scale=self.scaling
            )
        else:
            out = _run(
                step,
                "mla_decode",
                _ops.mla_decode,
                absorbed,
                cache,
                step.table,
                step.seq_lens,
                softmax_scale=self.scaling,
                q_len=tokens,
            )
        out = torch.matmul(out.transpose(0, 1), w_v.transpose(1, 2)).transpose(0, 1)
    out = self.o_proj(out.reshape(batch, tokens, heads * self.v_head_dim))
    return (out, None, selection) if hasattr(self, "skip_topk") else (out, None)


def _select(indexer, step, hidden_states, q_resid, position_embeddings):
    """The keys of each row by the layer's indexer: (slots int32 [rows, k], lens int32 [rows])."""
    batch, tokens = hidden_states.shape[:2]
    rows, rope = batch * tokens, indexer.qk_rope_head_dim
    q = indexer.wq_b(q_resid).view(batch, tokens, indexer.n_heads, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    name = "apply_rotary_pos_emb_interleave" if type(indexer).__name__.startswith("Glm") else "apply_rotary_pos_emb"
    q_rope, k_rope = _rotate(indexer, name, q[..., :rope], k[..., :rope], position_embeddings, 2)
    q, k = torch.cat([q_rope, q[..., rope:]], dim=-1), torch.cat([k_rope, k[..., rope:]], dim=-1)
    weights = indexer.weights_proj(hidden_states.to(indexer.weights_proj.weight.dtype)).float()
    weights = weights * (indexer.n_heads**-0.5 * indexer.softmax_scale)
    layer = indexer.layer_idx
    cache = _core.IndexCache(
        step.cache._rows(step.cache._index_k, layer, indexer.head_dim, k), head_dim=indexer.head_dim
    )
    _run(step, "index_k_write", _ops.index_k_write, k.reshape(rows, -1), step.slots, cache)
    return _run(
        step,
        "index_select",
        _ops.index_select,
        q.reshape(rows, indexer.n_heads, -1),
        weights.reshape(rows, -1).contiguous(),
        cache,
        step.table,
        step.seq_lens,
        min(indexer.index_topk, step.longest),
        max_seq_len=step.longest,
        q_len=tokens,
    )


def _run(step, op, function, *args, **kwargs):
    result = function(*args, **kwargs)
    step.ran.add((op, _ops.last_impl(op)))
    return result


def attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, indices=None, **kwargs):
    """What attn_implementation="gannet" does without `enable`: causal prefill over expanded keys, [batch, heads, tokens, width]."""
    if indices is not None:
        raise NotImplementedError("gannet: attention over indices; call gannet.integrations.transformers.enable(model)")
    if attention_mask is not None or query.shape[2] != key.shape[2] or dropout != 0.0:
        raise NotImplementedError(
            "gannet: masks, cached tokens and dropout; call gannet.integrations.transformers.enable(model)"
        )
    batch, heads, tokens, _ = query.shape
    groups = heads // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    q, k, v = (t.transpose(1, 2).reshape(batch * tokens, heads, -1).contiguous() for t in (query, key, value))
    ends = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=q.device)
    out = _ops.ragged_prefill(q, k, v, ends, ends, softmax_scale=scaling, causal=True)
    return out.view(batch, tokens, heads, -1), None


AttentionInterface.register("gannet", attention_forward)
