"""Channels and ports are opened in one file alone, so that none is opened past the certificates."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.repo.tree import package_files, parse

DOOR = Path("kvpact/handoff/security_transport.py")
OPENERS = {"insecure_channel", "secure_channel", "add_insecure_port", "add_secure_port"}


def openings(tree: ast.AST) -> Iterator[str]:
    """Where a module opens a channel, a port or a server of gRPC."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if node.attr in OPENERS or text in ("grpc.aio.server", "grpc.server"):
                yield f"{node.lineno}: {text}"


def test_no_other_file_opens_a_channel_a_port_or_a_server() -> None:
    found = {file: list(openings(parse(file))) for file in package_files() if file != DOOR}
    assert {str(file): lines for file, lines in found.items() if lines} == {}


def test_the_one_file_is_found_to_open_them() -> None:
    found = " ".join(openings(parse(DOOR)))
    assert all(opener in found for opener in (*OPENERS, "grpc.aio.server"))
