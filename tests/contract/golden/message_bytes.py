"""Golden bytes of single messages, one file for values of the codec and one for requests and responses."""

from __future__ import annotations

import json
from pathlib import Path

from tests.handoff_samples import SAMPLES
from tests.rpc_samples import RPCS

FOLDER = Path(__file__).parents[2] / "unit" / "golden"
GOLDEN_MESSAGES, GOLDEN_RPCS = "messages_v1.json", "rpcs_v1.json"


def rpc_bytes(name: str) -> bytes:
    """Bytes of a request or response."""
    data: bytes = RPCS[name].SerializeToString(deterministic=True)
    return data


def read_golden(file: str) -> dict[str, str]:
    """Name to bytes in hexadecimal."""
    return dict(json.loads((FOLDER / file).read_text(encoding="utf-8")))


def golden_files() -> dict[Path, str]:
    """Path to content of each."""
    messages = {name: sample.to_bytes(sample.value).hex() for name, sample in SAMPLES.items()}
    rpcs = {name: rpc_bytes(name).hex() for name in RPCS}
    return {
        FOLDER / file: json.dumps(content, indent=1) + "\n"
        for file, content in ((GOLDEN_MESSAGES, messages), (GOLDEN_RPCS, rpcs))
    }
