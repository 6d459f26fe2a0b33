"""Ray shell around one decode worker: placement, restart, health. No KV byte and no token passes through."""

from __future__ import annotations

from typing import Any

import ray

from decode_worker.worker import build_decode_worker
from kvpact.config import parse_config
from kvpact.serving.host import WorkerHost

OPTIONS: dict[str, Any] = {"max_restarts": -1, "max_task_retries": 0, "concurrency_groups": {"health": 1}}


class DecodeShell(WorkerHost):
    """Serves from construction on; a restart by Ray is a new incarnation that registers itself again."""

    def __init__(self, settings: dict[str, Any], worker: str, coordinator: str) -> None:
        config = parse_config(settings)
        super().__init__(lambda: build_decode_worker(config, worker=worker, coordinator=coordinator))
        self.start()

    @ray.method(concurrency_group="health")
    def healthy(self) -> bool:
        """Whether the worker's loop runs; answered beside running calls."""
        return self.alive()


DecodeActor: Any = ray.remote(**OPTIONS)(DecodeShell)
