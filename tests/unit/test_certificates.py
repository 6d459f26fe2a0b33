"""A set of certificate, key and CAs is used only if it fits together; new files replace it in use."""

from __future__ import annotations

import logging
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvpact.clock import wall_time_s
from kvpact.errors import BadRequest
from kvpact.handoff.certificate_store import SETTLED_S, CertificateStore
from kvpact.handoff.certificates import check_pem, read_pem
from kvpact.tls import PeerRole
from tests.tls_files import DAY_S, make_certificates, paths_of

PREFILL = PeerRole.PREFILL
PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


class Wall:
    """Wall time that moves by hand, from now on."""

    def __init__(self) -> None:
        self.now_s = float(wall_time_s())

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_certificates(tmp_path / "certs")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return make_certificates(tmp_path / "other")


def take(source: Path, folder: Path, *names: str) -> None:
    """Puts files of one folder into another."""
    for name in names:
        (folder / name).write_bytes((source / name).read_bytes())


def refusal(folder: Path, role: PeerRole = PREFILL) -> str:
    paths = paths_of(folder, role)
    with pytest.raises(BadRequest) as caught:
        check_pem(read_pem(paths), paths, role)
    return str(caught.value)


def test_a_set_as_it_is_made_fits(folder: Path) -> None:
    for role in PeerRole:
        paths = paths_of(folder, role)
        assert check_pem(read_pem(paths), paths, role).names == {role.dns_name()}


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "prefill.key").unlink()
    assert str(folder / "prefill.key") in refusal(folder)


def test_a_key_of_another_certificate_is_refused(folder: Path, other: Path) -> None:
    take(other, folder, "prefill.key")
    assert f"prefill.key can't be used: it isn't the key of {folder}/prefill.crt" in refusal(folder)


def test_a_certificate_of_another_ca_is_refused(folder: Path, other: Path) -> None:
    take(other, folder, "prefill.key", "prefill.crt")
    assert f"no CA in {folder}/ca.crt signed it" in refusal(folder)


def test_a_ca_file_may_hold_several_cas(folder: Path, other: Path) -> None:
    bundle = (other / "ca.crt").read_bytes() + (folder / "ca.crt").read_bytes()
    (folder / "ca.crt").write_bytes(bundle)
    paths = paths_of(folder, PREFILL)
    assert check_pem(read_pem(paths), paths, PREFILL).pem.ca == bundle


def test_a_certificate_for_another_role_is_refused(folder: Path) -> None:
    take(folder, folder, "prefill.crt")
    (folder / "prefill.crt").write_bytes((folder / "decode.crt").read_bytes())
    (folder / "prefill.key").write_bytes((folder / "decode.key").read_bytes())
    assert "its DNS names are decode.kvpact, expected prefill.kvpact" in refusal(folder)


@pytest.mark.parametrize("name", ["prefill.crt", "prefill.key", "ca.crt"])
@pytest.mark.parametrize("content", [b"", b"\x00\xff", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_files_that_hold_something_else_are_named(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    assert f"{folder / name} can't be used" in refusal(folder)


def test_a_key_under_a_passphrase_is_refused(folder: Path) -> None:
    key = load_pem_private_key((folder / "prefill.key").read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word"))
    (folder / "prefill.key").write_bytes(locked)
    assert "locked by a passphrase" in refusal(folder)


def sign(folder: Path, key: PrivateKey, *extensions: x509.ExtensionType) -> None:
    """Puts a certificate for `key` with the prefill role's name in place, signed by the folder's CA."""
    ca_key = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(ca_key, ec.EllipticCurvePrivateKey)
    now = datetime.fromtimestamp(wall_time_s(), UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes()).subject)
        .public_key(key.public_key())
        .serial_number(7)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("prefill.kvpact")]), critical=True)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    (folder / "prefill.crt").write_bytes(builder.sign(ca_key, hashes.SHA256()).public_bytes(Encoding.PEM))
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "prefill.key").write_bytes(pem)


@pytest.mark.parametrize(
    ("purposes", "fits"),
    [
        ([ExtendedKeyUsageOID.SERVER_AUTH], False),
        ([ExtendedKeyUsageOID.CLIENT_AUTH], False),
        ([ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE], True),
        ([], True),
    ],
)
def test_a_certificate_must_serve_both_ends(
    folder: Path, purposes: list[x509.ObjectIdentifier], fits: bool
) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    sign(folder, key, *([x509.ExtendedKeyUsage(purposes)] if purposes else []))
    if fits:
        paths = paths_of(folder, PREFILL)
        assert check_pem(read_pem(paths), paths, PREFILL).names == {"prefill.kvpact"}
    else:
        assert "lacks server auth or client auth" in refusal(folder)


@pytest.mark.parametrize(
    "key",
    [ec.generate_private_key(ec.SECP521R1()), ed25519.Ed25519PrivateKey.generate()],
    ids=["P-521", "Ed25519"],
)
def test_a_key_that_grpc_can_not_use_is_refused_as_such(folder: Path, key: PrivateKey) -> None:
    sign(folder, key)
    assert "gRPC can't use a key of its kind; expected RSA" in refusal(folder)


