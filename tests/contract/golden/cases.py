"""The cases of the corpus: who writes what, who reads it, and what must come of it, written down by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from kvpact.contract.contract import Contract, Quantization
from kvpact.types import (
    AxisOrder,
    Dtype,
    KeyState,
    LaneOrder,
    LayerKind,
    QuantizationGranularity,
    QuantizationScheme,
    ScaleSource,
)
from tests.contract.golden import model
from tests.factories import make_contract, make_group, make_rotary, with_layout, with_rotary

THETA, OTHER_THETA = 10_000.0, 100_000.0
CONTEXT = 256


class Landing(StrEnum):
    """What must come of the bytes."""

    EQUAL = "equal"
    """They land, and the reader's cache holds what its own prefill would have made."""
    REFUSED = "refused"
    """They never land: the contract is refused before a byte is sent."""
    CAUGHT = "caught"
    """The contract is fine and the bytes aren't what it says: the commit must fail its witnesses."""
    FAILED = "failed"
    """The bytes are right and the stream isn't: it must fail as the case says."""


class Fault(StrEnum):
    """What a writer does to the parts of an honest push."""

    NONE = "none"
    FLIP_BYTE = "flip_byte"
    SWAP_CHUNKS = "swap_chunks"
    CHUNK_TWICE = "chunk_twice"
    LEAVE_CHUNK_OUT = "leave_chunk_out"
    ONE_CHUNK_MORE = "one_chunk_more"
    ONE_BYTE_MORE = "one_byte_more"
    NO_COMMIT = "no_commit"
    WITNESS_LEFT_OUT = "witness_left_out"
    WITNESS_OF_OTHER_ROW = "witness_of_other_row"
    OPEN_OTHER_GENERATION = "open_other_generation"
    OPEN_OTHER_CONTRACT = "open_other_contract"
    OPEN_TWICE = "open_twice"
    CHUNK_OTHER_GENERATION = "chunk_other_generation"
    CHUNK_OTHER_HANDOFF = "chunk_other_handoff"
    CHUNK_OTHER_LAYER = "chunk_other_layer"
    CHUNK_BEHIND_END = "chunk_behind_end"
    CHUNK_OTHER_SIZE = "chunk_other_size"


class Damage(StrEnum):
    """What a lying writer does to its rows before it stores them."""

    NONE = "none"
    TURN_TWICE = "turn_twice"
    ONE_POSITION_LATE = "one_position_late"
    SWAP_KEYS_AND_VALUES = "swap_keys_and_values"
    SWAP_VALUE_AXES = "swap_value_axes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One recorded handoff."""

    name: str
    about: str
    writer: Contract
    """What the header says."""
    reader: Contract
    tokens: int = 20
    stored_as: Contract | None = None
    """What its model really runs and stores, where the header lies."""
    damage: Damage = Damage.NONE
    steps: tuple[int, ...] = ()
    """Prompt tokens computed after each prefill step but the last; a step sends the blocks that it filled."""
    chunk_blocks: int | None = None
    """Most blocks of a chunk."""
    layers_backwards: bool = False
    sends_all: bool = False
    """Blocks that windows let stay with the writer travel all the same."""
    chunk_cap_bytes: int = 1 << 20
    lossy: bool = False
    """Whether the reader allows loss."""
    fault: Fault = Fault.NONE
    reason: str | None = None
    """Of the error, where the push must fail."""
    check: str | None = None
    """Its failed check, where the reason is DATA_LOSS; its parameter, where it is BAD_REQUEST."""
    verdict: str = "accept"
    differences: Mapping[str, str] = field(default_factory=dict)
    """Field to action; an accepted or noted one is listed too."""
    plan: tuple[str, ...] = ()
    exactness: str = "bit_exact"
    landing: Landing = Landing.EQUAL


def table(theta: float = THETA) -> tuple[float, ...]:
    """1 / theta ** (2 i / D), rounded to float32 once."""
    exponents = np.arange(0, model.HEAD_DIM, 2) / model.HEAD_DIM
    return tuple(float(np.float32(value)) for value in theta**-exponents)


def make(**facts: Any) -> Contract:
    """A contract of the corpus's model: two layers, two KV heads of 16 lanes; `facts` as make_contract's."""
    theta = facts.pop("theta", THETA)
    digest = hashlib.sha256(b"".join(rows.tobytes() for rows in model.weights().values())).digest()
    standing: dict[str, Any] = {
        "inv_freq": table(theta),
        "context_tokens": CONTEXT,
        "function_digest": digest,
        "name": "golden",
    }
    return make_contract(**(standing | facts))


