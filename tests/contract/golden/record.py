"""Makes one case's handoff as its writer would, and records it while a real receiver takes it in."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvpact.contract.contract import Contract, Quantization, Rotary
from kvpact.contract.convert import TORCH_DTYPES
from kvpact.contract.identity import contract_digest
from kvpact.errors import KvpactError
from kvpact.handoff.capture import Capture
from kvpact.handoff.capture_recorder import RecordingReaderPort
from kvpact.handoff.chunks import block_count, chunk_checksum, layer_blocks
from kvpact.handoff.codec import contract_to_bytes
from kvpact.handoff.inprocess_transport import InProcessReaderPort
from kvpact.handoff.messages import (
    Chunk,
    ChunkHeader,
    Commit,
    HandoffTerms,
    Open,
    PairOffer,
    PushPart,
    Reservation,
    Witness,
)
from kvpact.handoff.terms import make_terms
from kvpact.types import AxisOrder, HandoffId, KeyState, LaneOrder
from tests.contract.golden import model
from tests.contract.golden.cases import Case, Damage, Landing, table
from tests.contract.golden.faults import faulty
from tests.contract.golden.reader import READER, WRITER, RowLanding, WorkerLanding, golden_reader, places
from tests.handoff_fakes import stream
from tests.reference_cache import pack

MAX_OUTPUT_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterRows:
    """What one layer's writer has, float32, rotary lanes in the order that its header names."""

    raw_THD: torch.Tensor
    attended_THD: torch.Tensor
    value_THD: torch.Tensor


def record(case: Case) -> Capture:
    """The capture of one case; the same on every run. A refused writer pushes to a reader of its own form."""
    return asyncio.run(_record(case))


def handoff_id(case: Case) -> HandoffId:
    """16 bytes that follow from the name."""
    return HandoffId(hashlib.sha256(case.name.encode()).digest()[:16])


def rows_of(case: Case) -> list[WriterRows]:
    """What the writer's model computed, layer by layer, as an honest look into its attention would show."""
    shown = case.stored_as or case.writer
    runs = shown.layer_groups[0].rotary.tables[0]
    layers = model.run(runs.inv_freq, runs.amplitude, model.prompt(case.tokens), _windows(case.writer))
    late = 1 if case.damage is Damage.ONE_POSITION_LATE else 0
    positions = np.arange(case.tokens) + late
    out = []
    for layer, rows in enumerate(layers):
        raw, value = rows.raw_key_THD[: case.tokens], rows.value_THD[: case.tokens]
        attended = model.turned(raw, runs.inv_freq, runs.amplitude, positions)
        rotary = case.writer.group_of(layer).rotary
        out.append(
            WriterRows(
                raw_THD=_in_lanes(_float32(raw), rotary),
                attended_THD=_in_lanes(_float32(attended), rotary),
                value_THD=_float32(value),
            )
        )
    return out


def stored_bytes(case: Case) -> list[tuple[bytes, bytes]]:
    """Keys and values of each layer as they lie in the writer's cache, whatever its header says."""
    shown = case.stored_as or case.writer
    out = []
    for layer, rows in enumerate(rows_of(case)):
        rotary = shown.group_of(layer).rotary
        keys_THD = rows.raw_THD if rotary.key_state is KeyState.RAW else rows.attended_THD
        if rotary.stored_lane_order is not case.writer.group_of(layer).rotary.stored_lane_order:
            keys_THD = _in_lanes(keys_THD, rotary)
        if case.damage is Damage.TURN_TWICE:
            again = model.turned(keys_THD.double().numpy(), table(), 1.0, np.arange(case.tokens))
            keys_THD = _float32(again)
        values_THD, value_layout = rows.value_THD, shown.layout
        if case.damage is Damage.SWAP_KEYS_AND_VALUES:
            keys_THD, values_THD = values_THD, keys_THD
        if case.damage is Damage.SWAP_VALUE_AXES:
            value_layout = replace(shown.layout, axis_order=AxisOrder.HND)
        keys_THD = keys_THD / _scale(shown.layout.key_quantization, layer)
        values_THD = values_THD / _scale(shown.layout.value_quantization, layer)
        keys_THD = keys_THD.to(TORCH_DTYPES[shown.layout.key_dtype])
        values_THD = values_THD.to(TORCH_DTYPES[shown.layout.value_dtype])
        out.append((pack(keys_THD, shown.layout), pack(values_THD, value_layout)))
    return out


def _scale(quantization: Quantization, layer: int) -> float:
    return quantization.fixed_scales[layer] if quantization.fixed_scales else 1.0


