"""The stub of the extension module names what the module has, and every public name has documentation."""

import ast
import inspect
import pathlib

import gannet
from gannet import _core

PACKAGE = pathlib.Path(gannet.__file__).parent


def names(tree):
    return {n.name for n in tree if isinstance(n, (ast.ClassDef, ast.FunctionDef))}


def test_the_stub_is_that_of_the_module():
    """Made by ``python -m nanobind.stubgen -m gannet._core -o python/gannet/_core.pyi``."""
    tree = ast.parse((PACKAGE / "_core.pyi").read_text()).body
    assert names(tree) == {n for n, v in vars(_core).items() if not n.startswith("_") and callable(v)}
    for c in (n for n in tree if isinstance(n, ast.ClassDef)):
        own = {n for n in vars(getattr(_core, c.name)) if not n.startswith("_")}
        assert own == {n for n in names(c.body) if not n.startswith("_")}, c.name
    assert (PACKAGE / "py.typed").exists()


def test_every_public_name_is_documented():
    for name in gannet.__all__:
        value = getattr(gannet, name)
        if inspect.isclass(value) or callable(value):
            assert value.__doc__, name
    for name, value in vars(gannet.Backend).items():
        if callable(value) and not name.startswith("_"):
            assert value.__doc__, name
