"""Families of Gemma, and those whose positions have several rows."""

from __future__ import annotations

from kvpact.contract.sources.family import Family, SoftmaxScale, WindowRule, sizes

TIED = {"tie_word_embeddings": True}
GELU = "gelu_pytorch_tanh"
LOCAL_AND_GLOBAL = {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}

GEMMA = Family(
    model_type="gemma",
    defaults=sizes(3072, 28, 16, 16, 8192, head_dim=256) | TIED,
    function_defaults={"hidden_act": GELU, "rms_norm_eps": 1e-6, "attention_bias": False},
    own_keys=frozenset({"hidden_activation"}),
    refused={"use_bidirectional_attention": (None, False)},
)
GEMMA2 = Family(
    model_type="gemma2",
    defaults=sizes(2304, 26, 8, 4, 8192, head_dim=256)
    | TIED
    | {
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 2,
        "layer_types": None, "attn_logit_softcapping": 50.0,
    },
    function_defaults={
        "hidden_activation": GELU, "rms_norm_eps": 1e-6, "attention_bias": False,
        "final_logit_softcapping": 30.0,
    },
    own_keys=frozenset({"hidden_act", "cache_implementation"}),
    heads_divide_hidden=True,
    softmax_scale=SoftmaxScale.QUERY_SCALAR,
    softcap_key="attn_logit_softcapping",
    windows=WindowRule.PATTERN,
    refused={"use_bidirectional_attention": (None, False), "sliding_window_pattern": (2,)},
)  # fmt: skip
GEMMA3 = Family(
    model_type="gemma3_text",
    defaults=sizes(2304, 26, 8, 4, 131_072, head_dim=256)
    | TIED
    | LOCAL_AND_GLOBAL
    | {
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 6,
        "layer_types": None,
    },
    function_defaults={
        "hidden_activation": GELU, "rms_norm_eps": 1e-6, "attention_bias": False,
        "final_logit_softcapping": None,
    },
    own_keys=frozenset({"cache_implementation", "_sliding_window_pattern"}),
    heads_divide_hidden=True,
    rope_by_layer_type=True,
    softmax_scale=SoftmaxScale.QUERY_SCALAR,
    windows=WindowRule.PATTERN,
    refused={"use_bidirectional_attention": (False, None), "attn_logit_softcapping": (None,)},
)  # fmt: skip
GEMMA4 = Family(
    model_type="gemma4_text",
    defaults=sizes(2304, 30, 8, 4, 131_072, head_dim=256)
    | TIED
    | LOCAL_AND_GLOBAL
    | {
        "sliding_window": 512, "sliding_window_pattern": 6, "layer_types": None, "global_head_dim": 512,
        "num_global_key_value_heads": None, "attention_k_eq_v": False,
    },
    function_defaults={
        "hidden_activation": GELU, "rms_norm_eps": 1e-6, "attention_bias": False,
        "final_logit_softcapping": None, "hidden_size_per_layer_input": 256, "enable_moe_block": False,
        "use_double_wide_mlp": False, "num_experts": None, "top_k_experts": None,
    },
    own_keys=frozenset({"moe_intermediate_size", "vocab_size_per_layer_input"}),
    rope_by_layer_type=True,
    default_rope={
        "full_attention": {
            "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    softmax_scale=SoftmaxScale.ONE,
    windows=WindowRule.PATTERN_LAST_FULL,
    refused={
        "use_bidirectional_attention": (None,), "num_kv_shared_layers": (0,), "per_layer_config": (None,),
        "sliding_window_pattern": (6,),
    },
)  # fmt: skip
QWEN_VL_WINDOW = {
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 80, "layer_types": None,
}  # fmt: skip
QWEN2_VL = Family(
    model_type="qwen2_vl_text",
    defaults=sizes(8192, 80, 64, 8, 32_768) | {"rope_theta": 1_000_000.0} | QWEN_VL_WINDOW,
    function_defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5},
    heads_divide_hidden=True,
    head_dim_is_given=False,
    rope_type_names={"mrope": "default"},
    mrope_sections=(16, 24, 24),
    windows=WindowRule.FROM_LAYER,
    refused={"mrope_interleaved": (False,)},
)
QWEN2_5_VL = Family(
    model_type="qwen2_5_vl_text",
    defaults=sizes(8192, 80, 64, 8, 32_768) | {"rope_theta": 1_000_000.0} | QWEN_VL_WINDOW,
    function_defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5},
    heads_divide_hidden=True,
    head_dim_is_given=False,
    rope_type_names={"mrope": "default"},
    mrope_sections=(16, 24, 24),
    windows=WindowRule.FROM_LAYER,
    refused={"mrope_interleaved": (False,)},
)
QWEN3_VL = Family(
    model_type="qwen3_vl_text",
    defaults=sizes(4096, 32, 32, 32, 128_000, head_dim=128) | {"rope_theta": 500_000.0},
    function_defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False},
    rope_type_names={"mrope": "default"},
    mrope_sections=(24, 20, 20),
    mrope_interleaved=True,
    refused={"mrope_interleaved": (True,)},
)
GEMMA_AND_VISION = (GEMMA, GEMMA2, GEMMA3, GEMMA4, QWEN2_VL, QWEN2_5_VL, QWEN3_VL)
