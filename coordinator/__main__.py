"""Runs the coordinator alone: python -m coordinator --model FOLDER."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import Any

from coordinator.coordinator import Coordinator
from kvpact.config import Config, load_config
from kvpact.errors import BadRequest, KvpactError


def main() -> None:
    """Serves until SIGINT or SIGTERM, then drains. Exit status 2 for settings that can't be served."""
    arguments = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        config = load_config(arguments.config, _flags(arguments))
        folder = _model_folder(config.model)
        host = arguments.grpc_host or config.coordinator.bind
        port = config.coordinator.port if arguments.grpc_port is None else arguments.grpc_port
        asyncio.run(_serve(config, folder, host, port))
    except KvpactError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from error


async def _serve(config: Config, folder: Path, grpc_host: str, grpc_port: int) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    coordinator = Coordinator(config, folder)
    http_port, endpoint = await coordinator.start(grpc_host=grpc_host, grpc_port=grpc_port)
    sys.stdout.write(f"http://{config.api.host}:{http_port} workers {endpoint}\n")
    sys.stdout.flush()
    await stopped.wait()
    await coordinator.stop()


def _model_folder(model: str) -> Path:
    """Raises BadRequest where it is no folder: what unpacks shipped models isn't loaded in this process."""
    folder = Path(model)
    if not folder.is_dir():
        raise BadRequest(
            f"model is {model!r}, which is no folder; give one that holds tokenizer.json and config.json by "
            "--model FOLDER, or run `kvpact up`, which unpacks a model that is shipped",
            param="model",
        )
    return folder


def _flags(arguments: argparse.Namespace) -> dict[str, Any]:
    api = {"host": arguments.host, "port": arguments.port}
    top = {
        "model": arguments.model,
        "served_name": arguments.served_name,
        "max_model_len": arguments.max_model_len,
    }
    flags: dict[str, Any] = {key: value for key, value in top.items() if value is not None}
    return flags | {"api": {key: value for key, value in api.items() if value is not None}}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m coordinator", description="OpenAI API in front of kvpact workers."
    )
    parser.add_argument("--model", help="model folder with tokenizer.json and config.json")
    parser.add_argument("--served-name", help="name that clients use")
    parser.add_argument("--config", type=Path, help="YAML file of the deployment")
    parser.add_argument("--max-model-len", type=int, help="positions to serve, in tokens")
    parser.add_argument("--host", help="address of the HTTP side, default 127.0.0.1")
    parser.add_argument("--port", type=int, help="port of the HTTP side, default 8000; 0 picks one")
    parser.add_argument("--grpc-host", help="address at which workers register, default coordinator.bind")
    parser.add_argument(
        "--grpc-port", type=int, help="port at which workers register, default coordinator.port; 0 picks one"
    )
    return parser


if __name__ == "__main__":
    main()
