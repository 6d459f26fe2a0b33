"""Tensors of a model folder's safetensors files as float32 arrays, one at a time, without torch.

A file is 8 bytes of little-endian header length, a header {name: {dtype, shape, data_offsets}}, and data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvpact.contract.json_file import read_json_object
from kvpact.errors import UnreadableSource

STORED_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "F64": "<f8"}
HEADER_CAP_BYTES = 100 << 20
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Safetensors files that make up the model, sorted; none if the folder has no weights at all.

    Raises:
        UnreadableSource: an indexed file is missing, or the weights are there as pickles only.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _indexed(folder, index)
    single = folder / "model.safetensors"
    files = (single,) if single.is_file() else tuple(sorted(folder.glob("*.safetensors")))
    pickles = sorted(path.name for pattern in PICKLE_PATTERNS for path in folder.glob(pattern))
    if not files and pickles:
        raise UnreadableSource(
            f"{folder} holds pickled weights only ({pickles[0]}), and unpickling runs code from the file;"
            " convert them to safetensors",
            source=str(folder),
        )
    return files


def read_rows(file: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every tensor of one file as (stored name, float32 array).

    Raises:
        UnreadableSource: the header is broken, or a tensor lies outside the file or is stored quantised.
    """
    header, data = _open(file)
    for name in sorted(header):
        yield name, _tensor(file, name, header[name], data)


def _open(file: Path) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size < 8 or header_bytes > min(HEADER_CAP_BYTES, size - 8):
            raise UnreadableSource(
                f"{file} isn't safetensors: its header runs past its end", source=str(file)
            )
        try:
            header = json.loads(stream.read(header_bytes))
        except (ValueError, RecursionError) as error:
            raise UnreadableSource(f"{file} isn't safetensors: {error}", source=str(file)) from error
    if not isinstance(header, dict):
        raise UnreadableSource(f"{file} isn't safetensors: its header is no object", source=str(file))
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    empty = np.zeros(0, np.uint8)
    return header, np.memmap(file, np.uint8, "r", offset=start) if size > start else empty


def _tensor(file: Path, name: str, entry: Any, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    try:
        stored, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        if not (0 <= start <= end <= data.size) or any(side < 0 for side in shape):
            raise ValueError(f"offsets {start} to {end} lie outside {data.size} bytes")
        if stored not in STORED_TYPES:
            known = ", ".join(STORED_TYPES)
            raise ValueError(f"stored as {stored}, expected one of {known}; give plain, unquantised weights")
        numbers = data[start:end].view(STORED_TYPES[stored]).reshape(shape)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise UnreadableSource(
            f"{file}: tensor {name} can't be read: {error}", source=str(file), key=name
        ) from error
    if stored == "BF16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype("<f4", copy=False)


def _indexed(folder: Path, index: Path) -> tuple[Path, ...]:
    places = read_json_object(index).get("weight_map", {})
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise UnreadableSource(f"{index}: weight_map is no object of file names", source=str(folder))
    present = {path.name for path in folder.iterdir() if path.is_file()}
    names = sorted(set(places.values()))
    for name in names:
        if name not in present:
            raise UnreadableSource(
                f"{index} names {name[:200]}, which isn't in the folder", source=str(folder)
            )
    return tuple(folder / name for name in names)
