"""The Llama family: the options that it reads, and its names at Hugging Face and in Megatron-LM.

It reads `model_type` llama, mistral, qwen2 and qwen3, as transformers 4 and 5 write them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megapar.config import Config, ModelConfig, RopeScaling, flatten
from megapar.errors import ConfigError
from megapar.messages import problem
from megapar.model_rules import ROPE_SCALING
from megapar_models.family import Family, HuggingFace, Megatron, ModelType, typed, wrong_types
from megapar_models.llama.model import LlamaStage
from megapar_models.llama.reference import logits

_UNUSED_BY_ROPE_TYPE = {"default": ROPE_SCALING[1:], "linear": ROPE_SCALING[2:], "llama3": ()}


def _rope_scaling(config: Config) -> Iterator[str]:
    """Yield the problems of model.rope_scaling: options that its type does not use, and factors in the wrong order."""
    defaults = flatten(Config())
    values = flatten(config)
    scaling = config.model.rope_scaling
    for path in _UNUSED_BY_ROPE_TYPE[scaling.rope_type]:
        if values[path] != defaults[path]:
            text = f"rope_type {scaling.rope_type} does not use it; set model.rope_scaling.rope_type, or leave it out"
            yield problem(config, path, text)
    if scaling.rope_type == "llama3" and scaling.low_freq_factor >= scaling.high_freq_factor:
        options = "model.rope_scaling.low_freq_factor model.rope_scaling.high_freq_factor"
        yield problem(config, options, "low must be below high; Llama 3.1 uses 1 and 4")


# Hugging Face

_MODULES = {
    "embedding": "model.embed_tokens",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention.q": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.k": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.v": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.o": "model.layers.*.self_attn.o_proj",
    "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
    "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.mlp.gate": "model.layers.*.mlp.gate_proj",
    "layers.*.mlp.up": "model.layers.*.mlp.up_proj",
    "layers.*.mlp.down": "model.layers.*.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
_SAME = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
    *("hidden_act", "rms_norm_eps", "tie_word_embeddings", "initializer_range"),
)
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02}
_FIXED = {"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "partial_rotary_factor": 1.0}
_MODEL_TYPES = {
    "llama": ModelType({**_DEFAULTS, "num_key_value_heads": None, "head_dim": None}, _FIXED),
    "mistral": ModelType({**_DEFAULTS, "num_key_value_heads": 8, "head_dim": None}, _FIXED),
    # Its q, k and v have biases, though its config.json has no field for them.
    "qwen2": ModelType({**_DEFAULTS, "num_key_value_heads": 32, "head_dim": None}, {**_FIXED, "attention_bias": True}),
    "qwen3": ModelType({**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128}, _FIXED),
}
_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _read(raw: Mapping[str, Any], model_type: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding, biases and norms from a config.json; returns option values and problems."""
    rope = _rope(raw)
    problems = list(_rope_problems(rope))
    values = {"rope_theta": rope.pop("rope_theta"), "attention_bias": model_type == "qwen2"}
    values["qk_norm"] = model_type == "qwen3"
    if not problems:
        values["rope_scaling"] = RopeScaling(**typed(rope, RopeScaling))
    return values, problems


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The base and the scaling of the rotary embedding, under the names of transformers 5."""
    # transformers 5 has both in `rope_parameters`. Version 4 has `rope_theta` and `rope_scaling`, whose field
    # `rope_type` was once called `type`.
    rope = {"rope_theta": raw.get("rope_theta", 10000.0), "rope_type": "default"}
    rope |= raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    old_type = rope.pop("type", "default")
    if rope["rope_type"] == "default":
        rope["rope_type"] = old_type
    if rope.get("partial_rotary_factor") == 1.0:
        del rope["partial_rotary_factor"]
    return rope


def _rope_problems(rope: dict[str, Any]) -> Iterator[str]:
    """Yield a problem for an unknown rope_type, and for fields that are missing, superfluous or of a wrong type."""
    rope_type = rope["rope_type"]
    if rope_type not in _ROPE_FIELDS:
        yield f"rope_type={rope_type!r} is not supported; {', '.join(_ROPE_FIELDS)} are"
        return
    fields = rope.keys() - {"rope_theta", "rope_type"}
    for field in sorted(fields ^ set(_ROPE_FIELDS[rope_type])):
        verb = "does not use" if field in fields else "lacks"
        yield f"rope_type {rope_type} {verb} {field}"
    yield from wrong_types({"rope_theta": rope["rope_theta"]}, ModelConfig)
    yield from wrong_types({field: rope[field] for field in fields}, RopeScaling)


def _window_problems(raw: Mapping[str, Any], model_type: str) -> Iterator[str]:
    """Yield a problem if a sliding window applies to positions of the model. A window that never applies is allowed."""
    # transformers takes 4096 for an absent window. Qwen's applies only with use_sliding_window, and from the layer
    # max_window_layers on.
    window = raw.get("sliding_window", 4096)
    layers = raw["num_hidden_layers"]
    types = raw.get("layer_types")
    if not types:
        types = ["sliding_attention"] if layers > raw.get("max_window_layers", 28) else []
    used = {"llama": False, "mistral": True}.get(model_type, raw.get("use_sliding_window", False))
    if model_type.startswith("qwen") and "sliding_attention" not in types:
        used = False
    if used and window is not None and window < raw["max_position_embeddings"]:
        yield (
            f"sliding_window={window} is not supported below max_position_embeddings="
            f"{raw['max_position_embeddings']}; with that set to {window} the window never applies"
        )


def _write(model: ModelConfig, fields: dict[str, Any]) -> dict[str, Any]:
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
    scaling = model.rope_scaling
    used = {name: getattr(scaling, name) for name in ("rope_type", *_ROPE_FIELDS[scaling.rope_type])}
    fields |= {"rope_theta": model.rope_theta, "rope_scaling": None if scaling.rope_type == "default" else used}
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
    unused=("model.hidden_dropout", "model.attention_dropout"),
    even_head_dim=True,
    problems=_rope_scaling,
    hugging_face=HuggingFace(
        model_types=_MODEL_TYPES,
        modules=_MODULES,
        fields={name: name for name in _SAME},
        activations={"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh", "relu2": "relu2"},
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        read=_read,
        judge=_window_problems,
        write=_write,
    ),
    megatron=Megatron(swiglu=True, normalization="RMSNorm", position_embedding_type="rope", add_bias_linear=False),
)
