"""The programs in examples/python run."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "python"
NEEDS = {"cuda_graph_step.py": ["torch"], "generate.py": ["torch", "transformers"]}
SAYS = {
    "paged_decode.py": "out (2, 16, 512)",
    "dsa_layer.py": "attends to 64 of them",
    "cuda_graph_step.py": "",
    "generate.py": "a daughter who was a king",
}


@pytest.mark.parametrize("name", sorted(SAYS))
def test_example_runs(name):
    for module in NEEDS.get(name, []):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert SAYS[name] in done.stdout, done.stdout


def test_every_example_is_run():
    assert {p.name for p in EXAMPLES.glob("*.py")} == set(SAYS)
