"""Chunks read before they were written, or lying over one another: hashes agree, or they are refused."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpact.cli.pair import InProcessPair
from kvpact.errors import BadRequest, DataLoss, KvpactError
from kvpact.handoff.chunks import chunk_checksum
from kvpact.handoff.messages import Buffer, Chunk, Commit, HandoffTerms, PushPart
from kvpact.types import Sampling
from tests.factories import make_contract
from tests.fakes import identified_engine, make_tiny_model, prompt_of
from tests.handoff_fakes import (
    MAX_OUTPUT_TOKENS,
    READER,
    FakeCache,
    Wire,
    all_parts,
    first_token,
    in_process_wire,
    order_of,
    stream,
)
from tests.references import golden

TOKENS, BLOCK = 40, 16
CHUNKS = {16: (16, 32, 40), 7: (7, 14, 21, 28, 35, 40)}


class FillingCache(FakeCache):
    """A writer's cache in which a block holds other bytes until its last token is computed."""

    computed = 0

    def block(self, layer: int, block: int) -> tuple[bytes, bytes]:
        keys, values = super().block(layer, block)
        if min((block + 1) * BLOCK, TOKENS) > self.computed:
            return b"\xee" * len(keys), b"\xee" * len(values)
        return keys, values


async def computing(
    cache: FillingCache, ends: tuple[int, ...], second: asyncio.Event
) -> AsyncGenerator[int, None]:
    """Prompt tokens computed so far; the second chunk's compute takes until `second` is set."""
    for index, end in enumerate(ends):
        if index == 1:
            await second.wait()
        cache.computed = end
        yield end


def hashes(blocks: dict[tuple[int, int], tuple[bytes, bytes]]) -> dict[tuple[int, int], str]:
    return {place: hashlib.sha256(keys + values).hexdigest() for place, (keys, values) in blocks.items()}


def written(wire: Wire) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    whole = FakeCache(wire.contract)
    return {(layer, block): whole.block(layer, block) for layer in range(2) for block in range(3)}


def landed(wire: Wire, terms: HandoffTerms) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    return {
        (layer, block): rows
        for (handoff, layer, block), rows in wire.reader.landing.landed.items()
        if handoff == terms.handoff_id
    }


@pytest.mark.parametrize("size", CHUNKS)
async def test_every_block_has_one_hash_on_both_ends_though_the_second_chunk_comes_late(size: int) -> None:
    async with in_process_wire() as wire:
        await wire.sender().pair(READER)
        terms, cache, second = wire.terms(prompt_tokens=TOKENS), FillingCache(wire.contract), asyncio.Event()
        sending = asyncio.create_task(
            wire.sender().hand_over(
                terms, MAX_OUTPUT_TOKENS, computing(cache, CHUNKS[size], second), cache, first_token()
            )
        )
        if size >= BLOCK:
            assert await asyncio.to_thread(wire.reader.landing.entered.wait, 10)
            assert {block for _, block in landed(wire, terms)} <= {0}
        second.set()
        await sending
        assert hashes(landed(wire, terms)) == hashes(written(wire))
        taken = wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms))
        assert taken.next_position == TOKENS
        wire.reader.pool.free(taken.blocks, "sequence")


async def test_blocks_that_are_read_before_they_are_written_have_other_hashes() -> None:
    """Progress that is told before it is made: what the sender relies on."""

    async def boasting() -> AsyncGenerator[int, None]:
        yield TOKENS

    async with in_process_wire() as wire:
        await wire.sender().pair(READER)
        terms, cache = wire.terms(prompt_tokens=TOKENS), FillingCache(wire.contract)
        cache.computed = 16
        await wire.sender().hand_over(terms, MAX_OUTPUT_TOKENS, boasting(), cache, first_token())
        found, expected = hashes(landed(wire, terms)), hashes(written(wire))
        assert {block for (_, block), digest in found.items() if digest != expected[0, block]} >= {1, 2}
        taken = wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms))
        wire.reader.pool.free(taken.blocks, "sequence")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("size", CHUNKS)
async def test_a_prompt_computed_in_chunks_decodes_as_its_golden(folder: Path, size: int) -> None:
    writer = identified_engine(folder, blocks=16, prefill_chunk_tokens=size)
    reader = identified_engine(folder, blocks=16)
    for engine in (writer, reader):
        engine.start()
    async with InProcessPair(writer, reader) as pair:
        sampling = Sampling(max_output_tokens=32, ignore_eos=True)
        found = [token.token_id async for token in pair.generate(prompt_of(TOKENS), sampling)]
    for engine in (writer, reader):
        engine.close()
    assert tuple(found) == golden(folder, prompt_of(TOKENS), 32).token_ids


