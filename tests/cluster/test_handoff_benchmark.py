"""The handoff benchmark's own path hands a checked cache over between two real processes."""

from __future__ import annotations

from contextlib import closing

import pytest

from benchmarks.ends import Path
from benchmarks.handoff_caches import TOKEN_BYTES

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize("transport", ["grpc", "shm"])
def test_payloads_of_any_size_are_carried_again_and_again(transport: str) -> None:
    with closing(Path("benchmarks.path_kvpact", {"transport": transport})) as path:
        path.open(2 << 20)
        for payload_bytes in (TOKEN_BYTES, 1 << 20, 2 << 20, 2 << 20):
            assert path.seconds(payload_bytes) > 0
