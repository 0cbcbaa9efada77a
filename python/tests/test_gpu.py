"""On a GPU: PyTorch and CuPy on their streams, scratch, plans, backends with captured steps, and the host's share of a call."""

import numpy as np
import pytest
import reference as ref
from conftest import BF16_TOLERANCE, assert_close

import gannet

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import overhead  # noqa: E402

pytestmark = pytest.mark.skipif(gannet.cuda_device_count() == 0, reason=f"no CUDA device: {gannet.why_no_cuda()}")

LENS = [300, 0, 65]


def problem(rng):
    cache = rng.standard_normal((16, 64, 576)).astype(np.float32) / 4
    q = rng.standard_normal((3, 16, 576)).astype(np.float32)
    table = rng.permutation(15).reshape(3, 5).astype(np.int32)
    as_bf16 = [torch.from_numpy(x).bfloat16().cuda() for x in (q, cache)]
    return *as_bf16, torch.from_numpy(table).cuda(), torch.tensor(LENS, dtype=torch.int32).cuda()


def wanted(q, cache, table):
    values = cache.float().cpu().double().numpy()
    return [
        ref.attend(q[i].float().cpu().numpy(), ref.row_keys(values, table[i].tolist(), n, 64), 0.07)[0]
        for i, n in enumerate(LENS)
    ]


@pytest.mark.parametrize(
    "impl",
    [
        i["name"]
        for i in gannet.implementations()
        if i["op"] == "mla_decode" and i["device"] == "cuda" and i["runs_here"]
    ],
)
def test_pytorch_on_any_stream(rng, impl):
    q, cache, table, lens = problem(rng)
    want = wanted(q, cache, table)
    view = gannet.LatentCache(cache)
    assert_close(
        gannet.mla_decode(q, view, table, lens, softmax_scale=0.07, impl=impl).float().cpu(), want, BF16_TOLERANCE
    )
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        late = torch.zeros_like(q)
        torch.cuda._sleep(50_000_000)
        late.copy_(q)  # on the side stream, some 25 ms later: a call on another stream would read zeros
        out = gannet.mla_decode(late, view, table, lens, softmax_scale=0.07, impl=impl)
    side.synchronize()
    assert_close(out.float().cpu(), want, BF16_TOLERANCE)
    plan = gannet.plan(gannet.mla_decode, q, view, table, lens, softmax_scale=0.07, impl=impl)
    workspace = torch.empty(max(plan.workspace_bytes, 16), dtype=torch.uint8, device="cuda")
    streams = [torch.cuda.current_stream(), 0]
    streams += [gannet.Stream(s, overlap=False) for s in (None, *streams)]
    for options in (dict(), dict(workspace=workspace), *(dict(stream=s) for s in streams)):
        torch.cuda.synchronize()
        again = plan.run(q, view, table, lens, softmax_scale=0.07, **options)
        torch.cuda.synchronize()
        assert_close(again.float().cpu(), want, BF16_TOLERANCE)


def test_cupy_arrays(rng):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    q, cache, table, lens = (
        cupy.asarray(t.float().cpu().numpy()) if t.is_floating_point() else cupy.asarray(t.cpu().numpy())
        for t in problem(rng)
    )
    with cupy.cuda.Stream() as stream:
        out = gannet.mla_decode(q, gannet.LatentCache(cache), table, lens, softmax_scale=0.07)
        stream.synchronize()
    values = cupy.asnumpy(cache).astype(np.float64)
    want = [
        ref.attend(cupy.asnumpy(q[i]), ref.row_keys(values, table[i].tolist(), n, 64), 0.07)[0]
        for i, n in enumerate(LENS)
    ]
    assert isinstance(out, cupy.ndarray)
    assert_close(cupy.asnumpy(out), want, 2.0**-14)


def test_tensors_on_two_devices_are_refused(rng):
    q, cache, table, lens = problem(rng)
    with pytest.raises(gannet.InvalidArgumentError):
        gannet.mla_decode(q, gannet.LatentCache(cache), table.cpu(), lens, softmax_scale=0.07)


