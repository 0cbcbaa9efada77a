"""Runs the peers' own tests, unmodified, over our drop-ins on a GPU, case by case with their own tolerances.

    git clone https://github.com/deepseek-ai/FlashMLA local/FlashMLA          # at commit 9241ae3
    git clone https://github.com/deepseek-ai/DeepGEMM local/DeepGEMM          # at commit 54e2261
    python python/tests/peers/drive.py --flash-mla local/FlashMLA --deep-gemm local/DeepGEMM --jobs 14 --done local/peers.jsonl
    python python/tests/peers/drive.py --merge local/peers.jsonl              # what has been noted so far

Suites: dense, sparse_decode, sparse_prefill, mqa, paged. A case is passed, failed, or outside of what the drop-ins offer (they raise
NotImplementedError: head dim 512, extra caches, fp4, fp16). Where a case's parameters alone say that it is outside, each process runs
the first of its kind, to see it refused, and notes the others. Every case's calls of our operations are counted: one that made none
has failed. Exit code 0: nothing failed, and nothing was left for want of time.

Most of a case's time is its reference, on one core of the host as much as on the GPU: --jobs processes share the GPU and take the next
case that none of them has. FlashMLA's cases keep the seeds that they have in one process, their numbers; DeepGEMM's draw from generators
that are seeded by the case's number. Left out or replaced is only what is measured, printed or kept (performance loops, pauses between
cases, the number of host threads, a table of rates, when cached memory goes back to the driver). A case that finds too little memory,
because others run beside it, is repeated.
"""

import argparse
import ast
import collections
import contextlib
import dataclasses
import importlib
import io
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
import traceback
import types
import unittest.mock

import torch

import gannet
from gannet import _ops
from gannet.compat import deep_gemm, flash_mla

START = time.time()
CALLS = collections.Counter()
empty_cache = torch.cuda.empty_cache


