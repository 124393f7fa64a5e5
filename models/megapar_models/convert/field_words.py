"""What fields of any config.json ask for, and what names of tensors hold, as rules of ours: data for `sketch`.

Config classes of transformers spell the same thing in several ways. A field that is not here is unknown.
"""

from collections.abc import Mapping
from typing import NamedTuple

# Our options, and the fields that say the same.
SIZES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "rms_norm_eps": (
        *("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon"),
    ),
    "hidden_act": ("hidden_act", "hidden_activation", "activation_function"),
    "tie_word_embeddings": ("tie_word_embeddings",),
    "initializer_range": ("initializer_range", "init_std"),
}
# Where null or no field follows from others.
OPTIONAL = ("num_key_value_heads", "head_dim", "initializer_range", "intermediate_size")

NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")  # if they are there

# Activations by their names at Hugging Face: the value of model.hidden_act, and those of `LayerKind.activation` alone.
ACTIVATIONS = {"silu": "silu", "swish": "silu", "relu2": "relu2"}
ACTIVATIONS |= dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_pytorch_tanh")
OF_LAYER_ALONE = ("gelu", "relu")


class Knob(NamedTuple):
    """Rules that a field sets: a part of `LayerKind`, `Ends` or `LogitRule`, and the code of its value.

    {} in the code is the option. `neutral` is the value with which the field changes nothing.
    """

    rules: tuple[str, ...]
    words: str
    neutral: bool | float
    code: str = "{}"


_BIASES = ("LayerKind.qkv_bias", "LayerKind.out_bias", "LayerKind.mlp_bias")
KNOBS: Mapping[str, Knob] = {
    "attention_bias": Knob(_BIASES[:2], "biases of attention", False),
    **dict.fromkeys(("qkv_bias", "use_qkv_bias"), Knob(_BIASES[:1], "biases of queries, keys and values", False)),
    "attention_out_bias": Knob(_BIASES[1:2], "a bias of attention's output", False),
    "mlp_bias": Knob(_BIASES[2:], "biases of the MLP", False),
    **dict.fromkeys(("use_bias", "bias", "enable_bias"), Knob(_BIASES, "biases of attention and MLP", False)),
    **dict.fromkeys(
        ("use_qk_norm", "qk_layernorm", "qk_norm"), Knob(("LayerKind.qk_norm",), "norms of queries and keys", False)
    ),
    **dict.fromkeys(
        ("use_parallel_residual", "parallel_attn"),
        Knob(("LayerKind.parallel",), "attention and MLP read the same residual stream", False),
    ),
    "clip_qkv": Knob(("LayerKind.qkv_clip",), "queries, keys and values within bounds", 0.0),
    "lm_head_bias": Knob(("Ends.head_bias",), "a bias of logits", False),
    "attention_multiplier": Knob(("LayerKind.attention_scale",), "a factor of scores", 0.0),
    "query_pre_attn_scalar": Knob(("LayerKind.attention_scale",), "a factor of scores", 0.0, "{}**-0.5"),
    "attn_logit_softcapping": Knob(("LayerKind.score_cap",), "capped scores", 0.0),
    "residual_multiplier": Knob(("LayerKind.residual_multiplier",), "a factor of both branches", 1.0),
    "embedding_multiplier": Knob(("Ends.embedding_multiplier",), "a factor of embeddings", 1.0),
    "scale_emb": Knob(("Ends.embedding_multiplier",), "a factor of embeddings", 1.0),
    "logit_scale": Knob(("LogitRule.multiplier",), "a factor of logits", 1.0),
    "logits_scaling": Knob(("LogitRule.multiplier",), "a divisor of logits", 1.0, "1 / {}"),
    "final_logit_softcapping": Knob(("LogitRule.cap",), "capped logits", 0.0),
}
ROTARY = ("rope_theta", "rope_scaling", "rope_parameters", "rotary_emb_base")
ROTARY_PART = ("partial_rotary_factor", "rotary_pct")
# Numbers that may be null, each with the least. Families rely on it.
COUNTS = {"sliding_window": 1, "sliding_window_pattern": 1, "max_window_layers": 0, "num_nextn_predict_layers": 0}
WINDOWS = ("sliding_window", "layer_types", "use_sliding_window")
# What tensors say too: with these fields there are more norms. Layers' kinds are in layer_types, if a file has both.
TOLD_BY_TENSORS = ("use_post_norm",)
TOLD_BY_LAYER_TYPES = ("sliding_window_pattern", "global_attn_every_n_layers")
# Kinds of layers that a draft does not write, each with a family that has them.
LAYERS_BY_HAND: Mapping[str, str] = {"conv": "lfm2"}

