"""Roles that certificates give, and the settings section `tls`: where each role's certificate lies."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kvpact.errors import BadRequest


class PeerRole(StrEnum):
    """What a certificate entitles its holder to be; its name in certificates is `<role>.kvpact`."""

    PREFILL = "prefill"
    DECODE = "decode"
    COORDINATOR = "coordinator"
    ADMIN = "admin"
    """Operators' tools."""

    def dns_name(self) -> str:
        """The name by which a certificate gives this role; never the address of a machine."""
        return f"{self.value}.kvpact"


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CertificatePaths(NamedTuple):
    """Where one role's certificate, its key and the CAs that it takes lie."""

    cert: Path
    key: Path
    ca: Path


class TlsFiles(_Part):
    """One role's certificate and key, and the CAs whose certificates it takes from others; all or none."""

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    @field_validator("cert", "key", "ca")
    @classmethod
    def _resolved(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().absolute()

    @model_validator(mode="after")
    def _whole(self) -> TlsFiles:
        missing = [name for name in type(self).model_fields if getattr(self, name) is None]
        if 0 < len(missing) < len(type(self).model_fields):
            raise PydanticCustomError(
                "half_given", "{missing} missing; give cert, key and ca", {"missing": " and ".join(missing)}
            )
        return self


class TlsConfig(_Part):
    """Certificates for the traffic between workers and coordinator. Nothing set: plaintext."""

    directory: Path | None = None
    """Holds ca.crt, and for each role <role>.crt and <role>.key."""
    prefill: TlsFiles = TlsFiles()
    decode: TlsFiles = TlsFiles()
    coordinator: TlsFiles = TlsFiles()
    admin: TlsFiles = TlsFiles()

    @field_validator("directory")
    @classmethod
    def _resolved(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser().absolute()

    def paths(self, role: PeerRole) -> CertificatePaths | None:
        """The files of a role; its own go before the directory's. None: nothing is set for any role.

        Raises:
            BadRequest: other roles have certificates and this one has none.
        """
        if (own := self._own(role)) is not None:
            return own
        if self.directory is not None:
            below = self.directory
            return CertificatePaths(below / f"{role}.crt", below / f"{role}.key", below / "ca.crt")
        if all(self._own(each) is None for each in PeerRole):
            return None
        raise BadRequest(
            f"tls.{role} is missing while other roles have certificates; set tls.{role}.cert, .key and .ca, "
            "or tls.directory",
            param=f"tls.{role}",
        )

    def _own(self, role: PeerRole) -> CertificatePaths | None:
        files: TlsFiles = getattr(self, role.value)
        if files.cert is None or files.key is None or files.ca is None:
            return None
        return CertificatePaths(files.cert, files.key, files.ca)
