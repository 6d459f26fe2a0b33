"""Certificates on disk for tests: a folder per CA, and what a process of each role makes of it."""

from __future__ import annotations

from pathlib import Path

from kvpact.cli.development_ca import make_files, write_files
from kvpact.clock import wall_time_s
from kvpact.handoff.security_transport import Security, make_security
from kvpact.tls import CertificatePaths, PeerRole, TlsConfig

DAY_S = 86400.0


def make_certificates(folder: Path, *, days: int = 2, age_days: int = 0) -> Path:
    """A folder as `kvpact tls init` makes it, with a CA of its own, as if made `age_days` ago."""
    files, _ = make_files(days=days, now_s=wall_time_s() - age_days * DAY_S)
    write_files(folder, files, force=True)
    return folder


def paths_of(folder: Path, role: PeerRole) -> CertificatePaths:
    """The three files of a role."""
    paths = TlsConfig(directory=folder).paths(role)
    assert paths is not None
    return paths


def security_of(folder: Path, role: PeerRole) -> Security:
    """What a process of this role uses."""
    return make_security(TlsConfig(directory=folder), role)
