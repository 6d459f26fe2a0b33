"""Head counts and widths of a config, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvpact.contract.sources.families import Family
from kvpact.contract.sources.numbers import positive_int, wrong_value


def head_dim_of(config: Mapping[str, Any], family: Family) -> int:
    """Lanes of one head: as given, else the family's own rule. Raises UnreadableSource if it can't be."""
    hidden = positive_int("hidden_size", family.value(config, "hidden_size"))
    heads = positive_int("num_attention_heads", family.value(config, "num_attention_heads"))
    head_dim = family.value(config, "head_dim")
    if hidden % heads and family.heads_divide_hidden:
        raise wrong_value("hidden_size", hidden, f"a multiple of num_attention_heads = {heads}")
    if head_dim is None and family.defaults["head_dim"] is None:
        head_dim = hidden // heads
    checked = positive_int("head_dim", head_dim)
    if checked % 2:
        raise wrong_value("head_dim", checked, "an even number, since lanes rotate in pairs")
    return checked


def kv_heads_of(config: Mapping[str, Any], family: Family) -> int:
    """KV heads of the whole model. Raises UnreadableSource if query heads can't share them evenly."""
    heads = positive_int("num_attention_heads", family.value(config, "num_attention_heads"))
    given = family.value(config, "num_key_value_heads")
    kv_heads = heads if given is None else positive_int("num_key_value_heads", given)
    if heads % kv_heads:
        raise wrong_value("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads = {heads}")
    return kv_heads


def layer_count_of(config: Mapping[str, Any], family: Family) -> int:
    """Layers of the model. Raises UnreadableSource for anything below 1."""
    return positive_int("num_hidden_layers", family.value(config, "num_hidden_layers"))
