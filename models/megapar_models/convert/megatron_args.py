"""Megatron-LM's `args`: those with an effect on the result of a model, and the refused ones among them.

The names and defaults are those of Megatron-LM main in August 2026 (commit d98e8a6), and of its releases since 2019.
A later version may rename an option, as `apply_layernorm_1p` became `layernorm_zero_centered_gamma`. So an option is
also refused if it is switched on, is not listed here, and sounds like the model's arithmetic.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

# Options that make a model compute what ours do not. Each has the values that leave it off. None is among them, because
# a version that lacks an option does not compute it.
UNUSED: Mapping[str, tuple[Any, ...]] = {
    "activation_func_clamp_value": (None,),
    "apply_layernorm_1p": (None, False),
    "apply_residual_connection_post_layernorm": (None, False),
    "attention_output_gate": (None, False),
    "enable_mhc_connections": (None, False),
    "experimental_attention_variant": (None,),
    "glu_linear_offset": (None, 0.0),
    "heterogeneous_layers_config_encoded_json": (None,),
    "heterogeneous_layers_config_path": (None,),
    "hybrid_attention_ratio": (None, 0.0),
    "hybrid_layer_pattern": (None,),
    "hybrid_mlp_ratio": (None, 0.0),
    "hybrid_override_pattern": (None,),
    "is_hybrid_model": (None, False),
    "layernorm_zero_centered_gamma": (None, False),
    "linear_attention_freq": (None,),
    "mrope_section": (None,),
    "mtp_num_layers": (None, 0),
    "multi_latent_attention": (None, False),
    "no_rope_freq": (None,),
    "num_experts": (None, 0),
    "onnx_safe": (None, False),  # GELU by erf
    "qk_l2_norm": (None, False),
    "quick_geglu": (None, False),
    "retro_add_retriever": (None, False),
    "rotary_interleaved": (None, False),
    "rotary_percent": (None, 1.0),
    "softmax_scale": (None,),
    "softmax_type": (None, "vanilla"),
    "spec": (None, ["local"]),  # a module of layers, which may compute anything
    "use_mup": (None, False),
    "window_size": (None, (-1, -1), [-1, -1]),
}

# Options that `megatron.model_of` turns into ours, or refuses with a message of its own.
READ = frozenset(
    (
        *("bias_gelu_fusion", "group_query_attention", "layernorm_epsilon", "max_position_embeddings", "norm_epsilon"),
        *("normalization", "num_attention_heads", "openai_gelu", "position_embedding_type", "qk_layernorm"),
        *("rope_scaling_factor", "rotary_base", "rotary_seq_len_interpolation_factor", "squared_relu", "swiglu"),
        *("use_rope_scaling", "use_rotary_position_embeddings"),
    )
)

# Options whose names speak of the arithmetic although they do not change it. They are about kernels that compute the
# same, precision, initialization, training, layout, and parts of kinds of models that one of UNUSED or READ refuses.
HARMLESS = frozenset(
    (
        *("activation_offload_fraction", "add_position_embedding", "apply_query_key_layer_scaling"),
        *("apply_rope_fusion", "apply_wd_to_qk_layernorm", "attention_backend", "attention_dropout"),
        *("attention_softmax_in_fp32", "bias_swiglu_fusion", "cache_mla_latents"),
        *("create_attention_mask_in_dataloader", "disable_mamba_mem_eff_path"),
        *("ep_overlap_early_attn_memory_release", "expert_gtp_weight_remat_size", "expert_model_parallel_size"),
        *("expert_tensor_parallel_num_weight_shards", "expert_tensor_parallel_size"),
        *("fine_grained_activation_offloading", "flash_attention_version", "fp32_residual_connection", "fp8_hybrid"),
        *("fused_residual_rmsnorm", "gtp_expert_remat_nccl_ub", "head_lr_mult", "hybrid_context_parallel"),
        *("initial_loss_scale", "kitchen_attention_backend", "logit_dtype", "masked_softmax_fusion"),
        *("min_loss_scale", "min_scale", "mla_down_proj_fusion", "no_persist_layer_norm", "persist_layer_norm"),
        "original_max_position_embeddings",  # of latent attention
        *("relative_attention_max_distance", "relative_attention_num_buckets", "reset_attention_mask"),
        *("reset_position_ids", "retriever_score_scaling", "rope_type", "rotary_scaling_factor"),
        *("scaled_masked_softmax_fusion", "scaled_upper_triang_masked_softmax_fusion", "use_flash_attn"),
        *("use_fused_weighted_squared_relu", "use_grouped_gemm_for_shared_expert", "use_kitchen_attention"),
        *("use_mamba_mem_eff_path", "use_te_activation_func", "window_attn_skip_freq", "yarn_beta_fast"),
        *("yarn_beta_slow", "yarn_correction_range_round_to_int", "yarn_original_max_position_embeddings"),
    )
)

# Beginnings of names that are harmless. Some describe how something is trained, stored or logged. Others describe a
# part of the model that is absent, because one of UNUSED refuses it: experts, layers that predict further tokens, state
# spaces, scaled widths, sparse attention, retrieval, several residual streams.
_APART = re.compile(
    r"(ckpt|cuda|dino|distributed|ft|grpo|inference|langrl|lion|log|loss|muon|optimizer|overlap|recompute|rl|save"
    r"|moe|mtp|mamba|mup|dsa|retro|mhc)_"
)
# Words in names that speak of the arithmetic.
_WORDS = re.compile(
    r"(^|_)((layer|rms|qk|l2)?norm|normalization|rope|rotary|yarn|position|attention|attn|window|softmax|gated?|glu"
    r"|swiglu|geglu|gelu|relu|silu|act|activation|clamp|cap|scale|scaling|multiplier|mult|mup|hybrid|mamba|ssm|mtp"
    r"|residual|connections|moe|experts?|mla|dsa|retro|heterogeneous|logit|spec)(_|$)"
)


def unsupported(args: Mapping[str, Any], accepted: Collection[str] = ()) -> Iterator[str]:
    """Yield a line for each refused one of `args`.

    It is refused if our models cannot compute it, or if it is unknown, may change the arithmetic and is not in
    `accepted`.
    """
    for field, value in args.items():
        if field in UNUSED:
            if value not in UNUSED[field]:
                instead = "; convert a mixture of experts through Hugging Face" if field == "num_experts" else ""
                yield f"args.{field} is {value!r}: not supported{instead}"
        # Only options that are switched on: an unknown one that is off changes nothing.
        elif value and field not in accepted and _speaks_of_arithmetic(field):
            yield (
                f"args.{field} is {value!r}: this option is not known, and by its name it may change what the model "
                f"computes; if it does not, give --accept_args {field}"
            )


def _speaks_of_arithmetic(field: str) -> bool:
    known = field in READ or field in HARMLESS
    return not known and not _APART.match(field) and _WORDS.search(field) is not None
