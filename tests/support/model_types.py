"""Every model_type of Hugging Face that a family reads, as one table: a tiny model of each, and what is said of it.

tests/test_model_types.py compares each row with transformers, and with itself in layouts. A new model_type is a row
here. A rule that some of its files turn on is a variant, a row of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Raw = Mapping[str, Any]  # the content of a config.json


@dataclass(frozen=True, kw_only=True)
class ModelTypeCase:
    """A model_type with the fields of a tiny model. Its sizes are unequal, its eps shows, its windows are short."""

    model_type: str
    fields: Raw
    layout: Mapping[str, Any]
    """The sizes of the `tests.support.grid.Layout` that the quick suite trains."""
    unread: tuple[str, ...] = ()
    """Fields of the file that change no logits in transformers either, with this row's other fields."""
    changes: tuple[Raw, ...] = ()
    """Fields with values that say more than automatic ones. Each changes the logits, or is a bad row."""
    refused: Raw = field(default_factory=dict)
    """Fields with a value that is refused by name."""
    unlike: tuple[str, ...] = ()
    """Fields by which transformers computes something else than the model's reference, and we do not."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Names of `FORMS` that the model cannot be trained in, each with words of the line that says so."""
    saved_as: Mapping[str, str] = field(default_factory=dict)
    """Parts of names of tensors that transformers saves, each with its counterpart in files that we write."""
    written_as: str = ""
    """The model_type of the config.json that we write, if it is another name of the same model."""

    @property
    def has_experts(self) -> bool:
        objects = [value for value in self.fields.values() if isinstance(value, dict)]  # DBRX has them in one
        return any("experts" in name and value for fields in (self.fields, *objects) for name, value in fields.items())

    def forms(self) -> list[str]:
        """The names of `FORMS` that mean something for the model, refused or not."""
        return [form for form in FORMS if self.has_experts or form not in OF_EXPERTS]


# The forms of parallelism: sizes of `tests.support.grid.Layout`.
FORMS: dict[str, dict[str, Any]] = {
    "tp": {"tp": 2},
    "tp + sequence parallel": {"tp": 2, "sequence_parallel": True},
    "pp": {"pp": 2},
    "pp, interleaved": {"pp": 2, "vpp": 2, "schedule": "interleaved"},
    "pp, zero bubble": {"pp": 2, "vpp": 2, "schedule": "zb-v"},
    "cp, gather": {"cp": 2, "cp_attention": "gather"},
    "cp, ring": {"cp": 2, "cp_attention": "ring"},
    "cp, ulysses": {"cp": 2, "cp_attention": "ulysses"},
    "cp, packed": {"cp": 2, "cp_attention": "ulysses", "packed": True},
    "tp x cp": {"tp": 2, "sequence_parallel": True, "cp": 2, "cp_attention": "ring"},
    "ZeRO-3": {"dp": 2, "zero_stage": 3},
    "recompute": {"recompute": "full"},
    "ep": {"dp": 2, "ep": 2},
    "tp x ep": {"tp": 2, "dp": 2, "ep": 2, "etp": 1},
    "cp x ep": {"cp": 2, "cp_attention": "ulysses", "ep": 2},
}
OF_EXPERTS = ("ep", "tp x ep", "cp x ep")
"""Forms of mixtures of experts alone."""

# What several rows say

VOCABULARY = 131
LENGTH = 40  # of a sample: beyond every original context here
# Sizes that differ from each other, and weights that make gradients large.
SIZES: dict[str, Any] = {
    **{"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 76, "max_position_embeddings": 64, "vocab_size": VOCABULARY, "initializer_range": 0.1},
    "pad_token_id": None,  # transformers would not train the embedding of that token
}
HEADS = {**SIZES, "head_dim": 10}  # heads times width is not hidden
RMS = {**HEADS, "rms_norm_eps": 1e-3}
UNTIED = {**RMS, "tie_word_embeddings": False}
LAYER_NORM = {**SIZES, "layer_norm_eps": 1e-3, "attention_bias": True, "tie_word_embeddings": True}
DBRX: dict[str, Any] = {
    **{"d_model": 48, "n_layers": 4, "n_heads": 6, "max_seq_len": 64, "vocab_size": VOCABULARY},
    **{"initializer_range": 0.1, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0}},
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.4, "rope_theta": 700.0},
    "ffn_config": {"ffn_hidden_size": 20, "moe_num_experts": 5, "moe_top_k": 3, "moe_loss_weight": 0.05},
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
TURNS = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 8, "rope_theta": 500.0}
PLAIN = {"rope_type": "default", "rope_theta": 700.0}
# Windows are masks of whole samples.
WINDOWS = dict.fromkeys(("cp, gather", "cp, ring", "tp x cp"), "use cp_attention ulysses, or cp 1")

GELU = {"hidden_act": "gelu_pytorch_tanh"}
EPS = {"rms_norm_eps": 1e-1}
NO_DROPOUT = {"attention_dropout": 0.1}

GEMMA = {**RMS, "attention_bias": True}
GEMMA_REFUSED = {**NO_DROPOUT, "use_bidirectional_attention": True}
GEMMA_LATER: tuple[Raw, ...] = (
    *(EPS, {"hidden_activation": "silu"}, {"layer_types": TURNS}, {"sliding_window": 3}),
    *({"query_pre_attn_scalar": 13}, {"final_logit_softcapping": None}),
)
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
GEMMA4_ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.6, "rope_theta": 300.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
# Two layers hand on, and the last two read. Scores have no factor, and norms are everywhere: with wider heads, or an
# eps of 1e-3, both programs are up to 1.5e-6 from fp64.
GEMMA4: dict[str, Any] = {
    **{**SIZES, "head_dim": 6, "global_head_dim": 10, "rms_norm_eps": 1e-1, "attention_bias": True},
    **{"sliding_window": 7, "rope_parameters": GEMMA4_ROPE},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    **{"final_logit_softcapping": 3.0, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    **{"hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": VOCABULARY},
}
GEMMA4_CHANGES: tuple[Raw, ...] = (
    *({"hidden_activation": "silu"}, {"sliding_window": 3}, {"final_logit_softcapping": None}),
    {"rms_norm_eps": 3e-1},
    {"rope_parameters": {**GEMMA4_ROPE, "full_attention": {**GEMMA4_ROPE["full_attention"], "factor": 2.0}}},
)
GEMMA4_REFUSED = {**NO_DROPOUT, "use_bidirectional_attention": "all", "layer_types": ["sliding_attention"] * 4}
OF_GEMMA4_EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 20}

EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 20}
FACTORS = {"embedding_multiplier": 2.5, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 0.7}
GRANITE = {**RMS, **FACTORS, "attention_bias": True}
GRANITE_CHANGES: tuple[Raw, ...] = (GELU, {"rope_parameters": YARN}, EPS, *({name: 0.9} for name in FACTORS))

