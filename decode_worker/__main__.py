"""`python -m decode_worker`: one decode worker without Ray."""

from __future__ import annotations

from decode_worker.worker import build_decode_worker
from kvpact.serving.standalone import run_worker
from kvpact.types import Role

if __name__ == "__main__":
    run_worker(Role.DECODE, build_decode_worker)
