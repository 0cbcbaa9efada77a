"""Runs the peers' own tests, unmodified, over our drop-ins on a GPU, case by case with their own tolerances.

    git clone https://github.com/deepseek-ai/FlashMLA local/FlashMLA          # at commit 9241ae3
    git clone https://github.com/deepseek-ai/DeepGEMM local/DeepGEMM          # at commit 54e2261
    python python/tests/peers/drive.py --flash-mla local/FlashMLA --deep-gemm local/DeepGEMM [--every N] [--seconds S] [--only SUITE]

The 7,000 cases of FlashMLA take hours one after the other, most of it in their references: `--shard I/N` lets N processes share them,
and `--done FILE` notes each case's result there as a JSON line and leaves out what the file says is done (a failed case is run again).

Suites: dense, sparse_decode, sparse_prefill, mqa, paged. A case is passed, failed, or outside of what the drop-ins offer (they raise
NotImplementedError: head dim 512, extra caches, fp4, fp16). Every case's calls of our operations are counted: one that made none has
failed. Only what is measured is left out: performance loops, and a pause between cases. Exit code 0: nothing failed.
"""

import argparse
import ast
import collections
import dataclasses
import importlib
import json
import pathlib
import sys
import time
import traceback
import types

import torch

import gannet
from gannet import _ops
from gannet.compat import deep_gemm, flash_mla

CALLS = collections.Counter()


def count_calls():
    original = _ops._call

    def counted(name, *args):
        CALLS[name] += 1
        return original(name, *args)

    _ops._call = counted


class Suite:
    def __init__(self, name, options):
        self.name, self.options = name, options
        self.counts, self.failures, self.seen, self.start = collections.Counter(), [], 0, time.time()

    def run(self, case, text):
        """case() returns False or raises where it fails. Returns True so that a peer's own loop goes on."""
        number = self.seen
        self.seen += 1
        if number % self.options.every:
            return True
        if number // self.options.every % self.options.shards != self.options.shard:
            return True
        if (self.name, number) in self.options.results:
            self.counts[self.options.results[self.name, number] + ", as noted"] += 1
            return True
        if time.time() - self.start > self.options.seconds:
            self.counts["not reached in time"] += 1
            return True
        before, start = sum(CALLS.values()), time.time()
        try:
            result = "FAILED" if case() is False else "passed"
            if sum(CALLS.values()) == before:
                result, text = "FAILED", text + ": made no call of ours"
        except NotImplementedError as e:
            result = f"outside ({str(e).split(': ', 1)[-1]})"
        except Exception as e:  # whatever a peer's test raises is its verdict
            result = "FAILED"
            text += f": {type(e).__name__}: {str(e)[:300]}"
            if not self.failures:
                traceback.print_exc()
        self.counts[result] += 1
        if result == "FAILED":
            self.failures.append(text)
        elif self.options.done:
            line = {"suite": self.name, "number": number, "case": text, "result": result, "s": round(time.time() - start, 3)}
            with self.options.done.open("a") as file:  # opened anew, so that processes can share it
                file.write(json.dumps(line) + "\n")
        return True

    def report(self):
        print(
            f"{self.name}: {self.seen} cases; "
            + ", ".join(f"{n} {what}" for what, n in sorted(self.counts.items()))
            + f"; {time.time() - self.start:.0f} s",
            flush=True,
        )
        for failure in self.failures[:10]:
            print("  failed:", failure)


def load(path):
    """A file's functions, and what stands under its `if __name__ == "__main__"`, as code over the same globals."""
    tree = ast.parse(path.read_text())
    main = next(n for n in tree.body if isinstance(n, ast.If) and "__name__" in ast.dump(n.test))
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module, compile(ast.Module(main.body, []), str(path), "exec")


def quiet(function):
    import contextlib
    import io

    with contextlib.redirect_stdout(io.StringIO()):
        return function()


