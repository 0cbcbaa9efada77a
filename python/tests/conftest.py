"""What tests share. Tests of an operation run on every implementation that this machine has, and say which; those that need
PyTorch, transformers or a GPU are skipped with the reason where there is none."""

import numpy as np
import pytest

import gannet

RAN = {}


def implementations_of(op, device="cpu"):
    return [i["name"] for i in gannet.implementations() if i["op"] == op and i["device"] == device and i["runs_here"]]


def pytest_generate_tests(metafunc):
    """A test marked op("mla_decode") runs on each implementation of the operation."""
    marker = metafunc.definition.get_closest_marker("op")
    if marker is not None and "impl" in metafunc.fixturenames:
        metafunc.parametrize("impl", implementations_of(marker.args[0]))


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed")


def pytest_configure(config):
    config.addinivalue_line("markers", "op(name): runs on every implementation of the operation")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    marker = item.get_closest_marker("op")
    if call.when == "call" and marker is not None and outcome.get_result().passed:
        impl = item.callspec.params.get("impl")
        RAN.setdefault(marker.args[0], {}).setdefault(impl, 0)
        RAN[marker.args[0]][impl] += 1


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(
        "implementations that ran (tests passed): "
        + "; ".join(
            f"{op}: " + ", ".join(f"{impl} {n}" for impl, n in sorted(ran.items())) for op, ran in sorted(RAN.items())
        )
    )
    terminalreporter.write_line(f"CUDA devices: {gannet.cuda_device_count()} ({gannet.why_no_cuda() or 'present'})")


# Largest error of an output beside the fp64 reference over the same stored numbers, as a share of the largest value:
# bf16 kernels round probabilities to bf16 (at most 2^-8 of each, so that a weighted mean of values moves by 2^-8 of the
# largest at most), and a bf16 output is rounded once more; fp32 sums of some hundred terms lose some units of 2^-24.
BF16_TOLERANCE = 2.0**-7
# Of queries and caches in e4m3: Hopper's kernel rounds the softmax weights to e4m3 too, half a unit of 3 bits each,
# which is the error of the output where one key holds most of the weight.
E4M3_TOLERANCE = 2.0**-4 + BF16_TOLERANCE
F32_TOLERANCE = 2.0**-16


def assert_close(got, want, tolerance):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert not np.isnan(got).any()
    finite = np.isfinite(want)
    np.testing.assert_array_equal(np.where(finite, 0, got), np.where(finite, 0, want))
    largest = np.abs(want[finite]).max(initial=1e-30)
    error = np.abs(np.where(finite, got - np.where(finite, want, 0), 0)).max(initial=0)
    assert error <= tolerance * largest, f"error {error} of {largest}"
