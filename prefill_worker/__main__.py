"""`python -m prefill_worker`: one prefill worker without Ray."""

from __future__ import annotations

from kvpact.serving.standalone import run_worker
from kvpact.types import Role
from prefill_worker.worker import build_prefill_worker

if __name__ == "__main__":
    run_worker(Role.PREFILL, build_prefill_worker)
