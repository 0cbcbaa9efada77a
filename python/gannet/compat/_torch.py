"""What the drop-ins share: PyTorch tensors as the operations want them."""

import math

import torch

from .. import _core, _ops

LOG2_E = math.log2(math.e)
_ALIGNMENT = 16  # bytes, of base pointers and of all strides but the last (include/gannet/ops.h)


def lacking(peer, what):
    """What a peer has and Gannet does not."""
    return NotImplementedError(f"gannet.compat.{peer}: {what} is not implemented")


def aligned(t):
    """The tensor itself where operations take it, else a packed copy."""
    size = t.element_size()
    ok = t.dim() == 0 or t.stride(-1) == 1 or t.shape[-1] <= 1
    ok = ok and t.data_ptr() % _ALIGNMENT == 0
    ok = ok and all(n <= 1 or s * size % _ALIGNMENT == 0 for n, s in zip(t.shape[:-1], t.stride()[:-1]))
    return t if ok else t.contiguous()


def rows(t, dims):
    """Merges the first `dims` dimensions, without a copy where strides allow it."""
    return aligned(t.reshape(-1, *t.shape[dims:]))


def unit_columns(t):
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def slot_rows(t, dims):
    """Lists of int32 slots, one a row."""
    return unit_columns(t.reshape(-1, t.shape[-1])) if dims > 1 else unit_columns(t)


def decode(
    q, cache, pages, seq_lens, scale, bound, q_len=1, cu_q_lens=None, out=None, lse=None, sink=None, q_scale=1.0
):
    _ops.mla_decode(
        q,
        cache,
        pages,
        seq_lens,
        softmax_scale=scale,
        q_len=q_len,
        cu_q_lens=cu_q_lens,
        bound=bound,
        out=out,
        lse=lse,
        attn_sink=sink,
        q_scale=q_scale,
    )


def latent_cache(tensor, **options):
    return _core.LatentCache(tensor, **options)


def num_sms(device):
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 1
