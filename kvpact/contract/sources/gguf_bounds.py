"""Bounds of a GGUF header, checked before a reader that makes as much as the header asks for."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a number of each type."""
STRING, ARRAY = 8, 9
LEAST = SIZES | {STRING: 8, ARRAY: 12}
"""Fewest bytes that a value of each type takes."""
PAIR_BYTES = 13
"""Fewest of a key with its value: length, type, one byte."""
TENSOR_BYTES = 24
MOST_ELEMENTS = 1 << 22
"""Elements of all lists; the largest vocabularies with scores, types and merges have some two million."""
DEEPEST = 4


def check_header(path: Path) -> None:
    """Walks the metadata of a GGUF file.

    Raises:
        ValueError: a count or length that runs past the end, an unknown type, or more lists than a model has.
        OSError: the file can't be read.
    """
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _Walk(data).metadata()


class _Walk:
    """One pass over a header, at `offset` bytes."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = 4
        self.elements = 0
        swapped = not int.from_bytes(data[4:6], "little")
        self.word, self.long = (struct.Struct((">" if swapped else "<") + form) for form in "IQ")

    def metadata(self) -> None:
        self.number(self.word, "version")
        tensors, pairs = self.number(self.long, "tensor count"), self.number(self.long, "key count")
        self.fits(pairs, PAIR_BYTES, "keys")
        for _ in range(pairs):
            key = self.text("a key").decode("utf-8")
            self.value(self.number(self.word, f"type of {key}"), key)
        self.fits(tensors, TENSOR_BYTES, "tensors")

    def value(self, kind: int, key: str, depth: int = 0) -> None:
        if kind == STRING:
            self.text(key)
        elif kind == ARRAY:
            self.list(key, depth)
        elif kind in SIZES:
            self.fits(1, SIZES[kind], key)
            self.offset += SIZES[kind]
        else:
            raise ValueError(f"{key}: type {kind} isn't known")

    def list(self, key: str, depth: int) -> None:
        kind, count = self.number(self.word, key), self.number(self.long, key)
        if kind not in LEAST:
            raise ValueError(f"{key}: type {kind} isn't known")
        if depth == DEEPEST:
            raise ValueError(f"{key}: lists more than {DEEPEST} deep")
        self.fits(count, LEAST[kind], key)
        self.elements += count
        if self.elements > MOST_ELEMENTS:
            raise ValueError(f"{key}: lists of more than {MOST_ELEMENTS} elements in all")
        if kind in SIZES:
            self.offset += count * SIZES[kind]
            return
        for _ in range(count):
            self.value(kind, key, depth + 1)

    def text(self, key: str) -> bytes:
        length = self.number(self.long, key)
        self.fits(length, 1, key)
        start, self.offset = self.offset, self.offset + length
        return self.data[start : self.offset]

    def number(self, form: struct.Struct, key: str) -> int:
        self.fits(1, form.size, key)
        (found,) = form.unpack_from(self.data, self.offset)
        self.offset += form.size
        return int(found)

    def fits(self, count: int, least: int, key: str) -> None:
        left = len(self.data) - self.offset
        if count * least > left:
            raise ValueError(f"{key}: {count} of at least {least} bytes, but {left} bytes are left")
