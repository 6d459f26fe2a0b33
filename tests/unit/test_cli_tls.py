"""`kvpact tls init` and `--tls`: what is made and for whose eyes, what is never replaced, what is refused."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from cryptography import x509
from typer.testing import CliRunner

from kvpact.cli.main import app
from kvpact.cli.preflight import check_certificates
from kvpact.clock import wall_time_s
from kvpact.config import parse_config
from kvpact.errors import BadRequest
from kvpact.handoff.service import add_worker_service
from kvpact.tls import PeerRole, TlsConfig
from tests.handoff_fakes import make_reader
from tests.tls_files import DAY_S, make_certificates, security_of

FILES = {"ca.crt", "ca.key"} | {f"{role}.{end}" for role in PeerRole for end in ("crt", "key")}


def init(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["tls", "init", *map(str, words)])


def test_init_makes_what_a_cluster_can_use(tmp_path: Path) -> None:
    folder = tmp_path / "below" / "certs"
    answer = init(folder, "--json", "--days", "3")
    assert answer.exit_code == 0
    told = json.loads(answer.stdout)
    assert told["directory"] == str(folder)
    assert set(told["files"]) == FILES == {path.name for path in folder.iterdir()}
    check_certificates(TlsConfig(directory=folder))
    for role in PeerRole:
        certificate = x509.load_pem_x509_certificate((folder / f"{role}.crt").read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert list(names) == [x509.DNSName(f"{role}.kvpact")]
        left_s = certificate.not_valid_after_utc.timestamp() - wall_time_s()
        assert left_s == pytest.approx(3 * DAY_S, abs=60)


def test_keys_are_their_owner_s_alone(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    folder.mkdir(mode=0o755)
    assert init(folder).exit_code == 0
    assert folder.stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert {name: mode for name, mode in modes.items() if name.endswith(".key")} == {
        name: 0o600 for name in FILES if name.endswith(".key")
    }


def test_people_get_a_table_the_date_and_what_to_write_into_the_settings(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    answer = init(folder)
    assert answer.exit_code == 0
    assert "certificate prefill.kvpact" in answer.stdout
    assert "expire on 20" in answer.stdout
    settings = yaml.safe_load("tls:\n" + answer.stdout.split("tls:\n")[1])
    assert parse_config(settings).tls.directory == folder


def test_nothing_is_replaced_unasked(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path / "certs")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    answer = init(folder, "--json")
    assert answer.exit_code == 2
    assert "--force" in json.loads(answer.stdout)["error"]["message"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert init(folder, "--force").exit_code == 0
    assert {path.name for path in folder.iterdir()} == FILES
    assert all(path.read_bytes() != before[path.name] for path in folder.iterdir())


def test_a_folder_that_holds_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    tmp_path.chmod(0o755)
    answer = init(tmp_path, "--force", "--json")
    assert answer.exit_code == 2
    assert "notes.txt" in json.loads(answer.stdout)["error"]["message"]
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("words", [("--days", "0"), ("--days", "x"), ()])
def test_wrong_usage_exits_2(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert init(*words, *([tmp_path / "certs"] if words else [])).exit_code == 2


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "certs").write_text("")
    answer = init(tmp_path / "certs", "--json")
    assert answer.exit_code == 2
    assert "can't write into" in json.loads(answer.stdout)["error"]["message"]


@pytest.mark.parametrize("role", [PeerRole.PREFILL, PeerRole.DECODE, PeerRole.COORDINATOR])
def test_up_reads_every_role_s_certificate_before_it_starts(tmp_path: Path, role: PeerRole) -> None:
    folder = make_certificates(tmp_path / "certs")
    (folder / f"{role}.key").write_bytes((folder / "admin.key").read_bytes())
    with pytest.raises(BadRequest, match=f"{role}.key can't be used"):
        check_certificates(TlsConfig(directory=folder))


def test_up_in_a_joined_cluster_reads_the_coordinator_s_alone(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path / "certs")
    (folder / "decode.key").unlink()
    check_certificates(TlsConfig(directory=folder), joined=True)
    (folder / "coordinator.key").unlink()
    with pytest.raises(BadRequest, match=r"coordinator\.key"):
        check_certificates(TlsConfig(directory=folder), joined=True)


@contextmanager
def served(folder: Path, role: PeerRole) -> Iterator[str]:
    """A worker's own service behind mutual TLS on a loop of its own, as host:port."""
    endpoint: list[str] = []
    serving, loop, over = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        security, reader = security_of(folder, role), make_reader()
        server = security.make_server()
        add_worker_service(server, reader)
        endpoint.append(f"127.0.0.1:{security.bind(server, '127.0.0.1:0')}")
        await server.start()
        serving.set()
        await over.wait()
        await server.stop(None)
        reader.receiver.close()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert serving.wait(10)
    yield endpoint[0]
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


@pytest.mark.parametrize("role", [PeerRole.DECODE, PeerRole.PREFILL])
def test_a_worker_is_asked_with_the_admin_certificate(tmp_path: Path, role: PeerRole) -> None:
    folder = make_certificates(tmp_path / "certs")
    with served(folder, role) as endpoint:
        shown = CliRunner().invoke(app, ["contract", "show", endpoint, "--tls", str(folder), "--json"])
        assert shown.exit_code == 0, shown.stderr
        assert json.loads(shown.stdout)["layers"]
        words = ["contract", "check", endpoint, endpoint, "--tls", str(folder), "--json"]
        checked = CliRunner().invoke(app, words)
        assert checked.exit_code == 0, checked.stderr
        by_environment = CliRunner().invoke(
            app, ["contract", "show", endpoint, "--json"], env={"KVPACT_TLS__DIRECTORY": str(folder)}
        )
        assert by_environment.stdout == shown.stdout


def test_a_worker_behind_certificates_says_no_to_plaintext_and_to_another_ca(tmp_path: Path) -> None:
    folder = make_certificates(tmp_path / "certs")
    other = make_certificates(tmp_path / "other")
    with served(folder, PeerRole.DECODE) as endpoint:
        plain = CliRunner().invoke(app, ["contract", "show", endpoint, "--json"])
        strange = CliRunner().invoke(app, ["contract", "show", endpoint, "--tls", str(other), "--json"])
    assert (plain.exit_code, strange.exit_code) == (3, 3)
    assert "--tls DIR" in json.loads(plain.stdout)["error"]["message"]
    assert f"{other}/ca.crt; was it made by another CA?" in json.loads(strange.stdout)["error"]["message"]


def test_a_folder_without_certificates_is_a_usage_error(tmp_path: Path) -> None:
    answer = CliRunner().invoke(app, ["contract", "show", "127.0.0.1:9", "--tls", str(tmp_path), "--json"])
    assert answer.exit_code == 2
    assert f"{tmp_path}/admin.crt" in json.loads(answer.stdout)["error"]["message"]
