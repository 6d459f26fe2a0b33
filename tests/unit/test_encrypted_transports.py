"""With certificates set, cache bytes aren't written in the open unless the settings ask for it by name."""

from __future__ import annotations

import pytest

from kvpact.config import HandoffConfig
from kvpact.handoff.transport_choice import GRPC, NIXL, TransportOffer
from kvpact.handoff.transport_settings import IN_THE_OPEN, make_writer_transports
from tests.handoff_fakes import WRITER

READER_OFFERS = (TransportOffer(name=NIXL, available=True, reason="its agent runs", agent=b"agent"),)


@pytest.mark.parametrize("encrypted", [True, False])
async def test_auto_passes_nixl_over_where_connections_are_encrypted(encrypted: bool) -> None:
    transports = make_writer_transports(HandoffConfig(), WRITER, encrypted=encrypted)
    if encrypted:
        choice, carrier = await transports.agree(READER_OFFERS)
        assert (choice.name, carrier) == (GRPC, None)
        assert IN_THE_OPEN in choice.reason
    else:
        assert IN_THE_OPEN not in transports._without_nixl
    transports.close()


def test_nixl_by_name_is_taken_at_its_word() -> None:
    transports = make_writer_transports(HandoffConfig(transport="nixl"), WRITER, encrypted=True)
    assert IN_THE_OPEN not in transports._without_nixl
    transports.close()
