"""Plaintext stays on loopback unless the operator says otherwise."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from coordinator.coordinator import Coordinator
from kvpact.config import ApiConfig, Config, RoleConfig
from kvpact.errors import BadRequest
from kvpact.handoff.security_transport import PLAINTEXT
from kvpact.serving.exposure import check_advertised, check_plaintext
from kvpact.serving.worker_transport import WorkerFront
from tests.coordinator_fakes import make_text_folder
from tests.handoff_fakes import make_reader


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_word(host: str) -> None:
    check_plaintext("bind", host, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "worker-3"])
def test_an_address_that_others_reach_is_refused(host: str) -> None:
    with pytest.raises(BadRequest, match=r"insecure: true") as caught:
        check_plaintext("bind", host, insecure=False)
    assert host in str(caught.value)


def test_insecure_is_allowed_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        check_plaintext("bind", "0.0.0.0", insecure=True)
    assert "without encryption" in caplog.text


def test_an_advertised_loopback_address_is_refused_for_a_reachable_bind() -> None:
    with pytest.raises(BadRequest, match="advertise_host is 127"):
        check_advertised("bind", "0.0.0.0", "127.0.0.1")
    check_advertised("bind", "0.0.0.0", "10.1.2.3")
    check_advertised("bind", "127.0.0.1", "127.0.0.1")


def test_certificates_make_any_address_fit_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    check_plaintext("bind", "0.0.0.0", insecure=False, encrypted=True)
    assert caplog.text == ""


async def front(role: RoleConfig, coordinator: str | None = None) -> None:
    """Starts and stops a decode worker's outside in plaintext."""
    reader = make_reader()
    outside = WorkerFront(
        facts=reader,
        role=role,
        add_service=lambda server: None,
        coordinator=coordinator,
        security=PLAINTEXT,
    )
    try:
        await outside.start()
    finally:
        await outside.stop()
        reader.receiver.close()


async def test_a_plaintext_worker_that_others_reach_does_not_start() -> None:
    await front(RoleConfig())
    with pytest.raises(BadRequest, match=r"bind is 0\.0\.0\.0.*kvpact tls init"):
        await front(RoleConfig(bind="0.0.0.0", advertise_host="10.1.2.3"))


@pytest.mark.parametrize("coordinator", ["10.1.2.3:7000", "coordinator.kvpact.svc:7000", "[fd00::1]:7000"])
async def test_a_plaintext_worker_does_not_announce_itself_to_another_machine(coordinator: str) -> None:
    with pytest.raises(BadRequest, match="the coordinator's address is"):
        await front(RoleConfig(), coordinator)


async def test_a_plaintext_coordinator_that_others_reach_does_not_start(tmp_path: Path) -> None:
    config = Config(model="fake", api=ApiConfig(port=0))
    coordinator = Coordinator(config, make_text_folder(tmp_path))
    with pytest.raises(BadRequest, match=r"coordinator\.bind is 0\.0\.0\.0.*insecure: true"):
        await coordinator.start(grpc_host="0.0.0.0")
    await coordinator.stop()
