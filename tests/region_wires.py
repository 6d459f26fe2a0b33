"""Wires whose payloads travel beside the messages: shared memory, and NIXL with and without its package."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kvpact.contract.contract import Contract
from kvpact.handoff.nixl_agent import DONE, MOVING, Agent, open_agent, why_not
from kvpact.handoff.nixl_staging import Staging
from kvpact.handoff.nixl_transport import NixlWriter
from kvpact.handoff.reader_transports import ReaderTransports
from kvpact.handoff.shm_segment import SUPPORTED, UNSUPPORTED
from kvpact.handoff.shm_transport import ShmReader
from kvpact.handoff.writer_transports import WriterTransports
from tests.handoff_fakes import WIRES, WRITER, FakeReader, Wire, grpc_wire, in_process_wire, make_reader

AREA_BYTES = 16 << 20


@dataclass(slots=True, kw_only=True)
class LoopbackAgent:
    """An Agent whose peers live in the same process; a write moves while its `gate` is open."""

    size_bytes: int = AREA_BYTES
    gate: bool = True
    stoppable: bool = True
    polls: int = 0
    closed: bool = False
    writes: list[LoopbackWrite] = field(default_factory=list)
    began: threading.Event = field(default_factory=threading.Event)
    memory: memoryview = field(init=False)
    _array: ctypes.Array[ctypes.c_char] = field(init=False)

    def __post_init__(self) -> None:
        self._array = (ctypes.c_char * self.size_bytes)()
        self.memory = memoryview(self._array).cast("B")

    @property
    def address(self) -> int:
        """See Agent."""
        return ctypes.addressof(self._array)

    def metadata(self) -> bytes:
        """See Agent."""
        return b"loopback"

    def poll(self) -> None:
        """See Agent."""
        self.polls += 1

    def meet(self, metadata: bytes) -> str:
        """See Agent."""
        return metadata.decode()

    def write(self, peer: str, offset: int, size_bytes: int, address: int) -> LoopbackWrite:
        """See Agent."""
        source = self.address + offset
        write = LoopbackWrite(agent=self, source=source, size_bytes=size_bytes, address=address)
        self.writes.append(write)
        self.began.set()
        write.state()
        return write

    def close(self) -> None:
        """See Agent."""
        self.closed = True


@dataclass(slots=True, kw_only=True)
class LoopbackWrite:
    """See Transfer."""

    agent: LoopbackAgent
    source: int
    size_bytes: int
    address: int
    done: bool = False

    def state(self) -> str:
        """See Transfer."""
        if not self.done and self.agent.gate:
            self.land()
        return DONE if self.done else MOVING

    def land(self) -> None:
        """The bytes get there."""
        ctypes.memmove(self.address, self.source, self.size_bytes)
        self.done = True

    def stop(self) -> bool:
        """See Transfer."""
        return self.done or self.agent.stoppable


class _Kept:
    """An agent that outlives its users: starting one takes most of a second."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.memory, self.address = agent.memory, agent.address
        self.metadata, self.poll, self.meet, self.write = agent.metadata, agent.poll, agent.meet, agent.write

    def close(self) -> None:
        """Nothing: others use it."""


@functools.cache
def real_agent(name: str) -> Agent:
    """A NIXL agent of this process."""
    return _Kept(open_agent(name, AREA_BYTES))


def with_transports(
    reader: FakeReader | None, *, staging_agent: Callable[[], Agent] | None = None
) -> FakeReader:
    """A reader that takes payloads beside messages."""
    reader = reader or make_reader()
    open_staging = None if staging_agent is None else lambda: Staging(staging_agent())
    transports = ReaderTransports(
        shm=ShmReader(most_bytes=AREA_BYTES) if staging_agent is None else None, open_staging=open_staging
    )
    receiver = reader.receiver
    receiver._transports = receiver._arrival._transports = receiver._grants._transports = transports
    receiver._table.on_end = transports.handoff_ended
    return reader


async def agree(wire: Wire, writer: WriterTransports) -> None:
    """Makes every sender of the wire use what the two sides agree on."""
    with writer.trial() as trial:
        offers = await wire.reader.receiver._transports.offers(WRITER, trial)
    wire.transports, wire.agreed = writer, await writer.agree(offers)


@asynccontextmanager
async def shm_wire(
    *, contract: Contract | None = None, reader: FakeReader | None = None, over: str = "grpc"
) -> AsyncIterator[Wire]:
    """Control over gRPC, payloads in shared memory."""
    if not SUPPORTED:
        pytest.skip(UNSUPPORTED)
    make_wire = grpc_wire if over == "grpc" else in_process_wire
    writer = WriterTransports(wanted="shm")
    try:
        async with make_wire(contract=contract, reader=with_transports(reader)) as wire:
            await agree(wire, writer)
            yield wire
            wire.unload()
    finally:
        writer.close()


@asynccontextmanager
async def nixl_wire(
    *,
    contract: Contract | None = None,
    reader: FakeReader | None = None,
    agents: tuple[Agent, Agent] | None = None,
) -> AsyncIterator[Wire]:
    """Control over gRPC, payloads by one-sided writes; `agents`: writer's and reader's, else real ones."""
    if agents is None:
        problem = why_not()
        if problem is not None:
            pytest.skip(problem)
        agents = real_agent("writer"), real_agent("reader")
    theirs, ours = agents
    writer = WriterTransports(wanted="nixl", open_nixl=lambda: NixlWriter(theirs))
    reader = with_transports(reader, staging_agent=lambda: ours)
    try:
        async with grpc_wire(contract=contract, reader=reader) as wire:
            await agree(wire, writer)
            yield wire
            wire.unload()
    finally:
        writer.close()


@asynccontextmanager
async def loopback_wire(
    *, contract: Contract | None = None, reader: FakeReader | None = None
) -> AsyncIterator[Wire]:
    """NIXL's two sides over agents that need no package."""
    agents = LoopbackAgent(), LoopbackAgent()
    async with nixl_wire(contract=contract, reader=reader, agents=agents) as wire:
        yield wire


@asynccontextmanager
async def shm_in_process_wire(
    *, contract: Contract | None = None, reader: FakeReader | None = None
) -> AsyncIterator[Wire]:
    """One event loop, payloads in shared memory all the same."""
    async with shm_wire(contract=contract, reader=reader, over="in_process") as wire:
        yield wire


ALL_WIRES = WIRES | {
    "shm": shm_wire,
    "shm_in_process": shm_in_process_wire,
    "nixl_loopback": loopback_wire,
    "nixl": nixl_wire,
}
