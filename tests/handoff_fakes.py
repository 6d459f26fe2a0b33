"""Writer and reader of handoffs without an engine: caches are dictionaries of bytes, time moves by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from decode_worker.service import add_decode_service
from kvpact.clock import ManualClock
from kvpact.contract.compare import Policy
from kvpact.contract.contract import Contract
from kvpact.contract.identity import contract_digest
from kvpact.handoff.chunks import LayerBlocks, block_count, layer_blocks
from kvpact.handoff.grpc_transport import GrpcReaderPort
from kvpact.handoff.handoff_table import ReceiverLimits
from kvpact.handoff.inprocess_transport import InProcessReaderPort
from kvpact.handoff.jobs import DecodedTokens, DecodeJob
from kvpact.handoff.messages import (
    Buffer,
    ChunkHeader,
    HandoffState,
    HandoffTerms,
    PushPart,
    WorkerDescription,
)
from kvpact.handoff.outgoing import Outgoing
from kvpact.handoff.port import ReaderPort
from kvpact.handoff.receiver import Receiver
from kvpact.handoff.regions import Carrier
from kvpact.handoff.security_transport import PLAINTEXT
from kvpact.handoff.sender import Sender
from kvpact.handoff.service import add_worker_service
from kvpact.handoff.terms import make_terms
from kvpact.handoff.transport_choice import TransportChoice
from kvpact.handoff.trust import CanaryJudge, TakenOnTrust, Verifier
from kvpact.handoff.writer_transports import WriterTransports
from kvpact.kvcache.block_pool import BlockPool
from kvpact.types import (
    BlockId,
    ContractDigest,
    FinishReason,
    HandoffId,
    Role,
    Verdict,
    WorkerCounters,
    WorkerLife,
    WorkerLoad,
)
from tests.factories import make_contract

WRITER = WorkerLife(worker="prefill-0", incarnation=b"w" * 16)
READER = WorkerLife(worker="decode-0", incarnation=b"r" * 16)
FIRST_TOKEN_ID = 7
MAX_OUTPUT_TOKENS = 8


def make_handoff_id(number: int = 1) -> HandoffId:
    """16 bytes that spell a number."""
    return HandoffId(number.to_bytes(16, "big"))


class FakeLanding:
    """Keeps each landed block in a dictionary, (handoff id, layer, block) -> (keys, values).

    A landing waits for `gate` first, so that a test can hold one open, and raises `failure` if there is one.
    """

    def __init__(self) -> None:
        self.landed: dict[tuple[HandoffId, int, int], tuple[bytes, bytes]] = {}
        self.finished: dict[HandoffId, int] = {}
        self.blocks: dict[HandoffId, tuple[BlockId, ...]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.failure: Exception | None = None

    def prepare(
        self,
        writer: Contract,
        verdict: Verdict,
        terms: HandoffTerms,
        blocks: Sequence[BlockId],
        *,
        held_tokens: int = 0,
    ) -> FakeLandingHandle:
        """See Landing."""
        self.blocks[terms.handoff_id] = tuple(blocks)
        sizes = {layer.layer: layer for layer in layer_blocks(writer, terms.required, terms.positions)}
        return FakeLandingHandle(landing=self, terms=terms, sizes=sizes)


@dataclass(slots=True, kw_only=True)
class FakeLandingHandle:
    """Writes one handoff into a FakeLanding."""

    landing: FakeLanding
    terms: HandoffTerms
    sizes: dict[int, LayerBlocks]
    max_abs_error: float | None = None
    brief: bool = False

    def land(self, header: ChunkHeader, keys: Buffer, values: Buffer) -> None:
        """See LandingHandle."""
        self.landing.entered.set()
        assert self.landing.gate.wait(10)
        if self.landing.failure is not None:
            raise self.landing.failure
        size = self.sizes[header.layer]
        for index in range(header.block_count):
            self.landing.landed[self.terms.handoff_id, header.layer, header.block_start + index] = (
                bytes(keys[index * size.key_bytes : (index + 1) * size.key_bytes]),
                bytes(values[index * size.value_bytes : (index + 1) * size.value_bytes]),
            )

    def finish(self, prompt_tokens: int) -> None:
        """See LandingHandle."""
        self.landing.finished[self.terms.handoff_id] = prompt_tokens


class FakeAlarms:
    """call_later on a clock that moves by hand."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._alarms: list[FakeAlarm] = []
        self.set_count = 0

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> FakeAlarm:
        """See CallLater."""
        self.set_count += 1
        alarm = FakeAlarm(due=self._clock.now() + delay_s, callback=callback)
        self._alarms.append(alarm)
        return alarm

    def advance(self, seconds: float) -> None:
        """Moves the clock and rings what became due."""
        self._clock.advance(seconds)
        due = [alarm for alarm in self._alarms if alarm.due <= self._clock.now()]
        self._alarms = [alarm for alarm in self._alarms if alarm not in due]
        for alarm in due:
            if not alarm.cancelled:
                alarm.callback()


