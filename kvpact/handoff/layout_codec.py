"""Layouts of blocks from and to protobuf."""

from __future__ import annotations

from kvpact.contract.contract import Layout, Quantization, Shard
from kvpact.handoff import codec_fields as fields
from kvpact.handoff.codec_fields import EnumCodec, join
from kvpact.types import (
    AxisOrder,
    ByteOrder,
    Dtype,
    Packing,
    QuantizationGranularity,
    QuantizationScheme,
    ScaleSource,
)
from kvpact.v1 import contract_pb2 as pb

AXIS_ORDERS = EnumCodec(pb.AxisOrder, "AXIS_ORDER", AxisOrder)
PACKINGS = EnumCodec(pb.Packing, "PACKING", Packing)
BYTE_ORDERS = EnumCodec(pb.ByteOrder, "BYTE_ORDER", ByteOrder)
DTYPES = EnumCodec(pb.Dtype, "DTYPE", Dtype)
SCHEMES = EnumCodec(pb.QuantizationScheme, "QUANTIZATION_SCHEME", QuantizationScheme)
GRANULARITIES = EnumCodec(pb.QuantizationGranularity, "QUANTIZATION_GRANULARITY", QuantizationGranularity)
SCALE_SOURCES = EnumCodec(pb.ScaleSource, "SCALE_SOURCE", ScaleSource)


def encode_layout(layout: Layout) -> pb.Layout:
    """Layout as a message."""
    return pb.Layout(
        axis_order=AXIS_ORDERS.encode(layout.axis_order),
        block_size_tokens=layout.block_size,
        packing=PACKINGS.encode(layout.packing),
        key_dtype=DTYPES.encode(layout.key_dtype),
        value_dtype=DTYPES.encode(layout.value_dtype),
        byte_order=BYTE_ORDERS.encode(layout.byte_order),
        key_quantization=_encode_quantization(layout.key_quantization),
        value_quantization=_encode_quantization(layout.value_quantization),
        shard=_encode_shard(layout.shard),
    )


def decode_layout(message: pb.Layout, path: str) -> Layout:
    """Layout from a message.

    Raises:
        BadRequest: a field is unset or unknown; `param` is its path.
    """
    return Layout(
        axis_order=AXIS_ORDERS.decode(message.axis_order, join(path, "axis_order")),
        block_size=fields.integer(message, "block_size_tokens", path, least=1),
        packing=PACKINGS.decode(message.packing, join(path, "packing")),
        key_dtype=DTYPES.decode(message.key_dtype, join(path, "key_dtype")),
        value_dtype=DTYPES.decode(message.value_dtype, join(path, "value_dtype")),
        byte_order=BYTE_ORDERS.decode(message.byte_order, join(path, "byte_order")),
        key_quantization=_decode_quantization(
            message.key_quantization, fields.part(message, "key_quantization", path)
        ),
        value_quantization=_decode_quantization(
            message.value_quantization, fields.part(message, "value_quantization", path)
        ),
        shard=_decode_shard(message.shard, fields.part(message, "shard", path)),
    )


def _encode_quantization(quantization: Quantization) -> pb.Quantization:
    return pb.Quantization(
        scheme=SCHEMES.encode(quantization.scheme),
        granularity=GRANULARITIES.encode_optional(quantization.granularity),
        scale_source=SCALE_SOURCES.encode_optional(quantization.scale_source),
        fixed_scales=quantization.fixed_scales,
    )


def _decode_quantization(message: pb.Quantization, path: str) -> Quantization:
    scheme = SCHEMES.decode(message.scheme, join(path, "scheme"))
    granularity = GRANULARITIES.decode_optional(message.granularity, join(path, "granularity"))
    scale_source = SCALE_SOURCES.decode_optional(message.scale_source, join(path, "scale_source"))
    if scheme is not QuantizationScheme.NONE and (granularity is None or scale_source is None):
        missing = "granularity" if granularity is None else "scale_source"
        raise fields.refusal(join(path, missing), f"is UNSPECIFIED with scheme {scheme}")
    return Quantization(
        scheme=scheme,
        granularity=granularity,
        scale_source=scale_source,
        fixed_scales=fields.numbers(message.fixed_scales, join(path, "fixed_scales"), positive=True),
    )


def _encode_shard(shard: Shard) -> pb.Shard:
    return pb.Shard(
        tensor_parallel_rank=shard.tensor_parallel_rank,
        tensor_parallel_size=shard.tensor_parallel_size,
        head_start=shard.head_start,
        head_end=shard.head_end,
        layer_start=shard.layer_start,
        layer_end=shard.layer_end,
    )


def _decode_shard(message: pb.Shard, path: str) -> Shard:
    return Shard(
        tensor_parallel_rank=fields.integer(message, "tensor_parallel_rank", path, least=0),
        tensor_parallel_size=fields.integer(message, "tensor_parallel_size", path, least=1),
        head_start=fields.integer(message, "head_start", path, least=0),
        head_end=fields.integer(message, "head_end", path, least=1),
        layer_start=fields.integer(message, "layer_start", path, least=0),
        layer_end=fields.integer(message, "layer_end", path, least=1),
    )
