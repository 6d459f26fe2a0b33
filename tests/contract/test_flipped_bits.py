"""Any one bit of a push flipped on the wire: it is refused for a reason, or changes nothing that counts."""

from __future__ import annotations

from collections import Counter

import grpc
import numpy as np

from kvpact.errors import Fenced
from kvpact.handoff import codec
from kvpact.handoff.grpc_transport import GrpcReaderPort
from kvpact.handoff.messages import HandoffState
from tests.handoff_fakes import FIRST_TOKEN_ID, READER, all_parts, expected_blocks, grpc_wire, order_of
from tests.handoff_faults import CHUNKS, Script
from tests.handoff_proxy import Proxy

FLIPS = 400
HEADER_BYTES = 90
"""Of each message, from its start: chunks are payload for the most part, and that has a checksum."""
REFUSED = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DATA_LOSS,
}
SEED = 11


async def test_a_flipped_bit_is_refused_or_changes_nothing_and_is_never_a_bug_of_the_reader() -> None:
    dice, seen = np.random.default_rng(SEED), Counter[grpc.StatusCode]()
    async with grpc_wire() as wire:
        assert isinstance(wire.port, GrpcReaderPort)
        await wire.sender().pair(READER)
        proxy = Proxy(Script(), wire.port.endpoint)
        for number in range(1, FLIPS + 1):
            terms = wire.terms(number=number)
            parts = await all_parts(wire, terms, (16, 32, 40))
            assert len(parts) == CHUNKS + 2
            messages = [codec.push_to_bytes(part) for part in parts]
            which = int(dice.integers(len(messages)))
            damaged = bytearray(messages[which])
            bit = int(dice.integers(8 * min(HEADER_BYTES, len(damaged))))
            damaged[bit // 8] ^= 1 << bit % 8
            messages[which] = bytes(damaged)
            code = await proxy.replay(messages)
            seen[code] += 1
            where = f"bit {bit} of message {which}: {parts[which]!r:.200}"
            if code is grpc.StatusCode.OK:
                expected = expected_blocks(wire, terms)
                assert {key: wire.reader.landing.landed[key] for key in expected} == expected, where
                try:
                    taken = wire.reader.receiver.take(terms.handoff_id, READER, order_of(terms))
                except Fenced:
                    assert await wire.port.release(terms.handoff_id, "another first token")
                else:
                    assert taken.first_token_id == FIRST_TOKEN_ID, where
                    wire.reader.pool.free(taken.blocks, "sequence")
            else:
                assert code in REFUSED, f"{code}: {where}"
                await wire.port.release(terms.handoff_id, "the writer gave up")
            assert wire.reader.all_free(), where
            assert await wire.port.release(terms.handoff_id, "late") in HandoffState
        await proxy.close()
    assert seen[grpc.StatusCode.DATA_LOSS] > FLIPS / 4
