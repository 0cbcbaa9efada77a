"""DeepGEMM's MQA logits, against the float64 reference over the same fp8 numbers, as its own tests compare."""

import numpy as np
import pytest
import reference as ref

import gannet

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from gannet.compat import deep_gemm  # noqa: E402

DEVICE = "cuda" if gannet.cuda_device_count() else "cpu"


def calc_diff(x, y):
    """1 - cosine, as its tests measure."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return 1 - 2 * (x * y).sum() / (x * x + y * y).sum()


def f64(t):
    return t.detach().float().cpu().double().numpy()


def problem(s, s_kv, h, d):
    torch.manual_seed(0)
    q = torch.randn(s, h, d).to(torch.float8_e4m3fn)
    kv = torch.randn(s_kv, d)
    scale = kv.abs().amax(dim=1).clamp(1e-4) / 448
    keys = (kv / scale[:, None]).to(torch.float8_e4m3fn)
    return q, keys, scale, torch.randn(s, h)


@pytest.mark.parametrize("h, d", [(32, 128), (64, 64), (64, 32), (8, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("s_kv", [150, 128])
def test_mqa_logits(h, d, dtype, compressed, s_kv):
    s = 13
    q, keys, scale, weights = problem(s, s_kv, h, d)
    ks = torch.randint(0, 40, (s,), dtype=torch.int32)
    ke = ks + torch.randint(0, s_kv - 40, (s,), dtype=torch.int32)
    most = int((ke - ks).max())
    on = [t.to(DEVICE) for t in (q, keys, scale, weights, ks, ke)]
    logits = deep_gemm.fp8_fp4_mqa_logits(
        (on[0], None),
        (on[1], on[2]),
        on[3],
        on[4],
        on[5],
        clean_logits=not compressed,
        max_seqlen_k=most if compressed else 0,
        logits_dtype=dtype,
    )
    assert logits.dtype == dtype and tuple(logits.shape) == (s, most if compressed else s_kv)
    assert logits.stride(0) * dtype.itemsize % 1024 == 0 and logits.stride(0) > logits.shape[1]
    stands_for = f64(keys) * scale.double().numpy()[:, None]
    got, want = [], []
    for i in range(s):
        scores = ref.index_scores(f64(q[i]), weights[i].numpy(), stands_for)[ks[i] : ke[i]]
        row = f64(logits[i])
        got.append(row[: len(scores)] if compressed else row[ks[i] : ke[i]])
        want.append(scores)
        if not compressed:
            assert np.isneginf(row[: ks[i]]).all() and np.isneginf(row[ke[i] :]).all()
    assert calc_diff(np.concatenate(got), np.concatenate(want)) < (3e-5 if dtype == torch.bfloat16 else 5e-6)
    if dtype == torch.float32 and not compressed:
        same = deep_gemm.fp8_mqa_logits(on[0], (on[1], on[2]), on[3], on[4], on[5])
        assert torch.equal(same, logits)


@pytest.mark.parametrize("next_n", [1, 2, 3])
@pytest.mark.parametrize("two_d", [True, False])
@pytest.mark.parametrize("page", [64, 32])
def test_paged_mqa_logits(next_n, two_d, page):
    b, h, d, pages = 3, 32, 128, 9
    q, _, _, weights = problem(b * next_n, 8, h, d)
    packed, stands_for = ref.pack_index(np.random.default_rng(0).standard_normal((pages * page, d)), page)
    wide = np.full((pages, page * (d + 4) + 64), 0xFF, np.uint8)  # pages lie apart
    wide[:, : page * (d + 4)] = packed
    cache = torch.from_numpy(wide).as_strided((pages, page, 1, d + 4), (wide.shape[1], d + 4, d + 4, 1))
    table = torch.randperm(pages, dtype=torch.int32).view(b, 3)
    lens = torch.tensor([page * 3, page + 5, 7], dtype=torch.int32)
    rows = (
        torch.stack([(lens.float() * f).int() for f in torch.linspace(0.5, 1, next_n)], dim=1)
        if two_d and next_n > 1
        else lens[:, None]
    )
    longest = page * 3
    context = rows.contiguous() if two_d else lens
    on = [t.to(DEVICE) for t in (q.view(b, next_n, h, d), weights, context, table)]
    if DEVICE == "cuda":
        cache = torch.from_numpy(wide).cuda().as_strided(cache.shape, cache.stride())
    meta = deep_gemm.get_paged_mqa_logits_metadata(on[2], page, deep_gemm.get_num_sms())
    assert meta.shape == (deep_gemm.get_num_sms() + 1, 2) and meta.dtype == torch.int32
    logits = deep_gemm.fp8_paged_mqa_logits(on[0], cache, on[1], on[2], on[3], meta, longest, clean_logits=not two_d)
    assert logits.shape == (b * next_n, longest) and logits.stride(0) % 256 == 0
    keys = stands_for.reshape(pages, page, d)
    for i in range(b):
        for j in range(next_n):
            n = int(rows[i, j]) if two_d else max(int(lens[i]) - next_n + j + 1, 0)
            want = ref.index_scores(
                f64(q[i * next_n + j]), weights[i * next_n + j].numpy(), ref.row_keys(keys, table[i].tolist(), n, page)
            )
            row = f64(logits[i * next_n + j])
            assert n == 0 or calc_diff(row[:n], want) < 5e-6
            assert two_d or np.isneginf(row[n:]).all()


def test_what_is_lacking_says_so():
    q, keys, scale, weights = problem(2, 64, 32, 128)
    bounds = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="fp4"):
        deep_gemm.fp8_fp4_mqa_logits((q, scale), (keys, scale), weights, bounds, bounds)
    with pytest.raises(NotImplementedError, match="bf16 weights"):
        deep_gemm.fp8_mqa_logits(q, (keys, scale), weights.bfloat16(), bounds, bounds)
    with pytest.raises(NotImplementedError, match="indices"):
        deep_gemm.get_paged_mqa_logits_metadata(bounds[:, None], 64, 1, indices=bounds)
    with pytest.raises(RuntimeError, match="clean_logits is False"):
        deep_gemm.fp8_mqa_logits(q, (keys, scale), weights, bounds, bounds, max_seqlen_k=4)
    with pytest.raises(RuntimeError, match=r"kv\[1\]"):
        deep_gemm.fp8_mqa_logits(q, (keys, scale.double()), weights, bounds, bounds)


def test_sms_are_what_was_set():
    before = deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(7)
    try:
        assert deep_gemm.get_num_sms() == 7
    finally:
        deep_gemm.set_num_sms(None)
    assert deep_gemm.get_num_sms() == before
