"""Errors: types, and the text of the C++ library."""

import numpy as np
import pytest

import gannet


def decode(**changes):
    arguments = dict(
        q=np.zeros((1, 4, 576), np.float32),
        cache=gannet.LatentCache(np.zeros((2, 16, 576), np.float32)),
        pages=np.array([[1]], np.int32),
        seq_lens=np.array([3], np.int32),
        softmax_scale=0.1,
    )
    arguments.update(changes)
    return gannet.mla_decode(**arguments)


@pytest.mark.parametrize(
    "changes, text",
    [
        (dict(softmax_scale=0.0), r"\[mla_decode\] softmax_scale is 0; accepted: a finite positive number"),
        (dict(q=np.zeros((1, 4, 512), np.float32)), r"\[mla_decode\] q"),
        (dict(q=np.zeros((1, 4, 576))), r"\[mla_decode\] q is float64; accepted: float32, bfloat16"),
        (dict(q=np.zeros((4, 576), np.float32)), r"\[mla_decode\] q has 2 dimensions; accepted: 3"),
        (dict(seq_lens=np.array([3])), r"seq_lens"),
        (dict(pages=np.array([[2]], np.int32)), r"\[mla_decode\] .*page"),
        (
            dict(bound="causal"),
            r'\[mla_decode\] bound is "causal"; accepted: "causal_full", "causal_from_first", "uniform_block"',
        ),
        (dict(impl="fast"), r'\[mla_decode\] impl is "fast"; accepted: '),
        (dict(out=np.zeros((1, 4, 500), np.float32)), r"\[mla_decode\] out"),
        (dict(workspace=np.zeros((1, 1), np.uint8)), r"\[mla_decode\] workspace"),
    ],
)
def test_invalid_arguments(changes, text):
    with pytest.raises(gannet.InvalidArgumentError, match=text) as e:
        decode(**changes)
    assert isinstance(e.value, ValueError) and isinstance(e.value, gannet.Error)


def test_what_is_no_tensor_is_a_type_error():
    for changes in (dict(q=[1.0]), dict(cache=np.zeros((2, 16, 576), np.float32)), dict(seq_lens=[3])):
        with pytest.raises(TypeError, match=r"\[mla_decode\]"):
            decode(**changes)


def test_unsupported_says_why_of_each():
    with pytest.raises(gannet.UnsupportedError, match=r"no implementation takes these arguments \(cuda_sm90: ") as e:
        decode(impl="cuda_sm90")  # of tensors on the CPU, whatever the build
    assert isinstance(e.value, NotImplementedError)


def test_fp16_is_refused_by_name():
    with pytest.raises(gannet.UnsupportedError, match="q is fp16; accepted: fp32, bf16 or e4m3"):
        decode(q=np.zeros((1, 4, 576), np.float16))


def test_read_only_outputs_are_refused():
    out = np.zeros((1, 4, 512), np.float32)
    out.flags.writeable = False
    with pytest.raises(gannet.InvalidArgumentError, match="out is read-only"):
        decode(out=out)


def test_out_of_pages_leaves_the_allocator_alone():
    pages = gannet.PageAllocator(4)
    with pytest.raises(gannet.OutOfMemoryError):
        pages.acquire(4)
    assert pages.num_free == 3 and pages.try_acquire(4) is None


@pytest.mark.parametrize(
    "tensor, options, text",
    [
        (np.zeros((2, 16, 500), np.float32), {}, "bytes a row"),
        (np.zeros((2, 16, 2, 576), np.float32), {}, "one row a token"),
        (np.zeros((2, 16 * 656), np.uint8), dict(format="packed656"), "page_size is not given"),
        (np.zeros((2, 15 * 656), np.uint8), dict(format="packed656", page_size=16), "bytes a page"),
        (np.zeros((2, 16, 600), np.uint8), {}, "format is not given"),
        (np.zeros((2, 16, 576), np.int32), dict(format="bf16"), "that dtype, or bytes"),
        (np.zeros((2, 16, 576), np.float32), dict(format="fp16"), 'format is "fp16"; accepted: "fp32"'),
        (np.zeros((2, 576, 16), np.float32).transpose(0, 2, 1), {}, "last dimension contiguous"),
    ],
)
def test_caches_that_are_none(tensor, options, text):
    with pytest.raises(gannet.InvalidArgumentError, match=text):
        gannet.LatentCache(tensor, **options)


def test_contexts_count_threads():
    assert gannet.Context(3).num_threads == 3
    with pytest.raises(gannet.InvalidArgumentError, match="num_threads is -1"):
        gannet.Context(-1)
