"""Arcee's AFM (Arcee AI, 2025): Llama with an MLP without gate, of squared ReLU (So et al., arXiv 2109.08668).

Its weights are those of Llama (megapar_models.families.llama), without layers.N.mlp.gate.

At Hugging Face: arcee.
"""

from dataclasses import dataclass
from typing import Any

from megapar_models.families.llama import MODULES_BUT_MLP, PLAIN_MLP_MODULES, SAME_FIELDS, TIED
from megapar_models.family import Family, HuggingFace, ModelType, Raw, refuse_uneven_heads
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rope import factor_warnings, read_rope, scaling_problems, write_rope
from megapar_models.rotary import Rotary
from megapar_models.rotary_options import RotaryModel
from megapar_models.stage import Stage


@dataclass(frozen=True)
class ArceeModel(RotaryModel):
    """The options of AFM."""

    attention_bias: bool = False
    """Biases of all projections of attention."""
    mlp_bias: bool = False
    """Biases of both matrices of the MLP."""


class ArceeStage(Stage[ArceeModel]):
    """Consecutive layers of AFM."""

    @classmethod
    def layer_kind(cls, model: ArceeModel, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=NormRule(model.rms_norm_eps),
            rotary=Rotary.of(model),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            mlp_bias=model.mlp_bias,
        )


# Hugging Face

_DEFAULTS = {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "initializer_range": 0.02}
_DEFAULTS |= {"num_key_value_heads": None, "head_dim": None, "attention_bias": False, "mlp_bias": False}


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    return read_rope(raw, default_theta=10000.0)


def _write(model: ArceeModel, fields: dict[str, Any]) -> dict[str, Any]:
    refuse_uneven_heads(model, "arcee")
    return {"model_type": "arcee", "architectures": ["ArceeForCausalLM"], **fields, **write_rope(model)}


ARCEE = Family(
    name="arcee",
    stage=ArceeStage,
    activations=("relu2", "silu", "gelu_pytorch_tanh"),
    options=ArceeModel,
    even_head_dim=True,
    problems=scaling_problems,
    hugging_face=HuggingFace(
        model_types={"arcee": ModelType(_DEFAULTS, {"attention_dropout": 0.0, "partial_rotary_factor": 1.0})},
        modules=MODULES_BUT_MLP | PLAIN_MLP_MODULES,
        fields={name: name for name in (*SAME_FIELDS, "attention_bias", "mlp_bias")},
        activations={name: name for name in ("relu2", "silu", "gelu_pytorch_tanh")},
        tied=TIED,
        read=_read,
        write=_write,
        warnings=factor_warnings,
    ),
)