@pytest.mark.parametrize("axis_order", ["NHD", "HND"])
async def test_what_a_window_leaves_with_the_writer_is_never_another_requests_nan(
    tmp_path: Path, axis_order: str
) -> None:
    """Blocks come from a pool; the reader's hold NaN everywhere, as after a request that went wrong."""
    windows: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    folder = make_tiny_model(tmp_path, model_type="qwen3", **windows)
    writer = identified_engine(folder, blocks=16)
    reader = identified_engine(folder, blocks=16, axis_order=axis_order, block_size=24)
    for storage in (part for layer in range(2) for part in reader.cache.storage(layer)):
        storage.fill_(float("nan"))
    for engine in (writer, reader):
        engine.start()
    async with InProcessPair(writer, reader) as pair:
        sampling = Sampling(max_output_tokens=16, ignore_eos=True)
        found = [token.token_id async for token in pair.generate(prompt_of(100), sampling)]
    for engine in (writer, reader):
        engine.close()
    assert tuple(found) == golden(folder, prompt_of(100), 16).token_ids


# ---------------------------------------------------------------- chunks that don't follow each other


def part_of(chunk: Chunk, terms: HandoffTerms, sequence: int, blocks: range) -> Chunk:
    """Some blocks of a chunk that holds a layer's three, as a chunk of its own with a right checksum."""
    sizes = [len(part) // 3 for part in (chunk.keys, chunk.values)]
    keys, values = (
        bytes(part[blocks.start * size : blocks.stop * size])
        for part, size in zip((chunk.keys, chunk.values), sizes, strict=True)
    )
    header = replace(
        chunk.header,
        sequence=sequence,
        block_start=blocks.start,
        block_count=len(blocks),
        key_bytes=len(keys),
        value_bytes=len(values),
    )
    return Chunk(header=header, checksum=checksum(header, terms, keys, values), keys=keys, values=values)


def checksum(header: object, terms: HandoffTerms, keys: Buffer, values: Buffer) -> int:
    return chunk_checksum(header, terms.contract_digest, terms.token_digest, keys, values)  # type: ignore[arg-type]


CUTS: dict[str, tuple[list[range], bool]] = {
    "one behind the other": ([range(1), range(1, 3)], True),
    "block by block": ([range(1), range(1, 2), range(2, 3)], True),
    "out of order": ([range(1, 3), range(1)], True),
    "overlapping": ([range(2), range(1, 3)], False),
    "duplicated": ([range(3), range(3)], False),
    "one block twice": ([range(3), range(2, 3)], False),
    "missing": ([range(1), range(2, 3)], False),
    "missing at the end": ([range(2)], False),
}


@pytest.mark.parametrize("cut", CUTS)
async def test_chunks_of_a_layer_make_it_whole_once_or_are_refused(cut: str) -> None:
    """Sequence numbers and checksums are right each time: only the blocks that they name tell."""
    ranges, whole = CUTS[cut]
    async with in_process_wire() as wire:
        await wire.sender().pair(READER)
        terms = wire.terms(prompt_tokens=TOKENS)
        parts = recut(await all_parts(wire, terms), terms, ranges)
        if whole:
            await wire.port.push(stream(parts))
            assert hashes(landed(wire, terms)) == hashes(written(wire))
            taken = wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms))
            wire.reader.pool.free(taken.blocks, "sequence")
        else:
            with pytest.raises(KvpactError) as refused:
                await wire.port.push(stream(parts))
            assert isinstance(refused.value, DataLoss | BadRequest)
        assert wire.reader.all_free()


def recut(parts: list[PushPart], terms: HandoffTerms, ranges: list[range]) -> list[PushPart]:
    """Every layer's chunk cut into these ranges, numbered anew, with totals to match."""
    chunks: list[Chunk] = []
    for part in parts:
        if isinstance(part, Chunk):
            assert part.header.block_count == 3
            chunks += [part_of(part, terms, len(chunks) + i, blocks) for i, blocks in enumerate(ranges)]
    commit = parts[-1]
    assert isinstance(commit, Commit)
    payload = sum(len(chunk.keys) + len(chunk.values) for chunk in chunks)
    return [parts[0], *chunks, replace(commit, chunk_count=len(chunks), payload_bytes=payload)]


def test_the_cuts_are_of_three_blocks() -> None:
    assert -(-TOKENS // make_contract().layout.block_size) == 3
