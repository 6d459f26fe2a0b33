"""Whether a contract's layout is whole: number formats that can be read, every scale, a shard that fits."""

from __future__ import annotations

import numpy as np

from kvpact.contract.contract import Contract, Layout, Quantization, Shard
from kvpact.contract.field_checks import require, require_enum, require_positive, require_whole
from kvpact.contract.shards import split_heads, widest_heads
from kvpact.types import (
    AxisOrder,
    ByteOrder,
    Dtype,
    LayerKind,
    Packing,
    QuantizationGranularity,
    QuantizationScheme,
    ScaleSource,
)


def check_layout(contract: Contract) -> None:
    """Gives nothing back for a whole layout of a contract whose layers are whole.

    Raises:
        BadRequest: names the first field that is unset, absent or out of range.
    """
    layout = contract.layout
    require_enum("axis_order", layout.axis_order, AxisOrder)
    require_whole("block_size", layout.block_size, 1)
    require_enum("packing", layout.packing, Packing)
    require_enum("key_dtype", layout.key_dtype, Dtype)
    require_enum("value_dtype", layout.value_dtype, Dtype)
    require_enum("byte_order", layout.byte_order, ByteOrder)
    _check_quantization("key_quantization", layout.key_quantization, layout.key_dtype, contract)
    _check_quantization("value_quantization", layout.value_quantization, layout.value_dtype, contract)
    _check_shard(layout, contract)


def _check_quantization(name: str, quantization: Quantization, dtype: Dtype, contract: Contract) -> None:
    require_enum(name, quantization.scheme, QuantizationScheme)
    if quantization.scheme is QuantizationScheme.NONE:
        bare = quantization == Quantization()
        require(bare, name, quantization, "no granularity and no scales for scheme none")
        require(dtype is not Dtype.INT8, name, "none", "a scheme: int8 means nothing without scales")
        return
    require_enum(f"{name}.granularity", quantization.granularity, QuantizationGranularity)
    require_enum(f"{name}.scale_source", quantization.scale_source, ScaleSource)
    found, field = len(quantization.fixed_scales), f"{name}.fixed_scales"
    if quantization.scale_source is ScaleSource.SHIPPED:
        require(found == 0, field, f"{found} numbers", "none where scales are shipped with the bytes")
        return
    by_token = quantization.granularity is QuantizationGranularity.TOKEN
    require(not by_token, f"{name}.scale_source", "fixed", "shipped for one scale per token")
    expected = _fixed_scale_count(quantization, contract)
    require(found == expected, field, f"{found} numbers", f"{expected} numbers; a missing scale isn't 1")
    for scale in quantization.fixed_scales:
        require_positive(field, scale)
        require(float(np.float32(scale)) == scale, field, scale, "a float32 number")


def _fixed_scale_count(quantization: Quantization, contract: Contract) -> int:
    """One for each layer, or for each head of each layer; a latent row is one head."""
    if quantization.granularity is QuantizationGranularity.TENSOR:
        return contract.layer_count()
    return sum(
        len(group.layers) * (1 if group.kind is LayerKind.MLA_LATENT else group.kv_heads)
        for group in contract.layer_groups
    )


def _check_shard(layout: Layout, contract: Contract) -> None:
    shard, size = layout.shard, layout.shard.tensor_parallel_size
    require_whole("shard.tensor_parallel_size", size, 1)
    require_whole("shard.tensor_parallel_rank", shard.tensor_parallel_rank, 0)
    rank = shard.tensor_parallel_rank
    require(rank < size, "shard.tensor_parallel_rank", rank, "less than tensor_parallel_size")
    for name in ("head_start", "head_end", "layer_start", "layer_end"):
        require_whole(f"shard.{name}", getattr(shard, name), 0)
    heads = widest_heads(contract)
    within = shard.head_start < shard.head_end <= heads
    require(within, "shard.head_end", shard.head_end, f"heads within [0, {heads})")
    _check_split(shard, contract, heads)
    layers = contract.layer_count()
    held = shard.layer_start < shard.layer_end <= layers
    require(held, "shard.layer_end", shard.layer_end, f"layers within [0, {layers})")


def _check_split(shard: Shard, contract: Contract, widest: int) -> None:
    rank, size = shard.tensor_parallel_rank, shard.tensor_parallel_size
    for group in contract.layer_groups:
        fits = group.kind is LayerKind.MLA_LATENT or split_heads(group.kv_heads, rank, size) is not None
        expected = f"a number of ranks that divides {group.kv_heads} KV heads or is a multiple of them"
        require(fits, "shard.tensor_parallel_size", size, expected)
    held = split_heads(widest, rank, size)
    if held is None:
        return
    require(shard.head_start == held.start, "shard.head_start", shard.head_start, _held(shard, held))
    require(shard.head_end == held.stop, "shard.head_end", shard.head_end, _held(shard, held))


def _held(shard: Shard, held: range) -> str:
    rank, size = shard.tensor_parallel_rank, shard.tensor_parallel_size
    return f"heads [{held.start}, {held.stop}) on rank {rank} of {size}"
