"""State of one push on the reader's side. Pure: a step gives the next state or the error that ends it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvpact.errors import BadRequest, DataLoss, Fenced
from kvpact.handoff.chunks import LayerBlocks
from kvpact.handoff.messages import ChunkHeader, Commit, Open
from kvpact.types import ContractDigest, HandoffId


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the reader granted and is ready to take."""

    handoff_id: HandoffId
    generation: int
    contract_digest: ContractDigest
    block_count: int
    """Writer's blocks that hold the prompt."""
    layers: tuple[LayerBlocks, ...]
    """Ascending by layer."""
    chunk_cap_bytes: int
    """A chunk of one block may pass it."""
    held_blocks: int = 0
    """Writer's blocks before these are held by the reader, which shares them: nothing may land there."""
    most_cached_tokens: int = 0
    """Prompt tokens that the writer may have taken from its own cache: not those of its last block."""
    block_size: int = 1
    """Tokens in a block of the writer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What arrived so far. Bit b of landed[i] says that block b of layers[i] arrived."""

    expected: Expected
    landed: tuple[int, ...]
    opened: bool = False
    chunk_count: int = 0
    payload_bytes: int = 0

    def open(self, part: Open) -> Session:
        """The push begins.

        Raises:
            Fenced: the handoff was opened before, or another generation or contract is meant.
        """
        if self.opened:
            raise Fenced(
                "a push is sent once; use a new handoff id", expected="one push", found="a second one"
            )
        expected = self.expected
        _fence("handoff id", expected.handoff_id.hex(), part.handoff_id.hex())
        _fence("generation", str(expected.generation), str(part.generation))
        _fence("contract digest", expected.contract_digest.hex(), part.contract_digest.hex())
        return replace(self, opened=True)

    def arrive(self, header: ChunkHeader, key_bytes: int, value_bytes: int) -> Session:
        """A chunk came; its payload has not been looked at.

        Raises:
            Fenced: it belongs to another handoff or generation.
            BadRequest: it goes where nothing was granted, or isn't as large as the writer's layout says.
            DataLoss: it is out of order, or its blocks landed before.
        """
        expected = self.expected
        if not self.opened:
            raise BadRequest("a chunk came before open", param="push.part")
        _fence("handoff id", expected.handoff_id.hex(), header.handoff_id.hex())
        _fence("generation", str(expected.generation), str(header.generation))
        if header.sequence != self.chunk_count:
            raise DataLoss(f"{header} came where chunk {self.chunk_count} was expected", check="order")
        index = _layer_index(expected.layers, header.layer)
        self._check_range(header)
        self._check_bytes(header, expected.layers[index], key_bytes, value_bytes)
        blocks = ((1 << header.block_count) - 1) << header.block_start
        again = self.landed[index] & blocks
        if again:
            raise DataLoss(f"{header}: block {_first(again)} came twice", check="order")
        landed = (*self.landed[:index], self.landed[index] | blocks, *self.landed[index + 1 :])
        payload_bytes = self.payload_bytes + key_bytes + value_bytes
        return replace(self, landed=landed, chunk_count=self.chunk_count + 1, payload_bytes=payload_bytes)

    def close(self, commit: Commit) -> None:
        """The push ends: gives nothing back if it is whole.

        Raises:
            DataLoss: totals differ, or required blocks are missing.
            BadRequest: the writer says that it computed less than it must.
        """
        if not self.opened:
            raise BadRequest("commit came before open", param="push.part")
        self._check_first_computed(commit.first_computed_tokens)
        holes = self._holes()
        for what, told, seen in (
            ("chunks", commit.chunk_count, self.chunk_count),
            ("bytes", commit.payload_bytes, self.payload_bytes),
        ):
            if told != seen:
                text = f"the writer sent {told} {what}, {seen} arrived"
                raise DataLoss(f"{text}; {holes}" if holes else text, check="totals")
        if holes:
            raise DataLoss(holes, check="holes")

    def _check_first_computed(self, tokens: int) -> None:
        most, size = self.expected.most_cached_tokens, self.expected.block_size
        if not 0 <= tokens <= most or tokens % size:
            raise BadRequest(
                f"commit.first_computed_tokens is {tokens}; at most {most} tokens of this prompt can come "
                f"from a cache, in whole blocks of {size}",
                param="commit.first_computed_tokens",
            )

    def landed_alike(self) -> dict[int, frozenset[int]]:
        """Layers that got the same of the writer's blocks, by these blocks as bits; mostly one set."""
        alike: dict[int, set[int]] = defaultdict(set)
        for entry, landed in zip(self.expected.layers, self.landed, strict=True):
            alike[landed].add(entry.layer)
        return {landed: frozenset(layers) for landed, layers in alike.items()}

    def _holes(self) -> str:
        """What the first layer lacks that isn't whole, for people; empty where nothing is missing."""
        for blocks, landed in zip(self.expected.layers, self.landed, strict=True):
            needed = (1 << self.expected.block_count) - (1 << blocks.first_block)
            missing = needed & ~landed
            if missing:
                return (
                    f"layer {blocks.layer}: {missing.bit_count()} blocks are missing, "
                    f"block {_first(missing)} first"
                )
        return ""

    def _check_range(self, header: ChunkHeader) -> None:
        stop = header.block_start + header.block_count
        if 0 <= header.block_start < self.expected.held_blocks:
            raise BadRequest(
                f"chunk {header.sequence} is for blocks [{header.block_start}, {stop}); the reader holds "
                f"those before block {self.expected.held_blocks}",
                param="chunk.header.block_start",
            )
        if header.block_start < 0 or header.block_count < 1 or stop > self.expected.block_count:
            raise BadRequest(
                f"chunk {header.sequence} is for blocks [{header.block_start}, {stop}); the prompt has "
                f"{self.expected.block_count}",
                param="chunk.header.block_start",
            )

    def _check_bytes(
        self, header: ChunkHeader, blocks: LayerBlocks, key_bytes: int, value_bytes: int
    ) -> None:
        count = header.block_count
        total_bytes = header.key_bytes + header.value_bytes
        if count > 1 and total_bytes > self.expected.chunk_cap_bytes:
            raise BadRequest(
                f"chunk {header.sequence} holds {total_bytes} bytes; "
                f"the cap is {self.expected.chunk_cap_bytes}",
                param="chunk.payload",
            )
        for name, told, layout_bytes, found in (
            ("key_bytes", header.key_bytes, blocks.key_bytes * count, key_bytes),
            ("value_bytes", header.value_bytes, blocks.value_bytes * count, value_bytes),
        ):
            if told != layout_bytes:
                raise BadRequest(
                    f"chunk {header.sequence}: {name} is {told}; {count} blocks of layer {blocks.layer} take "
                    f"{layout_bytes} in the writer's layout",
                    param=f"chunk.header.{name}",
                )
            if told != found:
                raise DataLoss(f"{header}: {name} is {told}, {found} arrived", check="totals")


def new_session(expected: Expected) -> Session:
    """Nothing arrived yet."""
    return Session(expected=expected, landed=(0,) * len(expected.layers))


def _first(blocks: int) -> int:
    """The lowest block of a bit set that isn't empty."""
    return (blocks & -blocks).bit_length() - 1


def _layer_index(layers: Sequence[LayerBlocks], layer: int) -> int:
    index = layer - layers[0].layer
    if 0 <= index < len(layers) and layers[index].layer == layer:
        return index
    for index, blocks in enumerate(layers):
        if blocks.layer == layer:
            return index
    raise BadRequest(f"layer {layer} isn't part of the writer's contract", param="chunk.header.layer")


def _fence(what: str, expected: str, found: str) -> None:
    if expected != found:
        raise Fenced(f"{what} is {found}; this reservation has {expected}", expected=expected, found=found)
