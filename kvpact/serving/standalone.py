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
from kvpact.errors import KvpactError
from kvpact.serving.host import Worker
from kvpact.types import Role

EXIT_FAILED = 1


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
    ) -> None:
        flags: dict[str, object] = {} if model is None else {"model": model}
        if port is not None:
            flags[role.value] = {"port": port}
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        try:
            settings = load_config(config, flags)
            asyncio.run(_serve(lambda: build(settings, worker=name, coordinator=coordinator)))
        except KvpactError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(EXIT_FAILED) from error

    serve.__doc__ = f"Serves one {role} worker until it is interrupted."
    typer.run(serve)


async def _serve(build: Callable[[], Worker]) -> None:
    interrupted = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    worker = build()
    endpoint = await worker.start()
    typer.echo(f"serving {endpoint}")
    try:
        await interrupted.wait()
    finally:
        await worker.stop()
