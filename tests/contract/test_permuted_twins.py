"""The same bytes under the wrong lane order are another function, and a pair of them is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from kvpact.cli.contract import app
from tests.fakes import make_tiny_model
from tests.gguf_files import to_pairs, write_gguf

HEADS = [(4, 2), (6, 2)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _model(tmp_path: Path, heads: tuple[int, int]) -> Path:
    sizes = {"num_attention_heads": heads[0], "kv_heads": heads[1], "hidden_size": 16 * heads[0]}
    return make_tiny_model(tmp_path / "model", **sizes)


def _check(writer: Path, reader: Path) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["check", str(writer), str(reader), "--json"])
    return result.exit_code, json.loads(result.stdout)


def _permuted(folder: Path, name: str, query_heads: int, key_heads: int) -> Path:
    """A copy whose query and key rows lie as adjacent pairs, taken with these head counts."""
    copy = Path(shutil.copytree(folder, folder.parent / name))
    counts = {"q_proj": query_heads, "k_proj": key_heads}
    changed = {
        key: to_pairs(values, counts[part]) if (part := key.split(".")[-2]) in counts else values
        for key, values in load_file(copy / "model.safetensors").items()
    }
    save_file(changed, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize("heads", HEADS)
def test_permuted_rows_in_a_folder_of_plain_ones_are_refused(tmp_path: Path, heads: tuple[int, int]) -> None:
    plain = _model(tmp_path, heads)
    code, verdict = _check(_permuted(plain, "permuted", *heads), plain)
    assert (code, [part["field"] for part in verdict["differences"]]) == (20, ["function_digest"])


@pytest.mark.parametrize("heads", HEADS)
def test_a_gguf_of_the_same_model_is_accepted(tmp_path: Path, heads: tuple[int, int]) -> None:
    plain = _model(tmp_path, heads)
    code, verdict = _check(write_gguf(plain, tmp_path / "model.gguf"), plain)
    assert (code, verdict["verdict"], verdict["identity"]) == (0, "accept", "equal")


@pytest.mark.parametrize("heads", HEADS)
def test_a_gguf_whose_key_rows_were_permuted_with_another_head_count_is_refused(
    tmp_path: Path, heads: tuple[int, int]
) -> None:
    """The wrong count works by luck for some sizes: taken back with the right one, rows end elsewhere."""
    plain = _model(tmp_path, heads)
    queries, keys = heads
    wrong = queries if 16 * keys % queries == 0 and queries != keys else 1
    rows = _permuted(plain, "wrong", queries, wrong)
    undone = {
        key: _half_split(values, queries if "q_proj" in key else keys)
        if key.split(".")[-2] in ("q_proj", "k_proj")
        else values
        for key, values in load_file(rows / "model.safetensors").items()
    }
    save_file(undone, rows / "model.safetensors")
    code, verdict = _check(write_gguf(rows, tmp_path / "wrong.gguf"), plain)
    assert (code, [part["field"] for part in verdict["differences"]]) == (20, ["function_digest"])


def _half_split(values: Any, heads: int) -> Any:
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape).copy()
