"""SmolLM3 (Hugging Face, 2025): Llama with some layers that see no positions (NoPE, arXiv 2305.19466).

At Hugging Face: smollm3.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.base.errors import ConfigError
from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar_models.families.llama import LLAMA, LlamaModel, LlamaStage
from megapar_models.family import Family, ModelType, Raw, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.rotary_fields import Rope
from megapar_models.windows import FULL, SLIDING, Windows, read_windows


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


class _Layers(Windows):
    """Biases, layers without positions, and windows of these."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        values = dict.fromkeys(("attention_bias", "attention_out_bias"), raw.get("attention_bias", False))
        layers, interval = raw["num_hidden_layers"], raw.get("no_rope_layer_interval", 4)
        roped = raw.get("no_rope_layers")
        if roped is None:
            if not isinstance(interval, int) or interval < 1:
                return values, [f"no_rope_layer_interval={interval!r} should be a whole number from 1 on"]
            roped = [int((number + 1) % interval != 0) for number in range(layers)]
        if not isinstance(roped, list) or len(roped) < layers or not set(roped) <= {0, 1}:
            text = f"no_rope_layers={roped!r} should be a list with 0 or 1 for each of {layers} layers"
            return values, [text]
        values["no_rope_layers"] = tuple(roped[:layers])
        window = raw.get("sliding_window")
        if not raw.get("use_sliding_window", False):
            window = None
        types = [FULL if window is None or has_rope else SLIDING for has_rope in roped[:layers]]
        windows, problems = read_windows(raw, window, raw.get("layer_types") or types)
        return values | windows, problems

    def write(self, model: SmolLM3Model, fields: dict[str, Any]) -> None:
        if model.attention_bias != model.attention_out_bias or model.qk_norm:
            text = "smollm3 has biases on all four projections or on none, and no norms of q and k"
            raise ConfigError(f"model.attention_bias, model.attention_out_bias, model.qk_norm: {text}")
        super().write(model, fields)
        fields |= {"no_rope_layers": list(model.no_rope_layers or [1] * model.num_hidden_layers)}
        # transformers takes 128004 for an absent padding token, and refuses one beyond the vocabulary.
        fields |= {"attention_bias": model.attention_bias, "pad_token_id": None}

    def problems(self, config: Config, model: SmolLM3Model) -> Iterator[str]:
        yield from super().problems(config, model)
        roped = model.no_rope_layers
        if roped and (len(roped) != model.num_hidden_layers or not set(roped) <= {0, 1}):
            text = f"give 0 or 1 for each of the {model.num_hidden_layers} layers, or nothing"
            yield problem(config, "model.no_rope_layers model.num_hidden_layers", text)


_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0}

SMOLLM3 = Family(
    name="smollm3",
    stage=SmolLM3Stage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=SmolLM3Model,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={"smollm3": ModelType("SmolLM3ForCausalLM", fixed=_FIXED)},
        codecs=(Rope(2e6), _Layers(switch="use_sliding_window")),
        fields=same("mlp_bias"),
        defaults={"tie_word_embeddings": True, "num_key_value_heads": 4, "mlp_bias": False},
        without_effect=("max_window_layers",),  # read by no version of its model
    ),
)
