"""Plaintext stays on loopback unless the operator says otherwise."""

from __future__ import annotations

import logging

import pytest

from kvpact.errors import BadRequest
from kvpact.serving.exposure import check_advertised, check_plaintext


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
