"""Names of what whole cached blocks hold: blocks with one name hold the same numbers, layout apart.

A name is a chain of SHA-256: over the root, the name of the block before, and the block's tokens at their
positions. The root says what made the numbers: the model's function, the adapter, each layer's kind, mask and
shape, the table that turns its keys at the request's length (as numbers, whatever picked them), the number
formats they were computed and stored in since, and the worst exactness class of their conversions. How the
numbers lie (key_state, lane and axis order, block size, packing, shards) isn't in it; but a name is that of a
whole block, so the holder's block size sets where names begin and end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NewType

import numpy as np

from kvpact.contract.canonical import contract_values
from kvpact.contract.contract import Contract, LayerGroup, Layout, Quantization, RotaryTable
from kvpact.contract.tables import table_at
from kvpact.types import Dtype, Exactness, KeyState

ContentId = NewType("ContentId", bytes)
"""Name of one whole block's content, 32 bytes."""
ROOTS_KEPT = 64
_LAYOUT_ONLY = ("key_state", "site", "stored_lane_order", "frequency_policy", "formula", "tables")
"""Parts of a rotary's values that the table at a length makes up for, or that only say how lanes lie."""
_STATES = {KeyState.RAW: "turned", KeyState.ROTATED: "turned", KeyState.NONE: "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """What numbers went through since they were computed."""

    exactness: Exactness
    """Worst class of all conversions."""
    compute_dtype: Dtype
    key_forms: frozenset[str]
    """Every form that keys were stored in, the narrowest among them."""
    value_forms: frozenset[str]


def own_passage(contract: Contract) -> Passage:
    """Of blocks that a side computes itself."""
    layout = contract.layout
    return Passage(
        exactness=Exactness.BIT_EXACT,
        compute_dtype=contract.model.compute_dtype,
        key_forms=frozenset((_form(layout, key=True),)),
        value_forms=frozenset((_form(layout, key=False),)),
    )


def landed_passage(writer: Contract, reader: Contract, exactness: Exactness) -> Passage:
    """Of blocks that `writer` computes and that land in `reader`'s cache by a plan of class `exactness`."""
    made, kept = own_passage(writer), own_passage(reader)
    return Passage(
        exactness=exactness,
        compute_dtype=made.compute_dtype,
        key_forms=made.key_forms | kept.key_forms,
        value_forms=made.value_forms | kept.value_forms,
    )


def content_root(
    contract: Contract, passage: Passage, *, table_length: int, adapter: bytes | None = None
) -> bytes:
    """What every name of a request begins with, 32 bytes.

    Args:
        contract: of the side that computes the request's prompt.
        table_length: length for which the request's tables are picked; two lengths with one table are alike.
        adapter: digest of the adapter's content; None means none.
    """
    function = contract.model.function_digest
    layers: dict[int, str] = {}
    for group, values in zip(contract.layer_groups, _group_values(contract, table_length), strict=True):
        layers |= dict.fromkeys(group.layers, _digest(values).hex())
    return _digest(
        {
            "function": None if function is None else function.hex(),
            "architecture": contract.model.architecture,
            "adapter": None if adapter is None else adapter.hex(),
            "layers": [layers[layer] for layer in sorted(layers)],
            "exactness": passage.exactness.value,
            "compute": passage.compute_dtype.value,
            "keys": sorted(passage.key_forms),
            "values": sorted(passage.value_forms),
        }
    )


def content_names(
    root: bytes, token_ids: Sequence[int], positions: Iterable[int], block_size: int
) -> tuple[ContentId, ...]:
    """Names of the whole blocks of `block_size` tokens, in order; a last block that isn't full has none."""
    tokens = np.asarray(token_ids, dtype="<i4")
    places = np.fromiter(positions, dtype="<i8", count=len(tokens))
    names: list[ContentId] = []
    name = root
    for start in range(0, len(tokens) // block_size * block_size, block_size):
        end = start + block_size
        state = hashlib.sha256(root)
        for part in (name, tokens[start:end].tobytes(), places[start:end].tobytes()):
            state.update(part)
        name = state.digest()
        names.append(ContentId(name))
    return tuple(names)


class NameMaker:
    """Names of what one side's prompts become after one passage; roots are kept by the tables that run."""

    def __init__(self, contract: Contract, passage: Passage, block_size: int) -> None:
        """`block_size`: of the cache that holds the blocks."""
        self._contract = contract
        self._passage = passage
        self._block_size = block_size
        self._roots: dict[tuple[RotaryTable | None, ...], bytes] = {}

    def names(
        self, token_ids: Sequence[int], positions: Iterable[int], table_length: int
    ) -> tuple[ContentId, ...]:
        """Names of the whole blocks of a prompt without an adapter."""
        context = self._contract.model.context_tokens
        tables = tuple(
            table_at(group.rotary, length=table_length, context_tokens=context)
            for group in self._contract.layer_groups
        )
        root = self._roots.get(tables)
        if root is None:
            if len(self._roots) >= ROOTS_KEPT:
                self._roots.clear()
            root = content_root(self._contract, self._passage, table_length=table_length)
            self._roots[tables] = root
        return content_names(root, token_ids, positions, self._block_size)


def kept_offset(name: ContentId, block_size: int) -> int:
    """Which token of a cached block keeps its witness rows; nothing but the block's content decides it."""
    return name[0] % block_size


def _group_values(contract: Contract, table_length: int) -> list[dict[str, Any]]:
    """Facts of each layer group without its layer numbers, and the table that runs in it."""
    values = {entry["layer"]: entry for entry in contract_values(contract)["layers"]}
    return [_facts(contract, group, values[group.layers[0]], table_length) for group in contract.layer_groups]


def _facts(
    contract: Contract, group: LayerGroup, values: dict[str, Any], table_length: int
) -> dict[str, Any]:
    table = table_at(group.rotary, length=table_length, context_tokens=contract.model.context_tokens)
    rotary = {key: value for key, value in values["rotary"].items() if key not in _LAYOUT_ONLY}
    rotary |= {
        "state": _STATES[group.rotary.key_state],
        "inv_freq": None if table is None else list(table.inv_freq),
        "amplitude": None if table is None else table.amplitude,
    }
    return values | {"layer": None, "rotary": rotary}


def _form(layout: Layout, *, key: bool) -> str:
    dtype = layout.key_dtype if key else layout.value_dtype
    quantization = layout.key_quantization if key else layout.value_quantization
    if quantization == Quantization():
        return dtype.value
    return f"{dtype.value} {quantization}"


def _digest(values: dict[str, Any]) -> bytes:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).digest()
