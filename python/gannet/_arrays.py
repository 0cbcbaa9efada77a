"""New tensors of the framework that a call's tensors are of: for outputs that the caller did not give."""

import sys


def empty(like, shape, dtype):
    """An uninitialised tensor beside `like`; dtype is a name: "float32", "bfloat16", "int32", "uint8"."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=getattr(torch, dtype), device=like.device)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(like, cupy.ndarray):
        return cupy.empty(shape, dtype=_numpy_dtype(dtype))
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(like, numpy.ndarray):
        return numpy.empty(shape, dtype=_numpy_dtype(dtype))
    raise TypeError(
        f"outputs are not given and {type(like).__name__} is no tensor of PyTorch, NumPy or CuPy; give them (out=...)"
    )


def _numpy_dtype(name):
    if name in ("bfloat16", "float8_e4m3fn"):
        import ml_dtypes  # NumPy has no such numbers of its own

        return getattr(ml_dtypes, name)
    return name


def dtype_name(tensor):
    """ "float32", "bfloat16", "float8_e4m3fn", ..., whatever the framework."""
    dtype = getattr(tensor, "dtype", None)
    name = getattr(dtype, "name", None)
    return name if isinstance(name, str) else str(dtype).removeprefix("torch.")


def wide(tensor):
    """The dtype of an attention's output where none is given: that of the query, bf16 of an e4m3 one."""
    name = dtype_name(tensor)
    return "bfloat16" if name == "float8_e4m3fn" else name
