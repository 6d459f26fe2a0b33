"""What one machine brings to a deployment, and whether machines of one deployment fit together."""

from __future__ import annotations

import os
import platform
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from kvpact.errors import KvpactError

PACKAGES = ("kvpact", "ray", "torch", "transformers", "grpcio", "protobuf")
LEAST_OPEN_FILES = 4096
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY_BYTES = 64 << 20
"""What Ray's own object store needs here at least; caches don't go through it."""


class Level(StrEnum):
    """How bad a finding is."""

    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """One machine."""

    node: str
    """Its address."""
    python: str
    packages: dict[str, str]
    """Version by name; a package that isn't there is left out."""
    cores: int
    open_files: int
    """Soft limit."""
    shared_memory_bytes: int | None
    """Size of /dev/shm; None where there is none."""
    model: str
    """Path under which the model was found, or why it wasn't."""
    model_digest: str | None
    """Of the function that the weights make; None where it couldn't be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something to mend."""

    level: Level
    node: str
    text: str


def node_facts(node: str, identify: Callable[[], tuple[str, str | None]]) -> NodeFacts:
    """Facts of this machine.

    Args:
        identify: the model's path and digest; a KvpactError that it raises becomes a fact.
    """
    try:
        model, digest = identify()
    except KvpactError as error:
        model, digest = f"not found: {error}", None
    return NodeFacts(
        node=node,
        python=platform.python_version(),
        packages={name: version for name in PACKAGES if (version := _version(name))},
        cores=os.cpu_count() or 1,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        shared_memory_bytes=_size_of(SHARED_MEMORY),
        model=model,
        model_digest=digest,
    )


def judge_nodes(nodes: Sequence[NodeFacts]) -> list[Finding]:
    """What keeps machines from serving together, errors first; each is held to the first one."""
    findings = [finding for node in nodes for finding in _alone(node)]
    findings += [finding for node in nodes[1:] for finding in _beside(nodes[0], node)]
    return sorted(findings, key=lambda finding: finding.level is not Level.ERROR)


def _alone(node: NodeFacts) -> Iterable[Finding]:
    if node.model_digest is None:
        yield _error(node, f"model {node.model}")
    if 0 <= node.open_files < LEAST_OPEN_FILES:
        yield _warning(
            node,
            f"at most {node.open_files} open files; many streams need more: ulimit -n {LEAST_OPEN_FILES}",
        )
    shared = node.shared_memory_bytes
    if sys.platform.startswith("linux") and (shared is None or shared < LEAST_SHARED_MEMORY_BYTES):
        size = "absent" if shared is None else f"{shared >> 20} MiB"
        yield _warning(
            node,
            f"{SHARED_MEMORY} is {size}; Ray wants {LEAST_SHARED_MEMORY_BYTES >> 20} MiB: mount a larger one "
            "(docker run --shm-size, or an emptyDir of medium Memory)",
        )


def _beside(first: NodeFacts, other: NodeFacts) -> Iterable[Finding]:
    if _minor(first.python) != _minor(other.python):
        yield _error(
            other, f"Python {other.python}, and {first.python} on {first.node}: install the same one"
        )
    for name in sorted(first.packages.keys() | other.packages.keys()):
        here, there = other.packages.get(name, "absent"), first.packages.get(name, "absent")
        if _public(here) != _public(there):
            level = _error if name in ("kvpact", "ray") else _warning
            yield level(other, f"{name} {here}, and {there} on {first.node}: install the same one")
    if first.model_digest and other.model_digest and first.model_digest != other.model_digest:
        yield _error(
            other,
            f"the weights at {other.model} make another function than those on {first.node}: copy one model "
            "to both",
        )


def _error(node: NodeFacts, text: str) -> Finding:
    return Finding(level=Level.ERROR, node=node.node, text=text)


def _warning(node: NodeFacts, text: str) -> Finding:
    return Finding(level=Level.WARNING, node=node.node, text=text)


def _public(version: str) -> str:
    """Without the build's own part, such as +cpu."""
    return version.partition("+")[0]


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _size_of(folder: Path) -> int | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return found.f_frsize * found.f_blocks
