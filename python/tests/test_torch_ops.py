"""Custom operators: torch.compile without a break, torch.library's own checks, CUDA graphs where there is a GPU."""

import pytest

import gannet

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import gannet.torch_ops  # noqa: E402

DEVICE = "cuda" if gannet.cuda_device_count() else "cpu"
SCALE, TOPK = 0.07, 16


class SparseLayer(torch.nn.Module):
    """One decode step of a DSA layer: write, select, attend."""

    def __init__(self, heads=8, index_heads=4):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("latent", torch.randn(5, 64, 576).bfloat16())
        self.register_buffer("index_k", torch.zeros(5, 64 * 132, dtype=torch.uint8))
        self.register_buffer("dense", torch.randn(5, 64, 576).bfloat16())

    def forward(self, q, iq, weights, kv, ik, slots, table, lens):
        ops = torch.ops.gannet
        ops.latent_write(kv[:, :512] * 1, kv[:, 512:] * 1, slots, self.latent)
        ops.index_k_write(ik, slots, self.index_k, page_size=64)
        chosen, counts = ops.index_select(iq, weights, self.index_k, table, lens, TOPK, 128, page_size=64)
        sparse, lse = ops.sparse_attention(q, self.latent, chosen, counts, SCALE)
        dense, dense_lse = ops.mla_decode(q, self.dense, table, lens, SCALE)
        out, lse = ops.merge_state(sparse, lse, dense, dense_lse)
        return torch.relu(out) + 1, lse


def inputs():
    torch.manual_seed(1)
    lens = torch.tensor([70, 9], dtype=torch.int32)
    table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
    slots = torch.tensor([1 * 64 + 5, 2 * 64 + 8], dtype=torch.int32)
    many = (
        torch.randn(2, 8, 576).bfloat16(),
        torch.randn(2, 4, 128).bfloat16(),
        torch.randn(2, 4),
        torch.randn(2, 576).bfloat16(),
        torch.randn(2, 128).bfloat16(),
        slots,
        table,
        lens,
    )
    return tuple(t.to(DEVICE) for t in many)


def layer():
    made = SparseLayer().to(DEVICE)
    slots = torch.arange(5 * 64, dtype=torch.int32, device=DEVICE)
    torch.ops.gannet.index_k_write(
        torch.randn(5 * 64, 128, generator=torch.Generator().manual_seed(2)).to(DEVICE),
        slots,
        made.index_k,
        page_size=64,
    )
    return made


def test_a_compiled_module_equals_the_eager_one():
    want = layer()(*inputs())
    compiled = torch.compile(layer(), fullgraph=True, backend="inductor" if DEVICE == "cuda" else "aot_eager")
    for _ in range(2):
        got = compiled(*inputs())
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_operators_pass_the_checks_of_torch_library():
    q, iq, weights, kv, ik, slots, table, lens = inputs()
    module, ops = layer(), torch.ops.gannet
    cos_sin = torch.randn(128, 64, device=DEVICE)
    x = torch.randn(2, 8, 192, device=DEVICE)
    ends = torch.tensor([0, 2], dtype=torch.int32, device=DEVICE)
    logits = torch.randn(2, 70, device=DEVICE)
    cases = {
        "latent_write": (kv[:, :512].contiguous(), kv[:, 512:].contiguous(), slots, module.latent),
        "latent_gather": (slots, module.latent, torch.float32),
        "index_k_write": (ik, slots, module.index_k, None, 64),
        "index_k_gather": (slots, module.index_k, torch.float32, None, 64),
        "rope_": (x, lens, cos_sin, 128),
        "ragged_prefill": (x, x, x[..., :128].contiguous(), ends, ends, SCALE),
        "merge_state": (
            q[..., :512].contiguous(),
            logits[:, :8].contiguous(),
            q[..., :512].contiguous(),
            logits[:, 8:16].contiguous(),
        ),
        "mla_decode": (q, module.dense, table, lens, SCALE),
        "sparse_attention": (q, module.dense, table, None, SCALE),
        "index_logits": (iq, weights, module.index_k, table, lens, 128, 1, None, "causal_full", None, 64),
        "topk": (logits, lens, 5),
        "index_select": (iq, weights, module.index_k, table, lens, TOPK, 128, 1, None, "causal_full", None, 64),
    }
    assert set(cases) == set(gannet.torch_ops.SIGNATURES)
    for name, args in cases.items():
        torch.library.opcheck(getattr(ops, name).default, args, test_utils=("test_schema", "test_faketensor"))


def test_errors_pass_through():
    q, *_, table, lens = inputs()
    with pytest.raises(gannet.InvalidArgumentError, match="softmax_scale is 0"):
        torch.ops.gannet.mla_decode(q, layer().dense, table, lens, 0.0)


@pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA device")
def test_a_captured_step_replays_bitwise():
    module, args = layer(), inputs()
    want = layer()(*args)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        module(*args)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = module(*args)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
