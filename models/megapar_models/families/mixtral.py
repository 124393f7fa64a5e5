"""Mixtral (arXiv 2401.04088): Llama with a mixture of experts in place of the MLP.

These are the weights beyond those of Llama (megapar_models.families.llama has the others). Sizes are h hidden, f the
width of an expert, and E experts:

    layers.N.mlp.router.weight                  [E, h]    on every tp rank; each computes a part of its gradient
    layers.N.mlp.router.bias                    [E]       balance=bias alone: no parameter, but state
    layers.N.mlp.experts.K.{gate,up}.weight     [f, h]    on the ep rank of expert K; cut by output over etp
    layers.N.mlp.experts.K.down.weight          [h, f]    on the ep rank of expert K; cut by input over etp
    layers.N.mlp.shared.{gate,up,down}.weight             an expert for every token (optional), cut as an MLP
    layers.N.mlp.shared_gate.weight             [1, h]    on every tp rank (optional)

The Mixtral family (arXiv 2401.04088): its options, and its names at Hugging Face.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from typing_extensions import TypeVar

from megapar.config.model_options import MixtureModel, MoEConfig
from megapar_models.families.llama import ACTIVATIONS, MODULES_BUT_MLP, SAME_FIELDS, TIED
from megapar_models.family import Family, HuggingFace, ModelType
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import mixture_warnings, read_moe, refuse_unwritable, refuse_windows
from megapar_models.norms import NormRule
from megapar_models.reference import mixtral_logits
from megapar_models.rope import read_rope, scaling_problems, write_rope
from megapar_models.rotary import Rotary
from megapar_models.rotary_options import RotaryModel
from megapar_models.stage import Stage


@dataclass(frozen=True)
class MixtralModel(MixtureModel, RotaryModel):
    """The options of Mixtral."""


X = TypeVar("X", bound=MixtralModel, default=MixtralModel)


class MixtralStage(Stage[X]):
    """Consecutive Mixtral layers."""

    @classmethod
    def layer_kind(cls, model: X, number: int) -> LayerKind:
        return LayerKind(norm=NormRule(model.rms_norm_eps), rotary=Rotary.of(model), mlp="mixture", mixture=model.moe)


# Hugging Face

EXPERTS = {
    "layers.*.mlp.router": "model.layers.*.block_sparse_moe.gate",
    "layers.*.mlp.experts.*.gate": "model.layers.*.block_sparse_moe.experts.*.w1",
    "layers.*.mlp.experts.*.up": "model.layers.*.block_sparse_moe.experts.*.w3",
    "layers.*.mlp.experts.*.down": "model.layers.*.block_sparse_moe.experts.*.w2",
}
STACKED = {
    "model.layers.*.block_sparse_moe.experts.gate_up_proj": ("w1", "w3"),
    "model.layers.*.block_sparse_moe.experts.down_proj": ("w2",),
}
# What transformers 5 calls mlp, in memory and in files of stacked experts.
RENAMED = {".mlp.": ".block_sparse_moe."}
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "initializer_range": 0.02}
_DEFAULTS |= {"num_key_value_heads": 8, "head_dim": None}
_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0, "router_jitter_noise": 0.0}
_MOE = {name: name for name in ("num_experts_per_tok", "router_aux_loss_coef")} | {"num_local_experts": "num_experts"}
_MOE_DEFAULTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.001}


def _read(raw: Mapping[str, Any], _: str) -> tuple[dict[str, Any], list[str]]:
    """Rotary embedding and experts from a config.json; returns option values and problems."""
    values, problems = read_rope(raw, default_theta=1e6)
    moe, wrong = read_moe(raw, _MOE, _MOE_DEFAULTS)
    # Mixtral takes the softmax of the chosen experts' logits. That is the softmax of all logits, divided by its sum
    # over the chosen experts.
    return values | {"moe": MoEConfig(norm_topk_prob=True, **moe)}, [*problems, *wrong]


def _write(model: MixtralModel, fields: dict[str, Any]) -> dict[str, Any]:
    """The config.json of `model`. Raises ConfigError if mixtral does not represent it."""
    refuse_unwritable(model, "mixtral", {"norm_topk_prob": True}, ())
    fields |= {theirs: getattr(model.moe, ours) for theirs, ours in _MOE.items()} | write_rope(model)
    # All its layers have experts, so their width is the only one. Hugging Face's field for it is intermediate_size.
    fields |= {"intermediate_size": model.moe.moe_intermediate_size, "sliding_window": None}
    return {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], **fields}


MIXTRAL = Family(
    name="mixtral",
    stage=MixtralStage,
    reference=mixtral_logits,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=MixtralModel,
    even_head_dim=True,
    problems=scaling_problems,
    hugging_face=HuggingFace(
        model_types={"mixtral": ModelType(_DEFAULTS, _FIXED)},
        modules=MODULES_BUT_MLP | EXPERTS,
        stacked=STACKED,
        renamed=RENAMED,
        fields={name: name for name in SAME_FIELDS},
        activations=ACTIVATIONS,
        tied=TIED,
        read=_read,
        judge=refuse_windows,
        write=_write,
        warnings=mixture_warnings,
    ),
)
