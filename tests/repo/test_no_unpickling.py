"""Nothing that arrives is run: no module of the packages can pickle, unpickle, or let a library do it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.repo.tree import package_files, parse

MODULES = ("pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "ray.cloudpickle")
CALLS = ("torch.load", "torch.save", "pandas.read_pickle", "yaml.load", "yaml.unsafe_load", "eval", "exec")
KEYWORDS = ("allow_pickle",)


def complaints(tree: ast.AST) -> Iterator[str]:
    """What in a module could run code out of bytes, with its line."""
    names = dict(_imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module in _modules(node):
                if any(module == each or module.startswith(f"{each}.") for each in MODULES):
                    yield f"{node.lineno}: imports {module}"
        if isinstance(node, ast.Call):
            called = _called(node.func, names)
            if called in CALLS:
                yield f"{node.lineno}: calls {called}"
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in KEYWORDS and not off:
                    yield f"{node.lineno}: {keyword.arg}"


def _modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Name in the module -> what it stands for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _called(function: ast.expr, names: dict[str, str]) -> str:
    if isinstance(function, ast.Attribute):
        return f"{_called(function.value, names)}.{function.attr}"
    return names.get(function.id, function.id) if isinstance(function, ast.Name) else ""


def test_no_module_of_the_packages_can_unpickle() -> None:
    found = {str(file): list(complaints(parse(file))) for file in package_files()}
    assert {file: what for file, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import cloudpickle as fast",
        "from ray import cloudpickle",
        "from pickle import loads",
        "def late():\n    import marshal",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.save({}, 'x')",
        "from torch import load\nload('x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=asked)",
        "import yaml\nyaml.load('x')",
        "eval('1')",
    ],
)
def test_each_way_is_found(source: str) -> None:
    assert list(complaints(ast.parse(source)))


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "import yaml\nyaml.safe_load('x')",
        "model.eval()\nself.load('x')",
        "import json\njson.load(file)",
    ],
)
def test_what_runs_nothing_is_let_be(source: str) -> None:
    assert not list(complaints(ast.parse(source)))