def flash_mla_suites(root, options):
    sys.modules["flash_mla"] = flash_mla
    sys.path.insert(0, str(root / "tests"))
    tests = root / "tests"

    def dense(suite):
        module, _ = load(tests / "test_flash_mla_dense_decoding.py")
        test = module.test_flash_mla
        module.test_flash_mla = lambda t: suite.run(
            lambda: quiet(lambda: test(dataclasses.replace(t, test_performance=False))), str(t)
        )
        module.main(torch.bfloat16)

    def sparse_decode(suite):
        module, _ = load(tests / "test_flash_mla_sparse_decoding.py")
        test = module.test_flash_mla

        def one(p):
            suite.run(lambda: quiet(lambda: test(dataclasses.replace(p, num_runs=0))).is_correct, str(p))
            return module.Result(True, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

        module.test_flash_mla = one
        module.lib.is_no_cooldown = lambda: True
        quiet(module.main)

    def sparse_prefill(suite):
        module, main = load(tests / "test_flash_mla_sparse_prefill.py")
        test = module.run_test
        module.run_test = lambda p: suite.run(lambda: quiet(lambda: test(dataclasses.replace(p, num_runs=0))), str(p))
        module.lib.is_no_cooldown = lambda: True
        quiet(lambda: exec(main, module.__dict__))

    return {"dense": dense, "sparse_decode": sparse_decode, "sparse_prefill": sparse_prefill}


class Cases(Exception):
    pass


def deep_gemm_suites(root, options):
    deep_gemm.__path__ = [str(root / "deep_gemm")]  # of theirs: testing and utils
    deep_gemm.__spec__ = importlib.util.spec_from_loader("deep_gemm", None, is_package=True)
    sys.modules["deep_gemm"] = deep_gemm
    extension = types.ModuleType("deep_gemm._C")

    def of_gemms(name):
        # Not __file__, which inspect reads of every module when PyTorch registers an operation: a function there breaks
        # the first import of torch._inductor half-way, and each later one meets what it had registered by then.
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None  # which no case here calls

    extension.__getattr__ = of_gemms
    sys.modules["deep_gemm._C"] = extension
    sys.path.insert(0, str(root / "tests"))

    def suite_of(function):
        def run(suite):
            torch.set_default_dtype(torch.float32)
            torch.set_default_device("cpu")
            torch.manual_seed(0)
            module, _ = load(root / "tests" / "test_attention.py")
            module.bench_kineto = lambda fn, names, **kwargs: (1.0,) * len(names) if isinstance(names, tuple) else 1.0

            def collect(name, cases):
                raise Cases(cases)

            module.sample_mqa_cases = collect
            try:
                quiet(getattr(module, function))
            except Cases as e:
                cases = e.args[0]
            for case in cases:
                module.sample_mqa_cases = lambda name, all_cases, case=case: [case]
                suite.run(lambda: quiet(getattr(module, function)), str(case))

        return run

    return {"mqa": suite_of("test_mqa_logits"), "paged": suite_of("test_paged_mqa_logits")}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flash-mla", type=pathlib.Path)
    parser.add_argument("--deep-gemm", type=pathlib.Path)
    parser.add_argument("--every", type=int, default=1, help="each Nth case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for each suite")
    parser.add_argument("--only", action="append", help="a suite")
    parser.add_argument("--shard", default="0/1", metavar="I/N", help="of N processes, the Ith (from 0)")
    parser.add_argument("--done", type=pathlib.Path, help="results so far, as JSON lines; grows")
    options = parser.parse_args()
    try:
        options.shard, options.shards = map(int, options.shard.split("/"))
    except ValueError:
        parser.error(f"--shard {options.shard}: I/N is accepted, as in 0/8")
    if not 0 <= options.shard < options.shards:
        parser.error(f"--shard {options.shard}/{options.shards}: I from 0 to N - 1 is accepted")
    options.results = {}
    if options.done and options.done.exists():
        for line in map(json.loads, options.done.read_text().splitlines()):
            options.results[line["suite"], line["number"]] = line["result"]
    if gannet.cuda_device_count() == 0:
        sys.exit(f"drive.py: the peers' tests need a GPU: {gannet.why_no_cuda()}")
    count_calls()
    suites = {}
    if options.flash_mla:
        suites.update(flash_mla_suites(options.flash_mla, options))
    if options.deep_gemm:
        suites.update(deep_gemm_suites(options.deep_gemm, options))
    failed = 0
    for name, run in suites.items():
        if options.only and name not in options.only:
            continue
        suite = Suite(name, options)
        run(suite)
        suite.report()
        failed += len(suite.failures)
    print("calls:", dict(CALLS), "implementations:", dict(_ops._last_impls))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