def trim(gigabytes):
    """Gives memory to the processes beside this one, where it is worth it: allocating GBs anew takes longer than many a case."""
    if torch.cuda.memory_reserved() > gigabytes << 30:
        empty_cache()


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
        self.refused = {}  # kind of case outside of what we offer: what the first one raised

    def mine(self, number):
        """Whether this process is the one to run a case: a file that only one can create says so."""
        if self.options.claims is None:
            return True
        try:
            os.close(os.open(self.options.claims / f"{self.name}.{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            return True
        except FileExistsError:
            return False

    def note(self, number, text, result, seconds):
        self.counts[result] += 1
        if result == "FAILED":
            self.failures.append(text)
        if self.options.done:
            line = {"suite": self.name, "number": number, "case": text, "result": result, "s": round(seconds, 3)}
            with self.options.done.open("a") as file:  # opened anew, so that processes can share it
                file.write(json.dumps(line) + "\n")

    def run(self, case, text, outside=None):
        """case(number) returns False or raises where it fails; outside: why its parameters say that we refuse it. Returns True, so
        that a peer's own loop goes on."""
        number = self.seen
        self.seen += 1
        if number % self.options.every:
            return True
        noted = self.options.results.get((self.name, number))
        if noted is not None:
            self.counts[noted + ", as noted"] += 1
            return True
        if time.time() - START > self.options.seconds:
            self.counts["not reached in time"] += 1
            return True
        if not self.mine(number):
            return True
        if outside in self.refused:
            self.note(number, text, self.refused[outside], 0)
            return True
        before, start = sum(CALLS.values()), time.time()
        try:
            answer = self.with_memory(lambda: case(number))
            result = "passed" if answer is None or answer else "FAILED"
            if sum(CALLS.values()) == before:
                result, text = "FAILED", text + ": made no call of ours"
        except Exception as e:  # whatever a peer's test raises is its verdict, but for what the drop-ins say they lack
            result = "FAILED"
            if type(e) is NotImplementedError and str(e).startswith("gannet.compat."):
                result = f"outside ({str(e).split(': ', 1)[-1]})"
                if outside is not None:
                    self.refused[outside] = result
                self.note(number, text, result, time.time() - start)
                return True
            text += f": {type(e).__name__}: {str(e)[:300]}"
            if not self.failures:
                traceback.print_exc()
        self.note(number, text, result, time.time() - start)
        return True

    def with_memory(self, case):
        """The largest cases take tens of GB: another process may have them for some seconds."""
        for attempt in range(60):
            try:
                return case()
            except torch.OutOfMemoryError:
                if attempt == 59 or self.options.claims is None:
                    raise
            empty_cache()
            time.sleep(random.SystemRandom().uniform(0.2, 2))

    def report(self):
        print(
            f"{self.name}: {self.seen} cases; "
            + ", ".join(f"{n} {what}" for what, n in sorted(self.counts.items()))
            + f"; {time.time() - self.start:.0f} s",
            flush=True,
        )
        for failure in self.failures[:10]:
            print("  failed:", failure)
        if self.options.done:
            with self.options.done.open("a") as file:
                file.write(json.dumps({"suite": self.name, "cases": self.seen}) + "\n")


def merge(paths, wanted=()):
    """Prints each suite's totals from files of notes, the last note of a case being its result. Returns whether every case of the
    wanted suites is there and none has failed."""
    cases, results, seconds = {}, {}, collections.Counter()
    for line in (json.loads(line) for path in paths for line in path.read_text().splitlines()):
        if "cases" in line:
            cases[line["suite"]] = line["cases"]
        else:
            results.setdefault(line["suite"], {})[line["number"]] = line
            seconds[line["suite"]] += line["s"]
    good = bool(cases) and set(wanted) <= set(cases)
    for suite, total in cases.items():
        noted = results.get(suite, {})
        counts = collections.Counter(line["result"] for line in noted.values())
        print(
            f"{suite}: {len(noted)} of {total} cases; "
            + ", ".join(f"{n} {what}" for what, n in sorted(counts.items()))
            + f"; {seconds[suite]:.0f} s of processes"
        )
        for line in noted.values():
            if line["result"] == "FAILED":
                print("  failed:", line["case"])
        good = good and len(noted) == total and not counts["FAILED"]
    return good


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
    with contextlib.redirect_stdout(io.StringIO()):
        return function()


def flash_mla_suites(root, options):
    sys.modules["flash_mla"] = flash_mla
    sys.path.insert(0, str(root / "tests"))
    tests = root / "tests"

    def seeded(p, number):
        """Theirs number the cases that they run, one process all of them."""
        return dataclasses.replace(p, num_runs=0, seed=number if p.seed == -1 else p.seed)

    def outside(p):
        if p.decode is not None and p.decode.extra_topk is not None:
            return "an extra cache"
        return "head dim 512" if p.d_qk == 512 else None

    def dense(suite):
        module, _ = load(tests / "test_flash_mla_dense_decoding.py")
        test = module.test_flash_mla
        module.test_flash_mla = lambda t: suite.run(
            lambda _: quiet(lambda: test(dataclasses.replace(t, test_performance=False))), str(t)
        )
        module.main(torch.bfloat16)

    def sparse_decode(suite):
        tables = dict.fromkeys(("rich", "rich.console", "rich.table"), unittest.mock.MagicMock())
        sys.modules.update(tables)  # a table of what was measured, with a row for each of 4,748 cases
        module, _ = load(tests / "test_flash_mla_sparse_decoding.py")
        for name in tables:
            del sys.modules[name]
        test = module.test_flash_mla

        def one(p):
            suite.run(lambda number: quiet(lambda: test(seeded(p, number))).is_correct, str(p), outside(p))
            return module.Result(True, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

        module.test_flash_mla = one
        module.lib.is_no_cooldown = lambda: True
        quiet(module.main)

    def sparse_prefill(suite):
        module, main = load(tests / "test_flash_mla_sparse_prefill.py")
        test = module.run_test
        module.run_test = lambda p: suite.run(lambda number: quiet(lambda: test(seeded(p, number))), str(p), outside(p))
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
            module, _ = load(root / "tests" / "test_attention.py")
            module.bench_kineto = lambda fn, names, **kwargs: (1.0,) * len(names) if isinstance(names, tuple) else 1.0

            def collect(name, cases):
                raise Cases(cases)

            module.sample_mqa_cases = collect
            try:
                quiet(getattr(module, function))
            except Cases as e:
                cases = e.args[0]

            def run_seeded(number):
                torch.manual_seed(number)
                random.seed(number)
                return quiet(getattr(module, function))

            for case in cases:
                module.sample_mqa_cases = lambda name, all_cases, case=case: [case]
                suite.run(run_seeded, str(case))
                trim(24)

        return run

    return {"mqa": suite_of("test_mqa_logits"), "paged": suite_of("test_paged_mqa_logits")}


SUITES = {"flash_mla": ("dense", "sparse_decode", "sparse_prefill"), "deep_gemm": ("mqa", "paged")}


def wanted_suites(options):
    suites = [name for peer, names in SUITES.items() if getattr(options, peer) for name in names]
    suites = [name for name in suites if not options.only or name in options.only]
    if not suites:
        sys.exit("drive.py: no suite is left to run; --flash-mla and --deep-gemm say where they are, --only which")
    if options.jobs > 1 and options.large_jobs < 1 and set(suites) & set(SUITES["deep_gemm"]):
        sys.exit(f"drive.py: --large-jobs is {options.large_jobs}; accepted with DeepGEMM's suites: 1 or more")
    return suites


def start_jobs(options):
    """Several of these processes over one GPU. Returns the largest exit code."""
    if options.done is None:
        sys.exit("drive.py: --jobs needs --done FILE, in which the processes note their results")
    with tempfile.TemporaryDirectory() as claims:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *sys.argv[1:], "--claims", claims]
        processes = [
            subprocess.Popen(command + (["--small"] if job >= options.large_jobs else []), env=environment)
            for job in range(options.jobs)
        ]
        codes = [p.wait() for p in processes]
    print("exit codes of the processes:", codes)
    return 0 if merge([options.done], wanted_suites(options)) and not any(codes) else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flash-mla", type=pathlib.Path)
    parser.add_argument("--deep-gemm", type=pathlib.Path)
    parser.add_argument("--every", type=int, default=1, help="each Nth case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no case is begun")
    parser.add_argument("--only", action="append", choices=sum(SUITES.values(), ()), help="a suite")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the cases")
    parser.add_argument(
        "--large-jobs", type=int, default=2, help="of them, how many run DeepGEMM's suites (40 GB each)"
    )
    parser.add_argument("--done", type=pathlib.Path, help="results so far, as JSON lines; grows")
    parser.add_argument(
        "--merge", type=pathlib.Path, nargs="+", metavar="FILE", help="print the totals of such files, and end"
    )
    parser.add_argument("--claims", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.merge:
        sys.exit(0 if merge(options.merge) else 1)
    wanted_suites(options)  # or ends
    if options.jobs > 1 and options.claims is None:
        sys.exit(start_jobs(options))
    options.results = {}
    if options.done and options.done.exists():
        for line in map(json.loads, options.done.read_text().splitlines()):
            if "number" in line and line["result"] != "FAILED":
                options.results[line["suite"], line["number"]] = line["result"]
    if gannet.cuda_device_count() == 0:
        sys.exit(f"drive.py: the peers' tests need a GPU: {gannet.why_no_cuda()}")
    count_calls()
    if options.jobs > 1:
        torch.set_num_threads(1)
        torch.set_num_threads = lambda n: None  # theirs ask for 32 in each process
        torch.cuda.empty_cache = lambda: trim(4)  # theirs do at every case
    suites = {}
    if options.deep_gemm and not options.small:
        suites.update(deep_gemm_suites(options.deep_gemm, options))
    if options.flash_mla:
        suites.update(flash_mla_suites(options.flash_mla, options))
    failed = 0
    for name, run in suites.items():
        if options.only and name not in options.only:
            continue
        suite = Suite(name, options)
        torch.set_float32_matmul_precision("highest")  # as each of their files finds it
        run(suite)
        suite.report()
        failed += len(suite.failures) + suite.counts["not reached in time"]
    print("calls:", dict(CALLS), "implementations:", dict(_ops._last_impls))
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
