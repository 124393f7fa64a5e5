"""Granite 3: Llama with factors of embeddings, scores, branches and logits.

The names of the weights are those of Llama (megapar_models.families.llama).

At Hugging Face: granite.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import TypeVar

from megapar.config.messages import problem
from megapar.config.model_options import OF_FUNCTION
from megapar.config.options import Config
from megapar.tensor_parallel.cross_entropy import LogitRule
from megapar_models.families.llama import LLAMA
from megapar_models.family import Family, ModelType, Raw, like, same
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.norms import NormRule
from megapar_models.rotary import Rotary, RotaryModel
from megapar_models.rotary_fields import Rope
from megapar_models.stage import Stage


@dataclass(frozen=True)
class GraniteModel(RotaryModel):
    """The options of Granite."""

    attention_bias: bool = False
    """Biases of all projections of attention."""
    embedding_multiplier: float = field(default=1.0, metadata=OF_FUNCTION)
    """The factor of token embeddings."""
    attention_multiplier: float = field(default=0.0, metadata=OF_FUNCTION)
    """The factor of scores; 0: 1 / sqrt(width of a head)."""
    residual_multiplier: float = field(default=1.0, metadata=OF_FUNCTION)
    """The factor of the outputs of attention and MLP."""
    logits_scaling: float = field(default=1.0, metadata=OF_FUNCTION)
    """Logits are divided by it."""


@dataclass(frozen=True)
class DenseGraniteModel(GraniteModel):
    """The options of Granite without experts."""

    mlp_bias: bool = False
    """Biases of all matrices of the MLP."""


G = TypeVar("G", bound=GraniteModel, default=GraniteModel)


class GraniteStage(Stage[G]):
    """Consecutive layers with the factors of Granite."""

    @classmethod
    def layer_kind(cls, model: G, number: int) -> LayerKind:
        return LayerKind(
            norm=NormRule(model.rms_norm_eps),
            rotary=Rotary.of(model),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            attention_scale=model.attention_multiplier or None,
            residual_multiplier=model.residual_multiplier,
        )

    @classmethod
    def ends_of(cls, model: G) -> Ends:
        return Ends(embedding_multiplier=model.embedding_multiplier, logits=LogitRule(1.0 / model.logits_scaling))


class DenseGraniteStage(GraniteStage[DenseGraniteModel]):
    """Consecutive layers of Granite without experts."""

    @classmethod
    def layer_kind(cls, model: DenseGraniteModel, number: int) -> LayerKind:
        return replace(super().layer_kind(model, number), mlp_bias=model.mlp_bias)


class Multipliers(Rope):
    """Rotary positions, and the factors of Granite."""

    def judge(self, raw: Raw, model_type: str) -> Iterator[str]:
        if raw.get("attention_multiplier", 1.0) == 0:
            yield "attention_multiplier=0 is not supported; a model with it would see no difference between keys"

    def write(self, model: GraniteModel, fields: dict[str, Any]) -> None:
        fields |= {"attention_multiplier": model.attention_multiplier or model.head_dim**-0.5}
        super().write(model, fields)

    def problems(self, config: Config, model: GraniteModel) -> Iterator[str]:
        yield from super().problems(config, model)
        if model.logits_scaling <= 0:
            yield problem(config, "model.logits_scaling", "logits are scaled by it; use a number above 0")


_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")

GRANITE = Family(
    name="granite",
    stage=DenseGraniteStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=DenseGraniteModel,
    even_head_dim=True,
    hugging_face=like(
        LLAMA,
        model_types={"granite": ModelType("GraniteForCausalLM", fixed={"attention_dropout": 0.0})},
        codecs=(Multipliers(),),
        fields=same("attention_bias", *_FACTORS, "mlp_bias"),
        defaults={"attention_bias": False, "mlp_bias": False, **dict.fromkeys(_FACTORS, 1.0)},
    ),
)
