"""Granite with windows (Granite SWASH, IBM, 2026): a sink of each head, and a rotary base for each layer.

Its weights are those of Llama (megapar_models.families.llama), and layers.N.attention.sinks [heads].

At Hugging Face: granite_swa.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar_models.families.granite import GRANITE, DenseGraniteModel, GraniteModel, GraniteStage, Multipliers
from megapar_models.family import Family, ModelType, Raw, like
from megapar_models.layer_kind import LayerKind
from megapar_models.rotary import Rotary
from megapar_models.rotary_fields import stated_rope
from megapar_models.windows import FULL, SLIDING, WindowModel, Windows, window_of


@dataclass(frozen=True)
class GraniteWindowModel(WindowModel, GraniteModel):
    """The options of Granite with windows, with experts or without."""

    layer_rope_theta: tuple[float, ...] = field(default=(), metadata=OF_FUNCTION)
    """The base of the rotary wavelengths of each layer, 0 for a layer without positions; empty: all have
    model.rope_theta."""


@dataclass(frozen=True)
class GraniteSwaModel(GraniteWindowModel, DenseGraniteModel):
    """The options of Granite with windows."""


def with_windows(kind: LayerKind, model: GraniteWindowModel, number: int) -> LayerKind:
    """Return `kind` with the window, the rotary table and the sinks of layer `number`."""
    # A list of the wrong length is reported by the family.
    theta = (*model.layer_rope_theta[number : number + 1], model.rope_theta)[0]
    rotary = replace(Rotary.of(model), theta=theta) if theta else None
    return replace(kind, rotary=rotary, window=window_of(model, number), sinks=True)


class GraniteSwaStage(GraniteStage[GraniteSwaModel]):
    """Consecutive layers of Granite with windows."""

    @classmethod
    def layer_kind(cls, model: GraniteSwaModel, number: int) -> LayerKind:
        kind = replace(super().layer_kind(model, number), mlp_bias=model.mlp_bias)
        return with_windows(kind, model, number)


class LayerBases(Windows):
    """The windows and the rotary bases of layers."""

    def types(self, raw: Raw) -> list[str]:
        layers = range(raw["num_hidden_layers"])
        return raw.get("layer_types") or [SLIDING if number % 4 else FULL for number in layers]

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        values, problems = super().read(raw, model_type)
        bases = raw.get("layer_rope_theta")
        if bases is None:
            return values, problems
        if not all(isinstance(base, (int, float)) and base >= 0 for base in bases):
            return values, [*problems, f"layer_rope_theta={bases!r} should be a list of numbers from 0 on"]
        if {*bases} == {stated_rope(raw).get("rope_theta", raw.get("rope_theta", 10000.0))}:
            return values, problems
        return values | {"layer_rope_theta": tuple(float(base) for base in bases)}, problems

    def write(self, model: GraniteWindowModel, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        fields |= {"layer_rope_theta": list(model.layer_rope_theta) or None}

    def problems(self, config: Config, model: GraniteWindowModel) -> Iterator[str]:
        yield from super().problems(config, model)
        bases = model.layer_rope_theta
        if bases and (len(bases) != model.num_hidden_layers or min(bases) < 0):
            text = f"give a base from 0 on for each of the {model.num_hidden_layers} layers, or nothing"
            yield problem(config, "model.layer_rope_theta model.num_hidden_layers", text)


SINKS = {"layers.*.attention.sinks": "model.layers.*.self_attn.sinks"}

GRANITE_SWA = Family(
    name="granite_swa",
    stage=GraniteSwaStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=GraniteSwaModel,
    even_head_dim=True,
    hugging_face=like(
        GRANITE,
        model_types={"granite_swa": ModelType("GraniteSWAForCausalLM", fixed={"attention_dropout": 0.0})},
        codecs=(Multipliers(), LayerBases(128, needed=True)),
        modules=SINKS,
        defaults={"num_key_value_heads": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    ),
)
