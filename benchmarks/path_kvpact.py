"""A whole handoff between two processes: reserve, push from a paged cache, landing in a paged cache, commit.

Checksums on both sides, witnesses as the contract asks, no conversion, no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Literal

import torch

from benchmarks.ends import Facts, Missing
from benchmarks.handoff_caches import TOKEN_BYTES, WriterCache, blocks_for, contract_for, faulted_cache
from decode_worker.landing import CacheLanding
from decode_worker.service import add_decode_service
from decode_worker.verifier import CacheVerifier
from decode_worker.worker import LANDING_THREADS
from kvpact.clock import MonotonicClock, new_handoff_id
from kvpact.config import HandoffConfig
from kvpact.contract.compare import Policy
from kvpact.contract.convert_fast import warm_up
from kvpact.errors import KvpactError, Unavailable
from kvpact.handoff.grpc_transport import GrpcReaderPort
from kvpact.handoff.handoff_table import ReceiverLimits
from kvpact.handoff.jobs import DecodedTokens
from kvpact.handoff.malloc import tune_malloc
from kvpact.handoff.messages import HandoffState, HandoffTerms, WorkerDescription
from kvpact.handoff.outgoing import Shown
from kvpact.handoff.receiver import Receiver
from kvpact.handoff.sender import Sender
from kvpact.handoff.sending import SendingHandoff, Sent
from kvpact.handoff.service import add_worker_service
from kvpact.handoff.terms import make_terms
from kvpact.handoff.transport_settings import make_reader_transports, make_writer_transports
from kvpact.kvcache.block_pool import BlockPool
from kvpact.serving.server_transport import WorkerServer
from kvpact.types import ContractDigest, HandoffId, Verdict, WorkerLife

Transport = Literal["grpc", "shm", "nixl"]
VOCABULARY = 49152
FIRST_TOKEN_ID = 7
WRITER = WorkerLife(worker="prefill-0", incarnation=b"w" * 16)
READER = WorkerLife(worker="decode-0", incarnation=b"r" * 16)


class FarEnd:
    """A receiver over a real pool and cache, behind the decode worker's own service."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def open(self, most_bytes: int) -> Facts:
        """See Far."""
        _be_a_worker()
        warm_up()
        contract, settings = contract_for(most_bytes), _settings(self._transport, most_bytes)
        limits = ReceiverLimits(
            lease_s=settings.lease_s, chunk_cap_bytes=settings.chunk_cap_bytes, reuse_prefixes=True
        )
        blocks = blocks_for(most_bytes) + limits.growth_watermark_blocks
        cache = faulted_cache(contract, blocks)
        self._executor = ThreadPoolExecutor(LANDING_THREADS)
        self._receiver = Receiver(
            life=READER,
            contract=contract,
            policy=Policy(),
            pool=BlockPool(blocks),
            landing=CacheLanding(cache),
            verifier=CacheVerifier(cache),
            judge=None,
            clock=MonotonicClock(),
            limits=limits,
            executor=self._executor,
            transports=make_reader_transports(settings, READER),
        )
        self._server = WorkerServer()
        self._server.add(lambda server: add_decode_service(server, self._receiver, _NoDecoder()))
        self._server.add(lambda server: add_worker_service(server, _ReceiverFacts(self._receiver)))
        return {"endpoint": await self._server.start(bind="127.0.0.1", port=0, advertise_host="127.0.0.1")}

    async def expect(self, payload_bytes: int) -> None:
        """See Far. The service takes handoffs in by itself."""

    async def close(self) -> None:
        """See Far."""
        await self._server.stop()
        self._receiver.close()
        self._executor.shutdown()


class NearEnd:
    """A sender over a full cache."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._count = 0

    async def open(self, facts: Facts, most_bytes: int) -> None:
        """See Near. Raises Missing where the pair has no such transport."""
        _be_a_worker()
        self._contract = contract_for(most_bytes)
        self._cache = WriterCache(self._contract, most_bytes)
        self._port = GrpcReaderPort(facts["endpoint"], READER)
        self._transports = make_writer_transports(_settings(self._transport, most_bytes), WRITER)
        self._sender = Sender(
            port=self._port,
            life=WRITER,
            contract=self._contract,
            clock=MonotonicClock(),
            transports=self._transports,
        )
        try:
            await self._sender.pair(READER)
        except Unavailable as error:
            raise Missing(str(error)) from error

    async def carry(self, payload_bytes: int) -> float:
        """See Near. From the terms to the receipt, for whole tokens; the room is given back outside the time.

        Each prompt begins with another token, so that the reader holds nothing of it.
        """
        tokens = max(1, payload_bytes // TOKEN_BYTES)
        self._count += 1
        token_ids = tuple((self._count + token) % VOCABULARY for token in range(tokens))
        start_s = perf_counter()
        terms = make_terms(
            handoff_id=new_handoff_id(),
            writer=WRITER,
            reader=READER,
            contract=self._contract,
            contract_digest=self._sender.digest,
            token_ids=token_ids,
            table_length=tokens + 1,
        )
        sent = await self._hand_over(terms)
        spent_s = perf_counter() - start_s
        if sent.payload_bytes < tokens * TOKEN_BYTES:
            raise ConnectionError(f"{sent.payload_bytes} bytes were sent of {tokens * TOKEN_BYTES}")
        await self._port.release(terms.handoff_id, "measured")
        return spent_s * payload_bytes / (tokens * TOKEN_BYTES)

    async def close(self) -> None:
        """See Near."""
        await self._port.close()
        self._transports.close()

    async def _hand_over(self, terms: HandoffTerms) -> Sent:
        first_token = asyncio.get_running_loop().create_future()
        first_token.set_result(FIRST_TOKEN_ID)
        computed = _all_at_once(len(terms.token_ids))
        async with self._sender.reserved(terms, 1) as handoff:
            return await handoff.send(computed, self._cache, first_token, lambda: self._shown(handoff))

    def _shown(self, handoff: SendingHandoff) -> Shown:
        return Shown(rows=tuple(self._cache.witness(place) for place in handoff.places_to_show()))


def _be_a_worker() -> None:
    """Malloc and threads as a worker on half of two cores has them."""
    tune_malloc()
    torch.set_num_threads(1)


def _settings(transport: Transport, most_bytes: int) -> HandoffConfig:
    """A deployment's defaults, with staging for the largest payload and what lies between its chunks."""
    return HandoffConfig(transport=transport, staging_bytes=most_bytes + (most_bytes >> 3) + (16 << 20))


async def _all_at_once(tokens: int) -> AsyncIterator[int]:
    yield tokens


class _NoDecoder:
    """Nothing is decoded here."""

    def decode(self, job: object) -> AsyncGenerator[DecodedTokens, None]:
        raise NotImplementedError

    def generate(self, job: object) -> AsyncGenerator[DecodedTokens, None]:
        raise NotImplementedError


class _ReceiverFacts:
    """As much of WorkerFacts as a handoff needs."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    async def describe(self) -> WorkerDescription:
        raise KvpactError("this is no worker")

    async def renew(self, handoff_id: HandoffId, life: WorkerLife) -> float:
        return await self._receiver.renew(handoff_id, life)

    async def release(
        self, handoff_id: HandoffId, reason: str, *, writer_stopped: bool = False
    ) -> HandoffState | None:
        return await self._receiver.release(handoff_id, reason, writer_stopped=writer_stopped)

    async def verdict(self, writer_digest: ContractDigest, reader_digest: ContractDigest) -> Verdict:
        return self._receiver.verdict(writer_digest, reader_digest)

    async def drain(self) -> int:
        return 0
