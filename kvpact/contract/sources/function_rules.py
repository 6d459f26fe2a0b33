"""Which tensors make up each family's function, under transformers' state-dict names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SparseLayers = Literal["all", "after_dense", "every_step", "listed"]
QKVO = ("self_attn.{q,k,v,o}_proj.weight",)
QKV_BIAS = ("self_attn.{q,k,v}_proj.bias",)
QKVO_BIAS = ("self_attn.{q,k,v,o}_proj.bias",)
QK_NORM = ("self_attn.{q,k}_norm.weight",)
GATED = ("mlp.{gate,up,down}_proj.weight",)
GATED_BIAS = ("mlp.{gate,up,down}_proj.bias",)
NORMS = ("{input,post_attention}_layernorm.weight",)
BIASED_NORMS = ("{input,post_attention}_layernorm.{weight,bias}",)
POST_NORMS = ("post_{attention,feedforward}_layernorm.weight",)
SANDWICH_NORMS = (*NORMS, "{pre,post}_feedforward_layernorm.weight")
SHARED_EXPERTS = ("mlp.shared_experts.{gate,up,down}_proj.weight",)
PLAIN = (*QKVO, *GATED, *NORMS)
BIAS = {"attention_bias": QKVO_BIAS}
BIAS_AND_MLP = {"attention_bias": QKVO_BIAS, "mlp_bias": GATED_BIAS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Mixture-of-experts part of a family: which layers have it, and the tensors of such a layer."""

    layers: SparseLayers
    count_key: str
    """Config key of the number of experts."""
    tensors: tuple[str, ...]
    dense: tuple[str, ...] = GATED
    """Tensors of the feed-forward part of a layer without experts."""
    prefix: str = "mlp.experts"
    split: bool = True
    """Digested one expert at a time, as files have them; else one tensor for all, as both have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRule:
    """Tensors of one family. Braces in a name stand for one name with each of their parts."""

    layer: tuple[str, ...]
    flagged: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tensors of a layer where the config's flag of that name is true."""
    structure: Mapping[str, Any] = field(default_factory=dict)
    """Keys that only say which tensors there are, with the class's defaults."""
    experts: Experts | None = None
    base: str = "model"
    layers: str = "layers"
    embedding: str = "embed_tokens.weight"
    outside: tuple[str, ...] = ("norm.weight",)
    head_bias: bool = False
    norms_add_one: bool = False
    """Norms multiply by 1 + weight: digested as that sum, which is what other files store."""


def _every_step(count_key: str, experts: int, shared: tuple[str, ...], **more: Any) -> FunctionRule:
    return FunctionRule(
        structure={"decoder_sparse_step": 1, "mlp_only_layers": [], count_key: experts},
        experts=Experts(layers="every_step", count_key=count_key, tensors=("mlp.gate.weight", *shared)),
        **more,
    )


def _after_dense(dense: int, experts: int, gate: tuple[str, ...], **more: Any) -> FunctionRule:
    return FunctionRule(
        structure={"n_routed_experts": experts, "first_k_dense_replace": dense} | more.pop("structure", {}),
        experts=Experts(layers="after_dense", count_key="n_routed_experts", tensors=(*gate, *SHARED_EXPERTS)),
        **more,
    )


def _latent(dense: int, experts: int, *gate: str) -> FunctionRule:
    projections = ("self_attn.{kv_a_proj_with_mqa,kv_b_proj,o_proj}.weight",)
    return _after_dense(
        dense,
        experts,
        ("mlp.gate.weight", *gate),
        layer=(*projections, "self_attn.kv_a_layernorm.weight", *NORMS),
        flagged={"attention_bias": ("self_attn.{kv_a_proj_with_mqa,o_proj}.bias",)},
        structure={"q_lora_rank": 1536},
    )


def _glm(*more: str) -> FunctionRule:
    return FunctionRule(
        layer=(*QKVO, "mlp.{gate_up,down}_proj.weight", *NORMS, *more),
        flagged={"attention_bias": QKV_BIAS},
    )


def _gemma(*layer: str) -> FunctionRule:
    return FunctionRule(layer=(*QKVO, *GATED, *layer), flagged=BIAS, norms_add_one=True)


