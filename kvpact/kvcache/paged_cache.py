"""Keys and values of all layers in blocks, laid out as the contract says.

Legend: T tokens, B blocks, S tokens in a block, H kv heads, D lanes of one head, n tokens of a sequence.
A row is one token of one head: D adjacent numbers. Both axis orders are the same rows in another order, so
reading and writing go through row numbers and never copy a block to turn its axes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvpact.contract.contract import Contract
from kvpact.errors import BadRequest
from kvpact.types import AxisOrder, BlockId, ByteOrder, Dtype, LayerKind, Packing, QuantizationScheme

TORCH_DTYPES = {Dtype.FLOAT32: torch.float32, Dtype.FLOAT16: torch.float16, Dtype.BFLOAT16: torch.bfloat16}


Octets: TypeAlias = npt.NDArray[np.uint8]


class PagedCache:
    """Cache of one worker: per layer one tensor of keys and one of values, blocks first."""

    def __init__(self, contract: Contract, total_blocks: int, device: torch.device) -> None:
        """Allocates zeroed storage for `total_blocks` blocks.

        Raises:
            BadRequest: the layout is one that this cache can't keep.
        """
        _check_storable(contract)
        layout = contract.layout
        self.contract = contract
        self.device = device
        self.block_size = layout.block_size
        self._head_major = layout.axis_order is AxisOrder.HND
        groups = [contract.group_of(layer) for layer in range(contract.layer_count())]
        self._heads = [group.kv_heads for group in groups]
        self._keys = [
            self._storage(total_blocks, group.kv_heads, group.key_dim, layout.key_dtype) for group in groups
        ]
        self._values = [
            self._storage(total_blocks, group.kv_heads, group.value_dim, layout.value_dtype)
            for group in groups
        ]
        self._octets = list(zip(map(_octets_of, self._keys), map(_octets_of, self._values), strict=True))

    def _storage(self, blocks: int, heads: int, dim: int, dtype: Dtype) -> torch.Tensor:
        axes = (heads, self.block_size) if self._head_major else (self.block_size, heads)
        return torch.zeros((blocks, *axes, dim), dtype=TORCH_DTYPES[dtype], device=self.device)

    def block_bytes(self, layer: int) -> tuple[int, int]:
        """Bytes of one block's keys and of its values in `layer`."""
        keys, values = self._keys[layer][0], self._values[layer][0]
        return keys.numel() * keys.element_size(), values.numel() * values.element_size()

    def storage(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensors of keys and values of all blocks of `layer` themselves, [blocks, ...], contiguous."""
        return self._keys[layer], self._values[layer]

    def octets(self, layer: int) -> tuple[Octets, Octets]:
        """The same as bytes, [blocks, bytes of a block], of a cache in host memory."""
        keys, values = self._octets[layer]
        assert keys is not None, "the cache isn't in host memory"
        assert values is not None, "the cache isn't in host memory"
        return keys, values

    def slots(self, blocks: Sequence[BlockId], start: int, end: int) -> torch.Tensor:
        """Slot, block * S + offset, of each token [start, end) of a sequence in `blocks`: int64 [T]."""
        offsets_T = torch.arange(start, end)
        blocks_B = torch.tensor(blocks, dtype=torch.int64)
        slots_T = blocks_B[offsets_T // self.block_size] * self.block_size + offsets_T % self.block_size
        return slots_T.to(self.device)

    def rows(self, slots: torch.Tensor, heads: int) -> torch.Tensor:
        """Row numbers of every head of slots [..., T]: int64 [..., H, T]."""
        head_H1 = torch.arange(heads, device=slots.device)[:, None]
        slots = slots[..., None, :]
        if not self._head_major:
            return slots * heads + head_H1
        blocks, offsets = slots // self.block_size, slots % self.block_size
        return (blocks * heads + head_H1) * self.block_size + offsets

    def put(self, layer: int, rows_HT: torch.Tensor, k_THD: torch.Tensor, v_THD: torch.Tensor) -> None:
        """Stores keys, already in the contract's key_state, and values at `rows_HT`."""
        rows = rows_HT.reshape(-1)
        for storage, x_THD in ((self._keys[layer], k_THD), (self._values[layer], v_THD)):
            x_HTD = x_THD.transpose(0, 1).to(storage.dtype)
            storage.view(-1, storage.shape[-1]).index_copy_(0, rows, x_HTD.reshape(-1, storage.shape[-1]))

    def keys_at(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """A copy of the keys at row numbers of any shape [...]: [..., D] in the key dtype."""
        return _gather(self._keys[layer], rows)

    def values_at(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """A copy of the values at row numbers of any shape [...]: [..., D] in the value dtype."""
        return _gather(self._values[layer], rows)

    def write(
        self, layer: int, blocks: torch.Tensor, offset: int, k_THD: torch.Tensor, v_THD: torch.Tensor
    ) -> None:
        """Stores T tokens of a sequence that lies in `blocks`, beginning with its token number `offset`.

        Keys are already in the contract's key_state; both tensors are cast to the stored dtype.
        """
        slots_T = self.slots(blocks.tolist(), offset, offset + k_THD.shape[0])
        self.put(layer, self.rows(slots_T, self._heads[layer]), k_THD.to(self.device), v_THD.to(self.device))

    def read_blocks(self, layer: int, blocks: torch.Tensor) -> tuple[memoryview, memoryview]:
        """Bytes of `blocks` as stored, keys then values, in host memory.

        Views of the cache where it `lends` them; else copies that belong to the caller.
        """
        if self.lends(blocks):
            there = slice(int(blocks[0]), int(blocks[-1]) + 1)
            keys, values = (octets[there].reshape(-1).data.toreadonly() for octets in self.octets(layer))
            return keys, values
        return _bytes_of(self._keys[layer], blocks), _bytes_of(self._values[layer], blocks)

    def lends(self, blocks: torch.Tensor) -> bool:
        """Whether the bytes of `blocks` lie in host memory in one piece."""
        return self.device.type == "cpu" and adjacent(blocks.numpy())

    def read_blocks_into(
        self, layer: int, blocks: torch.Tensor, keys: memoryview, values: memoryview
    ) -> None:
        """Writes the bytes of `blocks` as stored into buffers of the caller, each of exactly their size."""
        _copy_into(self._keys[layer], blocks, keys)
        _copy_into(self._values[layer], blocks, values)

    def zero_tail(self, blocks: torch.Tensor, valid_tokens: int) -> None:
        """Zeroes, in all layers, the slots of a sequence in `blocks` from token `valid_tokens` on."""
        slots_T = self.slots(blocks.tolist(), valid_tokens, blocks.numel() * self.block_size)
        for layer, heads in enumerate(self._heads):
            rows = self.rows(slots_T, heads).reshape(-1)
            for storage in (self._keys[layer], self._values[layer]):
                storage.view(-1, storage.shape[-1]).index_fill_(0, rows, 0)


def adjacent(blocks: npt.NDArray[np.integer[Any]]) -> bool:
    """Whether each block but the first is the next one after that before it; there is at least one."""
    return bool((blocks[1:] - blocks[:-1] == 1).all())


def _octets_of(storage: torch.Tensor) -> Octets | None:
    if storage.device.type != "cpu":
        return None
    octets: Octets = storage.view(torch.uint8).numpy()
    return octets.reshape(storage.shape[0], -1)


def _gather(storage: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    flat = storage.view(-1, storage.shape[-1]).index_select(0, rows.reshape(-1))
    return flat.view(*rows.shape, storage.shape[-1])


def _bytes_of(storage: torch.Tensor, blocks: torch.Tensor) -> memoryview:
    chosen = storage.index_select(0, blocks.to(storage.device)).cpu()
    return chosen.view(torch.uint8).numpy().reshape(-1).data


def _copy_into(storage: torch.Tensor, blocks: torch.Tensor, out: memoryview) -> None:
    target = torch.frombuffer(out, dtype=storage.dtype).view(blocks.numel(), *storage.shape[1:])
    if adjacent(blocks.numpy()):
        target.copy_(storage[int(blocks[0]) : int(blocks[-1]) + 1])
    elif storage.device.type == "cpu":
        torch.index_select(storage, 0, blocks, out=target)
    else:
        target.copy_(storage.index_select(0, blocks.to(storage.device)))


def _check_storable(contract: Contract) -> None:
    layout = contract.layout
    found: list[str] = []
    for side, dtype in (("key_dtype", layout.key_dtype), ("value_dtype", layout.value_dtype)):
        if dtype not in TORCH_DTYPES:
            found.append(f"{side} {dtype.value} (known: {', '.join(known.value for known in TORCH_DTYPES)})")
    if layout.packing is not Packing.SEPARATE:
        found.append(f"packing {layout.packing.value} (known: separate)")
    if layout.byte_order is not ByteOrder.LITTLE:
        found.append(f"byte_order {layout.byte_order.value} (known: little)")
    for side, quantization in (("key", layout.key_quantization), ("value", layout.value_quantization)):
        if quantization.scheme is not QuantizationScheme.NONE:
            found.append(f"{side}_quantization {quantization.scheme.value} (known: none)")
    for group in contract.layer_groups:
        if group.kind not in (LayerKind.FULL, LayerKind.SLIDING):
            found.append(f"kind {group.kind.value} in layers {list(group.layers)} (known: full, sliding)")
    if layout.shard.tensor_parallel_size != 1:
        found.append(f"shard of {layout.shard.tensor_parallel_size} ranks (known: 1)")
    if found:
        raise BadRequest(f"this engine can't keep a cache with {'; '.join(found)}", param="cache")
