"""Stored numbers and real ones: casts that saturate, scales that are checked, eight bits and back.

Shapes: T tokens, H KV heads of a shard, D lanes. real = stored * scale; a scale is one for the layer, one for
each head or one for each token of each head, and is never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvpact.contract.contract import Contract
from kvpact.contract.convert_blocks import TORCH_DTYPES
from kvpact.contract.numbers import NumberForm
from kvpact.contract.shards import held_heads
from kvpact.errors import BadRequest, DataLoss
from kvpact.types import Dtype, LayerKind, QuantizationGranularity, ScaleSource

SMALLEST_SCALE = 2.0**-126
"""Scale of numbers that are all zero: float32's smallest normal number."""
_INT8_LARGEST = 127.0
"""The code -128 has no positive twin and is never made."""
_SATURATING = (Dtype.FLOAT16, Dtype.BFLOAT16, Dtype.FLOAT8_E4M3, Dtype.FLOAT8_E5M2)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlace:
    """What scales are for: keys or values of some tokens of one layer."""

    contract: Contract
    layer: int
    tokens: int
    side: str
    """key or value."""

    @property
    def heads(self) -> range:
        """Heads of the model that the shard stores."""
        return held_heads(self.contract.group_of(self.layer), self.contract)

    def refusal(self, problem: str) -> BadRequest:
        """The error for scales that can't be used."""
        field = f"{self.side}_scales"
        return BadRequest(f"{field} of layer {self.layer}: {problem}", param=field)


def scales_of(form: NumberForm, shipped: Sequence[float] | None, place: ScalePlace) -> torch.Tensor | None:
    """Scales that multiply stored numbers [T, H, D]; None for numbers that have none.

    Raises:
        BadRequest: scales are missing, too many, or no positive numbers; or came where there are none.
    """
    if not form.quantized or form.quantization.scale_source is ScaleSource.FIXED:
        if shipped:
            raise place.refusal(f"found {len(shipped)}, the writer's contract ships none")
        return _fixed(form, place) if form.quantized else None
    expected = math.prod(_scale_shape(form, place))
    found = 0 if shipped is None else len(shipped)
    if shipped is None or found != expected:
        raise place.refusal(f"found {found} numbers, expected {expected}; a missing scale isn't 1")
    for scale in shipped:
        if not (math.isfinite(scale) and scale > 0):
            raise place.refusal(f"found {scale!r}, expected numbers above 0")
    return torch.tensor(shipped, dtype=torch.float32).view(_scale_shape(form, place))


def fitting_scales(x_THD: torch.Tensor, form: NumberForm, place: ScalePlace) -> torch.Tensor | None:
    """Scales under which `form` holds `x_THD`, float32: its fixed ones, or the smallest that fit."""
    if not form.quantized:
        return None
    if form.quantization.scale_source is ScaleSource.FIXED:
        return _fixed(form, place)
    tokens, heads, _ = _scale_shape(form, place)
    magnitudes = x_THD.abs().amax(-1, keepdim=True) if x_THD.numel() else x_THD.new_zeros((tokens, heads, 1))
    if tokens == 1:
        magnitudes = magnitudes.amax(0, keepdim=True)
    if heads == 1:
        magnitudes = magnitudes.amax(1, keepdim=True)
    return (magnitudes / _largest(form.dtype)).clamp(min=SMALLEST_SCALE)


def real_numbers(x_THD: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Stored numbers of any dtype as float32."""
    real = x_THD.to(torch.float32)
    return real if scales is None else real * scales


def stored_numbers(x_THD: torch.Tensor, dtype: Dtype, scales: torch.Tensor | None) -> torch.Tensor:
    """Float32 numbers in `dtype`, to nearest, ties to even; finite ones too large become its largest.

    Infinity and NaN stay as far as `dtype` has them; int8 has neither, see `require_finite`.
    """
    scaled_THD = x_THD if scales is None else x_THD / scales
    if dtype is Dtype.INT8:
        return scaled_THD.round().clamp(-_INT8_LARGEST, _INT8_LARGEST).to(torch.int8)
    if dtype in _SATURATING:
        fitting_THD = scaled_THD.clamp(-_largest(dtype), _largest(dtype))
        scaled_THD = torch.where(x_THD.isinf(), x_THD, fitting_THD)
    return scaled_THD.to(TORCH_DTYPES[dtype])


def require_finite(x_THD: torch.Tensor, place: ScalePlace) -> None:
    """Raises DataLoss, check finite, where a number is NaN or infinite: there is no distance from it."""
    odd = int((~x_THD.isfinite()).sum())
    if odd:
        raise DataLoss(
            f"{place.side}s of layer {place.layer}: {odd} of {x_THD.numel()} numbers are NaN or infinite, "
            "which a lossy conversion would hide",
            check="finite",
        )


def _largest(dtype: Dtype) -> float:
    return _INT8_LARGEST if dtype is Dtype.INT8 else float(torch.finfo(TORCH_DTYPES[dtype]).max)


def _scale_shape(form: NumberForm, place: ScalePlace) -> tuple[int, int, int]:
    match form.quantization.granularity:
        case QuantizationGranularity.TENSOR:
            return 1, 1, 1
        case QuantizationGranularity.HEAD:
            return 1, len(place.heads), 1
        case _:
            return place.tokens, len(place.heads), 1


def _fixed(form: NumberForm, place: ScalePlace) -> torch.Tensor:
    scales, contract = form.quantization.fixed_scales, place.contract
    if form.quantization.granularity is QuantizationGranularity.TENSOR:
        return torch.tensor(scales[place.layer], dtype=torch.float32).view(1, 1, 1)
    groups = [contract.group_of(layer) for layer in range(place.layer)]
    before = sum(1 if group.kind is LayerKind.MLA_LATENT else group.kv_heads for group in groups)
    own = [scales[before + head] for head in place.heads]
    return torch.tensor(own, dtype=torch.float32).view(1, -1, 1)
