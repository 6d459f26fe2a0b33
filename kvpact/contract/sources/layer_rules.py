"""What each layer of a config sees, and whether its keys turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpact.contract.sources.family import Family, RotatedLayers, WindowRule
from kvpact.contract.sources.heads import layer_count_of
from kvpact.contract.sources.numbers import flag, positive_int, wrong_value
from kvpact.types import LayerKind

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
KINDS = {FULL: LayerKind.FULL, SLIDING: LayerKind.SLIDING, CHUNKED: LayerKind.CHUNKED}
LISTING = {
    WindowRule.FROM_LAYER, WindowRule.ALTERNATE_BELOW, WindowRule.PATTERN, WindowRule.PATTERN_LAST_FULL,
    WindowRule.UNROTATED, WindowRule.CHUNKED_ROTATED,
}  # fmt: skip
"""Rules of families that read layer_types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRule:
    """One layer: what it sees and whether it turns keys."""

    layer_type: str
    window: int | None
    rotated: bool

    @property
    def kind(self) -> LayerKind:
        """The contract's word."""
        return KINDS[self.layer_type]


def layer_rules(config: Mapping[str, Any], family: Family) -> list[LayerRule]:
    """Every layer in order. Raises UnreadableSource for a key that is absent or out of range."""
    count = layer_count_of(config, family)
    listed = _rope_list(config, family, count)
    types = _given_types(config, family, count) or _ruled_types(config, family, count, listed)
    rules = []
    for layer, layer_type in enumerate(types):
        rotated = _rotates(config, family, layer_type, listed[layer])
        window = _window(config, family, layer_type)
        rules.append(LayerRule(layer_type=layer_type, window=window, rotated=rotated))
    return rules


def _rope_list(config: Mapping[str, Any], family: Family, count: int) -> list[bool]:
    """Per layer whether no_rope_layers has a 1, which means that the layer does turn its keys."""
    if family.rotated is not RotatedLayers.LISTED:
        return [True] * count
    given = family.value(config, "no_rope_layers")
    if given is None or given == []:
        every = positive_int("no_rope_layer_interval", family.value(config, "no_rope_layer_interval"))
        return [(layer + 1) % every != 0 for layer in range(count)]
    if not isinstance(given, list) or len(given) != count or any(one not in (0, 1) for one in given):
        raise wrong_value("no_rope_layers", given, f"a list of {count} zeros and ones")
    return [bool(one) for one in given]


def _rotates(config: Mapping[str, Any], family: Family, layer_type: str, listed: bool) -> bool:
    if family.rotated is RotatedLayers.WINDOWED:
        return layer_type == SLIDING
    if family.rotated is RotatedLayers.WINDOWED_IF_ANY:
        return layer_type == SLIDING or family.value(config, "sliding_window") is None
    return listed


def _window(config: Mapping[str, Any], family: Family, layer_type: str) -> int | None:
    if layer_type == FULL:
        return None
    key = "attention_chunk_size" if layer_type == CHUNKED else "sliding_window"
    return positive_int(key, family.value(config, key))


def _given_types(config: Mapping[str, Any], family: Family, count: int) -> list[str] | None:
    types = family.value(config, "layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != count:
        raise wrong_value("layer_types", types, f"a list of {count} layer types")
    known = (FULL, CHUNKED if family.windows is WindowRule.CHUNKED_ROTATED else SLIDING)
    for layer, layer_type in enumerate(types):
        if layer_type not in known:
            raise wrong_value(f"layer_types[{layer}]", layer_type, " or ".join(known))
    if family.windows not in LISTING:
        return _agreeing(config, family, types)
    if family.windows is WindowRule.PATTERN_LAST_FULL:
        return [*types[:-1], FULL]
    return types if _windows_are_on(config, family) else [FULL] * count


def _agreeing(config: Mapping[str, Any], family: Family, types: list[str]) -> list[str]:
    """These families don't read layer_types, so a list that says otherwise is refused."""
    ruled = _ruled_types(config, family, len(types), [True] * len(types))
    for layer, (given, own) in enumerate(zip(types, ruled, strict=True)):
        if given != own:
            raise wrong_value(f"layer_types[{layer}]", given, f"{own}, as in every {family.model_type}")
    return types


def _windows_are_on(config: Mapping[str, Any], family: Family) -> bool:
    """Whether windows act: use_sliding_window is true where there is such a switch, and a size is set."""
    switched = "use_sliding_window" not in family.defaults
    switched = switched or flag("use_sliding_window", family.value(config, "use_sliding_window"))
    if switched and family.value(config, "sliding_window") is not None:
        positive_int("sliding_window", family.value(config, "sliding_window"))
    if family.windows in (WindowRule.FROM_LAYER, WindowRule.ALTERNATE_BELOW, WindowRule.UNROTATED):
        return switched
    return switched and (family.value(config, "sliding_window") is not None or _needs_window(family))


def _needs_window(family: Family) -> bool:
    """Whether a null size is a contradiction here rather than a switch."""
    patterned = family.windows in (WindowRule.PATTERN, WindowRule.PATTERN_LAST_FULL)
    chunked = family.windows is WindowRule.CHUNKED_ROTATED
    return chunked or (patterned and family.rotated is not RotatedLayers.WINDOWED_IF_ANY)


def _ruled_types(config: Mapping[str, Any], family: Family, count: int, listed: Sequence[bool]) -> list[str]:
    rule = family.windows
    if rule is WindowRule.NEVER or not _windows_are_on(config, family):
        return [FULL] * count
    if rule is WindowRule.CHUNKED_ROTATED:
        chunked = family.value(config, "attention_chunk_size") is not None
        return [CHUNKED if rotated and chunked else FULL for rotated in listed]
    if family.value(config, "sliding_window") is None and not _needs_window(family):
        return [FULL] * count
    sliding = [_slides(config, family, layer, listed[layer]) for layer in range(count)]
    if rule is WindowRule.PATTERN_LAST_FULL:
        sliding[-1] = False
    return [SLIDING if slides else FULL for slides in sliding]


def _slides(config: Mapping[str, Any], family: Family, layer: int, listed: bool) -> bool:
    rule = family.windows
    if rule in (WindowRule.FROM_LAYER, WindowRule.ALTERNATE_BELOW):
        bound = family.value(config, "max_window_layers")
        if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
            raise wrong_value("max_window_layers", bound, "a whole number of at least 0")
        return layer >= bound if rule is WindowRule.FROM_LAYER else layer % 2 == 0 and layer < bound
    if rule in (WindowRule.PATTERN, WindowRule.PATTERN_LAST_FULL):
        return _in_pattern(family.value(config, "sliding_window_pattern"), layer)
    return not listed if rule is WindowRule.UNROTATED else True


def _in_pattern(pattern: Any, layer: int) -> bool:
    """A number n: all but every n-th layer. Text such as LLLG: L slides, G doesn't, over and over."""
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        return pattern[layer % len(pattern)] == "L"
    return (layer + 1) % positive_int("sliding_window_pattern", pattern) != 0
