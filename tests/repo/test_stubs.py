"""The committed stubs are, byte for byte, what protoc makes of proto/ today."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.repo.tree import GENERATED, ROOT


def contents(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of the generated files of a folder."""
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if "_pb2" in path.name and path.is_file()
    }


def test_regenerating_gives_the_committed_stubs(tmp_path: Path) -> None:
    sources = sorted(str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto"))
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    # In a process of its own: the compiler's C++ library and that of the nixl package don't go together.
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}", *outputs, *sources]
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    fresh, committed = contents(tmp_path / GENERATED), contents(ROOT / GENERATED)
    assert sorted(fresh) == sorted(committed)
    stale = [name for name in fresh if fresh[name] != committed[name]]
    assert stale == [], "proto/ changed: run `make stubs` and commit what it writes"
