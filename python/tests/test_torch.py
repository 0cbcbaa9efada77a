"""PyTorch tensors: the same bytes, its narrow floats, slices, outputs, Python threads."""

import threading

import numpy as np
import pytest
import reference as ref

import gannet

torch = pytest.importorskip("torch", reason="PyTorch is not installed")


def problem(rng, dtype=torch.float32):
    cache = torch.from_numpy(rng.standard_normal((4, 16, 576)).astype(np.float32)).to(dtype)
    q = torch.from_numpy(rng.standard_normal((2, 8, 576)).astype(np.float32)).to(dtype)
    return q, cache, torch.tensor([[1, 2], [3, 0]], dtype=torch.int32), torch.tensor([30, 9], dtype=torch.int32)


def test_the_same_bits_as_from_numpy(rng):
    q, cache, table, lens = problem(rng)
    ours = gannet.mla_decode(q, gannet.LatentCache(cache), table, lens, softmax_scale=0.1)
    numpy = gannet.mla_decode(
        q.numpy(), gannet.LatentCache(cache.numpy()), table.numpy(), lens.numpy(), softmax_scale=0.1
    )
    assert isinstance(ours, torch.Tensor) and isinstance(numpy, np.ndarray)
    np.testing.assert_array_equal(ours.numpy(), numpy)


def test_bf16_and_fp8_are_torchs(rng):
    q, cache, table, lens = problem(rng, torch.bfloat16)
    out = gannet.mla_decode(q, gannet.LatentCache(cache), table, lens, softmax_scale=0.1)
    as_ml = gannet.mla_decode(
        q.view(torch.int16).numpy().view(ref.BF16),
        gannet.LatentCache(cache.view(torch.int16).numpy().view(ref.BF16)),
        table.numpy(),
        lens.numpy(),
        softmax_scale=0.1,
    )
    assert out.dtype == torch.bfloat16
    np.testing.assert_array_equal(out.view(torch.int16).numpy(), as_ml.view(np.int16))
    fp8 = cache.to(torch.float8_e4m3fn)
    narrow = gannet.LatentCache(fp8, scale=1.0)
    assert narrow.format == "e4m3"
    out = gannet.mla_decode(q.to(torch.float8_e4m3fn), narrow, table, lens, softmax_scale=0.1, q_scale=1.0)
    wide = gannet.mla_decode(
        q.to(torch.float8_e4m3fn).float(), gannet.LatentCache(fp8.float()), table, lens, softmax_scale=0.1
    )
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), wide, rtol=2.0**-6, atol=2.0**-6)


def test_slices_are_read_where_they_lie(rng):
    q, cache, table, lens = problem(rng)
    wide = torch.full((2, 11, 640), float("nan"))
    wide[:, 1:9, 32:608] = q
    table_in = torch.full((2, 5), 2**31 - 1, dtype=torch.int32)
    table_in[:, 1:3] = table
    apart = torch.full((4, 20, 576), float("nan"))
    apart[:, :16] = cache
    out = torch.zeros(2, 9, 512)
    result = gannet.mla_decode(
        wide[:, 1:9, 32:608],
        gannet.LatentCache(apart[:, :16]),
        table_in[:, 1:3],
        lens,
        softmax_scale=0.1,
        out=out[:, :8],
    )
    assert result.data_ptr() == out.data_ptr() and (out[:, 8] == 0).all()
    assert torch.equal(out[:, :8], gannet.mla_decode(q, gannet.LatentCache(cache), table, lens, softmax_scale=0.1))


def test_tensors_of_other_kinds_are_refused(rng):
    q, cache, table, lens = problem(rng)
    with pytest.raises(gannet.InvalidArgumentError, match="q is "):
        gannet.mla_decode(q.double(), gannet.LatentCache(cache), table, lens, softmax_scale=0.1)
    with pytest.raises(BufferError):
        gannet.mla_decode(q.to("meta"), gannet.LatentCache(cache), table, lens, softmax_scale=0.1)


def test_python_threads_take_turns(rng):
    q, cache, table, lens = problem(rng)
    view = gannet.LatentCache(cache)
    want = gannet.mla_decode(q, view, table, lens, softmax_scale=0.1)
    wrong = []

    def work(rows):
        for _ in range(50):
            if not torch.equal(
                gannet.mla_decode(q[:rows], view, table[:rows], lens[:rows], softmax_scale=0.1), want[:rows]
            ):
                wrong.append(rows)

    threads = [threading.Thread(target=work, args=(1 + i % 2,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_pools_are_torch_memory_by_dlpack(rng):
    pool = gannet.LatentPool(1, 2, page_size=16)
    pages = torch.from_dlpack(pool.layer(0).pages)
    assert pages.shape == (2, 16 * 1152) and pages.dtype == torch.uint8
    pages[1] = 3
    assert (pool.layer(0).pages[1] == 3).all()


def test_jax_arrays_are_read(rng):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    q, cache, table, lens = problem(rng)
    cpu = jax.devices("cpu")[0]  # where `out` is: by default JAX takes a GPU (test_gpu.py)
    j = [jax.device_put(t.numpy(), cpu) for t in (q, cache, table, lens)]
    out = gannet.mla_decode(
        j[0], gannet.LatentCache(j[1]), j[2], j[3], softmax_scale=0.1, out=np.empty((2, 8, 512), np.float32)
    )
    np.testing.assert_array_equal(
        out, gannet.mla_decode(q, gannet.LatentCache(cache), table, lens, softmax_scale=0.1).numpy()
    )