def test_keys_are_not_in_what_is_printed(folder: Path) -> None:
    current = CertificateStore(paths_of(folder, PREFILL), PREFILL).current()
    assert "PRIVATE" not in repr(current)
    assert b"PRIVATE" in current.pem.key


def test_an_expired_certificate_is_refused_with_both_dates(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path / "old", days=1, age_days=3)
    with pytest.raises(BadRequest, match=r"prefill\.crt expired on \d{4}-\d\d-\d\d .*, and it is \d{4}"):
        CertificateStore(paths_of(folder, PREFILL), PREFILL)


def test_a_certificate_of_the_future_is_refused_with_both_dates(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path / "new", days=9, age_days=-3)
    with pytest.raises(BadRequest, match=r"isn't valid before \d{4}.*, and it is \d{4}"):
        CertificateStore(paths_of(folder, PREFILL), PREFILL)


def test_unchanged_files_give_the_same_set(folder: Path) -> None:
    store = CertificateStore(paths_of(folder, PREFILL), PREFILL)
    assert store.current() is store.current()


def test_a_new_set_is_taken_up(folder: Path) -> None:
    store = CertificateStore(paths_of(folder, PREFILL), PREFILL)
    before = store.current()
    make_certificates(folder)
    after = store.current()
    assert after.pem == read_pem(paths_of(folder, PREFILL)) != before.pem
    assert store.current() is after


@pytest.mark.parametrize(
    "halves", [("prefill.crt",), ("prefill.key",), ("ca.crt",), ("prefill.crt", "ca.crt")]
)
def test_a_half_written_set_leaves_the_old_one_in_use_until_it_is_whole(
    folder: Path, other: Path, caplog: pytest.LogCaptureFixture, halves: tuple[str, ...]
) -> None:
    store = CertificateStore(paths_of(folder, PREFILL), PREFILL)
    before = store.current()
    take(other, folder, *halves)
    with caplog.at_level(logging.ERROR):
        assert all(store.current() is before for _ in range(3))
    assert len(caplog.records) == 1
    assert "stays in use" in caplog.text
    take(other, folder, "prefill.crt", "prefill.key", "ca.crt")
    assert store.current().pem == read_pem(paths_of(other, PREFILL))


def test_a_file_that_is_gone_for_a_moment_changes_nothing(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CertificateStore(paths_of(folder, PREFILL), PREFILL)
    before = store.current()
    moved = (folder / "prefill.key").rename(folder / "away")
    assert store.current() is before
    assert "can't read" in caplog.text
    moved.rename(folder / "prefill.key")
    assert store.current() is before


def test_a_change_within_one_tick_of_the_clock_is_seen(folder: Path, other: Path) -> None:
    wall = Wall()
    store = CertificateStore(paths_of(folder, PREFILL), PREFILL, wall_s=wall)
    store.current()
    stamps = [(path, path.stat()) for path in paths_of(folder, PREFILL)]
    take(other, folder, "prefill.crt", "prefill.key", "ca.crt")
    for path, stat in stamps:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert store.current().pem == read_pem(paths_of(other, PREFILL))


def test_settled_files_are_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = Wall()
    wall.now_s += 2 * SETTLED_S
    store = CertificateStore(paths_of(folder, PREFILL), PREFILL, wall_s=wall)
    monkeypatch.setattr("kvpact.handoff.certificate_store.read_pem", None)
    store.current()
    os.utime(folder / "ca.crt", (wall.now_s - SETTLED_S - 1, wall.now_s - SETTLED_S - 1))
    with pytest.raises(TypeError):
        store.current()


def test_a_set_whose_time_has_not_come_waits_for_it(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    wall = Wall()
    store = CertificateStore(paths_of(folder, PREFILL), PREFILL, wall_s=wall)
    before = store.current()
    make_certificates(folder, days=9, age_days=-1)
    assert all(store.current() is before for _ in range(3))
    assert caplog.text.count("isn't valid before") == 1
    wall.now_s += DAY_S
    assert store.current().pem == read_pem(paths_of(folder, PREFILL))


def test_an_old_set_in_place_of_a_good_one_is_not_taken(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CertificateStore(paths_of(folder, PREFILL), PREFILL)
    before = store.current()
    make_certificates(folder, days=1, age_days=3)
    assert store.current() is before
    assert "expired on" in caplog.text


def test_expiry_in_use_is_logged_once_and_ends_with_new_files(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wall = Wall()
    store = CertificateStore(paths_of(folder, PREFILL), PREFILL, wall_s=wall)
    before = store.current()
    wall.now_s += 3 * DAY_S
    assert all(store.current() is before for _ in range(3))
    assert caplog.text.count("expired on") == 1
    make_certificates(folder, days=9)
    assert store.current() is not before
    assert caplog.text.count("expired on") == 1
