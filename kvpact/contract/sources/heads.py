"""Head counts and widths of a config, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvpact.contract.sources.family import Family
from kvpact.contract.sources.numbers import (
    MOST_HEADS,
    MOST_LAYERS,
    WIDEST_HEAD,
    flag,
    positive_int,
    wrong_value,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """KV heads of the whole model, and lanes of one of them."""

    kv_heads: int
    key_dim: int
    value_dim: int
    turning_end: int
    """Lanes of a key that may turn end here: all of them, or those behind the ones that never do."""
    turning_start: int = 0


def heads_of(config: Mapping[str, Any], family: Family, *, full: bool = True) -> Heads:
    """Heads of layers that see everything, or of those with a window. Raises UnreadableSource."""
    if family.latent:
        return _expanded_heads(config, family)
    head_dim, kv_heads = head_dim_of(config, family), kv_heads_of(config, family)
    if full and "global_head_dim" in family.defaults:
        head_dim = _even("global_head_dim", family.value(config, "global_head_dim"))
        given = family.value(config, "num_global_key_value_heads")
        if given is not None and flag("attention_k_eq_v", family.value(config, "attention_k_eq_v")):
            kv_heads = positive_int("num_global_key_value_heads", given)
    return Heads(kv_heads=kv_heads, key_dim=head_dim, value_dim=head_dim, turning_end=head_dim)


def head_dim_of(config: Mapping[str, Any], family: Family) -> int:
    """Lanes of one head: as given, else the family's own rule. Raises UnreadableSource if it can't be."""
    if family.latent:
        return _even("qk_rope_head_dim", family.value(config, "qk_rope_head_dim"))
    hidden = positive_int("hidden_size", family.value(config, "hidden_size"))
    heads = positive_int("num_attention_heads", family.value(config, "num_attention_heads"), MOST_HEADS)
    head_dim = family.value(config, "head_dim")
    if hidden % heads and (family.heads_divide_hidden or not family.head_dim_is_given):
        raise wrong_value("hidden_size", hidden, f"a multiple of num_attention_heads = {heads}")
    if head_dim is None and family.defaults.get("head_dim") is None:
        if hidden % heads:
            raise wrong_value("head_dim", None, f"a number, since {heads} heads don't divide {hidden}")
        head_dim = hidden // heads
    checked = _even("head_dim", head_dim)
    if not family.head_dim_is_given and checked != hidden // heads:
        raise wrong_value("head_dim", checked, f"hidden_size / num_attention_heads = {hidden // heads}")
    return checked


def kv_heads_of(config: Mapping[str, Any], family: Family) -> int:
    """KV heads of the whole model. Raises UnreadableSource if query heads can't share them evenly."""
    heads = positive_int("num_attention_heads", family.value(config, "num_attention_heads"), MOST_HEADS)
    key = "num_key_value_heads"
    given = family.value(config, key)
    if family.model_type == "falcon":
        key, given = "num_kv_heads", _falcon_kv_heads(config, family)
    if "multi_query_attention" in family.defaults:
        many = not flag("multi_query_attention", family.value(config, "multi_query_attention"))
        key, given = "multi_query_group_num", heads if many else config.get("multi_query_group_num")
        given = positive_int(key, given)
    kv_heads = heads if given is None else positive_int(key, given)
    if kv_heads != heads and not family.shares_kv_heads:
        raise wrong_value(key, kv_heads, f"all {heads} heads, since {family.model_type} shares none")
    if heads % kv_heads:
        raise wrong_value(key, kv_heads, f"a divisor of num_attention_heads = {heads}")
    return kv_heads


def layer_count_of(config: Mapping[str, Any], family: Family) -> int:
    """Layers of the model. Raises UnreadableSource for anything below 1."""
    return positive_int("num_hidden_layers", family.value(config, "num_hidden_layers"), MOST_LAYERS)


def _falcon_kv_heads(config: Mapping[str, Any], family: Family) -> Any:
    """Only the new decoder and plain attention read num_kv_heads; multi-query attention has one."""
    new = flag("new_decoder_architecture", family.value(config, "new_decoder_architecture"))
    one = flag("multi_query", family.value(config, "multi_query")) and not new
    return 1 if one else config.get("num_kv_heads")


def _expanded_heads(config: Mapping[str, Any], family: Family) -> Heads:
    """Heads as attention sees them once a latent row is expanded: content lanes, then rotary lanes."""
    heads = positive_int("num_attention_heads", family.value(config, "num_attention_heads"), MOST_HEADS)
    kv_heads_of(config, family)
    content = positive_int("qk_nope_head_dim", family.value(config, "qk_nope_head_dim"), WIDEST_HEAD)
    width = content + head_dim_of(config, family)
    value_dim = positive_int("v_head_dim", family.value(config, "v_head_dim"), WIDEST_HEAD)
    return Heads(kv_heads=heads, key_dim=width, value_dim=value_dim, turning_start=content, turning_end=width)


def _even(key: str, value: Any) -> int:
    checked = positive_int(key, value, WIDEST_HEAD)
    if checked % 2:
        raise wrong_value(key, checked, "an even number, since lanes rotate in pairs")
    return checked
