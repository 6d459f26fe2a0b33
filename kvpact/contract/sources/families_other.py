"""Families that turn part of a head, pair adjacent lanes or store latent rows, and foreign ones."""

from __future__ import annotations

from kvpact.contract.sources.family import Family, RotatedLayers, SoftmaxScale, WindowRule, sizes
from kvpact.types import LaneOrder

ADJACENT = LaneOrder.ADJACENT
TIED = {"tie_word_embeddings": True}
WITHOUT_PROPORTIONAL = ("default", "dynamic", "linear", "llama3", "longrope", "yarn")
EARLY = ("default", "dynamic", "linear")
GPT_ALIASES = {
    "n_positions": "max_position_embeddings", "n_embd": "hidden_size", "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers", "n_inner": "intermediate_size",
}  # fmt: skip

PHI = Family(
    model_type="phi",
    defaults=sizes(2048, 24, 32, None, 2048),
    function_defaults={"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "qk_layernorm": False},
    partial_rotation=0.5,
    rope_types=WITHOUT_PROPORTIONAL,
)
PHI3 = Family(
    model_type="phi3",
    defaults=sizes(3072, 32, 32, None, 4096)
    | {"original_max_position_embeddings": 4096, "sliding_window": None},
    function_defaults={"hidden_act": "silu", "rms_norm_eps": 1e-5},
    partial_rotation=1.0,
    rope_types=("default", "longrope"),
    rope_type_names={"su": "longrope", "yarn": "longrope"},
    windows=WindowRule.ALL,
)
GPT_NEOX = Family(
    model_type="gpt_neox",
    defaults=sizes(6144, 44, 64, None, 2048),
    function_defaults={
        "hidden_act": "gelu", "layer_norm_eps": 1e-5, "use_parallel_residual": True, "attention_bias": True,
    },
    heads_divide_hidden=True,
    head_dim_is_given=False,
    shares_kv_heads=False,
    partial_rotation=0.25,
)  # fmt: skip
GPTJ = Family(
    model_type="gptj",
    defaults=sizes(4096, 28, 16, None, 2048) | {"rotary_dim": 64},
    function_defaults={"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
    aliases=GPT_ALIASES,
    heads_divide_hidden=True,
    head_dim_is_given=False,
    shares_kv_heads=False,
    partial_rotation=1.0,
    rope_types=("default",),
    weight_lane_order=ADJACENT,
    cache_lane_order=ADJACENT,
    refused={"rotary": (True,), "rope_theta": (10_000.0,)},
    own_keys=frozenset({"scale_attn_weights", "task_specific_params", "gradient_checkpointing"}),
)  # fmt: skip
STABLELM = Family(
    model_type="stablelm",
    defaults=sizes(2560, 32, 32, 32, 4096),
    function_defaults={
        "hidden_act": "silu", "layer_norm_eps": 1e-5, "use_qkv_bias": False, "qk_layernorm": False,
        "use_parallel_residual": False,
    },
    heads_divide_hidden=True,
    head_dim_is_given=False,
    partial_rotation=0.25,
    rope_types=WITHOUT_PROPORTIONAL,
)  # fmt: skip
GLM_FUNCTION = {"hidden_act": "silu", "rms_norm_eps": 1.5625e-7, "attention_bias": True}
GLM = Family(
    model_type="glm",
    defaults=sizes(4096, 40, 32, 2, 131_072, head_dim=128),
    function_defaults=GLM_FUNCTION,
    partial_rotation=0.5,
    weight_lane_order=ADJACENT,
    cache_lane_order=ADJACENT,
)
GLM4 = Family(
    model_type="glm4",
    defaults=sizes(4096, 40, 32, 2, 131_072, head_dim=128),
    function_defaults=GLM_FUNCTION,
    partial_rotation=0.5,
    weight_lane_order=ADJACENT,
    cache_lane_order=ADJACENT,
)
GLM4_MOE = Family(
    model_type="glm4_moe",
    defaults=sizes(4096, 46, 96, 8, 131_072),
    function_defaults={
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False, "num_experts_per_tok": 8,
        "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False,
    },
    own_keys=frozenset({"moe_intermediate_size"}),
    partial_rotation=0.5,
)  # fmt: skip
MINIMAX_M2 = Family(
    model_type="minimax_m2",
    defaults=sizes(3072, 62, 48, 8, 196_608, head_dim=128) | {"rope_theta": 5_000_000.0},
    function_defaults={
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "num_experts_per_tok": 8, "num_local_experts": 256,
    },
    partial_rotation=1.0,
)  # fmt: skip
COHERE = Family(
    model_type="cohere",
    defaults=sizes(8192, 40, 64, None, 8192) | TIED | {"rope_theta": 500_000.0},
    function_defaults={
        "hidden_act": "silu", "layer_norm_eps": 1e-5, "attention_bias": False, "use_qk_norm": False,
        "logit_scale": 0.0625,
    },
    weight_lane_order=ADJACENT,
    cache_lane_order=ADJACENT,
)  # fmt: skip
COHERE2 = Family(
    model_type="cohere2",
    defaults=sizes(8192, 40, 64, None, 8192)
    | TIED
    | {"sliding_window": 4096, "sliding_window_pattern": 4, "layer_types": None},
    function_defaults={
        "hidden_act": "silu", "layer_norm_eps": 1e-5, "attention_bias": False, "logit_scale": 0.0625,
    },
    head_dim_is_given=False,
    rotated=RotatedLayers.WINDOWED,
    windows=WindowRule.PATTERN,
    weight_lane_order=ADJACENT,
    cache_lane_order=ADJACENT,
)  # fmt: skip
FALCON = Family(
    model_type="falcon",
    defaults=sizes(4544, 32, 71, None, 2048) | TIED,
    function_defaults={
        "layer_norm_epsilon": 1e-5, "new_decoder_architecture": False, "multi_query": True,
        "parallel_attn": True, "bias": False, "activation": "gelu", "num_ln_in_parallel_attn": None,
    },
    own_keys=frozenset({"ffn_hidden_size", "num_kv_heads", "apply_residual_connection_post_layernorm"}),
    aliases={"n_embed": "hidden_size"},
    heads_divide_hidden=True,
    head_dim_is_given=False,
    refused={"alibi": (False, None)},
)  # fmt: skip
LATENT_DIMS = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
LATENT_KEYS = frozenset(
    {"q_lora_rank", "qk_head_dim", "moe_intermediate_size", "moe_layer_freq", "ep_size", "aux_loss_alpha"}
)
DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    defaults=sizes(4096, 32, 32, None, 2048) | LATENT_DIMS,
    function_defaults={
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False,
        "first_k_dense_replace": 0, "n_group": None, "n_routed_experts": 64, "n_shared_experts": 2,
        "routed_scaling_factor": 1.0, "topk_group": None, "topk_method": "greedy", "norm_topk_prob": False,
        "num_experts_per_tok": None,
    },
    own_keys=LATENT_KEYS | {"scoring_func", "seq_aux"},
    aliases={"num_experts": "n_routed_experts"},
    heads_divide_hidden=True,
    latent=True,
    shares_kv_heads=False,
    softmax_scale=SoftmaxScale.LATENT,
    weight_lane_order=ADJACENT,
    cache_lane_order=ADJACENT,
)  # fmt: skip
DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    defaults=sizes(7168, 61, 128, 128, 4096) | LATENT_DIMS | {"rope_interleave": True},
    function_defaults={
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "first_k_dense_replace": 3,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
        "topk_group": 4, "norm_topk_prob": True, "num_experts_per_tok": 8,
    },
    own_keys=LATENT_KEYS | {"scoring_func", "seq_aux", "topk_method"},
    aliases={"num_local_experts": "n_routed_experts"},
    latent=True,
    shares_kv_heads=False,
    softmax_scale=SoftmaxScale.LATENT,
    weight_lane_order=ADJACENT,
)  # fmt: skip

