"""Streams of the corpus: honest bytes in pushes of every shape, whole and broken; what must come of each."""

from __future__ import annotations

from typing import Any

from kvpact.contract.contract import Contract
from tests.contract.golden.cases import ADJACENT, BF16, HND, NHD, RAW, RAW_HND, WINDOW, Case, Fault, Landing

TO_HND = {"axis_order": "convert", "block_size": "convert"}
CAST = {"key_dtype": "convert", "value_dtype": "convert"}


def good(name: str, about: str, writer: Contract, reader: Contract, **facts: Any) -> Case:
    """A push that must be committed."""
    return Case(name=name, about=about, writer=writer, reader=reader, **facts)


def bad(fault: Fault, about: str, reason: str, check: str | None = None, **facts: Any) -> Case:
    """A push in two steps that must fail."""
    standing: dict[str, Any] = {
        "writer": NHD,
        "reader": NHD,
        "tokens": 20,
        "steps": (16,),
        "name": fault.value,
    }
    return Case(
        about=about, fault=fault, reason=reason, check=check, landing=Landing.FAILED, **(standing | facts)
    )


GOOD_STREAMS = (
    good("several_steps", "four prefill steps", NHD, NHD, tokens=40, steps=(16, 20, 33)),
    good("steps_fill_no_block", "steps too short to fill a block send nothing", NHD, NHD, steps=(1, 2, 15)),
    good("odd_ends", "steps that end beside block ends", NHD, NHD, tokens=33, steps=(15, 17, 31)),
    good("one_block_each", "a chunk for each block", NHD, NHD, tokens=40, chunk_blocks=1),
    good(
        "tight_cap", "blocks that just fit the cap", NHD, NHD, tokens=40, chunk_blocks=1, chunk_cap_bytes=4096
    ),
    good("layers_backwards", "layers may come in any order", NHD, NHD, tokens=40, layers_backwards=True),
    good(
        "window_in_steps", "a window's skipped blocks, in two steps", WINDOW, WINDOW, tokens=40, steps=(33,)
    ),
    good("window_sent_whole", "blocks that may stay away came", WINDOW, WINDOW, tokens=40, sends_all=True),
    good("one_token", "one token in blocks of 24", RAW_HND, RAW_HND, tokens=1),
    good(
        "other_blocks",
        "blocks of 16 for a reader with 24, heads first",
        NHD,
        HND,
        tokens=40,
        steps=(16, 32),
        verdict="convert",
        differences=TO_HND,
        plan=("relayout", "reblock"),
    ),
    good(
        "raw_to_rotated",
        "keys are turned on landing, step by step",
        RAW,
        NHD,
        tokens=40,
        steps=(20,),
        verdict="convert",
        differences={"key_state": "convert"},
        plan=("rotate",),
        exactness="rounding",
    ),
    good(
        "raw_hnd24_to_rotated_nhd16",
        "state, axes and blocks at once, step by step",
        RAW_HND,
        NHD,
        tokens=40,
        steps=(24, 30),
        verdict="convert",
        differences={"key_state": "convert"} | TO_HND,
        plan=("relayout", "reblock", "rotate"),
        exactness="rounding",
    ),
    good(
        "lanes_in_steps",
        "rotary lanes in the other order, a block at a time",
        ADJACENT,
        NHD,
        tokens=40,
        chunk_blocks=1,
        verdict="convert",
        differences={"stored_lane_order": "convert"},
        plan=("reorder_lanes",),
    ),
    good(
        "cast_wider",
        "bfloat16 for a float32 reader, step by step",
        BF16,
        NHD,
        tokens=40,
        steps=(20,),
        verdict="convert",
        differences=CAST,
        plan=("cast",),
    ),
    good(
        "cast_lossy",
        "float32 for a bfloat16 reader that allows loss",
        NHD,
        BF16,
        tokens=40,
        steps=(20,),
        lossy=True,
        verdict="convert",
        differences=CAST,
        plan=("cast",),
        exactness="lossy",
    ),
)
BAD_STREAMS = (
    bad(Fault.FLIP_BYTE, "a byte of the last chunk changed on its way", "DATA_LOSS", "checksum"),
    bad(Fault.SWAP_CHUNKS, "two chunks in the wrong order", "DATA_LOSS", "order"),
    bad(Fault.CHUNK_TWICE, "the same blocks twice", "DATA_LOSS", "order"),
    bad(
        Fault.LEAVE_CHUNK_OUT,
        "the last chunk is missing, and the totals don't count it",
        "DATA_LOSS",
        "holes",
    ),
    bad(Fault.ONE_CHUNK_MORE, "the commit counts a chunk that never came", "DATA_LOSS", "totals"),
    bad(Fault.ONE_BYTE_MORE, "the commit counts a byte that never came", "DATA_LOSS", "totals"),
    bad(Fault.NO_COMMIT, "the stream ends behind the last chunk", "DATA_LOSS", "totals"),
    bad(Fault.WITNESS_LEFT_OUT, "a row that the nonce asks for is missing", "DATA_LOSS", "witness"),
    bad(Fault.WITNESS_OF_OTHER_ROW, "a row shows another row's value", "DATA_LOSS", "witness"),
    bad(Fault.OPEN_OTHER_GENERATION, "a generation that wasn't granted", "FENCED"),
    bad(Fault.OPEN_OTHER_CONTRACT, "another contract than the one reserved for", "FENCED"),
    bad(Fault.OPEN_TWICE, "a second open among the chunks", "FENCED"),
    bad(Fault.CHUNK_OTHER_GENERATION, "a late chunk of another generation", "FENCED"),
    bad(Fault.CHUNK_OTHER_HANDOFF, "a chunk of another handoff", "FENCED"),
    bad(Fault.CHUNK_OTHER_LAYER, "a layer that the contract lacks", "BAD_REQUEST", "chunk.header.layer"),
    bad(Fault.CHUNK_BEHIND_END, "blocks behind the prompt", "BAD_REQUEST", "chunk.header.block_start"),
    bad(
        Fault.CHUNK_OTHER_SIZE, "fewer key bytes than the layout has", "BAD_REQUEST", "chunk.header.key_bytes"
    ),
    bad(
        Fault.NONE,
        "two blocks in one chunk over the cap",
        "BAD_REQUEST",
        "chunk.payload",
        name="over_the_cap",
        chunk_cap_bytes=4096,
        steps=(),
    ),
)
STREAMS = (*GOOD_STREAMS, *BAD_STREAMS)
