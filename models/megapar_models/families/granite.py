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
from megapar_models.families.llama import ACTIVATIONS, MLP_MODULES, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.family import Family, HuggingFace, ModelType, Raw
from megapar_models.layer_kind import Ends, LayerKind
from megapar_models.norms import NormRule
from megapar_models.rope import factor_warnings, read_rope, scaling_problems, write_rope
from megapar_models.rotary import Rotary
from megapar_models.rotary_options import RotaryModel
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


MULTIPLIERS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
FIELDS = {name: name for name in (*SAME_FIELDS, "attention_bias", *MULTIPLIERS)}
DEFAULTS: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
DEFAULTS |= {"initializer_range": 0.02, "num_key_value_heads": None, "head_dim": None, "attention_bias": False}
DEFAULTS |= dict.fromkeys(MULTIPLIERS, 1.0)
FIXED = {"attention_dropout": 0.0}


def multiplier_problems(config: Config, model: GraniteModel) -> Iterator[str]:
    """Yield the problems of rotary options and of factors."""
    yield from scaling_problems(config, model)
    if model.logits_scaling <= 0:
        yield problem(config, "model.logits_scaling", "logits are divided by it; use a number above 0")


def judge_multipliers(raw: Raw, _: str) -> Iterator[str]:
    """Yield a problem for factors that our options give another meaning."""
    if raw.get("attention_multiplier", 1.0) == 0:
        yield "attention_multiplier=0 is not supported; a model with it would see no difference between keys"


def write_multipliers(model: GraniteModel) -> dict[str, Any]:
    """The fields of a config.json that derive from several options."""
    return {"attention_multiplier": model.attention_multiplier or model.head_dim**-0.5, **write_rope(model)}


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    return read_rope(raw, default_theta=10000.0)


def _write(model: DenseGraniteModel, fields: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "granite", "architectures": ["GraniteForCausalLM"], **fields, **write_multipliers(model)}


GRANITE = Family(
    name="granite",
    stage=DenseGraniteStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=DenseGraniteModel,
    even_head_dim=True,
    problems=multiplier_problems,
    hugging_face=HuggingFace(
        model_types={"granite": ModelType({**DEFAULTS, "mlp_bias": False}, FIXED)},
        modules=MODULES_BUT_MLP | MLP_MODULES,
        fields={**FIELDS, "mlp_bias": "mlp_bias"},
        activations=ACTIVATIONS,
        tied=TIED,
        read=_read,
        judge=judge_multipliers,
        write=_write,
        warnings=factor_warnings,
    ),
)
