"""Readers of the corpus, without an engine: a receiver over rows in dictionaries or over a worker's cache."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from decode_worker.landing import CacheLanding, CacheLandingHandle
from decode_worker.verifier import CacheVerifier
from kvpact.clock import ManualClock
from kvpact.contract.compare import Policy
from kvpact.contract.contract import Contract
from kvpact.contract.convert import Converter, RotationCache
from kvpact.contract.witness import Rows, check_rows
from kvpact.contract.witness_places import Place
from kvpact.errors import DataLoss
from kvpact.handoff.chunks import layer_blocks
from kvpact.handoff.grants import Marks
from kvpact.handoff.handoff_table import ReceiverLimits
from kvpact.handoff.messages import Buffer, ChunkHeader, HandoffTerms, Witness, WitnessReport
from kvpact.handoff.receiver import Receiver
from kvpact.handoff.terms import positions_of
from kvpact.handoff.trust import Landed
from kvpact.handoff.witness_terms import places_to_show
from kvpact.kvcache.block_pool import BlockPool
from kvpact.kvcache.paged_cache import PagedCache
from kvpact.types import BlockId, Verdict, WorkerLife
from tests.handoff_fakes import FakeAlarms

WRITER = WorkerLife(worker="golden-prefill", incarnation=b"golden writer 01")
READER = WorkerLife(worker="golden-decode", incarnation=b"golden reader 01")
BLOCKS = 8


def places(writer: Contract, terms: HandoffTerms, nonce: bytes) -> tuple[Place, ...]:
    """Rows that a reader asks for by its nonce; tokens of the corpus stand at positions 0, 1, 2 ..."""
    return places_to_show(writer, terms, nonce=nonce, first_computed=0)


class RowLanding:
    """Keeps what lands by layer and token: stored numbers, or real ones where there are scales."""

    def __init__(self, reader: Contract) -> None:
        self._reader = reader
        self.keys: dict[tuple[int, int], torch.Tensor] = {}
        """(layer, token) -> [H, D]."""
        self.values: dict[tuple[int, int], torch.Tensor] = {}

    def prepare(
        self,
        writer: Contract,
        verdict: Verdict,
        terms: HandoffTerms,
        blocks: Sequence[BlockId],
        *,
        held_tokens: int = 0,
    ) -> RowLandingHandle:
        """See Landing."""
        return RowLandingHandle(
            landing=self,
            converter=Converter(writer, self._reader),
            positions_T=torch.tensor(positions_of(terms.positions)),
            rotations=RotationCache(table_length=terms.table_length),
        )

    def verify(self, landed: Landed, witnesses: Sequence[Witness]) -> WitnessReport:
        """See Verifier."""
        asked = places(landed.writer, landed.terms, landed.nonce)
        shown = [Place(layer=witness.layer, token=witness.position) for witness in witnesses]
        if tuple(shown) != asked:
            raise DataLoss(f"witnesses are of {shown}; asked for were {list(asked)}", check="witness")
        for _, group in groupby(witnesses, lambda witness: landed.writer.group_of(witness.layer)):
            rows = self._rows(landed.writer, tuple(group))
            check_rows(landed.writer, self._reader, rows, table_length=landed.terms.table_length)
        above = any(witness.position > 0 for witness in witnesses)
        return WitnessReport(row_count=len(shown), shows_rotation=above)

    def _rows(self, writer: Contract, witnesses: tuple[Witness, ...]) -> Rows:
        at = [(witness.layer, witness.position) for witness in witnesses]
        group = writer.group_of(witnesses[0].layer)
        return Rows(
            layers=tuple(layer for layer, _ in at),
            positions_N=torch.tensor([position for _, position in at]),
            raw_key_NHD=_numbers([witness.raw_key for witness in witnesses], group.kv_heads),
            attended_key_NHD=_numbers([witness.attended_key for witness in witnesses], group.kv_heads),
            value_NHD=_numbers([witness.value for witness in witnesses], group.kv_heads),
            landed_key_NHD=torch.stack([self.keys[place].float() for place in at]),
            landed_value_NHD=torch.stack([self.values[place].float() for place in at]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowLandingHandle:
    """One handoff's way into a RowLanding."""

    landing: RowLanding
    converter: Converter
    positions_T: torch.Tensor
    rotations: RotationCache
    max_abs_error: float | None = None
    brief: bool = False

    def land(self, header: ChunkHeader, keys: Buffer, values: Buffer) -> None:
        """See LandingHandle."""
        size = self.converter.writer.layout.block_size
        start = header.block_start * size
        end = min(start + header.block_count * size, len(self.positions_T))
        landed = self.converter.land(
            header.layer,
            keys,
            values,
            writer_block_start=header.block_start,
            writer_block_count=header.block_count,
            positions_T=self.positions_T[start:end],
            rotations=self.rotations,
        )
        keys_THD = _real(landed.keys, landed.key_scales)
        values_THD = _real(landed.values, landed.value_scales)
        for token in range(start, end):
            self.landing.keys[header.layer, token] = keys_THD[token - start].clone()
            self.landing.values[header.layer, token] = values_THD[token - start].clone()

    def finish(self, prompt_tokens: int) -> None:
        """See LandingHandle. Rows are kept one by one, so there is no tail."""


