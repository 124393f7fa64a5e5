"""MiniMax-M2: Mixtral's layers with norms of all of q and k, a rotated part of each head, and DeepSeek-V3's router.

Its weights are those of Mixtral (megapar_models.families.mixtral), with layers.N.attention.q_norm and k_norm as wide as
the projections, and a bias by which each router selects.

At Hugging Face: minimax_m2. Layers of multi-token prediction are left out.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.model_options import MoEConfig
from megapar_models.families.mixtral import MIXTRAL, MixtralModel, MixtralStage
from megapar_models.family import Family, ModelType, Raw, like
from megapar_models.layer_kind import LayerKind
from megapar_models.moe_fields import RoutedExperts
from megapar_models.rotary import PartialRotaryModel, Rotary
from megapar_models.rotary_fields import PartialRope


@dataclass(frozen=True)
class MiniMaxM2Model(MixtralModel, PartialRotaryModel):
    """The options of MiniMax-M2."""

    moe: MoEConfig = field(default_factory=MoEConfig)
    """Mixture of experts."""


class MiniMaxM2Stage(MixtralStage[MiniMaxM2Model]):
    """Consecutive layers of MiniMax-M2."""

    @classmethod
    def layer_kind(cls, model: MiniMaxM2Model, number: int) -> LayerKind:
        kind = super().layer_kind(model, number)
        return replace(kind, rotary=Rotary.of(model), qk_norm=True, qk_norm_over="width")


class _Rope(PartialRope):
    def read(self, raw: Raw, model_type: str) -> tuple[dict[str, Any], list[str]]:
        rotated, width = raw.get("rotary_dim"), raw.get("head_dim", 128)
        part = 1.0
        if isinstance(rotated, int) and isinstance(width, int) and width:
            part = rotated / width  # as the published files say it
        return PartialRope(self.theta, factor=part).read(raw, model_type)

    def write(self, model: MiniMaxM2Model, fields: dict[str, Any]) -> None:
        super().write(model, fields)
        fields |= {"rotary_dim": model.rotary_width}


_FIXED = {"attention_dropout": 0.0, "router_jitter_noise": 0.0, "scoring_func": "sigmoid", "use_qk_norm": True}
_FIXED |= {"qk_norm_type": "per_layer", "use_routing_bias": True, "shared_intermediate_size": 0}
_EXPERTS = RoutedExperts(
    names={"num_experts_per_tok": "num_experts_per_tok", "num_local_experts": "num_experts"},
    defaults={"num_experts_per_tok": 8, "num_local_experts": 256},
    always={"scoring_func": "sigmoid", "norm_topk_prob": True},
    has_bias=True,
)

MINIMAX_M2 = Family(
    name="minimax_m2",
    stage=MiniMaxM2Stage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=MiniMaxM2Model,
    hugging_face=like(
        MIXTRAL,
        model_types={"minimax_m2": ModelType("MiniMaxM2ForCausalLM", fixed=_FIXED)},
        codecs=(_EXPERTS, _Rope(5000000.0)),
        modules={"layers.*.mlp.router.bias": "model.layers.*.block_sparse_moe.e_score_correction_bias"},
        in_fp32=("layers.*.mlp.router.weight",),  # transformers takes them in any dtype, other programs in fp32
        defaults={"rms_norm_eps": 1e-6, "head_dim": 128},
        ignored=lambda raw: ("model.mtp.", "mtp."),
        # Of the published files: layers of prediction, of another program's losses, and all layers of attention.
        without_effect=(
            "use_mtp",
            "num_mtp_modules",
            "mtp_transformer_layers",
            "router_aux_loss_coef",
            "attn_type_list",
        ),
    ),
)
