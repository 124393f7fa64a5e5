"""Each family's Hugging Face names, and what of their config.json we can be.

Read are `model_type` llama, mistral, qwen2, qwen3 and gpt2, as transformers 4 and 5 spell them. A field that would
change what is computed, and that our models do not have, is refused by name.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_type_hints

from megapar.config import ModelConfig, RopeScaling
from megapar.errors import ConfigError

# Our modules to theirs; * is the layer's number. GPT-2 keeps q, k and v stacked in one.
MODULES = {
    "llama": {
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
    },
    "gpt": {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "layers.*.attention_norm": "transformer.h.*.ln_1",
        "layers.*.attention.q": "transformer.h.*.attn.c_attn",
        "layers.*.attention.k": "transformer.h.*.attn.c_attn",
        "layers.*.attention.v": "transformer.h.*.attn.c_attn",
        "layers.*.attention.o": "transformer.h.*.attn.c_proj",
        "layers.*.mlp_norm": "transformer.h.*.ln_2",
        "layers.*.mlp.up": "transformer.h.*.mlp.c_fc",
        "layers.*.mlp.down": "transformer.h.*.mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
}
# Their Conv1D modules, whose weights are [in, out].
CONV1D = {f"transformer.h.*.{name}" for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
# What a file of a tied model may hold besides.
TIED = {"llama": {"lm_head.weight": "model.embed_tokens.weight"}, "gpt": {"lm_head.weight": "transformer.wte.weight"}}
# Tables that old versions stored among the weights: causal masks and rotary wavelengths.
_DERIVED = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")

# Their fields to ours; llama's have the same names.
_SAME = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings"),
    *("hidden_act", "rms_norm_eps", "tie_word_embeddings", "initializer_range"),
)
_FIELDS = {
    "llama": {name: name for name in _SAME},
    "gpt": {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "vocab_size": "vocab_size",
        "n_positions": "max_position_embeddings",
        "activation_function": "hidden_act",
        "layer_norm_epsilon": "rms_norm_eps",
        "tie_word_embeddings": "tie_word_embeddings",
        "resid_pdrop": "hidden_dropout",
        "attn_pdrop": "attention_dropout",
        "initializer_range": "initializer_range",
    },
}
# What an absent field means to transformers. Sizes that are not here must be there.
_LLAMA_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**_LLAMA_DEFAULTS, "num_key_value_heads": None, "head_dim": None},
    "mistral": {**_LLAMA_DEFAULTS, "num_key_value_heads": 8, "head_dim": None},
    "qwen2": {**_LLAMA_DEFAULTS, "num_key_value_heads": 32, "head_dim": None},
    "qwen3": {**_LLAMA_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
    "gpt2": {
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "initializer_range": 0.02,
    },
}
# Fields that must have this value where they stand: with another, other things are computed.
_LLAMA_FIXED = {"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "partial_rotary_factor": 1.0}
_FIXED: dict[str, dict[str, Any]] = {
    "llama": _LLAMA_FIXED,
    "mistral": _LLAMA_FIXED,
    "qwen2": {**_LLAMA_FIXED, "attention_bias": True},  # it has them without saying so
    "qwen3": _LLAMA_FIXED,
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
}
_ACTIVATIONS = {
    "llama": {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_pytorch_tanh", "relu2": "relu2"},
    "gpt": {"gelu_new": "gelu_pytorch_tanh", "gelu_pytorch_tanh": "gelu_pytorch_tanh", "relu2": "relu2"},
}


def canonical_name(name: str, family: str) -> str | None:
    """The name that the tables use of a stored tensor; None for one that holds no weights.

    GPT-2's own files lack the prefix that models with a head give its names.
    """
    if _DERIVED.search(name):
        return None
    bare = family == "gpt" and not name.startswith(("transformer.", "lm_head."))
    return f"transformer.{name}" if bare else name


def from_hugging_face(raw: Mapping[str, Any]) -> ModelConfig:
    """The model that a config.json describes. Raises ConfigError naming every field that we cannot be."""
    kind = raw.get("model_type")
    if kind not in _DEFAULTS:
        raise ConfigError(f"config.json: model_type={kind!r} is not supported; {', '.join(_DEFAULTS)} are")
    family: Literal["llama", "gpt"] = "gpt" if kind == "gpt2" else "llama"
    problems = [*_unsupported(raw, kind)]
    values: dict[str, Any] = {}
    for theirs, ours in _FIELDS[family].items():
        value = raw.get(theirs, _DEFAULTS[kind].get(theirs))
        if value is None and theirs not in _DEFAULTS[kind]:
            problems.append(f"{theirs} is missing")
        elif ours == "hidden_act" and value not in _ACTIVATIONS[family]:
            problems.append(f"{theirs}={value!r} is not supported; {', '.join(_ACTIVATIONS[family])} are")
        elif value is not None:
            values[ours] = _ACTIVATIONS[family][value] if ours == "hidden_act" else value
    if family == "llama":
        rope = _rope(raw)
        problems += _rope_problems(rope)
        values |= {"rope_theta": rope.pop("rope_theta"), "attention_bias": kind == "qwen2", "qk_norm": kind == "qwen3"}
    problems += _wrong_types(values, ModelConfig)
    if not problems and family == "llama":
        problems += _window_problems(raw, kind)
    if problems:
        raise ConfigError("\n".join(f"config.json: {problem}" for problem in problems))
    scaling = RopeScaling(**_typed(rope, RopeScaling)) if family == "llama" else RopeScaling()
    return ModelConfig(family=family, rope_scaling=scaling, **_typed(values, ModelConfig))


def told(raw: Mapping[str, Any]) -> list[str]:
    """What of a supported config.json has no option of ours and does not matter to what the model computes."""
    embedding, residual = raw.get("embd_pdrop", 0.1), raw.get("resid_pdrop", 0.1)
    if raw.get("model_type") == "gpt2" and embedding != residual:
        both = "model.hidden_dropout is the latter for both, and training may choose another"
        return [f"config.json: embd_pdrop={embedding} differs from resid_pdrop={residual}: {both}"]
    return []


def _unsupported(raw: Mapping[str, Any], kind: str) -> Iterator[str]:
    for field, value in {**_FIXED[kind], "quantization_config": None}.items():
        if raw.get(field, value) != value:
            yield f"{field}={raw[field]!r} is not supported; {value!r} is"


def _wrong_types(values: Mapping[str, Any], section: type) -> Iterator[str]:
    for name, kind in get_type_hints(section).items():
        value = values.get(name)
        allowed = (int, float) if kind is float else kind if kind in (int, bool) else object
        if name in values and (not isinstance(value, allowed) or isinstance(value, bool) != (kind is bool)):
            yield f"{name}={value!r} should be {kind.__name__}"


def _typed(values: Mapping[str, Any], section: type) -> dict[str, Any]:
    """JSON's whole numbers as floats where options are floats."""
    types = get_type_hints(section)
    return {name: float(value) if types[name] is float else value for name, value in values.items()}


