"""The engine's backends by their method names, over a pool, a layer and modes of the same shape, against the reference."""

import types

import numpy as np
import pytest
import reference as ref
from conftest import BF16_TOLERANCE, F32_TOLERANCE, assert_close

import gannet

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from gannet.integrations import tokenspeed  # noqa: E402

HEADS, TOPK, PAGE, PAGES = 4, 8, 64, 9


class Mode:
    def __init__(self, name):
        self.name = name

    def is_idle(self):
        return self.name == "idle"

    def is_decode(self):
        return self.name == "decode"

    def is_extend(self):
        return self.name == "extend"

    def is_extend_or_mixed(self):
        return self.name in ("extend", "mixed")


class Pool:
    def __init__(self, dtype):
        torch.manual_seed(0)
        self.rows = (torch.randn(PAGES * PAGE, 1, 576) / 4).to(dtype)

    def get_key_buffer(self, layer_id):
        return self.rows

    def set_mla_kv_buffer(self, layer, loc, latent, rope):
        self.rows[loc.long()] = torch.cat([latent, rope], dim=-1).view(-1, 1, 576).to(self.rows.dtype)

    def values(self):
        return self.rows.float().double().numpy().reshape(PAGES, PAGE, 576)


class Counter:
    count = 0

    def record_cache(self):
        self.count += 1


def config(**changes):
    return types.SimpleNamespace(
        **(
            dict(
                device="cpu",
                context_len=256,
                page_size=PAGE,
                kv_lora_rank=512,
                qk_rope_head_dim=64,
                qk_nope_head_dim=128,
                v_head_dim=128,
                scaling=0.07,
                kv_cache_dtype=torch.bfloat16,
                dtype=torch.bfloat16,
                num_attention_heads=2 * HEADS,
                attn_tp_size=2,
                index_topk=TOPK,
            )
            | changes
        )
    )


LAYER = types.SimpleNamespace(
    layer_id=0, scaling=0.07, logit_cap=0.0, tp_q_head_num=HEADS, head_dim=576, v_head_dim=512, k_scale_float=None
)
TABLE = torch.tensor([[3, 1, 0, 0], [2, 5, 7, 0]], dtype=torch.int32)


def step(backend, lens, mode="decode", table=TABLE, num_extends=0, **extras):
    backend.init_forward_metadata(
        len(lens), num_extends, None, torch.tensor(lens, dtype=torch.int32), Mode(mode), page_table=table, **extras
    )


