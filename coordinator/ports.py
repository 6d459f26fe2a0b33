"""What the coordinator asks of workers, whatever carries it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvpact.contract.contract import Contract
from kvpact.handoff.jobs import (
    DecodedTokens,
    DecodeJob,
    GenerateJob,
    Paired,
    Partner,
    PrefillEvent,
    PrefillJob,
)
from kvpact.handoff.messages import WorkerDescription
from kvpact.types import HandoffId, Role, WorkerLife


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredWorker:
    """One life of a worker as it made itself known."""

    life: WorkerLife
    role: Role
    endpoint: str
    """host:port on which it serves."""
    contract: Contract
    pid: int

    def partner(self) -> Partner:
        """What a prefill worker is told of it, where it is a decode worker."""
        return Partner(life=self.life, endpoint=self.endpoint)


Item_co = TypeVar("Item_co", covariant=True)


class Stream(Protocol[Item_co]):
    """Items of a call that already began. Closing it before its end cancels the call."""

    def __aiter__(self) -> AsyncIterator[Item_co]:
        """Itself."""

    async def __anext__(self) -> Item_co:
        """The next item; raises KvpactError where the worker failed or is gone."""

    async def aclose(self) -> None:
        """Ends the call. Idempotent."""


class WorkerPort(Protocol):
    """What both roles answer."""

    async def release(self, handoff_id: HandoffId, reason: str) -> None:
        """Gives a handoff up at any state. Idempotent. Raises KvpactError."""

    async def describe(self) -> WorkerDescription:
        """Counters and load now. Raises KvpactError."""

    async def drain(self) -> int:
        """Lets it take no new work from now on; requests that still run. Idempotent. Raises KvpactError."""

    async def close(self) -> None:
        """Ends the channel; running calls raise Unavailable. Idempotent."""


class PrefillPort(WorkerPort, Protocol):
    """A prefill worker."""

    async def connect(self, decode: Partner) -> Paired:
        """Pairs it with a decode worker. A reject is an answer.

        Raises:
            DataLoss: the probe of the pair failed; check is "canary".
            KvpactError: one of them can't be reached.
        """

    def prefill(self, job: PrefillJob) -> Stream[PrefillEvent]:
        """Begins to compute a prompt."""


class DecodePort(WorkerPort, Protocol):
    """A decode worker."""

    def decode(self, job: DecodeJob) -> Stream[DecodedTokens]:
        """Begins to decode; once per handoff."""

    def generate(self, job: GenerateJob) -> Stream[DecodedTokens]:
        """Begins to compute and decode a prompt on this worker alone."""


class Transport(Protocol):
    """Opens ports."""

    def prefill_port(self, endpoint: str) -> PrefillPort:
        """A port to the prefill worker at host:port."""

    def decode_port(self, endpoint: str) -> DecodePort:
        """A port to the decode worker at host:port."""