def windowed() -> Contract:
    """The second layer sees 8 keys, itself included."""
    rotary = make_rotary(inv_freq=table())
    groups = (
        make_group(layers=(0,), rotary=rotary),
        make_group(layers=(1,), kind=LayerKind.SLIDING, window=8, rotary=rotary),
    )
    return make(layer_groups=groups)


def with_ulp(contract: Contract) -> Contract:
    """The table's second number is one unit in the last place larger."""
    rotary = contract.layer_groups[0].rotary
    moved = list(rotary.tables[0].inv_freq)
    moved[1] = float(np.nextafter(np.float32(moved[1]), np.float32(1)))
    return with_rotary(contract, tables=(replace(rotary.tables[0], inv_freq=tuple(moved)),))


def eight_bit(scheme: QuantizationScheme) -> Contract:
    """Eight-bit floats, with or without a scale for each layer."""
    none = scheme is QuantizationScheme.NONE
    form = Quantization(
        scheme=scheme,
        granularity=None if none else QuantizationGranularity.TENSOR,
        scale_source=None if none else ScaleSource.FIXED,
        fixed_scales=() if none else (0.03125, 0.0625),
    )
    contract = make(dtype=Dtype.FLOAT8_E4M3)
    return with_layout(contract, key_quantization=form, value_quantization=form)


NHD = make()
HND = make(axis_order=AxisOrder.HND, block_size=24)
RAW = make(key_state=KeyState.RAW)
RAW_HND = make(key_state=KeyState.RAW, axis_order=AxisOrder.HND, block_size=24)
ADJACENT = make(stored_lane_order=LaneOrder.ADJACENT)
BF16, FP16 = make(dtype=Dtype.BFLOAT16), make(dtype=Dtype.FLOAT16)
OTHER = make(theta=OTHER_THETA)
WINDOW = windowed()

GOOD = (
    Case(name="rotated_nhd16", about="rotated keys, the same form on both sides", writer=NHD, reader=NHD),
    Case(name="rotated_hnd24", about="rotated keys, heads first", writer=HND, reader=HND),
    Case(name="raw_nhd16", about="raw keys, the same form on both sides", writer=RAW, reader=RAW),
    Case(name="raw_hnd24", about="raw keys, heads first", writer=RAW_HND, reader=RAW_HND),
    Case(name="rotated_bf16", about="keys and values in bfloat16", writer=BF16, reader=BF16),
    Case(name="rotated_one_token", about="one token, whose angle is 0", writer=NHD, reader=NHD, tokens=1),
    Case(name="rotated_whole_block", about="a prompt that fills a block", writer=NHD, reader=NHD, tokens=16),
    Case(
        name="window_leaves_blocks_out",
        about="a sliding window: blocks that the next token can't see aren't sent",
        writer=WINDOW,
        reader=WINDOW,
        tokens=40,
    ),
    Case(
        name="rotated_to_raw",
        about="keys are turned back on landing",
        writer=NHD,
        reader=RAW,
        verdict="convert",
        differences={"key_state": "convert"},
        plan=("unrotate",),
        exactness="rounding",
    ),
    Case(
        name="raw_to_rotated",
        about="keys are turned on landing",
        writer=RAW,
        reader=NHD,
        verdict="convert",
        differences={"key_state": "convert"},
        plan=("rotate",),
        exactness="rounding",
    ),
    Case(
        name="nhd16_to_hnd24",
        about="other axes and other blocks",
        writer=NHD,
        reader=HND,
        tokens=33,
        verdict="convert",
        differences={"axis_order": "convert", "block_size": "convert"},
        plan=("relayout", "reblock"),
    ),
    Case(
        name="rotated_nhd16_to_raw_hnd24",
        about="state, axes and blocks at once",
        writer=NHD,
        reader=RAW_HND,
        verdict="convert",
        differences={"key_state": "convert", "axis_order": "convert", "block_size": "convert"},
        plan=("unrotate", "relayout", "reblock"),
        exactness="rounding",
    ),
    Case(
        name="raw_hnd24_to_rotated_nhd16",
        about="the way back",
        writer=RAW_HND,
        reader=NHD,
        tokens=33,
        verdict="convert",
        differences={"key_state": "convert", "axis_order": "convert", "block_size": "convert"},
        plan=("relayout", "reblock", "rotate"),
        exactness="rounding",
    ),
    Case(
        name="adjacent_to_half_split",
        about="rotary lanes lie in the other order",
        writer=ADJACENT,
        reader=NHD,
        verdict="convert",
        differences={"stored_lane_order": "convert"},
        plan=("reorder_lanes",),
    ),
    Case(
        name="bf16_to_float32",
        about="a wider dtype holds every number",
        writer=BF16,
        reader=NHD,
        verdict="convert",
        differences={"key_dtype": "convert", "value_dtype": "convert"},
        plan=("cast",),
    ),
    Case(
        name="table_off_by_one_ulp",
        about="one frequency differs by one unit in the last place: accepted as rounding",
        writer=with_ulp(NHD),
        reader=NHD,
        differences={"inv_freq": "accept"},
        exactness="rounding",
    ),
)


