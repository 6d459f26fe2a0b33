"""Families that attend as Llama does: whole heads turn, half-split lanes, one rotary table."""

from __future__ import annotations

from kvpact.contract.sources.family import Family, RotatedLayers, SoftmaxScale, Temperature, WindowRule, sizes
from kvpact.types import LaneOrder

TIED = {"tie_word_embeddings": True}
SWITCHED_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
EXPERT_KEYS = frozenset({"moe_intermediate_size", "shared_expert_intermediate_size"})

LLAMA = Family(
    model_type="llama",
    defaults=sizes(4096, 32, 32, None, 2048),
    function_defaults={
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False,
    },
    heads_divide_hidden=True,
)  # fmt: skip
LLAMA4 = Family(
    model_type="llama4_text",
    defaults=sizes(5120, 48, 40, 8, 131_072, head_dim=128)
    | {
        "rope_theta": 500_000.0, "no_rope_layers": None, "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192, "layer_types": None, "attn_temperature_tuning": True,
        "floor_scale": 8192, "attn_scale": 0.1,
    },
    function_defaults={
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False, "num_experts_per_tok": 1,
        "num_local_experts": 16, "moe_layers": None, "interleave_moe_layer_step": 1, "use_qk_norm": True,
    },
    own_keys=frozenset({"intermediate_size_mlp"}),
    rotated=RotatedLayers.LISTED,
    windows=WindowRule.CHUNKED_ROTATED,
    temperature=Temperature.LLAMA4,
    weight_lane_order=LaneOrder.ADJACENT,
    cache_lane_order=LaneOrder.ADJACENT,
)  # fmt: skip
MISTRAL = Family(
    model_type="mistral",
    defaults=sizes(4096, 32, 32, 8, 131_072) | {"sliding_window": 4096},
    function_defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6},
    windows=WindowRule.ALL,
)
MINISTRAL3 = Family(
    model_type="ministral3",
    defaults=sizes(4096, 34, 32, 8, 262_144, head_dim=128) | {"sliding_window": None},
    function_defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5},
    windows=WindowRule.ALL,
    temperature=Temperature.MINISTRAL3,
    default_rope={
        "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 16_384, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
)  # fmt: skip
QWEN2 = Family(
    model_type="qwen2",
    defaults=sizes(4096, 32, 32, 32, 32_768)
    | SWITCHED_WINDOW
    | {"max_window_layers": 28, "layer_types": None},
    function_defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6},
    windows=WindowRule.FROM_LAYER,
)
QWEN3 = Family(
    model_type="qwen3",
    defaults=sizes(4096, 32, 32, 32, 32_768, head_dim=128)
    | SWITCHED_WINDOW
    | {"max_window_layers": 28, "layer_types": None},
    function_defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False},
    windows=WindowRule.FROM_LAYER,
)
QWEN2_MOE = Family(
    model_type="qwen2_moe",
    defaults=sizes(2048, 24, 16, 16, 32_768)
    | SWITCHED_WINDOW
    | {"max_window_layers": 28, "layer_types": None},
    function_defaults={
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "decoder_sparse_step": 1, "num_experts_per_tok": 4,
        "num_experts": 60, "norm_topk_prob": False, "mlp_only_layers": None, "qkv_bias": True,
    },
    own_keys=EXPERT_KEYS,
    windows=WindowRule.ALTERNATE_BELOW,
)  # fmt: skip
QWEN3_MOE = Family(
    model_type="qwen3_moe",
    defaults=sizes(2048, 24, 32, 4, 32_768) | SWITCHED_WINDOW,
    function_defaults={
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "decoder_sparse_step": 1,
        "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False, "mlp_only_layers": None,
    },
    own_keys=EXPERT_KEYS | {"max_window_layers"},
    aliases={"num_local_experts": "num_experts"},
    windows=WindowRule.ALL_IF_ON,
)  # fmt: skip
OLMO2 = Family(
    model_type="olmo2",
    defaults=sizes(4096, 32, 32, None, 2048),
    function_defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False},
)
OLMO3 = Family(
    model_type="olmo3",
    defaults=sizes(4096, 32, 32, None, 2048)
    | {
        "rope_theta": 500_000.0, "rope_local_base_freq": 500_000.0, "sliding_window": 4096,
        "sliding_window_pattern": 4, "layer_types": None,
    },
    function_defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False},
    rope_by_layer_type=True,
    windows=WindowRule.PATTERN,
    refused={"sliding_window_pattern": (4,), "rope_local_base_freq": (500_000.0,)},
)  # fmt: skip
SMOLLM3 = Family(
    model_type="smollm3",
    defaults=sizes(2048, 36, 16, 4, 32_768)
    | TIED
    | {
        "rope_theta": 2_000_000.0, "use_sliding_window": False, "sliding_window": None,
        "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None,
    },
    function_defaults={
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False,
    },
    own_keys=frozenset({"max_window_layers"}),
    rotated=RotatedLayers.LISTED,
    windows=WindowRule.UNROTATED,
)  # fmt: skip
GRANITE = Family(
    model_type="granite",
    defaults=sizes(4096, 32, 32, None, 2048) | {"attention_multiplier": 1.0},
    function_defaults={
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False,
        "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    },
    softmax_scale=SoftmaxScale.MULTIPLIER,
)  # fmt: skip
EXAONE4 = Family(
    model_type="exaone4",
    defaults=sizes(4096, 32, 32, 32, 2048)
    | {"sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
    function_defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5},
    rotated=RotatedLayers.WINDOWED_IF_ANY,
    windows=WindowRule.PATTERN,
)
GPT_OSS = Family(
    model_type="gpt_oss",
    defaults=sizes(2880, 36, 64, 8, 131_072, head_dim=64)
    | {"rope_theta": 150_000.0, "sliding_window": 128, "sliding_window_pattern": 2, "layer_types": None},
    function_defaults={
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "num_local_experts": 128, "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True,
    },
    own_keys=frozenset({"initial_context_length"}),
    default_rope={
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    sinks=True,
    windows=WindowRule.PATTERN,
    refused={"sliding_window_pattern": (2,)},
)  # fmt: skip
STARCODER2 = Family(
    model_type="starcoder2",
    defaults=sizes(3072, 30, 24, 2, 4096) | TIED | {"sliding_window": None},
    function_defaults={"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "use_bias": True},
    windows=WindowRule.ALL,
)
LLAMA_LIKE = (
    LLAMA, LLAMA4, MISTRAL, MINISTRAL3, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, OLMO2, OLMO3, SMOLLM3, GRANITE,
    EXAONE4, GPT_OSS, STARCODER2,
)  # fmt: skip
