from collections.abc import Sequence

class LatentCache:
    """
    The latent rows of one layer, where a tensor of the caller's holds them (never copied).

    tensor: [pages, page_size, row], [pages, page_size, 1, row], or, with page_size, [pages, bytes of a page]. Pages may
      lie apart (stride of dimension 0), and rows too where the format has its rows in one piece.
    format: "fp32" and "bf16" [latent | rope]; "e4m3" the same with one `scale` for all (stored = x / scale);
      "packed656": 512 e4m3, 4 float32 scales, 64 bf16, as FlashMLA and vLLM have it; "e4m3_per_token": planes of
      e4m3 latents, one float32 scale a token, bf16 rope. None: by dtype and width; "e4m3_per_token" must be named.
    latent_dim, rope_dim: widths of the two parts, 512 and 64 for DeepSeek-V3, V3.2 and GLM-5.
    scale: "e4m3" only, finite and positive.

    Raises InvalidArgumentError for tensors that are no such pages. docs/kv_layouts.md has every byte.
    """

    def __init__(
        self,
        tensor: object,
        *,
        format: str | None = None,
        latent_dim: int = 512,
        rope_dim: int = 64,
        page_size: int | None = None,
        scale: float = 0.0,
    ) -> None: ...
    @property
    def format(self) -> str: ...
    @property
    def latent_dim(self) -> int: ...
    @property
    def rope_dim(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def page_stride_bytes(self) -> int: ...
    @property
    def row_stride_bytes(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def pages(self) -> object:
        """
        uint8 [num_pages, bytes of a page] over the same memory (NumPy on the CPU, else an object with __dlpack__).
        """

class IndexCache:
    """
    The index keys of one layer, where a tensor of the caller's holds them (never copied).

    tensor: [pages, page_size, row], [pages, page_size, 1, row], or, with page_size, [pages, bytes of a page].
    format: "fp32", "bf16" [head_dim] a token; "e4m3": a page holds page_size * head_dim e4m3 values, then page_size
      float32 scales, as DeepGEMM and vLLM have it (nominally head_dim + 4 bytes a token). None: by dtype.
    scale_format: how scales are written, "fp32" (amax / 448) or "power_of_two"; readers take any.
    hadamard: keys are kept rotated (gannet.hadamard).

    Raises InvalidArgumentError for tensors that are no such pages.
    """

    def __init__(
        self,
        tensor: object,
        *,
        format: str | None = None,
        head_dim: int = 128,
        page_size: int | None = None,
        scale_format: str = "fp32",
        hadamard: bool = False,
    ) -> None: ...
    @property
    def format(self) -> str: ...
    @property
    def scale_format(self) -> str: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def page_stride_bytes(self) -> int: ...
    @property
    def hadamard(self) -> bool: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def pages(self) -> object:
        """
        uint8 [num_pages, bytes of a page] over the same memory (NumPy on the CPU, else an object with __dlpack__).
        """

class Pages:
    """
    A page table for calls: Pages(table, row_indices) with table an int32 tensor [rows, max_pages] or a PageTable, and
    optionally the row of each request, int32 [num_requests]; or Pages.csr(indptr, indices): pages of request i are
    indices[indptr[i]:indptr[i + 1]]. Operations also take the tensor, the PageTable, or the pair (indptr, indices).
    """

    def __init__(self, table: object, row_indices: object | None = None) -> None: ...
    @staticmethod
    def csr(indptr: object, indices: object) -> Pages: ...

class Context:
    """
    Threads for work on the CPU, plans kept by shape, and scratch kept by stream.

    num_threads: 0: as many as the process may run on; 1: the calling thread.

    Calls from several Python threads take turns; the GIL is released while an operation runs. No result depends on
    the number of threads. A call without `context` uses gannet.default_context().
    """

    def __init__(self, num_threads: int = 0) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch that calls without `workspace` have needed so far."""

    def release_scratch(self) -> None:
        """
        Frees all scratch. Only while nothing is in flight, and no captured CUDA graph will be replayed that used it.
        """

def latent_write(
    context: Context, impl: str, batch_invariant: bool, stream: object | None, workspace: object | None, args: tuple
) -> str: ...

class latent_write_plan:
    def __init__(self, arg0: object, arg1: str, arg2: bool, arg3: tuple, /) -> None: ...
    @property
    def impl(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    def run(self, stream: object | None, workspace: object | None, args: tuple) -> None: ...

def latent_gather(
    context: Context, impl: str, batch_invariant: bool, stream: object | None, workspace: object | None, args: tuple
) -> str: ...

class latent_gather_plan:
    def __init__(self, arg0: object, arg1: str, arg2: bool, arg3: tuple, /) -> None: ...
    @property
    def impl(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    def run(self, stream: object | None, workspace: object | None, args: tuple) -> None: ...

def index_k_write(
    context: Context, impl: str, batch_invariant: bool, stream: object | None, workspace: object | None, args: tuple
) -> str: ...

class index_k_write_plan:
    def __init__(self, arg0: object, arg1: str, arg2: bool, arg3: tuple, /) -> None: ...
    @property
    def impl(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    def run(self, stream: object | None, workspace: object | None, args: tuple) -> None: ...

def index_k_gather(
    context: Context, impl: str, batch_invariant: bool, stream: object | None, workspace: object | None, args: tuple
) -> str: ...

class index_k_gather_plan:
    def __init__(self, arg0: object, arg1: str, arg2: bool, arg3: tuple, /) -> None: ...
    @property
    def impl(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    def run(self, stream: object | None, workspace: object | None, args: tuple) -> None: ...

def rope(
    context: Context, impl: str, batch_invariant: bool, stream: object | None, workspace: object | None, args: tuple
) -> str: ...

class rope_plan:
    def __init__(self, arg0: object, arg1: str, arg2: bool, arg3: tuple, /) -> None: ...
    @property
    def impl(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    def run(self, stream: object | None, workspace: object | None, args: tuple) -> None: ...

def ragged_prefill(
    context: Context, impl: str, batch_invariant: bool, stream: object | None, workspace: object | None, args: tuple
) -> str: ...

class ragged_prefill_plan:
    def __init__(self, arg0: object, arg1: str, arg2: bool, arg3: tuple, /) -> None: ...
    @property
    def impl(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    def run(self, stream: object | None, workspace: object | None, args: tuple) -> None: ...

def merge_state(
    context: Context, impl: str, batch_invariant: bool, stream: object | None, workspace: object | None, args: tuple
) -> str: ...

class merge_state_plan:
    def __init__(self, arg0: object, arg1: str, arg2: bool, arg3: tuple, /) -> None: ...
    @property
    def impl(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    def run(self, stream: object | None, workspace: object | None, args: tuple) -> None: ...

def mla_decode(
    context: Context, impl: str, batch_invariant: bool, stream: object | None, workspace: object | None, args: tuple
) -> str: ...

class mla_decode_plan:
    def __init__(self, arg0: object, arg1: str, arg2: bool, arg3: tuple, /) -> None: ...
    @property
    def impl(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    def run(self, stream: object | None, workspace: object | None, args: tuple) -> None: ...

def index_logits(
    context: Context, impl: str, batch_invariant: bool, stream: object | None, workspace: object | None, args: tuple
) -> str: ...

class index_logits_plan:
    def __init__(self, arg0: object, arg1: str, arg2: bool, arg3: tuple, /) -> None: ...
    @property
    def impl(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    def run(self, stream: object | None, workspace: object | None, args: tuple) -> None: ...

def topk(
    context: Context, impl: str, batch_invariant: bool, stream: object | None, workspace: object | None, args: tuple
) -> str: ...

class topk_plan:
    def __init__(self, arg0: object, arg1: str, arg2: bool, arg3: tuple, /) -> None: ...
    @property
    def impl(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    def run(self, stream: object | None, workspace: object | None, args: tuple) -> None: ...

def index_select(
    context: Context, impl: str, batch_invariant: bool, stream: object | None, workspace: object | None, args: tuple
) -> str: ...

class index_select_plan:
    def __init__(self, arg0: object, arg1: str, arg2: bool, arg3: tuple, /) -> None: ...
    @property
    def impl(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    def run(self, stream: object | None, workspace: object | None, args: tuple) -> None: ...

def sparse_attention(
    context: Context, impl: str, batch_invariant: bool, stream: object | None, workspace: object | None, args: tuple
) -> str: ...

class sparse_attention_plan:
    def __init__(self, arg0: object, arg1: str, arg2: bool, arg3: tuple, /) -> None: ...
    @property
    def impl(self) -> str: ...
    @property
    def workspace_bytes(self) -> int: ...
    def run(self, stream: object | None, workspace: object | None, args: tuple) -> None: ...

class Stream:
    """
    A CUDA stream for whatever takes `stream`, and how kernels follow each other on it.

    stream: an address, torch.cuda.Stream, cupy.cuda.Stream; None: what a call would use without.
    overlap: on Hopper and newer a kernel is set up while the one before it ends. The same bits either way.
    """

    def __init__(self, stream: object | None = None, *, overlap: bool = True) -> None: ...
    @property
    def stream(self) -> object: ...
    @property
    def overlap(self) -> bool: ...

def hadamard(context: Context, x: object, out: object, stream: object | None) -> None: ...
def implementations() -> list: ...
def cuda_device_count() -> int: ...
def why_no_cuda() -> str: ...
def version() -> str: ...

RESERVED_PAGE: int = 0

def pages_for(tokens: int, page_size: int = 64) -> int:
    """ceil(tokens / page_size)."""

class PageList:
    """
    The pages of a request in the order of their tokens, one counted reference each: what PageAllocator.acquire gives.
    A page is free again when its last reference is gone.
    """

    def __init__(self) -> None: ...
    def __len__(self) -> int: ...
    @property
    def ids(self) -> list[int]: ...
    def share(self, begin: int, count: int) -> PageList:
        """Further references: a common prefix of two requests."""

    def append(self, tail: PageList) -> None:
        """Takes over all of `tail`."""

    def truncate(self, count: int) -> None:
        """Gives back all but the first `count`."""

    def clear(self) -> None: ...

class PageAllocator:
    """
    Hands out page numbers 1 .. num_pages - 1; page 0 is reserved and never handed out.
    """

    def __init__(self, num_pages: int) -> None: ...
    def acquire(self, count: int) -> PageList:
        """`count` pages, or none: OutOfMemoryError."""

    def try_acquire(self, count: int) -> PageList | None:
        """The same; None where too few are free."""

    @property
    def num_pages(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_used(self) -> int: ...

class PageTable:
    """A page table in host memory: int32 [rows, max_pages], unused cells 0."""

    def __init__(self, rows: int, max_pages: int) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def max_pages(self) -> int: ...
    def num_pages(self, row: int) -> int: ...
    def set_row(self, row: int, pages: object) -> None:
        """Replaces a row; the rest of it becomes 0."""

    def append(self, row: int, pages: object) -> None: ...
    def clear_row(self, row: int) -> None: ...
    @property
    def cells(self) -> object:
        """
        The table itself, int32 [rows, max_pages]: copy it to a device for operations there.
        """

class SharedPageTable:
    """
    The page table and the lengths of a batch of decode requests, where the kernels read them, shared by captured batches:
    those of a target and of its draft, of one backend or of several.

        table = gannet.SharedPageTable(64, 8192, num_pages=n, lookahead=3, device="cuda")
        target.capture(64, q_len=4, table=table)
        draft.capture(64, table=table)
        # each step, in either order:
        table.refresh(step, seq_lens, pages)      # the first call of a step copies, the other finds it done
        target.refresh_shared(table, step, q_len=4)
        draft.refresh_shared(table, step, seq_lens=accepted_lens, steps=1)

    num_requests: those included that pad a smaller batch. max_seq_len: tokens of a request at most, drafts included.
    num_pages: of the pool, against which pages are checked; 0: they are not. lookahead: tokens beyond its length for
    which a request has pages. device: "cpu", "cuda", "cuda:N".
    """

    def __init__(
        self,
        num_requests: int,
        max_seq_len: int,
        *,
        page_size: int = 64,
        num_pages: int = 0,
        lookahead: int = 0,
        device: object = "cpu",
    ) -> None: ...
    def refresh(self, generation: int, seq_lens: object, pages: object | None, stream: object | None = None) -> bool:
        """
        Makes the table that of `generation`, a number that grows from step to step: lengths of up to num_requests
        requests, the others padding, and their pages, both on the host. False where it is of that generation already.
        """

    def mark(self, generation: int) -> None:
        """
        Makes it that of a greater generation with what is, or will be when the stream comes there, in its tensors.
        """

    @property
    def generation(self) -> int: ...
    @property
    def num_requests(self) -> int: ...
    @property
    def max_seq_len(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def lookahead(self) -> int: ...
    @property
    def seq_lens(self) -> object:
        """
        int32 [num_requests] on the device, 0: padding. Kernels of your own may write it.
        """

    @property
    def pages(self) -> object:
        """int32 [num_requests, columns] on the device."""

class LatentPool:
    """
    Memory for the latent rows of all layers; page 0 of every layer is cleared.

    format, latent_dim, rope_dim, scale: as of LatentCache. device: "cpu", "cuda", "cuda:N".
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        *,
        format: str = "bf16",
        page_size: int = 64,
        latent_dim: int = 512,
        rope_dim: int = 64,
        scale: float = 0.0,
        device: object = "cpu",
    ) -> None: ...
    def layer(self, layer: int) -> LatentCache:
        """The LatentCache of a layer."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...

class IndexKPool:
    """
    Memory for the index keys of the layers that have an indexer (`layers`, ascending); page 0 is cleared.

    format, scale_format, head_dim, hadamard: as of IndexCache. device: "cpu", "cuda", "cuda:N".
    """

    def __init__(
        self,
        layers: Sequence[int],
        num_pages: int,
        *,
        format: str = "e4m3",
        scale_format: str = "fp32",
        page_size: int = 64,
        head_dim: int = 128,
        hadamard: bool = False,
        device: object = "cpu",
    ) -> None: ...
    def layer(self, layer: int) -> IndexCache:
        """The IndexCache of a layer that has one."""

    def has_layer(self, layer: int) -> bool: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def page_size(self) -> int: ...
    @property
    def token_bytes(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...

def copy_pages(
    latent: LatentPool, index: IndexKPool | None, moves: Sequence[tuple[int, int]], stream: object | None = None
) -> None:
    """
    Copies pages (from, to) in every layer of both pools, one after the other.
    """

def exported_bytes(latent: LatentPool, index: IndexKPool | None, num_pages: int) -> int:
    """Bytes of export_pages for so many pages."""

def export_pages(
    latent: LatentPool, index: IndexKPool | None, pages: object, buffer: object, stream: object | None = None
) -> None:
    """
    Copies pages of all layers into a host buffer (uint8, exactly exported_bytes), in the order docs/kv_layouts.md gives.
    """

def import_pages(
    latent: LatentPool, index: IndexKPool | None, pages: object, buffer: object, stream: object | None = None
) -> None:
    """Copies a buffer of export_pages into pages of all layers."""

class Backend:
    """
    An attention backend: `mla` (dense) or `dsa` (sparse, with an indexer). gannet.Backend has the documentation.
    """

    def __init__(
        self,
        arg0: object,
        arg1: str,
        arg2: str,
        arg3: int,
        arg4: int,
        arg5: int,
        arg6: int,
        arg7: int,
        arg8: int,
        arg9: float,
        arg10: int,
        arg11: int,
        arg12: int,
        arg13: int,
        arg14: int,
        arg15: int,
        arg16: str,
        arg17: bool,
        arg18: object,
        /,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    def bind(self, arg0: list | None, arg1: list | None, /) -> None: ...
    def set_stream(self, arg: object | None, /) -> None: ...
    def set_layer_hooks(self, arg0: object | None, arg1: object | None, /) -> None: ...
    def prepare(
        self,
        arg0: object | None,
        arg1: object | None,
        arg2: object | None,
        arg3: object | None,
        arg4: int | None,
        arg5: str | None,
        /,
    ) -> None: ...
    def capture(
        self, arg0: int | None, arg1: int | None, arg2: str | None, arg3: int | None, arg4: object | None, /
    ) -> None: ...
    def refresh(
        self, arg0: int | None, arg1: object | None, arg2: object | None, arg3: int | None, arg4: str | None, /
    ) -> None: ...
    def refresh_shared(
        self,
        arg0: SharedPageTable | None,
        arg1: int | None,
        arg2: int | None,
        arg3: str | None,
        arg4: object | None,
        arg5: int | None,
        /,
    ) -> None: ...
    def advance(self, arg0: int | None, arg1: object | None, arg2: object | None, /) -> None: ...
    def narrow(self, arg: object | None, /) -> tuple: ...
    def step(self) -> dict: ...
    def step_tensors(self) -> tuple: ...
    def write(
        self, arg0: int | None, arg1: str | None, arg2: object | None, arg3: object | None, arg4: object | None, /
    ) -> None: ...
    def select(
        self,
        arg0: int | None,
        arg1: str | None,
        arg2: object | None,
        arg3: object | None,
        arg4: object | None,
        arg5: object | None,
        arg6: object | None,
        arg7: bool | None,
        arg8: object | None,
        arg9: object | None,
        arg10: object | None,
        /,
    ) -> None: ...
    def attend(
        self,
        arg0: int | None,
        arg1: str | None,
        arg2: object | None,
        arg3: object | None,
        arg4: object | None,
        arg5: object | None,
        arg6: bool | None,
        arg7: bool | None,
        arg8: object | None,
        arg9: object | None,
        arg10: object | None,
        arg11: object | None,
        /,
    ) -> None: ...
    def prefill_new_tokens(
        self,
        arg0: int | None,
        arg1: object | None,
        arg2: object | None,
        arg3: object | None,
        arg4: object | None,
        arg5: object | None,
        arg6: object | None,
        arg7: object | None,
        arg8: bool | None,
        arg9: object | None,
        arg10: object | None,
        /,
    ) -> None: ...
    def gather_prefix(
        self, arg0: int | None, arg1: int | None, arg2: object | None, arg3: object | None, /
    ) -> None: ...
    def prefill_prefix(
        self,
        arg0: int | None,
        arg1: int | None,
        arg2: object | None,
        arg3: object | None,
        arg4: object | None,
        arg5: object | None,
        arg6: object | None,
        arg7: object | None,
        /,
    ) -> None: ...
    def implementations(self) -> dict: ...
    def capabilities(self) -> dict: ...
