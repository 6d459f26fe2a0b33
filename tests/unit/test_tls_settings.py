"""Settings of certificates: whole or not at all, by folder or by role, and the same in another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpact.config import load_config, parse_config
from kvpact.errors import BadRequest
from kvpact.tls import PeerRole

OWN = {"cert": "/etc/tls/tls.crt", "key": "/etc/tls/tls.key", "ca": "/etc/tls/ca.crt"}


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        (("cert",), "key and ca missing"),
        (("cert", "key"), "ca missing"),
        (("ca",), "cert and key missing"),
        (("key", "ca"), "cert missing"),
    ],
)
def test_half_given_files_are_refused_with_what_is_missing(given: tuple[str, ...], missing: str) -> None:
    with pytest.raises(BadRequest, match=missing) as caught:
        parse_config({"tls": {"decode": {name: OWN[name] for name in given}}})
    assert "tls.decode" in str(caught.value)


def test_files_of_a_role_are_taken_as_cert_manager_names_them() -> None:
    tls = parse_config({"tls": {"decode": OWN}}).tls
    assert tls.paths(PeerRole.DECODE) == tuple(Path(OWN[name]) for name in ("cert", "key", "ca"))


def test_a_role_without_files_beside_one_with_files_is_refused() -> None:
    tls = parse_config({"tls": {"decode": OWN}}).tls
    with pytest.raises(BadRequest, match=r"tls\.prefill is missing.*tls\.directory"):
        tls.paths(PeerRole.PREFILL)


def test_a_folder_serves_every_role_and_its_own_files_go_before() -> None:
    tls = parse_config({"tls": {"directory": "/certs", "decode": OWN}}).tls
    assert tls.paths(PeerRole.PREFILL) == (
        Path("/certs/prefill.crt"),
        Path("/certs/prefill.key"),
        Path("/certs/ca.crt"),
    )
    paths = tls.paths(PeerRole.DECODE)
    assert paths is not None
    assert paths.cert == Path(OWN["cert"])


def test_nothing_set_is_plaintext_for_every_role() -> None:
    assert [parse_config({}).tls.paths(role) for role in PeerRole] == [None] * len(PeerRole)


def test_relative_paths_mean_the_same_in_a_process_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    here = parse_config({"tls": {"directory": "certs"}})
    monkeypatch.chdir("/")
    assert parse_config(here.model_dump(mode="json")) == here
    assert here.tls.directory == tmp_path / "certs"


def test_the_environment_names_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPACT_TLS__DIRECTORY", "/certs")
    assert load_config(None, {}).tls.directory == Path("/certs")


@pytest.mark.parametrize("tls", [{"directry": "x"}, {"prefill": {"certificate": "x"}}])
def test_an_unknown_key_is_refused_with_the_nearest_one(tls: dict[str, object]) -> None:
    with pytest.raises(BadRequest, match=r"did you mean (tls\.prefill\.)?(directory|cert)\?"):
        parse_config({"tls": tls})
