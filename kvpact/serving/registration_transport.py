"""Keeps one worker known to the coordinator: registers, beats, registers again when asked or cut off."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable

import grpc

from kvpact.clock import Clock, MonotonicClock
from kvpact.contract.contract import Contract
from kvpact.handoff import codec
from kvpact.handoff.security_transport import PLAINTEXT, Security
from kvpact.serving.repeats import Repeats
from kvpact.tls import PeerRole
from kvpact.types import Role, WorkerCounters, WorkerLife, WorkerLoad
from kvpact.v1 import coordinator_pb2, coordinator_pb2_grpc

logger = logging.getLogger(__name__)

CALL_DEADLINE_S = 5.0
SHORTEST_PAUSE_S = 0.05
"""Between heartbeats, whatever interval a coordinator asks for."""


def registration_delay_s(failures: int) -> float:
    """Seconds before the next try after `failures` >= 1 failed ones."""
    return float(min(0.5 * 2 ** min(failures - 1, 3), 3.0))


async def _ignore(obstacle: str) -> None:
    """Takes no notice."""


class Registrar:
    """Announces a serving worker until it is stopped. An unreachable coordinator is tried again for ever."""

    def __init__(
        self,
        *,
        coordinator: str,
        life: WorkerLife,
        role: Role,
        endpoint: str,
        contract: Contract,
        load: Callable[[], WorkerLoad],
        counters: Callable[[], WorkerCounters] = WorkerCounters,
        security: Security = PLAINTEXT,
        on_obstacle: Callable[[str], Awaitable[None]] = _ignore,
        clock: Clock | None = None,
        delay_s: Callable[[int], float] = registration_delay_s,
    ) -> None:
        """`on_obstacle` is told after each try why no request can reach this worker; empty where one can."""
        self._life = life
        self._load = load
        self._counters = counters
        self._on_obstacle = on_obstacle
        self._delay_s = delay_s
        self._troubles = Repeats(clock or MonotonicClock())
        self._registration = coordinator_pb2.RegisterRequest(
            worker=codec.encode_life(life),
            role=codec.encode_role(role),
            endpoint=endpoint,
            contract=codec.encode_contract(contract),
            pid=os.getpid(),
        )
        self._link = security.link(coordinator, PeerRole.COORDINATOR)
        self._stub = coordinator_pb2_grpc.CoordinatorServiceStub(self._link.channel)
        self._stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to announce; needs a running event loop."""
        self._task = asyncio.create_task(self._announce())

    async def stop(self) -> None:
        """Ends announcing and closes the channel. Idempotent."""
        self._stopped.set()
        if self._task is not None:
            await self._task
            self._task = None
        await self._link.channel.close()

    async def beat(self) -> None:
        """Says what the worker carries now, beside the beats that come by themselves; a failure is logged."""
        await self._try(self._beat)

    async def _announce(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            interval_s = await self._try(self._register)
            failures = failures + 1 if interval_s is None else 0
            while interval_s is not None and not await self._pause(max(interval_s, SHORTEST_PAUSE_S)):
                if await self._try(self._beat) is None:
                    break
            if interval_s is None:
                await self._pause(self._delay_s(failures))

    async def _register(self) -> float | None:
        request = coordinator_pb2.RegisterRequest()
        request.CopyFrom(self._registration)
        request.load.CopyFrom(codec.encode_load(self._load()))
        response = await self._stub.Register(request, timeout=CALL_DEADLINE_S)
        return codec.decode_seconds(response.heartbeat_interval, "heartbeat_interval")

    async def _beat(self) -> float | None:
        request = coordinator_pb2.HeartbeatRequest(
            worker=codec.encode_life(self._life),
            load=codec.encode_load(self._load()),
            counters=codec.encode_counters(self._counters()),
        )
        response = await self._stub.Heartbeat(request, timeout=CALL_DEADLINE_S)
        if not response.register_again:
            await self._on_obstacle(response.obstacle)
        return None if response.register_again else 0.0

    async def _try(self, call: Callable[[], Awaitable[float | None]]) -> float | None:
        try:
            found = await call()
        except grpc.aio.AioRpcError as error:
            failure = self._link.failure(error)
            if self._troubles.is_news(str(failure)):
                logger.warning("announcing this worker failed: %s; it is tried again until it works", failure)
            await self._on_obstacle("its coordinator doesn't answer")
            return None
        except Exception as error:
            if self._troubles.is_news(repr(error)):
                logger.exception("announcing this worker failed; it is tried again until it works")
            return None
        self._troubles.is_over()
        return found

    async def _pause(self, seconds: float) -> bool:
        """Waits; true when stopped meanwhile."""
        try:
            await asyncio.wait_for(self._stopped.wait(), timeout=seconds)
        except TimeoutError:
            return False
        return True
