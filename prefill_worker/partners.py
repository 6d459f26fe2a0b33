"""Decode workers that this prefill worker has paired with: one port and one sender per process life."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

from kvpact.clock import Clock
from kvpact.contract.contract import Contract
from kvpact.errors import ContractRefused, DataLoss, Fenced
from kvpact.handoff.jobs import Partner
from kvpact.handoff.messages import CanaryOutcome
from kvpact.handoff.port import ReaderPort
from kvpact.handoff.sender import Sender
from kvpact.handoff.transport_choice import GRPC, TransportChoice
from kvpact.handoff.writer_transports import WriterTransports
from kvpact.types import Verdict, VerdictWord, WorkerLife

logger = logging.getLogger(__name__)


class Probe(Protocol):
    """Probes a pair whose contracts agree."""

    async def run(self, sender: Sender, reader: WorkerLife, contract: Contract) -> CanaryOutcome | None:
        """How it went; None where no probe fits. `contract` is the reader's. Raises KvpactError."""


class OwnedPort(ReaderPort, Protocol):
    """A port with something to close."""

    async def close(self) -> None:
        """Ends the connection. Idempotent."""


OpenPort = Callable[[Partner], OwnedPort]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A partner with its port, and its verdict on this worker's cache once it gave one."""

    partner: Partner
    port: OwnedPort
    sender: Sender
    verdict: Verdict | None = None
    canary: CanaryOutcome | None = None
    """How the pair's probe went; None until it ran, and again after bytes of this pair were refused."""
    transport: TransportChoice | None = None
    """How payloads travel, once the contracts agreed."""


class Partners:
    """Owns the ports. `connect` alone replaces a decode worker's old life by its new one."""

    def __init__(
        self,
        *,
        life: WorkerLife,
        contract: Contract,
        clock: Clock,
        open_port: OpenPort,
        probe: Probe | None,
        transports: WriterTransports | None = None,
    ) -> None:
        """`probe` None: pairs are used as soon as their contracts agree; for laboratory runs."""
        self._life = life
        self._contract = contract
        self._probe = probe
        self._clock = clock
        self._open_port = open_port
        self._transports = transports or WriterTransports(wanted=GRPC)
        self._connections: dict[str, Connection] = {}
        self._changing: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """One lock for each decode worker, so that a dead one doesn't hold up the others."""

    async def connect(self, partner: Partner) -> Connection:
        """Offers this worker's contract to `partner` and probes the pair; a refusal is a normal answer.

        The probe runs once per pair of lives, again after it failed, and after `doubt`.

        Raises:
            KvpactError: the partner can't be reached, is another life, or can't read the contract.
        """
        name = partner.life.worker
        async with self._changing[name]:
            held = self._connections.get(name)
            if held is None or held.partner != partner:
                if held is not None:
                    await held.port.close()
                held = self._connect(partner)
                self._connections[name] = held
            answer = await held.sender.pair(partner.life)
            verdict, canary = answer.verdict, held.canary
            if self._probe and verdict.word is not VerdictWord.REJECT and not (canary and canary.passed):
                canary = await self._probe.run(held.sender, partner.life, answer.reader_contract)
            paired = dataclasses.replace(held, verdict=verdict, canary=canary, transport=held.sender.choice)
            _log_choice(name, held.transport, paired.transport)
            self._connections[name] = paired
            return paired

    def doubt(self, partner: Partner) -> None:
        """Makes the pair prove itself by another probe, since the partner refused bytes or rows of it."""
        held = self._connections.get(partner.life.worker)
        if held is not None and held.partner == partner:
            self._connections[partner.life.worker] = dataclasses.replace(held, verdict=None, canary=None)

    async def usable(self, partner: Partner) -> Connection:
        """The connection to a partner that took this worker's cache; pairs first where it never did.

        Raises:
            ContractRefused: the partner refuses this worker's cache.
            DataLoss: the pair's probe failed.
            Fenced: another life of that worker has been connected since.
            KvpactError: as `connect`.
        """
        held = self._connections.get(partner.life.worker)
        if held is None or held.verdict is None:
            held = await self.connect(partner)
        if held.partner != partner:
            raise Fenced(
                f"decode worker {partner.life.worker} has another life than the one that is meant",
                expected=held.partner.life.incarnation.hex(),
                found=partner.life.incarnation.hex(),
            )
        assert held.verdict is not None
        if held.verdict.word is VerdictWord.REJECT:
            fields = ", ".join(difference.field for difference in held.verdict.differences)
            raise ContractRefused(
                f"decode worker {partner.life.worker} refuses the cache of {self._life.worker}: {fields}",
                verdict=held.verdict,
            )
        if held.canary is not None and not held.canary.passed:
            raise DataLoss(
                f"the probe of {self._life.worker} with {partner.life.worker} failed: {held.canary.finding}",
                check="canary",
            )
        return held

    def verdict(self, writer_digest: bytes, reader_digest: bytes) -> Verdict | None:
        """A verdict that a partner gave."""
        for connection in self._connections.values():
            verdict = connection.verdict
            if verdict and (verdict.writer_digest, verdict.reader_digest) == (writer_digest, reader_digest):
                return verdict
        return None

    def quarantined_bytes(self) -> int:
        """Memory for payloads that nobody may have, since a write that was given up may still read it."""
        return self._transports.quarantined_bytes()

    async def close(self) -> None:
        """Closes every port."""
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.port.close()
        self._transports.close()

    def _connect(self, partner: Partner) -> Connection:
        port = self._open_port(partner)
        sender = Sender(
            port=port,
            life=self._life,
            contract=self._contract,
            clock=self._clock,
            transports=self._transports,
        )
        return Connection(partner=partner, port=port, sender=sender)


def _log_choice(partner: str, before: TransportChoice | None, now: TransportChoice | None) -> None:
    """Once per pair, and again when it changes."""
    if now is not None and now != before:
        logger.info("payloads to %s travel over %s: %s", partner, now.name, now.reason)
