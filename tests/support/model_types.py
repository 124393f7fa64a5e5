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
    refuses: Mapping[str, str] = field(default_factory=dict)
    """Names of `FORMS` that the model cannot be trained in, each with words of the line that says so."""
    written_as: str = ""
    """The model_type of the config.json that we write, if it is another name of the same model."""

    @property
    def has_experts(self) -> bool:
        return any("experts" in name for name in self.fields)

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
DEEPSEEK_V3 = {
    **LATENT,
    **{"q_lora_rank": 18, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "attention_bias": True},
    "num_mtp_layers": 0,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8, "rope_theta": 300.0}
ALPHA = {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 100.0}
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
    "gptj": ModelTypeCase(
        model_type="gptj",
        fields={**GPT2, "rotary_dim": 6, "n_inner": 76, "tie_word_embeddings": False},
        layout={"tp": 2, "sequence_parallel": True},
        unread=("attn_pdrop", "embd_pdrop", "resid_pdrop", "n_positions"),
        changes=({"activation_function": "relu"}, {"layer_norm_epsilon": 1e-1}),
        refused={"rotary_dim": 0},
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
    "opt": ModelTypeCase(
        model_type="opt",
        fields={
            **{name: value for name, value in WITHOUT_WIDTHS.items() if name != "initializer_range"},
            **{"ffn_dim": 76, "word_embed_proj_dim": 48, "init_std": 0.2, "dropout": 0.0},
        },
        unread=("init_std",),
        layout={"tp": 2, "pp": 2, "sequence_parallel": True},
        refused={"word_embed_proj_dim": 24, "do_layer_norm_before": False, "enable_bias": False, "layerdrop": 0.1},
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
        changes=(GELU, {"rope_parameters": YARN}),
        refused={**NO_DROPOUT, "clip_qkv": 0.5},
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
    # Granite
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
        unread=("num_nextn_predict_layers",),
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
        unread=("num_nextn_predict_layers",),
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
    "glm4_moe": ModelTypeCase(
        model_type="glm4_moe",
        fields={
            **{**FINE_EXPERTS, "head_dim": 12, "n_routed_experts": 7, "attention_bias": True, "use_qk_norm": True},
            **{"routed_scaling_factor": 1.5, "num_mtp_layers": 0},
        },
        layout={"tp": 2, "ep": 2, "etp": 1},
        unread=("num_nextn_predict_layers",),
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
        refused={**NO_DROPOUT, "attention_bias": True, "layer_types": MIXED},
        written_as="glm4_moe",
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
}
