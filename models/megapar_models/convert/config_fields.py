"""The kinds of the fields of a config.json that families read. All are checked before a family reads one."""

from collections.abc import Iterator, Mapping
from typing import Any

from megapar_models.convert.typed_fields import (
    COUNT,
    FLAG,
    LIST,
    NAMES,
    NUMBER,
    NUMBERS,
    OBJECT,
    TEXT,
    WHOLE,
    Kind,
    either,
    problems,
    whole_up_to,
)
from megapar_models.windows import FULL, SLIDING

# A list of as many layers or experts must end.
_COUNTED = whole_up_to(10_000)

_TEXTS = (
    *("model_type", "hidden_act", "hidden_activation", "activation", "activation_function", "scoring_func"),
    *("mlp_hidden_act", "normalization_function", "score_func"),
    *("expert_selection_fn", "shared_expert_combination_strategy"),
    *("topk_method", "norm_type", "qk_norm_type", "position_embedding_type", "order_of_interleaved_layers"),
)
_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_nextn_predict_layers", "num_mtp_layers"),
    "mtp_num_hidden_layers",
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_shared_experts"),
    "num_dense_layers",
    "moe_top_k",
    *("moe_num_shared_experts", "n_group", "topk_group", "num_experts_per_tok", "moe_k", "first_k_dense_replace"),
    *("num_expert_group", "num_experts_per_token", "num_shared_experts", "num_kv_shared_layers", "top_k_experts"),
)
# Others are divided by these.
_SIZES = (
    *("hidden_size", "n_embd", "d_model", "vocab_size", "num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_n_heads",
    *("attention_heads", "max_position_embeddings", "max_seq_len", "seq_length"),
    *("n_positions", "original_max_position_embeddings"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_conv_kernel_dim", "full_attention_interval"),
    *("conv_L_cache", "block_multiple_of"),
    *("model_max_length", "layer_group_size", "prefix_dense_sliding_window_pattern"),
    "floor_scale",
)
_WHOLES = (
    *("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"),
    *("num_key_value_heads", "num_kv_heads", "head_dim", "kv_channels"),
    *("attention_head_dim", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "word_embed_proj_dim"),
    *("kv_lora_rank", "q_lora_rank", "rotary_dim", "sliding_window", "sliding_window_size", "max_window_layers"),
    *("decoder_sparse_step", "shared_expert_intermediate_size", "shared_intermediate_size"),
    *("moe_layer_end_index", "moe_layer_interval", "moe_layer_start_index", "no_rope_layer_interval", "layer_switch"),
    *("num_ln_in_parallel_attn", "window_size", "expansion_ratio"),
    *("block_ff_dim", "block_dim", "conv_dim", "conv_dim_out"),
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "mamba_d_ssm", "mamba_num_heads"),
    *("mamba_head_dim", "n_groups", "ssm_state_size", "state_size", "conv_kernel", "attn_rotary_emb"),
    *("moe_latent_size", "moe_shared_expert_intermediate_size"),
    *("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"),
    *("num_attention_groups", "share_expert_dim", "share_expert_dims", "num_sliding_attention_heads"),
    *("linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim", "short_conv_kernel_size"),
    *("dim_model_base", "attention_chunk_size", "interleave_moe_layer_step", "intermediate_size_mlp"),
    *("global_head_dim", "num_global_key_value_heads", "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
    *("global_attn_every_n_layers", "prefix_dense_intermediate_size", "intermediate_multiple_size"),
)
_NUMBERS = (
    *("attention_dropout", "attn_pdrop", "dropout", "embd_pdrop", "embedding_dropout", "hidden_dropout", "layerdrop"),
    *("emb_pdrop", "embedding_fraction"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout"),
    *("resid_pdrop", "summary_first_dropout", "resid_dropout", "embed_dropout", "residual_dropout"),
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier"),
    *("attn_logit_softcapping", "final_logit_softcapping", "clip_qkv", "init_std", "initializer_range"),
    *("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon", "rms_norm_eps", "logit_scale"),
    *("logits_scaling", "moe_norm_min", "partial_rotary_factor", "query_pre_attn_scalar", "rope_local_base_freq"),
    *("rotary_emb_base", "rotary_pct", "routed_scaling_factor", "router_aux_loss_coef"),
    *("moe_routed_scaling_factor", "moe_router_logit_softcapping"),
    *("softmax_scale", "moe_jitter_eps", "moe_loss_weight", "moe_normalize_expert_weights"),
    *("attention_value_scale", "layernorm_epsilon", "swa_rope_theta", "moe_router_scaling_factor"),
    "block_ffn_dim_multiplier",
    *("router_jitter_noise", "swiglu_alpha", "swiglu_limit", "mamba_expand", "expand"),
    *("attention_in_multiplier", "attention_out_multiplier", "key_multiplier", "lm_head_multiplier"),
    *("ssm_in_multiplier", "ssm_out_multiplier"),
    *("kda_lower_bound", "output_dropout", "route_scale", "router_scaling_factor"),
    *("embedding_initializer_range", "scale_emb", "scale_depth", "attn_scale"),
    "pad_token_id",  # some files have -1
)
_FLAGS = (
    *("add_cross_attention", "alibi", "attention_bias", "attention_out_bias", "bias", "do_layer_norm_before"),
    *("enable_bias", "is_decoder", "is_encoder_decoder", "layer_norm_elementwise_affine", "mlp_bias", "multi_query"),
    *("new_decoder_architecture", "norm_topk_prob", "output_router_logits", "parallel_attn", "qk_layernorm"),
    *("qkv_bias", "rope_interleave", "scale_attn_by_inverse_layer_idx", "scale_attn_weights"),
    *("tie_word_embeddings", "use_bias", "use_parallel_residual", "use_qk_norm"),
    *("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"),
    *("mamba_conv_bias", "mamba_proj_bias", "mamba_norm_before_gate", "mamba_rms_norm", "projectors_bias"),
    *("use_conv_bias", "residual_in_fp32", "scale_embedding"),
    *("apply_residual_connection_post_layernorm", "slow_but_exact", "no_bias", "learned_pos_emb"),
    *("use_embedding_sharing", "use_qkv_bias", "use_rotary_pos_emb", "use_routing_bias", "use_sliding_window"),
    *("linear_allow_neg_eigval", "attn_output_gate"),
    *("block_auto_adjust_ff_dim", "block_use_swiglu", "conv_bias", "tie_embedding", "use_attention_gate"),
    *("use_expert_bias", "use_pos_enc", "use_sandwich_norm"),
    *("moe_renormalize", "kda_safe_gate", "for_llm_compressor"),
    "moe_apply_router_weight_on_input",
    *("add_full_attention_sink_bias", "add_swa_attention_sink_bias"),
    *("enable_moe_fp32_combine", "mup_enabled", "route_norm", "use_post_norm"),
    *("use_moe", "use_head_wise_attn_gate", "use_moe_router_bias", "norm_expert_weight", "zero_centered", "sink"),
)

# Objects of options that other files have beside the others.
_OBJECTS = ("attn_config", "ffn_config")

KINDS: Mapping[str, Kind] = {
    **dict.fromkeys(_TEXTS, TEXT),
    **dict.fromkeys(_COUNTS, _COUNTED),
    **dict.fromkeys(_SIZES, COUNT),
    **dict.fromkeys(_WHOLES, WHOLE),
    **dict.fromkeys(_NUMBERS, NUMBER),
    **dict.fromkeys(_FLAGS, FLAG),
    **dict.fromkeys(("layer_types", "mlp_layer_types", "architectures", "gating_types"), NAMES),
    **dict.fromkeys(("mlp_only_layers", "no_rope_layers", "moe_layers"), NUMBERS),
    "full_attn_idxs": NUMBERS,
    "num_attention_heads_per_layer": NUMBERS,
    "hybrid_layer_pattern": NUMBERS,
    "rope_theta": either(NUMBER, LIST),
    **dict.fromkeys(("swiglu_limits", "swiglu_limits_shared", "partial_rotary_factors", "use_rope_layers"), LIST),
    "is_moe_layer": LIST,
    "yarn_only_types": NAMES,
    "moe_layers_enum": either(TEXT, NUMBERS),
    **dict.fromkeys(("attention_other_setting", "per_layer_config"), OBJECT),
    **dict.fromkeys(("gating", "use_bidirectional_attention"), either(FLAG, TEXT)),
    "attn_temperature_tuning": either(FLAG, WHOLE),  # 4 in the published files of Llama 4
    "attn_layer_indices": NUMBERS,
    **{"layers_block_type": NAMES, "attention_layers": NAMES, "attention_types": LIST},
    "mamba_d_head": either(WHOLE, TEXT),
    "hybrid_override_pattern": TEXT,
    **dict.fromkeys(("time_step_limit", "mlp_multipliers", "ssm_multipliers"), LIST),
    "layer_rope_theta": LIST,
    **dict.fromkeys(("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"), LIST),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "quantization_config", "text_config"), OBJECT),
    "dual_chunk_attention_config": OBJECT,
    "linear_attn_config": OBJECT,
    **dict.fromkeys(_OBJECTS, OBJECT),
    "ffn_act_fn": OBJECT,
    "sliding_window_pattern": either(WHOLE, TEXT),
    "moe_layer_freq": either(WHOLE, NUMBERS),
    **dict.fromkeys(("moe_intermediate_size", "moe_topk", "num_shared_expert"), either(WHOLE, NUMBERS)),
}
_OF_ROPE: Mapping[str, Kind] = {
    **dict.fromkeys(("rope_type", "type"), TEXT),
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), NUMBER),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim", "partial_rotary_factor", "alpha"), NUMBER),
    **dict.fromkeys(("original_max_position_embeddings", "max_position_embeddings"), COUNT),
    **dict.fromkeys((FULL, SLIDING), OBJECT),
    "llama_4_scaling_beta": NUMBER,
    "mrope_section": NUMBERS,
    "mrope_interleaved": FLAG,
}


def wrong_kinds(file: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each field of a config.json with a value of another kind, also of its rotary parameters."""
    yield from problems(file, KINDS)
    for name in _OBJECTS:
        if isinstance(file.get(name), Mapping):
            yield from (f"{name}: {line}" for line in problems(file[name], KINDS))
    for name in ("rope_parameters", "rope_scaling"):
        rope = file.get(name)
        if not isinstance(rope, Mapping):
            continue
        # Gemma 3 has an object for each kind of layer.
        nested = {kind: of_kind for kind, of_kind in rope.items() if isinstance(of_kind, Mapping)}
        for where, fields in {name: rope, **{f"{name}.{kind}": of_kind for kind, of_kind in nested.items()}}.items():
            yield from (f"{where}: {line}" for line in problems(fields, _OF_ROPE))
