"""What besides the weights decides a model's function, and which tensors count."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpact.contract.contract import Contract
from kvpact.contract.sources.families import Family, family_of
from kvpact.contract.sources.function_rules import BIASED_NORMS, GATED_BIAS, RULES, Experts, FunctionRule
from kvpact.contract.sources.model_config import canonical_config
from kvpact.contract.sources.numbers import MOST_EXPERTS, MOST_NORMED_HEADS, flag, positive_int, wrong_value
from kvpact.errors import UnreadableSource
from kvpact.types import KeyState, LaneOrder

SAME_FUNCTION = {"swish": "silu"}
"""Spellings of one activation."""
LM_HEAD = "lm_head.weight"
LM_HEAD_BIAS = "lm_head.bias"
WRAPPERS = ("model.language_model.", "language_model.")
"""Prefixes under which a text model lies inside a model of several inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryLanes:
    """Where the lanes that rotate lie in the rows of query and key weights."""

    head_dim: int
    start: int
    count: int
    """Lanes [start, start + count) of each head pair up and rotate."""
    kv_heads: int
    latent_rows: int | None
    """Rows before the shared rotary rows of a latent projection; None without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionFacts:
    """Facts of one model that its function digest needs beside its tensors' values."""

    values: Mapping[str, Any]
    """Architecture and the config facts that change the function, class defaults left out."""
    tensors: frozenset[str]
    """State-dict names that count, lm_head left out; experts one by one where files hold them so."""
    embedding: str
    base: str
    """Prefix of every tensor but the output head."""
    lanes: RotaryLanes | None
    """None: no layer rotates."""
    weight_lane_order: LaneOrder
    """How rotary rows of query and key weights lie in the weights that are given."""
    vocabulary_size: int | None
    """Tokenizer's size; embedding rows beyond it are left out. None: unknown, all rows count."""
    tied: bool
    """Whether the output head is the embedding."""
    head_bias: bool
    norms_add_one: bool
    split_experts: str | None
    """Name inside a layer of the experts that are digested one by one."""

    def state_name(self, name: str) -> str:
        """A stored name as transformers' state dict has it: base models are saved without the prefix."""
        for wrapper in WRAPPERS:
            if name.startswith(wrapper):
                name = name.removeprefix(wrapper)
                break
        name = _renamed(name)
        return name if name.startswith((f"{self.base}.", "lm_head.")) else f"{self.base}.{name}"


def function_facts(
    config: Mapping[str, Any],
    contract: Contract,
    *,
    vocabulary_size: int | None = None,
    weight_lane_order: LaneOrder | None = None,
) -> FunctionFacts:
    """Facts of the model that `config` and the contract made from it describe.

    `weight_lane_order` None: as transformers' own weights of the family lie.

    Raises:
        UnreadableSource: no rule for the model type, or a config fact can't be read.
    """
    flat = canonical_config(config)
    family = family_of(flat)
    model = _Model(config=flat, family=family, rule=function_rule(family.model_type))
    experts = model.rule.experts
    return FunctionFacts(
        values=model.values(),
        tensors=model.tensors(contract.layer_count()),
        embedding=f"{model.rule.base}.{model.rule.embedding}",
        base=model.rule.base,
        lanes=_lanes(flat, family, contract),
        weight_lane_order=weight_lane_order or _natural_order(flat, family),
        vocabulary_size=vocabulary_size,
        tied=flag("tie_word_embeddings", family.value(flat, "tie_word_embeddings")),
        head_bias=model.rule.head_bias,
        norms_add_one=model.rule.norms_add_one,
        split_experts=experts.prefix if experts is not None and experts.split else None,
    )


def has_function_rule(model_type: str) -> bool:
    """Whether the function of models of this type can be told from their weights."""
    return model_type in RULES


def function_rule(model_type: str) -> FunctionRule:
    """The family's rule. Raises UnreadableSource for a type without one."""
    rule = RULES.get(model_type)
    if rule is None:
        raise UnreadableSource(
            f"which tensors of model type {model_type!r} make up its function isn't known; known are"
            f" {', '.join(sorted(RULES))}",
            source="config",
            key="model_type",
        )
    return rule


def _natural_order(config: Mapping[str, Any], family: Family) -> LaneOrder:
    if config.get("rope_interleave") is False:
        return LaneOrder.HALF_SPLIT
    return family.weight_lane_order


