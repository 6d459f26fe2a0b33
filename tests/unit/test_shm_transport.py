"""Who keeps which segment: writers reuse acknowledged ones, readers keep mappings that may be used again."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from kvpact.clock import ManualClock
from kvpact.errors import BadRequest
from kvpact.handoff.regions import ShmSegment
from kvpact.handoff.shm_segment import SUPPORTED, OwnSegment
from kvpact.handoff.shm_transport import IDLE_S, SIZE_STEP_BYTES, ShmCarrier, ShmReader
from tests.handoff_fakes import FakeAlarms

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="sealed memory files are a thing of Linux")
PAGE = 4096
SEGMENT_PROCESS = """
import sys
from kvpact.handoff.shm_segment import OwnSegment
own = OwnSegment(1 << 20, b"t" * 16)
own.space(64, 3)[:] = b"abc"
told = own.told()
print(told.pid, told.fd, told.size_bytes, flush=True)
sys.stdin.read()
"""
READER_PROCESS = """
import sys
from kvpact.handoff.regions import ShmSegment
from kvpact.handoff.shm_transport import ShmReader
pid, fd, size_bytes = map(int, sys.argv[1:])
told = ShmSegment(pid=pid, fd=fd, size_bytes=size_bytes, token=b"t" * 16)
region = ShmReader(most_bytes=0).open(told, size_bytes)
print(bytes(region.view(64, 3)).decode(), flush=True)
sys.stdin.read()
"""


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = open_fds()
    yield
    assert open_fds() == before


@pytest.fixture
def carrier() -> Iterator[ShmCarrier]:
    carrier = ShmCarrier(most_bytes=2 * SIZE_STEP_BYTES)
    yield carrier
    carrier.close()


@pytest.fixture
def alarms() -> FakeAlarms:
    return FakeAlarms(ManualClock())


@pytest.fixture
def reader(alarms: FakeAlarms) -> Iterator[ShmReader]:
    reader = ShmReader(most_bytes=2 * SIZE_STEP_BYTES, call_later=alarms.call_later)
    yield reader
    reader.close()


async def told_of(carrier: ShmCarrier, size_bytes: int = PAGE) -> ShmSegment:
    cargo = await carrier.load(None, size_bytes, size_bytes)
    told = cargo.segment
    cargo.close(acknowledged=True)
    assert told is not None
    return told


async def test_an_acknowledged_segment_serves_the_next_handoff_by_another_token(
    carrier: ShmCarrier,
) -> None:
    first, second = await told_of(carrier), await told_of(carrier)
    assert (first.pid, first.fd, first.size_bytes) == (second.pid, second.fd, second.size_bytes)
    assert first.token != second.token


async def test_a_segment_has_no_name_that_could_stay(carrier: ShmCarrier) -> None:
    told = await told_of(carrier)
    assert os.readlink(f"/proc/self/fd/{told.fd}") == "/memfd:kvpact (deleted)"


async def test_two_handoffs_at_a_time_have_two_segments(carrier: ShmCarrier) -> None:
    one, other = [await carrier.load(None, PAGE, PAGE) for _ in range(2)]
    assert one.segment is not None
    assert other.segment is not None
    assert one.segment.fd != other.segment.fd
    assert carrier.in_use_bytes() == 2 * SIZE_STEP_BYTES
    for cargo in (one, other, one):
        cargo.close(acknowledged=True)
    assert (carrier.in_use_bytes(), carrier.idle_bytes()) == (0, 2 * SIZE_STEP_BYTES)


async def test_a_segment_whose_reader_never_answered_is_dropped(
    carrier: ShmCarrier, reader: ShmReader
) -> None:
    cargo = await carrier.load(None, PAGE, PAGE)
    assert cargo.segment is not None
    region = reader.open(cargo.segment, PAGE)
    cargo.space(64, 3)[:] = b"abc"
    cargo.close(acknowledged=False)
    assert (carrier.dropped_bytes, carrier.idle_bytes(), carrier.in_use_bytes()) == (SIZE_STEP_BYTES, 0, 0)
    assert bytes(region.view(64, 3)) == b"abc"
    region.close(reusable=False)


async def test_waiting_segments_are_bounded(
    carrier: ShmCarrier,
) -> None:
    cargos = [await carrier.load(None, size * SIZE_STEP_BYTES, PAGE) for size in (1, 2, 1)]
    for cargo in cargos:
        cargo.close(acknowledged=True)
    assert carrier.idle_bytes() == SIZE_STEP_BYTES


async def test_a_mapping_is_kept_for_the_next_handoff_in_the_same_segment(
    carrier: ShmCarrier, reader: ShmReader
) -> None:
    reader.open(await told_of(carrier), PAGE).close(reusable=True)
    fds = open_fds()
    told = await told_of(carrier)
    region = reader.open(told, PAGE)
    assert (open_fds(), reader.idle_bytes()) == (fds, 0)
    region.close(reusable=True)
    await told_of(carrier)
    with pytest.raises(BadRequest, match="another token"):
        reader.open(told, PAGE)


async def test_a_push_that_failed_leaves_no_mapping_of_that_writer(
    carrier: ShmCarrier, reader: ShmReader
) -> None:
    cargos = [await carrier.load(None, PAGE, PAGE) for _ in range(2)]
    regions = [reader.open(cargo.segment, PAGE) for cargo in cargos if cargo.segment]
    regions[0].close(reusable=True)
    assert reader.idle_bytes() == SIZE_STEP_BYTES
    regions[1].close(reusable=False)
    assert reader.idle_bytes() == 0
    for cargo in cargos:
        cargo.close(acknowledged=True)


async def test_a_mapping_that_nobody_uses_goes_after_a_while(
    carrier: ShmCarrier, reader: ShmReader, alarms: FakeAlarms
) -> None:
    reader.open(await told_of(carrier), PAGE).close(reusable=True)
    alarms.advance(IDLE_S - 1)
    assert reader.idle_bytes() > 0
    alarms.advance(1)
    assert reader.idle_bytes() == 0


async def test_a_mapping_goes_when_its_writer_let_go(carrier: ShmCarrier, reader: ShmReader) -> None:
    reader.open(await told_of(carrier), PAGE).close(reusable=True)
    carrier.close()
    other = OwnSegment(PAGE, b"t" * 16)
    reader.open(other.told(), PAGE).close(reusable=False)
    assert reader.idle_bytes() == 0
    other.close()


def started(code: str, *arguments: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_killed_writer_neither_hurts_its_reader_nor_leaves_anything(reader: ShmReader) -> None:
    fds = open_fds()
    writer = started(SEGMENT_PROCESS)
    pid, fd, size_bytes = map(int, line_of(writer).split())
    told = ShmSegment(pid=pid, fd=fd, size_bytes=size_bytes, token=b"t" * 16)
    region = reader.open(told, size_bytes)
    killed(writer)
    assert bytes(region.view(64, 3)) == b"abc"
    assert not any(region.view(1 << 19, 1 << 18))
    region.close(reusable=False)
    assert open_fds() == fds


def test_a_killed_reader_leaves_nothing() -> None:
    own = OwnSegment(1 << 20, b"t" * 16)
    own.space(64, 3)[:] = b"abc"
    told = own.told()
    fds = open_fds()
    reader = started(READER_PROCESS, told.pid, told.fd, told.size_bytes)
    assert line_of(reader) == "abc"
    killed(reader)
    assert open_fds() == fds
    own.close()
