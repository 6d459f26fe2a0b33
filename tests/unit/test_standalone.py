"""A worker as a process of its own: what its settings can't be is told before a model is loaded."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvpact.config import Config
from kvpact.errors import Unavailable
from kvpact.serving.host import Worker
from kvpact.serving.standalone import run_worker
from kvpact.types import Role


def ended(monkeypatch: pytest.MonkeyPatch, role: Role, folder: Path) -> int:
    """Exit code of a worker that captures to `folder` and whose model can't be loaded."""

    def build(config: Config, *, worker: str, coordinator: str | None) -> Worker:
        raise Unavailable("the model was reached")

    monkeypatch.setattr(sys, "argv", ["worker", "--capture", str(folder)])
    with pytest.raises(SystemExit) as end:
        run_worker(role, build)
    assert isinstance(end.value.code, int)
    return end.value.code


def test_a_decode_worker_refuses_a_folder_for_captures_that_can_t_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert ended(monkeypatch, Role.DECODE, tmp_path / "file") == 2
    told = capsys.readouterr().err
    assert f"--capture (handoff.capture): can't write to {tmp_path}/file: it is no folder" in told
    for role, folder in ((Role.DECODE, tmp_path / "new"), (Role.PREFILL, tmp_path / "file")):
        assert ended(monkeypatch, role, folder) == 1
        assert "the model was reached" in capsys.readouterr().err
