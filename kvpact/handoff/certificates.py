"""One role's certificate, key and CAs, read from files and proved to fit together before they are used."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvpact.errors import BadRequest
from kvpact.tls import CertificatePaths, PeerRole

PURPOSES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
CURVES = (ec.SECP256R1, ec.SECP384R1)
ANY_PURPOSE = ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class PemFiles:
    """What three files hold, as it lies there; nothing of it is checked."""

    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ca: bytes = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """A set whose parts fit together. Dates are seconds since the epoch."""

    pem: PemFiles
    names: frozenset[str]
    """DNS names of the certificate."""
    valid_from_s: float
    valid_until_s: float

    def check_dates(self, path: Path, now_s: float) -> None:
        """Raises BadRequest, with the dates, where the certificate isn't valid now."""
        if now_s < self.valid_from_s:
            raise BadRequest(
                f"the certificate {path} isn't valid before {_date(self.valid_from_s)}, and it is "
                f"{_date(now_s)}; is this machine's clock right?",
                param=str(path),
            )
        if now_s > self.valid_until_s:
            raise BadRequest(
                f"the certificate {path} expired on {_date(self.valid_until_s)}, and it is {_date(now_s)}; "
                "put a new one there with its key: kvpact tls init DIR --force makes them for development",
                param=str(path),
            )


def read_pem(files: CertificatePaths) -> PemFiles:
    """Reads the three files. Raises BadRequest that names the one that can't be read."""
    return PemFiles(cert=_read(files.cert), key=_read(files.key), ca=_read(files.ca))


def check_pem(pem: PemFiles, files: CertificatePaths, role: PeerRole) -> Certificates:
    """Proves that the parts fit together and that the certificate is one of `role`.

    Raises:
        BadRequest: names the file, what was found and what to do.
    """
    try:
        return _checked(pem, files, role)
    except (ValueError, UnsupportedAlgorithm, x509.DuplicateExtension) as error:
        raise _wrong(files.cert, f"it can't be read ({error})") from error


def _checked(pem: PemFiles, files: CertificatePaths, role: PeerRole) -> Certificates:
    chain = _certificates(pem.cert, files.cert)
    authorities = _certificates(pem.ca, files.ca)
    leaf = chain[0]
    _check_key(pem.key, leaf, files)
    names = _dns_names(leaf)
    if role.dns_name() not in names:
        found = ", ".join(sorted(names)) or "none"
        raise _wrong(files.cert, f"its DNS names are {found}, expected {role.dns_name()}")
    _check_purposes(leaf, files.cert)
    if not any(_issued_by(each, authority) for each in chain for authority in authorities):
        raise _wrong(
            files.cert,
            f"no CA in {files.ca} signed it; that file must hold the CAs of every role's certificate",
        )
    return Certificates(
        pem=pem,
        names=names,
        valid_from_s=leaf.not_valid_before_utc.timestamp(),
        valid_until_s=leaf.not_valid_after_utc.timestamp(),
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadRequest(
            f"can't read {path}: {error.strerror}; tls in the settings names it, and kvpact tls init DIR "
            "makes a folder for tls.directory",
            param=str(path),
        ) from error


def _certificates(data: bytes, path: Path) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise _wrong(path, f"it holds no certificate in PEM form ({error})") from error


def _check_key(data: bytes, leaf: x509.Certificate, files: CertificatePaths) -> None:
    try:
        key = load_pem_private_key(data, password=None)
    except TypeError as error:
        raise _wrong(files.key, "it is locked by a passphrase; store the key without one") from error
    except ValueError as error:
        raise _wrong(files.key, f"it holds no private key in PEM form ({error})") from error
    mine, theirs = (
        each.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        for each in (key.public_key(), leaf.public_key())
    )
    if mine != theirs:
        raise _wrong(files.key, f"it isn't the key of {files.cert}; was only one of the two replaced?")
    if not isinstance(key, rsa.RSAPrivateKey) and not (
        isinstance(key, ec.EllipticCurvePrivateKey) and isinstance(key.curve, CURVES)
    ):
        raise _wrong(files.key, "gRPC can't use a key of its kind; expected RSA, or elliptic P-256 or P-384")


def _check_purposes(leaf: x509.Certificate, path: Path) -> None:
    try:
        purposes = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    if ANY_PURPOSE not in purposes and not all(purpose in purposes for purpose in PURPOSES):
        raise _wrong(path, "its extended key usage lacks server auth or client auth; each role is both")


def _dns_names(leaf: x509.Certificate) -> frozenset[str]:
    try:
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    return frozenset(names.get_values_for_type(x509.DNSName))


def _issued_by(certificate: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _wrong(path: Path, what: str) -> BadRequest:
    return BadRequest(f"{path} can't be used: {what}", param=str(path))
