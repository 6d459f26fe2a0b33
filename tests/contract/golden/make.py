"""Writes the corpus: `python -m tests.contract.golden.make`. The same code gives the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save

from kvpact.contract.contract import Contract
from kvpact.contract.jsonform import contract_to_json
from kvpact.handoff.capture_file import capture_to_bytes
from tests.contract.golden import model
from tests.contract.golden.cases import CASES, WINDOW, Case, Landing, table
from tests.contract.golden.record import record

FOLDER = Path(__file__).parent
TABLE_FILE, TRUTH_FILE, READERS = "golden.json", "truth.safetensors", "readers"
LONGEST = max(case.tokens for case in CASES)


def case_bytes(case: Case) -> bytes:
    """The `.kvpact` file of a case."""
    return capture_to_bytes(record(case))


def corpus() -> dict[str, bytes]:
    """Every file of the corpus by its path in the folder."""
    files = {f"{case.name}.kvpact": case_bytes(case) for case in CASES}
    files |= {reader_file(case.reader): _json(contract_to_json(case.reader)) for case in CASES}
    return files | {TABLE_FILE: table_bytes(), TRUTH_FILE: truth_bytes()}


def table_bytes() -> bytes:
    """What must come of each file."""
    return _json({"version": 1, "truth": TRUTH_FILE, "cases": [_entry(case) for case in CASES]})


def truth_bytes() -> bytes:
    """Raw and rotated keys, values, raw queries and attention of the right model, all positions, float32."""
    full = model.run(table(), 1.0, model.prompt(LONGEST))
    windows = tuple(WINDOW.group_of(layer).window for layer in range(model.LAYERS))
    windowed = model.run(table(), 1.0, model.prompt(LONGEST), windows)
    tensors: dict[str, Any] = {"token_ids": np.asarray(model.prompt(LONGEST), np.int32)}
    for layer, rows in enumerate(full):
        tensors[f"{layer}.raw_key"] = rows.raw_key_THD.astype(np.float32)
        turned_THD = model.turned(rows.raw_key_THD, table(), 1.0, np.arange(LONGEST + 1))
        tensors[f"{layer}.rotated_key"] = turned_THD.astype(np.float32)
        tensors[f"{layer}.value"] = rows.value_THD.astype(np.float32)
        tensors[f"{layer}.raw_query"] = rows.query_TQD.astype(np.float32)
        tensors[f"{layer}.attention"] = rows.attention_TQD.astype(np.float32)
        if windows[layer] is not None:
            windowed_TQD = windowed[layer].attention_TQD.astype(np.float32)
            tensors[f"{layer}.attention.window{windows[layer]}"] = windowed_TQD
    return save(tensors)


def reader_file(reader: Contract) -> str:
    """Where a reader's contract lies: one file for each, named for the first case that it reads."""
    first = next(case.name for case in CASES if case.reader == reader)
    return f"{READERS}/{first}.json"


def _entry(case: Case) -> dict[str, Any]:
    return {
        "file": f"{case.name}.kvpact",
        "about": case.about,
        "reader": reader_file(case.reader),
        "prompt_tokens": case.tokens,
        "verdict": case.verdict,
        "differences": dict(case.differences),
        "plan": list(case.plan),
        "exactness": case.exactness,
        "landing": case.landing.value,
        "check": "witness" if case.landing is Landing.CAUGHT else None,
    }


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def main() -> None:
    """Replaces the corpus beside this file."""
    torch.set_num_threads(1)
    files = corpus()
    (FOLDER / READERS).mkdir(exist_ok=True)
    for stale in (*FOLDER.glob("*.kvpact"), *(FOLDER / READERS).glob("*.json")):
        stale.unlink()
    for path, data in files.items():
        (FOLDER / path).write_bytes(data)


if __name__ == "__main__":
    main()
