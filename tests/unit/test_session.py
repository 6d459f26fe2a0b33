"""The state of a push: what may come next, what ends it, and that a refused step changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvpact.errors import BadRequest, DataLoss, Fenced
from kvpact.handoff.chunks import LayerBlocks
from kvpact.handoff.messages import ChunkHeader, Commit, Open
from kvpact.handoff.session import Expected, Session, new_session
from tests.handoff_fakes import make_handoff_id
from tests.handoff_samples import WRITER_DIGEST

OPEN = Open(handoff_id=make_handoff_id(), generation=4, contract_digest=WRITER_DIGEST)


def make_session(*, block_count: int = 3, first_block: int = 0, chunk_cap_bytes: int = 1000) -> Session:
    layers = tuple(
        LayerBlocks(layer=layer, key_bytes=100, value_bytes=50, first_block=first_block) for layer in (2, 5)
    )
    return new_session(
        Expected(
            handoff_id=OPEN.handoff_id,
            generation=4,
            contract_digest=WRITER_DIGEST,
            block_count=block_count,
            layers=layers,
            chunk_cap_bytes=chunk_cap_bytes,
        )
    )


def header(*, sequence: int = 0, layer: int = 2, block_start: int = 0, block_count: int = 3) -> ChunkHeader:
    return ChunkHeader(
        handoff_id=OPEN.handoff_id,
        generation=4,
        sequence=sequence,
        layer=layer,
        block_start=block_start,
        block_count=block_count,
        key_bytes=100 * block_count,
        value_bytes=50 * block_count,
    )


def arrive(session: Session, *headers: ChunkHeader) -> Session:
    for item in headers:
        session = session.arrive(item, item.key_bytes, item.value_bytes)
    return session


def commit_of(session: Session) -> Commit:
    return Commit(chunk_count=session.chunk_count, payload_bytes=session.payload_bytes, first_token_id=0)


def test_every_block_of_every_layer_makes_a_push_whole() -> None:
    session = arrive(
        make_session().open(OPEN),
        header(sequence=0, layer=5, block_start=1, block_count=2),
        header(sequence=1, layer=2),
        header(sequence=2, layer=5, block_start=0, block_count=1),
    )
    session.close(commit_of(session))


def test_blocks_that_the_reader_cannot_reach_may_be_left_out() -> None:
    session = make_session(first_block=2).open(OPEN)
    session = arrive(
        session,
        header(sequence=0, layer=2, block_start=2, block_count=1),
        header(sequence=1, layer=5, block_start=1, block_count=2),
    )
    session.close(commit_of(session))


def test_a_hole_is_named_by_layer_and_block() -> None:
    session = arrive(make_session().open(OPEN), header(), header(sequence=1, layer=5, block_count=1))
    with pytest.raises(DataLoss, match="layer 5: 2 blocks are missing, block 1 first") as lost:
        session.close(commit_of(session))
    assert lost.value.check == "holes"


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"sequence": 1}, DataLoss, r"chunk 1 \(layer 2, blocks .* came where chunk 0 was expected"),
        ({"generation": 5}, Fenced, "generation is 5; this reservation has 4"),
        ({"handoff_id": b"x" * 16}, Fenced, "handoff id"),
        ({"layer": 3}, BadRequest, "layer 3"),
        ({"layer": 6}, BadRequest, "layer 6"),
        ({"block_start": 1}, BadRequest, r"blocks \[1, 4\); the prompt has 3"),
        ({"block_count": 4, "key_bytes": 400, "value_bytes": 200}, BadRequest, r"blocks \[0, 4\)"),
        ({"block_start": -1}, BadRequest, r"blocks \[-1, 2\)"),
        ({"block_count": 0}, BadRequest, r"blocks \[0, 0\)"),
        ({"key_bytes": 301}, BadRequest, "key_bytes is 301; 3 blocks of layer 2 take 300"),
        ({"value_bytes": 0}, BadRequest, "value_bytes is 0; 3 blocks of layer 2 take 150"),
    ],
)
def test_a_chunk_for_what_was_not_granted_is_refused(
    changes: dict[str, object], error: type[Exception], words: str
) -> None:
    session = make_session().open(OPEN)
    wrong = replace(header(), **changes)  # type: ignore[arg-type]
    with pytest.raises(error, match=words):
        arrive(session, wrong)
    assert arrive(session, header()).chunk_count == 1


def test_a_payload_of_another_length_than_its_header_is_data_loss() -> None:
    with pytest.raises(DataLoss, match="value_bytes is 150, 149 arrived"):
        make_session().open(OPEN).arrive(header(), 300, 149)


def test_a_chunk_beyond_the_cap_is_refused_unless_it_is_one_block() -> None:
    session = make_session(chunk_cap_bytes=120).open(OPEN)
    with pytest.raises(BadRequest, match="holds 450 bytes; the cap is 120"):
        arrive(session, header())
    assert arrive(session, header(block_count=1)).payload_bytes == 150


def test_an_overlap_is_refused_even_in_order() -> None:
    with pytest.raises(DataLoss, match="came twice"):
        arrive(
            make_session().open(OPEN), header(block_count=2), header(sequence=1, block_start=1, block_count=1)
        )


def test_nothing_comes_before_open_and_open_comes_once() -> None:
    session = make_session()
    with pytest.raises(BadRequest):
        arrive(session, header())
    with pytest.raises(BadRequest):
        session.close(commit_of(session))
    with pytest.raises(Fenced, match="sent once"):
        session.open(OPEN).open(OPEN)


def test_an_open_for_another_handoff_is_fenced() -> None:
    with pytest.raises(Fenced, match="handoff id"):
        make_session().open(replace(OPEN, handoff_id=make_handoff_id(2)))


@pytest.mark.parametrize("changes", [{"chunk_count": 3}, {"payload_bytes": 1}])
def test_totals_that_differ_are_data_loss(changes: dict[str, int]) -> None:
    session = arrive(make_session().open(OPEN), header(), header(sequence=1, layer=5))
    with pytest.raises(DataLoss, match="the writer sent") as lost:
        session.close(replace(commit_of(session), **changes))
    assert lost.value.check == "totals"
