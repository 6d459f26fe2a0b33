"""A whole cluster inside one command: local Ray, coordinator in this process, workers as actors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from coordinator.coordinator import Coordinator, check_exposure
from kvpact.cli.preflight import check_address, side_contracts
from kvpact.cli.signals import handlers_kept
from kvpact.config import Config, EngineConfig
from kvpact.errors import Unavailable
from kvpact.types import Role

if TYPE_CHECKING:
    from coordinator.supervisor import Supervisor

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
PAIRING_DEADLINE_S = 60.0
RAY_TOKEN_LOGGER = "ray._private.authentication.authentication_token_setup"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster that serves."""

    coordinator: Coordinator
    url: str
    workers: dict[str, str]
    """Worker name -> endpoint."""


@contextlib.asynccontextmanager
async def local_cluster(config: Config, progress: Progress) -> AsyncIterator[Cluster]:
    """Starts Ray, coordinator and workers; ends them all on leaving, whatever happened."""
    from kvpact.engine.weights import resolve_model

    check_address(config.api.host, config.api.port)
    check_exposure(config.api)
    progress(f"model {config.model}")
    folder = resolve_model(config.model)
    side_contracts(config, folder)
    config = config.model_copy(
        update={
            "model": str(folder),
            "served_name": config.served_name or config.model.rstrip("/").rsplit("/", 1)[-1],
            "engine": _with_threads(config),
        }
    )
    async with contextlib.AsyncExitStack() as stack:
        progress("Ray")
        supervisor = stack.enter_context(_local_ray(config))
        coordinator = Coordinator(config, folder)
        http_port, grpc_endpoint = await coordinator.start()
        stack.push_async_callback(supervisor.stop)
        stack.push_async_callback(coordinator.stop)
        progress(f"{config.prefill_workers} prefill and {config.decode_workers} decode workers")
        workers = await supervisor.start(grpc_endpoint)
        progress("pairing")
        await _paired(coordinator)
        yield Cluster(coordinator=coordinator, url=f"http://{config.api.host}:{http_port}", workers=workers)


async def _paired(coordinator: Coordinator) -> None:
    try:
        async with asyncio.timeout(PAIRING_DEADLINE_S):
            await coordinator.wait_paired()
    except TimeoutError as error:
        _, reason = coordinator.readiness()
        raise Unavailable(f"no verdict from the workers within {PAIRING_DEADLINE_S:g} s: {reason}") from error


def _with_threads(config: Config) -> EngineConfig:
    """Settles `threads: auto`: the machine's cores shared evenly, at least one thread per worker."""
    if config.engine.threads is not None:
        return config.engine
    threads = max(1, (os.cpu_count() or 1) // (config.prefill_workers + config.decode_workers))
    logger.info("engine.threads: auto -> %d per worker", threads)
    return config.engine.model_copy(update={"threads": threads})


def _worth_saying(record: logging.LogRecord) -> bool:
    """False for Ray's word that it protects the cluster: true of every local one, and nothing to do."""
    return not record.getMessage().startswith("Token authentication is enabled")


@contextlib.contextmanager
def _local_ray(config: Config) -> Iterator[Supervisor]:
    import ray

    from coordinator.supervisor import Supervisor
    from decode_worker.actor import DecodeActor
    from prefill_worker.actor import PrefillActor

    workers = config.prefill_workers + config.decode_workers
    logging.getLogger(RAY_TOKEN_LOGGER).addFilter(_worth_saying)
    with handlers_kept():
        ray.init(
            address="local",
            num_cpus=max(workers, os.cpu_count() or 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    try:
        yield Supervisor(config, {Role.PREFILL: PrefillActor, Role.DECODE: DecodeActor})
    finally:
        ray.shutdown()
