"""Writes the corpus and the golden bytes of messages: `python -m tests.contract.golden.make`.

The same code gives the same bytes. `lifetimes.json` is written by hand and stays.
"""

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
from tests.contract.golden.message_bytes import golden_files
from tests.contract.golden.record import record
from tests.contract.golden.streams import STREAMS

FOLDER = Path(__file__).parent
TABLE_FILE, TRUTH_FILE, READERS = "golden.json", "truth.safetensors", "readers"
STREAMS_FILE, STREAMS_FOLDER = "streams.json", "streams"
LONGEST = max(case.tokens for case in CASES)


def case_bytes(case: Case) -> bytes:
    """The `.kvpact` file of a case."""
    return capture_to_bytes(record(case))


def corpus() -> dict[str, bytes]:
    """Every file of the corpus by its path in the folder."""
    files = {f"{case.name}.kvpact": case_bytes(case) for case in CASES}
    files |= {f"{STREAMS_FOLDER}/{case.name}.kvpact": case_bytes(case) for case in STREAMS}
    files |= {reader_file(case.reader): _json(contract_to_json(case.reader)) for case in CASES}
    tables = {TABLE_FILE: table_bytes(), STREAMS_FILE: streams_bytes()}
    return files | tables | {TRUTH_FILE: truth_bytes()}


def table_bytes() -> bytes:
    """What must come of each file."""
    return _json({"version": 1, "truth": TRUTH_FILE, "cases": [_entry(case) for case in CASES]})


def streams_bytes() -> bytes:
    """What must come of each stream."""
    return _json({"version": 1, "truth": TRUTH_FILE, "streams": [_stream_entry(case) for case in STREAMS]})


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


def _stream_entry(case: Case) -> dict[str, Any]:
    parameter = case.reason == "BAD_REQUEST"
    return {
        "file": f"{STREAMS_FOLDER}/{case.name}.kvpact",
        "about": case.about,
        "reader": reader_file(case.reader),
        "prompt_tokens": case.tokens,
        "chunk_cap_bytes": case.chunk_cap_bytes,
        "lossy": "allow" if case.lossy else "reject",
        "verdict": case.verdict,
        "plan": list(case.plan),
        "exactness": case.exactness,
        "outcome": "failed" if case.landing is Landing.FAILED else "committed",
        "reason": case.reason,
        "check": None if parameter else case.check,
        "param": case.check if parameter else None,
    }


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def main() -> None:
    """Replaces the corpus beside this file, and the bytes of messages."""
    torch.set_num_threads(1)
    files = corpus()
    for folder in (READERS, STREAMS_FOLDER):
        (FOLDER / folder).mkdir(exist_ok=True)
    for stale in (*FOLDER.rglob("*.kvpact"), *(FOLDER / READERS).glob("*.json")):
        stale.unlink()
    for path, data in files.items():
        (FOLDER / path).write_bytes(data)
    for path, text in golden_files().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
