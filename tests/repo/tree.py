"""The packages' files, and what each one imports, read without importing them."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kvpact", "prefill_worker", "decode_worker", "coordinator")
GENERATED = Path("kvpact/v1")


def settings() -> dict[str, Any]:
    """pyproject.toml as read."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def package_files() -> list[Path]:
    """Every hand-written Python file of the packages, relative to the root, in order."""
    files = (path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return sorted(path for path in files if path.parent != GENERATED)


def module_name(file: Path) -> str:
    """kvpact/contract/rope.py -> kvpact.contract.rope; a package's __init__ is the package."""
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parse(file: Path) -> ast.Module:
    """The syntax tree of a file given relative to the root."""
    return ast.parse((ROOT / file).read_text(encoding="utf-8"), filename=str(file))


def imported_modules(file: Path) -> Iterator[tuple[str, int]]:
    """Dotted names that a file imports anywhere, functions included, with line numbers.

    `from a.b import c` gives a.b.c, since c may be a module.
    """
    for node in ast.walk(parse(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def within(name: str, module: str) -> bool:
    """Whether a dotted name is the module or lies below it."""
    return name == module or name.startswith(f"{module}.")
