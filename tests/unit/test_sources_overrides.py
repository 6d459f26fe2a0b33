"""Config fields and cache keys that a person sets over a source."""

from __future__ import annotations

from typing import Any

import pytest

from kvpact.config import CacheConfig
from kvpact.contract.sources.cache_choice import (
    CacheChoice,
    choice_from_settings,
    from_config,
    parse_cache_settings,
)
from kvpact.contract.sources.huggingface import override_config
from kvpact.errors import BadRequest, UnreadableSource
from kvpact.types import AxisOrder, Dtype, KeyState, LaneOrder

NEW = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
OLD = {"model_type": "llama", "rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 2.0}}


@pytest.mark.parametrize(
    ("config", "overrides", "expected"),
    [
        (NEW, {"rope_theta": "10000"}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}}),
        (NEW, {"rope_theta": 1e4}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        (OLD, {"rope_theta": "1e4"}, {"rope_theta": 1e4}),
        ({"model_type": "llama"}, {"rope_theta": "1e4"}, {"rope_theta": 1e4}),
        (
            {"model_type": "llama", "rope_theta": 1e5, "rope_parameters": {"rope_theta": 1e5}},
            {"rope_theta": "5"},
            {"rope_theta": 5, "rope_parameters": {"rope_theta": 5}},
        ),
        (OLD, {"rope_type": "default"}, {"rope_scaling": {"rope_type": "default", "factor": 2.0}}),
        (OLD, {"factor": "4"}, {"rope_scaling": {"type": "linear", "factor": 4}}),
        (NEW, {"rope_scaling.factor": "4"}, {"rope_parameters": NEW["rope_parameters"] | {"factor": 4}}),
        ({"model_type": "llama"}, {"factor": "4"}, {"rope_parameters": {"factor": 4}}),
        (NEW, {"tie_word_embeddings": "True"}, {"tie_word_embeddings": True}),
        (NEW, {"hidden_act": "gelu"}, {"hidden_act": "gelu"}),
        (NEW | {"odd_key": 1}, {"odd_key": "2"}, {"odd_key": 2}),
    ],
)
def test_a_field_changes_where_the_config_keeps_it(
    config: dict[str, Any], overrides: dict[str, Any], expected: dict[str, Any]
) -> None:
    before = repr(config)
    assert override_config(config, overrides) == config | expected
    assert repr(config) == before


def test_a_whole_new_section_replaces_both_and_keeps_theta() -> None:
    scaling = '{"rope_type": "llama3", "factor": 8}'
    changed = override_config(NEW, {"rope_scaling": scaling})
    assert changed == {
        "model_type": "llama",
        "rope_scaling": {"rope_type": "llama3", "factor": 8},
        "rope_theta": 1e5,
    }
    assert override_config(OLD, {"rope_parameters": {"rope_theta": 7}}) == {
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 7},
    }


def test_an_unknown_field_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(BadRequest, match="rope_thta is unknown for llama; did you mean rope_theta"):
        override_config(NEW, {"rope_thta": "1"})
    with pytest.raises(BadRequest, match="max_window_layers is unknown for llama"):
        override_config(NEW, {"max_window_layers": "1"})
    with pytest.raises(UnreadableSource):
        override_config({"model_type": "foo"}, {"rope_theta": "1"})


def test_cache_settings_are_parsed_and_checked() -> None:
    settings = parse_cache_settings("key_state=raw, axis_order=HND,block_size=24,dtype=bfloat16")
    assert choice_from_settings(settings) == CacheChoice(
        key_state=KeyState.RAW, axis_order=AxisOrder.HND, block_size=24, dtype=Dtype.BFLOAT16
    )
    assert parse_cache_settings("stored_lane_order=adjacent") == {"stored_lane_order": "adjacent"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("keystate=raw", "did you mean key_state"),
        ("zzz=1", "known are key_state"),
        ("key_state=none", "expected raw or rotated"),
        ("axis_order=DNH", "expected NHD or HND"),
        ("block_size=0", "whole number from 1 to 1024"),
        ("block_size=-4", "whole number from 1 to 1024"),
        ("dtype=float8", "float32, float16"),
        ("stored_lane_order=x", "half_split or adjacent"),
        ("key_state", "expected key=value"),
        ("", "expected key=value"),
        ("key_state=raw,key_state=raw", "given twice"),
    ],
)
def test_a_wrong_cache_setting_is_refused_with_what_is_allowed(text: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        parse_cache_settings(text)


def test_an_unset_cache_config_is_the_default_choice() -> None:
    assert from_config(CacheConfig()) == CacheChoice()
    assert (
        from_config(CacheConfig(stored_lane_order=LaneOrder.ADJACENT)).stored_lane_order is LaneOrder.ADJACENT
    )