def test_a_backend_with_a_captured_batch(rng):
    backend = gannet.Backend("mla", num_heads=16, softmax_scale=0.07, max_context_len=640, device="cuda")
    pool = gannet.LatentPool(1, 16, device="cuda")
    torch.from_dlpack(pool.layer(0).pages).view(torch.bfloat16).normal_()
    backend.bind([pool.layer(0)])
    stream = torch.cuda.Stream()
    backend.set_stream(stream)
    table = np.arange(1, 16, dtype=np.int32).reshape(3, 5)
    q = torch.randn(4, 16, 576, device="cuda").bfloat16()
    out = torch.empty(4, 16, 512, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    backend.capture(4)
    shared = gannet.SharedPageTable(4, 640, num_pages=16, device="cuda")
    with torch.cuda.stream(stream):
        backend.attend(0, q, selection="all", out=out)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            backend.attend(0, q, selection="all", out=out)
        for lens in ([70, 300, 9], [71, 301]):
            backend.refresh(4, lens, table[: len(lens)])
            graph.replay()
            stream.synchronize()
            replayed = out.clone()
            backend.prepare(lens, table[: len(lens)])
            eager = backend.attend(0, q[: len(lens)], selection="all")
            stream.synchronize()
            assert torch.equal(replayed[: len(lens)], eager) and (replayed[len(lens) :] == 0).all()
        # A step of two rows a request, planned on the device by a kernel that is part of the graph.
        backend.capture(4, q_len=2, table=shared)
        out = torch.empty(8, 16, 512, device="cuda", dtype=torch.bfloat16)
        q = torch.randn(8, 16, 576, device="cuda").bfloat16()
        backend.attend(0, q, selection="all", out=out)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            backend.refresh_shared(shared, 0, q_len=2)
            backend.attend(0, q, selection="all", out=out)
        for step, lens in enumerate(([70, 300, 9], [71, 301]), start=1):
            assert shared.refresh(step, lens, table[: len(lens)], stream)
            graph.replay()
            stream.synchronize()
            replayed = out.clone()
            padded = np.zeros((4, 5), np.int32)
            padded[: len(lens)] = table[: len(lens)]
            backend.prepare(lens + [0] * (4 - len(lens)), padded, q_len=2)  # bits may depend on the batch
            eager = backend.attend(0, q, selection="all")
            stream.synchronize()
            assert torch.equal(replayed, eager) and (replayed[2 * len(lens) :] == 0).all()
        backend.refresh_shared(shared, 2, q_len=2)
        assert not backend.step["lens_known"]
        assert torch.from_dlpack(shared.seq_lens).tolist() == [71, 301, 0, 0]


def test_the_hosts_share_of_a_call():
    """Measured and printed; `python overhead.py` holds it to a limit, which a busy machine may miss."""
    assert overhead.report(overhead.measure()) > 0


def test_jax_arrays_are_read(rng, monkeypatch):
    """Inputs that JAX is still computing, an output of PyTorch's; an output that is not beside them is refused."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX has no GPU")
    q, cache, table, lens = problem(rng)
    jq, jcache = (jax.device_put(t.float().cpu().numpy()).astype(jax.numpy.bfloat16) for t in (q, cache))
    jtable, jlens = (jax.device_put(t.cpu().numpy()) for t in (table, lens))
    out = torch.full((3, 16, 512), torch.nan, dtype=torch.bfloat16, device="cuda")
    gannet.mla_decode(jq, gannet.LatentCache(jcache), jtable, jlens, softmax_scale=0.07, out=out)
    assert torch.equal(out, gannet.mla_decode(q, gannet.LatentCache(cache), table, lens, softmax_scale=0.07))
    with pytest.raises(gannet.InvalidArgumentError, match="out is on cpu; the first argument is on cuda:0"):
        gannet.mla_decode(jq, gannet.LatentCache(jcache), jtable, jlens, softmax_scale=0.07, out=out.cpu())
    with pytest.raises(TypeError, match=r"give them \(out=\.\.\.\)"):
        gannet.mla_decode(jq, gannet.LatentCache(jcache), jtable, jlens, softmax_scale=0.07)
