"""Apertus (arXiv 2509.14233): Llama with norms of queries and keys, and an MLP without gate of xIELU.

Its weights are those of Llama (megapar_models.families.llama) without layers.N.mlp.gate, and these, with d the width of
a head:

    layers.N.attention.{q,k}_norm.weight    [d]     on every tp rank; each computes a part of its gradient
    layers.N.mlp.activation.alpha_{p,n}     [1]     on every tp rank; each computes a part of its gradient

At Hugging Face: apertus.
"""

from dataclasses import dataclass
from typing import Any

from megapar_models.families.llama import MODULES_BUT_MLP, PLAIN_MLP_MODULES, SAME_FIELDS, TIED
from megapar_models.family import Family, HuggingFace, ModelType, Raw
from megapar_models.layer_kind import LayerKind
from megapar_models.norms import NormRule
from megapar_models.rope import factor_warnings, read_stated_rope, scaling_problems, write_rope
from megapar_models.rotary import Rotary
from megapar_models.rotary_options import RotaryModel
from megapar_models.stage import Stage


@dataclass(frozen=True)
class ApertusModel(RotaryModel):
    """The options of Apertus."""

    attention_bias: bool = False
    """Biases of all projections of attention."""


class ApertusStage(Stage[ApertusModel]):
    """Consecutive layers of Apertus."""

    @classmethod
    def layer_kind(cls, model: ApertusModel, number: int) -> LayerKind:
        return LayerKind(
            mlp="plain",
            norm=NormRule(model.rms_norm_eps),
            rotary=Rotary.of(model),
            qk_norm=True,
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
        )


# Hugging Face

_MODULES = MODULES_BUT_MLP | PLAIN_MLP_MODULES
_MODULES |= {
    "layers.*.attention_norm": "model.layers.*.attention_layernorm",
    "layers.*.mlp_norm": "model.layers.*.feedforward_layernorm",
    "layers.*.mlp.activation.alpha_p": "model.layers.*.mlp.act_fn.alpha_p",
    "layers.*.mlp.activation.alpha_n": "model.layers.*.mlp.act_fn.alpha_n",
}
# Numbers of xIELU that are not trained.
_CONSTANTS = {"model.layers.*.mlp.act_fn.beta": 0.5, "model.layers.*.mlp.act_fn.eps": -1e-6}
_DEFAULTS = {"hidden_act": "xielu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "initializer_range": 0.02}
_DEFAULTS |= {"num_key_value_heads": None, "head_dim": None, "attention_bias": False}
# The published files also have fields of the program that trained them.
_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0, "hidden_dropout": 0.0, "mlp_bias": False}
_FIXED |= {"post_norm": False, "qk_norm": True}
_ROPE = {"rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "original_max_position_embeddings": 8192}
_ROPE |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


def _read(raw: Raw, _: str) -> tuple[dict[str, Any], list[str]]:
    return read_stated_rope(raw, _ROPE)


def _write(model: ApertusModel, fields: dict[str, Any]) -> dict[str, Any]:
    fields |= write_rope(model)
    # Without any, transformers takes that of the published models.
    fields["rope_scaling"] = fields["rope_scaling"] or {"rope_type": "default"}
    return {"model_type": "apertus", "architectures": ["ApertusForCausalLM"], **fields}


APERTUS = Family(
    name="apertus",
    stage=ApertusStage,
    activations=("xielu",),
    options=ApertusModel,
    even_head_dim=True,
    problems=scaling_problems,
    hugging_face=HuggingFace(
        model_types={"apertus": ModelType(_DEFAULTS, _FIXED)},
        modules=_MODULES,
        constants=_CONSTANTS,
        fields={name: name for name in (*SAME_FIELDS, "attention_bias")},
        activations={"xielu": "xielu"},
        tied=TIED,
        read=_read,
        write=_write,
        warnings=factor_warnings,
    ),
)
