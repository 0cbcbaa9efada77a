"""A decode step that is captured into a CUDA graph and replayed with other lengths and queries.

python examples/python/cuda_graph_step.py     (needs PyTorch and a CUDA build; without a GPU it runs the step eagerly and says so)
"""

import torch

import gannet
import gannet.torch_ops  # noqa: F401  (torch.ops.gannet)

HEADS, BATCH, PAGES, SCALE = 16, 4, 64, 192**-0.5
device = "cuda" if torch.cuda.is_available() and gannet.cuda_device_count() else "cpu"
torch.manual_seed(0)

cache = torch.randn(PAGES, 64, 576, device=device).bfloat16()
table = torch.randperm(PAGES, device=device)[: BATCH * 8].view(BATCH, 8).int()
lens = torch.full((BATCH,), 100, dtype=torch.int32, device=device)
q = torch.randn(BATCH, HEADS, 576, device=device).bfloat16()


def step():
    out, _ = torch.ops.gannet.mla_decode(q, cache, table, lens, SCALE)
    return out


if device == "cpu":
    print(f"no CUDA graph here ({gannet.why_no_cuda()}); eagerly:", step().float().abs().mean().item())
else:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # plans the shape
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for n in (101, 250, 512):
        lens.fill_(n)
        q.normal_()
        graph.replay()
        assert torch.equal(captured, step()), "a replay is the eager step, bit for bit"
    print("captured once, replayed at 101, 250 and 512 tokens:", gannet.last_impl("mla_decode"))
