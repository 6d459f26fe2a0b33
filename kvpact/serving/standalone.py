"""One worker as a process of its own, without Ray: flags in, serves until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Protocol

import typer

from kvpact.config import Config, load_config
from kvpact.errors import BadRequest, KvpactError
from kvpact.handoff.capture_folder import check_capture
from kvpact.serving.draining import finish
from kvpact.serving.host import Worker
from kvpact.types import Role

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_USAGE = 2
CAPTURE = "Decode workers: folder in which each handoff becomes a .kvpact file, NAME/..., prompts included."


class BuildWorker(Protocol):
    """Loads and wires a worker."""

    def __call__(self, config: Config, *, worker: str, coordinator: str | None) -> Worker:
        """Raises KvpactError where the model or the settings can't be used."""


def run_worker(role: Role, build: BuildWorker) -> None:
    """Parses the command line and serves."""

    def serve(
        config: Annotated[Path | None, typer.Option(help="YAML file with settings.")] = None,
        model: Annotated[
            str | None, typer.Option(help="Model folder, GGUF file, hub id, or smollm2.")
        ] = None,
        name: Annotated[str, typer.Option(help="Name of this worker, stable over restarts.")] = f"{role}-0",
        coordinator: Annotated[str | None, typer.Option(help="host:port at which to register.")] = None,
        port: Annotated[
            int | None, typer.Option(min=0, max=65535, help="Port to serve on; 0 picks one.")
        ] = None,
        capture: Annotated[Path | None, typer.Option(help=CAPTURE)] = None,
    ) -> None:
        flags: dict[str, object] = {} if model is None else {"model": model}
        if capture is not None:
            flags["handoff"] = {"capture": capture}
        if port is not None:
            flags[role.value] = {"port": port}
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        try:
            settings = load_config(config, flags)
            if role is Role.DECODE:
                check_capture(settings.handoff.capture)
            drain_s = settings.handoff.drain_s
            asyncio.run(_serve(lambda: build(settings, worker=name, coordinator=coordinator), drain_s))
        except KvpactError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(EXIT_USAGE if isinstance(error, BadRequest) else EXIT_FAILED) from error

    serve.__doc__ = f"Serves one {role} worker until it is interrupted; then it finishes what it has."
    typer.run(serve)


async def _serve(build: Callable[[], Worker], drain_s: float) -> None:
    """Serves until a signal, then finishes what runs; a second signal ends it at once."""
    interrupted, hurry = asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (hurry if interrupted.is_set() else interrupted).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, signalled)
    worker = build()
    endpoint = await worker.start()
    typer.echo(f"serving {endpoint}")
    left = 0
    try:
        await interrupted.wait()
        logger.info("draining: no new work from now on; ends once nothing runs, in %g s at most", drain_s)
        left = await finish(worker, within_s=drain_s, hurry=hurry)
    finally:
        await worker.stop(at_once=left > 0)
        logger.info("ended")
