"""FlashMLA's interface, against the float64 reference: cases of its own tests (sizes reduced), on the CPU or, where there is
one, a GPU."""

import inspect

import numpy as np
import pytest
import reference as ref
from conftest import E4M3_TOLERANCE, assert_close

import gannet

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from gannet.compat import flash_mla  # noqa: E402

DEVICE = "cuda" if gannet.cuda_device_count() else "cpu"
# FlashMLA's own tolerances (tests/test_flash_mla_dense_decoding.py and lib.py of commit 9241ae3).
OUT = dict(atol=8e-4, rtol=2.01 / 128)
LSE = dict(atol=1e-6, rtol=8.01 / 65536)


def f64(t):
    return t.detach().double().cpu().numpy()


def compare(got, want, atol, rtol):
    torch.testing.assert_close(got.double().cpu(), torch.as_tensor(np.asarray(want)), atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    "b, s_q, h_q, h_kv", [(1, 1, 16, 1), (2, 2, 9, 3), (3, 4, 128, 1), (2, 1, 126, 2), (2, 1, 1, 1)]
)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("page", [64, 16])
def test_dense_decoding(b, s_q, h_q, h_kv, causal, page):
    torch.manual_seed(0)
    lens = torch.randint(0, 140, (b,), dtype=torch.int32)
    lens[0] = max(int(lens[0]), 1)
    columns = 256 // page
    table = torch.randperm(b * columns, dtype=torch.int32).view(b, columns)
    cache = (torch.randn(b * columns, page, h_kv, 576) / 10).clamp(-1, 1).bfloat16()
    q = (torch.randn(b, s_q, h_q, 576) / 10).clamp(-1, 1).bfloat16()
    for i in range(b):  # as its tests do: NaN in what is not used, table cells beyond it far outside
        used = -(-int(lens[i]) // page)
        cache[table[i, used:].long()] = float("nan")
        if lens[i] % page:
            cache[table[i, used - 1].long(), lens[i] % page :] = float("nan")
        table[i, used:] = 2147480000
    want, want_lse = np.zeros((b, s_q, h_q, 512)), np.zeros((b, h_q, s_q))
    flat = f64(cache)
    for i in range(b):
        for j in range(s_q):
            n = ref.bound("causal_full" if causal else "uniform_block", int(lens[i]), s_q, j)
            for g in range(h_kv):
                heads = slice(g * h_q // h_kv, (g + 1) * h_q // h_kv)
                keys = ref.row_keys(flat[:, :, g], table[i].tolist(), n, page)
                want[i, j, heads], lse, _ = ref.attend(f64(q[i, j, heads]), keys, 576**-0.5)
                want_lse[i, heads, j] = np.where(lse == -np.inf, np.inf, lse)
    meta, splits = flash_mla.get_mla_metadata()
    args = [t.to(DEVICE) for t in (q, cache, table, lens)]
    out, lse = flash_mla.flash_mla_with_kvcache(*args, 512, meta, splits, causal=causal)
    assert out.shape == (b, s_q, h_q, 512) and out.dtype == torch.bfloat16 and lse.shape == (b, h_q, s_q)
    compare(out, want, **OUT)
    compare(lse, want_lse, **LSE)
    # The older metadata: two tensors.
    old = flash_mla.get_mla_metadata(args[3], s_q * h_q // h_kv, h_kv)
    assert old[0].dtype == torch.int32 and old[1].shape == (b + 1,)
    again, _ = flash_mla.flash_mla_with_kvcache(*args, 512, *old, causal=causal)
    assert torch.equal(again, out)


def test_metadata_holds_calls_to_the_first_ones_shapes():
    meta, _ = flash_mla.get_mla_metadata()
    q, cache = (
        torch.zeros(1, 1, 4, 576, dtype=torch.bfloat16, device=DEVICE),
        torch.zeros(2, 64, 1, 576, dtype=torch.bfloat16, device=DEVICE),
    )
    table, lens = torch.zeros(1, 2, dtype=torch.int32, device=DEVICE), torch.ones(1, dtype=torch.int32, device=DEVICE)
    flash_mla.flash_mla_with_kvcache(q, cache, table, lens, 512, meta)
    assert meta.have_initialized and meta.config.h_q == 4 and meta.num_splits.shape == (2,)
    with pytest.raises(AssertionError, match="h_q"):
        flash_mla.flash_mla_with_kvcache(q[:, :, :2], cache, table, lens, 512, meta)
    with pytest.raises(AssertionError, match="num_splits"):
        flash_mla.flash_mla_with_kvcache(q, cache, table, lens, 512, meta, num_splits=1)


def sparse_problem(b, s_q, h_q, topk, page, has_length):
    torch.manual_seed(1)
    pages = 8
    values = (torch.randn(pages * page, 576) / 10).clamp(-1, 1)
    packed, stands_for = ref.pack656(values.numpy())
    indices = torch.stack([torch.randperm(pages * page)[:topk] for _ in range(b * s_q)]).view(b, s_q, topk).int()
    indices[..., ::7] = -1
    indices[0, 0] = -1
    length = torch.randint(0, topk + 1, (b,), dtype=torch.int32) if has_length else None
    unused = torch.ones(pages * page, dtype=torch.bool)
    for i in range(b):
        n = topk if length is None else int(length[i])
        unused[indices[i, :, :n][indices[i, :, :n] >= 0].long()] = False
    packed[unused.numpy()] = 0xFF  # NaN, scales and rope included
    cache = torch.from_numpy(packed).view(pages, page, 1, 656).view(torch.float8_e4m3fn)
    q = torch.randn(b, s_q, h_q, 576).clamp(-1, 1).bfloat16()
    return q, cache, indices, length, stands_for


@pytest.mark.parametrize("b, s_q, h_q, topk, page", [(2, 1, 64, 64, 64), (3, 3, 16, 65, 61), (1, 2, 128, 128, 2)])
@pytest.mark.parametrize("has_length", [False, True])
@pytest.mark.parametrize("has_sink", [False, True])
def test_sparse_decoding(b, s_q, h_q, topk, page, has_length, has_sink):
    if topk > 8 * page:
        topk = 8 * page
    q, cache, indices, length, stands_for = sparse_problem(b, s_q, h_q, topk, page, has_length)
    sink = torch.randn(h_q) if has_sink else None
    if has_sink:
        sink[0], sink[1] = float("inf"), float("-inf")
    scale = 576**-0.55
    meta, splits = flash_mla.get_mla_metadata()
    on = lambda t: None if t is None else t.to(DEVICE)  # noqa: E731
    out, lse = flash_mla.flash_mla_with_kvcache(
        on(q),
        on(cache),
        None,
        None,
        512,
        meta,
        splits,
        scale,
        False,
        True,
        on(indices),
        on(sink),
        None,
        None,
        on(length),
        None,
    )
    want, want_lse = np.zeros((b, s_q, h_q, 512)), np.zeros((b, h_q, s_q))
    for i in range(b):
        for j in range(s_q):
            n = topk if length is None else int(length[i])
            listed = [k for k in indices[i, j, :n].tolist() if k >= 0]
            want[i, j], one, _ = ref.attend(
                f64(q[i, j]), stands_for[listed], scale, None if sink is None else sink.numpy()
            )
            want_lse[i, :, j] = np.where(one == -np.inf, np.inf, one)
    compare(out, want, atol=1e-3, rtol=2.01 / 128)
    compare(lse, want_lse, **LSE)


@pytest.mark.parametrize("s_q, s_kv, h_q, topk", [(5, 100, 64, 128), (3, 37, 128, 16)])
@pytest.mark.parametrize("extras", [False, True])
def test_sparse_prefill(s_q, s_kv, h_q, topk, extras):
    torch.manual_seed(2)
    q = (torch.randn(s_q, h_q, 600) / 10).bfloat16()[:, :, :576]
    kv = (torch.randn(s_kv, 1, 600) / 10).bfloat16()[:, :, :576]
    indices = torch.randint(0, s_kv, (s_q, 1, topk), dtype=torch.int32)
    indices[:, :, ::5] = torch.tensor([-1, -(2**31), s_kv, 114514, 2**31 - 1] * topk, dtype=torch.int32)[
        : indices[0, 0, ::5].numel()
    ]
    indices[1] = -1
    sink = torch.randn(h_q) if extras else None
    length = torch.randint(0, topk + 1, (s_q,), dtype=torch.int32) if extras else None
    on = lambda t: None if t is None else t.to(DEVICE)  # noqa: E731
    out, most, lse = flash_mla.flash_mla_sparse_fwd(
        on(q), on(kv), on(indices), sm_scale=0.5, attn_sink=on(sink), topk_length=on(length)
    )
    for i in range(s_q):
        n = topk if length is None else int(length[i])
        listed = [k for k in indices[i, 0, :n].tolist() if 0 <= k < s_kv]
        want, want_lse, want_most = ref.attend(
            f64(q[i]), f64(kv[listed, 0]).reshape(-1, 576), 0.5, None if sink is None else sink.numpy()
        )
        compare(out[i], want, atol=8e-4, rtol=3.01 / 128)
        compare(lse[i], np.where(want_lse == -np.inf, np.inf, want_lse), atol=1e-6, rtol=2.01 / 65536)
        compare(most[i], want_most, atol=1e-6, rtol=2.01 / 65536)


@pytest.mark.parametrize("where", ["host", DEVICE, None])
def test_dense_decoding_in_fp8(where):
    torch.manual_seed(3)
    q, cache = (
        (torch.randn(2, 2, 16, 576)).to(torch.float8_e4m3fn),
        (torch.randn(4, 64, 1, 576)).to(torch.float8_e4m3fn),
    )
    table, lens = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32), torch.tensor([100, 7], dtype=torch.int32)
    dq, dk = (1.0, 1.0) if where is None else (0.13, 0.07)
    descale = (
        (None, None)
        if where is None
        else tuple(torch.full((1,), x, device="cpu" if where == "host" else where) for x in (dq, dk))
    )
    args = [t.to(DEVICE) for t in (q, cache, table, lens)]
    out, lse = flash_mla.flash_mla_with_kvcache_fp8(
        *args, 512, *flash_mla.get_mla_metadata_dense_fp8(args[3], 32, 1), 0.04, True, *descale
    )
    assert out.dtype == torch.bfloat16 and lse.shape == (2, 16, 2)
    for i in range(2):
        for j in range(2):
            n = ref.bound("causal_full", int(lens[i]), 2, j)
            keys = ref.row_keys(f64(cache[:, :, 0].float()), table[i].tolist(), n, 64) * dk
            want, want_lse, _ = ref.attend(f64(q[i, j].float()) * dq, keys, 0.04)
            assert_close(f64(out[i, j]), want, E4M3_TOLERANCE)
            compare(lse[i, :, j], want_lse, atol=2e-2, rtol=2.0**-7)


def test_what_is_lacking_says_so():
    meta, _ = flash_mla.get_mla_metadata()
    half = torch.zeros(1, 1, 64, 576, dtype=torch.float16)
    bf16 = torch.zeros(1, 1, 64, 576, dtype=torch.bfloat16)
    cache, table, lens = (
        torch.zeros(1, 64, 1, 576, dtype=torch.bfloat16),
        torch.zeros(1, 1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
    )
    fp8, indices = torch.zeros(1, 64, 1, 656, dtype=torch.uint8), torch.zeros(1, 1, 64, dtype=torch.int32)
    for call, text in (
        (
            lambda: flash_mla.flash_mla_with_kvcache(
                half, cache.half(), table, lens, 512, flash_mla.FlashMLASchedMeta()
            ),
            "fp16",
        ),
        (
            lambda: flash_mla.flash_mla_with_kvcache(
                bf16[..., :512], cache[..., :512], table, lens, 512, flash_mla.FlashMLASchedMeta()
            ),
            "MODEL1",
        ),
        (
            lambda: flash_mla.flash_mla_with_kvcache(
                bf16,
                fp8,
                None,
                None,
                512,
                flash_mla.FlashMLASchedMeta(),
                is_fp8_kvcache=True,
                indices=indices,
                extra_k_cache=fp8,
                extra_indices_in_kvcache=indices,
            ),
            "extra cache",
        ),
        (lambda: flash_mla.flash_attn_varlen_func(), "flash_attn_varlen_func"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            call()
    with pytest.raises(RuntimeError, match="head_dim_v"):
        flash_mla.flash_mla_with_kvcache(bf16, cache, table, lens, 256, flash_mla.FlashMLASchedMeta())
    with pytest.raises(RuntimeError, match="seqlens_k must have dtype int32"):
        flash_mla.flash_mla_with_kvcache(bf16, cache, table, lens.long(), 512, flash_mla.FlashMLASchedMeta())
    with pytest.raises(AssertionError, match="causal must be False"):
        flash_mla.flash_mla_with_kvcache(
            bf16, fp8, None, None, 512, flash_mla.FlashMLASchedMeta(), causal=True, is_fp8_kvcache=True, indices=indices
        )


def test_names_orders_and_defaults_are_the_peers():
    def of(f):
        return [(p.name, p.default) for p in inspect.signature(f).parameters.values()]

    nothing = inspect.Parameter.empty
    assert of(flash_mla.flash_mla_with_kvcache) == [
        (n, nothing) for n in ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata")
    ] + [
        ("num_splits", None),
        ("softmax_scale", None),
        ("causal", False),
        ("is_fp8_kvcache", False),
        ("indices", None),
        ("attn_sink", None),
        ("extra_k_cache", None),
        ("extra_indices_in_kvcache", None),
        ("topk_length", None),
        ("extra_topk_length", None),
    ]
    assert of(flash_mla.flash_mla_sparse_fwd) == [(n, nothing) for n in ("q", "kv", "indices", "sm_scale")] + [
        ("d_v", 512),
        ("attn_sink", None),
        ("topk_length", None),
    ]
