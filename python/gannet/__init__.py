"""Gannet: attention of DeepSeek-style models (MLA, DSA) over a paged KV cache, on CPUs and NVIDIA GPUs.

Operations take tensors of PyTorch, NumPy, CuPy or anything that speaks DLPack, where they lie, and work on the stream that
their framework is working on:

    cache = gannet.LatentCache(torch.zeros(pages, 64, 576, dtype=torch.bfloat16))
    out = gannet.mla_decode(q, cache, page_table, seq_lens, softmax_scale=192**-0.5)

Beside them: plans (gannet.plan), pools and page tables, backends (gannet.Backend), operators for torch.compile
(gannet.torch_ops), and, under the names that others have, gannet.compat.flash_mla, gannet.compat.deep_gemm and
gannet.compat.flashinfer. docs/python.md is the guide, docs/semantics.md the contract.
"""

from . import _core
from ._backend import Backend
from ._core import (
    RESERVED_PAGE,
    Context,
    IndexCache,
    IndexKPool,
    LatentCache,
    LatentPool,
    PageAllocator,
    PageList,
    PageTable,
    Pages,
    SharedPageTable,
    Stream,
    copy_pages,
    export_pages,
    exported_bytes,
    implementations,
    import_pages,
    pages_for,
)
from ._errors import CorruptFileError, DeviceError, Error, InvalidArgumentError, OutOfMemoryError, UnsupportedError
from ._ops import (
    Plan,
    default_context,
    hadamard,
    index_k_gather,
    index_k_write,
    index_logits,
    index_select,
    last_impl,
    latent_gather,
    latent_write,
    merge_state,
    mla_decode,
    plan,
    ragged_prefill,
    rope,
    set_default_context,
    sparse_attention,
    topk,
)

__version__ = _core.version()


def cuda_device_count():
    """CUDA devices that this build and this machine offer; 0 without a driver, a device, or CUDA in the build."""
    return _core.cuda_device_count()


def why_no_cuda():
    """The reason in words where cuda_device_count() is 0, else an empty text."""
    return _core.why_no_cuda()


__all__ = [name for name in dir() if not name.startswith("_")]
