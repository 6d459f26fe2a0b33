"""One process's NIXL agent over UCX, with memory registered; the package is an extra and imported late.

No progress thread: an agent moves bytes when it is called. A writer's calls do, and while a push is open its
reader polls, which the first write to it and emulated transports need.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
import sys
from typing import Any, Protocol

from kvpact.errors import Unavailable

PACKAGES = ("nixl_cu13", "nixl_cu12")
"""Either holds the same bindings; they work without CUDA."""
MOVING, DONE, FAILED = "PROC", "DONE", "ERR"


class Transfer(Protocol):
    """A write on its way."""

    def state(self) -> str:
        """MOVING, DONE or FAILED; moves it on."""

    def stop(self) -> bool:
        """Whether nothing moves any more; cancels what does if the transport can."""


class Agent(Protocol):
    """Used from one thread at a time."""

    @property
    def memory(self) -> memoryview:
        """The registered area, writable."""

    @property
    def address(self) -> int:
        """Where it lies in this process."""

    def metadata(self) -> bytes:
        """What another agent needs to write into the area."""

    def poll(self) -> None:
        """Moves on what others do to this agent."""

    def meet(self, metadata: bytes) -> str:
        """Makes another agent known; its name. Raises Unavailable where it can't be."""

    def write(self, peer: str, offset: int, size_bytes: int, address: int) -> Transfer:
        """Begins a write from the area to an address of `peer`. Raises Unavailable."""

    def close(self) -> None:
        """Takes the registration back. Idempotent."""


def why_not() -> str | None:
    """Why there is no NIXL here; None where it is installed. Nothing is imported."""
    if not sys.platform.startswith("linux"):
        return f"NIXL is a thing of Linux; this is {sys.platform}"
    if _package() is None:
        return "the package nixl-cu12 isn't installed; run make install-nixl"
    return None


def open_agent(name: str, size_bytes: int) -> Agent:
    """An agent with `size_bytes` of registered memory.

    Raises:
        Unavailable: the package isn't installed, or doesn't start here.
    """
    problem = why_not()
    if problem is not None:
        raise Unavailable(problem)
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    try:
        return NixlAgent(importlib.import_module(f"{_package()}._api"), name, size_bytes)
    except Exception as error:
        raise Unavailable(f"NIXL doesn't start: {type(error).__name__}: {error}") from error


def _package() -> str | None:
    return next((package for package in PACKAGES if importlib.util.find_spec(package)), None)


class NixlAgent:
    """See Agent."""

    def __init__(self, api: Any, name: str, size_bytes: int) -> None:
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = api.nixl_agent(name, config)
        self._map = mmap.mmap(-1, size_bytes)
        self.memory = memoryview(self._map)
        self.address = _address_of(self._map)
        self._registered = self._agent.register_memory([(self.address, size_bytes, 0, name)], "DRAM")
        self._peers: dict[bytes, str] = {}
        self._open = True

    def metadata(self) -> bytes:
        """See Agent."""
        found: bytes = self._agent.get_agent_metadata()
        return found

    def poll(self) -> None:
        """See Agent."""
        self._agent.get_new_notifs()

    def meet(self, metadata: bytes) -> str:
        """See Agent."""
        known = self._peers.get(metadata)
        if known is not None:
            return known
        try:
            peer = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise Unavailable(f"NIXL can't use the other side's agent: {error}") from error
        self._peers[metadata] = name = peer.decode() if isinstance(peer, bytes) else str(peer)
        return name

    def write(self, peer: str, offset: int, size_bytes: int, address: int) -> Transfer:
        """See Agent."""
        try:
            source = self._agent.get_xfer_descs([(self.address + offset, size_bytes, 0)], "DRAM")
            target = self._agent.get_xfer_descs([(address, size_bytes, 0)], "DRAM")
            handle = self._agent.initialize_xfer("WRITE", source, target, peer, b"")
            return NixlTransfer(self._agent, handle, self._agent.transfer(handle))
        except Exception as error:
            raise Unavailable(f"NIXL can't write to {peer}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """See Agent."""
        if self._open:
            self._open = False
            for peer in self._peers.values():
                self._agent.remove_remote_agent(peer)
            self._agent.deregister_memory(self._registered)
            del self._agent


class NixlTransfer:
    """See Transfer."""

    def __init__(self, agent: Any, handle: Any, state: str) -> None:
        self._agent = agent
        self._handle = handle
        self._state = state

    def state(self) -> str:
        """See Transfer."""
        if self._state == MOVING:
            try:
                self._state = str(self._agent.check_xfer_state(self._handle))
            except Exception:
                self._state = FAILED
        return self._state

    def stop(self) -> bool:
        """See Transfer."""
        try:
            self._agent.release_xfer_handle(self._handle)
        except Exception:
            return False
        return True


def _address_of(mapped: mmap.mmap) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(mapped))
