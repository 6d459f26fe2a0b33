"""Number formats: which holds every number of which other, and when stored numbers must be made anew."""

from __future__ import annotations

from dataclasses import dataclass

from kvpact.contract.contract import Layout, Quantization
from kvpact.types import Dtype, QuantizationScheme

DTYPE_BYTES = {
    Dtype.FLOAT32: 4,
    Dtype.FLOAT16: 2,
    Dtype.BFLOAT16: 2,
    Dtype.FLOAT8_E4M3: 1,
    Dtype.FLOAT8_E5M2: 1,
    Dtype.INT8: 1,
}
_EXACTLY_HELD_BY = {
    Dtype.FLOAT32: frozenset({Dtype.FLOAT32}),
    Dtype.FLOAT16: frozenset({Dtype.FLOAT16, Dtype.FLOAT32}),
    Dtype.BFLOAT16: frozenset({Dtype.BFLOAT16, Dtype.FLOAT32}),
    Dtype.FLOAT8_E4M3: frozenset({Dtype.FLOAT8_E4M3, Dtype.FLOAT16, Dtype.BFLOAT16, Dtype.FLOAT32}),
    Dtype.FLOAT8_E5M2: frozenset({Dtype.FLOAT8_E5M2, Dtype.FLOAT16, Dtype.BFLOAT16, Dtype.FLOAT32}),
    Dtype.INT8: frozenset({Dtype.INT8, Dtype.FLOAT16, Dtype.BFLOAT16, Dtype.FLOAT32}),
}
"""Formats with at least the fraction bits and the exponent range of the first; bfloat16 has int8's 8 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberForm:
    """How numbers of one side, keys or values, are stored."""

    dtype: Dtype
    quantization: Quantization

    @property
    def quantized(self) -> bool:
        """Whether stored numbers mean something only together with a scale."""
        return self.quantization.scheme is not QuantizationScheme.NONE


def key_form(layout: Layout) -> NumberForm:
    """Number form of keys."""
    return NumberForm(dtype=layout.key_dtype, quantization=layout.key_quantization)


def value_form(layout: Layout) -> NumberForm:
    """Number form of values."""
    return NumberForm(dtype=layout.value_dtype, quantization=layout.value_quantization)


def widens(writer: Dtype, reader: Dtype) -> bool:
    """Whether every number of `writer` is one of `reader`."""
    return reader in _EXACTLY_HELD_BY[writer]


def loses(writer: NumberForm, reader: NumberForm) -> bool:
    """Whether going from one form to the other may lose precision beyond an exact widening."""
    if writer.quantization != reader.quantization:
        return True
    if writer.dtype is reader.dtype:
        return False
    return writer.quantized or not widens(writer.dtype, reader.dtype)
