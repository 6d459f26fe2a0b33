"""The whole coordinator: HTTP for users, gRPC for workers, on the event loop that starts it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from coordinator.api.app import create_app
from coordinator.api.closing import Closing
from coordinator.api.context import ApiContext
from coordinator.api.prompts import chat_job
from coordinator.api.requests import ChatBody, Message
from coordinator.fleet import Fleet
from coordinator.generation import Answer, collect_answer
from coordinator.grpc_transport import GrpcTransport
from coordinator.lifecycle import Lifecycle
from coordinator.model_folder import ModelText
from coordinator.ports import Transport
from coordinator.registry import PairKey
from coordinator.scaling import Crew, Scaling
from coordinator.service import CoordinatorServer
from kvpact.clock import Clock, MonotonicClock, new_handoff_id, new_nonce, wall_time_s
from kvpact.config import ApiConfig, Config
from kvpact.errors import BadRequest, NoCompatiblePair, Unavailable
from kvpact.handoff.messages import WorkerDescription
from kvpact.handoff.security_transport import make_security
from kvpact.metrics import Metrics
from kvpact.serving.exposure import check_plaintext, is_loopback
from kvpact.tls import PeerRole
from kvpact.types import Verdict, WorkerLife

logger = logging.getLogger(__name__)

DATE_HEADER_S = 1.0
CUT_S = 5
"""What a request that is ended gets to say so; uvicorn drops it after that."""


class Coordinator:
    """Serves from `start` to `stop`."""

    def __init__(
        self,
        config: Config,
        model_folder: Path,
        *,
        transport: Transport | None = None,
        clock: Clock | None = None,
        crew: Crew | None = None,
    ) -> None:
        """Reads the model's tokenizer and config. `crew` starts and ends workers on an operator's order.

        Raises:
            UnreadableSource: the folder lacks something.
            BadRequest: settings that can't be served.
        """
        check_exposure(config.api)
        clock = clock or MonotonicClock()
        name = config.served_name or config.model.rstrip("/").rsplit("/", 1)[-1]
        metrics = Metrics(name)
        self._config = config
        self._security = make_security(config.tls, PeerRole.COORDINATOR)
        self._fleet = Fleet(transport or GrpcTransport(self._security), clock, metrics)
        local_tokens = config.local_prefill_max_tokens
        self._lifecycle = Lifecycle(
            self._fleet, clock, metrics, new_handoff_id, local_prefill_max_tokens=local_tokens
        )
        self._scaling = Scaling(self._fleet, crew, drain_s=config.handoff.drain_s) if crew else None
        self._context = ApiContext(
            config=config,
            scaling=self._scaling,
            model=ModelText(model_folder, max_model_len=config.max_model_len),
            model_name=name,
            fleet=self._fleet,
            lifecycle=self._lifecycle,
            metrics=metrics,
            clock=clock,
            started_s=wall_time_s(),
        )
        self._grpc = CoordinatorServer(self._fleet, self._security)
        self._http = _HttpServer(self._context, config.api, config.handoff.drain_s)

    async def start(self, *, grpc_host: str = "127.0.0.1", grpc_port: int = 0) -> tuple[int, str]:
        """Serves; gives the HTTP port and the gRPC host:port for workers.

        Raises:
            BadRequest: others could reach workers' side in plaintext, and that isn't said to be meant.
            Unavailable: an address can't be bound.
        """
        allowed, encrypted = self._config.coordinator.insecure, self._security.encrypted
        check_plaintext("coordinator.bind", grpc_host, insecure=allowed, encrypted=encrypted)
        http_port = await self._http.start()
        try:
            endpoint = await self._grpc.start(grpc_host, grpc_port)
        except Unavailable:
            await self._http.stop()
            raise
        self._fleet.start()
        logger.info("HTTP on %s:%d, workers register at %s", self._config.api.host, http_port, endpoint)
        return http_port, endpoint

    async def stop(self) -> None:
        """Takes no new requests, lets running ones end, closes everything. Idempotent."""
        await self._http.stop()
        if self._scaling is not None:
            await self._scaling.stop()
        await self._lifecycle.settle()
        await self._grpc.stop()
        await self._fleet.stop()

    def running(self) -> int:
        """HTTP requests that run now."""
        return self._http.running()

    def cut(self) -> None:
        """Ends every running request at once; each client is told that the server is stopping."""
        self._http.cut()

    async def wait_paired(self) -> None:
        """Returns when there is a pair of workers and each has a verdict or is in quarantine."""
        while True:
            pairs = self._fleet.snapshot().pairs
            if pairs and all(pair.settled() for pair in pairs):
                return
            await self._fleet.change()

    def readiness(self) -> tuple[bool, str]:
        """Whether a request that needs a handoff can be served, and if not, why."""
        obstacle = self._context.obstacle()
        return (True, "") if obstacle is None else (False, str(obstacle))

    def refusal(self) -> Verdict | None:
        """The verdict that keeps requests from being served; None where there is another reason or none."""
        obstacle = self._context.obstacle()
        return obstacle.verdict if isinstance(obstacle, NoCompatiblePair) else None

    async def chat(self, text: str, *, max_tokens: int) -> Answer:
        """Answers one user message as /v1/chat/completions would.

        Raises:
            NoCompatiblePair: no two workers agreed on a cache.
            KvpactError: the message can't be served, or the workers failed.
        """
        body = ChatBody(messages=[Message(role="user", content=text)], max_tokens=max_tokens)
        job = await chat_job(
            body,
            self._context.model,
            self._config.api,
            new_nonce().hex(),
            context_tokens=self._context.context_tokens(),
        )
        return await collect_answer(
            self._lifecycle, job.request, job.rules, self._context.account(job.request)
        )

    async def describe(self) -> list[WorkerDescription]:
        """What each known worker says of itself now. Raises Unavailable if one doesn't answer."""
        lives = [state.worker.life for state in self._fleet.snapshot().workers]
        return list(await asyncio.gather(*(self._fleet.port(life).describe() for life in lives)))

    def verdict(self, prefill: WorkerLife, decode: WorkerLife) -> Verdict:
        """What a pair agreed on. Raises Unavailable if it has no verdict."""
        for pair in self._fleet.snapshot().pairs:
            if pair.key == PairKey(prefill, decode) and pair.verdict is not None:
                return pair.verdict
        raise Unavailable(f"{prefill.worker} and {decode.worker} have no verdict yet")