@dataclass(slots=True, kw_only=True, eq=False)
class FakeAlarm:
    """One call that is due later."""

    due: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        """See Alarm."""
        self.cancelled = True


class FakeCache:
    """A writer's cache whose bytes tell layer and block; reads can be held open by `gate`."""

    def __init__(self, contract: Contract) -> None:
        self._sizes = {layer.layer: layer for layer in layer_blocks(contract, ())}
        self.reads: list[tuple[int, range]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.running = 0

    def __call__(self, layer: int, blocks: range) -> tuple[Buffer, Buffer]:
        """See BlockReader."""
        self.running += 1
        self.entered.set()
        assert self.gate.wait(10)
        self.reads.append((layer, blocks))
        keys = b"".join(self.block(layer, block)[0] for block in blocks)
        values = b"".join(self.block(layer, block)[1] for block in blocks)
        self.running -= 1
        return memoryview(keys), memoryview(values)

    def lends(self, layer: int, blocks: range) -> bool:
        """See BlockReader. Every read can be held open, so none is the loop's."""
        return False

    def into(self, layer: int, blocks: range, keys: memoryview, values: memoryview) -> None:
        """See BlockReader."""
        keys[:], values[:] = self(layer, blocks)

    def block(self, layer: int, block: int) -> tuple[bytes, bytes]:
        """Keys and values of one block."""
        size = self._sizes[layer]
        return bytes([2 * layer, block % 256]) * (size.key_bytes // 2), bytes(
            [2 * layer + 1, block % 256]
        ) * (size.value_bytes // 2)


class FakeDecoder:
    """Takes the handoff, yields its first token twice over and the end; frees the blocks."""

    def __init__(self, receiver: Receiver, pool: BlockPool) -> None:
        self._receiver = receiver
        self._pool = pool

    async def decode(self, job: DecodeJob) -> AsyncGenerator[DecodedTokens, None]:
        """See Decoder."""
        taken = self._receiver.take(job.handoff_id, job.decode, job.token_ids)
        try:
            yield DecodedTokens(token_ids=(taken.first_token_id, taken.first_token_id), finish_reason=None)
            yield DecodedTokens(token_ids=(taken.next_position,), finish_reason=FinishReason.LENGTH)
        finally:
            self._pool.free(taken.blocks, "sequence")


@dataclass(slots=True, kw_only=True)
class FakeReader:
    """A receiver with everything around it."""

    contract: Contract
    clock: ManualClock
    alarms: FakeAlarms
    pool: BlockPool
    landing: FakeLanding
    receiver: Receiver
    life: WorkerLife = READER

    async def describe(self) -> WorkerDescription:
        """See WorkerFacts."""
        return self.description()

    def description(self) -> WorkerDescription:
        """See ServedFacts."""
        load = WorkerLoad(running_requests=0, waiting_requests=0, blocks=self.pool.counts(), draining=False)
        counters = WorkerCounters(committed_handoffs=self.receiver.counters().committed)
        return WorkerDescription(
            life=self.life, role=Role.DECODE, contract=self.contract, counters=counters, load=load, pid=1
        )

    async def renew(self, handoff_id: HandoffId, life: WorkerLife) -> float:
        """See WorkerFacts."""
        return await self.receiver.renew(handoff_id, life)

    async def release(
        self, handoff_id: HandoffId, reason: str, *, writer_stopped: bool = False
    ) -> HandoffState | None:
        """See WorkerFacts."""
        return await self.receiver.release(handoff_id, reason, writer_stopped=writer_stopped)

    async def verdict(self, writer_digest: ContractDigest, reader_digest: ContractDigest) -> Verdict:
        """See WorkerFacts."""
        return self.receiver.verdict(writer_digest, reader_digest)

    async def drain(self) -> int:
        """See WorkerFacts."""
        self.receiver.drain()
        return self.receiver.held()

    async def emptied(self) -> None:
        """Returns when every block is back in the pool: at once, or when the last landing lets go."""
        freed = asyncio.Event()
        stop = self.pool.on_free(freed.set)
        while not self.all_free():
            freed.clear()
            await freed.wait()
        stop()

    def all_free(self) -> bool:
        """Whether every block is back in the pool."""
        counts = self.pool.counts()
        return counts.free == counts.total and self.receiver.held() == 0


def make_reader(
    *,
    contract: Contract | None = None,
    blocks: int = 64,
    policy: Policy | None = None,
    limits: ReceiverLimits | None = None,
    verifier: Verifier | None = None,
    judge: CanaryJudge | None = None,
    life: WorkerLife = READER,
) -> FakeReader:
    """A receiver over 64 blocks, leases of 30 s, no blocks kept for growth, that checks no witness.

    Each prompt lands as a whole, since FakeLanding knows blocks by their handoff.
    """
    contract = contract or make_contract()
    clock, pool, landing = ManualClock(), BlockPool(blocks), FakeLanding()
    alarms = FakeAlarms(clock)
    receiver = Receiver(
        life=life,
        contract=contract,
        policy=policy or Policy(),
        pool=pool,
        landing=landing,
        verifier=verifier or TakenOnTrust(),
        judge=judge,
        clock=clock,
        limits=limits or ReceiverLimits(growth_watermark_blocks=0, reuse_prefixes=False),
        call_later=alarms.call_later,
    )
    return FakeReader(
        contract=contract,
        clock=clock,
        alarms=alarms,
        pool=pool,
        landing=landing,
        receiver=receiver,
        life=life,
    )


@dataclass(slots=True, kw_only=True)
class Wire:
    """A reader, a port to it over some transport, and a sender for the writer's contract."""

    reader: FakeReader
    port: ReaderPort
    contract: Contract
    clock: ManualClock
    asleep: list[asyncio.Future[None]] = field(default_factory=list)
    """Renewals that wait; a test ends one by setting its result."""
    fell_asleep: asyncio.Event = field(default_factory=asyncio.Event)
    transports: WriterTransports | None = None
    agreed: tuple[TransportChoice | None, Carrier | None] = (None, None)
    """How payloads travel; None: in the messages."""
    loaded: list[Outgoing] = field(default_factory=list)

    def sender(self, port: ReaderPort | None = None, life: WorkerLife = WRITER) -> Sender:
        """A sender whose renewals wait until the test lets them go on."""
        sender = Sender(
            port=port or self.port,
            life=life,
            contract=self.contract,
            clock=self.clock,
            sleep=self._sleep,
            transports=self.transports,
        )
        sender.choice, sender._carrier = self.agreed
        return sender

    async def load(self, outgoing: Outgoing) -> None:
        """Makes its payloads travel as this wire's do, until `unload`."""
        carrier = self.agreed[1]
        if carrier is not None:
            await outgoing.load(carrier)
            self.loaded.append(outgoing)

    def unload(self) -> None:
        """Ends the regions of what was made without a sender."""
        while self.loaded:
            self.loaded.pop().unload(acknowledged=True)

    def terms(self, *, prompt_tokens: int = 40, number: int = 1, table_length: int = 128) -> HandoffTerms:
        """Terms of a prompt 0, 1, 2 ..."""
        terms = make_terms(
            handoff_id=make_handoff_id(number),
            writer=WRITER,
            reader=READER,
            contract=self.contract,
            contract_digest=contract_digest(self.contract),
            token_ids=range(prompt_tokens),
            table_length=table_length,
        )
        choice = self.agreed[0]
        return terms if choice is None else replace(terms, transport=choice.name)

    async def _sleep(self, seconds: float) -> None:
        waiting = asyncio.get_running_loop().create_future()
        self.asleep.append(waiting)
        self.fell_asleep.set()
        await waiting


@asynccontextmanager
async def in_process_wire(
    *, contract: Contract | None = None, reader: FakeReader | None = None
) -> AsyncIterator[Wire]:
    """Writer and reader on one event loop."""
    reader = reader or make_reader()
    yield Wire(
        reader=reader,
        port=InProcessReaderPort(reader.receiver),
        contract=contract or make_contract(),
        clock=reader.clock,
    )
    reader.receiver.close()


@asynccontextmanager
async def grpc_wire(
    *, contract: Contract | None = None, reader: FakeReader | None = None
) -> AsyncIterator[Wire]:
    """Writer and reader over gRPC on 127.0.0.1 and an ephemeral port."""
    reader = reader or make_reader()
    server = PLAINTEXT.make_server()
    add_decode_service(server, reader.receiver, FakeDecoder(reader.receiver, reader.pool))
    add_worker_service(server, reader)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    remote = GrpcReaderPort(f"127.0.0.1:{port}", READER)
    yield Wire(reader=reader, port=remote, contract=contract or make_contract(), clock=reader.clock)
    await remote.close()
    await server.stop(None)
    reader.receiver.close()


WIRES = {"in_process": in_process_wire, "grpc": grpc_wire}


def order_of(terms: HandoffTerms) -> tuple[int, ...]:
    """Prompt and first token, as an order to decode has them."""
    return (*terms.token_ids, FIRST_TOKEN_ID)


async def progress(*computed_tokens: int) -> AsyncGenerator[int, None]:
    """Prompt tokens computed so far, at once."""
    for tokens in computed_tokens:
        yield tokens


def first_token() -> asyncio.Future[int]:
    """The first output token, at once."""
    token = asyncio.get_running_loop().create_future()
    token.set_result(FIRST_TOKEN_ID)
    return token


async def all_parts(wire: Wire, terms: HandoffTerms, computed: Iterable[int] = ()) -> list[PushPart]:
    """Reserves and makes every part of a push without sending it; `computed`: prompt tokens as they come."""
    reservation = await wire.port.reserve(terms, MAX_OUTPUT_TOKENS)
    outgoing = Outgoing(
        terms=terms, reservation=reservation, contract=wire.contract, clock=wire.clock, executor=None
    )
    await wire.load(outgoing)
    tokens = progress(*(computed or (len(terms.token_ids),)))
    parts = outgoing.parts(tokens, FakeCache(wire.contract), first_token())
    return [part async for part in parts]


async def stream(parts: Iterable[PushPart]) -> AsyncGenerator[PushPart, None]:
    """Parts as a stream."""
    for part in parts:
        yield part


def expected_blocks(wire: Wire, terms: HandoffTerms) -> dict[tuple[HandoffId, int, int], tuple[bytes, bytes]]:
    """What a FakeLanding holds after a whole handoff."""
    cache = FakeCache(wire.contract)
    blocks = block_count(len(terms.token_ids), wire.contract.layout.block_size)
    return {
        (terms.handoff_id, layer, block): cache.block(layer, block)
        for layer in range(wire.contract.layer_count())
        for block in range(blocks)
    }
