"""A CA for development with one certificate for each role, made in memory and written into a folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvpact.errors import BadRequest
from kvpact.tls import PeerRole

BACKDATED = timedelta(minutes=5)
"""Clocks of two machines may differ by so much."""
FOLDER_MODE = 0o700
KEY_MODE = 0o600
CERTIFICATE_MODE = 0o644
BESIDE = ".new"
"""Ends the name of a file that isn't whole yet."""
CA_NAME = "kvpact development CA"


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeFile:
    """One file to write."""

    name: str
    data: bytes
    mode: int
    holds: str
    """What it is, for people."""


def make_files(*, days: int, now_s: float) -> tuple[list[MadeFile], datetime]:
    """A new CA, and for each role a certificate with its key, valid for `days`; files and their end."""
    start = datetime.fromtimestamp(now_s, UTC).replace(microsecond=0)
    until = start + timedelta(days=days)
    maker = _Maker(start - BACKDATED, until)
    files = [
        MadeFile(name="ca.crt", data=_pem(maker.ca), mode=CERTIFICATE_MODE, holds="CA, for every process"),
        MadeFile(
            name="ca.key",
            data=_key_pem(maker.ca_key),
            mode=KEY_MODE,
            holds="key of the CA; no process needs it",
        ),
    ]
    for role in PeerRole:
        certificate, key = maker.leaf(role.dns_name())
        held = f"certificate {role.dns_name()}"
        files.append(
            MadeFile(name=f"{role}.key", data=_key_pem(key), mode=KEY_MODE, holds=f"key of {role}.crt")
        )
        files.append(MadeFile(name=f"{role}.crt", data=_pem(certificate), mode=CERTIFICATE_MODE, holds=held))
    return files, until


def write_files(folder: Path, files: list[MadeFile], *, force: bool) -> None:
    """Writes each file in one step, keys for the owner's eyes only, into a folder for the owner alone.

    Raises:
        BadRequest: one of them is there and `force` isn't said, or the folder is for other things as well.
    """
    try:
        _check_folder(folder, files, force=force)
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        folder.chmod(FOLDER_MODE)
        for file in files:
            _write(folder / file.name, file.data, file.mode)
    except OSError as error:
        raise BadRequest(f"can't write into {folder}: {error.strerror or error}", param="DIR") from error


def _check_folder(folder: Path, files: list[MadeFile], *, force: bool) -> None:
    ours = [file.name for file in files]
    there = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    foreign = [name for name in there if name not in ours and not name.endswith(BESIDE)]
    if foreign:
        raise BadRequest(
            f"{folder} holds {foreign[0]}, which is none of these certificates; name a folder of their own, "
            "since it will be closed to other users",
            param="DIR",
        )
    if there and not force:
        raise BadRequest(
            f"{folder} holds certificates, which running processes may use; name another folder, or say "
            "--force to replace all of them by new ones of a new CA",
            param="DIR",
        )


def _write(path: Path, data: bytes, mode: int) -> None:
    beside = path.with_name(f".{path.name}{BESIDE}")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)
    beside.replace(path)


class _Maker:
    """A CA with its key."""

    def __init__(self, start: datetime, until: datetime) -> None:
        self._start, self._until = start, until
        self.ca_key = ec.generate_private_key(ec.SECP256R1())
        name = _name(CA_NAME)
        usage = _usage(digital_signature=False, signs=True)
        self.ca = (
            self._builder(name, self.ca_key.public_key())
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(self.ca_key, hashes.SHA256())
        )

    def leaf(self, dns_name: str) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
        """A certificate for one name, for servers and clients alike."""
        key = ec.generate_private_key(ec.SECP256R1())
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.ca_key.public_key())
        certificate = (
            self._builder(_name(dns_name), key.public_key())
            .issuer_name(self.ca.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(dns_name)]), critical=False)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(_usage(digital_signature=True, signs=False), critical=True)
            .add_extension(issuer, critical=False)
            .sign(self.ca_key, hashes.SHA256())
        )
        return certificate, key

    def _builder(self, name: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._start)
            .not_valid_after(self._until)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, digital_signature: bool, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