GPT_OSS_ROPE = {
    **{"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "beta_fast": 2.0, "beta_slow": 0.2},
    **{"truncate": False, "original_max_position_embeddings": 16},
}
# YaRN whose range lies between whole pairs, and two unlike mscales.
LATENT_ROPE: dict[str, Any] = {
    **{"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "beta_fast": 2.0, "beta_slow": 0.2},
    **{"original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 1.3},
}
FINE_EXPERTS: dict[str, Any] = {
    **SIZES,
    **{"intermediate_size": 44, "moe_intermediate_size": 20, "num_experts_per_tok": 4, "n_shared_experts": 2},
    **{"rms_norm_eps": 1e-3, "routed_scaling_factor": 2.5},
}
LATENT: dict[str, Any] = {
    **FINE_EXPERTS,
    **{"num_key_value_heads": 4, "n_routed_experts": 8, "rope_parameters": LATENT_ROPE},
    **{"kv_lora_rank": 14, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 7},
}
DENSE_LATENT: dict[str, Any] = {
    **{**SIZES, "num_key_value_heads": 4, "rms_norm_eps": 1e-3, "rope_parameters": LATENT_ROPE},
    **{"q_lora_rank": 18, "kv_lora_rank": 14, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 7},
}
MINICPM_FACTORS = {"scale_emb": 2.5, "scale_depth": 1.3, "dim_model_base": 20}
NAMED_OTHERWISE = ("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "max_position_embeddings")
DEEPSEEK_V3 = {
    **LATENT,
    **{"q_lora_rank": 18, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "attention_bias": True},
    "num_mtp_layers": 0,
}
# Keys of 16 numbers: the square of a shorter one is near the eps of its norm.
DELTA: dict[str, Any] = {
    **{name: value for name, value in LATENT.items() if name not in ("rope_parameters", *NAMED_OTHERWISE)},
    **{"num_hidden_layers": 5, "num_experts": 9, "num_experts_per_token": 4, "num_shared_experts": 2},
    **{"model_max_length": 64, "rms_norm_eps": 1e-2},
}
KIMI_LINEAR = {
    **DELTA,
    **{"linear_head_dim": 16, "linear_num_heads": 6, "linear_conv_kernel_dim": 3, "attention_bias": True},
    "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2, "full_attention"],
}
BAILING = {
    **DELTA,
    **{"head_dim": 16, "layer_group_size": 2, "short_conv_kernel_size": 3, "kda_lower_bound": -3.0},
    **{"num_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_mtp_layers": 0},
    "rope_parameters": PLAIN,
}
# transformers prefers what it wrote under other names.
BAILING_UNREAD = ("first_k_dense_replace", "head_dim", "layer_group_size", "num_nextn_predict_layers", "rope_theta")
BAILING_UNREAD += ("short_conv_kernel_size",)
PARTS: tuple[Raw, ...] = ({}, {"partial_rotary_factor": 0.2})
LAGUNA_ROPE: dict[str, Any] = {
    "full_attention": {**YARN, "partial_rotary_factor": 0.6},
    "sliding_attention": {**PLAIN, "partial_rotary_factor": 0.8},
}
LAGUNA: dict[str, Any] = {
    **{**RMS, "num_attention_heads_per_layer": [4, 6, 4, 6], "layer_types": TURNS, "sliding_window": 7},
    **{"mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "rope_parameters": LAGUNA_ROPE},
    **{"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "moe_routed_scaling_factor": 1.5},
    **{"shared_expert_intermediate_size": 12, "moe_router_logit_softcapping": 0.7},
}
MIMO: dict[str, Any] = {
    **{**RMS, "num_attention_heads": 8, "v_head_dim": 6, "attention_bias": True, "attention_value_scale": 0.7},
    **{"layer_types": TURNS, "sliding_window": 7, "mlp_layer_types": ["dense", "sparse", "sparse", "dense"]},
    **{"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
    **{"routed_scaling_factor": 1.5, "rope_parameters": LAGUNA_ROPE},
}
MIMO_PARTS: tuple[Raw, ...] = ({"partial_rotary_factor": 0.2}, {"partial_rotary_factor": 1.0})
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8, "rope_theta": 300.0}
LLAMA4: dict[str, Any] = {
    **{**UNTIED, "num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20},
    **{"intermediate_size_mlp": 76, "attention_chunk_size": 7, "floor_scale": 5, "attn_scale": 0.7},
    "rope_parameters": PLAIN,
}
LLAMA4_ROPE = {"rope_parameters": LLAMA3}
LLAMA3_STEP = {**LLAMA3, "high_freq_factor": 1.0}  # nothing between wavelengths that are kept and stretched ones
ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 100.0}
OF_STEP = ("mlp_layer_types", "num_sliding_attention_heads", "rope_parameters", "swiglu_limits")
STEP: dict[str, Any] = {
    **{**RMS, "num_sliding_attention_heads": 6, "layer_types": TURNS, "sliding_window": 7, "share_expert_dim": 12},
    **{"mlp_layer_types": ["dense", "sparse", "sparse", "dense"], "rope_parameters": LAGUNA_ROPE},
    **{"n_routed_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "moe_router_scaling_factor": 1.5},
    **{"swiglu_limits": [None, 0.07, 0.04, 0.0], "swiglu_limits_shared": [0.05, 0.0, 0.06, 0.0]},
    **{"query_pre_attn_scalar": 13, "pad_token_id": 0},
}
LONGROPE: dict[str, Any] = {
    **{"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
    **{"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.5, 3.0, 9.0]},
}
SCALES = {"factor": 5.0, "attention_factor": 1.4}
TEMPERATURE: dict[str, Any] = {
    **{"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "beta_fast": 2.0, "beta_slow": 0.2},
    **{"original_max_position_embeddings": 5, "mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.7},
}
MINISTRAL3 = {**RMS, "num_hidden_layers": 3, "rope_parameters": TEMPERATURE}
SILU = {"hidden_act": "silu"}
OTHER_ROPE = {"rope_parameters": PLAIN}
PHI3_REFUSED = {**NO_DROPOUT, "embd_pdrop": 0.1, "resid_pdrop": 0.1, "sliding_window": "5"}

NEOX = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"} | {"layer_norm_eps": 1e-3}
GPT2 = {
    **{"n_embd": 48, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY},
    **{"initializer_range": 0.1, "layer_norm_epsilon": 1e-3, "bos_token_id": None, "eos_token_id": 0},
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
}
WITHOUT_WIDTHS = {name: value for name, value in NEOX.items() if name not in ("intermediate_size", "layer_norm_eps")}
FALCON = {
    **WITHOUT_WIDTHS,
    **{"layer_norm_epsilon": 1e-3, "ffn_hidden_size": 76, "rope_parameters": PLAIN},
}

BLOOM = {
    **{"hidden_size": 48, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY, "initializer_range": 0.1},
    "layer_norm_epsilon": 1e-3,
}
MPT = {
    **{"d_model": 48, "n_layers": 4, "n_heads": 4, "max_seq_len": 64, "vocab_size": VOCABULARY},
    **{"initializer_range": 0.1, "layer_norm_epsilon": 1e-3},
}
LINEAR_TURNS = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
DELTA: dict[str, Any] = {
    **{**SIZES, "head_dim": 16, "rms_norm_eps": 1e-3, "tie_word_embeddings": False, "attention_bias": True},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 10, "linear_conv_kernel_dim": 3},
}
PARTIAL = {**PLAIN, "partial_rotary_factor": 0.5}
MROPE = {**PARTIAL, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
DELTA_CHANGES: tuple[Raw, ...] = (EPS, {"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}})
NO_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": None}}
OLMO_HYBRID_NORMS = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}
GATED_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
GATED_EXPERTS |= {"shared_expert_intermediate_size": 28}
CONVOLVED = ["conv", "full_attention", "conv", "conv"]
LFM2 = {**HEADS, "norm_eps": 1e-3}
LFM2_CHANGES: tuple[Raw, ...] = ({"norm_eps": 1e-1}, OTHER_ROPE, {"rope_parameters": YARN})
LFM2_MOE = {
    **{**LFM2, "intermediate_size": 44, "moe_intermediate_size": 20, "num_experts": 7, "num_experts_per_tok": 3},
    **{"layer_types": CONVOLVED, "num_dense_layers": 1},
}
LFM3_ROPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 500.0, "partial_rotary_factor": 0.6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

# A limit that cuts some time steps.
MAMBA: dict[str, Any] = {
    **{"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 7, "mamba_d_conv": 3},
    **{"mamba_expand": 2, "mamba_chunk_size": 16, "time_step_limit": [0.0, 1.4]},
}

NEMOTRON_H: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name != "num_hidden_layers"},
    **{"head_dim": 10, "layer_norm_epsilon": 1e-3, "mamba_num_heads": 6, "mamba_head_dim": 9, "n_groups": 2},
    **{"ssm_state_size": 7, "conv_kernel": 3, "chunk_size": 16},
    # transformers lets no time step be below the first, which is no part of the model, and does not read the limit.
    **{"time_step_min": 1e-30, "time_step_limit": [0.0, 1e9]},
}

FALCON_H1: dict[str, Any] = {
    **{"embedding_multiplier": 2.5, "lm_head_multiplier": 0.7, "key_multiplier": 1.3, "attention_in_multiplier": 1.2},
    **{"attention_out_multiplier": 0.8, "ssm_in_multiplier": 1.4, "ssm_out_multiplier": 0.6},
    **{"ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7], "mlp_multipliers": [1.3, 0.8]},
}

GROUPS = ({"n_group": 2, "topk_group": 1}, {"routed_scaling_factor": 1.5})

TYPES: dict[str, ModelTypeCase] = {
    # Family llama
    "llama": ModelTypeCase(
        model_type="llama",
        fields={**RMS, "attention_bias": True, "mlp_bias": True},
        layout={"tp": 2, "sequence_parallel": True},
        refused=NO_DROPOUT,
    ),
    "llama, scaled rotary": ModelTypeCase(
        model_type="llama",
        fields={
            **RMS,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0},
                **{"low_freq_factor": 1.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 16},
            },
        },
        layout={"pp": 2},
    ),
    "mistral": ModelTypeCase(
        model_type="mistral",
        fields={**RMS, "sliding_window": 5},
        layout={"pp": 2, "vpp": 2, "schedule": "interleaved"},
        refused=NO_DROPOUT,
        refuses=WINDOWS,
    ),
    "ministral": ModelTypeCase(
        model_type="ministral",
        fields={**RMS, "sliding_window": 5, "layer_types": MIXED},
        layout={"cp": 2, "cp_attention": "ulysses"},
        refuses=WINDOWS,
    ),
    "qwen2": ModelTypeCase(model_type="qwen2", fields=RMS, layout={"cp": 2, "cp_attention": "ring"}),
    "qwen2, windows": ModelTypeCase(
        model_type="qwen2",
        fields={**RMS, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        layout={"tp": 2},
        refuses=WINDOWS,
    ),
    "qwen3": ModelTypeCase(model_type="qwen3", fields=RMS, layout={"dp": 2, "zero_stage": 3}),
    "qwen3, windows": ModelTypeCase(
        model_type="qwen3",
        fields={
            **{**RMS, "attention_bias": True, "use_sliding_window": True, "sliding_window": 5},
            "layer_types": MIXED,
        },
        layout={"tp": 2, "pp": 2, "sequence_parallel": True},
        refuses=WINDOWS,
    ),
    "seed_oss": ModelTypeCase(
        model_type="seed_oss",
        fields={**RMS, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
        layout={"tp": 2, "pp": 2, "sequence_parallel": True},
        unread=("attention_dropout",),
    ),
    "internlm3": ModelTypeCase(
        model_type="internlm3",
        fields={**RMS, "attention_bias": True, "mlp_bias": True},
        layout={"tp": 2, "sequence_parallel": True},
        refused=NO_DROPOUT,
        written_as="llama",
    ),
    "internlm3, dynamic rotary": ModelTypeCase(
        model_type="internlm3",
        fields={**RMS, "rope_parameters": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 300.0}},
        layout={"pp": 2},
        refused=NO_DROPOUT,
        written_as="llama",
    ),
    "iquestcoder": ModelTypeCase(
        model_type="iquestcoder",
        fields={**RMS, "attention_bias": True, "mlp_bias": True},
        layout={"tp": 2, "sequence_parallel": True},
        refused={**NO_DROPOUT, "clip_qkv": 0.5, "use_sliding_window": True},
        written_as="llama",
    ),
    "cwm": ModelTypeCase(
        model_type="cwm",
        fields={**RMS, "sliding_window": 5, "rope_parameters": LLAMA3},
        layout={"cp": 2, "cp_attention": "ulysses"},
        changes=({"rope_parameters": YARN}, {"layer_types": TURNS}, {"sliding_window": 3}, EPS),
        refused={**NO_DROPOUT, "mlp_bias": True},
        refuses=WINDOWS,
        written_as="ministral",
    ),
    # Family gpt
    "gpt2": ModelTypeCase(
        model_type="gpt2",
        fields=GPT2,
        layout={"tp": 2, "pp": 2},
        unread=("embd_pdrop",),
    ),
    # GPT-NeoX's block, and GPT-2's
    "gpt_neox": ModelTypeCase(
        model_type="gpt_neox",
        fields={**NEOX, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        layout={"tp": 2, "sequence_parallel": True},
        unread=("attention_dropout", "hidden_dropout"),
        changes=(GELU, {"layer_norm_eps": 1e-1}, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}),
        refused={"use_parallel_residual": 1},
    ),
    "gpt_neox, one branch after the other": ModelTypeCase(
        model_type="gpt_neox",
        fields={
            **{**NEOX, "use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True},
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0},
        },
        layout={"pp": 2},
        unread=("attention_dropout", "hidden_dropout"),
    ),
    "gpt_neox_japanese": ModelTypeCase(
        model_type="gpt_neox_japanese",
        fields={
            **{name: value for name, value in NEOX.items() if name != "intermediate_size"},
            **{"intermediate_multiple_size": 2, "tie_word_embeddings": False, "attention_dropout": 0.0},
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
        },
        layout={"tp": 2, "sequence_parallel": True},
        unread=("attention_dropout", "hidden_dropout"),
        changes=(GELU, {"layer_norm_eps": 1e-1}, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}),
        refused={"intermediate_multiple_size": 0},
    ),
    "phi": ModelTypeCase(
        model_type="phi",
        fields={**NEOX, "num_key_value_heads": 2, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        layout={"tp": 2, "sequence_parallel": True},
        unread=("attention_dropout", "resid_pdrop", "embd_pdrop"),
        changes=(SILU, {"layer_norm_eps": 1e-1}),
    ),
    "phi, norms": ModelTypeCase(
        model_type="phi",
        fields={**NEOX, "qk_layernorm": True, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        layout={"tp": 2},
        unread=("attention_dropout", "resid_pdrop", "embd_pdrop"),
    ),
    "gpt_neo": ModelTypeCase(
        model_type="gpt_neo",
        fields={
            **{"hidden_size": 48, "num_layers": 4, "num_heads": 4, "intermediate_size": 76, "window_size": 5},
            **{"max_position_embeddings": 64, "vocab_size": VOCABULARY, "initializer_range": 0.1},
            **{"attention_types": [[["global", "local"], 1], [["local"], 2]], "layer_norm_epsilon": 1e-3},
        },
        layout={"tp": 2, "pp": 2},
        unread=("embed_dropout",),
        changes=(
            *({"activation_function": "relu"}, {"layer_norm_epsilon": 1e-1}, {"window_size": 3}),
            {"attention_types": [[["local", "global"], 2]], "attention_layers": ["local", "global"] * 2},
        ),
        refused={"attention_types": [[["global"], 3]], "attention_layers": ["global"] * 4},
        refuses=WINDOWS,
    ),
    "persimmon": ModelTypeCase(
        model_type="persimmon",
        fields={**NEOX, "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
        layout={"tp": 2, "pp": 2, "sequence_parallel": True},
        unread=("attention_dropout", "hidden_dropout"),
        changes=(SILU, {"layer_norm_eps": 1e-1}, {"rope_parameters": YARN | {"partial_rotary_factor": 1.0}}),
    ),
    "persimmon, no norms": ModelTypeCase(
        model_type="persimmon",
        fields={
            **{**NEOX, "qk_layernorm": False, "tie_word_embeddings": True, "hidden_act": "gelu"},
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0},
        },
        layout={"pp": 2},
        unread=("attention_dropout", "hidden_dropout"),
    ),
    "gptj": ModelTypeCase(
        model_type="gptj",
        fields={**GPT2, "rotary_dim": 6, "n_inner": 76, "tie_word_embeddings": False},
        layout={"tp": 2, "sequence_parallel": True},
        unread=("attn_pdrop", "embd_pdrop", "resid_pdrop", "n_positions"),
        changes=({"activation_function": "relu"}, {"layer_norm_epsilon": 1e-1}),
        refused={"rotary_dim": 0},
    ),
    "codegen": ModelTypeCase(
        model_type="codegen",
        fields={**GPT2, "n_head": 8, "rotary_dim": 4, "n_inner": 76, "tie_word_embeddings": False},
        layout={"tp": 2, "sequence_parallel": True},
        unread=("attn_pdrop", "embd_pdrop", "resid_pdrop", "n_positions"),
        changes=({"activation_function": "relu"}, {"layer_norm_epsilon": 1e-1}),
        refused={"rotary_dim": 0, "n_head": 6},
    ),
    "stablelm": ModelTypeCase(
        model_type="stablelm",
        fields={
            **{**NEOX, "num_key_value_heads": 2, "use_qkv_bias": True},
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
        },
        layout={"tp": 2, "sequence_parallel": True},
        unread=("attention_dropout", "hidden_dropout"),
        changes=(GELU, {"layer_norm_eps": 1e-1}),
    ),
    "stablelm, parallel": ModelTypeCase(
        model_type="stablelm",
        fields={
            **{**NEOX, "num_key_value_heads": 4, "use_parallel_residual": True},
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
        },
        layout={"pp": 2},
        unread=("attention_dropout", "hidden_dropout"),
    ),
    "stablelm, norms": ModelTypeCase(
        model_type="stablelm",
        fields={
            **{**NEOX, "num_key_value_heads": 2, "use_parallel_residual": True, "qk_layernorm": True},
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5},
        },
        layout={"tp": 2, "sequence_parallel": True},
        unread=("attention_dropout", "hidden_dropout"),
    ),
    "falcon": ModelTypeCase(
        model_type="falcon",
        fields=FALCON,
        layout={"tp": 2, "sequence_parallel": True},
        unread=("attention_dropout", "hidden_dropout"),
        changes=({"rope_parameters": YARN}, {"layer_norm_epsilon": 1e-1}, {"activation": "relu"}),
        refused={"alibi": True, "num_ln_in_parallel_attn": 2, "bias": 1},
    ),
    "falcon, two norms": ModelTypeCase(
        model_type="falcon",
        fields={**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True},
        layout={"tp": 2, "pp": 2},
        unread=("attention_dropout", "hidden_dropout", "multi_query"),
        refused={"parallel_attn": False, "num_ln_in_parallel_attn": 3},
    ),
    "falcon, whole heads": ModelTypeCase(
        model_type="falcon",
        fields={**FALCON, "multi_query": False, "parallel_attn": False, "bias": True, "tie_word_embeddings": False},
        layout={"tp": 2},
        unread=("attention_dropout", "hidden_dropout"),
    ),
    "bloom": ModelTypeCase(
        model_type="bloom",
        fields=BLOOM,
        layout={"tp": 2, "pp": 2, "sequence_parallel": True},
        unread=("attention_dropout", "hidden_dropout"),
        changes=({"layer_norm_epsilon": 1e-1},),
        refused={"apply_residual_connection_post_layernorm": True, "slow_but_exact": True},
    ),
    "bloom, six heads": ModelTypeCase(
        model_type="bloom",
        fields={**BLOOM, "n_head": 6, "tie_word_embeddings": False},
        layout={"cp": 2, "cp_attention": "ring"},
        unread=("attention_dropout", "hidden_dropout"),
    ),
    "mpt": ModelTypeCase(
        model_type="mpt",
        fields={**MPT, "attn_config": {"clip_qkv": 0.4, "softmax_scale": 0.3}},
        layout={"tp": 2, "sequence_parallel": True},
        unread=("emb_pdrop", "max_seq_len", "resid_pdrop"),
        changes=({"attn_config": {"clip_qkv": 0.2}}, {"attn_config": {"softmax_scale": 0.5}}),
        refused={"attn_config": {"alibi": False}, "no_bias": False, "norm_type": "rmsnorm", "logit_scale": 2.0},
    ),
    "mpt, six heads": ModelTypeCase(
        model_type="mpt",
        fields={**MPT, "n_heads": 6, "tie_word_embeddings": False},
        layout={"pp": 2},
        unread=("emb_pdrop", "max_seq_len", "resid_pdrop"),
    ),
    "opt": ModelTypeCase(
        model_type="opt",
        fields={
            **{name: value for name, value in WITHOUT_WIDTHS.items() if name != "initializer_range"},
            **{"ffn_dim": 76, "word_embed_proj_dim": 48, "init_std": 0.2, "dropout": 0.0},
        },
        unread=("init_std",),
        layout={"tp": 2, "pp": 2, "sequence_parallel": True},
        refused={"word_embed_proj_dim": 0, "enable_bias": False, "layerdrop": 0.1},
    ),
    "opt, narrow embeddings": ModelTypeCase(
        model_type="opt",
        fields={
            **{name: value for name, value in WITHOUT_WIDTHS.items() if name != "initializer_range"},
            **{"ffn_dim": 76, "word_embed_proj_dim": 28, "init_std": 0.2, "dropout": 0.0},
            **{"do_layer_norm_before": False, "tie_word_embeddings": True},
        },
        unread=("init_std",),
        layout={"tp": 2, "pp": 2, "sequence_parallel": True},
    ),
    "biogpt": ModelTypeCase(
        model_type="biogpt",
        fields={
            **{name: value for name, value in NEOX.items() if name != "layer_norm_eps"},
            **{"initializer_range": 0.2, **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)},
        },
        layout={"tp": 2, "pp": 2, "sequence_parallel": True},
        unread=("activation_dropout",),
        changes=({"scale_embedding": False}, GELU),
        refused={"layerdrop": 0.1},
    ),
    "xglm": ModelTypeCase(
        model_type="xglm",
        fields={
            **{"d_model": 48, "num_layers": 4, "attention_heads": 4, "ffn_dim": 76, "max_position_embeddings": 64},
            **{"vocab_size": VOCABULARY, "init_std": 0.2, "pad_token_id": None},
            **dict.fromkeys(("dropout", "attention_dropout"), 0.0),
        },
        layout={"tp": 2, "sequence_parallel": True},
        unread=("activation_dropout", "init_std"),
        changes=({"scale_embedding": False}, {"activation_function": "relu"}),
        refused={"layerdrop": 0.1, "pad_token_id": 2, "add_cross_attention": True},
    ),
    "gpt_bigcode": ModelTypeCase(
        model_type="gpt_bigcode",
        # With weights of 0.1 the gradients of q and k are so small that they are rounding.
        fields={**GPT2, "n_inner": 76, "initializer_range": 0.2},
        layout={"tp": 2, "sequence_parallel": True},
        unread=("embd_pdrop",),
        changes=({"activation_function": "relu"}, {"layer_norm_epsilon": 1e-1}),
        refused={"scale_attn_weights": False},
    ),
    "gpt_bigcode, whole heads": ModelTypeCase(
        model_type="gpt_bigcode",
        fields={**GPT2, "multi_query": False, "tie_word_embeddings": False, "initializer_range": 0.2},
        layout={"pp": 2},
        unread=("embd_pdrop",),
    ),
    # Mixtures in the manner of Mixtral
    "mixtral": ModelTypeCase(
        model_type="mixtral",
        fields={**RMS, "num_local_experts": 5, "router_aux_loss_coef": 0.05},
        layout={"dp": 2, "ep": 2},
        changes=({"num_experts_per_tok": 3},),
    ),
    "dbrx": ModelTypeCase(
        model_type="dbrx",
        fields=DBRX,
        layout={"tp": 2, "dp": 2, "ep": 2, "etp": 1},
        unread=("emb_pdrop", "max_seq_len", "resid_pdrop"),
        changes=(
            {"attn_config": {**DBRX["attn_config"], "clip_qkv": 0.2}},
            {"ffn_config": {**DBRX["ffn_config"], "moe_top_k": 2}},
            {"ffn_config": {**DBRX["ffn_config"], "moe_normalize_expert_weights": None}},
            {"ffn_config": {**DBRX["ffn_config"], "ffn_act_fn": {"name": "gelu_pytorch_tanh"}}},
            {"rope_parameters": {**YARN, "rope_theta": 700.0}},
        ),
        refused={
            "attn_config": {**DBRX["attn_config"], "rope_theta": 500.0},
            "ffn_config": {**DBRX["ffn_config"], "moe_jitter_eps": 0.01},
            **{"num_key_value_heads": 4, "tie_word_embeddings": True},
        },
    ),
    "qwen3_moe": ModelTypeCase(
        model_type="qwen3_moe",
        fields={
            **{**RMS, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
            "decoder_sparse_step": 2,
        },
        layout={"tp": 2, "dp": 2, "ep": 2, "etp": 1},
        unread=("use_sliding_window",),
        changes=({"num_experts_per_tok": 3}, {"norm_topk_prob": True}),
    ),
    "qwen2_moe": ModelTypeCase(
        model_type="qwen2_moe",
        fields={
            **{**SIZES, "rms_norm_eps": 1e-3, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20},
            **{"shared_expert_intermediate_size": 28, "mlp_only_layers": [1]},
        },
        layout={"tp": 2, "dp": 2, "ep": 2, "etp": 1},
        unread=("sliding_window",),
        changes=({"num_experts_per_tok": 2}, {"norm_topk_prob": True}, EPS, OTHER_ROPE),
        refused={**NO_DROPOUT, "decoder_sparse_step": 0},
    ),
    # Gemma
    "gemma": ModelTypeCase(
        model_type="gemma",
        fields=GEMMA,
        layout={"tp": 2, "sequence_parallel": True},
        changes=(EPS, {"hidden_act": "relu2"}, {"rope_parameters": YARN}),
        refused=GEMMA_REFUSED,
    ),
    "gemma2": ModelTypeCase(
        model_type="gemma2",
        fields={
            **{**GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0},
            "final_logit_softcapping": 3.0,
        },
        layout={"tp": 2, "pp": 2},
        changes=(*GEMMA_LATER, {"attn_logit_softcapping": None}, {"rope_parameters": YARN}),
        refused=GEMMA_REFUSED,
        refuses=WINDOWS,
    ),
    "vaultgemma": ModelTypeCase(
        model_type="vaultgemma",
        fields={
            **{**GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 7, "attn_logit_softcapping": 2.0},
            "final_logit_softcapping": 3.0,
        },
        layout={"tp": 2, "pp": 2},
        changes=(*GEMMA_LATER, {"attn_logit_softcapping": None}, {"rope_parameters": YARN}),
        refused=NO_DROPOUT,
        refuses=WINDOWS,
    ),
    "gemma3_text": ModelTypeCase(
        model_type="gemma3_text",
        fields={
            **{**GEMMA, "sliding_window": 5, "query_pre_attn_scalar": 7, "rope_parameters": GEMMA3_ROPE},
            **{"sliding_window_pattern": 3, "final_logit_softcapping": 3.0},
        },
        layout={"cp": 2, "cp_attention": "ulysses"},
        unread=("sliding_window_pattern",),
        changes=(
            *GEMMA_LATER,
            {"layer_types": None, "sliding_window_pattern": 2},
            {"rope_parameters": {"full_attention": YARN}},
        ),
        refused={**GEMMA_REFUSED, "attn_logit_softcapping": 2.0},
        refuses=WINDOWS,
    ),
    # OLMo
    "olmo": ModelTypeCase(
        model_type="olmo",
        fields={**HEADS, "attention_bias": True},
        layout={"pp": 2, "vpp": 2, "schedule": "interleaved"},
        changes=(GELU, {"rope_parameters": YARN}, {"clip_qkv": 0.3}),
        refused={**NO_DROPOUT, "clip_qkv": -0.5},
    ),
    "bitnet": ModelTypeCase(
        model_type="bitnet",
        fields={**SIZES, "rms_norm_eps": 1e-3, "attention_bias": True, "rope_parameters": PLAIN},
        layout={"tp": 2, "sequence_parallel": True},
        changes=(GELU, {"rope_parameters": YARN}, EPS, {"hidden_act": "silu"}),
        refused={**NO_DROPOUT, "quantization_config": {"quant_method": "bitnet"}, "head_dim": 10},
    ),
    "bitnet, shared heads": ModelTypeCase(
        model_type="bitnet",
        # Squared ReLU of layers behind each other makes ten times as much of what rounding leaves of the first update.
        fields={
            **{**SIZES, "num_attention_heads": 6, "num_key_value_heads": 3, "tie_word_embeddings": True},
            "hidden_act": "silu",
        },
        layout={"tp": 2, "pp": 2},
    ),
    "olmo2": ModelTypeCase(
        model_type="olmo2",
        fields={**RMS, "attention_bias": True},
        layout={"tp": 2, "sequence_parallel": True},
        changes=(GELU, {"rope_parameters": YARN}, EPS),
        refused=NO_DROPOUT,
    ),
    "olmo3": ModelTypeCase(
        model_type="olmo3",
        # With weights of 0.1 the gradients of keys are so small that they are rounding.
        fields={
            **{**RMS, "attention_bias": True, "sliding_window": 5, "initializer_range": 0.2},
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
        },
        layout={"tp": 2},
        changes=(
            *(GELU, EPS, {"sliding_window": 3}, {"layer_types": TURNS}),
            {"rope_parameters": {"full_attention": PLAIN}},
        ),
        refused=NO_DROPOUT,
        refuses=WINDOWS,
    ),
    "olmoe": ModelTypeCase(
        model_type="olmoe",
        fields={
            **{**SIZES, "rms_norm_eps": 1e-3, "attention_bias": True, "num_experts": 5, "num_experts_per_tok": 3},
            "intermediate_size": 20,
        },
        layout={"tp": 2, "ep": 2, "etp": 1},
        changes=(GELU, {"rope_parameters": YARN}, EPS, {"num_experts_per_tok": 2}, {"norm_topk_prob": True}),
        refused={**NO_DROPOUT, "clip_qkv": 0.5},
    ),
    "flex_olmo": ModelTypeCase(
        model_type="flex_olmo",
        # With an eps of 1e-3 the second step differs between layouts by rounding alone. Weights of two layouts differ
        # by 1e-6 of their norms after the first step, and their exact gradients (in fp64) by up to 1.6e-5. At equal
        # weights our gradients are within 4.6e-6 of the exact ones, and those of transformers within 4.5e-6.
        fields={
            **{**SIZES, "rms_norm_eps": 3e-2, "attention_bias": True, "num_experts": 5, "num_experts_per_tok": 3},
            "intermediate_size": 76,
        },
        layout={"tp": 2, "ep": 2, "etp": 1},
        changes=(GELU, {"rope_parameters": YARN}, EPS, {"num_experts_per_tok": 2}, {"norm_topk_prob": True}),
        refused=NO_DROPOUT,
    ),
    # Granite
    "granite_swa": ModelTypeCase(
        model_type="granite_swa",
        fields={
            **{**GRANITE, "mlp_bias": True, "sliding_window": 5, "tie_word_embeddings": False},
            **{"layer_types": MIXED, "layer_rope_theta": [300.0, 0, 50, 300.0]},
        },
        layout={"tp": 2, "sequence_parallel": True},
        changes=(*GRANITE_CHANGES, {"layer_rope_theta": [0, 0, 0, 0]}, {"layer_types": TURNS}, {"sliding_window": 3}),
        refused={**NO_DROPOUT, "layer_rope_theta": [-1.0]},
        refuses=WINDOWS,
    ),
    "granite_swa, one base": ModelTypeCase(
        model_type="granite_swa",
        fields={**RMS, "sliding_window": 5, "attention_multiplier": 0.3, "rope_parameters": YARN},
        layout={"pp": 2},
        refuses=WINDOWS,
    ),
    "granitemoe_swa": ModelTypeCase(
        model_type="granitemoe_swa",
        fields={
            **{**GRANITE, **EXPERTS, "sliding_window": 5, "shared_intermediate_size": 28},
            "layer_rope_theta": [300.0, 0, 50, 300.0],
        },
        layout={"tp": 2, "ep": 2, "etp": 1},
        changes=(*GRANITE_CHANGES, {"layer_types": TURNS}, {"num_experts_per_tok": 2}),
        refused=NO_DROPOUT,
        refuses=WINDOWS,
    ),
    "granitemoe_swa, no shared expert": ModelTypeCase(
        model_type="granitemoe_swa",
        fields={**GRANITE, **EXPERTS, "sliding_window": 5, "layer_types": TURNS, "rope_parameters": YARN},
        layout={"dp": 2, "ep": 2},
        refused=NO_DROPOUT,
        refuses=WINDOWS,
    ),
    "hyperclovax": ModelTypeCase(
        model_type="hyperclovax",
        fields={**GRANITE, "mlp_bias": True},
        layout={"tp": 2, "sequence_parallel": True},
        changes=GRANITE_CHANGES,
        refused={**NO_DROPOUT, "resid_pdrop": 0.1},
    ),
    "hyperclovax, norms before": ModelTypeCase(
        model_type="hyperclovax",
        fields={**RMS, "use_post_norm": False, "tie_word_embeddings": True},
        layout={"pp": 2},
        changes=({"attention_multiplier": 0.9},),
    ),
    "granite": ModelTypeCase(
        model_type="granite",
        fields={**GRANITE, "mlp_bias": True},
        layout={"tp": 2, "sequence_parallel": True},
        changes=GRANITE_CHANGES,
        refused=NO_DROPOUT,
    ),
    "granitemoe": ModelTypeCase(
        model_type="granitemoe",
        fields={**GRANITE, **EXPERTS},
        layout={"dp": 2, "ep": 2},
        changes=(*GRANITE_CHANGES, {"num_experts_per_tok": 2}),
        refused=NO_DROPOUT,
    ),
    "granitemoeshared": ModelTypeCase(
        model_type="granitemoeshared",
        fields={**GRANITE, **EXPERTS, "shared_intermediate_size": 28},
        layout={"dp": 2, "ep": 2, "zero_stage": 3},
        changes=(*GRANITE_CHANGES, {"num_experts_per_tok": 2}),
        refused=NO_DROPOUT,
    ),
    # Cohere
    "cohere": ModelTypeCase(
        model_type="cohere",
        fields={**LAYER_NORM, "logit_scale": 0.3, "num_key_value_heads": 1},
        layout={"tp": 2, "sequence_parallel": True},
        changes=(GELU, {"rope_parameters": YARN}, {"layer_norm_eps": 1e-1}, {"logit_scale": 0.9}),
        refused=NO_DROPOUT,
    ),
    "cohere, norms": ModelTypeCase(
        model_type="cohere",
        fields={
            **{**HEADS, "layer_norm_eps": 1e-3, "logit_scale": 0.3, "use_qk_norm": True},
            **{"num_attention_heads": 6, "num_key_value_heads": 3},
        },
        layout={"tp": 2},
        changes=(OTHER_ROPE, GELU, {"layer_norm_eps": 1e-1}, {"logit_scale": 0.9}),
        refused=NO_DROPOUT,
    ),
    "cohere2": ModelTypeCase(
        model_type="cohere2",
        fields={**LAYER_NORM, "logit_scale": 0.3, "sliding_window": 5},
        layout={"cp": 2, "cp_attention": "ulysses"},
        changes=(
            *(GELU, {"rope_parameters": YARN}, {"sliding_window": 3}, {"layer_types": TURNS}),
            *({"layer_norm_eps": 1e-1}, {"logit_scale": 0.9}, {"layer_types": None, "sliding_window_pattern": 3}),
        ),
        refused={**NO_DROPOUT, "sliding_window": None},
        refuses=WINDOWS,
    ),
    # Layers without positions
    "cohere2_moe": ModelTypeCase(
        model_type="cohere2_moe",
        fields={
            **{**HEADS, "layer_norm_eps": 1e-3, "attention_bias": True, "intermediate_size": 20, "num_experts": 5},
            **{"num_experts_per_tok": 3, "num_shared_experts": 2, "sliding_window": 5, "logit_scale": 0.7},
            **{"prefix_dense_intermediate_size": 44, "first_k_dense_replace": 2, "sliding_window_pattern": 2},
        },
        layout={"tp": 2, "dp": 2, "ep": 2, "etp": 1},
        unread=("norm_topk_prob", "rope_theta", "sliding_window_pattern"),
        changes=(
            *({"layer_norm_eps": 1e-1}, GELU, OTHER_ROPE, {"num_experts_per_tok": 2}, {"rms_norm_eps": 1e-3}),
            *({"shared_expert_combination_strategy": "sum"}, {"expert_selection_fn": "sigmoid"}),
            *({"layer_types": MIXED}, {"prefix_dense_sliding_window_pattern": 2}),
        ),
        refused={**NO_DROPOUT, "sliding_window": None, "expert_selection_fn": "none"},
        refuses=WINDOWS,
    ),
    "cohere2_moe, sigmoid": ModelTypeCase(
        model_type="cohere2_moe",
        fields={
            **{**RMS, "intermediate_size": 20, "num_experts": 5, "num_experts_per_tok": 3, "sliding_window": 5},
            **{"expert_selection_fn": "sigmoid", "norm_topk_prob": False, "tie_word_embeddings": False},
            **{"rope_parameters": YARN, "logit_scale": 0.7},
        },
        layout={"dp": 2, "ep": 2},
        unread=("layer_norm_eps", "prefix_dense_sliding_window_pattern", "rope_theta", "sliding_window_pattern"),
        changes=({"norm_topk_prob": True}, EPS),
        refused=NO_DROPOUT,
        refuses=WINDOWS,
    ),
    "smollm3": ModelTypeCase(
        model_type="smollm3",
        fields={
            **{**UNTIED, "no_rope_layers": [1, 0, 1, 1], "attention_bias": True, "mlp_bias": True},
            **{"use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED},
        },
        layout={"tp": 2, "pp": 2, "sequence_parallel": True},
        unread=("no_rope_layer_interval",),
        refuses=WINDOWS,
    ),
    "exaone4": ModelTypeCase(
        model_type="exaone4",
        # With weights of 0.1 gradients of the norms of heads are so small that they are rounding.
        fields={**RMS, "sliding_window": 5, "sliding_window_pattern": 3, "initializer_range": 0.2},
        layout={"tp": 2, "pp": 2, "sequence_parallel": True},
        unread=("sliding_window_pattern",),
        refuses=WINDOWS,
    ),
    "exaone4, no windows": ModelTypeCase(
        model_type="exaone4",
        fields={**RMS, "sliding_window": None, "layer_types": ["full_attention"] * 4, "initializer_range": 0.2},
        layout={"cp": 2, "cp_attention": "ring"},
        unread=("sliding_window_pattern",),
    ),
    # Rotary pairs beside each other, and a rotated part of each head
    "ernie4_5": ModelTypeCase(
        model_type="ernie4_5", fields={**UNTIED, "use_bias": True}, layout={"cp": 2, "cp_attention": "gather"}
    ),
    "helium": ModelTypeCase(
        model_type="helium",
        fields={**UNTIED, "attention_bias": True, "head_dim": 12},
        layout={"tp": 2},
    ),
    "phi3": ModelTypeCase(
        model_type="phi3",
        fields={**UNTIED, "sliding_window": 5, "partial_rotary_factor": 0.6},
        layout={"tp": 2, "sequence_parallel": True},
        unread=("partial_rotary_factor",),
        refuses=WINDOWS,
    ),
    "phi3, short samples": ModelTypeCase(
        model_type="phi3",
        fields={
            **{**SIZES, "rms_norm_eps": 1e-3, "num_hidden_layers": 3, "rope_parameters": LONGROPE},
            "original_max_position_embeddings": LENGTH,
        },
        layout={"tp": 2},
        changes=(
            *(GELU, EPS, {"rope_parameters": {**LONGROPE, "factor": 5.0}}),
            {"rope_parameters": {**LONGROPE, "attention_factor": 1.4}},
            {"rope_parameters": {**LONGROPE, **SCALES, "rope_type": "yarn", "rope_theta": 50.0}},
            {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.5}},
            {"original_max_position_embeddings": LENGTH - 1},
        ),
        refused=PHI3_REFUSED,
    ),
    "phi3, long samples": ModelTypeCase(
        model_type="phi3",
        fields={
            **{**SIZES, "rms_norm_eps": 1e-3, "num_hidden_layers": 3, "rope_parameters": {**LONGROPE, **SCALES}},
            # Documents alone are long too: transformers would take the other factors for a shorter one.
            "original_max_position_embeddings": 1,
        },
        layout={"pp": 2},
        changes=(
            {"original_max_position_embeddings": LENGTH},
            {"rope_parameters": {**LONGROPE, **SCALES, "long_factor": [1.5, 3.0, 5.0]}},
        ),
        refused={**PHI3_REFUSED, "hidden_act": "relu", "rms_norm_eps": "1"},
    ),
    "glm": ModelTypeCase(
        model_type="glm",
        fields={**UNTIED, "attention_bias": True, "partial_rotary_factor": 0.6},
        layout={"cp": 2, "cp_attention": "ring"},
    ),
    "glm4": ModelTypeCase(
        model_type="glm4",
        fields={**UNTIED, "attention_bias": True, "partial_rotary_factor": 0.6},
        layout={"tp": 2, "pp": 2, "sequence_parallel": True},
    ),
    "starcoder2": ModelTypeCase(
        model_type="starcoder2",
        fields={
            **{**HEADS, "norm_epsilon": 1e-3, "sliding_window": 5, "use_bias": True},
            **{"bos_token_id": 0, "eos_token_id": 0},
        },
        layout={"tp": 2, "pp": 2, "sequence_parallel": True},
        unread=("attention_dropout", "residual_dropout", "embedding_dropout"),
        refuses=WINDOWS,
    ),
    "starcoder2, no biases": ModelTypeCase(
        model_type="starcoder2",
        fields={
            **{**HEADS, "norm_epsilon": 1e-3, "sliding_window": 5, "use_bias": False},
            **{"bos_token_id": 0, "eos_token_id": 0},
        },
        layout={"dp": 2, "zero_stage": 3},
        unread=("attention_dropout", "residual_dropout", "embedding_dropout"),
        refuses=WINDOWS,
    ),
    # Ungated MLPs, and rotary embeddings scaled in ways of their own
    "nanochat": ModelTypeCase(
        model_type="nanochat",
        fields={**SIZES, "rms_norm_eps": 1e-2, "attention_bias": True, "final_logit_softcapping": 3.0},
        layout={"tp": 2, "sequence_parallel": True},
        changes=(SILU, EPS, {"rope_parameters": YARN}, {"final_logit_softcapping": None}),
        refused=NO_DROPOUT,
    ),
    "jais2": ModelTypeCase(
        model_type="jais2",
        fields={**HEADS, "layer_norm_eps": 1e-3},
        layout={"tp": 2, "sequence_parallel": True},
        changes=(SILU, {"layer_norm_eps": 1e-1}, {"rope_parameters": YARN}),
        refused=NO_DROPOUT,
    ),
    "jais2, no biases": ModelTypeCase(
        model_type="jais2",
        fields={**HEADS, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True},
        layout={"pp": 2},
        refused=NO_DROPOUT,
    ),
    "arcee": ModelTypeCase(
        model_type="arcee",
        fields={**RMS, "attention_bias": True, "mlp_bias": True},
        layout={"pp": 2, "vpp": 2, "schedule": "interleaved"},
        changes=(OTHER_ROPE, SILU, EPS),
        refused=NO_DROPOUT,
    ),
    "nemotron": ModelTypeCase(
        model_type="nemotron",
        fields={
            **{**HEADS, "norm_eps": 1e-3, "attention_bias": True, "mlp_bias": True},
            **{"partial_rotary_factor": 0.6, "tie_word_embeddings": True},
        },
        layout={"tp": 2, "sequence_parallel": True},
        changes=(SILU, {"norm_eps": 1e-1}, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.2}}),
        refused=NO_DROPOUT,
    ),
    "apertus": ModelTypeCase(
        model_type="apertus",
        fields={**RMS, "attention_bias": True, "rope_parameters": LLAMA3},
        layout={"tp": 2, "pp": 2},
        changes=(OTHER_ROPE, EPS, {"rope_parameters": None}),
        refused={**NO_DROPOUT, "hidden_act": "relu2"},
    ),
    "hunyuan_v1_dense": ModelTypeCase(
        model_type="hunyuan_v1_dense",
        fields={**RMS, "attention_bias": True, "rope_parameters": ALPHA},
        layout={"cp": 2, "zero_stage": 3},
        unread=("attention_dropout",),  # it is told
        changes=(OTHER_ROPE, GELU, EPS, {"rope_parameters": {**ALPHA, "alpha": 5.0}}),
    ),
    "ministral3": ModelTypeCase(
        model_type="ministral3",
        fields={**MINISTRAL3, "sliding_window": 9},
        layout={"tp": 2, "sequence_parallel": True},
        changes=(
            *(GELU, EPS, {"sliding_window": 3}, {"sliding_window": None}),
            *({"rope_parameters": {**TEMPERATURE, "llama_4_scaling_beta": beta}} for beta in (0.0, 0.2)),
            {"rope_parameters": {**TEMPERATURE, "original_max_position_embeddings": 7}},
        ),
        refused=NO_DROPOUT,
        refuses=WINDOWS,
    ),
    "ministral3, no window": ModelTypeCase(
        model_type="ministral3",
        fields={**MINISTRAL3, "sliding_window": None},
        layout={"cp": 2, "cp_attention": "ring", "packed": True},
    ),
    # Experts with rules of their own
    "gpt_oss": ModelTypeCase(
        model_type="gpt_oss",
        fields={
            **{**RMS, "num_attention_heads": 6, "num_hidden_layers": 4, "intermediate_size": 48},
            **{"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 7, "rope_parameters": GPT_OSS_ROPE},
            "swiglu_limit": 0.46,  # no gate or up is so near to it that rounding decides whether it has a slope
        },
        layout={"tp": 2, "pp": 2, "sequence_parallel": True},
        changes=(
            *({"rms_norm_eps": 1e-2}, {"swiglu_limit": 0.3}, {"sliding_window": 9}, {"num_experts_per_tok": 2}),
            *({"rope_parameters": {**GPT_OSS_ROPE, **change}} for change in ({"truncate": True}, {"factor": 4.0})),
            {"rope_parameters": {**GPT_OSS_ROPE, "rope_theta": 50.0}},
        ),
        refused={
            **{**NO_DROPOUT, "sliding_window": None, "layer_types": MIXED, "swiglu_alpha": 1.0, "hidden_act": "gelu"},
            **{"quantization_config": {"quant_method": "gptq"}, "new_field": 1},
        },
        refuses=WINDOWS,
    ),
    "deepseek_v3": ModelTypeCase(
        model_type="deepseek_v3",
        fields=DEEPSEEK_V3,
        layout={"tp": 2, "pp": 2},
        changes=(
            *(
                {"rms_norm_eps": 1e-2},
                *GROUPS,
                {"topk_group": 4},
                {"num_experts_per_tok": 2},
                {"num_experts_per_tok": 3},
            ),
            {"norm_topk_prob": False},
            *(
                {"rope_parameters": {**LATENT_ROPE, **change}}
                for change in ({"factor": 4.0}, {"mscale": 1.5}, {"mscale_all_dim": 0.4})
            ),
        ),
        refused={
            **{**NO_DROPOUT, "rope_interleave": False, "num_key_value_heads": 2, "scoring_func": "softmax"},
            **{"topk_method": "greedy", "moe_layer_freq": 2, "hidden_act": "gelu", "head_dim": 8},
            **{
                "mscale_all_dim": 1.0,
                "quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]},
            },
        },
    ),
    "deepseek_v3, whole queries": ModelTypeCase(
        model_type="deepseek_v3",
        fields={**DEEPSEEK_V3, "q_lora_rank": None, "norm_topk_prob": False},
        layout={"tp": 2, "sequence_parallel": True},
    ),
    "deepseek_v2": ModelTypeCase(
        model_type="deepseek_v2",
        fields={
            **{**LATENT, "q_lora_rank": None, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
            "topk_method": "group_limited_greedy",
        },
        layout={"cp": 2, "cp_attention": "ulysses", "ep": 2, "packed": True},
        changes=(*GROUPS, {"topk_method": "greedy"}),
        refused={"norm_topk_prob": True, "topk_method": "other", "mlp_bias": True},
    ),
    "glm4_moe_lite": ModelTypeCase(
        model_type="glm4_moe_lite",
        fields={
            **{**LATENT, "q_lora_rank": 18, "n_routed_experts": 7},
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
        },
        layout={"cp": 2, "zero_stage": 3, "recompute": "selective"},
        written_as="deepseek_v3",
        unread=("qk_head_dim",),
    ),
    "youtu": ModelTypeCase(
        model_type="youtu",
        fields={**DENSE_LATENT, "attention_bias": True, "tie_word_embeddings": False},
        layout={"tp": 2, "sequence_parallel": True, "pp": 2},
        changes=(EPS, GELU, {"rope_parameters": {**LATENT_ROPE, "mscale_all_dim": 0.4}}, OTHER_ROPE),
        refused={**NO_DROPOUT, "num_key_value_heads": 2, "rope_interleave": False, "qk_head_dim": 15, "mlp_bias": True},
    ),
    "youtu, whole queries": ModelTypeCase(
        model_type="youtu",
        fields={**DENSE_LATENT, "q_lora_rank": None, "rope_parameters": PLAIN},
        layout={"cp": 2, "cp_attention": "ring", "packed": True},
    ),
    "minicpm3": ModelTypeCase(
        model_type="minicpm3",
        fields={**DENSE_LATENT, "attention_bias": True, "mlp_bias": True, **MINICPM_FACTORS},
        layout={"tp": 2, "sequence_parallel": True, "cp": 2, "cp_attention": "ulysses"},
        changes=(EPS, GELU, OTHER_ROPE, *({name: 9} for name in MINICPM_FACTORS), {"scale_depth": None}),
        refused={**NO_DROPOUT, "num_key_value_heads": 2, "qk_head_dim": 15, "scale_depth": 0},
    ),
    "minicpm3, longrope": ModelTypeCase(
        model_type="minicpm3",
        fields={
            **{**DENSE_LATENT, "q_lora_rank": None, "tie_word_embeddings": False, "dim_model_base": None},
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 64},
                **{"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.5, 3.0, 9.0], "factor": 4.0},
            },
        },
        layout={"pp": 2, "vpp": 2, "schedule": "interleaved"},
        changes=({"dim_model_base": 9},),
    ),
    "axk1": ModelTypeCase(
        model_type="axk1",
        fields={
            **{
                name: value
                for name, value in DEEPSEEK_V3.items()
                if name not in ("num_mtp_layers", "first_k_dense_replace")
            },
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
        layout={"tp": 2, "sequence_parallel": True, "pp": 2},
        changes=({"rms_norm_eps": 1e-2}, *GROUPS, {"norm_topk_prob": False}, {"num_experts_per_tok": 3}),
        refused={
            **{**NO_DROPOUT, "q_lora_rank": None, "num_key_value_heads": 2, "rope_interleave": False},
            **{"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "topk_method": "greedy"},
        },
    ),
    "mistral4": ModelTypeCase(
        model_type="mistral4",
        fields={
            **{**LATENT, "q_lora_rank": 18, "n_group": 4, "topk_group": 2, "attention_bias": True},
            **{"first_k_dense_replace": 1, "norm_topk_prob": True, "rope_parameters": TEMPERATURE},
        },
        layout={"tp": 2, "sequence_parallel": True, "cp": 2, "cp_attention": "ring"},
        changes=(
            *({"rms_norm_eps": 1e-2}, *GROUPS, {"norm_topk_prob": False}, {"num_experts_per_tok": 3}),
            *({"rope_parameters": {**TEMPERATURE, "llama_4_scaling_beta": beta}} for beta in (0.0, 0.2)),
        ),
        refused={
            **{**NO_DROPOUT, "num_key_value_heads": 2, "rope_interleave": False, "head_dim": 6, "qk_head_dim": 15},
            "rope_parameters": {**TEMPERATURE, "partial_rotary_factor": 0.5},
        },
    ),
    "mistral4, whole queries": ModelTypeCase(
        model_type="mistral4",
        fields={
            **{**LATENT, "q_lora_rank": None, "norm_topk_prob": False, "tie_word_embeddings": True},
            "rope_parameters": {**LATENT_ROPE, "llama_4_scaling_beta": 0.0},
        },
        unread=("intermediate_size",),
        layout={"cp": 2, "cp_attention": "ulysses", "ep": 2, "packed": True},
    ),
    "gemma4_text": ModelTypeCase(
        model_type="gemma4_text",
        fields=GEMMA4,
        layout={"tp": 2, "sequence_parallel": True, "pp": 2},
        changes=GEMMA4_CHANGES,
        refused={**GEMMA4_REFUSED, "num_kv_shared_layers": 3, "vocab_size_per_layer_input": 100},
        refuses=WINDOWS,
    ),
    "gemma4_text, experts": ModelTypeCase(
        model_type="gemma4_text",
        fields={
            **{**GEMMA4, **OF_GEMMA4_EXPERTS, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
            **{"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
        },
        layout={"tp": 2, "dp": 2, "ep": 2},
        unread=("use_double_wide_mlp", "vocab_size_per_layer_input"),
        changes=(*GEMMA4_CHANGES, {"top_k_experts": 2}),
        refuses=WINDOWS,
    ),
    "gemma4_text, all": ModelTypeCase(
        model_type="gemma4_text",
        fields={
            **{**GEMMA4, **OF_GEMMA4_EXPERTS, "attention_k_eq_v": True, "num_global_key_value_heads": 4},
            **{"num_key_value_heads": 1, "use_double_wide_mlp": False, "tie_word_embeddings": False},
            **{"num_kv_shared_layers": 1, "attention_bias": False, "hidden_size": 32, "rms_norm_eps": 3e-1},
            # The last layer reads what the third one hands on.
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "full_attention"],
        },
        layout={"pp": 2, "vpp": 2, "schedule": "interleaved", "cp": 2, "cp_attention": "ulysses"},
        refuses=WINDOWS,
    ),
    "gemma4_unified_text": ModelTypeCase(
        model_type="gemma4_unified_text",
        fields={
            **{name: value for name, value in GEMMA4.items() if "per_layer_input" not in name},
            **{"num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        },
        layout={"dp": 2, "zero_stage": 3},
        unread=("use_double_wide_mlp",),
        changes=GEMMA4_CHANGES,
        refused=GEMMA4_REFUSED,
        refuses=WINDOWS,
        written_as="gemma4_text",
    ),
    "llama4_text": ModelTypeCase(
        model_type="llama4_text",
        fields={**LLAMA4, "interleave_moe_layer_step": 2, "attention_bias": True},
        layout={"tp": 2, "sequence_parallel": True, "pp": 2},
        unread=("interleave_moe_layer_step", "no_rope_layer_interval"),
        changes=(
            *(EPS, GELU, LLAMA4_ROPE, {"num_experts_per_tok": 1}, {"attention_chunk_size": 11}),
            *({"attn_scale": 0.2}, {"floor_scale": 4}, {"attn_temperature_tuning": False}, {"use_qk_norm": False}),
            *({"no_rope_layers": [0, 1, 1, 1]}, {"layer_types": ["chunked_attention", *["full_attention"] * 3]}),
        ),
        refused={
            **{**NO_DROPOUT, "router_jitter_noise": 0.1, "moe_layers": [0, 3], "layer_types": MIXED},
            **{"attention_chunk_size": None, "no_rope_layers": [1, 0]},
        },
    ),
    "llama4_text, one expert a token": ModelTypeCase(
        model_type="llama4_text",
        fields={**LLAMA4, "num_experts_per_tok": 1, "use_qk_norm": False, "rope_parameters": LLAMA3_STEP},
        layout={"cp": 2, "cp_attention": "ring", "packed": True},
        unread=("intermediate_size_mlp", "interleave_moe_layer_step", "no_rope_layer_interval"),
    ),
    "llama4_text, no experts": ModelTypeCase(
        model_type="llama4_text",
        fields={
            **{**LLAMA4, "moe_layers": [], "no_rope_layers": [1, 1, 0, 1], "tie_word_embeddings": True},
            **{"num_local_experts": 0, "num_experts_per_tok": 0},
            **{"layer_types": ["chunked_attention", "full_attention", "chunked_attention", "chunked_attention"]},
        },
        layout={"cp": 2, "cp_attention": "gather"},
        unread=(
            *("interleave_moe_layer_step", "no_rope_layer_interval", "intermediate_size", "num_local_experts"),
            "num_experts_per_tok",
        ),
    ),
    "kimi_linear": ModelTypeCase(
        model_type="kimi_linear",
        fields=KIMI_LINEAR,
        layout={"tp": 2, "cp": 2, "cp_attention": "ring", "packed": True},
        changes=(
            *({"num_experts_per_token": 2}, {"moe_renormalize": False}, {"routed_scaling_factor": 1.5}),
            *({"rms_norm_eps": 1e-1}, {"num_expert_group": 3, "topk_group": 2}),
        ),
        refused={
            **{**NO_DROPOUT, "num_key_value_heads": 2, "hidden_act": "gelu", "mla_use_nope": False},
            **{"moe_router_activation_func": "softmax", "rope_scaling": YARN, "tie_word_embeddings": True},
            **{"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2, 3]}, "n_group": 3},
        },
        saved_as={f".block_sparse_moe.{name}_proj.": f".mlp.{name}_proj." for name in ("gate", "up", "down")},
    ),
    "kimi_linear, latents of queries": ModelTypeCase(
        model_type="kimi_linear",
        fields={
            **{name: value for name, value in KIMI_LINEAR.items() if name not in ("layer_types", "linear_head_dim")},
            **{"q_lora_rank": 18, "attention_bias": False, "first_k_dense_replace": 2},
            "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2, 4, 5], "head_dim": 17},
        },
        layout={"pp": 2, "ep": 2, "dp": 2},
        unread=("first_k_dense_replace", "linear_head_dim"),
        saved_as={f".block_sparse_moe.{name}_proj.": f".mlp.{name}_proj." for name in ("gate", "up", "down")},
    ),
    "bailing_hybrid": ModelTypeCase(
        model_type="bailing_hybrid",
        fields=BAILING,
        layout={"tp": 2, "sequence_parallel": True, "pp": 2},
        unread=BAILING_UNREAD,
        changes=(
            *({"num_experts_per_token": 2}, {"moe_renormalize": False}, {"routed_scaling_factor": 1.5}),
            *({"rms_norm_eps": 1e-1}, {"topk_group": 2}, {"kda_lower_bound": -1.0}, {"kda_safe_gate": False}),
            *({"rope_parameters": YARN}, {"rope_parameters": LATENT_ROPE}),
        ),
        refused={
            **{**NO_DROPOUT, "num_key_value_heads": 2, "hidden_act": "gelu", "kda_lower_bound": 0.5},
            **{"no_kda_lora": False, "q_lora_rank": 8, "tie_word_embeddings": True, "rotary_dim": 4},
            **{"expert_swiglu_limit_list": [0, 4], "moe_shared_expert_intermediate_size": 40, "n_group": 3},
        },
    ),
    "bailing_hybrid, decays without a bound": ModelTypeCase(
        model_type="bailing_hybrid",
        fields={
            **{**BAILING, "kda_safe_gate": False, "attention_bias": True, "linear_num_heads": 6},
            **{"n_group": 1, "topk_group": 1, "num_experts_per_token": 6},
            "layer_types": KIMI_LINEAR["layer_types"],
        },
        layout={"cp": 2, "cp_attention": "ulysses", "zero_stage": 3},
        unread=(*BAILING_UNREAD, "kda_lower_bound"),
    ),
    "glm4_moe": ModelTypeCase(
        model_type="glm4_moe",
        fields={
            **{**FINE_EXPERTS, "head_dim": 12, "n_routed_experts": 7, "attention_bias": True, "use_qk_norm": True},
            **{"routed_scaling_factor": 1.5, "num_mtp_layers": 0},
        },
        layout={"tp": 2, "ep": 2, "etp": 1},
        changes=(
            {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
            *({"routed_scaling_factor": 2.5}, {"num_experts_per_tok": 2}, {"norm_topk_prob": False}),
        ),
        refused={**NO_DROPOUT, "topk_method": "greedy", "hidden_act": "gelu"},
    ),
    "dots1": ModelTypeCase(
        model_type="dots1",
        fields={**FINE_EXPERTS, "n_routed_experts": 7, "first_k_dense_replace": 1, "norm_topk_prob": True},
        layout={"tp": 2, "ep": 2, "etp": 1},
        unread=("sliding_window", "max_window_layers"),
        changes=({"routed_scaling_factor": 1.5}, {"num_experts_per_tok": 2}, {"norm_topk_prob": False}, OTHER_ROPE),
        refused={**NO_DROPOUT, "attention_bias": True},
        written_as="glm4_moe",
    ),
    "dots1, windows": ModelTypeCase(
        model_type="dots1",
        fields={
            **{**FINE_EXPERTS, "n_routed_experts": 7, "first_k_dense_replace": 1, "sliding_window": 5},
            "max_window_layers": 1,
        },
        layout={"tp": 2, "sequence_parallel": True},
        unread=("max_window_layers",),
        changes=({"layer_types": MIXED}, {"sliding_window": 3}, {"layer_types": None, "max_window_layers": 2}),
        refused={**NO_DROPOUT, "attention_bias": True},
        refuses=WINDOWS,
    ),
    "afmoe": ModelTypeCase(
        model_type="afmoe",
        fields={
            **{**UNTIED, "intermediate_size": 44, "moe_intermediate_size": 20, "num_experts": 7, "sliding_window": 5},
            **{"num_experts_per_tok": 3, "num_dense_layers": 1, "route_scale": 2.5, "mup_enabled": True},
            "rope_parameters": PLAIN,
        },
        layout={"tp": 2, "dp": 2, "ep": 2, "etp": 1},
        unread=("global_attn_every_n_layers",),
        changes=(
            *(EPS, {"rope_parameters": YARN}, {"num_experts_per_tok": 2}, {"layer_types": TURNS}),
            *({"mup_enabled": False}, {"layer_types": None, "global_attn_every_n_layers": 3}),
        ),
        refused={**NO_DROPOUT, "attention_bias": True, "sliding_window": None},
        refuses=WINDOWS,
    ),
    "exaone_moe": ModelTypeCase(
        model_type="exaone_moe",
        fields={
            **{**UNTIED, "intermediate_size": 44, "moe_intermediate_size": 20, "num_experts": 8, "sliding_window": 5},
            **{"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "num_shared_experts": 2, "layer_types": MIXED},
        },
        layout={"tp": 2, "dp": 2, "ep": 2, "etp": 1},
        unread=("sliding_window_pattern", "first_k_dense_replace"),
        changes=(EPS, {"rope_parameters": YARN}, {"num_experts_per_tok": 2}, {"norm_topk_prob": False}, *GROUPS),
        refused={**NO_DROPOUT, "sliding_window": None, "mlp_layer_types": ["dense"]},
        refuses=WINDOWS,
    ),
    "hunyuan_v1_moe": ModelTypeCase(
        model_type="hunyuan_v1_moe",
        fields={
            **{**RMS, "attention_bias": True, "rope_parameters": ALPHA, "intermediate_size": 20, "num_experts": 7},
            **{"moe_topk": 3, "tie_word_embeddings": True},
        },
        layout={"tp": 2, "dp": 2, "ep": 2, "etp": 1},
        unread=("attention_dropout",),
        changes=(EPS, GELU, OTHER_ROPE, {"moe_topk": 2}, {"moe_topk": [2, 2, 2, 2]}),
        refused={"num_shared_expert": [1, 2, 1, 1], "moe_intermediate_size": 12, "moe_topk": [2, 3, 2, 2]},
    ),
    "hy_v3": ModelTypeCase(
        model_type="hy_v3",
        fields={
            **{**UNTIED, "intermediate_size": 44, "moe_intermediate_size": 20, "num_experts": 7},
            **{"num_experts_per_tok": 3, "num_shared_experts": 2, "rope_parameters": PLAIN, "attention_bias": True},
        },
        layout={"tp": 2, "dp": 2, "ep": 2, "etp": 1},
        changes=(EPS, {"rope_parameters": YARN}, {"num_experts_per_tok": 2}, {"router_scaling_factor": 1.5}),
        refused={**NO_DROPOUT, "mlp_bias": True, "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"]},
    ),
    "kolibri1": ModelTypeCase(
        model_type="kolibri1",
        fields={
            **{**UNTIED, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "num_experts": 7},
            **{"num_experts_per_tok": 3, "sliding_window": 5, "layer_types": MIXED},
        },
        layout={"tp": 2, "dp": 2, "ep": 2, "etp": 1},
        changes=(EPS, {"rope_parameters": YARN}, {"num_experts_per_tok": 2}, {"norm_topk_prob": True}),
        refused={**NO_DROPOUT, "sliding_window": None},
        refuses=WINDOWS,
    ),
    "flint": ModelTypeCase(
        model_type="flint",
        fields={
            **{**UNTIED, "num_hidden_layers": 6, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28},
            **{"num_experts": 7, "num_experts_per_tok": 3, "sliding_window": 5, "attention_bias": True},
            "mlp_only_layers": [1],
        },
        layout={"tp": 2, "dp": 2, "ep": 2, "etp": 1},
        changes=(EPS, {"rope_parameters": YARN}, {"num_experts_per_tok": 2}, {"norm_topk_prob": False}),
        refused={**NO_DROPOUT, "sliding_window": None},
        refuses=WINDOWS,
    ),
    "mellum": ModelTypeCase(
        model_type="mellum",
        fields={
            **{**UNTIED, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "layer_types": MIXED},
            **{"attention_bias": True, "sliding_window": 5, "intermediate_size": 44},
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN},
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        },
        layout={"tp": 2, "dp": 2, "ep": 2, "etp": 1},
        changes=(EPS, {"num_experts_per_tok": 2}, {"norm_topk_prob": False}, {"layer_types": TURNS}),
        refused={**NO_DROPOUT, "mlp_layer_types": ["dense"]},
        refuses=WINDOWS,
    ),
    "solar_open": ModelTypeCase(
        model_type="solar_open",
        fields={
            **{name: value for name, value in FINE_EXPERTS.items() if name != "intermediate_size"},
            **{"head_dim": 12, "n_routed_experts": 7, "n_group": 1, "topk_group": 1},
        },
        layout={"dp": 2, "ep": 2},
        changes=(
            *({"routed_scaling_factor": 1.5}, {"num_experts_per_tok": 2}, {"norm_topk_prob": False}, OTHER_ROPE),
            {"rope_parameters": YARN},
        ),
        refused={**NO_DROPOUT, "partial_rotary_factor": 0.5},
        written_as="glm4_moe",
    ),
    "minimax_m2": ModelTypeCase(
        model_type="minimax_m2",
        fields={
            **{**RMS, "num_local_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 20},
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.6},
        },
        layout={"tp": 2, "dp": 2, "ep": 2, "etp": 1},
        changes=({"num_experts_per_tok": 2}, EPS, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}),
        refused={**NO_DROPOUT, "router_jitter_noise": 0.1},
    ),
    # Heads and widths by layer
    "laguna": ModelTypeCase(
        model_type="laguna",
        fields=LAGUNA,
        layout={"tp": 2, "dp": 2, "ep": 2, "etp": 1},
        changes=(
            *({"num_experts_per_tok": 2}, EPS, {"moe_router_logit_softcapping": 2.0}),
            *({"sliding_window": 3}, {"sliding_window": 64}),
            *({"moe_routed_scaling_factor": 1.0}, {"layer_types": ["sliding_attention", *TURNS[1:]]}),
            *({"rope_parameters": {**LAGUNA_ROPE, "full_attention": {**PLAIN, **part}}} for part in PARTS),
            *({"rope_parameters": {**LAGUNA_ROPE, "sliding_attention": {**PLAIN, **part}}} for part in PARTS),
        ),
        refused={
            **{**NO_DROPOUT, "attention_bias": True, "gating": False, "moe_apply_router_weight_on_input": True},
            **{"num_attention_heads_per_layer": [4, 6, 4], "mlp_layer_types": ["dense", "sparse", "moe", "dense"]},
            **{
                "shared_expert_intermediate_size": 0,
                "rope_theta": 100.0,
                "hidden_act": "gelu",
                "norm_topk_prob": False,
            },
            **{"layer_types": TURNS[1:], "partial_rotary_factor": 0.5, "mlp_only_layers": [0], "norm_topk_prob": False},
            "gating_types": ["per_element"],
            "rope_parameters": {"full_attention": PLAIN},
        },
        refuses=WINDOWS,
    ),
    "laguna, gates of each dimension": ModelTypeCase(
        model_type="laguna",
        fields={
            **{name: value for name, value in LAGUNA.items() if name != "mlp_layer_types"},
            **{"gating": "per-element", "num_attention_heads_per_layer": [6, 4, 2, 4], "layer_types": None},
            **{"moe_router_logit_softcapping": 0.0, "sliding_window": 0, "tie_word_embeddings": True},
            "rope_parameters": {"full_attention": {**YARN, "partial_rotary_factor": 0.4}},
        },
        layout={"tp": 2, "sequence_parallel": True, "cp": 2, "cp_attention": "ring", "packed": True},
        unread=("sliding_window",),
        changes=({"rope_parameters": {"full_attention": PLAIN}},),
        refused={"num_attention_heads_per_layer": [6, 4, 2, 0]},
    ),
    "mimo_v2_flash": ModelTypeCase(
        model_type="mimo_v2_flash",
        fields=MIMO,
        layout={"tp": 2, "cp": 2, "cp_attention": "ulysses", "sequence_parallel": True, "packed": True},
        changes=(
            *(
                {"num_experts_per_tok": 2},
                EPS,
                {"sliding_window": 3},
                {"sliding_window": 64},
                {"norm_topk_prob": False},
            ),
            *({"sliding_window_size": 2}, {"attention_value_scale": None}, {"routed_scaling_factor": None}),
            {"n_group": 4, "topk_group": 2},
            *({"rope_parameters": {**LAGUNA_ROPE, "full_attention": {**PLAIN, **part}}} for part in MIMO_PARTS),
            *({"rope_parameters": {**LAGUNA_ROPE, "sliding_attention": {**PLAIN, **part}}} for part in MIMO_PARTS),
        ),
        refused={
            **{**NO_DROPOUT, "hidden_act": "gelu", "mlp_layer_types": ["dense", "sparse"], "rope_theta": 100.0},
            **{"swa_num_key_value_heads": 2, "swa_head_dim": 8, "add_full_attention_sink_bias": True},
            **{"hybrid_layer_pattern": [0, 0, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "layernorm_epsilon": 1e-2},
        },
        refuses=WINDOWS,
    ),
    "mimo_v2_flash, all keys": ModelTypeCase(
        model_type="mimo_v2_flash",
        fields={
            **{**MIMO, "layer_types": ["full_attention"] * 4, "attention_bias": False, "v_head_dim": 14},
            **{"attention_value_scale": None, "rope_parameters": {"full_attention": PLAIN}, "num_key_value_heads": 1},
            "head_dim": 12,
        },
        layout={"tp": 2, "cp": 2, "cp_attention": "ring", "packed": True},
        unread=("sliding_window",),
        changes=({"rope_parameters": {"full_attention": {**PLAIN, "partial_rotary_factor": 0.7}}},),
    ),
    "step3p5": ModelTypeCase(
        model_type="step3p5",
        fields=STEP,
        layout={"tp": 2, "pp": 2, "sequence_parallel": True},
        unread=("num_nextn_predict_layers",),
        changes=(
            *({"num_experts_per_tok": 2}, EPS, {"sliding_window": 3}, {"sliding_window": 64}),
            *({"query_pre_attn_scalar": 5}, {"moe_router_scaling_factor": 1.0}, {"swiglu_limits": None}),
            *({"swiglu_limits": [0.0, 0.05, None, 0.02]}, {"swiglu_limits_shared": [0.03, 0.0, 0.02, None]}),
            *({"rope_parameters": {**LAGUNA_ROPE, "full_attention": {**PLAIN, **part}}} for part in PARTS),
            {"rope_parameters": None, "rope_theta": [50.0, 80.0] * 2, "partial_rotary_factors": [0.6, 1.0] * 2},
            {"rope_parameters": None, "rope_theta": 90.0, "rope_scaling": LLAMA3},
        ),
        refused={
            **{**NO_DROPOUT, "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "gating": False},
            **{
                "swiglu_limits": [0.1, 0.2],
                "mlp_layer_types": ["dense", "sparse", "moe", "dense"],
                "share_expert_dim": 0,
            },
            **{"per_layer_config": {"1": {"num_attention_heads": 6}, "3": {"num_attention_heads": 4}}},
            **{"zero_centered": False, "use_rope_layers": [True, False], "yarn_only_types": ["sliding_attention"]},
            **{"moe_router_activation": "softmax", "partial_rotary_factors": [0.6, 1.0, 0.4, 1.0]},
        },
        refuses=WINDOWS,
    ),
    "step3p5, fields by layer": ModelTypeCase(
        model_type="step3p5",
        fields={
            **{name: value for name, value in STEP.items() if name not in OF_STEP},
            **{"layer_types": [*TURNS, "sliding_attention"], "num_nextn_predict_layers": 1, "moe_layers_enum": "1,3"},
            **{"attention_other_setting": {"num_attention_heads": 6}, "rope_theta": [50.0, 80.0, 50.0, 80.0, 80.0]},
            **{"partial_rotary_factors": [0.6, 1.0, 0.6, 1.0, 1.0], "swiglu_limits": [0.0, 0.07, 0.0, 0.04, 0.0]},
        },
        layout={"dp": 2, "ep": 2, "zero_stage": 3},
        unread=("num_nextn_predict_layers",),
        refuses=WINDOWS,
    ),
    "ernie4_5_moe": ModelTypeCase(
        model_type="ernie4_5_moe",
        fields={
            **{**SIZES, "rms_norm_eps": 1e-3, "moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 20},
            "moe_layer_end_index": -1,
        },
        layout={"tp": 2, "ep": 2, "etp": 1},
        changes=({"moe_k": 2}, {"rms_norm_eps": 1e-1}, OTHER_ROPE),
        refused={"use_bias": True, "moe_layer_interval": 2, "moe_layer_end_index": 1},
    ),
    "ernie4_5_moe, no shared experts": ModelTypeCase(
        model_type="ernie4_5_moe",
        fields={
            **{**SIZES, "rms_norm_eps": 1e-3, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20},
            **{"moe_num_shared_experts": 0, "moe_layer_start_index": 2, "tie_word_embeddings": False},
        },
        layout={"pp": 2, "tp": 2},
    ),
    # Gated delta nets
    "qwen3_next": ModelTypeCase(
        model_type="qwen3_next",
        fields={**DELTA, **GATED_EXPERTS, "rope_parameters": PARTIAL},
        layout={"tp": 2, "dp": 2, "ep": 2, "etp": 1},
        unread=("intermediate_size",),  # all layers have experts
        changes=(*DELTA_CHANGES, {"num_experts_per_tok": 2}, {"norm_topk_prob": False}),
        refused={**NO_DROPOUT, "hidden_act": "relu2", "layer_types": TURNS, "linear_num_value_heads": 0},
    ),
    "qwen3_next, plain layers": ModelTypeCase(
        model_type="qwen3_next",
        fields={
            **{**DELTA, **GATED_EXPERTS, "attention_bias": False, "tie_word_embeddings": True, "norm_topk_prob": False},
            **{"layer_types": LINEAR_TURNS, "mlp_only_layers": [0, 2], "linear_num_value_heads": 2},
        },
        layout={"cp": 2, "cp_attention": "ulysses", "ep": 2},
    ),
    "qwen3_5_text": ModelTypeCase(
        model_type="qwen3_5_text",
        fields={**DELTA, "rope_parameters": MROPE},
        layout={"tp": 2, "sequence_parallel": True},
        changes=DELTA_CHANGES,
        refused={**NO_DROPOUT, "hidden_act": "relu2", "attn_output_gate": False, "layer_types": ["full_attention"]},
    ),
    "qwen3_5_text, other layers": ModelTypeCase(
        model_type="qwen3_5_text",
        fields={
            **{**DELTA, "attention_bias": False, "tie_word_embeddings": True, "layer_types": LINEAR_TURNS},
            **{"linear_num_key_heads": 3, "linear_num_value_heads": 6, "num_key_value_heads": 1},
        },
        layout={"cp": 2, "cp_attention": "ring", "packed": True},
    ),
    "qwen3_5_moe_text": ModelTypeCase(
        model_type="qwen3_5_moe_text",
        fields={
            **{name: value for name, value in DELTA.items() if name != "intermediate_size"},
            **{**GATED_EXPERTS, "rope_parameters": MROPE},
        },
        layout={"tp": 2, "pp": 2, "dp": 2, "ep": 2},
        changes=(*DELTA_CHANGES, {"num_experts_per_tok": 2}),
        refused={**NO_DROPOUT, "norm_topk_prob": False},
    ),
    "olmo_hybrid": ModelTypeCase(
        model_type="olmo_hybrid",
        # transformers divides the convolution's rows evenly when it saves a file, so q, k and v are equally wide. With
        # an eps of 1e-3 both programs are 1.4e-6 from fp64.
        fields={
            **{
                **RMS,
                "rms_norm_eps": 5e-2,
                "attention_bias": True,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
            },
            **{"linear_key_head_dim": 16, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 3},
            **{"rope_parameters": PLAIN, "eos_token_id": 0},
        },
        layout={"tp": 2, "sequence_parallel": True},
        saved_as=OLMO_HYBRID_NORMS,
        changes=({"rms_norm_eps": 0.2}, {"rope_parameters": YARN}, {"linear_allow_neg_eigval": False}, NO_ROPE),
        refused={**NO_DROPOUT, "layer_types": ["linear_attention"] * 4, "hidden_act": "relu2"},
    ),
    "olmo_hybrid, no positions": ModelTypeCase(
        model_type="olmo_hybrid",
        fields={
            **{**SIZES, **NO_ROPE, "rms_norm_eps": 5e-2, "linear_allow_neg_eigval": False, "eos_token_id": 0},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16},
            **{"linear_value_head_dim": 16, "layer_types": LINEAR_TURNS},
        },
        layout={"cp": 2, "cp_attention": "ring", "packed": True},
        saved_as=OLMO_HYBRID_NORMS,
    ),
    # Layers of short convolutions
    "lfm2": ModelTypeCase(
        model_type="lfm2",
        fields={**LFM2, "block_multiple_of": 7, "layer_types": CONVOLVED},
        layout={"tp": 2, "sequence_parallel": True, "pp": 2},
        changes=LFM2_CHANGES,
        refused={"conv_L_cache": 0, "layer_types": MIXED, "conv_dim": 24, "use_pos_enc": False},
    ),
    "lfm2, biases": ModelTypeCase(
        model_type="lfm2",
        fields={
            **{**LFM2, "block_auto_adjust_ff_dim": False, "conv_bias": True, "conv_L_cache": 5},
            **{"full_attn_idxs": [2], "tie_word_embeddings": False},
        },
        layout={"cp": 2, "cp_attention": "ring", "tp": 2},
        unread=("full_attn_idxs", "block_ffn_dim_multiplier", "block_multiple_of"),
    ),
    "lfm2_moe": ModelTypeCase(
        model_type="lfm2_moe",
        fields={**LFM2_MOE, "routed_scaling_factor": 2.5},
        layout={"tp": 2, "ep": 2, "etp": 1, "dp": 2},
        changes=(
            *(*LFM2_CHANGES, {"num_experts_per_tok": 2}, {"norm_topk_prob": False}),
            {"routed_scaling_factor": 1.5},
        ),
        refused={"layer_types": None, "conv_L_cache": 0},
    ),
    "lfm2_moe, no selection bias": ModelTypeCase(
        model_type="lfm2_moe",
        fields={**LFM2_MOE, "use_expert_bias": False, "conv_bias": True, "num_dense_layers": 0},
        layout={"pp": 2, "cp": 2, "cp_attention": "ulysses"},
        unread=("intermediate_size",),
    ),
    "lfm3": ModelTypeCase(
        model_type="lfm3",
        fields={
            **{**LFM2, "rope_parameters": LFM3_ROPE, "sliding_window": 5},
            # With weights of 0.1 the gradients of norms of queries are so small that they are rounding.
            **{"layer_types": ["conv", "sliding_attention", "full_attention", "conv"], "initializer_range": 0.3},
        },
        layout={"tp": 2, "sequence_parallel": True, "cp": 2, "cp_attention": "ulysses"},
        changes=(
            *({"norm_eps": 1e-1}, {"sliding_window": 3}),
            {"layer_types": ["conv", "full_attention", "sliding_attention", "conv"]},
            {"rope_parameters": {**LFM3_ROPE, "full_attention": {**PLAIN, "rope_type": "proportional", "factor": 3.0}}},
        ),
        refused={**NO_DROPOUT, "layer_types": MIXED[:3], "rope_theta": 100.0, "sliding_window": None},
        refuses=WINDOWS,
    ),
    "lfm3, biases": ModelTypeCase(
        model_type="lfm3",
        fields={
            **{**LFM2, "num_hidden_layers": 5, "sliding_window": 5, "conv_L_cache": 4, "conv_bias": True},
            **{"attention_bias": True, "use_sandwich_norm": False, "use_attention_gate": False},
            **{"tie_word_embeddings": False},
        },
        layout={"pp": 2, "cp": 2, "cp_attention": "ulysses"},
        changes=(
            {
                "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention"],
                "rope_parameters": {"full_attention": PLAIN},
            },
        ),
        refused={"rope_parameters": {"full_attention": PLAIN}},
        refuses=WINDOWS,
    ),
    # Mamba-2
    "bamba": ModelTypeCase(
        model_type="bamba",
        fields={**{**SIZES, **MAMBA, "rms_norm_eps": 1e-3, "attn_layer_indices": [1]}, "attention_bias": True},
        layout={"tp": 2, "sequence_parallel": True},
        changes=(EPS, {"time_step_limit": [0.5, 1.0]}, {"rope_parameters": {**PLAIN, "partial_rotary_factor": 1.0}}),
        refused={**NO_DROPOUT, "mamba_expand": 3, "hidden_act": "gelu"},
    ),
    "granitemoehybrid": ModelTypeCase(
        model_type="granitemoehybrid",
        fields={
            **{**SIZES, **MAMBA, **FACTORS, **EXPERTS, "rms_norm_eps": 1e-3, "shared_intermediate_size": 28},
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        },
        layout={"tp": 2, "ep": 2, "etp": 1},
        changes=(EPS, {"time_step_limit": [0.5, 1.0]}, {"position_embedding_type": "rope"}, {"num_experts_per_tok": 2}),
        refused={**NO_DROPOUT, "mamba_expand": 3, "hidden_act": "gelu", "attention_multiplier": 0.0},
    ),
    "granitemoehybrid, no experts": ModelTypeCase(
        model_type="granitemoehybrid",
        fields={
            **{**SIZES, **MAMBA, **FACTORS, "rms_norm_eps": 1e-3, "shared_intermediate_size": 76},
            **{
                "num_local_experts": 0,
                "position_embedding_type": "rope",
                "mamba_n_groups": 3,
                "mamba_conv_bias": False,
            },
            **{"layer_types": ["full_attention", "linear_attention"] * 2, "mamba_proj_bias": True},
        },
        layout={"pp": 2, "tp": 2},
        unread=("intermediate_size", "num_experts_per_tok"),
    ),
    "nemotron_h": ModelTypeCase(
        model_type="nemotron_h",
        fields={
            **{**NEMOTRON_H, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]},
            **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 2},
            **{"moe_shared_expert_intermediate_size": 28, "topk_group": 1, "routed_scaling_factor": 2.5},
            "moe_latent_size": 24,
        },
        layout={"tp": 2, "ep": 2, "etp": 1},
        unread=("hidden_dropout", "intermediate_size"),
        unlike=("time_step_min",),
        changes=({"routed_scaling_factor": 1.5}, {"norm_topk_prob": False}, {"n_group": 1}, {"mlp_hidden_act": "silu"}),
        refused={"attention_dropout": 0.1, "attention_bias": True, "mlp_bias": True, "mamba_hidden_act": "gelu"},
    ),
    "nemotron_h, no experts": ModelTypeCase(
        model_type="nemotron_h",
        fields={
            **{**NEMOTRON_H, "layers_block_type": ["mlp", "linear_attention", "full_attention", "mlp"]},
            **{"use_bias": True, "n_groups": 3},
        },
        layout={"pp": 2, "tp": 2},
        unread=(
            *("hidden_dropout", "n_group", "topk_group", "num_experts_per_tok", "moe_intermediate_size"),
            *("norm_topk_prob", "routed_scaling_factor", "n_routed_experts", "moe_shared_expert_intermediate_size"),
        ),
        unlike=("time_step_min",),
    ),
    "falcon_h1": ModelTypeCase(
        model_type="falcon_h1",
        fields={
            **{**HEADS, **MAMBA, **FALCON_H1, "rms_norm_eps": 1e-3, "mamba_d_ssm": 54, "mamba_d_head": 9},
            **{"attention_bias": True, "mlp_bias": True, "projectors_bias": True, "mamba_proj_bias": True},
            **{"mamba_rms_norm": True, "mamba_norm_before_gate": False},
        },
        layout={"tp": 2, "sequence_parallel": True},
        changes=(
            *(EPS, {"time_step_limit": [0.5, 1.0]}, {"mamba_norm_before_gate": True}, OTHER_ROPE),
            *({name: 0.9} for name in FALCON_H1 if not name.endswith("multipliers")),
            *({"ssm_multipliers": [1.0, 0.8, 0.9, 1.1, 0.7]}, {"mlp_multipliers": [0.9, 1.1]}),
        ),
        refused={**NO_DROPOUT, "mamba_d_ssm": 60, "hidden_act": "gelu"},
        unread=("mamba_expand",),
    ),
    "falcon_h1, no norm": ModelTypeCase(
        model_type="falcon_h1",
        fields={**{**HEADS, **MAMBA, "rms_norm_eps": 1e-3, "mamba_d_ssm": None, "tie_word_embeddings": True}},
        layout={"cp": 2, "cp_attention": "ulysses"},
        unread=("mamba_norm_before_gate",),
    ),
    "mamba2": ModelTypeCase(
        model_type="mamba2",
        fields={
            **{"hidden_size": 48, "num_hidden_layers": 4, "vocab_size": VOCABULARY, "initializer_range": 0.1},
            **{"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 7, "conv_kernel": 3, "chunk_size": 16},
            **{"layer_norm_epsilon": 1e-3, "pad_token_id": None, "residual_in_fp32": False, "use_bias": True},
            "time_step_limit": [0.0, 1.0],
        },
        layout={"tp": 2, "sequence_parallel": True},
        changes=({"layer_norm_epsilon": 1e-1}, {"time_step_limit": [0.5, 1.0]}),
        refused={"hidden_act": "gelu", "expand": 3},
        unread=("residual_in_fp32",),
    ),
}