_CONNECTIONS = ("several residual streams (hyper-connections)", "rule LayerKind.stream")
_DEPTH = ("sums of finished blocks (attention residuals)", "rule LayerKind.stream")
# Fields for rules that we have, and whose options a draft does not write: the words, and a family or a rule with them.
BY_HAND: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(("num_experts", "num_local_experts"), ("a mixture of experts", "mixtral")),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token"), ("experts of a token", "mixtral")),
    **dict.fromkeys(("moe_num_experts", "moe_k", "moe_topk"), ("a mixture of experts", "mixtral")),
    **dict.fromkeys(("moe_intermediate_size", "norm_topk_prob"), ("how experts are made and weighted", "qwen3_moe")),
    **dict.fromkeys(("mlp_only_layers", "decoder_sparse_step"), ("layers without experts", "qwen3_moe")),
    **dict.fromkeys(("n_routed_experts", "n_group", "topk_group"), ("routing in groups", "deepseek")),
    **dict.fromkeys(("scoring_func", "topk_method", "routed_scaling_factor"), ("how experts are chosen", "deepseek")),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "mlp_layer_types"), ("dense layers", "deepseek")),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), ("an expert for every token", "deepseek")),
    **dict.fromkeys(("shared_expert_intermediate_size",), ("an expert for every token", "deepseek")),
    "shared_intermediate_size": ("an expert for every token", "granitemoe"),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim"), ("multi-head latent attention", "deepseek")),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), ("multi-head latent attention", "deepseek")),
    "qk_head_dim": ("multi-head latent attention", "deepseek"),
    "rope_interleave": ("rotary pairs beside each other", "deepseek"),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval"), ("layers without positions", "smollm3")),
    "layer_rope_theta": ("a rotary base for each layer", "granite_swa"),
    "intermediate_multiple_size": ("a width of the MLP", "gpt_neox_japanese"),
    "use_post_norm": ("norms of outputs", "hyperclovax"),
    "prefix_dense_sliding_window_pattern": ("which layers have a window", "cohere2_moe"),
    "prefix_dense_intermediate_size": ("the width of dense layers", "cohere2_moe"),
    "expert_selection_fn": ("how experts are weighted", "cohere2_moe"),
    "shared_expert_combination_strategy": ("an expert for every token", "cohere2_moe"),
    "global_attn_every_n_layers": ("which layers have a window", "afmoe"),
    "mup_enabled": ("a factor of embeddings", "afmoe"),
    "route_scale": ("how experts are weighted", "afmoe"),
    "router_scaling_factor": ("how experts are weighted", "hy_v3"),
    "rope_local_base_freq": ("a rotary table for layers with a window", "gemma2"),
    "sliding_window_pattern": ("which layers have a window", "cohere"),
    **dict.fromkeys(("swiglu_limit", "swiglu_alpha"), ("a bound of the activation", "gpt_oss")),
    "num_nextn_predict_layers": ("layers of multi-token prediction: `Stage.mtp_rule`, or `ignored`", "glm4_moe"),
    "output_router_logits": ("a loss that balances experts", "mixtral"),
    **dict.fromkeys(("router_jitter_noise", "input_jitter_noise"), ("noise on a router's input", "mixtral")),
    **dict.fromkeys(("attention_types", "attention_layers", "window_size"), ("windows of some layers", "gpt_neo")),
    "alibi": ("scores that fall with the distance", "bloom"),
    "attn_config": ("options of attention in an object", "mpt"),
    "ffn_config": ("options of experts in an object", "dbrx"),
    "scale_embedding": ("embeddings times the root of hidden_size", "biogpt"),
    "embedding_scale": ("a factor of embeddings", "gemma"),
    "residual_scale": ("a factor of branches", "granite"),
    "moe_num_shared_experts": ("an expert for every token", "ernie4_5_moe"),
    "rotary_dim": ("a number of rotated dimensions of a head", "glm"),
    "multi_query": ("one head of keys and values", "llama"),
    "activation": ("an activation", "starcoder2"),
    **dict.fromkeys(("linear_num_key_heads", "linear_key_head_dim"), ("keys of a gated delta net", "qwen3_5")),
    **dict.fromkeys(("linear_num_value_heads", "linear_value_head_dim"), ("values of a gated delta net", "qwen3_5")),
    "linear_conv_kernel_dim": ("the short convolution of a gated delta net", "qwen3_5"),
    "full_attention_interval": ("which layers have full attention", "qwen3_5"),
    "attn_output_gate": ("a gate on attention's output", "qwen3_5"),
    "linear_allow_neg_eigval": ("states of a gated delta net that turn their sign", "olmo_hybrid"),
    **dict.fromkeys(("conv_L_cache", "conv_bias"), ("layers of short convolutions", "lfm2")),
    **dict.fromkeys(("full_attn_idxs",), ("which layers have attention", "lfm2")),
    **dict.fromkeys(("use_sandwich_norm", "use_attention_gate"), ("norms and gates of outputs", "lfm3")),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state"), ("Mamba-2", "bamba")),
    **dict.fromkeys(("mamba_d_conv", "mamba_expand", "mamba_conv_bias", "mamba_proj_bias"), ("Mamba-2", "bamba")),
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups"), ("Mamba-2", "nemotron_h")),
    "time_step_limit": ("the limit of Mamba-2's time steps", "bamba"),
    "attn_layer_indices": ("which layers have attention", "bamba"),
    "hybrid_override_pattern": ("a branch for each layer", "nemotron_h"),
    "moe_latent_size": ("experts in a latent width", "nemotron_h"),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), ("further factors", "falcon_h1")),
    **dict.fromkeys(("key_multiplier", "mlp_multipliers", "lm_head_multiplier"), ("further factors", "falcon_h1")),
    **dict.fromkeys(("linear_attn_config", "linear_head_dim", "linear_num_heads"), ("delta nets", "kimi_linear")),
    "short_conv_kernel_size": ("short convolutions", "bailing_hybrid"),
    **dict.fromkeys(("num_expert_group", "moe_renormalize"), ("how experts are chosen", "kimi_linear")),
    **dict.fromkeys(("kda_safe_gate", "kda_lower_bound"), ("the decays of delta nets", "bailing_hybrid")),
    "num_attention_heads_per_layer": ("heads of each layer", "laguna"),
    "moe_router_logit_softcapping": ("a cap of the router's logits", "laguna"),
    "moe_routed_scaling_factor": ("how experts are weighted", "laguna"),
    "attention_value_scale": ("a factor of values", "mimo_v2_flash"),
    **dict.fromkeys(("swa_num_key_value_heads", "swa_head_dim"), ("heads of layers with a window", "mimo_v2_flash")),
    "num_sliding_attention_heads": ("heads of layers with a window", "step3p5"),
    **dict.fromkeys(("swiglu_limits", "swiglu_limits_shared"), ("a bound of the activation by layer", "step3p5")),
    "gating": ("a gate on attention's output", "laguna"),
    "layer_group_size": ("which layers have latent attention", "bailing_hybrid"),
    **dict.fromkeys(("attention_chunk_size",), ("attention within chunks", "llama4")),
    **dict.fromkeys(("interleave_moe_layer_step", "moe_layers"), ("which layers have experts", "llama4")),
    **dict.fromkeys(("attn_temperature_tuning", "attn_scale", "floor_scale"), ("a factor by position", "llama4")),
    "moe_apply_router_weight_on_input": ("experts whose input is weighted", "llama4"),
    **dict.fromkeys(("scale_depth", "dim_model_base"), ("factors of branches and logits", "minicpm3")),
    **dict.fromkeys(("hc_mult", "hc_eps", "hc_sinkhorn_iters", "hc_magnitude"), _CONNECTIONS),
    **dict.fromkeys(("attn_res_block_size", "n_layers_per_attn_res_block"), _DEPTH),
    **dict.fromkeys(("num_kv_shared_layers", "attention_k_eq_v"), ("keys and values that layers share", "gemma4")),
    **dict.fromkeys(("hidden_size_per_layer_input", "vocab_size_per_layer_input"), ("inputs by layer", "gemma4")),
    **dict.fromkeys(("global_head_dim", "num_global_key_value_heads"), ("heads of layers with all keys", "gemma4")),
    **dict.fromkeys(("enable_moe_block", "top_k_experts"), ("experts beside the MLP", "gemma4")),
    "use_double_wide_mlp": ("an MLP as wide as the layer says", "gemma4"),
}
_CHOSEN_KEYS = "attention to chosen keys (a sparse indexer)"
_OF_LAYER = "numbers or widths of heads by layer"
LEARNED = "learned positions of family gpt alone"
_SHORT = "short convolutions beside attention"
_RG_LRU = "a gated linear recurrence (RG-LRU)"
_RWKV = "a recurrence by decays of time (RWKV)"
_MLSTM = "a matrix memory (mLSTM)"
_LIGHTNING = "linear attention with decays (lightning)"
_FACTORS = "learned factors of the residual stream"
_CCA = "queries and keys of a convolution (CCA)"
_HASHED = "attention within chunks and hash buckets"
_STREAMS = "several residual streams (hyper-connections)"
_PER_LAYER = "embeddings for each layer (per-layer inputs)"
_OTHER_SEQUENCE = "attention to another sequence"
_BIAS_OF_SCORES = "positions by a bias of scores"
_BYTES = "patches of bytes"
_NGRAMS = "embeddings of n-grams"
_SHARED_LAYERS = "weights that several layers share"
# Beginnings of fields for what no rule here computes. The first that fits is said.
MISSING: Mapping[str, str] = {
    "conv_kernel_size": _SHORT,
    **dict.fromkeys(("mamba_", "ssm_", "state_size", "time_step_", "conv_", "dt_rank"), "a state-space mixer"),
    **dict.fromkeys(("expand", "mixer_rms_eps", "use_mamba", "use_associative_scan"), "a state-space mixer"),
    **dict.fromkeys(("n_mamba_heads", "hidden_mamba_act", "use_conv_bias"), "a state-space mixer"),
    **dict.fromkeys(("linear_", "full_attn_", "short_conv"), "linear attention"),
    **dict.fromkeys(("attn_layer_", "layers_block_type"), "layers of two kinds of mixers"),
    **dict.fromkeys(("index_", "indexer_"), _CHOSEN_KEYS),
    **dict.fromkeys(("compress_r", "o_groups", "o_lora_rank"), "keys of compressed tokens, and a grouped output"),
    **dict.fromkeys(("position_buckets", "position_bias", "d_rel", "rel_"), _BIAS_OF_SCORES),
    "relative_attention": _BIAS_OF_SCORES,
    **dict.fromkeys(("per_layer_config", "swa_num", "swa_head_dim"), _OF_LAYER),
    "hc_": _STREAMS,
    **dict.fromkeys(("altup_",), "several residual streams (AltUp)"),
    **dict.fromkeys(("laurel_",), "a branch of low rank (LAuReL)"),
    **dict.fromkeys(("activation_sparsity",), "an activation of the largest numbers alone"),
    **dict.fromkeys(("ngram_", "heads_per_ngram", "split_ngram", "make_ngram", "ple_"), _NGRAMS),
    **dict.fromkeys(("qk_l2_clip",), "a clip of queries and keys"),
    "zero_expert_": "experts that are the identity, and experts added one attention later (a shortcut)",
    **dict.fromkeys(("router_hidden_size",), "a router with layers of its own"),
    **dict.fromkeys(("shared_expert_sink",), "a shared expert that is weighted"),
    **dict.fromkeys(("expert_layer_",), "experts in some layers"),
    "gated_norm_rank": "norms with a gate of low rank",
    **dict.fromkeys(("mlp_gate_softcap", "mlp_up_softcap"), "a cap within the MLP"),
    **dict.fromkeys(("log_scaling_",), "a temperature of scores by position"),
    **dict.fromkeys(("mlp_alpha_factor", "mlp_beta_factor", "logits_mup_width"), "further factors"),
    **dict.fromkeys(("use_bidirectional_attention", "prefix_lm", "prompt_"), "attention to later tokens"),
    "apply_residual_connection_post_layernorm": "a residual stream behind the norm",
    **dict.fromkeys(("H_cycles", "L_cycles", "L_bp_cycles"), "layers that run several times"),
    **dict.fromkeys(("num_mem_blocks", "hybrid_layer_ids", "use_shared_attention_adapter"), _SHARED_LAYERS),
    **dict.fromkeys(("cca_",), _CCA),
    **dict.fromkeys(("lru_width", "block_types"), _RG_LRU),
    **dict.fromkeys(("rescale_every",), _RWKV),
    **dict.fromkeys(("qk_dim_factor", "chunkwise_kernel", "gate_soft_cap"), _MLSTM),
    **dict.fromkeys(
        ("num_hashes", "lsh_", "local_attn_chunk", "attn_layers"), "attention within chunks and hash buckets"
    ),
    "axial_pos": LEARNED,
    **dict.fromkeys(("lambda_std_dev",), "differential attention"),
    "keep_window_size": "a mask that depends on the values",
    "cross_attention_layers": _OTHER_SEQUENCE,
    "segment_types": "embeddings of segments",
    **dict.fromkeys(("patch", "encoder_hash", "cross_attn_k"), _BYTES),
}
# Beginnings of names of tensors, or of the modules above them, that no rule here has. The first that fits is said.
OTHER_TENSORS: Mapping[str, str] = {
    **dict.fromkeys(("wpe", "embed_positions", "position_embeddings", "positions_embed"), LEARNED),
    **dict.fromkeys(("hc_", "attn_hyper_connection", "mlp_hyper_connection", "hyper_connection"), _STREAMS),
    "altup": "several residual streams (AltUp)",
    "laurel": "a branch of low rank (LAuReL)",
    **dict.fromkeys(("self_attn.indexer", "attn.indexer"), _CHOSEN_KEYS),
    **dict.fromkeys(("attn.compressor", "attn.wo_a", "attn.wo_b"), "keys of compressed tokens, and a grouped output"),
    **dict.fromkeys(("embed_tokens_per_layer", "per_layer_", "post_per_layer_input_norm", "layer_scalar"), _PER_LAYER),
    **dict.fromkeys(("shared_transf", "linear.", "mamba_decoder"), _SHARED_LAYERS),
    **dict.fromkeys(("mamba", "mixer."), "a state-space mixer"),
    **dict.fromkeys(("self_attn.A.", "self_attn.dt_proj"), "a mask that depends on the values"),
    **dict.fromkeys(("temporal_block.rg_lru", "temporal_block.conv_1d", "temporal_block.linear"), _RG_LRU),
    **dict.fromkeys(
        ("attention.time_", "feed_forward.time_", "attention.receptance", "feed_forward.receptance"), _RWKV
    ),
    "mlstm_layer": _MLSTM,
    **dict.fromkeys(("self_attn.diagonal_decay", "self_attn.output_gate", "self_attn.norm"), _LIGHTNING),
    "self_attn.lambda_": "differential attention",
    "self_attn.softmax_offset": "an offset in the softmax of scores",
    **dict.fromkeys(("input_residual", "post_attention_residual", "post_mlp_residual", "input_hidden"), _FACTORS),
    **dict.fromkeys(("encoder_hash", "local_encoder", "local_decoder", "global_transformer", "patch"), _BYTES),
    "cross_attn": _OTHER_SEQUENCE,
    "segment_embedding": "embeddings of segments",
    **dict.fromkeys(("position_bias", "self_attn.rel_logits", "self_attn.r_proj"), _BIAS_OF_SCORES),
    **dict.fromkeys(("attn.rel_", "attn.wr_du"), _BIAS_OF_SCORES),
    **dict.fromkeys(("H_module", "L_module", "z_L_init"), "layers that run several times"),
    **dict.fromkeys(("attn_sconv", "mlp_sconv", "self_attn.k_sconv", "self_attn.v_sconv"), _SHORT),
    **dict.fromkeys(("attn.k_sconv", "attn.v_sconv"), _SHORT),
    **dict.fromkeys(("self_attn.qkv_proj.conv", "self_attn.qkv_proj.v_proj", "self_attn.qk_norm.temp"), _CCA),
    **dict.fromkeys(("input_layernorm.W_", "post_attention_layernorm.W_"), "norms with a gate of low rank"),
    **dict.fromkeys(("attn.attn_sink_proj", "attn.q_l2_clip"), "sinks of a projection, and clips of queries"),
    "lm_head.dense": "a layer between the last norm and the head",
    "attention.self_attention.query_key": _HASHED,
    "self_attention.kv_proj": "experts of attention",
    "attention.dense_bias": "a bias that one layer has",
}
# The same for tensors of rules that we have, and whose options a draft does not write: the words, and a family.
TENSORS_BY_HAND: Mapping[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("self_attn.q_a_", "self_attn.q_b_", "self_attn.kv_a_"), ("multi-head latent attention", "deepseek")
    ),
    **dict.fromkeys(("self_attn.kv_b_", "self_attn.k_rope_only"), ("multi-head latent attention", "deepseek")),
    **dict.fromkeys(
        ("self_attn.sinks", "self_attn.attention_sink", "self_attn.learnable_sink", "attn.attn_sink."),
        ("a sink in the softmax of each head", "gpt_oss"),
    ),
    **dict.fromkeys(
        ("self_attn.gate_proj", "self_attn.g_proj", "self_attn.linear_gate", "attn.gate_attn", "self_attn.gate_bias"),
        ("a gate on attention's output", "qwen3_next"),
    ),
    **dict.fromkeys(
        ("self_attn.attn_sub_norm", "mlp.ffn_sub_norm"), ("a norm in front of a branch's last matrix", "bitnet")
    ),
    "linear_attn": ("a gated delta net", "qwen3_5"),
    **dict.fromkeys(("project_in", "project_out"), ("embeddings of another width than the layers", "opt")),
    **dict.fromkeys(("word_embeddings_layernorm", "embeddings.norm", "embed_norm"), ("a norm of embeddings", "bloom")),
    **dict.fromkeys(("attn_hc", "ffn_hc", "hc_head"), _CONNECTIONS),
    **dict.fromkeys(("self_attention_res_", "mlp_res_", "output_attn_res_", "attn_res."), _DEPTH),
}

