"""Kolibri 1 (Aleph Alpha, 2026): norms on both sides of a branch, and experts chosen by logits, weighted by sigmoids.

Layers with a window have rotary positions, and the others see none. The weights are those of Mixtral
(megapar_models.families.mixtral), and norms of each head's query and key and of the outputs of branches.

At Hugging Face: kolibri1.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from megapar.config.model_options import MoEConfig
from megapar_models.families.mixtral import MixtralModel, MixtralStage
from megapar_models.families.qwen3_moe import QWEN3_MOE
from megapar_models.family import Family, ModelType, like, same
from megapar_models.layer_kind import LayerKind
from megapar_models.moe import router_rule
from megapar_models.moe_fields import RoutedExperts, refuse_unwritable
from megapar_models.rotary import Rotary
from megapar_models.rotary_fields import Rope
from megapar_models.windows import WindowModel, Windows, is_full, window_of


@dataclass(frozen=True)
class Kolibri1Model(MixtralModel, WindowModel):
    """The options of Kolibri 1. Layers without a window see no positions."""

    moe: MoEConfig = field(default_factory=MoEConfig)
    """Mixture of experts."""


class Kolibri1Stage(MixtralStage[Kolibri1Model]):
    """Consecutive layers of Kolibri 1."""

    @classmethod
    def layer_kind(cls, model: Kolibri1Model, number: int) -> LayerKind:
        return replace(
            super().layer_kind(model, number),
            norms="both",
            rotary=None if is_full(model, number) else Rotary.of(model),
            window=window_of(model, number),
            qk_norm=True,
            router=replace(router_rule(model.moe), selects_by="logit"),
        )


class _Experts(RoutedExperts):
    def write(self, model: Kolibri1Model, fields: dict[str, Any]) -> None:
        fixed = {**self.always, "shared_expert_gate": False, _SHARED: model.moe.shared_expert_intermediate_size}
        refuse_unwritable(model, fields["model_type"], fixed, self.refusals(model), has_bias=self.has_bias)
        fields |= {theirs: getattr(model.moe, ours) for theirs, ours in self.names.items()}

    def refusals(self, model: Kolibri1Model) -> Iterator[str]:
        if not model.moe.shared_expert_intermediate_size:
            yield "model.moe.shared_expert_intermediate_size=0: kolibri1 of transformers has a shared expert"


_SHARED = "shared_expert_intermediate_size"
_EXPERTS = _Experts(
    names=same("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", _SHARED),
    aliases={"num_local_experts": "num_experts"},
    defaults={
        **{"num_experts": 384, "num_experts_per_tok": 6, "moe_intermediate_size": 512, "norm_topk_prob": False},
        _SHARED: 512,
    },
    always={"scoring_func": "sigmoid"},
    has_bias=True,
)
_FIXED = {"attention_dropout": 0.0, "partial_rotary_factor": 1.0, "attention_bias": False}
_LAYER = "model.layers.*"
_MATRICES = ("gate", "up", "down")

KOLIBRI1 = Family(
    name="kolibri1",
    stage=Kolibri1Stage,
    activations=("silu", "gelu_pytorch_tanh", "relu2"),
    options=Kolibri1Model,
    even_head_dim=True,
    hugging_face=like(
        QWEN3_MOE,
        model_types={"kolibri1": ModelType("Kolibri1ForCausalLM", fixed=_FIXED)},
        codecs=(_EXPERTS, Rope(), Windows(513, every=5, keeps_unused=True, needed=True)),
        modules={
            **dict.fromkeys((*(f"layers.*.mlp.{name}" for name in _MATRICES), "layers.*.mlp.shared_gate")),
            "layers.*.attention_output_norm": f"{_LAYER}.post_attn_norm",
            "layers.*.mlp_output_norm": f"{_LAYER}.post_ffn_norm",
            "layers.*.mlp.router.bias": f"{_LAYER}.moe.router.expert_bias",
            **{f"layers.*.mlp.shared.{name}": f"{_LAYER}.mlp.shared_experts.{name}_proj" for name in _MATRICES},
        },
        # As transformers calls them in memory.
        renamed={
            ".post_self_attn_layernorm.": ".post_attn_norm.",
            ".post_mlp_layernorm.": ".post_ffn_norm.",
            ".mlp.gate.e_score_correction_bias": ".moe.router.expert_bias",
        },
        fields={"intermediate_size": None},  # all layers have experts
        defaults={"head_dim": 128},
        without_effect=("head_dtype", "intermediate_size"),
    ),
)
