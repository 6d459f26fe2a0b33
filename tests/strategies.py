"""Contracts for property tests: valid ones of every kind, and close ones that share a function."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from kvpact.contract.contract import (
    Contract,
    LatentDims,
    LayerGroup,
    Quantization,
    Rotary,
    RotaryTable,
    Shard,
)
from kvpact.types import (
    AxisOrder,
    Basis,
    ByteOrder,
    Dtype,
    FrequencyPolicy,
    KeyState,
    LaneOrder,
    LayerKind,
    Packing,
    QuantizationGranularity,
    QuantizationScheme,
    RotationSite,
    ScaleSource,
)
from tests.factories import make_contract, make_group, make_inv_freq, make_rotary, with_layout

THETAS = (1e4, 1.0001e4, 1e5, 1e6)


@st.composite
def rotaries(draw: st.DrawFn) -> Rotary:
    """Rotary parts of any kind for keys of 16 lanes."""
    state = draw(st.sampled_from(KeyState))
    rotary_dim = draw(st.sampled_from((4, 8, 16)))
    rotary = make_rotary(
        key_state=state,
        site=draw(st.sampled_from(RotationSite)),
        rotary_dim=rotary_dim,
        lane_offset=draw(st.sampled_from((0, 16 - rotary_dim))),
        stored_lane_order=draw(st.sampled_from(LaneOrder)),
        theta=draw(st.sampled_from(THETAS)),
        amplitude=draw(st.sampled_from((1.0, 1.0000001, 1.2079441))),
    )
    if state is KeyState.NONE:
        return rotary
    longer = make_inv_freq(theta=draw(st.sampled_from(THETAS)), rotary_dim=rotary_dim)
    two = (replace(rotary.tables[0], upper_length=32), RotaryTable(inv_freq=longer, amplitude=1.0))
    policy = draw(st.sampled_from(FrequencyPolicy))
    return replace(
        rotary,
        basis=draw(st.sampled_from(Basis)),
        frequency_policy=policy,
        tables=rotary.tables if policy is FrequencyPolicy.FROZEN else two,
        mrope_sections=draw(st.sampled_from(((), (rotary_dim // 2,)))),
    )


@st.composite
def groups(draw: st.DrawFn) -> LayerGroup:
    """Groups of any kind; layers are set by `contracts`."""
    kind = draw(st.sampled_from(LayerKind))
    windowed = kind in (LayerKind.SLIDING, LayerKind.CHUNKED)
    latent = LatentDims(latent_dim=8, rope_dim=8, content_first=draw(st.booleans()))
    group = make_group(
        kind=kind,
        window=draw(st.sampled_from((8, 32))) if windowed else None,
        kv_heads=draw(st.sampled_from((1, 2))),
        softmax_scale=draw(st.sampled_from((0.25, 0.5))),
        rotary=draw(rotaries()),
    )
    return replace(
        group,
        latent=latent if kind is LayerKind.MLA_LATENT else None,
        softcap=draw(st.sampled_from((None, 30.0))),
        sinks=draw(st.booleans()),
    )


@st.composite
def contracts(draw: st.DrawFn) -> Contract:
    """Any valid contract of one to four layers, cut into groups in any way."""
    layers = draw(st.permutations(range(draw(st.integers(1, 4)))))
    cut = draw(st.integers(1, len(layers)))
    parts = [part for part in (layers[:cut], layers[cut:]) if part]
    contract = make_contract(
        layer_groups=tuple(replace(draw(groups()), layers=tuple(sorted(part))) for part in parts),
        context_tokens=draw(st.sampled_from((16, 64, 4096))),
        function_digest=draw(st.sampled_from((None, b"f" * 32, b"g" * 32))),
        compute_dtype=draw(st.sampled_from((Dtype.FLOAT32, Dtype.BFLOAT16))),
        architecture=draw(st.sampled_from(("llama", "qwen3"))),
    )
    key_dtype, key_quantization = draw(number_forms(contract))
    value_dtype, value_quantization = draw(number_forms(contract))
    return with_layout(
        contract,
        axis_order=draw(st.sampled_from(AxisOrder)),
        block_size=draw(st.integers(1, 40)),
        packing=draw(st.sampled_from(Packing)),
        byte_order=draw(st.sampled_from(ByteOrder)),
        key_dtype=key_dtype,
        value_dtype=value_dtype,
        key_quantization=key_quantization,
        value_quantization=value_quantization,
        shard=draw(shards(contract)),
    )


@st.composite
def number_forms(draw: st.DrawFn, contract: Contract) -> tuple[Dtype, Quantization]:
    """A dtype with scales or without, as `validate_contract` takes them."""
    dtype = draw(st.sampled_from(Dtype))
    if dtype is not Dtype.INT8 and draw(st.booleans()):
        return dtype, Quantization()
    granularity = draw(st.sampled_from(QuantizationGranularity))
    source = draw(st.sampled_from(ScaleSource))
    if granularity is QuantizationGranularity.TOKEN:
        source = ScaleSource.SHIPPED
    by_layer = granularity is QuantizationGranularity.TENSOR
    counts = [
        len(group.layers) * (1 if by_layer or group.kind is LayerKind.MLA_LATENT else group.kv_heads)
        for group in contract.layer_groups
    ]
    scales = tuple(0.25 + 0.125 * i for i in range(sum(counts))) if source is ScaleSource.FIXED else ()
    scheme = QuantizationScheme.SYMMETRIC
    return dtype, Quantization(
        scheme=scheme, granularity=granularity, scale_source=source, fixed_scales=scales
    )


@st.composite
def shards(draw: st.DrawFn, contract: Contract) -> Shard:
    """The whole model, or one rank of a split that fits every group."""
    heads = max(group.kv_heads for group in contract.layer_groups)
    size = draw(st.sampled_from((1, 1, 2, 4)))
    rank = draw(st.integers(0, size - 1))
    start = rank * heads // size
    end = start + max(1, heads // size)
    layer_start = draw(st.sampled_from((0, 0, contract.layer_count() - 1)))
    return replace(
        contract.layout.shard,
        tensor_parallel_rank=rank,
        tensor_parallel_size=size,
        head_start=start,
        head_end=end,
        layer_start=layer_start,
    )


@st.composite
def cache_forms(draw: st.DrawFn) -> dict[str, object]:
    """Choices of one role that leave the function alone, as arguments of make_contract."""
    return {
        "key_state": draw(st.sampled_from((KeyState.RAW, KeyState.ROTATED))),
        "axis_order": draw(st.sampled_from(AxisOrder)),
        "block_size": draw(st.integers(1, 40)),
        "stored_lane_order": draw(st.sampled_from(LaneOrder)),
        "dtype": draw(st.sampled_from((Dtype.FLOAT32, Dtype.FLOAT16, Dtype.BFLOAT16, Dtype.FLOAT8_E4M3))),
        "theta": draw(st.sampled_from(THETAS)),
    }
