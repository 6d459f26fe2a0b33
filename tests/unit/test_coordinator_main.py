"""python -m coordinator as a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.__main__ import main


@pytest.mark.parametrize("arguments", [[], ["--model", "smollm2"], ["--model", "no/such/folder"]])
def test_a_model_that_is_no_folder_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["coordinator", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert repr(arguments[-1] if arguments else "smollm2") in told
    assert "--model FOLDER" in told
    assert "kvpact up" in told
