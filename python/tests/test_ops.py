"""Every operation, from NumPy (with ml_dtypes), against NumPy in float64."""

import numpy as np
import pytest
import reference as ref
from conftest import BF16_TOLERANCE, F32_TOLERANCE, assert_close

import gannet

PAGE = 16


def pages_for_test(rng, requests, columns, page=PAGE, width=576, dtype=np.float32):
    """Poisoned pages beside the used ones: page 0 and everything beyond a length is NaN."""
    num_pages = requests * columns + 1
    table = (rng.permutation(num_pages - 1) + 1).reshape(requests, columns).astype(np.int32)
    cache = (rng.standard_normal((num_pages, page, width)) / 4).astype(dtype)
    return cache, table


def poison(cache, table, lens, page=PAGE):
    seen = np.zeros(cache.shape[:2], bool)
    for row, length in zip(table, lens):
        for t in range(length):
            seen[row[t // page], t % page] = True
    cache[~seen] = np.nan


@pytest.mark.op("mla_decode")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bound", ["causal_full", "causal_from_first", "uniform_block"])
def test_mla_decode(rng, impl, dtype, bound):
    dtype = np.float32 if dtype == "float32" else ref.BF16
    lens, q_len, heads = np.array([37, 0, 61], np.int32), 2, 16
    cache, table = pages_for_test(rng, 3, 4, dtype=dtype)
    poison(cache, table, lens + (1 if bound == "causal_from_first" else 0))
    q = rng.standard_normal((6, heads, 576)).astype(dtype)
    sink = rng.standard_normal(heads).astype(np.float32)
    most = np.empty((6, heads), np.float32)
    out, lse = gannet.mla_decode(
        q,
        gannet.LatentCache(cache),
        table,
        lens,
        softmax_scale=0.1,
        q_len=q_len,
        bound=bound,
        attn_sink=sink,
        max_logits=most,
        return_lse=True,
        impl=impl,
    )
    want = [
        ref.attend(q[i], ref.row_keys(cache, table[i // 2], ref.bound(bound, lens[i // 2], 2, i % 2), PAGE), 0.1, sink)
        for i in range(6)
    ]
    tolerance = F32_TOLERANCE if dtype == np.float32 else BF16_TOLERANCE
    assert out.dtype == q.dtype
    assert_close(out, [w[0] for w in want], tolerance)
    assert_close(lse, [w[1] for w in want], F32_TOLERANCE)
    assert_close(most, [w[2] for w in want], F32_TOLERANCE)


@pytest.mark.op("mla_decode")
def test_mla_decode_in_every_form_of_table(rng, impl):
    lens = np.array([20, 33], np.int32)
    cache, table = pages_for_test(rng, 2, 3)
    poison(cache, table, lens)
    q = rng.standard_normal((2, 4, 576)).astype(np.float32)
    view = gannet.LatentCache(cache)
    plain = gannet.mla_decode(q, view, table, lens, softmax_scale=0.1, impl=impl)
    csr = (np.array([0, 2, 5], np.int32), np.concatenate([table[0, :2], table[1]]))
    own = gannet.PageTable(2, 3)
    own.set_row(0, table[0, :2].tolist())
    own.set_row(1, table[1])
    swapped = gannet.Pages(np.ascontiguousarray(table[::-1]), np.array([1, 0], np.int32))
    for pages in (csr, gannet.Pages.csr(*csr), own, gannet.Pages(own), swapped):
        np.testing.assert_array_equal(gannet.mla_decode(q, view, pages, lens, softmax_scale=0.1, impl=impl), plain)


@pytest.mark.op("mla_decode")
@pytest.mark.parametrize("form", ["[pages, page, 656]", "[pages, page, 1, 656]", "[pages, bytes]", "pages apart"])
def test_packed_rows(rng, impl, form):
    lens = np.array([50], np.int32)
    values = rng.standard_normal((4 * PAGE, 576)) / 4
    packed, stands_for = ref.pack656(values)
    table = np.array([[3, 1, 2, 0]], np.int32)
    q = rng.standard_normal((1, 8, 576)).astype(ref.BF16)
    if form == "[pages, page, 656]":
        cache = gannet.LatentCache(packed.reshape(4, PAGE, 656))
    elif form == "[pages, page, 1, 656]":
        cache = gannet.LatentCache(packed.reshape(4, PAGE, 1, 656).view(ref.E4M3))
    elif form == "[pages, bytes]":
        cache = gannet.LatentCache(packed.reshape(4, -1), format="packed656", page_size=PAGE)
    else:
        apart = np.full((4, PAGE + 3, 656), 0xFF, np.uint8)
        apart[:, :PAGE] = packed.reshape(4, PAGE, 656)
        cache = gannet.LatentCache(apart[:, :PAGE])
        assert cache.page_stride_bytes == (PAGE + 3) * 656
    assert cache.format == "packed656"
    out = gannet.mla_decode(q, cache, table, lens, softmax_scale=0.1, impl=impl)
    want = ref.attend(q[0], ref.row_keys(stands_for.reshape(4, PAGE, 576), table[0], 50, PAGE), 0.1)[0]
    assert_close(out[0], want, BF16_TOLERANCE)


@pytest.mark.op("latent_write")
@pytest.mark.parametrize("format", ["fp32", "bf16", "e4m3", "packed656", "e4m3_per_token"])
def test_rows_come_back(rng, impl, format):
    scale = 0.5 if format == "e4m3" else 0.0
    pool = gannet.LatentPool(2, 4, format=format, page_size=PAGE, scale=scale)
    cache = pool.layer(1)
    assert cache.format == format and cache.num_slots == 4 * PAGE
    latent, rope = rng.standard_normal((9, 512)).astype(np.float32), rng.standard_normal((9, 64)).astype(np.float32)
    slots = np.array([17, 40, -1, 20, 63, 33, 21, 22, 16], np.int64)
    gannet.latent_write(latent, rope, slots, cache, impl=impl)
    got_latent, got_rope = gannet.latent_gather(slots, cache, dtype="float32", impl=impl)
    kept = slots >= 0
    assert (got_latent[~kept] == 0).all() and (got_rope[~kept] == 0).all()
    step = {"fp32": 0, "bf16": 2.0**-8, "e4m3": 2.0**-4, "packed656": 2.0**-4, "e4m3_per_token": 2.0**-4}[format]
    small = 1e-30 if step < 2.0**-5 else 0.02  # e4m3: below the smallest normal number the step is absolute
    assert (np.abs(got_latent[kept] - latent[kept]) <= step * np.abs(latent[kept]) + small).all()
    assert (np.abs(got_rope[kept] - rope[kept]) <= step * np.abs(rope[kept]) + small).all()


@pytest.mark.op("index_k_write")
def test_index_keys_are_written_as_others_write_them(rng, impl):
    keys = rng.standard_normal((64, 128)).astype(np.float32)
    pages = np.zeros((2, 64 * 132), np.uint8)
    cache = gannet.IndexCache(pages, page_size=64)
    gannet.index_k_write(keys, np.arange(64, 128, dtype=np.int32), cache, impl=impl)
    want, stands_for = ref.pack_index(keys)
    np.testing.assert_array_equal(pages[1], want[0])
    assert (pages[0] == 0).all()
    got = gannet.index_k_gather(np.arange(64, 128, dtype=np.int32), cache, dtype="float32", impl=impl)
    assert_close(got, stands_for, F32_TOLERANCE)


@pytest.mark.op("index_logits")
@pytest.mark.parametrize("q_dtype", ["float32", "bfloat16", "e4m3"])
def test_index_logits_and_topk(rng, impl, q_dtype):
    dtype = {"float32": np.float32, "bfloat16": ref.BF16, "e4m3": ref.E4M3}[q_dtype]
    packed, stands_for = ref.pack_index(rng.standard_normal((4 * 64, 128)))
    table, lens = np.array([[3, 1], [2, 0]], np.int32), np.array([100, 7], np.int32)
    q = rng.standard_normal((2, 8, 128)).astype(np.float32).astype(dtype)
    weights = rng.standard_normal((2, 8)).astype(np.float32)
    cache = gannet.IndexCache(packed.reshape(4, 64, 132))
    logits = gannet.index_logits(q, weights, cache, table, lens, logits=np.full((2, 128), 777, np.float32), impl=impl)
    scores = [
        ref.index_scores(
            q[i].astype(np.float64), weights[i], ref.row_keys(stands_for.reshape(4, 64, 128), table[i], lens[i], 64)
        )
        for i in range(2)
    ]
    for i in range(2):
        assert_close(logits[i, : lens[i]], scores[i], BF16_TOLERANCE)
        assert (logits[i, lens[i] :] == 777).all()
    k = 16
    positions, counts = gannet.topk(logits, lens, k)
    slots, lens_out, positions_too = gannet.index_select(
        q, weights, cache, table, lens, k, max_seq_len=128, return_positions=True
    )
    assert counts.tolist() == lens_out.tolist() == [16, 7]
    for i in range(2):
        n = counts[i]
        assert positions[i, :n].tolist() == ref.best(logits[i, : lens[i]].tolist(), k)
        assert (positions[i, n:] == -1).all() and (slots[i, n:] == -1).all()
        p = positions_too[i, :n]
        np.testing.assert_array_equal(slots[i, :n], table[i, p // 64] * 64 + p % 64)


@pytest.mark.op("sparse_attention")
def test_sparse_attention(rng, impl):
    cache, _ = pages_for_test(rng, 1, 4, dtype=ref.BF16)
    flat = cache.reshape(-1, 576)
    slots = np.array([[3, 17, -1, 3, 70], [-1, -1, -1, -1, -1], [5, 6, 2**31 - 1, 9, 10]], np.int32)
    lens = np.array([5, 5, 4], np.int32)
    q = rng.standard_normal((3, 16, 576)).astype(ref.BF16)
    out, lse = gannet.sparse_attention(
        q, gannet.LatentCache(cache), slots, lens, softmax_scale=0.1, return_lse=True, impl=impl
    )
    for i, listed in enumerate([[3, 17, 3, 70], [], [5, 6, 9]]):
        want, want_lse, _ = ref.attend(q[i], flat[listed].astype(np.float64), 0.1)
        assert_close(out[i], want, BF16_TOLERANCE)
        assert_close(lse[i], want_lse, F32_TOLERANCE)


@pytest.mark.op("ragged_prefill")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shared_rope", [True, False])
def test_ragged_prefill(rng, impl, causal, shared_rope):
    cu_q, cu_k = np.array([0, 5, 5, 12], np.int32), np.array([0, 5, 9, 12], np.int32)
    q, k = (rng.standard_normal((12, 4, 192)).astype(np.float32) for _ in range(2))
    v = rng.standard_normal((12, 4, 128)).astype(np.float32)
    k[:, :, 128:] = k[:, :1, 128:]
    parts = dict(k_rope=np.ascontiguousarray(k[:, 0, 128:])) if shared_rope else {}
    out, lse = gannet.ragged_prefill(
        q,
        np.ascontiguousarray(k[:, :, :128]) if shared_rope else k,
        v,
        cu_q,
        cu_k,
        softmax_scale=0.1,
        causal=causal,
        return_lse=True,
        impl=impl,
        **parts,
    )
    want, want_lse = ref.ragged(q, k, v, cu_q, cu_k, 0.1, causal)
    assert_close(out, want, F32_TOLERANCE)
    assert_close(lse, want_lse, F32_TOLERANCE)
    assert (out[5:9] == 0).all() == causal  # 7 queries over 3 keys: the first 4 see none


@pytest.mark.op("merge_state")
@pytest.mark.parametrize("base", ["e", "2"])
def test_merge_state(rng, impl, base):
    a, b = rng.standard_normal((2, 3, 4, 64)).astype(np.float32)
    la, lb = rng.standard_normal((2, 3, 4)).astype(np.float32)
    lb[1] = -np.inf
    b[1] = np.nan  # an empty side is never read
    power = np.exp if base == "e" else np.exp2
    wa, wb = power(la.astype(np.float64)), power(lb.astype(np.float64))
    want = (a * wa[..., None] + np.nan_to_num(b) * wb[..., None]) / (wa + wb)[..., None]
    want_lse = (np.log if base == "e" else np.log2)(wa + wb)
    out, lse = gannet.merge_state(a.copy(), la.copy(), b, lb, base=base, impl=impl)
    assert_close(out, want, F32_TOLERANCE)
    assert_close(lse, want_lse, F32_TOLERANCE)
    np.testing.assert_array_equal(out[1], a[1])


@pytest.mark.op("rope")
@pytest.mark.parametrize("pairing", ["interleaved", "half_split"])
def test_rope(rng, impl, pairing):
    x = rng.standard_normal((3, 2, 96)).astype(np.float32)
    angles = rng.standard_normal((10, 32))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    positions = np.array([9, 0, 4], np.int32)
    first, second = (slice(32, 96, 2), slice(33, 96, 2)) if pairing == "interleaved" else (slice(32, 64), slice(64, 96))
    want = x.astype(np.float64)
    c, s = (f(angles[positions])[:, None] for f in (np.cos, np.sin))
    a, b = x[..., first].astype(np.float64), x[..., second].astype(np.float64)
    want[..., first], want[..., second] = a * c - b * s, b * c + a * s
    assert gannet.rope(x, positions, table, offset=32, pairing=pairing, impl=impl) is x
    assert_close(x, want, F32_TOLERANCE)


def test_hadamard_is_its_own_inverse(rng):
    x = rng.standard_normal((4, 128)).astype(np.float32)
    once = gannet.hadamard(x, out=np.empty_like(x))
    assert_close(once[:, 0], x.sum(axis=1) * 128**-0.5, F32_TOLERANCE)
    assert_close(gannet.hadamard(once), x, F32_TOLERANCE)


def test_plan_runs_other_data_and_refuses_other_shapes(rng):
    lens = np.array([20, 33], np.int32)
    cache, table = pages_for_test(rng, 2, 3)
    view = gannet.LatentCache(cache)
    q = rng.standard_normal((2, 4, 576)).astype(np.float32)
    plan = gannet.plan(gannet.mla_decode, q, view, table, lens, softmax_scale=0.1)
    other = q * 2
    workspace = np.empty(plan.workspace_bytes, np.uint8)
    np.testing.assert_array_equal(
        plan.run(other, view, table, lens, softmax_scale=0.1, workspace=workspace),
        gannet.mla_decode(other, view, table, lens, softmax_scale=0.1, impl=plan.impl),
    )
    with pytest.raises(gannet.InvalidArgumentError, match="planned"):
        plan.run(q[:1], view, table[:1], lens[:1], softmax_scale=0.1)
    if plan.workspace_bytes > 0:
        with pytest.raises(gannet.InvalidArgumentError, match="workspace has 1 bytes"):
            plan.run(q, view, table, lens, softmax_scale=0.1, workspace=np.empty(1, np.uint8))


def test_threads_do_not_change_a_bit(rng):
    lens = np.array([60, 47], np.int32)
    cache, table = pages_for_test(rng, 2, 4, dtype=ref.BF16)
    q = rng.standard_normal((2, 16, 576)).astype(ref.BF16)
    runs = [
        gannet.mla_decode(q, gannet.LatentCache(cache), table, lens, softmax_scale=0.1, context=gannet.Context(n))
        for n in (1, 2, 3)
    ]
    for other in runs[1:]:
        np.testing.assert_array_equal(runs[0].view(np.uint16), other.view(np.uint16))


class Speaks:
    """A tensor of a framework that nobody knows, which speaks DLPack and nothing else; old: before version 1.0 of it."""

    def __init__(self, array, old=False):
        self._array, self._old, self.shape = array, old, array.shape

    def __dlpack__(self, **options):
        if self._old and options:
            raise TypeError("unexpected keyword argument")
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("old", [False, True])
def test_whatever_speaks_dlpack(rng, old):
    lens = np.array([20, 33], np.int32)
    cache, table = pages_for_test(rng, 2, 3)
    q = rng.standard_normal((2, 4, 576)).astype(np.float32)
    want = gannet.mla_decode(q, gannet.LatentCache(cache), table, lens, softmax_scale=0.1)
    wide = np.zeros((2, 8, 512), np.float32)
    out = Speaks(wide[:, ::2], old)
    got = gannet.mla_decode(
        Speaks(q, old),
        gannet.LatentCache(Speaks(cache, old)),
        Speaks(table, old),
        Speaks(lens, old),
        softmax_scale=0.1,
        out=out,
    )
    assert got is out
    np.testing.assert_array_equal(wide[:, ::2], want)
    assert (wide[:, 1::2] == 0).all()
    with pytest.raises(TypeError, match="outputs are not given and Speaks is no tensor"):
        gannet.mla_decode(Speaks(q, old), gannet.LatentCache(cache), table, lens, softmax_scale=0.1)
    if not old:
        wide.flags.writeable = False
        with pytest.raises(gannet.InvalidArgumentError, match="out is read-only"):
            gannet.mla_decode(q, gannet.LatentCache(cache), table, lens, softmax_scale=0.1, out=Speaks(wide[:, ::2]))
