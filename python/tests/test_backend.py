"""Backends: steps of a small DSA layer, against the reference over the keys that it says it chose."""

import numpy as np
import pytest
import reference as ref
from conftest import BF16_TOLERANCE, F32_TOLERANCE, assert_close

import gannet

HEADS, TOPK, SCALE = 4, 8, 0.1


def make(kind, layers=1, pages=8, **options):
    if kind == "dsa":
        options = dict(q_lora_rank=64, index_num_heads=2, index_topk=TOPK) | options
    backend = gannet.Backend(
        kind, num_heads=HEADS, softmax_scale=SCALE, max_context_len=256, qk_nope_head_dim=128, v_head_dim=128, **options
    )
    latent = gannet.LatentPool(layers, pages, format="fp32")
    index = gannet.IndexKPool(list(range(layers)), pages, format="fp32") if kind == "dsa" else None
    backend.bind([latent.layer(i) for i in range(layers)], [index.layer(i) for i in range(layers)] if index else None)
    return backend, latent, index


def rows(rng, n):
    return tuple(rng.standard_normal((n, w)).astype(np.float32) for w in (512, 64, 128))


def keys_of(pool, slots):
    flat = pool.layer(0).pages.view(np.float32).reshape(-1, 576)
    return flat[slots]


def test_dsa_steps(rng):
    backend, latent, _ = make("dsa")
    assert backend.name == "dsa" and backend.capabilities["attend_sparse"]
    table = gannet.PageTable(2, 2)
    table.set_row(0, [3, 5])
    table.set_row(1, [2])
    # One request of 70 new tokens, then a step in which it decodes and another begins.
    backend.prepare([70], gannet.Pages(table, np.array([0], np.int32)), prefix_lens=[0], extend_lens=[70])
    assert backend.step["mode"] == "extend" and backend.step["num_rows"] == 70
    positions, write_slots, lens = (np.asarray(t) for t in backend.step_tensors)
    assert positions.tolist() == list(range(70)) and write_slots[63] == 3 * 64 + 63 and write_slots[64] == 5 * 64
    assert lens.tolist() == list(range(1, 71))
    backend.write(0, rows(rng, 70))
    backend.prepare([12, 71], gannet.Pages(table, np.array([1, 0], np.int32)), prefix_lens=[0], extend_lens=[12])
    q = rng.standard_normal((13, HEADS, 576)).astype(np.float32)
    iq, weights = rng.standard_normal((13, 2, 128)).astype(np.float32), rng.standard_normal((13, 2)).astype(np.float32)
    slots, counts = backend.select(0, iq, weights, kv=rows(rng, 13))
    out, lse = backend.attend(0, q, selection=(slots, counts), return_lse=True)
    assert counts.tolist() == [min(i, TOPK) for i in range(1, 13)] + [TOPK]
    assert set(slots[-1] // 64) <= {3, 5}
    for i in range(13):
        want, want_lse, _ = ref.attend(q[i], keys_of(latent, slots[i, : counts[i]]), SCALE)
        assert_close(out[i], want, F32_TOLERANCE)
        assert_close(lse[i], want_lse, F32_TOLERANCE)
    assert backend.implementations["sparse_attention"]
    backend.prepare([])
    with pytest.raises(gannet.InvalidArgumentError):
        backend.attend(0, q, selection=(slots, counts))


def test_a_prefix_in_chunks_is_one_pass(rng):
    wk, wv = (rng.standard_normal((512, HEADS, 128)).astype(np.float32) / 20 for _ in range(2))
    latent, rope, _ = rows(rng, 150)
    q = rng.standard_normal((150, HEADS, 192)).astype(np.float32)

    def expand(c):
        return np.einsum("nr,rhd->nhd", c, wk), np.einsum("nr,rhd->nhd", c, wv)

    k, v = expand(latent)
    table = np.array([[1, 2, 3]], np.int32)
    backend, _, _ = make("mla", prefix_chunk_capacity=64)
    backend.prepare([130], table, prefix_lens=[0], extend_lens=[130])
    backend.dense_prefill(0, q[:130], k[:130], rope[:130], v[:130], kv=(latent[:130], rope[:130]))
    backend.prepare([150], table, prefix_lens=[130], extend_lens=[20])
    assert backend.step["prefix_chunk_tokens"] == [64, 64, 2]
    out, lse = backend.dense_prefill(
        0, q[130:], k[130:], rope[130:], v[130:], kv=(latent[130:], rope[130:]), expand=expand, return_lse=True
    )
    full_k = np.concatenate([k, np.broadcast_to(rope[:, None], (150, HEADS, 64))], axis=2)
    want, want_lse = ref.ragged(q[130:], full_k, v, [0, 20], [0, 150], SCALE, True)
    assert_close(out, want, F32_TOLERANCE)
    assert_close(lse, want_lse, F32_TOLERANCE)


def test_a_captured_batch_is_the_eager_one(rng):
    table = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    kv, q = rows(rng, 3)[:2], rng.standard_normal((3, HEADS, 576)).astype(np.float32)
    eager, pool, _ = make("mla")
    pool.layer(0).pages.view(np.float32)[:] = rng.standard_normal((8, 64 * 576)).astype(np.float32)
    before = pool.layer(0).pages.copy()
    eager.prepare([5, 66, 9], table)
    want = eager.attend(0, q, selection="all", kv=kv)
    captured, latent, _ = make("mla")
    latent.layer(0).pages[:] = before
    captured.capture(4)
    pad = tuple(np.concatenate([x, np.full_like(x[:1], np.nan)]) for x in (*kv, q))
    captured.refresh(4, [5, 66, 9], table)
    out = captured.attend(0, pad[2], selection="all", kv=pad[:2])
    np.testing.assert_array_equal(out[:3], want)
    assert (out[3] == 0).all()


def test_a_target_and_its_draft_share_a_table(rng):
    pages = np.array([[1, 2], [3, 4]], np.int32)
    kv, q = rows(rng, 6)[:2], rng.standard_normal((6, HEADS, 576)).astype(np.float32)
    stored = rng.standard_normal((8, 64 * 576)).astype(np.float32)

    def filled():
        backend, pool, _ = make("mla")
        pool.layer(0).pages.view(np.float32)[:] = stored
        return backend

    eager, target, draft = filled(), filled(), filled()
    eager.prepare([70, 9], pages, q_len=3)
    want = eager.attend(0, q, selection="all", kv=kv)
    eager.prepare([70, 9], pages)
    newest = tuple(x[:2] for x in kv)
    want_draft = eager.attend(0, q[:2], selection="all", kv=newest)
    table = gannet.SharedPageTable(2, 128, num_pages=8, lookahead=1)
    assert (table.num_requests, table.max_seq_len, table.page_size, table.lookahead) == (2, 128, 64, 1)
    target.capture(2, q_len=3, table=table)
    draft.capture(2, q_len=3, table=table)
    draft.capture(2, table=table)
    assert table.refresh(1, [70, 9], pages) and not table.refresh(1, [], None) and table.generation == 1
    np.testing.assert_array_equal(np.asarray(table.pages)[:, :2], [[1, 2], [3, 0]])
    target.refresh_shared(table, 1, q_len=3)
    assert target.step["lens_known"] and target.step["seq_lens"] == [70, 9]
    np.testing.assert_array_equal(target.attend(0, q, selection="all", kv=kv), want)
    draft.refresh_shared(table, 1, q_len=3)
    draft.write(0, kv)
    draft.refresh_shared(table, 1, seq_lens=np.array([69, 8], np.int32), steps=1)
    np.testing.assert_array_equal(draft.attend(0, q[:2], selection="all", kv=newest), want_draft)
    # Lengths that were written in place, by a kernel of somebody's.
    np.asarray(table.seq_lens)[:] = [3, 0]
    table.mark(2)
    with pytest.raises(gannet.InvalidArgumentError, match="the step is stale"):
        target.attend(0, q, selection="all")
    target.refresh_shared(table, 2, q_len=3)
    assert target.step["seq_lens"] == [3, 0]
    del table  # the backends keep it
    assert target.step["num_rows"] == 6


def test_shared_tables_name_what_is_wrong():
    with pytest.raises(gannet.InvalidArgumentError, match="num_requests is 0; accepted: 1 and more"):
        gannet.SharedPageTable(0, 128)
    with pytest.raises(gannet.InvalidArgumentError, match='device is "tpu"'):
        gannet.SharedPageTable(1, 128, device="tpu")
    table = gannet.SharedPageTable(1, 128)
    with pytest.raises(gannet.InvalidArgumentError, match="reaches 64"):
        table.refresh(1, [65], np.array([[1]], np.int32))
    with pytest.raises(gannet.InvalidArgumentError, match="generation is 0; accepted: more than that of the table, 0"):
        table.mark(0)
    backend, _, _ = make("mla")
    with pytest.raises(gannet.InvalidArgumentError, match="was never captured"):
        backend.refresh_shared(table, 0)
    with pytest.raises(TypeError):
        backend.refresh_shared(None, 0)
    with pytest.raises(TypeError):
        backend.capture(1, table=3)


def test_streams_say_whether_kernels_overlap():
    stream = gannet.Stream(64, overlap=False)
    assert stream.stream == 64 and not stream.overlap and gannet.Stream().stream is None and gannet.Stream().overlap
    with pytest.raises(TypeError, match="stream is a str; accepted: None, an address"):
        gannet.Stream("fast")
    with pytest.raises(TypeError, match="already"):
        gannet.Stream(stream)
    backend, _, _ = make("mla")
    for s in (gannet.Stream(overlap=False), gannet.Stream(None), None):
        backend.set_stream(s)  # means nothing on the CPU, and is taken
    x = np.ones((1, 4), np.float32)
    np.testing.assert_array_equal(gannet.hadamard(x, stream=gannet.Stream(overlap=False)), [[2, 0, 0, 0]])


def test_a_draft_goes_on_from_what_was_accepted(rng):
    backend, _, _ = make("mla")
    backend.prepare([104, 100], np.array([[1, 2], [3, 4]], np.int32), q_len=4)
    assert backend.narrow([2, 9]) == ([1, 7], [102, 100])
    backend.advance(seq_lens=[102, 100])
    assert backend.step["seq_lens"] == [103, 101] and backend.step["num_rows"] == 2


def test_layers_are_recorded_once(rng):
    backend, _, _ = make("mla", layers=2)
    seen = []
    backend.set_layer_hooks(
        record=lambda layer, what: seen.append((layer, what)), wait=lambda layer: seen.append(layer)
    )
    backend.prepare([3], np.array([[1]], np.int32), prefix_lens=[0], extend_lens=[3])
    backend.write(0, rows(rng, 3)[:2])
    backend.prepare([])
    assert [s for s in seen if isinstance(s, tuple)] == [(0, "written"), (1, "abandoned")] and 0 in seen

    def refuse(layer):
        raise KeyError("the rows of this layer will not come")

    backend.set_layer_hooks(wait=refuse)
    backend.prepare([3], np.array([[1]], np.int32), prefix_lens=[0], extend_lens=[3])
    with pytest.raises(KeyError, match="will not come"):
        backend.write(0, rows(rng, 3)[:2])


@pytest.mark.parametrize(
    "options, text",
    [
        (dict(arch="mha"), 'arch is "mha"; accepted: "mla", "dsa"'),
        (dict(page_size=48), "page_size is 48"),
        (dict(arch="dsa"), "dsa"),
        (dict(device="tpu"), 'device is "tpu"'),
    ],
)
def test_configs_that_are_refused(options, text):
    with pytest.raises(gannet.InvalidArgumentError, match=text):
        gannet.Backend(options.pop("arch", "mla"), num_heads=4, softmax_scale=0.1, max_context_len=64, **options)


def test_nothing_is_assumed(rng):
    backend, _, _ = make("mla")
    backend.prepare([3], np.array([[1]], np.int32))
    with pytest.raises(gannet.InvalidArgumentError):
        backend.attend(0, rng.standard_normal((1, HEADS, 576)).astype(np.float32))