class WorkerLanding(CacheLanding):
    """The decode worker's own landing and verifier over its paged cache, and what lies there afterwards."""

    def __init__(self, reader: Contract) -> None:
        self.cache = PagedCache(reader, BLOCKS, torch.device("cpu"))
        super().__init__(self.cache)
        self.verify = CacheVerifier(self.cache).verify
        self._landed: tuple[Contract, HandoffTerms, Sequence[BlockId]] | None = None

    def prepare(
        self,
        writer: Contract,
        verdict: Verdict,
        terms: HandoffTerms,
        blocks: Sequence[BlockId],
        *,
        held_tokens: int = 0,
    ) -> CacheLandingHandle:
        """See Landing."""
        self._landed = writer, terms, blocks
        return super().prepare(writer, verdict, terms, blocks, held_tokens=held_tokens)

    @property
    def keys(self) -> dict[tuple[int, int], torch.Tensor]:
        """(layer, token) -> [H, D]."""
        return {place: self.cache.keys_at(place[0], rows_H1)[:, 0] for place, rows_H1 in self._rows()}

    @property
    def values(self) -> dict[tuple[int, int], torch.Tensor]:
        """(layer, token) -> [H, D]."""
        return {place: self.cache.values_at(place[0], rows_H1)[:, 0] for place, rows_H1 in self._rows()}

    def _rows(self) -> Iterator[tuple[tuple[int, int], torch.Tensor]]:
        """Row numbers of every token that was sent."""
        if self._landed is None:
            return
        writer, terms, blocks = self._landed
        tokens = len(terms.token_ids)
        slots_T = self.cache.slots(blocks, 0, tokens)
        for layer in layer_blocks(writer, terms.required, terms.positions):
            heads = self.cache.contract.group_of(layer.layer).kv_heads
            for token in range(layer.first_block * writer.layout.block_size, tokens):
                yield (layer.layer, token), self.cache.rows(slots_T[token : token + 1], heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenReader:
    """A receiver and where its bytes land."""

    receiver: Receiver
    landing: RowLanding | WorkerLanding
    pool: BlockPool


@asynccontextmanager
async def golden_reader(
    contract: Contract,
    nonce: bytes,
    kind: type[RowLanding] | type[WorkerLanding] = RowLanding,
    *,
    lossy: bool = False,
    chunk_cap_bytes: int = 1 << 20,
) -> AsyncIterator[GoldenReader]:
    """A reader whose first reservation has generation 1 and the given nonce."""
    clock, landing, pool = ManualClock(), kind(contract), BlockPool(BLOCKS)
    receiver = Receiver(
        life=READER,
        contract=contract,
        policy=Policy(lossy="allow" if lossy else "reject"),
        pool=pool,
        landing=landing,
        verifier=landing,
        judge=None,
        clock=clock,
        limits=ReceiverLimits(growth_watermark_blocks=0, chunk_cap_bytes=chunk_cap_bytes),
        call_later=FakeAlarms(clock).call_later,
        marks=Marks(new_nonce=lambda: nonce),
    )
    yield GoldenReader(receiver=receiver, landing=landing, pool=pool)
    receiver.close()


def _real(x_THD: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return x_THD if scales is None else x_THD.float() * scales


def _numbers(rows: Sequence[bytes], heads: int) -> torch.Tensor:
    """Float32 rows [N, H, D]."""
    return torch.from_numpy(np.frombuffer(b"".join(rows), "<f4").reshape(len(rows), heads, -1).copy())
