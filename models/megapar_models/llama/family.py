"""The Llama family: its options, and its names at Hugging Face and in Megatron-LM.

It reads `model_type` llama, mistral, qwen2 and qwen3, as transformers 4 and 5 write them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megapar.errors import ConfigError
from megapar_models.family import Family, HuggingFace, Megatron, ModelType
from megapar_models.llama.model import LlamaModel, LlamaStage
from megapar_models.llama.reference import logits
from megapar_models.rope import factor_warnings, read_rope, scaling_problems, write_rope

# Hugging Face

# Everything but the MLP. Families with the same attention and norms share it.
MODULES_BUT_MLP = {
    "embedding": "model.embed_tokens",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention.q": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.k": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.v": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.o": "model.layers.*.self_attn.o_proj",
    "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "norm": "model.norm",
    "head": "lm_head",
}
MLP_MODULES = {
    "layers.*.mlp.gate": "model.layers.*.mlp.gate_proj",
    "layers.*.mlp.up": "model.layers.*.mlp.up_proj",
    "layers.*.mlp.down": "model.layers.*.mlp.down_proj",
}
# Fields of config.json whose names are those of our options.
SAME_FIELDS = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
    *("hidden_act", "rms_norm_eps", "tie_word_embeddings", "initializer_range"),
)
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh", "relu2": "relu2"}
TIED = {"lm_head.weight": "model.embed_tokens.weight"}
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02}
_FIXED = {"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "partial_rotary_factor": 1.0}
_MODEL_TYPES = {
    "llama": ModelType({**_DEFAULTS, "num_key_value_heads": None, "head_dim": None}, _FIXED),
    "mistral": ModelType({**_DEFAULTS, "num_key_value_heads": 8, "head_dim": None}, _FIXED),
    # Its q, k and v have biases, though its config.json has no field for them.
    "qwen2": ModelType({**_DEFAULTS, "num_key_value_heads": 32, "head_dim": None}, {**_FIXED, "attention_bias": True}),
    "qwen3": ModelType({**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128}, _FIXED),
}


def _read(raw: Mapping[str, Any], model_type: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding, biases and norms from a config.json; returns option values and problems."""
    values, problems = read_rope(raw, default_theta=10000.0)
    values["attention_bias"] = model_type == "qwen2"
    values["qk_norm"] = model_type == "qwen3"
    return values, problems


def window_problems(raw: Mapping[str, Any], model_type: str) -> Iterator[str]:
    """Yield a problem if a sliding window applies to positions of the model. Any other window is allowed.

    Families with other layers of the same attention share it.
    """
    # What transformers takes for an absent window.
    window = raw.get("sliding_window", None if model_type == "mixtral" else 4096)
    used = {"llama": False, "mistral": True, "mixtral": True}.get(model_type, raw.get("use_sliding_window", False))
    if model_type in ("qwen2", "qwen3"):
        # Theirs applies from the layer max_window_layers on.
        later = raw["num_hidden_layers"] > raw.get("max_window_layers", 28)
        types = raw.get("layer_types") or ["sliding_attention"] * later
        used = used and "sliding_attention" in types
    longest = raw["max_position_embeddings"]
    if used and window is not None and window < longest:
        yield (
            f"sliding_window={window} is not supported below max_position_embeddings={longest}; with that set to "
            f"{window} the window never applies"
        )


def _write(model: LlamaModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if no model_type represents it."""
    if model.attention_bias and model.qk_norm:
        raise ConfigError("model.attention_bias, model.qk_norm: no model_type of Hugging Face has both as we do")
    if model.attention_bias:
        model_type = "qwen2"
    elif model.qk_norm:
        model_type = "qwen3"
    else:
        model_type = "llama"
    if model_type == "llama" and model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size}, model.num_attention_heads={model.num_attention_heads}: "
            "transformers refuses a llama whose width does not divide by its heads"
        )
    fields |= write_rope(model)
    if model_type == "llama":
        fields |= {"attention_bias": False, "mlp_bias": False}
    else:
        fields |= {"use_sliding_window": False}
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[model_type]
    return {"model_type": model_type, "architectures": [f"{name}ForCausalLM"], **fields}


LLAMA = Family(
    name="llama",
    stage=LlamaStage,
    reference=logits,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=LlamaModel,
    even_head_dim=True,
    problems=scaling_problems,
    hugging_face=HuggingFace(
        model_types=_MODEL_TYPES,
        modules=MODULES_BUT_MLP | MLP_MODULES,
        fields={name: name for name in SAME_FIELDS},
        activations=ACTIVATIONS,
        tied=TIED,
        read=_read,
        judge=window_problems,
        write=_write,
        warnings=factor_warnings,
    ),
    megatron=Megatron(swiglu=True, normalization="RMSNorm", position_embedding_type="rope", add_bias_linear=False),
)