def refused(name: str, about: str, writer: Contract, reader: Contract, *fields: str) -> Case:
    """An honest writer whose cache this reader must not use."""
    return Case(
        name=name,
        about=about,
        writer=writer,
        reader=reader,
        verdict="reject",
        differences=dict.fromkeys(fields, "reject"),
        landing=Landing.REFUSED,
    )


REFUSED = (
    refused("wrong_theta", "keys of another table", OTHER, NHD, "inv_freq"),
    refused(
        "wrong_theta_raw",
        "raw keys of another table: history was computed with it, so turning them repairs nothing",
        make(theta=OTHER_THETA, key_state=KeyState.RAW),
        RAW,
        "inv_freq",
    ),
    refused("other_amplitude", "keys carry another amplitude", make(amplitude=1.25), NHD, "amplitude"),
    refused(
        "bf16_for_fp16",
        "two dtypes of one size; fewer bits of fraction are a loss, which this policy refuses",
        FP16,
        BF16,
        "key_dtype",
        "value_dtype",
    ),
    refused(
        "missing_scale",
        "eight-bit numbers that need a scale, for a reader that has none",
        eight_bit(QuantizationScheme.SYMMETRIC),
        eight_bit(QuantizationScheme.NONE),
        "key_quantization",
        "value_quantization",
    ),
    refused(
        "other_weights",
        "another model of one shape",
        make(function_digest=b"o" * 32),
        NHD,
        "function_digest",
    ),
)


def lie(name: str, about: str, writer: Contract, stored_as: Contract | None = None, **facts: Any) -> Case:
    """A writer whose bytes aren't what its header says, for a reader that believes the header."""
    return Case(
        name=f"lie_{name}",
        about=about,
        writer=writer,
        reader=facts.pop("reader", writer),
        stored_as=stored_as,
        landing=Landing.CAUGHT,
        **facts,
    )


LIES = (
    lie("raw_is_rotated", "says raw, sends rotated: the reader would turn keys twice", RAW, NHD),
    lie("rotated_is_raw", "says rotated, sends raw: nobody turns them", NHD, RAW),
    lie("rotated_twice", "turned twice before they were stored", NHD, damage=Damage.TURN_TWICE),
    lie(
        "raw_is_rotated_converted",
        "says raw, sends rotated, to a reader that rotates on landing",
        RAW,
        NHD,
        reader=NHD,
        verdict="convert",
        differences={"key_state": "convert"},
        plan=("rotate",),
        exactness="rounding",
    ),
    lie("attends_other_table", "attends with another table than it names", NHD, OTHER),
    lie("lanes_swapped", "says half-split, stores adjacent lanes", NHD, ADJACENT),
    lie("axes_swapped", "says NHD, stores HND", NHD, make(axis_order=AxisOrder.HND)),
    lie("value_axes_swapped", "values alone lie in the other order", NHD, damage=Damage.SWAP_VALUE_AXES),
    lie("keys_and_values_swapped", "values where keys should be", NHD, damage=Damage.SWAP_KEYS_AND_VALUES),
    lie("bf16_named_fp16", "says float16, stores bfloat16: equal size, other numbers", FP16, BF16),
    lie("one_position_late", "turned by the position behind its own", NHD, damage=Damage.ONE_POSITION_LATE),
    lie("amplitude_left_out", "the amplitude that the contract names is missing", make(amplitude=1.25), NHD),
)
CASES = (*GOOD, *REFUSED, *LIES)
