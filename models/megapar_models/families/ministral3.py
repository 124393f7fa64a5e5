"""Ministral 3 (Mistral AI, 2025): Llama with YaRN, and with a factor of queries that grows with the position.

Its weights are those of Llama (megapar_models.families.llama).

At Hugging Face: ministral3, also the text of mistral3.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar_models.families.llama import LLAMA
from megapar_models.family import Family, ModelType, Raw, like
from megapar_models.layer_kind import LayerKind, Temperature
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary, RotaryModel
from megapar_models.rotary_fields import StatedRope, split_rope, stated_rope, write_rope
from megapar_models.stage import Stage
from megapar_models.windows import OneWindow, WindowModel, window_of


@dataclass(frozen=True)
class TemperatureModel(RotaryModel):
    """The options of a family whose queries have a factor by position."""

    llama_4_scaling_beta: float = field(default=0.0, metadata=OF_FUNCTION)
    """Queries are multiplied by 1 + beta ln(1 + floor(position / rope_scaling.original_max_position_embeddings))."""


def temperature_of(model: TemperatureModel) -> Temperature | None:
    """Return the factor of queries by position, for `LayerKind.temperature`."""
    if not model.llama_4_scaling_beta:
        return None
    return Temperature(model.llama_4_scaling_beta, model.rope_scaling.original_max_position_embeddings)


@dataclass(frozen=True)
class Ministral3Model(WindowModel, TemperatureModel):
    """The options of Ministral 3."""


class Ministral3Stage(Stage[Ministral3Model]):
    """Consecutive layers of Ministral 3."""

    @classmethod
    def layer_kind(cls, model: Ministral3Model, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps),
            rotary=Rotary.of(model),
            window=window_of(model, number),
            temperature=temperature_of(model),
        )


_OF_NO_LENGTH = ("default", "linear")  # the types of rotary positions without an original length
_BETA = "llama_4_scaling_beta"


class TemperatureRope(StatedRope):
    """Rotary positions, and the temperature among their parameters."""

    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        stated = stated_rope(raw)
        # The length there is that of the file, which transformers reads beside them.
        raw, beside = split_rope(raw, _BETA, "max_position_embeddings")
        if stated.get("rope_type", stated.get("type", "default")) in _OF_NO_LENGTH:
            # transformers reads the length also if there is no temperature.
            raw, _ = split_rope(raw, "original_max_position_embeddings")
        values, problems = super().read(raw, model_type)
        if stated and _BETA not in beside:
            problems.append(f"rope_parameters lacks {_BETA}; transformers fails without it, and 0.0 means none")
        return {**values, _BETA: beside.get(_BETA, 0.1)}, problems

    def write(self, model: Any, fields: dict[str, Any]) -> None:
        rope = write_rope(model)
        parameters = {"rope_type": "default", **(rope["rope_scaling"] or {}), "rope_theta": rope["rope_theta"]}
        # transformers reads the length also if there is no temperature.
        parameters.setdefault("original_max_position_embeddings", model.max_position_embeddings)
        fields |= {"rope_parameters": {**parameters, _BETA: model.llama_4_scaling_beta}}


def temperature_problems(config: Config, model: TemperatureModel) -> Iterator[str]:
    """Yield the problems of the factor of queries by position."""
    name = "model.llama_4_scaling_beta"
    if model.llama_4_scaling_beta < 0:
        yield problem(config, name, "must be at least 0")
    if model.llama_4_scaling_beta and model.rope_scaling.rope_type in _OF_NO_LENGTH:
        text = "is about the original length of contexts, which this rope_type does not have; use yarn, or 0.0"
        yield problem(config, f"{name} model.rope_scaling.rope_type", text)


# What transformers takes if a config.json has no field about rotary positions.
_ROPE = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384}
_ROPE |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0}
_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0}

MINISTRAL3 = Family(
    name="ministral3",
    stage=Ministral3Stage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=Ministral3Model,
    even_head_dim=True,
    problems=temperature_problems,
    hugging_face=like(
        LLAMA,
        model_types={"ministral3": ModelType("Ministral3ForCausalLM", fixed=_FIXED)},
        codecs=(TemperatureRope(warns=False, default=_ROPE), OneWindow()),
        defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128},
    ),
)
