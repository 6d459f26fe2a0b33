"""A whole cluster inside one command: coordinator in this process, workers as actors on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.coordinator import Coordinator, check_exposure
from kvpact.cli.joining import init_ray
from kvpact.cli.preflight import check_address, check_files, side_contracts
from kvpact.cli.signals import handlers_kept
from kvpact.config import Config, EngineConfig
from kvpact.errors import Unavailable
from kvpact.serving.addresses import settled_host
from kvpact.types import Role

if TYPE_CHECKING:
    from coordinator.supervisor import Supervisor

logger = logging.getLogger(__name__)

Progress = Callable[[str], None]
PAIRING_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A cluster that serves."""

    coordinator: Coordinator
    url: str
    workers: dict[str, str]
    """Worker name -> endpoint."""
    registration: str
    """host:port at which further workers register."""


@contextlib.asynccontextmanager
async def running_cluster(
    config: Config, progress: Progress, *, address: str | None = None
) -> AsyncIterator[Cluster]:
    """Starts coordinator and workers; ends them all on leaving, whatever happened.

    `address` names the Ray cluster that they join, `auto` the one on this node; None starts Ray here.
    """
    from kvpact.engine.weights import resolve_model

    check_address(config.api.host, config.api.port)
    check_exposure(config.api)
    check_files(config, joined=address is not None)
    progress(f"model {config.model}")
    folder = resolve_model(config.model)
    side_contracts(config, folder)
    config = _for_workers(config, folder, joined=address is not None)
    async with contextlib.AsyncExitStack() as stack:
        progress("Ray" if address is None else f"Ray at {address}")
        supervisor = stack.enter_context(_ray(config, address))
        coordinator = Coordinator(config, folder, crew=supervisor)
        http_port, grpc_endpoint = await coordinator.start(
            grpc_host=config.coordinator.bind, grpc_port=config.coordinator.port
        )
        stack.push_async_callback(supervisor.stop)
        stack.push_async_callback(coordinator.stop)
        grpc_port = grpc_endpoint.rpartition(":")[2]
        grpc_endpoint = f"{settled_host(config.coordinator.advertise_host)}:{grpc_port}"
        progress(f"{config.prefill_workers} prefill and {config.decode_workers} decode workers")
        workers = await supervisor.start(grpc_endpoint)
        progress("pairing")
        if address is None:
            await _paired(coordinator)
        else:
            await coordinator.wait_paired()
        yield Cluster(
            coordinator=coordinator,
            url=_url(config.api.host, http_port),
            workers=workers,
            registration=grpc_endpoint,
        )


def _for_workers(config: Config, folder: Path, *, joined: bool) -> Config:
    """Names and counts settled, so that every worker reads the same, in whatever folder it runs."""
    served_name = config.served_name or config.model.rstrip("/").rsplit("/", 1)[-1]
    here = {"model": str(folder), "engine": _with_threads(config)}
    settled = {"model": _model_for_all(config.model)} if joined else here
    return config.model_copy(update={"served_name": served_name} | settled)


def _model_for_all(name: str) -> str:
    """A path that holds whatever folder a worker runs in; hub ids and shipped models by their names."""
    path = Path(name).expanduser()
    return str(path.absolute()) if path.exists() else name


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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


@contextlib.contextmanager
def _ray(config: Config, address: str | None) -> Iterator[Supervisor]:
    import ray

    from coordinator.supervisor import Supervisor
    from decode_worker.actor import DecodeActor
    from prefill_worker.actor import PrefillActor

    started: dict[str, Any] = {"address": address}
    if address is None:
        cores = max(config.prefill_workers + config.decode_workers, os.cpu_count() or 1)
        started = {"address": "local", "num_cpus": cores, "include_dashboard": False}
    with handlers_kept():
        init_ray(**started)
    try:
        actor_classes = {Role.PREFILL: PrefillActor, Role.DECODE: DecodeActor}
        yield Supervisor(config, actor_classes, joined=address is not None)
    finally:
        ray.shutdown()
