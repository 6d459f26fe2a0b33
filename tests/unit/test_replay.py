"""A replay ends as the recording did, or says in which facts it doesn't."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvpact.cli.handoff_reader import recorded_reader
from kvpact.contract.compare import Policy
from kvpact.errors import DataLoss, Exhausted, Fenced, KvpactError, UnknownHandoff, UnreadableSource
from kvpact.handoff.capture import Capture
from kvpact.handoff.capture_file import read_capture
from kvpact.handoff.chunks import chunk_checksum
from kvpact.handoff.messages import Chunk, Commit, Open
from kvpact.handoff.replay import ONLY_WORDS, Replay, recorded_policy, replay
from tests.contract.golden.make import FOLDER

NOT_KEPT = "missing_scale.kvpact"
"""Its reader keeps eight-bit floats, which kvpact's own cache doesn't."""
FILES = sorted(path for path in FOLDER.rglob("*.kvpact") if path.name != NOT_KEPT)


def replayed(capture: Capture) -> Replay:
    async def run() -> Replay:
        async with recorded_reader(capture) as reader:
            return await replay(capture, reader)

    return asyncio.run(run())


def whole() -> Capture:
    return read_capture(FOLDER / "rotated_to_raw.kvpact")


def with_chunk(capture: Capture, change: Callable[[Chunk], Chunk]) -> Capture:
    """The second chunk changed."""
    parts = list(capture.parts)
    chunk = parts[2]
    assert isinstance(chunk, Chunk)
    parts[2] = change(chunk)
    return replace(capture, parts=tuple(parts))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_recorded_handoff_ends_as_it_did(path: Path) -> None:
    capture = read_capture(path)
    found = replayed(capture)
    assert found.differences() == ()
    assert (found.replayed.receipt is None) == (capture.receipt is None)


def test_bytes_that_were_changed_under_their_checksum_end_otherwise() -> None:
    found = replayed(with_chunk(whole(), lambda chunk: replace(chunk, keys=bytes(len(chunk.keys)))))
    differences = {each.fact: (each.recorded, each.replayed) for each in found.differences()}
    assert differences["outcome"] == ("committed", "failed at push")
    assert differences["reason"] == (None, "DATA_LOSS")
    assert differences["error.check"] == (None, "checksum")
    assert differences["receipt.witness_rows"] == ("6", None)


def test_bytes_that_were_changed_with_their_checksum_fail_their_witnesses() -> None:
    capture = whole()
    assert capture.reserved is not None
    terms = capture.reserved.terms

    def change(chunk: Chunk) -> Chunk:
        values = bytes(len(chunk.values))
        digests = terms.contract_digest, terms.token_digest
        return replace(
            chunk, values=values, checksum=chunk_checksum(chunk.header, *digests, chunk.keys, values)
        )

    error = replayed(with_chunk(capture, change)).replayed.error
    assert isinstance(error, DataLoss)
    assert error.check == "witness"


@pytest.mark.parametrize("fact", ["message", "reason", "error.check"])
def test_another_refusal_is_another_ending(fact: str) -> None:
    capture = read_capture(FOLDER / "lie_rotated_twice.kvpact")
    other: KvpactError = DataLoss("witness of another row", check="witness")
    if fact != "message":
        other = DataLoss(str(capture.error), check="holes")
    if fact == "reason":
        other = Fenced(str(capture.error), expected="1", found="2")
    found = replayed(replace(capture, error=other))
    assert fact in {each.fact for each in found.differences()}
    assert found.notes == ((ONLY_WORDS,) if fact == "message" else ())


def test_a_commit_that_is_left_out_ends_otherwise() -> None:
    capture = whole()
    error = replayed(replace(capture, parts=capture.parts[:-1])).replayed.error
    assert isinstance(error, DataLoss)
    assert error.check == "totals"


def test_the_recorded_generation_is_granted_again() -> None:
    capture = whole()
    assert capture.reserved is not None
    reservation = capture.reserved.reservation
    assert reservation is not None
    terms = capture.reserved.terms
    parts = []
    for part in capture.parts:
        match part:
            case Chunk(header=header):
                header = replace(header, generation=7)
                digests = terms.contract_digest, terms.token_digest
                checksum = chunk_checksum(header, *digests, part.keys, part.values)
                parts.append(replace(part, header=header, checksum=checksum))
            case Open():
                parts.append(replace(part, generation=7))
            case Commit():
                parts.append(part)
    later = replace(
        capture,
        parts=tuple(parts),
        reserved=replace(capture.reserved, reservation=replace(reservation, generation=7)),
    )
    found = replayed(later)
    assert found.differences() == ()
    assert found.reservation is not None
    assert found.reservation.generation == 7
    fenced = replace(later, parts=capture.parts)
    assert isinstance(replayed(fenced).replayed.error, Fenced)


@pytest.mark.parametrize(
    "error",
    [Exhausted("no room", retry_after_s=1), UnknownHandoff("its lease expired", handoff_id=b"h" * 16)],
)
def test_what_came_of_the_reader_s_state_is_said_to_be_so(error: KvpactError) -> None:
    found = replayed(replace(whole(), receipt=None, error=error))
    assert found.differences() != ()
    assert error.reason in found.notes[0]
    assert "state at that moment" in found.notes[0]


def test_a_pair_alone_is_replayed_too() -> None:
    alone = replace(whole(), reserved=None, parts=(), receipt=None)
    found = replayed(alone)
    assert found.differences() == ()
    assert found.replayed.outcome() == "not reserved"


def test_a_refused_reservation_is_replayed() -> None:
    capture = whole()
    assert capture.reserved is not None
    terms = replace(capture.reserved.terms, token_digest=b"x" * 32)
    asked = replace(capture.reserved, terms=terms, reservation=None)
    refused = replayed(replace(capture, reserved=asked, parts=(), receipt=None, error=None))
    error = refused.replayed.error
    assert error is not None
    assert replayed(replace(capture, reserved=asked, parts=(), receipt=None, error=error)).differences() == ()


def test_the_policy_is_the_one_that_gives_the_recorded_verdict() -> None:
    assert recorded_policy(whole()) == Policy()
    capture = read_capture(FOLDER / "bf16_for_fp16.kvpact")
    assert recorded_policy(capture) == Policy()


def test_a_form_that_this_cache_cannot_keep_is_said() -> None:
    with pytest.raises(UnreadableSource, match="can't be made here"):
        replayed(read_capture(FOLDER / NOT_KEPT))