@pytest.mark.parametrize(
    "dtype, k_scale", [(torch.bfloat16, None), (torch.float8_e4m3fn, None), (torch.float8_e4m3fn, 0.5)]
)
@pytest.mark.parametrize("draft", [False, True])
def test_decode_and_verify(dtype, k_scale, draft):
    backend, pool = tokenspeed.MLABackend(config(kv_cache_dtype=dtype, is_draft=draft)), Pool(dtype)
    layer = types.SimpleNamespace(**(vars(LAYER) | dict(k_scale_float=k_scale)))
    step(backend, [70, 130])
    q, k = torch.randn(4, HEADS * 576).bfloat16(), torch.randn(4, 1, 576).to(dtype)
    loc = torch.tensor([3 * 64 + 1, 64, 5 * 64 + 2, 7 * 64])
    out = backend.forward(q, k, None, layer, loc, pool, Mode("decode"), 2)
    assert out.shape == (4, HEADS * 512) and torch.equal(pool.rows[64], k[1])
    values = pool.values() * (k_scale or 1)
    for row in range(4):
        n = ref.bound("causal_from_first" if draft else "causal_full", [70, 130][row // 2], 2, row % 2)
        want = ref.attend(
            q[row].float().numpy().reshape(HEADS, 576), ref.row_keys(values, TABLE[row // 2].tolist(), n, PAGE), 0.07
        )[0]
        assert_close(out[row].float().view(HEADS, 512), want, BF16_TOLERANCE)
    with pytest.raises(RuntimeError, match="3 query rows of 2 requests"):
        backend.forward_decode(q[:3], None, None, layer, None, pool, 2, save_kv_cache=False)


def test_graph_steps_are_the_eager_ones():
    eager, graph, pool = tokenspeed.MLABackend(config()), tokenspeed.MLABackend(config()), Pool(torch.bfloat16)
    q = torch.randn(2, HEADS, 576).bfloat16()
    graph.init_cuda_graph_state(4)
    graph.init_forward_metadata_capture_cuda_graph(2, None, torch.tensor([1, 1], dtype=torch.int32), Mode("decode"))
    address = graph.forward_decode_metadata.block_kv_indices.data_ptr()
    req_to_page = torch.zeros(6, 4, dtype=torch.int32)
    req_to_page[[4, 2]] = TABLE
    lens = torch.tensor([70, 130], dtype=torch.int32)
    graph.init_forward_metadata_replay_cuda_graph(
        2, torch.tensor([4, 2]), lens, Mode("decode"), req_to_page=req_to_page
    )
    assert graph.forward_decode_metadata.block_kv_indices.data_ptr() == address
    step(eager, [70, 130])
    assert torch.equal(
        *(b.forward_decode(q, None, None, LAYER, None, pool, 2, save_kv_cache=False) for b in (eager, graph))
    )
    graph.advance_draft_forward_metadata()
    assert graph.forward_decode_metadata.seq_lens_k.tolist() == [71, 131]
    with pytest.raises(NotImplementedError, match="capture"):
        graph.init_forward_metadata_capture_cuda_graph(2, None, lens, Mode("mixed"))
    with pytest.raises(KeyError):
        graph.init_forward_metadata_replay_cuda_graph(3, None, lens, Mode("decode"))


def test_chunked_prefill_is_one_pass():
    backend, counter = tokenspeed.MLABackend(config()), Counter()
    backend.chunked_prefill_capacity = 128
    backend.register_step_counter(counter)
    prefix, extend = torch.tensor([0, 130], dtype=torch.int32), torch.tensor([5, 3], dtype=torch.int32)
    step(
        backend,
        [5, 133],
        "extend",
        num_extends=2,
        extend_prefix_lens=prefix,
        extend_prefix_lens_cpu=prefix,
        extend_seq_lens=extend,
        extend_seq_lens_cpu=extend,
    )
    chunks = backend.chunked_prefill_metadata
    assert chunks.chunked_loop_num == 3 and chunks.chunked_seq_len.tolist() == [[0, 64], [0, 64], [0, 2]]
    assert chunks.cu_chunked_seq_len.tolist() == [
        [0, 0, 64],
        [0, 0, 64],
        [0, 0, 2],
    ] and chunks.max_chunk_len_per_loop == [64, 64, 2]
    assert chunks.chunk_kv_indices_list[2].tolist() == [7 * 64, 7 * 64 + 1] and chunks.cum_extend_seq_lens.tolist() == [
        0,
        5,
        8,
    ]
    torch.manual_seed(0)
    k, v, q = (
        torch.randn(138, HEADS, 192),
        torch.randn(138, HEADS, 128),
        torch.randn(8, HEADS, 192),
    )  # by request, by position
    new = [*range(5), *range(135, 138)]
    common = dict(max_q_len=5, batch_size=2)
    out, lse = backend.forward_extend_chunked(
        q,
        k[new],
        v[new],
        0.07,
        0.0,
        cum_seq_lens_q=chunks.cum_extend_seq_lens,
        cum_seq_lens_kv=chunks.cum_extend_seq_lens,
        max_kv_len=5,
        seq_lens=extend,
        causal=True,
        **common,
    )
    for i in range(3):
        part = slice(5 + 64 * i, 5 + min(64 * i + 64, 130))
        one, one_lse = backend.forward_extend_chunked(
            q,
            k[part],
            v[part],
            0.07,
            0.0,
            cum_seq_lens_q=chunks.cum_extend_seq_lens,
            cum_seq_lens_kv=chunks.cu_chunked_seq_len[i],
            max_kv_len=64,
            seq_lens=chunks.chunked_seq_len[i],
            causal=False,
            **common,
        )
        gannet.merge_state(out, lse, one, one_lse)
    want, want_lse = ref.ragged(q, k, v, [0, 5, 8], [0, 5, 138], 0.07, True)
    assert_close(out, want, F32_TOLERANCE)
    assert_close(lse, want_lse, F32_TOLERANCE)
    assert counter.count == 1
    with pytest.raises(KeyError, match="extend_prefix_lens"):
        step(backend, [5], "extend", num_extends=1)


def test_sparse_decode_and_prefill():
    backend, pool, counter = tokenspeed.DSABackend(config()), Pool(torch.bfloat16), Counter()
    backend.register_step_counter(counter)
    step(backend, [70, 130])
    q = torch.randn(2, HEADS, 576).bfloat16()
    slots = torch.randint(0, PAGES * PAGE, (2, TOPK), dtype=torch.int32)
    slots[1, 5:] = -1
    lens = torch.tensor([TOPK, 5], dtype=torch.int32)
    out = backend.forward_decode(
        q, None, None, LAYER, None, pool, 2, save_kv_cache=False, topk_indices=slots, topk_lens=lens
    )
    for row in range(2):
        listed = [s for s in slots[row].tolist() if s >= 0]
        want = ref.attend(q[row].float().numpy(), pool.values().reshape(-1, 576)[listed], 0.07)[0]
        assert_close(out[row].float().view(HEADS, 512), want, BF16_TOLERANCE)
    workspace = torch.randperm(PAGES * PAGE)
    where = torch.argsort(workspace)
    indices = torch.where(slots < 0, -1, where[slots.clamp(min=0).long()]).int()
    again = backend.forward_sparse_prefill(
        q=q, layer=LAYER, token_to_kv_pool=pool, workspace_indices=indices, topk_lens=lens, kv_workspace_slots=workspace
    )
    assert torch.equal(again, out) and counter.count == 1
    empty = backend.forward_sparse_prefill(
        q=q[:0], layer=LAYER, token_to_kv_pool=pool, workspace_indices=indices[:0], topk_lens=lens[:0]
    )
    assert empty.shape == (0, HEADS * 512) and counter.count == 2
    with pytest.raises(RuntimeError, match="top-k width"):
        backend.forward_decode(q, None, None, LAYER, None, pool, 2, save_kv_cache=False, topk_indices=slots[:, :4])


def test_what_is_refused():
    with pytest.raises(ValueError, match="page_size 32 or 64, got 48"):
        tokenspeed.MLABackend(config(page_size=48))
    with pytest.raises(ValueError, match="page_size 64, got 32"):
        tokenspeed.DSABackend(config(page_size=32))
    backend = tokenspeed.MLABackend(config())
    capped = types.SimpleNamespace(**(vars(LAYER) | dict(logit_cap=30.0)))
    with pytest.raises(NotImplementedError, match="logits_soft_cap"):
        backend.forward_decode(None, None, None, capped, None, None, 1)
    step(backend, [3], table=TABLE[:1])
    backend.init_forward_metadata(0, 0, None, None, Mode("idle"))
    with pytest.raises(RuntimeError, match="not initialized"):
        backend.forward_decode(torch.zeros(1, HEADS, 576), None, None, LAYER, None, None, 1, save_kv_cache=False)
    with pytest.raises(RuntimeError, match="the pool is torch.float32"):
        step(backend, [3], table=TABLE[:1])
        backend.forward_decode(
            torch.zeros(1, HEADS, 576), None, None, LAYER, None, Pool(torch.float32), 1, save_kv_cache=False
        )


def test_register_combines_with_the_engines_base_class(monkeypatch):
    """Modules of the engine's names stand in for it: its package needs a GPU."""
    import enum
    import sys

    registered = {}

    class AttentionBackend:
        def __init__(self, config):
            self.base_config = config

        def forward(self, *args):
            return "the engine's"

        def register_step_counter(self, counter):
            self.step_counter = counter

    def module(name, **members):
        made = types.ModuleType(name)
        made.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, made)

    for name in (
        "tokenspeed",
        "tokenspeed.runtime",
        "tokenspeed.runtime.configs",
        "tokenspeed.runtime.layers",
        "tokenspeed.runtime.layers.attention",
        "tokenspeed.runtime.layers.attention.backends",
    ):
        module(name)
    arch = enum.Enum("AttentionArch", "MLA DSA MHA")
    module("tokenspeed.runtime.configs.model_config", AttentionArch=arch)
    module("tokenspeed.runtime.layers.attention.backends.base", AttentionBackend=AttentionBackend)
    module(
        "tokenspeed.runtime.layers.attention.registry",
        register_backend=lambda name, archs, cls: registered.update({name: (archs, cls)}),
    )
    tokenspeed.register()
    assert set(registered) == {"gannet_mla", "gannet_dsa"} and registered["gannet_dsa"][0] == {arch.DSA}
    backend = registered["gannet_dsa"][1](config())
    assert isinstance(backend, AttentionBackend) and backend.forward() == "the engine's" and backend.index_topk == TOPK
