"""A channel that is opened anew when its certificates changed; calls that run end on the old one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc

from kvpact.handoff.certificate_store import CertificateStore
from kvpact.handoff.certificates import Certificates

OpenChannel = Callable[[Certificates], grpc.aio.Channel]


class _Opened:
    """One real channel and the number of calls that run on it."""

    def __init__(self, channel: grpc.aio.Channel, certificates: Certificates) -> None:
        self.channel = channel
        self.certificates = certificates
        self.running = 0


class _Method:
    """One rpc of a RenewedChannel: each call begins on the channel of that moment."""

    def __init__(self, owner: RenewedChannel, kind: str, *how: Any) -> None:
        self._owner = owner
        self._kind = kind
        self._how = how
        self._opened: _Opened | None = None
        self._begin: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        opened = self._owner.opened()
        if self._begin is None or opened is not self._opened:
            self._begin = getattr(opened.channel, self._kind)(*self._how)
            self._opened = opened
        call = self._begin(*args, **kwargs)
        self._owner.count(opened, call)
        return call


class RenewedChannel(grpc.aio.Channel):
    """Owns the channels that it opens until `close`."""

    def __init__(self, open_channel: OpenChannel, store: CertificateStore) -> None:
        self._open_channel = open_channel
        self._store = store
        self._opened = self._open()
        self._retired: set[_Opened] = set()
        self._closing: set[asyncio.Future[None]] = set()
        self._closed = False

    def opened(self) -> _Opened:
        """The channel for a call that begins now."""
        if not self._closed and self._store.current() is not self._opened.certificates:
            old, self._opened = self._opened, self._open()
            self._retired.add(old)
            self._close_if_idle(old)
        return self._opened

    def count(self, opened: _Opened, call: Any) -> None:
        """Keeps a channel open for a call that began on it."""
        opened.running += 1

        def ended(_: Any) -> None:
            opened.running -= 1
            self._close_if_idle(opened)

        call.add_done_callback(ended)

    async def close(self, grace: float | None = None) -> None:
        """Ends running calls after `grace` seconds and closes every channel. Idempotent."""
        self._closed = True
        retired, self._retired = self._retired, set()
        for opened in (self._opened, *retired):
            await opened.channel.close(grace)
        await asyncio.gather(*self._closing)

    def unary_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """See grpc.aio.Channel."""
        how = (method, request_serializer, response_deserializer, _registered_method)
        return _Method(self, "unary_unary", *how)

    def unary_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """See grpc.aio.Channel."""
        how = (method, request_serializer, response_deserializer, _registered_method)
        return _Method(self, "unary_stream", *how)

    def stream_unary(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """See grpc.aio.Channel."""
        how = (method, request_serializer, response_deserializer, _registered_method)
        return _Method(self, "stream_unary", *how)

    def stream_stream(
        self,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Any:
        """See grpc.aio.Channel."""
        how = (method, request_serializer, response_deserializer, _registered_method)
        return _Method(self, "stream_stream", *how)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See grpc.aio.Channel."""
        return self.opened().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self.opened().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self.opened().channel.channel_ready()

    async def __aenter__(self) -> RenewedChannel:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _open(self) -> _Opened:
        certificates = self._store.current()
        return _Opened(self._open_channel(certificates), certificates)

    def _close_if_idle(self, opened: _Opened) -> None:
        if opened in self._retired and opened.running == 0:
            self._retired.discard(opened)
            closing = asyncio.ensure_future(opened.channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
