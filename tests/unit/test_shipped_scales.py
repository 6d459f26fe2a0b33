"""Scales on the wire: they travel with their chunk, are checked with it, and are never made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from decode_worker.landing import CacheLanding
from kvpact.contract.compare import Policy, compare
from kvpact.contract.contract import Quantization
from kvpact.contract.identity import contract_digest
from kvpact.errors import BadRequest
from kvpact.handoff.chunks import chunk_checksum
from kvpact.handoff.codec import push_from_bytes, push_to_bytes
from kvpact.handoff.messages import Chunk, ChunkHeader
from kvpact.handoff.terms import make_terms
from kvpact.kvcache.paged_cache import PagedCache
from kvpact.types import (
    BlockId,
    ContractDigest,
    Dtype,
    HandoffId,
    QuantizationGranularity,
    QuantizationScheme,
    ScaleSource,
    VerdictWord,
    WorkerLife,
)
from tests.factories import make_contract, with_layout

torch.set_num_threads(1)
BY_HEAD = Quantization(
    scheme=QuantizationScheme.SYMMETRIC,
    granularity=QuantizationGranularity.HEAD,
    scale_source=ScaleSource.SHIPPED,
)
WRITER = with_layout(make_contract(dtype=Dtype.INT8), key_quantization=BY_HEAD, value_quantization=BY_HEAD)
READER = make_contract()
STORED = bytes(torch.ones(16 * 2 * 16, dtype=torch.int8).numpy().tobytes())
HEADER = ChunkHeader(
    handoff_id=HandoffId(bytes(16)),
    generation=1,
    sequence=0,
    layer=1,
    block_start=0,
    block_count=1,
    key_bytes=len(STORED),
    value_bytes=len(STORED),
    key_scales=(0.25, 0.5),
    value_scales=(2.0, 4.0),
)


def checksum(header: ChunkHeader) -> int:
    return chunk_checksum(header, ContractDigest(bytes(32)), bytes(32), STORED, STORED)


def land(header: ChunkHeader) -> PagedCache:
    """The reader's cache after one chunk of 16 tokens."""
    cache = PagedCache(READER, 1, torch.device("cpu"))
    lives = [WorkerLife(worker=name, incarnation=bytes(16)) for name in ("w", "r")]
    terms = make_terms(
        handoff_id=header.handoff_id,
        writer=lives[0],
        reader=lives[1],
        contract=WRITER,
        contract_digest=contract_digest(WRITER),
        token_ids=range(16),
        table_length=32,
    )
    verdict = compare(WRITER, READER, Policy(lossy="allow"), 32)
    assert verdict.word is VerdictWord.CONVERT
    handle = CacheLanding(cache).prepare(WRITER, verdict, terms, [BlockId(0)])
    handle.land(header, STORED, STORED)
    assert handle.max_abs_error == 0.0
    return cache


def test_a_chunk_with_scales_comes_back_from_its_bytes() -> None:
    chunk = Chunk(header=HEADER, checksum=checksum(HEADER), keys=STORED, values=STORED)
    back = push_from_bytes(push_to_bytes(chunk))
    assert isinstance(back, Chunk)
    assert back.header == HEADER


@pytest.mark.parametrize("scale", [0.0, -0.25, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["key_scales", "value_scales"])
def test_a_scale_that_is_no_positive_number_is_refused_on_the_wire(field: str, scale: float) -> None:
    header = replace(HEADER, **{field: (1.0, scale)})
    data = push_to_bytes(Chunk(header=header, checksum=0, keys=STORED, values=STORED))
    with pytest.raises(BadRequest, match=rf"{field}\[1\]"):
        push_from_bytes(data)


def test_the_checksum_covers_every_scale_and_which_side_it_is_for() -> None:
    others = [
        replace(HEADER, key_scales=(0.25, 0.5000001)),
        replace(HEADER, key_scales=HEADER.value_scales, value_scales=HEADER.key_scales),
        replace(HEADER, key_scales=(0.25,), value_scales=(0.5, 2.0, 4.0)),
        replace(HEADER, key_scales=(), value_scales=()),
    ]
    assert len({checksum(header) for header in (HEADER, *others)}) == 5


def test_landed_numbers_are_those_that_the_scales_make_of_them() -> None:
    keys, values = land(HEADER).storage(1)
    assert keys[0, 0, :, 0].tolist() == [0.25, 0.5]
    assert values[0, 0, :, 0].tolist() == [2.0, 4.0]


@pytest.mark.parametrize("field", ["key_scales", "value_scales"])
@pytest.mark.parametrize("scales", [(), (1.0,), (1.0, 1.0, 1.0)])
def test_a_chunk_without_its_scales_is_refused(field: str, scales: tuple[float, ...]) -> None:
    with pytest.raises(BadRequest, match=f"{field} of layer 1"):
        land(replace(HEADER, **{field: scales}))
