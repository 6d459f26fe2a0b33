"""A GGUF file as metadata and named float32 tensors, read without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvpact.contract.sources.gguf_bounds import check_header
from kvpact.contract.sources.numbers import shown
from kvpact.errors import UnreadableSource

MAGIC = b"GGUF"
ARCHITECTURE = "general.architecture"
Absent = TypeVar("Absent")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """One open file. Values and tensors are read when asked for."""

    path: Path
    architecture: str
    fields: Mapping[str, Any]
    tensors: Mapping[str, Any]

    def value(self, key: str, default: Any = None) -> Any:
        """Metadata under its whole key; a float32 as the shortest number that it can stand for."""
        field = self.fields.get(key)
        if field is None:
            return default
        try:
            return _plain(field.contents())
        except (IndexError, KeyError, TypeError, ValueError) as error:
            raise self.broken(f"metadata {key} can't be read: {error!r}", key) from error

    def of_architecture(self, key: str, default: Any = None) -> Any:
        """Metadata under the architecture's name, which is left out of `key`."""
        return self.value(f"{self.architecture}.{key}", default)

    def own(self, key: str) -> str:
        """A whole key from one under the architecture's name."""
        return f"{self.architecture}.{key}"

    def number(self, key: str, default: Absent) -> float | Absent:
        """A finite number under its whole key. Raises UnreadableSource for another value, as all below do."""
        value = self.value(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def positive(self, key: str, default: Absent) -> float | Absent:
        """A number above 0 that float32 holds, under its whole key."""
        number = self.number(key, None)
        if number is None:
            return default
        if not float(np.finfo(np.float32).tiny) <= number <= float(np.finfo(np.float32).max):
            raise self._wrong(key, number, "a number above 0 that float32 holds")
        return number

    def whole(self, key: str, default: Absent) -> int | Absent:
        """A whole number of at least 0 under its whole key."""
        value = self.value(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._wrong(key, value, "a whole number of at least 0")
        return value

    def text(self, key: str, default: Absent) -> str | Absent:
        """Text under its whole key."""
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(key, value, "text")
        return value

    def texts(self, key: str) -> list[str] | None:
        """A list of texts under its whole key."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._wrong(key, value, "a list of texts")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """Sides of a tensor, rows first."""
        return tuple(int(side) for side in reversed(self.tensors[name].shape))

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A tensor's numbers as float32, dequantised where it is stored so; rows first."""
        from gguf.quants import dequantize

        entry = self.tensors.get(name)
        if entry is None:
            raise self.broken(f"tensor {name} is missing", name)
        try:
            numbers = np.asarray(dequantize(entry.data, entry.tensor_type), dtype=np.float32)
            return numbers.reshape(self.shape(name))
        except (NotImplementedError, TypeError, ValueError) as error:
            raise self.broken(f"tensor {name} can't be read: {error}", name) from error

    def _wrong(self, key: str, found: Any, expected: str) -> UnreadableSource:
        return self.broken(f"{key}: found {shown(found)}, expected {expected}", key)

    def broken(self, message: str, key: str | None = None) -> UnreadableSource:
        """The error for something in this file that can't be used."""
        return UnreadableSource(f"{self.path}: {message}", source=str(self.path), key=key)


def is_gguf(path: Path) -> bool:
    """Whether a file's first bytes say that it is one."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def open_gguf(path: Path) -> GgufFile:
    """Opens a GGUF file.

    Raises:
        UnreadableSource: not a whole GGUF file, one of several parts, or without an architecture.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UnreadableSource(
            f"{path}: reading a GGUF file needs the package gguf; run: pip install gguf", source=str(path)
        ) from error
    try:
        check_header(path)
        reader = GGUFReader(path)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        architecture = reader.fields[ARCHITECTURE].contents() if ARCHITECTURE in reader.fields else None
    except Exception as error:  # the reader checks nothing: a damaged file fails anywhere in it
        raise UnreadableSource(
            f"{path} is no whole GGUF file: {error!r}", source=str(path), key=ARCHITECTURE
        ) from error
    if not isinstance(architecture, str):
        raise UnreadableSource(
            f"{path}: {ARCHITECTURE} is {architecture!r}, expected a name", source=str(path), key=ARCHITECTURE
        )
    file = GgufFile(path=path, architecture=architecture, fields=reader.fields, tensors=tensors)
    if file.whole("split.count", 1) > 1:
        raise file.broken("one of several parts; join them first (llama-gguf-split --merge)", "split.count")
    return file


def _plain(value: Any) -> Any:
    if isinstance(value, np.floating | float):
        with np.errstate(over="ignore"):
            return float(str(np.float32(value)))
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.integer):
        return int(value)
    return [_plain(item) for item in value] if isinstance(value, list) else value