CHATGLM = Family(
    model_type="chatglm",
    defaults={"rope_theta": 10_000.0, "rope_ratio": 1, "multi_query_attention": False, "head_dim": None},
    function_defaults={
        "layernorm_epsilon": None, "rmsnorm": None, "add_bias_linear": None, "add_qkv_bias": None,
        "apply_residual_connection_post_layernorm": None, "post_layer_norm": None,
    },
    own_keys=frozenset({"multi_query_group_num", "ffn_hidden_size", "padded_vocab_size", "rope_ratio"}),
    aliases={
        "num_layers": "num_hidden_layers", "kv_channels": "head_dim", "seq_length": "max_position_embeddings",
    },
    transformers_has=False,
    partial_rotation=0.5,
    rope_types=("default",),
    weight_lane_order=ADJACENT,
    cache_lane_order=ADJACENT,
    refused={"original_rope": (True,)},
)  # fmt: skip
INTERNLM2 = Family(
    model_type="internlm2",
    defaults={"rope_theta": 10_000.0, "num_key_value_heads": None, "head_dim": None},
    function_defaults={"hidden_act": "silu", "rms_norm_eps": 1e-6, "bias": True},
    transformers_has=False,
    heads_divide_hidden=True,
    head_dim_is_given=False,
    rope_types=EARLY,
)
MINICPM = Family(
    model_type="minicpm",
    defaults={"rope_theta": 10_000.0, "num_key_value_heads": None, "head_dim": None},
    function_defaults={
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "attention_bias": False, "scale_emb": 1,
        "dim_model_base": 1, "scale_depth": 1,
    },
    transformers_has=False,
    heads_divide_hidden=True,
    head_dim_is_given=False,
    rope_types=EARLY,
)  # fmt: skip
PHI_MSFT = Family(
    model_type="phi-msft",
    defaults={"rope_theta": 10_000.0, "num_key_value_heads": None, "head_dim": None},
    function_defaults={"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
    own_keys=frozenset({"flash_attn", "flash_rotary", "fused_dense"}),
    aliases=GPT_ALIASES | {"n_head_kv": "num_key_value_heads"},
    transformers_has=False,
    heads_divide_hidden=True,
    head_dim_is_given=False,
    partial_rotation=1.0,
    rotary_dim_is_required=True,
    rope_types=("default",),
)
OTHER = (
    PHI, PHI3, GPT_NEOX, GPTJ, STABLELM, GLM, GLM4, GLM4_MOE, MINIMAX_M2, COHERE, COHERE2, FALCON,
    DEEPSEEK_V2, DEEPSEEK_V3, CHATGLM, INTERNLM2, MINICPM, PHI_MSFT,
)  # fmt: skip
