"""Conversions that benchmarks run: both sides' contracts, payloads of a prompt, and the reader's cache.

Three KV heads of 64 lanes, as SmolLM2-135M has them; S tokens in a block, H heads, D lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvpact.clock import new_incarnation
from kvpact.contract.compare import Policy
from kvpact.contract.contract import (
    Contract,
    LayerGroup,
    Layout,
    ModelIdentity,
    Quantization,
    Rotary,
    RotaryTable,
    Schema,
    Shard,
)
from kvpact.contract.convert import TORCH_DTYPES, Converter, RotationCache
from kvpact.contract.convert_blocks import layer_bytes
from kvpact.contract.convert_fast import Destination, FastConverter, serves
from kvpact.contract.identity import contract_digest
from kvpact.handoff.codec import contract_to_bytes
from kvpact.handoff.messages import PairOffer
from kvpact.handoff.pairing import PairBook
from kvpact.handoff.terms import make_terms
from kvpact.kvcache.paged_cache import PagedCache
from kvpact.types import (
    AxisOrder,
    ByteOrder,
    Dtype,
    FrequencyPolicy,
    HandoffId,
    KeyState,
    LaneOrder,
    LayerKind,
    Packing,
    RotationSite,
    WorkerLife,
)

HEADS, WIDTH, CONTEXT_TOKENS = 3, 64, 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What one side's cache looks like."""

    key_state: KeyState = KeyState.ROTATED
    lanes: LaneOrder = LaneOrder.HALF_SPLIT
    axis_order: AxisOrder = AxisOrder.NHD
    block_size: int = 16
    dtype: Dtype = Dtype.FLOAT32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One conversion, and the share of a copy's speed to aim at."""

    name: str
    writer: Form
    reader: Form
    target: float = 0.4


F32, BF16 = Dtype.FLOAT32, Dtype.BFLOAT16
RAW, ROTATED, HND = KeyState.RAW, KeyState.ROTATED, AxisOrder.HND
CASES = (
    Case(name="raw_to_rotated_relayout_float32", writer=Form(key_state=RAW), reader=Form(axis_order=HND)),
    Case(
        name="raw_to_rotated_relayout_bfloat16",
        writer=Form(key_state=RAW, dtype=BF16),
        reader=Form(axis_order=HND, dtype=BF16),
        target=0.35,
    ),
    Case(
        name="raw_to_rotated_relayout_cast_bfloat16_to_float32",
        writer=Form(key_state=RAW, dtype=BF16),
        reader=Form(axis_order=HND),
        target=0.35,
    ),
    Case(name="rotated_to_raw_float32", writer=Form(), reader=Form(key_state=RAW)),
    Case(
        name="rotated_to_raw_bfloat16",
        writer=Form(dtype=BF16),
        reader=Form(key_state=RAW, dtype=BF16),
        target=0.35,
    ),
    Case(
        name="adjacent_to_half_split_float32",
        writer=Form(lanes=LaneOrder.ADJACENT),
        reader=Form(),
        target=0.3,
    ),
    Case(name="cast_bfloat16_to_float32", writer=Form(dtype=BF16), reader=Form()),
    Case(name="relayout_float32", writer=Form(), reader=Form(axis_order=HND)),
    Case(name="reblock_float32", writer=Form(), reader=Form(block_size=24)),
    Case(name="nothing_float32", writer=Form(), reader=Form()),
)


def contract_of(form: Form, *, layers: int) -> Contract:
    """A llama-like contract of `layers` equal layers in this form."""
    table = RotaryTable(inv_freq=_inverse_frequencies(), amplitude=1.0)
    rotary = Rotary(
        key_state=form.key_state,
        site=RotationSite.WRITER if form.key_state is ROTATED else RotationSite.READER,
        rotary_dim=WIDTH,
        lane_offset=0,
        stored_lane_order=form.lanes,
        frequency_policy=FrequencyPolicy.FROZEN,
        tables=(table,),
    )
    group = LayerGroup(
        layers=tuple(range(layers)),
        kind=LayerKind.FULL,
        window=None,
        kv_heads=HEADS,
        key_dim=WIDTH,
        value_dim=WIDTH,
        softmax_scale=WIDTH**-0.5,
        softcap=None,
        sinks=False,
        temperature=None,
        latent=None,
        rotary=rotary,
    )
    model = ModelIdentity(
        architecture="llama",
        function_digest=b"f" * 32,
        lm_head_digest=b"h" * 32,
        tokenizer_digest=b"t" * 32,
        compute_dtype=F32,
        context_tokens=CONTEXT_TOKENS,
    )
    return Contract(schema=Schema(), model=model, layer_groups=(group,), layout=_layout(form, layers))