class _HttpServer:
    """uvicorn inside this loop, without its signal handlers."""

    def __init__(self, context: ApiContext, api: ApiConfig, drain_s: float) -> None:
        """`drain_s`: running requests get this long to end when it stops; then they are ended."""
        self._api = api
        self._drain_s = drain_s
        self._closing = Closing(create_app(context))
        self._server = _QuietServer(
            uvicorn.Config(
                self._closing,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=math.ceil(drain_s + CUT_S),
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> int:
        """Binds and serves; gives the port. Raises Unavailable if the address is taken."""
        bound = _bind(self._api.host, self._api.port)
        self._task = asyncio.create_task(self._server.serve(sockets=[bound]), name="http")
        port: int = bound.getsockname()[1]
        await self._server.ready.wait()
        return port

    def running(self) -> int:
        """Requests that run now."""
        return self._closing.running

    def cut(self) -> None:
        """Ends running requests."""
        self._closing.cut()

    async def stop(self) -> None:
        """Stops accepting, waits for running requests, ends those that take longer, closes. Idempotent."""
        if self._task is not None:
            self._server.leave.set()
            await asyncio.wait({self._task}, timeout=self._drain_s)
            self._closing.cut()
            await self._task
            self._task = None


class _QuietServer(uvicorn.Server):
    """Waits for events where uvicorn looks ten times a second, and leaves signals to the program."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self.leave = asyncio.Event()

    async def main_loop(self) -> None:
        # A multiple of 10 makes uvicorn renew the Date header.
        while not await self.on_tick(0) and not self.leave.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_HEADER_S):
                    await self.leave.wait()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio turns Nagle's algorithm off; else tokens wait for acknowledgements.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise Unavailable(
            f"can't bind {host}:{port}: {error.strerror}; choose another with --port"
        ) from error
    return bound


def check_exposure(api: ApiConfig) -> None:
    """Refuses to face a network without keys. Raises BadRequest."""
    if api.api_keys or api.insecure or is_loopback(api.host):
        if api.insecure and not api.api_keys:
            logger.warning("api.insecure is set: whoever reaches %s may use this server", api.host)
        return
    raise BadRequest(
        f"--host (api.host) is {api.host}, which others can reach, and api.api_keys is empty; set keys, bind "
        "127.0.0.1, or set api.insecure: true",
        param="api.host",
    )
