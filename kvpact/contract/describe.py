"""Contract values as short text for people, at most 256 characters each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from kvpact.contract.contract import (
    AttentionTemperature,
    FrequencyFormula,
    LatentDims,
    Quantization,
    Rotary,
    Shard,
)
from kvpact.types import QuantizationScheme

TEXT_LIMIT = 256
ABSENT = "none"


def clip(text: str) -> str:
    """`text`, cut to the limit of a difference's value."""
    return text if len(text) <= TEXT_LIMIT else text[: TEXT_LIMIT - 3] + "..."


def describe_layers(layers: Iterable[int]) -> str:
    """Ascending layers as ranges: `layers 0-2, 5`."""
    ordered = sorted(set(layers))
    if not ordered:
        return "no layers"
    runs = [
        [layer for _, layer in run] for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0])
    ]
    ranges = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"layer{'' if len(ordered) == 1 else 's'} {', '.join(ranges)}"


def describe_numbers(writer: float, reader: float) -> tuple[str, str]:
    """Both numbers with as many digits as it takes to tell them apart."""
    for digits in (6, 9, 17):
        texts = f"{writer:.{digits}g}", f"{reader:.{digits}g}"
        if texts[0] != texts[1]:
            break
    return texts


def describe_arrays(writer: Sequence[float], reader: Sequence[float]) -> tuple[str, str]:
    """First differing index, its two values and how many differ: `[1] 0.749894 (7 of 8 differ)`."""
    length = max(len(writer), len(reader))
    differing = [i for i in range(length) if i >= min(len(writer), len(reader)) or writer[i] != reader[i]]
    if not differing:
        return "no difference", "no difference"
    first = differing[0]
    count = f"({len(differing)} of {length} differ)"
    if first < min(len(writer), len(reader)):
        left, right = describe_numbers(writer[first], reader[first])
    else:
        left, right = (f"{side[first]:.6g}" if first < len(side) else "absent" for side in (writer, reader))
    return f"[{first}] {left} {count}", f"[{first}] {right} {count}"


def describe_digest(digest: bytes | None) -> str:
    """A digest in hex."""
    return "unknown" if digest is None else digest.hex()


def describe_optional(value: object) -> str:
    """`none` for None, else the value's own text."""
    return ABSENT if value is None else str(value)


def describe_temperature(temperature: AttentionTemperature | None) -> str:
    """Formula with its numbers."""
    return ABSENT if temperature is None else _call(temperature.formula, temperature.parameters)


def describe_formula(formula: FrequencyFormula | None) -> str:
    """Formula with its numbers."""
    return ABSENT if formula is None else _call(formula.name, formula.parameters)


def describe_latent(latent: LatentDims | None) -> str:
    """Dimensions of a latent row in the order in which they are stored."""
    if latent is None:
        return ABSENT
    parts = [f"{latent.latent_dim} content lanes", f"{latent.rope_dim} rotary lanes"]
    return ", then ".join(parts if latent.content_first else parts[::-1])


def describe_sections(rotary: Rotary) -> str:
    """Frequencies per position row."""
    if not rotary.mrope_sections:
        return ABSENT
    sections = ", ".join(str(section) for section in rotary.mrope_sections)
    return f"{sections} {'interleaved' if rotary.mrope_interleaved else 'in runs'}"


def describe_quantization(quantization: Quantization) -> str:
    """Scheme, reach of a scale and where scales come from."""
    if quantization.scheme is QuantizationScheme.NONE:
        return ABSENT
    granularity, source = quantization.granularity, quantization.scale_source
    text = f"{quantization.scheme}, one scale per {granularity or 'unknown'}, scales {source or 'unknown'}"
    if quantization.fixed_scales:
        shown = ", ".join(f"{scale:.9g}" for scale in quantization.fixed_scales[:4])
        more = len(quantization.fixed_scales) - 4
        text += f" [{shown}{f', and {more} more' if more > 0 else ''}]"
    return text


def describe_shard(shard: Shard) -> str:
    """Rank, heads and layers; ranges are half open."""
    return (
        f"rank {shard.tensor_parallel_rank} of {shard.tensor_parallel_size}, "
        f"heads [{shard.head_start}, {shard.head_end}), layers [{shard.layer_start}, {shard.layer_end})"
    )


def _call(name: str, parameters: Sequence[float]) -> str:
    return f"{name}({', '.join(f'{number:.9g}' for number in parameters)})"
