"""Mellum 2 (JetBrains, 2026): Qwen3-MoE with windows, whose layers have a rotary table of their own.

Its weights are those of Qwen3-MoE (megapar_models.families.qwen3_moe).

At Hugging Face: mellum. The layer of multi-token prediction is left out.
"""

from dataclasses import dataclass, field, replace

from megapar_models.families.laguna import ExpertsByLayer
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.families.qwen3_moe import QWEN3_MOE, Qwen3MoeExperts
from megapar_models.family import Family, ModelType, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.rotary_fields import LocalRope
from megapar_models.windows import LocalRopeModel, Windows, rotary_of, window_of


@dataclass(frozen=True)
class MellumModel(MixtralModel, LocalRopeModel):
    """The options of Mellum 2."""

    moe: Qwen3MoeExperts = field(default_factory=Qwen3MoeExperts)
    """Mixture of experts."""
    attention_bias: bool = False
    """Biases of all projections of attention."""


class MellumStage(MixtralStage[MellumModel]):
    """Consecutive layers of Mellum 2."""

    @classmethod
    def layer_kind(cls, model: MellumModel, number: int) -> LayerKind:
        kind = replace(
            super().layer_kind(model, number),
            rotary=rotary_of(model, number),
            window=window_of(model, number),
            qkv_bias=model.attention_bias,
            out_bias=model.attention_bias,
            qk_norm=True,
        )
        if number in model.moe.mlp_only_layers:
            return replace(kind, mlp="dense", mixture=None)
        return kind


_EXPERTS = ExpertsByLayer(
    names=same("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "router_aux_loss_coef"),
    aliases={"num_local_experts": "num_experts"},
    defaults={
        **{"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 896, "norm_topk_prob": True},
        "router_aux_loss_coef": 0.001,
    },
    first_dense=0,
)
_FIXED = {"attention_dropout": 0.0, "use_sliding_window": True}
_ROPES = LocalRope(500000.0, local_theta=10000.0, windows=Windows(1024, keeps_unused=True))

MELLUM = Family(
    name="mellum",
    stage=MellumStage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=MellumModel,
    even_head_dim=True,
    hugging_face=like(
        QWEN3_MOE,
        model_types={"mellum": ModelType("MellumForCausalLM", fixed=_FIXED)},
        codecs=(_EXPERTS, _ROPES),
        fields=same("attention_bias"),
        defaults={"head_dim": 128, "attention_bias": False},
        ignored=lambda raw: ("mtp.",),
        without_effect=(
            # Of the layer of prediction.
            *("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
            "max_window_layers",  # layer_types says which layers have a window
        ),
    ),
)