def _rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Base and scaling of the rotary embedding. transformers 5 keeps both in `rope_parameters`; before, there were
    `rope_theta` and `rope_scaling`, whose `rope_type` was once `type`."""
    rope = {"rope_theta": raw.get("rope_theta", 10000.0), "rope_type": "default"}
    rope |= raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    old_type = rope.pop("type", "default")
    rope["rope_type"] = old_type if rope["rope_type"] == "default" else rope["rope_type"]
    if rope.get("partial_rotary_factor") == 1.0:
        del rope["partial_rotary_factor"]
    return rope


_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope_problems(rope: dict[str, Any]) -> Iterator[str]:
    kind = rope["rope_type"]
    if kind not in _ROPE_FIELDS:
        yield f"rope_type={kind!r} is not supported; {', '.join(_ROPE_FIELDS)} are"
        return
    found = rope.keys() - {"rope_theta", "rope_type"}
    for field in sorted(found ^ set(_ROPE_FIELDS[kind])):
        yield f"rope_type {kind} {'does not use' if field in found else 'lacks'} {field}"
    yield from _wrong_types({"rope_theta": rope["rope_theta"]}, ModelConfig)
    yield from _wrong_types({field: rope[field] for field in found}, RopeScaling)


def _window_problems(raw: Mapping[str, Any], kind: str) -> Iterator[str]:
    """A sliding window may stand there if it never applies: absent it means 4096, and Qwen's has switches."""
    window, layers = raw.get("sliding_window", 4096), raw["num_hidden_layers"]
    types = raw.get("layer_types") or ["sliding_attention"] * (layers > raw.get("max_window_layers", 28))
    used = {"llama": False, "mistral": True}.get(kind, raw.get("use_sliding_window", False))
    if kind.startswith("qwen") and "sliding_attention" not in types:
        used = False
    if used and window is not None and window < raw["max_position_embeddings"]:
        yield (
            f"sliding_window={window} is not supported below max_position_embeddings="
            f"{raw['max_position_embeddings']}; with that set to {window} the window never applies"
        )


def to_hugging_face(model: ModelConfig) -> dict[str, Any]:
    """config.json of a validated model, as transformers 4 and 5 read it. Raises ConfigError if no model_type is it."""
    fields = {theirs: getattr(model, ours) for theirs, ours in _FIELDS[model.family].items()}
    if model.family == "gpt":
        whole = model.num_key_value_heads == model.num_attention_heads
        if not whole or model.num_attention_heads * model.head_dim != model.hidden_size:
            raise ConfigError(
                "model.num_key_value_heads, model.head_dim: gpt2 of Hugging Face has as many key/value heads as heads, "
                "of width hidden_size / num_attention_heads"
            )
        if model.hidden_act == "gelu_pytorch_tanh":
            fields["activation_function"] = "gelu_new"
        fields["embd_pdrop"] = model.hidden_dropout
        return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **fields, **_FIXED["gpt2"]}
    if model.attention_bias and model.qk_norm:
        raise ConfigError("model.attention_bias, model.qk_norm: no model_type of Hugging Face has both as we do")
    kind = "qwen2" if model.attention_bias else "qwen3" if model.qk_norm else "llama"
    if kind == "llama" and model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size}, model.num_attention_heads={model.num_attention_heads}: "
            "transformers refuses a llama whose width does not divide by its heads"
        )
    scaling = model.rope_scaling
    used = {name: getattr(scaling, name) for name in ("rope_type", *_ROPE_FIELDS[scaling.rope_type])}
    fields |= {"rope_theta": model.rope_theta, "rope_scaling": None if scaling.rope_type == "default" else used}
    fields |= {"attention_bias": False, "mlp_bias": False} if kind == "llama" else {"use_sliding_window": False}
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[kind]
    return {"model_type": kind, "architectures": [f"{name}ForCausalLM"], **fields}
