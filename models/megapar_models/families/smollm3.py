"""SmolLM3 (Hugging Face, 2025): Llama with some layers that see no positions (NoPE, arXiv 2305.19466).

At Hugging Face: smollm3.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
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
from megapar_models.layer_kind import LayerKind
from megapar_models.rope import factor_warnings, read_rope, write_rope
from megapar_models.windows import FULL, SLIDING, read_windows, rotary_problems, write_windows


@dataclass(frozen=True)
class SmolLM3Model(LlamaModel):
    """The options of SmolLM3."""

    no_rope_layers: tuple[int, ...] = field(default=(), metadata=OF_FUNCTION)
    """1 for each layer with rotary positions and 0 for each layer without, as in config.json; empty: all have them."""


class SmolLM3Stage(LlamaStage[SmolLM3Model]):
    """Consecutive SmolLM3 layers."""

    @classmethod
    def layer_kind(cls, model: SmolLM3Model, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        # A list of the wrong length is reported by the family.
        if model.no_rope_layers[number : number + 1] == (0,):
            return replace(kind, rotary=None)
        return kind


# Hugging Face

_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "initializer_range": 0.02}
_DEFAULTS |= {"num_key_value_heads": 4, "head_dim": None, "mlp_bias": False}
_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0}


def _read(raw: Mapping[str, Any], _: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding, biases and kinds of layers from a config.json; returns option values and problems."""
    values, problems = read_rope(raw, default_theta=2e6)
    values["attention_bias"] = values["attention_out_bias"] = raw.get("attention_bias", False)
    layers = raw.get("num_hidden_layers")
    interval = raw.get("no_rope_layer_interval", 4)
    roped = raw.get("no_rope_layers")
    if not isinstance(layers, int):
        return values, problems  # it is reported elsewhere
    if roped is None:
        if not isinstance(interval, int) or interval < 1:
            return values, [*problems, f"no_rope_layer_interval={interval!r} should be a whole number from 1 on"]
        roped = [int((number + 1) % interval != 0) for number in range(layers)]
    if not isinstance(roped, list) or len(roped) < layers or not set(roped) <= {0, 1}:
        text = f"no_rope_layers={roped!r} should be a list with 0 or 1 for each of {layers} layers"
        return values, [*problems, text]
    values["no_rope_layers"] = tuple(roped[:layers])
    window = raw.get("sliding_window")
    if not raw.get("use_sliding_window", False):
        window = None
    types = [FULL if window is None or has_rope else SLIDING for has_rope in roped[:layers]]
    windows, wrong = read_windows(raw, window, raw.get("layer_types") or types)
    return values | windows, [*problems, *wrong]


def _write(model: SmolLM3Model, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if smollm3 does not represent it."""
    if model.attention_bias != model.attention_out_bias or model.qk_norm:
        text = "smollm3 has biases on all four projections or on none, and no norms of q and k"
        raise ConfigError(f"model.attention_bias, model.attention_out_bias, model.qk_norm: {text}")
    fields |= {**write_rope(model), **write_windows(model), "use_sliding_window": model.sliding_window > 0}
    fields |= {"no_rope_layers": list(model.no_rope_layers or [1] * model.num_hidden_layers)}
    # transformers takes 128004 for an absent padding token, and refuses one beyond the vocabulary.
    fields |= {"attention_bias": model.attention_bias, "pad_token_id": None}
    return {"model_type": "smollm3", "architectures": ["SmolLM3ForCausalLM"], **fields}


def _problems(config: Config, model: SmolLM3Model) -> Iterator[str]:
    yield from rotary_problems(config, model)
    roped = model.no_rope_layers
    if roped and (len(roped) != model.num_hidden_layers or not set(roped) <= {0, 1}):
        text = f"give 0 or 1 for each of the {model.num_hidden_layers} layers, or nothing"
        yield problem(config, "model.no_rope_layers model.num_hidden_layers", text)


SMOLLM3 = Family(
    name="smollm3",
    stage=SmolLM3Stage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=SmolLM3Model,
    even_head_dim=True,
    problems=_problems,
    hugging_face=HuggingFace(
        model_types={"smollm3": ModelType(_DEFAULTS, _FIXED)},
        modules=MODULES_BUT_MLP | MLP_MODULES,
        fields={name: name for name in (*SAME_FIELDS, "mlp_bias")},
        activations=ACTIVATIONS,
        tied=TIED,
        read=_read,
        write=_write,
        warnings=factor_warnings,
        without_effect=("max_window_layers",),  # read by no version of its model
    ),
)
