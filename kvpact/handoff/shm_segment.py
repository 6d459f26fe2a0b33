"""Sealed memory files: one process makes and fills them, another of the same user on the same host looks in.

They have no name in any file system, so that the kernel takes them back when the last of the two is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import sys

from kvpact.errors import BadRequest, KvpactError, Unavailable
from kvpact.handoff.region_layout import check_inside
from kvpact.handoff.regions import ShmSegment

TOKEN_BYTES = 16
MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23
"""Of Linux 5.14; older ones refuse, and pages fault one by one."""
SUPPORTED = sys.platform.startswith("linux") and hasattr(os, "memfd_create")
UNSUPPORTED = f"sealed memory files (memfd_create) are a thing of Linux; this is {sys.platform}"
if SUPPORTED:
    import fcntl

    SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class OwnSegment:
    """A segment of this process, writable. Its memory stays until `close`, and until its reader lets go."""

    def __init__(self, size_bytes: int, token: bytes) -> None:
        """Raises Unavailable where the system gives no such file."""
        if not SUPPORTED:
            raise Unavailable(UNSUPPORTED)
        self.size_bytes = size_bytes
        try:
            self._fd = os.memfd_create("kvpact", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise Unavailable(f"can't make a memory file of {size_bytes} bytes: {error}") from error
        try:
            os.ftruncate(self._fd, size_bytes)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, SEALS)
            self._map = mmap.mmap(self._fd, size_bytes)
        except OSError as error:
            os.close(self._fd)
            raise Unavailable(f"can't make a memory file of {size_bytes} bytes: {error}") from error
        self._bytes = memoryview(self._map)
        self._open = True
        self._present_bytes = 0
        self.rename(token)

    def rename(self, token: bytes) -> None:
        """Gives it a new token, so that whoever still has the old one is refused."""
        self.token = token
        self._bytes[:TOKEN_BYTES] = token

    def told(self) -> ShmSegment:
        """What a reader needs to open it."""
        return ShmSegment(pid=os.getpid(), fd=self._fd, size_bytes=self.size_bytes, token=self.token)

    def space(self, offset: int, size_bytes: int) -> memoryview:
        """Writable bytes of one chunk."""
        check_inside(offset, size_bytes, self.size_bytes)
        if offset + size_bytes > self._present_bytes:
            self._populate(offset + size_bytes)
        return self._bytes[offset : offset + size_bytes]

    def _populate(self, end: int) -> None:
        self._present_bytes = _populate(self._map, MADV_POPULATE_WRITE, self._present_bytes, end)

    def close(self) -> None:
        """Lets go of it. Idempotent. Memory that a view still shows goes with the view."""
        if self._open:
            self._open = False
            os.close(self._fd)
            _unmap(self._bytes, self._map)


class ForeignSegment:
    """The read-only mapping of a segment of another process of this user; it can't shrink."""

    def __init__(self, told: ShmSegment) -> None:
        """Looks at the file before it maps it.

        Raises:
            BadRequest: it isn't a sealed memory file of this user, of that size, with that token.
            Unavailable: it can't be opened.
        """
        self.pid, self._fd = told.pid, told.fd
        fd = _open(told)
        try:
            self.identity = _check_file(fd, told)
            self._map = mmap.mmap(fd, told.size_bytes, prot=mmap.PROT_READ)
        except OSError as error:
            raise Unavailable(f"can't map {_name(told)}: {error}") from error
        finally:
            os.close(fd)
        self.size_bytes = told.size_bytes
        self._bytes = memoryview(self._map)
        self._present_bytes = 0
        try:
            self.check_token(told)
        except BadRequest:
            self.close()
            raise

    def check_token(self, told: ShmSegment) -> None:
        """Raises BadRequest unless it begins with the token that the writer tells."""
        if self._bytes[:TOKEN_BYTES] != told.token:
            raise _refused(
                told, "has another token", "the writer closed it, or runs in another pid namespace"
            )

    def is_still_open(self) -> bool:
        """Whether its writer lives and keeps it."""
        try:
            found = os.stat(f"/proc/{self.pid}/fd/{self._fd}")
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self.identity

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Bytes that lie inside; the caller has checked that."""
        if offset + size_bytes > self._present_bytes:
            self._populate(offset + size_bytes)
        return self._bytes[offset : offset + size_bytes]

    def _populate(self, end: int) -> None:
        self._present_bytes = _populate(self._map, MADV_POPULATE_READ, self._present_bytes, end)

    def close(self) -> None:
        """Lets go of it. Memory that a view still shows goes with the view."""
        _unmap(self._bytes, self._map)


def same_file(told: ShmSegment) -> tuple[int, int] | None:
    """Identity of the file that the numbers name now; None where they name none."""
    try:
        found = os.stat(f"/proc/{told.pid}/fd/{told.fd}")
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _open(told: ShmSegment) -> int:
    """Opens what the numbers name, if it looks like a memory file: opening a pipe may block."""
    path = f"/proc/{told.pid}/fd/{told.fd}"
    try:
        if not os.readlink(path).startswith("/memfd:") or not stat.S_ISREG(os.stat(path).st_mode):
            raise _refused(told, "is no memory file", "the writer closed it, or its process ended")
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as error:
        raise Unavailable(
            f"can't open {_name(told)}: {error.strerror}; writer and reader have to run as one user on one "
            "host and see each other's processes"
        ) from error


def _check_file(fd: int, told: ShmSegment) -> tuple[int, int]:
    """The file's identity."""
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise _refused(told, f"belongs to user {found.st_uid}", f"expected user {os.geteuid()}")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise _refused(told, "is no memory file", "expected one made by memfd_create") from error
    if seals & SEALS != SEALS:
        raise _refused(
            told,
            f"has seals {seals:#x}",
            f"expected {SEALS:#x}: a file that shrinks would end the reader",
        )
    if found.st_size != told.size_bytes or told.size_bytes < TOKEN_BYTES:
        raise _refused(told, f"holds {found.st_size} bytes", f"the writer said {told.size_bytes}")
    return found.st_dev, found.st_ino


def _refused(told: ShmSegment, found: str, hint: str) -> KvpactError:
    return BadRequest(f"{_name(told)} {found}; {hint}", param="shm")


def _name(told: ShmSegment) -> str:
    return f"segment {told.fd} of process {told.pid}"


def _populate(mapped: mmap.mmap, how: int, start: int, end: int) -> int:
    """Faults pages [start, end) in at one go, faster than one by one; the end, on a page boundary."""
    start -= start % mmap.PAGESIZE
    end = min(-(-end // mmap.PAGESIZE) * mmap.PAGESIZE, len(mapped))
    with contextlib.suppress(OSError):
        mapped.madvise(how, start, end - start)
    return end


def _unmap(view: memoryview, mapped: mmap.mmap) -> None:
    view.release()
    with contextlib.suppress(BufferError):
        mapped.close()
