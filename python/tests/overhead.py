"""What a decode call from Python costs the host above the same call of the C++ library, and what a replayed one does.

    python python/tests/overhead.py

On a GPU, calls go into a stream that is held up meanwhile, so that neither kernels nor a full queue are measured: 200 calls a round,
the least mean of 20 rounds. Without a GPU the problem is an empty one, whose call is checked and does nothing: on the CPU a call
includes the work. Exit code 0: no more than 6 us, scratch included.
"""

import sys
import time

import torch

import gannet

LIMIT = 6.0  # us
CALLS, ROUNDS = 200, 20
HELD = 60_000_000  # cycles, some 30 ms: 200 calls of less than 150 us


def least(function, cuda):
    """us a call. function(n) makes n calls and returns the seconds that they took, or None: then they are timed here."""
    best = float("inf")
    for _ in range(ROUNDS):
        if cuda:
            torch.cuda.synchronize()
            torch.cuda._sleep(HELD)
        start = time.perf_counter()
        seconds = function(CALLS)
        passed = time.perf_counter() - start
        best = min(best, passed if seconds is None else seconds)
    if cuda:
        torch.cuda.synchronize()
    return best / CALLS * 1e6


def measure():
    """us a call by what is called; "C++" is the plan's run over scratch that is there."""
    cuda = gannet.cuda_device_count() > 0
    device, rows = ("cuda", 3) if cuda else ("cpu", 0)
    q = torch.randn(rows, 16, 576, device=device).bfloat16()
    cache = gannet.LatentCache(torch.randn(16, 64, 576, device=device).bfloat16())
    table = torch.randperm(15).int().view(3, 5)[:rows].to(device)
    lens = torch.tensor([300, 17, 65], dtype=torch.int32)[:rows].to(device)
    out, lse = torch.empty(rows, 16, 512, device=device).bfloat16(), torch.empty(rows, 16, device=device)
    plan = gannet.plan(gannet.mla_decode, q, cache, table, lens, softmax_scale=0.07, out=out, lse=lse)
    scratch = torch.empty(max(plan.workspace_bytes, 16), dtype=torch.uint8, device=device)
    arguments = []
    gannet.mla_decode(
        *(q, cache, table, lens),
        softmax_scale=0.07,
        out=out,
        lse=lse,
        _run=lambda stream, workspace, args: arguments.append(args),
    )

    def calls(function, **options):
        def run(n):
            for _ in range(n):
                function(q, cache, table, lens, softmax_scale=0.07, **options)

        return run

    given = dict(out=out, lse=lse)
    found = {
        "C++": least(lambda n: plan._plan._time_calls(n, scratch, arguments[0]), cuda),
        "mla_decode(out=, lse=)": least(calls(gannet.mla_decode, **given), cuda),
        "mla_decode(out=, lse=, workspace=)": least(calls(gannet.mla_decode, workspace=scratch, **given), cuda),
        "Plan.run(out=, lse=, workspace=)": least(calls(plan.run, workspace=scratch, **given), cuda),
        "mla_decode(), making its output": least(calls(gannet.mla_decode), cuda),
    }
    if cuda:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                gannet.mla_decode(q, cache, table, lens, softmax_scale=0.07, **given)

        def replay(n):
            start = time.perf_counter()
            for _ in range(n // 100):
                graph.replay()
            return time.perf_counter() - start

        found["one of 100 calls of a replayed graph"] = least(replay, cuda)
    return found


def report(found):
    """Prints what measure() found; returns what the plainest call adds to the C++ one."""
    print(f"{'us of the host':40}{'a call':>8}{'above C++':>11}")
    for name, us in found.items():
        print(f"{name:40}{us:8.2f}{us - found['C++']:11.2f}")
    return found["mla_decode(out=, lse=)"] - found["C++"]


if __name__ == "__main__":
    sys.exit(0 if report(measure()) <= LIMIT else 1)