def _lanes(config: Mapping[str, Any], family: Family, contract: Contract) -> RotaryLanes | None:
    turning = [group for group in contract.layer_groups if group.rotary.key_state is not KeyState.NONE]
    if not turning:
        return None
    group = turning[0]
    latent = positive_int("kv_lora_rank", family.value(config, "kv_lora_rank")) if family.latent else None
    return RotaryLanes(
        head_dim=group.key_dim,
        start=group.rotary.lane_offset,
        count=group.rotary.rotary_dim,
        kv_heads=group.kv_heads,
        latent_rows=latent,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """One config with its family and rule."""

    config: Mapping[str, Any]
    family: Family
    rule: FunctionRule

    def value(self, key: str) -> Any:
        """What the config says, or else the class's default."""
        if key in self.config:
            return self.config[key]
        found = self.family.value(self.config, key)
        return self.rule.structure.get(key) if found is None else found

    def values(self) -> dict[str, Any]:
        """Facts that differ from the class's defaults; those that show in the tensors' names left out."""
        facts: dict[str, Any] = {"architecture": self.family.model_type}
        shown = set(self.rule.structure) | set(self.rule.flagged)
        for key, default in self.family.function_defaults.items():
            value = _canonical(key, self.family.value(self.config, key))
            if key not in shown and value != _canonical(key, default):
                facts[key] = value
        return facts

    def tensors(self, layers: int) -> frozenset[str]:
        """State-dict names that count."""
        rule = self.rule
        names = {f"{rule.base}.{name}" for name in spread((rule.embedding, *rule.outside))}
        always = list(rule.layer) + [
            part for key, parts in rule.flagged.items() if self.value(key) for part in parts
        ]
        always += self._by_family()
        for layer in range(layers):
            parts = (*always, *self._feed_forward(layer, layers))
            names |= {f"{rule.base}.{rule.layers}.{layer}.{name}" for name in spread(parts)}
        return frozenset(names)

    def _feed_forward(self, layer: int, layers: int) -> tuple[str, ...]:
        experts = self.rule.experts
        if experts is None:
            return ()
        if not self._is_sparse(experts, layer, layers):
            return (*experts.dense, *(GATED_BIAS if self.value("mlp_bias") else ()))
        if not experts.split:
            return experts.tensors
        count = positive_int(experts.count_key, self.value(experts.count_key), MOST_EXPERTS // layers)
        numbers = ",".join(str(number) for number in range(count))
        return (*experts.tensors, f"{experts.prefix}.{{{numbers}}}.{{gate,up,down}}_proj.weight")

    def _is_sparse(self, experts: Experts, layer: int, layers: int) -> bool:
        match experts.layers:
            case "all":
                return True
            case "after_dense":
                return layer >= self._whole("first_k_dense_replace")
            case "every_step":
                step = positive_int("decoder_sparse_step", self.value("decoder_sparse_step"))
                return layer not in self._listed("mlp_only_layers") and (layer + 1) % step == 0
            case "listed":
                step = positive_int("interleave_moe_layer_step", self.value("interleave_moe_layer_step"))
                if self.value("moe_layers") is None:
                    return (layer + 1) % step == 0
                return layer in self._listed("moe_layers")

    def _by_family(self) -> tuple[str, ...]:
        """Tensors of a layer that no single flag decides."""
        match self.family.model_type:
            case "deepseek_v2" | "deepseek_v3":
                return self._latent_queries()
            case "stablelm":
                return self._stablelm_norms()
            case "falcon":
                return self._falcon_norms()
            case _:
                return ()

    def _latent_queries(self) -> tuple[str, ...]:
        if self.value("q_lora_rank") is None:
            return ("self_attn.q_proj.weight",)
        bias = ("self_attn.q_a_proj.bias",) if self.value("attention_bias") else ()
        return ("self_attn.q_{a,b}_proj.weight", "self_attn.q_a_layernorm.weight", *bias)

    def _stablelm_norms(self) -> tuple[str, ...]:
        names = [] if self.value("use_parallel_residual") else ["post_attention_layernorm.{weight,bias}"]
        if self.value("qk_layernorm"):
            for part, key in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
                heads = positive_int(key, self.value(key), MOST_NORMED_HEADS)
                names += [f"self_attn.{part}_layernorm.norms.{head}.weight" for head in range(heads)]
        return tuple(names)

    def _falcon_norms(self) -> tuple[str, ...]:
        if not self.value("parallel_attn"):
            return BIASED_NORMS
        count = self.value("num_ln_in_parallel_attn")
        if count is None and self.value("new_decoder_architecture"):
            count = 2
        return ("ln_{attn,mlp}.{weight,bias}",) if count == 2 else ("input_layernorm.{weight,bias}",)

    def _listed(self, key: str) -> list[Any]:
        value = self.value(key)
        if value is not None and not isinstance(value, list):
            raise wrong_value(key, value, "a list of layers")
        return value or []

    def _whole(self, key: str) -> int:
        value = self.value(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise wrong_value(key, value, "a whole number of at least 0")
        return value


def spread(names: Iterable[str]) -> Iterable[str]:
    """Names with braces as one name for each part: "{a,b}_proj" is "a_proj", "b_proj"."""
    for name in names:
        before, brace, rest = name.partition("{")
        if not brace:
            yield name
            continue
        parts, _, after = rest.partition("}")
        yield from spread(f"{before}{part}{after}" for part in parts.split(","))


RENAMED = (
    (re.compile(r"^(?:gpt_neox\.)?embed_out\."), "lm_head."),
    (re.compile(r"\.block_sparse_moe\.experts\.(\d+)\.w1\."), r".mlp.experts.\1.gate_proj."),
    (re.compile(r"\.block_sparse_moe\.experts\.(\d+)\.w3\."), r".mlp.experts.\1.up_proj."),
    (re.compile(r"\.block_sparse_moe\.experts\.(\d+)\.w2\."), r".mlp.experts.\1.down_proj."),
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
)
"""Names of published files that transformers takes under another name."""


def _renamed(name: str) -> str:
    for pattern, replacement in RENAMED:
        name = pattern.sub(replacement, name)
    return name


def _canonical(key: str, value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= float(np.finfo(np.float32).max):
            raise wrong_value(key, value, "a number that float32 holds")
        return float(np.float32(value))
    return SAME_FUNCTION.get(value, value) if isinstance(value, str) else value
