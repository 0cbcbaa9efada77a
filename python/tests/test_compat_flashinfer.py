"""FlashInfer's MLA interface, against the float64 reference; and install()."""

import subprocess
import sys

import numpy as np
import pytest
import reference as ref
from conftest import BF16_TOLERANCE, E4M3_TOLERANCE, F32_TOLERANCE, assert_close

import gannet

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
from gannet.compat import flashinfer  # noqa: E402

DEVICE = "cuda" if gannet.cuda_device_count() else "cpu"
LOG2_E = np.log2(np.e)


def f64(t):
    return t.detach().float().cpu().double().numpy()


@pytest.mark.parametrize("form", ["slices of one", "two tensors", "fp8"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("graph", [False, True])
def test_wrapper(form, causal, graph):
    torch.manual_seed(0)
    page, h = 16, 8
    lens, q_lens = [37, 5, 20], [2, 1, 3]
    pages = [-(-n // page) for n in lens]
    qo_indptr = torch.tensor(np.cumsum([0] + q_lens), dtype=torch.int32)
    kv_indptr = torch.tensor(np.cumsum([0] + pages), dtype=torch.int32)
    kv_indices = torch.randperm(9, dtype=torch.int32)[: sum(pages)]
    cache = torch.randn(9, page, 576) / 4
    cache = cache.to(torch.float8_e4m3fn if form == "fp8" else torch.bfloat16).to(DEVICE)
    ckv, kpe = cache[..., :512], cache[..., 512:]
    if form != "slices of one":
        ckv, kpe = (x.contiguous() for x in (ckv, kpe))
    scales = dict(ckv_scale=0.5, kpe_scale=0.25) if form == "fp8" else {}
    q = torch.randn(6, h, 576).bfloat16().to(DEVICE)
    buffers = {}
    if graph:
        buffers = dict(
            use_cuda_graph=True,
            qo_indptr=torch.zeros(4, dtype=torch.int32),
            kv_indptr=torch.zeros(4, dtype=torch.int32),
            kv_indices=torch.full((12,), 5, dtype=torch.int32),
            kv_len_arr=torch.zeros(3, dtype=torch.int32),
        )
        buffers = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in buffers.items()}
    wrapper = flashinfer.mla.BatchMLAPagedAttentionWrapper(torch.empty(128, dtype=torch.int8, device=DEVICE), **buffers)
    wrapper.plan(
        qo_indptr.to(DEVICE),
        kv_indptr.to(DEVICE),
        kv_indices.to(DEVICE),
        torch.tensor(lens, dtype=torch.int32).to(DEVICE),
        h,
        512,
        64,
        page,
        causal,
        0.07,
        torch.bfloat16,
        cache.dtype,
    )
    out, lse = wrapper.run(q[..., :512], q[..., 512:], ckv, kpe, return_lse=True, **scales)
    natural = wrapper.run(q[..., :512], q[..., 512:], ckv, kpe, return_lse=True, return_lse_base_on_e=True, **scales)[1]
    assert torch.equal(wrapper.run(q[..., :512], q[..., 512:], ckv, kpe, **scales), out) and out.shape == (6, h, 512)
    values = f64(cache) * np.concatenate(
        [np.full(512, scales.get("ckv_scale", 1)), np.full(64, scales.get("kpe_scale", 1))]
    )
    row = 0
    for i, n in enumerate(q_lens):
        table = kv_indices[kv_indptr[i] : kv_indptr[i + 1]].tolist()
        for j in range(n):
            seen = ref.bound("causal_full" if causal else "uniform_block", lens[i], n, j)
            want, want_lse, _ = ref.attend(f64(q[row]), ref.row_keys(values, table, seen, page), 0.07)
            assert_close(f64(out[row]), want, BF16_TOLERANCE)
            assert_close(f64(natural[row]), want_lse, 2.0**-7 if form == "fp8" else F32_TOLERANCE)
            assert_close(f64(lse[row]), want_lse * LOG2_E, 2.0**-7 if form == "fp8" else F32_TOLERANCE)
            row += 1


def test_wrapper_refuses_as_the_peer_does():
    wrapper = flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(1))
    one = torch.tensor([0, 1], dtype=torch.int32)

    def plan(q=torch.bfloat16, kv=torch.bfloat16):
        wrapper.plan(one, one, one[:1], one[1:], 4, 512, 64, 16, False, 0.1, q, kv)

    with pytest.raises(NotImplementedError, match="fp16"):
        plan(torch.float16, torch.float16)
    with pytest.raises(ValueError, match="not supported"):
        plan(kv=torch.float64)
    with pytest.raises(NotImplementedError, match="cutlass"):
        flashinfer.BatchMLAPagedAttentionWrapper(torch.empty(1), backend="cutlass")
    plan()
    q, cache = torch.zeros(1, 4, 576, dtype=torch.bfloat16), torch.zeros(1, 16, 576, dtype=torch.bfloat16)
    run = lambda **k: wrapper.run(k.pop("q", q)[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], **k)  # noqa: E731
    for changes, text in (
        (dict(q=q.float()), "q_nope.dtype"),
        (dict(o_scale=1.0), "o_scale"),
        (dict(kpe_scale=1.0), "only valid when"),
        (dict(out=torch.zeros(1, 4, 512)), "Invalid dtype of out"),
        (dict(lse=torch.zeros(4, 4), return_lse=True), "shape of lse"),
    ):
        with pytest.raises(ValueError, match=text):
            run(**changes)
    plan(kv=torch.float8_e4m3fn)
    fp8 = cache.to(torch.float8_e4m3fn)
    for scales, text in (
        (dict(), "Exactly one of"),
        (dict(ckv_scale=1.0), "kpe_scale is required"),
        (dict(ckv_scale=-1.0, kpe_scale=1.0), "finite positive"),
    ):
        with pytest.raises(ValueError, match=text):
            wrapper.run(q[..., :512], q[..., 512:], fp8[..., :512], fp8[..., 512:], **scales)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("flat, backend", [(False, "auto"), (False, "cute-dsl"), (True, "auto"), (True, "trtllm-gen")])
def test_trtllm_decode(dtype, flat, backend):
    """The base of the LSE is that of the kernels that the original takes: natural for compact queries, and where asked for."""
    natural = backend == "cute-dsl" or (flat and backend == "auto")
    torch.manual_seed(0)
    q = torch.randn(2, 3, 16, 576).to(dtype).to(DEVICE)
    cache = (torch.randn(6, 1, 32, 576) / 4).to(dtype).to(DEVICE)
    table, lens = (
        torch.tensor([[4, 2, 0, 0], [1, 5, 3, 0]], dtype=torch.int32),
        torch.tensor([2, 90], dtype=torch.int32),  # the first of three rows over two keys sees none
    )
    given = torch.full((6, 16) if flat else (2, 3, 16), torch.nan).to(DEVICE)
    extra = dict(cum_seq_lens_q=torch.tensor([0, 3, 6], dtype=torch.int32).to(DEVICE), max_q_len=3) if flat else {}
    out, lse = flashinfer.mla.trtllm_batch_decode_with_kv_cache_mla(
        q.view(6, 16, 576) if flat else q,
        cache,
        torch.empty(1),
        128,
        512,
        64,
        table.to(DEVICE),
        lens.to(DEVICE),
        128,
        bmm1_scale=0.05,
        bmm2_scale=0.5,
        lse=given,
        return_lse=True,
        backend=backend,
        **extra,
    )
    assert out.shape == ((6, 16, 512) if flat else (2, 3, 16, 512)) and out.dtype == torch.bfloat16
    assert lse is given
    lse = lse.view(6, 16)
    assert (lse[0] == float("inf" if natural else "-inf")).all() and (out.view(6, 16, 512)[0] == 0).all()
    for i in range(2):
        for j in range(1 - i, 3):
            keys = ref.row_keys(f64(cache[:, 0]), table[i].tolist(), int(lens[i]) - 2 + j, 32)
            want, want_lse, _ = ref.attend(f64(q[i, j]), keys, 0.05)
            tolerance = BF16_TOLERANCE if dtype == torch.bfloat16 else E4M3_TOLERANCE
            assert_close(f64(out.view(6, 16, 512)[3 * i + j]), want / 2, tolerance)
            # fp8 tensor cores keep about 13 bits of a sum of products: 3.6e-4 of the largest LSE were seen on an H200.
            lse_tolerance = 2.0**-12 if dtype == torch.bfloat16 else 2.0**-10
            assert_close(f64(lse[3 * i + j]), want_lse * (1 if natural else LOG2_E), lse_tolerance)


def test_trtllm_decode_over_token_indices():
    torch.manual_seed(0)
    q, cache = torch.randn(2, 1, 16, 576).bfloat16().to(DEVICE), (torch.randn(4, 32, 576) / 4).bfloat16().to(DEVICE)
    indices = torch.randint(-1, 128, (2, 1, 64), dtype=torch.int32).to(DEVICE)
    out = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        q,
        cache,
        torch.empty(1),
        128,
        512,
        64,
        indices,
        torch.tensor([64, 64], dtype=torch.int32),
        128,
        sparse_mla_top_k=64,
        bmm1_scale=0.05,
    )
    for i in range(2):
        listed = [k for k in indices[i, 0].tolist() if k >= 0]
        assert_close(
            f64(out[i, 0]), ref.attend(f64(q[i, 0]), f64(cache).reshape(-1, 576)[listed], 0.05)[0], BF16_TOLERANCE
        )
    with pytest.raises(ValueError, match=r"lse must have shape \(2, 16\) or \(2, 1, 16\); got \(16, 2\)"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(
            *(q, cache, None, 128, 512, 64, indices, None, 128),
            sparse_mla_top_k=64,
            return_lse=True,
            lse=torch.empty(16, 2),
        )
    with pytest.raises(ValueError, match="page_table.shape"):
        flashinfer.trtllm_batch_decode_with_kv_cache_mla(
            q, cache, None, 128, 512, 64, indices, None, 128, sparse_mla_top_k=32
        )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dims", [(192, 128), (128, 128), (256, 256)])
def test_trtllm_ragged(causal, dims):
    torch.manual_seed(0)
    cu_q, cu_k = [0, 5, 9], [0, 8, 8]
    q, k, v = (
        torch.randn(9, 4, dims[0]).bfloat16(),
        torch.randn(8, 4, dims[0]).bfloat16(),
        torch.randn(8, 4, dims[1]).bfloat16(),
    )
    as_int = lambda x: torch.tensor(x, dtype=torch.int32).to(DEVICE)  # noqa: E731
    out, lse = flashinfer.prefill.trtllm_ragged_attention_deepseek(
        q.to(DEVICE),
        k.to(DEVICE),
        v.to(DEVICE),
        torch.empty(1),
        as_int([8, 0]),
        5,
        8,
        0.1,
        1.0,
        -1,
        2,
        -1,
        as_int(cu_q),
        as_int(cu_k),
        None,
        causal,
        True,
    )
    want, want_lse = ref.ragged(f64(q), f64(k), f64(v), cu_q, cu_k, 0.1, causal)
    assert_close(f64(out), want, BF16_TOLERANCE)
    assert_close(f64(lse), want_lse * LOG2_E, 2.0**-12)
    assert (out[5:] == 0).all() and torch.isneginf(lse[5:]).all()
    with pytest.raises(AssertionError, match="Unsupported head dimensions"):
        flashinfer.prefill.trtllm_ragged_attention_deepseek(q[..., :64], k, v, *[None] * 10, None, None, causal, True)


def test_one_key_shows_the_base():
    """lse of one key is its score: times log2(e) to base 2."""
    q = torch.full((1, 1, 192), 0.125).bfloat16()
    one = torch.tensor([0, 1], dtype=torch.int32)
    args = [t.to(DEVICE) for t in (q, q, q[..., :128].contiguous())]
    _, lse = flashinfer.prefill.trtllm_ragged_attention_deepseek(
        *args, None, one[1:], 1, 1, 0.5, 1.0, -1, 1, -1, one.to(DEVICE), one.to(DEVICE), None, True, True
    )
    assert abs(lse.item() - 0.5 * 192 / 64 * LOG2_E) < 1e-5


def test_merges():
    torch.manual_seed(0)
    v, s = torch.randn(5, 3, 4, 64).to(DEVICE), torch.randn(5, 3, 4).to(DEVICE)
    s[2, 1] = float("-inf")
    weights = np.exp2(f64(s))[..., None]
    want = (f64(v) * weights).sum(1) / weights.sum(1)
    out, lse = flashinfer.merge_states(v, s)
    assert_close(f64(out), want, F32_TOLERANCE)
    assert_close(f64(lse), np.log2(weights.sum(1)[..., 0]), F32_TOLERANCE)
    two = (v[:, 0].contiguous(), s[:, 0].contiguous(), v[:, 1].contiguous(), s[:, 1].contiguous())
    before = two[0].clone()
    out, lse = flashinfer.merge_state(*two)
    assert torch.equal(two[0], before)
    flashinfer.merge_state_in_place(*two)
    assert torch.equal(two[0], out) and torch.equal(two[1], lse)


def test_install_puts_the_drop_ins_in_place():
    code = """
import sys, types
real = types.ModuleType("deep_gemm"); real.fp8_gemm_nt = "theirs"; real.fp8_mqa_logits = "theirs"
sys.modules["deep_gemm"] = real
import gannet.compat
done = gannet.compat.install()
import flash_mla, deep_gemm, flashinfer.mla
from flashinfer.prefill import trtllm_ragged_attention_deepseek
from gannet.compat import flash_mla as ours
assert flash_mla is ours and deep_gemm is real and deep_gemm.fp8_gemm_nt == "theirs"
assert deep_gemm.fp8_mqa_logits is gannet.compat.deep_gemm.fp8_mqa_logits
assert flashinfer.mla.BatchMLAPagedAttentionWrapper.__module__ == "gannet.compat.flashinfer"
assert done["deep_gemm.fp8_mqa_logits"] == "replaced" and done["flash_mla.flash_mla_sparse_fwd"] == "provided", done
try:
    gannet.compat.install("vllm")
except ValueError as e:
    assert "accepted: flash_mla" in str(e)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)