RULES: dict[str, FunctionRule] = {
    "llama": FunctionRule(layer=PLAIN, flagged=BIAS_AND_MLP),
    "smollm3": FunctionRule(layer=PLAIN, flagged=BIAS_AND_MLP),
    "granite": FunctionRule(layer=PLAIN, flagged=BIAS_AND_MLP),
    "mistral": FunctionRule(layer=PLAIN),
    "ministral3": FunctionRule(layer=PLAIN),
    "qwen2": FunctionRule(layer=(*PLAIN, *QKV_BIAS)),
    "qwen3": FunctionRule(layer=(*PLAIN, *QK_NORM), flagged=BIAS),
    "qwen2_moe": _every_step(
        "num_experts",
        60,
        ("mlp.shared_expert.{gate,up,down}_proj.weight", "mlp.shared_expert_gate.weight"),
        layer=(*QKVO, *NORMS),
        flagged={"qkv_bias": QKV_BIAS},
    ),
    "qwen3_moe": _every_step("num_experts", 128, (), layer=(*QKVO, *NORMS, *QK_NORM), flagged=BIAS),
    "gemma": _gemma(*NORMS),
    "gemma2": _gemma(*SANDWICH_NORMS),
    "gemma3_text": _gemma(*SANDWICH_NORMS, *QK_NORM),
    "olmo2": FunctionRule(layer=(*QKVO, *GATED, *POST_NORMS, *QK_NORM), flagged=BIAS),
    "olmo3": FunctionRule(layer=(*QKVO, *GATED, *POST_NORMS, *QK_NORM), flagged=BIAS),
    "exaone4": FunctionRule(layer=(*QKVO, *GATED, *POST_NORMS, *QK_NORM)),
    "glm": _glm(),
    "glm4": _glm("post_{self_attn,mlp}_layernorm.weight"),
    "cohere": FunctionRule(
        layer=(*QKVO, *GATED, "input_layernorm.weight"), flagged=BIAS | {"use_qk_norm": QK_NORM}
    ),
    "cohere2": FunctionRule(layer=(*QKVO, *GATED, "input_layernorm.weight"), flagged=BIAS),
    "phi": FunctionRule(
        layer=(
            "self_attn.{q_proj,k_proj,v_proj,dense}.{weight,bias}",
            "mlp.fc{1,2}.{weight,bias}",
            "input_layernorm.{weight,bias}",
        ),
        flagged={"qk_layernorm": ("self_attn.{q,k}_layernorm.{weight,bias}",)},
        outside=("final_layernorm.{weight,bias}",),
        head_bias=True,
    ),
    "phi3": FunctionRule(layer=("self_attn.{qkv,o}_proj.weight", "mlp.{gate_up,down}_proj.weight", *NORMS)),
    "gpt_neox": FunctionRule(
        layer=(
            *BIASED_NORMS,
            "attention.{query_key_value,dense}.weight",
            "mlp.dense_{h_to_4h,4h_to_h}.{weight,bias}",
        ),
        flagged={"attention_bias": ("attention.{query_key_value,dense}.bias",)},
        base="gpt_neox",
        embedding="embed_in.weight",
        outside=("final_layer_norm.{weight,bias}",),
    ),
    "gptj": FunctionRule(
        layer=("ln_1.{weight,bias}", "attn.{q,k,v,out}_proj.weight", "mlp.fc_{in,out}.{weight,bias}"),
        base="transformer",
        layers="h",
        embedding="wte.weight",
        outside=("ln_f.{weight,bias}",),
        head_bias=True,
    ),
    "stablelm": FunctionRule(
        layer=(*QKVO, *GATED, "input_layernorm.{weight,bias}"),
        flagged={"use_qkv_bias": QKV_BIAS},
        outside=("norm.{weight,bias}",),
    ),
    "starcoder2": FunctionRule(
        layer=(*QKVO, "mlp.c_{fc,proj}.weight", *BIASED_NORMS),
        flagged={"use_bias": (*QKVO_BIAS, "mlp.c_{fc,proj}.bias")},
        outside=("norm.{weight,bias}",),
    ),
    "falcon": FunctionRule(
        layer=("self_attention.{query_key_value,dense}.weight", "mlp.dense_{h_to_4h,4h_to_h}.weight"),
        flagged={"bias": ("self_attention.{query_key_value,dense}.bias", "mlp.dense_{h_to_4h,4h_to_h}.bias")},
        base="transformer",
        layers="h",
        embedding="word_embeddings.weight",
        outside=("ln_f.{weight,bias}",),
    ),
    "deepseek_v2": _latent(0, 64),
    "deepseek_v3": _latent(3, 256, "mlp.gate.e_score_correction_bias"),
    "glm4_moe": _after_dense(
        1,
        128,
        ("mlp.gate.{weight,e_score_correction_bias}",),
        layer=(*QKVO, *NORMS),
        flagged={"attention_bias": QKV_BIAS, "use_qk_norm": QK_NORM},
    ),
    "minimax_m2": FunctionRule(
        layer=(*QKVO, *NORMS, *QK_NORM),
        structure={"num_local_experts": 256},
        experts=Experts(
            layers="all",
            count_key="num_local_experts",
            tensors=("mlp.gate.weight", "mlp.e_score_correction_bias"),
        ),
    ),
    "gpt_oss": FunctionRule(
        layer=(*QKVO, "self_attn.sinks", *NORMS),
        flagged=BIAS,
        structure={"num_local_experts": 128},
        experts=Experts(
            layers="all",
            count_key="num_local_experts",
            tensors=("mlp.router.{weight,bias}", "mlp.experts.{gate_up,down}_proj{,_bias}"),
            split=False,
        ),
    ),
    "llama4_text": FunctionRule(
        layer=(*QKVO, *NORMS),
        flagged=BIAS,
        structure={"num_local_experts": 16, "interleave_moe_layer_step": 1, "moe_layers": None},
        experts=Experts(
            layers="listed",
            count_key="num_local_experts",
            tensors=(
                "feed_forward.router.weight",
                "feed_forward.shared_expert.{gate,up,down}_proj.weight",
                "feed_forward.experts.{gate_up,down}_proj",
            ),
            dense=("feed_forward.{gate,up,down}_proj.weight",),
            split=False,
        ),
    ),
}