def sides_of(case: Case, *, layers: int) -> tuple[Contract, Contract]:
    """Writer's and reader's contract."""
    return contract_of(case.writer, layers=layers), contract_of(case.reader, layers=layers)


def known_pair(writer: Contract, reader: Contract) -> Callable[[], object]:
    """What a request costs on a pair that has paired: its terms are looked up and judged at their length."""
    lives = [WorkerLife(worker=name, incarnation=new_incarnation()) for name in ("writer", "reader")]
    digest = contract_digest(writer)
    book = PairBook(reader, Policy())
    book.offer(
        PairOffer(
            schema_major=writer.schema.major,
            contract_digest=digest,
            writer=lives[0],
            reader=lives[1],
            contract=contract_to_bytes(writer),
        )
    )
    terms = make_terms(
        handoff_id=HandoffId(bytes(16)),
        writer=lives[0],
        reader=lives[1],
        contract=writer,
        contract_digest=digest,
        token_ids=range(512),
        table_length=1024,
    )
    return lambda: book.usable(terms)


class Landing:
    """One case's prompt, ready to be landed again and again."""

    def __init__(self, case: Case, *, tokens: int, layers: int) -> None:
        writer, reader = sides_of(case, layers=layers)
        self._writer = writer
        self._converter = Converter(writer, reader)
        blocks = -(-tokens // reader.layout.block_size)
        self._cache = PagedCache(reader, blocks, torch.device("cpu"))
        self._blocks = torch.arange(blocks)
        self._positions_T = torch.arange(tokens)
        self._rotations = RotationCache()
        generator = torch.Generator().manual_seed(0)
        shape = (tokens, HEADS, WIDTH)
        numbers = torch.randn(shape, generator=generator).to(TORCH_DTYPES[writer.layout.key_dtype])
        self._payloads = [layer_bytes(numbers, numbers, writer.layout) for _ in range(layers)]
        self._copies = [bytearray(len(part)) for payload in self._payloads for part in payload]
        self._fast = (
            FastConverter(self._converter) if serves(self._converter, self._cache.storage(0)[0]) else None
        )

    @property
    def payload_bytes(self) -> int:
        """Bytes that the writer sends."""
        return sum(len(part) for payload in self._payloads for part in payload)

    def copy(self) -> None:
        """A plain copy of the payload, part by part."""
        parts = (part for payload in self._payloads for part in payload)
        for part, target in zip(parts, self._copies, strict=True):
            memoryview(target)[:] = part

    def convert(self) -> None:
        """All layers into the reader's cache, as a landing does it."""
        if self._fast is None:
            self.convert_by_reference()
            return
        for layer, payload in enumerate(self._payloads):
            keys, values = self._cache.storage(layer)
            to = Destination(
                keys=keys, values=values, blocks=self._blocks.numpy().astype(np.uint64), first_token=0
            )
            self._fast.convert_into(layer, *payload, **self._places(), destination=to)

    def convert_by_reference(self) -> None:
        """The same without the fast way."""
        for layer, payload in enumerate(self._payloads):
            landed = self._converter.land(layer, *payload, **self._places())
            self._cache.write(layer, self._blocks, 0, landed.keys, landed.values)

    def _places(self) -> dict[str, Any]:
        return {
            "writer_block_start": 0,
            "writer_block_count": -(-len(self._positions_T) // self._writer.layout.block_size),
            "positions_T": self._positions_T,
            "rotations": self._rotations,
        }


def _layout(form: Form, layers: int) -> Layout:
    shard = Shard(
        tensor_parallel_rank=0,
        tensor_parallel_size=1,
        head_start=0,
        head_end=HEADS,
        layer_start=0,
        layer_end=layers,
    )
    return Layout(
        axis_order=form.axis_order,
        block_size=form.block_size,
        packing=Packing.SEPARATE,
        key_dtype=form.dtype,
        value_dtype=form.dtype,
        byte_order=ByteOrder.LITTLE,
        key_quantization=Quantization(),
        value_quantization=Quantization(),
        shard=shard,
    )


def _inverse_frequencies() -> tuple[float, ...]:
    exponents = np.arange(0, WIDTH, 2, dtype=np.float32) / np.float32(WIDTH)
    return tuple((np.float32(1.0) / np.float32(1e5) ** exponents).astype(np.float32).tolist())
