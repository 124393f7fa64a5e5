"""Helium (Kyutai, 2025) and dense ERNIE 4.5 (Baidu, 2025): their names at Hugging Face (helium, ernie4_5).

Both are Llama, by another order of the rows of q and k: the two numbers of a rotary pair lie beside each other. A
conversion moves them half a head apart.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.options import Config
from megapar_models.families.llama import (
    ACTIVATIONS,
    MLP_MODULES,
    MODULES_BUT_MLP,
    SAME_FIELDS,
    TIED,
    LlamaModel,
    LlamaStage,
)
from megapar_models.family import Family, HuggingFace, ModelType
from megapar_models.rope import factor_warnings, read_rope, scaling_problems, write_rope
from megapar_models.tensor_layouts import Pairs

# Hugging Face

_DEFAULTS = {"hidden_act": "silu", "initializer_range": 0.02}
_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0}
_MODEL_TYPES = {
    "helium": ModelType(
        {**_DEFAULTS, "rms_norm_eps": 1e-8, "tie_word_embeddings": False, "num_key_value_heads": 20, "head_dim": 128},
        _FIXED,
    ),
    "ernie4_5": ModelType(
        {**_DEFAULTS, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "num_key_value_heads": 2, "head_dim": 128},
        {**_FIXED, "attention_bias": False, "mlp_bias": False},
    ),
}


def _read(raw: Mapping[str, Any], model_type: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding and biases from a config.json; returns option values and problems."""
    if model_type == "ernie4_5":
        values, problems = read_rope(raw, default_theta=500000.0)
        names = ("attention_bias", "attention_out_bias", "mlp_bias")
        return values | dict.fromkeys(names, raw.get("use_bias", False)), problems
    values, problems = read_rope(raw, default_theta=100000.0)
    values |= {name: raw.get(name, False) for name in ("attention_bias", "mlp_bias")}
    heads = raw.get("num_attention_heads")
    width = raw.get("head_dim", 128)
    if isinstance(heads, int) and isinstance(width, int) and heads * width != raw.get("hidden_size"):
        problems.append(f"hidden_size={raw.get('hidden_size')} should be num_attention_heads x head_dim in helium")
    return values, problems


def _write(model: LlamaModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if neither model_type represents it."""
    fields |= write_rope(model)
    biases = {model.attention_bias, model.attention_out_bias, model.mlp_bias}
    if len(biases) == 1:
        fields |= {"use_bias": model.mlp_bias}
        return {"model_type": "ernie4_5", "architectures": ["Ernie4_5ForCausalLM"], **fields}
    if model.attention_out_bias or model.num_attention_heads * model.head_dim != model.hidden_size:
        text = "ernie4_5 has all biases or none; helium has none on o, and heads as wide as the model"
        raise ConfigError(f"model.attention_bias, model.attention_out_bias, model.mlp_bias, model.head_dim: {text}")
    fields |= {"attention_bias": model.attention_bias, "mlp_bias": model.mlp_bias}
    return {"model_type": "helium", "architectures": ["HeliumForCausalLM"], **fields}


def _pairs(model: LlamaModel) -> dict[str, Pairs]:
    pairs = Pairs(model.head_dim, 0, model.head_dim)
    return {"layers.*.attention.q": pairs, "layers.*.attention.k": pairs}


def _problems(config: Config, model: LlamaModel) -> Iterator[str]:
    yield from scaling_problems(config, model)
    if model.qk_norm or model.sliding_window or model.layer_types:
        text = "family helium has no norms of q and k and no windows; use family llama"
        yield problem(config, "model.qk_norm model.sliding_window model.layer_types", text)


HELIUM = Family(
    name="helium",
    stage=LlamaStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=LlamaModel,
    even_head_dim=True,
    problems=_problems,
    hugging_face=HuggingFace(
        model_types=_MODEL_TYPES,
        modules=MODULES_BUT_MLP | MLP_MODULES,
        fields={name: name for name in SAME_FIELDS},
        activations=ACTIVATIONS,
        tied=TIED,
        pairs=_pairs,
        read=_read,
        write=_write,
        warnings=factor_warnings,
    ),
)