async def _record(case: Case) -> Capture:
    captures: list[Capture] = []
    honest = case.landing is not Landing.REFUSED
    nonce = hashlib.sha256(b"nonce of " + case.name.encode()).digest()[:16]
    contract = case.reader if honest else case.writer
    kind = WorkerLanding if case.lossy or case.landing is Landing.FAILED else RowLanding
    limits = {"lossy": case.lossy, "chunk_cap_bytes": case.chunk_cap_bytes}
    async with golden_reader(contract, nonce, kind, **limits) as reader:
        port = RecordingReaderPort(InProcessReaderPort(reader.receiver), captures.append)
        digest = contract_digest(case.writer)
        await port.pair(
            PairOffer(
                schema_major=case.writer.schema.major,
                contract_digest=digest,
                writer=WRITER,
                reader=READER,
                contract=contract_to_bytes(case.writer),
            )
        )
        terms = make_terms(
            handoff_id=handoff_id(case),
            writer=WRITER,
            reader=READER,
            contract=case.writer,
            contract_digest=digest,
            token_ids=model.prompt(case.tokens)[:-1],
            table_length=case.tokens + MAX_OUTPUT_TOKENS,
        )
        reservation = await port.reserve(terms, MAX_OUTPUT_TOKENS)
        try:
            await port.push(stream(faulty(case.fault, terms, [*_parts(case, terms, reservation)])))
        except KvpactError:
            assert case.landing in (Landing.CAUGHT, Landing.FAILED), f"{case.name} is honest"
    (capture,) = captures
    return capture


def _parts(case: Case, terms: HandoffTerms, reservation: Reservation) -> Iterator[PushPart]:
    """Open, the chunks of each prefill step, commit."""
    yield Open(
        handoff_id=terms.handoff_id,
        generation=reservation.generation,
        contract_digest=terms.contract_digest,
    )
    stored, payload_bytes, sequence = stored_bytes(case), 0, 0
    layers = {layer.layer: layer for layer in layer_blocks(case.writer, terms.required)}
    for sequence, (number, blocks) in enumerate(_spans(case, terms)):
        layer = layers[number]
        keys, values = (
            data[blocks.start * size : blocks.stop * size]
            for data, size in zip(stored[number], (layer.key_bytes, layer.value_bytes), strict=True)
        )
        header = ChunkHeader(
            handoff_id=terms.handoff_id,
            generation=reservation.generation,
            sequence=sequence,
            layer=number,
            block_start=blocks.start,
            block_count=len(blocks),
            key_bytes=len(keys),
            value_bytes=len(values),
        )
        payload_bytes += len(keys) + len(values)
        yield _chunk(terms, header, keys, values)
    yield Commit(
        chunk_count=sequence + 1,
        payload_bytes=payload_bytes,
        first_token_id=model.prompt(case.tokens)[-1],
        witnesses=_witnesses(case, terms, reservation),
    )


def _spans(case: Case, terms: HandoffTerms) -> Iterator[tuple[int, range]]:
    """Layer and blocks of each chunk."""
    size = case.writer.layout.block_size
    layers = layer_blocks(case.writer, terms.required)
    sent = {layer.layer: 0 if case.sends_all else layer.first_block for layer in layers}
    for computed in (*case.steps, case.tokens):
        filled = computed // size if computed < case.tokens else block_count(computed, size)
        for layer in sorted(sent, reverse=case.layers_backwards):
            while sent[layer] < filled:
                stop = min(filled, sent[layer] + (case.chunk_blocks or filled))
                yield layer, range(sent[layer], stop)
                sent[layer] = stop


def _chunk(terms: HandoffTerms, header: ChunkHeader, keys: bytes, values: bytes) -> Chunk:
    checksum = chunk_checksum(header, terms.contract_digest, terms.token_digest, keys, values)
    return Chunk(header=header, checksum=checksum, keys=keys, values=values)


def _witnesses(case: Case, terms: HandoffTerms, reservation: Reservation) -> tuple[Witness, ...]:
    """Rows that the reader's nonce asks for, as an honest look into the writer's attention shows them."""
    rows = rows_of(case)
    return tuple(
        Witness(
            layer=place.layer,
            position=place.token,
            raw_key=rows[place.layer].raw_THD[place.token].numpy().tobytes(),
            attended_key=rows[place.layer].attended_THD[place.token].numpy().tobytes(),
            value=rows[place.layer].value_THD[place.token].numpy().tobytes(),
        )
        for place in places(case.writer, terms, reservation.nonce)
    )


def _windows(contract: Contract) -> tuple[int | None, ...]:
    return tuple(contract.group_of(layer).window for layer in range(model.LAYERS))


def _float32(x_THD: model.Array) -> torch.Tensor:
    return torch.from_numpy(x_THD.astype(np.float32))


def _in_lanes(x_THD: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Half-split lanes, as the model has them, in the stored order."""
    if rotary.stored_lane_order is LaneOrder.HALF_SPLIT:
        return x_THD
    return x_THD.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
