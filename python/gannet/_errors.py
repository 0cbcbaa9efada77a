"""Errors of the library. The text is that of the C++ library: the function in brackets, the value given, what is accepted."""


class Error(RuntimeError):
    """Base of everything that Gannet raises by itself. Text: ``[mla_decode] q_scale is 0; accepted: finite and positive``."""


class InvalidArgumentError(Error, ValueError):
    """A value, shape, dtype, stride or order of calls that the function does not accept."""


class UnsupportedError(Error, NotImplementedError):
    """Valid, but no implementation here takes it; the text says why of each."""


class OutOfMemoryError(Error, MemoryError):
    """Memory, or pages of the cache."""


class DeviceError(Error):
    """A device or the operating system reported a failure."""


class CorruptFileError(Error):
    """A file is missing, truncated or contradicts itself."""
