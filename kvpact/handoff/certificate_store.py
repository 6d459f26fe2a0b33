"""The certificates that a process uses now: looks at the files at each use and changes to a set that fits."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvpact.clock import wall_time_s
from kvpact.errors import BadRequest
from kvpact.handoff.certificates import Certificates, PemFiles, check_pem, read_pem
from kvpact.tls import CertificatePaths, PeerRole

logger = logging.getLogger(__name__)

SETTLED_S = 2.0
"""A file that was written less than this ago may change once more without a later change time."""

Stamp = tuple[tuple[int, int, int], ...]
"""Change time, which no program sets, modification time, both in nanoseconds, and inode of each file."""


class CertificateStore:
    """Any thread may ask. What is wrong with new files is logged once, and the old set stays in use."""

    def __init__(
        self, files: CertificatePaths, role: PeerRole, *, wall_s: Callable[[], float] = wall_time_s
    ) -> None:
        """Reads the files.

        Raises:
            BadRequest: they can't be used; names file, finding and remedy.
        """
        self.role = role
        self.files = files
        self._wall_s = wall_s
        self._lock = threading.Lock()
        self._stamp: Stamp | None = self._look()
        self._told: set[tuple[int, str]] = set()
        self._next: Certificates | None = None
        self._current = check_pem(read_pem(files), files, role)
        self._current.check_dates(self.files.cert, wall_s())

    def current(self) -> Certificates:
        """The set to use for a new connection; the same object as long as nothing changed."""
        with self._lock:
            stamp = self._look()
            if stamp is None or stamp != self._stamp:
                self._stamp = stamp
                self._read_anew()
            if self._next is not None:
                self._take_up(self._next)
            self._tell_expiry()
            return self._current

    def _look(self) -> Stamp | None:
        """None where the files can't be relied on to show a change: one is missing or was just written."""
        try:
            stats = [path.stat() for path in self.files]
        except OSError:
            return None
        if max(stat.st_ctime for stat in stats) > self._wall_s() - SETTLED_S:
            return None
        return tuple((stat.st_ctime_ns, stat.st_mtime_ns, stat.st_ino) for stat in stats)

    def _read_anew(self) -> None:
        pem: PemFiles | None = None
        try:
            pem = read_pem(self.files)
            known = self._next or self._current
            if pem == known.pem:
                return
            self._next = None
            if pem != self._current.pem:
                self._next = check_pem(pem, self.files, self.role)
        except BadRequest as error:
            self._tell(pem, f"{error}; the certificate that was read before stays in use")

    def _take_up(self, found: Certificates) -> None:
        """Changes to a set that fits, as soon as its dates allow it."""
        try:
            found.check_dates(self.files.cert, self._wall_s())
        except BadRequest as error:
            self._tell(found.pem, f"{error}; the certificate that was read before stays in use")
            return
        logger.info("new connections use the certificate that was put into %s", self.files.cert)
        self._current, self._next = found, None
        self._told.clear()

    def _tell_expiry(self) -> None:
        try:
            self._current.check_dates(self.files.cert, self._wall_s())
        except BadRequest as error:
            self._tell(self._current.pem, f"{error}; others refuse new connections until then")

    def _tell(self, pem: PemFiles | None, what: str) -> None:
        """Logs an error once for each content of the files."""
        told = (hash(pem), what.partition(", and it is ")[0])
        if told not in self._told:
            self._told.add(told)
            logger.error("%s", what)
