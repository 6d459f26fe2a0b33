"""Segments: what a reader checks before it maps what the numbers name."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvpact.errors import BadRequest, KvpactError, Unavailable
from kvpact.handoff.regions import ShmSegment
from kvpact.handoff.shm_segment import SUPPORTED, ForeignSegment, OwnSegment
from kvpact.handoff.shm_transport import ShmReader, trial_segment, try_segment

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="sealed memory files are a thing of Linux")
TOKEN = b"t" * 16
SIZE = 1 << 16


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def no_fd_left() -> Iterator[None]:
    before = open_fds()
    yield
    assert open_fds() == before


@pytest.fixture
def own() -> Iterator[OwnSegment]:
    segment = OwnSegment(SIZE, TOKEN)
    yield segment
    segment.close()


def opened(told: ShmSegment) -> None:
    ForeignSegment(told).close()


def told_of(fd: int, size_bytes: int = SIZE) -> ShmSegment:
    return ShmSegment(pid=os.getpid(), fd=fd, size_bytes=size_bytes, token=TOKEN)


def test_a_reader_sees_what_the_writer_writes_later(own: OwnSegment) -> None:
    foreign = ForeignSegment(own.told())
    own.space(64, 4)[:] = b"abcd"
    assert bytes(foreign.view(64, 4)) == b"abcd"
    foreign.close()


def test_a_reader_can_not_write(own: OwnSegment) -> None:
    foreign = ForeignSegment(own.told())
    assert foreign.view(64, 4).readonly
    foreign.close()


def test_a_segment_can_neither_shrink_nor_grow(own: OwnSegment) -> None:
    for size_bytes in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(own.told().fd, size_bytes)


def test_another_token_is_refused(own: OwnSegment) -> None:
    stale = own.told()
    opened(stale)
    own.rename(b"n" * 16)
    with pytest.raises(BadRequest, match="another token"):
        opened(stale)


@pytest.mark.parametrize("size_bytes", [SIZE - 1, SIZE + 1, 1 << 40])
def test_another_size_than_told_is_refused(own: OwnSegment, size_bytes: int) -> None:
    with pytest.raises(BadRequest, match=f"holds {SIZE} bytes; the writer said {size_bytes}"):
        opened(replace(own.told(), size_bytes=size_bytes))


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK if SUPPORTED else 0])
def test_a_file_that_could_shrink_is_refused(seals: int) -> None:
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    os.pwrite(fd, TOKEN, 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    with pytest.raises(BadRequest, match="has seals"):
        opened(told_of(fd))
    os.close(fd)


def test_a_file_with_a_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(TOKEN + bytes(SIZE - 16))
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(BadRequest, match="is no memory file"):
        opened(told_of(fd))
    os.close(fd)


def test_a_folder_is_refused(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(BadRequest, match="is no memory file"):
        opened(told_of(fd))
    os.close(fd)


def test_a_pipe_is_refused_and_nobody_waits_for_its_other_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    fd = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(BadRequest, match="is no memory file"):
        opened(told_of(fd))
    os.close(fd)


def test_a_socket_is_refused() -> None:
    with socket.socket() as listening, pytest.raises(BadRequest, match="is no memory file"):
        opened(told_of(listening.fileno()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused(own: OwnSegment) -> None:
    os.fchown(own.told().fd, 12345, -1)
    with pytest.raises(BadRequest, match="belongs to user 12345"):
        opened(own.told())


@pytest.mark.parametrize("changes", [{"fd": 100_000}, {"pid": 2**22 + 1}])
def test_what_is_not_there_is_unavailable(own: OwnSegment, changes: dict[str, int]) -> None:
    with pytest.raises(Unavailable, match="as one user on one host"):
        opened(replace(own.told(), **changes))


def test_a_closed_segment_is_gone(own: OwnSegment) -> None:
    told = own.told()
    own.close()
    with pytest.raises(KvpactError):
        opened(told)


@pytest.mark.parametrize(
    ("offset", "size_bytes"),
    [(-64, 64), (0, 16), (63, 1), (SIZE - 1, 2), (1 << 62, 1), (64, -1), (SIZE + 64, 0)],
)
def test_a_view_outside_is_refused_untouched(own: OwnSegment, offset: int, size_bytes: int) -> None:
    reader = ShmReader(most_bytes=0)
    region = reader.open(own.told(), SIZE)
    region.view(64, SIZE - 64).release()
    for look in (region.check, region.view):
        with pytest.raises(BadRequest, match="region_offset"):
            look(offset, size_bytes)
    region.close(reusable=False)


def test_a_region_ends_where_the_reservation_does(own: OwnSegment) -> None:
    region = ShmReader(most_bytes=0).open(own.told(), 1000)
    region.view(64, 936).release()
    with pytest.raises(BadRequest, match=r"payload is \[64, 1000\)"):
        region.check(64, 937)
    region.close(reusable=False)


def test_a_trial_that_can_be_read_is_an_offer_and_gone_after() -> None:
    with trial_segment() as trial:
        assert try_segment(trial).available
    gone = try_segment(trial)
    assert not gone.available
    assert "segment" in gone.reason


def test_no_trial_is_no_offer() -> None:
    offer = try_segment(None)
    assert (offer.available, offer.reason) == (False, "the prefill side named no segment to try")
