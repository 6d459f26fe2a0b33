"""Hostile calls on live servers: raw bytes to any method, with what came of each."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from itertools import cycle, islice

import grpc
from google.protobuf.message import Message

from tests.hostile import field_mutations, varint

DEADLINE_S = 20.0
EVERY = 200
"""Messages for each method."""
NEVER = {
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.UNKNOWN,
}
"""What no hostile message may get: a hang, a failure of the worker's own, or no worker."""


def bodies(message: Message, most: int = EVERY) -> list[bytes]:
    """So many mutations, spread over all kinds; among them the valid message itself.

    No bit is flipped at random, since an address could come out that isn't of this machine.
    """
    valid = message.SerializeToString()
    found = [data for _, data in field_mutations(message)]
    found += [valid[:at] for at in range(0, len(valid), max(1, len(valid) // 20))]
    found += [varint(tag << 3 | 2) + varint(2**40) + valid for tag in range(1, 9)]
    found += [bytes((seed * 37 + at * at * 11) % 256 for at in range(seed)) for seed in range(1, 40)]
    step = max(1, -(-len(found) // most))
    return list(islice(cycle([valid, *found[::step]]), most))


async def outcome_of(
    channel: grpc.aio.Channel, method: str, body: bytes | Iterable[bytes], *, streams: bool = False
) -> grpc.StatusCode:
    """The status of one call; `body` is a list of messages where the request is a stream."""
    try:
        if streams:
            async for _ in channel.unary_stream(method)(body, timeout=DEADLINE_S):
                pass
        elif isinstance(body, bytes):
            await channel.unary_unary(method)(body, timeout=DEADLINE_S)
        else:
            await channel.stream_unary(method)(_stream(body), timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def pelt(
    channel: grpc.aio.Channel,
    method: str,
    messages: Iterable[bytes | Iterable[bytes]],
    *,
    streams: bool = False,
) -> Counter[grpc.StatusCode]:
    """What came of every call, some of them at a time."""
    found: Counter[grpc.StatusCode] = Counter()
    waiting: Iterator[bytes | Iterable[bytes]] = iter(messages)

    async def caller() -> None:
        for body in waiting:
            found[await outcome_of(channel, method, body, streams=streams)] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(caller())
    return found


def harmed(found: Counter[grpc.StatusCode]) -> set[grpc.StatusCode]:
    """Statuses among them that no hostile message may get."""
    return NEVER & set(found)


async def _stream(messages: Iterable[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        yield message
