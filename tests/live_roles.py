"""A prefill worker, a decode worker and the coordinator's lifecycle in one process, joined by loopback gRPC.

The handoff's own messages pass a proxy, so that a test can watch them or make one of them go wrong.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator.attempt import GenerationRequest
from coordinator.fleet import Fleet
from coordinator.grpc_transport import GrpcDecodePort, GrpcPrefillPort, GrpcTransport
from coordinator.lifecycle import Lifecycle
from coordinator.ports import RegisteredWorker
from decode_worker.worker import DecodeWorker
from kvpact.clock import MonotonicClock, new_handoff_id
from kvpact.config import Config
from kvpact.engine.engine import Engine
from kvpact.metrics import Metrics
from kvpact.types import HandoffId, Sampling
from prefill_worker.worker import PrefillWorker
from tests.fakes import identified_engine
from tests.handoff_faults import Script
from tests.handoff_proxy import Proxy, proxied

DEADLINE_S = 20.0
WRITER = {"key_state": "raw", "axis_order": "HND", "block_size": 24, "prefill_chunk_tokens": 24}
READER = {"key_state": "rotated", "axis_order": "NHD", "block_size": 16}


class Behind(GrpcTransport):
    """Orders to decode go to the worker itself; what its prefill worker sends goes to its proxy."""

    def __init__(self, proxied_endpoints: dict[str, str]) -> None:
        super().__init__()
        self._endpoints = proxied_endpoints

    def decode_port(self, endpoint: str) -> GrpcDecodePort:
        """See Transport."""
        return super().decode_port(self._endpoints[endpoint])

    def prefill_port(self, endpoint: str) -> GrpcPrefillPort:
        """See Transport."""
        return super().prefill_port(endpoint)


@dataclass(slots=True, kw_only=True)
class LiveRoles:
    """What runs. Engines belong to their workers."""

    writer: Engine
    reader: Engine
    prefill: PrefillWorker
    decode: DecodeWorker
    fleet: Fleet
    lifecycle: Lifecycle
    proxy: Proxy
    script: Script
    drawn: dict[asyncio.Task[Any] | None, HandoffId]
    """The handoff id that each task drew last."""
    _numbers: Any = field(default_factory=itertools.count)

    def request(self, prompt: tuple[int, ...], tokens: int) -> GenerationRequest:
        """A greedy request that ignores end tokens."""
        return GenerationRequest(
            request_id=f"request-{next(self._numbers)}",
            endpoint="test",
            prompt=prompt,
            table_length=len(prompt) + tokens,
            sampling=Sampling(max_output_tokens=tokens, ignore_eos=True),
        )

    async def generate(self, prompt: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """All tokens of a request."""
        found: list[int] = []
        async for item in self.lifecycle.run(self.request(prompt, tokens), lambda _: None):
            found.extend(item.token_ids)
        return tuple(found)

    def idle(self) -> bool:
        """Whether every block of both sides is free and nothing is held or waits."""
        loads = [worker.description().load for worker in (self.prefill, self.decode)]
        return all(
            load.blocks.free == load.blocks.total and not load.running_requests and not load.waiting_requests
            for load in loads
        )

    async def becomes_idle(self) -> None:
        """Waits until it is; a running forward or landing gives its blocks back right after it."""
        await self.lifecycle.settle()
        async with asyncio.timeout(DEADLINE_S):
            while not self.idle():  # noqa: ASYNC110  threads of engines and landings free blocks
                await asyncio.sleep(0.001)


@asynccontextmanager
async def live_roles(
    folder: Path, *, script: Script | None = None, blocks: int = 128, **settings: Any
) -> AsyncIterator[LiveRoles]:
    """Workers that keep their caches in different forms, paired and probed; `settings` are Config's."""
    config, script = Config(model=str(folder), **settings), script or Script()
    async with AsyncExitStack() as stack:
        writer = identified_engine(folder, blocks=blocks, **WRITER)
        reader = identified_engine(folder, blocks=blocks, **READER)
        prefill = PrefillWorker(config, writer, worker="prefill-0", coordinator=None)
        decode = DecodeWorker(config, reader, worker="decode-0", coordinator=None)
        endpoints = [await worker.start() for worker in (prefill, decode)]
        for worker in (decode, prefill):
            stack.push_async_callback(worker.stop)
        proxy, behind = await stack.enter_async_context(proxied(script, endpoints[1]))
        metrics, clock = Metrics(model_name="tiny"), MonotonicClock()
        drawn: dict[asyncio.Task[Any] | None, HandoffId] = {}
        fleet = Fleet(Behind({behind: endpoints[1]}), clock, metrics)
        stack.push_async_callback(fleet.stop)

        def draw() -> HandoffId:
            drawn[asyncio.current_task()] = handoff_id = new_handoff_id()
            return handoff_id

        live = LiveRoles(
            writer=writer,
            reader=reader,
            prefill=prefill,
            decode=decode,
            fleet=fleet,
            lifecycle=Lifecycle(fleet, clock, metrics, draw),
            proxy=proxy,
            script=script,
            drawn=drawn,
        )
        for served, endpoint in ((prefill, endpoints[0]), (decode, behind)):
            register(fleet, served, endpoint)
        async with asyncio.timeout(DEADLINE_S):
            while not all(pair.usable() for pair in fleet.snapshot().pairs):
                await fleet.change()
        yield live


def register(fleet: Fleet, worker: PrefillWorker | DecodeWorker, endpoint: str) -> None:
    """Makes a worker known under an address."""
    said = worker.description()
    fleet.register(
        RegisteredWorker(
            life=said.life, role=said.role, endpoint=endpoint, contract=said.contract, pid=said.pid
        ),
        said.load,
    )
