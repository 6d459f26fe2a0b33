"""What sets two sides apart, before a policy says what to do about it, with the remedy of each field."""

from __future__ import annotations

from dataclasses import dataclass

from kvpact.types import Relation

_MODEL_CONFIG = (
    "run both sides from one model config; look at prefill.override and decode.override in the config file "
    "and at --prefill-override and --decode-override"
)
_ROPE = (
    "give both sides one rope configuration: remove or equalise rope_theta, rope_scaling and rope_parameters "
    "in prefill.override and decode.override (--prefill-override, --decode-override) or in config.json"
)
_WEIGHTS = (
    "load the same model folder, at the same revision, on both sides (model in the config file, --model)"
)
_ENGINE = "use engines that agree on it, or compute the prompt on the decode side"
NOTHING = "nothing to do"


def _cache(key: str) -> str:
    return (
        f"set the same {key} on both sides: prefill.cache.{key} and decode.cache.{key} in the config file, "
        f"or --prefill-cache {key}=... and --decode-cache {key}=..."
    )


REMEDIES: dict[str, str] = {
    "schema_major": "run releases of kvpact that speak the same schema on both sides",
    "required_features": "upgrade the side that doesn't know the feature, or turn it off on the other",
    "architecture": _WEIGHTS,
    "function_digest": _WEIGHTS,
    "lm_head_digest": _WEIGHTS,
    "tokenizer_digest": "use the same tokenizer files on both sides (model in the config file, --model)",
    "layers": _MODEL_CONFIG,
    "kind": _MODEL_CONFIG,
    "window": _MODEL_CONFIG,
    "kv_heads": _MODEL_CONFIG,
    "key_dim": _MODEL_CONFIG,
    "value_dim": _MODEL_CONFIG,
    "latent": _MODEL_CONFIG,
    "softmax_scale": _MODEL_CONFIG,
    "softcap": _MODEL_CONFIG,
    "sinks": _MODEL_CONFIG,
    "temperature": _MODEL_CONFIG,
    "key_state": _cache("key_state"),
    "site": NOTHING,
    "inv_freq": _ROPE,
    "amplitude": _ROPE,
    "rotary_dim": _ROPE,
    "lane_offset": _ENGINE,
    "stored_lane_order": _cache("stored_lane_order"),
    "frequency_policy": "serve a context below the first switch of tables on both sides (max_model_len)",
    "mrope_sections": _ROPE,
    "basis": _ENGINE,
    "axis_order": _cache("axis_order"),
    "block_size": _cache("block_size"),
    "packing": _ENGINE,
    "byte_order": _ENGINE,
    "shard": "run both sides with one split of heads and layers, into ranks whose number divides the heads",
    "key_dtype": _cache("dtype"),
    "value_dtype": _cache("dtype"),
    "key_quantization": _cache("dtype"),
    "value_quantization": _cache("dtype"),
    "compute_dtype": "nothing to do; engine.compute_dtype in the config file makes both sides equal",
    "context": "nothing to do; a request gets no further than the shorter of the two",
}
"""Every field that can differ, in the order in which verdicts list them, and what a person can do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One field on which the sides differ, for the whole contract or for some layers."""

    field: str
    writer: str
    reader: str
    relation: Relation
    explanation: str = ""
    lossy: bool = False
    """Whether bridging it loses precision beyond rounding; for CONVERTIBLE only."""

    def __post_init__(self) -> None:
        assert self.field in REMEDIES, self.field
