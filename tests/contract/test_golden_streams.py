"""Every recorded stream, pushed in process and over gRPC, ends as the corpus's table of streams says."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import grpc
import pytest

from decode_worker.service import add_decode_service
from kvpact.errors import KvpactError
from kvpact.handoff.capture import Capture
from kvpact.handoff.capture_file import read_capture
from kvpact.handoff.grpc_transport import GrpcReaderPort
from kvpact.handoff.inprocess_transport import InProcessReaderPort
from kvpact.handoff.port import ReaderPort
from kvpact.types import Exactness
from tests.contract.golden.make import FOLDER, STREAMS_FILE, STREAMS_FOLDER, case_bytes, streams_bytes
from tests.contract.golden.reader import READER, GoldenReader, WorkerLanding, golden_reader
from tests.contract.golden.streams import STREAMS
from tests.contract.test_golden import gap_to_truth, nonce_of, reader_of, reserved_of, tolerance_of
from tests.handoff_fakes import FakeDecoder, stream

TABLE = json.loads((FOLDER / STREAMS_FILE).read_text(encoding="utf-8"))
ENTRIES = {entry["file"].split("/")[1].removesuffix(".kvpact"): entry for entry in TABLE["streams"]}
OpenPort = Callable[[GoldenReader], AbstractAsyncContextManager[ReaderPort]]


@asynccontextmanager
async def in_process(reader: GoldenReader) -> AsyncIterator[ReaderPort]:
    yield InProcessReaderPort(reader.receiver)


@asynccontextmanager
async def over_grpc(reader: GoldenReader) -> AsyncIterator[ReaderPort]:
    server = grpc.aio.server()
    add_decode_service(server, reader.receiver, FakeDecoder(reader.receiver, reader.pool))
    number = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    port = GrpcReaderPort(f"127.0.0.1:{number}", READER)
    yield port
    await port.close()
    await server.stop(None)


PORTS: dict[str, OpenPort] = {"in_process": in_process, "grpc": over_grpc}


async def ends_as_told(entry: dict[str, Any], open_port: OpenPort) -> None:
    """Pairs, reserves and pushes as recorded; fails unless it ends as `entry` says."""
    capture = read_capture(FOLDER / entry["file"])
    limits = {"lossy": entry["lossy"] == "allow", "chunk_cap_bytes": entry["chunk_cap_bytes"]}
    async with (
        golden_reader(reader_of(entry), nonce_of(capture), WorkerLanding, **limits) as reader,
        open_port(reader) as port,
    ):
        verdict = (await port.pair(capture.offer)).verdict
        assert (verdict.word.value, verdict.exactness.value) == (entry["verdict"], entry["exactness"])
        assert [step.op.value for step in verdict.plan] == entry["plan"]
        asked = reserved_of(capture)
        granted = await port.reserve(asked.terms, asked.max_output_tokens)
        assert granted == asked.reservation
        if entry["outcome"] == "committed":
            await _commits(entry, capture, reader, port)
        else:
            await _fails(entry, capture, reader, port)


async def _commits(entry: dict[str, Any], capture: Capture, reader: GoldenReader, port: ReaderPort) -> None:
    receipt = await port.push(stream(capture.parts))
    assert receipt == capture.receipt
    allowed = tolerance_of(reader_of(entry), entry["exactness"])
    if receipt.exactness is Exactness.LOSSY:
        assert receipt.max_abs_error is not None
        assert 0 < receipt.max_abs_error < 0.02
        allowed = receipt.max_abs_error
    assert gap_to_truth(reader, capture, reader_of(entry)) <= allowed
    terms, commit = reserved_of(capture).terms, capture.commit()
    assert commit is not None
    taken = reader.receiver.take(terms.handoff_id, READER, (*terms.token_ids, commit.first_token_id))
    assert len(taken.token_ids) == entry["prompt_tokens"]


async def _fails(entry: dict[str, Any], capture: Capture, reader: GoldenReader, port: ReaderPort) -> None:
    with pytest.raises(KvpactError) as failed:
        await port.push(stream(capture.parts))
    error, recorded = failed.value, capture.error
    assert error.reason == entry["reason"]
    assert (getattr(error, "check", None), getattr(error, "param", None)) == (entry["check"], entry["param"])
    assert recorded is not None
    assert (type(error), str(error), error.metadata()) == (type(recorded), str(recorded), recorded.metadata())
    assert reader.receiver.counters().committed == 0
    opened = error.reason != "FENCED" or len(capture.parts) > 1
    assert reader.receiver.held() == (0 if opened else 1), (
        "a push that never opened leaves the handoff to its writer"
    )


@pytest.mark.parametrize("transport", PORTS)
@pytest.mark.parametrize("name", ENTRIES)
async def test_a_stream_ends_as_the_table_says(name: str, transport: str) -> None:
    await ends_as_told(ENTRIES[name], PORTS[transport])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("several_steps", {"outcome": "failed", "reason": "DATA_LOSS", "check": "totals"}),
        ("several_steps", {"plan": ["relayout"]}),
        ("several_steps", {"prompt_tokens": 39}),
        ("raw_to_rotated", {"exactness": "bit_exact"}),
        ("cast_lossy", {"lossy": "reject"}),
        ("flip_byte", {"check": "holes"}),
        ("flip_byte", {"outcome": "committed"}),
        ("over_the_cap", {"chunk_cap_bytes": 1 << 20}),
        ("open_other_generation", {"reason": "UNKNOWN_HANDOFF"}),
    ],
)
async def test_another_expectation_fails(name: str, change: dict[str, Any]) -> None:
    with pytest.raises((AssertionError, KvpactError, pytest.fail.Exception)):
        await ends_as_told(ENTRIES[name] | change, in_process)


@pytest.mark.parametrize("case", STREAMS[::6], ids=lambda case: case.name)
def test_the_same_code_makes_the_same_stream(case: Any) -> None:
    assert case_bytes(case) == (FOLDER / STREAMS_FOLDER / f"{case.name}.kvpact").read_bytes()


def test_the_table_of_streams_is_what_the_code_makes_and_leaves_no_file_out() -> None:
    assert (FOLDER / STREAMS_FILE).read_bytes() == streams_bytes()
    assert {path.stem for path in (FOLDER / STREAMS_FOLDER).iterdir()} == set(ENTRIES)