# The options of model.moe, and the fields that say the same.
EXPERTS: Mapping[str, tuple[str, ...]] = {
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"),
    "moe_intermediate_size": ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"),
    "scoring_func": ("scoring_func", "score_func"),
    "norm_topk_prob": ("norm_topk_prob", "moe_renormalize", "route_norm"),
    "routed_scaling_factor": (
        *("routed_scaling_factor", "route_scale", "moe_routed_scaling_factor", "router_scaling_factor"),
    ),
    "n_group": ("n_group", "num_expert_group"),
    "topk_group": ("topk_group",),
    "shared_expert_intermediate_size": (
        *("shared_expert_intermediate_size", "shared_experts_intermediate_size", "shared_intermediate_size"),
        "moe_shared_expert_intermediate_size",
    ),
    "router_aux_loss_coef": ("router_aux_loss_coef", "aux_loss_coef"),
}
# Numbers of shared experts, each as wide as another expert.
SHARED_COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
# Fields of a mixture that a draft takes with the value of its model alone, and those that must be 1 for that.
EXPERTS_FIXED = ("topk_method", "output_router_logits", "moe_layer_end_index", "moe_norm_min")
EVERY_LAYER = ("decoder_sparse_step", "moe_layer_freq", "moe_layer_interval")
# A router in the folder of experts, and the bias by which it selects.
ROUTERS = ("gate", "router", "router.gate", "gate.wg")
SELECTION_BIASES = ("e_score_correction_bias", "expert_bias")
EXPERT_FOLDERS = ("mlp", "feed_forward", "block_sparse_moe", "moe", "ffn", "shared_mlp")

# Our modules of a layer, and their last names in files. Several of ours in one of theirs are divided by spaces.
ATTENTION: Mapping[str, tuple[str, ...]] = {
    "q": ("q_proj", "wq", "Wq"),
    "k": ("k_proj", "wk", "Wk"),
    "v": ("v_proj", "wv", "Wv"),
    "o": ("o_proj", "out_proj", "dense", "c_proj", "wo"),
    "q k v": ("qkv_proj", "query_key_value", "c_attn", "Wqkv"),
    "q_norm": ("q_norm", "q_layernorm", "query_layernorm"),
    "k_norm": ("k_norm", "k_layernorm", "key_layernorm"),
}
MLP: Mapping[str, tuple[str, ...]] = {
    "gate": ("gate_proj", "w1"),
    "up": ("up_proj", "w3", "fc1", "fc_in", "c_fc", "dense_h_to_4h"),
    "down": ("down_proj", "w2", "fc2", "fc_out", "c_proj", "dense_4h_to_h"),
    "gate up": ("gate_up_proj",),
}
# Whether their q, k and v lie below each other in a matrix of all three, or head by head, cannot be told of these.
GROUPED = ("query_key_value", "c_attn", "Wqkv")
NORMS: Mapping[str, tuple[str, ...]] = {
    "attention_norm": (
        *("input_layernorm", "ln_1", "norm_1", "self_attn_layer_norm", "attention_layernorm", "attn_norm"),
    ),
    "mlp_norm": (
        *("pre_feedforward_layernorm", "pre_mlp_layernorm", "feedforward_layernorm", "ln_2", "norm_2"),
        *("pre_ff_layernorm", "ffn_norm", "mlp_norm"),
        "final_layer_norm",  # OPT's; it is in each layer
    ),
    "attention_output_norm": ("post_self_attn_layernorm", "post_attn_norm", "post_norm1"),
    "mlp_output_norm": ("post_feedforward_layernorm", "post_mlp_layernorm", "post_ffn_norm", "post_norm2"),
}
# In most files the norm before the MLP. Where that has another name, or attention has none before it, the norm behind
# attention.
AMBIGUOUS_NORM = "post_attention_layernorm"
ENDS: Mapping[str, tuple[str, ...]] = {
    "embedding": ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings", "embeddings", "tokens_embed"),
    "norm": (
        "norm",
        "ln_f",
        "final_layernorm",
        "final_layer_norm",
        "norm_f",
        "final_norm",
        "layer_norm",
        "ln_out",
        "out_norm",
    ),
    "head": ("lm_head", "embed_out", "head"),
}
